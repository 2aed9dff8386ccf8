"""Describe which bit of an element differs, and its meaning in the element's type.

::

    bfloat16   15 │14 … 7 │6 … 0        sign │ exponent │ mantissa
    float32    31 │30 … 23│22 … 0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.dtypes import DType
from workbench.core.words import plural

# mantissa bits; the sign is the top bit, the exponent is between them. E8M0 has only an exponent.
_MANTISSA = {
    "float64": 52,
    "float32": 23,
    "bfloat16": 7,
    "float16": 10,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
}


def one_flip(element: DType, shape: tuple[int, ...], at: int, old: int, new: int) -> dict[str, Any]:
    """Return index, bit (0 is the lowest), its kind, and the values before and after, as JSON."""
    bit = (old ^ new).bit_length() - 1
    index = [int(k) for k in np.unravel_index(at, shape)] if shape else []
    hexes = [f"0x{bits:0{element.itemsize * 2}x}" for bits in (old, new)]
    return {
        "index": index,
        "bit": bit,
        "kind": _kind(element, bit),
        "bits": hexes,
        "before": number_text(element, old),
        "after": number_text(element, new),
    }


def flip_text(found: list[dict[str, Any]], numel: int) -> str:
    """Return the sentence."""
    parts = [
        f"bit {one['bit']} ({one['kind']}) of element ({', '.join(f'{k:,}' for k in one['index'])}): "
        f"{one['bits'][0]} → {one['bits'][1]}, {one['before']} → {one['after']}"
        for one in found
    ]
    if len(parts) == 1:
        return f"one bit differs among {numel:,} elements: {parts[0]}"
    return f"{plural(len(parts), 'element')} of {numel:,} differ, each in one bit: " + "; ".join(parts)


def number_text(element: DType, bits: int) -> str:
    """Return the shortest text of a number, given as bits, that distinguishes it from its neighbors."""
    raw = np.array([bits], element.raw)
    decoder = Decoder(element)
    if decoder.kind != "numbers":
        return f"0x{bits:0{element.itemsize * 2}x}"
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = decoder.numbers(raw.view(element.numpy))[0]
        if value.dtype.kind == "f":
            return f"{float(value):.4g}"
    if element.name == "bool":
        return str(bool(value))
    return f"{int(value):,}"


def _kind(element: DType, bit: int) -> str:
    if element.kind == "b":
        return "value"
    if element.kind == "c":
        return "imaginary part" if bit >= element.bits // 2 else "real part"
    if element.kind != "f":
        return "sign" if element.kind == "i" and bit == element.bits - 1 else "value"
    if element.name == "float8_e8m0fnu":
        return "exponent"
    if bit == element.bits - 1:
        return "sign"
    return "mantissa" if bit < _MANTISSA.get(element.name, 0) else "exponent"
