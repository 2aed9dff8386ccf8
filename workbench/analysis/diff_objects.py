"""Changes in non-tensor state: nested dicts, lists, namespaces and tensors inside them, as a flat list.

::

    train_state.step          100 → 200
    lr_scheduler.base_lrs[0]  0.0003 → 0.0001
    args.seq_length           only in b: 4096
    rng.torch                 differs in 2,496 of 5,056 bytes          generator states are counted, not shown

Both sides are traversed together, with limits on nodes and depth; containers that contain themselves are not entered
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from workbench.core.jsonable import jsonable
from workbench.core.pickles.standins import Opaque, PickledDict, Record, StorageRef, short
from workbench.errors import WorkbenchError

NODES = 200_000  #: maximum number of values compared, over all objects
DEPTH = 64
TOO_MANY = "nested too deeply, or too many values to compare"
ENTRIES = 6  #: maximum changes reported per list; if there are more, their number and the first ones
TEXT = 60  #: maximum characters shown of a value


@dataclass(frozen=True)
class ObjectChange:
    """One difference.

    Attributes:
        path: the object's name, then keys and positions: ``args.lr``, ``state['betas'][1]``.
        kind: ``added``, ``removed``, ``changed``, ``unreadable``, ``unlooked`` (too many, too deep, or bytes of a
            storage that are not decoded) or ``entries`` (how many of a list differ, before the first ones).
        text: both values, in one line or less.
        before, after: the values as plain JSON, bounded; ``None`` if absent or summarized.
    """

    path: str
    kind: str
    text: str
    before: Any = None
    after: Any = None


def object_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ObjectChange]:
    """Return the differences between two checkpoints' objects, by name in the order of the first side."""
    return list(_Walk().named(a, b))


class _Walk:
    def __init__(self) -> None:
        self._left = NODES
        self._open: set[tuple[int, int]] = set()

    def named(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ObjectChange]:
        """Return objects by name; report those that cannot be decoded and continue."""
        for name in [*a, *(name for name in b if name not in a)]:
            sides = []
            for side in (a, b):
                try:
                    value = _own(name, side[name]) if name in side else _ABSENT
                    sides.append((value is not _ABSENT, value, ""))
                except WorkbenchError as error:
                    sides.append((True, None, str(error)))
            (in_a, before, why_a), (in_b, after, why_b) = sides
            path = name if _plain(name) else short(name)
            if why_a or why_b:
                yield ObjectChange(path, "unreadable", why_a or why_b)
            elif not in_a and not in_b:
                continue
            elif not in_a:
                yield _added(path, after)
            elif not in_b:
                yield _removed(path, before)
            else:
                yield from self.values(path, before, after, DEPTH)

    def values(self, path: str, a: Any, b: Any, depth: int) -> Iterator[ObjectChange]:
        self._left -= 1
        if a is b:
            return
        if isinstance(a, StorageRef) and isinstance(b, StorageRef) and (a.dtype, a.numel) == (b.dtype, b.numel):
            if a.numel:
                many = f"{a.numel:,} {'elements of ' + a.dtype if a.dtype else 'bytes'}"
                yield ObjectChange(path, "unlooked", f"a storage of {many} in an object that is not decoded")
            return
        if depth <= 0 or self._left <= 0:
            if self._left > -1 or depth <= 0:
                yield ObjectChange(path, "unlooked", TOO_MANY)
            return
        left, right = _parts(a), _parts(b)
        if left is None or right is None or _kind(a) != _kind(b):
            yield from _leaf(path, a, b)
            return
        pair = id(a), id(b)
        if pair in self._open:
            return
        self._open.add(pair)
        try:
            yield from self._inside(path, left, right, depth - 1)
        finally:
            self._open.discard(pair)

    def _inside(self, path: str, a: dict[Any, Any], b: dict[Any, Any], depth: int) -> Iterator[ObjectChange]:
        entries = [*a, *(key for key in b if key not in a)]
        found = list(self._entries(path, a, b, entries, depth))
        if len(found) > ENTRIES and all(isinstance(key, _At) for key in entries):
            many = len({change.path[len(path) :].split("]")[0] for change in found})
            yield ObjectChange(path, "entries", f"differs in {many:,} of {len(entries):,} entries; the first:")
            found = found[:2]
        yield from found

    def _entries(
        self, path: str, a: dict[Any, Any], b: dict[Any, Any], entries: list[Any], depth: int
    ) -> Iterator[ObjectChange]:
        for key in entries:
            inner = _joined(path, key)
            if key not in b:
                yield _removed(inner, a[key])
            elif key not in a:
                yield _added(inner, b[key])
            else:
                yield from self.values(inner, a[key], b[key], depth)


# ---- parts and leaves ------------------------------------------------------------------------------------------------


_ABSENT = object()
_LAYOUT = {"format", "DCP_SHARDING_INFO", "total_size", "total_parameters"}


def _own(name: str, value: Any) -> Any:
    """Return an object without facts about the file layout, such as safetensors headers and index."""
    if name == "__metadata__" and isinstance(value, Mapping):
        parts = [part for part in value.values() if isinstance(part, Mapping)]
        value = {key: item for part in parts for key, item in part.items() if key not in _LAYOUT}
    elif name.endswith(".safetensors.index") and isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if key not in _LAYOUT}
    else:
        return value
    return value or _ABSENT


class _At(int):
    """A position in a list, as opposed to an integer key of a dict."""


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the contents of a container by key or position; ``None`` for a leaf."""
    if isinstance(value, PickledDict):
        return {**value, **({"(attributes)": value.attrs} if value.attrs else {})}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return {_At(at): item for at, item in enumerate(value)}
    if isinstance(value, Record):
        return dict(value.fields)
    if isinstance(value, Opaque):
        names = ("args", "kwargs", "state", "items", "pairs")
        parts = {name: getattr(value, name) for name in names if getattr(value, name)}
        state = parts.get("state")
        return {**{k: v for k, v in parts.items() if k != "state"}, **state} if isinstance(state, dict) else parts
    return None


def _kind(value: Any) -> Any:
    if isinstance(value, Opaque):
        return value.name
    return "dict" if isinstance(value, Mapping) else type(value).__name__


def _leaf(path: str, a: Any, b: Any) -> Iterator[ObjectChange]:
    left, right = _array(a), _array(b)
    if left is not None and right is not None:
        if (text := _arrays(left, right)) is not None:
            yield ObjectChange(path, "changed", text)
        return
    if isinstance(a, (bytes, bytearray)) and isinstance(b, (bytes, bytearray)):
        if bytes(a) != bytes(b):
            one, two = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
            yield ObjectChange(path, "changed", _counted(one, two, "byte"))
        return
    if _same(a, b):
        return
    if isinstance(a, (set, frozenset)) and type(a) is type(b):
        yield ObjectChange(path, "changed", _sets(a, b), _json(a), _json(b))
        return
    text = f"{_text(a)} → {_text(b)}"
    if _kind(a) != _kind(b) and _text(a) == _text(b):
        text += f" ({_kind(a)} → {_kind(b)})"
    yield ObjectChange(path, "changed", text, _json(a), _json(b))


def _array(value: Any) -> np.ndarray[Any, Any] | Any | None:
    """Return the bytes of a tensor or array with its type and shape, or ``None``."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind == "O" else (str(value.dtype), value.shape, np.ascontiguousarray(value))
    if type(value).__module__.startswith("torch") and hasattr(value, "dtype") and hasattr(value, "untyped_storage"):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.view(torch.uint8).numpy()
    return None


def _arrays(a: Any, b: Any) -> str | None:
    (type_a, shape_a, left), (type_b, shape_b, right) = a, b
    if (type_a, shape_a) != (type_b, shape_b):
        return f"{type_a}{list(shape_a)} → {type_b}{list(shape_b)}"
    one, two = (side.reshape(-1).view(np.uint8) for side in (left, right))
    if (one == two).all():
        return None
    if type_a in ("uint8", "torch.uint8"):
        return _counted(one, two, "byte")
    size = len(one) // max(int(np.prod(shape_a)), 1)
    rows = [side.reshape(-1, size) for side in (one, two)]
    many = int((rows[0] != rows[1]).any(axis=1).sum())
    values = _first_values(type_a, rows) if len(rows[0]) == 1 else None
    return values or f"{type_a}{list(shape_a)} differs in {many:,} of {len(rows[0]):,} elements"


def _first_values(kind: str, rows: list[np.ndarray[Any, Any]]) -> str | None:
    try:
        found = [row.reshape(-1).copy().view(np.dtype(kind))[0].item() for row in rows]
    except TypeError:
        return None
    return f"{_text(found[0])} → {_text(found[1])}"


def _counted(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], noun: str) -> str:
    if len(a) != len(b):
        return f"{len(a):,} → {len(b):,} {noun}s"
    many = int(np.count_nonzero(a != b))
    return f"differs in {many:,} of {len(a):,} {noun}s"


def _same(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float and math.isnan(a) and math.isnan(b):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (set, frozenset)):
        try:
            return bool(a == b)
        except (TypeError, RecursionError):
            return short(a) == short(b)
    if isinstance(a, (str, int, float, complex, bool, type(None), range, slice)):
        return bool(a == b)
    return bool(jsonable(a, max_nodes=1000) == jsonable(b, max_nodes=1000))


def _sets(a: Any, b: Any) -> str:
    """Describe the elements in only one of two different sets of the same kind."""
    try:
        sides = [("only in a", a - b), ("only in b", b - a)]
    except (TypeError, RecursionError):
        return f"{_text(a)} → {_text(b)}"
    return "; ".join(f"{side}: {_sample_text(found)}" for side, found in sides if found)


def _sample_text(found: Any) -> str:
    shown = sorted(short(one, TEXT) for one in islice(found, NODES))
    return ", ".join(shown[:ENTRIES]) + (f" and {len(found) - ENTRIES:,} more" if len(found) > ENTRIES else "")


def _text(value: Any) -> str:
    found = _array(value)
    if found is not None:
        return f"{found[0]}{list(found[1])}"
    if isinstance(value, Mapping):
        return f"a dict of {len(value):,}"
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return f"a {type(value).__name__} of {len(value):,}"
    return short(value, TEXT)


def _json(value: Any) -> Any:
    return jsonable(value, max_nodes=50, max_depth=3) if _array(value) is None else None


def _added(path: str, value: Any) -> ObjectChange:
    return ObjectChange(path, "added", f"only in b: {_text(value)}", None, _json(value))


def _removed(path: str, value: Any) -> ObjectChange:
    return ObjectChange(path, "removed", f"only in a: {_text(value)}", _json(value), None)


def _joined(path: str, key: Any) -> str:
    if isinstance(key, _At):
        return f"{path}[{int(key)}]"
    if type(key) is str and _plain(key):
        return f"{path}.{key}"
    return f"{path}[{short(key, 40)}]"


def _plain(name: str) -> bool:
    return 0 < len(name) <= 200 and name.isprintable()
