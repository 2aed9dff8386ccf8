"""``torch.save`` of a flat dict of tensors: a zip archive, written without torch.

::

    archive/data.pkl             {name: _rebuild_tensor_v2(storage N, 0, shape, stride, …)}    protocol 2
    archive/.format_version      1
    archive/.storage_alignment   64
    archive/byteorder            little
    archive/data/0 …             payloads, each from a multiple of 64 bytes on (an "FB" field of 'Z's pads)
    archive/version              3
    central directory            CRCs are known when the payloads are written: it is filled in last

Records are STORED, with data descriptors (flag bit 3), as torch writes them; from 4 GiB on with zip64 fields. Element
types without a storage class of their own go through ``_rebuild_tensor_v3`` over an untyped storage.

Source: torch 2.13 ``torch/serialization.py`` (``_save``), ``torch/_tensor.py`` (``_reduce_ex_internal``),
``caffe2/serialize/inline_container.cc``; APPNOTE.TXT 6.3, sections 4.3.7 to 4.3.16, 4.5.3.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.filemap import FileMap, Pieces
from workbench.export.writers.pickle_tree import Opcodes
from workbench.export.writers.pickled import dumps
from workbench.export.writers.record import ALIGN, RecordLayout
from workbench.export.writers.tensor_archive import tensor_value


def torch_file(pieces: Pieces, name: str, *, objects: Mapping[str, Any] = MappingProxyType({})) -> FileMap:
    """Write all pieces in one archive.

    Args:
        objects: plain values (:mod:`workbench.export.writers.plain`) that follow the tensors in the dict.

    Raises:
        UnsupportedFormatError: an element type that torch lacks or cannot load; names the tensor.
        UsageError: two tensors of one name.
    """
    small = [
        ("data.pkl", _pickle(pieces, objects)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGN).encode()),
        ("byteorder", b"little"),
    ]
    layout = RecordLayout()
    for record, data in small:
        layout.add(record, len(data), data)
    for at, nbytes in enumerate(pieces.nbytes.tolist()):
        layout.add(f"data/{at}", nbytes)
    layout.add("version", 2, b"3\n")
    start = np.array([record.start for record in layout.records if record.data is None], np.int64)
    size = layout.at + len(layout.directory([0] * len(pieces)))
    return FileMap(name, size, tuple(layout.literals), pieces, start, layout.finish)


def _pickle(pieces: Pieces, objects: Mapping[str, Any]) -> bytes:
    """Pickle ``{name: tensor, …, name: object}``, with torch's persistent ids for storages."""
    tree: dict[str, Any] = {}
    for at, name in enumerate(pieces.names):
        if name in tree or name in objects:
            raise UsageError(f"two entries would be named {name!r}; rename one of them, or leave it out")
        try:
            tree[name] = tensor_value(pieces.dtype_of(at), pieces.shape_of(at), str(at))
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"tensor {name!r}: {error}") from None
    return dumps(tree | {name: _plain(value) for name, value in objects.items()}, 2)


def _plain(value: object) -> Opcodes:
    """Pickle a plain value without a memo, whose numbers would collide with those of this pickle."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 2)
    pickler.fast = True
    pickler.dump(value)
    return Opcodes(out.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)])
