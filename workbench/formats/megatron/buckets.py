"""Name the contents of a ``torch_dist`` checkpoint's distributed optimizer buckets (``dp_reshardable``).

::

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg   (n,)
                                       │          │                                            │
        TP × PP group, TP fastest ─────┘          └ buffer: model chunk, then dtype            └ gradient bucket

    │ output_layer │ ░ │ final_layernorm │ ░ │ layers.3.mlp.linear_fc2 │ …        chunk per parameter, hole and DP rank

The file stores no names. Parameters are in reverse model order, each at a multiple of 64 elements. The model's order
follows from how Megatron registers its modules (model.py). A candidate order is accepted only if it fills every bucket
to the element and every parameter begins and ends at chunk boundaries. Otherwise the buckets stay as stored, without
names. Holes are uninitialized memory and belong to no tensor here.

Read from megatron-core 0.16.1 and 0.20.0dev (``core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box, codecs
from workbench.core.arrays import Array
from workbench.core.box import row_major
from workbench.core.build import CatalogBuilder
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ITEMSIZE, DType
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.flat import fill_buckets
from workbench.formats.megatron.model import Param, StageModel
from workbench.names.roles import STATES

_BUCKET = re.compile(
    r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d{1,9})\.gbuf_idx_(\d{1,9})\.dtype_\((.+?), .+?\)"
    r"\.bucket_idx_(\d{1,9})\.(\w+)"
)


@dataclass(frozen=True, eq=False)
class Named:
    """Optimizer tensors by name, and the positions of their buckets."""

    catalog: Catalog
    buckets: Array


def named_buckets(place: Place, catalog: Catalog, run: RunArgs, notes: list[str]) -> Named | None:
    """Return the optimizer's tensors, cut out of its buckets, or ``None`` if there are no buckets to name.

    Args:
        catalog: the checkpoint with one tensor per layer, and names.
        notes: receives a sentence about buckets that stay without names.
    """
    buffers: dict[tuple[str, int], dict[int, dict[str, dict[int, int]]]] = {}
    dtypes: dict[tuple[str, int, int], str] = {}
    for tensor, key in enumerate(catalog.keys):
        match = _BUCKET.fullmatch(key) if key.startswith(("optimizer.distributed.", "chained_")) else None
        if match is not None:
            chain, group, buffer, bucket = match[1], int(match[2]), int(match[3]), int(match[5])
            states = buffers.setdefault((chain, group), {}).setdefault(buffer, {})
            states.setdefault(match[6], {})[bucket] = tensor
            dtypes[chain, group, buffer] = match[4].removeprefix("torch.")
    if not buffers:
        return None
    stages = layout.stage_layers(run)
    if stages is None:
        notes.append(
            f"the optimizer's {plural(sum(map(len, buffers.values())), 'buffer', 'have')} no names: args do not store "
            "which layers a pipeline stage holds"
        )
        return None
    model = StageModel(catalog, run, stages)
    cutter = _Cutter(place, catalog)
    lost: list[str] = []
    used: list[int] = []
    for (chain, group), by_buffer in sorted(buffers.items()):
        seen: dict[str, int] = defaultdict(int)
        for buffer, states in sorted(by_buffer.items()):
            dtype = dtypes[chain, group, buffer]
            nth, seen[dtype] = seen[dtype], seen[dtype] + 1
            layout_ = _fit(catalog, model, group, nth, dtype, states)
            if layout_ is None:
                lost.append(f"{chain}dp_group_idx_{group}.gbuf_idx_{buffer}")
                continue
            used += [tensor for tensors in states.values() for tensor in tensors.values()]
            cutter.add(states, *layout_)
    if lost:
        notes.append(
            f"{plural(len(lost), 'optimizer buffer', 'stay')} without names, first {lost[0]!r}: "
            "Megatron's order of parameters does not fill their buckets to the element"
        )
    notes += _absent(buffers, run)
    if not used:
        return None
    return Named(cutter.build(), np.array(sorted(used), np.int64))


def _absent(buffers: Mapping[tuple[str, int], Any], run: RunArgs) -> list[str]:
    """Return a note if model-parallel groups of the first optimizer have no buffers."""
    groups = {group for chain, group in buffers if chain in ("", "chained_0.")}
    tp, pp = run.known("tp"), run.known("pp")
    lost = [(group % tp, group // tp) for group in range(min(tp * pp, 1 << 20)) if group not in groups]
    if not lost:
        return []
    return [f"optimizer state of {len(lost)} of {tp * pp} (tp, pp) groups is missing, first {lost[0]}: holes"]


def _fit(
    catalog: Catalog, model: StageModel, group: int, nth: int, dtype: str, states: Mapping[str, Any]
) -> tuple[list[Param], list[tuple[int, int]]] | None:
    """Return the first candidate order that fills the buckets of every state, and each parameter's bucket and start."""
    buckets = [sorted(tensors) for tensors in states.values()]
    if any(ids != list(range(len(ids))) or ids != buckets[0] for ids in buckets):
        return None
    tables = list(states.values())
    sizes = [int(catalog.shape[tables[0][k], 0]) for k in buckets[0]]
    if any(int(catalog.shape[table[k], 0]) != sizes[k] for table in tables for k in table):
        return None
    edges = [_edges(catalog, tables[0][k]) for k in buckets[0]]
    for params in model.candidates(group, nth, dtype):
        places = fill_buckets([param.numel for param in params], sizes)
        if places is None:
            continue
        if all(
            start in edges[bucket] and start + param.numel in edges[bucket]
            for param, (bucket, start) in zip(params, places, strict=True)
        ):
            return params, places
    return None


def _edges(catalog: Catalog, tensor: int) -> set[int]:
    rows = catalog.rows_of(tensor)
    starts = catalog.offsets[rows, 0]
    return {0, int(catalog.shape[tensor, 0]), *starts.tolist(), *(starts + catalog.sizes[rows, 0]).tolist()}


class _Cutter:
    """Collects runs of buckets as boxes of named tensors, then joins all of them with the chunks."""

    def __init__(self, place: Place, catalog: Catalog) -> None:
        self.catalog = catalog
        self.builder = CatalogBuilder(
            catalog.format, place, files={name: position for position, name in enumerate(catalog.files)}
        )
        self.ids: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)  # (state, dtype) → parameter → tensor
        self.runs: list[Array] = []  # (N, 4): bucket, start, stop, target
        self.sizes: list[tuple[int, ...]] = []
        self.offsets: list[tuple[int, ...]] = []
        self.of: list[Array] = []  # index into `sizes` and `offsets` of a run; all states share them

    def add(
        self, states: Mapping[str, Mapping[int, int]], params: Sequence[Param], places: Sequence[tuple[int, int]]
    ) -> None:
        """Add all states of one buffer."""
        rows: list[tuple[int, int, int, int]] = []
        begin = len(self.sizes)
        for position, (param, (bucket, at)) in enumerate(zip(params, places, strict=True)):
            for numel, sizes, offsets in param.parts:
                rows.append((bucket, at, at + numel, position))
                self.sizes.append(sizes)
                self.offsets.append(offsets)
                at += numel
        table = np.array(rows, np.int64)
        for state, buckets in states.items():
            tensors = np.array([buckets[bucket] for bucket in range(len(buckets))], np.int64)
            targets = np.array(self._targets(state, params, self.catalog.dtype_of(buckets[0])), np.int64)
            self.runs.append(np.stack([tensors[table[:, 0]], table[:, 1], table[:, 2], targets[table[:, 3]]], axis=1))
            self.of.append(np.arange(begin, len(self.sizes)))

    def _targets(self, state: str, params: Sequence[Param], dtype: DType) -> list[int]:
        role = "master" if state == "param" else STATES.get(state, "other")
        known = self.ids[state, dtype.code]
        for _, name, shape, *_ in params:
            if name not in known:
                known[name] = self.builder.tensor(f"optimizer.state.{state}.{name}", dtype, shape, fqn=name, role=role)
        return [known[param.target] for param in params]

    def build(self) -> Catalog:
        """Return the catalog of the named tensors, with replicas numbered by rank."""
        c = self.catalog
        runs, of = np.concatenate(self.runs), np.concatenate(self.of)
        dims = max([1, *map(len, self.sizes)])
        shapes, base = _padded(self.sizes, dims, 1)[of], _padded(self.offsets, dims, 0)[of]
        tensors = box.distinct(runs[:, 0])
        rows = np.concatenate([np.arange(c.row_ptr[t], c.row_ptr[t + 1]) for t in tensors.tolist()])
        start, stop = c.offsets[rows, 0], c.offsets[rows, 0] + c.sizes[rows, 0]
        which, hit = box.group_join(
            runs[:, 0],
            runs[:, 1:2],
            runs[:, 2:3] - runs[:, 1:2],
            c.tensor[rows],
            start[:, None],
            (stop - start)[:, None],
        )
        low = np.maximum(runs[which, 1], start[hit]) - runs[which, 1]
        high = np.minimum(runs[which, 2], stop[hit]) - runs[which, 1]
        index, offsets, sizes, at = box.flat_ranges(shapes[which], low, high)
        run, row = which[index], rows[hit[index]]
        itemsize = ITEMSIZE[c.dtype[c.tensor[row]]]
        inner = (runs[run, 1] + at - c.offsets[row, 0]) * itemsize + (0 if c.inner is None else c.inner[row])
        self.builder.block(
            runs[run, 3],
            offsets + base[run],
            sizes,
            c.file[row],
            c.start[row],
            c.stop[row],
            codec=codecs.PART[c.codec[row]],
            rank=c.rank[row],
            inner=inner,
            strides=row_major(shapes)[run],
        )
        return self.builder.build(named=True)


def _padded(rows: Sequence[tuple[int, ...]], dims: int, fill: int) -> Array:
    return np.array([(*row, *([fill] * (dims - len(row)))) for row in rows], np.int64).reshape(len(rows), dims)
