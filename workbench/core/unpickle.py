"""The only unpickler of the project: decodes a pickle without importing or running anything that it names.

::

    80 04 95 …                     PROTO 4, FRAME
    8c 08 'my.mod'… 93             STACK_GLOBAL   find_class looks here, in this order:
                                     1. the caller's ``allow``    the very object is handed back
                                     2. the table below           torch, numpy, collections … as stand-ins
                                     3. anything else             an `Opaque` leaf; UnsafeError if strict
    81 · 52 · 62                   NEWOBJ · REDUCE · BUILD        act on stand-ins only
    2e                             STOP

The C unpickler does the work, after `pickle_guard.walk` has read every opcode of the stream.
Read from torch 2.13 (``torch/_utils.py``, ``torch/_tensor.py``, ``torch/storage.py``), numpy 2.4
(``numpy/_core/multiarray``) and CPython 3.11 (``copyreg``, ``collections``, ``Modules/_pickle.c``); older
module names stand beside.
"""

from __future__ import annotations

import gc
import math
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from workbench.core import pickle_guard as guard
from workbench.core.stubs import (
    Call,
    DTypeRef,
    Inert,
    NumpyDType,
    Opaque,
    Record,
    StorageRef,
    StorageType,
    TensorRef,
    opaque_class,
    short,
)
from workbench.errors import CorruptError, UnsafeError, WorkbenchError

__all__ = ["Unpickled", "jsonable", "load_prefix", "loads", "loads_with_globals", "nested", "torch_storage"]

# fmt: off
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex32", "complex64", "complex128", "quint8", "qint8", "qint32",
    "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "int1", "int2", "int3",
    "int4", "int5", "int6", "int7", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
)
STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexDouble": "complex128", "ComplexFloat": "complex64", "QUInt8": "quint8", "QInt8": "qint8",
    "QInt32": "qint32", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}
TEXT, ARRAY = 10_000, 1000  # characters of a string and elements of an array that `jsonable` shows
# Known and harmless by name, kept as opaque leaves: they count as no foreign global.
_LEAVES = {
    "torch._utils": (
        "_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor", "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass", "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_xla_tensor"),
    "torch": (
        "Tensor", "device", "Generator", "per_tensor_affine", "per_channel_affine", "strided", "sparse_coo",
        "per_channel_affine_float_qparams", "layout", "contiguous_format", "preserve_format", "channels_last",
        "channels_last_3d"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.nn": ("Parameter",),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "uuid": ("UUID", "SafeUUID"), "decimal": ("Decimal",), "fractions": ("Fraction",),
    "collections": ("deque",),
    "numpy.random._pickle": ("__generator_ctor", "__bit_generator_ctor", "__randomstate_ctor"),
    "numpy.random._mt19937": ("MT19937",), "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",), "numpy.random._sfc64": ("SFC64",),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
}
# fmt: on
OPAQUE = {(module, name) for module, names in _LEAVES.items() for name in names}
RECORDS = {("argparse", "Namespace"), ("types", "SimpleNamespace")}


class Unpickled(NamedTuple):
    """A decoded value, the foreign globals that the pickle names, and where the stream ended."""

    value: object
    globals: set[str]
    stop: int


def loads(
    data: bytes | memoryview,
    *,
    what: str,
    allow: Mapping[tuple[str, str], object] | None = None,
    strict: bool = False,
    persistent_load: Callable[[object], object] | None = None,
) -> object:
    """Decode one pickle (protocols 0 to 5).

    Args:
        data: the stream; bytes after its STOP are ignored, as by ``pickle.loads``.
        what: how messages name it, e.g. ``"'.metadata'"``.
        allow: (module, qualname) to stand-in, before the table; each is handed to the stream as it is, so it
        must survive a
            hostile BUILD: a class needs ``__setstate__``, a bare function must not be given.
        strict: refuse any global outside ``allow`` and the table, where structure is needed.
        persistent_load: what decodes persistent ids (see `torch_storage`); without one they are refused.

    Raises:
        CorruptError: no pickle, cut short, or contradicting itself.
        UnsafeError: a bomb, or (strict) a foreign global.
    """
    return _load(data, 0, what, allow, strict, persistent_load).value


def loads_with_globals(
    data: bytes | memoryview,
    *,
    what: str,
    allow: Mapping[tuple[str, str], object] | None = None,
    strict: bool = False,
    persistent_load: Callable[[object], object] | None = None,
) -> Unpickled:
    """Like `loads`, and says which foreign globals (``module.qualname``) became opaque leaves."""
    return _load(data, 0, what, allow, strict, persistent_load)


def load_prefix(
    data: bytes | memoryview,
    offset: int,
    *,
    what: str,
    allow: Mapping[tuple[str, str], object] | None = None,
    strict: bool = False,
    persistent_load: Callable[[object], object] | None = None,
) -> tuple[object, int]:
    """Decode the pickle at byte ``offset``; returns it and the offset after its STOP (legacy torch.save:
    several in a row).
    """
    found = _load(data, offset, what, allow, strict, persistent_load)
    return found.value, found.stop


def nested(value: bytes, what: str) -> object:
    """Decode bytes that a pickle holds and that are a pickle themselves, by the same rules. Raises like
    `loads`.
    """
    if type(value) not in (bytes, bytearray):
        raise CorruptError(f"{what} is a {type(value).__name__}, not the bytes of a pickle")
    return loads(bytes(value), what=what)


def torch_storage(pid: object) -> StorageRef:
    """The storage behind a persistent id of torch.save: ``('storage', class, key, location, numel[,
    view])``.
    """
    if (
        type(pid) is not tuple
        or len(pid) not in (5, 6)
        or pid[0] != "storage"
        or not isinstance(pid[1], StorageType)
    ):
        raise ValueError(f"{short(pid)} is no storage")
    _, kind, key, location, numel = pid[:5]
    if (
        type(key) is not str
        or type(location) is not str
        or type(numel) is not int
        or not 0 <= numel < 1 << 63
    ):
        raise ValueError(f"{short(pid)} is no storage")
    view = pid[5] if len(pid) == 6 else None
    if view is not None and not (
        type(view) is tuple
        and len(view) == 3
        and type(view[0]) is str
        and type(view[1]) is int
        and view[1] >= 0
        and type(view[2]) is int
        and view[2] >= 0
    ):
        raise ValueError(f"{short(view)} is no view of a storage")
    return StorageRef(kind.dtype, key, location, numel, view)


def _load(
    data: bytes | memoryview,
    offset: int,
    what: str,
    allow: Mapping[tuple[str, str], object] | None,
    strict: bool,
    persistent_load: Callable[[object], object] | None,
) -> Unpickled:
    view = memoryview(data).cast("B")
    guard.walk(view, offset, what)
    reader = _Reader(view, offset)
    unpickler = _Unpickler(reader, what, allow or {}, strict, persistent_load)
    collecting = gc.isenabled()
    gc.disable()  # millions of young objects and no garbage: collections would take two thirds of the time
    try:
        value = unpickler.load()
    except WorkbenchError:
        raise
    except Exception as error:  # whatever hostile bytes provoke in the C unpickler or a stand-in ends here
        reason = (
            f"{type(error).__name__}: {error}"
            if not isinstance(error, pickle.UnpicklingError)
            else str(error)
        )
        raise CorruptError(
            f"{what} cannot be unpickled, at or before byte {reader.pos:,}: {_line(reason)}; "
            "the file is damaged, or no pickle that a checkpoint would hold"
        ) from None
    finally:
        if collecting:
            gc.enable()
    return Unpickled(value, unpickler.foreign, reader.pos)


def jsonable(value: object, *, max_nodes: int = 100_000, max_depth: int = 64) -> object:
    """Any decoded value as plain JSON types, bounded and safe against cycles; what is left out is said in
    words.

    Numbers, text, lists and dicts stay what they are; the rest becomes a dict with a ``"type"``, or a word.
    Non-finite floats become ``"nan"``, ``"inf"``, ``"-inf"``; keys that are no text become their bounded
    repr.
    """
    return _Json(max_nodes, max_depth).render(value, max_depth)


class _Json:
    def __init__(self, nodes: int, depth: int) -> None:
        self.left = nodes
        self.depth = depth
        self.open: set[int] = set()  # containers being rendered: meeting one again is a cycle

    def render(self, value: object, depth: int) -> object:
        self.left -= 1
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            return value if abs(value) < 1 << 256 else short(value)
        if type(value) is float:
            return value if math.isfinite(value) else str(value)
        if type(value) is str:
            self.left -= len(value[:TEXT]) >> 6  # long text is not one node
            text = value if len(value) <= TEXT else f"{value[:TEXT]}… {len(value) - TEXT:,} more"
            return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates are no JSON text
        if isinstance(value, np.generic):
            return (
                self.render(value.item(), depth)
                if value.dtype.kind in "biufSU" and value.dtype != np.longdouble
                else str(value)
            )
        if type(value) in (bytes, bytearray):
            return {"type": "bytes", "length": len(value), "start": short(bytes(value[:32]), 200)}  # type: ignore[arg-type,index]
        if isinstance(value, (Inert, type, complex, range, slice)):
            return self._leaf(value, depth)
        if id(value) in self.open:
            return "… the object that contains this one"
        if depth <= 0:
            return f"… nested deeper than {self.depth}"
        if self.left <= 0:
            return "… more"
        self.open.add(id(value))
        try:
            return self._container(value, depth - 1)
        finally:
            self.open.discard(id(value))

    def _leaf(self, value: object, depth: int) -> object:
        if isinstance(value, TensorRef):
            leaf: dict[str, object] = {"type": "tensor", "dtype": value.dtype, "shape": list(value.shape)}
            if value.kind:
                leaf["class"] = self.render(value.kind, 0)
            if value.attrs and depth > 0:
                leaf["attributes"] = self.render(value.attrs, depth - 1)
            return leaf
        if isinstance(value, DTypeRef):
            return f"torch.{value.name}"
        return short(value)

    def _container(self, value: object, depth: int) -> object:
        if isinstance(value, dict):
            return self._pairs(value.items(), len(value), depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._list(value, len(value), depth)
        if isinstance(value, np.ndarray):
            refused = getattr(value, "refused", None)
            if refused is not None:
                return {"type": "numpy.ndarray, not decoded", "what": short(refused)}
            shown = self._list(value.reshape(-1)[: min(value.size, ARRAY)], value.size, depth)
            return {
                "type": "numpy.ndarray",
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "values": shown,
            }
        if isinstance(value, Opaque):
            leaf: dict[str, object] = {"type": value.name}
            for name in ("args", "kwargs", "state", "items"):
                if part := getattr(value, name):
                    leaf[name] = self.render(part, depth)
            if value.pairs:
                leaf["pairs"] = self._pairs(value.pairs, len(value.pairs), depth)
            return leaf
        return short(value)

    def _list(self, items: Iterable[object], total: int, depth: int) -> list[object]:
        shown: list[object] = []
        for item in items:
            if self.left <= 0:
                break
            shown.append(self.render(item, depth))
        if len(shown) < total:
            shown.append(f"… {total - len(shown):,} more")
        return shown

    def _pairs(self, pairs: Iterable[tuple[object, object]], total: int, depth: int) -> dict[str, object]:
        shown: dict[str, object] = {}
        done = 0
        for key, item in pairs:
            if self.left <= 0:
                break
            text = str(self.render(key, 0)) if type(key) is str else short(key)
            if text in shown:  # 1 and '1' are two keys
                text = f"{text} (key {done + 1:,})"
            shown[text] = self.render(item, depth)
            done += 1
        if done < total:
            shown["…"] = f"{total - done:,} more"
        return shown


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: _Reader,
        what: str,
        allow: Mapping[tuple[str, str], object],
        strict: bool,
        persistent: Callable[[object], object] | None,
    ) -> None:
        super().__init__(file, encoding="latin1")  # type: ignore[arg-type]  # Python 2's str: any byte is a character
        self.what = what
        self.allow = allow
        self.strict = strict
        self.persistent = persistent
        self.foreign: set[str] = set()
        self.made: dict[tuple[str, str], object] = {}

    def find_class(self, module: str, qualname: str) -> object:
        key = (module, qualname)
        if key in self.allow:
            return self.allow[key]
        if key in TABLE:
            return TABLE[key]
        if key in self.made:
            return self.made[key]
        if key not in OPAQUE and key not in RECORDS:
            if self.strict:
                raise UnsafeError(
                    f"{self.what} names a foreign global {_line(module + '.' + qualname)!r}, which no "
                    "checkpoint of this format "
                    "holds; it was not imported. Do not load this file with torch or pickle before you "
                    "know who wrote it"
                )
            self.foreign.add(f"{module}.{qualname}")
        made = opaque_class(module, qualname, Record if key in RECORDS else Opaque)
        self.made[key] = made
        return made

    def persistent_load(self, pid: object) -> object:
        if self.persistent is None:
            raise ValueError(f"a persistent id {short(pid)} where none can be")
        return self.persistent(pid)


class _Reader:
    """A file over a buffer for the C unpickler: no copy, and ``pos`` ends exactly after STOP.

    With ``peek`` the unpickler prefetches, then says by ``read`` how much of it was used.
    """

    __slots__ = ("pos", "view")

    def __init__(self, view: memoryview, pos: int) -> None:
        self.view = view
        self.pos = pos

    def peek(self, size: int) -> memoryview:
        return self.view[self.pos : self.pos + size]

    def read(self, size: int) -> memoryview:
        part = self.view[self.pos : self.pos + size]
        self.pos += len(part)
        return part

    def readinto(self, target: memoryview) -> int:
        part = self.read(len(target))
        target[: len(part)] = part
        return len(part)

    def readline(self) -> bytes:
        at = self.pos
        while at < len(self.view):  # a line may be long; look for its end piece by piece
            piece = bytes(self.view[at : at + 4096])
            end = piece.find(b"\n")
            if end >= 0:
                at += end + 1
                break
            at += len(piece)
        line = bytes(self.view[self.pos : at])
        self.pos = at
        return line


def _line(text: str) -> str:
    """One printable, bounded line."""
    safe = repr(text)[1:-1]
    return safe if len(safe) <= 200 else safe[:199] + "…"


def _reconstructor(cls: object, base: object = None, state: object = None) -> object:
    if not (isinstance(cls, type) and issubclass(cls, Opaque)):
        raise TypeError("copyreg._reconstructor of something else than a class")
    return cls() if state is None else cls(state)


def _newobj(cls: object, *args: object) -> object:
    if not (isinstance(cls, type) and issubclass(cls, Opaque)):
        raise TypeError("copyreg.__newobj__ of something else than a class")
    return cls(*args)


def _tensor(storage: object, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    return TensorRef(storage, getattr(storage, "dtype", None), offset, size, stride)  # type: ignore[arg-type]


def _tensor_v2(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> TensorRef:
    attrs = {"metadata": metadata} if metadata else None  # {'conj': True}: the bits mean something else then
    return TensorRef(storage, getattr(storage, "dtype", None), offset, size, stride, requires_grad, attrs)  # type: ignore[arg-type]


def _tensor_v3(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    dtype: object = None,
    metadata: object = None,
) -> TensorRef:
    if not isinstance(dtype, DTypeRef):
        raise TypeError("_rebuild_tensor_v3 without a dtype")
    return TensorRef(
        storage, dtype.name, offset, size, stride, requires_grad, {"metadata": metadata} if metadata else None
    )


def _parameter(
    data: object, requires_grad: bool = True, hooks: object = None, state: object = None
) -> object:
    if not isinstance(data, TensorRef):
        return opaque_class("torch.nn.parameter", "Parameter")(data)
    return data.replace(
        requires_grad=requires_grad,
        attrs=data.attrs | _attributes(state),
        kind="torch.nn.parameter.Parameter",
    )


def _from_type(function: object, new_type: object, args: object, state: object = None) -> object:
    if type(args) is not tuple or not (
        isinstance(function, Call) or (isinstance(function, type) and issubclass(function, Opaque))
    ):
        raise TypeError("_rebuild_from_type_v2 of something else than a rebuild function")
    made = function(*args)
    if isinstance(made, TensorRef):
        kind = (
            f"{new_type.module}.{new_type.qualname}"
            if isinstance(new_type, type) and issubclass(new_type, Opaque)
            else None
        )
        return made.replace(attrs=made.attrs | _attributes(state), kind=kind)
    if isinstance(made, Opaque):
        made.__setstate__(state)
    return made


def _attributes(state: object) -> dict[str, object]:
    parts = state if type(state) is tuple else (state,)
    return {
        key: value for part in parts if type(part) is dict for key, value in part.items() if type(key) is str
    }


# fmt: off
def _table() -> dict[tuple[str, str], object]:
    functions: dict[tuple[str, str], Callable[..., object]] = {
        ("collections", "OrderedDict"): guard.mapping("OrderedDict"),
        ("collections", "Counter"): guard.mapping("Counter"),
        ("collections", "defaultdict"): guard.defaultdict,
        ("_codecs", "encode"): guard.encode,
        ("torch", "Size"): guard.size,
        ("torch.serialization", "_get_layout"): opaque_class("torch", "layout"),
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
        ("torch._tensor", "_rebuild_from_type"): _from_type,
        ("numpy", "ndarray"): guard.reconstruct,
    }
    integer, whole, word = guard.only(int, int, str, bool), guard.only(range, int), guard.only(str, str)
    simple = {
        "set": guard.sequence(set), "frozenset": guard.sequence(frozenset), "list": guard.sequence(list),
        "tuple": guard.sequence(tuple), "dict": guard.mapping("dict"), "bytes": guard.to_bytes,
        "bytearray": lambda *args: bytearray(guard.to_bytes(*args)), "int": integer, "long": integer,
        "float": guard.only(float, int, float, str), "bool": guard.only(bool, int, bool), "str": word,
        "unicode": word, "complex": guard.only(complex, int, float), "range": whole, "xrange": whole,
        "slice": guard.only(slice, int, type(None)), "object": guard.only(opaque_class("builtins", "object")),
    }
    for module in ("builtins", "__builtin__"):
        functions.update({(module, name): function for name, function in simple.items()})
    for module in ("copyreg", "copy_reg"):
        functions.update({(module, "_reconstructor"): _reconstructor, (module, "__newobj__"): _newobj})
    for module in ("numpy.core", "numpy._core"):
        functions[f"{module}.multiarray", "_reconstruct"] = guard.reconstruct
        functions[f"{module}.multiarray", "scalar"] = guard.scalar
        functions[f"{module}.numeric", "_frombuffer"] = guard.frombuffer
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            functions[module, name] = guard.path(pathlib.PurePosixPath)
        for name in ("WindowsPath", "PureWindowsPath"):
            functions[module, name] = guard.path(pathlib.PureWindowsPath)
    table: dict[tuple[str, str], object] = {key: Call(".".join(key), call) for key, call in functions.items()}
    table["numpy", "dtype"] = NumpyDType
    table.update({("torch", name): DTypeRef(name) for name in DTYPES})
    for module in ("torch", "torch.cuda", "torch.storage"):
        table.update({(module, f"{name}Storage"): StorageType(dtype) for name, dtype in STORAGES.items()})
        for name in ("UntypedStorage", "_UntypedStorage", "TypedStorage", "_TypedStorage"):
            table[module, name] = StorageType(None)
    return table
# fmt: on


TABLE: dict[tuple[str, str], object] = _table()
assert all(
    isinstance(value, Inert) or value is NumpyDType for value in TABLE.values()
)  # nothing bare: BUILD could reach it
