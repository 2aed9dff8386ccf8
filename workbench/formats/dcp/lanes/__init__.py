"""Read the columns of a huge ``.metadata`` from lanes of its pickle, without a Python object per chunk or item.

1,024,000 chunks, 194 MB of ``.metadata``, decoded to columns (2026-11-22, 2 cores, CPU; ``benchmarks/opening.py``
writes the file)::

                                               CPU s    memory
    lanes                                        1.6    0.41 GB
    stand-ins, the opcodes skimmed (until then)  9.7    1.80 GB
    stand-ins, every opcode read (core/pickles) 27.2    1.80 GB
    pickle.loads with torch's classes           12.0    2.25 GB    objects, no columns yet

These six files exist only for this speed; any ``.metadata`` can be decoded without them.

::

    pages       the bytes: in memory, or a window that moves along a huge file
    templates   the opcodes that a million records share, separated from what differs between them
    records     candidate positions of records: the templates matched everywhere at once
    cut         which candidates are records, proved from byte 0 on; the pickle without them
    fields      the records' fields, one column per field

    state_dict_metadata  {fqn → … chunks [chunk, Run 1…511, chunk, …]}    Run: records that were cut, by number
    storage_data         {index → info, Run 513…800 → Run 801, …}         in turn a MetadataIndex and a _StorageInfo

`Columns` is a `dcp_metadata.DecodedSource`, like `dcp_metadata.Objects` for a pickle decoded as a whole. Anything
unusual raises (`Unlike`, or the exception that the same fault raises there). Then the pickle is decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.garbage import uncollected
from workbench.core.pickles.standins import FAULTS, ByClass, Held, state_of
from workbench.errors import WorkbenchError
from workbench.formats.dcp import metadata as dcp
from workbench.formats.dcp.lanes.cut import IRREGULAR, RUN, Lanes, RecordRun, read
from workbench.formats.dcp.lanes.fields import Fields, Values
from workbench.formats.dcp.lanes.pages import HeldBytes, PagedBytes
from workbench.formats.dcp.lanes.records import Ints
from workbench.formats.dcp.lanes.templates import Unlike

__all__ = ["Columns", "PagedBytes", "decode"]


@uncollected()
def decode(
    data: bytes | memoryview | PagedBytes, *, what: str, run: int = RUN, irregular: float | None = None
) -> dcp.DcpMetadata | None:
    """Return what `dcp_metadata.decode` returns, or None if the pickle must be decoded as a whole.

    Args:
        run, irregular: see `cut.read`.
    """
    try:
        share = IRREGULAR if irregular is None else irregular
        lanes = read(
            data if isinstance(data, PagedBytes) else HeldBytes(data),
            what=what,
            allow=ByClass(dcp.CLASSES),
            run=run,
            irregular=share,
        )
        columns = Columns(lanes)
        root = state_of(lanes.value, dcp.ROOTS, what, set())
        found = dcp.assemble(root, columns)
        return found if columns.whole() and _plain(root, found.paths) else None
    except (Unlike, WorkbenchError, *FAULTS):
        return None  # undecided: the slow decoder reports the fault, if there is one


def _plain(root: Mapping[str, Any], paths: Mapping[Any, Any] | None) -> bool:
    """Return whether the parts that are passed on as decoded hold only text and numbers, no runs."""
    for key, path in (paths or {}).items():
        if type(key) is not str or type(path) is not tuple or any(type(part) not in (str, int) for part in path):
            return False
    meta = root.get("storage_meta")
    state = meta[0] if isinstance(meta, Held) and meta else {}
    words = root.get("version"), state.get("save_id") if isinstance(state, Mapping) else None
    return all(word is None or type(word) is str for word in words)


class Columns:
    """Chunks and items of a cut pickle, as arrays."""

    def __init__(self, lanes: Lanes) -> None:
        for one in lanes.records:
            if not (isinstance(one.kind, type) and issubclass(one.kind, Held)):
                raise Unlike("records of another class")
            if any(type(key) is not str for key in one.state):
                raise Unlike("a key that is not text")
        self.values = Values(lanes)
        self.seen = 0

    def chunks(self, lists: list[Any], ndim: Ints, dims: int) -> tuple[Ints, Ints, Ints]:
        """See `dcp_metadata.Objects.chunks`."""
        if any(type(part) is not list for part in lists):  # in a dict, a run would be keys and values
            raise Unlike("chunks that are not a list")
        counts, order, objects = _flatten(lists)
        self._count(order)
        each = np.repeat(ndim, counts)
        part = Fields(self.values, order, objects)
        out = []
        for name, fill in (("offsets", 0), ("sizes", 1)):
            size, box = part.boxes(name, dims, fill)
            if (size != each).any():
                raise Unlike("a chunk and its tensor differ in number of dimensions")
            out.append(box)
        return counts, out[0], out[1]

    def items(self, storage: Mapping[Any, Any], rows_of: Mapping[Any, int], dims: int) -> dcp.Items:
        """See `dcp_metadata.Objects.items`."""
        for key, value in storage.items():
            many = type(key) is RecordRun and key.stop - key.first > 1
            if type(value) is RecordRun and value.stop - value.first > 1:
                raise Unlike("a run across keys and values")
            if many and not (type(value) is RecordRun and value.first == key.stop):  # the last record of the same run
                raise Unlike("a run across keys and values")
        _, order, objects = _flatten([[part for pair in storage.items() for part in pair]])
        self._count(order)
        value = np.flatnonzero(order < 0) % 2  # of each object: whether it is a key's
        keys = [one for one, odd in zip(objects, value.tolist(), strict=True) if not odd]
        values = [one for one, odd in zip(objects, value.tolist(), strict=True) if odd]
        index, info = Fields(self.values, order[0::2], keys), Fields(self.values, order[1::2], values)

        codes, names = index.texts("fqn")
        owner = np.array([rows_of.get(name, -1) for name in names], np.int64)[codes]
        size, box = index.boxes("offset", dims, 0, owner >= 0)
        codes, names = info.texts("relative_path")
        first = np.full(len(names), len(codes), np.int64)
        first[codes[::-1]] = np.arange(len(codes))[::-1]
        by_appearance = np.argsort(first)
        rank = np.empty(len(names), np.int64)
        rank[by_appearance] = np.arange(len(names))
        codec, transforms = info.codecs()
        self.values.check_texts()
        return dcp.Items(
            owner=owner,
            hint=index.numbers("index", -1, owner >= 0),
            ndim=size,
            at=box,
            files=[names[i] for i in by_appearance.tolist()],
            file=rank[codes].astype(np.int32),
            start=info.numbers("offset"),
            length=info.numbers("length"),
            codec=codec,
            transforms=transforms,
        )

    def whole(self) -> bool:
        """Return whether each record occurred once."""
        return self.seen == self.values.lanes.cut

    def _count(self, order: Ints) -> None:
        lanes = order[order >= 0]
        if (lanes[1:] <= lanes[:-1]).any():  # for example, a list that two tensors share
            raise Unlike("records not in stored order")
        self.seen += len(lanes)


def _flatten(lists: Iterable[Any]) -> tuple[Ints, Array, list[Any]]:
    """Return each list's elements, as record numbers or ``-1`` for an object, and the objects, in order."""
    counts: list[int] = []
    pieces: list[tuple[int, int]] = []
    objects: list[Any] = []
    for group in lists:
        count = 0
        for one in group:
            if type(one) is RecordRun:
                pieces.append((one.first, one.stop))
                count += one.stop - one.first
            else:
                pieces.append((-1, 0))
                objects.append(one)
                count += 1
        counts.append(count)
    first, stop = (
        (np.array(part, np.int64) for part in zip(*pieces, strict=True)) if pieces else (np.empty(0, np.int64),) * 2
    )
    length = stop - first
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    kind = np.int32 if max(total, *stop.tolist()) < 1 << 31 else np.int64
    order: Array = np.arange(total, dtype=kind)
    order += np.repeat((first - ends + length).astype(kind), length)
    return np.array(counts, np.int64), order, objects
