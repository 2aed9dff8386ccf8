"""safetensors: one file, or a folder of them with or without an index.

::

    config.json                          facts about the model, read as objects
    model.safetensors.index.json         {"metadata": {…}, "weight_map": {"lm_head.weight": "model-00002-…"}}
    model-00001-of-00002.safetensors     ◀─┐ the index decides which tensor comes from which file;
    model-00002-of-00002.safetensors     ◀─┘ a file may hold more than it lists

    adapter_config.json, adapter_model.safetensors        PEFT

    shard-00001-model-00001-of-00001.safetensors          HuggingFaceStorageWriter(save_distributed=True):
    shard-00002-model-00001-of-00001.safetensors          a piece of every tensor per rank; its position is in
                                                          __metadata__["DCP_SHARDING_INFO"]
    sharded/shard-…, model-00001-of-00001.safetensors     the same, consolidated: the full files are read

    model-rank-00000-of-00004.safetensors                 local tensors of a rank, with their boxes (ranks.py)

The sharded layout stores no global shapes and no number of ranks: a shape is the largest end of the pieces that exist.
torch's own reader infers it in the same way, so a lost last rank silently makes tensors smaller. If file names show
lost ranks, ``meta["notes"]`` says so.

Sources: safetensors 0.8, transformers 5.23 (index), peft 0.21, diffusers' variant names (``model.fp16.safetensors``),
torch 2.13 ``torch/distributed/checkpoint/hf_storage.py`` and ``_hf_utils.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.place import Place, lacking
from workbench.core.words import Ordinary, plural, some_of
from workbench.errors import CorruptError, NotACheckpointError, WorkbenchError
from workbench.formats import Format
from workbench.formats.safetensors.header import Entry, Header, check_start, looks_like, parse, saved_offsets
from workbench.formats.safetensors.quantised import recipes
from workbench.formats.safetensors.ranks import add_boxes, says_boxes
from workbench.formats.safetensors.weight_index import (
    SINGLE,
    SINGLE_INDEX,
    WeightIndex,
    absent_files,
    before_index,
    find_tensors,
    missing_weights,
    other_weights,
    read_index,
)

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
STARTS = 4  #: files of a checkpoint whose headers are read to say that it is complete
START = 1 << 20  #: bytes of a header up to which it is parsed for that
SHARDED = "sharded"  #: folder of HuggingFaceStorageWriter's pieces next to the consolidated files
PREFERRED = (
    "model",
    "diffusion_pytorch_model",
    "adapter_model",
    "pytorch_model",
)  #: preference if there are several indices
MAX_NAMED = 5  #: maximum names in one note

_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_PART = re.compile(r"(.*?)(-rank)?-(\d+)-of-(\d+)(\..*)?\.safetensors")
_FACTS = re.compile(r".*config.*\.json|params\.json|model_index\.json|trainer_state\.json")


def detect(place: Place) -> bool:
    """Return whether the file begins like safetensors, or the folder holds such files or their index."""
    if place.file is not None:
        if place.file.endswith((SUFFIX, INDEX)):
            return True
        size = place.stat(place.file).size
        return looks_like(place.read(place.file, length=min(9, size)), size)
    return any(name.endswith((SUFFIX, INDEX)) for name in place.files) or _only_sharded(place)


def is_collection(place: Place) -> bool:
    """Return whether a folder's files are separate checkpoints.

    Two hold a tensor of the same name, and neither an index nor their names make them parts of one checkpoint; or one
    is a link out of the folder. `read_catalog` refuses such a folder.
    """
    names = [name for name in place.files if name.endswith(SUFFIX) and _variant_of(name) not in place.files]
    parts = all(_PART.fullmatch(name) for name in names)
    if len(names) < 2 or parts or any(name.endswith(INDEX) for name in place.files):
        return False
    if any(not place.exists(name) for name in names):
        return True
    seen: set[str] = set()
    for name in names:
        try:
            header = parse(place, name, cut=True)
            mine = {entry.name for entry in header.entries}
            if not seen.isdisjoint(mine):
                return not saved_offsets(name, header)
        except WorkbenchError:  # an unreadable file says nothing about the others
            continue
        seen |= mine
    return False


def missing(place: Place) -> str:
    """Describe the files that an index or the numbers in names show to be missing, and tensors of the first files.

    Raises:
        CorruptError, TruncatedError: one of the first files on a disk is not safetensors, or is cut.
    """
    lost = missing_weights(place)
    if not lost and place.local:  # a store would be asked for each file
        lost = _missing_tensors(place)
    return lost


def _missing_tensors(place: Place) -> str:
    """Describe tensors that the first files should hold by the index. Raises as :func:`missing`."""
    index = None if place.file is not None or before_index(place) else next(iter(_indices(place)), None)
    weights = {} if index is None else read_index(place, index).weights
    names = [place.file] if place.file is not None else [name for name in place.files if name.endswith(SUFFIX)]
    for name in names[:STARTS]:
        if not name.endswith(SUFFIX) or check_start(place, name) > START:
            continue
        held = {entry.name for entry in parse(place, name).entries}
        if lost := [tensor for tensor, file in weights.items() if file == name and tensor not in held]:
            return f"{name!r} lacks {plural(len(lost), 'tensor')} that {index!r} maps to it: {some_of(lost, 1)}"
    return ""


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of every tensor.

    Raises:
        CorruptError: a header or an index contradicts itself; or, as ``check_files`` finds, they contradict each other.
        MissingFileError: (from ``check_files``) a file that the index names is missing.
        UnsafeError: the index names a file outside the folder.
    """
    notes: list[str] = []
    builder = CatalogBuilder("safetensors", place)
    index, files, absent = _files(place, notes)
    headers = {file: parse(place, file, cut=True) for file in files}
    for file in files:
        builder.file(file, metadata=True)
    if index is None and says_boxes(headers):
        facts = add_boxes(builder, headers, notes)
    elif index is None:
        facts = _add_pieces(builder, headers, notes)
    else:
        facts = _add_indexed(builder, index, absent, headers, notes)
        builder.file(index.name, metadata=True)
    facts |= _adapter(place)
    return builder.build({"step": None, "notes": notes, **facts})


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return configs by file stem, the index's ``metadata``, and each file's ``__metadata__`` text."""
    makers: dict[str, Any] = {}
    for name in place.files:
        if _FACTS.fullmatch(name) and place.file is None:
            makers[name.removesuffix(".json")] = partial(place.read_json, name)
    for name in catalog.metadata_files:
        if name.endswith(INDEX):
            makers[name.removesuffix(".json")] = partial(_index_facts, place, name)
    makers["__metadata__"] = partial(_texts, place, catalog)
    return LazyMap(makers)


def _index_facts(place: Place, name: str) -> Any:
    return place.read_json(name).get("metadata")


# ---- files -----------------------------------------------------------------------------------------------


def _files(place: Place, notes: list[str]) -> tuple[WeightIndex | None, list[str], list[str]]:
    """Return the index, if any, the files of the checkpoint, and those that the index names and that do not exist."""
    if place.file is not None and place.file.endswith(INDEX):
        return _indexed(place, place.file)
    if place.file is not None:
        return None, [place.file], []
    present = [name for name in place.files if name.endswith(SUFFIX)]
    indices = _indices(place)
    if weights := other_weights(place):
        text = f"{some_of(weights)} is not read: transformers prefers safetensors; open it by its own path"
        notes.append(Ordinary(text))
    if before_index(place):
        notes.append(
            f"opened {SINGLE!r}, as transformers does, although {SINGLE_INDEX!r} lists other files: open the index by "
            "its own path to read those"
        )
        return None, [SINGLE], []
    if indices:
        found = index, *_ = _indexed(place, indices[0])
        _note(notes, "more index file", f", read {indices[0]!r}", indices[1:])
        unlisted = sorted(set(present) - set(index.files))
        _note(notes, "file", f" that {indices[0]!r} does not list, left out", unlisted)
        return found
    if not present and _only_sharded(place):
        inner = place.sub(SHARDED)
        notes.append(
            "only the pieces in 'sharded/' exist; they were not consolidated, or the consolidated file is lost"
        )
        return None, [f"{SHARDED}/{name}" for name in inner.files if name.endswith(SUFFIX)], []
    variants = [name for name in present if _variant_of(name) in place.files]
    _note(notes, "variant", " of other files, left out", variants)
    files = [name for name in present if name not in set(variants)]
    full = [name for name in files if not _SHARD.fullmatch(name)]
    if full and len(full) < len(files):
        _note(notes, "piece", " next to the consolidated files, left out", sorted(set(files) - set(full)))
        files = full
    if not files:
        raise NotACheckpointError(f"{place.path!r} holds no safetensors file")
    _missing_parts(files, notes)
    return None, files, []


def _indices(place: Place) -> list[str]:
    """Return the index files, the one to read first."""
    return sorted((name for name in place.files if name.endswith(INDEX)), key=_preference)


def _indexed(place: Place, name: str) -> tuple[WeightIndex, list[str], list[str]]:
    index = read_index(place, name)
    absent = absent_files(place, index)
    return index, [file for file in index.files if file not in set(absent)], absent


def _preference(index: str) -> tuple[int, int, str]:
    stem = index.removesuffix(INDEX)
    return (PREFERRED.index(stem) if stem in PREFERRED else len(PREFERRED), len(stem), stem)


def _variant_of(name: str) -> str:
    """Return ``model.safetensors`` for ``model.fp16.safetensors``, and a name without a variant unchanged."""
    stem, _, variant = name.removesuffix(SUFFIX).rpartition(".")
    return stem + SUFFIX if stem and variant else ""


def _only_sharded(place: Place) -> bool:
    if place.file is not None or SHARDED not in place.folders or not place.exists(SHARDED):
        return False
    return any(_SHARD.fullmatch(name) for name in place.sub(SHARDED).files)


def _missing_parts(files: Sequence[str], notes: list[str]) -> None:
    """Note the files that names such as ``model-00003-of-00004`` count; pieces of ranks are checked elsewhere."""
    parts: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in files:
        if (match := _PART.fullmatch(name)) and not match[2] and not _SHARD.fullmatch(name):
            parts[match[1], match[4], match[5] or ""].add(int(match[3]))
    for (stem, count, _), present in parts.items():
        if int(count) <= 100_000:
            absent = [f"{number:05d}" for number in range(1, int(count) + 1) if number not in present]
            if absent:
                lost = lacking(len(absent), int(count), f"files '{stem}-N-of-{count}'")
                notes.append(f"{lost}, and no index lists what was in them: {some_of(absent, MAX_NAMED)}")


# ---- tensors ---------------------------------------------------------------------------------------------


def _add_indexed(
    builder: CatalogBuilder,
    index: WeightIndex,
    absent: Sequence[str],
    headers: Mapping[str, Header],
    notes: list[str],
) -> dict[str, Any]:
    where = {file: {entry.name: entry for entry in header.entries} for file, header in headers.items()}
    found, lost = find_tensors(builder.place, index, absent, where, notes)
    for name, file in found.items():
        entry = where[file][name]
        builder.tensor(name, entry.dtype, entry.shape)
        builder.chunk(name, (0,) * len(entry.shape), entry.shape, file, entry.start, entry.stop)
    extra = [name for file, entries in where.items() for name in entries if found.get(name) != file]
    _note(notes, "tensor", f" that {index.name!r} does not list, left out", extra)
    total = sum(where[file][name].stop - where[file][name].start for name, file in found.items())
    if not lost and (stated := index.other_size(total)):
        notes.append(f"index {index.name!r} states {stated} bytes of tensors, but there are {total:,}")
    return {"index": index.name, **lost}


def _add_pieces(builder: CatalogBuilder, headers: Mapping[str, Header], notes: list[str]) -> dict[str, Any]:
    """Add the tensors of all files; one in several files must consist of pieces with stored positions."""
    pieces: dict[str, list[tuple[str, Entry, tuple[int, ...] | None]]] = defaultdict(list)
    for file, header in headers.items():
        offsets = saved_offsets(file, header)
        for entry in header.entries:
            pieces[entry.name].append((file, entry, offsets.get(entry.name)))
    for name, found in pieces.items():
        whole = [file for file, _, offsets in found if offsets is None]
        if len(found) > 1 and whole:
            first, second = whole[0], next(file for file, *_ in found if file != whole[0])
            raise CorruptError(
                f"tensor {name!r} is in {first!r} and in {second!r}, and no index selects one; "
                "move one of the two files out of the folder, or open one file alone"
            )
        shape = _extent(name, found)
        builder.tensor(name, found[0][1].dtype, shape)
        for file, entry, place_of in found:
            if entry.dtype != found[0][1].dtype:
                builder.tensor(name, entry.dtype, shape)  # raises, naming both
            match = _SHARD.fullmatch(file.rpartition("/")[2])
            rank = int(match[1]) - 1 if match else -1
            at = place_of or (0,) * len(shape)
            builder.chunk(name, at, entry.shape, file, entry.start, entry.stop, rank=rank)
    return _ranks(list(headers), notes)


def _extent(name: str, found: Sequence[tuple[str, Entry, tuple[int, ...] | None]]) -> tuple[int, ...]:
    dims = {len(entry.shape) for _, entry, _ in found}
    if len(dims) > 1:
        raise CorruptError(
            f"tensor {name!r} has pieces of {sorted(dims)} dimensions; the files are from different saves"
        )
    ends = [
        [at + size for at, size in zip(offsets or (0,) * len(entry.shape), entry.shape, strict=True)]
        for _, entry, offsets in found
    ]
    return tuple(max(axis) for axis in zip(*ends, strict=True))


def _ranks(files: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return facts about the ranks that wrote pieces, from the file names."""
    matches = [match for file in files if (match := _SHARD.fullmatch(file.rpartition("/")[2]))]
    if not matches:
        return {}
    ranks = {int(match[1]) for match in matches}
    counts = {int(match[3]) for match in matches}
    if max(ranks) > 1 << 20:
        raise CorruptError(f"file {matches[-1][0]!r} has the rank number {max(ranks):,}; no job is that large")
    absent = [number for number in range(1, max(ranks) + 1) if number not in ranks]
    reason = ""
    if absent:
        names = some_of([f"shard-{n:05d}" for n in absent], MAX_NAMED)
        reason = f"{len(absent)} of {max(ranks)} ranks have no file ({names})"
    elif len(counts) > 1:
        reason = f"file names disagree on the number of files ({', '.join(map(str, sorted(counts)))})"
    if reason:
        notes.append(f"{reason}: those files are lost, or had nothing to store; shapes are lower bounds")
    else:
        notes.append("this layout stores no global shapes: they are inferred from the pieces that exist")
    return {"writers": max(ranks), "ranks_absent": [number - 1 for number in absent[:1000]]}


# ---- the rest --------------------------------------------------------------------------------------------


def _adapter(place: Place) -> dict[str, Any]:
    if place.file is not None or "adapter_config.json" not in place.files:
        return {}
    config = place.read_json("adapter_config.json")
    if not isinstance(config, dict):
        raise CorruptError("'adapter_config.json' is not a JSON object")
    expected = (
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "target_modules",
        "use_dora",
        "use_rslora",
    )
    return {"peft": {name: config[name] for name in expected if name in config}}


def _texts(place: Place, catalog: Catalog) -> dict[str, Any]:
    files = [name for name in catalog.metadata_files if name.endswith(SUFFIX) or name == place.file]
    texts = {name: parse(place, name, cut=True).metadata for name in files}
    return dict(texts[place.file]) if place.file in texts else dict(texts)


def _note(notes: list[str], noun: str, rest: str, names: Sequence[str]) -> None:
    if names:
        notes.append(f"{plural(len(names), noun)}{rest}: {some_of(names, MAX_NAMED)}")


FORMAT = Format(
    name="safetensors",
    title="safetensors",
    marks="*.safetensors, *.index.json",
    read_from="safetensors 0.8, peft 0.21",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    recipes=recipes,
    missing=missing,
    is_collection=is_collection,
    single_file=True,
    suffixes=(SUFFIX,),
    loose=True,
    subfolders=(SHARDED,),
    own_bytes=True,
)
