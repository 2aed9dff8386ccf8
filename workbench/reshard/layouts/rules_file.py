"""Placement rules from a JSON file.

::

    [
        {"pattern": "embed_tokens", "placements": {"tp": "Shard(0)"}},
        {"pattern": "qkv_proj", "placements": {"tp": "PartedShard(0, 4096, 1024, 1024)"}, "role": "param"},
    ]

The first rule that matches a tensor wins. Placements: ``Replicate()``, ``Shard(dim)``, ``StridedShard(dim, parts)``,
``PartedShard(dim, size, size, …)``, ``Flat()``, ``Only(coordinate, …)``.
"""

from __future__ import annotations

import os
import re
from typing import Any

from workbench.core.jsonsafe import read_own
from workbench.errors import UsageError
from workbench.reshard.layouts.layout import Rule
from workbench.reshard.placement import Flat, Only, PartedShard, Placement, Replicate, Shard, StridedShard

__all__ = ["placement", "read_rules"]

_CALL = re.compile(r"(\w+)\(\s*((?:-?\d{1,18}\s*(?:,\s*-?\d{1,18}\s*)*)?)\)")


def read_rules(path: str | os.PathLike[str]) -> tuple[Rule, ...]:
    """The rules of a file.

    Raises:
        UsageError: it cannot be read, or is not as above; says which rule.
    """
    document = read_own(path, what=f"the file of rules {os.fspath(path)!r}")
    if not isinstance(document, list):
        raise UsageError(f"rules {os.fspath(path)!r} are not a JSON list")
    return tuple(_rule(one, f"rule {number} of {os.fspath(path)!r}") for number, one in enumerate(document, 1))


def placement(text: object) -> Placement:
    """``Shard(0)`` and its like, as a value.

    Raises:
        UsageError: no placement, or with other numbers than it takes.
    """
    found = _CALL.fullmatch(text.strip()) if isinstance(text, str) else None
    numbers = [int(one) for one in found[2].split(",")] if found is not None and found[2].strip() else []
    match (found[1] if found is not None else "", numbers):
        case "Replicate", []:
            return Replicate()
        case "Shard", [dim]:
            return Shard(dim)
        case "StridedShard", [dim, parts]:
            return StridedShard(dim, parts)
        case "PartedShard", [dim, *sizes] if sizes:
            return PartedShard(dim, tuple(sizes))
        case "Only", coordinates if coordinates:
            return Only(tuple(coordinates))
        case "Flat", []:
            return Flat()
    raise UsageError(
        f"{text!r} is no placement; write Replicate(), Shard(dim), StridedShard(dim, parts), "
        "PartedShard(dim, size, …), Only(coordinate, …) or Flat()"
    )


def _rule(document: Any, where: str) -> Rule:
    names = {"pattern", "placements", "role"}
    if not isinstance(document, dict) or not isinstance(document.get("pattern"), str) or set(document) - names:
        raise UsageError(f"{where} is no object with a 'pattern', 'placements' and perhaps a 'role'")
    places, role = document.get("placements"), document.get("role")
    if role is not None and not isinstance(role, str):
        raise UsageError(f"{where} has a role that is no text")
    if isinstance(places, dict):
        return Rule(document["pattern"], {axis: placement(one) for axis, one in places.items()}, role)
    if isinstance(places, list):
        return Rule(document["pattern"], [placement(one) for one in places], role)
    raise UsageError(f"{where} has no placements: an object by mesh axis, or a list with one for each axis")
