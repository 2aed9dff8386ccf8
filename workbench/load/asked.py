"""One rank's request to a checkpoint: its tensors, where they are stored, and what cannot be found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.name_map import NameMap
from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core.arrays import Ints
from workbench.core.mesh.cut import Locals
from workbench.core.payload import Payloads
from workbench.core.storage import SourcePool
from workbench.errors import UsageError
from workbench.load.boxes import HeldTensor, cut_held, held
from workbench.load.fill import Batch, batches
from workbench.load.names import NamedTensors, Renaming, StateLeaf, find_object, flatten, renamed


@dataclass(frozen=True, eq=False)
class Asked:
    """What this rank requests, and where it is stored.

    Attributes:
        tensors, positions: the tensors to fill, and the position of each in ``stored.catalog``.
        requested: positions of all tensors that names refer to, including mismatched ones.
        boxes: the boxes of these tensors.
        primary: tensors that do not share their memory, or are the first to use it.
        twins: tensors tied to a primary one, but stored separately.
        loaded: names of the tensors that will be filled, including those tied to one of them.
        missing, mismatched: name → reason.
        objects: other values, with what is stored for them.
    """

    ckpt: Checkpoint
    stored: NamedTensors
    tensors: list[HeldTensor]
    positions: Ints
    requested: Ints
    boxes: Locals
    primary: list[int]
    twins: list[int]
    loaded: list[str]
    missing: dict[str, str]
    mismatched: dict[str, str]
    objects: list[tuple[StateLeaf, Any]]

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
        stored, leaves = NamedTensors(ckpt), flatten(state_dict)
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
            if one.memory in memories:  # tied to a tensor that is stored
                del missing[one.name]
                loaded.append(one.name)
            elif find_object(ckpt.objects, leaf.path)[0]:
                missing[one.name] = "is an object there, not a tensor"
        objects = []
        for leaf in rest:
            key = renamed(leaf.name, names)
            is_object, value = find_object(ckpt.objects, leaf.path if key == leaf.name else (key,))
            if is_object:
                objects.append((leaf, value))
            else:
                missing[leaf.name] = (
                    "is a tensor there: pass a tensor for it"
                    if key in ckpt
                    else "is neither an object nor a tensor there"
                )
        boxes = cut_held(tensors, stored.catalog.shape.shape[1])
        where = np.array(positions, np.int64)
        requested = np.array([at for at in found if not isinstance(at, str)], np.int64)
        return cls(ckpt, stored, tensors, where, requested, boxes, primary, twins, loaded, missing, mismatched, objects)

    @property
    def nbytes(self) -> Ints:
        """Size in bytes of each tensor on this rank."""
        return np.array([one.nbytes for one in self.tensors], np.int64)

    @property
    def payloads(self) -> Payloads:
        """Access to the bytes of ``stored.catalog``, whose file numbers may differ from the checkpoint's."""
        catalog, own = self.stored.catalog, self.ckpt.payloads
        if own.catalog is catalog:
            return own
        return Payloads(catalog, SourcePool(self.ckpt.place, catalog.files, catalog.file_stats))

    def plan(self, members: list[int], *, compare: bool = False) -> list[Batch]:
        """Plan the reads of some of the tensors; raises as :func:`batches`."""
        return batches(self.payloads, self.boxes, self.positions, self.tensors, members, compare=compare)


def _memories(tensors: list[HeldTensor], positions: list[int]) -> tuple[list[int], list[int]]:
    """Return the tensors that are the first in their memory, and those tied to one of them but stored separately."""
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
    ckpt = as_checkpoint(path)
    if isinstance(name_map, NameMap):
        if (name_map.a.place.root, name_map.a.place.file) != (ckpt.place.root, ckpt.place.file):
            raise UsageError(
                f"name_map is from {name_map.a.path!r}, but {ckpt.path!r} is being loaded; make the name_map from that "
                "checkpoint"
            )
        return name_map.apply()
    return ckpt
