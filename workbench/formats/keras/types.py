"""The types of HDF5's elements, and their names here.

::

    class and version u8 │ bits u24 │ bytes of an element u32 │ properties of the class

Integers and IEEE's floats of whole bytes; bfloat16 also as opaque bytes, as h5py writes types that numpy lacks.
h5py's booleans are an enumeration of FALSE and TRUE, its complex numbers a compound of ``r`` and ``i``.

Source: HDF5 File Format Specification, IV.A.2.d.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.formats.keras.structures import StructureFields

#: Bytes, first bit and bits of the exponent, first bit and bits of the mantissa, bias → element type.
_FLOATS = {
    (2, 10, 5, 0, 10, 15): "float16",
    (2, 7, 8, 0, 7, 127): "bfloat16",
    (4, 23, 8, 0, 23, 127): "float32",
    (8, 52, 11, 0, 52, 1023): "float64",
}


@dataclass(frozen=True, slots=True)
class Element:
    """The type of the elements of a data set or an attribute.

    Attributes:
        name: name in :mod:`workbench.core.dtypes`; ``text`` or ``texts`` for strings of fixed or variable length; else
            empty, with the reason in ``why``.
        size: bytes.
    """

    name: str
    size: int
    big: bool = False
    why: str = ""


def read_element(fields: StructureFields, depth: int = 2) -> Element:
    """Decode a data type at the current position of the fields."""
    first = fields.uint(1)
    bits, size = fields.uint(3), fields.uint(4)
    kind = first & 15
    big = bool(bits & 1) and size > 1
    if kind == 0:
        offset, precision = fields.uint(2), fields.uint(2)
        if offset == 0 and precision == 8 * size and size in (1, 2, 4, 8):
            return Element(f"{'int' if bits & 8 else 'uint'}{precision}", size, big)
        return Element("", size, why=f"has integers of {precision} bits in {size} bytes")
    if kind == 1:
        offset, precision = fields.uint(2), fields.uint(2)
        form = (size, *fields.take(4), fields.uint(4))
        name = _FLOATS.get(form)
        if (
            name
            and not bits & 0x40
            and (bits >> 4 & 3, bits >> 8 & 255, offset, precision) == (2, 8 * size - 1, 0, 8 * size)
        ):
            return Element(name, size, big)
        return Element("", size, why=f"has floats of {size} bytes in a form that is not IEEE's")
    if kind == 3:
        return Element("text", size)
    if kind == 5 and size in (1, 2):
        return Element(f"bits{8 * size}", size)
    if kind == 8 and depth:
        return _enumeration(fields, bits & 0xFFFF, size, first >> 4, depth)
    if kind in (6, 11) and depth:
        return _complex(fields, bits & 0xFFFF, size, kind, first >> 4, depth)
    if kind == 9 and bits & 15 == 1:
        return Element("texts", size)
    names = {
        2: "times",
        4: "bit fields",
        5: "opaque bytes",
        6: "compounds",
        7: "references",
        9: "sequences",
        10: "arrays",
    }
    return Element("", size, why=f"has elements of {size} bytes that are {names.get(kind, f'of class {kind}')}")


def _enumeration(fields: StructureFields, count: int, size: int, version: int, depth: int) -> Element:
    """Read an enumeration: h5py's booleans, or the integers in which it is stored."""
    base = read_element(fields, depth - 1)
    names = []
    for _ in range(min(count, 3)):
        end = fields.data.find(b"\0", fields.at)
        names.append(fields.take(end - fields.at))
        fields.take(1)
        if version < 3:
            fields.take(min(-(len(names[-1]) + 1) % 8, fields.left))
    if names == [b"FALSE", b"TRUE"] and size == 1 and fields.take(2) == b"\0\1":
        return Element("bool", 1)
    return base


def _complex(fields: StructureFields, count: int, size: int, kind: int, version: int, depth: int) -> Element:
    """Read a complex type: HDF5 2.0's own class, or h5py's compound of ``r`` and ``i``."""
    other = Element("", size, why=f"has elements of {size} bytes that are compounds")
    parts: list[Element] = []
    if kind == 11:
        parts = [read_element(fields, depth - 1)] * 2
    elif count == 2:
        for want, offset in ((b"r\0", 0), (b"i\0", size // 2)):
            if fields.left < 4 or fields.take(2) != want:
                return other
            fields.take(6 * (version < 3))  # names are padded, and offsets have four bytes
            found = fields.uint(4 if version < 3 else 1)
            fields.take(28 * (version == 1))
            if found != offset:
                return other
            begin = fields.at
            parts.append(read_element(fields, depth - 1))
            fields.at = begin + 20
    name = {"float32": "complex64", "float64": "complex128"}.get(parts[0].name if parts else "")
    good = name and parts[0] == parts[1] and 2 * parts[0].size == size
    return Element(name, size, parts[0].big) if good and name else other
