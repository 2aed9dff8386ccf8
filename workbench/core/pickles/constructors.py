"""The globals that a pickle may name without being reported as foreign, and the result of each.

::

    TABLE     ('collections', 'OrderedDict')  →  Call(…)            one stand-in for all pickles
    RECORDS   ('argparse', 'Namespace')       →  a fresh `Record`   attributes only
    OPAQUE    ('datetime', 'datetime')        →  a fresh `Opaque`   known and harmless, kept as written

    ('storage', FloatStorage, '0', 'cpu', 24)   persistent id  → torch_storage  → StorageRef
    _rebuild_tensor_v2(storage, 0, (4, 6), (6, 1), False, OrderedDict())        → TensorRef
    _rebuild_parameter(tensor, True, OrderedDict())                             → TensorRef, kind Parameter
    _rebuild_from_type_v2(function, cls, args, state)                           → the same, with attributes

Everything else becomes an `Opaque` too, but is reported. What a hostile pickle could make of them::

    GLOBAL builtins bytearray · 10**12 · REDUCE          a terabyte from 30 bytes
    GLOBAL builtins tuple · range(10**12) · REDUCE       the same
    GLOBAL builtins set · [a tuple of 2**60 paths]       hashing it takes for ever
    GLOBAL builtins list · a list of a million · × 5000  copies of one object: charged to the budget
    GLOBAL builtins str · a list of 2**60 paths          so does writing it down

All are one REDUCE away, so these take only the argument types that real picklers emit and raise TypeError or
ValueError for the rest. Names and arguments from torch 2.13 (``torch/_utils.py``, ``torch/_tensor.py``,
``torch/storage.py``, ``torch/serialization.py``), numpy 2.4 (``numpy/_core/multiarray``) and CPython 3.11 (``copyreg``,
``collections``, ``Objects/*.c``); older module names are included.
"""

from __future__ import annotations

import codecs
import pathlib
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, cast

from workbench.core.pickles import arrays
from workbench.core.pickles.arrays import NumpyDType
from workbench.core.pickles.budget import charge, refuse, tick
from workbench.core.pickles.standins import (
    Call,
    DTypeRef,
    Inert,
    Opaque,
    PickledDict,
    StorageRef,
    StorageType,
    TensorRef,
    opaque_class,
    short,
)

HASH_BUDGET = 1000  # elements that hashing one key may visit
SLICE = 500  # keys hashed between two checks of the clock


def sequence(kind: Callable[..., object]) -> Callable[..., object]:
    def build(items: Any = ()) -> object:
        if type(items) not in (list, tuple, set, frozenset, dict):
            raise TypeError(f"{kind.__name__} of something that is not a list")
        if kind is tuple:  # it may become a key itself
            _check_hashable([tuple(items)] if any(type(item) is tuple for item in items) else ())
        elif kind is not list:
            _check_hashable(items)
            items = _filled(set[object](), items)
        return items if kind is set else kind(items)

    return build


def mapping(kind: str) -> Callable[..., object]:
    def build(items: Any = None) -> PickledDict:
        if items is None:
            return PickledDict(kind)
        pairs = list(items.items()) if isinstance(items, dict) else items
        if type(pairs) is not list or any(type(pair) not in (tuple, list) or len(pair) != 2 for pair in pairs):
            raise TypeError(f"{kind} of something that is not a mapping")
        _check_hashable(pair[0] for pair in pairs)
        return cast(PickledDict, _filled(PickledDict(kind), pairs))

    return build


def defaultdict(factory: object = None, items: object = None) -> PickledDict:
    made = cast(PickledDict, mapping("defaultdict")(items))
    made.factory = None if factory is None else short(factory)
    return made


def to_bytes(*args: object) -> bytes:
    if not args:
        return b""
    if type(args[0]) in (bytes, bytearray) and len(args) == 1:
        return bytes(cast(bytes, args[0]))
    if type(args[0]) is str and len(args) == 2:
        return encode(*args)
    raise TypeError("bytes of something other than bytes")


def encode(text: object, encoding: object = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise TypeError("_codecs.encode of something other than latin1 text")
    return codecs.latin_1_encode(text)[0]


def only(kind: Callable[..., object], *types: type) -> Callable[..., object]:
    def build(*args: object) -> object:
        if len(args) > 3 or any(type(arg) not in types for arg in args):
            raise TypeError(f"{kind.__name__} of an unexpected argument")
        return kind(*args)

    return build


def path(kind: type[pathlib.PurePath]) -> Callable[..., object]:
    def build(*parts: object) -> str:
        if any(type(part) is not str for part in parts):
            raise TypeError("a path of something other than text")
        return str(kind(*cast(tuple[str, ...], parts)))

    return build


def reconstructor(cls: object, base: object = None, state: object = None) -> object:
    return newobj(cls) if state is None else newobj(cls, state)


def newobj(cls: object, *args: object) -> object:
    if not (isinstance(cls, type) and issubclass(cls, Opaque)):
        raise TypeError("copyreg makes an instance of something other than a class")
    return cls(*args)


def _filled(made: Any, items: Iterable[object]) -> Any:
    """Return a set or dict after its ``update``; the clock is checked every few items, as all hashes may be equal."""
    rest = iter(items)
    while part := list(islice(rest, SLICE)):
        made.update(part)
        tick()
    return made


def _check_hashable(items: Iterable[object]) -> None:
    """Refuse tuples whose hash would visit more than `HASH_BUDGET` elements."""
    for item in items:
        if type(item) is tuple:
            left, todo = HASH_BUDGET, [item]
            while todo:
                inner = todo.pop()
                left -= len(inner)
                if left < 0:
                    refuse(f"a key of more than {HASH_BUDGET:,} nested elements")
                todo.extend(cast(tuple[object, ...], part) for part in inner if type(part) is tuple)


STORAGE = 120  # bytes of a `StorageRef`


def torch_storage(pid: object) -> StorageRef:
    """Return the storage behind a persistent id of torch.save: ``('storage', class, key, location, numel[, view])``."""
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage" or not isinstance(pid[1], StorageType):
        raise ValueError(f"{short(pid)} is not a storage")
    _, kind, key, location, numel = pid[:5]
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 1 << 63:
        raise ValueError(f"{short(pid)} is not a storage")
    view = pid[5] if len(pid) == 6 else None
    if view is not None and not (
        type(view) is tuple and [type(part) for part in view] == [str, int, int] and min(view[1:]) >= 0
    ):
        raise ValueError(f"{short(view)} is not a view of a storage")
    charge(STORAGE)
    return StorageRef(kind.dtype, key, location, numel, view)


def tensor(
    storage: object,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: object = None,
) -> TensorRef:
    attrs = {"metadata": metadata} if metadata else None  # {'conj': True}: the bits mean something else then
    dtype: Any = getattr(storage, "dtype", None)  # TensorRef refuses anything but a name
    return TensorRef(storage, dtype, offset, size, stride, requires_grad, attrs)


def tensor_v3(storage: object, *args: Any) -> TensorRef:
    """Rebuild a tensor as `tensor` does, with the dtype as the seventh argument because the storage is untyped."""
    offset, size, stride, requires_grad, _, dtype, *metadata = args
    if not isinstance(dtype, DTypeRef):
        raise TypeError("_rebuild_tensor_v3 without a dtype")
    attrs = {"metadata": metadata[0]} if any(metadata) else None
    return TensorRef(storage, dtype.name, offset, size, stride, requires_grad, attrs)


def parameter(data: object, requires_grad: bool = True, hooks: object = None, state: object = None) -> object:
    if not isinstance(data, TensorRef):
        return opaque_class("torch.nn.parameter", "Parameter")(data)
    return data.replace(
        requires_grad=requires_grad,
        attrs=_merged(data.attrs, state),
        kind="torch.nn.parameter.Parameter",
    )


def from_type(function: object, new_type: object, args: object, state: object = None) -> object:
    if type(args) is not tuple or not (
        isinstance(function, Call) or (isinstance(function, type) and issubclass(function, Opaque))
    ):
        raise TypeError("_rebuild_from_type_v2 of something other than a rebuild function")
    made = function(*args)
    if isinstance(made, TensorRef):
        kind = (
            f"{new_type.module}.{new_type.qualname}"
            if isinstance(new_type, type) and issubclass(new_type, Opaque)
            else None
        )
        return made.replace(attrs=_merged(made.attrs, state), kind=kind)
    if isinstance(made, Opaque):
        made.__setstate__(state)
    return made


def size(items: object = ()) -> tuple[object, ...]:
    if type(items) not in (tuple, list) or any(type(n) is not int for n in cast(tuple[object, ...], items)):
        raise TypeError("torch.Size of something other than whole numbers")
    return tuple(cast(tuple[object, ...], items))


def _merged(attrs: dict[str, object], state: object) -> dict[str, object]:
    parts = [attrs, *(part for part in (state if type(state) is tuple else (state,)) if type(part) is dict)]
    charge(sum(map(sys.getsizeof, parts)))
    return {key: value for part in parts for key, value in part.items() if type(key) is str}


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


# fmt: off
def _table() -> dict[tuple[str, str], object]:
    functions: dict[tuple[str, str], Callable[..., object]] = {
        ("collections", "OrderedDict"): mapping("OrderedDict"),
        ("collections", "Counter"): mapping("Counter"),
        ("collections", "defaultdict"): defaultdict,
        ("_codecs", "encode"): encode,
        ("torch", "Size"): size,
        ("torch.serialization", "_get_layout"): opaque_class("torch", "layout"),
        ("torch._utils", "_rebuild_tensor"): tensor,
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_tensor_v3"): tensor_v3,
        ("torch._utils", "_rebuild_parameter"): parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch._tensor", "_rebuild_from_type"): from_type,
        ("numpy", "ndarray"): arrays.reconstruct,
    }
    integer, whole, word = only(int, int, str, bool), only(range, int), only(str, str)
    simple = {
        "set": sequence(set), "frozenset": sequence(frozenset), "list": sequence(list),
        "tuple": sequence(tuple), "dict": mapping("dict"), "bytes": to_bytes,
        "bytearray": lambda *args: bytearray(to_bytes(*args)), "int": integer, "long": integer,
        "float": only(float, int, float, str), "bool": only(bool, int, bool), "str": word,
        "unicode": word, "complex": only(complex, int, float), "range": whole, "xrange": whole,
        "slice": only(slice, int, type(None)), "object": only(opaque_class("builtins", "object")),
    }
    for module in ("builtins", "__builtin__"):
        functions.update({(module, name): function for name, function in simple.items()})
    for module in ("copyreg", "copy_reg"):
        functions.update({(module, "_reconstructor"): reconstructor, (module, "__newobj__"): newobj})
    for module in ("numpy.core", "numpy._core"):
        functions[f"{module}.multiarray", "_reconstruct"] = arrays.reconstruct
        functions[f"{module}.multiarray", "scalar"] = arrays.scalar
        functions[f"{module}.numeric", "_frombuffer"] = arrays.frombuffer
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            functions[module, name] = path(pathlib.PurePosixPath)
        for name in ("WindowsPath", "PureWindowsPath"):
            functions[module, name] = path(pathlib.PureWindowsPath)
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
# Nothing bare: BUILD could reach it.
assert all(isinstance(value, Inert) or value is NumpyDType for value in TABLE.values())
