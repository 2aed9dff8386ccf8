"""Which older moments a parameter's can have evolved from: laws that a parent keeps, and likeness that strangers lack.

::

    v_B ≥ β2^k·v_A  and  (m_B − β1^k·m_A)² ≤ K_k·(v_B − β2^k·v_A)     kept by the parent in every element; also by any
                                                                     A of small moments, so that besides
    r = correlation of log v_A and log v_B                           has to be much nearer to 1 than the own one's

The laws are told only where moments are not those of their own name: there they are broken, which proves the fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.doctor.laws.bounds import floor, has_slack, transition
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.became import EXACT, one_gradient
from workbench.doctor.origins.index import row_shape
from workbench.doctor.passes.pair import Update
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

__all__ = ["descends"]

Array = np.ndarray[Any, Any]

SAMPLED = 128  #: rows of a tensor that are looked at
CANDIDATES = 256  #: tensors of that shape
FAILS = 0.02  #: share of elements from which its own moments are no parent
KEPT = 0.05  #: β2^k below which the law tells nothing
ALIKE = 0.7  #: r of a parent
NEARER = 0.5  #: 1 − r of a parent over that of its own name


def descends(
    atoms: Atoms, moments: Sequence[Atom], updates: Mapping[str, Update], not_checked: dict[str, str]
) -> list[tuple[Atom, Atom]]:  # fmt: skip
    """``(second moments, those that they can have evolved from)`` where that is one other tensor and not their own."""
    held = {(atom.fqn, atom.role): atom for atom in atoms.rows}
    found = []
    for atom in moments:
        update, first = updates.get(atom.owners[0]), held.get((atom.fqn, "exp_avg"))
        if update is None or update.betas is None or first is None or update.k < 1:
            continue
        if update.bars("floor") or update.bars("transition"):
            continue
        dtype = atoms.before(atom).element.name
        if update.betas[1] ** update.k < KEPT or has_slack(update.betas, dtype, update.k) is not None:
            continue
        try:
            parent = _parent(atoms, held, atom, first, update)
        except WorkbenchError as error:
            not_checked[f"moments of {atom.fqn!r}"] = str(error)
            continue
        if parent is not None:
            found.append((atom, parent))
    return found


def _parent(
    atoms: Atoms, held: Mapping[tuple[str, str], Atom], atom: Atom, first: Atom, update: Update
) -> Atom | None:  # fmt: skip
    before, after = atoms.tensors(atom)
    dtype = before.element.name
    v, m = _some(after), _some(atoms.tensors(first)[1])
    assert update.betas is not None
    betas, k = update.betas, update.k
    mine = _some(before)
    if k == 1:
        return _exactly(atoms, held, atom, m, v, betas)
    if not v.any() or floor(mine, v, betas[1], k, dtype).broken <= FAILS * len(v):
        return None
    own = _likeness(mine, v)
    best: tuple[float, Atom] | None = None
    others = [
        one for one in atoms.rows
        if one.role == atom.role and one.tensor != atom.tensor and atoms.before(one).shape == after.shape
    ]  # fmt: skip
    for one in others[:CANDIDATES]:
        v_then = _some(atoms.before(one))
        like = _likeness(v_then, v)
        if like < ALIKE or 1 - like > NEARER * (1 - own) or (best is not None and like <= best[0]):
            continue
        partner = held.get((one.fqn, "exp_avg"))
        if partner is None or floor(v_then, v, betas[1], k, dtype).broken:
            continue
        if not transition(_some(atoms.before(partner)), v_then, m, v, betas, k, dtype).broken:
            best = like, one
    return None if best is None else best[1]


def _exactly(
    atoms: Atoms, held: Mapping[tuple[str, str], Atom], atom: Atom, m: Array, v: Array, betas: tuple[float, float]
) -> Atom | None:
    """The other parameter from whose moments one gradient leads to these."""
    shape = atoms.before(atom).shape
    others = [
        one for one in atoms.rows
        if one.role == atom.role and one.tensor != atom.tensor and atoms.before(one).shape == shape
    ]  # fmt: skip
    for one in others[:CANDIDATES]:
        partner = held.get((one.fqn, "exp_avg"))
        if partner is None:
            continue
        m_then, v_then = (_some(atoms.before(each)).astype(np.float64) for each in (partner, one))
        if one_gradient(m_then, v_then, m.astype(np.float64), v.astype(np.float64), betas) >= EXACT:
            return one
    return None


def _some(tensor: LazyTensor) -> Array:
    """Rows spread over a tensor, flat."""
    if len(tensor.shape) > 1:
        count = tensor.shape[0]
        most = max(SAMPLED * row_shape(tensor.shape)[1] // max(tensor.numel // count, 1), 1)
        if count > most:
            tensor = tensor.lazy[np.unique(np.linspace(0, count - 1, most).astype(np.int64)).tolist()]
    return np.asarray(Decoder(tensor.element).numbers(tensor.numpy().reshape(-1)))


def _likeness(a: Array, b: Array) -> float:
    """Correlation of the logarithms."""
    both = (a > 0) & (b > 0)
    if np.count_nonzero(both) < 8:
        return -1.0
    x, y = np.log(a[both].astype(np.float64)), np.log(b[both].astype(np.float64))
    x, y = x - x.mean(), y - y.mean()
    length = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / length if length > 0 else -1.0
