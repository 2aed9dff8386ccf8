"""Which stored tensor a name of a state dict means.

::

    {"model": {"norm.weight": T}, "step": 0}   ──flatten──▶   model.norm.weight  T     as DCP names them
                                                              step               0
    name ──name_map──▶ key ──▶ a tensor of that key, listed or a view
                         └───▶ else the one tensor of the same fqn and role (naming.py): model.norm.weight, norm.weight

Source: torch 2.13 ``distributed/checkpoint/_nested_dict.py`` and ``_traverse.py`` (mappings are walked, lists only
where they hold a tensor or a mapping, tuples never).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench import naming
from workbench.checkpoint import Checkpoint
from workbench.core import box
from workbench.core.build import merge
from workbench.core.near import near
from workbench.errors import UsageError

__all__ = ["Leaf", "Renaming", "Stored", "find_object", "flatten", "renamed"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Renaming = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A value of a state dict: ``holder[key]``, under its dotted name."""

    name: str
    path: tuple[str, ...]
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def flatten(state_dict: Mapping[Any, Any]) -> list[Leaf]:
    """Every leaf, named as ``torch.distributed.checkpoint`` names it.

    Raises:
        UsageError: two leaves of one name, or a module, optimizer or the like in place of its state dict.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"the state dict is a {type(state_dict).__name__}; give a mapping, as state_dict() returns it")
    found: dict[str, Leaf] = {}
    _walk(state_dict, (), found)
    return list(found.values())


def find_object(objects: Mapping[str, Any], path: Sequence[str]) -> tuple[bool, Any]:
    """``(whether it is there, value)``: by its dotted name, or inside of an object that is stored as a whole."""
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
    """The key that a name stands for.

    Raises:
        UsageError: a map that makes no text of it.
    """
    if name_map is None:
        return name
    new = name_map.get(name, name) if isinstance(name_map, Mapping) else name_map(name)
    if not isinstance(new, str):
        raise UsageError(f"name_map makes {new!r} of {name!r}; it has to be the text of a key")
    return new


class Stored:
    """The tensors that names can mean: those listed first, then the views.

    Attributes:
        catalog: of the listed ones, and of the views where one of these was found.
        listed: how many are listed.
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
        """How many tensors there are, views included."""
        return self.listed + (0 if self._views is None else len(self._views))

    @property
    def digest(self) -> bytes:
        """What ranks must have alike so that positions mean the same to them: tensors, chunks, files and the step.

        A rank that opens a run's folder later than the others may find a newer step, of the same names and shapes.
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
        """For each name the position of its tensor, or a sentence why there is none."""
        keys = [renamed(name, name_map) for name in names]
        found: list[int | str] = [self._index.get(key, "is not in the checkpoint") for key in keys]
        if any(isinstance(one, str) for one in found):
            given = {key: path for name, key, path in zip(names, keys, paths, strict=True) if name == key}
            for at, (fqn, role) in enumerate(zip(*naming.resolve(keys, {"paths": given}), strict=True)):
                if isinstance(found[at], str) and fqn is not None:
                    found[at] = self._by_meaning(fqn, role)
        if any(not isinstance(one, str) and one >= self.listed for one in found):
            self._show_views()
        return found

    def unused(self, asked: Ints) -> list[str]:
        """Keys of listed tensors that share no stored byte with those asked for, of the same roles as these.

        Tensors that belong to nothing nameable (role ``other``, generator states) are not expected by anyone.
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
        """A few keys like a name, as the end of a sentence."""
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
            return f"could be any of {len(found)} tensors ({keys} …): say which in name_map"
        return "is not in the checkpoint"

    def _show_views(self) -> None:
        """One catalog of both; views have files of the same names, numbered after the others."""
        if self.catalog is self._main.catalog and self._views is not None:
            parts = [replace(one.catalog, views=None, fqns=None, roles=None) for one in (self._main, self._views)]
            self.catalog = merge(self.catalog.format, [("", "", part) for part in parts], {})

    def _behind(self, shown: Ints) -> Ints:
        """Listed tensors in whose stored items views lie."""
        both, files = self.catalog, len(self._main.catalog.files)
        mine = both.tensor < self.listed
        theirs = np.isin(both.tensor, shown)
        spans = [
            (both.file[rows] % files, both.start[rows, None], (both.stop - both.start)[rows, None])
            for rows in (mine, theirs)
        ]
        i, _ = box.group_join(*spans[0], *spans[1])
        return np.asarray(both.tensor[mine][i], np.int64)


def _walk(value: Any, path: tuple[str, ...], found: dict[str, Leaf]) -> None:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        here = (*path, str(key))
        if isinstance(item, Mapping) or (isinstance(item, list) and _holds_tensors(item)):
            _walk(item, here, found)
            continue
        name = ".".join(here)
        if name in found:
            raise UsageError(f"two values of the state dict are called {name!r}; rename one of them")
        if hasattr(item, "state_dict") or hasattr(item, "load_state_dict"):
            raise UsageError(f"value {name!r} is a {type(item).__name__}; give its state_dict() instead")
        found[name] = Leaf(name, here, value, key)


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
