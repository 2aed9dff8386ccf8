"""Decode ``paddle.save``'s pickles of numpy arrays without reading a tensor: payloads stay in the file.

::

    numpy.core.multiarray._reconstruct(ndarray, …)    ┐
      BUILD (1, (4, 6), dtype('f4'), False, span 7)   ┴→ ArrayRef: float32 (4, 6), bytes a to b of the file

A pickle has no table of contents, so its opcodes are walked. The data of each array are replaced by a persistent id,
and the rest, a few hundred bytes per tensor, is decoded by the only unpickler (core/pickles)::

    protocol 3, 4   …( K\\x01 shape dtype \\x89  B│8e 00100000 ░░░░ 1 MiB ░░░░  t b …
    thinned         …( K\\x01 shape dtype \\x89  J 00000007 Q                   t b …    span 7 = bytes a to b
    protocol 2      …c _codecs encode  X 00170000 ░░ UTF-8 of latin-1 ░░  q.  X latin1  \\x86 R …
    thinned         …c _codecs encode  J 00000008 Q                       q.  X latin1  \\x86 R …

FRAME opcodes are dropped, as their lengths are no longer valid. Payloads of protocol 2 are text: bytes from 0x80 on
take two bytes in the file, so they have to be decoded as a whole (codec ``latin1_text``).

``builtins.eval`` occurs in files that paddle itself wrote: a static graph's DenseTensor is pickled as
``eval("data", {"data": array})``. Exactly this call becomes the array; any other call stays an opaque leaf and is
reported. Nothing is ever evaluated.

Source: paddlepaddle 3.3.1 ``framework/io.py`` and ``io_utils.py``, numpy 2.4, CPython 3.11 ``pickle.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from workbench.core import catalog as cat
from workbench.core import codecs
from workbench.core.dtypes import DType, by_name
from workbench.core.pickles import arrays, constructors, unpickle
from workbench.core.pickles.arrays import NumpyDType
from workbench.core.pickles.opcodes import COUNTED, end_of
from workbench.core.pickles.standins import Call, Inert, opaque_class, short
from workbench.core.place import Place
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError, UnsupportedFormatError

INLINE = 256  #: largest text in bytes whose value is kept
_PUT = rb"(?:q.|r....|\x94)?"
#: What follows a text that is the first argument of ``_codecs.encode(text, "latin1")``.
_LATIN1 = re.compile(_PUT + rb"(?:(?:X\x06\0\0\0|\x8c\x06)latin1" + _PUT + rb"|h.|j....)\x86", re.DOTALL)


class Span(Inert):
    """Bytes in a pickle: ``[start, stop)`` of the file, raw or (``text``) as UTF-8 of latin-1."""

    __slots__ = ("start", "stop", "text")
    start: int
    stop: int
    text: bool

    def __init__(self, start: int, stop: int, text: bool = False) -> None:
        set_ = object.__setattr__  # a hot constructor: called twice per tensor
        set_(self, "start", start)
        set_(self, "stop", stop)
        set_(self, "text", text)

    def __repr__(self) -> str:
        return f"<bytes {self.start} to {self.stop}>"


class Text(str):
    """A text with its place; the value is kept only up to `INLINE` bytes."""

    __slots__ = ("span",)
    span: Span

    def __setstate__(self, state: object) -> None:
        raise TypeError("a text takes no state")


def thin(view: memoryview | LazyBytes, what: str) -> tuple[bytes, list[Span | Text]]:
    """Return the pickle with a persistent id in place of each run of bytes, and the runs.

    Raises:
        TruncatedError: an opcode ends beyond the data.
        CorruptError: the data are not a pickle, or have persistent ids, which paddle does not write.
    """
    pieces: list[bytes] = []
    spans: list[Span | Text] = []
    at = kept = 0
    end = len(view)

    def cut(start: int, stop: int, span: Span | Text | None) -> int:
        if stop > end:
            raise TruncatedError(
                f"file {what} ends at byte {end:,}, inside {plural(stop - start, 'byte')} from byte {start:,}; "
                "it is truncated"
            )
        pieces.append(bytes(view[kept:at]))
        if span is not None:
            pieces.append(b"J" + len(spans).to_bytes(4, "little") + b"Q")
            spans.append(span)
        return stop

    while True:
        if at >= end:
            raise TruncatedError(f"file {what} ends at byte {end:,} without the end of its pickle; it is truncated")
        op = view[at]
        if op == 0x2E:  # STOP
            pieces.append(bytes(view[kept : at + 1]))
            return b"".join(pieces), spans
        if op == 0x95:
            at = kept = cut(at, at + 9, None)
            continue
        if op in b"PQ":
            raise CorruptError(
                f"{what}, byte {at:,}: a persistent id, which paddle does not write; it is another format"
            )
        try:
            stop = end_of(view, at)
        except KeyError:
            raise CorruptError(
                f"{what}, byte {at:,}: {op:#04x} is not a pickle opcode; the file is damaged or not a pickle"
            ) from None
        except IndexError:
            raise TruncatedError(
                f"file {what} ends at byte {end:,}, inside the opcode at byte {at:,}; it is truncated"
            ) from None
        if op in b"CB\x8e\x96":
            start = at + 1 + COUNTED[op]
            at = kept = cut(start, stop, Span(start, stop))
        elif op == 0x58 and (stop - at <= 7 or _LATIN1.match(view[stop : stop + 20])):
            at = kept = cut(at + 5, stop, _text(view, at + 5, stop, what))
        else:
            at = stop


def plain(view: memoryview | LazyBytes, span: Span) -> bytes:
    """Return the bytes of a span."""
    data = bytes(view[span.start : span.stop])
    return data.decode("utf-8").encode("latin-1") if span.text else data


def _text(view: memoryview | LazyBytes, start: int, stop: int, what: str) -> Text:
    try:
        value = bytes(view[start:stop]).decode("utf-8", "surrogatepass") if stop - start < INLINE else ""
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{what}, byte {start + error.start:,}: a text that is not UTF-8; the file is damaged"
        ) from None
    made = Text(value)
    made.span = Span(start, stop, text=True)
    return made


SMALL = 1 << 16  #: largest scalar or plain bytes object to read in full
MAX_DIMS = 64
_EMPTY = Span(0, 0)


class ArrayRef(Inert):
    """A numpy array that has not been read.

    ``dtype`` is None, and ``refused`` is the reason, if it is not a plain array (Python objects, records) or its bytes
    are not stored separately in the file.
    """

    __slots__ = ("dtype", "fortran", "refused", "shape", "span")
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    fortran: bool
    span: Span
    refused: str

    def __init__(self) -> None:
        self._set(dtype=None, shape=(), fortran=False, span=_EMPTY, refused="it has no data")

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("the state of a numpy array must be a 5-tuple")
        _, shape, dtype, fortran, data = state
        self._fill(shape, dtype, fortran is True, data)

    def _fill(self, shape: object, dtype: object, fortran: bool, data: object) -> None:
        if not isinstance(dtype, NumpyDType):
            raise TypeError("a numpy array without a dtype")
        if type(shape) is not tuple or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("a numpy array has an invalid shape")
        plain = _without_places(dtype).resolve()
        if plain is None or type(data) is list:
            self._set(refused="it holds Python objects or records")
            return
        numel = math.prod(shape)
        if numel > cat.MAX_ELEMENTS:
            raise ValueError(f"a numpy array's shape {short(shape)} is too large")
        nbytes = numel * plain.itemsize
        if isinstance(data, Span):
            stored = data.stop - data.start
            if not (nbytes <= stored <= 2 * nbytes if data.text else nbytes == stored):
                raise ValueError(
                    f"a numpy array of shape {short(shape)} and {plain} has {plural(stored, 'byte')}, not {nbytes:,}"
                )
            self._set(dtype=plain, shape=shape, fortran=fortran, span=data, refused="")
        elif not nbytes and not data:
            self._set(dtype=plain, shape=shape, refused="")
        else:
            self._set(refused="its bytes are not stored separately in the file")

    def element(self) -> DType:
        """Return the element type; ``uint16`` becomes bfloat16, which paddle stores as ``uint16``.

        Raises:
            UnsupportedFormatError: the type is unknown, or it is not a plain array.
        """
        if self.dtype is None:
            raise UnsupportedFormatError(self.refused)
        return _element(self.dtype)

    def codec(self) -> int:
        """Return the codec of the elements in the span."""
        big = self.dtype is not None and self.dtype.byteorder == ">"
        if self.span.text:
            return codecs.OPAQUE if big else codecs.LATIN1_TEXT
        return codecs.RAW_BE if big else codecs.RAW

    def strides(self) -> tuple[int, ...] | None:
        """Return the strides in elements of an array in Fortran order; ``None`` for row-major."""
        if not self.fortran or len(self.shape) < 2:
            return None
        return tuple(int(step) for step in np.cumprod([1, *self.shape[:-1]]))

    def __repr__(self) -> str:
        return f"<array {self.dtype} {list(self.shape)}>"


@dataclass(frozen=True, slots=True)
class DecodedPickle:
    """A decoded file: its tree, the foreign globals that it names, and its bytes."""

    tree: object
    globals: set[str]
    view: LazyBytes


def load(place: Place, file: str) -> DecodedPickle:
    """Decode a pickle file; arrays become `ArrayRef`, other bytes `Span`.

    Raises:
        TruncatedError, CorruptError: the file is truncated, not a pickle, or contradicts itself.
        UnsafeError: a bomb.
    """
    view = place.window(file)
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
    return DecodedPickle(found.value, found.globals | evaluated, view)


def _stand_ins(view: LazyBytes, evaluated: set[str]) -> dict[tuple[str, str], object]:
    """Return replacements of the pickle's globals, in addition to the table's own."""

    def raw(data: object) -> object:
        if isinstance(data, Span):
            if data.stop - data.start > SMALL:
                raise ValueError(f"{plural(data.stop - data.start, 'byte')} where only a few are expected")
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
        return constructors.encode(str(text) if isinstance(text, Text) else text, encoding)

    def scalar(dtype: object, data: object = b"") -> object:
        return arrays.scalar(_without_places(dtype) if isinstance(dtype, NumpyDType) else dtype, raw(data))

    def evaluate(*args: object) -> object:
        if len(args) == 2 and args[0] == "data" and type(args[1]) is dict and list(args[1]) == ["data"]:
            held = args[1]["data"]
            if isinstance(held, ArrayRef):
                return held
        evaluated.add("builtins.eval")
        return opaque_class("builtins", "eval")(*args)

    def to_bytes(*args: object) -> object:
        return constructors.to_bytes(*(raw(arg) for arg in args))

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


def _without_places(dtype: NumpyDType) -> NumpyDType:
    """Return the same dtype with plain strings (``f4``, ``<``), without their places."""
    made = NumpyDType(*map(_word, dtype.args))
    if type(dtype.state) is tuple:
        made.__setstate__(tuple(map(_word, dtype.state)))
    return made


def _word(value: object) -> object:
    return str(value) if isinstance(value, Text) else value
