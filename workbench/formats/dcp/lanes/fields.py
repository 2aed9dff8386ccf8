"""The fields of a cut ``.metadata``'s records, one column per field, without an object per record.

::

    record 0    offsets = torch.Size((0, 0))      relative_path = "__0_0.distcp"
    record 1    offsets = torch.Size((16, 0))     relative_path = memo 57, written by record 0
    an object   {"offsets": …}                    decoded as usual, between the runs of records

    Fields.boxes("offsets")        lengths (n,), numbers (n, dims)
    Fields.texts("relative_path")  (n,) numbers of the distinct texts, and the texts

`Values` decodes each distinct text and each shared object once; `Fields` arranges records and objects in the order of
a list. Both raise `Unlike` for anything that DCP's records do not hold. `distinct` numbers a million spans of bytes by
value without making a Python string of each. A hash proposes equal spans, which are then compared byte for byte::

    rows   the span's 8-byte words, zero after its end              → sum of word × odd constant, top bits = slot
    slot   represented by the last row that writes its number there → rows equal to it: numbered
                                                                      others: again with other constants
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.core.arrays import Array
from workbench.core.pickles import unpickle
from workbench.formats.dcp import metadata as dcp
from workbench.formats.dcp.lanes.cut import Lanes, Records
from workbench.formats.dcp.lanes.pages import Bytes
from workbench.formats.dcp.lanes.records import MARGIN, SPAN, Ints, blocks
from workbench.formats.dcp.lanes.templates import INT, REF, TEXT, Unlike, Value

TARGETS = 300_000  # objects that records share; each becomes a Python object
NO_BOX = -1
MANY = 1 << 20  # texts that are compared at a time


class Fields:
    """Records and objects in the order of one list; each field is one column.

    Args:
        order: ``(n,)`` record numbers, ``-1`` for one of ``objects``, which have the same order.
    """

    def __init__(self, values: Values, order: Ints, objects: list[Any]) -> None:
        self.values, self.count = values, len(order)
        self.odd = np.flatnonzero(order < 0)
        self.states: list[Mapping[str, Any]] = [one[0] for one in objects]
        owner = values.owner[order]
        owner[self.odd] = -1
        self.templates: list[tuple[int, Records, Ints, Ints | slice]] = []
        for position in np.flatnonzero(np.bincount(owner + 1, minlength=1)[1:]).tolist():
            one = values.lanes.records[position]
            at = np.flatnonzero(owner == position)
            rows: Ints | slice = slice(None) if len(at) == len(one.lane) else np.searchsorted(one.lane, order[at])
            self.templates.append((position, one, at, rows))

    def numbers(self, name: str, default: int | None = None, mine: Any = None) -> Ints:
        """Return integers; None and absent values become ``default``, if given. Only the rows ``mine`` matter."""
        out = np.empty(self.count, np.int64)
        for _, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is not None and value.kind == INT:
                out[at] = one.columns[value.column][rows]
            elif default is not None and (value is None or (value.kind == "const" and value.constant is None)):
                out[at] = default
            else:
                raise Unlike(f"{name!r} is not a number")
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            if mine is None or mine[place]:
                found = state[name] if default is None else state.get(name)
                out[place] = np.fromiter([default if default is not None and found is None else found], np.int64)[0]
        return out

    def texts(self, name: str) -> tuple[Ints, list[Any]]:
        """Return numbers, and the distinct values that they refer to."""
        number: dict[Any, int] = {}
        out = np.empty(self.count, np.int64)
        for position, one, at, rows in self.templates:
            value = one.state[name]
            if value.kind == TEXT:
                codes, texts = self.values.spans(position, value)
            elif value.kind == REF:
                codes, texts = self.values.targets(one.columns[value.column])
            else:
                raise Unlike(f"{name!r} is not text")
            known = np.array([number.setdefault(text, len(number)) for text in texts], np.int64)
            out[at] = known[codes][rows]
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            out[place] = number.setdefault(state[name], len(number))
        used = np.zeros(len(number), np.bool_)
        used[out] = True
        if not used.all():
            raise Unlike("records in several lists")
        if any(type(text) is not str for text in number):
            raise Unlike(f"{name!r} is not text")
        return out, list(number)

    def boxes(self, name: str, dims: int, fill: int, mine: Any = None) -> tuple[Ints, Ints]:
        """Return tuples of integers as ``(n,)`` lengths and padded ``(n, dims)``. Only the rows ``mine`` matter."""
        size = np.full(self.count, NO_BOX, np.int64)
        out = np.full((self.count, dims), fill, np.int64)
        for _, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is None or value.kind == "const":
                continue
            if value.kind == REF:
                codes, tuples = self.values.targets(one.columns[value.column][rows])
                if any(
                    type(box) is not tuple or len(box) > dims or any(type(n) is not int for n in box) for box in tuples
                ):
                    raise Unlike(f"{name!r} is not a tuple of numbers")
                table = np.full((len(tuples), dims), fill, np.int64)
                for row, box in enumerate(tuples):
                    table[row, : len(box)] = box
                out[at] = table[codes]
                size[at] = np.array([len(box) for box in tuples], np.int64)[codes]
                continue
            parts = self.values.size(value) if value.kind == "call" else value.parts
            if value.kind not in ("call", "tuple") or any(part.kind != INT for part in parts) or len(parts) > dims:
                raise Unlike(f"{name!r} is not a tuple of numbers")
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
        """Return what `dcp_metadata.codecs` returns, from the distinct descriptors."""
        out = np.zeros(self.count, np.int64)
        kinds: list[Any] = [None]
        name, shared = "transform_descriptors", self.values
        for position, one, at, rows in self.templates:
            value = one.state.get(name)
            if value is None or (value.kind == "const" and not value.constant):
                continue
            first = len(kinds)
            if value.kind == REF:
                codes, found = shared.targets(one.columns[value.column])
                kinds.extend(found)
            elif value.kind == "list" and len(value.parts) == 1 and value.parts[0].kind in (TEXT, REF):
                [part] = value.parts
                text = part.kind == TEXT
                codes, found = shared.spans(position, part) if text else shared.targets(one.columns[part.column])
                kinds.extend([word] for word in found)
            elif value.kind in ("list", "tuple") and not value.parts:
                continue
            else:
                raise Unlike("descriptors of several transforms")
            out[at] = first + codes[rows]
        for place, state in zip(self.odd.tolist(), self.states, strict=True):
            out[place] = len(kinds)
            kinds.append(state.get(name))
        if any(kind is not None and not (type(kind) is list and all(type(n) is str for n in kind)) for kind in kinds):
            raise Unlike("descriptors that are not a list of texts")
        seen, where = np.unique(out, return_index=True)
        used = seen[np.argsort(where)].tolist()  # in item order, the order in which unknown ones are listed
        codec, transforms = dcp.codecs([{name: kinds[kind]} for kind in used])
        table = np.zeros(len(kinds), np.uint8)
        table[used] = codec
        return table[out], transforms


class Values:
    """Texts and shared objects of all records."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.owner = np.full(len(lanes.base), -1, np.int16)  # record → its template
        for position, one in enumerate(lanes.records):
            self.owner[one.lane] = position
        self.read: set[tuple[int, int]] = set()  # decoded texts
        self.memo = dict(lanes.memo)
        self.inside = False

    def check_texts(self) -> None:
        """Decode the texts that were not requested. Raises UnicodeDecodeError for invalid text."""
        for position, one in enumerate(self.lanes.records):
            for value in one.template.fields:
                if value.kind == TEXT and (position, value.column) not in self.read:
                    self.spans(position, value)

    def spans(self, position: int, value: Value) -> tuple[Array, list[str]]:
        """Return a text column as numbers, and the texts that they refer to."""
        self.read.add((position, value.column))
        start, stop = self.lanes.records[position].columns[value.column : value.column + 2]
        held, number = self.lanes.held, dict[str, int]()
        codes: Array = np.empty(len(start), np.int32)
        for low, high in blocks(start, MANY, SPAN):
            held.need(int(start[low]), int(stop[high - 1]) + MARGIN)
            found, where = distinct(held.array, start[low:high], stop[low:high])
            texts = (
                self._text(a, b)
                for a, b in zip(start[low:high][where].tolist(), stop[low:high][where].tolist(), strict=True)
            )
            known = [number.setdefault(text, len(number)) for text in texts]
            codes[low:high] = np.array(known, np.int32)[found]
        return codes, list(number)

    def _text(self, start: int, stop: int) -> str:
        return str(bytes(self.lanes.held.data[start:stop]), "utf-8", "surrogatepass")  # as the C unpickler

    def targets(self, column: Ints) -> tuple[Ints, list[Any]]:
        """Return a reference column as numbers, and the objects that they refer to."""
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
        """Return a value as it is in one record."""
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
        if value.kind == REF and not self.inside:  # an element of a list, possibly the list itself
            self.inside = True
            try:
                return self.targets(one.columns[value.column][row : row + 1])[1][0]
            finally:
                self.inside = False
        raise Unlike(f"shares a {value.kind}")

    def size(self, value: Value) -> list[Value]:
        """Return the numbers of a ``torch.Size((…))`` call."""
        if (
            self.lanes.memo[value.parts[0].number] is not unpickle.TABLE["torch", "Size"]
            or len(value.parts) != 2
            or value.parts[1].kind != "tuple"
            or any(part.kind != INT for part in value.parts[1].parts)
        ):
            raise Unlike("calls something other than torch.Size")
        return value.parts[1].parts


BLOCK = 8192
ROUNDS = 12
WIDTHS = (32, 64, 128, MARGIN)  # longer spans are compared by Python

Words = np.ndarray[Any, np.dtype[np.uint64]]


def distinct(buffer: Bytes, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Number the spans ``buffer[start[i]:stop[i]]`` by value.

    Args:
        start, stop: ``(n,)`` byte positions, `MARGIN` or more before the end of the buffer.

    Returns:
        ``(n,)`` numbers, and for each number the position in ``start`` of one span with that value.
    """
    length = stop - start
    representative = np.empty(len(start), np.int64)
    lower = -1
    for width in WIDTHS:
        todo = np.flatnonzero((length > lower) & (length <= width))
        if len(todo):
            _find_representatives(_Rows(buffer, start, length, width), todo, representative)
        lower = width
    _one_by_one(buffer, start, stop, np.flatnonzero(length > lower), representative)
    own = np.flatnonzero(representative == np.arange(len(start)))
    number = np.empty(len(start), np.int64)
    number[own] = np.arange(len(own))
    return number[representative], own


class _Rows:
    """Spans as rows of whole words, zero after their ends."""

    def __init__(self, buffer: Bytes, start: Ints, length: Ints, width: int) -> None:
        self.buffer, self.start, self.length, self.width = buffer, start, length, width
        self.view: np.ndarray[Any, Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer.data, 0, (1,))
        ends = np.arange(width + 1)[:, None] - 8 * np.arange(width // 8)  # bytes of a word inside the span
        bits = (8 * np.clip(ends, 0, 8)).astype(np.uint64)
        self.masks = np.where(bits == 64, ~np.uint64(0), (np.uint64(1) << (bits % np.uint64(64))) - np.uint64(1))

    def of(self, rows: Ints) -> Words:
        words = self.view[self.start[rows]].view(np.uint64).reshape(len(rows), -1)
        words &= self.masks.take(self.length[rows], axis=0)
        return words


def _find_representatives(rows: _Rows, todo: Ints, representative: Ints) -> None:
    random = np.random.default_rng(1)
    for _ in range(ROUNDS):
        if not len(todo):
            return
        bits = max(10, min(22, len(todo).bit_length() + 1))
        odd = random.integers(1 << 62, 1 << 63, rows.width // 8, np.uint64) * np.uint64(2) + np.uint64(1)
        slots = np.empty(len(todo), np.uint32)
        for block in range(0, len(todo), BLOCK):
            part = todo[block : block + BLOCK]
            words = rows.of(part)
            words ^= words >> np.uint64(29)
            mixed = (words * odd).sum(axis=1, dtype=np.uint64) + rows.length[part].astype(np.uint64) * odd[0]
            slots[block : block + BLOCK] = (mixed ^ mixed >> np.uint64(32)) * odd[-1] >> np.uint64(64 - bits)
        table = np.zeros(1 << bits, np.int64)
        table[slots] = todo
        chosen = table[slots]
        equal = np.empty(len(todo), np.bool_)
        for block in range(0, len(todo), BLOCK):
            mine, other = todo[block : block + BLOCK], chosen[block : block + BLOCK]
            same = rows.length[mine] == rows.length[other]
            same &= (rows.of(mine) == rows.of(other)).all(axis=1)
            equal[block : block + BLOCK] = same
        representative[todo[equal]] = chosen[equal]
        todo = todo[~equal]
    _one_by_one(rows.buffer, rows.start, rows.start + rows.length, todo, representative)


def _one_by_one(buffer: Bytes, start: Ints, stop: Ints, todo: Ints, representative: Ints) -> None:
    seen: dict[bytes, int] = {}
    for row in todo.tolist():
        representative[row] = seen.setdefault(bytes(buffer[start[row] : stop[row]]), row)
