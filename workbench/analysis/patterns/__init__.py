"""Identify how one tensor was made from another, if the change has a provable form.

::

    b = a with its rows in another order     halves exchanged, heads interleaved, n blocks in another order …
    b = a moved along an axis                rolled, or rows removed at one end and others added at the other
    b = f(a) element by element              c·a, −a, rounded to a narrower type, its bytes reversed
    b = a except in one place                flipped bits, a run of zeros, a replaced block
    b = another tensor, or a in another shape

A name is a fact: applying the pattern to ``a`` yields ``b`` bit for bit on *all* elements, and the probability that a
random change looks like this is below 2⁻⁴⁰ (:mod:`.evidence`). The probable cause, inferred from the tensor's name, is
separate, in ``likely``.

Whatever the size of the tensor, memory holds blocks of up to 4 MiB and one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.analysis.patterns.fill import filled
from workbench.analysis.patterns.found import Pattern
from workbench.analysis.patterns.likely import likely
from workbench.analysis.patterns.local import Difference, flipped, replaced
from workbench.analysis.patterns.moved import moved, reordered
from workbench.analysis.patterns.read import readable
from workbench.analysis.patterns.shape import Sibling, reshaped, sibling, transposed
from workbench.analysis.patterns.values import cast, elementwise
from workbench.tensor import LazyTensor

__all__ = ["Pattern", "Sibling", "recognise"]


def recognise(a: LazyTensor, b: LazyTensor, *, siblings: Sequence[Sibling] = ()) -> Pattern | None:
    """Return the form of the change from ``a`` to ``b``, or ``None`` if they are equal or the change has no form.

    Args:
        siblings: other tensors that ``b`` may have been exchanged with, for example those of ``a``'s checkpoint. Only
            the first elements of tensors that do not match are read.

    Raises:
        HoleError, OpenError: a needed element is not stored or cannot be read.
    """
    if not (readable(a) and readable(b)) or not a.numel() or not b.numel():
        return None
    found = _found(a, b, siblings)
    return None if found is None else replace(found, likely=likely(found, b))


def _found(a: LazyTensor, b: LazyTensor, siblings: Sequence[Sibling]) -> Pattern | None:
    if a.element != b.element:
        return (cast(a, b) if a.shape == b.shape else None) or sibling(b, siblings)
    if a.shape != b.shape:
        return sibling(b, siblings) or transposed(a, b, None) or moved(a, b, None) or reshaped(a, b)
    seen = Difference(a, b)
    values = elementwise(a, b, seen)
    if seen.complete and not seen.count:
        return None
    return (
        flipped(seen)
        or filled(seen)
        or sibling(b, siblings)
        or values()
        or transposed(a, b, seen)
        or reordered(a, b, seen)
        or moved(a, b, seen)
        or replaced(seen)
    )
