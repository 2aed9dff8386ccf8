"""``wb.layout``: placements proven from boxes; right on every sample, on torch's meshes and on the resharding's."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from safetensors.numpy import save_file

import workbench as wb
from tests import bytecheckpoint_files
from tests.megatron_files import Model, write_dist
from workbench.analysis.layout import Placed, classes, digits
from workbench.analysis.layout.classes import alike
from workbench.analysis.layout.runs import AxisCut, cut_axis
from workbench.analysis.layout.simple import called
from workbench.cli import main
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.mesh.cut import cut
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, PartedShard, Placement, Replicate, Shard, StridedShard, flat_buffer
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.core.work import chunk_work
from workbench.errors import CorruptError, TensorNotFoundError, UsageError

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"

Box = tuple[tuple[int, ...], tuple[int, ...]]


def counts(name: str, pattern: str | None = None) -> Counter[tuple[str, str]]:
    """How many tensors lie how, and what is known of it."""
    found = wb.layout(wb.open(SAMPLES / name).select(pattern)).tensors
    return Counter(zip(found["placement"], found["status"], strict=True))


# ---- every sample, as its framework cut it (sample_ckpts/README.md) -------------------------------------------------


def test_fsdp2_shards_rows_over_four_ranks() -> None:
    found = wb.layout(wb.open(SAMPLES / "dcp_fsdp2"))
    sharded = found.tensors["role"].isin(["param", "exp_avg", "exp_avg_sq"])
    assert set(found.tensors["placement"][sharded]) == {"ranks Shard(0)"} and sharded.sum() == 117
    assert set(found.tensors["status"][sharded]) == {"proven"}
    assert found.placed("model.model.norm.weight").torch == ("Shard(dim=0)",)
    assert set(found.tensors["status"][~sharded]) == {"unknown"}  # steps and generators are saved once
    assert "saved once" in found.placed("rng.rank2").why
    assert (str(found.mesh), found.world_size) == ("ranks=4", None)
    assert counts("titan_run/step-4", r"^(?!optimizer\.state.*\.step$|train)") == {("ranks Shard(0)", "proven"): 63}


def test_fsdp2_over_tp_is_a_strided_shard_on_uneven_rows() -> None:
    found = wb.layout(wb.open(SAMPLES / "dcp_tp2_fsdp2_vocab515"))
    assert found.mesh.shape == (2, 2)  # (dp, tp), as make_hsdp2d.py made it
    column = found.placed("model.tok_embeddings.weight")
    assert (column.torch, column.status) == (("_StridedShard(dim=0, sf=2)", "Shard(dim=0)"), "proven")
    row = found.placed("model.layers.0.attention.wo.weight")
    assert (row.torch, row.status) == (("Shard(dim=0)", "Shard(dim=1)"), "proven")
    norm = found.placed("model.norm.weight")  # sharded over dp, copied over tp, saved once
    assert (str(norm), norm.status, norm.torch) == ("axis0 Shard(0), axis1 ?", "partly", None)
    steps = found.tensors[found.tensors["role"] == "step"]
    assert set(steps["status"]) == {"unknown"}
    assert found.rank(2).coordinates == {"axis0": 1, "axis1": 0}
    assert found.rank(2).peers == {"axis0": ["rank 0", "rank 2"], "axis1": ["rank 2", "rank 3"]}


def test_bytecheckpoint_proves_the_mesh_of_the_same_boxes(tmp_path) -> None:
    """The boxes and ranks of a real DCP save, in ByteCheckpoint's files (formats trial, E6)."""
    source = wb.open(SAMPLES / "dcp_tp2_fsdp2_vocab515")
    catalog, want = source.catalog, wb.layout(source)
    pieces = {}
    for tensor, key in enumerate(catalog.keys):
        rows = range(catalog.row_ptr[tensor], catalog.row_ptr[tensor + 1])
        at = [(catalog.offsets[row], catalog.sizes[row], int(catalog.rank[row])) for row in rows]
        whole = source[key].torch()
        boxes = [(tuple(low[: whole.ndim].tolist()), size[: whole.ndim].tolist(), rank) for low, size, rank in at]
        pieces[key] = [
            (low, whole[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))].clone(), rank)
            for low, size, rank in boxes
        ]
    params = {key.removeprefix("model."): pieces[key] for key in source.model}
    bytecheckpoint_files.save(tmp_path / "model", params, ranks=4)
    found = wb.layout(wb.open(tmp_path))
    assert found.mesh == want.mesh and found.mesh.shape == (2, 2) and len(params) >= 20
    for name in params:
        mine, theirs = found.placed(f"model.{name}"), want.placed(f"model.{name}")
        assert (str(mine), mine.status, mine.torch) == (str(theirs), theirs.status, theirs.torch)


def test_hsdp_without_copies_shows_in_the_turns_that_ranks_take() -> None:
    found = wb.layout(wb.open(SAMPLES / "dcp_hsdp_2x2"))
    assert found.mesh.shape == (2, 2)  # (replicate, shard)
    sharded = found.tensors[found.tensors["role"] != "step"]
    assert set(sharded["placement"]) == {"axis1 Shard(0), axis0 ?"} and len(sharded) == 63
    assert set(sharded["status"]) == {"partly"}


def test_flat_parameters_of_fsdp1_are_ranges() -> None:
    found = wb.layout(wb.open(SAMPLES / "bytecheckpoint_fsdp1_flat"))
    flat = found.tensors["role"].isin(["param", "exp_avg", "exp_avg_sq"])
    assert set(found.tensors["placement"][flat]) == {"ranks Flat()"}
    assert set(found.tensors["kind"][flat]) == {"flat"} and set(found.tensors["status"][flat]) == {"proven"}
    assert set(found.tensors["status"][~flat]) == {"unknown"}
    pieces = found.pieces("model.layers.0.mlp.up_proj.weight")
    assert pieces["holder"].tolist() == ["rank 2", "rank 2", "rank 3", "rank 3"]


def test_zero1_has_flat_states_and_says_nothing_of_copies_of_weights() -> None:
    assert counts("deepspeed_zero1") == {
        ("dp Flat()", "proven"): 162,
        ("dp ?", "unknown"): 55,
        ("dp Replicate()", "proven"): 2,
    }


def test_megatron_gate_and_up_are_told_from_a_plain_shard() -> None:
    found = wb.layout(wb.open(SAMPLES / "megatron_dp_reshardable"))
    assert dict(zip(found.mesh.axes, found.mesh.shape, strict=True)) == {"tp": 2, "pp": 1, "cp": 1, "dp": 2}
    for key, want in {
        "decoder.layers.0.mlp.linear_fc1.weight": "tp StridedShard(0, 2), dp ?",
        "decoder.layers.0.mlp.linear_fc2.weight": "tp Shard(1), dp ?",
        "decoder.layers.0.self_attention.linear_qkv.weight": "tp Shard(0), dp ?",
        "decoder.layers.1.self_attention.linear_qkv.bias": "tp Shard(0), dp ?",  # of ranks 0 and 3
        "embedding.word_embeddings.weight": "tp Shard(0), dp ?",
        "optimizer.state.param.decoder.final_layernorm.weight": "tp Replicate(), dp ?",
        "decoder.final_layernorm.weight": "tp ?, dp ?",
    }.items():
        assert str(found.placed(key)) == want, key
    assert "proven" not in set(found.tensors["status"])  # who else along dp has a copy is not stored


def test_paddle_shards_are_found_on_the_mesh_that_they_prove() -> None:
    found = wb.layout(wb.open(SAMPLES / "paddle_dist"))
    for key, want in {
        "model.layers.0.up.weight": ("axis0 Shard(0), axis1 Shard(1)", "proven"),
        "opt.embed.weight.moment1_0": ("axis1 Shard(0), axis0 Shard(1)", "proven"),
        "model.layers.0.uneven.weight": ("all Shard(0)", "proven"),  # 10 rows: 3 3 3 1, not 3 2 3 2
        "model.layers.0.qkv.weight": ("axis1 Shard(1), axis0 ?", "partly"),  # written by ranks 2 and 1
        "model.embed.weight": ("?", "unknown"),  # by ranks 0 and 3: along either axis
        "model.layers.0.ln.weight": ("axis0 ?, axis1 ?", "unknown"),
    }.items():
        placed = found.placed(key)
        assert sorted(str(placed).split(", ")) == sorted(want[0].split(", ")) and placed.status == want[1], key
    assert "axis0 or axis1" in found.placed("model.embed.weight").why


@pytest.mark.parametrize(
    ("tp", "dp", "fc1"),
    [(1, 2, "ep Shard(0), pp Only(0)"), (2, 4, "etp StridedShard(1, 2), ep Shard(0), pp Only(0), edp ?")],
)
def test_experts_of_megatron_lie_along_expert_parallelism(tmp_path: Path, tp: int, dp: int, fc1: str) -> None:
    """Ranks of dp that hold other experts hold no ranges of a flat buffer."""
    write_dist(tmp_path / "it", Model(experts=4), tp=tp, pp=2, ep=2, dp=dp, optimizer="none")
    layout = wb.layout(wb.open(tmp_path / "it"))
    found = layout.tensors.set_index("key")["placement"]
    assert found["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"] == fc1
    assert found["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"] == fc1.replace("Only(0)", "Only(1)")
    assert not found.str.contains("Flat").any() and f"ep=2, etp={tp}" in layout.mesh_source


def test_stages_of_a_pipeline_hold_their_layers_alone() -> None:
    found = wb.layout(wb.open(SAMPLES / "paddlenlp_legacy"))
    assert str(found.placed("llama.embed_tokens.weight")) == "tp Shard(0), pp Only(0), sharding ?"
    assert str(found.placed("llama.layers.0.self_attn.q_proj.weight")) == "tp Shard(1), pp Only(0), sharding ?"
    assert str(found.placed("llama.layers.3.mlp.down_proj.weight")) == "tp Shard(0), pp Only(1), sharding ?"
    assert str(found.placed("llama.layers.0.input_layernorm.weight")) == "tp Replicate(), pp Only(0), sharding ?"
    stages = found.by("stage")
    assert stages["stage"].tolist() == [0, 1] and stages["tensors"].sum() == len(found.tensors)
    assert int(stages["stored"].sum()) == found.summary["stored"]


@pytest.mark.parametrize(
    "name", ["hf_llama_bf16_sharded", "hf_deepseek_fp8_block", "torch_save/ckpt.pt", "paddle_save"]
)
def test_files_without_ranks_prove_nothing(name: str) -> None:
    found = wb.layout(wb.open(SAMPLES / name))
    whole = found.tensors[found.tensors["kind"] != "empty"]
    assert set(whole["status"]) == {"unknown"} and set(whole["placement"]) == {"?"}
    assert found.mesh.axes == () and found.mesh_source == "no ranks are stored"


def test_one_rank_is_proven_only_where_a_file_says_so() -> None:
    assert set(counts("trainer_run/checkpoint-6")) == {("whole", "proven")}  # world size 1 is stored
    odd = wb.layout(wb.open(SAMPLES / "dcp_single_odd"))
    assert Counter(odd.tensors["status"]) == {"unknown": 14, "proven": 1}  # an empty tensor lies nowhere, for certain
    assert "the number of ranks is not stored" in odd.placed("base").why


@pytest.mark.parametrize("world", [2, 4])
def test_an_export_for_ranks_is_proven_with_its_copies(tmp_path: Path, world: int) -> None:
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    wb.export(ckpt, tmp_path / "out", mesh=f"tp={world}", manifest=False)
    found = wb.layout(wb.open(tmp_path / "out"))
    assert set(found.tensors["status"]) == {"proven"} and dict(zip(found.mesh.axes, found.mesh.shape, strict=True)) == {
        "tp": world
    }
    layers = "model.model.layers.0."
    assert str(found.placed(f"{layers}self_attn.q_proj.weight")) == "tp Shard(0)"
    assert str(found.placed(f"{layers}self_attn.o_proj.weight")) == "tp Shard(1)"
    assert str(found.placed(f"{layers}input_layernorm.weight")) == "tp Replicate()"
    assert found.placed(f"{layers}input_layernorm.weight").copies == (world, world)
    norms = [t for t in found.tensors.itertuples() if t.placement == "tp Replicate()"]
    assert found.summary["copies"] == (world - 1) * sum(t.nbytes for t in norms) > 0
    assert int(found.ranks["copies"].sum()) == found.summary["copies"]


# ---- meshes cut by torch, and by the resharding ---------------------------------------------------------------------


def saved(shapes: list[tuple[int, ...]], chunks: list[tuple[int, int, Box]], **meta: Any) -> wb.Checkpoint:
    """A checkpoint in memory: ``(tensor, rank, box)`` chunks, a file a rank."""
    builder = CatalogBuilder("dcp", Place(SAMPLES))
    for number, shape in enumerate(shapes):
        builder.tensor(f"w{number}", by_name("float32"), shape)
    at: Counter[int] = Counter()
    for tensor, rank, (low, size) in chunks:
        nbytes = 4 * int(np.prod(size))
        builder.chunk(f"w{tensor}", low, size, f"__{rank}_0.distcp", at[rank], at[rank] + nbytes, rank=rank)
        at[rank] += nbytes
    catalog = builder.build(meta)
    catalog.check()
    return wb.Checkpoint(Place(SAMPLES), catalog, SourcePool(Place(SAMPLES), catalog.files, catalog.file_stats), {})


def mask(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    found = np.zeros(shape, np.int64)
    for low, size in boxes:
        found[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] += 1
    return found


def forward(shape: tuple[int, ...], steps: list[tuple[Placement, int]], places: np.ndarray) -> list[list[Box]]:
    """Boxes of each coordinate, by the resharding's own cut."""
    ndim = len(shape)
    found = cut(np.array([shape or (1,)]), ndim, steps, places)
    boxes: list[list[Box]] = [[] for _ in places]
    for owner, low, size in zip(
        found.rank[found.owner].tolist(), found.offsets.tolist(), found.sizes.tolist(), strict=True
    ):
        boxes[owner].append((tuple(low[:ndim]), tuple(size[:ndim])))
    return boxes


def inferred_steps(placed: Placed) -> tuple[list[tuple[Placement, int]], list[int]]:
    """What was inferred, as the resharding's placements, and the mesh axes they are along."""
    steps: list[tuple[Placement, int]] = []
    axes = []
    for one in placed.cuts:
        where = Shard(one.dim) if not one.parts else PartedShard(one.dim, one.parts)
        steps.append((where, placed.mesh.shape[one.axis]))
        axes.append(one.axis)
    return steps, axes


def reproduces(placed: Any, shape: tuple[int, ...], stored: dict[int, list[Box]]) -> None:
    """What was inferred, cut forward, gives what ranks stored."""
    steps, axes = inferred_steps(placed)
    ranks = sorted(stored)
    places = digits.coordinates(np.array(ranks), placed.mesh.shape)[:, axes]
    for rank, boxes in zip(ranks, forward(shape, steps, places), strict=True):
        have, want = mask(shape, boxes), mask(shape, stored[rank])
        assert (have == want).all(), (str(placed), rank)


@st.composite
def placed_tensors(
    draw: Any, strided: bool
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], list[Placement], list[int]]]]:
    """Mesh sizes, and tensors: shape, one placement a mesh axis, the order they are applied in."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    tensors = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 16), min_size=1, max_size=3)))
        dims = st.integers(0, len(shape) - 1)
        order = draw(st.permutations(range(len(sizes))))
        placements: list[Placement] = [draw(st.one_of(st.just(Replicate()), st.builds(Shard, dims))) for _ in sizes]
        first = order[0]
        if strided and isinstance(placements[first], Shard) and draw(st.booleans()):
            dim = placements[first].dim
            parts = draw(st.sampled_from([2, 3]))
            sized = draw(st.lists(st.integers(1, 6), min_size=2, max_size=3))
            if draw(st.booleans()):
                placements[first] = StridedShard(dim, parts)
            else:
                placements[first] = PartedShard(dim, tuple(sized))
                shape = (*shape[:dim], sum(sized), *shape[dim + 1 :])
        tensors.append((shape, placements, list(order)))
    return sizes, tensors


@examples(150, 5_000)
@given(placed_tensors(strided=True))
def test_whatever_is_proven_gives_the_boxes_again(made: Any) -> None:
    """All ranks save all they hold."""
    sizes, tensors = made
    world = int(np.prod(sizes))
    places = Mesh(**{f"a{k}": n for k, n in enumerate(sizes)}).coordinates()
    chunks, stored = [], []
    for number, (shape, placements, order) in enumerate(tensors):
        boxes = forward(shape, [(placements[k], sizes[k]) for k in order], places[:, order])
        stored.append(dict(enumerate(boxes)))
        chunks += [(number, rank, one) for rank, mine in enumerate(boxes) for one in mine]
    ckpt = saved([shape for shape, *_ in tensors], chunks)
    found = wb.layout(ckpt)
    for number, (shape, placements, _) in enumerate(tensors):
        placed = found.placed(f"w{number}")
        full = all(stored[number].values())
        distinct = len({tuple(mine) for mine in stored[number].values()})
        plain = not any(isinstance(one, StridedShard | PartedShard) for one in placements)
        ranks = set(found.holders.rank.tolist()) == set(range(world))
        if full and plain and ranks:
            assert placed.status == "proven" or world == 1, (str(placed), placed.why)
        if placed.status == "proven" and placed.kind == "grid":
            assert distinct > 1
            mine = {rank: boxes for rank, boxes in stored[number].items() if rank in found.holders.rank}
            reproduces(placed, shape, mine)
        if placed.kind == "whole" and placed.status == "proven" and world > 1:
            mine = {tuple(boxes) for rank, boxes in stored[number].items() if rank in found.holders.rank}
            assert len(mine) == 1 and all(mine)


@examples(150, 5_000)
@given(placed_tensors(strided=False), st.data())
def test_a_save_without_copies_is_never_read_as_something_else(made: Any, data: Any) -> None:
    """Each box is saved by one of its holders, whoever."""
    sizes, tensors = made
    places = Mesh(**{f"a{k}": n for k, n in enumerate(sizes)}).coordinates()
    chunks, stored = [], []
    for number, (shape, placements, order) in enumerate(tensors):
        boxes = forward(shape, [(placements[k], sizes[k]) for k in order], places[:, order])
        holders: dict[Box, list[int]] = {}
        for rank, mine in enumerate(boxes):
            for one in mine:
                holders.setdefault(one, []).append(rank)
        written: dict[int, list[Box]] = {}
        for one, ranks in holders.items():
            written.setdefault(data.draw(st.sampled_from(ranks)), []).append(one)
        stored.append(written)
        chunks += [(number, rank, one) for rank, mine in written.items() for one in mine]
    found = wb.layout(saved([shape for shape, *_ in tensors], chunks))
    for number, (shape, *_) in enumerate(tensors):
        placed = found.placed(f"w{number}")
        if placed.kind == "grid" and placed.status != "unknown":
            reproduces(placed, shape, stored[number])


@examples(100, 3_000)
@given(st.data())
def test_dtensors_of_torch_are_named_as_torch_names_them(data: Any) -> None:
    """Boxes from torch's own arithmetic; what is inferred gives them again, through torch."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local
    from torch.distributed.tensor.placement_types import Replicate as R
    from torch.distributed.tensor.placement_types import Shard as S
    from torch.distributed.tensor.placement_types import _StridedShard as Strided

    sizes = tuple(data.draw(st.lists(st.integers(2, 3), min_size=1, max_size=2)))
    world = int(np.prod(sizes))
    places = digits.coordinates(np.arange(world), sizes).tolist()
    shapes, chunks, stored = [], [], []
    for number in range(data.draw(st.integers(1, 4))):
        if len(sizes) == 2 and data.draw(st.booleans()):  # FSDP2 over TP, on the same axis
            shape = (sizes[0] * sizes[1] * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
            placements = (Strided(0, split_factor=sizes[1]), S(0))
        else:
            shape = tuple(data.draw(st.lists(st.integers(4, 13), min_size=1, max_size=3)))
            dims = st.integers(0, len(shape) - 1).map(S)
            placements = tuple(data.draw(st.one_of(st.just(R()), dims)) for _ in sizes)
        boxes = [tuple(map(tuple, local(shape, sizes, at, placements)[::-1])) for at in places]
        shapes.append(shape)
        stored.append(boxes)
        chunks += [(number, rank, one) for rank, one in enumerate(boxes) if all(one[1])]
    found = wb.layout(saved(shapes, chunks))
    for number, shape in enumerate(shapes):
        placed = found.placed(f"w{number}")
        if all(all(size) for _, size in stored[number]):
            assert placed.status == "proven", placed.why
        if placed.status != "proven" or placed.kind == "whole" or len(found.holders) < world:
            continue  # a rank that holds nothing of any tensor leaves no trace
        assert placed.torch is not None, str(placed)
        again = []
        for text in placed.torch:
            if text == "Replicate()":
                again.append(R())
            elif match := re.fullmatch(r"Shard\(dim=(\d)\)", text):
                again.append(S(int(match[1])))
            else:
                match = re.fullmatch(r"_StridedShard\(dim=(\d), sf=(\d+)\)", text)
                assert match is not None
                again.append(Strided(int(match[1]), split_factor=int(match[2])))
        for rank in range(world):
            at = digits.coordinates(np.array([rank]), placed.mesh.shape)[0].tolist()
            size, low = local(shape, placed.mesh.shape, at, tuple(again))
            want = stored[number][rank]
            assert tuple(size) == want[1] and (tuple(low) == want[0] or not all(want[1]))


@examples(120, 3_000)
@given(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(2, 5))
def test_flat_buffers_are_ranges_or_said_to_be_unknown(shapes: list[list[int]], ranks: int) -> None:
    sizes = [tuple(shape) for shape in shapes]
    chunks = []
    for number, flat in enumerate(flat_buffer([int(np.prod(shape)) for shape in sizes], ranks)):
        boxes = forward(sizes[number], [(flat, ranks)], np.arange(ranks)[:, None])
        chunks += [(number, rank, one) for rank, mine in enumerate(boxes) for one in mine]
    found = wb.layout(saved(sizes, chunks))
    order = {name: row for row, name in enumerate(found.holders.label)}
    for number, shape in enumerate(sizes):
        placed = found.placed(f"w{number}")
        pieces = found.pieces(f"w{number}")
        holders = [order[name] for name in pieces["holder"]]
        row = int(np.prod(shape[1:]))
        starts = [int(np.ravel_multi_index(low, shape)) for low in pieces["offsets"]]
        ragged = any(start % row for start, a, b in zip(starts, holders, [None, *holders], strict=False) if a != b)
        if len(set(holders)) > 1:
            assert placed.kind in ("flat", "grid", "irregular")  # rows in equal parts look like a shard
        if ragged:
            assert placed.kind == "flat" and placed.status == "proven", placed.why
        if placed.kind == "flat":
            assert holders == sorted(holders) and len(set(holders)) > 1
        if len(set(holders)) == 1:
            assert placed.kind == "whole" and (placed.status == "unknown")


def test_flat_ranges_inside_a_tensor_parallel_shard() -> None:
    """Megatron's distributed optimizer: columns by tp, then ranges of what is left, by dp."""
    shape, places = (4, 6), Mesh(dp=2, tp=2).coordinates()
    boxes = forward(shape, [(Shard(1), 2), (Flat((0, 5), (5, 12)), 2)], places[:, ::-1])
    chunks = [(0, rank, one) for rank, mine in enumerate(boxes) for one in mine]
    ranks = {str(rank): {"tp": int(at[1]), "dp": int(at[0])} for rank, at in enumerate(places.tolist())}
    mesh = {"axes": {"tp": 2, "dp": 2}, "ranks": ranks, "source": "the test"}
    found = wb.layout(saved([shape], chunks, mesh=mesh, world_size=4))
    placed = found.placed("w0")
    assert (str(placed), placed.status, placed.kind) == ("tp Shard(1), dp Flat()", "proven", "flat")


# ---- what is wrong or missing ----------------------------------------------------------------------------------------


def test_holes_and_overlaps_are_exact() -> None:
    chunks = [(0, 0, ((0, 0), (2, 4))), (0, 1, ((2, 0), (1, 4))), (1, 0, ((0,), (5,))), (1, 1, ((3,), (5,)))]
    found = wb.layout(saved([(4, 4), (8,)], chunks))
    assert found.holes.to_dict("records") == [{"key": "w0", "offsets": (3, 0), "sizes": (1, 4), "numel": 4}]
    assert found.overlaps.to_dict("records") == [
        {"key": "w1", "offsets": (3,), "sizes": (2,), "numel": 2, "file_a": "__0_0.distcp", "file_b": "__1_0.distcp"}
    ]
    assert (found.placed("w0").kind, found.placed("w1").kind) == ("hole", "overlap")
    assert "HOLE  [3, 0] + [1, 4] of w0" in repr(found) and "OVERLAP  [3] + [2] of w1" in repr(found)


def test_rows_in_order_prove_no_flat_buffer() -> None:
    """4 rows by Shard(0), Shard(0) on 2 × 3 ranks: two of them have none."""
    rows = [(0, rank, ((row,), (1,))) for row, rank in enumerate((0, 1, 3, 4))]
    other = [(1, rank, ((0,), (2,))) for rank in range(6)]
    placed = wb.layout(saved([(4,), (2,)], rows + other)).placed("w0")
    assert (placed.kind, placed.status) == (
        "irregular",
        "unknown",
    ) and "a flat buffer, or shards along unknown axes" in placed.why
    ragged = [(2, 0, ((0, 0), (1, 3))), (2, 1, ((1, 0), (1, 1))), (2, 2, ((1, 1), (1, 2)))]
    found = wb.layout(saved([(4,), (2,), (2, 3)], rows + other + ragged))  # a buffer that is one for certain
    assert found.placed("w0").kind == found.placed("w2").kind == "flat"


def test_pieces_in_no_order_are_irregular() -> None:
    chunks = [(0, 0, ((0,), (3,))), (0, 1, ((5,), (3,))), (0, 2, ((3,), (2,)))]
    placed = wb.layout(saved([(8,)], chunks)).placed("w0")
    assert (placed.kind, placed.status, str(placed)) == ("irregular", "unknown", "?")


def test_equal_sums_do_not_join_unequal_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were two ways to have one 64-bit number, rows still decide."""
    monkeypatch.setattr(classes, "_mix", lambda values: values * np.uint64(0))
    chunks = [(0, 0, ((0,), (4,))), (0, 1, ((4,), (4,))), (1, 0, ((0,), (6,))), (1, 1, ((6,), (2,)))]
    catalog = saved([(8,), (8,)], chunks).catalog
    group, first = alike(catalog, catalog.rank.astype(np.int64), np.arange(2))
    assert group.tolist() == [0, 1] and first.tolist() == [0, 1]


def test_tensors_that_lie_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a million chunks cost is the number of ways, not of tensors or ranks."""
    monkeypatch.setattr(classes, "ROWS", 200)  # three tensors at a time
    chunks = [(t, rank, ((4 * rank, 0), (4, 3))) for t in range(50) for rank in range(64)]
    found = wb.layout(saved([(256, 3)] * 50, chunks))
    assert len(found.inferred.placed) == 1 and found.mesh.shape == (64,)
    assert set(found.tensors["status"]) == {"proven"}


def test_empty_checkpoints_and_selections() -> None:
    nothing = wb.layout(wb.open(SAMPLES / "dcp_fsdp2").select("no such tensor"))
    assert len(nothing.tensors) == 0 and nothing.summary["stored"] == 0 and "0 tensors" in repr(nothing)
    assert nothing.balance.ratio == 0
    one = wb.layout(wb.open(SAMPLES / "dcp_fsdp2").select(r"^model\.lm_head"))
    assert one.tensors["placement"].tolist() == ["ranks Shard(0)"]


def test_scalars_with_a_copy_a_rank_are_whole_on_each() -> None:
    """As paddle.distributed stores them with ``save_replicas``: one element of no axis, on every rank."""
    everywhere = [(0, rank, ((), ())) for rank in range(4)]
    rows = [(1, rank, ((2 * rank, 0), (2, 3))) for rank in range(4)]
    found = wb.layout(saved([(), (8, 3)], [*everywhere, *rows])).tensors
    assert found["placement"].tolist() == ["ranks Replicate()", "ranks Shard(0)"]
    assert digits.radices(np.zeros((4, 0), np.int64)) == digits.radices(np.zeros((4, 1), np.int64)) == (4,)


def test_axes_of_ranks_in_mixed_radix() -> None:
    assert digits.radices(np.array([[0], [2], [1], [3]])) == (2, 2)
    assert digits.radices(np.arange(6)[:, None]) == (6,)
    assert digits.radices(np.array([[0], [0], [1], [1]])) == (2, 2)
    assert digits.radices(np.array([[0], [1], [1], [0]])) is None
    assert digits.refine([(6,), (2, 3)], 6) == (2, 3)
    assert digits.refine([(2, 3), (3, 2)], 6) == (2, 3)  # the second contradicts the first
    assert cut_axis(10, [(AxisCut(0, 0, (4, 6)), 2, 1)]) == [(2, 2), (7, 3)]


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp_fsdp2", "megatron_dp_reshardable", "paddlenlp_legacy", "deepspeed_zero1"])
def test_figures_add_up(name: str) -> None:
    ckpt = wb.open(SAMPLES / name)
    found = wb.layout(ckpt)
    stored = int(ckpt.catalog.chunk_nbytes.sum())
    assert int(found.ranks["nbytes"].sum()) == int(found.files["nbytes"].sum()) == found.summary["stored"] == stored
    assert int(found.ranks["chunks"].sum()) == len(ckpt.chunks)
    for what in ("role", "dtype", "layer"):
        table = found.by(what)
        assert int(table["stored"].sum()) == stored and int(table["tensors"].sum()) == len(ckpt)
        assert int(table["nbytes"].sum()) == int(ckpt.tensors["nbytes"].sum())
    roles = ckpt.tensors.groupby("role", observed=True)["nbytes"].sum()
    assert found.by("role").set_index("role")["nbytes"].to_dict() == roles.to_dict()
    chunks = ckpt.chunks.assign(nbytes=ckpt.catalog.chunk_nbytes)
    assert found.files.set_index("file")["nbytes"].loc[lambda s: s > 0].to_dict() == (
        chunks.groupby("file", observed=True)["nbytes"].sum().to_dict()
    )
    for label in found.ranks["label"]:
        number = int(label.split()[1]) if label.startswith("rank ") else label
        view = found.rank(number)
        assert view.nbytes == int(found.ranks.set_index("label")["nbytes"][label])
    assert found.summary["proven"] + found.summary["partly"] + found.summary["unknown"] == len(ckpt)


def test_what_is_not_there_is_said() -> None:
    found = wb.layout(wb.open(SAMPLES / "dcp_fsdp2"))
    with pytest.raises(TensorNotFoundError, match="no tensor 'nope'"):
        found.placed("nope")
    with pytest.raises(UsageError, match="'rank 9' stored nothing"):
        found.rank(9)
    with pytest.raises(UsageError, match="no pipeline stage is stored"):
        found.by("stage")
    with pytest.raises(UsageError, match="not by 'colour'"):
        found.by("colour")


# ---- screens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp_fsdp2", "paddlenlp_legacy", "hf_llama_bf16_sharded", "dcp_single_odd"])
def test_text_and_html_are_bounded_and_harmless(name: str) -> None:
    found = wb.layout(wb.open(SAMPLES / name))
    lines = repr(found).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120 and repr(found).isprintable() is False  # newlines only
    assert all(line.isprintable() for line in lines)
    assert found._repr_html_().startswith("<div>")


def test_hostile_names_are_shown_not_obeyed() -> None:
    builder = CatalogBuilder("dcp", Place(SAMPLES))
    name = "a\x1b[2J<script>\u202e"
    builder.tensor(name, by_name("float32"), (4,))
    builder.chunk(name, (0,), (4,), "f\x1b<b>.distcp", 0, 16, rank=-1)
    catalog = builder.build({})
    place = Place(SAMPLES)
    found = wb.layout(wb.Checkpoint(place, catalog, SourcePool(place, catalog.files, catalog.file_stats), {}))
    text, html = repr(found), found._repr_html_()
    assert "\x1b" not in text + html and "\u202e" not in text and "<script>" not in html and "<b>.dis" not in html


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    sample = str(SAMPLES / "dcp_tp2_fsdp2_vocab515")
    assert main(["layout", sample]) == 0
    assert "48 proven, 15 partly, 21 unknown of 84 tensors" in capsys.readouterr().out
    assert main(["layout", sample, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["mesh"] == {"axis0": 2, "axis1": 2} and len(document["tensors"]) == 84
    assert main(["layout", sample, "--tensor", "model.output.weight"]) == 0
    assert "(_StridedShard(dim=0, sf=2), Shard(dim=0))" in capsys.readouterr().out
    assert main(["layout", sample, "--tensor", "model.output.weight", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pieces"][3]["sizes"] == [128, 32]
    assert main(["layout", sample, "--rank", "3", "--all"]) == 0
    assert "rank 3 at axis0=1, axis1=1" in capsys.readouterr().out
    assert main(["layout", sample, "--rank", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peers"]["axis1"] == ["rank 2", "rank 3"]
    assert main(["layout", sample, "--rank", "7"]) == 64 == main(["layout", sample, "--tensor", "nope"])
    assert main(["show", sample, "nope"]) == 64
    assert main(["layout", str(SAMPLES / "nothing here")]) == 3


def test_neither_the_number_of_a_rank_nor_of_overlaps_is_trusted_for_a_size() -> None:
    far = wb.layout(saved([(4, 4)], [(0, 0, ((0, 0), (2, 4))), (0, 2**31 - 2, ((2, 0), (2, 4)))]))
    assert [int(one) for one in far.ranks["rank"]] == [0, 2**31 - 2]
    assert called(far.holders, [0, 1]) == "ranks 0, 2147483646"
    piled = [(0, rank, ((rank,), (3000,))) for rank in range(3000)]  # 4.5 million pairs
    found = wb.layout(saved([(6000,)], piled))
    assert len(found.overlaps) == 1024 and found.rank(found.ranks["rank"][0]).rank == 0


def test_chunks_that_overlap_in_too_many_ways_are_told() -> None:
    walls = [(0, 0, ((at, 0, 0), (1, 81, 81))) for at in range(1, 81, 2)]  # and 41³ holes between them
    walls += [(0, 0, ((0, at, 0), (81, 1, 81))) for at in range(1, 81, 2)]
    walls += [(0, 0, ((0, 0, at), (81, 81, 1))) for at in range(1, 81, 2)]
    ckpt = saved([(81, 81, 81)], walls)
    found = wb.layout(ckpt)
    assert found.covered.tangled == [0] and found.to_dict()["tangled"] == ["w0"]
    assert "HOLES NOT CHECKED  in w0" in repr(found) and found.placed("w0").kind == "hole"
    report = wb.verify(ckpt)
    told = [one for one in report.findings.to_dict("records") if one["rule"] == "coverage.hole"]
    assert (
        len(told) == 1 and "its 120 chunks have more overlaps or holes" in told[0]["message"] and report.exit_code == 2
    )
    with pytest.raises(CorruptError, match="tensor 'w0': its 120 chunks overlap in too many ways"):
        chunk_work(ckpt.payloads)


def test_a_number_in_a_files_name_that_is_no_rank_is_none(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SAMPLES / "dcp_single_odd", tmp_path / "one"))
    (name,) = [one.name for one in folder.glob("*.distcp")]
    other = name.replace("__0_", "__99999999999_")
    (folder / name).rename(folder / other)
    data = (folder / ".metadata").read_bytes()
    before, after = (b"\x8c" + bytes([len(one)]) + one.encode() for one in (name, other))  # SHORT_BINUNICODE
    assert data[:3] == b"\x80\x04\x95" and data.count(before)
    frame = struct.unpack_from("<Q", data, 3)[0] + data.count(before) * (len(after) - len(before))
    edited = data[:3] + struct.pack("<Q", frame) + data[11:].replace(before, after)
    (folder / ".metadata").write_bytes(edited)
    ckpt = wb.open(folder)
    assert set(ckpt.catalog.rank.tolist()) == {-1} and len(wb.layout(ckpt).ranks) == 1


def test_the_index_of_shards_is_not_counted_as_a_file_of_chunks(tmp_path):
    save_file({f"{n}.weight": np.ones(100, np.float32) for n in range(3)}, tmp_path / "x.safetensors")
    report = wb.export(tmp_path / "x.safetensors", tmp_path / "shards", max_shard_size=500)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    found = wb.layout(tmp_path / "shards")
    shards = [one for one in report.files if one.name.endswith(".safetensors")]
    assert found.summary["files"] == len(shards) == 3
