"""The formats that are written: how each turns a selection into file maps, and what each can store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.core.near import did_you_mean
from workbench.errors import UsageError
from workbench.export.filemap import FileMap
from workbench.export.moving.pieces import whole_pieces
from workbench.export.selection import ExportSelection
from workbench.export.writers.bytecheckpoint import bytecheckpoint_files
from workbench.export.writers.bytecheckpoint_names import stored_names
from workbench.export.writers.dcp import dcp_files
from workbench.export.writers.ranks import safetensors_ranks, torch_ranks
from workbench.export.writers.safetensors import one_file, shards
from workbench.export.writers.torch import torch_file
from workbench.export.writers.torch_dist import torch_dist_files, torch_dist_notes
from workbench.formats import FORMATS


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of the writers in addition to the selection.

    Attributes:
        name: name of the target, if it is one file.
        max_shard_size: bytes of tensors per file.
    """

    name: str
    max_shard_size: int


@dataclass(frozen=True, slots=True)
class ExportWriter:
    """A target format.

    Attributes:
        title: its usual name.
        reader: the reader that opens it again.
        maps: its files.
        is_folder: whether a target of this name is a folder.
        objects: it has a place for non-tensor state.
        tensors_in_objects: also if tensors are part of it.
        passes: the small files of a Hugging Face model go with it.
        merges: its reader merges the files of all ranks; otherwise each file is a separate checkpoint.
        marker: regular expression of the files without which a folder is not a checkpoint: the last in a store.
        notes: what remains to be done before the framework can load it.
        keys: the name of each tensor of a selection when the target is opened.
    """

    title: str
    reader: str
    maps: Callable[[ExportSelection, Options], list[FileMap]]
    is_folder: Callable[[str, ExportSelection], bool]
    objects: bool
    tensors_in_objects: bool = False
    passes: bool = False
    merges: bool = True
    marker: str = "$."
    notes: Callable[[ExportSelection], list[str]] = lambda selection: []
    keys: Callable[[ExportSelection], list[str]] = lambda selection: selection.names


#: The format of a file that a target's name stands for.
FILES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_BY_CONTENT = (".npz", ".npy", ".h5")  #: of formats whose readers do not rely on names


def target_format(name: str, format: str | None, *, sharded: bool) -> str:
    """Return the format of a target: the requested one, or else the one that its name stands for.

    Args:
        sharded: whether the target has one file for each rank.

    Raises:
        UsageError: no writer has that name, or the file name implies another format.
    """
    if format is not None and format not in WRITERS:
        hint = did_you_mean(format, WRITERS)
        raise UsageError(f"cannot write format {format!r}; choose {', '.join(WRITERS)}{hint}")
    ending = os.path.splitext(name)[1]
    known = {*_BY_CONTENT, *(suffix for one in FORMATS.values() if one.single_file for suffix in one.suffixes)}
    if name.endswith(tuple(known - FILES.keys())):
        raise UsageError(f"{name!r}: {ending} files cannot be written; name a folder, NAME.safetensors or NAME.pt")
    meant = FILES.get(ending)
    if meant is None:
        return format or "safetensors"
    if sharded:
        raise UsageError(f"{name!r}: with a mesh, the target is a folder with a file for each rank; omit {ending!r}")
    if format not in (None, meant):
        raise UsageError(
            f"{name!r} is the name of a file of the format {meant}, not of {format}; choose another name or format"
        )
    return meant


def _safetensors(selection: ExportSelection, options: Options) -> list[FileMap]:
    if selection.target is not None:
        return safetensors_ranks(selection)
    pieces = whole_pieces(selection)
    if options.name.endswith(".safetensors"):
        return [one_file(pieces, options.name)]
    return shards(pieces, max_shard_size=options.max_shard_size)


def _torch(selection: ExportSelection, options: Options) -> list[FileMap]:
    if selection.target is not None:
        return torch_ranks(selection)
    return [torch_file(whole_pieces(selection), options.name, objects=selection.objects)]


def _always(name: str, selection: ExportSelection) -> bool:
    return True


WRITERS: Mapping[str, ExportWriter] = {
    "safetensors": ExportWriter(
        "safetensors (Hugging Face)",
        "safetensors",
        _safetensors,
        lambda name, selection: selection.target is not None or not name.endswith(".safetensors"),
        objects=False,
        passes=True,
        marker=r".*\.safetensors\.index\.json",
    ),
    "torch": ExportWriter(
        "torch.save",
        "torch_save",
        _torch,
        lambda name, selection: selection.target is not None,
        objects=True,
        merges=False,
    ),
    "dcp": ExportWriter(
        "DCP (torch.distributed.checkpoint)",
        "dcp",
        lambda selection, options: dcp_files(selection),
        _always,
        objects=True,
        tensors_in_objects=True,
        marker=r"\.metadata",
    ),
    "bytecheckpoint": ExportWriter(
        "ByteCheckpoint",
        "bytecheckpoint",
        lambda selection, options: bytecheckpoint_files(selection),
        _always,
        objects=True,
        tensors_in_objects=True,
        marker=r".*/\.metadata",
        keys=stored_names,
    ),
    "torch_dist": ExportWriter(
        "torch_dist (Megatron-core)",
        "megatron_dist",
        lambda selection, options: torch_dist_files(selection),
        _always,
        objects=True,
        tensors_in_objects=True,
        marker=r"\.metadata|metadata\.json",
        notes=torch_dist_notes,
    ),
}
