"""Read the optimizer's param groups from any format, and assign names to numbered state.

::

    optimizer.param_groups[0] {lr, betas, params: [0, 1, …]}       numbers: the state's keys, or counts, give the names
    optim.param_groups.0.params = [fqn, …]                         get_state_dict
    optim.param_groups.layers.0.wq.weight.lr                       flattened by DCP: one each; equal ones are joined

    optimizer.state.3.exp_avg       "optimizer state 3"            a pseudo-name, if the owner of the number is unknown
    optimizer_1.state.3.exp_avg     "optimizer_1 state 3"
    fp32_from_fp16_params.0.3       "optimizer master 0.3"
    master_weights.layers.0.wq      "layers.0.wq", role master     masters by name, outside of the optimizer

Numbers become names if the reader assigned the state to them. Weights get their group if the parameters are matrices
and vectors and the groups have exactly these two counts, or if a shape occurs in only one group. Nothing else is
certain.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.doctor.facts.flat import ObjectLeaf
from workbench.doctor.facts.numbers import BITS, betas_of, flag, number
from workbench.doctor.facts.optimizer import recognise
from workbench.doctor.facts.state import Group
from workbench.errors import WorkbenchError
from workbench.names.roles import ADAPTERS, STATES, listed_alone

_FIELDS = {
    "lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay", "initial_lr", "step", "params",
    "maximize", "foreach", "capturable", "differentiable", "fused", "param_names", "wd_mult", "lr_mult",
    "is_expert_parallel", "is_decoupled_lr", "default_config", "max_lr", "min_lr", "bias_correction", "beta1", "beta2",
    "momentum",
}  # fmt: skip
_NUMBERED = re.compile(r"(?:(.*?)\.)?state\.([0-9]{1,18})\.(.+)", re.S)
_PSEUDO = re.compile(r"\S+ (state|master) ([0-9.]+)")
#: Paths of a run's only or first optimizer, which pseudo-names omit, so two formats use the same names.
_MAIN = re.compile(
    r"(?:(?:app|app_state|checkpoint|trainer)\.)?(?:optim(?:izer)?(?:_state(?:_dict)?)?|opt|optimi[sz]er(?:s|_states)\.0)"
)
#: Containers of masters, as trainers name them; apex and Megatron store a list of lists, others a mapping of names.
_MASTERS = re.compile(
    r"(?:(?:\w*optim\w*|opt)\.)*"
    r"(?:masters?|master_(?:weight|param|copy|copie)s?|fp32_(?:master_)?(?:weight|param|master)s?"
    r"|fp32_from_(?:fp16|float16|bf16)(?:_params|_groups)?|main_params?)\.(.+)",
    re.S,
)
#: Words in keys of averages that trainer callbacks store: Lightning's WeightAveraging and EMA, torch's swa_utils.
OF_AVERAGES = ("ema", "average", "swa")
_OUTER = ("module.", "model.", "_orig_mod.")
LONGEST = 4096  #: most characters of a name
_CONTAINERS = {"__bnb_optimizer_quant_state__"}  #: containers of bitsandbytes around its state
_ROLES = {*STATES.values()}
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum", "square_avg", "sum", "exp_inf", "master", "state1"}


TRAINED = {"weight", "bias"}  #: last parts of the names of what optimizers train
KINDS = 16  #: most last parts of names among which buffers are looked for
MASKED = 1 << 20  #: most elements of a mask that is read


def _whole_copies(stored: Counter[tuple[int, ...]], held: Counter[tuple[int, ...]]) -> bool:
    """Return whether weights have the shapes of the optimizer's state, each the same number of times."""
    return (
        bool(held)
        and stored.keys() == held.keys()
        and len({stored[one] / held[one] for one in held}) == 1
        and stored >= held
    )


def _elements(shapes: Counter[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) * times for shape, times in shapes.items())


def _is_mask(ckpt: Checkpoint, at: int) -> bool:
    """Return whether a tensor of several elements holds only one or two values."""
    tensor = ckpt[ckpt.catalog.keys[at]]
    if not 2 < tensor.numel() <= MASKED:
        return False
    try:
        return len(np.unique(tensor.numpy())) <= 2
    except WorkbenchError:  # of a type that numpy does not have, or damaged
        return False


def is_numbered(name: str) -> bool:
    """Return whether a parameter's name is a pseudo-name: ``optimizer state 3``."""
    return _PSEUDO.fullmatch(name) is not None


def number_of(name: str) -> int | None:
    """Return the optimizer's number in a pseudo-name of its state."""
    match = _PSEUDO.fullmatch(name)
    return int(match[2]) if match and match[1] == "state" and match[2].isdigit() else None


class Names:
    """The parameter of each tensor of a checkpoint, including numbered state and masters.

    Attributes:
        fqns, roles: those of the checkpoint, plus pseudo-names for numbers without a known owner, names for masters,
            and for optimizer state without a role its stored name: ``state1``, ``exp_avg.codes``, ``row_var``. An
            adapter is a parameter of its own: ``fc.lora_A.weight``.
        owner: pseudo-name of each number → the name that its tensors are listed under.
        numbers, paths: positions of the tensors that are stored under a number; paths of their optimizers.
        state: name → names of its optimizer state.
        weights, unheld: name → shape of the weights, and of buffers that are known by not being in the optimizer.
        held, whole: the shapes of numbered state; whether these are the shapes of all weights.
    """

    def __init__(self, ckpt: Checkpoint, found: Iterable[ObjectLeaf] = ()) -> None:
        self.fqns, self.roles = list(ckpt.fqns), list(ckpt.roles)
        for at, (fqn, role) in enumerate(zip(self.fqns, self.roles, strict=True)):
            if fqn is not None and (role in ADAPTERS or "lora_" in fqn):
                self.fqns[at], self.roles[at] = listed_alone(fqn, role)
            elif role == "param" and str(ckpt.catalog.dtype_of(at)) in ("int64", "bool"):
                self.roles[at] = "buffer"  # no optimizer trains it, and no quantised weight is stored as it
        self.owner: dict[str, str] = {}
        self.state: dict[str, set[str]] = defaultdict(set)
        self.shapes: dict[str, tuple[int, ...]] = {}
        tied = {key for group in ckpt.catalog.meta.get("aliases", []) for key in group[1:]}
        self.weights = {
            fqn: ckpt.catalog.shape_of(at)
            for at, (fqn, role, key) in enumerate(zip(self.fqns, self.roles, ckpt.catalog.keys, strict=True))
            if role == "param" and fqn is not None and key not in tied
        }
        numbered = self._numbered(ckpt)
        self.numbers = tuple(numbered)
        leaves = self._leaves(found)
        self.paths = sorted({path for path, _, _ in (*numbered.values(), *leaves)})
        self._main = [path for path in self.paths if _is_main(path)]
        for at, (path, count, _) in numbered.items():  # one tensor that the reader assigned names the others
            if (fqn := self.fqns[at]) is not None:
                self.owner.setdefault(self._pseudo(path, count), fqn)
        for at, (path, count, word) in numbered.items():
            pseudo = self._pseudo(path, count)
            self.fqns[at] = self.owner.setdefault(pseudo, pseudo)
            if self.roles[at] == "other":
                self.roles[at] = word
        for path, count, word in leaves:
            pseudo = self._pseudo(path, count)
            self.state[self.owner.setdefault(pseudo, pseudo)].add(word)
        own = {*numbered, *self._rest(ckpt)}
        self.known_names = {fqn for fqn in self.fqns if fqn is not None}
        for at, (fqn, role) in enumerate(zip(self.fqns, self.roles, strict=True)):
            if fqn is not None and (role in _ROLES or at in own):
                self.state[fqn].add(role)
                if role in _MOMENTS:
                    self.shapes.setdefault(fqn, ckpt.catalog.shape_of(at))
        self.held = Counter(self.shapes[name] for name in set(self.owner.values()) & self.shapes.keys())
        named = bool(self.weights) and self.weights.keys() <= self.shapes.keys()
        self.whole = named or _whole_copies(Counter(self.weights.values()), self.held)
        self.unheld: dict[str, tuple[int, ...]] = {}
        self.list_buffers(self._unheld(ckpt))

    def list_buffers(self, names: Iterable[str]) -> None:
        """List these weights as buffers, and those that were listed so before as weights again."""
        self.weights |= self.unheld
        before = self.unheld.keys()
        self.unheld = {name: self.weights.pop(name) for name in names if name in self.weights}
        for at, fqn in enumerate(self.fqns) if before | self.unheld.keys() else ():
            if self.roles[at] == "buffer" and fqn in before:
                self.roles[at] = "param"
            if self.roles[at] == "param" and fqn in self.unheld:
                self.roles[at] = "buffer"

    def _unheld(self, ckpt: Checkpoint) -> list[str]:
        """Return the weights that the optimizer cannot hold: without them, the shapes are those of its state.

        Buffers have names of their own, such as ``queue``. The others may be there several times, as networks that
        follow the trained one. If two names fit, it is the one whose tensors hold only one or two values: masks. Of
        state under names, these are all weights whose last name no parameter with state has.
        """
        leaves: dict[str, list[str]] = defaultdict(list)
        for fqn in self.weights:
            leaves[fqn.rpartition(".")[2]].append(fqn)
        if self.whole:
            return []
        if not self.owner and not self.shapes.keys().isdisjoint(self.weights):  # state is stored under names
            held = {fqn.rpartition(".")[2] for fqn in self.shapes} | TRAINED
            own = [fqn for leaf, some in leaves.items() if leaf not in held for fqn in some]
            return own if 2 * len(own) < len(self.weights) else []
        if not self.held or len(leaves) > KINDS:
            return []
        shapes = {leaf: Counter(self.weights[fqn] for fqn in some) for leaf, some in leaves.items()}
        others = [leaf for leaf in leaves if leaf not in TRAINED]
        for every in (*(combinations(leaves, count) for count in (1, 2, 3)), [tuple(others)]):
            fits = []
            for some in every:
                out = sum((shapes[leaf] for leaf in some), Counter[tuple[int, ...]]())
                rest = sum((shapes[leaf] for leaf in leaves if leaf not in some), Counter[tuple[int, ...]]())
                if _elements(out) < _elements(rest) and _whole_copies(rest, self.held):  # not most weights, frozen
                    fits.append([fqn for leaf in some for fqn in leaves[leaf]])
            if len(fits) > 1:
                at = {fqn: at for at, fqn in enumerate(self.fqns) if self.roles[at] == "param"}
                fits = [out for out in fits if all(_is_mask(ckpt, at[fqn]) for fqn in out)]
            if fits:
                return fits[0] if len(fits) == 1 else []
        return []

    def of(self, path: str, count: int) -> str | None:
        """Return the name for an optimizer's number, if any of its state is stored."""
        return self.owner.get(self._pseudo(path, count))

    def named(self, params: Sequence[Any], path: str = "") -> tuple[str, ...] | None:
        """Return the names of stored parameters; ``None`` if any of them is unknown."""
        found = []
        some = path in self.paths
        for one in params:
            if isinstance(one, bool) or not isinstance(one, (int, str)):
                return None
            if isinstance(one, str):
                name = self.known(one)
            else:  # a parameter that never got a gradient, or whose state was lost, has a number like the others
                name = self.of(path, one) or (self._pseudo(path, one) if some and 0 <= one < 1 << BITS else None)
            if name is None:
                return None
            found.append(name)
        return tuple(found) if len(set(found)) == len(found) else None

    def known(self, name: str) -> str | None:
        """Return a stored name without the containers before it, if a parameter has that name."""
        if len(name) > LONGEST:
            return None
        name, _ = listed_alone(name, "")
        while name not in self.known_names:
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return name

    def _numbered(self, ckpt: Checkpoint) -> dict[int, tuple[str, int, str]]:
        """Return position → path of the optimizer, number, name of the state."""
        found = {}
        for at, key in enumerate(ckpt.catalog.keys):
            if "state." not in key or self.roles[at] == "param" or len(key) > LONGEST:
                continue
            match = _NUMBERED.fullmatch(key)
            fqn = ckpt.fqns[at]
            # state by name, of modules whose names begin with a number: state.1.bias.exp_avg
            if match is None or (fqn is not None and f"state.{fqn}." in key):
                continue
            words = [word for word in match[3].split(".") if word not in _CONTAINERS] or [match[3]]
            if not match[1] or "opt" in match[1].lower() or words[0] in STATES:
                word = words[0] if len(words) == 1 else f"{words[0]}.{words[-1]}"
                found[at] = match[1] or "", int(match[2]), word
        return found

    def _leaves(self, found: Iterable[ObjectLeaf]) -> list[tuple[str, int, str]]:
        """Return numbers whose state is plain values: steps of transformers' and bitsandbytes' optimizers."""
        plain = []
        for leaf in found:
            if len(leaf.path) > 2 and leaf.path[-3] == "state" and leaf.value is not None:
                path, count = ".".join(leaf.path[:-3]), leaf.path[-2]
                if count.isdecimal() and count.isascii() and len(count) < 19 and (not path or "opt" in path.lower()):
                    plain.append((path, int(count), leaf.name))
        return plain

    def words(self, group: Group) -> set[str]:
        """Return the names of the state of a group's parameters, or of its kind if the parameters are unknown."""
        kinds = {frozenset(words) for words in self.state.values()}
        if group.params is not None:
            found = {word for name in group.params for word in self.state.get(name, ())}
            # bitsandbytes keeps the state of small parameters in 32 bits: one optimizer, two kinds of state
            return found.union(*(kind for kind in kinds if "state1" in kind)) if "state1" in found else found
        for field, marks in (("betas", {"exp_avg", "state1"}), ("momentum", {"momentum"})):
            if field in group.settings and any(kind & marks for kind in kinds):
                kinds = {kind for kind in kinds if kind & marks}
                break
        return {word for kind in kinds for word in kind}

    def _rest(self, ckpt: Checkpoint) -> list[int]:
        """Return positions of named state without a role; also assign names to masters outside the optimizer."""
        found = []
        params = {fqn for fqn, role in zip(self.fqns, self.roles, strict=True) if role == "param"}
        for at, key in enumerate(ckpt.catalog.keys):
            fqn, role = self.fqns[at], self.roles[at]
            stored = ckpt.fqns[at]
            if role == "other" and fqn is not None and f"state.{stored}." in key:
                words = key.rpartition(f"state.{stored}.")[2].split(".")
                self.roles[at] = words[0] if len(words) == 1 else f"{words[0]}.{words[-1]}"
                found.append(at)
            elif ((fqn is None and role == "other") or role == "param") and len(key) <= LONGEST:
                match = _MASTERS.fullmatch(key) if "master" in key or "fp32" in key or "main_param" in key else None
                if match is None:
                    if role == "other":
                        self._averaged(ckpt, at, key)
                    continue
                name = match[1]
                while name not in params and name.startswith(_OUTER):
                    name = name.partition(".")[2]
                if name in params and name != fqn:
                    self.fqns[at], self.roles[at] = name, "master"
                elif fqn is None and re.fullmatch(r"[0-9.]{1,40}", name):
                    self.fqns[at], self.roles[at] = f"optimizer master {name}", "master"
        return found

    def _averaged(self, ckpt: Checkpoint, at: int, key: str) -> None:
        """Assign an average that a callback stores to its weight, if one of that shape is stored."""
        parts = key.split(".")
        named = [n for n, part in enumerate(parts) if any(word in part.lower() for word in OF_AVERAGES)]
        for first in range(named[-1] + 1 if named else len(parts), len(parts) - 1):
            name = ".".join(parts[first:])
            found = [name] if name in self.weights else self._tails.get(name, [])
            if found:
                if len(found) == 1 and self.weights[found[0]] == ckpt.catalog.shape_of(at):
                    self.fqns[at], self.roles[at] = found[0], "ema"
                return

    @cached_property
    def _tails(self) -> dict[str, list[str]]:
        """Weight names without their first one or two containers → the full names."""
        found: dict[str, list[str]] = {}
        for fqn in self.weights:
            for parts in (1, 2):
                if len(words := fqn.split(".", parts)) > parts:
                    found.setdefault(words[-1], []).append(fqn)
        return found

    def _pseudo(self, path: str, count: int) -> str:
        alone = _is_main(path) and self._main[:1] in ([], [path])
        return f"{'optimizer' if alone else path.replace(' ', '_') or 'optimizer'} state {count}"


def read_groups(found: Iterable[ObjectLeaf], names: Names, called: str = "") -> tuple[Group, ...]:
    """Return the groups of all optimizers, each once even if several ranks state it.

    Args:
        called: the optimizer's name in the trainer's arguments.
    """
    raw: dict[tuple[str, str, str], dict[str, Any]] = {}
    for leaf in found:
        if "param_groups" not in leaf.path:
            continue
        at = leaf.path.index("param_groups")
        key, field = leaf.path[at + 1 : -1], leaf.name
        if not key:
            continue
        inner = ".".join(key)
        flattened = inner in names.known_names or (field in _FIELDS and not key[0].isdigit())
        if not flattened and key[0].isdigit():  # a field that is itself a dict
            inner, field = key[0], ".".join((*key[1:], field))
            flattened = True
        if flattened:
            raw.setdefault((leaf.rank, ".".join(leaf.path[: at + 1]), inner), {})[field] = leaf.value
    groups = [_group(key, fields, names) for key, fields in raw.items()]
    return tuple(
        replace(group, optimizer=recognise(group.settings, names.words(group), called))
        for group in _by_shape(_split(_joined(groups), names), names)
    )


def _group(key: tuple[str, str, str], fields: Mapping[str, Any], names: Names) -> Group:
    rank, path, inner = key
    source = f"{rank}/{path}" if rank else path
    params: tuple[str, ...] | None = None
    count: int | None = None
    stored = fields.get("params")
    if isinstance(stored, tuple):
        outer = path.removesuffix("param_groups").rstrip(".")
        count = len(stored)
        params = names.named(stored, f"{rank}/{outer}" if rank else outer) or names.named(stored, outer)
        listed = fields.get("param_names")
        if isinstance(listed, tuple) and len(listed) == count and (params is None or any(map(is_numbered, params))):
            params = names.named(listed) or params
        source += f"[{inner}]"
    elif not inner.isdigit():
        name = names.known(inner)
        count, params = 1, None if name is None else (name,)
    else:
        source += f"[{inner}]"
    betas = fields.get("betas")
    pair = betas_of((fields.get("beta1"), fields.get("beta2")) if betas is None else betas)
    eps, step = (_least(number(fields.get(name))) for name in ("eps", "step"))
    settings = {name: value for name, value in fields.items() if name not in ("params", "param_names")}
    return Group(
        params,
        count,
        number(fields.get("lr")),
        pair,
        eps,
        number(fields.get("weight_decay")),
        number(fields.get("initial_lr")),
        step,
        flag(fields.get("amsgrad")),
        flag(fields.get("decoupled_weight_decay")),
        source,
        settings,
    )


def _joined(groups: Iterable[Group]) -> list[Group]:
    """Join groups that several ranks, or DCP's flattening, state one by one."""
    found: dict[Any, Group] = {}
    for group in groups:
        alike = repr(sorted(group.settings.items()))  # as text, so NaN equals NaN
        single = group.params is not None and len(group.params) == 1 and "[" not in group.source
        key = (alike, single, None if single else group.params, None if single else group.count)
        if key not in found:
            found[key] = group
        elif single:
            one = found[key]
            params = tuple(dict.fromkeys([*(one.params or ()), *(group.params or ())]))
            found[key] = replace(one, params=params, count=len(params))
    return list(found.values())


def _split(groups: list[Group], names: Names) -> list[Group]:
    """Assign matrices and vectors to two groups by their counts, if neither numbers nor names do."""
    if len(groups) != 2 or any(group.params is not None or group.count is None for group in groups):
        return groups
    shapes = {name: shape for name, shape in names.shapes.items() if "exp_avg" in names.state[name]}
    matrices = tuple(name for name, shape in shapes.items() if len(shape) > 1)
    vectors = tuple(name for name, shape in shapes.items() if len(shape) <= 1)
    by_count = {len(matrices): matrices, len(vectors): vectors}
    counts = [group.count or 0 for group in groups]
    if len(by_count) != 2 or set(counts) != set(by_count) or len(set(counts)) != 2:
        return groups
    return [replace(group, params=by_count[count]) for group, count in zip(groups, counts, strict=True)]


def _by_shape(groups: list[Group], names: Names) -> list[Group]:
    """Assign weights to the only group with their shape, if numbers and weights have the same shapes overall."""
    taken = {name for group in groups for name in group.params or ()}
    left = {name: shape for name, shape in names.weights.items() if name not in taken}
    numbered = [[name for name in group.params or () if is_numbered(name)] for group in groups]
    shapes = [Counter(names.shapes.get(name) for name in of) for of in numbered]
    every = Counter(names.shapes.get(name) for of in numbered for name in of)
    if not every or None in every or every != Counter(left.values()):
        return groups
    owners = {shape: [at for at, own in enumerate(shapes) if shape in own] for shape in every}
    return [
        replace(group, weights=tuple(name for name, shape in left.items() if owners[shape] == [at]))
        for at, group in enumerate(groups)
    ]


def _is_main(path: str) -> bool:
    return not path or _MAIN.fullmatch(path) is not None


def _least(value: float | None) -> float | None:
    """Return a value of 0 or more that a count can hold, otherwise ``None``."""
    return value if value is not None and 0 <= value < 1 << BITS else None
