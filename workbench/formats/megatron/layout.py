"""Megatron's conventions that no file stores: the layers of a stage, how TP divides a weight, and the order in which
modules register parameters. Pure functions of names, numbers and the stored ``args``.

::

    pipeline, VPP 2, PP 2, 8 layers            TP of [gate; up], partition_stride 2
    stage 0:  0 1 | 4 5                        rank 0: g0 u0    rank 1: g1 u1   ──▶  g0 g1 u0 u1
    stage 1:  2 3 | 6 7                        query groups are not divided: plain concatenation

Read from megatron-core 0.16.1 (``core/transformer/transformer_block.py``, ``transformer_layer.py``,
``pipeline_parallel_layer_layout.py``) and 0.20.0dev.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.pickles.standins import TensorRef, short
from workbench.formats.megatron.args import RunArgs
from workbench.names.weights import parse

MAX_STAGES = 1 << 16  #: stages, and layers; no model has more


@dataclass(frozen=True, slots=True)
class Split:
    """How TP divides a tensor: along ``dim`` (``None``: every rank holds all of it), in ``stride`` parts."""

    dim: int | None
    stride: int = 1


WHOLE = Split(None)


# ---- pipeline ------------------------------------------------------------------------------------------------------


def stage_layers(run: RunArgs) -> list[list[int]] | None:
    """Return the decoder layers of each stage as ``[chunk][stage]``; layer numbers count up in this order.

    Returns ``None`` if ``args`` do not store them or contradict themselves; never raises.
    """
    pp, vp, layers = run.size("pp"), run.known("vpp"), run.number("num_layers")
    if pp is None or layers is None or pp * vp > MAX_STAGES or layers > MAX_STAGES:
        return None
    if run.args.get("pipeline_model_parallel_layout") is not None:
        return _custom(run.args["pipeline_model_parallel_layout"], pp, layers)
    first, last = (run.number(f"decoder_{side}_pipeline_num_layers") for side in ("first", "last"))
    extra = [bool(run.args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss")]
    if first is not None or last is not None:
        middle = pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if middle < 0 or rest < 0 or (rest % middle if middle else rest):
            return None
        stages = [rest // middle] * middle if middle else []
        stages = [*([first] if first is not None else []), *stages, *([last] if last is not None else [])]
    else:
        total = layers + sum(extra)
        if total % pp:
            return None
        stages = [total // pp] * pp
    if any(count % vp for count in stages):
        return None
    table = [[count // vp for count in stages] for _ in range(vp)]
    if first is None and last is None:
        table[0][0] -= extra[0]
        table[-1][-1] -= extra[1]
    return table if sum(map(sum, table)) == layers and min(map(min, table)) >= 0 else None


def _custom(stored: Any, pp: int, layers: int) -> list[list[int]] | None:
    """Parse ``"Et|(tt|)*2tL"``: stages in order, ``t`` a decoder layer; a pickled layout has it in ``input_data``."""
    state = getattr(stored, "state", None)
    text = state.get("input_data") if isinstance(state, Mapping) else stored
    if isinstance(text, list):
        rows = [[str(item).strip().lower() for item in row] for row in text if isinstance(row, list)]
        counts = [sum(item in ("decoder", "t") for item in row) for row in rows]
    elif isinstance(text, str) and len(text) < 10_000:
        text = text.replace(",", "")
        for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
            if sum(int(times) for _, times in re.findall(pattern, text)) > 10_000:
                return None
            text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        counts = [stage.count("t") for stage in text.split("|")]
    else:
        return None
    if not counts or len(counts) % pp or sum(counts) != layers:
        return None
    return [counts[at : at + pp] for at in range(0, len(counts), pp)]


#: Stacks that pipeline stages share; multi-token-prediction layers are numbered separately.
_PIPELINE = ("decoder.layers", "encoder.layers", "transformer.layers")


def layer_of(name: str) -> int | None:
    """Return the number of the pipeline layer in a parameter's name."""
    weight = parse(name)
    return weight.layer if weight.stack.removeprefix("language_model.") in _PIPELINE else None


_STACK = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)", re.S)


def is_stack(key: str) -> bool:
    """Return whether a key of a distributed checkpoint is a stack of all layers (``decoder.layers.mlp.…``)."""
    return _STACK.fullmatch(key) is not None


def layer_key(key: str, layer: int) -> str:
    """Return the name of one layer of a stack."""
    found = _STACK.fullmatch(key)
    assert found is not None, key
    return f"{found[1]}{layer}.{found[2]}"


def with_layer(name: str, offset: int) -> str:
    """Replace the stage-local layer number in a name by the global one."""
    layer, stack = layer_of(name), parse(name).stack
    return name if layer is None else f"{stack}.{layer + offset}{name.removeprefix(f'{stack}.{layer}')}"


# ---- tensor parallelism --------------------------------------------------------------------------------------------

#: Megatron's own column- and row-parallel modules; other modules of the same kinds may be replicated.
_COLUMN = {
    "word_embeddings",
    "word_embeddings_for_head",
    "output_layer",
    "linear_qkv",
    "linear_fc1",
    "linear_q_proj",
    "linear_q",
    "linear_kv",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "eh_proj",
    "query_key_value",
    "query",
    "key_value",
    "dense_h_to_4h",
}
_ROW = {"linear_proj", "linear_fc2", "dense", "dense_4h_to_h"}
_SAME = {"position_embeddings", "tokentype_embeddings", "linear_q_down_proj", "linear_kv_down_proj"}


def split_by_rule(name: str, gated: bool) -> Split | None:
    """Return how Megatron divides a parameter of this name; ``None`` for a name that is not Megatron's own.

    Args:
        gated: whether ``linear_fc1`` is [gate; up].
    """
    weight = parse(name)
    if weight.kind in ("norm", "router", "shared_gate", "pooler") or weight.name in _SAME:
        return WHOLE
    if weight.leaf not in ("weight", "bias"):
        return None
    if weight.name in _COLUMN:
        return Split(0, 2 if gated and weight.kind == "fc1" else 1)
    if weight.name in _ROW:
        return Split(1) if weight.leaf == "weight" else WHOLE
    return None


def local_pieces(
    shape: Sequence[int], split: Split, rank: int, world: int
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]:
    """Return the global shape, and the boxes of a rank's tensor as ``(offsets, sizes, position in the global tensor)``.

    >>> local_pieces((4, 2), Split(0, 2), rank=1, world=2)
    ((8, 2), [((0, 0), (2, 2), (2, 0)), ((2, 0), (2, 2), (6, 0))])
    """
    shape = tuple(shape)
    zeros = (0,) * len(shape)
    if split.dim is None or split.dim >= len(shape):
        return shape, [(zeros, shape, zeros)]
    d, parts = split.dim, split.stride
    full = (*shape[:d], shape[d] * world, *shape[d + 1 :])
    size = shape[d] // parts
    boxes = []
    for part in range(parts):
        sizes = (*shape[:d], size, *shape[d + 1 :])
        offsets, at = [*zeros], [*zeros]
        offsets[d], at[d] = part * size, part * size * world + rank * size
        boxes.append((tuple(offsets), sizes, tuple(at)))
    return full, boxes


def qkv_rows(run: RunArgs, rows: int) -> list[tuple[str, int, int, int]] | None:
    """Return the boxes of a fused QKV's rows as ``(side, first row, count, first row in q, k or v)``, group by group.

    ``None`` if ``args`` do not store the geometry, or it does not match these rows.
    """
    heads = run.number("num_attention_heads")
    groups = run.number("num_query_groups") if run.args.get("group_query_attention") else heads
    width = run.number("kv_channels")
    if (
        not heads
        or not groups
        or not width
        or heads % groups
        or groups > MAX_STAGES
        or rows != (heads + 2 * groups) * width
    ):
        return None
    each = heads // groups
    found = []
    for group in range(groups):
        start = group * (each + 2) * width
        for side, first, count in (("q", 0, each), ("k", each, 1), ("v", each + 1, 1)):
            found.append((side, start + first * width, count * width, group * count * width))
    return found


# ---- names ---------------------------------------------------------------------------------------------------------

#: The same norm as a separate module and as part of Transformer Engine's fused layer.
SPELLINGS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


def respelled(name: str) -> str | None:
    """Return a norm's name in the other spelling, ``None`` for any other name."""
    for plain, fused in SPELLINGS:
        for a, b in ((plain, fused), (fused, plain)):
            head, found, leaf = name.rpartition(f".{a}")
            if found and leaf in ("weight", "bias"):
                return f"{head}.{b}{leaf}"
    return None


#: Order in which Megatron's modules register parameters; other names follow alphabetically.
_ORDER = {
    name: position
    for level in (
        ("embedding", "decoder", "encoder", "mtp", "output_layer"),
        ("word_embeddings", "position_embeddings", "tokentype_embeddings"),
        ("enorm", "hnorm", "eh_proj", "transformer_layer", "layers", "final_layernorm"),
        (
            "input_layernorm",
            "self_attention",
            "pre_cross_attn_layernorm",
            "cross_attention",
            "pre_mlp_layernorm",
            "mlp",
        ),
        (
            "linear_proj",
            "linear_q_proj",
            "linear_q_down_proj",
            "linear_q_up_proj",
            "linear_kv_down_proj",
            "linear_kv_up_proj",
            "linear_qkv",
            "linear_q",
            "linear_kv",
            "q_layernorm",
            "k_layernorm",
            "kv_layernorm",
        ),
        ("router", "experts", "shared_experts", "linear_fc1", "linear_fc2", "gate_weight"),
        ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    )
    for position, name in enumerate(level)
}
_NUMBERED = re.compile(r"(\D*)(\d*)")


def model_order(name: str) -> tuple[tuple[int, str, int], ...]:
    """Return the sort key of a parameter's place in ``model.named_parameters()``."""
    key = []
    for part in name.split("."):
        found = _NUMBERED.match(part)
        word, number = (found[1], found[2]) if found else (part, "")
        key.append((_ORDER.get(word, 99), word, int(number[:18] or -1)))
    return tuple(key)


# ---- trees ---------------------------------------------------------------------------------------------------------


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, TensorRef]]:
    """Yield the tensors of a decoded tree by dotted path; a repeated container is entered only once."""
    seen: set[int] = set()
    stack = [(path, tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, TensorRef):
            yield path, node
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            pairs = list(node.items() if isinstance(node, dict) else enumerate(node))
            # only text keys are joined: a key may be anything that a pickle can create
            named = [(key if type(key) in (str, int) else short(key, 60), child) for key, child in pairs[::-1]]
            stack += [(f"{path}.{key}" if path else str(key), child) for key, child in named]
