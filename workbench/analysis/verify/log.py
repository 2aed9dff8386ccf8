"""Shared by the rules of ``verify``: the checkpoint under examination and the log of findings.

::

    rules ── add(rule, severity, where, …) ──►  Log  ──►  Report: up to MOST findings per rule, the rest counted
          ── lost(rows) ──────────────────────►       rows that no later rule tries to read
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.analysis.report import Finding, Report
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.words import plural, some_of
from workbench.errors import ChangedError, CorruptError, HoleError, MissingFileError, WorkbenchError

Progress = Callable[[float], None]
MOST = 20  #: findings listed per rule


class Log:
    """Findings, and what was checked and what was not."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.checked: dict[str, str] = {}
        self.not_checked: dict[str, str] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, rule: str, severity: str, where: str, message: str, hint: str = "", **evidence: Any) -> None:
        """Add a finding; beyond :data:`MOST` per rule, findings are only counted."""
        self._counts[rule, severity] += 1
        if self._counts[rule, severity] <= MOST:
            self.found.append(Finding(rule, severity, where, message, evidence, hint))

    def report(self, subject: str) -> Report:
        """Return everything as a report."""
        more = [
            Finding(rule, severity, "", f"… {count - MOST:,} more of this rule", {"more": count - MOST})
            for (rule, severity), count in self._counts.items()
            if count > MOST
        ]
        return Report.of(subject, [*self.found, *more], self.checked, self.not_checked)


@dataclass
class Examined:
    """A checkpoint under examination.

    Attributes:
        threads: number of reader threads.
        lost: ``(chunks,) bool`` rows whose bytes are known to be absent; no rule reads them again.
        shut: files that the user has no permission to read.
    """

    ckpt: Checkpoint
    place: Place
    log: Log
    threads: int | None = None
    lost: Array = field(default_factory=lambda: np.empty(0, bool))

    shut: set[str] = field(default_factory=set)
    _unread: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lost = np.zeros(self.catalog.chunks, bool)

    @property
    def catalog(self) -> Catalog:
        """The checkpoint's catalog."""
        return self.ckpt.catalog

    @property
    def payloads(self) -> Payloads:
        """The bytes of the checkpoint."""
        return self.ckpt.payloads

    def key(self, row: int) -> str:
        """Return the stored name of a chunk row's tensor."""
        return self.catalog.keys[self.catalog.tensor[row]]

    def file(self, row: int) -> str:
        """Return the file that contains a chunk row."""
        return self.catalog.files[self.catalog.file[row]]

    def unread(self, row: int) -> None:
        """Record a chunk row in an unsupported form, whose values remain unknown."""
        self.lost[row] = True
        self._unread[self.key(row)] = None
        self.log.not_checked["unread tensors"] = (
            f"{plural(len(self._unread), 'tensor')} stored in an unsupported form: {some_of(self._unread)}"
        )

    def gone(self, file: str, stop: int) -> bool:
        """Return whether a byte range of a file is known to be absent."""
        if file in self.shut:
            return True
        number = self.catalog.files.index(file) if file in self.catalog.files else -1
        return number >= 0 and stop > self.catalog.file_stats[number].size

    def box(self, row: int) -> list[list[int]]:
        """Return ``[offsets, sizes]`` of a chunk row, in elements."""
        ndim = int(self.catalog.ndim[self.catalog.tensor[row]])
        return [self.catalog.offsets[row, :ndim].tolist(), self.catalog.sizes[row, :ndim].tolist()]


def advice(error: WorkbenchError) -> str:
    """Return the hint for bytes that could not be read."""
    if isinstance(error, ChangedError):
        return "something is writing to the checkpoint: verify it again afterwards"
    if isinstance(error, (CorruptError, HoleError)):
        return "the bytes are damaged, or belong to another tensor: restore the file"
    if isinstance(error, MissingFileError):
        return "restore the file, or ask its owner for permission to read it"
    return "verify again; if it fails again, the message gives the reason"
