"""Is a checkpoint whole? Every answer says what was looked at and what was not.

::

    structure   names, sizes, headers, boxes, steps: no payload is read           seconds at any size
    content     every byte once: stored checksums, values, copies of each other   deep=True, about the speed of reading
    manifest    every byte against what was written down earlier                  any later flip, located

One file a family of rules: files, siblings, commit, boxes, headers, steps and state; for the content counts, values,
pages, pairs and stored. docs/verify.md lists every rule.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from workbench import checkpoint
from workbench.analysis.report import Report
from workbench.analysis.verify.boxes import check_boxes
from workbench.analysis.verify.commit import check_commit
from workbench.analysis.verify.files import check_files
from workbench.analysis.verify.headers import check_headers, check_index, check_objects, headers_nbytes
from workbench.analysis.verify.log import Log, Subject
from workbench.analysis.verify.pairs import check_pairs, pairs_nbytes
from workbench.analysis.verify.siblings import check_folder, leftovers
from workbench.analysis.verify.state import check_ranks, check_state
from workbench.analysis.verify.steps import check_steps
from workbench.analysis.verify.stored import StoredSums, check_manifest, manifest_nbytes
from workbench.analysis.verify.values import check_values, values_nbytes
from workbench.checkpoint import Checkpoint
from workbench.core.place import Place
from workbench.core.scan import Tick
from workbench.core.source import needs_descriptors
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingExtraError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
)

__all__ = ["verify"]

#: What to do about a checkpoint that cannot be opened, by rule.
RESTORE = "restore what is named, or use another checkpoint; the rest of it cannot be judged"
REMEDIES = {
    "open.unsafe": "find out who wrote it before anything else reads it",
    "open.unrecognised": "give the path of a checkpoint, or the format that it is of",
    "open.unsupported": "save it again in a form that is read, with what wrote it",
    "open.failed": "verify it again when nothing writes to it",
}

#: The rule that an error of opening is reported under; the first that fits counts.
OPENING: tuple[tuple[type[OpenError], str], ...] = (
    (MissingFileError, "open.missing"),
    (TruncatedError, "open.truncated"),
    (CorruptError, "open.corrupt"),
    (UnsafeError, "open.unsafe"),
    (IncompleteError, "open.incomplete"),
    (NotACheckpointError, "open.unrecognised"),
    (UnsupportedFormatError, "open.unsupported"),
    (OpenError, "open.failed"),
)


@needs_descriptors()
def verify(
    ckpt: Checkpoint | str | os.PathLike[str],
    deep: bool = False,
    *,
    format: str | None = None,
    io: str = "mmap",
    manifest: Any = None,
    threads: int | None = None,
    tick: Tick | None = None,
) -> Report:
    """Check a checkpoint; nothing is changed, and damage is reported, never raised.

    Args:
        ckpt: a checkpoint, or a path. A path is opened without the cache of catalogs, and with what is left of it
            where files are lost.
        format, io: how a path is opened, as ``wb.open`` takes them.
        deep: also read every byte: stored checksums, values, replicas, masters, and a manifest that lies beside.
        manifest: a manifest or its path, to check every byte against.
        threads: how many read side by side; by default as many as there are cores, at most 8.
        tick: told the share that is done; raising there ends the check.

    Returns:
        findings, and what was and was not checked.

    Raises:
        NotACheckpointError: nothing lies at the path.
        OpenError: the process has no free file descriptors.
        MissingExtraError: the format needs an optional package.
        UsageError: no such format, or ``io``.
    """
    log = Log()
    place = Place(ckpt._place.path if isinstance(ckpt, Checkpoint) else ckpt)
    opened = ckpt if isinstance(ckpt, Checkpoint) else _open(place, format, io, log)
    weights: dict[str, int] = {}
    subject = None if opened is None else Subject(opened, Place(opened.path), log, threads)
    if deep or manifest is not None:
        weights["manifest"] = manifest_nbytes(place if subject is None else subject.place, manifest)
    if subject is None:
        shares = _Shares(tick, weights)
        _beside(place, log)
    else:
        sums = StoredSums(subject) if deep else None
        weights["headers"] = headers_nbytes(subject)
        if sums is not None:
            weights |= {"stored": sums.nbytes, "values": values_nbytes(subject), "pairs": pairs_nbytes(subject)}
        shares = _Shares(tick, weights)
        _structure(subject, shares)
        if sums is not None:
            sums.check(shares.of("stored"))
            check_values(subject, shares.of("values"))
            check_pairs(subject, shares.of("pairs"))
        else:
            log.not_checked["values"] = "payloads were not read: verify with --deep (deep=True)"
    if deep or manifest is not None:
        check_manifest(place if opened is None else Place(opened.path), log, manifest, threads, shares.of("manifest"))
    if not deep and manifest is None and opened is not None:
        log.not_checked["flips"] = "bytes were compared with nothing: verify with --deep, or against a manifest"
    return log.report(place.path if opened is None else opened.path)


def _open(place: Place, format: str | None, io: str, log: Log) -> Checkpoint | None:
    """The checkpoint as strictly as it can be opened; what forbids more is a finding."""
    try:
        return checkpoint.open(place.path, format=format, io=io, cache=False)
    except MissingExtraError:
        raise
    except (OpenError, RecursionError) as error:
        strict = error
    try:
        return checkpoint.open(place.path, format=format, io=io, cache=False, partial=True)
    except (OpenError, RecursionError) as error:
        rule = next((rule for kind, rule in OPENING if isinstance(strict, kind)), "open.failed")
        log.add(rule, "error", place.name, str(error) or type(error).__name__, REMEDIES.get(rule, RESTORE))
        log.not_checked["everything else"] = "the checkpoint cannot be opened"
    return None


def _structure(subject: Subject, shares: _Shares) -> None:
    check_files(subject)
    check_folder(subject)
    check_commit(subject)
    check_boxes(subject)
    check_headers(subject, shares.of("headers"))
    check_index(subject)
    check_objects(subject)
    check_ranks(subject)
    check_state(subject)
    check_steps(subject)
    for note in subject.ckpt.notes:
        subject.log.add("open.note", "info", "", note)


def _beside(place: Place, log: Log) -> None:
    """What can be said of the files of a checkpoint that cannot be opened."""
    for name in leftovers(place):
        log.add(
            "files.leftover", "warn", name, "is a temporary file: a save or a download was interrupted, or still runs"
        )
    for name, stat in place.files.items():
        if stat.size == 0:
            log.add("files.empty", "warn", name, "has no bytes", "a write was lost: restore it")


class _Shares:
    """One progress of several passes, each weighed by the bytes that it reads."""

    def __init__(self, tick: Tick | None, weights: Mapping[str, int]) -> None:
        self._tick, self._weights, self._total = tick, weights, max(sum(weights.values()), 1)
        self._done = 0

    def of(self, name: str) -> Tick | None:
        """The tick of the next pass."""
        if self._tick is None:
            return None
        tick, before, weight, total = self._tick, self._done, self._weights[name], self._total
        self._done += weight
        return lambda share: tick((before + share * weight) / total)
