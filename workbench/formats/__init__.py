"""On-disk formats: one module each, found by name and imported on first use.

A reader is a module with three functions::

    detect(place)               -> bool       from names and a few bytes; never raises for a stranger's folder
    read_catalog(place)         -> Catalog    from metadata only; no tensor byte is read
    read_objects(place, catalog) -> Mapping   the non-tensor state, decoded on access without executing anything

Readers do not know each other; layouts that combine several (``hf_trainer``) ask this registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from workbench.core import ziparchive
from workbench.core.catalog import Catalog
from workbench.core.near import did_you_mean
from workbench.core.place import Place
from workbench.errors import IncompleteError, MissingFileError, NotACheckpointError, OpenError, UsageError

__all__ = ["FORMATS", "Format", "Reader", "detect", "detect_or_raise", "read_forced", "reader"]


class Reader(Protocol):
    """What a format module offers."""

    def detect(self, place: Place) -> bool:
        """Whether the place looks like this format."""

    def read_catalog(self, place: Place) -> Catalog:
        """Columns of everything stored."""

    def read_objects(self, place: Place, catalog: Catalog) -> Mapping[str, Any]:
        """Non-tensor state by stored name."""


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the format table (``workbench formats``)."""

    name: str
    title: str
    marks: str
    read_from: str


#: In order of detection: a layout that contains another format comes before it.
FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format(
            "paddlenlp",
            "PaddleNLP checkpoint-N, fleet",
            "model_state*.pdparams, mp_TT_sharding_SS_pp_PP/",
            "paddlenlp 3.0.0b4",
        ),
        Format("hf_trainer", "Hugging Face Trainer checkpoint-N", "trainer_state.json", "transformers 5.23"),
        Format("accelerate", "accelerate save_state", "pytorch_model_fsdp_0/, optimizer_0/", "accelerate 1.15"),
        Format("megatron_dist", "Megatron-core torch_dist", "metadata.json, common.pt", "megatron-core 0.16 – 0.20"),
        Format("megatron_legacy", "Megatron-LM mp_rank folders", "mp_rank_TT[_PPP][_EEE]/", "megatron-core 0.16"),
        Format("deepspeed_universal", "DeepSpeed universal", "zero/NAME/fp32.pt", "deepspeed 0.19"),
        Format(
            "deepspeed",
            "DeepSpeed ZeRO 0 – 3, pipeline, MoE",
            "mp_rank_00_model_states.pt, …optim_states.pt",
            "deepspeed 0.3.15 – 0.19",
        ),
        Format("lightning", "Lightning checkpoint", "*.ckpt file, or folder with meta.pt", "lightning 2.6"),
        Format("bytecheckpoint", "ByteCheckpoint", "model/, optimizer/, extra_state/", "bytecheckpoint 0.0.2 – 0.0.3"),
        Format("vescale", "veScale (legacy)", "model/, optimizer/pp_R/", "veScale 2024, legacy/vescale"),
        Format("dcp", "PyTorch distributed checkpoint", ".metadata, __R_N.distcp", "torch 2.1 – 2.13"),
        Format("paddle_dist", "paddle.distributed", "N.metadata, R_N.distcp or .safetensors", "paddlepaddle 3.3"),
        Format("paddle_save", "paddle.save", ".pdparams, .pdopt, …", "paddlepaddle 3.3"),
        Format("safetensors", "safetensors", "*.safetensors, *.index.json", "safetensors 0.8, peft 0.21"),
        Format("torch_save", "torch.save", "zip, legacy or tar file", "torch 0.1 – 2.13"),
    )
}

_SAFETENSORS_ONLY = re.compile(
    r"model(-\d+(-of-\d+)?)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
_DCP_ONLY = re.compile(r"\.metadata|__\d+_\d+\.distcp")


def reader(name: str) -> Reader:
    """The module that reads a format.

    Raises:
        UsageError: no such format.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known are {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    return cast(Reader, import_module(f"workbench.formats.{name}"))


def detect(place: Place) -> str | None:
    """Name of the first format that recognises the place, or ``None``."""
    return _plain(place) or next((name for name in FORMATS if reader(name).detect(place)), None)


def _plain(place: Place) -> str | None:
    """The format of a folder that holds nothing but one format's files: told without importing every reader."""
    names = list(place.files)
    if place.file is not None or place.folders or not names:
        return None
    if all(_SAFETENSORS_ONLY.fullmatch(name) for name in names):
        return "safetensors" if any(name.endswith(".safetensors") for name in names) else None
    if ".metadata" in names and all(_DCP_ONLY.fullmatch(name) for name in names):
        head = place.read(".metadata", length=min(256, place.files[".metadata"].size))
        plain = b"torch.distributed.checkpoint.metadata" in head and b"bytecheckpoint" not in head
        return "dcp" if plain else None
    return None


#: Formats that can be a single file.
_OF_FILES = ("lightning", "paddle_save", "safetensors", "torch_save")


def detect_or_raise(place: Place) -> str:
    """As :func:`detect`, with an error that says what was looked for."""
    found = detect(place)
    if found is None:
        place.check()  # what was replaced meanwhile may have looked like nothing
        if other := _other(place):
            raise NotACheckpointError(f"{place.path!r} is {other}, which is not supported")
        if place.file is not None and not place.stat(place.file).size:
            raise NotACheckpointError(f"{place.path!r} is empty: it has 0 bytes")
        names = FORMATS if place.file is None else _OF_FILES
        looked = "; ".join(f"{name}: {FORMATS[name].marks}" for name in names)
        raise NotACheckpointError(f"{place.path!r} holds no checkpoint that we know. Looked for {looked}")
    return found


def read_forced(place: Place, name: str) -> Catalog:
    """The catalog of a place whose format the caller named.

    Raises:
        NotACheckpointError: it is of another format, or nothing of that format is there.
    """
    if reader(name).detect(place):
        return reader(name).read_catalog(place)
    found = detect(place)
    if found is None:
        try:
            catalog = reader(name).read_catalog(place)
            if catalog.keys or catalog.objects.keys:
                return catalog
        except (IncompleteError, MissingFileError):  # what a reader does not find, it takes for lost
            pass
    place.check()  # what was replaced meanwhile may have looked like nothing
    other = f"it looks like {found} ({FORMATS[found].title})" if found else f"looked for {FORMATS[name].marks}"
    raise NotACheckpointError(f"{place.path!r} is not a {name} checkpoint ({FORMATS[name].title}); {other}")


#: First bytes of files that are checkpoints or weights of other programs, and what they are.
_MAGIC = (
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)"),
    (b"\x93NUMPY", "a numpy array (.npy)"),
)
#: Records of zip archives that are such.
_RECORDS = (
    ("/archive_format", "a torch.export archive (.pt2)"),
    (".npy", "a numpy archive (.npz)"),
    ("model.weights.h5", "a Keras model"),
)


def _other(place: Place) -> str | None:
    """What a place is that is a checkpoint, but of a format that we do not read; ``None`` where nothing tells."""
    if place.file is None:
        if (
            "_CHECKPOINT_METADATA" in place.files
            or "manifest.ocdbt" in place.files
            or "ocdbt.process_0" in place.folders
        ):
            return "an Orbax checkpoint (JAX)"
        ggufs = [name for name in place.files if name.lower().endswith(".gguf")]
        return f"a folder of GGUF files (llama.cpp), such as {ggufs[0]!r}" if ggufs else None
    try:
        head = place.read(place.file, length=min(16, place.stat(place.file).size))
        if head.startswith(b"PK\x03\x04"):
            names = ziparchive.read_directory(place.window(place.file), what=repr(place.file)).records
            return next((what for end, what in _RECORDS if any(name.endswith(end) for name in names)), None)
    except OpenError:
        return None
    return next((what for mark, what in _MAGIC if head.startswith(mark)), None)
