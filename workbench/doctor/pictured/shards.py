"""Maps for pictures: the chunks that a load changed, by rank file and tensor, and where rows of a tensor came from.

::

               embed  wq.0  wk.0  …
    rank 0      =      =     =        =  equal to before
    rank 1      ≠      ≠     ≠        ≠  differs                  0  differs by zeros alone
    rank 2      =      0     ≠
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from workbench.core.arrays import Array
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.origins.index import Origins, RowIndex, row_keys, row_shape
from workbench.doctor.pictured.samples import boxes_of
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

STATES = ("equal to before", "differs", "differs by zeros alone", "cannot be read")
EQUAL, DIFFERS, ZEROS, UNREAD = range(4)
ROLES = ("param", "master", "exp_avg", "exp_avg_sq")
CHUNKS = 4096  #: most chunks that are examined; above that, tensors are skipped at regular intervals
ELEMENTS = 1 << 24  #: read in full below that, sampled above
SAMPLE = 4096  #: elements per chunk
NEAR = 0.9  #: cosine from which a row is the same one, a few updates later
ROWS = 2048  #: most rows of a tensor that are matched by cosine
BYTES = 256 << 20  #: most bytes of tensors that are matched


@dataclass(frozen=True, eq=False)
class ShardProfile:
    """The state of each tensor in each file.

    Attributes:
        files: the rows. tensors: the columns, fqn and role.
        state: ``(files, tensors) int8`` index into :data:`STATES`, the largest of any chunk; -1 if nothing is stored.
        whole: whether every element was compared, instead of samples.
        left_out: number of tensors that were not examined.
    """

    files: tuple[str, ...]
    tensors: tuple[tuple[str, str], ...]
    state: Array
    whole: bool
    left_out: int = 0


@dataclass(frozen=True, eq=False)
class Rows:
    """The origin of each row of a tensor.

    Attributes:
        fqn, role: the tensor. sources: tensors whose rows were searched, itself first.
        source, place: ``(n,)`` the tensor, and the row in it, that each row came from; -1 if none.
        exact: whether rows were matched by equality, not by cosine.
    """

    fqn: str
    role: str
    sources: tuple[str, ...]
    source: Array
    place: Array
    exact: bool


def shard_map(pair: Pair) -> ShardProfile | None:
    """Compare every chunk of the second state with the first; ``None`` if nothing is shared."""
    wanted = [(fqn, role, *at) for fqn, roles in pair.shared() for role, at in roles.items() if role in ROLES]
    catalog = pair.b.ckpt.catalog
    chunks = sum(len(range(*catalog.rows_of(b).indices(catalog.chunks))) for _, _, _, b in wanted)
    picked = wanted[:: max(-(-chunks // CHUNKS), 1)]
    whole = sum(prod(pair.b.shape(b)) for _, _, _, b in picked) <= ELEMENTS
    cells: dict[tuple[str, int], int] = {}
    for column, (_, _, a, b) in enumerate(picked):
        before, after = pair.a.tensor(a), pair.b.tensor(b)
        for row in range(*catalog.rows_of(b).indices(catalog.chunks)):
            ndim = int(catalog.ndim[b])
            box = catalog.offsets[row, :ndim], catalog.sizes[row, :ndim]
            where = catalog.files[int(catalog.file[row])], column
            copy = after.replica(int(catalog.replica[row]))
            cells[where] = max(cells.get(where, -1), _compared(before, copy, *box, whole))
    files = sorted({file for file, _ in cells})
    if not files:
        return None
    state = np.full((len(files), len(picked)), -1, np.int8)
    for (file, column), found in cells.items():
        state[files.index(file), column] = found
    names = tuple((fqn, role) for fqn, role, _, _ in picked)
    return ShardProfile(tuple(files), names, state, whole, len(wanted) - len(picked))


def match_rows(pair: Pair, fqn: str, role: str = "param") -> Rows | None:
    """Find where the rows of a tensor came from: itself, or tensors with rows of that length."""
    roles = dict(pair.shared()).get(fqn, {})
    if role not in roles or len(pair.b.shape(roles[role][1])) < 2:
        return None
    after = pair.b.tensor(roles[role][1])
    names = [fqn, *_siblings(pair, fqn, role, after)]
    tensors = [pair.a.tensor(pair.a.params[name][role]) for name in names]
    while sum(tensor.nbytes for tensor in tensors) > BYTES and len(tensors) > 1:
        tensors.pop(), names.pop()
    if after.nbytes > BYTES:
        return None
    try:
        keys, plain = row_keys(after)
        index = RowIndex(tensors)
        found = index.origins(0, keys, plain)
    except WorkbenchError:
        return None
    if found.looked and found.share < 0.5 and len(keys) <= ROWS:
        return _nearest(fqn, role, names, tensors, after)
    if not (found.place >= 0).any():
        return None
    return Rows(fqn, role, tuple(names), *_split(found, index.starts), True)


def _split(found: Origins, starts: Array) -> tuple[Array, Array]:
    source = np.searchsorted(starts, found.place, side="right") - 1
    return np.where(found.place < 0, -1, source), np.where(found.place < 0, -1, found.place - starts[source])


def _nearest(fqn: str, role: str, names: Iterable[str], tensors: list[LazyTensor], after: LazyTensor) -> Rows | None:
    """Match rows by the largest cosine, because updates turn a row only a little."""
    target = _unit(after)
    best = np.full(len(target), NEAR)
    source, place = np.full(len(target), -1), np.full(len(target), -1)
    kept: list[str] = []
    for name, tensor in zip(names, tensors, strict=True):
        if row_shape(tensor.shape)[0] > ROWS:
            continue
        cosines = target @ _unit(tensor).T
        top = cosines.argmax(axis=1)
        value = cosines[np.arange(len(target)), top]
        better = value > best
        best[better], source[better], place[better] = value[better], len(kept), top[better]
        kept.append(name)
    return Rows(fqn, role, tuple(kept), source, place, False) if (place >= 0).any() else None


def _unit(tensor: LazyTensor) -> Array:
    rows = tensor.torch().float().numpy().reshape(row_shape(tensor.shape)).astype(np.float64)
    with np.errstate(all="ignore"):
        return np.nan_to_num(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _siblings(pair: Pair, fqn: str, role: str, after: LazyTensor) -> list[str]:
    """Return tensors with rows of that length, those of the same layer first."""
    layer = fqn.rpartition(".")[0].rpartition(".")[0] + "."
    width = row_shape(after.shape)[1]
    found = []
    for name, roles in pair.a.params.items():
        if name != fqn and role in roles:
            shape = pair.a.shape(roles[role])
            if len(shape) > 1 and row_shape(shape)[1] == width and pair.a.dtype(roles[role]) == after.element.name:
                found.append(name)
    return sorted(found, key=lambda name: not name.startswith(layer))


def _compared(before: LazyTensor, after: LazyTensor, offsets: Array, sizes: Array, whole: bool) -> int:
    if whole or not len(sizes):
        low, extent = offsets[None], sizes[None]
    else:
        low, extent = boxes_of(tuple(sizes.tolist()), SAMPLE)
        low = low + offsets
    try:
        a, b = _read(before, low, extent), _read(after, low, extent)
        if a.dtype == b.dtype and (a == b).all():
            return EQUAL
    except WorkbenchError:
        return UNREAD
    # lost writes leave only zeros; rows that moved bring other numbers too
    return ZEROS if a.dtype == b.dtype and not b[a != b].any() else DIFFERS


def _read(tensor: LazyTensor, low: Array, extent: Array) -> Array:
    return np.concatenate([np.array(box).reshape(-1) for box in tensor.boxes(low, extent)])
