"""Make a save visible in one step, whatever the folder held before; remove what it replaces.

::

    step-10/  .metadata ──► __0_0.1f3a09bc.distcp  __1_0.1f3a09bc.distcp        the checkpoint until now
              __0_0.77c1e05d.distcp  __1_0.77c1e05d.distcp                      written and synced by the ranks
              .workbench-manifest.<digest>.json                                 of the new .metadata
              .metadata ──► __0_0.77c1e05d.distcp  …                            replaced: this is the commit
              .workbench-manifest.json                                          renamed
              __0_0.1f3a09bc.distcp  …                                          removed

Data files have the save's id in their names, so a save never writes into a file that a ``.metadata`` refers to. A
death at any point leaves the old checkpoint or the new one, each with the manifest that describes it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_file import INSIDE, encode, is_pending, pending, write_whole
from workbench.core.place import Place
from workbench.errors import WorkbenchError
from workbench.export.atomic.owners import DAY, locked
from workbench.export.atomic.writing import sync_folder, writing
from workbench.formats.dcp.metadata import decode

__all__ = ["METADATA", "commit", "data_file", "generation", "remove_generation"]

METADATA = ".metadata"
_TAIL = 4096  #: bytes at the end of the metadata that have the id of the save
_DATA = re.compile(r"__\d+_\d+(\.[0-9a-f]{8})?\.distcp")
_OURS = re.compile(r"__\d+_\d+\.[0-9a-f]{8}\.distcp")
_TEMPORARY = re.compile(r"\.(\.metadata|__\d+\.metadata|\.workbench-manifest\..*json)\.\w+\.tmp")


def data_file(rank: int, number: int, save_id: str) -> str:
    """Return the name of a data file; torch's, with the id of the save."""
    return f"__{rank}_{number}.{generation(save_id)}.distcp"


def commit(folder: str, name: str, metadata: bytes, manifest: Manifest | None, files: Iterable[str]) -> None:
    """Replace the checkpoint in a folder by the one whose data files are there already.

    Args:
        name: of the metadata file.
        metadata: its bytes.
        manifest: of the new checkpoint. Without one, an older manifest is removed.
        files: names of the new checkpoint's data files.

    Raises:
        WriteError: the system refuses; the old checkpoint is as it was.
    """
    with locked(folder):
        replaced = _referenced(folder, name)
        if manifest is not None:
            waiting = os.path.join(folder, pending(metadata))
            with writing(INSIDE):
                write_whole(encode(manifest), waiting, "a manifest")
        elif os.path.lexists(os.path.join(folder, INSIDE)):
            with writing(INSIDE):
                os.unlink(os.path.join(folder, INSIDE))
        with writing(name):
            write_whole(metadata, os.path.join(folder, name), "the metadata")
        # Visible from here on. What fails now leaves files behind, which the next save removes.
        with suppress(OSError):
            if manifest is not None:
                os.replace(waiting, os.path.join(folder, INSIDE))
            left = _abandoned(folder) if name == METADATA else set()  # else other ranks' metadata refers to files, too
            for old in (replaced | left) - set(files):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, old))
            sync_folder(folder)


def remove_generation(pid: int, folder: str, name: str, save_id: str) -> None:
    """Remove all ranks' data files of a save, unless the folder's metadata is that save's.

    Only the process that would commit the save may do so: another one cannot know that it does not.

    Args:
        pid: the process that set the save up; nothing is done in a fork of it.
    """
    if pid != os.getpid():
        return
    with suppress(OSError):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as handle:
                handle.seek(max(0, os.path.getsize(path) - _TAIL))
                if save_id.encode() in handle.read():
                    return
        for one in os.scandir(folder):
            if _OURS.fullmatch(one.name) and one.name.split(".")[1] == generation(save_id):
                with suppress(FileNotFoundError):
                    os.unlink(one.path)


def generation(save_id: str) -> str:
    """Return the part of a save's id that is in the names of its files."""
    return save_id.replace("-", "")[:8]


def _referenced(folder: str, name: str) -> set[str]:
    """Names of the data files of the checkpoint that is there; none if its metadata cannot be read."""
    if not os.path.isfile(os.path.join(folder, name)):
        return set()
    try:
        found = decode(Place(folder).read(name), what=repr(name)).files
    except (WorkbenchError, OSError):
        return set()
    return {one for one in found if _DATA.fullmatch(one)}  # a path to anything else is not followed


def _abandoned(folder: str) -> set[str]:
    """Files of saves that did not finish. A young one may belong to another job that is saving into this folder."""
    found = set()
    for entry in os.scandir(folder):
        ours = _OURS.fullmatch(entry.name) or is_pending(entry.name) or _TEMPORARY.fullmatch(entry.name)
        if ours and time.time() - entry.stat(follow_symlinks=False).st_mtime > DAY:
            found.add(entry.name)
    return found
