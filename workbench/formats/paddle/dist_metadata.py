"""``N.metadata`` of paddle's distributed checkpoint: a pickle that describes and locates the shards.

::

    Metadata
      state_dict_metadata  {key → [LocalTensorMetadata(global_offset, local_shape, dtype, global_shape,
                                                       is_flattened, flattened_range)]}
      storage_metadata     {LocalTensorIndex(tensor_key, global_offset, local_shape, flattened_range,
                                             replica_id) → file}
      flat_mapping         flat key → path

Older releases store no ``global_shape``, and no ``local_shape`` in the index. Classes are recognized by name, as their
module moved (``distributed.checkpoint`` to ``distributed.flex_checkpoint.dcp``).
Source: paddlepaddle 3.3.1 ``distributed/flex_checkpoint/dcp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.pickles import unpickle
from workbench.core.pickles.standins import FAULTS, ByClass, state_of
from workbench.errors import CorruptError, IncompleteError

CLASSES = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Rows of the storage table, and their tensors.

    Attributes:
        tensors: key → (global shape, paddle's dtype name).
        rows: (key, global offset, local shape, flat range or ``None``, file).
        lost: shards without a file.
        inferred: tensors without a stored global shape.
        paths: flat key → path.
    """

    tensors: dict[str, tuple[tuple[int, ...], str]]
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int] | None, str]]
    lost: int
    inferred: int
    paths: dict[str, tuple[Any, ...]]


def decode(data: bytes, what: str) -> Metadata:
    """Decode the bytes of an ``N.metadata`` file.

    Raises:
        IncompleteError: it is empty.
        CorruptError: the data are not such a pickle, or contradict themselves.
        UnsafeError: a pickle bomb.
    """
    if not data:
        raise IncompleteError(f"{what} is empty; the save was interrupted, use an earlier step")
    found = unpickle.loads_with_globals(data, what=what, allow=ByClass(CLASSES))
    root = state_of(found.value, ("Metadata",), what, found.globals)
    try:
        return _columns(root)
    except FAULTS as error:
        raise CorruptError(
            f"{what} is not laid out as paddle's metadata ({type(error).__name__}: {str(error)[:120]})"
        ) from None


def _columns(root: Mapping[str, Any]) -> Metadata:
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # older indices have no local shape
    inferred = 0
    listed: set[tuple[Any, ...]] = set()
    for key, shards in root["state_dict_metadata"].items():
        states = [shard[0] for shard in (shards if isinstance(shards, list) else [shards])]
        whole = next((state["global_shape"] for state in states if state.get("global_shape") is not None), None)
        if whole is None:  # older releases: the largest end of the shards
            inferred += 1
            ends = [[a + b for a, b in zip(s["global_offset"], s["local_shape"], strict=True)] for s in states]
            whole = tuple(max(axis) for axis in zip(*ends, strict=True))
        tensors[_text(key)] = _ints(whole), str(states[0].get("dtype", ""))
        for state in states:
            offset, flat = _ints(state["global_offset"]), _range(state)
            shapes[key, offset, flat] = _ints(state["local_shape"])
            listed.add((key, offset, flat))
    rows = []
    for index, file in root["storage_metadata"].items():
        state = index[0]
        key, offset, flat = _text(state["tensor_key"]), _ints(state["global_offset"]), _range(state)
        local = state.get("local_shape")
        shape = shapes[key, offset, flat] if local is None else _ints(local)
        rows.append((key, offset, shape, flat, _text(file)))
        listed.discard((key, offset, flat))
    mapping = root.get("flat_mapping")
    paths = (
        {k: tuple(v) for k, v in mapping.items() if isinstance(v, (tuple, list))} if isinstance(mapping, dict) else {}
    )
    return Metadata(tensors, rows, len(listed), inferred, paths)


def _ints(values: Any) -> tuple[int, ...]:
    for n in values:
        if type(n) is not int or not 0 <= n < 1 << 62:
            raise ValueError("an invalid offset or size")
    return tuple(values)


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError("a name that is not text")
    return value


def _range(state: Mapping[str, Any]) -> tuple[int, int] | None:
    found = state.get("flattened_range")
    if found is None or not state.get("is_flattened", True):
        return None
    start, stop = (found.start, found.stop) if isinstance(found, slice) else found
    return _ints((start, stop))[0], stop
