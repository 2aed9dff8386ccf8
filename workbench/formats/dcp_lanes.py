"""The columns of a huge ``.metadata`` from its pickle's lanes: no Python object per chunk or item.

::

    state_dict_metadata  {fqn → … chunks [chunk, Run 1…511, chunk, …]}    Run: records of `core.pickle_lanes`, by number
    storage_data         {index → info, Run 513…800 → Run 801, …}         in turn a MetadataIndex and a _StorageInfo

`Columns` answers what `dcp_metadata.assemble` asks, as `dcp_metadata.Objects` does for a pickle decoded whole. Anything
out of the ordinary raises (`Unlike`, or what the same fault raises there), and the pickle is decoded whole to find the
truth.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from workbench.core import unpickle
from workbench.core.lane_match import Bytes
from workbench.core.lane_templates import INT, REF, TEXT, Unlike, Value
from workbench.core.lane_texts import distinct
from workbench.core.pickle_lanes import IRREGULAR, RUN, Lanes, Records, Run, read
from workbench.errors import WorkbenchError
from workbench.formats import dcp_metadata as dcp

__all__ = ["Columns", "decode"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
TARGETS = 300_000  # objects that records share: each is made as a Python object
NO_BOX = -1


def decode(
    data: bytes | memoryview, *, what: str, run: int = RUN, irregular: float = IRREGULAR
) -> dcp.DcpMetadata | None:
    """What `dcp_metadata.decode` returns, or None where the whole pickle must be decoded to know it.

    Args:
        run, irregular: as `core.pickle_lanes.read`.
    """
    collecting = gc.isenabled()
    gc.disable()  # as in `unpickle`: a hundred thousand tensors are a million objects, and no garbage
    try:
        lanes = read(data, what=what, allow=dcp.ByClass(), run=run, irregular=irregular)
        columns = Columns(lanes)
        root = dcp.state_of(lanes.value, dcp.ROOTS, what, set())
        found = dcp.assemble(root, columns)
        return found if columns.whole() and _plain(root, found.paths) else None
    except (Unlike, WorkbenchError, *dcp.FAULTS):
        return None  # no verdict: the slow decoder finds the same fault, or none, and says which
    finally:
        if collecting:
            gc.enable()


def _plain(root: Mapping[str, Any], paths: Mapping[Any, Any] | None) -> bool:
    """Whether what is handed on as it was decoded is free of runs: nothing but text and numbers."""
    for key, path in (paths or {}).items():
        if type(key) is not str or type(path) is not tuple or any(type(part) not in (str, int) for part in path):
            return False
    meta = root.get("storage_meta")
    state = meta[0] if isinstance(meta, dcp.Held) and meta else {}
    words = root.get("version"), state.get("save_id") if isinstance(state, Mapping) else None
    return all(word is None or type(word) is str for word in words)


class Columns:
    """Chunks and items of a cut pickle, as arrays."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.buffer: Bytes = np.frombuffer(lanes.data, np.uint8)
        self.owner = np.full(len(lanes.base), -1, np.int16)  # record → its template
        for position, one in enumerate(lanes.records):
            if not (isinstance(one.kind, type) and issubclass(one.kind, dcp.Held)):
                raise Unlike("records of another class")
            if any(type(key) is not str for key in one.state):
                raise Unlike("a key that is no text")
            self.owner[one.lane] = position
        self.seen = 0
        self.read: set[tuple[int, int]] = set()  # texts that were decoded
        self.memo = dict(lanes.memo)
        self.inside = False

    def chunks(self, lists: list[Any], ndim: Ints, dims: int) -> tuple[Ints, Ints, Ints]:
        """As `dcp_metadata.Objects.chunks`."""
        if any(type(part) is not list for part in lists):  # of a dict, say, a run would be keys and values
            raise Unlike("chunks that are no list")
        counts, order, objects = _flatten(lists)
        self._count(order)
        each = np.repeat(ndim, counts)
        part = _Part(self, order, objects)
        out = []
        for name, fill in (("offsets", 0), ("sizes", 1)):
            size, box = part.boxes(name, dims, fill)
            if (size != each).any():
                raise Unlike("a chunk has another number of dimensions than its tensor")
            out.append(box)
        return counts, out[0], out[1]

    def items(self, storage: Mapping[Any, Any], rows_of: Mapping[Any, int], dims: int) -> dcp.Items:
        """As `dcp_metadata.Objects.items`."""
        for key, value in storage.items():
            many = type(key) is Run and key.stop - key.first > 1
            if type(value) is Run and value.stop - value.first > 1:
                raise Unlike("a run across keys and values")
            if many and not (type(value) is Run and value.first == key.stop):  # the last record of the same run
                raise Unlike("a run across keys and values")
        _, order, objects = _flatten([[part for pair in storage.items() for part in pair]])
        self._count(order)
        odd = np.cumsum(order < 0) - 1  # which of the objects
        places = np.flatnonzero(order < 0)
        keys = [objects[i] for i in odd[places[places % 2 == 0]].tolist()]
        values = [objects[i] for i in odd[places[places % 2 == 1]].tolist()]
        index, info = _Part(self, order[0::2], keys), _Part(self, order[1::2], values)

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
        """Whether each record was met once, and all their texts are text."""
        for position, one in enumerate(self.lanes.records):
            for value in one.template.fields:
                if value.kind == TEXT and (position, value.column) not in self.read:
                    self.spans(position, value)
        return self.seen == self.lanes.cut

    def _count(self, order: Ints) -> None:
        lanes = order[order >= 0]
        if (lanes[1:] <= lanes[:-1]).any():  # a list that two tensors share, say
            raise Unlike("records in another order than stored")
        self.seen += len(lanes)

    def spans(self, position: int, value: Value) -> tuple[Ints, list[str]]:
        """A text column: numbers, and the texts that they stand for."""
        self.read.add((position, value.column))
        start, stop = self.lanes.records[position].columns[value.column : value.column + 2]
        codes, where = distinct(self.buffer, start, stop)
        pairs = zip(start[where].tolist(), stop[where].tolist(), strict=True)
        return codes, [self._text(a, b) for a, b in pairs]

    def _text(self, start: int, stop: int) -> str:
        return str(bytes(self.lanes.data[start:stop]), "utf-8", "surrogatepass")  # as the C unpickler

    def targets(self, column: Ints) -> tuple[Ints, list[Any]]:
        """A reference column: numbers, and the objects that they stand for."""
        found = np.unique(column)
        if len(found) > TARGETS:
            raise Unlike("too many shared objects")
        for target, lane in zip(found.tolist(), self.lanes.places.records(found).tolist(), strict=True):
            if lane >= 0 and target not in self.memo:
                one = self.lanes.records[self.owner[lane]]
                row = int(np.searchsorted(one.lane, lane))
                self.memo[target] = self._object(one, row, one.template.slots[target - int(self.lanes.base[lane])])
        return np.searchsorted(found, column), [self.memo[target] for target in found.tolist()]

    def _object(self, one: Records, row: int, value: Value) -> Any:
        """What a value is in one record."""
        if value.kind == INT:
            return int(one.columns[value.column][row])
        if value.kind == TEXT:
            return self._text(int(one.columns[value.column][row]), int(one.columns[value.column + 1][row]))
        if value.kind == "tuple":
            return tuple(self._object(one, row, part) for part in value.parts)
        if value.kind == "list":
            return [self._object(one, row, part) for part in value.parts]
        if value.kind == "call":
            return tuple(self._object(one, row, part) for part in self.size(value))
        if value.kind == REF and not self.inside:  # a list's element; it may be that list
            self.inside = True
            try:
                return self.targets(one.columns[value.column][row : row + 1])[1][0]
            finally:
                self.inside = False
        raise Unlike(f"shares a {value.kind}")

    def size(self, value: Value) -> list[Value]:
        """The numbers of a call that is ``torch.Size((…))``."""
        if (
            self.lanes.memo[value.parts[0].number] is not unpickle.TABLE["torch", "Size"]
            or len(value.parts) != 2
            or value.parts[1].kind != "tuple"
            or any(part.kind != INT for part in value.parts[1].parts)
        ):
            raise Unlike("calls something else than torch.Size")
        return value.parts[1].parts


class _Part:
    """Records and objects in the order of one list: its fields as columns."""

    def __init__(self, columns: Columns, order: Ints, objects: list[Any]) -> None:
        self.columns, self.count = columns, len(order)
        self.odd = np.flatnonzero(order < 0)
        self.states: list[Mapping[str, Any]] = [one[0] for one in objects]
        owner = columns.owner[order]
        owner[self.odd] = -1
        self.templates: list[tuple[int, Records, Ints, Ints | slice]] = []
        for position in np.flatnonzero(np.bincount(owner + 1, minlength=1)[1:]).tolist():
            one = columns.lanes.records[position]
            at = np.flatnonzero(owner == position)
            rows: Ints | slice = slice(None) if len(at) == len(one.lane) else np.searchsorted(one.lane, order[at])
            self.templates.append((position, one, at, rows))

    def numbers(self, name: str, default: int | None = None, mine: Any = None) -> Ints:
        """Whole numbers; None and nothing at all are ``default`` where there is one. Only the rows ``mine`` matter."""
        out = np.empty(self.count, np.int64)
        for _, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is not None and value.kind == INT:
                out[at] = one.columns[value.column][rows]
            elif default is not None and (value is None or (value.kind == "const" and value.constant is None)):
                out[at] = default
            else:
                raise Unlike(f"no number {name!r}")
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            if mine is None or mine[place]:
                found = state[name] if default is None else state.get(name)
                out[place] = np.fromiter([default if default is not None and found is None else found], np.int64)[0]
        return out

    def texts(self, name: str) -> tuple[Ints, list[Any]]:
        """Numbers and the distinct values that they stand for."""
        number: dict[Any, int] = {}
        out = np.empty(self.count, np.int64)
        for position, one, at, rows in self.templates:
            value = one.state[name]
            if value.kind == TEXT:
                codes, values = self.columns.spans(position, value)
            elif value.kind == REF:
                codes, values = self.columns.targets(one.columns[value.column])
            else:
                raise Unlike(f"{name!r} is no text")
            known = np.array([number.setdefault(text, len(number)) for text in values], np.int64)
            out[at] = known[codes][rows]
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            out[place] = number.setdefault(state[name], len(number))
        used = np.zeros(len(number), np.bool_)
        used[out] = True
        if not used.all():
            raise Unlike("records in several lists")
        if any(type(text) is not str for text in number):
            raise Unlike(f"{name!r} is no text")
        return out, list(number)

    def boxes(self, name: str, dims: int, fill: int, mine: Any = None) -> tuple[Ints, Ints]:
        """Tuples of whole numbers as ``(n,)`` lengths and ``(n, dims)``, padded. Only the rows ``mine`` matter."""
        size = np.full(self.count, NO_BOX, np.int64)
        out = np.full((self.count, dims), fill, np.int64)
        for _, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is None or value.kind == "const":
                continue
            if value.kind == REF:
                codes, tuples = self.columns.targets(one.columns[value.column][rows])
                if any(
                    type(box) is not tuple or len(box) > dims or any(type(n) is not int for n in box) for box in tuples
                ):
                    raise Unlike(f"{name!r} is no tuple of numbers")
                table = np.full((len(tuples), dims), fill, np.int64)
                for row, box in enumerate(tuples):
                    table[row, : len(box)] = box
                out[at] = table[codes]
                size[at] = np.array([len(box) for box in tuples], np.int64)[codes]
                continue
            parts = self.columns.size(value) if value.kind == "call" else value.parts
            if value.kind not in ("call", "tuple") or any(part.kind != INT for part in parts) or len(parts) > dims:
                raise Unlike(f"{name!r} is no tuple of numbers")
            size[at] = len(parts)
            for axis, part in enumerate(parts):
                out[at, axis] = one.columns[part.column][rows]
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            if mine is None or mine[place]:
                box = np.fromiter(iter(state[name]), np.int64)
                if len(state[name]) != len(box) or len(box) > dims:
                    raise Unlike(f"{name!r} has more dimensions than any tensor")
                size[place] = len(box)
                out[place, : len(box)] = box
        if (size == NO_BOX if mine is None else (size == NO_BOX) & mine).any():
            raise Unlike(f"no {name!r}")
        return size, out

    def codecs(self) -> tuple[Any, list[str]]:
        """As `dcp_metadata.codecs`, over the distinct descriptors."""
        out = np.zeros(self.count, np.int64)
        kinds: list[Any] = [None]
        name, columns = "transform_descriptors", self.columns
        for position, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is None or (value.kind == "const" and not value.constant):
                continue
            first = len(kinds)
            if value.kind == REF:
                codes, values = columns.targets(one.columns[value.column])
                kinds.extend(values)
            elif value.kind == "list" and len(value.parts) == 1 and value.parts[0].kind in (TEXT, REF):
                [part] = value.parts
                text = part.kind == TEXT
                codes, values = columns.spans(position, part) if text else columns.targets(one.columns[part.column])
                kinds.extend([word] for word in values)
            elif value.kind in ("list", "tuple") and not value.parts:
                continue
            else:
                raise Unlike("descriptors of several transforms")
            out[at] = first + codes[rows]
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            out[place] = len(kinds)
            kinds.append(state.get(name))
        if any(kind is not None and not (type(kind) is list and all(type(n) is str for n in kind)) for kind in kinds):
            raise Unlike("descriptors that are no list of texts")
        seen, where = np.unique(out, return_index=True)
        used = seen[np.argsort(where)].tolist()  # in the order of the items: the unknown ones are listed in that order
        codec, transforms = dcp.codecs([{name: kinds[kind]} for kind in used])
        table = np.zeros(len(kinds), np.uint8)
        table[used] = codec
        return table[out], transforms


def _flatten(lists: Iterable[Any]) -> tuple[Ints, Ints, list[Any]]:
    """Elements of each list, records by number and ``-1`` for an object, and the objects, in order."""
    counts: list[int] = []
    pieces: list[tuple[int, int]] = []
    objects: list[Any] = []
    for group in lists:
        count = 0
        for one in group:
            if type(one) is Run:
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
    order = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - ends + length, length)
    return np.array(counts, np.int64), cast(Ints, order), objects
