"""What one rank asks of a checkpoint: its tensors, where they are stored, and what cannot be found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint, open
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.errors import UsageError
from workbench.namemap import NameMap
from workbench.reshard.layouts.cut import Locals
from workbench.reshard.loading.boxes import Held, cut_held, held
from workbench.reshard.loading.fill import Batch, batches
from workbench.reshard.loading.names import Leaf, Renaming, Stored, find_object, flatten, renamed

__all__ = ["Asked"]

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Asked:
    """What this rank asks for, and where it is stored.

    Attributes:
        tensors, positions: those to be filled, and where each is in ``stored.catalog``.
        boxes: theirs.
        primary: tensors that have their memory for themselves, or are the first in it.
        twins: tensors tied to one of these, but stored apart.
        loaded: names of tensors that will be filled, those tied to one of these included.
        missing, mismatched: name → why.
        objects: other values, and what is stored for them.
    """

    ckpt: Checkpoint
    stored: Stored
    tensors: list[Held]
    positions: Ints
    boxes: Locals
    primary: list[int]
    twins: list[int]
    loaded: list[str]
    missing: dict[str, str]
    mismatched: dict[str, str]
    objects: list[tuple[Leaf, Any]]

    @classmethod
    def of(
        cls,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str] | Checkpoint,
        name_map: Renaming | NameMap | None,
    ) -> Asked:
        import torch

        ckpt = _opened(path, name_map)
        names = None if isinstance(name_map, NameMap) else name_map
        stored, leaves = Stored(ckpt), flatten(state_dict)
        live = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
        rest = [leaf for leaf in leaves if not isinstance(leaf.value, torch.Tensor)]
        every = [held(leaf.name, leaf.value) for leaf in live]
        found = stored.find([leaf.name for leaf in live], [leaf.path for leaf in live], names)

        tensors, positions = [], []
        missing, mismatched = {}, {}
        for one, at in zip(every, found, strict=True):
            if isinstance(at, str):
                missing[one.name] = at
            elif why := one.differs(stored.catalog.dtype_of(at), stored.catalog.shape_of(at)):
                mismatched[one.name] = why
            else:
                tensors.append(one)
                positions.append(at)
        primary, twins = _memories(tensors, positions)
        loaded = [one.name for one in tensors]
        memories = {one.memory for one in tensors}
        for leaf, one in zip(live, every, strict=True):
            if one.name not in missing:
                continue
            if one.memory in memories:  # tied: what it shares its memory with is stored
                del missing[one.name]
                loaded.append(one.name)
            elif find_object(ckpt.objects, leaf.path)[0]:
                missing[one.name] = "is an object there, and no tensor"
        objects = []
        for leaf in rest:
            key = renamed(leaf.name, names)
            there, value = find_object(ckpt.objects, leaf.path if key == leaf.name else (key,))
            if there:
                objects.append((leaf, value))
            else:
                missing[leaf.name] = "is a tensor there: put one in its place" if key in ckpt else "is no object of it"
        boxes = cut_held(tensors, stored.catalog.shape.shape[1])
        where = np.array(positions, np.int64)
        return cls(ckpt, stored, tensors, where, boxes, primary, twins, loaded, missing, mismatched, objects)

    @property
    def nbytes(self) -> Ints:
        """Bytes of each tensor on this rank."""
        return np.array([one.nbytes for one in self.tensors], np.int64)

    @property
    def payloads(self) -> Payloads:
        """The bytes of ``stored.catalog``, which may number the checkpoint's files in its own way."""
        catalog, own = self.stored.catalog, self.ckpt.payloads
        if own.catalog is catalog:
            return own
        return Payloads(catalog, SourcePool(Place(self.ckpt.path), catalog.files, catalog.file_stats))

    def plan(self, members: list[int], *, compare: bool = False) -> list[Batch]:
        """The reads of some of the tensors. Raises as :func:`batches`."""
        return batches(self.payloads, self.boxes, self.positions, self.tensors, members, compare=compare)


def _memories(tensors: list[Held], positions: list[int]) -> tuple[list[int], list[int]]:
    """Which tensors are the first in their memory, and which are tied to one of these but stored apart."""
    first: dict[Any, int] = {}
    primary, twins = [], []
    for number, one in enumerate(tensors):
        owner = first.setdefault(one.memory, number)
        if owner == number:
            primary.append(number)
        elif positions[owner] != positions[number]:
            twins.append(number)
    return primary, twins


def _opened(path: str | os.PathLike[str] | Checkpoint, name_map: Renaming | NameMap | None) -> Checkpoint:
    ckpt = path if isinstance(path, Checkpoint) else open(path)
    if isinstance(name_map, NameMap):
        if os.path.realpath(name_map.a.path) != os.path.realpath(ckpt.path):
            raise UsageError(
                f"name_map is from {name_map.a.path!r}, but {ckpt.path!r} is loaded; make it from that one"
            )
        return name_map.apply()
    return ckpt
