"""Merge the ranks of a legacy Megatron checkpoint: every local tensor as boxes of the global one.

::

    rank 0  linear_proj.weight  (64, 32)  ┐ partition_dim 1            ┌ cols 0:32 │ 32:64 ┐
    rank 1  linear_proj.weight  (64, 32)  ┴────────────────────────▶   │  rank 0   │ rank 1│   (64, 64)
    rank 0  input_layernorm.weight  (64,) ┐ not tensor parallel
    rank 1  input_layernorm.weight  (64,) ┴────────────────────────▶   (64,) with a replica

A missing rank is also placed, with a sibling's shapes, in the file that should hold it; reading it raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from workbench.core.build import CatalogBuilder
from workbench.core.catalog import reach, row_major
from workbench.core.codecs import RAW, RAW_BE
from workbench.core.dtypes import by_name
from workbench.core.pickles.standins import StorageRef, TensorRef
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError
from workbench.formats.megatron import layout
from workbench.formats.megatron.args import RunArgs
from workbench.formats.megatron.layout import Split
from workbench.formats.megatron.optim import RankState
from workbench.names.roles import STATES
from workbench.names.weights import is_gated, parse

FILE, FLAT = "model_optim_rng.pt", "distrib_optim.pt"
CHUNK = re.compile(r"model(\d{0,4})")
_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.local_experts\.)(\d{1,6})(\..+)|(.+\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})()",
    re.S,
)
_BUFFER = re.compile(r"(?:.*\.)?(?:expert_bias|local_tokens_per_expert|inv_freq|.*_extra_state)", re.S)


@dataclass(eq=False)
class RankFiles:
    """One rank's files.

    Attributes:
        folder: its name. coordinates: the ranks along tp, pp and ep.
        tree: the object tree, with tensors as references.
        storages: payload byte ranges by file and storage key.
        ends: where the contents of each file end, if its format defines that.
        absent: the folder is missing; the shapes are from a sibling's tree.
        chunks: local names of each model chunk, in the model's order.
    """

    folder: str
    coordinates: tuple[int, int, int]
    tree: Mapping[str, Any]
    run: RunArgs
    storages: dict[str, dict[str, tuple[int, int]]]
    big: bool = False
    ends: dict[str, int | None] = field(default_factory=dict)
    flat: Any = None
    absent: bool = False
    sibling: RankFiles | None = None
    chunks: list[dict[str, TensorRef]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Rank of the writer, ``-1`` if not stored."""
        found = self.run.number("rank")
        return -1 if found is None or self.absent else found


class Merger:
    """Places every rank's tensors in the global tensors."""

    def __init__(self, builder: CatalogBuilder, run: RunArgs, tp_ranks: set[int], notes: list[str]) -> None:
        self.builder, self.run, self.notes = builder, run, notes
        self.tp = run.size("tp") or len(tp_ranks)
        self.recorded: dict[str, Split] = {}
        self.ruled: set[str] = set()
        self.unknown: set[str] = set()

    def learn(self, part: RankFiles, states: RankState, offsets: Mapping[tuple[int, int], int]) -> None:
        """Remember how TP divided parameters, from a rank's fp32 copies."""
        copies = {
            name: by_state["fp32_param"][0] for name, by_state in states.named.items() if "fp32_param" in by_state
        }
        if not any("tensor_model_parallel" in copy.attrs for copy in copies.values()):
            return
        for (chunk, name), ref in copies.items():
            # a copy without the attributes has a parameter without them: every rank holds all of it
            dim, stride = ref.attrs.get("partition_dim", -1), ref.attrs.get("partition_stride", 1)
            if type(dim) is int and type(stride) is int:
                parallel = (
                    ref.attrs.get("tensor_model_parallel") is True and 0 <= dim < len(ref.shape) and 1 <= stride <= 64
                )
                split = Split(dim, stride) if parallel else Split(None)
                key = self._global(part, chunk, name, offsets)
                if self.recorded.setdefault(key, split) != split:
                    raise CorruptError(
                        f"parameter {key!r}: ranks store different divisions, {self.recorded[key]} and {split} in "
                        f"{part.folder!r}; the folders are from different runs"
                    )

    def add(self, part: RankFiles, states: RankState, offsets: Mapping[tuple[int, int], int]) -> None:
        """Declare and place one rank's tensors."""
        for chunk, tensors in enumerate(part.chunks):
            shapes = {name: ref.shape for name, ref in tensors.items()}
            for name, ref in tensors.items():
                key = self._global(part, chunk, name, offsets)
                split = self._split(key, name, shapes) if not _BUFFER.fullmatch(name) else None
                fqn, role = key, "param"
                if _BUFFER.fullmatch(name):
                    role = "other" if name.endswith("_extra_state") else "buffer"
                    split = Split(None) if role == "buffer" else None
                self._place(part, FILE, key, ref, split, fqn, role)
                for state, (held, file) in states.named.get((chunk, name), {}).items():
                    role = "master" if state in ("param", "fp32_param") else STATES.get(state, "other")
                    own = Split(None) if held.shape == () != ref.shape else split
                    self._place(part, file, f"optimizer.state.{state}.{key}", held, own, fqn, role)
        for path, (ref, file) in () if part.absent else states.unnamed.items():
            leaf = path.rpartition(".")[2]
            role = "master" if ".fp32_from_fp16_params." in f".{path}" else STATES.get(leaf, "other")
            self._place(part, file, f"{part.folder}/{path}", ref, Split(None), None, role)
        if part.absent:  # its sibling's other state says nothing about its own
            return
        for name, node in part.tree.items():
            if name != "optimizer" and not CHUNK.fullmatch(str(name)):
                for path, ref in layout.tensors(node, str(name)):
                    self._place(part, FILE, f"{part.folder}/{path}", ref, Split(None), None, "other")

    def _global(self, part: RankFiles, chunk: int, name: str, offsets: Mapping[tuple[int, int], int]) -> str:
        """Return the name with global numbers of layer and expert."""
        name = layout.with_layer(name, offsets.get((chunk, part.coordinates[1]), 0))
        match = _EXPERT.fullmatch(name)
        if match is None:
            return name
        head, number, tail = match.groups()[:3] if match[1] is not None else match.groups()[3:]
        each = (self.run.number("num_experts") or 0) // self.run.known("ep")
        return f"{head}{int(number) + part.coordinates[2] * each}{tail}"

    def _split(self, key: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Split | None:
        if self.tp == 1:
            return Split(None)
        if parse(key).routed and self.run.size("etp") == 1:
            return Split(None)
        if key in self.recorded:
            return self.recorded[key]
        gated = is_gated(name, shapes)
        split = layout.split_by_rule(key, bool(self.run.args.get("swiglu")) if gated is None else gated)
        if split is None:
            self.unknown.add(key)
        else:
            self.ruled.add(key)
        return split

    def _place(
        self, part: RankFiles, file: str, key: str, ref: TensorRef, split: Split | None, fqn: str | None, role: str
    ) -> None:
        """Place one local tensor; one that cannot be merged keeps its rank in its key."""
        try:
            dtype = by_name(ref.dtype)
        except UnsupportedFormatError as error:
            self.notes.append(f"tensor {key!r} of {part.folder!r} is left out: {error}")
            return
        if split is None:
            if self.tp > 1:
                key, fqn = f"{part.folder}/{key}", None
            split = Split(None)
        if split.dim is not None and ref.shape and ref.shape[split.dim] % split.stride:
            raise CorruptError(
                f"{part.folder!r}: {key!r} of shape {list(ref.shape)} cannot consist of {split.stride} parts along "
                f"dimension {split.dim}"
            )
        shape, pieces = layout.local_pieces(ref.shape, split, part.coordinates[0], self.tp)
        if part.sibling is not None and split.dim is None:
            own = parse(fqn or "").routed and part.sibling.coordinates[2] != part.coordinates[2]
            pieces = pieces if own else []  # its sibling holds the same
        if pieces:
            self.builder.tensor(key, dtype, shape, fqn=fqn, role=role)
        start, stop = self._bytes(part, file, key, ref)
        for offsets, sizes, at in pieces:
            strides: Sequence[int] = row_major(sizes) if part.absent else ref.stride
            inner = sum(o * s for o, s in zip(offsets, strides, strict=True)) + ref.storage_offset
            if part.absent:
                inner, start, stop = 0, 0, dtype.itemsize * prod(sizes)
            codec = RAW_BE if part.big and dtype.itemsize > 1 else RAW
            where = f"{part.folder}/{file}"
            if 0 in sizes:
                inner, strides = 0, row_major(sizes)
            self.builder.chunk(
                key,
                at,
                sizes,
                where,
                start,
                stop,
                codec=codec,
                rank=part.rank,
                inner=inner * dtype.itemsize,
                strides=strides,
            )

    def _bytes(self, part: RankFiles, file: str, key: str, ref: TensorRef) -> tuple[int, int]:
        storage = ref.storage
        found = part.storages[file].get(storage.key) if isinstance(storage, StorageRef) else None
        if found is None:
            raise CorruptError(f"{part.folder + '/' + file!r}: tensor {key!r} has no storage in the file")
        itemsize = by_name(ref.dtype).itemsize
        length = reach(ref.shape, ref.stride)
        end = (ref.storage_offset + length) * itemsize if length else 0
        if end > found[1] - found[0]:
            raise CorruptError(
                f"{part.folder + '/' + file!r}: tensor {key!r} of shape {list(ref.shape)} ends at byte {end:,} of a "
                f"storage of {plural(found[1] - found[0], 'byte')} at byte {found[0]:,}; the file is damaged"
            )
        return found
