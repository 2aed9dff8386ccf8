"""Statistics of a whole checkpoint as a table: one row per tensor, stored chunk, or module.

::

    by="tensor"   each element once, whatever the sharding and the copies
    by="shard"    each chunk as it is stored, copies too: does one rank's differ?
    by="module"   layers.3 is all below layers.3; the root is ""; floating-point tensors only

One pass over the payload (:mod:`workbench.core.scan`) folds :mod:`moments <workbench.analysis.moments>`, and, if
quantiles are requested, a :mod:`census <workbench.analysis.census>`. Results that took longer than a second are kept
in the user's cache folder under a key of every file's name, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.census import Census, Counts
from workbench.analysis.moment import Moment
from workbench.analysis.moments import Moments
from workbench.checkpoint import Checkpoint, as_checkpoint
from workbench.core import box
from workbench.core import scan as scanning
from workbench.core.arrays import Array
from workbench.core.cache import cache_folder
from workbench.core.disk import keep
from workbench.core.dtypes import ALL, DType
from workbench.core.engine import engine
from workbench.core.executors import using
from workbench.core.scan import Piece, Progress
from workbench.core.source import needs_descriptors
from workbench.core.work import chunk_work
from workbench.errors import UsageError, WorkbenchError

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2  #: version of the computation; part of the cache's key
WORTH_KEEPING = 1.0  #: seconds from which a result is kept
BY = ("tensor", "shard", "module")
REALS = ("min", "max", "mean", "std", "norm", "absmean", "rms")
COUNTS = ("zero", "nan", "posinf", "neginf", "subnormal")
NUMBERS = (*REALS, *COUNTS)
QUANTILES = {"q01": 0.01, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q99": 0.99}
_OF_CENSUS = (*QUANTILES, "distinct", "entropy")


@needs_descriptors()
def stats(
    ckpt: Checkpoint | str | os.PathLike[str],
    by: str = "tensor",
    *,
    quantiles: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    cache: bool = True,
    executor: Executor | None = None,
) -> pd.DataFrame:
    """Compute statistics of every tensor, stored chunk or module.

    Args:
        ckpt: a checkpoint, a selection of one, or a path or URL.
        by: ``tensor``, ``shard`` (one row per chunk, including copies) or ``module``.
        quantiles: also q01 q25 q50 q75 q99, distinct, entropy (bits per element): exact for dtypes of 16 bits or less;
            for wider ones, quantiles are within 0.4 % and the other two are missing.
        threads: number of reader threads; by default one per core, up to 8.
        progress: called with the fraction done; raise to cancel.
        cache: use and store results that took longer than a second.
        executor: a ``concurrent.futures.Executor`` whose workers do the reading: a process pool with the start method
            ``spawn``, or ``distributed.Client(…).get_executor()``. The result is the same, bit for bit.

    Returns:
        by tensor: key fqn role dtype shape numel nbytes, by shard: key fqn role dtype offsets sizes file rank replica
        numel nbytes, by module: module tensors numel nbytes; then min max mean std absmean of the finite elements
        (of complex ones the magnitudes; NaN if there are none), norm rms of all elements (NaN where one is NaN,
        else infinite where one is infinite), zero nan posinf neginf subnormal as counts, and ``error``: why some
        elements are missing from the row's numbers, or NA. Of a module, tensors numel nbytes count all its tensors, and
        the other columns only those of floats.
        ``attrs["engine"]`` states what computed it: ``numpy``, ``numba`` or ``cache``.

    Raises:
        UsageError: another ``by``, or quantiles of modules.
        WorkerError: the executor lost its workers or its scheduler.
    """
    if by not in BY:
        raise UsageError(f"by={by!r}: choose one of {', '.join(map(repr, BY))}")
    if by == "module" and quantiles:
        raise UsageError("quantiles of modules are not available; use by='tensor' or by='shard'")
    ckpt = as_checkpoint(ckpt)
    kept = _kept(ckpt, by, quantiles) if cache else None
    errors: dict[int, str] = {}
    if kept is not None:
        columns, how = kept, "cache"
    else:
        how, begin = engine(int(ckpt.catalog.tensor_nbytes.sum())), time.perf_counter()
        with using(executor):
            columns, errors = _computed(ckpt, by == "shard", quantiles, how, threads, progress)
        if cache and not errors and time.perf_counter() - begin > WORTH_KEEPING:
            keep(_path(ckpt, by, quantiles), lambda out: np.savez(out, **columns))  # type: ignore[arg-type]
    frame = {"tensor": _by_tensor, "shard": _by_shard, "module": _by_module}[by](ckpt, columns, errors)
    frame.attrs["engine"] = how
    return frame


# ---- the pass --------------------------------------------------------------------------------------------------------


class _Full:
    """Moments and census together; an exact census also determines the moments."""

    def __init__(self, how: str) -> None:
        self.engine = how
        self._moments, self._census = Moments(how), Census(how)

    def begin(self, dtype: DType, other: DType | None) -> tuple[Moment, Counts | None]:
        return self._moments.begin(dtype), self._census.begin(dtype)

    def fold(self, state: tuple[Moment, Counts | None], piece: Piece) -> None:
        moment, counts = state
        self._census.fold(counts, piece)
        if counts is None or not counts.exact:
            self._moments.fold(moment, piece)

    def merge(self, state: tuple[Moment, Counts | None], later: tuple[Moment, Counts | None]) -> None:
        self._moments.merge(state[0], later[0])
        self._census.merge(state[1], later[1])


def _computed(
    ckpt: Checkpoint, by_chunk: bool, quantiles: bool, how: str, threads: int | None, progress: Progress | None
) -> tuple[dict[str, Array], dict[int, str]]:
    """Compute the columns, one row per tensor (or chunk row), and the errors by row."""
    catalog = ckpt.catalog
    rows = catalog.chunks if by_chunk else len(catalog)
    group = np.arange(rows) if by_chunk else None
    order = "group" if quantiles and not by_chunk else "file"
    work = chunk_work(ckpt.payloads, replica=None if by_chunk else 0, group=group, order=order)
    columns: dict[str, Array] = {name: np.full(rows, np.nan) for name in REALS}
    columns |= {name: np.zeros(rows, np.int64) for name in (*COUNTS, "finite", "seen")}
    if quantiles:
        columns |= {name: np.full(rows, np.nan) for name in _OF_CENSUS}
    errors: dict[int, str] = {}

    def failed(side: int, row: int, error: WorkbenchError) -> None:
        errors.setdefault(row if by_chunk else int(catalog.tensor[row]), str(error))

    reducer: Any = _Full(how) if quantiles else Moments(how)
    for at, state in scanning.scan(work, reducer, threads=threads, progress=progress, on_error=failed):
        _enter(columns, at, *(state if quantiles else (state, None)))
    whole = _chunk_numel(ckpt) if by_chunk else catalog.numel
    for at in np.flatnonzero(columns["seen"] < whole).tolist():
        lost, why = int(whole[at] - columns["seen"][at]), errors.get(at, "they are not stored")
        errors[at] = f"{lost:,} of {int(whole[at]):,} elements are missing here: {why}"
    return columns, errors


def _enter(columns: dict[str, Array], at: int, moment: Moment, counts: Counts | None) -> None:
    if counts is not None and counts.exact:
        moment = counts.moment()
    real = (moment.min, moment.max, moment.average, moment.std, moment.norm, moment.absmean, moment.rms)
    for name, value in zip(REALS, real, strict=True):
        columns[name][at] = np.nan if value is None else value
    for name in (*COUNTS, "finite"):
        columns[name][at] = getattr(moment, name)
    columns["seen"][at] = moment.count
    if counts is None:
        return
    found = counts.quantiles(np.array(list(QUANTILES.values())), moment.min, moment.max)
    for position, name in enumerate(QUANTILES):
        columns[name][at] = np.nan if found is None else found[position]
    for name, known in (("distinct", counts.distinct), ("entropy", counts.entropy)):
        columns[name][at] = np.nan if known is None else known


def _chunk_numel(ckpt: Checkpoint) -> Array:
    return np.prod(ckpt.catalog.sizes, axis=1, dtype=np.int64)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _by_tensor(ckpt: Checkpoint, columns: dict[str, Array], errors: dict[int, str]) -> pd.DataFrame:
    return _with_numbers(ckpt.tensors[["key", "fqn", "role", "dtype", "shape", "numel", "nbytes"]], columns, errors)


def _by_shard(ckpt: Checkpoint, columns: dict[str, Array], errors: dict[int, str]) -> pd.DataFrame:
    tensor = ckpt.catalog.tensor
    frame = ckpt.chunks[["key", "dtype", "offsets", "sizes", "file", "rank", "replica"]]
    for at, name in ((1, "fqn"), (2, "role")):
        frame.insert(at, name, ckpt.tensors[name].take(tensor).reset_index(drop=True))
    frame["numel"] = _chunk_numel(ckpt)
    frame["nbytes"] = ckpt.catalog.chunk_nbytes
    return _with_numbers(frame, columns, errors)


def _by_module(ckpt: Checkpoint, columns: dict[str, Array], errors: dict[int, str]) -> pd.DataFrame:
    """Aggregate by module: each is the sum of the tensors whose key begins with its path and a dot."""
    import pandas as pd

    catalog = ckpt.catalog
    index: dict[str, int] = {}
    module: list[int] = []
    member: list[int] = []
    for position, key in enumerate(catalog.keys):
        parts = key.split(".")
        for path in {".".join(parts[:depth]) for depth in range(len(parts))}:  # once, also if a name starts with a dot
            module.append(index.setdefault(path, len(index)))
            member.append(position)
    order = sorted(index, key=lambda path: path.split(".") if path else [])
    rank = np.empty(len(index), np.int64)
    rank[[index[path] for path in order]] = np.arange(len(order))
    where, who = rank[np.array(module, np.int64)], np.array(member, np.int64)
    frame = pd.DataFrame({"module": pd.array(order, dtype="str")})
    frame["tensors"] = np.bincount(where, minlength=len(order))
    for name, each in (("numel", catalog.numel), ("nbytes", catalog.tensor_nbytes)):
        frame[name] = box.sums(where, each[who], len(order))
    floating = np.array([dtype.kind == "f" for dtype in ALL])[catalog.dtype]
    keep = floating[who]
    reasons: dict[int, str] = {}
    for at, tensor in zip(where.tolist(), who.tolist(), strict=True):
        if tensor in errors:
            reasons.setdefault(at, f"tensor {catalog.keys[tensor]!r}: {errors[tensor]}")
    return _with_numbers(frame, _merged(columns, where[keep], who[keep], len(order)), reasons)


def _merged(columns: dict[str, Array], where: Array, who: Array, rows: int) -> dict[str, Array]:
    """Add up rows of tensors: ``M₂ = Σ (M₂ᵢ + nᵢ·(meanᵢ − mean)²)``."""
    each = {name: column[who] for name, column in columns.items()}
    n, total = each["finite"].astype(np.float64), box.sums(where, each["finite"], rows)
    found: dict[str, Array] = {name: box.sums(where, each[name], rows) for name in COUNTS}
    found["min"], found["max"] = np.full(rows, np.nan), np.full(rows, np.nan)
    np.fmin.at(found["min"], where, each["min"])
    np.fmax.at(found["max"], where, each["max"])

    def average(values: Array) -> Array:
        with np.errstate(invalid="ignore", over="ignore"):
            parts = np.bincount(where, np.where(n > 0, n * values, 0.0), rows)
            return np.where(total > 0, parts / np.maximum(total, 1), np.nan)

    found["mean"], found["absmean"] = average(each["mean"]), average(each["absmean"])
    with np.errstate(over="ignore"):
        found["std"] = np.sqrt(average(each["std"] ** 2 + (each["mean"] - found["mean"][where]) ** 2))
        square = average(each["std"] ** 2 + each["mean"] ** 2)  # of the finite: others' rms would spoil a sum
        found["rms"] = np.sqrt(square)
        found["norm"] = found["rms"] * np.sqrt(total)
    spoilt = [(found["posinf"] + found["neginf"] > 0, np.inf), (found["nan"] > 0, np.nan)]
    for name in ("norm", "rms"):
        for where_spoilt, value in spoilt:
            found[name][where_spoilt] = value
    return found


def _with_numbers(frame: pd.DataFrame, columns: dict[str, Array], errors: dict[int, str]) -> pd.DataFrame:
    import pandas as pd

    numbers: dict[str, Any] = {name: columns[name] for name in NUMBERS}
    if "q50" in columns:
        numbers |= {name: columns[name] for name in _OF_CENSUS}
        numbers["distinct"] = pd.array(columns["distinct"], dtype="Float64").astype("Int64")
        numbers["distinct"][np.isnan(columns["distinct"])] = pd.NA
    numbers["error"] = pd.array([errors.get(at) for at in range(len(frame))], dtype="str")
    return pd.concat([frame, pd.DataFrame(numbers, index=frame.index)], axis=1)


# ---- results kept between runs ---------------------------------------------------------------------------------------


def _path(ckpt: Checkpoint, by: str, quantiles: bool) -> str:
    catalog = ckpt.catalog
    what: list[Any] = [
        VERSION,
        "shard" if by == "shard" else "tensor",
        quantiles,
        catalog.format,
        ckpt.place.root,
        ckpt.place.file,
    ]
    what += [
        [name, stat.size, stat.mtime_ns, stat.tag] for name, stat in zip(catalog.files, catalog.file_stats, strict=True)
    ]
    digest = hashlib.blake2b(json.dumps([what, catalog.keys]).encode("utf-8", "surrogatepass"), digest_size=16)
    places = (
        catalog.row_ptr,
        catalog.file,
        catalog.start,
        catalog.stop,
        catalog.offsets,
        catalog.sizes,
        catalog.inner,
        catalog.strides,
    )
    for column in places:
        digest.update(np.ascontiguousarray(0 if column is None else column))
    return os.path.join(cache_folder(), f"stats-{digest.hexdigest()}.npz")


def _kept(ckpt: Checkpoint, by: str, quantiles: bool) -> dict[str, Array] | None:
    """Load the columns of an earlier run, or ``None``; a damaged file or another user's file is ignored."""
    rows = ckpt.catalog.chunks if by == "shard" else len(ckpt.catalog)
    names = (*NUMBERS, "finite", "seen", *(_OF_CENSUS if quantiles else ()))
    try:
        with open(_path(ckpt, by, quantiles), "rb") as handle:
            if os.fstat(handle.fileno()).st_uid != os.getuid():
                return None
            with np.load(handle, allow_pickle=False) as stored:
                columns = {name: stored[name] for name in names}
    except Exception:  # zipfile, zlib and numpy raise any exception; then it is computed again
        return None
    return columns if all(column.shape == (rows,) for column in columns.values()) else None
