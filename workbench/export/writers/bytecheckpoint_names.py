"""The part of a ByteCheckpoint to which a tensor belongs, and its name there.

::

    any source                                            model/       optimizer/
    model.layers.0.wq.weight           role param         layers.0.wq.weight
    optim.state.layers.0.wq.weight.exp_avg                             state.layers.0.wq.weight.exp_avg
    optim.param_groups.0.lr            an object                       param_groups [{"lr": …}]
    train_state.step                   an object          extra_state

Source: bytecheckpoint 0.0.2 ``checkpointer/fsdp2_checkpointer.py``, and its saves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.export.selection import ExportSelection
from workbench.export.writers.flatten import flatten
from workbench.names.roles import STATES

_OPTIMIZER = re.compile(r"optim(?:izer)?s?\.(.+)", re.S)
_GROUP = re.compile(r"((?:.+\.)?optim(?:izer)?s?)\.param_groups\.(\d{1,6})\.([^.]+)", re.S)


@dataclass(frozen=True)
class NamedPart:
    """A tensor's part, its key in it, and the dict keys that the key represents."""

    part: str
    key: str
    path: tuple[str, ...]


def named(selection: ExportSelection) -> list[NamedPart]:
    """Return a place for each tensor of a selection. A renamed tensor keeps its new name."""
    ckpt = selection.ckpt
    fqns, roles, keys = ckpt.fqns, ckpt.roles, selection.catalog.keys
    positions = selection.tensors.tolist()
    container = _container([(keys[t], fqns[t]) for t in positions if roles[t] == "param"])
    found = []
    for name, t in zip(selection.names, positions, strict=True):
        fqn, role = (fqns[t], roles[t]) if name == keys[t] else (None, roles[t])
        if role in _ROLES and fqn is not None:
            found.append(_state(name, fqn, role))
        elif match := _OPTIMIZER.fullmatch(name):
            found.append(NamedPart("optimizer", match[1], (match[1],)))
        elif role in _ROLES:
            found.append(NamedPart("optimizer", name, (name,)))
        else:
            key = name.removeprefix(container) if name == keys[t] else name
            found.append(NamedPart("model", key, (key,)))
    return found


def stored_names(selection: ExportSelection) -> list[str]:
    """Return the key under which each tensor of a selection is found when the export is opened."""
    return [f"{place.part}.{place.key}" for place in named(selection)]


def param_groups(objects: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Return the groups of the first optimizer, however flat its objects are, and the objects that are not groups."""
    groups: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    owner = None
    for name, value in objects.items():
        matches = [(_GROUP.fullmatch(leaf.key), leaf.value) for leaf in flatten({name: value})]
        owners = {match[1] if match else None for match, _ in matches}
        if len(owners) != 1 or None in owners or not owners <= {owner or next(iter(owners))}:
            rest[name] = value
            continue
        owner = next(iter(owners))
        for match, one in matches:
            assert match is not None
            groups.setdefault(int(match[2]), {})[match[3]] = one
    return [groups[number] for number in sorted(groups)] or None, rest


def _container(params: list[tuple[str, str | None]]) -> str:
    """Return the prefix of the fqn in every parameter's name, ``model.`` or nothing."""
    heads = {key[: -len(fqn)] if fqn and key.endswith(fqn) else None for key, fqn in params}
    return heads.pop() or "" if len(heads) == 1 else ""


def _state(name: str, fqn: str, role: str) -> NamedPart:
    """Place a tensor of the optimizer under its stored name if that means the role, else under the usual name of the
    role.
    """
    leaf = name.rpartition(".")[2]
    state = leaf if STATES.get(leaf) == role else _ROLES[role]
    return NamedPart("optimizer", f"state.{fqn}.{state}", ("state", fqn, state))


#: An optimizer's name for a role, if the stored name does not show it.
_ROLES = {role: state for state, role in reversed(STATES.items())} | {"momentum": "momentum_buffer"}
