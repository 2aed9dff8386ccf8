"""The parameters of a Megatron rank and their order, inferred from the listed tensors and the run.

::

    listed, by name                          rank TP 0 of 2, PP 1 of 2, in the order of its buffer
    decoder.layers.3.mlp.linear_fc1.weight   output_layer.weight                        rows 0 to 22 of 44
    decoder.layers.2.…                       decoder.final_layernorm.weight             all
    output_layer.weight                      decoder.layers.3.mlp.linear_fc2.weight     columns 0 to 6 of 12
    …                                        decoder.layers.3.mlp.linear_fc1.weight     two boxes: gate, up

A stack of experts is one listed tensor, but one parameter per expert. Several orders are possible, because no file
stores whether modules are Megatron's or Transformer Engine's or whether experts are grouped: `StageModel.candidates`.

Read from megatron-core 0.16.1 and 0.20.0dev (``core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from workbench.core.catalog import Catalog
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.boxes import expert_names
from workbench.formats.megatron.layout import Split
from workbench.names.weights import is_gated, parse

MAX_EXPERTS = 1 << 16
_LAYER = re.compile(r"\.\d+\.")
_STACK = re.compile(r".+\.mlp\.experts\.experts\..+")


class BoxRun(NamedTuple):
    """A range of a flattened local tensor that is a box of the listed tensor."""

    numel: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


class Param(NamedTuple):
    """A parameter of one rank.

    Attributes:
        name: its name in the rank's own model, except for the layer's number.
        target, shape: the listed tensor that it is part of.
        numel: number of elements on the rank.
        parts: these elements, in order.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    numel: int
    parts: tuple[BoxRun, ...]


class StageModel:
    """The parameters of each stage, model chunk and TP rank, from the listed tensors and the run."""

    def __init__(self, catalog: Catalog, run: RunArgs, stages: Sequence[Sequence[int]]) -> None:
        self.run, self.stages = run, stages
        self.tp, self.pp, self.ep = run.known("tp"), run.known("pp"), run.known("ep")
        self.etp = run.size("etp") or self.tp
        params = [t for t, role in enumerate(catalog.roles or ()) if role == "param"]
        self.shapes = {catalog.keys[t]: catalog.shape_of(t) for t in params}
        self.dtype = {catalog.keys[t]: catalog.dtype_of(t).torch_name for t in params}
        self.by_layer: dict[int | None, list[str]] = defaultdict(list)
        for key in self.shapes:
            self.by_layer[layout.layer_of(key)].append(key)
        self._has_experts = any(parse(name).routed for name in self.shapes)
        self._order = cache(layout.model_order)
        self._made: dict[Any, list[Param] | None] = {}
        self._cuts: dict[Any, tuple[int, tuple[BoxRun, ...]] | None] = {}

    def candidates(self, group: int, nth: int, dtype: str) -> Iterator[list[Param]]:
        """Yield possible orders of a buffer, likeliest first: dense or expert, local or Transformer Engine modules."""
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
        """Return parameters in buffer order, ``None`` if Megatron's rules do not cover how one is divided."""
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
            is_expert = self.ep > 1 and parse(key).routed
            if is_expert != expert or self.dtype[key] != dtype:
                continue
            made = self._locals(key, tp_rank, ep_rank, plain, together)
            if made is None:
                return None
            found += made
        key = "embedding.word_embeddings.weight"
        if last and not first and not expert and "output_layer.weight" not in self.shapes and key in self.shapes:
            cut = self._cut(key, self.shapes[key], tp_rank, self.tp)  # tied: the last stage optimizes its own copy
            if cut is not None and self.dtype[key] == dtype:
                found.append(Param("output_layer.weight", "output_layer.weight", self.shapes[key], *cut))
        return sorted(found, key=lambda param: self._order(param.name))[::-1]

    def _locals(self, key: str, tp_rank: int, ep_rank: int, plain: bool, together: bool) -> list[Param] | None:
        """Return a rank's parameters of a listed tensor: its part, or its experts of a stack."""
        shape = self.shapes[key]
        world = self.etp if parse(key).routed else self.tp
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
            parts = tuple(BoxRun(part.numel, (1, *part.sizes), (ep_rank * each + e, *part.offsets)) for part in cut[1])
            found.append(Param(expert_names(key, e)[together], key, shape, cut[0], parts))
        return found

    def _cut(self, key: str, shape: tuple[int, ...], rank: int, world: int) -> tuple[int, tuple[BoxRun, ...]] | None:
        """Return elements and boxes of a rank's part; layers of one model are divided in the same way."""
        kind = (_LAYER.sub(".", key), shape, rank, world)
        if kind not in self._cuts:
            self._cuts[kind] = self._cut_one(key, shape, rank, world)
        return self._cuts[kind]

    def _cut_one(
        self, key: str, shape: tuple[int, ...], rank: int, world: int
    ) -> tuple[int, tuple[BoxRun, ...]] | None:
        gated = is_gated(key, self.shapes)
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
        return prod(local), tuple(BoxRun(prod(sizes), sizes, at) for _, sizes, at in pieces)
