"""Orders of a flat tensor that is too long for one key per element: one key per unit of 2, 4, 8 … elements.

::

    2,097,152 elements   ▏4▕▏4▕▏4▕ …   524,288 units; finds blocks, halves and rolls by whole units
"""

from __future__ import annotations

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN
from workbench.analysis.patterns.forms import find_form
from workbench.analysis.patterns.found import Pattern
from workbench.analysis.patterns.local import Difference
from workbench.analysis.patterns.read import bits, differing, fold, runs_of
from workbench.core.arrays import Array, Ints
from workbench.core.words import plural
from workbench.tensor import LazyTensor

LONGEST = 1 << 19  #: longest axis searched for an order, as some numbers are kept per index


def reordered_units(a: LazyTensor, b: LazyTensor, seen: Difference) -> Pattern | None:
    """Return a pattern if ``b`` has the units of ``a`` in another order; both have one axis longer than ``LONGEST``."""
    (n,) = seen.shape
    unit = 1 << (-(-n // LONGEST) - 1).bit_length()
    runs = runs_of(seen.shape, a.element.itemsize)
    if n % unit or (len(runs) > 1 and runs[1].start % unit):
        return None
    form = find_form(_unit_keys(a, unit), _unit_keys(b, unit))
    if form is None:
        return None
    surprise = seen.count * seen.bits_each - form.cost
    if surprise < MARGIN or not _proved(a, b, form.order, unit):
        return None
    units = f"of {plural(unit, 'element')}"
    sentence = form.say(f"unit {units}", f"units {units}")
    detail = {"axis": 0, "unit_of": unit, **form.detail}
    order = form.order

    def make(array: Array, rest: Array | None) -> Array:
        return array.reshape(-1, unit)[order].reshape(-1)

    return Pattern(form.name, sentence, detail, evidence=surprise, make=make)


def _unit_keys(tensor: LazyTensor, unit: int) -> Array:
    found = np.zeros(tensor.numel() // unit, np.uint64)
    for run in runs_of(tensor.shape, tensor.element.itemsize):
        rows = bits(tensor, run.key).reshape(-1, unit)
        inside = slice(run.start // unit, run.start // unit + len(rows))
        found[inside] = fold(found[inside], rows)
    return found


def _proved(a: LazyTensor, b: LazyTensor, order: Ints, unit: int) -> bool:
    # old units are read by positions of elements, 8 bytes each, so fewer at a time
    for run in runs_of(b.shape, b.element.itemsize, max(unit, 1 << 18) * b.element.itemsize).ends_first():
        first = run.start // unit
        old = order[first : first + run.sizes[0] // unit]
        where = (old[:, None] * unit + np.arange(unit)).reshape(-1)
        if differing(bits(a, (where,)), bits(b, run.key)):
            return False
    return True
