"""Find the same elements at other indices: transposed, in another shape, or in another tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from workbench.analysis.patterns.evidence import MARGIN, entropy
from workbench.analysis.patterns.found import Pattern
from workbench.analysis.patterns.local import Difference
from workbench.analysis.patterns.read import bits, corner, runs_of
from workbench.core.arrays import Array
from workbench.tensor import LazyTensor

AXES = 5  #: maximum axes to try in every order


class Sibling:
    """A tensor that others may have been exchanged with; its first elements are read once for all of them."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor

    @cached_property
    def first(self) -> bytes:
        """The first elements."""
        return corner(self.tensor).tobytes()


def sibling(b: LazyTensor, siblings: Sequence[Sibling]) -> Pattern | None:
    """Return a pattern if ``b`` equals another tensor bit for bit."""
    alike = [one for one in siblings if one.tensor.shape == b.shape and one.tensor.element == b.element]
    first = Sibling(b).first if alike else b""
    equal = [one.tensor for one in alike if one.first == first and _same(one.tensor, b)]
    if not equal:
        return None
    surprise = b.numel() * entropy(_sample(b))
    if surprise < MARGIN:
        return None
    names = [one.key for one in equal]
    sentence = f"equal to {names[0]!r} bit for bit"
    if len(names) > 1:
        sentence += f" (and to {len(names) - 1} more: {', '.join(map(repr, names[1:4]))})"
    other = equal[0]
    return Pattern("sibling", sentence, {"keys": names}, evidence=surprise, make=lambda array, rest: other.numpy())


def transposed(a: LazyTensor, b: LazyTensor, seen: Difference | None) -> Pattern | None:
    """Return a pattern if ``b`` is ``a`` with its axes in another order."""
    if not 2 <= len(a.shape) <= AXES or len(a.shape) != len(b.shape):
        return None
    for axes in permutations(range(len(a.shape))):
        if axes == tuple(range(len(axes))) or tuple(a.shape[k] for k in axes) != b.shape:
            continue
        if min(len(a.shape), sum(n > 1 for n in a.shape)) < 2 or not _turned(a, b, axes):
            continue
        surprise = b.numel() * entropy(_sample(b)) if seen is None else seen.count * seen.bits_each
        if surprise - 8 < MARGIN:
            continue
        what = "transposed" if len(axes) == 2 else f"axes in the order {axes}"
        square = a.shape == b.shape
        sentence = f"{what}: {f'both are {_shape(a)}' if square else f'{_shape(a)} became {_shape(b)}'}"
        return Pattern("transposed", sentence, {"axes": list(axes)}, evidence=surprise - 8, make=_transpose(axes))
    return None


def reshaped(a: LazyTensor, b: LazyTensor) -> Pattern | None:
    """Return a pattern if ``b`` has the elements of ``a`` in the same row-major order but another shape."""
    if a.numel() != b.numel():
        return None
    for left, right in zip(_flat(a), _flat(b), strict=True):
        if (left != right).any():
            return None
    surprise = b.numel() * entropy(_sample(b))
    if surprise < MARGIN:
        return None
    shape = b.shape
    sentence = f"the same elements in another shape: {_shape(a)} became {_shape(b)}"
    detail = {"before": list(a.shape), "after": list(b.shape)}
    return Pattern("reshaped", sentence, detail, evidence=surprise, make=lambda array, rest: array.reshape(shape))


def _same(one: LazyTensor, b: LazyTensor) -> bool:
    runs = runs_of(b.shape, b.element.itemsize)
    return all((bits(one, run.key) == bits(b, run.key)).all() for run in runs.ends_first())


def _turned(a: LazyTensor, b: LazyTensor, axes: tuple[int, ...]) -> bool:
    for number, run in enumerate(_boxes(b)):
        key: list[Any] = [slice(None)] * len(axes)
        for axis, low, size in zip(axes, run[0], run[1], strict=True):
            key[axis] = slice(low, low + size)
        if number == 0:  # a small corner first
            small = tuple(slice(part.start, part.start + min(part.stop - part.start, 16)) for part in key)
            if (bits(a, small).transpose(axes) != bits(b, tuple(small[k] for k in axes))).any():
                return False
        target = bits(b, tuple(key[k] for k in axes))
        if (bits(a, tuple(key)).transpose(axes) != target).any():
            return False
    return True


def _boxes(b: LazyTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for run in runs_of(b.shape, b.element.itemsize).ends_first():
        yield run.low, run.sizes


def _transpose(axes: tuple[int, ...]) -> Any:
    return lambda array, rest: np.ascontiguousarray(array.transpose(axes))


def _flat(tensor: LazyTensor, size: int = 1 << 18) -> Iterator[Array]:
    """Yield the elements in row-major order, in pieces of equal size."""
    kept = np.empty(0, tensor.element.raw)
    for run in runs_of(tensor.shape, tensor.element.itemsize):
        kept = np.concatenate([kept, bits(tensor, run.key).reshape(-1)])
        whole = len(kept) // size * size
        for start in range(0, whole, size):
            yield kept[start : start + size]
        kept = kept[whole:]
    if len(kept):
        yield kept


def _sample(b: LazyTensor) -> Array:
    return corner(b, 1 << 16)


def _shape(tensor: LazyTensor) -> str:
    return "×".join(f"{n:,}" for n in tensor.shape) or "a single number"
