"""Megatron-core's distributed checkpoint, ``torch_dist``: PyTorch's DCP with its own conventions.

::

    iter_0000010/
      metadata.json         {"sharded_backend": "torch_dist", …}    written last: the commit marker
      .metadata             as in DCP; every item is one archive
      __R_W.distcp          rank R, writer W: any rank of a replica group may write a chunk
      common.pt             args, iteration, schedulers, param groups (≤ 0.18); since 0.19 an object
                            ``common_state/shard_0_1`` among the items
      integrity.json        {"algorithm": "sha256", "files": {name: hex}}, if requested

    decoder.layers.mlp.linear_fc1.weight        (layers, 2·ffn, hidden): all layers of the model, [gate; up] unsharded
    optimizer.state.exp_avg.decoder.layers.…    the same; no or ``fully_reshardable`` distributed optimizer
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(…).bucket_idx_0.exp_avg     (n,): buckets.py
    rng_state/shard_0.1_1.2                     cell (0, 1) of a 1 × 2 grid of objects

Here every layer is a tensor (``decoder.layers.3.mlp.linear_fc1.weight``), and the stack is a view under its stored key.
Other views: boxes.py. Read from megatron-core 0.16.1 and 0.20.0dev (``core/dist_checkpointing``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from workbench import formats
from workbench.core import ziparchive
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog, ObjectTable
from workbench.core.codecs import RAW, RAW_BE
from workbench.core.dtypes import by_name
from workbench.core.lazymap import LazyMap
from workbench.core.objects import archive_objects, decode_archive
from workbench.core.pickles import unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import StorageRef, TensorRef, short
from workbench.core.place import Place, stat_or_absent
from workbench.core.words import plural
from workbench.errors import CorruptError, IncompleteError, MissingFileError, UnsupportedFormatError, WorkbenchError
from workbench.formats import Format
from workbench.formats.megatron import boxes, layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.buckets import named_buckets
from workbench.formats.megatron.objects import missing_cells, object_makers, unwrapped
from workbench.names.roles import STATES, resolve

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
MARKER = "metadata.json"
#: file, tensor, first byte, end of its storage, whether its elements are big endian
StoredStep = tuple[str, TensorRef, int, int, bool]
_DATA = re.compile(r"__\d+_\d+\.distcp")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)", re.S)


def detect(place: Place) -> bool:
    """Return whether the folder is one of Megatron's distributed checkpoints, committed or not."""
    if place.file is not None:
        return False
    data = ".metadata" in place.files or any(_DATA.fullmatch(name) for name in place.files)
    if MARKER in place.files:
        try:
            document = place.read_json(MARKER)
        except WorkbenchError:  # truncated: decide by the data files
            return data
        return isinstance(document, dict) and "sharded_backend" in document
    return COMMON in place.files and data


def missing(place: Place) -> str:
    """Describe which of a finished save's two marker files are missing, or what ``.metadata`` lacks."""
    absent = [name for name in (MARKER, ".metadata") if name not in place.files]
    return f"{' and '.join(absent)} missing" if absent else formats.reader("dcp").missing(place)


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of everything stored, one tensor per layer.

    Raises:
        IncompleteError: there is no ``metadata.json``: the save was interrupted.
        MissingFileError: ``.metadata`` is missing.
        UnsupportedFormatError: the backend is zarr or unknown.
        CorruptError: the metadata contradicts itself.
    """
    backend = _backend(place)
    base = formats.reader("dcp").read_catalog(place)
    base.check()  # the steps below multiply and repeat by its numbers
    base = replace(base, format="megatron_dist", metadata_files=[*base.metadata_files, MARKER])
    notes: list[str] = list(base.meta.get("notes", []))
    common, step = _common(place, base, notes, backend)
    if COMMON in place.files:
        base = replace(
            base,
            files=[*base.files, COMMON],
            file_stats=[*base.file_stats, stat_or_absent(place, COMMON)],
            metadata_files=[*base.metadata_files, COMMON],
        )
    source = COMMON if COMMON in place.files else COMMON_OBJECT
    catalog = assembled(place, base, common, step, source, notes)
    return replace(catalog, meta={**catalog.meta, **_integrity(place, notes)})


def assembled(
    place: Place, base: Catalog, common: Mapping[str, Any], step: StoredStep | None, source: str, notes: list[str]
) -> Catalog:
    """Return a catalog of Megatron's global tensors as it is listed: one tensor per layer, names, roles and views.

    Args:
        base: the tensors as stored. common: the common state, without tensors' bytes.
        step: where the optimizer's common step is stored. source: the name of what stores ``args``, for people.
        notes: receives what cannot be named.
    """
    run = RunArgs.of(common.get("args"))
    fqns, roles = _names(base.keys)
    base = replace(base, fqns=fqns, roles=roles)
    stacked = boxes.cuttable(base, np.array([layout.is_stack(key) for key in base.keys], bool))
    main = boxes.unstack(base, stacked, layout.layer_key) if stacked.any() else base
    fqns, roles = _names(main.keys)
    _unflattened(main, fqns, roles, notes)
    main = replace(main, fqns=fqns, roles=roles)
    found = named_buckets(place, main, run, notes)
    shown = [base.take(np.flatnonzero(stacked))]
    if found is not None:
        buckets = np.isin(np.arange(len(main)), found.buckets)
        shown.append(main.take(np.flatnonzero(buckets)))
        main = boxes.concat([main.take(np.flatnonzero(~buckets)), found.catalog])
    if step is not None:
        main, steps = _steps(place, main, *step)
        shown.append(steps)
    shown += boxes.views(main, run)
    views = boxes.concat([replace(view, objects=ObjectTable(), views=None) for view in shown])
    notes += missing_cells(base.objects.keys)
    return replace(main, views=views if len(views) else None, meta=_facts(base, common, run, source, notes))


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return common state by name (``args``, ``iteration`` …), and sharded objects (objects.py)."""
    stored = archive_objects(place, catalog)
    makers: dict[str, Callable[[], Any]] = {}

    @cache
    def common() -> Mapping[str, Any]:
        return _common_value(place, stored)

    for name in catalog.meta.get("common", []):
        makers[name] = partial(_item, common, name)
    found = object_makers(stored, catalog.objects.keys, leave_out=COMMON_OBJECT.partition("/")[0])
    return LazyMap(makers | {name: maker for name, maker in found.items() if name not in makers})


# ---- detection -----------------------------------------------------------------------------------------------------


def _backend(place: Place) -> Mapping[str, Any]:
    if MARKER not in place.files:
        raise IncompleteError(
            f"{place.path!r} has {COMMON} but no {MARKER}, which Megatron writes last: the save was interrupted; "
            "use an earlier iteration"
        )
    document = place.read_json(MARKER)
    name = document.get("sharded_backend") if isinstance(document, dict) else None
    if name == "zarr":
        raise UnsupportedFormatError(
            f"{place.path!r} is a Megatron checkpoint of the former zarr backend (one folder per tensor); open it with "
            "format='zarr'"
        )
    if name != "torch_dist":
        raise UnsupportedFormatError(f"{MARKER!r} names the unknown sharded backend {short(name)}; expected torch_dist")
    if ".metadata" not in place.files:
        raise MissingFileError(
            f"{MARKER!r} shows that the save of {place.path!r} finished, but '.metadata' is missing; restore it, "
            "or use another iteration"
        )
    return document


def _names(keys: list[str]) -> tuple[list[str | None], list[str]]:
    """Return fqn and role by Megatron's containers; the rest of a key is the model's name."""
    fqns: list[str | None] = [None] * len(keys)
    roles = ["other"] * len(keys)
    model: list[int] = []
    for position, key in enumerate(keys):
        if match := _STATE.fullmatch(key):
            fqns[position] = match[2]
            roles[position] = "master" if match[1] == "param" else STATES.get(match[1], "other")
        elif not key.startswith(("optimizer.", "chained_")):
            model.append(position)
    names = [keys[position] for position in model]
    for position, fqn, role in zip(model, *resolve(names, {"paths": {n: (n,) for n in names}}), strict=True):
        fqns[position], roles[position] = fqn, role
    known = dict(zip(names, (fqns[position] for position in model), strict=True))
    return [known.get(fqn, fqn) if fqn is not None else None for fqn in fqns], roles  # NeMo: without module.


def _unflattened(catalog: Catalog, fqns: list[str | None], roles: list[str], notes: list[str]) -> None:
    """Clear fqn and role of optimizer tensors whose shape differs from their parameter's: their layout is unknown."""
    shapes = {
        fqn: catalog.shape_of(t) for t, (fqn, role) in enumerate(zip(fqns, roles, strict=True)) if role == "param"
    }
    odd = [
        t
        for t, (fqn, role) in enumerate(zip(fqns, roles, strict=True))
        if role not in ("param", "step", "other") and shapes.get(fqn, catalog.shape_of(t)) != catalog.shape_of(t)
    ]
    if odd:
        t = odd[0]
        notes.append(
            f"{plural(len(odd), 'optimizer tensor', 'differ')} in shape from their parameter, first "
            f"{catalog.keys[t]!r} {catalog.shape_of(t)} and {shapes[fqns[t]]}: flattened by TP rank (megatron-core < "
            "0.14); they are listed as stored and belong to no parameter"
        )
    for t in odd:
        fqns[t], roles[t] = None, "other"


def _facts(base: Catalog, common: Mapping[str, Any], run: RunArgs, source: str, notes: list[str]) -> dict[str, Any]:
    step = common.get("iteration")
    facts: dict[str, Any] = {
        **{key: value for key, value in base.meta.items() if key != "notes"},
        "step": step if type(step) is int else None,
        "world_size": run.number("world_size"),
        "notes": notes,
        "mesh": {**run.mesh, "source": f"args in {source}"} if run.args else {},
        "common": [name for name in common if type(name) is str],
        "vocab": run.vocab,
    }
    if (samples := run.number("consumed_train_samples")) is not None:
        facts["consumed_train_samples"] = samples
    kind = common.get("content_metadata")
    if isinstance(kind, Mapping):
        facts["content"] = {str(k): v for k, v in kind.items() if isinstance(v, (str, int, bool))}
    return facts


def _integrity(place: Place, notes: list[str]) -> dict[str, Any]:
    """Return which checksums a save has beside it."""
    if "integrity.json" not in place.files:
        return {}
    document = place.read_json("integrity.json")
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not isinstance(document.get("algorithm"), str):
        notes.append("integrity.json is invalid: it has no algorithm or no files")
        return {}
    return {"integrity": {"file": "integrity.json", "algorithm": document["algorithm"], "files": len(files)}}


# ---- common state --------------------------------------------------------------------------------------------------


def _common(
    place: Place, base: Catalog, notes: list[str], backend: Mapping[str, Any]
) -> tuple[Mapping[str, Any], StoredStep | None]:
    """Return the common state without its tensors' bytes, and where the optimizer's common step is stored."""
    if COMMON in place.files:
        file, start = COMMON, 0
        data = np.frombuffer(place.read(COMMON), np.uint8)
    elif COMMON_OBJECT in base.objects.keys:
        row = base.objects.keys.index(COMMON_OBJECT)
        file, start = base.files[base.objects.file[row]], int(base.objects.start[row])
        data = np.frombuffer(place.read(file, start=start, length=int(base.objects.stop[row]) - start), np.uint8)
    else:
        why = f"{COMMON} is missing" if "common_backend" in backend else "no common state is stored"
        notes.append(f"{why}: args, iteration, schedulers and param groups are unknown")
        return {}, None
    what = repr(file) if not start else f"object {COMMON_OBJECT!r} at byte {start:,} of {file!r}"
    archive = ziparchive.read_directory(data, what=what)
    record = archive.records.get(f"{archive.prefix}/data.pkl")
    if record is None:
        raise CorruptError(f"{what} is an archive without data.pkl, so not from torch.save")
    begin, end = archive.payload(record)
    tree = unpickle.loads(bytes(data[begin:end]), what=f"{what} (data.pkl)", persistent_load=torch_storage)
    tree = unwrapped(tree)
    if not isinstance(tree, Mapping):
        raise CorruptError(f"{what} holds {unpickle.short(tree, 60)}, not a dict of common state")
    ref = common_step(tree)
    if ref is None or not isinstance(ref.storage, StorageRef):
        return tree, None
    payload = archive.records.get(f"{archive.prefix}/data/{ref.storage.key}")
    if payload is None:
        raise CorruptError(f"{what} names the storage {ref.storage.key!r}, which the archive does not hold")
    begin, end = archive.payload(payload)
    return tree, (file, ref, start + begin, start + end, archive.byteorder == "big")


def common_step(tree: Mapping[str, Any]) -> TensorRef | None:
    """Find ``optimizer.optimizer.state.common_step``, one counter for all parameters (no distributed optimizer)."""
    node: Any = tree
    for name in ("optimizer", "optimizer", "state", "common_step"):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, TensorRef) and node.shape == () else None


def _steps(
    place: Place, main: Catalog, file: str, ref: TensorRef, start: int, stop: int, big: bool
) -> tuple[Catalog, Catalog]:
    """Return the catalog with the common step, and a view of it for each parameter with optimizer state."""
    builder = CatalogBuilder(main.format, place, files={name: k for k, name in enumerate(main.files)})
    dtype = by_name(ref.dtype)
    key = "optimizer.optimizer.state.common_step"
    builder.tensor(key, dtype, (), role="step")
    inner = ref.storage_offset * dtype.itemsize
    builder.chunk(key, (), (), file, start, stop, codec=RAW_BE if big else RAW, inner=inner)
    alone = builder.build(named=True)
    owners = [f for f, role in zip(main.fqns or (), main.roles or (), strict=True) if role == "exp_avg" and f]
    owners += [other for fqn in owners if (other := layout.respelled(fqn)) is not None]
    view = boxes.renamed(alone, [(0, f"optimizer.state.step.{fqn}", fqn) for fqn in owners])
    return boxes.concat([main, alone]), view


def _common_value(place: Place, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    if COMMON in place.files:
        value = decode_archive(np.frombuffer(place.read(COMMON), np.uint8), what=repr(COMMON))
    else:
        value = unwrapped(stored[COMMON_OBJECT])
    return value if isinstance(value, Mapping) else {}


def _item(whole: Callable[[], Mapping[str, Any]], name: str) -> Any:
    return whole()[name]


FORMAT = Format(
    name="megatron_dist",
    title="Megatron-core torch_dist",
    marks="metadata.json, common.pt",
    read_from="megatron-core 0.16 – 0.20",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    own_bytes=True,
    framework="megatron",
    never_cuts=("dp", "cp"),
    stores_parts=True,
    experts_apart=True,
)
