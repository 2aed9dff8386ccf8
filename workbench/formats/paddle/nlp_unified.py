"""PaddleNLP's unified checkpoint: safetensors of full (TP-merged) tensors, in three groups of files.

::

    model-00001-of-00004.safetensors           "llama.norm.weight"                  weights; bfloat16 as U16
    optimizer-00001-of-00008.safetensors       "llama.norm.weight/moment1_0"        file number ≠ global rank
    master_weights-00001-of-00008.safetensors  "llama.norm.weight"                  float32
    *.safetensors.index.json                   weight_map; for the optimizer: master_weights, ckpt_quant_stage …

    ckpt_quant_stage O1:   moment1 int8 + "…/moment1_0@scales";  moment2 uint8 of 1/(√v + ε), @min_scales, @max_scales
                     O2:   both as 4 bits of one int8 under moment2's key; no moment1 key

The index is written before quantizing: weight_map lacks the scales, and with O2 some of its names are in no file.
Keys of master weights get the prefix ``master_weights/``. The files are written by numpy, which stores bfloat16 as U16.
Source: PaddleNLP 3.0.0b4 ``trainer/unified_checkpoint``, ``quantization/unified_checkpoint_quantization.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.place import Place, lacking
from workbench.core.words import plural
from workbench.errors import CorruptError, IncompleteError
from workbench.formats.paddle import names as paddle_names
from workbench.formats.safetensors import header as safetensors_header
from workbench.formats.safetensors.header import Entry
from workbench.formats.safetensors.weight_index import WeightIndex, check_files, read_index

INDEX = ".safetensors.index.json"
GROUPS = {"model": "", "peft_model": "", "optimizer": "", "master_weights": "master_weights/"}  #: stem → key prefix
MAX_NAMED = 3
_FILE = re.compile(r"(model|peft_model|optimizer|master_weights)(?:-(\d+)-of-(\d+))?\.safetensors")


def groups(place: Place) -> dict[str, list[str]]:
    """Return the files of each group that exists."""
    found: dict[str, list[str]] = {}
    for name in place.files:
        if match := _FILE.fullmatch(name):
            found.setdefault(match[1], []).append(name)
        elif name.endswith(INDEX) and name.removesuffix(INDEX) in GROUPS:
            found.setdefault(name.removesuffix(INDEX), [])
    return found


def read(builder: CatalogBuilder, place: Place, notes: list[str]) -> None:
    """Declare every tensor of the three groups.

    Raises:
        IncompleteError, MissingFileError: files are missing that an index or the names of others require.
        CorruptError: an index and its files contradict each other.
    """
    present = groups(place)
    for stem, files in present.items():
        name = f"{stem}{INDEX}"
        index = WeightIndex(name, {})
        if name in place.files:
            index = read_index(place, name)
            builder.file(name, metadata=True)
        check_files(place, index, remedy="restore it, or use an earlier step")
        _all_there(index, stem, files)
        file_of: dict[str, str] = {}
        for file in sorted({*files, *index.files}):
            builder.file(file, metadata=True)
            for entry in safetensors_header.parse(place, file, cut=True).entries:
                if entry.name in file_of:
                    raise CorruptError(
                        f"tensor {entry.name!r} is in {file_of[entry.name]!r} and in {file!r}, which is ambiguous"
                    )
                file_of[entry.name] = file
                _declare(builder, stem, file, entry)
        _compare(index, stem, file_of, notes)
        if stem == "optimizer" and index.facts.get("master_weights") is True and "master_weights" not in present:
            notes.append(
                "the optimizer's index lists master weights, but their files are missing: after a save with "
                "skip_save_model_weight, the model's files hold them"
            )
    if "optimizer" not in present:
        notes.append("no optimizer state: a resume from here resets the optimizer")


def _all_there(index: WeightIndex, stem: str, files: list[str]) -> None:
    """Check that file numbers belong to one save and, without an index, are complete."""
    counts = {int(match[3]) for file in files if (match := _FILE.fullmatch(file)) and match[3]}
    if len(counts) > 1:
        raise CorruptError(
            f"names of files {stem!r} count {', '.join(map(str, sorted(counts)))} files: jobs of different sizes "
            "wrote to one folder; remove the older ones"
        )
    if counts and not index.weights:
        numbers = {int(match[2]) for file in files if (match := _FILE.fullmatch(file)) and match[2]}
        count = counts.pop()
        first = next((number for number in range(1, count + 1) if number not in numbers), None)
        if first is not None:
            lost = lacking(count - sum(1 <= number <= count for number in numbers), count, f"files {stem!r}")
            raise IncompleteError(
                f"{lost}, first {stem}-{first:05d}-of-{count:05d}, "
                f"and no {index.name!r} lists their contents: the save was interrupted; use an earlier step"
            )


def _declare(builder: CatalogBuilder, stem: str, file: str, entry: Entry) -> None:
    dtype = by_name("bfloat16") if entry.dtype.name == "uint16" else entry.dtype
    key = GROUPS[stem] + entry.name
    state = paddle_names.split_state(entry.name) if stem == "optimizer" else None
    if state is not None:
        fqn, role = state[0], state[1]
    elif stem == "optimizer":
        fqn, role = None, "other"
    elif stem == "master_weights":
        fqn, role = entry.name, "master"
    else:
        (fqn,), (role,) = paddle_names.resolve([entry.name], {entry.name: (entry.name,)}, {}, {})
    builder.tensor(key, dtype, entry.shape, fqn=fqn, role=role)
    builder.chunk(key, (0,) * len(entry.shape), entry.shape, file, entry.start, entry.stop)


def _compare(index: WeightIndex, stem: str, file_of: Mapping[str, str], notes: list[str]) -> None:
    weights = index.weights
    stage = index.facts.get("ckpt_quant_stage")
    quantised = stem == "optimizer" and isinstance(stage, str) and stage != "O0"
    elsewhere = [name for name, file in weights.items() if file_of.get(name) not in (file, None)]
    gone = [name for name in weights if name not in file_of]
    if elsewhere or (gone and not quantised):
        name = (elsewhere or gone)[0]
        found = f"it is in {file_of[name]!r}" if name in file_of else "no file of the group holds it"
        raise CorruptError(f"index {index.name!r} maps {name!r} to {weights[name]!r}, which lacks it; {found}")
    extra = [name for name in file_of if name not in weights and "@" not in name]
    if weights and extra:
        notes.append(f"{plural(len(extra), 'tensor')} not in {index.name!r}: {', '.join(map(repr, extra[:MAX_NAMED]))}")
    if quantised:
        scales = sum("@" in name for name in file_of)
        notes.append(
            f"the optimizer is quantized ({stage}) with {scales} scales: moment1 is int8 times its scale, and "
            "moment2 is not the second moment but uint8 of 1/(sqrt(v) + eps) between two scales"
            + (f"; {len(gone)} names of the index were merged into others" if gone else "")
        )
