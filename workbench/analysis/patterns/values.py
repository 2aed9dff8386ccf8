"""Find changes that apply to every element: a constant factor, a sign, a rounding, another type.

::

    a            0.1234567     −3.000001      c·a, rounded: every element allows an interval of factors,
    via bf16     0.12353516    −3.0           [ (b − ½ulp)/a, (b + ½ulp)/a ]; their intersection is tested

Roundings and signs are computed and compared block by block, up to the first element that differs. A factor is first
narrowed down to an interval. Then the simplest numbers in it are tested as a training loop would apply them: in
float64, in float32 as torch does for types of 16 bits or less, or as a division.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, steps
from workbench.analysis.patterns.found import Pattern, made
from workbench.analysis.patterns.local import Difference
from workbench.analysis.patterns.ratio import Ratio
from workbench.analysis.patterns.read import bits, parts, runs_of
from workbench.analysis.patterns.rounding import FLOATS, encode, numbers, rounded
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.tensor import LazyTensor

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_WORDS = {"nearest": "", "truncated": ", truncated instead of rounded", "saturating": ", saturating at its largest"}


class SameValues:
    """The hypothesis ``b == of(a)``."""

    def __init__(self, name: str, of: Callable[[Array], Array], sentence: str, detail: dict[str, Any]) -> None:
        self.name, self.of, self.sentence, self.detail = name, of, sentence, detail
        self.alive = True

    def feed(self, left: Array, right: Array) -> None:
        """Compare a few elements, then the rest."""
        for start, stop in parts(len(left)):
            if (self.of(left[start:stop]) != right[start:stop]).any():
                self.alive = False
                return

    def pattern(self, seen: Difference, cost: float = 8.0) -> Pattern | None:
        """Return the pattern, if a random change is unlikely to match it."""
        element = seen.b.element
        each = min(steps(seen.before, seen.after, element.kind), seen.bits_each)
        surprise = seen.count * each - cost
        if surprise < MARGIN:
            return None
        sentence = f"{self.sentence} ({seen.count:,} of {seen.a.numel():,} elements change)"
        detail = self.detail | {"changed": seen.count}
        return Pattern(self.name, sentence, detail, evidence=surprise, make=made(self.of, element, element))


def elementwise(a: LazyTensor, b: LazyTensor, seen: Difference) -> Callable[[], Pattern | None]:
    """Run the pass of ``seen`` with every hypothesis of this module; call the result for the one that is true."""
    element = a.element
    if seen.refutes([*_hypotheses(element), Ratio(element)]):
        return lambda: None
    same = list(_hypotheses(element))
    ratio = Ratio(element)
    seen.run([*same, ratio])

    def finish() -> Pattern | None:
        if not seen.complete:
            return None
        for one in same:
            if one.alive and (found := one.pattern(seen)) is not None:
                return found
        return ratio.pattern(seen) if ratio.alive else None

    return finish


def cast(a: LazyTensor, b: LazyTensor) -> Pattern | None:
    """Return a pattern if ``b`` has the numbers of ``a``, rounded if its type requires it."""
    before, after = a.element, b.element
    if "c" in (before.kind, after.kind):
        return None
    casts = [(how, of) for how, of in _casts(before, after)]
    changed = 0
    for run in runs_of(a.shape, max(before.itemsize, after.itemsize)).ends_first():
        left, right = bits(a, run.key).reshape(-1), bits(b, run.key).reshape(-1)
        for start, stop in parts(len(left)):
            part, target = left[start:stop], right[start:stop]
            casts = [(how, of) for how, of in casts if not (of(part) != target).any()]
            if not casts:
                return None
            old, new = numbers(part, before), numbers(target, after)
            changed += int(np.count_nonzero((old != new) & ~((old != old) & (new != new))))
    if changed and after.name not in FLOATS:
        return None  # integers that did not fit
    how, of = casts[0]
    detail = {"from": before.name, "to": after.name, "rounding": how, "changed": changed}
    sentence = f"the same numbers as {after.name} instead of {before.name}"
    if changed:
        each = f"{changed:,} of {a.numel():,} elements lose digits"
        sentence = f"{before.name} rounded to {after.name}{_WORDS[how]} ({each})"
    return Pattern("cast", sentence, detail, evidence=float(a.numel()), make=made(of, before, after))


def _hypotheses(element: DType) -> list[SameValues]:
    found = []
    top = element.raw.type(1 << (element.bits - 1))
    if element.kind == "f" and element.name in FLOATS and not element.name.endswith("fnuz"):
        found.append(
            SameValues("ratio", lambda raw: raw ^ top, "the sign of every element is flipped", {"ratio": -1.0})
        )
    if element.itemsize > 1:
        words = "the bytes of every element are in reverse order (another endianness)"
        found.append(SameValues("byteswap", lambda raw: raw.byteswap(), words, {}))
    for narrow, how in _narrower(element):
        short_name = _SHORT.get(narrow, narrow)
        detail = {"through": narrow, "rounding": how}
        found.append(
            SameValues("rounded", _through(element, narrow, how), f"rounded through {short_name}{_WORDS[how]}", detail)
        )
    return found


def _narrower(element: DType) -> list[tuple[str, str]]:
    """Return possible intermediate types, the most precise first."""
    if element.name not in FLOATS:
        return []
    own = FLOATS[element.name]
    found = []
    for name, kind in FLOATS.items():
        if kind.mantissa < own.mantissa and element.bits != 8:
            found.append((name, "nearest"))
            found += [(name, "truncated")] if name == "bfloat16" else []
            found += [(name, "saturating")] if name.startswith("float8") else []
    return found


def _through(element: DType, narrow: str, how: str) -> Callable[[Array], Array]:
    def of(raw: Array) -> Array:
        x = numbers(raw, element)
        y = encode(rounded(x, narrow, how), element)
        return np.where(np.isnan(x), raw, y)

    return of


def _casts(before: DType, after: DType) -> list[tuple[str, Callable[[Array], Array]]]:
    if after.name in FLOATS and before.name in FLOATS:
        modes = ["nearest"]
        modes += ["truncated"] if after.name == "bfloat16" else []
        modes += ["saturating"] if after.bits == 8 else []
        return [(how, partial(_converted, before=before, after=after, how=how)) for how in modes]
    return [("nearest", lambda raw: _plainly(numbers(raw, before), after))]


def _converted(raw: Array, before: DType, after: DType, how: str) -> Array:
    x = numbers(raw, before)
    return encode(rounded(x, after.name, how), after)


def _plainly(x: Array, after: DType) -> Array:
    """Convert integers and booleans to another type; numbers that it cannot represent change and so do not match."""
    with np.errstate(all="ignore"):
        if after.name in FLOATS:
            return encode(rounded(x.astype(np.float64), after.name), after)
        if after.name == "bool":
            return ((x != 0) & (x == 1)).astype(np.uint8) + (x > 1)
        return x.astype(after.numpy).view(after.raw)
