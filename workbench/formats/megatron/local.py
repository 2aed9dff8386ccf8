"""Megatron-core's local checkpoints: one file per rank on the disks of the nodes, written through NVRx.

::

    SESSION/                               ``LocalCheckpointManager(root, session_id)``; often the root itself
      0/ iter_0000010_0_local.pt           by rank 0, for rank 0: a torch.save archive
      1/ iter_0000010_1_local.pt
         iter_0000010_0_local.pt           a replica of rank 0's file on another node
         iter_0000020_1_local.dirty.pt     a save that was not finished: it is renamed in the end

    MCoreTensorAwareStateDict
      common                  args, iteration, schedulers …: the same on every rank, except ``args.rank``
      sharded_state_dict      containers of
        ShardedTensor         key, global_shape, global_offset, local_shape, prepend_axis_num; data: a tensor, or None
                              where another rank of the data-parallel group stores it (``fully_parallel``)
        ShardedObject         key, global_shape, global_offset, data: a cell of a grid, see objects.py

Every tensor states its box in the global one, so ranks are joined exactly; keys are those of ``torch_dist`` (dist.py).
The iteration that is opened is the one that the manager would load: the newest with a file of every rank.

``BasicTensorAwareStateDict`` (plain NVRx) states no boxes. Its files are opened one by one, as ``torch_save``.

Read from nvidia-resiliency-ext 0.4.1 (``checkpointing/local/ckpt_managers``) and megatron-core 0.16.1 and 0.20.0dev
(``core/dist_checkpointing/tensor_aware_state_dict.py``, ``mapping.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.objects import decode_archive
from workbench.core.pickles.budget import leaves
from workbench.core.pickles.standins import DTypeRef, Opaque, StorageRef, TensorRef, short
from workbench.core.place import Place
from workbench.core.words import some_of
from workbench.errors import CorruptError, NotACheckpointError, UnsupportedFormatError
from workbench.formats import Format
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.dist import StoredStep, assembled, common_step
from workbench.formats.megatron.objects import missing_cells, object_makers
from workbench.formats.torch.file import declare, load_tree

_FILE = re.compile(r"iter_(\d{7})_(\d{1,9})_local(\.dirty)?\.pt")
_RANK = re.compile(r"\d{1,9}")
_CLASS = b"MCoreTensorAwareStateDict"
_PEEK = 1024  #: bytes; the pickle is the archive's first record and begins with the name of its class


class LocalFile(NamedTuple):
    """A rank's file.

    Attributes:
        path: in the place. iteration, owner: as in the name: the rank whose state it holds.
        holder: the rank whose folder holds the file; the owner if the file is in no rank's folder.
        dirty: the save was not finished.
    """

    path: str
    iteration: int
    owner: int
    holder: int
    dirty: bool


def detect(place: Place) -> bool:
    """Return whether the place is such a file, a rank's folder of them, or a folder of these."""
    found = next((one for one in _held(place) if not one.dirty), None)
    return found is not None and _CLASS in place.head(found.path, _PEEK)


def missing(place: Place) -> str:
    """Describe what the iteration that is opened lacks, from names: a file of each rank that has a folder or a file."""
    held = list(_held(place))
    if place.file is not None or all(one.dirty for one in held):
        return "" if place.file is not None else "no file was finished"
    files = _chosen(held, [])
    lost = sorted(_ranks(held) - {one.owner for one in files})
    return f"iteration {files[0].iteration} has no file of {_listed(lost)}" if lost else ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the newest iteration that every rank finished, with ranks joined.

    ``meta["incomplete"]`` names the ranks without a file. A single file is opened as what its rank stores.

    Raises:
        CorruptError: a file is damaged or another rank's, or the ranks' boxes contradict each other.
        UnsupportedFormatError: a tensor is flattened (megatron-core before 0.14).
    """
    held = list(_held(place))
    if all(one.dirty for one in held):
        raise NotACheckpointError(f"{place.path!r} has no iter_NNNNNNN_RANK_local.pt that was finished")
    notes: list[str] = []
    files = _chosen(held, notes)
    builder = CatalogBuilder("megatron_local", place)
    cells: dict[str, str] = {}
    common: Mapping[str, Any] = {}
    step: StoredStep | None = None
    for one in files:
        loaded = load_tree(place, one.path)
        builder.file(one.path, metadata=True, end=loaded.stop)
        state = _state(loaded.tree, one.path)
        rank = RunArgs.of(state["common"].get("args")).number("rank")
        if rank is not None and rank != one.owner:
            raise CorruptError(
                f"{one.path!r} is named after rank {one.owner}, but its args are of rank {rank}: files were exchanged"
            )
        if one is files[0]:
            common = state["common"]
            ref = common_step(common)
            if ref is not None and isinstance(ref.storage, StorageRef) and ref.storage.key in loaded.storages:
                step = one.path, ref, *loaded.storages[ref.storage.key], loaded.big
            if common.get("iteration", one.iteration) != one.iteration:
                notes.append(f"{one.path!r} stores the iteration {short(common.get('iteration'), 20)}")
        for tensor in _sharded(state, "ShardedTensor", one.path):
            shape, offset, ref = _part(tensor, one.path)
            if ref is None:
                builder.tensor(tensor["key"], by_name(tensor["dtype"].name), shape)
                continue
            box = offset, ref.shape, (0,) * len(shape)
            declare(builder, one.path, tensor["key"], ref, loaded, notes, shape=shape, boxes=[box], rank=one.owner)
        for cell in _sharded(state, "ShardedObject", one.path):
            cells.setdefault(_unique_key(cell, one.path), one.path)
    catalog = assembled(place, builder.build(), common, step, repr(files[0].path), notes)
    notes += missing_cells(list(cells))
    facts = {**catalog.meta, "step": files[0].iteration, "cells": cells, "common_in": files[0].path}
    world = facts["world_size"]
    lost = sorted(({*range(world)} if world and world <= 1 << 20 else _ranks(held)) - {one.owner for one in files})
    if lost and place.file is None:
        facts["incomplete"] = (
            f"{place.path!r} has no file of {_listed(lost)} at iteration {files[0].iteration}, first "
            f"'iter_{files[0].iteration:07}_{lost[0]}_local.pt'; copy the folders of the other nodes here, or open "
            "with partial=True to read the rest"
        )
    elif lost:
        notes.append(f"one rank's file: the parts of global tensors that {_listed(lost)} stored are holes")
    return replace(catalog, meta=facts)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the first rank's common state by name, and every rank's sharded objects (objects.py)."""

    @cache
    def decoded(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        def wanted(tree: object) -> Any:
            state = _state(tree, path)
            inside = {_unique_key(cell, path): cell["data"] for cell in _sharded(state, "ShardedObject", path)}
            return state["common"], inside

        common, inside = decode_archive(place.window(path), what=repr(path), part=wanted)
        return common, inside

    cells: Mapping[str, str] = catalog.meta["cells"]
    stored = LazyMap({key: partial(_item, decoded, path, 1, key) for key, path in cells.items()})
    makers: dict[str, Callable[[], Any]] = {}
    for name in catalog.meta["common"]:
        makers[name] = partial(_item, decoded, catalog.meta["common_in"], 0, name)
    found = object_makers(stored, list(cells), leave_out="")
    return LazyMap(makers | {name: maker for name, maker in found.items() if name not in makers})


def stored_step(place: Place) -> int | None:
    """Return the iteration that would be opened, from names."""
    return _chosen(list(_held(place)), [])[0].iteration


# ---- files ---------------------------------------------------------------------------------------------------------


def _held(place: Place) -> Iterator[LocalFile]:
    if place.file is not None:
        yield from _named([place.file], "", -1)
        return
    yield from _named(place.files, "", -1)
    for folder in sorted(place.folders):
        if _RANK.fullmatch(folder) and not place.is_link(folder):
            yield from _named(place.sub(folder).files, f"{folder}/", int(folder))


def _named(names: Any, folder: str, holder: int) -> Iterator[LocalFile]:
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            owner = int(match[2])
            yield LocalFile(folder + name, int(match[1]), owner, owner if holder < 0 else holder, bool(match[3]))


def _ranks(held: list[LocalFile]) -> set[int]:
    """Return the ranks in the names of folders and files."""
    return {one.owner for one in held} | {one.holder for one in held}


def _chosen(held: list[LocalFile], notes: list[str]) -> list[LocalFile]:
    """Return the files of the iteration that the manager would load, one for each rank, in order of the ranks."""
    owners: dict[int, dict[int, LocalFile]] = defaultdict(dict)
    copies: dict[int, int] = defaultdict(int)
    for one in sorted(held, key=lambda one: one.holder != one.owner):  # a rank's own file first
        if not one.dirty:
            copies[one.iteration] += one.owner in owners[one.iteration]
            owners[one.iteration].setdefault(one.owner, one)
    ranks = _ranks(held)
    whole = [iteration for iteration, found in owners.items() if found.keys() == ranks]
    chosen = max(whole or owners)
    others = sorted({one.iteration for one in held} - {chosen})
    if others:
        why = "the newest with a file of every rank" if whole else "the newest"
        notes.append(f"iteration {chosen} was opened, {why}; iterations {', '.join(map(str, others))} were not read")
    if copies[chosen]:
        notes.append(f"{copies[chosen]} replicas of other ranks' files were not read or compared")
    return [owners[chosen][rank] for rank in sorted(owners[chosen])]


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of(ranks, 8)}"


# ---- contents ------------------------------------------------------------------------------------------------------


def _state(tree: object, path: str) -> Mapping[str, Any]:
    state = tree.state if isinstance(tree, Opaque) else None
    if not isinstance(state, dict) or not isinstance(state.get("common"), dict) or "sharded_state_dict" not in state:
        raise CorruptError(f"{path!r} is not an MCoreTensorAwareStateDict with its common and sharded state")
    if state.get("_is_hollow") is True:
        raise CorruptError(f"{path!r} is hollow: its tensors were removed before it was saved")
    return state


def _sharded(state: Mapping[str, Any], kind: str, path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the attributes of each ShardedTensor or ShardedObject."""

    def children(node: object) -> Any:
        if isinstance(node, dict):
            return node.items()
        return enumerate(node) if isinstance(node, (list, tuple)) else None

    def wanted(node: object) -> bool:
        return isinstance(node, Opaque) and node.qualname == kind

    for _, node in leaves(state["sharded_state_dict"], children, wanted, what=repr(path)):
        if not isinstance(node.state, dict) or type(node.state.get("key")) is not str or "data" not in node.state:
            raise CorruptError(f"{path!r} has a {kind} without key or data")
        yield node.state


def _numbers(stored: Mapping[str, Any], name: str, path: str) -> tuple[int, ...]:
    value = stored.get(name)
    if not isinstance(value, (tuple, list)) or any(type(n) is not int or not 0 <= n < 1 << 48 for n in value):
        raise CorruptError(f"{path!r}: {name} of {stored['key']!r} is {short(value, 60)}, not a tuple of sizes")
    return tuple(value)


def _unique_key(cell: Mapping[str, Any], path: str) -> str:
    """Return a sharded object's key as ``torch_dist`` stores it (``ShardedObject.unique_key``)."""
    offset, shape = (_numbers(cell, name, path) for name in ("global_offset", "global_shape"))
    if not offset or len(offset) != len(shape):
        return str(cell["key"])
    return f"{cell['key']}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def _part(tensor: Mapping[str, Any], path: str) -> tuple[tuple[int, ...], tuple[int, ...], TensorRef | None]:
    """Return the shape of a global tensor, where this rank's part is, and the part; ``None`` if another stores it."""
    key, data = tensor["key"], tensor["data"]
    shape, offset, local = (_numbers(tensor, name, path) for name in ("global_shape", "global_offset", "local_shape"))
    prepended = tensor.get("prepend_axis_num", 0)
    if tensor.get("flattened_range") is not None:
        raise UnsupportedFormatError(
            f"{path!r}: {key!r} is a range of a flattened tensor, which megatron-core before 0.14 stores; not supported"
        )
    if type(prepended) is not int or not 0 <= prepended <= len(shape) == len(offset) == prepended + len(local):
        raise CorruptError(
            f"{path!r}: {key!r} of shape {list(local)} with {short(prepended, 20)} axes before it cannot be at "
            f"{list(offset)} of {list(shape)}"
        )
    if data is None:
        if not isinstance(tensor.get("dtype"), DTypeRef):
            raise CorruptError(f"{path!r}: {key!r} has neither data nor dtype")
        return shape, offset, None
    if not isinstance(data, TensorRef) or data.shape != local:
        found = list(data.shape) if isinstance(data, TensorRef) else short(data, 60)
        raise CorruptError(f"{path!r}: {key!r} should have the shape {list(local)}; its data is {found}")
    sizes, strides = (1,) * prepended + local, (0,) * prepended + data.stride
    return shape, offset, TensorRef(data.storage, data.dtype, data.storage_offset, sizes, strides, False, data.attrs)


def _item(decoded: Callable[[str], Any], path: str, part: int, name: str) -> Any:
    return decoded(path)[part][name]


FORMAT = Format(
    name="megatron_local",
    title="Megatron-core local checkpoint (NVRx)",
    marks="N/iter_NNNNNNN_N_local.pt",
    read_from="nvidia-resiliency-ext 0.4, megatron-core 0.16 – 0.20",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    stored_step=stored_step,
    single_file=True,
    subfolders=("[0-9]*",),
    framework="megatron",
    never_cuts=("dp", "cp"),
    stores_parts=True,
    experts_apart=True,
)
