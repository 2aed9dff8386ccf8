"""Compare two checkpoints: tensors in only one, different names, dtypes, shapes or places, and changed values.

::

    align    key · fqn and role · name map · fingerprint          workbench.analysis.diff_pairs
    values   every pair, every element, whatever the shardings    workbench.analysis.compare
    or       stored CRC-32, manifests: no payload read            workbench.analysis.evidence
    pattern  of changed tensors, where it can be proved           workbench.analysis.patterns
    objects  step, arguments, schedulers, generators              workbench.analysis.diff_objects
    rounding of a GGUF that was made from the other side          workbench.analysis.rounding
    result   rows, counts, tables, JSON                           workbench.analysis.diff_result

Equal means bitwise equal; for tensors that a converter wrote in another type, the same numbers. A different sharding,
file or format is reported, but is not a difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench.analysis import evidence as file_evidence
from workbench.analysis.compare import compare
from workbench.analysis.comparison import Comparison
from workbench.analysis.diff_objects import ObjectChange, object_changes
from workbench.analysis.diff_pairs import MAP, TensorPair, align, renamed
from workbench.analysis.diff_place import moved
from workbench.analysis.diff_result import Diff
from workbench.analysis.diff_rows import TensorDiff
from workbench.analysis.name_map import TIED, NameMap, mapped
from workbench.analysis.patterns import Sibling, recognise
from workbench.analysis.rounding import CellCheck, has_bound, roundings
from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core.engine import engine
from workbench.core.executors import using
from workbench.core.remote.url import with_options
from workbench.core.scan import Progress, part_of
from workbench.core.source import needs_descriptors
from workbench.core.words import plural
from workbench.errors import UsageError, WorkbenchError
from workbench.names.gguf import LEFT_OUT, MADE, conversion
from workbench.tensor import LazyTensor

PATTERN_TENSORS = 64  #: maximum number of changed tensors searched for a pattern
PATTERN_BYTES = 1 << 30  #: maximum bytes of them
SIBLINGS = 64  #: tensors of the same dtype and shape with which a changed one may have been swapped

GGUF = "gguf"
EVIDENCE = ("auto", "none", "trust")


@needs_descriptors()
def diff(
    a: Checkpoint | str | os.PathLike[str],
    b: Checkpoint | str | os.PathLike[str],
    *,
    names: NameMap | None = None,
    values: bool = True,
    evidence: str = "auto",
    patterns: bool = True,
    replicas: tuple[int, int] = (0, 0),
    threads: int | None = None,
    progress: Progress | None = None,
    fast: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Diff:
    """Compare two checkpoints, of any formats and shardings.

    If they are quantised in different ways, their decoded values are compared. A GGUF can be compared with the
    checkpoint that it was made from, which is then always ``a``.

    Args:
        a, b: checkpoints, or paths that are opened.
        names: a map from the names of ``a`` to those of ``b``; by default computed if keys do not match.
        values: compare every element; otherwise only structure, objects, and what is known without reading payloads.
        evidence: ``auto``: used if values are not read; ``none``: never; ``trust``: tensors that are equal according
            to stored checksums or manifests are not read and count as equal.
        patterns: identify patterns of change that can be proved. The search is limited; what was left out is reported.
        replicas: the stored copy of each side: ``diff(ckpt, ckpt, replicas=(0, 1))`` compares the ranks' copies.
        threads: number of worker threads; by default one per available core, up to 8.
        progress: called with the fraction done; raise to cancel.
        fast: use numba; by default if it can be imported and the work is large.
        storage_options: for those of ``a`` and ``b`` that are URLs, as in ``wb.open``. If the two need different ones,
            open them first: ``diff(wb.open(a, storage_options=…), wb.open(b, storage_options=…))``.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. Patterns are searched for in this process. The
            result is the same, bit for bit.

    Raises:
        OpenError: a path cannot be opened. Tensors that cannot be read are rows of status ``unread``.
        UsageError: an unknown ``evidence``.
        WorkerError: the executor lost its workers or its scheduler.
    """
    if evidence not in EVIDENCE:
        raise UsageError(f"evidence={evidence!r}: choose one of {', '.join(EVIDENCE)}")
    with using(executor), with_options(storage_options, a, b):
        left = as_checkpoint(a)
        right = as_checkpoint(b)
        if names is None and left.format == GGUF != right.format:
            left, right, replicas = right, left, replicas[::-1]
        return _Differ(left, right, names, values, evidence, patterns, replicas, threads, progress, fast).run()


@dataclass
class _Differ:
    a: Checkpoint
    b: Checkpoint
    names: NameMap | None
    values: bool
    evidence: str
    patterns: bool
    replicas: tuple[int, int]
    threads: int | None
    progress: Progress | None
    fast: bool | None

    def run(self) -> Diff:
        self.checked: dict[str, str] = {}
        self.stored = self.b.payloads
        self.not_checked: dict[str, str] = {}
        self.converted = self.rounds = self.names is None and self.b.format == GGUF != self.a.format
        notes = self._decode()
        a, b = self.a, self.b
        found = align(a, b, self.names)
        pairs, notes = found.pairs, notes + found.notes
        if self.converted:
            self._left_out(found.only_a, found.only_b)
        if self.replicas != (0, 0):
            pairs = [pair for pair in pairs if self._stored(pair)]
            self.checked["replicas"] = (
                f"copies {self.replicas[0]} and {self.replicas[1]} of {len(pairs):,} of {len(found.pairs):,} tensors; "
                "the others are stored once"
            )
        if self.values and found.only_a and found.only_b and self.replicas == (0, 0):
            same, more = renamed(a, b, found.only_a, found.only_b, threads=self.threads)
            notes = notes + more
            pairs = sorted(pairs + same, key=lambda pair: pair.tensor_b)
            for pair in same:
                del found.only_a[pair.key_a], found.only_b[pair.key_b]
        elif found.only_a and found.only_b:
            self.not_checked["renamed"] = "tensors with different names were not compared by content"
        rows = self._rows(pairs)
        looked = a is not b and self.replicas == (0, 0) and not self.converted
        objects = tuple(object_changes(a.objects, b.objects)) if looked else ()
        skipped = [change for change in objects if change.kind in ("unreadable", "unlooked")]
        self.not_checked |= {f"object {change.path!r}": change.text for change in skipped}
        objects = tuple(change for change in objects if change not in skipped)
        for name in dict.fromkeys(name for side in (a, b) for name in side.catalog.meta.get("left_out", ())):
            skipped.append(ObjectChange(name, "unlooked", "it is stored in an unsupported form"))
            self.not_checked[f"tensor {name!r}"] = skipped[-1].text
        if self.converted:
            self.not_checked["objects"] = "a configuration and the metadata of a GGUF cannot be compared"
        elif self.replicas == (0, 0):
            count = len(set(a.objects) | set(b.objects))
            self.checked["objects"] = f"{count:,} object{'' if count == 1 else 's'}"
        if self.progress is not None:
            self.progress(1.0)
        return Diff(
            a.path,
            b.path,
            (a.format, b.format),
            (a.step, b.step),
            tuple(rows),
            found.only_b,
            found.only_a,
            objects,
            self.values,
            tuple(notes),
            self.checked,
            self.not_checked,
            tuple(skipped),
        )

    def _decode(self) -> list[str]:
        """View both sides as numbers if no tensor of both is quantised in the same way."""
        if self.names is not None or not self.values or self.evidence == "trust" or self.replicas != (0, 0):
            return []
        schemes = [{(one.key, one.scheme) for one in ckpt._decoding.recipes} for ckpt in (self.a, self.b)]
        if not (schemes[0] or schemes[1]) or schemes[0] & schemes[1]:
            return []
        self.stored = self.b._decoding.stored
        self.rounds |= self.b.format == GGUF and not schemes[0]  # quantised from a GGUF of floats
        self.a, self.b = self.a.decode(), self.b.decode()
        words = [", ".join(sorted({scheme for _, scheme in side})) for side in schemes]
        return [
            f"{letter} is quantised ({names}): its tensors are compared as decoded numbers"
            for letter, names in zip("ab", words, strict=True)
            if names
        ]

    def _left_out(self, only_a: dict[str, str], only_b: dict[str, str]) -> None:
        """Remove tensors that a conversion adds or leaves out by design from the differences."""
        for key in [key for key in only_b if key in MADE]:
            self.not_checked[f"tensor {key!r}"] = only_b.pop(key)
        for key in [key for key, why in only_a.items() if why == TIED or key.endswith(LEFT_OUT)]:
            self.not_checked[f"tensor {key!r}"] = only_a.pop(key) or "the converter leaves it out"

    def _stored(self, pair: TensorPair) -> bool:
        return all(
            int(ckpt.catalog.replica[ckpt.catalog.rows_of(tensor)].max(initial=-1)) >= replica
            for ckpt, tensor, replica in zip(
                (pair.a, self.b), (pair.tensor_a, pair.tensor_b), self.replicas, strict=True
            )
        )

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, pairs: Sequence[TensorPair]) -> list[TensorDiff]:
        # a row can be pickled: it keeps the checkpoints, but nothing of this call
        places = moved(pairs, self.b, self.replicas)
        rows = [
            TensorDiff.of(pair, self.b, moved=place, sides=partial(_sides, pair, self.b, self.replicas))
            for pair, place in zip(pairs, places, strict=True)
        ]
        todo = [at for at, row in enumerate(rows) if row.status != "shape"]
        if not self.values or self.evidence == "trust":
            todo = self._by_evidence(pairs, rows, todo)
        if self.values:
            self._by_value(pairs, rows, todo)
            if self.rounds:
                self._roundings(pairs, rows)
            if self.patterns:
                self._patterns(pairs, rows)
        else:
            self.not_checked["values"] = "no payload was read; compare values to see how tensors differ"
        return rows

    def _by_evidence(self, pairs: Sequence[TensorPair], rows: list[TensorDiff], todo: list[int]) -> list[int]:
        """Fill in the evidence of the files; return the rows that must still be read."""
        if self.evidence == "none":
            for at in todo:
                rows[at] = replace(rows[at], status="unknown")
            return todo
        usable = [at for at in todo if pairs[at].by != MAP and rows[at].dtype_a == rows[at].dtype_b]
        found = file_evidence.gather(
            self.a, self.b, [pairs[at].tensor_a for at in usable], [pairs[at].tensor_b for at in usable], self.replicas
        )
        self.checked |= found.checked
        settled = set()
        for at, verdict in zip(usable, found.verdicts, strict=True):
            if not self.values or verdict.status == "equal":
                settled.add(at)
                status = "equal" if not rows[at].numel else verdict.status
                rows[at] = replace(rows[at], status=status, source=verdict.source, chunk_rows=verdict.chunks)
        if not self.values:
            self.not_checked |= found.not_checked
            for at in set(todo) - set(usable):
                rows[at] = replace(rows[at], status="equal" if not rows[at].numel else "unknown")
            return []
        return [at for at in todo if at not in settled]

    def _by_value(self, pairs: Sequence[TensorPair], rows: list[TensorDiff], todo: list[int]) -> None:
        sides: dict[int, list[int]] = {}
        for at in todo:
            sides.setdefault(id(pairs[at].a.catalog), []).append(at)
        total = sum(rows[at].nbytes for at in todo) or 1
        done, elements, problems = 0, 0, {}
        chosen = engine(2 * total, self.fast)
        for group in sides.values():
            left = pairs[group[0]].a
            share = sum(rows[at].nbytes for at in group) / total
            errors: dict[tuple[int, int], str] = {}

            def on_error(
                side: int,
                row: int,
                error: WorkbenchError,
                left: Checkpoint = left,
                errors: dict[tuple[int, int], str] = errors,
            ) -> None:
                catalog = (left, self.b)[side].catalog
                errors.setdefault((side, int(catalog.tensor[row])), str(error))

            found = compare(
                left.payloads,
                self.b.payloads,
                np.array([pairs[at].tensor_a for at in group], np.int64),
                np.array([pairs[at].tensor_b for at in group], np.int64),
                replicas=self.replicas,
                threads=self.threads,
                progress=part_of(self.progress, 0.9 * done / total, 0.9 * share),
                on_error=on_error,
                fast=chosen == "numba",
            )
            read = dict(found)
            for k, at in enumerate(group):
                why = errors.get((0, pairs[at].tensor_a)) or errors.get((1, pairs[at].tensor_b)) or ""
                again = partial(_again, pairs[at], self.b, self.replicas)
                rows[at] = rows[at].compared(read.get(k), why, again)
                elements += read[k].seen if k in read else 0
                if why:
                    problems[rows[at].key_b] = why
            done += sum(rows[at].nbytes for at in group)
        if todo:
            self.checked["values"] = (
                f"{plural(elements, 'element')} of {plural(len(todo), 'tensor')}, bit by bit (with {chosen})"
            )
        for key, why in problems.items():
            self.not_checked[f"tensor {key!r}"] = why

    def _roundings(self, pairs: Sequence[TensorPair], rows: list[TensorDiff]) -> None:
        """Determine whether each converted tensor equals its source, up to the rounding of its stored type."""
        catalog = self.stored.catalog
        weighted = conversion(self.b.objects).weighted
        todo: list[int] = []
        for at, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
            c = row.comparison
            if row.status not in ("type", "changed") or c is None or c.unread:
                continue
            name = catalog.dtype_of(catalog.index[pair.key_b]).name
            if not c.changed:
                rows[at] = replace(row, status="equal")
            elif name == "NVFP4" and f"{pair.key_b.removesuffix('.weight')}.scale" in catalog.index:
                why = "NVFP4 with a scale in a tensor of its own, which is not applied here"
                rows[at] = replace(row, status="type", why=why)
            elif has_bound(name, weighted):
                todo.append(at)
            elif name in ("float32", "float64"):
                rows[at] = replace(row, status="changed")
            else:
                how = " with an importance matrix" if weighted else ""
                why = f"{name}{how} does not store the nearest code of each number; its rounding has no bound"
                rows[at] = replace(row, status="type", why=why)
        for at, found in self._within(pairs, todo):
            rows[at] = rows[at].rounded(found)
        kinds = {row.rounding.scheme for row in rows if row.rounding is not None}
        if kinds:
            names = ", ".join(sorted(kinds))
            self.checked["rounding"] = f"{plural(len(todo), 'tensor')} against what their codes stand for ({names})"
        if self.converted:
            self._without(pairs, rows)

    def _within(self, pairs: Sequence[TensorPair], todo: list[int]) -> Iterator[tuple[int, CellCheck]]:
        sides: dict[int, list[int]] = {}
        for at in todo:
            sides.setdefault(id(pairs[at].a.catalog), []).append(at)
        for group in sides.values():
            places = [(pairs[at].tensor_a, self.stored.catalog.index[pairs[at].key_b]) for at in group]
            found = roundings(pairs[group[0]].a.payloads, self.stored, places, threads=self.threads)
            for k, one in found:
                yield group[k], one

    def _without(self, pairs: Sequence[TensorPair], rows: list[TensorDiff]) -> None:
        """Find damaged tensors that equal the source without the changes that the converter should have made."""
        done, undone = (conversion(self.b.objects, plain=plain) for plain in (False, True))
        damaged = [
            at
            for at, row in enumerate(rows)
            if row.status == "changed" and done.links(row.key_b, row.shape_b) != undone.links(row.key_b, row.shape_b)
        ]
        if not damaged:
            return
        names = mapped(self.a, self.b, plain=True)
        plain = {pair.key_b: pair for pair in align(self.a, self.b, names).pairs}
        for at in damaged:
            pair = plain.get(rows[at].key_b)
            if pair is None:
                continue
            one, two = np.array([pair.tensor_a]), np.array([pair.tensor_b])
            same = dict(compare(pair.a.payloads, self.b.payloads, one, two, threads=self.threads))[0].equal
            if not same and rows[at].rounding is not None:
                same = not next(found for _, found in self._within([pair], [0])).beyond
            if same:
                norm = "1 was not added to it" if "norm" in rows[at].key_b else "its rows were not permuted"
                why = f"it equals the unconverted source: {norm}, although llama.cpp expects that"
                rows[at] = replace(rows[at], why=why)

    def _patterns(self, pairs: Sequence[TensorPair], rows: list[TensorDiff]) -> None:
        wanted = [at for at, row in enumerate(rows) if row.status in ("changed", "type", "shape") and row.nbytes]
        wanted.sort(key=lambda at: rows[at].weight(), reverse=True)
        siblings = self._siblings()
        spent = looked = 0
        for at in wanted:
            pair, row = pairs[at], rows[at]
            if looked == PATTERN_TENSORS or spent + row.nbytes > PATTERN_BYTES:
                continue
            looked, spent = looked + 1, spent + row.nbytes
            first, second = _sides(pair, self.b, self.replicas)
            others = (
                [one for t, one in siblings.get((row.dtype_b, row.shape_b), []) if t != pair.tensor_a]
                if pair.a is self.a
                else []
            )
            try:
                pattern = recognise(first, second, siblings=others[:SIBLINGS])
            except WorkbenchError as error:
                self.not_checked[f"pattern of tensor {row.key_b!r}"] = str(error)
                continue
            rows[at] = replace(row, pattern=pattern)
            if self.progress is not None:
                self.progress(0.9 + 0.1 * looked / min(len(wanted), PATTERN_TENSORS))
        if looked < len(wanted):
            self.not_checked["patterns"] = (
                f"{len(wanted) - looked:,} of {len(wanted):,} changed tensors were not searched for a pattern; the "
                f"limit is {PATTERN_TENSORS} tensors and {PATTERN_BYTES >> 20:,} MiB"
            )

    def _siblings(self) -> dict[tuple[str, tuple[int, ...]], list[tuple[int, Sibling]]]:
        catalog = self.a.catalog
        found: dict[tuple[str, tuple[int, ...]], list[tuple[int, Sibling]]] = {}
        for t in range(len(catalog)):
            kind = catalog.dtype_of(t).name, catalog.shape_of(t)
            found.setdefault(kind, []).append((t, Sibling(self.a._tensor(t))))
        return found


def _sides(pair: TensorPair, b: Checkpoint, replicas: tuple[int, int]) -> tuple[LazyTensor, LazyTensor]:
    first, second = pair.a._tensor(pair.tensor_a), b._tensor(pair.tensor_b)
    if replicas == (0, 0):
        return first, second
    return first.replica(replicas[0]), second.replica(replicas[1])


def _again(pair: TensorPair, b: Checkpoint, replicas: tuple[int, int], progress: Progress | None) -> Comparison | None:
    """Compare one pair once more, with histograms."""
    one, two = np.array([pair.tensor_a]), np.array([pair.tensor_b])
    found = compare(pair.a.payloads, b.payloads, one, two, replicas=replicas, histograms=True, progress=progress)
    return dict(found).get(0)
