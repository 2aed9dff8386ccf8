"""The report of an export: files, tensors, and the proof that their elements are the source's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.core.shown import Shown
from workbench.core.words import plural


@dataclass(frozen=True)
class FileReport:
    """A file of the target: its name in the folder, bytes, and how many tensors it holds."""

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the target; with a mesh, one per rank, or one per chunk if files store boxes.

    Attributes:
        key: its name in the source.
        name: its name in the target.
        file: where it is.
        source_dtype, dtype: element types before and after.
        shape: elements along each axis.
        nbytes: bytes as written.
        source: fingerprint of its elements as read; ``None`` in a dry run.
        target: fingerprint of the bytes as written; equal to ``source`` unless it was cast or changed.
        changed, overflowed, max_abs: number of elements whose value the cast rounded, number that became infinite, and
            the largest difference of the others; 0 without a cast.
        updated, max_update: number of elements whose value adapters changed (before the cast), and the largest
            difference; 0 without adapters.
    """

    key: str
    name: str
    file: str
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: str | None = None
    target: str | None = None
    changed: int = 0
    overflowed: int = 0
    max_abs: float = 0.0
    updated: int = 0
    max_update: float = 0.0


@dataclass(frozen=True)
class ExportReport(Shown):
    """The files and tensors that were written, or would be written in a dry run.

    Attributes:
        path: the target; visible under this name unless ``dry_run``.
        format: format of the target.
        files: in the order in which they are numbered.
        tensors: in the order of the source; if tensors were split, their shards.
        read_nbytes: bytes of elements read from the source.
        copies: number of copies in the read plan.
        peak_nbytes: upper bound on the anonymous memory used.
        copied: small files copied from the source (``config.json`` …).
        carried: non-tensor objects that were also written.
        left_out: objects that have no place in the target; if objects were requested, ``notes`` say why.
        unselected: tensors of the source that ``select`` and ``role`` exclude.
        renamed_out: with ``rename="hf"``, tensors that have no place in the model: stored key → why.
        mesh: ``dp=2,tp=2`` if tensors were sharded for ranks.
        verified: whether the target was read back and every fingerprint matched.
        seconds: wall time of planning, writing, syncing and verifying.
        dry_run: whether nothing was written.
        notes: sentences about choices made.
    """

    path: str
    format: str
    files: tuple[FileReport, ...]
    tensors: tuple[TensorReport, ...]
    read_nbytes: int
    copies: int = 0
    peak_nbytes: int = 0
    copied: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unselected: tuple[str, ...] = ()
    renamed_out: Mapping[str, str] = field(default_factory=dict)
    mesh: str | None = None
    verified: bool = False
    seconds: float = 0.0
    dry_run: bool = False
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def casts(self) -> tuple[TensorReport, ...]:
        """Tensors whose element type or elements changed."""
        return tuple(one for one in self.tensors if one.source_dtype != one.dtype or one.source != one.target)

    @property
    def identical(self) -> bool:
        """Whether every tensor was written bit for bit as stored; ``False`` for a dry run, which proves nothing."""
        return not self.dry_run and all(one.source is not None and one.source == one.target for one in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"nbytes": self.nbytes, "identical": self.identical}

    def __str__(self) -> str:
        tensors, files = plural(len(self.tensors), "tensor"), plural(len(self.files), "file")
        what = f"{tensors}, {plural(self.nbytes, 'byte')} in {files} of {self.format}"
        if self.dry_run:
            return f"would write {what} to {self.path!r}"
        if self.identical:
            proof = "bit-identical to the source"
        else:
            proof = ", ".join([f"{len(self.casts):,} cast or changed", *change_words(self.casts)])
        if self.unselected:
            proof += f"; {plural(len(self.unselected), 'tensor')} of the source left out"
        return f"wrote {what} to {self.path!r} in {self.seconds:.1f} s: {proof}" + (
            "; verified by reading it back" if self.verified else ""
        )


def change_words(casts: Sequence[TensorReport]) -> list[str]:
    """Return what adapters changed in some tensors, what the cast rounded, and how many elements overflowed."""
    words = []
    updated, changed = sum(one.updated for one in casts), sum(one.changed for one in casts)
    if updated:
        most = max(casts, key=lambda one: one.max_update)
        words.append(f"adapters changed {plural(updated, 'element')} by up to {most.max_update:.3g} (in {most.name!r})")
    if changed:
        most = max(casts, key=lambda one: one.max_abs)
        words.append(f"rounding changed {plural(changed, 'element')} by up to {most.max_abs:.3g} (in {most.name!r})")
    lost = sum(one.overflowed for one in casts)
    return [*words, *[f"{lost:,} overflowed"] * bool(lost)] or ["no element has another value"]
