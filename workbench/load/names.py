"""Find the stored tensor for a name of a state dict.

::

    {"model": {"norm.weight": T}, "step": 0}   ──flatten──▶   model.norm.weight  T     as DCP names them
                                                              step               0
    name ──name_map──▶ key ──▶ a tensor of that key, listed or a view
                         └───▶ else the one tensor of its fqn and role (names.roles): model.norm.weight, norm.weight

Source: torch 2.13 ``distributed/checkpoint/_nested_dict.py`` and ``_traverse.py`` (mappings are walked, lists only
if they contain a tensor or a mapping, tuples never).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.build import merge
from workbench.core.near import near
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.names.roles import resolve

Renaming = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class StateLeaf:
    """A value of a state dict: ``holder[key]``, under its dotted name."""

    name: str
    path: tuple[str, ...]
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def flatten(state_dict: Mapping[Any, Any]) -> list[StateLeaf]:
    """Return every leaf, named as ``torch.distributed.checkpoint`` names it.

    Raises:
        UsageError: two leaves have the same name, or a module or optimizer was passed instead of its state dict.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"the state dict is a {type(state_dict).__name__}; pass a mapping as returned by state_dict()")
    found: dict[str, StateLeaf] = {}
    _walk(state_dict, (), found)
    return list(found.values())


def find_object(objects: Mapping[str, Any], path: Sequence[str]) -> tuple[bool, Any]:
    """Return ``(found, value)``: the object is found by its dotted name, or inside an object stored as a whole."""
    for end in range(len(path), 0, -1):
        if (name := ".".join(path[:end])) in objects:
            value = objects[name]
            for step in path[end:]:
                value, found = _step(value, step)
                if not found:
                    return False, None
            return True, value
    return False, None


def renamed(name: str, name_map: Renaming | None) -> str:
    """Return the key that a name maps to.

    Raises:
        UsageError: the map does not return a string.
    """
    if name_map is None:
        return name
    new = name_map.get(name, name) if isinstance(name_map, Mapping) else name_map(name)
    if not isinstance(new, str):
        raise UsageError(f"name_map maps {name!r} to {new!r}, which is not a string")
    return new


class NamedTensors:
    """The tensors that names can refer to: the listed ones first, then the views.

    Attributes:
        catalog: catalog of the listed tensors, and of the views once one of them was found.
        listed: number of listed tensors.
    """

    def __init__(self, ckpt: Checkpoint) -> None:
        self._main, self._views = ckpt, ckpt.views if isinstance(ckpt.views, Checkpoint) else None
        self.catalog, self.listed = ckpt.catalog, len(ckpt)
        shown = [] if self._views is None else list(self._views)
        self._index = {key: at + self.listed for at, key in enumerate(shown)} | ckpt.catalog.index
        self._meant: dict[tuple[str, str], list[int]] = {}
        for at, (fqn, role) in enumerate(zip(ckpt.fqns, ckpt.roles, strict=True)):
            if fqn is not None:
                self._meant.setdefault((fqn, role), []).append(at)

    @property
    def total(self) -> int:
        """Number of tensors, including views."""
        return self.listed + (0 if self._views is None else len(self._views))

    @property
    def digest(self) -> bytes:
        """Digest of what must be equal on all ranks for positions to match: tensors, chunks, files and the step.

        A rank that opens a run's folder later than the others may find a newer step with the same names and shapes.
        """
        found = hashlib.blake2b(repr(self._main.step).encode(), digest_size=16)
        for one in (self._main, self._views):
            if one is None:
                continue
            catalog = one.catalog
            sizes = [str(stat.size) for stat in catalog.file_stats]
            for text in (*catalog.keys, *catalog.files, *sizes):
                found.update(text.encode("utf-8", "surrogatepass") + b"\0")
            for name in ("dtype", "shape", "row_ptr", "offsets", "sizes", "file", "start", "stop"):
                found.update(np.ascontiguousarray(getattr(catalog, name)).tobytes())
        return found.digest()

    @property
    def title(self) -> str:
        """The checkpoint's path and step, for messages."""
        return f"{self._main.path!r}" + (f" (step {self._main.step})" if self._main.step is not None else "")

    def find(
        self, names: Sequence[str], paths: Sequence[tuple[str, ...]], name_map: Renaming | None
    ) -> list[int | str]:
        """Return for each name the position of its tensor, or the reason why there is none."""
        keys = [renamed(name, name_map) for name in names]
        found: list[int | str] = [self._index.get(key, "is not in the checkpoint") for key in keys]
        if any(isinstance(one, str) for one in found):
            given = {key: path for name, key, path in zip(names, keys, paths, strict=True) if name == key}
            for at, (fqn, role) in enumerate(zip(*resolve(keys, {"paths": given}), strict=True)):
                if isinstance(found[at], str) and fqn is not None:
                    found[at] = self._by_meaning(fqn, role)
        if any(not isinstance(one, str) and one >= self.listed for one in found):
            self._show_views()
        return found

    def unused(self, asked: Ints) -> list[str]:
        """Return the keys of listed tensors, of the requested roles, that share no stored byte with requested ones.

        Tensors that belong to nothing nameable (role ``other``, generator states) are never unexpected.
        """
        roles = self._main.roles + (self._views.roles if self._views is not None else [])
        wanted = {roles[at] for at in asked.tolist()} - {"other", "rng"}
        used = np.zeros(self.listed, bool)
        used[asked[asked < self.listed]] = True
        shown = asked[asked >= self.listed]
        if len(shown):
            used[self._behind(shown)] = True
        return [self._main.catalog.keys[at] for at in np.flatnonzero(~used).tolist() if roles[at] in wanted]

    def near(self, name: str) -> str:
        """Return a few keys similar to a name, as the end of a sentence."""
        close = near(name, self._main.catalog.keys, count=2)
        return f" (near: {', '.join(map(repr, close))})" if close else ""

    def _by_meaning(self, fqn: str, role: str) -> int | str:
        found = self._meant.get((fqn, role), [])
        if not found and self._views is not None:
            shown = zip(self._views.fqns, self._views.roles, strict=True)
            found = [at + self.listed for at, meaning in enumerate(shown) if meaning == (fqn, role)]
        if len(found) == 1:
            return found[0]
        if found:
            keys = ", ".join(repr(self._main.catalog.keys[at]) for at in found[:3] if at < self.listed)
            return f"could be any of {plural(len(found), 'tensor')} ({keys} …): choose one with name_map"
        return "is not in the checkpoint"

    def _show_views(self) -> None:
        """Build one catalog of both; views have files of the same names, numbered after the others."""
        if self.catalog is self._main.catalog and self._views is not None:
            parts = [replace(one.catalog, views=None, fqns=None, roles=None) for one in (self._main, self._views)]
            self.catalog = merge(self.catalog.format, [("", "", part) for part in parts], {})

    def _behind(self, shown: Ints) -> Ints:
        """Return the listed tensors whose stored items contain the views."""
        both, files = self.catalog, len(self._main.catalog.files)
        mine = both.tensor < self.listed
        theirs = np.isin(both.tensor, shown)
        spans = [
            (both.file[rows] % files, both.start[rows, None], (both.stop - both.start)[rows, None])
            for rows in (mine, theirs)
        ]
        i, _ = box.group_join(*spans[0], *spans[1])
        return np.asarray(both.tensor[mine][i], np.int64)


def _walk(value: Any, path: tuple[str, ...], found: dict[str, StateLeaf]) -> None:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        here = (*path, str(key))
        if isinstance(item, Mapping) or (isinstance(item, list) and _holds_tensors(item)):
            _walk(item, here, found)
            continue
        name = ".".join(here)
        if name in found:
            raise UsageError(f"two values of the state dict are named {name!r}; rename one of them")
        if hasattr(item, "state_dict") or hasattr(item, "load_state_dict"):
            raise UsageError(f"value {name!r} is a {type(item).__name__}; pass its state_dict() instead")
        found[name] = StateLeaf(name, here, value, key)


def _holds_tensors(values: list[Any]) -> bool:
    import torch

    return any(
        isinstance(one, torch.Tensor | Mapping) or (isinstance(one, list) and _holds_tensors(one)) for one in values
    )


def _step(value: Any, step: str) -> tuple[Any, bool]:
    if isinstance(value, Mapping):
        for key in (step, int(step) if step.isdigit() else step):
            if key in value:
                return value[key], True
    elif isinstance(value, list | tuple) and step.isdigit() and int(step) < len(value):
        return value[int(step)], True
    return None, False
