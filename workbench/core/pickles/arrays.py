"""numpy arrays, dtypes and scalars out of a pickle: plain ones are built, sizes first, the rest stays closed.

::

    _reconstruct(ndarray, (0,), b'b')          →  NumpyArray, empty    REDUCE
    (1, (2, 3), dtype, False, b'…48 bytes…')   →  its __setstate__     BUILD: 2·3·itemsize must be 48
    dtype('f8', False, True)                   →  NumpyDType('f8')     REDUCE
    (3, '<', None, None, None, -1, -1, 0)      →  its __setstate__     BUILD: byte order, fields …

Python objects and structured dtypes are not built: their bytes would be pointers, or pickles again.
Read from numpy 2.4 (``numpy/_core/multiarray``, ``numpy/_core/numeric.py``, ``descriptor.c``); numpy before 2
says ``numpy.core``.
"""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np

from workbench.core.pickles.budget import charge
from workbench.core.pickles.standins import Opaque, opaque_class, short

ARRAY = 200  # bytes of an array beside its elements


class NumpyArray(np.ndarray):
    """A numpy array as pickled: read-only, over the pickle's own bytes.

    ``refused`` is None, or the `Opaque` record of an array that was not built (object or structured dtype);
    the array is then empty.
    """

    __slots__ = ("refused",)

    def __new__(cls, *_: object) -> NumpyArray:
        array = super().__new__(cls, (0,), np.uint8)
        array.refused = None
        return array

    def __array_finalize__(self, base: object) -> None:
        self.refused = getattr(base, "refused", None)

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("the state of a numpy array must be a 5-tuple")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, NumpyDType):
            raise TypeError("a numpy array without a dtype")
        plain = dtype.resolve()
        if plain is None or type(data) is list:
            self.refused = opaque_class("numpy", "ndarray")(shape, dtype)
            return
        raw = _raw(data)
        _check_shape(shape, plain, len(raw))
        super().__setstate__((1, cast(Any, shape), plain, cast(Any, fortran is True), raw))
        self.flags.writeable = False

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError("an array from a checkpoint is read-only")


class NumpyDType(Opaque):
    """A numpy dtype as pickled: the name in ``args[0]``, the byte order in the state's second place."""

    __slots__ = ()
    module, qualname = "numpy", "dtype"

    def resolve(self) -> np.dtype | None:
        """Return the dtype, or None when it is structured or holds Python objects. Raises ValueError for
        nonsense.
        """
        code = self.args[0] if self.args else None
        if type(code) is not str:
            return None
        if not re.fullmatch(r"[biufcSUmMV][0-9]{1,9}", code) or code[0] == "V":
            return None
        order = "|"
        if type(self.state) is tuple and len(self.state) >= 5:
            order = self.state[1]
            if self.state[2] is not None or self.state[3] is not None or self.state[4] is not None:
                return None
            if code[0] in "SU" and len(self.state) > 5 and type(self.state[5]) is int:
                width = 4 if code[0] == "U" else 1
                code = f"{code[0]}{self.state[5] // width}"  # numpy writes 'U0', and the size here
        if order not in ("|", "<", ">", "="):
            raise ValueError("a numpy dtype without a byte order")
        unit = ""
        if code[0] in "mM":
            unit = _unit(self.state)
            if not unit:
                return None
        plain = np.dtype(f"{'' if order == '|' else order}{code}{unit}")
        return plain if plain.itemsize else None


def reconstruct(*_: object) -> NumpyArray:
    charge(ARRAY)
    return NumpyArray()


def frombuffer(data: object, dtype: object, shape: object, order: object = "C", axes: object = None) -> object:
    if not isinstance(dtype, NumpyDType) or axes is not None or order not in ("C", "F"):
        return opaque_class("numpy", "ndarray")(dtype, shape, order, axes)
    plain, raw = dtype.resolve(), _raw(data)
    if plain is None:
        return opaque_class("numpy", "ndarray")(dtype, shape, order, axes)
    _check_shape(shape, plain, len(raw))
    return np.ndarray(cast(tuple[int, ...], shape), plain, raw, order=cast(Any, order)).view(NumpyArray)


def scalar(dtype: object, data: object = b"") -> object:
    if not isinstance(dtype, NumpyDType):
        raise TypeError("a numpy scalar without a dtype")
    plain = dtype.resolve()
    if plain is None:
        return opaque_class("numpy", "generic")(dtype, data)
    raw = _raw(data)
    if len(raw) != plain.itemsize:
        raise ValueError(f"a numpy scalar of {plain.itemsize} bytes has {len(raw)}")
    return np.frombuffer(raw, plain)[0]


def _unit(state: object) -> str:
    meta = state[8] if type(state) is tuple and len(state) > 8 else None  # ({}, (unit, num, den, event))
    if type(meta) is tuple and len(meta) == 2 and type(meta[1]) is tuple and len(meta[1]) >= 2:
        unit, count = meta[1][0], meta[1][1]
        unit = unit.decode("ascii", "replace") if type(unit) is bytes else unit
        if type(unit) is str and re.fullmatch("[a-zA-Z]{1,7}", unit) and type(count) is int and 0 < count < 1 << 31:
            return "" if unit == "generic" else f"[{count}{unit}]"
    return ""


def _raw(data: object) -> bytes:
    if type(data) in (str, bytes, bytearray):
        charge(ARRAY + len(cast(bytes, data)))
    if type(data) is str:  # written by Python 2: bytes that were decoded as latin1
        return data.encode("latin1")
    if type(data) in (bytes, bytearray):
        return bytes(cast(bytes, data))
    raise TypeError("the data of a numpy array must be bytes")


def _check_shape(shape: object, dtype: np.dtype, nbytes: int) -> None:
    if type(shape) is not tuple or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a numpy array's shape is not a valid shape")
    total = dtype.itemsize
    for n in cast(tuple[int, ...], shape):
        total *= n
        if n > 1 << 62:
            raise ValueError("a numpy array's shape is too large")
    if total != nbytes:
        raise ValueError(
            f"a numpy array of shape {short(shape)} has {nbytes} bytes, not {total if total < 1 << 64 else 'so many'}"
        )
