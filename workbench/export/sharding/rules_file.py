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
from workbench.core.mesh.layout import PlacementRule
from workbench.core.mesh.placement import Flat, Only, PartedShard, Placement, Replicate, Shard, StridedShard
from workbench.errors import UsageError

_CALL = re.compile(r"(\w+)\(\s*((?:-?\d{1,18}\s*(?:,\s*-?\d{1,18}\s*)*)?)\)")


def read_rules(path: str | os.PathLike[str]) -> tuple[PlacementRule, ...]:
    """Read the rules of a file.

    Raises:
        UsageError: the file cannot be read, or a rule is invalid; the message names the rule.
    """
    document = read_own(path, what=f"rules file {os.fspath(path)!r}")
    if not isinstance(document, list):
        raise UsageError(f"rules {os.fspath(path)!r} are not a JSON list")
    return tuple(_rule(one, f"rule {number} of {os.fspath(path)!r}") for number, one in enumerate(document, 1))


def placement(text: object) -> Placement:
    """Parse a placement such as ``Shard(0)``.

    Raises:
        UsageError: it is not a placement, or its arguments are invalid.
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
        f"{text!r} is not a placement; write Replicate(), Shard(dim), StridedShard(dim, parts), "
        "PartedShard(dim, size, …), Only(coordinate, …) or Flat()"
    )


def _rule(document: Any, where: str) -> PlacementRule:
    names = {"pattern", "placements", "role"}
    if not isinstance(document, dict) or not isinstance(document.get("pattern"), str) or set(document) - names:
        raise UsageError(f"{where} is not an object with a 'pattern', 'placements' and optionally a 'role'")
    places, role = document.get("placements"), document.get("role")
    if role is not None and not isinstance(role, str):
        raise UsageError(f"{where} has a role that is not a string")
    if isinstance(places, dict):
        return PlacementRule(document["pattern"], {axis: placement(one) for axis, one in places.items()}, role)
    if isinstance(places, list):
        return PlacementRule(document["pattern"], [placement(one) for one in places], role)
    raise UsageError(f"{where} has no placements: give an object by mesh axis, or a list with one for each axis")
