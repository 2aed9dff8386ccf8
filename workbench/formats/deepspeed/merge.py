"""Merge model-parallel ranks: join pieces of a parameter and number copies of a parameter as replicas.

::

    mp_rank = stage × tp + tensor-parallel rank         stored: checkpoint_parallel_dimensions {pp_degree, tp_degree}
    fp32.mp_rank_00.wqkv  (96, 64) ┐
    fp32.mp_rank_01.wqkv  (96, 64) ┴─▶ fp32.wqkv (192, 64)       by universal_checkpoint_info's patterns
    fp32.mp_rank_00.tied  ┐
    fp32.mp_rank_03.tied  ┴──────────▶ fp32.tied, two replicas   tied between the first and the last stage

How tensor-parallel ranks divide a parameter is stored only as ``universal_checkpoint_info`` (regular expressions over
names). Without it, the pieces keep separate keys; nothing is guessed. Rules as in ``checkpoint/ds_to_universal.py`` of
deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.pickles.standins import Opaque
from workbench.core.rebox import ComposedBox, Composition, compose
from workbench.core.words import plural
from workbench.formats.deepspeed.files import items

#: Regular expressions as DeepSpeed's integrations write them. Others are not run, as an expression in a checkpoint
#: could take forever.
_PLAIN = re.compile(r"\^?(?:\\[dw][+*]?|\.[+*]?|\[0-9\][+*]?|\\[.\-_/]|[\w\-/:])*\$?")
MAX_PATTERN = 300
Names = Mapping[tuple[str, str], Mapping[int, str]]


@dataclass(frozen=True)
class Dims:
    """Stages and tensor-parallel ranks; ``tp`` is ``None`` if no file stores it."""

    pp: int | None
    tp: int | None
    source: str


def unify(
    catalog: Catalog, names: Names, dims: Dims, info: object, mp_of_file: Sequence[int]
) -> tuple[Catalog, list[str]]:
    """Return the catalog with unified names: ``state.name`` where it is certain what a parameter's ranks hold.

    Args:
        names: ``(state, name)`` → model-parallel rank → key in ``catalog``.
        info: ``universal_checkpoint_info``, or ``None``.
        mp_of_file: model-parallel rank of each file, -1 for files without one.
    """
    renamed: dict[str, str] = {}
    targets: list[Composition] = []
    copies: list[dict[int, int]] = []
    unjoined: list[str] = []
    used: set[str] = set()
    rules = _Rules(info)
    for (state, name), where in names.items():
        key = f"{state}.{name}"
        if len(where) == 1:
            renamed[next(iter(where.values()))] = key
            continue
        made = _target(catalog, key, name, where, dims, rules)
        if made is None:
            unjoined.append(name)
        else:
            targets.append(made[0])
            copies.append(made[1])
            used.update(where.values())
    rest = catalog.take(np.array([t for t, key in enumerate(catalog.keys) if key not in used], np.int64))
    rest = replace(rest, keys=[renamed.get(key, key) for key in rest.keys])
    notes = []
    if unjoined:
        count = len(dict.fromkeys(unjoined))
        notes.append(
            f"{plural(count, 'parameter', 'have')} pieces on several model-parallel ranks, and no file stores how they "
            f"were divided (no universal_checkpoint_info): each piece is a separate tensor, such as {unjoined[0]!r}"
        )
    if not targets:
        return rest, notes
    joined = _numbered(compose(catalog, targets), copies, np.array(mp_of_file, np.int64))
    return _same_files([rest, joined], catalog), notes + rules.notes


def with_views(catalog: Catalog, aliases: Mapping[str, tuple[str, str, str]]) -> Catalog:
    """Add views to a catalog: key → ``(owner's key, fqn, role)``; each shows the first stored copy of its owner."""
    owners = sorted({catalog.index[owner] for owner, _, _ in aliases.values() if owner in catalog.index})
    narrow = _first_copies(catalog.take(np.array(owners, np.int64)))
    targets = []
    for key, (owner, fqn, role) in aliases.items():
        if owner in narrow.index and key not in catalog.index:
            shape = narrow.shape_of(narrow.index[owner])
            zero = (0,) * len(shape)
            piece = ComposedBox(narrow.index[owner], zero, shape, zero, tuple(range(len(shape))))
            targets.append(Composition(key, shape, [piece], fqn, role))
    return replace(catalog, views=compose(narrow, targets)) if targets else catalog


def _target(
    catalog: Catalog, key: str, name: str, where: Mapping[int, str], dims: Dims, rules: _Rules
) -> tuple[Composition, dict[int, int]] | None:
    """Return the tensor that several ranks' tensors form, and the copy that each rank's tensor belongs to."""
    if dims.tp is None:
        return None
    positions = {mp: catalog.index[local] for mp, local in where.items()}
    role = (catalog.roles or [])[next(iter(positions.values()))]
    stages = {stage: at for at, stage in enumerate(sorted({mp // dims.tp for mp in where}))}
    shapes = {mp: catalog.shape_of(position) for mp, position in positions.items()}
    if len({mp % dims.tp for mp in where}) == 1:  # the same tensor on several stages
        if len(set(shapes.values())) > 1:
            return None
        whole = shapes[min(where)]
        cuts = {mp: [(0, 0, whole[0] if whole else 0, 0)] for mp in where}
        copy = {mp: stages[mp // dims.tp] for mp in where}
    else:
        grid = [[shapes.get(stage * dims.tp + t) for t in range(dims.tp)] for stage in stages]
        if any(row != grid[0] or None in row for row in grid) or role == "buffer":
            return None
        found = rules.cut(name, [shape for shape in grid[0] if shape is not None])
        if found is None:
            return None
        whole, parts, same = found
        cuts = {mp: parts[mp % dims.tp] for mp in where}
        copy = {mp: stages[mp // dims.tp] * (dims.tp if same else 1) + (mp % dims.tp if same else 0) for mp in where}
    pieces = []
    for mp, position in positions.items():
        shape = shapes[mp]
        for axis, begin, size, at in cuts[mp]:
            offsets, target, sizes = [0] * len(shape), [0] * len(shape), list(shape)
            if shape:
                offsets[axis], target[axis], sizes[axis] = begin, at, size
            pieces.append(ComposedBox(position, tuple(offsets), tuple(sizes), tuple(target), tuple(range(len(shape)))))
    return Composition(key, whole, pieces, name, role), copy


class _Rules:
    """``universal_checkpoint_info``: the axis along which a parameter is divided, by patterns of its name."""

    def __init__(self, info: object) -> None:
        self.info: Mapping[Any, Any] | None = info if isinstance(info, Mapping) else None
        self.notes: list[str] = []

    def cut(
        self, name: str, shapes: list[tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[list[tuple[int, int, int, int]]], bool] | None:
        """Return ``(full shape, per rank (axis, begin, size, destination), whether all ranks hold the same)``."""
        if self.info is None:
            return None
        same = self._any("tp_replicated_parameter_patterns", name)
        averaged = self._any("parameter_to_average_patterns", name)
        if same or averaged:
            if len(set(shapes)) > 1:
                return None
            if averaged and not self.notes:
                self.notes.append(
                    f"each tensor-parallel rank keeps its own copy of {name!r} and others (DeepSpeed averages them "
                    "when it merges): they are replicas, which may differ"
                )
            shape = shapes[0]
            return shape, [[(0, 0, shape[0] if shape else 0, 0)] for _ in shapes], True
        axis, parts = 1 if self._any("parameter_with_row_parallelism_patterns", name) else 0, 1
        widths = self._widths(name, shapes)
        if widths is not None:
            axis, table = widths
        if any(len(shape) <= axis for shape in shapes):
            return None
        if widths is None:
            parts = 2 if self._any("parameter_with_2_sub_params_cat_dim_0", name) else 1
            if any(shape[axis] % parts for shape in shapes):
                return None
            table = [[shape[axis] // parts for shape in shapes] for _ in range(parts)]
        if any(shape[:axis] + shape[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :] for shape in shapes):
            return None
        cuts: list[list[tuple[int, int, int, int]]] = [[] for _ in shapes]
        used, at = [0] * len(shapes), 0
        for row in table:
            for rank, width in enumerate(row):
                cuts[rank].append((axis, used[rank], width, at))
                used[rank] += width
                at += width
        if used != [shape[axis] for shape in shapes]:
            return None
        return (*shapes[0][:axis], at, *shapes[0][axis + 1 :]), cuts, False

    def _widths(self, name: str, shapes: list[tuple[int, ...]]) -> tuple[int, list[list[int]]] | None:
        """Return the axis of a fused parameter, and the width of each of its parts on each rank."""
        assert self.info is not None
        for spec in items(self.info.get("parameter_with_sub_params")):
            spec = spec.state if isinstance(spec, Opaque) else spec
            if not isinstance(spec, Mapping) or not (pattern := _match(spec.get("patterns"), name)):
                continue
            axis, shape = spec.get("partition_dim"), spec.get("shape")
            if type(axis) is not int or not isinstance(shape, (list, tuple)) or not 0 <= axis < len(shape):
                return 0, []
            widths = self.info.get("sub_param_shard_widths")
            if isinstance(widths, Mapping) and pattern in widths:
                table = [list(items(row)) for row in items(widths[pattern])]
                fits = all(len(row) == len(shapes) and all(type(n) is int and n >= 0 for n in row) for row in table)
                return axis, table if fits else []
            total = sum(s[axis] if axis < len(s) else 0 for s in shapes)
            sizes = shape[axis]
            if type(sizes) is int:
                sizes = (total // sizes,) * sizes if 0 < sizes <= 64 and total % sizes == 0 else ()
            return axis, [[size // len(shapes)] * len(shapes) for size in items(sizes) if type(size) is int]
        return None

    def _any(self, kind: str, name: str) -> bool:
        assert self.info is not None
        return _match(self.info.get(kind), name) is not None


def _match(patterns: object, name: str) -> str | None:
    for pattern in items(patterns):
        plain = type(pattern) is str and len(pattern) <= MAX_PATTERN and _PLAIN.fullmatch(pattern)
        if plain and sum(map(pattern.count, "+*")) <= 3 and re.match(pattern, name):
            return str(pattern)
    return None


def _numbered(catalog: Catalog, copies: Sequence[Mapping[int, int]], mp_of_file: np.ndarray[Any, Any]) -> Catalog:
    """Number replicas so that copies of different ranks differ, whatever boxes each rank stores."""
    mp = mp_of_file[catalog.file]
    table = np.zeros((len(copies), int(mp_of_file.max(initial=0)) + 1), np.int64)
    for row, copy in enumerate(copies):
        for rank, number in copy.items():
            table[row, rank] = number
    step = int(catalog.replica.max(initial=0)) + 1
    number = table[catalog.tensor, mp] * step + catalog.replica
    return replace(catalog, replica=number.astype(np.int16))


def _same_files(parts: Sequence[Catalog], whole: Catalog) -> Catalog:
    """Return one catalog of several over the same list of files."""
    joined = merge(whole.format, [("", "", replace(part, views=None)) for part in parts], whole.meta)
    return replace(
        joined,
        file=joined.file % np.int32(max(1, len(whole.files))),
        files=whole.files,
        file_stats=whole.file_stats,
        metadata_files=whole.metadata_files,
        objects=whole.objects,
    )


def _first_copies(catalog: Catalog) -> Catalog:
    rows = np.flatnonzero(catalog.replica == 0)
    counts = np.bincount(catalog.tensor[rows], minlength=len(catalog))
    names = ("offsets", "sizes", "file", "start", "stop", "codec", "rank", "replica", "inner", "strides")
    columns: dict[str, Any] = {n: None if getattr(catalog, n) is None else getattr(catalog, n)[rows] for n in names}
    return replace(catalog, row_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), **columns)
