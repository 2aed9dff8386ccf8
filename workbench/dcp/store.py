"""Make a save visible in one step in a store, which cannot rename, and remove what it replaces.

::

    s3://bucket/run/step-10/  .metadata ──► __0_0.1f3a09bc.distcp  …      the existing checkpoint
                              __0_0.77c1e05d.distcp  …                    sent by the ranks while they write it
                              .workbench-manifest.<digest>.json           of the new .metadata
                              .metadata ──► __0_0.77c1e05d.distcp  …      replaced, if it is still the one that was read
                              __0_0.1f3a09bc.distcp  …                    removed, with the older manifest

The manifest keeps its name with the digest: copying it to another one would be a second step, and of two jobs that save
into one folder, one could undo the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.manifest_file import INSIDE, encode, pending
from workbench.core.remote.destination import Destination
from workbench.core.remote.objects import TakenError
from workbench.dcp.commit import METADATA, TAIL, abandoned, of_generation, referenced
from workbench.dcp.outputs import StoreOutput
from workbench.errors import WorkbenchError, WriteError

TRIES = 20  #: maximum number of other saves that become visible while one tries to


class StoreFolder:
    """A folder of objects; see :class:`workbench.dcp.commit.SaveFolder` for the methods."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        """Connect.

        Raises:
            UsageError: the scheme cannot be written to, or the URL names no folder.
            MissingExtraError: the library that knows the scheme is not installed.
        """
        self._to = Destination(url, options, "a save")
        self.shown = self._to.shown

    def make(self) -> None:
        """Do nothing: a store has no folders to make."""

    def has(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return self._to.stat(self._key(name)) is not None

    def create(self, name: str, size: int) -> StoreOutput:
        """Begin to send an object of about this many bytes."""
        if self.has(name):
            raise FileExistsError(name)
        return StoreOutput(self._to, self._key(name), size)

    def sync(self) -> None:
        """Do nothing: a complete object is durable."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the objects that exist, if the store permits it."""
        with suppress(WorkbenchError):
            self._to.remove([self._key(name) for name in names])

    def commit(self, name: str, metadata: bytes, manifest: Manifest | None, files: Iterable[str]) -> None:
        """Replace the checkpoint with the one whose data objects already exist."""
        waiting = pending(metadata)
        if manifest is not None:
            self._to.put(self._key(waiting), encode(manifest))
        elif name == METADATA:
            self._to.remove([self._key(INSIDE)])
        try:
            replaced = self._replaced(name, metadata)
        except WorkbenchError:
            self.remove([waiting])
            raise
        # Visible from here on. Failures from now on leave objects behind, which the next save removes.
        with suppress(WorkbenchError):
            left = set()
            if name == METADATA:  # without collectives, other ranks' metadata refers to files, too
                existing = self._to.files(self._to.key)
                left = abandoned((one, stat.mtime_ns / 1e9) for one, stat in existing.items())
                left |= {INSIDE} & existing.keys()
            self._to.remove([self._key(old) for old in (replaced | left) - {waiting, *files}])

    def _replaced(self, name: str, metadata: bytes) -> set[str]:
        """Replace the existing metadata, and return the files to which only the replaced metadata refers."""
        key = self._key(name)
        for _ in range(TRIES):
            version, old = self._to.version(key), self._read(name)
            if version is not None and old == metadata:  # the answer to our own request was lost
                return set()
            replaced: set[str] = set()
            with suppress(WorkbenchError):
                replaced = set() if old is None else referenced(old, name) | {pending(old)}
            with suppress(TakenError):
                self._to.put(key, metadata, only=version or {})
                return replaced
        raise WriteError(
            f"{name!r} in {self.shown!r} was replaced by other writers {TRIES} times in the meantime; save again"
        )

    def remove_generation(self, name: str, save_id: str) -> None:
        """Remove all ranks' data objects of a save, unless the folder's metadata is that save's."""
        with suppress(WorkbenchError):
            tail = self._read(name, TAIL)
            if tail is None or save_id.encode() not in tail:
                self.remove(of_generation(self._to.files(self._to.key), save_id))

    def _read(self, name: str, last: int | None = None) -> bytes | None:
        """Read the bytes of an object, or its last ones; ``None`` if it does not exist."""
        key = self._key(name)
        stat = self._to.stat(key)
        return None if stat is None else self._to.read(key, stat, 0 if last is None else max(0, stat.size - last))

    def _key(self, name: str) -> str:
        return f"{self._to.key}/{name}"
