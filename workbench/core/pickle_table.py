"""The globals that a pickle may name without being called foreign, and what each of them becomes.

::

    TABLE     ('collections', 'OrderedDict')  →  Call(…)            one stand-in for all pickles
    RECORDS   ('argparse', 'Namespace')       →  a fresh `Record`   attributes only
    OPAQUE    ('datetime', 'datetime')        →  a fresh `Opaque`   known and harmless, kept as written

Everything else becomes an `Opaque` too, but is reported. Names from torch 2.13 (``torch/_utils.py``,
``torch/_tensor.py``, ``torch/storage.py``), numpy 2.4 (``numpy/_core/multiarray``) and CPython 3.11
(``copyreg``, ``collections``); older module names stand beside.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from workbench.core import numpy_stubs, torch_build
from workbench.core import pickle_build as build
from workbench.core.stubs import Call, DTypeRef, Inert, NumpyDType, StorageType, opaque_class

__all__ = ["OPAQUE", "RECORDS", "TABLE"]

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
        ("collections", "OrderedDict"): build.mapping("OrderedDict"),
        ("collections", "Counter"): build.mapping("Counter"),
        ("collections", "defaultdict"): build.defaultdict,
        ("_codecs", "encode"): build.encode,
        ("torch", "Size"): torch_build.size,
        ("torch.serialization", "_get_layout"): opaque_class("torch", "layout"),
        ("torch._utils", "_rebuild_tensor"): torch_build.tensor,
        ("torch._utils", "_rebuild_tensor_v2"): torch_build.tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): torch_build.tensor_v3,
        ("torch._utils", "_rebuild_parameter"): torch_build.parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): torch_build.parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): torch_build.from_type,
        ("torch._tensor", "_rebuild_from_type"): torch_build.from_type,
        ("numpy", "ndarray"): numpy_stubs.reconstruct,
    }
    integer, whole, word = build.only(int, int, str, bool), build.only(range, int), build.only(str, str)
    simple = {
        "set": build.sequence(set), "frozenset": build.sequence(frozenset), "list": build.sequence(list),
        "tuple": build.sequence(tuple), "dict": build.mapping("dict"), "bytes": build.to_bytes,
        "bytearray": lambda *args: bytearray(build.to_bytes(*args)), "int": integer, "long": integer,
        "float": build.only(float, int, float, str), "bool": build.only(bool, int, bool), "str": word,
        "unicode": word, "complex": build.only(complex, int, float), "range": whole, "xrange": whole,
        "slice": build.only(slice, int, type(None)), "object": build.only(opaque_class("builtins", "object")),
    }
    for module in ("builtins", "__builtin__"):
        functions.update({(module, name): function for name, function in simple.items()})
    for module in ("copyreg", "copy_reg"):
        functions.update({(module, "_reconstructor"): build.reconstructor, (module, "__newobj__"): build.newobj})
    for module in ("numpy.core", "numpy._core"):
        functions[f"{module}.multiarray", "_reconstruct"] = numpy_stubs.reconstruct
        functions[f"{module}.multiarray", "scalar"] = numpy_stubs.scalar
        functions[f"{module}.numeric", "_frombuffer"] = numpy_stubs.frombuffer
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            functions[module, name] = build.path(pathlib.PurePosixPath)
        for name in ("WindowsPath", "PureWindowsPath"):
            functions[module, name] = build.path(pathlib.PureWindowsPath)
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
