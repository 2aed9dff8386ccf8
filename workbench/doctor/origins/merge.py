"""Recognise averages that were loaded as the weights, and adapters that were merged into them.

::

    averaged   W_B = (cast of) the stored average                  element by element
    low rank   W_B − W_A = c·B·A: nearly all of a sample's energy in r directions, r far below its sides
    no merge   and if more than that is left beside the r directions of the stored B·A
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from workbench.analysis.patterns.read import bits, runs_of
from workbench.analysis.patterns.rounding import FLOATS, encode, numbers, rounded
from workbench.core.arrays import Array
from workbench.doctor.origins.atoms import Atoms
from workbench.doctor.origins.look import AtomLook
from workbench.names.roles import adapter_of
from workbench.tensor import LazyTensor

SAMPLED = 8  #: tensors whose rank is estimated
SIDE = 384  #: rows and columns of a sample
ENERGY = 0.9  #: share of the change in the leading directions; the rest is rounding
ROUNDINGS = 4.0  #: units in the last place of the weights that merging may leave beside the directions of an adapter
LIKE = 0.3  #: cosine with the old weights above which they are still contained
SMALL = 0.25  #: largest ratio of the rank to the shorter side; noise has full rank


def averaged(atoms: Atoms, weights: Sequence[AtomLook], masters: Sequence[AtomLook]) -> int:
    """Return the number of weights (and masters) that equal the averages stored in before; 0 if any differs."""
    averages = {atom.fqn: atom for atom in atoms.rows if atom.role == "ema"}
    looks = [one for one in (*weights, *masters) if one.atom.fqn in averages]
    if not looks or len(looks) < len(weights) + len(masters):
        return 0
    if all(_equal(atoms.before(averages[one.atom.fqn]), atoms.tensors(one.atom)[1]) for one in looks):
        return len(looks)
    return 0


def _equal(average: LazyTensor, weight: LazyTensor) -> bool:
    if average.shape != weight.shape or average.element.name not in FLOATS or weight.element.name not in FLOATS:
        return False
    for run in runs_of(weight.shape, 8).ends_first():
        x = numbers(bits(average, run.key), average.element)
        cast = encode(rounded(x, weight.element.name), weight.element)
        if (cast != bits(weight, run.key)).any():
            return False
    return True


def low_rank(atoms: Atoms, weights: Sequence[AtomLook]) -> int | None:
    """Return the largest rank of the changes of some matrices, or ``None`` if any of them has no low rank."""
    found = []
    picked = [one for one in weights if len(one.row.shape_b) == 2 and min(one.row.shape_b) >= 16]
    picked = [one for one in picked if one.kind == "near" or (one.kind == "other" and (one.cosine or 0) > LIKE)]
    if len(picked) < len(weights):
        return None
    for one in picked[:: max(len(picked) // SAMPLED, 1)]:
        rank = changed_rank(*atoms.tensors(one.atom))
        if rank is None:
            return None
        found.append(rank)
    return max(found, default=None)


def changed_rank(before: LazyTensor, after: LazyTensor) -> int | None:
    """Return the rank of a matrix's change; ``None`` if it has no low rank."""
    if len(after.shape) != 2 or before.element.name not in FLOATS or after.element.name not in FLOATS:
        return None
    with np.errstate(invalid="ignore"):
        return _rank(_sample(after) - _sample(before))


def unmerged(atoms: Atoms, weights: Sequence[AtomLook]) -> bool:
    """Return whether no changed weight with an adapter can have been merged with it."""
    ranks = ranks_of({atom.fqn: atoms.before(atom).shape for atom in atoms.rows if atom.role == "param"})
    held = [one for one in weights if not adapter_of(one.atom.fqn) and module_of(one.atom.fqn) in ranks]
    return bool(held) and all(
        is_beyond(*atoms.tensors(one.atom), ranks[module_of(one.atom.fqn)])
        for one in held[:: max(len(held) // SAMPLED, 1)]
    )


def module_of(fqn: str) -> str:
    """Return the module of a weight, or of an adapter of it."""
    part = adapter_of(fqn)
    return fqn.partition(f".{part}")[0] if part else fqn.rpartition(".")[0].removesuffix(".base_layer")


def ranks_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the rank of each module's adapters together; of none with a magnitude (DoRA), which scales all rows."""
    scaled = {module_of(fqn) for fqn in shapes if "magnitude" in adapter_of(fqn)}
    found = Counter[str]()
    for fqn, shape in shapes.items():
        if adapter_of(fqn) == "lora_A" and (at := module_of(fqn)) not in scaled:
            found[at] += min(shape, default=0)
    return found


def is_beyond(before: LazyTensor, after: LazyTensor, rank: int) -> bool:
    """Return whether a matrix changed in more directions than its adapter has, by more than rounding."""
    names = {before.element.name, after.element.name}
    if len(after.shape) != 2 or before.shape != after.shape or not names <= FLOATS.keys():
        return False
    with np.errstate(invalid="ignore"):
        new = _sample(after)
        change = new - _sample(before)
    if not np.isfinite(change).all() or 2 * rank >= min(change.shape):
        return False
    energy = np.linalg.svd(change, compute_uv=False) ** 2
    unit = max(2.0 ** -FLOATS[name].mantissa for name in names)
    rest = float(energy[rank:].sum())
    return rest > (1 - ENERGY) * float(energy.sum()) and rest > (ROUNDINGS * unit) ** 2 * float(np.square(new).sum())


def _sample(tensor: LazyTensor) -> Array:
    """Return rows and columns spread over a matrix, as float64."""
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, SIDE)).astype(np.int64)) for n in tensor.shape)
    part = bits(tensor.lazy[rows.tolist()])[:, columns]
    with np.errstate(invalid="ignore"):
        return np.asarray(numbers(np.ascontiguousarray(part), tensor.element), np.float64)


def _rank(change: Array) -> int | None:
    energy = np.linalg.svd(change, compute_uv=False) ** 2
    total = energy.sum()
    if not np.isfinite(total) or total == 0:
        return None
    rank = int(np.searchsorted(np.cumsum(energy) / total, ENERGY)) + 1
    return rank if rank <= max(SMALL * min(change.shape), 1) else None
