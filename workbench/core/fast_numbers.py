"""Stored bits as float32, for compiled loops; shared by statistics and comparisons.

float16 is converted without arithmetic on subnormals, which costs a hundred cycles on some processors: by the
processor's own instruction where it has one, else by integers.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from workbench.core.kernels import loop


@loop
def float32(bits, table):
    return np.uint32(bits).view(np.float32)


@loop
def bfloat16(bits, table):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@loop
def looked_up(bits, table):
    """Look up values of an 8-bit type."""
    return table[bits]


@intrinsic
def _half_native(context, bits):
    def generate(_, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@loop
def _half_plain(bits):
    magnitude = np.uint32(bits) & np.uint32(0x7FFF)
    moved = np.uint32(magnitude << np.uint32(13))
    normal = np.uint32(moved + np.uint32(112 << 23)).view(np.float32)
    special = np.uint32(moved | np.uint32(0x7F800000)).view(np.float32)
    y = np.float32(np.int32(magnitude)) * np.float32(2.0**-24) if magnitude < np.uint32(0x400) else normal
    y = special if magnitude >= np.uint32(0x7C00) else y
    return -y if bits & np.uint16(0x8000) else y


def _converts_halves() -> bool:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    features: Any = binding.get_host_cpu_features()
    return bool(features.get("f16c"))


_half: Any = _half_native if _converts_halves() else _half_plain


@loop
def float16(bits, table):
    return _half(bits)


@loop
def float8_e5m2(bits, table):
    return _half(np.uint16(np.uint16(bits) << np.uint16(8)))


@loop
def float8_e4m3fn(bits, table):
    """Sign and the other bits, moved apart to where float16 has them: the pattern of value · 2⁻⁸."""
    wide = np.uint16(np.uint16(bits) << np.uint16(7))
    sign = np.uint16(np.uint16(wide << np.uint16(1)) & np.uint16(0x8000))
    return _half(np.uint16(np.uint16(wide & np.uint16(0x3F80)) | sign)) * np.float32(256)
