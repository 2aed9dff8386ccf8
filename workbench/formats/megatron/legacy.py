"""Megatron-LM's own checkpoints: one folder per model-parallel rank, with each tensor as the rank held it.

::

    iter_0000010/
      mp_rank_01_000/                TP rank 1, PP rank 0 (_PPP only with a pipeline, _EEE only with expert parallelism)
        model_optim_rng.pt           torch.save: args, iteration, model (or model0, model1 …), optimizer, rng_state
        distrib_optim.pt             with the distributed optimizer: flat fp32 buffers without names

    rank's file                                        here
    model  decoder.layers.0.mlp.linear_fc1.weight  ──▶ decoder.layers.2.mlp.linear_fc1.weight    stage 1 begins at 2
           [gate_r; up_r]                               gate_0 gate_1 up_0 up_1                   partition_stride 2
    optimizer.fp32_from_fp16_params[g][j]          ──▶ optimizer.state.fp32_param.decoder.layers.2.…
    optimizer.optimizer.state[id].exp_avg          ──▶ optimizer.state.exp_avg.decoder.layers.2.…
    distrib_optim.pt  0.(bfloat16, float32).param  ──▶ optimizer.state.param.decoder.layers.2.…

How TP divided a parameter is stored only as attributes of the fp32 copies (``partition_dim``, ``partition_stride``).
Without them, Megatron's rules by name decide, and a note says so. Tensors that several ranks hold in full (norms, row
biases, dense weights with expert parallelism) are replicas. Keys are those of ``torch_dist``.

Read from megatron-core 0.16.1 (``training/checkpointing.py``, ``core/optimizer``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import TensorRef
from workbench.core.place import Place, lacking
from workbench.core.words import plural
from workbench.errors import CorruptError, IncompleteError, NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.megatron import boxes, layout
from workbench.formats.megatron.args import AXIS_ARGS, RunArgs
from workbench.formats.megatron.merge import CHUNK, FILE, FLAT, Merger, RankFiles
from workbench.formats.megatron.optim import RankState, held_states
from workbench.formats.torch.file import load_tree, tree_objects

AXES = ("tp", "pp", "ep")
_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
_SIZES = (b"tensor_model_parallel_size", b"pipeline_model_parallel_size")
ARGS = 64 << 10  #: bytes at the beginning of a rank's file in which its sizes are looked for
_EMPTY = np.empty(0, np.int64)
MAX_NAMED = 4
MAX_RANKS = 1 << 20


def detect(place: Place) -> bool:
    """Return whether the folder holds ``mp_rank_…`` folders with Megatron's file in one of them."""
    if place.file is not None:
        return False
    return any(_FOLDER.fullmatch(name) and place.exists(f"{name}/{FILE}") for name in place.folders)


def missing(place: Place) -> str:
    """Describe missing ranks by the numbers of the folders and, on a disk, by the sizes that the first one states."""
    names = [name for name in place.folders if _FOLDER.fullmatch(name) and place.exists(f"{name}/{FILE}")]
    ranks = {tuple(map(int, name.split("_")[2:])) for name in names}
    if len({len(rank) for rank in ranks}) != 1:
        return "mp_rank folders of two runs"
    total = 1
    for axis in zip(*ranks, strict=True):
        total *= max(axis) + 1
    if place.local and len(ranks) == total:  # names cannot show lost last ranks
        total = max(total, _stated_ranks(place.head(f"{names[0]}/{FILE}", ARGS)))
    return lacking(total - len(ranks), total, "mp_rank folders") if len(ranks) < total else ""


def _stated_ranks(start: bytes) -> int:
    """Return the tensor × pipeline ranks that ``args`` at the beginning of a rank's file state; 0 if not there."""
    # BINUNICODE with its length, memoized, and the value: ``encoder_tensor_model_parallel_size`` is another key
    names = (b"X" + len(name).to_bytes(4, "little") + name for name in _SIZES)
    sizes = [re.search(re.escape(name) + rb"(?:q.|r.{4})K(.)", start, re.DOTALL) for name in names]
    return prod(size[1][0] for size in sizes if size) if all(sizes) else 0


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every tensor, with ranks merged.

    Raises:
        IncompleteError: ranks are missing that no other rank can replace; the message has their coordinates.
        MissingFileError: (from ``check_files``) ranks are missing whose shapes are known from a sibling.
        CorruptError: the folder holds ranks of different runs or steps, or their shapes do not match.
    """
    notes: list[str] = []
    parts = _parts(place, notes)
    if not parts:
        raise NotACheckpointError(f"{place.path!r} has no mp_rank folder with a {FILE}")
    run = parts[0].run
    _same_save(parts)
    parts += _absent(parts, run, notes)
    offsets = _layer_offsets(parts, run, notes)
    builder = CatalogBuilder("megatron_legacy", place)
    for part in parts:
        for file in part.storages:
            builder.file(f"{part.folder}/{file}", metadata=not part.absent, end=part.ends.get(file))
    merger = Merger(builder, run, {part.coordinates[0] for part in parts}, notes)
    held = [held_states(part.tree, part.flat, part.chunks, part.run, part.coordinates[1]) for part in parts]
    for part, states in zip(parts, held, strict=True):
        merger.learn(part, states, offsets)
    for part, states in zip(parts, held, strict=True):
        merger.add(part, states, offsets)
    _add_notes(notes, held, merger, parts)
    catalog = builder.build(named=True)
    views = boxes.concat(boxes.views(catalog, run) or [catalog.take(_EMPTY)])
    facts = _facts(parts, run, notes, place)
    return replace(catalog, views=views if len(views) else None, meta={**catalog.meta, **facts})


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the first rank's state by name, the others' as ``mp_rank_01_000/rng_state``, without tensors."""
    makers: dict[str, Callable[[], Any]] = {}
    for folder, names in catalog.meta.get("objects", {}).items():
        if not place.exists(f"{folder}/{FILE}"):
            continue
        stored = tree_objects(place, f"{folder}/{FILE}", names)
        first = not makers
        makers |= {name if first else f"{folder}/{name}": partial(stored.__getitem__, name) for name in names}
    return LazyMap(makers)


# ---- the ranks -----------------------------------------------------------------------------------------------------


def _parts(place: Place, notes: list[str]) -> list[RankFiles]:
    """Decode every rank's files without their tensors."""
    found: list[RankFiles] = []
    names: list[tuple[int, ...]] = []
    for folder in place.folders:
        match = _FOLDER.fullmatch(folder)
        if match is None:
            continue
        if not place.exists(f"{folder}/{FILE}"):
            notes.append(f"folder {folder!r} has no {FILE}")
            continue
        loaded = load_tree(place, f"{folder}/{FILE}")
        if not isinstance(loaded.tree, Mapping) or not any(CHUNK.fullmatch(str(key)) for key in loaded.tree):
            raise CorruptError(f"{folder + '/' + FILE!r} holds no model: Megatron did not write it")
        part = RankFiles(
            folder, (0, 0, 0), loaded.tree, RunArgs.of(loaded.tree.get("args")), {FILE: loaded.storages}, loaded.big
        )
        part.ends[FILE] = loaded.stop
        if place.exists(f"{folder}/{FLAT}"):
            flat = load_tree(place, f"{folder}/{FLAT}")
            part.flat, part.storages[FLAT], part.ends[FLAT] = flat.tree, flat.storages, flat.stop
        part.chunks = _chunks(loaded.tree)
        found.append(part)
        names.append(tuple(int(number) for number in match.groups() if number is not None))
    if len({len(name) for name in names}) > 1:
        raise CorruptError(
            f"{place.path!r} holds {found[0].folder!r} and {_odd_folder(found, names)!r}, ranks of two runs with "
            "different sizes, and it is unknown which run you want; move the folders of the other one away"
        )
    for part, name in zip(found, names, strict=True):
        part.coordinates = _coordinates(name, part.run)
    return found


def _odd_folder(parts: Sequence[RankFiles], names: Sequence[tuple[int, ...]]) -> str:
    return next(part.folder for part, name in zip(parts, names, strict=True) if len(name) != len(names[0]))


def _coordinates(name: tuple[int, ...], run: RunArgs) -> tuple[int, int, int]:
    """Return (tp, pp, ep). A second number in the name is pp's, or ep's if args show that there is no pipeline."""
    if len(name) == 1:
        return name[0], 0, 0
    if len(name) == 2:
        experts = run.known("pp") == 1 and run.known("ep") > 1
        return (name[0], 0, name[1]) if experts else (name[0], name[1], 0)
    return name[0], name[1], name[2]


def _chunks(tree: Mapping[str, Any]) -> list[dict[str, TensorRef]]:
    """Return the tensors of each model chunk by local name."""
    found = sorted((int(m[1] or 0), key) for key in tree if type(key) is str and (m := CHUNK.fullmatch(key)))
    return [dict(layout.tensors(tree[key])) for _, key in found]


def _same_save(parts: Sequence[RankFiles]) -> None:
    """Check that all ranks store the same step and sizes."""
    first = parts[0]
    for part in parts[1:]:
        for what in ("iteration", "checkpoint_version"):
            a, b = first.tree.get(what), part.tree.get(what)
            if type(a) in (int, float) and type(b) in (int, float) and a != b:
                raise CorruptError(
                    f"{first.folder!r} has {what} {a} but {part.folder!r} has {b}: a part of another save is in "
                    "the folder; restore it or use another iteration"
                )
        for axis, name in (("world size", "world_size"), *AXIS_ARGS.items()):
            a, b = first.run.number(name), part.run.number(name)
            if a is not None and b is not None and a != b:
                raise CorruptError(
                    f"{first.folder!r} was written by a run with {axis} {a}, {part.folder!r} with {axis} {b}: mixed "
                    "world sizes in one folder, and it is unknown which run you want; move the folders of the "
                    "other one away"
                )


def _absent(parts: Sequence[RankFiles], run: RunArgs, notes: list[str]) -> list[RankFiles]:
    """Return stand-ins for missing ranks, based on a sibling of the same stage; raises if there is none."""
    present = {part.coordinates: part for part in parts}
    seen = [1 + max(at[axis] for at in present) for axis in range(3)]
    sizes = [run.size(axis) or seen[k] for k, axis in enumerate(AXES)]
    beyond = next((p for p in parts if any(at >= n for at, n in zip(p.coordinates, sizes, strict=True))), None)
    if beyond is not None:
        degrees = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise CorruptError(
            f"{beyond.folder!r} is outside the run's sizes ({degrees}): it is left over from another run; "
            "move it out of the folder"
        )
    if sizes[0] * sizes[1] * sizes[2] > MAX_RANKS:
        degrees = " × ".join(f"{axis} {size:,}" for axis, size in zip(AXES, sizes, strict=True))
        raise CorruptError(f"args state {degrees} model-parallel ranks, which no run has")
    if sizes[2] > 1 and run.size("etp") not in (None, sizes[0]):
        # expert and tensor ranks then do not form a grid: each one must only occur
        lost = [(t, p, 0) for t, p in product(range(sizes[0]), range(sizes[1])) if not _has(present, (t, p, None))]
        lost += [(0, p, e) for p, e in product(range(sizes[1]), range(sizes[2])) if not _has(present, (None, p, e))]
    else:
        grid = product(range(sizes[0]), range(sizes[1]), range(sizes[2]))
        lost = [at for at in grid if at not in present]
    alone = [at for at in lost if not _has(present, (None, at[1], None))]
    if alone or len(lost) > len(parts):
        shown = ", ".join(_named(at) for at in (alone or lost)[:MAX_NAMED])
        raise IncompleteError(
            f"{lacking(len(lost), sizes[0] * sizes[1] * sizes[2], 'ranks')}, among them {shown}"
            f"{' …' if len(alone or lost) > MAX_NAMED else ''}; restore their mp_rank folders"
        )
    found = []
    width = next(iter(parts)).folder.count("_") - 1
    for at in lost:
        sibling = min((p for p in parts if p.coordinates[1] == at[1]), key=lambda p: p.coordinates[2] != at[2])
        numbers = at if width == 3 else (at[0], max(at[1:])) if width == 2 else at[:1]
        folder = "_".join([f"mp_rank_{numbers[0]:02d}", *(f"{n:03d}" for n in numbers[1:])])
        found.append(replace(sibling, folder=folder, coordinates=at, absent=True, sibling=sibling))
    if lost:
        shown = ", ".join(_named(at) for at in lost[:MAX_NAMED])
        notes.append(f"ranks are missing: {shown}{' …' if len(lost) > MAX_NAMED else ''}")
    return found


def _has(
    present: Mapping[tuple[int, int, int], RankFiles], coordinates: tuple[int | None, int | None, int | None]
) -> bool:
    return any(all(w is None or w == c for w, c in zip(coordinates, at, strict=True)) for at in present)


def _named(at: tuple[int, int, int]) -> str:
    return "(" + ", ".join(f"{axis} {n}" for axis, n in zip(AXES, at, strict=True)) + ")"


def _layer_offsets(parts: Sequence[RankFiles], run: RunArgs, notes: list[str]) -> dict[tuple[int, int], int]:
    """Return the first global layer of each ``(chunk, stage)``: layers count up over the stages, chunk after chunk."""
    counts: dict[tuple[int, int], int] = {}
    for part in parts:
        for chunk, tensors in enumerate(part.chunks):
            numbers = {n for name in tensors if (n := layout.layer_of(name)) is not None}
            count = max(numbers, default=-1) + 1
            known = counts.setdefault((chunk, part.coordinates[1]), count)
            if known != count:
                raise CorruptError(
                    f"{part.folder!r} has {plural(count, 'layer')} of model chunk {chunk}, another rank of that stage "
                    f"{known}; the folders are from different runs"
                )
    table = layout.stage_layers(run)
    if table is not None and len(counts) > 1:
        expected = {(v, p): n for v, chunk in enumerate(table) for p, n in enumerate(chunk)}
        odd = sorted(key for key in counts if counts[key] != expected.get(key))
        if odd:
            v, p = odd[0]
            raise CorruptError(
                f"stage {p}, model chunk {v} holds {plural(counts[odd[0]], 'layer')}, but by the stored args it should "
                f"hold {expected.get(odd[0], 0)}; the folders are from different runs"
            )
    elif len(counts) > 1:
        notes.append("args do not store which layers a stage holds: layers are numbered in order of the stages")
    offsets, at = {}, 0
    for key in sorted(counts):
        offsets[key] = at
        at += counts[key]
    return offsets


# ---- facts ---------------------------------------------------------------------------------------------------------


def _add_notes(notes: list[str], held: Sequence[RankState], merger: Merger, parts: Sequence[RankFiles]) -> None:
    if merger.ruled:
        notes.append(
            f"how TP divided {plural(len(merger.ruled), 'parameter')} is not stored; they are merged by "
            "Megatron's naming rules"
        )
    if merger.unknown:
        notes.append(
            f"how {plural(len(merger.unknown), 'tensor', 'were')} divided is neither stored nor known, first "
            f"{min(merger.unknown)!r}: each rank's part has a separate key"
        )
    for part, states in zip(parts, held, strict=True):
        notes += [f"{part.folder}: {reason}" for reason in states.reasons if not part.absent]


def _facts(parts: Sequence[RankFiles], run: RunArgs, notes: list[str], place: Place) -> dict[str, Any]:
    present = [part for part in parts if not part.absent]
    step = present[0].tree.get("iteration")
    mesh: dict[str, Any] = run.mesh if run.args else {"axes": {}, "unknown": list(AXIS_ARGS)}
    used = [
        axis for k, axis in enumerate(AXES) if mesh["axes"].get(axis, 2) > 1 or any(p.coordinates[k] for p in present)
    ]
    folders = {
        part.folder: {axis: part.coordinates[k] for k, axis in enumerate(AXES) if axis in used or axis == "tp"}
        for part in present
    }
    others = sorted({name for part in present for name in _listed(place, part.folder) if name not in (FILE, FLAT)})
    if others:
        notes.append(f"files that are not read: {', '.join(map(repr, others[:MAX_NAMED]))}")
    facts: dict[str, Any] = {
        "step": step if type(step) is int else None,
        "world_size": run.number("world_size"),
        "notes": notes,
        "mesh": {**mesh, "folders": folders, "source": f"folder names, args in {FILE}"},
        "vocab": run.vocab,
        "objects": {
            part.folder: [
                name
                for name, node in part.tree.items()
                if type(name) is str and not CHUNK.fullmatch(name) and (part is present[0] or name != "args")
                if _has_objects(node)
            ]
            for part in present
        },
    }
    if (samples := run.number("consumed_train_samples")) is not None:
        facts["consumed_train_samples"] = samples
    return facts


def _has_objects(tree: Any) -> bool:
    """Return whether a tree holds anything except tensors."""
    seen: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if not isinstance(node, (dict, list, tuple, TensorRef)) or (not isinstance(node, TensorRef) and not node):
            return True
        if not isinstance(node, TensorRef) and id(node) not in seen:
            seen.add(id(node))
            stack += node.values() if isinstance(node, dict) else node
    return False


def _listed(place: Place, folder: str) -> list[str]:
    try:
        return list(place.sub(folder).files)
    except WorkbenchError:
        return []


FORMAT = Format(
    name="megatron_legacy",
    title="Megatron-LM mp_rank folders",
    marks="mp_rank_TT[_PPP][_EEE]/",
    read_from="megatron-core 0.16",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    missing=missing,
    subfolders=("*",),
    framework="megatron",
    never_cuts=("dp", "cp"),
)
