"""Atomic targets in a store, which cannot rename: objects appear one by one, and the last one completes the target.

::

    s3://bucket/run/ ┌ .out.tmp-export/             beside the target
                     │ ├── owner                    the writer and its plan; sent again every minute as a sign of life
                     │ ├── journal/…                the result of each file, once it is in the store
                     │ ├── out/…                    the files, if an existing target is to be overwritten
                     │ └── complete                 all of these exist; copying them over the old ones has begun
                     └ out/ .workbench-unfinished   created first and removed last: until then it does not open
                            model-00001-of-…        data, then small files, and last the format's own marker

An object is visible only once it is complete; parts of one that were sent before a kill are not visible at all, and a
lifecycle rule of the bucket (AbortIncompleteMultipartUpload) removes them. One run at a time has the target: it created
``owner``, which a store allows only one of several. A run of the same plan resumes the leftovers of a dead one, any
other removes them: files in the target only if its mark names the dead run. If files were being copied over old
ones, that is finished first.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from workbench.core.fingerprint import Fingerprint
from workbench.core.place import UNFINISHED
from workbench.core.remote.destination import Destination
from workbench.core.remote.objects import TakenError, Version
from workbench.core.source import FileStat
from workbench.errors import WorkbenchError, WriteError
from workbench.export.atomic import owners
from workbench.export.atomic.journal import FORMAT, Written
from workbench.export.atomic.leftovers import TEMP
from workbench.export.atomic.signals import Signals
from workbench.export.atomic.transaction import GO_ON, add_note, exists
from workbench.export.casts import CastError

QUIET = 1800  #: seconds without a sign of life after which an invisible run counts as gone; clocks may differ
INTERRUPTED, FAILED = 1.0, 20.0  #: seconds for each call of the clean-up after a signal, and after an error
LEFT = (
    f"; what was sent is still in the store, with {UNFINISHED!r} beside it: the same export with resume continues from "
    "there, and any other export to this target removes it"
)
RECORD = 64 << 20  #: bytes of the largest record of a file that is read


@dataclass
class StoreStaging:
    """A target in a store that is being written.

    Attributes:
        destination: the target.
        folder: whether it is a folder of objects, or one object.
        names: its files, in the order in which they become visible.
        plan: the identity of the job, from :meth:`workbench.export.moving.engine.ExportJob.plan`.
        aside: whether the files are kept beside the target until all of them exist.
        kept: by name, files that a dead run of the same plan has sent, and the results of their pieces.
        notes: sentences on leftovers of earlier runs, for a report.
    """

    destination: Destination
    folder: bool
    names: list[str]
    plan: str
    overwrite: bool
    resume: bool
    aside: bool
    kept: dict[str, tuple[FileStat, list[Written]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._token = owners.token()
        self._temp = self.destination.beside(f".{owners.short(self.destination.name)}{TEMP}export")
        self._version: Version | None = None  # of the owner's object, while it is ours
        self._lock = threading.Lock()
        self._after: dict[str, Any] | None = None  # the leftovers of a dead run are still to be resolved
        self._recorded = 0
        self._settled = self._copying = self._done = False

    def key(self, name: str) -> str:
        """Return the key to which a file is sent."""
        if self.aside:
            return f"{self._temp}/out/{name}"
        return f"{self.destination.key}/{name}" if self.folder else self.destination.key

    @property
    def resumable(self) -> bool:
        """Whether a later run can resume from the journal."""
        return self.resume and self._recorded > 0

    def record(self, name: str, stat: FileStat, written: Sequence[Written]) -> None:
        """Note that a file is in the store."""
        if not self.folder and not self.aside:
            return  # it is the whole target
        self._alive()
        value = {
            "file": name,
            "size": stat.size,
            "mtime_ns": stat.mtime_ns,
            "tag": stat.tag,
            "pieces": [_encoded(one) for one in written],
        }
        text = json.dumps(value, separators=(",", ":")).encode()
        where = f"{self._temp}/journal/{xxhash.xxh3_64_hexdigest(name.encode())}"
        self.destination.put(where, xxhash.xxh3_64_hexdigest(text).encode() + b" " + text)
        self._recorded += 1

    # ---- whose it is ----

    def take(self) -> None:
        """Become the only run that has the target, and resolve the leftovers of a dead one.

        Raises:
            WriteError: another run has it, the target exists, or the store refuses.
        """
        self.destination.settle()
        dead = self._own()
        left = self.destination.files(self._temp)
        left.pop("owner", None)
        existing = self._existing()
        self._copying = dead is not None and dead.aside and "complete" in left
        same = dead is not None and self.resume and dead.plan == self.plan
        if dead is not None and same and (dead.aside or UNFINISHED in existing):
            self.aside = dead.aside
            self.kept = self._found(left, existing)
            self._recorded = len(self.kept)
        else:
            if dead is not None and self._copying:
                dead._publish({name[4:]: stat for name, stat in left.items() if name.startswith("out/")})
            elif dead is not None and dead.folder and not dead.aside and UNFINISHED in existing:
                dead._forget(existing)
            self._sweep(left)
            if dead is not None and self.resume and left and not same:
                self.notes.append("removed an unfinished export of other data into this target")
            existing = self._existing()
            self.aside = self.aside or (self.folder and bool(existing))
            self._copying = False
        self._settled, self._after = True, None
        if existing and not self.overwrite and not self._copying and (self.aside or UNFINISHED not in existing):
            raise exists(self.destination.shown)
        if self.names and self.folder and self.destination.stat(self.destination.key) is not None:
            raise WriteError(f"{self.destination.shown!r} exists and is a single object; choose another name")
        self._alive()  # nothing is left to resolve, and `aside` is known
        if self.folder and not self.aside:
            self.destination.put(f"{self.destination.key}/{UNFINISHED}", self._document())

    def _own(self) -> StoreStaging | None:
        """Create the owner's object, or take over that of a dead run, which is returned."""
        where = f"{self._temp}/owner"
        with suppress(TakenError):
            self._version = self.destination.put(where, self._document(), only={})
            return None
        version, stat = self.destination.version(where), self.destination.stat(where)
        data = None if stat is None else self.destination.read_all({where: stat})[0]
        if version is None or stat is None or data is None:
            raise WriteError(f"{self.destination.shown!r} was being written by another run; try again")
        value = _json(data)
        dead = self._run_of(value)
        silent = max(time.time() - stat.mtime_ns / 1e9, 0.0)
        if dead is not None and dead._token == self._token:  # we made it, and the answer was lost
            self._version = version
            return None
        token = "" if dead is None else dead._token
        if not (owners.is_gone(token, lambda: silent, QUIET) if owners.is_token(token) else silent > QUIET):
            raise WriteError(
                f"{self.destination.shown!r} is being written by {owners.describe(token, silent)}; wait until it has "
                f"finished, or stop it (a writer on another machine counts as stopped after {QUIET // 60} silent "
                "minutes)"
            )
        if isinstance(value, dict):  # a run that died before it had resolved its leftovers leaves that to this one
            self._after = value.get("after") or value
        try:
            self._version = self.destination.put(where, self._document(), only=version)
        except TakenError:
            raise WriteError(f"{self.destination.shown!r} is being written by another run; try again later") from None
        return self._run_of(self._after)

    def _document(self) -> bytes:
        value = {
            "journal": FORMAT,
            "plan": self.plan,
            "owner": self._token,
            "aside": self.aside,
            "folder": self.folder,
            "names": self.names,
            "after": self._after,
        }
        return json.dumps(value).encode()

    def _run_of(self, value: Any) -> StoreStaging | None:
        """Return the run that wrote an owner's object, or ``None`` if it is not one."""
        try:
            if value["journal"] != FORMAT:
                return None
            names = [str(name) for name in value["names"]]
            found = StoreStaging(
                self.destination, bool(value["folder"]), names, str(value["plan"]), True, True, bool(value["aside"])
            )
            found._token = str(value["owner"])
        except (KeyError, TypeError):
            return None
        return found

    def _alive(self) -> None:
        """Send the owner's object again.

        Raises:
            WriteError: another run, which considered this one dead, owns it now.
        """
        where = f"{self._temp}/owner"
        with self._lock:
            for _ in range(2):
                if self._version is None:
                    break
                with suppress(TakenError):
                    self._version = self.destination.put(where, self._document(), only=self._version)
                    return
                self._version = None
                stat = self.destination.stat(where)  # the answer to our own request may have been lost
                data = None if stat is None else self.destination.read_all({where: stat})[0]
                found = self._run_of(_json(data or b""))
                if found is not None and found._token == self._token:
                    self._version = self.destination.version(where)
        raise WriteError(
            f"{self.destination.shown!r} is being written by another run, which considered this one stopped"
        )

    def beat(self) -> None:
        """Give a sign of life; the next file checks whether this run still has the target."""
        with suppress(WriteError):
            self._alive()

    def _existing(self) -> dict[str, FileStat]:
        """Return the objects under the target's name."""
        if self.folder:
            return self.destination.files(self.destination.key)
        if self.destination.files(self.destination.key):
            raise WriteError(f"{self.destination.shown!r} exists and is a folder; choose another name")
        stat = self.destination.stat(self.destination.key)
        return {} if stat is None else {self.destination.name: stat}

    def _found(
        self, left: Mapping[str, FileStat], existing: Mapping[str, FileStat]
    ) -> dict[str, tuple[FileStat, list[Written]]]:
        """Return the recorded pieces of files that are still in the store as recorded."""
        sent = {name[4:]: stat for name, stat in left.items() if name.startswith("out/")} if self.aside else existing
        records = {
            f"{self._temp}/{name}": stat
            for name, stat in left.items()
            if name.startswith("journal/") and stat.size <= RECORD
        }
        found = {}
        for data in self.destination.read_all(records):
            check, _, text = (data or b"").partition(b" ")
            if check != xxhash.xxh3_64_hexdigest(text).encode():
                continue
            with suppress(ValueError, KeyError, TypeError, IndexError):
                value = json.loads(text)
                stat = FileStat(value["size"], value["mtime_ns"], value["tag"])
                if value["file"] in self.names and sent.get(value["file"]) == stat:
                    found[value["file"]] = stat, [_decoded(one) for one in value["pieces"]]
        return found

    # ---- the end ----

    def commit(self) -> None:
        """Make the target visible; every file is in the store."""
        if self.folder or self.aside:
            self._alive()
        if self.aside:
            existing = self._existing()
            existing.pop(UNFINISHED, None)
            if existing and not self.overwrite and not self._copying:
                raise exists(self.destination.shown)
            files = self.destination.files(f"{self._temp}/out")
            self.destination.put(f"{self._temp}/complete", b"")
            self._publish(files)
        elif self.folder:
            self.destination.remove([f"{self.destination.key}/{UNFINISHED}"])
        self._done = True
        with suppress(WorkbenchError):  # the next run removes what stays
            self._sweep(self.destination.files(self._temp), owner_first=True)

    def _publish(self, files: Mapping[str, FileStat]) -> None:
        """Copy the files over the old ones; if interrupted, it starts over."""
        names = [name for name in self.names if name in files]
        if len(names) < len(files):
            raise WriteError(f"{self._temp!r} holds files that are not of this export; remove it and export again")
        target = self.destination.key
        pairs = [
            (f"{self._temp}/out/{name}", f"{target}/{name}" if self.folder else target, files[name]) for name in names
        ]
        if self.folder:
            mark = f"{target}/{UNFINISHED}"
            self.destination.put(mark, self._document())
            self.destination.remove([f"{target}/{name}" for name in self._existing() if name != UNFINISHED])
        self.destination.copy(pairs[:-1])
        self.destination.copy(pairs[-1:])
        if self.folder:
            self.destination.remove([mark])
        self.destination.remove([f"{self._temp}/complete"])

    def discard(self) -> bool:
        """Remove what was sent; ``False`` if it cannot be removed now: the next run does that."""
        if self._version is None or not self._settled or self._done:
            return True
        if self.destination.behind:  # it may become visible after everything else was removed, even the mark
            return False
        with suppress(WorkbenchError):
            left = self.destination.files(self._temp)
            if "complete" in left:  # the old files are being replaced: the next run finishes that
                return True
            if self.folder and not self.aside:
                self._forget(self.destination.files(self.destination.key))
            self._sweep(left, owner_first=False)
            return True
        return False

    def _forget(self, existing: Mapping[str, FileStat]) -> None:
        """Remove this run's files from the target, and the mark last."""
        target = self.destination.key
        if UNFINISHED in existing:
            self.destination.remove([f"{target}/{name}" for name in self.names if name in existing])
            self.destination.remove([f"{target}/{UNFINISHED}"])

    def _sweep(self, left: Mapping[str, FileStat], *, owner_first: bool | None = None) -> None:
        """Remove the files beside the target: the owner's object first, last, or not at all."""
        owner = [f"{self._temp}/owner"]
        if owner_first:
            self.destination.remove(owner)
        self.destination.remove([f"{self._temp}/{name}" for name in left if name != "owner"])
        if owner_first is False:
            self.destination.remove(owner)


@contextmanager
def staging_in_store(
    destination: Destination,
    *,
    folder: bool,
    names: Sequence[str],
    plan: str,
    overwrite: bool = False,
    resume: bool = False,
    aside: bool = False,
) -> Iterator[StoreStaging]:
    """Provide a target for the block to send files to; it becomes visible when the block ends and is removed if it
    raises.

    Args:
        folder: whether the target is a folder of objects, or one object.
        names: its files, in the order in which they are to become visible.
        plan: the identity of the job.
        overwrite: replace an existing target; it stays unchanged until every new file is in the store.
        resume: resume a dead run of the same plan; and keep what this run sent if the block raises.
        aside: show nothing under the target's name before every file exists, even if the name is free.

    Raises:
        WriteError: the target exists, another run is writing it, or the store refuses.
    """
    made = StoreStaging(destination, folder, list(names), plan, overwrite, resume, aside)
    owners.ACTIVE.add(made._token)
    with Signals() as signals:
        try:
            made.take()
            with owners.every_minute(made.beat):
                yield made
            with signals.deferred(limited=True):
                made.commit()
        except BaseException as error:
            destination.within = FAILED if isinstance(error, Exception) else INTERRUPTED
            if made.resumable and not made._done:
                add_note(error, GO_ON)
            elif not made.discard():  # a second signal skips it
                add_note(error, LEFT)
            raise
        finally:
            owners.ACTIVE.discard(made._token)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _encoded(one: Written) -> list[Any]:
    """Encode both fingerprints with their blocks, and what a cast lost."""
    if one.cast is None:
        return list(_print(one.target))
    return [*_print(one.target), *_print(one.source), asdict(one.cast)]


def _print(found: Fingerprint) -> tuple[str, str]:
    return found.hex, b"".join(found.blocks).hex()


def _decoded(stored: list[Any]) -> Written:
    def read(digest: str, blocks: str) -> Fingerprint:
        raw = bytes.fromhex(blocks)
        return Fingerprint(digest, [raw[k : k + 16] for k in range(0, len(raw), 16)])

    target = read(*stored[:2])
    if len(stored) == 2:
        return Written(target, target, None)
    return Written(read(*stored[2:4]), target, CastError(**stored[4]))
