"""Match the optimizer tensors of a legacy Megatron file to parameters.

::

    optimizer.optimizer.param_groups   [{params: [0 … 8], wd_mult 1}, {params: [9 … 15], wd_mult 0}]
    optimizer.optimizer.state          {id: {step, exp_avg, exp_avg_sq}}
    optimizer.fp32_from_fp16_params    [[tensor …] per group]: the group's half-precision parameters, in order
    optimizer = [ {…}, {…} ]           chained: one for dense parameters, one for experts

    distrib_optim.pt  {0: {(bfloat16, float32): {param, exp_avg, exp_avg_sq: (n,), numel_unpadded}}, 1: …}
                       └ buffer: model chunk, then dtype (experts separately: a list of such dicts)

Names are not stored. Parameters are numbered group by group in the model's order; flat buffers hold them in reverse. A
match is accepted only if all shapes, or the exact length of the buffer, agree. Otherwise tensors keep their path and
have no name. Read from megatron-core 0.16.1 (``core/optimizer``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.catalog import row_major
from workbench.core.pickles.standins import TensorRef, short
from workbench.core.words import plural
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.flat import bucket_size, flat_layout
from workbench.names.weights import parse

HALF = ("bfloat16", "float16")
_NO_PARAM = re.compile(r"(?:.*\.)?(?:expert_bias|local_tokens_per_expert|inv_freq|.*_extra_state)", re.S)
MODEL_FILE, FLAT_FILE = "model_optim_rng.pt", "distrib_optim.pt"
Name = tuple[int, str]  # model chunk, local name


@dataclass(eq=False)
class RankState:
    """Optimizer tensors of one rank.

    Attributes:
        named: by parameter and state, with the file that holds them.
        unnamed: the others, by path.
        reasons: why these have no name.
    """

    named: dict[Name, dict[str, tuple[TensorRef, str]]] = field(default_factory=lambda: defaultdict(dict))
    unnamed: dict[str, tuple[TensorRef, str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def held_states(
    tree: Mapping[str, Any], flat: Any, chunks: Sequence[Mapping[str, TensorRef]], run: RunArgs, stage: int
) -> RankState:
    """Match one rank's optimizer to its model."""
    held = RankState()
    params = {
        (chunk, name): ref
        for chunk, tensors in enumerate(chunks)
        for name, ref in tensors.items()
        if not _NO_PARAM.fullmatch(name)
    }
    stored = tree.get("optimizer")
    chain = list(enumerate(stored)) if isinstance(stored, list) else [(None, stored)]
    for number, one in chain:
        if isinstance(one, Mapping):
            path = "optimizer" if number is None else f"optimizer.{number}"
            _by_groups(held, one, path, params, run)
    flats = flat if isinstance(flat, list) else [flat]
    for number, one in enumerate(flats):
        if isinstance(one, Mapping):
            _by_buffers(held, one, "" if len(flats) == 1 else f"{number}.", params, run, stage)
    return held


# ---- groups --------------------------------------------------------------------------------------------------------


def _by_groups(
    held: RankState, stored: Mapping[Any, Any], path: str, params: Mapping[Name, TensorRef], run: RunArgs
) -> None:
    inner = stored.get("optimizer")
    base = inner if isinstance(inner, Mapping) else stored
    state, groups = base.get("state"), base.get("param_groups")
    masters = stored.get("fp32_from_fp16_params")
    if not isinstance(state, Mapping):
        state = {}
    if not state and not masters:
        return
    by_group = found = None
    if isinstance(groups, list) and groups and all(isinstance(group, Mapping) for group in groups):
        flat = {_joined(name): ref.shape for name, ref in params.items()}
        names = {_joined(name): name for name in params}
        by_group = _by_param_group(groups, flat, run.known("ep") > 1)
        found = None if by_group is None else _verified(by_group, groups, state, masters, params, names)
    if found is None:
        _unnamed(held, path, {"state": state, "fp32_from_fp16_params": masters or []})
        held.reasons.append(f"{path}: its tensors are numbered, and Megatron's order of parameters does not match them")
        return
    for name, states in found.items():
        held.named[name] |= {key: (ref, MODEL_FILE) for key, ref in states.items()}


def _joined(name: Name) -> str:
    """Join chunk and name so that `_by_param_group` still sees how the name begins and ends."""
    return name[1] if not name[0] else f"{name[1].partition('.')[0]}.\0{name[0]}.{name[1].partition('.')[2]}"


def _by_param_group(
    groups: Sequence[Mapping[str, Any]], params: Mapping[str, tuple[int, ...]], experts_apart: bool
) -> list[list[str]] | None:
    """Return the parameter names of each stored ``param_group``, in order; ``None`` if they do not match.

    Megatron assigns parameters to groups by weight decay (none for biases and vectors), by expert parallelism, and by a
    separate learning rate for embedding and output. Inside a group, the model's order is kept.
    """
    flags = [
        (bool(g.get("is_expert_parallel")), g.get("wd_mult", 1.0) == 0, bool(g.get("is_decoupled_lr"))) for g in groups
    ]
    if len(set(flags)) != len(flags):
        return None
    by_decay = len({flag[1] for flag in flags}) > 1 or flags[0][1]
    by_rate = any(flag[2] for flag in flags)
    by_group: dict[tuple[bool, bool, bool], list[str]] = {flag: [] for flag in flags}
    for name, shape in params.items():
        expert = experts_apart and parse(name).routed
        no_decay = by_decay and (len(shape) < 2 or name.endswith(".bias"))
        end = by_rate and name.startswith(("embedding.", "output_layer."))
        if (expert, no_decay, end) in by_group:
            by_group[expert, no_decay, end].append(name)
        elif any(flag[0] == expert for flag in flags):
            return None
    found = [by_group[flag] for flag in flags]
    stored = [group.get("params") for group in groups]
    for ids, names in zip(stored, found, strict=True):
        if not isinstance(ids, list) or len(ids) != len(names) or any(type(number) is not int for number in ids):
            return None
    return found


def _verified(
    by_group: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    masters: Any,
    params: Mapping[Name, TensorRef],
    names: Mapping[str, Name],
) -> dict[Name, dict[str, TensorRef]] | None:
    """Return the states of each parameter, ``None`` if a shape contradicts the order."""
    found: dict[Name, dict[str, TensorRef]] = defaultdict(dict)
    for position, (group, mine) in enumerate(zip(groups, by_group, strict=True)):
        copies = masters[position] if isinstance(masters, list) and position < len(masters) else []
        halves = [names[key] for key in mine if params[names[key]].dtype in HALF]
        if isinstance(masters, list) and (not isinstance(copies, (list, tuple)) or len(copies) != len(halves)):
            return None
        for name, copy in zip(halves, copies, strict=False):
            if not isinstance(copy, TensorRef) or copy.shape != params[name].shape:
                return None
            found[name]["fp32_param"] = copy
        for number, key in zip(group["params"], mine, strict=True):
            for what, ref in _states(state.get(number)):
                if ref.shape != () and ref.shape != params[names[key]].shape:
                    return None
                found[names[key]][what] = ref
    return found


def _states(stored: Any) -> Iterator[tuple[str, TensorRef]]:
    for what, ref in stored.items() if isinstance(stored, Mapping) else ():
        if isinstance(ref, TensorRef):
            yield str(what), ref


# ---- flat buffers --------------------------------------------------------------------------------------------------


def _by_buffers(
    held: RankState,
    stored: Mapping[Any, Any],
    path: str,
    params: Mapping[Name, TensorRef],
    run: RunArgs,
    stage: int,
) -> None:
    buffers = sorted(key for key in stored if type(key) is int)
    experts_apart = run.known("ep") > 1
    nth: dict[str, int] = defaultdict(int)
    for buffer in buffers:
        for kind, states in stored[buffer].items() if isinstance(stored[buffer], Mapping) else ():
            dtype = getattr(kind[0], "name", "") if isinstance(kind, tuple) and kind else ""
            chunk, nth[dtype] = nth[dtype], nth[dtype] + 1
            here = f"{path}{buffer}.{short(kind, 80)}"
            flat = {k: v for k, v in states.items() if isinstance(v, TensorRef)} if isinstance(states, Mapping) else {}
            lengths = {ref.shape for ref in flat.values()}
            fit = None
            if len(lengths) == 1 and len(next(iter(lengths))) == 1 and stored.get("buckets_coalesced") is True:
                fit = _fit(params, chunk, dtype, next(iter(lengths))[0], run, stage, experts_apart, here)
            if not isinstance(fit, dict):
                _unnamed(held, here, states)
                why = fit or "its buckets are not coalesced (before February 2024), so their order is unknown"
                held.reasons.append(f"{FLAT_FILE} {here}: {why}; it stays without names")
                continue
            for name, start in fit.items():
                shape = params[name].shape
                for what, ref in flat.items():
                    step = ref.stride[0]
                    cut = ref.replace(
                        storage_offset=ref.storage_offset + start * step,
                        shape=shape,
                        stride=tuple(s * step for s in row_major(shape)),
                    )
                    held.named[name][str(what)] = (cut, FLAT_FILE)


def _fit(
    params: Mapping[Name, TensorRef],
    chunk: int,
    dtype: str,
    length: int,
    run: RunArgs,
    stage: int,
    experts_apart: bool,
    here: str,
) -> dict[Name, int] | str:
    """Return where each parameter starts in a buffer of ``length`` elements, or why that is unknown."""
    mine = {name: ref for name, ref in params.items() if name[0] == chunk and ref.dtype == dtype}
    tied = run.args.get("untie_embeddings_and_output_weights") is False and run.known("pp") > 1
    got: list[int] = []
    for expert in (False, True) if experts_apart else (None,):
        names = [n for n in mine if expert is None or parse(n[1]).routed == expert][::-1]
        numels = [_numel(mine[n].shape) for n in names]
        ends = [n[1] in ("embedding.word_embeddings.weight", "output_layer.weight") for n in names]
        for alone in (ends, [False] * len(names)) if tied else ([False] * len(names), ends):
            for size in dict.fromkeys((bucket_size(run, stage, chunk), None)):
                starts, total = flat_layout(numels, alone, size)
                got.append(total)
                if names and total == length:
                    return dict(zip(names, starts, strict=True))
    nearest = min(got, key=lambda total: abs(total - length), default=0)
    return f"it has {plural(length, 'element')}, but the model's parameters in Megatron's order need {nearest:,}"


def _unnamed(held: RankState, path: str, node: Any) -> None:
    file = MODEL_FILE if path.startswith("optimizer") else FLAT_FILE
    held.unnamed |= {key: (ref, file) for key, ref in layout.tensors(node, path)}


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
