"""What a decoded pickle is made of: inert stand-ins for the classes and functions that it names.

A pickle names globals and tells the unpickler to call them, to give them state and to fill them with items::

    GLOBAL torch._utils _rebuild_tensor_v2   →  Call("…", function of ours)        → TensorRef
    GLOBAL my.lib Config                     →  a fresh subclass of Opaque         → keeps args, state, items
    GLOBAL torch bfloat16                    →  DTypeRef("bfloat16")

Opcodes can reach an object in five ways: call it (REDUCE, NEWOBJ, OBJ, INST), give it state (BUILD), append,
add, set an item. Nothing here runs code that a pickle brought along in any of them, and none of them changes
a class or a function of ours: BUILD looks for ``__setstate__`` and only without one falls back on
``setattr``, so every stand-in has one; classes are sealed; functions are never handed out bare (BUILD would
reach their ``__defaults__``) but wrapped in `Call`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np

__all__ = [
    "Call",
    "DTypeRef",
    "NumpyArray",
    "NumpyDType",
    "Opaque",
    "PickledDict",
    "Record",
    "StorageRef",
    "StorageType",
    "TensorRef",
    "opaque_class",
    "short",
]

MAX_DIMS = 64  # torch's own limit


class _Sealed(type):
    """Metaclass of classes whose attributes a BUILD opcode must not reach."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("a stand-in class cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError("a stand-in class cannot be changed")

    def __repr__(cls) -> str:
        if "qualname" in cls.__dict__:
            return f"<class {_name(cls)}>"
        return type.__repr__(cls)


class Inert(metaclass=_Sealed):
    """Base of the values that take no state and no attribute."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{type(self).__name__} cannot be changed")

    def __setstate__(self, state: object) -> None:
        raise TypeError(f"{type(self).__name__} takes no state")

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Call(Inert):
    """A function of ours under a pickled name; callable, not a class, without state."""

    __slots__ = ("function", "name")
    function: Callable[..., object]
    name: str

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self._set(name=name, function=function)

    def __call__(self, *args: object) -> object:
        return self.function(*args)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class DTypeRef(Inert):
    """A dtype by its torch name, such as ``bfloat16``."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        self._set(name=name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypeRef) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class StorageType(Inert):
    """A storage class: its dtype's torch name, or None when untyped (then sizes are in bytes)."""

    __slots__ = ("dtype",)
    dtype: str | None

    def __init__(self, dtype: str | None) -> None:
        self._set(dtype=dtype)

    def __repr__(self) -> str:
        return f"<storage of {self.dtype or 'bytes'}>"


class StorageRef(Inert):
    """One storage of a torch.save file: ``numel`` counts elements of ``dtype``, or bytes when ``dtype`` is
    None.

    ``view`` is the legacy format's (key, offset, numel) of a storage that lies inside another one, else None.
    """

    __slots__ = ("dtype", "key", "location", "numel", "view")
    dtype: str | None
    key: str
    location: str
    numel: int
    view: tuple[str, int, int] | None

    def __init__(
        self, dtype: str | None, key: str, location: str, numel: int, view: tuple[str, int, int] | None = None
    ) -> None:
        self._set(dtype=dtype, key=key, location=location, numel=numel, view=view)

    def __repr__(self) -> str:
        return f"<storage {self.key!r} of {self.numel} {self.dtype or 'bytes'}>"


class TensorRef(Inert):
    """A tensor that was not read: where it lies in which storage.

    ``storage`` is what ``persistent_load`` returned; ``storage_offset`` and ``stride`` count elements.
    ``kind`` names a subclass (``torch.nn.parameter.Parameter``) or is None; ``attrs`` are the Python
    attributes that the file keeps with it (Megatron's ``partition_dim``), inert values only.
    """

    __slots__ = ("attrs", "dtype", "kind", "requires_grad", "shape", "storage", "storage_offset", "stride")
    storage: Any
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    attrs: dict[str, object]
    kind: str | None

    def __init__(
        self,
        storage: object,
        dtype: str,
        storage_offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool = False,
        attrs: dict[str, object] | None = None,
        kind: str | None = None,
    ) -> None:
        if type(dtype) is not str:
            raise ValueError("a tensor's storage has no dtype")
        if (
            type(shape) is not tuple
            or type(stride) is not tuple
            or len(shape) != len(stride)
            or len(shape) > MAX_DIMS
        ):
            raise ValueError("a tensor's shape and stride do not fit each other")
        for number in (storage_offset, *shape, *stride):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise ValueError("a tensor's shape, stride or offset is no size")
        set_ = object.__setattr__  # this constructor is hot: once a tensor
        set_(self, "storage", storage)
        set_(self, "dtype", dtype)
        set_(self, "storage_offset", storage_offset)
        set_(self, "shape", shape)
        set_(self, "stride", stride)
        set_(self, "requires_grad", requires_grad is True)
        set_(self, "attrs", {} if attrs is None else attrs)
        set_(self, "kind", kind)

    def replace(self, **changes: Any) -> TensorRef:
        """A copy with some fields changed."""
        return TensorRef(**{name: getattr(self, name) for name in TensorRef.__slots__} | changes)

    def __repr__(self) -> str:
        return f"<tensor {self.dtype} {list(self.shape)}>"


class PickledDict(dict):
    """An OrderedDict, defaultdict or Counter: a plain dict plus the attributes that were pickled with it.

    ``kind`` says which; ``attrs`` holds e.g. a state_dict's ``_metadata``; a default factory is kept as a
    word, never called.
    """

    __slots__ = ("attrs", "factory", "kind")

    def __init__(
        self, kind: str, items: dict[object, object] | None = None, factory: str | None = None
    ) -> None:
        super().__init__(items or ())
        self.kind = kind
        self.factory = factory
        self.attrs: dict[str, object] = {}

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict:
            raise TypeError("the state of a dict must be a dict")
        self.attrs = state

    def __repr__(self) -> str:
        return f"<{self.kind} of {len(self)}>"


class Opaque(metaclass=_Sealed):
    """An instance of a class that is not ours: what the pickle says about it, and nothing that runs.

    The class attributes ``module`` and ``qualname`` name it; ``args`` and ``kwargs`` are what it was called
    with, ``state`` what BUILD gave (None before), ``items`` what was appended or added, ``pairs`` what was
    set as items. Equal only to itself.
    """

    __slots__ = ("args", "items", "kwargs", "pairs", "state")
    module: str = ""
    qualname: str = ""
    args: tuple[object, ...]
    kwargs: dict[str, object]
    state: object
    items: list[object]
    pairs: list[tuple[object, object]]

    def __new__(cls, *args: object, **kwargs: object) -> Opaque:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.items = []
        self.pairs = []
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: list[object]) -> None:
        self.items.extend(items)

    add = append

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    @property
    def name(self) -> str:
        """``module.qualname``, escaped and bounded: safe to print."""
        return _name(type(self))

    def __repr__(self) -> str:
        return short(self)


class Record(Opaque):
    """A plain bag of attributes: argparse.Namespace, types.SimpleNamespace."""

    __slots__ = ()

    @property
    def fields(self) -> dict[str, object]:
        """The attributes, as pickled."""
        return self.state if type(self.state) is dict else dict(self.kwargs)


def opaque_class(module: str, qualname: str, base: type[Opaque] = Opaque) -> type[Opaque]:
    """A fresh class for a global (fresh per load, so that nothing is shared between two pickles)."""
    return _Sealed(base.__name__, (base,), {"__slots__": (), "module": module, "qualname": qualname})  # type: ignore[return-value]


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
        raw = raw_bytes(data)
        check_shape(shape, plain, len(raw))
        super().__setstate__((1, cast(Any, shape), plain, cast(Any, fortran is True), raw))
        self.flags.writeable = False

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError("an array from a checkpoint is read-only")


class NumpyDType(Opaque):
    """A numpy dtype as pickled: the name in ``args[0]``, the byte order in the state's second place."""

    __slots__ = ()
    module, qualname = "numpy", "dtype"

    def resolve(self) -> np.dtype | None:
        """The dtype, or None when it is structured or holds Python objects. Raises ValueError for
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


def _unit(state: object) -> str:
    meta = state[8] if type(state) is tuple and len(state) > 8 else None  # ({}, (unit, num, den, event))
    if type(meta) is tuple and len(meta) == 2 and type(meta[1]) is tuple and len(meta[1]) >= 2:
        unit, count = meta[1][0], meta[1][1]
        unit = unit.decode("ascii", "replace") if type(unit) is bytes else unit
        if (
            type(unit) is str
            and re.fullmatch("[a-zA-Z]{1,7}", unit)
            and type(count) is int
            and 0 < count < 1 << 31
        ):
            return "" if unit == "generic" else f"[{count}{unit}]"
    return ""


def raw_bytes(data: object) -> bytes:
    if type(data) is str:  # written by Python 2: bytes that were decoded as latin1
        return data.encode("latin1")
    if type(data) in (bytes, bytearray):
        return bytes(cast(bytes, data))
    raise TypeError("the data of a numpy array must be bytes")


def check_shape(shape: object, dtype: np.dtype, nbytes: int) -> None:
    if type(shape) is not tuple or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a numpy array's shape is no shape")
    total = dtype.itemsize
    for n in cast(tuple[int, ...], shape):
        total *= n
        if n > 1 << 62:
            raise ValueError("a numpy array's shape is too large")
    if total != nbytes:
        raise ValueError(
            f"a numpy array of shape {short(shape)} has {nbytes} bytes, not "
            f"{total if total < 1 << 64 else 'so many'}"
        )


def short(value: object, limit: int = 120) -> str:
    """A one-line, escaped, bounded repr of any decoded value."""
    text = _REPR.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _name(cls: type) -> str:
    text = repr(f"{cls.module[:121]}.{cls.qualname[:121]}")[1:-1]  # type: ignore[attr-defined]  # repr escapes control characters
    return text if len(text) <= 120 else text[:119] + "…"


class _Repr(reprlib.Repr):
    """reprlib bounds depth and width; it dispatches on the class name, so ours are caught here first."""

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, Opaque):
            if level <= 0:
                return f"<{x.name} …>"
            inner = [self.repr1(item, level - 1) for item in x.args[:4]]
            if len(x.args) > 4:
                inner.append("…")
            return f"<{x.name}({', '.join(inner)})>"
        if isinstance(x, PickledDict | Inert | type):
            return repr(x)
        if (
            type(x) is int and abs(x) >= 1 << 256
        ):  # repr of a huge int is quadratic, and limited by the interpreter
            return f"<int of {x.bit_length()} bits>"
        if type(x) in (
            list,
            tuple,
            dict,
            set,
            frozenset,
            str,
            int,
            bytes,
            bytearray,
            float,
            complex,
            bool,
            type(None),
        ):
            if type(x) in (bytes, bytearray):
                return repr(bytes(x[:40])) + ("…" if len(x) > 40 else "")  # type: ignore[index,arg-type]
            if type(x) in (set, frozenset):  # reprlib sorts sets: comparing deep keys could take for ever
                return f"<{type(x).__name__} of {len(x)}>"  # type: ignore[arg-type]
            if type(x) is dict:
                return self._dict(x, level)
            return super().repr1(x, level)
        if type(x).__module__ == "numpy":
            return (
                f"<numpy {type(x).__name__} {getattr(x, 'dtype', '')}>"
                if getattr(x, "ndim", 0)
                else repr(x)[:80]
            )
        return f"<{type(x).__name__}>"

    def _dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0:
            return "{…}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in list(x.items())[:4]]
        return "{" + ", ".join(shown) + (", …" if len(x) > 4 else "") + "}"


_REPR = _Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 60
