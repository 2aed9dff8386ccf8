"""torch_checkpointing: what the library wrote, and what is left of a save that was killed or damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import workbench as wb
from tests.reader_suite import check_reader, refused, same_bits
from workbench.core.mesh.placement import of_torch
from workbench.core.place import Place
from workbench.errors import CorruptError, IncompleteError, UnsafeError, UnsupportedFormatError
from workbench.formats.torch_checkpointing.spec import _boxes

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
NAME = "torch_checkpointing/step-3"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / NAME, tmp_path / "step-3"))


@pytest.fixture
def truth() -> dict[str, torch.Tensor]:
    return load_file(ROOT.parent / "tests/truth" / f"{NAME}.safetensors")


def edit(step: Path, change) -> None:
    document = pickle.loads((step / "metadata.pkl").read_bytes())
    change(document)
    (step / "metadata.pkl").write_bytes(pickle.dumps(document, protocol=4))


def group(document: dict, path: str, item: str = "model") -> dict:
    return document["metadata"][item]["nested_path_to_metadata"][json.dumps([path])][0]["sharding_metadata"]["data"]


# ---- what the library wrote -----------------------------------------------------------------------------------------


def test_mesh_world_size_and_placements_are_read(samples: Path) -> None:
    ckpt = wb.open(samples / NAME)
    assert (ckpt.format, ckpt.world_size, ckpt.step) == ("torch_checkpointing", 4, 3)
    assert ckpt.mesh["axes"] == {"fsdp": 2, "tp": 2}
    assert ckpt.mesh["ranks"]["model_2.pt"] == {"fsdp": 1, "tp": 0}
    assert Counter(ckpt.roles)["exp_avg"] == 3
    assert ckpt.param("norm.weight", role="exp_avg").key == "optimizer.state.norm.weight.exp_avg"
    norm = ckpt["model.norm.weight"]
    assert norm.num_replicas == 2  # replicated over tp, sharded over fsdp
    same_bits(norm.replica(1).torch(), norm.torch(), "replica")


def test_state_of_ranks_is_kept_where_it_differs(samples: Path) -> None:
    objects = wb.open(samples / NAME).objects
    assert objects["config"] == {"vocab": 43, "rank_independent": True}
    assert set(objects) == {"config", "dataloader", "dataloader@rank2", "dataloader@rank3", "lr_scheduler", "optimizer"}
    assert objects["dataloader"] == {"dp_rank_0": {"cursor": 7}}
    assert objects["dataloader@rank3"] == {"dp_rank_1": {"cursor": 8}}
    assert wb.open(samples / "torch_checkpointing" / "single").objects["step"] == 3


def test_without_metadata_the_files_suffice(step: Path, truth: dict[str, torch.Tensor]) -> None:
    """The synchronous saver writes ``metadata.pkl`` in its first save only."""
    (step / "metadata.pkl").unlink()
    for rank in range(4):
        (step / f"head_{rank}.safetensors").unlink()  # the only item whose file has no placements
    del truth["head.proj"]
    ckpt = check_reader(step, truth)
    assert ckpt.world_size == 4 and wb.verify(step, deep=True).exit_code == 0


def test_version_1_metadata_is_read_alike(step: Path, truth: dict[str, torch.Tensor]) -> None:
    """As the library's ``_convert_v1_to_v2`` expects it: paths begin with the item, layouts are by rank."""

    def downgrade(document: dict) -> None:
        flat, layouts = {}, {}
        for item, told in document["metadata"].items():
            for path, groups in told["nested_path_to_metadata"].items():
                flat[json.dumps([item, *json.loads(path)])] = groups
            for rank, layout in told["rank_to_layout_info"].items():
                layouts.setdefault(str(rank), {})[item] = layout
        document |= {"metadata": flat, "rank_to_layout_info_mappings": layouts}
        del document["version"]

    edit(step, downgrade)
    check_reader(step, truth)


def test_boxes_of_a_default_tensor_are_read(step: Path, truth: dict[str, torch.Tensor]) -> None:
    """``default_tensor_v1`` lists boxes; here those of the local tensors of ``head``, each cut in two."""

    def boxes(document: dict) -> None:
        groups = []
        for rank in range(4):
            top, left = rank // 2 * 4, rank % 2 * 4
            data = {"global_shape": [8, 8], "dtype": "torch.float32", "global_offsets": [[top, left], [top + 1, left]]}
            data |= {"local_offsets": [[0, 0], [1, 0]], "local_sizes": [[1, 4], [3, 4]]}
            groups.append({"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (rank,)})
        document["metadata"]["head"]["nested_path_to_metadata"] = {'["proj"]': groups}

    edit(step, boxes)
    ckpt = check_reader(step, truth)
    assert len(ckpt["head.proj"].chunks) == 8


@pytest.mark.parametrize("shape", [(43, 8), (7,), (3, 5), (16, 2), (1, 4)])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        ((2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
        ((4,), (_StridedShard(0, split_factor=2),)),
    ],
)
def test_boxes_are_those_of_torch(shape, mesh, placements) -> None:
    """Against torch's own arithmetic: what a DTensor of these placements keeps of ``arange``, on every coordinate."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for position in range(torch.Size(mesh).numel()):
        coordinate = torch.unravel_index(torch.tensor(position), mesh)
        coordinate = tuple(int(at) for at in coordinate)
        want = whole
        # as DTensor distributes: strided shards come last, from right to left
        order = [a for a, p in enumerate(placements) if not isinstance(p, _StridedShard)]
        lone = len(order) == 0
        order += [a for a in reversed(range(len(mesh))) if isinstance(placements[a], _StridedShard)]
        for axis in order:
            placement = placements[axis]
            if isinstance(placement, Replicate):
                continue
            if lone:
                pieces = placement._split_tensor(want, mesh[axis], with_padding=False)[0]
                want = pieces[coordinate[axis]]
                continue
            chunks = torch.chunk(want, mesh[axis], dim=placement.dim) if want.shape[placement.dim] else ()
            empty = want.narrow(placement.dim, 0, 0)
            want = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else empty
        local, boxes = _boxes(tuple(shape), mesh, coordinate, tuple(map(of_torch, placements)))
        assert local == tuple(want.shape)
        got = torch.full(local, -1)
        for offsets, sizes, at in boxes:
            outer = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            got[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] = whole[outer]
        assert torch.equal(got, want)


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("fsdp2_w4_async/step-3", "fsdp2_w4_async/truth_step-3"),
        ("fsdp2_w4_async/step-6", "fsdp2_w4_async/truth_step-6"),
        ("hsdp_2x2/step-3", "hsdp_2x2/truth_step-3"),  # the truth lacks its averages and generator states
        ("single_no_resharder/step-3", "single_no_resharder/truth"),
        ("single_resharder/step-3", "single_resharder/truth"),
    ],
)
def test_further_saves_equal_their_truth(name: str, beside: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / "torch_checkpointing"
    check_reader(folder / name, load_file(folder / f"{beside}.safetensors"), rest=name.startswith("hsdp"))


# ---- interrupted saves ----------------------------------------------------------------------------------------------


def test_a_folder_that_was_not_renamed_does_not_count(step: Path, tmp_path: Path) -> None:
    shutil.copytree(step, tmp_path / "tmp_step-4")
    os.truncate(tmp_path / "tmp_step-4" / "model_2.pt", 4000)
    found = {Path(row.path).name: row for row in wb.discover(tmp_path).itertuples()}
    assert found["step-3"].complete and not found["tmp_step-4"].complete
    assert "not renamed to 'step-4'" in found["tmp_step-4"].why
    assert wb.open(tmp_path).step == 3
    refused(IncompleteError, tmp_path / "tmp_step-4", "1 of 32 files", "'model_2.pt'")


def test_a_truncated_file_is_named_and_the_rest_can_be_opened(step: Path, truth: dict[str, torch.Tensor]) -> None:
    os.truncate(step / "optimizer_3.pt", 4000)
    refused(IncompleteError, step, "1 of 32 files", "'optimizer_3.pt'")
    ckpt = wb.open(step, partial=True, cache=False)
    same_bits(ckpt["model.output.weight"].torch(), truth["model.output.weight"], "intact")
    with pytest.raises(wb.errors.HoleError):
        ckpt["optimizer.state.layers.0.attention.wq.weight.exp_avg"].torch()


@pytest.mark.parametrize("lost", ["model_3.pt", "model_0.pt", "config_1.json", "head_2.safetensors"])
@pytest.mark.parametrize("described", [True, False])
def test_a_missing_file_is_named(step: Path, lost: str, described: bool) -> None:
    if not described:
        (step / "metadata.pkl").unlink()
    (step / lost).unlink()
    refused(IncompleteError, step, lost.split(".")[0])
    report = wb.verify(step)
    assert report.exit_code and any(lost.split(".")[0] in one.message for one in report)


def test_all_files_of_the_last_rank_are_missed_through_the_world_size(step: Path) -> None:
    for path in step.glob("*_3.*"):
        path.unlink()
    refused(IncompleteError, step, "8 of ", "_3")
    (row,) = wb.discover(step.parent).itertuples()
    assert not row.complete and "8 of 32 files" in row.why


def test_empty_files_as_o_direct_leaves_them_are_named(step: Path) -> None:
    """On ext4 the default of 0.1.1 fails in its first write, and leaves files of no bytes."""
    folder = step.rename(step.parent / "tmp_step-3")
    for path in folder.iterdir():
        path.write_bytes(b"")
    (folder / "metadata.pkl").unlink()
    refused(IncompleteError, folder, "is empty")


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_a_replica_that_differs_is_found_with_its_rank(step: Path) -> None:
    from tests.faults import resealed

    path = step / "train_state_2.pt"
    state = torch.load(path, weights_only=True)
    data = bytearray(path.read_bytes())
    at = data.index(int(state["ntokens_seen"]).to_bytes(8, "little"))
    data[at] ^= 1
    path.write_bytes(resealed(bytes(data)))  # drifted before it was saved: its CRC fits
    found = [one for one in wb.verify(step, deep=True) if one.rule == "replicas.differ"]
    assert len(found) == 1 and "ntokens_seen" in found[0].where + found[0].message
    assert "train_state_2.pt" in json.dumps(found[0].evidence) + found[0].message


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("item", ["model", "optimizer", "ema"])
def test_swapped_ranks_are_refused(step: Path, item: str, described: bool) -> None:
    if not described:
        (step / "metadata.pkl").unlink()
    a, b = step / f"{item}_0.pt", step / f"{item}_1.pt"
    left, right = a.read_bytes(), b.read_bytes()
    a.write_bytes(right)
    b.write_bytes(left)
    refused(CorruptError, step, f"'{item}_0.pt'", "rank 1", "rank 0", "swapped")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: group(d, "output.weight").update(global_shape=[44, 8]), ("(43, 8)", "(44, 8)", "different saves")),
        (lambda d: group(d, "output.weight").update(dtype="torch.int32"), ("float32", "int32")),
        (lambda d: group(d, "proj", "head").update(global_shape=[9, 8]), ("head.proj", "(4, 4)", "(5, 4)")),
        (lambda d: group(d, "proj", "head").update(dtype="torch.float16"), ("head.proj", "float16")),
        (lambda d: group(d, "output.weight").update(placements=[{"type": "Shard", "dim": 5}] * 2), ("model.output",)),
        (lambda d: group(d, "output.weight").update(placements=[]), ("0 placements",)),
        (lambda d: group(d, "output.weight")["mesh_spec"].update(mesh_shape=(1 << 40, 1)), ("mesh",)),
        (lambda d: group(d, "output.weight")["mesh_spec"].update(mesh_data=(0, 1)), ("mesh of 2 ranks",)),
        (lambda d: group(d, "output.weight").update(global_shape=[-1, 8]), ("global_shape",)),
        (lambda d: d.update(world_size=2), ("world size of 2", "different saves")),
        (lambda d: d.update(world_size=1 << 60), ("world size",)),
        (lambda d: d.update(metadata=[]), ("no dict",)),
        (lambda d: d["metadata"]["model"].update(nested_path_to_metadata={"[": []}), ("JSON",)),
        (lambda d: d["metadata"]["model"].update(rank_to_layout_info={0: {"file_path": 3}}), ("invalid layout",)),
    ],
)
def test_metadata_that_contradict_the_files_are_refused(step: Path, change, words: tuple[str, ...]) -> None:
    edit(step, change)
    refused(CorruptError, step, *words)


def test_paths_out_of_the_folder_are_refused(step: Path, tmp_path: Path) -> None:
    shutil.copy(step / "model_0.pt", tmp_path / "outside.pt")
    layout = {"file_path": "../outside.pt", "serialization_format": {"type": "TorchSerialization"}}
    edit(step, lambda d: d["metadata"]["model"]["rank_to_layout_info"].update({0: layout}))
    refused(UnsafeError, step, "outside.pt")


def test_unknown_versions_types_and_placements_are_refused(step: Path) -> None:
    before = (step / "metadata.pkl").read_bytes()
    partial = [{"type": "Partial"}, {"type": "Shard", "dim": 0}]
    changes = [
        lambda d: d.update(version="3.0"),
        lambda d: group(d, "output.weight").update(placements=partial),
        lambda d: d["metadata"]["model"]["nested_path_to_metadata"]['["output.weight"]'][0]["sharding_metadata"].update(
            type="ragged"
        ),
    ]
    for change in changes:
        (step / "metadata.pkl").write_bytes(before)
        edit(step, change)
        refused(UnsupportedFormatError, step)


def test_every_truncation_of_the_metadata_is_an_error_of_ours(step: Path) -> None:
    data = (step / "metadata.pkl").read_bytes()
    for size in range(0, len(data), 97):
        (step / "metadata.pkl").write_bytes(data[:size])
        with pytest.raises(wb.errors.OpenError):
            wb.open(step, cache=False)


# ---- what is not a save of this library -----------------------------------------------------------------------------


def test_files_of_a_training_loop_are_not_a_save(tmp_path: Path) -> None:
    for epoch in range(3):
        torch.save({"w": torch.ones(3)}, tmp_path / f"model_{epoch}.pt")
        torch.save({"m": torch.ones(3)}, tmp_path / f"optim_{epoch}.pt")
    assert set(wb.discover(tmp_path)["format"]) == {"torch_save"}
    assert not wb.formats.FORMATS["torch_checkpointing"].detect(Place(tmp_path))


def test_files_written_through_a_handle_are_not_ranks_without_a_dtensor(tmp_path: Path) -> None:
    for epoch in range(3):
        for name in ("model", "optim"):
            with open(tmp_path / f"{name}_{epoch}.pt", "wb") as handle:
                torch.save({"w": torch.ones(3)}, handle)
    assert not wb.formats.FORMATS["torch_checkpointing"].detect(Place(tmp_path))
