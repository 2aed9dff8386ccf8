"""Elements of a tensor as text and as JSON: only the elements that are shown are read.

::

    [[0.012, -0.034, 0.005, ..., 0.021, 0.002, -0.01], ..., [0.004, 0.011, 0.008, ..., -0.013, 0.019, 0.007]]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.core.dtypes import DType
from workbench.core.jsonable import finite
from workbench.core.words import plural
from workbench.tensor import LazyTensor

WHOLE = 200  #: elements up to which everything is printed
LONG_AXES = 6  #: maximum number of axes that are abbreviated to their edges


def values_text(tensor: LazyTensor, *, whole: int = WHOLE) -> str:
    """Return the elements as NumPy prints them; only the edges of each axis if the tensor is larger.

    Raises:
        HoleError, OpenError: a shown element is stored nowhere or cannot be read.
    """
    if Decoder(tensor.element).kind == "raw bytes":
        return f"raw bytes: {tensor.element} packs several elements into a byte; read them with .numpy()"
    edge = 0 if tensor.numel() <= whole else 3 if tensor.ndim <= 3 else 1
    cut = [axis for axis, size in enumerate(tensor.shape) if edge and size > 2 * edge]
    if len(cut) > LONG_AXES:
        return f"… {plural(tensor.numel(), 'element')} along {tensor.ndim} axes; show a slice of them"
    shown = elements(_edges(tensor, cut, edge), tensor.element)
    texts = np.array([_text(value) for value in shown.reshape(-1).tolist()], object).reshape(shown.shape)
    width = max((len(text) for text in texts.reshape(-1)), default=0)
    return _nested(texts, 0, set(cut), edge, width)


def json_values(tensor: LazyTensor) -> Any:
    """Return all elements as nested lists; NaN and infinities as strings, complex numbers as ``[real, imaginary]``."""
    return _plain(elements(tensor.numpy(), tensor.element).tolist())


def elements(bits: Array, dtype: DType) -> Array:
    """Convert the result of ``LazyTensor.numpy()`` to a numeric NumPy type, even if NumPy lacks the stored dtype."""
    if dtype.kind == "c":
        if dtype.name == "complex32":
            parts = np.ascontiguousarray(bits).reshape(-1).view("<f2").reshape(*bits.shape, 2).astype(np.float32)
            return parts[..., 0] + 1j * parts[..., 1]
        return bits
    numbers = Decoder(dtype).numbers(bits.reshape(-1)).reshape(bits.shape)
    return numbers.astype(bool) if dtype.kind == "b" else numbers


def _edges(tensor: LazyTensor, cut: list[int], edge: int) -> Array:
    if not cut:
        return tensor.numpy()
    axis = cut[0]
    before: tuple[Any, ...] = (slice(None),) * axis
    ends = [tensor.lazy[(*before, part)] for part in (slice(0, edge), slice(-edge, None))]
    return np.concatenate([_edges(end, cut[1:], edge) for end in ends], axis=axis)


def _nested(texts: Array, axis: int, cut: set[int], edge: int, width: int) -> str:
    if not texts.ndim:
        return str(texts.item())
    inner = [_nested(part, axis + 1, cut, edge, width) if texts.ndim > 1 else part.rjust(width) for part in texts]
    if axis in cut:
        inner.insert(edge, "...")
    between = ", " if texts.ndim == 1 else "," + "\n" * (texts.ndim - 1) + " " * (axis + 1)
    return f"[{between.join(inner)}]"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, complex):
        return f"{value:.4g}"
    return str(value)


def _plain(values: Any) -> Any:
    if isinstance(values, list):
        return [_plain(value) for value in values]
    if isinstance(values, complex):
        return [_plain(values.real), _plain(values.imag)]
    return finite(values) if isinstance(values, float) else values
