"""How one tensor came from another, where the change has a form that can be proved.

::

    b = a with its rows in another order     halves exchanged, heads interleaved, n blocks of another rank order …
    b = a moved along an axis                rolled, or rows leave at one end and others enter at the other
    b = f(a) element by element              c·a, −a, rounded to a narrower type, its bytes reversed
    b = a but for a place                    flipped bits, a run of zeros, a block that was replaced
    b = another tensor, or a in another shape

A name is a fact: it is given when ``b`` equals what the pattern makes of ``a`` bit for bit on *all* elements, and when
a random change would have had less than one chance in 2⁴⁰ to look alike (:mod:`.evidence`). What may lie
behind it, told from the tensor's name, stands apart in ``likely``.

Blocks of at most 4 MiB are in memory, whatever the size of the tensor, besides one number for each row of it.
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
from workbench.analysis.patterns.shape import reshaped, sibling, transposed
from workbench.analysis.patterns.values import cast, elementwise
from workbench.tensor import LazyTensor

__all__ = ["Pattern", "recognise"]


def recognise(a: LazyTensor, b: LazyTensor, *, siblings: Sequence[LazyTensor] = ()) -> Pattern | None:
    """The form of the change from ``a`` to ``b``, or ``None`` when they are equal or the change has none.

    Args:
        siblings: other tensors that ``b`` may have been exchanged with, those of ``a``'s checkpoint, say. Only the
            first elements of those that are not it are read.

    Raises:
        HoleError, OpenError: an element that is needed is stored nowhere or cannot be read.
    """
    if not (readable(a) and readable(b)) or not a.numel or not b.numel:
        return None
    found = _found(a, b, siblings)
    return None if found is None else replace(found, likely=likely(found, b))


def _found(a: LazyTensor, b: LazyTensor, siblings: Sequence[LazyTensor]) -> Pattern | None:
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
