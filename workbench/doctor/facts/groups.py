"""Param groups of the optimizer, from the ways in which formats store them, with the names of their parameters.

::

    optimizer.param_groups[0] {lr, betas, params: [0, 1, …]}       numbers: the state's keys, or counts, tell the names
    optim.param_groups.0.params = [fqn, …]                         get_state_dict
    optim.param_groups.layers.0.wq.weight.lr                       flattened by DCP: a group each; equal ones are joined

Numbers become names where the reader joined the state to them; or where the parameters fall into matrices and vectors,
and the groups have just these two counts. Nothing else is certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.checkpoint import Checkpoint
from workbench.doctor.facts.flat import Leaf
from workbench.doctor.facts.numbers import BITS, betas_of, number
from workbench.doctor.facts.state import Group

__all__ = ["read_groups"]

_FIELDS = {
    "lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay", "initial_lr", "step", "params",
    "maximize", "foreach", "capturable", "differentiable", "fused", "param_names", "wd_mult", "lr_mult",
    "is_expert_parallel", "is_decoupled_lr", "default_config", "max_lr", "min_lr", "bias_correction", "beta1", "beta2",
    "momentum",
}  # fmt: skip
_NUMBERED = re.compile(r"(?:^|\.)state\.(\d+)\.\w+")


def read_groups(found: Iterable[Leaf], ckpt: Checkpoint) -> tuple[Group, ...]:
    """The groups of all optimizers; those that several ranks state alike once."""
    raw: dict[tuple[str, str, str], dict[str, Any]] = {}
    for leaf in found:
        if "param_groups" not in leaf.path:
            continue
        at = leaf.path.index("param_groups")
        key, field = leaf.path[at + 1 : -1], leaf.name
        if key and (field in _FIELDS or key[0].isdigit()):
            raw.setdefault((leaf.rank, ".".join(leaf.path[: at + 1]), ".".join(key)), {})[field] = leaf.value
    names = _Names(ckpt)
    groups = [_group(key, fields, names) for key, fields in raw.items()]
    return tuple(_split(_joined(groups), names))


class _Names:
    """Which names the checkpoint's parameters have."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.fqns = {fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if fqn is not None}
        self.by_number: dict[int, str] = {}
        self.shapes: dict[str, int] = {}
        doubtful: set[int] = set()
        for position, (key, fqn, role) in enumerate(zip(ckpt.catalog.keys, ckpt.fqns, ckpt.roles, strict=True)):
            if fqn is None:
                continue
            if role == "exp_avg":
                self.shapes[fqn] = len(ckpt.catalog.shape_of(position))
            if match := _NUMBERED.search(key):
                number = int(match[1])
                if self.by_number.setdefault(number, fqn) != fqn:  # two optimizers
                    doubtful.add(number)
        for number in doubtful:
            del self.by_number[number]

    def named(self, params: Sequence[Any]) -> tuple[str, ...] | None:
        """Stored parameters as fqns; ``None`` if one of them cannot be told."""
        found = []
        for one in params:
            name = self.by_number.get(one) if isinstance(one, int) else self.known(str(one))
            if name is None:
                return None
            found.append(name)
        return tuple(found)

    def known(self, name: str) -> str | None:
        while name not in self.fqns:
            _, dot, name = name.partition(".")
            if not dot:
                return None
        return name


def _group(key: tuple[str, str, str], fields: Mapping[str, Any], names: _Names) -> Group:
    rank, path, inner = key
    source = f"{rank}/{path}" if rank else path
    params: tuple[str, ...] | None = None
    count: int | None = None
    stored = fields.get("params")
    if isinstance(stored, tuple):
        count, params = len(stored), names.named(stored)
        told = fields.get("param_names")
        if params is None and isinstance(told, tuple) and len(told) == count:
            params = names.named(told)
        source += f"[{inner}]"
    elif not inner.isdigit():
        name = names.known(inner)
        count, params = 1, None if name is None else (name,)
    else:
        source += f"[{inner}]"
    betas = fields.get("betas")
    pair = betas_of((fields.get("beta1"), fields.get("beta2")) if betas is None else betas)
    eps, step = (_least(number(fields.get(name))) for name in ("eps", "step"))
    return Group(
        params, count, number(fields.get("lr")), pair, eps, number(fields.get("weight_decay")),
        number(fields.get("initial_lr")), step, _flag(fields.get("amsgrad")),
        _flag(fields.get("decoupled_weight_decay")), source,
    )  # fmt: skip


def _joined(groups: Iterable[Group]) -> list[Group]:
    """Groups that several ranks, or DCP's flattening, state one by one, as one."""
    found: dict[Any, Group] = {}
    for group in groups:
        alike = replace(group, params=None, count=None, source="")
        single = group.params is not None and len(group.params) == 1 and "[" not in group.source
        key = (alike, single, None if single else group.params, None if single else group.count)
        if key not in found:
            found[key] = group
        elif single:
            one = found[key]
            params = tuple(dict.fromkeys([*(one.params or ()), *(group.params or ())]))
            found[key] = replace(one, params=params, count=len(params))
    return list(found.values())


def _split(groups: list[Group], names: _Names) -> list[Group]:
    """Matrices and vectors by the counts of two groups, where neither numbers nor names tell."""
    if len(groups) != 2 or any(group.params is not None or group.count is None for group in groups):
        return groups
    matrices = tuple(name for name, dims in names.shapes.items() if dims > 1)
    vectors = tuple(name for name, dims in names.shapes.items() if dims <= 1)
    by_count = {len(matrices): matrices, len(vectors): vectors}
    counts = [group.count or 0 for group in groups]
    if len(by_count) != 2 or set(counts) != set(by_count) or len(set(counts)) != 2:
        return groups
    return [replace(group, params=by_count[count]) for group, count in zip(groups, counts, strict=True)]


def _least(value: float | None) -> float | None:
    """Of 0 or more, and no larger than a count can be."""
    return value if value is not None and 0 <= value < 1 << BITS else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
