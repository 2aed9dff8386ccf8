"""The formats that are written: how each turns a selection into file maps, and what it has a place for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.errors import UnsupportedFormatError
from workbench.reshard.moving.filemap import FileMap
from workbench.reshard.moving.pieces import whole_pieces
from workbench.reshard.selection import Selection
from workbench.reshard.writers.bytecheckpoint import bytecheckpoint_files
from workbench.reshard.writers.bytecheckpoint_names import stored_names
from workbench.reshard.writers.dcp import dcp_files
from workbench.reshard.writers.ranks import safetensors_ranks, torch_ranks
from workbench.reshard.writers.safetensors import one_file, shards
from workbench.reshard.writers.torch import torch_file
from workbench.reshard.writers.torch_dist import torch_dist_files, torch_dist_notes

__all__ = ["WRITERS", "Options", "Writer", "writer"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the writers are told beside the selection.

    Attributes:
        name: of the target, where it is one file.
        max_shard_size: bytes of tensors a file.
    """

    name: str
    max_shard_size: int


@dataclass(frozen=True, slots=True)
class Writer:
    """A target format.

    Attributes:
        reader: the reader that opens it again.
        maps: its files.
        is_folder: whether a target of this name is a folder.
        objects: it has a place for non-tensor state.
        tensors_in_objects: also where tensors are part of it.
        passes: the small files of a Hugging Face model go with it.
        merges: its reader merges the files of all ranks; otherwise each file is a checkpoint of its own.
        notes: what is left to be done before the framework loads it.
        keys: what each tensor of a selection is called when the target is opened.
    """

    reader: str
    maps: Callable[[Selection, Options], list[FileMap]]
    is_folder: Callable[[str, Selection], bool]
    objects: bool
    tensors_in_objects: bool = False
    passes: bool = False
    merges: bool = True
    notes: Callable[[Selection], list[str]] = lambda selection: []
    keys: Callable[[Selection], list[str]] = lambda selection: selection.names


def writer(format: str) -> Writer:
    """The writer of a format.

    Raises:
        UnsupportedFormatError: none is.
    """
    if format not in WRITERS:
        raise UnsupportedFormatError(f"cannot write format {format!r}; choose {', '.join(WRITERS)}")
    return WRITERS[format]


def _safetensors(selection: Selection, options: Options) -> list[FileMap]:
    if selection.target is not None:
        return safetensors_ranks(selection)
    pieces = whole_pieces(selection)
    if options.name.endswith(".safetensors"):
        return [one_file(pieces, options.name)]
    return shards(pieces, max_shard_size=options.max_shard_size)


def _torch(selection: Selection, options: Options) -> list[FileMap]:
    if selection.target is not None:
        return torch_ranks(selection)
    return [torch_file(whole_pieces(selection), options.name, objects=selection.objects)]


def _always(name: str, selection: Selection) -> bool:
    return True


WRITERS: Mapping[str, Writer] = {
    "safetensors": Writer(
        "safetensors",
        _safetensors,
        lambda name, selection: selection.target is not None or not name.endswith(".safetensors"),
        objects=False,
        passes=True,
    ),
    "torch": Writer(
        "torch_save", _torch, lambda name, selection: selection.target is not None, objects=True, merges=False
    ),
    "dcp": Writer(
        "dcp", lambda selection, options: dcp_files(selection), _always, objects=True, tensors_in_objects=True
    ),
    "bytecheckpoint": Writer(
        "bytecheckpoint",
        lambda selection, options: bytecheckpoint_files(selection),
        _always,
        objects=True,
        tensors_in_objects=True,
        keys=stored_names,
    ),
    "torch_dist": Writer(
        "megatron_dist",
        lambda selection, options: torch_dist_files(selection),
        _always,
        objects=True,
        tensors_in_objects=True,
        notes=torch_dist_notes,
    ),
}
