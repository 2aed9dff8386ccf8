"""What was written down about the bytes when they were saved, against the bytes.

::

    torch.save archive          a CRC-32 a record, which torch itself never compares: items, files of tensors, and
                                files of objects alone (rng_state.pth, scheduler.pt, extra_state_rank_0.pt)
    zstd stream                 a frame that decompresses, with a checksum where the writer asked for one
    integrity.json              sha256 of every file (Megatron, --verify-integrity)
    .cache/huggingface, blobs   sha256 of every large file, as the hub named it
    a manifest of ours          every byte of every file

Where none of these is stored, a flipped bit that leaves a plausible number cannot be seen; the report says for how
many tensors that is so.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from workbench.analysis import manifest_check
from workbench.analysis.folder import files_of
from workbench.analysis.manifest import find
from workbench.analysis.verify.log import Log, Subject, names, plural
from workbench.analysis.verify.siblings import leftovers
from workbench.core import catalog as cat
from workbench.core.checksums import RecordCheck, archives_nbytes, check_archives
from workbench.core.place import Place
from workbench.core.scan import Tick
from workbench.core.source import no_descriptor
from workbench.errors import MissingFileError, WorkbenchError

__all__ = ["StoredSums", "check_manifest", "manifest_nbytes"]

Array = np.ndarray[Any, Any]
BLOCK = 8 << 20  #: bytes hashed at a time
HUB = ".cache/huggingface/download"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESTORE = "the bytes are not those that were written: restore the file"


class StoredSums:
    """The checksums that the files themselves hold: the CRC-32 of records, and sha256 of whole files.

    Attributes:
        nbytes: that a check reads.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._archived = archives_nbytes(subject.payloads, subject.place, _others(subject)[0])
        self._digests: dict[str, tuple[str, str]] = {}
        for name, wanted, source in (*_integrity(subject), *_hub(subject)):
            self._digests.setdefault(name, (wanted, source))
        files = subject.place.files
        self._sizes = {name: max(files[name].size, 0) if name in files else 0 for name in self._digests}
        self.nbytes = self._archived + sum(self._sizes.values())

    def check(self, tick: Tick | None = None) -> None:
        """Compare each with the bytes; what differs, and what none vouches for, goes to the log."""
        done, total = self._archived, max(self.nbytes, 1)

        def of_archives(share: float) -> None:
            if tick is not None:
                tick(share * self._archived / total)

        covered = _archives(self._subject, of_archives)
        for name, (wanted, source) in self._digests.items():
            _digest(self._subject, name, wanted, source, covered)
            done += self._sizes[name]
            if tick is not None:
                tick(done / total)
        _not_covered(self._subject, covered)


def check_manifest(place: Place, log: Log, manifest: Any, threads: int | None, tick: Tick | None) -> None:
    """Every byte against a manifest: the one given, or one that lies inside or beside the checkpoint."""
    try:
        report = manifest_check.check(place.path, manifest, partial=True, threads=threads, tick=tick)
    except MissingFileError as error:
        if manifest is not None:
            raise
        log.not_checked["manifest"] = str(error)
        return
    except WorkbenchError as error:
        if manifest is not None:
            raise
        log.add("manifest.unreadable", "warn", place.name, str(error), "write it anew from a copy that you trust")
        return
    log.found += report.found
    log.checked["manifest"] = "; ".join(report.checked.values())
    left = [words for name, words in report.not_checked.items() if name != "meaning"]
    log.not_checked["manifest"] = "; ".join(left)
    log.not_checked.pop("flips", None)


def manifest_nbytes(place: Place, manifest: Any) -> int:
    """Bytes that are compared with a manifest: of all files where there is one, none where there is none."""
    if manifest is None:
        try:
            find(place.path)
        except (WorkbenchError, OSError):
            return 0
    return sum(max(stat.size, 0) for stat in place.files.values())


# ---- archives ------------------------------------------------------------------------------------------------------


def _archives(subject: Subject, tick: Tick | None) -> Array:
    """CRC-32 of every record; returns the chunk rows whose bytes one vouches for."""
    log, catalog = subject.log, subject.catalog
    counts = {"ok": 0, "absent": 0, "mismatch": 0, "damaged": 0}
    covered = np.zeros(catalog.chunks, bool)
    by_file = np.argsort(catalog.file, kind="stable")
    others, left = _others(subject)
    checks = check_archives(subject.payloads, subject.place, others, threads=subject.threads, tick=tick)
    without: set[str] = set()
    for file, group in groupby(checks, key=lambda one: one.file):  # one file at a time: millions of records are many
        good = []
        for one in group:
            counts[one.status] += 1
            if one.status in ("ok", "mismatch"):
                good.append((one.start, one.stop))
            elif one.status == "absent" and file in others:
                without.add(file)
            _tell(subject, one)
        if good and file in catalog.files:
            number = catalog.files.index(file)
            low, high = (np.searchsorted(catalog.file, number, side=side, sorter=by_file) for side in ("left", "right"))
            rows = by_file[low:high]
            covered[rows] |= _inside(np.array(sorted(good), np.int64), catalog, rows)
    if counts["ok"] or counts["mismatch"]:
        log.checked["checksums"] = f"the CRC-32 of {plural(counts['ok'] + counts['mismatch'], 'record')} of torch.save"
    if without:
        left.append(f"{names(sorted(without))}: saved without checksums")
    if left:
        log.not_checked["checksums"] = "; ".join(left)
    return covered


def _others(subject: Subject) -> tuple[set[str], list[str]]:
    """Files that may hold no tensor, such as generators, schedulers and arguments; and what is not looked at, and why.

    A DCP file that the metadata does not name has no known items, and a temporary file is rightly cut short: other
    rules report both by name.
    """
    if subject.ckpt._parent is not None:
        return set(), ["files that hold no tensor of this selection: verify the whole checkpoint"]
    place, temporary = subject.place, {*leftovers(subject.place)}
    found, skipped = files_of(subject.ckpt)
    shut = [
        name for name in found if name not in subject.shut and not os.access(os.path.join(place.root, name), os.R_OK)
    ]
    links = [name for name in skipped if not os.path.isdir(os.path.join(place.root, name))]
    left = [f"{names(shut)}: may not be read by this user"] if shut else []
    left += [f"{names(links)}: {skipped[links[0]]}"] if links else []
    chains = {name for name in found if name.endswith(".distcp")}
    if unnamed := sorted(chains - {*subject.catalog.files} - temporary):
        left.append(f"{names(unnamed)}: no metadata that was read says where their items are")
    return {*found} - temporary - chains, left


def _tell(subject: Subject, one: RecordCheck) -> None:
    place: dict[str, Any] = {"file": one.file, "record": one.record, "start": one.start, "stop": one.stop}
    if one.status == "mismatch":
        subject.log.add(
            "checksum.mismatch",
            "error",
            one.owner or one.file,
            f"record {one.record!r} at bytes {one.start:,} to {one.stop:,} of {one.file!r}{_also(subject, one)}: "
            f"CRC-32 is {one.computed or 0:08x}, stored is {one.stored or 0:08x}",
            _RESTORE,
            stored=one.stored,
            computed=one.computed,
            **place,
        )
    elif one.status == "damaged" and not _told(subject, one):
        subject.log.add("checksum.damaged", "error", one.owner or one.file, one.message, _RESTORE, **place)


def _told(subject: Subject, one: RecordCheck) -> bool:
    """Whether the structure already showed this damage."""
    catalog = subject.catalog
    if subject.gone(one.file, one.stop):
        return True
    if one.file not in catalog.files:
        return False
    here = subject.lost & (catalog.file == catalog.files.index(one.file))
    return bool((here & (catalog.start < one.stop) & (catalog.stop > one.start)).any())


def _inside(ranges: Array, catalog: cat.Catalog, rows: Array) -> Array:
    """Which rows have a checked record in their item (archives), or lie in one (raw bytes of a whole-file archive)."""
    start, stop = catalog.start[rows].astype(np.int64), catalog.stop[rows].astype(np.int64)
    raw = np.isin(catalog.codec[rows], (cat.RAW, cat.RAW_BE, cat.LATIN1_TEXT, *cat.LAZY))
    after = np.searchsorted(ranges[:, 0], start, side="right") - 1
    within = (after >= 0) & (ranges[np.maximum(after, 0), 1] >= stop)
    first = np.searchsorted(ranges[:, 0], start, side="left")
    holds = (first < len(ranges)) & (ranges[np.minimum(first, len(ranges) - 1), 0] < stop)
    return np.where(raw, within | (start == stop), holds)


def _also(subject: Subject, one: RecordCheck) -> str:
    """The tensors that lie in a record of a whole-file archive."""
    catalog = subject.catalog
    if one.owner or one.file not in catalog.files:
        return ""
    mine = np.flatnonzero(catalog.file == catalog.files.index(one.file))
    hit = mine[(catalog.start[mine] < one.stop) & (catalog.stop[mine] > one.start)]
    keys = list(dict.fromkeys(subject.key(row) for row in hit[:100].tolist()))
    return f", in {names(keys)}" if keys else ""


def _not_covered(subject: Subject, covered: Array) -> None:
    catalog = subject.catalog
    bare = np.unique(catalog.tensor[~covered & (catalog.chunk_nbytes > 0)])
    if len(bare):
        subject.log.not_checked["flips"] = (
            f"bit flips in {len(bare):,} of {plural(len(catalog), 'tensor')} cannot be seen: their files store no "
            "checksums; `workbench manifest write` now makes every later flip visible"
        )


# ---- whole files ---------------------------------------------------------------------------------------------------


def _integrity(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Megatron's ``integrity.json``: ``{"algorithm": "sha256", "files": {name: hex}}`` (megatron-core 0.18)."""
    for folder in ("", *subject.place.folders):
        name = f"{folder}/integrity.json" if folder else "integrity.json"
        if not subject.place.exists(name):
            continue
        try:
            document = subject.place.read_json(name)
        except WorkbenchError as error:
            subject.log.add("integrity.unreadable", "warn", name, str(error), "its sums cannot be compared")
            continue
        files = document.get("files") if isinstance(document, dict) else None
        if not isinstance(files, dict) or document.get("algorithm") != "sha256":
            subject.log.not_checked["integrity.json"] = f"{name!r} is of an algorithm that we do not know"
            continue
        for file, digest in files.items():
            if isinstance(file, str) and isinstance(digest, str) and _SHA256.fullmatch(digest.lower()):
                yield (f"{folder}/{file}" if folder else file), digest.lower(), name


def _hub(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """sha256 of large files as the hub tells it: in a download's metadata, or as the name of a cached blob."""
    place = subject.place
    if place.file is not None:
        return
    for name in place.files:
        real = os.path.realpath(os.path.join(place.root, name))
        blob = os.path.basename(real)
        if os.path.basename(os.path.dirname(real)) == "blobs" and _SHA256.fullmatch(blob):
            yield name, blob, "the hub's cache"
        elif place.exists(f"{HUB}/{name}.metadata"):
            try:
                lines = place.read(f"{HUB}/{name}.metadata").decode("utf-8", "replace").split()
            except WorkbenchError:  # a note of the downloader that cannot be read vouches for nothing
                continue
            if len(lines) >= 2 and _SHA256.fullmatch(lines[1]):
                yield name, lines[1], "the hub's digest"


def _digest(subject: Subject, name: str, wanted: str, source: str, covered: Array) -> None:
    log, catalog = subject.log, subject.catalog
    try:
        found = _sha256(subject.place.resolve(name))
    except (WorkbenchError, OSError) as error:
        if isinstance(error, OSError):
            no_descriptor(error)
        log.add(
            "digest.unreadable", "error", name, f"{source} vouches for it, but it cannot be read: {error}", "restore it"
        )
        return
    if found != wanted:
        log.add(
            "digest.mismatch",
            "error",
            name,
            f"sha256 is {found[:16]}…, {source} says {wanted[:16]}…",
            _RESTORE,
            stored=wanted,
            computed=found,
        )
    log.checked["digests"] = "sha256 of the files that integrity.json or the hub vouches for"
    if name in catalog.files:
        covered |= catalog.file == catalog.files.index(name)


def _sha256(path: str) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK):
            total.update(block)
    return total.hexdigest()
