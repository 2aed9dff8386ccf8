"""``metadata.pkl``: one pickle of plain dicts, lists, tuples, text and numbers, which names no class.

::

    {"version": "2.0", "world_size": 4, "metadata": {"model": {
        "nested_path_to_metadata": {'["norm.weight"]': [group, …]},
        "rank_to_layout_info": {0: None | {"file_path": "model_0.pt", "serialization_format": {"type": …}}, …}}}}

    group          {"sharding_metadata": {"type": …, "data": …}, "ranks": (0, 1, 2, 3)}
    version 1.0    "metadata": {'["model","norm.weight"]': [group, …]},
                   "rank_to_layout_info_mappings": {rank: {item: …}}

A path is JSON; integer keys of dicts and positions of lists stay integers. Several groups of one path are copies on
different meshes (a tensor sharded along one of two mesh axes), not more shards.

The file proves nothing about a save: rank 0 writes it before the other ranks are known to be done, the synchronous
saver writes it only in the first save of a process, and items without a resharder are not in it.

Source: torch_checkpointing 0.1.1 ``distributed_metadata.py``, ``checkpoint_layout.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core import jsonsafe
from workbench.core.mesh.mesh import MAX_RANKS
from workbench.core.pickles import unpickle
from workbench.core.pickles.standins import short
from workbench.core.place import Place
from workbench.errors import CorruptError, UnsupportedFormatError, quoted

NAME = "metadata.pkl"
VERSIONS = ("1.0", "2.0")


@dataclass(frozen=True)
class SaveMetadata:
    """The contents of the file.

    Attributes:
        world_size: number of ranks.
        groups: item → path → its groups, each a dict with ``sharding_metadata`` and ``ranks``.
        files: item → rank → file path and kind of serialization, if they are not the default ``{item}_{rank}.pt``.
    """

    world_size: int
    groups: Mapping[str, Mapping[tuple[Any, ...], list[Any]]]
    files: Mapping[str, Mapping[int, tuple[str, str]]] = field(default_factory=dict)
    _positions: dict[int, tuple[object, dict[int, int]]] = field(default_factory=dict)  # of lists that many share

    def group(self, item: str, path: tuple[Any, ...], rank: int) -> Any:
        """Return the sharding metadata of a tensor for one rank, or ``None``."""
        for one in self.groups.get(item, {}).get(path, ()):
            ranks = one.get("ranks") if isinstance(one, dict) else None
            if isinstance(ranks, (tuple, list)) and self.position(ranks, rank) is not None:
                return one.get("sharding_metadata")
        return None

    def position(self, ranks: Sequence[object], rank: int) -> int | None:
        """Return the position of a rank in a list that thousands of tensors share, or ``None``."""
        known = self._positions.get(id(ranks))
        if known is None:
            where = {one: at for at, one in enumerate(ranks) if isinstance(one, int)}
            known = self._positions[id(ranks)] = ranks, where  # held, so that no other list gets its id
        return known[1].get(rank)


def read(place: Place) -> SaveMetadata | None:
    """Read the file; ``None`` if there is none.

    Raises:
        CorruptError: it is damaged, or was not written by the library.
        UnsafeError: it is far larger when decoded.
        UnsupportedFormatError: a version that this reader does not know.
    """
    if NAME not in place.files:
        return None
    what = repr(NAME)
    document = unpickle.loads(place.read(NAME), what=what)
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        raise CorruptError(f"{what} holds no dict of metadata")
    version, world = document.get("version", "1.0"), document.get("world_size")
    if version not in VERSIONS:
        raise UnsupportedFormatError(f"{what} has version {short(version)}; this workbench reads {VERSIONS}")
    if type(world) is not int or not 0 < world <= MAX_RANKS:
        raise CorruptError(f"{what} has the world size {short(world)}")
    return _grouped(document, world, what) if version == "1.0" else _nested(document, world, what)


def _nested(document: Mapping[str, Any], world: int, what: str) -> SaveMetadata:
    groups: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
    files: dict[str, dict[int, tuple[str, str]]] = {}
    for item, item_metadata in document["metadata"].items():
        paths = item_metadata.get("nested_path_to_metadata") if isinstance(item_metadata, dict) else None
        if type(item) is not str or not isinstance(paths, dict):
            raise CorruptError(f"{what} has an item without paths: {short(item)}")
        groups[item] = {_path(text, what): _list(found, what) for text, found in paths.items()}
        for rank, layout in _dict(item_metadata.get("rank_to_layout_info"), what).items():
            _file(files, item, rank, layout, what)
    return SaveMetadata(world, groups, files)


def _grouped(document: Mapping[str, Any], world: int, what: str) -> SaveMetadata:
    groups: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
    files: dict[str, dict[int, tuple[str, str]]] = {}
    for text, found in document["metadata"].items():
        item, *path = _path(text, what) or ("",)
        if type(item) is not str:
            raise CorruptError(f"{what} has a path that begins with no item: {short(text)}")
        groups.setdefault(item, {})[tuple(path)] = _list(found, what)
    for rank, layouts in _dict(document.get("rank_to_layout_info_mappings"), what).items():
        for item, layout in _dict(layouts, what).items():
            _file(files, item, int(rank) if isinstance(rank, str) and rank.isdecimal() else rank, layout, what)
    return SaveMetadata(world, groups, files)


def _file(files: dict[str, dict[int, tuple[str, str]]], item: object, rank: object, layout: object, what: str) -> None:
    if layout is None:
        return
    layout_info = layout if isinstance(layout, dict) else {}
    path, kind = layout_info.get("file_path"), _dict(layout_info.get("serialization_format") or {}, what).get("type")
    if type(item) is not str or type(rank) is not int or type(path) is not str or type(kind) is not str:
        raise CorruptError(f"{what} has an invalid layout of item {short(item)} for rank {short(rank)}")
    files.setdefault(item, {})[rank] = path, kind


def _path(text: object, what: str) -> tuple[Any, ...]:
    if type(text) is not str:
        raise CorruptError(f"{what} has a path that is not text: {short(text)}")
    path = jsonsafe.loads(text.encode("utf-8", "surrogatepass"), what=f"a path of {what}")
    if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
        raise CorruptError(f"{what} has an invalid path {quoted(text)}")
    return tuple(path)


def _dict(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise CorruptError(f"{what} has a layout that is not a dict")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise CorruptError(f"{what} has a path whose groups are not a list")
    return list(value)
