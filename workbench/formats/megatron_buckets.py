"""The distributed optimizer's buckets of a ``torch_dist`` checkpoint (``dp_reshardable``), with names.

::

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg   (n,)
                                       │          │                                            │
        TP × PP group, TP fastest ─────┘          └ buffer: model chunk, then dtype            └ gradient bucket

    │ output_layer │ ░ │ final_layernorm │ ░ │ layers.3.mlp.linear_fc2 │ …        a chunk a parameter, hole and DP rank

No name is in the file. Parameters lie in reverse model order, each on a multiple of 64 elements; the model's order
follows from how Megatron registers its modules. A candidate order counts only if every bucket is filled to the
element and every parameter begins and ends where chunks do; else the buckets stay as they are stored, without names.
Holes are uninitialised memory and belong to no tensor here.

Read from megatron-core 0.16.1 and 0.20.0dev (``core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from workbench import naming
from workbench.core import box
from workbench.core.build import CatalogBuilder, row_major
from workbench.core.catalog import CODECS, TORCH_PART, TORCH_ZIP, ZSTD_TORCH_PART, ZSTD_TORCH_ZIP, Catalog
from workbench.core.dtypes import ALL, DType
from workbench.core.place import Place
from workbench.formats import megatron_layout as layout
from workbench.formats.megatron_boxes import expert_names
from workbench.formats.megatron_layout import Run, Split

__all__ = ["Named", "named_buckets"]

Array = np.ndarray[Any, Any]
_BUCKET = re.compile(
    r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d{1,9})\.gbuf_idx_(\d{1,9})\.dtype_\((.+?), .+?\)"
    r"\.bucket_idx_(\d{1,9})\.(\w+)"
)
_LAYER = re.compile(r"\.\d+\.")
_STACK = re.compile(r".+\.mlp\.experts\.experts\..+")
MAX_EXPERTS = 1 << 16
_PART = np.arange(len(CODECS))
_PART[TORCH_ZIP], _PART[ZSTD_TORCH_ZIP] = TORCH_PART, ZSTD_TORCH_PART
_ITEM = np.array([dtype.bits // 8 for dtype in ALL], np.int64)


@dataclass(frozen=True, eq=False)
class Named:
    """Optimizer tensors by name, and the positions of the buckets that they were cut from."""

    catalog: Catalog
    buckets: Array


class Part(NamedTuple):
    """A run of a flattened local tensor that is a box of the listed one."""

    numel: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


class Param(NamedTuple):
    """A parameter of one rank.

    Attributes:
        name: in the rank's own model, but for the layer's number.
        target, shape: the listed tensor that it is a part of.
        numel: elements that the rank holds.
        parts: they, in order.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    numel: int
    parts: tuple[Part, ...]


def named_buckets(place: Place, catalog: Catalog, run: Run, notes: list[str]) -> Named | None:
    """Tensors of the optimizer cut out of its buckets, or ``None`` where there are no buckets (that can be named).

    Args:
        catalog: the checkpoint with a tensor a layer, and names.
        notes: gets a sentence on buckets that stay without names.
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
            f"the optimizer's {sum(map(len, buffers.values()))} buffers have no names: args do not say which layers "
            "a pipeline stage holds"
        )
        return None
    model = _Model(catalog, run, stages)
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
            f"{len(lost)} buffers of the optimizer stay without names, first {lost[0]!r}: Megatron's order of "
            "parameters does not fill their buckets to the element"
        )
    notes += _absent(buffers, run)
    if not used:
        return None
    return Named(cutter.build(), np.array(sorted(used), np.int64))


def _absent(buffers: Mapping[tuple[str, int], Any], run: Run) -> list[str]:
    """Which model-parallel groups of the first optimizer have no buffer at all."""
    groups = {group for chain, group in buffers if chain in ("", "chained_0.")}
    tp, pp = run.known("tp"), run.known("pp")
    lost = [(group % tp, group // tp) for group in range(min(tp * pp, 1 << 20)) if group not in groups]
    if not lost:
        return []
    return [f"optimizer state of {len(lost)} of {tp * pp} (tp, pp) groups is missing, first {lost[0]}: it is a hole"]


class _Model:
    """Which parameters each stage, model chunk and TP rank holds, from the listed tensors and the run."""

    def __init__(self, catalog: Catalog, run: Run, stages: Sequence[Sequence[int]]) -> None:
        self.run, self.stages = run, stages
        self.tp, self.pp, self.ep = run.known("tp"), run.known("pp"), run.known("ep")
        self.etp = run.size("etp") or self.tp
        params = [t for t, role in enumerate(catalog.roles or ()) if role == "param"]
        self.shapes = {catalog.keys[t]: catalog.shape_of(t) for t in params}
        self.dtype = {catalog.keys[t]: catalog.dtype_of(t).torch_name for t in params}
        self.by_layer: dict[int | None, list[str]] = defaultdict(list)
        for key in self.shapes:
            self.by_layer[layout.layer_of(key)].append(key)
        self._has_experts = any(map(layout.is_expert, self.shapes))
        self._order = cache(layout.model_order)
        self._made: dict[Any, list[Param] | None] = {}
        self._cuts: dict[Any, tuple[int, tuple[Part, ...]] | None] = {}

    def candidates(self, group: int, nth: int, dtype: str) -> Iterator[list[Param]]:
        """Orders that a buffer may have, the likeliest first: dense or expert, local or Transformer Engine modules."""
        if nth >= len(self.stages):
            return
        local = self.run.args.get("transformer_impl") == "local"
        grouped = bool(self.run.args.get("moe_grouped_gemm"))
        for expert in (False, True) if self.ep > 1 else (False,):
            for plain in (local, not local):
                for together in (grouped, not grouped) if self._has_experts else (False,):
                    found = self._params(group, nth, dtype, expert, plain, together)
                    if found:
                        yield found

    def _params(
        self, group: int, nth: int, dtype: str, expert: bool, plain: bool, together: bool
    ) -> list[Param] | None:
        """Parameters in buffer order, ``None`` where Megatron's rules do not say how one is cut."""
        if expert:
            tp_rank, rest = group % self.etp, group // self.etp
            ep_rank, stage = rest % self.ep, rest // self.ep
        else:
            tp_rank, ep_rank, stage = group % self.tp, 0, group // self.tp
        memo = (tp_rank, ep_rank, stage, nth, dtype, expert, plain, together)
        if memo not in self._made:
            self._made[memo] = self._listed(*memo) if stage < self.pp else None
        return self._made[memo]

    def _listed(
        self, tp_rank: int, ep_rank: int, stage: int, nth: int, dtype: str, expert: bool, plain: bool, together: bool
    ) -> list[Param] | None:
        before = sum(sum(chunk) for chunk in self.stages[:nth]) + sum(self.stages[nth][:stage])
        layers = range(before, before + self.stages[nth][stage])
        first, last = stage == nth == 0, stage == self.pp - 1 and nth == len(self.stages) - 1
        ends = [key for key in self.by_layer[None] if (first if key.startswith("embedding.") else last)]
        found: list[Param] = []
        for key in [*(key for layer in layers for key in self.by_layer[layer]), *ends]:
            apart = self.ep > 1 and layout.is_expert(key)
            if apart != expert or self.dtype[key] != dtype:
                continue
            made = self._locals(key, tp_rank, ep_rank, plain, together)
            if made is None:
                return None
            found += made
        key = "embedding.word_embeddings.weight"
        if last and not first and not expert and "output_layer.weight" not in self.shapes and key in self.shapes:
            cut = self._cut(key, self.shapes[key], tp_rank, self.tp)  # tied: the last stage optimizes a copy of its own
            if cut is not None and self.dtype[key] == dtype:
                found.append(Param("output_layer.weight", "output_layer.weight", self.shapes[key], *cut))
        return sorted(found, key=lambda param: self._order(param.name))[::-1]

    def _locals(self, key: str, tp_rank: int, ep_rank: int, plain: bool, together: bool) -> list[Param] | None:
        """What a rank holds of a listed tensor: itself, or its experts of a stack."""
        shape = self.shapes[key]
        world = self.etp if layout.is_expert(key) else self.tp
        if _STACK.fullmatch(key) is None:
            cut = self._cut(key, shape, tp_rank, world)
            name = (layout.respelled(key) or key) if plain and "layer_norm_" in key else key
            return None if cut is None else [Param(name, key, shape, *cut)]
        cut = self._cut(key, shape[1:], tp_rank, world)
        if cut is None or shape[0] > MAX_EXPERTS:
            return None
        each = shape[0] // self.ep
        found = []
        for e in range(each):
            parts = tuple(Part(part.numel, (1, *part.sizes), (ep_rank * each + e, *part.offsets)) for part in cut[1])
            found.append(Param(expert_names(key, e)[together], key, shape, cut[0], parts))
        return found

    def _cut(self, key: str, shape: tuple[int, ...], rank: int, world: int) -> tuple[int, tuple[Part, ...]] | None:
        """Elements and boxes of a rank's part; layers of one model are cut alike."""
        kind = (_LAYER.sub(".", key), shape, rank, world)
        if kind not in self._cuts:
            self._cuts[kind] = self._cut_one(key, shape, rank, world)
        return self._cuts[kind]

    def _cut_one(self, key: str, shape: tuple[int, ...], rank: int, world: int) -> tuple[int, tuple[Part, ...]] | None:
        gated = layout.is_gated(key, self.shapes)
        split = layout.split_by_rule(key, bool(self.run.args.get("swiglu")) if gated is None else gated)
        if split is None:
            if world > 1:
                return None
            split = Split(None)
        if split.dim is None:
            local = shape
        elif split.dim >= len(shape) or shape[split.dim] % (world * split.stride):
            return None
        else:
            local = (*shape[: split.dim], shape[split.dim] // world, *shape[split.dim + 1 :])
        _, pieces = layout.local_pieces(local, split, rank, world)
        return prod(local), tuple(Part(prod(sizes), sizes, at) for _, sizes, at in pieces)


def _fit(
    catalog: Catalog, model: _Model, group: int, nth: int, dtype: str, states: Mapping[str, Any]
) -> tuple[list[Param], list[tuple[int, int]]] | None:
    """The first candidate order that fills the buckets of every state, with each parameter's bucket and start."""
    buckets = [sorted(tensors) for tensors in states.values()]
    if any(ids != list(range(len(ids))) or ids != buckets[0] for ids in buckets):
        return None
    tables = list(states.values())
    sizes = [int(catalog.shape[tables[0][k], 0]) for k in buckets[0]]
    if any(int(catalog.shape[table[k], 0]) != sizes[k] for table in tables for k in table):
        return None
    edges = [_edges(catalog, tables[0][k]) for k in buckets[0]]
    for params in model.candidates(group, nth, dtype):
        places = layout.fill_buckets([param.numel for param in params], sizes)
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
    """Collects runs of buckets as boxes of named tensors, then joins them with the chunks, all at once."""

    def __init__(self, place: Place, catalog: Catalog) -> None:
        self.catalog = catalog
        self.builder = CatalogBuilder(
            catalog.format, place, files={name: position for position, name in enumerate(catalog.files)}
        )
        self.ids: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)  # (state, dtype) → parameter → tensor
        self.runs: list[Array] = []  # (N, 4): bucket, start, stop, target
        self.sizes: list[tuple[int, ...]] = []
        self.offsets: list[tuple[int, ...]] = []
        self.of: list[Array] = []  # which of `sizes` and `offsets` a run has: those of all states are the same

    def add(
        self, states: Mapping[str, Mapping[int, int]], params: Sequence[Param], places: Sequence[tuple[int, int]]
    ) -> None:
        """All states of one buffer."""
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
        role = "master" if state == "param" else naming.STATES.get(state, "other")
        known = self.ids[state, dtype.code]
        for _, name, shape, *_ in params:
            if name not in known:
                known[name] = self.builder.tensor(f"optimizer.state.{state}.{name}", dtype, shape, fqn=name, role=role)
        return [known[param.target] for param in params]

    def build(self) -> Catalog:
        """The catalog of the named tensors, replicas numbered by rank."""
        c = self.catalog
        runs, of = np.concatenate(self.runs), np.concatenate(self.of)
        dims = max([1, *map(len, self.sizes)])
        shapes, base = _padded(self.sizes, dims, 1)[of], _padded(self.offsets, dims, 0)[of]
        tensors = box.distinct(runs[:, 0])
        rows = np.concatenate([np.arange(c.row_ptr[t], c.row_ptr[t + 1]) for t in tensors.tolist()])
        start, stop = c.offsets[rows, 0], c.offsets[rows, 0] + c.sizes[rows, 0]
        which, hit = box.group_join(
            runs[:, 0], runs[:, 1:2], runs[:, 2:3] - runs[:, 1:2], c.tensor[rows], start[:, None],
            (stop - start)[:, None],
        )  # fmt: skip
        low = np.maximum(runs[which, 1], start[hit]) - runs[which, 1]
        high = np.minimum(runs[which, 2], stop[hit]) - runs[which, 1]
        index, offsets, sizes, at = box.flat_ranges(shapes[which], low, high)
        run, row = which[index], rows[hit[index]]
        itemsize = _ITEM[c.dtype[c.tensor[row]]]
        inner = (runs[run, 1] + at - c.offsets[row, 0]) * itemsize + (0 if c.inner is None else c.inner[row])
        self.builder.block(
            runs[run, 3],
            offsets + base[run],
            sizes,
            c.file[row],
            c.start[row],
            c.stop[row],
            codec=_PART[c.codec[row]],
            rank=c.rank[row],
            inner=inner,
            strides=row_major(shapes)[run],
        )
        return self.builder.build(named=True)


def _padded(rows: Sequence[tuple[int, ...]], dims: int, fill: int) -> Array:
    return np.array([(*row, *([fill] * (dims - len(row)))) for row in rows], np.int64).reshape(len(rows), dims)
