"""One table of element types and the names every framework gives them.

A :class:`DType` is identified by torch's name (``bfloat16``); types torch lacks keep the name of the format that
defines them. A type's smallest unit of whole bytes is a *block* of ``block`` elements in ``block_nbytes`` bytes::

    float32          1 element    in 4 bytes
    float4_e2m1fn    2 elements   in 1 byte        packed: elements share bytes, and the tensor can only be shown raw
    float6_e2m3fn    4 elements   in 3 bytes
    GGUF's Q4_K    256 elements   in 144 bytes     a quantised block with its scales (core/decoding makes numbers of it)

Sources: safetensors 0.8 ``Dtype`` (lib.rs; F6_E2M3, F6_E3M2, F4, F8_E8M0, F8_*FNUZ since 0.6), torch 2.13
``torch/csrc/utils/tensor_dtypes.cpp`` and ``torch/storage.py`` (legacy Storage names), numpy 2.4, gguf 0.19
``constants.py`` (``GGML_QUANT_SIZES``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.errors import UnsupportedFormatError, quoted


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: torch's name without the ``torch.`` prefix, or the defining format's.
        block, block_nbytes: elements of the smallest unit of whole bytes, and its bytes; one element unless packed.
        kind: ``f`` float, ``i`` signed, ``u`` unsigned, ``b`` bool, ``c`` complex.
        torch_name: attribute of ``torch``, or ``None`` where torch has no such type or cannot compute with it (its
            quantised and ``bits`` types); such tensors are shown raw.
        numpy_name: numpy's name, or ``None`` (bfloat16 and the small floats).
        safetensors: name in a safetensors header, or ``None``.
        code: position in :data:`ALL`, stored in catalog columns.
    """

    name: str
    block: int
    block_nbytes: int
    kind: str
    torch_name: str | None
    numpy_name: str | None
    safetensors: str | None
    code: int

    @property
    def bits(self) -> int:
        """Bits of one element; of a quantised block, rounded down."""
        return 8 * self.block_nbytes // self.block

    @property
    def itemsize(self) -> int:
        """Bytes of one element; raises for the packed types, which have none."""
        if self.packed:
            raise UnsupportedFormatError(f"{self.name} packs elements of {self.bits} bits; it has no item size")
        return self.block_nbytes

    @property
    def packed(self) -> bool:
        """Whether several elements share bytes (F4, F6, quantised blocks)."""
        return self.block > 1

    @property
    def raw(self) -> np.dtype[Any]:
        """The numpy type that carries the bits unchanged: unsigned of the same size (``uint8`` when packed)."""
        return _RAW[8 if self.packed else self.bits]

    @property
    def numpy(self) -> np.dtype[Any]:
        """numpy's own type where it has one, else :attr:`raw`."""
        return np.dtype(self.numpy_name) if self.numpy_name is not None else self.raw

    @property
    def torch(self) -> Any:
        """The ``torch.dtype``; raises where torch (or this version of it) has none."""
        import torch

        found = getattr(torch, self.torch_name, None) if self.torch_name else None
        if found is None:
            raise UnsupportedFormatError(
                f"torch {torch.__version__} has no element type {self.name}; read the raw bytes with .numpy()"
            )
        return found

    def __str__(self) -> str:
        return self.name


_RAW: dict[int, np.dtype[Any]] = {
    8: np.dtype("u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
    128: np.dtype("V16"),
}

# name, bits, kind, torch, numpy, safetensors
_TABLE: Sequence[tuple[str, int, str, str | None, str | None, str | None]] = (
    ("float32", 32, "f", "float32", "float32", "F32"),
    ("bfloat16", 16, "f", "bfloat16", None, "BF16"),
    ("float16", 16, "f", "float16", "float16", "F16"),
    ("float64", 64, "f", "float64", "float64", "F64"),
    ("float8_e4m3fn", 8, "f", "float8_e4m3fn", None, "F8_E4M3"),
    ("float8_e5m2", 8, "f", "float8_e5m2", None, "F8_E5M2"),
    ("float8_e4m3fnuz", 8, "f", "float8_e4m3fnuz", None, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 8, "f", "float8_e5m2fnuz", None, "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 8, "f", "float8_e8m0fnu", None, "F8_E8M0"),
    ("float6_e2m3fn", 6, "f", None, None, "F6_E2M3"),
    ("float6_e3m2fn", 6, "f", None, None, "F6_E3M2"),
    ("float4_e2m1fn", 4, "f", None, None, "F4"),
    ("float4_e2m1fn_x2", 8, "f", "float4_e2m1fn_x2", None, None),
    ("int8", 8, "i", "int8", "int8", "I8"),
    ("uint8", 8, "u", "uint8", "uint8", "U8"),
    ("int16", 16, "i", "int16", "int16", "I16"),
    ("uint16", 16, "u", "uint16", "uint16", "U16"),
    ("int32", 32, "i", "int32", "int32", "I32"),
    ("uint32", 32, "u", "uint32", "uint32", "U32"),
    ("int64", 64, "i", "int64", "int64", "I64"),
    ("uint64", 64, "u", "uint64", "uint64", "U64"),
    ("bool", 8, "b", "bool", "bool", "BOOL"),
    ("complex64", 64, "c", "complex64", "complex64", "C64"),
    ("complex128", 128, "c", "complex128", "complex128", "C128"),
    ("complex32", 32, "c", "complex32", None, None),
    ("qint8", 8, "i", None, None, None),
    ("quint8", 8, "u", None, None, None),
    ("qint32", 32, "i", None, None, None),
    ("quint4x2", 4, "u", None, None, None),
    ("quint2x4", 2, "u", None, None, None),
    ("bits8", 8, "u", None, None, None),
    ("bits16", 16, "u", None, None, None),
    ("bits1x8", 8, "u", None, None, None),
    ("bits2x4", 8, "u", None, None, None),
    ("bits4x2", 8, "u", None, None, None),
)

ALL: tuple[DType, ...] = tuple(
    DType(name, 8 // gcd(bits, 8), bits // gcd(bits, 8), kind, in_torch, in_numpy, in_safetensors, code)
    for code, (name, bits, kind, in_torch, in_numpy, in_safetensors) in enumerate(_TABLE)
)
#: Blocks of ggml: elements and bytes of each.
BLOCKS: dict[str, tuple[int, int]] = {
    "Q1_0": (128, 18),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}
ALL += tuple(
    DType(name, *sizes, "f", None, None, None, len(ALL) + position)
    for position, (name, sizes) in enumerate(BLOCKS.items())
)
ALL += tuple(  # ONNX's, two in a byte, the first in the low bits
    DType(name, 2, 1, kind, None, None, None, len(ALL) + position)
    for position, (name, kind) in enumerate((("int4", "i"), ("uint4", "u")))
)
#: Columns of the table, by code.
BLOCK = np.array([dtype.block for dtype in ALL])
BLOCK_NBYTES = np.array([dtype.block_nbytes for dtype in ALL])
PACKED = BLOCK > 1
ITEMSIZE = np.where(PACKED, 0, BLOCK_NBYTES)  #: bytes of one element; 0 for packed types, which have none

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}
_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "chalf": "complex32",
}

_BY_NAME: dict[str, DType] = {}
for _dtype in ALL:
    for _name in (_dtype.name, f"torch.{_dtype.name}", _dtype.safetensors):
        if _name:
            _BY_NAME[_name] = _dtype
for _other, _name in {**_STORAGES, **_ALIASES}.items():
    _BY_NAME[_other] = _BY_NAME[_name]
    _BY_NAME[f"torch.{_other}"] = _BY_NAME[_name]


def by_name(name: object) -> DType:
    """Return the type that a framework calls ``name``.

    Accepts torch's (``bfloat16``, ``torch.bfloat16``, ``torch.half``), safetensors' (``BF16``), legacy storage
    names (``BFloat16Storage``), numpy dtypes, and ``torch.dtype`` objects (recognised by their string).

    Raises:
        UnsupportedFormatError: an element type that is not in the table.
    """
    if isinstance(name, DType):
        return name
    found = _BY_NAME.get(str(name))
    if found is None:
        raise UnsupportedFormatError(f"unknown element type {quoted(str(name))}; it may be newer than this workbench")
    return found


def by_code(code: int) -> DType:
    """Return the type at position ``code`` of the table (as stored in catalog columns)."""
    return ALL[code]


def nbytes_of(dtype: DType, numel: int) -> int:
    """Return the bytes that ``numel`` elements take, with packed types rounded up to whole bytes."""
    return -(-numel * dtype.block_nbytes // dtype.block)


def nbytes_of_codes(codes: Array, numel: Array) -> Array:
    """Return the bytes of elements like :func:`nbytes_of`, for columns."""
    nbytes, block = numel * BLOCK_NBYTES[codes], BLOCK[codes]
    return np.asarray(nbytes if (block == 1).all() else -(-nbytes // block))
