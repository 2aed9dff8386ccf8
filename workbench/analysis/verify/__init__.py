"""Is a checkpoint intact? Every report lists what was checked and what was not.

::

    structure   names, sizes, headers, boxes, steps: no payload is read           seconds at any size
    content     every byte once: values, stored checksums, copies of each other   deep=True, about the speed of reading
    manifest    every byte against digests recorded earlier                       locates any later flip

There is one file per family of rules: files, siblings, commit, boxes, headers, steps and state; for the content counts,
values, pages, pairs and stored. docs/verify.md lists every rule.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from workbench import checkpoint, runs
from workbench.analysis.report import Report
from workbench.analysis.verify.boxes import check_boxes
from workbench.analysis.verify.commit import check_commit
from workbench.analysis.verify.files import check_files
from workbench.analysis.verify.headers import check_headers, check_index, check_objects, headers_nbytes
from workbench.analysis.verify.log import Examined, Log
from workbench.analysis.verify.pairs import check_pairs, pairs_nbytes
from workbench.analysis.verify.siblings import check_folder, leftovers
from workbench.analysis.verify.state import check_ranks, check_state
from workbench.analysis.verify.steps import check_steps
from workbench.analysis.verify.stored import StoredSums, check_manifest, manifest_nbytes
from workbench.analysis.verify.values import check_values, values_nbytes
from workbench.checkpoint import Checkpoint
from workbench.core.executors import using
from workbench.core.place import Place
from workbench.core.remote.url import with_options
from workbench.core.scan import Progress
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

#: Hint for a checkpoint that cannot be opened, by rule.
RESTORE = (
    "restore the named files as one save wrote them, or use another checkpoint; the rest of this one cannot be checked"
)
REMEDIES = {
    "open.unsafe": "find out who wrote it before any other program reads it",
    "open.unrecognised": "give the path of a checkpoint, or specify its format",
    "open.unsupported": "save it again in a supported form, with the software that wrote it",
    "open.failed": "verify it again when nothing is writing to it",
}

#: The rule under which an error in opening is reported; the first match counts.
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
    manifest: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Report:
    """Check a checkpoint. Nothing is changed; damage is reported, never raised.

    Args:
        ckpt: a checkpoint, or a path. A path is opened without the catalog cache; if files are lost, the rest is
            still checked.
        format: how to open a path, as in ``wb.open``.
        deep: also read every byte: stored checksums, values, replicas, masters, and a manifest next to the checkpoint.
        manifest: a manifest or its path to check every byte against.
        threads: number of reader threads; by default one per core, up to 8.
        progress: called with the fraction done; raise to cancel.
        storage_options: for URLs, of the checkpoint and the manifest, as in ``wb.open``.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. The result is the same, bit for bit.

    Returns:
        findings, and what was and was not checked.

    Raises:
        NotACheckpointError: the path does not exist.
        OpenError: the process has no free file descriptors.
        MissingExtraError: the format needs an optional package.
        UsageError: unknown format.
        WorkerError: the executor lost its workers or its scheduler.
    """
    with using(executor), with_options(storage_options, ckpt, manifest):
        place = ckpt.place if isinstance(ckpt, Checkpoint) else Place(ckpt)
        with place.uncached():
            return _verified(ckpt, place.again(), deep, format, manifest, threads, progress)


def _verified(
    ckpt: Checkpoint | str | os.PathLike[str],
    place: Place,
    deep: bool,
    format: str | None,
    manifest: Any,
    threads: int | None,
    progress: Progress | None,
) -> Report:
    log = Log()
    opened = ckpt if isinstance(ckpt, Checkpoint) else _open(place, format, log)
    if opened is None:
        place = _located(place, format)
    weights: dict[str, int] = {}
    subject = None if opened is None else Examined(opened, opened.place.again(), log, threads)
    if deep or manifest is not None:
        weights["manifest"] = manifest_nbytes(place if subject is None else subject.place, manifest)
    if subject is None:
        shares = _Shares(progress, weights)
        _check_unopened(place, log)
    else:
        sums = StoredSums(subject) if deep else None
        weights["headers"] = headers_nbytes(subject)
        if sums is not None:
            weights |= {"values": values_nbytes(subject), "stored": sums.nbytes, "pairs": pairs_nbytes(subject)}
        shares = _Shares(progress, weights)
        _structure(subject, shares)
        if sums is not None:
            check_values(subject, sums.summed, shares.of("values"))
            sums.check(shares.of("stored"))
            check_pairs(subject, shares.of("pairs"))
        else:
            log.not_checked["values"] = "payloads were not read: verify with --deep (deep=True)"
    if deep or manifest is not None:
        check_manifest(place if opened is None else opened.place.again(), log, manifest, threads, shares.of("manifest"))
    if not deep and manifest is None and opened is not None:
        log.not_checked["flips"] = "bytes were not compared with anything: verify with --deep, or against a manifest"
    return log.report(place.path if opened is None else opened.path)


def _open(place: Place, format: str | None, log: Log) -> Checkpoint | None:
    """Open the checkpoint as strictly as possible; obstacles become findings."""
    try:
        return checkpoint.open_place(place.again(), format=format, cache=False)
    except MissingExtraError:
        raise
    except (OpenError, RecursionError) as error:
        strict = error
    try:
        return checkpoint.open_place(place.again(), format=format, cache=False, partial=True)
    except (OpenError, RecursionError) as error:
        rule = next((rule for kind, rule in OPENING if isinstance(strict, kind)), "open.failed")
        log.add(rule, "error", place.name, str(error) or type(error).__name__, REMEDIES.get(rule, RESTORE))
        log.not_checked["everything else"] = "the checkpoint cannot be opened"
    return None


def _located(place: Place, format: str | None) -> Place:
    """Return where the checkpoint is that cannot be opened, such as a step of a run; its manifest is there."""
    with suppress(OpenError, RecursionError):
        return runs.locate(place.again(), format)[0]
    return place


def _structure(subject: Examined, shares: _Shares) -> None:
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
    lost = subject.catalog.lost()  # reported file by file
    for note in subject.ckpt.notes:
        if note != lost:
            subject.log.add("open.note", "info", "", note)


def _check_unopened(place: Place, log: Log) -> None:
    """Check the files of a checkpoint that cannot be opened."""
    for name in leftovers(place):
        log.add(
            "files.leftover", "warn", name, "is a temporary file: a save or a download was interrupted, or is running"
        )
    for name, stat in place.files.items():
        if stat.size == 0:
            log.add("files.empty", "warn", name, "is empty", "a write was lost: restore the file")


class _Shares:
    """Overall progress of several passes, each weighted by the bytes that it reads."""

    def __init__(self, progress: Progress | None, weights: Mapping[str, int]) -> None:
        self._tick, self._weights, self._total = progress, weights, max(sum(weights.values()), 1)
        self._done = 0

    def of(self, name: str) -> Progress | None:
        """Return the progress function of the next pass."""
        if self._tick is None:
            return None
        progress, before, weight, total = self._tick, self._done, self._weights[name], self._total
        self._done += weight
        return lambda share: progress((before + share * weight) / total)
