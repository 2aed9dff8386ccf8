"""Make a save visible in one step, whatever the folder held before; remove what it replaces.

::

    step-10/  .metadata ──► __0_0.1f3a09bc.distcp  __1_0.1f3a09bc.distcp        the existing checkpoint
              __0_0.77c1e05d.distcp  __1_0.77c1e05d.distcp                      written and synced by the ranks
              .workbench-manifest.<digest>.json                                 of the new .metadata
              .metadata ──► __0_0.77c1e05d.distcp  …                            replaced: this is the commit
              .workbench-manifest.json                                          renamed
              __0_0.1f3a09bc.distcp  …                                          removed

Data files have the save's id in their names, so a save never writes into a file that a ``.metadata`` refers to. A
crash at any point leaves the old checkpoint or the new one, each with the manifest that describes it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_file import INSIDE, encode, is_pending, pending, write_whole
from workbench.core.place import Place
from workbench.dcp.outputs import DirectOutput, DiskOutput, Output
from workbench.errors import WorkbenchError
from workbench.export.atomic.owners import DAY, locked
from workbench.export.atomic.writing import sync_folder, writing
from workbench.formats.dcp.metadata import decode

METADATA = ".metadata"
TAIL = 4096  #: bytes at the end of the metadata that contain the id of the save
_DATA = re.compile(r"__\d+_\d+(\.[0-9a-f]{8})?\.distcp")
_OURS = re.compile(r"__\d+_\d+\.[0-9a-f]{8}\.distcp")
_TEMPORARY = re.compile(r"\.(\.metadata|__\d+\.metadata|\.workbench-manifest\..*json)\.\w+\.tmp")


def data_file(rank: int, number: int, save_id: str) -> str:
    """Return the name of a data file; torch's, with the id of the save."""
    return f"__{rank}_{number}.{generation(save_id)}.distcp"


class SaveFolder(Protocol):
    """Where a save goes: :class:`DiskFolder`, or :class:`workbench.dcp.store.StoreFolder`.

    Attributes:
        shown: its path or URL, for messages and comparisons.
    """

    shown: str

    def make(self) -> None:
        """Create the folder if it does not exist."""

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def create(self, name: str, size: int) -> Output:
        """Begin a new file of about this many bytes; FileExistsError if the name is taken."""

    def sync(self) -> None:
        """Sync the names of its files to disk."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the files that exist, if possible."""

    def commit(self, name: str, metadata: bytes, manifest: Manifest | None, files: Iterable[str]) -> None:
        """Replace the checkpoint in the folder with the one whose data files are already there.

        Args:
            name: name of the metadata file.
            metadata: its bytes.
            manifest: manifest of the new checkpoint; without it, an older manifest is removed.
            files: names of the new checkpoint's data files.

        Raises:
            WriteError: the system or the store refuses; the old checkpoint is unchanged.
        """

    def remove_generation(self, name: str, save_id: str) -> None:
        """Remove all ranks' data files of a save, unless the folder's metadata is that save's.

        Only the process that would commit the save may do so: no other process can know that it will not.
        """


class DiskFolder:
    """A folder on a disk; with ``direct``, data files are written around the page cache."""

    def __init__(self, path: str, *, direct: bool = False) -> None:
        self.shown, self._direct = path, direct

    def make(self) -> None:
        """See :class:`SaveFolder`."""
        os.makedirs(self.shown, exist_ok=True)

    def has(self, name: str) -> bool:
        """See :class:`SaveFolder`."""
        return os.path.lexists(os.path.join(self.shown, name))

    def create(self, name: str, size: int) -> DiskOutput:
        """See :class:`SaveFolder`."""
        made = DirectOutput if self._direct else DiskOutput
        return made(os.path.join(self.shown, name), size)

    def sync(self) -> None:
        """See :class:`SaveFolder`."""
        sync_folder(self.shown)

    def remove(self, names: Iterable[str]) -> None:
        """See :class:`SaveFolder`."""
        for name in names:
            with suppress(OSError):
                os.unlink(os.path.join(self.shown, name))

    def commit(self, name: str, metadata: bytes, manifest: Manifest | None, files: Iterable[str]) -> None:
        """See :class:`SaveFolder`."""
        folder = self.shown
        with locked(folder):
            replaced = self._referenced(name)
            if manifest is not None:
                waiting = os.path.join(folder, pending(metadata))
                with writing(INSIDE):
                    write_whole(encode(manifest), waiting, "a manifest")
            elif self.has(INSIDE):
                with writing(INSIDE):
                    os.unlink(os.path.join(folder, INSIDE))
            with writing(name):
                write_whole(metadata, os.path.join(folder, name), "the metadata")
            # Visible from here on. Failures from now on leave files behind, which the next save removes.
            with suppress(OSError):
                if manifest is not None:
                    os.replace(waiting, os.path.join(folder, INSIDE))
                    os.utime(os.path.join(folder, INSIDE))  # newer than all that it describes, as its readers require
                # without collectives, other ranks' metadata refers to files, too
                left = abandoned(self._ages()) if name == METADATA else set()
                for old in (replaced | left) - set(files):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, old))
                sync_folder(folder)

    def remove_generation(self, name: str, save_id: str) -> None:
        """See :class:`SaveFolder`."""
        with suppress(OSError):
            path = os.path.join(self.shown, name)
            if os.path.isfile(path):
                with open(path, "rb") as handle:
                    handle.seek(max(0, os.path.getsize(path) - TAIL))
                    if save_id.encode() in handle.read():
                        return
            self.remove(of_generation(os.listdir(self.shown), save_id))

    def _referenced(self, name: str) -> set[str]:
        """Return the names of the existing checkpoint's data files; empty if its metadata cannot be read."""
        if not os.path.isfile(os.path.join(self.shown, name)):
            return set()
        try:
            return referenced(Place(self.shown).read(name), name)
        except (WorkbenchError, OSError):
            return set()

    def _ages(self) -> Iterator[tuple[str, float]]:
        for entry in os.scandir(self.shown):
            yield entry.name, entry.stat(follow_symlinks=False).st_mtime


def generation(save_id: str) -> str:
    """Return the part of a save's id that is in the names of its files."""
    return save_id.replace("-", "")[:8]


def of_generation(names: Iterable[str], save_id: str) -> list[str]:
    """Return the data files of a save among these names."""
    return [name for name in names if _OURS.fullmatch(name) and name.split(".")[1] == generation(save_id)]


def referenced(metadata: bytes, name: str) -> set[str]:
    """Return the names of the data files that a metadata file refers to; a path to anything else is not followed.

    Raises:
        OpenError: it cannot be decoded.
    """
    return {one for one in decode(metadata, what=repr(name)).files if _DATA.fullmatch(one)}


def abandoned(ages: Iterable[tuple[str, float]]) -> set[str]:
    """Return the files of unfinished saves among names and the times when they were last written.

    A recent file may belong to another job that is saving into this folder.
    """
    found = set()
    for name, written in ages:
        ours = _OURS.fullmatch(name) or is_pending(name) or _TEMPORARY.fullmatch(name)
        if ours and time.time() - written > DAY:
            found.add(name)
    return found
