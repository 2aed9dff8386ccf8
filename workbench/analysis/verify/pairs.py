"""Check that data stored twice agrees: replicas, tied weights, and weights with their fp32 masters.

::

    replica 0   ▓▓▓▓▓▓        bit for bit, element by element
    replica 1   ▓▓▓▒▓▓   ✗    which rank drifted: the one that differs from most others

    weight bf16      0x3f81                                    rounded to nearest, ties to even
    master fp32      0x3f80c001  ──round──►  0x3f81   ✓

With stochastic rounding, weights differ by one ULP everywhere; a difference of more than one ULP means that weights and
masters are from two saves (the loss is right at the first step after a resume, and wrong at the second).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.bit_patterns import float_steps
from workbench.analysis.verify.log import Examined
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.parts import storable
from workbench.core.scan import Piece, Progress, scan
from workbench.core.words import plural, some_of
from workbench.core.work import ReadWork, pair_work
from workbench.errors import CorruptError, WorkbenchError
from workbench.names.weights import tied_pairs


@storable
@dataclass(slots=True)
class Count:
    """Elements compared, elements that differ, and the largest difference."""

    seen: int = 0
    differ: int = 0
    ulps: int = 0
    first: tuple[int, ...] | None = None
    rows: tuple[int, int] = (-1, -1)


class BitCounter:
    """Counts elements whose bits differ."""

    def begin(self, dtype: DType, other: DType | None) -> Count:
        """Return an empty state."""
        return Count()

    def fold(self, state: Count, piece: Piece) -> None:
        """Compare one piece."""
        state.seen += len(piece.bits)
        a, b = piece.bits, piece.other
        assert b is not None
        if a.dtype.kind == "V":
            a, b = (np.ascontiguousarray(x).view(np.uint64).reshape(-1, 2) for x in (a, b))
        differ = a != b
        if differ.ndim == 2:
            differ = differ.any(axis=1)
        _count_differing(state, piece, differ)

    def merge(self, state: Count, later: Count) -> None:
        """Add a later state."""
        state.seen += later.seen
        state.differ += later.differ
        state.ulps = max(state.ulps, later.ulps)
        if state.first is None:
            state.first, state.rows = later.first, later.rows


class Rounding(BitCounter):
    """Compares weights with their masters (float32), rounded to the weight's type."""

    def begin(self, dtype: DType, other: DType | None) -> Count:
        """Return an empty state."""
        return Count()

    def fold(self, state: Count, piece: Piece) -> None:
        """Compare one piece; NaNs are reported elsewhere."""
        weight, master = piece.bits, piece.other
        assert master is not None
        state.seen += len(weight)
        rounded = self.rounded(weight.dtype.itemsize, self.half, master)
        differ = rounded != weight
        if differ.any():
            differ &= ~np.isnan(master.view(np.float32))
            _count_differing(state, piece, differ)
            state.ulps = max(state.ulps, int(float_steps(rounded[differ], weight[differ]).max(initial=0)))

    def __init__(self, half: bool) -> None:
        self.half = half  #: IEEE half, else bfloat16 (or float32, which stays itself)

    @staticmethod
    def rounded(itemsize: int, half: bool, master: Array) -> Array:
        """Return the bits of float32 numbers rounded to nearest even in 16 bits."""
        if itemsize == 4:
            return master
        if half:
            with np.errstate(over="ignore", invalid="ignore"):
                return master.view(np.float32).astype(np.float16).view(np.uint16)
        even = (master >> np.uint32(16)) & np.uint32(1)
        return ((master + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)


def check_pairs(
    subject: Examined, progress: Progress | None = None, *, kinds: Collection[str] = ("replicas", "ties", "masters")
) -> None:
    """Check replicas, ties and masters, or only the given ``kinds``; only data stored twice is read again."""
    make = {"replicas": _replica_passes, "ties": _tied_passes, "masters": _master_passes}
    passes = [one for kind, made in make.items() if kind in kinds for one in made(subject)]
    for kind in make.keys() & subject.log.not_checked.keys():
        subject.log.checked.pop(kind, None)
    total = max(sum(int(work.nbytes.sum()) for work, *_ in passes), 1)
    done = 0
    for work, reducer, judge in passes:
        mine = int(work.nbytes.sum())

        def step(share: float, mine: int = mine, done: int = done) -> None:
            if progress is not None:
                progress((done + share * mine) / total)

        def failed(side: int, row: int, error: WorkbenchError) -> None:
            subject.lost[row] = True

        counts: dict[int, Count] = dict(scan(work, reducer, threads=subject.threads, progress=step, on_error=failed))
        judge(counts)
        done += mine


def pairs_nbytes(subject: Examined) -> int:
    """Return about how many bytes :func:`check_pairs` reads: copies and originals, masters and weights."""
    catalog, ckpt = subject.catalog, subject.ckpt
    twice = 2 * int(catalog.chunk_nbytes[catalog.replica > 0].sum())
    sizes = catalog.tensor_nbytes.tolist()
    held = {fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if role == "master" and fqn is not None}
    both = zip(sizes, ckpt.fqns, ckpt.roles, strict=True)
    return twice + sum(size for size, fqn, role in both if fqn in held and role in ("master", "param"))


# ---- replicas ------------------------------------------------------------------------------------------------------


def _replica_passes(subject: Examined) -> list[Any]:
    catalog, log = subject.catalog, subject.log
    most = int(catalog.replica.max(initial=0))
    if not most:
        log.not_checked["replicas"] = "no element is stored twice"
        return []
    log.checked["replicas"] = f"{plural(int((catalog.replica > 0).sum()), 'chunk')} against the first copy, bit for bit"
    passes = []
    for replica in range(1, most + 1):
        tensors = np.unique(catalog.tensor[catalog.replica == replica]).astype(np.int64)
        work = _paired(subject, "replicas", tensors, tensors, (0, replica))

        def judge(counts: dict[int, Count], tensors: Any = tensors) -> None:
            for group, count in sorted(counts.items()):
                if count.differ:
                    key = catalog.keys[int(tensors[group])]
                    a, b = (subject.file(row) for row in count.rows)
                    first = _first(subject, count, int(tensors[group]))
                    log.add(
                        "replicas.differ",
                        "error",
                        key,
                        f"{count.differ:,} of {count.seen:,} elements differ between "
                        f"the copies in {a!r} and {b!r}, first at {first}",
                        "one of the two ranks "
                        "drifted, or its file is damaged: the result of a resume depends on which copy is loaded",
                        files=[a, b],
                        differ=count.differ,
                        first=first,
                    )

        passes.append((work, BitCounter(), judge))
    return passes


# ---- ties ----------------------------------------------------------------------------------------------------------


def _tied_passes(subject: Examined) -> list[Any]:
    declared = _tied_by(subject)
    if declared is None:
        return []
    catalog = subject.catalog
    pairs = []
    params = {key: t for t, key in enumerate(catalog.keys) if subject.ckpt.roles[t] in ("param", "master")}
    for first, second in tied_pairs(params):
        t, u = params[first], params[second]
        if catalog.shape_of(t) == catalog.shape_of(u) and catalog.dtype[t] == catalog.dtype[u]:
            pairs.append((t, u))
    if not pairs:
        return []
    a, b = (np.array(column, np.int64) for column in zip(*pairs, strict=True))

    def judge(counts: dict[int, Count]) -> None:
        for group, count in counts.items():
            if count.differ:
                one, two = catalog.keys[int(a[group])], catalog.keys[int(b[group])]
                subject.log.add(
                    "tied.differ",
                    "error",
                    two,
                    f"{count.differ:,} of {count.seen:,} elements differ from {one!r}, although {declared} ties them",
                    "one of the two is from another save, or was reinitialised: a loader keeps only one",
                    other=one,
                    differ=count.differ,
                )

    subject.log.checked["ties"] = f"{plural(len(pairs), 'pair')} tied by {declared}, bit for bit"
    return [(_paired(subject, "ties", a, b), BitCounter(), judge)]


def _tied_by(subject: Examined) -> str | None:
    """Return what declares the embeddings as tied, if anything."""
    objects = subject.ckpt.objects
    for name in ("config", "args"):
        try:
            value = objects.get(name)
        except (WorkbenchError, RecursionError):  # reported by check_objects
            continue
        state = value if isinstance(value, Mapping) else getattr(value, "state", None)
        if isinstance(state, Mapping):
            if state.get("tie_word_embeddings") is True:
                return f"{name}.tie_word_embeddings"
            if state.get("untie_embeddings_and_output_weights") is False:
                return f"{name}.untie_embeddings_and_output_weights"
    return None


# ---- masters -------------------------------------------------------------------------------------------------------


def _master_passes(subject: Examined) -> list[Any]:
    ckpt, catalog = subject.ckpt, subject.catalog
    of: dict[str, dict[str, int]] = defaultdict(dict)
    for tensor, (fqn, role) in enumerate(zip(ckpt.fqns, ckpt.roles, strict=True)):
        if fqn is not None and role in ("param", "master"):
            of[fqn].setdefault(role, tensor)
    kinds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for roles in of.values():
        if len(roles) == 2 and catalog.dtype_of(roles["master"]).name == "float32":
            dtype = catalog.dtype_of(roles["param"]).name
            if catalog.shape_of(roles["param"]) == catalog.shape_of(roles["master"]):
                kinds[dtype].append((roles["param"], roles["master"]))
    passes = []
    for dtype in sorted(set(kinds) & {"bfloat16", "float16", "float32"}):
        a, b = (np.array(column, np.int64) for column in zip(*kinds[dtype], strict=True))
        work = _paired(subject, "masters", a, b)

        def judge(counts: dict[int, Count], a: Any = a, dtype: str = dtype) -> None:
            _judge_masters(subject, counts, a, dtype)

        passes.append((work, Rounding(dtype == "float16"), judge))
        words = f"{plural(len(a), 'weight')} of {dtype} equal their masters, rounded"
        subject.log.checked["masters"] = "; ".join(filter(None, (subject.log.checked.get("masters"), words)))
    if not passes:
        subject.log.not_checked["masters"] = "no weight is stored together with its master"
    return passes


def _judge_masters(subject: Examined, counts: dict[int, Count], params: Any, dtype: str) -> None:
    bad = {group: count for group, count in sorted(counts.items()) if count.differ}
    if not bad:
        return
    seen, differ = sum(c.seen for c in counts.values()), sum(c.differ for c in bad.values())
    if all(count.ulps <= 1 for count in bad.values()) and differ > seen / 100:
        keys = [subject.catalog.keys[int(params[group])] for group in bad]
        subject.log.add(
            "master.rounding",
            "warn",
            "",
            f"{differ:,} of {seen:,} weights differ by one {dtype} ULP from their rounded masters: {some_of(keys)}",
            "expected with stochastic rounding; otherwise weights and masters are from two steps",
            differ=differ,
            tensors=keys[:100],
        )
        return
    for group, count in bad.items():
        key = subject.catalog.keys[int(params[group])]
        a, b = (subject.file(row) for row in count.rows)
        first = _first(subject, count, int(params[group]))
        subject.log.add(
            "master.differs",
            "error",
            key,
            f"{count.differ:,} of {count.seen:,} weights in {a!r} differ from their "
            f"rounded masters in {b!r}, by up to {count.ulps:,} ULPs, first at {first}",
            "weights and masters are from two saves, or one of the files is damaged",
            differ=count.differ,
            ulps=count.ulps,
            files=[a, b],
            first=first,
        )


# ---- shared --------------------------------------------------------------------------------------------------------


def _paired(subject: Examined, kind: str, a: Array, b: Array, replicas: tuple[int, int] = (0, 0)) -> ReadWork:
    """Scan tensors ``a[k]`` and ``b[k]`` in parallel, skipping unreadable parts."""
    try:
        work = pair_work(subject.payloads, subject.payloads, a, b, replicas=replicas)
    except CorruptError as error:  # reported by check_boxes
        subject.log.not_checked[kind] = str(error)
        return pair_work(subject.payloads, subject.payloads, a[:0], b[:0])
    bad = np.zeros(len(work), bool)
    for side in work.sides:
        bad |= subject.lost[side.row]
    return work.take(np.flatnonzero(~bad))


def _first(subject: Examined, count: Count, tensor: int) -> list[int]:
    """Return the position of the first element that differs, on the tensor's own axes."""
    return list(count.first or ())[: int(subject.catalog.ndim[tensor])]


def _count_differing(state: Count, piece: Piece, differ: Array) -> None:
    count = int(np.count_nonzero(differ))
    if count:
        state.differ += count
        if state.first is None:
            state.first, state.rows = piece.where(int(differ.argmax())), (piece.row, piece.other_row)
