"""How a stored item becomes a payload: one table of codecs, and masks over it for catalog columns.

A *stored item* is a byte range of a file. A catalog names its codec by position in :data:`TABLE`, a ``uint8``. A
question about all chunks is then one lookup: ``codecs.ZIP[catalog.codec]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One codec.

    Attributes:
        name: as ``chunks`` and reports show it.
        raw: the item's bytes are the payload.
        zip: the item is a ``torch.save`` archive of one tensor.
        compressed: the item is one compressed stream: gzip or zlib, or bare deflate, if its name says so; else zstd.
        within: codec of the stream that begins at ``inner`` in the decoded item, up to its own end; its payload is the
            chunk's.
        filters: HDF5's, in the order in which they were applied to a chunk: shuffle (the first bytes of all elements,
            then the second …), gzip, fletcher32 (a checksum that follows).
        text: the item is text, one character per byte.
        varint: the item has a varint per element; the element is its low bits (protobuf).
        big: elements are big endian.
        conj, neg: the payload belongs to a conjugate or negative view; signs are flipped when it is read.
        part: name of the codec of a part of such an item, addressed by ``inner`` and ``strides``; by default this one.
    """

    name: str
    raw: bool = False
    zip: bool = False
    compressed: bool = False
    within: str = ""
    filters: tuple[str, ...] = ()
    text: bool = False
    varint: bool = False
    big: bool = False
    conj: bool = False
    neg: bool = False
    part: str = ""

    @property
    def turned(self) -> bool:
        """Whether signs are flipped when it is read."""
        return self.conj or self.neg

    @property
    def in_file(self) -> bool:
        """Whether elements are in the file as stored, in either byte order."""
        return (self.raw and not self.turned) or (self.zip and not self.compressed)

    @property
    def in_place(self) -> bool:
        """Whether elements are in the file as in memory: they can be mapped, and a part read without the rest."""
        return self.in_file and not self.big

    @property
    def undone_whole(self) -> bool:
        """Whether a whole chunk has to be decoded to read any part of it."""
        return self.compressed or self.text or self.varint or self.big


#: The codecs of HDF5's combinations of filters; gzip alone, little endian, has a separate codec.
_FILTERED = tuple(
    (filters, big)
    for big in (False, True)
    for filters in (
        ("gzip",),
        ("shuffle",),
        ("fletcher32",),
        ("shuffle", "gzip"),
        ("shuffle", "fletcher32"),
        ("gzip", "fletcher32"),
        ("shuffle", "gzip", "fletcher32"),
    )
    if big or filters != ("gzip",)
)
TABLE = (
    Codec(name="raw", raw=True),  # the payload itself, little endian
    Codec(name="raw_be", raw=True, big=True),  # the payload, big endian
    Codec(name="torch_zip", zip=True, part="torch_part"),  # an archive, whose own strides count (DCP items)
    Codec(name="zstd+torch_zip", zip=True, compressed=True, part="zstd+torch_part"),  # DCP's ZStandard extension
    Codec(name="opaque"),  # an unknown transform; listed, never read
    Codec(name="torch_part", zip=True),  # a part of an archive's tensor, in its row-major order (a layer of a stack)
    Codec(name="zstd+torch_part", zip=True, compressed=True),
    Codec(name="latin1_text", text=True),  # one character per byte, in UTF-8 (pickles of protocol 2)
    Codec(name="raw_conj", raw=True, conj=True),
    Codec(name="raw_neg", raw=True, neg=True),
    Codec(name="raw_conj_neg", raw=True, conj=True, neg=True),
    Codec(name="zstd", compressed=True),  # the payload in one zstd stream (zarr)
    Codec(name="gzip", compressed=True),  # … in one gzip or zlib stream
    Codec(name="decoded"),  # computed from quantised tensors (core/decoding); only in catalogs of decoded tensors
    Codec(name="zstd+zstd", compressed=True, within="zstd"),  # a stream within a node of an OCDBT database (Orbax)
    Codec(name="zstd+gzip", compressed=True, within="gzip"),
    Codec(name="deflate", compressed=True),  # a deflated record of a zip archive (numpy); inner is after its header
    Codec(name="deflate_be", compressed=True, big=True),
    Codec(name="varint", varint=True),  # int32_data and its like (ONNX)
    *(  # a chunk of HDF5
        Codec(name="+".join(filters) + "_be" * big, compressed=True, filters=filters, big=big)
        for filters, big in _FILTERED
    ),
)
CODECS = tuple(codec.name for codec in TABLE)  #: names, by code
RAW, RAW_BE, TORCH_ZIP, ZSTD_TORCH_ZIP, OPAQUE, TORCH_PART, ZSTD_TORCH_PART, LATIN1_TEXT, *_TURNED = range(
    len(TABLE) - len(_FILTERED)
)
RAW_CONJ, RAW_NEG, RAW_CONJ_NEG, ZSTD, GZIP, DECODED, ZSTD_ZSTD, ZSTD_GZIP, DEFLATE, DEFLATE_BE, VARINT = _TURNED


def filtered(filters: tuple[str, ...], big: bool) -> int | None:
    """Return the codec of a chunk of HDF5 that went through filters, in this order; ``None`` if there is none."""
    plain = {(): RAW_BE if big else RAW, ("gzip",): GZIP if not big else None}.get(filters)
    if plain is not None:
        return plain
    return len(TABLE) - len(_FILTERED) + _FILTERED.index((filters, big)) if (filters, big) in _FILTERED else None


def _mask(question: Callable[[Codec], bool]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the mask over all codes that fit in a ``uint8``; false for unassigned codes."""
    return np.array([*map(question, TABLE), *[False] * (256 - len(TABLE))])


RAW_BYTES = _mask(lambda codec: codec.raw)
BITS = _mask(lambda codec: codec.raw and not codec.turned)  #: raw bytes; only their order may have to be changed
ZIP = _mask(lambda codec: codec.zip)
COMPRESSED = _mask(lambda codec: codec.compressed)
TEXT = _mask(lambda codec: codec.text)
IN_FILE = _mask(lambda codec: codec.in_file)
IN_PLACE = _mask(lambda codec: codec.in_place)
UNDONE_WHOLE = _mask(lambda codec: codec.undone_whole)
WHOLE_ITEM = _mask(lambda codec: bool(codec.part))  #: the chunk is its item's tensor, not a part of it
PART = np.array([CODECS.index(codec.part or codec.name) for codec in TABLE], np.uint8)  #: codec of a part of the item
