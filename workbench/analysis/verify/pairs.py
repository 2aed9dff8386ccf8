"""What is stored twice must agree: replicas, tied weights, and weights beside their fp32 masters.

::

    replica 0   ▓▓▓▓▓▓        bit for bit, element by element
    replica 1   ▓▓▓▒▓▓   ✗    which rank drifted: the one that differs from most

    weight bf16      0x3f81                                    rounded to nearest, ties to even
    master fp32      0x3f80c001  ──round──►  0x3f81   ✓

An optimizer that rounds stochastically differs by one step of the last bit everywhere; more than one step means that
weights and masters are of two saves (the loss is right at the first step after a resume, and wrong at the second).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.analysis.verify.log import Subject, names, plural
from workbench.core.dtypes import DType
from workbench.core.scan import Piece, Tick, scan
from workbench.core.work import Work, pair_work
from workbench.errors import CorruptError, WorkbenchError

__all__ = ["Rounding", "Same", "check_pairs", "pairs_nbytes"]

Array = np.ndarray[Any, Any]
#: Stored names of the two ends of a tied pair.
TIED = (
    ("embed_tokens.weight", "lm_head.weight"),
    ("wte.weight", "lm_head.weight"),
    ("word_embeddings.weight", "output_layer.weight"),
    ("tok_embeddings.weight", "output.weight"),
)


@dataclass(slots=True)
class Count:
    """Elements compared, those that differ, and by how much at most."""

    seen: int = 0
    differ: int = 0
    ulps: int = 0
    first: tuple[int, ...] | None = None
    rows: tuple[int, int] = (-1, -1)


class Same:
    """Counts elements whose bits differ."""

    def begin(self, dtype: DType, other: DType | None) -> Count:
        """Nothing compared yet."""
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
        _take(state, piece, differ)

    def merge(self, state: Count, later: Count) -> None:
        """Add a later state."""
        state.seen += later.seen
        state.differ += later.differ
        state.ulps = max(state.ulps, later.ulps)
        if state.first is None:
            state.first, state.rows = later.first, later.rows


class Rounding(Same):
    """Compares weights with their masters (float32), rounded to the weight's type."""

    def begin(self, dtype: DType, other: DType | None) -> Count:
        """Nothing compared yet."""
        return Count()

    def fold(self, state: Count, piece: Piece) -> None:
        """Compare one piece; NaNs are told elsewhere."""
        weight, master = piece.bits, piece.other
        assert master is not None
        state.seen += len(weight)
        rounded = self.rounded(weight.dtype.itemsize, self.half, master)
        differ = rounded != weight
        if differ.any():
            differ &= ~np.isnan(master.view(np.float32))
            _take(state, piece, differ)
            state.ulps = max(state.ulps, int(_distance(rounded[differ], weight[differ]).max(initial=0)))

    def __init__(self, half: bool) -> None:
        self.half = half  #: IEEE half, else bfloat16 (or float32, which stays itself)

    @staticmethod
    def rounded(itemsize: int, half: bool, master: Array) -> Array:
        """Bits of float32 numbers rounded to nearest even in 16 bits."""
        if itemsize == 4:
            return master
        if half:
            with np.errstate(over="ignore", invalid="ignore"):
                return master.view(np.float32).astype(np.float16).view(np.uint16)
        even = (master >> np.uint32(16)) & np.uint32(1)
        return ((master + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)


def check_pairs(
    subject: Subject, tick: Tick | None = None, *, kinds: Collection[str] = ("replicas", "ties", "masters")
) -> None:
    """Replicas, ties and masters, or those ``kinds`` of them; only what exists twice is read again."""
    make = {"replicas": _replica_passes, "ties": _tied_passes, "masters": _master_passes}
    passes = [one for kind, made in make.items() if kind in kinds for one in made(subject)]
    for kind in make.keys() & subject.log.not_checked.keys():
        subject.log.checked.pop(kind, None)
    total = max(sum(int(work.nbytes.sum()) for work, *_ in passes), 1)
    done = 0
    for work, reducer, judge in passes:
        mine = int(work.nbytes.sum())

        def step(share: float, mine: int = mine, done: int = done) -> None:
            if tick is not None:
                tick((done + share * mine) / total)

        def failed(side: int, row: int, error: WorkbenchError) -> None:
            subject.lost[row] = True

        counts: dict[int, Count] = dict(scan(work, reducer, threads=subject.threads, tick=step, on_error=failed))
        judge(counts)
        done += mine


def pairs_nbytes(subject: Subject) -> int:
    """Bytes that :func:`check_pairs` reads, about: copies and their first, masters and their weights."""
    catalog, ckpt = subject.catalog, subject.ckpt
    twice = 2 * int(catalog.chunk_nbytes[catalog.replica > 0].sum())
    sizes = catalog.tensor_nbytes.tolist()
    held = {fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if role == "master" and fqn is not None}
    both = zip(sizes, ckpt.fqns, ckpt.roles, strict=True)
    return twice + sum(size for size, fqn, role in both if fqn in held and role in ("master", "param"))


# ---- replicas ------------------------------------------------------------------------------------------------------


def _replica_passes(subject: Subject) -> list[Any]:
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
                    log.add(
                        "replicas.differ",
                        "error",
                        key,
                        f"{count.differ:,} of {count.seen:,} elements differ between "
                        f"its copies in {a!r} and {b!r}, first at {list(count.first or ())}",
                        "one of the two ranks "
                        "drifted or its file is damaged: which copy a loader takes decides the run",
                        files=[a, b],
                        differ=count.differ,
                        first=list(count.first or ()),
                    )

        passes.append((work, Same(), judge))
    return passes


# ---- ties ----------------------------------------------------------------------------------------------------------


def _tied_passes(subject: Subject) -> list[Any]:
    told = _told_tied(subject)
    if told is None:
        return []
    catalog = subject.catalog
    pairs = []
    params = {key: t for t, key in enumerate(catalog.keys) if subject.ckpt.roles[t] in ("param", "master")}
    for first, second in TIED:
        for key, tensor in params.items():
            if key == first or key.endswith("." + first):
                head = key[: len(key) - len(first)]
                for prefix in (head, head.removesuffix("model."), head.removesuffix("embedding.")):
                    other = params.get(prefix + second)
                    if other is not None and catalog.shape_of(other) == catalog.shape_of(tensor):
                        if catalog.dtype[other] == catalog.dtype[tensor]:
                            pairs.append((tensor, other))
                        break
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
                    f"{count.differ:,} of {count.seen:,} elements differ from {one!r}, to which {told} ties it",
                    "one of the two is of another save, or was initialised anew: a loader keeps only one",
                    other=one,
                    differ=count.differ,
                )

    subject.log.checked["ties"] = f"{plural(len(pairs), 'pair')} that {told} ties, bit for bit"
    return [(_paired(subject, "ties", a, b), Same(), judge)]


def _told_tied(subject: Subject) -> str | None:
    """What says that the embeddings are tied, or nothing."""
    objects = subject.ckpt.objects
    for name in ("config", "args"):
        try:
            value = objects.get(name)
        except (WorkbenchError, RecursionError):  # told by check_objects
            continue
        state = value if isinstance(value, Mapping) else getattr(value, "state", None)
        if isinstance(state, Mapping):
            if state.get("tie_word_embeddings") is True:
                return f"{name}.tie_word_embeddings"
            if state.get("untie_embeddings_and_output_weights") is False:
                return f"{name}.untie_embeddings_and_output_weights"
    return None


# ---- masters -------------------------------------------------------------------------------------------------------


def _master_passes(subject: Subject) -> list[Any]:
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
        subject.log.not_checked["masters"] = "no weight is stored beside a master of it"
    return passes


def _judge_masters(subject: Subject, counts: dict[int, Count], params: Any, dtype: str) -> None:
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
            f"{differ:,} of {seen:,} weights are one step of {dtype}'s last bit "
            f"from their rounded masters: {names(keys)}",
            "right for stochastic rounding; else weights and masters are of two steps",
            differ=differ,
            tensors=keys[:100],
        )
        return
    for group, count in bad.items():
        key = subject.catalog.keys[int(params[group])]
        a, b = (subject.file(row) for row in count.rows)
        subject.log.add(
            "master.differs",
            "error",
            key,
            f"{count.differ:,} of {count.seen:,} weights in {a!r} are not their "
            f"rounded masters in {b!r}, by up to {count.ulps:,} steps of the last bit, first at "
            f"{list(count.first or ())}",
            "weights and masters are of two saves, or one of the files is damaged",
            differ=count.differ,
            ulps=count.ulps,
            files=[a, b],
            first=list(count.first or ()),
        )


# ---- shared --------------------------------------------------------------------------------------------------------


def _paired(subject: Subject, kind: str, a: Array, b: Array, replicas: tuple[int, int] = (0, 0)) -> Work:
    """Tensors ``a[k]`` and ``b[k]`` side by side, without what cannot be read."""
    try:
        work = pair_work(subject.payloads, subject.payloads, a, b, replicas=replicas)
    except CorruptError as error:  # told by check_boxes
        subject.log.not_checked[kind] = str(error)
        return pair_work(subject.payloads, subject.payloads, a[:0], b[:0])
    bad = np.zeros(len(work), bool)
    for side in work.sides:
        bad |= subject.lost[side.row]
    return work.take(np.flatnonzero(~bad))


def _take(state: Count, piece: Piece, differ: Array) -> None:
    count = int(np.count_nonzero(differ))
    if count:
        state.differ += count
        if state.first is None:
            state.first, state.rows = piece.where(int(differ.argmax())), (piece.row, piece.other_row)


def _distance(a: Array, b: Array) -> Array:
    """Steps of the last bit between floats given as bits; -0 and 0 are one place."""
    bits = a.dtype.itemsize * 8
    sign = 1 << (bits - 1)

    def place(x: Array) -> Array:
        wide = x.astype(np.int64)
        return np.where(wide & sign, sign - wide, wide)

    return np.abs(place(a) - place(b))
