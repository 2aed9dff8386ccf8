"""ONNX models: the initializers of the main graph.

::

    model.onnx         one message: ModelProto ─ graph 7 ─ initializer 5 (TensorProto) …
    model.onnx.data    external data, at the offset stated by an initializer

    TensorProto        dims 1 │ data_type 2 │ name 8 │ raw_data 9                 elements as in memory
                       float_data 4, double_data 10                              the same
                       int32_data 5, int64_data 7, uint64_data 11                a varint per element
                       data_location 14 = 1, external_data 13                    location, offset, length

The message is parsed without its payloads, which are read in place. A location that leaves the folder is refused. Types
of four bits are packed bytes, two elements each. Constants inside nodes and sparse initializers are not read.

Sources: onnx 1.23 ``onnx.proto``, ``docs/ExternalData.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import MAX_ELEMENTS, Catalog
from workbench.core.dtypes import by_name, nbytes_of
from workbench.core.lazymap import LazyMap
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.core.protobuf import BadMessage, signed, spans, varint
from workbench.core.words import plural
from workbench.errors import CorruptError, NotACheckpointError, quoted
from workbench.formats.format import Format

SUFFIX = ".onnx"
TEXT_LIMIT = 1 << 20  #: maximum bytes of a name, or of the model's description of itself
NOTED = 5
#: Types by number, and the fields beside ``raw_data`` that may hold their elements.
_TYPES = {
    1: ("float32", 4),
    2: ("uint8", 5),
    3: ("int8", 5),
    4: ("uint16", 5),
    5: ("int16", 5),
    6: ("int32", 5),
    7: ("int64", 7),
    9: ("bool", 5),
    10: ("float16", 5),
    11: ("float64", 10),
    12: ("uint32", 11),
    13: ("uint64", 11),
    14: ("complex64", 4),
    15: ("complex128", 10),
    16: ("bfloat16", 5),
    17: ("float8_e4m3fn", 5),
    18: ("float8_e4m3fnuz", 5),
    19: ("float8_e5m2", 5),
    20: ("float8_e5m2fnuz", 5),
    21: ("uint4", 5),
    22: ("int4", 5),
    23: ("float4_e2m1fn", 5),
    24: ("float8_e8m0fnu", 5),
}
_RAW, _PLAIN = 9, (4, 10)
_FACTS = {1: "ir_version", 2: "producer_name", 3: "producer_version", 4: "domain", 5: "model_version", 6: "doc_string"}


@dataclass(slots=True)
class _Tensor:
    """An initializer: its fields, and where each one with elements is."""

    at: int
    dims: list[int] = field(default_factory=list)
    kind: int = 0
    name: str = ""
    external: bool = False
    where: dict[str, str] = field(default_factory=dict)
    data: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class _Model:
    """A model's file, parsed on demand."""

    def __init__(self, place: Place, name: str) -> None:
        self.name, self.view = name, place.window(name)

    def text(self, span: tuple[int, int]) -> str:
        start, stop = span
        if stop - start > TEXT_LIMIT:
            raise CorruptError(
                f"{self.name!r}, byte {start:,}: text of {plural(stop - start, 'byte')}; the file is damaged"
            )
        try:
            return bytes(self.view[start:stop]).decode()
        except UnicodeDecodeError:
            raise CorruptError(f"{self.name!r}, byte {start:,}: text is not UTF-8; the file is damaged") from None

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
        try:
            yield from spans(self.view, start, stop)
        except BadMessage:
            raise CorruptError(
                f"{self.name!r}: the message in bytes {start:,} to {stop:,} ends in the middle of a field, or is not "
                "one; the file is truncated or damaged"
            ) from None

    def tensors(self) -> Iterator[_Tensor]:
        for number, graph in self.fields(0, len(self.view)):
            for inner, span in self.fields(*graph) if number == 7 and isinstance(graph, tuple) else ():
                if inner == 5 and isinstance(span, tuple):
                    yield self.tensor(*span)

    def tensor(self, start: int, stop: int) -> _Tensor:
        found = _Tensor(start)
        for number, value in self.fields(start, stop):
            if isinstance(value, int):
                if number == 1:
                    found.dims.append(signed(value))
                elif number == 2:
                    found.kind = value
                elif number == 14:
                    found.external = value == 1
            elif number == 1:
                found.dims += self.packed(value)
            elif number == 8:
                found.name = self.text(value)
            elif number == 13:
                pair = {n: self.text(v) for n, v in self.fields(*value) if isinstance(v, tuple)}
                found.where[pair.get(1, "")] = pair.get(2, "")
            elif number in (4, 5, 7, 9, 10, 11):
                found.data.setdefault(number, []).append(value)
        return found

    def packed(self, span: tuple[int, int]) -> Iterator[int]:
        at, stop = span
        if stop - at > 1024:
            raise CorruptError(
                f"{self.name!r}, byte {at:,}: a shape of {plural(stop - at, 'byte')}; the file is damaged"
            )
        while at < stop:
            try:
                value, at = varint(self.view, at, stop)
            except BadMessage:
                raise CorruptError(f"{self.name!r}, byte {at:,}: a shape is damaged") from None
            yield signed(value)

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, value in self.fields(0, len(self.view)):
            if number in _FACTS:
                found[_FACTS[number]] = signed(value) if isinstance(value, int) else self.text(value)
            elif number in (8, 14) and isinstance(value, tuple):
                pair = [(n, v if isinstance(v, int) else self.text(v)) for n, v in self.fields(*value)]
                one = dict(pair)
                found.setdefault("opset_import" if number == 8 else "metadata", {})[one.get(1, "")] = one.get(2, "")
        return found


# ---- the format ------------------------------------------------------------------------------------------------------


def detect(place: Place) -> bool:
    """Return whether the file has the name of a model and begins with its version, or with its graph."""
    if place.file is None or not place.file.endswith(SUFFIX):
        return False
    return place.head(place.file, 1) in (b"\x08", b"\x3a", b"\x12")


def read_catalog(place: Place) -> Catalog:
    """Return the catalog of the initializers.

    Raises:
        CorruptError: the message is damaged, or an initializer contradicts itself.
        UnsafeError: external data outside the folder.
    """
    if place.file is None:
        raise NotACheckpointError(f"{place.path!r} is a folder; open one of its {SUFFIX} files")
    model = _Model(place, place.file)
    builder = CatalogBuilder("onnx", place)
    builder.file(place.file, metadata=True)
    left: list[str] = []
    for one in model.tensors():
        if why := _add(builder, place, model, one):
            left.append(f"initializer {quoted(one.name)} {why} and is left out")
    notes = left[:NOTED] + (
        [f"{len(left) - NOTED:,} more are left out for similar reasons"] if len(left) > NOTED else []
    )
    return builder.build({"step": None, "notes": notes, "objects": list(model.facts())})


def _add(builder: CatalogBuilder, place: Place, model: _Model, one: _Tensor) -> str:
    """Declare an initializer; return why it is left out, or an empty string."""
    what = f"{model.name!r}, byte {one.at:,}: initializer {quoted(one.name)}"
    if one.kind not in _TYPES:
        return f"has the type {one.kind}" + (" (text)" if one.kind == 8 else "")
    dtype, shape = by_name(_TYPES[one.kind][0]), tuple(one.dims)
    if min(shape, default=0) < 0 or len(shape) > 64 or prod(shape) > MAX_ELEMENTS:
        raise CorruptError(f"{what} has the impossible shape {short(shape)}")
    if one.name in builder:
        raise CorruptError(f"{what} occurs twice; it is unknown which one is valid")
    nbytes, codec = nbytes_of(dtype, prod(shape)), codecs.RAW
    if one.external:
        file = one.where.get("location", "")
        start, length = (_offset(one.where.get(key, ""), what, key) for key in ("offset", "length"))
        if not file:
            raise CorruptError(f"{what} has external data without a location")
        span = start, start + (nbytes if length < 0 else length)
        span = (max(start, 0), span[1] - min(start, 0))
    else:
        file = model.name
        number, pieces = next(iter(one.data.items()), (_RAW, [(one.at, one.at)]))
        if len(one.data) > 1 or number not in (_RAW, _TYPES[one.kind][1]):
            return "has its elements in a field of another type, or in several"
        if len(pieces) > 1:
            return "has its elements in several pieces"
        span = pieces[0]
        if number not in (_RAW, *_PLAIN):
            codec, count = codecs.VARINT, nbytes // dtype.raw.itemsize
            nbytes = min(max(span[1] - span[0], count), 10 * count)  # of a varint of each
    if span[1] - span[0] != nbytes:
        raise CorruptError(
            f"{what}: {dtype} {shape} takes {plural(nbytes, 'byte')}, but {span[1] - span[0]:,} are stored"
        )
    builder.tensor(one.name, dtype, shape)
    builder.chunk(one.name, [0] * len(shape), shape, file, *span, codec=codec)
    return ""


def _offset(text: str, what: str, key: str) -> int:
    """Parse a number of ``external_data``; -1 if it is not given."""
    if not text:
        return -1
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise CorruptError(f"{what}: the {key} {quoted(text)} of its external data is not a number")
    return int(text)


def read_objects(place: Place, catalog: Catalog) -> Mapping[str, Any]:
    """Return the model's description of itself: versions, operator sets, properties."""
    names = catalog.meta.get("objects", [])
    return LazyMap({name: partial(_fact, place, name) for name in names})


def _fact(place: Place, name: str) -> Any:
    return _Model(place, place.file or "").facts()[name]


FORMAT = Format(
    name="onnx",
    title="ONNX initializers",
    marks="*.onnx",
    read_from="onnx 1.23",
    detect=detect,
    read_catalog=read_catalog,
    read_objects=read_objects,
    single_file=True,
    suffixes=(SUFFIX,),
)
