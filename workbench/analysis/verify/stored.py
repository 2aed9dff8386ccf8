"""Compare the bytes with checksums and digests recorded when they were saved.

::

    torch.save archive          a CRC-32 per record, which torch never checks: items, files of tensors, and
    files with only objects (rng_state.pth, scheduler.pt, extra_state_rank_0.pt)
    zstd stream                 a frame that decompresses, with a checksum if the writer enabled it
    integrity.json              sha256 of every file (Megatron, --verify-integrity)
    .cache/huggingface, blobs   sha256 of every large file, from the hub
    workbench manifest          every byte of every file

    Without any of these, a flipped bit that leaves a plausible number is undetectable; the report counts the tensors
    for which this is the case.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis import manifest_check
from workbench.analysis.folder import files_of
from workbench.analysis.manifest import find
from workbench.analysis.verify.log import Examined, Log
from workbench.analysis.verify.siblings import leftovers
from workbench.core import catalog as cat
from workbench.core import codecs
from workbench.core.arrays import Array
from workbench.core.checksums import RecordCheck, Summed, archives_nbytes, check_archives
from workbench.core.executors import cores, ordered
from workbench.core.place import Place
from workbench.core.scan import Progress
from workbench.core.source import Source, no_descriptor
from workbench.core.words import plural, some_of
from workbench.errors import MissingFileError, WorkbenchError, WorkerError

BLOCK = 8 << 20  #: bytes hashed at a time
HUB = ".cache/huggingface/download"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESTORE = "the bytes differ from those written: restore the file"


class StoredSums:
    """The checksums stored in the files: CRC-32 of records, and sha256 of whole files.

    Attributes:
        summed: the CRC-32 of chunks, from the pass over their values; without it, they are read here.
        nbytes: number of bytes that a check reads after that pass.
    """

    def __init__(self, subject: Examined) -> None:
        self._subject, self.summed = subject, Summed(subject.payloads)
        archived = archives_nbytes(subject.payloads, subject.place, _others(subject)[0])
        self._archived = max(archived - self.summed.nbytes, 0)
        self._digests: dict[str, tuple[str, str]] = {}
        for name, expected, source in (*_integrity(subject), *_hub(subject)):
            self._digests.setdefault(name, (expected, source))
        files = subject.place.files
        self._sizes = {name: max(files[name].size, 0) if name in files else 0 for name in self._digests}
        self.nbytes = self._archived + sum(self._sizes.values())

    def check(self, progress: Progress | None = None) -> None:
        """Compare each with the bytes; log mismatches, and bytes without a checksum."""
        done, total = self._archived, max(self.nbytes, 1)

        def of_archives(share: float) -> None:
            if progress is not None:
                progress(share * self._archived / total)

        covered = _archives(self._subject, self.summed, of_archives)
        run, threads = _Sha256(self._subject.place, self._sizes), self._subject.threads
        digests = ordered(
            run,
            list(self._digests),
            sum(self._sizes.values()),
            threads=threads or cores(),
            at_once=threads,
            name="workbench-sha256",
        )
        with closing(digests):
            for name, result in digests:
                _digest(self._subject, name, *self._digests[name], result, covered)
                done += self._sizes[name]
                if progress is not None:
                    progress(done / total)
        _not_covered(self._subject, covered)


def check_manifest(place: Place, log: Log, manifest: Any, threads: int | None, progress: Progress | None) -> None:
    """Compare every byte with a manifest: the given one, or one inside or next to the checkpoint."""
    try:
        report = manifest_check.check(place, manifest, partial=True, threads=threads, progress=progress)
    except MissingFileError as error:
        if manifest is not None:
            raise
        log.not_checked["manifest"] = str(error)
        return
    except WorkerError:
        raise
    except WorkbenchError as error:
        if manifest is not None:
            raise
        log.add("manifest.unreadable", "warn", place.name, str(error), "write it again from a trusted copy")
        return
    log.found += report
    checked = dict(report.checked)
    if "live" in checked:
        log.checked["live"] = checked.pop("live")
    log.checked["manifest"] = "; ".join(checked.values())
    left = [words for name, words in report.not_checked.items() if name != "meaning"]
    log.not_checked["manifest"] = "; ".join(left)
    log.not_checked.pop("flips", None)


def manifest_nbytes(place: Place, manifest: Any) -> int:
    """Return the bytes to compare with a manifest: of all files if there is one, otherwise none."""
    if manifest is None:
        try:
            find(place)
        except (WorkbenchError, OSError):
            return 0
    return sum(max(stat.size, 0) for stat in place.files.values())


# ---- archives ------------------------------------------------------------------------------------------------------


def _archives(subject: Examined, summed: Summed, progress: Progress | None) -> Array:
    """Check the CRC-32 of every record; return the chunk rows covered by one."""
    log, catalog = subject.log, subject.catalog
    counts = {"ok": 0, "absent": 0, "mismatch": 0, "damaged": 0}
    covered = np.zeros(catalog.chunks, bool)
    by_file = np.argsort(catalog.file, kind="stable")
    others, left = _others(subject)
    checks = check_archives(
        subject.payloads, subject.place, others, summed=summed, threads=subject.threads, progress=progress
    )
    without: set[str] = set()
    for file, group in groupby(checks, key=lambda one: one.file):  # by file: there may be millions of records
        good = []
        for one in group:
            counts[one.status] += 1
            if one.status in ("ok", "mismatch"):
                good.append((one.start, one.stop))
            elif one.status == "absent" and file in others:
                without.add(file)
            _report(subject, one)
        if good and file in catalog.files:
            number = catalog.files.index(file)
            low, high = (np.searchsorted(catalog.file, number, side=side, sorter=by_file) for side in ("left", "right"))
            rows = by_file[low:high]
            covered[rows] |= _inside(np.array(sorted(good), np.int64), catalog, rows)
    if counts["ok"] or counts["mismatch"]:
        what = f"{plural(counts['ok'] + counts['mismatch'], 'record')} of {catalog.meta.get('archive', 'torch.save')}"
        log.checked["checksums"] = f"the {_crc_name(catalog)} of {what}"
    if without:
        left.append(f"{some_of(sorted(without))}: saved without checksums")
    if left:
        log.not_checked["checksums"] = "; ".join(left)
    return covered


def _crc_name(catalog: cat.Catalog) -> str:
    return "CRC-32C" if "crc32c" in catalog.meta or "chunk_crc32c" in catalog.meta else "CRC-32"


def _others(subject: Examined) -> tuple[set[str], list[str]]:
    """Return files possibly without tensors (generators, schedulers, arguments), and what is not checked and why.

    A DCP file that is not in the metadata has no known items, and a temporary file is expected to be truncated: other
    rules report both.
    """
    if subject.ckpt._parent is not None:
        return set(), ["files without a tensor of this selection: verify the whole checkpoint"]
    place, temporary = subject.place, {*leftovers(subject.place)}
    found, skipped = files_of(subject.ckpt)
    paths = {name: os.path.join(place.root, name) for name in (*found, *skipped)} if place.local else {}
    shut = [name for name in found if name in paths and not os.access(paths[name], os.R_OK)]
    shut = [name for name in shut if name not in subject.shut]
    links = [name for name in skipped if name in paths and not os.path.isdir(paths[name])]
    left = [f"{some_of(shut)}: no permission to read"] if shut else []
    left += [f"{some_of(links)}: {skipped[links[0]]}"] if links else []
    chains = {name for name in found if name.endswith(".distcp")}
    if unnamed := sorted(chains - {*subject.catalog.files} - temporary):
        left.append(f"{some_of(unnamed)}: no metadata gives the positions of their items")
    return {*found} - temporary - chains, left


def _report(subject: Examined, one: RecordCheck) -> None:
    place: dict[str, Any] = {"file": one.file, "record": one.record, "start": one.start, "stop": one.stop}
    if one.status == "mismatch":
        subject.log.add(
            "checksum.mismatch",
            "error",
            one.owner or one.file,
            f"record {one.record!r} at bytes {one.start:,} to {one.stop:,} of {one.file!r}{_tensors_in(subject, one)}: "
            f"{_crc_name(subject.catalog)} is {one.computed or 0:08x}, stored is {one.stored or 0:08x}",
            _RESTORE,
            stored=one.stored,
            computed=one.computed,
            **place,
        )
    elif one.status == "damaged" and not _already_reported(subject, one):
        subject.log.add("checksum.damaged", "error", one.owner or one.file, one.message, _RESTORE, **place)


def _already_reported(subject: Examined, one: RecordCheck) -> bool:
    """Return whether the structure checks have already reported this damage."""
    catalog = subject.catalog
    if subject.gone(one.file, one.stop):
        return True
    if one.file not in catalog.files:
        return False
    here = subject.lost & (catalog.file == catalog.files.index(one.file))
    return bool((here & (catalog.start < one.stop) & (catalog.stop > one.start)).any())


def _inside(ranges: Array, catalog: cat.Catalog, rows: Array) -> Array:
    """Return rows with a checked record in their item (archives), or inside one (raw bytes of a whole-file archive)."""
    start, stop = catalog.start[rows].astype(np.int64), catalog.stop[rows].astype(np.int64)
    raw = (codecs.RAW_BYTES | codecs.TEXT)[catalog.codec[rows]]
    after = np.searchsorted(ranges[:, 0], start, side="right") - 1
    within = (after >= 0) & (ranges[np.maximum(after, 0), 1] >= stop)
    first = np.searchsorted(ranges[:, 0], start, side="left")
    holds = (first < len(ranges)) & (ranges[np.minimum(first, len(ranges) - 1), 0] < stop)
    return np.where(raw, within | (start == stop), holds)


def _tensors_in(subject: Examined, one: RecordCheck) -> str:
    """Return the tensors in a record of a whole-file archive."""
    catalog = subject.catalog
    if one.owner or one.file not in catalog.files:
        return ""
    mine = np.flatnonzero(catalog.file == catalog.files.index(one.file))
    hit = mine[(catalog.start[mine] < one.stop) & (catalog.stop[mine] > one.start)]
    keys = list(dict.fromkeys(subject.key(row) for row in hit[:100].tolist()))
    return f", in {some_of(keys)}" if keys else ""


def _not_covered(subject: Examined, covered: Array) -> None:
    catalog = subject.catalog
    bare = np.unique(catalog.tensor[~covered & (catalog.chunk_nbytes > 0)])
    if len(bare):
        subject.log.not_checked["flips"] = (
            f"bit flips in {len(bare):,} of {plural(len(catalog), 'tensor')} cannot be detected: their files store no "
            "checksums; run `workbench manifest write` now to detect every later flip"
        )


# ---- whole files ---------------------------------------------------------------------------------------------------


def _integrity(subject: Examined) -> Iterator[tuple[str, str, str]]:
    """Yield the digests in Megatron's ``integrity.json``: ``{"algorithm": "sha256", "files": {name: hex}}``
    (megatron-core 0.18).
    """
    for folder in ("", *subject.place.folders):
        name = f"{folder}/integrity.json" if folder else "integrity.json"
        if not subject.place.exists(name):
            continue
        try:
            document = subject.place.read_json(name)
        except WorkbenchError as error:
            subject.log.add("integrity.unreadable", "warn", name, str(error), "its digests cannot be compared")
            continue
        files = document.get("files") if isinstance(document, dict) else None
        if not isinstance(files, dict) or document.get("algorithm") != "sha256":
            subject.log.not_checked["integrity.json"] = f"{name!r} uses an unknown algorithm"
            continue
        for file, digest in files.items():
            if isinstance(file, str) and isinstance(digest, str) and _SHA256.fullmatch(digest.lower()):
                yield (f"{folder}/{file}" if folder else file), digest.lower(), name


def _hub(subject: Examined) -> Iterator[tuple[str, str, str]]:
    """Return the hub's sha256 of large files: from a download's metadata, or from the name of a cached blob."""
    place = subject.place
    if place.file is not None or not place.local:
        return
    for name in place.files:
        real = os.path.realpath(os.path.join(place.root, name))
        blob = os.path.basename(real)
        if os.path.basename(os.path.dirname(real)) == "blobs" and _SHA256.fullmatch(blob):
            yield name, blob, "the hub's cache"
        elif place.exists(f"{HUB}/{name}.metadata"):
            try:
                lines = place.read(f"{HUB}/{name}.metadata").decode("utf-8", "replace").split()
            except WorkbenchError:  # an unreadable note of the downloader proves nothing
                continue
            if len(lines) >= 2 and _SHA256.fullmatch(lines[1]):
                yield name, lines[1], "the hub's digest"


def _digest(subject: Examined, name: str, expected: str, source: str, result: tuple[str, str], covered: Array) -> None:
    log, catalog = subject.log, subject.catalog
    found, why = result
    if why:
        log.add("digest.unreadable", "error", name, f"{source} lists it, but it cannot be read: {why}", "restore it")
        return
    if found != expected:
        log.add(
            "digest.mismatch",
            "error",
            name,
            f"sha256 is {found[:16]}…, but {expected[:16]}… in {source}",
            _RESTORE,
            stored=expected,
            computed=found,
        )
    log.checked["digests"] = "sha256 of the files listed by integrity.json or the hub"
    if name in catalog.files:
        covered |= catalog.file == catalog.files.index(name)


class _Sha256(NamedTuple):
    """Hashes files; the result is the digest, or why there is none."""

    place: Place
    sizes: Mapping[str, int]

    def __call__(self, name: str) -> tuple[str, str]:
        try:
            return _sha256(self.place.source(name)), ""
        except (WorkbenchError, OSError) as error:
            if isinstance(error, OSError):
                no_descriptor(error)
            return "", str(error)

    def nbytes(self, name: str) -> int:
        return self.sizes[name]

    def part(self, names: list[str]) -> tuple[_Sha256, list[str]]:
        return _Sha256(self.place.pinned({}), {name: self.sizes[name] for name in names}), names

    def key(self, name: str) -> bytes:
        return f"sha256 {name}".encode("utf-8", "surrogatepass")

    def close(self) -> None:
        pass


def _sha256(source: Source) -> str:
    total, buffer = hashlib.sha256(), np.empty(BLOCK, np.uint8)
    for at in range(0, source.size, BLOCK):
        part = buffer[: min(BLOCK, source.size - at)]
        source.read_into(part, at)
        total.update(part)
    return total.hexdigest()
