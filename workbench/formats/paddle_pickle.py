"""Pickles of numpy arrays whose payloads stay in the file: ``paddle.save``'s, decoded without reading a tensor.

::

    numpy.core.multiarray._reconstruct(ndarray, …)    ┐
      BUILD (1, (4, 6), dtype('f4'), False, span 7)   ┴→ ArrayRef: float32 (4, 6), bytes a to b of the file

What the arrays hold is stepped over (paddle_spans.py); the rest, a few hundred bytes a tensor, goes through the only
unpickler (core/unpickle.py). Payloads of protocol 2 are text: bytes from 0x80 on take two in the file, so they have to
be decoded whole (codec ``latin1_text``).

``builtins.eval`` stands in files that paddle itself wrote: a static graph's DenseTensor is pickled as
``eval("data", {"data": array})``. Exactly that is taken for the array; any other call of it stays an opaque leaf that
is reported. Nothing is ever evaluated.

Source: paddlepaddle 3.3.1 ``framework/io.py`` and ``io_utils.py``, numpy 2.4, CPython 3.11 ``pickle.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from workbench.core import catalog as cat
from workbench.core import numpy_stubs, pickle_build, unpickle
from workbench.core.dtypes import DType, by_name
from workbench.core.numpy_stubs import NumpyDType
from workbench.core.place import Place
from workbench.core.stubs import Call, Inert, opaque_class, short
from workbench.errors import TruncatedError, UnsupportedFormatError
from workbench.formats.paddle_spans import Span, Text, plain, thin

__all__ = ["ArrayRef", "Loaded", "load"]

SMALL = 1 << 16  #: bytes of a scalar or a plain bytes object that is worth having whole
MAX_DIMS = 64
_EMPTY = Span(0, 0)


class ArrayRef(Inert):
    """A numpy array that was not read.

    ``dtype`` is None, and ``refused`` says why, for what is no plain array (Python objects, records) and for one whose
    bytes have no place of their own in the file.
    """

    __slots__ = ("dtype", "fortran", "refused", "shape", "span")
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    fortran: bool
    span: Span
    refused: str

    def __init__(self) -> None:
        self._set(dtype=None, shape=(), fortran=False, span=_EMPTY, refused="it was never given its data")

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("the state of a numpy array must be a 5-tuple")
        _, shape, dtype, fortran, data = state
        self._fill(shape, dtype, fortran is True, data)

    def _fill(self, shape: object, dtype: object, fortran: bool, data: object) -> None:
        if not isinstance(dtype, NumpyDType):
            raise TypeError("a numpy array without a dtype")
        if type(shape) is not tuple or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("a numpy array's shape is no shape")
        plain = _untold(dtype).resolve()
        if plain is None or type(data) is list:
            self._set(refused="it holds Python objects or records")
            return
        numel = math.prod(shape)
        if numel > cat.MAX_ELEMENTS:
            raise ValueError(f"a numpy array's shape {short(shape)} is too large")
        wanted = numel * plain.itemsize
        if isinstance(data, Span):
            stored = data.stop - data.start
            if not (wanted <= stored <= 2 * wanted if data.text else wanted == stored):
                raise ValueError(
                    f"a numpy array of shape {short(shape)} and {plain} has {stored:,} bytes, not {wanted:,}"
                )
            self._set(dtype=plain, shape=shape, fortran=fortran, span=data, refused="")
        elif not wanted and not data:
            self._set(dtype=plain, shape=shape, refused="")
        else:
            self._set(refused="its bytes have no place of their own in the file")

    def element(self) -> DType:
        """The element type; numpy's ``uint16`` is what paddle stores bfloat16 as, and reads as bfloat16.

        Raises:
            UnsupportedFormatError: none of the table, or no plain array.
        """
        if self.dtype is None:
            raise UnsupportedFormatError(self.refused)
        return _element(self.dtype)

    def codec(self) -> int:
        """How the span holds the elements."""
        big = self.dtype is not None and self.dtype.byteorder == ">"
        if self.span.text:
            return cat.OPAQUE if big else cat.LATIN1_TEXT
        return cat.RAW_BE if big else cat.RAW

    def strides(self) -> tuple[int, ...] | None:
        """Elements, for an array in Fortran order; ``None`` for row-major."""
        if not self.fortran or len(self.shape) < 2:
            return None
        return tuple(int(step) for step in np.cumprod([1, *self.shape[:-1]]))

    def __repr__(self) -> str:
        return f"<array {self.dtype} {list(self.shape)}>"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoded file: its tree, the foreign globals that it names, and the bytes it was decoded from."""

    tree: object
    globals: set[str]
    view: memoryview


def load(place: Place, file: str) -> Loaded:
    """Decode a pickle file; arrays become `ArrayRef`, other bytes `Span`.

    Raises:
        TruncatedError, CorruptError: cut short, no pickle, or contradicting itself.
        UnsafeError: a bomb.
    """
    view = place.map(file)
    what = repr(file)
    if not len(view):
        raise TruncatedError(f"file {what} is empty")
    data, spans = thin(view, what)
    evaluated: set[str] = set()

    def span(pid: object) -> object:
        if type(pid) is not int or not 0 <= pid < len(spans):
            raise ValueError("a persistent id")
        return spans[pid]

    saved = len(view) - len(data)
    found = unpickle.loads_with_globals(
        data,
        what=f"{what} (a pickle; bytes are counted without the {max(saved, 0):,} of its arrays)",
        allow=_stand_ins(view, evaluated),
        persistent_load=span,
    )
    return Loaded(found.value, found.globals | evaluated, view)


def _stand_ins(view: memoryview, evaluated: set[str]) -> dict[tuple[str, str], object]:
    """What the pickle's globals become beside the table's own."""

    def raw(data: object) -> object:
        if isinstance(data, Span):
            if data.stop - data.start > SMALL:
                raise ValueError(f"{data.stop - data.start:,} bytes where a few are expected")
            return plain(view, data)
        return data

    def array(*_: object) -> ArrayRef:
        return ArrayRef()

    def frombuffer(data: object, dtype: object, shape: object, order: object = "C", axes: object = None) -> ArrayRef:
        made = ArrayRef()
        if axes is None and order in ("C", "F"):
            made._fill(shape, dtype, order == "F", data)
        return made

    def encode(text: object, encoding: object = "utf-8") -> object:
        if isinstance(text, Text) and encoding in ("latin1", "latin-1"):
            return text.span
        return pickle_build.encode(str(text) if isinstance(text, Text) else text, encoding)

    def scalar(dtype: object, data: object = b"") -> object:
        return numpy_stubs.scalar(_untold(dtype) if isinstance(dtype, NumpyDType) else dtype, raw(data))

    def evaluate(*args: object) -> object:
        if len(args) == 2 and args[0] == "data" and type(args[1]) is dict and list(args[1]) == ["data"]:
            held = args[1]["data"]
            if isinstance(held, ArrayRef):
                return held
        evaluated.add("builtins.eval")
        return opaque_class("builtins", "eval")(*args)

    def to_bytes(*args: object) -> object:
        return pickle_build.to_bytes(*(raw(arg) for arg in args))

    def to_bytearray(*args: object) -> object:
        return bytearray(cast(bytes, to_bytes(*args)))

    functions: dict[tuple[str, str], Callable[..., object]] = {("_codecs", "encode"): encode}
    for module in ("numpy.core", "numpy._core"):
        functions[f"{module}.multiarray", "_reconstruct"] = array
        functions[f"{module}.multiarray", "scalar"] = scalar
        functions[f"{module}.numeric", "_frombuffer"] = frombuffer
    for module in ("builtins", "__builtin__"):
        functions[module, "eval"] = evaluate
        functions[module, "bytes"], functions[module, "bytearray"] = to_bytes, to_bytearray
    return {key: Call(".".join(key), function) for key, function in functions.items()}


@lru_cache(256)
def _element(dtype: np.dtype[Any]) -> DType:
    name = dtype.newbyteorder("=").name if dtype.kind in "biufc" else str(dtype)
    return by_name("bfloat16" if name == "uint16" else name)


def _untold(dtype: NumpyDType) -> NumpyDType:
    """The same dtype with its texts (``f4``, ``<``) free of their places."""
    made = NumpyDType(*map(_word, dtype.args))
    if type(dtype.state) is tuple:
        made.__setstate__(tuple(map(_word, dtype.state)))
    return made


def _word(value: object) -> object:
    return str(value) if isinstance(value, Text) else value
