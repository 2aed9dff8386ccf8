"""ZeRO's flat partitions as boxes of the parameters they belong to.

::

    model_states  param_shapes [{"wte": (509, 64), …}, {"ln_f": (64,)}]      the true order
    optim_states  rank 0: fp32 [flat, flat]  exp_avg [flat, flat] …          one catalog row per box:
                  rank 1: fp32 [flat, flat]  exp_avg [flat, flat] …            fp32.wte rows 0:253 → rank 0, byte …

``param_slice_mappings`` names parameters too, but in the wrong order with ``round_robin_gradients`` (deepspeed 0.19.8).
It is only compared, never used. Arithmetic: flat.py; one file: optim.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core import codecs
from workbench.core.build import CatalogBuilder
from workbench.core.place import Place, lacking
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, IncompleteError, UnsafeError
from workbench.formats.deepspeed import flat
from workbench.formats.deepspeed.files import FileDecoder, Located
from workbench.formats.deepspeed.names import Folder, global_expert, local_experts, ranks_of_expert_group
from workbench.formats.deepspeed.optim import MASTER, RankShard, read_shard
from workbench.names.roles import STATES

Shapes = Mapping[str, tuple[int, ...]]
MAX_PIECES = 200_000_000


@dataclass
class Partitions:
    """The optimizer files of one model-parallel rank.

    Attributes:
        shards: by data-parallel rank; ``None`` for a missing file.
        files: their names, also of missing ones.
        lost: ranks whose files are missing.
        extra: files of ranks beyond ``partition_count``, left over from another save.
    """

    mp: int
    shards: list[RankShard | None]
    files: list[str]
    lost: list[int]
    extra: list[str]
    steps: set[int] = field(default_factory=set)

    @property
    def first(self) -> RankShard:
        """The first shard that exists; all have the same structure."""
        return next(shard for shard in self.shards if shard is not None)


def read_partitions(place: Place, folder: Folder, mp: int) -> Partitions | None:
    """Read all optimizer files of one model-parallel rank; ``None`` if there are none.

    Raises:
        CorruptError: the files contradict each other about the number of ranks or groups.
        IncompleteError: too many files are missing to use the rest.
    """
    found = {dp: file for (m, dp), file in sorted(folder.optims.items()) if m == mp}
    if not found:
        return None
    decoder = FileDecoder(place)
    shards = {dp: read_shard(decoder.read(file)) for dp, file in found.items()}
    count = max(shards[min(shards)].counts)
    extra = [found[dp] for dp in found if dp >= count]
    kept = {dp: shard for dp, shard in shards.items() if dp < count}
    first = kept[min(kept)] if kept else shards[min(shards)]
    for shard in kept.values():
        if (shard.counts, shard.stage3) != (first.counts, first.stage3) or shard.groups != first.groups:
            raise CorruptError(
                f"{shard.file!r} has {max(shard.counts)} ranks and {shard.groups} groups, but {first.file!r} has "
                f"{max(first.counts)} and {first.groups}; the files are from different saves"
            )
    lost = [dp for dp in range(count) if dp not in kept]
    if len(lost) > len(kept):
        raise IncompleteError(
            f"{lacking(len(lost), count, f'optimizer files of mp_rank {mp:02d}')}, data-parallel ranks "
            f"{some_of(lost, 8)}; copy them here or save again"
        )
    stem = first.file.replace(f"zero_pp_rank_{min(kept)}_", "zero_pp_rank_{}_", 1)
    files = [kept[dp].file if dp in kept else stem.replace("{}", str(dp), 1) for dp in range(count)]
    steps = {step for shard in kept.values() for step in shard.steps}
    return Partitions(mp, [kept.get(dp) for dp in range(count)], files, lost, extra, steps)


def count_ranks(place: Place, folder: Folder) -> int | None:
    """Return the data-parallel ranks stored in one optimizer file; ``None`` if there is none. See `read_partitions`."""
    if not folder.optims:
        return None
    return max(read_shard(FileDecoder(place).read(folder.optims[min(folder.optims)])).counts)


def add_partitions(
    builder: CatalogBuilder, parts: Partitions, shapes: Sequence[Shapes], key: Any, *, rank: bool, data_first: bool
) -> list[str]:
    """Declare every parameter's flat states and locate their boxes.

    Args:
        shapes: ``param_shapes``, one dict of name → shape per group.
        key: ``(state, name)`` → stored key.
        rank: whether the data-parallel rank is the rank of the job.
        data_first: ``use_data_before_expert_parallelism`` of the config.

    Returns:
        notes.

    Raises:
        CorruptError: ``param_shapes`` does not add up to the partitions; the message has the numbers.
    """
    adder = _Adder(builder, parts, key, rank)
    first = parts.first
    if first.stage3:
        names = [name for group in shapes for name in group]
        adder.stage3(names, [group[name] for group in shapes for name in group])
        return adder.notes
    if len(shapes) != first.groups:
        raise CorruptError(
            f"param_shapes has {plural(len(shapes), 'group')}, but {first.file!r} has {first.groups}; model and "
            "optimizer files are from different saves"
        )
    world = len(parts.shards)
    for group, named in enumerate(shapes):
        count = first.counts[group]
        if count == world:
            adder.line(group, list(named), list(named.values()), np.arange(world))
            continue
        if world % count:
            raise CorruptError(
                f"{first.file!r}: {plural(count, 'rank', 'share')} group {group}, but {count} does not divide "
                f"{world} ranks"
            )
        local = local_experts(named)
        for expert in range(world // count):
            ranks = ranks_of_expert_group(world, count, expert, data_first)
            renamed = [global_expert(name, expert, local) for name in named]
            if None in renamed:
                adder.notes.append(
                    f"group {group} is shared by {count} of {world} ranks each, but its names do not distinguish the "
                    f"experts: {next(n for n, r in zip(named, renamed, strict=True) if r is None)!r}; it is left out"
                )
                break
            adder.line(group, [str(name) for name in renamed], list(named.values()), np.array(ranks))
    return adder.notes


class _Adder:
    """Adds groups of one model-parallel rank to a builder."""

    def __init__(self, builder: CatalogBuilder, parts: Partitions, key: Any, rank: bool) -> None:
        self.builder, self.parts, self.key, self.rank = builder, parts, key, rank
        self.keys: dict[str, dict[str, str]] = {}
        self.notes: list[str] = []
        self.file_ids = np.array([builder.file(file) for file in parts.files], np.int64)

    def stage3(self, names: list[str], shapes: list[tuple[int, ...]]) -> None:
        first, world = self.parts.first, len(self.parts.shards)
        numel = flat.counted(names, shapes)
        if len(names) * world > MAX_PIECES:
            raise UnsafeError(
                f"{plural(len(names), 'parameter')} over {plural(world, 'rank', 'are')} more than {MAX_PIECES:,} pieces"
            )
        segments = np.array([_master(first, group) for group in range(first.groups)], np.int64)
        flat.check_param(numel, segments, world, f"mp_rank {self.parts.mp:02d}")
        ranges = flat.by_param(numel, segments, world)
        self._emit(names, shapes, ranges, range(first.groups))

    def line(self, group: int, names: list[str], shapes: list[tuple[int, ...]], ranks: Any) -> None:
        shards = [self.parts.shards[r] for r in ranks.tolist()]
        present = [shard for shard in shards if shard is not None]
        first = present[0] if present else self.parts.first
        numel = flat.counted(names, shapes)
        pads = np.zeros(len(names), np.int64)
        if first.aligned is not None and any(first.aligned[group]):
            if len(first.aligned[group]) != len(names):
                raise CorruptError(
                    f"{first.file!r}: param_alignment_paddings of group {group} has {len(first.aligned[group])} "
                    f"entries for {plural(len(names), 'parameter')}"
                )
            pads[:] = first.aligned[group]
        need = int((numel + pads).sum())
        padding = sum(s.padding(group) for s in present) if len(present) == len(shards) and first.paddings else None
        part = _part(present or [first], group, len(ranks), need, padding)
        what = f"group {group} of mp_rank {self.parts.mp:02d}"
        flat.check_line(need, part, len(ranks), padding, what)
        ranges = flat.by_line(numel, pads, part, ranks, group)
        if len(ranks) == len(shards) == len(self.parts.shards):
            self._compare_order(group, names, ranges)
        self._emit(names, shapes, ranges, [group])

    def _compare_order(self, group: int, names: list[str], ranges: flat.Ranges) -> None:
        """Note if ``param_slice_mappings`` lists others than a rank holds: tools that trust it scramble parameters."""
        by_rank = np.argsort(ranges.rank, kind="stable")
        edges = np.searchsorted(ranges.rank[by_rank], np.arange(len(self.parts.shards) + 1))
        for rank, shard in enumerate(self.parts.shards):
            order = shard.order[group] if shard is not None and shard.order and group < len(shard.order) else []
            held = [names[param] for param in ranges.param[by_rank[edges[rank] : edges[rank + 1]]]]
            if order and order != held and not any("round_robin" in note for note in self.notes):
                self.notes.append(
                    f"{self.parts.files[rank]!r}: the order of group {group} in param_slice_mappings differs from "
                    "param_shapes, which is right (a bug of deepspeed with round_robin_gradients); "
                    "ds_to_universal.py would scramble these parameters"
                )

    def _emit(self, names: list[str], shapes: list[tuple[int, ...]], ranges: flat.Ranges, groups: Any) -> None:
        """Add rows of every state for the same ranges; boxes are computed once."""
        reach = _reach(ranges, len(self.parts.shards), self.parts.first.groups)
        tables = {}
        for state in dict.fromkeys(state for shard in self.parts.shards if shard is not None for state in shard.flat):
            table = _RangeTable(self.parts, state, reach, groups)
            if table.dtype is None:
                continue
            bare = np.flatnonzero(((reach > 0) & ~table.present).any(axis=1))
            if len(bare):
                self.notes.append(
                    f"{state} is not in the files of data-parallel ranks {some_of(bare.tolist(), 8)}: holes"
                )
            role = "master" if state == MASTER else STATES.get(state, "other")
            known = self.keys.setdefault(state, {})
            position = np.empty(len(names), np.int64)
            for at, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                if name in known:
                    raise CorruptError(f"param_shapes lists {name!r} twice; its partition is ambiguous")
                known[name] = self.key(state, name)
                position[at] = self.builder.tensor(known[name], table.dtype, shape, fqn=name, role=role)
            tables[state] = table, position
        for made in flat.boxes(ranges, shapes):
            for table, position in tables.values():
                present = table.present[made.rank, made.segment]
                rows = slice(None) if present.all() else present
                rank, segment = made.rank[rows], made.segment[rows]
                self.builder.block(
                    position[made.param[rows]],
                    made.offsets[rows],
                    made.sizes[rows],
                    self.file_ids[rank],
                    table.start[rank, segment],
                    table.stop[rank, segment],
                    codec=codecs.RAW_BE if table.big else codecs.RAW,
                    rank=rank if self.rank else -1,
                    inner=table.inner[rank, segment] + made.at[rows] * table.dtype.itemsize,
                )


class _RangeTable:
    """Byte ranges of one state's flat tensors, ``(ranks, groups)``; for missing files, what they must hold."""

    def __init__(self, parts: Partitions, state: str, reach: Any, groups: Any) -> None:
        shape = reach.shape
        self.start, self.stop, self.inner = (np.zeros(shape, np.int64) for _ in range(3))
        self.present = np.zeros(shape, bool)
        self.dtype: Any = None
        self.big = False
        absent = [rank for rank, shard in enumerate(parts.shards) if shard is None]
        for rank, shard in enumerate(parts.shards):
            for group in groups if shard is not None else ():
                part = shard.flat.get(state, [None] * shape[1])[group]  # type: ignore[union-attr]
                if part is None or not reach[rank, group]:
                    continue
                self._take(part, state, group, int(reach[rank, group]))
                self.start[rank, group], self.stop[rank, group] = part.start, part.stop
                self.inner[rank, group], self.present[rank, group] = part.inner, True
        if self.dtype is not None:
            for rank in absent:
                self.stop[rank], self.present[rank] = reach[rank] * self.dtype.itemsize, True

    def _take(self, part: Located, state: str, group: int, need: int) -> None:
        if self.dtype is None:
            self.dtype, self.big = part.dtype, part.big
        if (part.dtype, part.big) != (self.dtype, self.big):
            raise CorruptError(
                f"{part.file!r}: {state} of group {group} is {part.dtype}, but {self.dtype} on other ranks"
            )
        if part.shape[0] < need:
            raise CorruptError(
                f"{part.file!r}: {state} of group {group} has {plural(part.shape[0], 'element')}, "
                f"{need - part.shape[0]:,} fewer than the {need:,} that param_shapes needs; the file is from another "
                "save"
            )


def _reach(ranges: flat.Ranges, ranks: int, groups: int) -> Any:
    """Return the minimum number of elements of each flat tensor, ``(ranks, groups)``."""
    reach = np.zeros((ranks, groups), np.int64)
    np.maximum.at(reach, (ranges.rank, ranges.segment), ranges.at + ranges.stop - ranges.start)
    return reach


def _part(shards: Sequence[RankShard], group: int, ranks: int, need: int, padding: int | None) -> int:
    """Return the elements of a rank's share, including padding.

    A rank without padding shows it. If all have padding, the share is the longest tensor, or all were stripped.
    """
    plain = [shard.length(group) for shard in shards if not shard.padding(group)]
    if plain:
        return max(plain)
    cut = max(shard.length(group) + shard.padding(group) for shard in shards)
    return cut if cut * ranks - need == padding else max(shard.length(group) for shard in shards)


def _master(shard: RankShard, group: int) -> int:
    part = shard.flat[MASTER][group]
    return part.shape[0] if part is not None else 0
