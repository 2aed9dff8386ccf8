"""ByteCheckpoint's ``.metadata``: DCP's pickle, plus a pickle of the tensor in every stored item.

::

    Metadata
      state_dict_metadata, planner_data, storage_data        as DCP (dcp/metadata.py); items are raw bytes
      all_tensor_metadata   {MetadataIndex → bytes | None}   the same keys in the same order; None for a bytes item
      bytecheckpoint_version  "0.0.2"
      user_defined_dict     {} or FSDP1's flat parameters (flat.py)

    bytes = pickle: _rebuild_tensor_v2(('storage', FloatStorage, '0', 'cpu', 8192), 0, (128, 64), (64, 1), False, …)
                                                                             offset  size     stride

ByteCheckpoint itself interprets the bytes by the inner pickle, not by ``TensorProperties``, so the dtype and strides of
the inner pickle apply. Ranks write equal pieces, so there are few distinct inner pickles; each is decoded once.

Read from bytecheckpoint 0.0.2 and 0.0.3 (``checkpointer/meta_type.py``, ``utilities/serialization.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.dtypes import by_name
from workbench.core.pickles import unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import FAULTS, ByClass, TensorRef, state_of
from workbench.errors import CorruptError
from workbench.formats.dcp import metadata as dcp

LANES_FROM = dcp.LANES_FROM
#: Start of ``all_tensor_metadata`` in a protocol 4 pickle: its memoized name and an empty dict.
SECTION = b"\x8c\x13all_tensor_metadata\x94}\x94("
#: What follows it if nothing is user-defined: the version, an empty dict, the end.
TAIL = re.compile(
    rb"(?:\x95.{8})?\x8c\x16bytecheckpoint_version\x94(?:N|\x8c.([ -~]{0,80})\x94)"
    rb"\x8c\x11user_defined_dict\x94}\x94ub\.",
    re.DOTALL,
)
MARK, SETITEMS, FRAME, MEMOIZE, NONE, BYTES, GET, LONG_GET = b"(u\x95\x94NChj"


@dataclass(frozen=True, eq=False)
class Layouts:
    """The distinct inner tensors, ``(L,)`` each; ``sizes`` and ``strides`` ``(L, D)``, padded with 1 and 0.

    ``start`` counts bytes from the item's beginning. ``odd`` marks bits that are not the values (a lazily conjugated
    or negated tensor).
    """

    dtype: Ints
    ndim: Ints
    sizes: Ints
    strides: Ints
    start: Ints
    odd: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class ByteMetadata:
    """Columns of one ``.metadata``: DCP's, and the layout of each item, ``(M,)``, ``-1`` if none is stored."""

    dcp: dcp.DcpMetadata
    layout: Ints
    layouts: Layouts
    version: str | None
    user: Mapping[str, Any]


def decode(data: bytes, *, what: str) -> ByteMetadata:
    """Decode a ``.metadata`` file's bytes.

    Raises:
        CorruptError: the data are not such a pickle or contradict themselves. UnsafeError: a pickle bomb.
    """
    if len(data) >= LANES_FROM:
        fast = _in_pieces(data, what)
        if fast is not None:
            return fast
    found = unpickle.loads_with_globals(data, what=what, allow=ByClass(dcp.CLASSES))
    root = state_of(found.value, dcp.ROOTS, what, found.globals)
    try:
        meta = dcp.assemble(root, dcp.Objects())
        number, distinct = _numbered(root)
    except FAULTS as error:
        raise CorruptError(
            f"{what} is not laid out as ByteCheckpoint metadata ({type(error).__name__}: {str(error)[:120]})"
        ) from None
    version, user = root.get("bytecheckpoint_version"), root.get("user_defined_dict")
    return ByteMetadata(
        meta,
        number,
        _layouts(distinct, what),
        version if type(version) is str else None,
        user if isinstance(user, dict) else {},
    )


def _numbered(root: Mapping[str, Any]) -> tuple[Ints, list[bytes]]:
    """Return the number of each item's inner pickle, and the distinct ones. Raises one of `by_class.FAULTS`."""
    storage = root["storage_data"]
    inner = root.get("all_tensor_metadata") or {}
    # pickle shares the keys, so they are identical objects; another pickler may have written them twice
    values = [inner.get(index) for index in storage]
    if sum(value is not None for value in values) < sum(value is not None for value in inner.values()):
        by_place = {_place(index): value for index, value in inner.items()}
        values = [by_place.get(_place(index)) for index in storage]
    table: dict[bytes, int] = {}
    number = [-1 if value is None else table.setdefault(value, len(table)) for value in values]
    return np.array(number, np.int64), list(table)


def _place(index: Any) -> tuple[Any, ...]:
    state = index[0]
    offset = state.get("offset")
    return state["fqn"], None if offset is None else tuple(offset)


# ---- huge metadata -------------------------------------------------------------------------------------------------


def _in_pieces(data: bytes, what: str, irregular: float | None = None) -> ByteMetadata | None:
    """Return what `decode` returns, or None if the pickle must be decoded as a whole.

    The stream is cut at `SECTION`. Before it is DCP's own metadata, closed by three opcodes and read as columns
    (dcp/lanes). The section is a sequence of references and bytes. Almost nothing follows it.
    ``irregular`` is passed to `dcp_lanes.decode`.
    """
    from workbench.formats.dcp import lanes as dcp_lanes

    at = data.find(SECTION)
    if at < 0 or data.find(SECTION, at + 1) >= 0:
        return None
    head = _closed(data, at)
    section = _section(data, at + len(SECTION)) if head is not None else None
    if head is None or section is None:
        return None
    refs, number, distinct, end = section
    tail = TAIL.fullmatch(data, end)
    meta = dcp_lanes.decode(head, what=what, irregular=irregular) if tail else None
    # The keys are the objects of storage_data: as many references, in rising order, name them in the same order.
    if tail is None or meta is None or len(meta.start) != len(refs) or (refs[1:] <= refs[:-1]).any():
        return None
    version = tail[1].decode() if tail[1] is not None else None
    return ByteMetadata(meta, number, _layouts(distinct, what), version, {})


def _closed(data: bytes, at: int) -> bytes | None:
    """Return the stream up to ``at`` as a complete pickle; its last frame is shortened."""
    pos = 2
    while data[pos] == FRAME:
        size = int.from_bytes(data[pos + 1 : pos + 9], "little")
        if pos + 9 + size > at:
            view = memoryview(data)
            return b"".join((view[: pos + 1], (at + 3 - pos - 9).to_bytes(8, "little"), view[pos + 9 : at], b"ub."))
        pos += 9 + size
    return None


def _section(data: bytes, pos: int) -> tuple[Ints, Ints, list[bytes], int] | None:
    """Return references, numbered bytes, the distinct bytes and the end of the dict whose first MARK was read."""
    refs: list[int] = []
    number: list[int] = []
    table: dict[bytes, int] = {}
    try:
        while True:
            op = data[pos]
            if op == FRAME:
                pos += 9
                continue
            if op == LONG_GET:
                refs.append(int.from_bytes(data[pos + 1 : pos + 5], "little"))
                pos += 5
            elif op == GET:
                refs.append(data[pos + 1])
                pos += 2
            elif op == SETITEMS:
                pos += 1
                after = pos + 9 if data[pos] == FRAME else pos
                if data[after] != MARK:
                    return np.array(refs, np.int64), np.array(number, np.int64), list(table), pos
                pos = after + 1
                continue
            else:
                return None
            if data[pos] == FRAME:
                pos += 9
            if data[pos] == BYTES:
                stop = pos + 2 + data[pos + 1]
                number.append(table.setdefault(data[pos + 2 : stop], len(table)))
                if data[stop] != MEMOIZE:
                    return None
                pos = stop + 1
            elif data[pos] == NONE:
                number.append(-1)
                pos += 1
            else:
                return None
    except IndexError:
        return None


# ---- the inner tensors ---------------------------------------------------------------------------------------------


def _layouts(distinct: Sequence[bytes], what: str) -> Layouts:
    refs = [_tensor(value, what) for value in distinct]
    count, dims = len(refs), max([1, *(len(ref.shape) for ref in refs)])
    sizes, strides = np.ones((count, dims), np.int64), np.zeros((count, dims), np.int64)
    for row, ref in enumerate(refs):
        sizes[row, : len(ref.shape)] = ref.shape
        strides[row, : len(ref.shape)] = ref.stride
    dtypes = [by_name(ref.dtype) for ref in refs]
    start = [ref.storage_offset * dtype.itemsize for ref, dtype in zip(refs, dtypes, strict=True)]
    if any(at >= 1 << 63 for at in start):
        raise CorruptError(f"{what} places a tensor beyond the end of any file")
    return Layouts(
        dtype=np.array([dtype.code for dtype in dtypes], np.int64),
        ndim=np.array([len(ref.shape) for ref in refs], np.int64),
        sizes=sizes,
        strides=strides,
        start=np.array(start, np.int64),
        odd=np.array([bool(ref.attrs.get("metadata")) for ref in refs], np.bool_),
    )


def _tensor(value: bytes, what: str) -> TensorRef:
    if type(value) is not bytes:
        raise CorruptError(f"{what}: all_tensor_metadata holds {unpickle.short(value, 60)} where bytes belong")
    inner = f"{what} (all_tensor_metadata)"
    found = unpickle.loads(value, what=inner, persistent_load=torch_storage)
    if not isinstance(found, TensorRef):
        raise CorruptError(f"{inner} holds {unpickle.short(found, 60)}, not a tensor")
    return found
