"""Find the simplest description of a reordering, from the keys of the rows before and after.

::

    order[i] = the old position of the row that is now at i

    halves      4 5 6 7 0 1 2 3                 swap        0 1 6 7 4 5 2 3     two ranges exchanged
    rolled      2 3 4 5 6 7 0 1                 reversed    7 6 5 4 3 2 1 0
    interleave  0 4 1 5 2 6 3 7                 x groups of p × q units of r rows, read as q × p
    blocks      2 3 6 7 0 1 4 5                 n equal blocks in another order
    regroup     q q k v q q k v → q q q q k k v v      groups of unequal parts, collected by part
    order       anything else: its cycles, or those of a part or of every n-th part

Equal rows make several orders possible; forms are tested on the keys themselves, so any of these orders is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import choose, multinomial
from workbench.analysis.patterns.index import anchors, assign, cycles, divisors, factors, parted, source
from workbench.analysis.patterns.read import fold
from workbench.core.arrays import Array, Ints
from workbench.core.words import plural

BLOCKS = 64  #: maximum equal blocks whose order is listed
MOVES = 8  #: maximum moves listed of a general order
FACTORS = 20_000  #: maximum factorizations tried


@dataclass(frozen=True, eq=False)
class Form:
    """An order and its description.

    Attributes:
        name: as in the drawing above.
        order: ``(n,)`` the old index of each row.
        cost: bits that select this order among those of its form.
        say: returns the sentence, given the words for one row and for several rows.
        detail: the numbers, of JSON's types.
    """

    name: str
    order: Ints
    cost: float
    say: Callable[[str, str], str]
    detail: dict[str, Any] = field(default_factory=dict)


def find_form(before: Array, after: Array) -> Form | None:
    """Return how rows with keys ``before`` were reordered to ``after``, or ``None`` if they are not the same rows."""
    if len(before) < 2 or len(before) != len(after) or not (np.sort(before) == np.sort(after)).all():
        return None
    order = assign(before, after)
    if (order == np.arange(len(order))).all():
        return None
    for look in (_plain, _repeated, _blocks, _part, partial(_repeated, general=True)):
        form = look(before, after, order)
        if form is not None:
            return form
    return _general(before, order)


# ---- the forms -------------------------------------------------------------------------------------------------------


def _plain(before: Array, after: Array, order: Ints) -> Form | None:
    """Return a form of all rows."""
    n = len(order)
    for form in (_swap(order), *_rolls(before, order), _reversed(n)):
        if form is not None and (before[form.order] == after).all():
            return form
    return _interleave(before, after, order) or _regroup(before, after)


def _swap(order: Ints) -> Form | None:
    """Return the exchange of two ranges of equal length; for all rows, of the two halves."""
    n = len(order)
    moved = np.flatnonzero(order != np.arange(n))
    first, away = int(moved[0]), int(order[moved[0]] - moved[0])
    if away <= 0 or len(moved) % 2:
        return None
    size = len(moved) // 2
    made = np.arange(n)
    if size > away or first + away + size > n:
        return None
    one, two = np.arange(first, first + size), np.arange(first, first + size) + away
    made[one], made[two] = two, one
    if (made != order).any():
        return None
    if 2 * size == n and size > 1:
        return _halves(n)
    cost = 3 * log2(n)

    def say(row: str, rows: str) -> str:
        if size == 1:
            return f"{rows} {first:,} and {first + away:,} are exchanged"
        return f"{rows} {first:,}:{first + size:,} and {first + away:,}:{first + away + size:,} are exchanged"

    return Form("swap", made, cost, say, {"first": first, "second": first + away, "size": size})


def _halves(n: int) -> Form:
    half = n // 2
    order = np.roll(np.arange(n), half)
    return Form(
        "halves",
        order,
        4.0,
        lambda row, rows: f"the two halves of the {n:,} {rows} are exchanged",
        {"n": 2, "size": half, "order": [1, 0]},
    )


def _rolls(before: Array, order: Ints) -> list[Form]:
    n = len(order)
    found = []
    for at in anchors(before, order)[:2] or [0]:
        by = int(at - order[at]) % n  # as in numpy.roll, positive moves rows to higher positions
        if not by:
            continue
        if 2 * by == n and n > 2:
            found.append(_halves(n))
            continue
        signed = by if by <= n // 2 else by - n

        def say(row: str, rows: str, signed: int = signed) -> str:
            return f"all {n:,} {rows} rolled by {signed:+,}"

        found.append(Form("rolled", np.roll(np.arange(n), by), log2(n), say, {"by": signed, "n": n}))
    return found


def _reversed(n: int) -> Form:
    return Form("reversed", np.arange(n)[::-1], 4.0, lambda row, rows: f"the {n:,} {rows} in reverse order", {"n": n})


def _interleave(before: Array, after: Array, order: Ints) -> Form | None:
    """Return ``a.reshape(x, p, q, r)`` read as ``(x, q, p, r)``."""
    n = len(order)
    certain = [(at, int(order[at])) for at in anchors(before, order)]
    if not certain:
        return None
    for tried, (x, p, q, r) in enumerate(factors(n)):
        if tried >= FACTORS:
            return None
        if any(source(at, p, q, r) != old for at, old in certain):
            continue
        made = np.arange(n).reshape(x, p, q, r).transpose(0, 2, 1, 3).reshape(-1)
        if (before[made] == after).all():
            return _interleaved(made, x, p, q, r)
    return None


def _interleaved(made: Ints, x: int, p: int, q: int, r: int) -> Form:
    def say(row: str, rows: str) -> str:
        units = rows if r == 1 else f"blocks of {r:,} {rows}"
        change = f"{p:,} groups of {q:,} {units} became {q:,} groups of {p:,}"
        return f"in each of {x:,} × {p * q * r:,} {rows}, {change}" if x > 1 else change

    return Form("interleave", made, 3 * log2(len(made)), say, {"outer": x, "groups": p, "each": q, "unit": r})


def _blocks(before: Array, after: Array, order: Ints) -> Form | None:
    """Return the smallest number of equal blocks that only changed their order."""
    n = len(before)
    for count in divisors(n):
        size = n // count
        if count < 2 or size < 2 or count > BLOCKS:
            continue
        found = _block_order(before, after, count)
        if found is None:
            continue
        blocks = found

        def say(row: str, rows: str, count: int = count, size: int = size, blocks: Ints = blocks) -> str:
            return f"{plural(count, 'equal block')} of {size:,} {rows} in the order {_listed(blocks)}"

        made = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        detail = {"n": count, "size": size, "order": blocks.tolist()}
        return Form("blocks", made, multinomial(np.ones(count, np.int64)) + log2(n), say, detail)
    return None


def _regroup(before: Array, after: Array) -> Form | None:
    """Return groups of unequal parts collected by part, or the reverse."""
    n = len(before)
    for count in divisors(n):
        if not 4 < count <= 4096:
            continue
        blocks = _block_order(before, after, count)
        if blocks is None:
            continue
        for gathered, order in ((True, blocks), (False, np.argsort(blocks))):
            shape = parted(order)
            if shape is None:
                continue
            groups, sizes = shape
            unit = n // count

            def say(
                row: str, rows: str, g: int = groups, s: list[int] = sizes, u: int = unit, gathered: bool = gathered
            ) -> str:
                each = " + ".join(str(k) for k in s)
                blocks = rows if u == 1 else f"blocks of {u:,} {rows}"
                one, two = f"{g:,} groups of {each} {blocks}", f"{len(s)} contiguous parts"
                return f"{one} became {two}" if gathered else f"{two} became {one}"

            made = (blocks[:, None] * unit + np.arange(unit)).reshape(-1)
            detail = {"groups": groups, "parts": sizes, "unit": unit, "to": "contiguous" if gathered else "grouped"}
            return Form("regroup", made, 4 * log2(n), say, detail)
    return None


def _repeated(before: Array, after: Array, order: Ints, general: bool = False) -> Form | None:
    """Return a reordering that is the same inside each of several equal parts."""
    n = len(order)
    for times in reversed(divisors(n)):
        size = n // times
        if times < 2 or size < 2:
            continue
        inner = order.reshape(times, size) - np.arange(times)[:, None] * size
        if not (inner == inner[0]).all() or inner[0].min() < 0 or inner[0].max() >= size:
            continue
        names = np.arange(size).astype(np.uint64)
        form = find_form(names, names[inner[0]])
        if form is None or (form.name == "order" and not general):
            continue
        found = form

        def say(row: str, rows: str, times: int = times, size: int = size, found: Form = found) -> str:
            return f"in each of {times:,} × {size:,} {rows}: {found.say(row, rows)}"

        detail = {"times": times, "size": size, "form": form.name, **form.detail}
        return Form(form.name, order, form.cost + log2(n), say, detail)
    return None


def _part(before: Array, after: Array, order: Ints) -> Form | None:
    """Return a form of the rows between the first and the last that moved; the others stay."""
    moved = np.flatnonzero(order != np.arange(len(order)))
    first, last = int(moved[0]), int(moved[-1]) + 1
    for low, high in dict.fromkeys(_around(order, first, last)):
        if (low, high) == (0, len(order)) or low < 0 or high > len(order):
            continue
        inner = order[low:high] - low
        if inner.min() < 0 or inner.max() >= high - low:
            continue
        old, new = before[low:high], after[low:high]
        form = _plain(old, new, inner) or _repeated(old, new, inner) or _blocks(old, new, inner)
        if form is None:
            continue
        found, whole = form, np.arange(len(order))
        whole[low:high] = form.order + low

        def say(row: str, rows: str, low: int = low, high: int = high, found: Form = found) -> str:
            return f"within {rows} {low:,}:{high:,}, {found.say(row, rows)}"

        detail = {"within": [low, high], "form": form.name, **form.detail}
        return Form(form.name, whole, form.cost + 2 * log2(len(order)), say, detail)
    return None


def _around(order: Ints, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield possible ranges of a form: the moved rows, and one more unit on each side (a corner that stays)."""
    yield first, last
    run = 1
    while first + run < last and order[first + run] == order[first] + run:
        run += 1
    for unit in dict.fromkeys((1, run)):
        yield first - unit, last + unit
        yield 0, last + unit
        yield 0, last


def _general(before: Array, order: Ints) -> Form:
    n = len(order)
    moved = np.flatnonzero(order != np.arange(n))
    lengths = cycles(order)
    longest = int(lengths.max())
    moves = [[int(order[at]), int(at)] for at in moved[:MOVES].tolist()]
    counts = np.unique(before[moved], return_counts=True)[1]
    cost = choose(n, len(moved)) + multinomial(counts)  # which rows, and their order

    def say(row: str, rows: str) -> str:
        shown = ", ".join(f"{a:,}→{b:,}" for a, b in moves) + (" …" if len(moved) > MOVES else "")
        most = f", the longest of {longest:,}" if len(lengths) > 1 else ""
        word = "cycle" if len(lengths) == 1 else "cycles"
        return f"{len(moved):,} of {n:,} {rows} reordered in {len(lengths):,} {word}{most} ({shown})"

    detail = {"moved": len(moved), "n": n, "cycles": len(lengths), "longest": longest, "moves": moves}
    return Form("order", order, cost, say, detail)


def _block_order(before: Array, after: Array, count: int) -> Ints | None:
    old, new = (fold(np.zeros(count, np.uint64), rows.reshape(count, -1)) for rows in (before, after))
    if not (np.sort(old) == np.sort(new)).all():
        return None
    order = assign(old, new)
    size = len(before) // count
    made = (order[:, None] * size + np.arange(size)).reshape(-1)
    return order if (before[made] == after).all() else None


def _listed(order: Ints) -> str:
    return "(" + ", ".join(str(k) for k in order.tolist()) + ")"
