"""safetensors files of local tensors, one per rank, with metadata of the boxes of global tensors that they hold.

::

    model-rank-00000-of-00002.safetensors   __metadata__: "world_size": "2", "rank": "0", "mesh": "tp=2",
    model-rank-00001-of-00002.safetensors                 "workbench.boxes": {name: {"shape": […], "boxes": [
                                                              [offsets in it, sizes, offsets in the stored tensor]]}}

    gate_up (8, h) under tp=2      rank 0 stores (4, h): rows 0:2 at 0, rows 4:6 at 2

Written by :mod:`workbench.export.writers.ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from workbench.core import catalog as cat
from workbench.core import jsonsafe
from workbench.core.build import CatalogBuilder
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError
from workbench.formats.safetensors.header import Entry, Header

KEY = "workbench.boxes"
MAX_RANKS = 1 << 20


def says_boxes(headers: Mapping[str, Header]) -> bool:
    """Return whether any of the files has metadata of its boxes."""
    return any(KEY in header.metadata for header in headers.values())


def add_boxes(builder: CatalogBuilder, headers: Mapping[str, Header], notes: list[str]) -> dict[str, Any]:
    """Add the tensors of all files; each box is a chunk of its rank.

    Returns:
        Facts for the catalog: world size, mesh, and incomplete ranks.

    Raises:
        CorruptError: files contradict each other or themselves; the message names the file and the tensor.
    """
    whole: dict[str, tuple[tuple[int, ...], str]] = {}
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    ranks: dict[str, int] = {}
    for file, header in headers.items():
        ranks[file] = rank = _number(file, header, "rank")
        document = jsonsafe.loads(header.metadata.get(KEY, "").encode(), what=f"{KEY} of {file!r}")
        for entry in header.entries:
            shape, boxes = _boxes(file, entry, document.get(entry.name) if isinstance(document, dict) else None)
            known, first = whole.setdefault(entry.name, (shape, file))
            if known != shape:
                raise CorruptError(f"tensor {entry.name!r} is {known} in {first!r} and {shape} in {file!r}")
            builder.tensor(entry.name, entry.dtype, shape)
            steps = cat.row_major(entry.shape)
            for offsets, sizes, at in boxes:
                start = entry.start + sum(a * s for a, s in zip(at, steps, strict=True)) * entry.dtype.itemsize
                builder.chunk(entry.name, offsets, sizes, file, start, entry.stop, rank=rank, strides=steps)
                held.setdefault(entry.name, set()).add((offsets, sizes))
    worlds = {_number(file, header, "world_size") for file, header in headers.items()}
    if len(worlds) > 1 or max(ranks.values()) >= max(worlds):
        raise CorruptError(
            f"the files are from jobs of {', '.join(map(str, sorted(worlds)))} ranks, with the highest rank "
            f"{max(ranks.values())}; they are from different exports"
        )
    world = worlds.pop()
    return {"world_size": world, **_absent(world, set(ranks.values()), whole, held, notes), **_mesh(headers, ranks)}


def _boxes(
    file: str, entry: Entry, metadata: object
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]:
    """Return an entry's global shape, and its boxes: offsets, sizes, offsets in the stored tensor."""
    shape = _ints(metadata.get("shape")) if isinstance(metadata, dict) else None
    rows = metadata.get("boxes") if isinstance(metadata, dict) else None
    boxes, count = [], 0
    for row in rows if isinstance(rows, list) else [None]:
        columns = [_ints(column) for column in row] if isinstance(row, list) and len(row) == 3 else [None]
        offsets, sizes, at = columns if len(columns) == 3 else (None, None, None)
        if shape is None or offsets is None or sizes is None or at is None:
            raise CorruptError(f"{KEY} of {file!r} has no valid boxes of tensor {entry.name!r}")
        dims = {len(shape), len(offsets), len(sizes), len(at), len(entry.shape)}
        inside = len(dims) == 1 and all(a + n <= size for a, n, size in zip(at, sizes, entry.shape, strict=True))
        if not inside or not all(a + n <= size for a, n, size in zip(offsets, sizes, shape, strict=True)):
            raise CorruptError(f"{KEY} of {file!r} has a box of tensor {entry.name!r} outside of it")
        boxes.append((offsets, sizes, at))
        count += prod(sizes)
    if shape is None or count != prod(entry.shape):
        raise CorruptError(
            f"{KEY} of {file!r} has boxes of {plural(count, 'element')} of tensor {entry.name!r}, which has "
            f"{prod(entry.shape):,} there"
        )
    return shape, boxes


def _ints(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 55 for one in value):
        return None
    return tuple(value)


def _number(file: str, header: Header, name: str) -> int:
    text = header.metadata.get(name, "")
    if not re.fullmatch(r"\d{1,7}", text) or int(text) > MAX_RANKS:
        raise CorruptError(f"{file!r} has no {name} in its __metadata__, unlike the other files of the export")
    return int(text)


def _absent(
    world: int,
    ranks: set[int],
    whole: Mapping[str, tuple[tuple[int, ...], str]],
    held: Mapping[str, set[tuple[tuple[int, ...], tuple[int, ...]]]],
    notes: list[str],
) -> dict[str, Any]:
    """Report ranks without a file: a note if copies replace them, otherwise the checkpoint is incomplete."""
    absent = [rank for rank in range(world) if rank not in ranks]
    if not absent:
        return {}
    text = f"{len(absent):,} of {world:,} ranks have no file: {some_of(absent, 5)}"
    for name, (shape, _) in whole.items():
        have = sum(prod(sizes) for _, sizes in held.get(name, ()))
        if have < prod(shape):
            lost = f"{text}; of tensor {name!r} {have:,} of {prod(shape):,} elements are stored"
            return {"incomplete": f"{lost}. Copy the other files here, or open the rest with partial=True"}
    notes.append(f"{text}; other files hold copies of all listed tensors")
    return {}


def _mesh(headers: Mapping[str, Header], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the mesh axes and each file's coordinate, if all files agree."""
    texts = {header.metadata.get("mesh", "") for header in headers.values()}
    text = texts.pop()
    axes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d{1,7})", text)}
    if texts or not axes:
        return {}
    found = {}
    for file, rank in ranks.items():
        coordinate, rest = {}, rank
        for name, size in reversed(axes.items()):
            coordinate[name], rest = rest % max(size, 1), rest // max(size, 1)
        found[file] = dict(reversed(coordinate.items()))
    return {"mesh": {"axes": axes, "ranks": found, "unknown": [], "source": "__metadata__ of the files"}}
