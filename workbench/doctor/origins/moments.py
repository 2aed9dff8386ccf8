"""Find earlier moments that could have evolved into these: candidates must satisfy Adam's laws, which others break.

::

    v_B ≥ β2^k·v_A  and  (m_B − β1^k·m_A)² ≤ K_k·(v_B − β2^k·v_A)     satisfied by the parent in every element
    β2^k·v_A > 2·s·v_own,  s = median of v_B/v_own                   elements that test the floor: there the parent's v
                                                                     clearly exceeds the parameter's own

Small moments satisfy the laws by chance; a parent must satisfy them in :data:`TESTED` or more elements of the second
kind. The search runs only for moments that break the laws with their own old values, which proves the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from workbench.core.arrays import Array
from workbench.doctor.laws.bounds import floor, has_slack, transition
from workbench.doctor.origins.atoms import Atom, Atoms
from workbench.doctor.origins.became import EXACT, one_gradient
from workbench.doctor.origins.samples import sampled, spread
from workbench.doctor.passes.pair import Update
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

SAMPLED = 1 << 15  #: elements of a tensor that are examined
CANDIDATES = 256  #: most tensors of that shape
FLIPS = 8  #: most elements beyond the law that single flipped bits explain
ORPHANS = 16  #: moments without a parent whose heirs are searched
KEPT = 0.05  #: β2^k below which the law carries no information
TESTED = 12  #: elements in which a parent's floor is distinctive
STANDS_OUT = 2.0  #: ratio to the expected value of the parameter's own v


@dataclass(frozen=True)
class Descent:
    """Second moments that can have evolved from another parameter's.

    Attributes:
        atom, parent: the parameter that holds them now, and the one that they came from.
        tested: examined elements in which the parent's floor is distinctive; 0 after a single update, which is
            followed exactly.
        orphan: whether they cannot have evolved from their own old values.
    """

    atom: Atom
    parent: Atom
    tested: int = 0
    orphan: bool = True


@np.errstate(all="ignore")  # NaN and Inf keep no law
def descends(
    atoms: Atoms, moments: Sequence[Atom], updates: Mapping[str, Update], not_checked: dict[str, str]
) -> list[Descent]:
    """Find the other tensor from which each of the moments came.

    Moments that replaced smaller ones do not break their own laws; they are found as the heirs of suspicious ones.

    Args:
        moments: suspicious ``exp_avg_sq``.
        not_checked: receives what could not be read.
    """
    held = {(atom.fqn, atom.role): atom for atom in atoms.rows}
    found: list[Descent] = []
    orphans: list[Atom] = []
    for atom in moments:
        try:
            heir = _heir(atoms, held, atom, updates)
            if heir is None:
                continue
            descent = heir.exactly(atoms, held) if heir.update.k == 1 else heir.parent(atoms, held)
        except WorkbenchError as error:
            not_checked[f"moments of {atom.fqn!r}"] = str(error)
            continue
        if descent is not None:
            found.append(descent)
        elif heir.update.k > 1 and heir.orphan:
            orphans.append(atom)
    known = {one.atom.fqn for one in found}
    for atom in orphans[:ORPHANS]:
        for other in _alike(atoms, atom):
            if other.fqn in known:
                continue
            try:
                heir = _heir(atoms, held, other, updates)
                tested = heir.tested(atoms, held, atom) if heir is not None else 0
            except WorkbenchError as error:
                not_checked[f"moments of {other.fqn!r}"] = str(error)
                continue
            if heir is not None and tested:
                known.add(other.fqn)
                found.append(Descent(other, atom, tested, heir.orphan))
    return found


@dataclass(frozen=True, eq=False)
class _Heir:
    """Samples of the moments of one parameter on both sides."""

    atom: Atom
    update: Update
    betas: tuple[float, float]
    dtype: str
    mine: Array
    m: Array
    v: Array

    @property
    def orphan(self) -> bool:
        """Whether they cannot have evolved from their own old values."""
        return bool(self.v.any()) and floor(self.mine, self.v, *self._terms).broken > FLIPS

    @property
    def _terms(self) -> tuple[float, int, str]:
        return self.betas[1], self.update.k, self.dtype

    def parent(self, atoms: Atoms, held: Mapping[tuple[str, str], Atom]) -> Descent | None:
        """Return the other parameter whose moments satisfy the laws in the most test elements."""
        best: Descent | None = None
        for one in _alike(atoms, self.atom) if self.orphan else []:
            if tested := self.tested(atoms, held, one, best.tested if best is not None else TESTED - 1):
                best = Descent(self.atom, one, tested)
        return best

    def tested(self, atoms: Atoms, held: Mapping[tuple[str, str], Atom], one: Atom, least: int = TESTED - 1) -> int:
        """Return in how many elements another's moments are distinctive and lawful; 0 if not above ``least``."""
        v_then = _some(atoms.before(one))
        both = (self.mine > 0) & (self.v > 0)
        usual = float(np.median(self.v[both] / self.mine[both])) if both.any() else math.inf
        risked = int(np.count_nonzero(self.betas[1] ** self.update.k * v_then > STANDS_OUT * usual * self.mine))
        partner = held.get((one.fqn, "exp_avg"))
        if risked <= least or partner is None or floor(v_then, self.v, *self._terms).broken:
            return 0
        m_then = _some(atoms.before(partner))
        broken = transition(m_then, v_then, self.m, self.v, self.betas, self.update.k, self.dtype).broken
        return 0 if broken else risked

    def exactly(self, atoms: Atoms, held: Mapping[tuple[str, str], Atom]) -> Descent | None:
        """Return the other parameter whose moments one gradient turns into these.

        None is returned if one gradient makes second ones from zero, as small ones of others are nearly zero, or
        from their own: the moments of two biases that are added to the same activations are nearly equal.
        """
        none, first = np.zeros_like(self.m), held.get((self.atom.fqn, "exp_avg"))
        begun = [none] if first is None else [none, _some(atoms.before(first))]
        if any(one_gradient(m, none, self.m, self.v, self.betas) >= EXACT for m in begun):
            return None
        if self._follows(atoms, held, self.atom):
            return None
        return next(
            (Descent(self.atom, one) for one in _alike(atoms, self.atom) if self._follows(atoms, held, one)), None
        )

    def _follows(self, atoms: Atoms, held: Mapping[tuple[str, str], Atom], one: Atom) -> bool:
        """Return whether one gradient turns its moments, or its second and this parameter's first ones, into these."""
        if (one.fqn, "exp_avg") not in held:
            return False
        v_then = _some(atoms.before(one))
        first = (held[name, "exp_avg"] for name in dict.fromkeys((one.fqn, self.atom.fqn)) if (name, "exp_avg") in held)
        return any(
            one_gradient(_some(atoms.before(each)), v_then, self.m, self.v, self.betas) >= EXACT for each in first
        )


def _heir(
    atoms: Atoms, held: Mapping[tuple[str, str], Atom], atom: Atom, updates: Mapping[str, Update]
) -> _Heir | None:
    """Return samples of the moments, or ``None`` if no law of Adam applies to them."""
    update, first = updates.get(atom.owners[0]), held.get((atom.fqn, "exp_avg"))
    if update is None or update.betas is None or first is None or update.k < 1:
        return None
    dtype = atoms.before(atom).element.name
    if update.bars("floor") or update.bars("transition"):
        return None
    if update.betas[1] ** update.k < KEPT or has_slack(update.betas, dtype, update.k) is not None:
        return None
    before, after = atoms.tensors(atom)
    return _Heir(atom, update, update.betas, dtype, _some(before), _some(atoms.tensors(first)[1]), _some(after))


def _alike(atoms: Atoms, atom: Atom) -> list[Atom]:
    """Return other tensors of that role and shape."""
    shape = atoms.before(atom).shape
    others = (
        one
        for one in atoms.rows
        if one.role == atom.role and one.tensor != atom.tensor and atoms.before(one).shape == shape
    )
    return list(islice(others, CANDIDATES))


def _some(tensor: LazyTensor) -> Array:
    return sampled(tensor, spread(tensor.shape, SAMPLED), SAMPLED)
