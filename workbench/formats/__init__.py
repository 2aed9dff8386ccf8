"""On-disk formats: one record each (:class:`Format`), found by name; a reader's module is imported on first use.

A reader is a module that exports its record as ``FORMAT``. Other packages register theirs in the entry point group
``workbench.formats``: the entry point has the format's name and loads its record (docs/architecture.md shows one).
Their ``detect`` is called only if no built-in format recognizes a place, or if the one that does is in ``before``.

Readers do not import each other; layouts that combine several formats (``hf_trainer``) look them up here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from workbench.core import ziparchive
from workbench.core.catalog import Catalog
from workbench.core.near import did_you_mean
from workbench.core.place import UNFINISHED, Place
from workbench.core.words import some_of
from workbench.errors import (
    IncompleteError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    UnsafeError,
    UsageError,
    WorkbenchError,
)
from workbench.formats.format import Format

__all__ = [
    "FORMATS",
    "GROUP",
    "Format",
    "detect",
    "missing",
    "not_recognised",
    "read_forced",
    "reader",
    "record",
    "third_party",
    "unfinished",
]

GROUP = "workbench.formats"  #: the entry point group
GUARDED = ("read_catalog", "read_objects", "missing", "stored_step", "is_collection", "recipes")
#: Built-in formats and their modules, in order of detection: a layout that contains another format comes first.
MODULES = {
    name: f"workbench.formats.{module}"
    for name, module in (
        ("paddlenlp", "paddle.nlp"),
        ("hf_trainer", "layered.hf_trainer"),
        ("accelerate", "layered.accelerate"),
        ("colossalai", "layered.colossalai"),
        ("orbax", "zarr.orbax"),
        ("zarr", "zarr.reader"),
        ("megatron_dist", "megatron.dist"),
        ("megatron_legacy", "megatron.legacy"),
        ("megatron_local", "megatron.local"),
        ("deepspeed_universal", "deepspeed.universal"),
        ("deepspeed", "deepspeed.reader"),
        ("lightning", "layered.lightning"),
        ("bytecheckpoint", "bytecheckpoint.reader"),
        ("vescale", "vescale"),
        ("dcp", "dcp.reader"),
        ("torch_checkpointing", "torch_checkpointing.reader"),
        ("paddle_dist", "paddle.dist"),
        ("paddle_save", "paddle.save"),
        ("safetensors", "safetensors.reader"),
        ("gguf", "gguf.reader"),
        ("torch_save", "torch.save"),
        ("nemo", "layered.nemo"),
        ("tensorflow", "tensorflow"),
        ("flax", "flax"),
        ("onnx", "onnx"),
        ("npz", "npz"),
        ("keras", "keras.reader"),
    )
}


class _Table(Mapping[str, Format]):
    """Name → record: the built-in ones, then those of other packages."""

    def __getitem__(self, name: str) -> Format:
        return _built_in(name) if name in MODULES else third_party()[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*MODULES, *third_party()])

    def __len__(self) -> int:
        return len(MODULES) + len(third_party())


FORMATS: Mapping[str, Format] = _Table()
_SAFETENSORS_ONLY = re.compile(
    r"model(-\d+(-of-\d+)?)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
_DCP_ONLY = re.compile(r"\.metadata|__\d+_\d+(\.[0-9a-f]{8})?\.distcp")


@cache
def _built_in(name: str) -> Format:
    found: Format = import_module(MODULES[name]).FORMAT
    return found


@cache
def third_party() -> dict[str, Format]:
    """Return the records of other packages by name. One that cannot be loaded is skipped with a warning."""
    from importlib.metadata import entry_points

    found: dict[str, Format] = {}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
            if not isinstance(loaded, Format) or loaded.name != point.name:
                raise TypeError(f"{point.value} is not a Format with that name")
            if point.name in MODULES or point.name in found:
                raise ValueError("a format of that name already exists")
            guarded: dict[str, Any] = {field: _guarded(loaded, field) for field in GUARDED}
            found[point.name] = replace(loaded, **guarded)
        except Exception as error:  # another package's module may raise anything
            _warn(point.name, f"cannot be loaded from {point.value!r}", error)
    return found


def _guarded(other: Format, field: str) -> Callable[..., Any]:
    """Wrap a function of another package's record: its exceptions become an `OpenError`."""
    function = getattr(other, field)

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except WorkbenchError:
            raise
        except Exception as error:
            raise OpenError(
                f"format {other.name!r} of another package failed in {field}: {type(error).__name__}: {error}"
            ) from error

    return call


def reader(name: str) -> Format:
    """Return the record of the format that a caller named.

    Raises:
        UsageError: the format does not exist.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; known are {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def record(name: str) -> Format:
    """Return the record of a checkpoint's format, or one with default fields for a name without a reader."""
    return FORMATS.get(name) or Format(name=name)


def detect(place: Place) -> str | None:
    """Return the name of the first format that recognizes the place, or ``None``."""
    if plain := _plain(place):
        return plain
    found = _safetensors_file(place) or next((name for name in MODULES if FORMATS[name].detect(place)), None)
    others = (other for other in third_party().values() if found is None or found in other.before)
    return next((other.name for other in others if _claims(other, place)), found)


def _claims(other: Format, place: Place) -> bool:
    """Return whether another package's format recognizes a place. If its ``detect`` raises, it does not."""
    try:
        return bool(other.detect(place))
    except Exception as error:
        _warn(other.name, f"failed at {place.path!r}", error)
        return False


def _warn(name: str, what: str, error: Exception) -> None:
    warnings.warn(f"format {name!r} of another package {what}: {type(error).__name__}: {error}", stacklevel=4)


def _plain(place: Place) -> str | None:
    """Return the format of a file or folder that is plainly of one, without importing every reader."""
    if place.file is not None:
        return _safetensors_file(place) if _SAFETENSORS_ONLY.fullmatch(place.file) else None
    names = list(place.files)
    if place.folders or not names:
        return None
    if all(_SAFETENSORS_ONLY.fullmatch(name) for name in names):
        return "safetensors" if any(name.endswith(".safetensors") for name in names) else None
    if ".metadata" in names and all(_DCP_ONLY.fullmatch(name) for name in names):
        head = place.read(".metadata", length=min(256, place.files[".metadata"].size))
        plain = b"torch.distributed.checkpoint.metadata" in head and b"bytecheckpoint" not in head
        return "dcp" if plain else None
    return None


def _safetensors_file(place: Place) -> str | None:
    """Return the format of a file that has the name and the beginning of safetensors: no other reader here takes it."""
    if place.file is None or not place.file.endswith(".safetensors"):
        return None
    try:
        size = place.stat(place.file).size
        return "safetensors" if size > 8 and place.read(place.file, length=9)[8:] == b"{" else None
    except WorkbenchError:  # its reader reports what is wrong
        return None


def missing(place: Place, format: str) -> str:
    """Describe what a checkpoint of this format lacks; empty if its commit marker and every file that it lists exist.
    Tensors are not checked; ``verify`` does that.

    Raises:
        WorkbenchError: a file that is needed to decide cannot be read, or does not begin like the format, so the
            checkpoint is not complete either.
    """
    if why := unfinished(place):
        return why
    entry = record(format)
    endings = entry.suffixes or tuple(end for other in FORMATS.values() for end in other.suffixes)
    return entry.missing(place) or _leading_out(place, endings)


def unfinished(place: Place) -> str:
    """Return why a folder whose export was interrupted, or is under way, does not count; empty otherwise."""
    if place.file is not None or UNFINISHED not in place.files:
        return ""
    return (
        f"an export into {place.path!r} is under way or was interrupted ({UNFINISHED} says so): "
        "run it again with resume, or use another checkpoint"
    )


def _leading_out(place: Place, endings: tuple[str, ...]) -> str:
    """Return why a data file that is a symbolic link out of the checkpoint is refused; empty if there is none."""
    for name in place.files:
        if name.endswith(endings) and place.is_link(name):
            try:
                place.stat(name)
            except UnsafeError as error:
                return str(error)
    return ""


def not_recognised(place: Place) -> OpenError:
    """Return the error for a place that no format recognizes: an export has just begun there, or what was looked for.

    Raises:
        ChangedError: the place was replaced in the meantime, which may be why no format recognized it.
    """
    place.check()
    if why := unfinished(place):
        return IncompleteError(why)
    if other := _other(place):
        return NotACheckpointError(f"{place.path!r} is {other}")
    if place.file is not None and not place.stat(place.file).size:
        return NotACheckpointError(f"{place.path!r} is empty: it has 0 bytes")
    names = [place.file] if place.file is not None else [*(f"{one}/" for one in place.folders), *place.files]
    if not names:
        return NotACheckpointError(f"{place.path!r} is empty: it has no files")
    held = "" if place.file is not None else f": it has {some_of(names)}"
    return NotACheckpointError(
        f"{place.path!r} does not hold a checkpoint in a known format{held}; `workbench formats` shows how each one is "
        "recognised"
    )


def read_forced(place: Place, name: str) -> Catalog:
    """Read the catalog of a place whose format the caller named.

    Raises:
        NotACheckpointError: the place has another format, or holds nothing of that format.
    """
    if reader(name).detect(place):
        return FORMATS[name].read_catalog(place)
    found = detect(place)
    if found is None:
        try:
            catalog = FORMATS[name].read_catalog(place)
            if catalog.keys or catalog.objects.keys:
                return catalog
        except (IncompleteError, MissingFileError):  # a reader reports missing files as lost
            pass
    place.check()  # a place that was replaced meanwhile may not have been recognized
    other = f"it looks like {found} ({FORMATS[found].title})" if found else f"looked for {FORMATS[name].marks}"
    raise NotACheckpointError(f"{place.path!r} is not a {name} checkpoint ({FORMATS[name].title}); {other}")


#: Records of zip archives → the kind of archive.
_RECORDS = (("/archive_format", "a torch.export archive (.pt2), which is not supported"),)
#: Beginnings of files → what they are.
_HEADS = (
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ\x00", "compressed with xz: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"\x80", "a pickle, and not one of torch.save: it could only be read by executing it"),
)


def _other(place: Place) -> str | None:
    """Describe a file of a known kind that cannot be read; ``None`` if it is not recognized."""
    if place.file is None:
        return None
    try:
        head = place.read(place.file, length=min(16, place.stat(place.file).size))
        if not head.startswith(b"PK\x03\x04"):
            return next((what for start, what in _HEADS if head.startswith(start)), None)
        names = ziparchive.read_directory(place.window(place.file), what=repr(place.file)).records
    except OpenError:
        return None
    return next((what for end, what in _RECORDS if any(name.endswith(end) for name in names)), None)
