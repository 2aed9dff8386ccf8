"""DCP as torch writes it today, every variant, made fresh by four gloo ranks; and what can be wrong with one."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import workbench as wb
from tests.reader_suite import check_reader, refused, same_bits
from workbench import errors

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = [
    "fsdp1",
    "fsdp2",
    "hf_sharded",
    "hsdp",
    "many_files",
    "no_collectives",
    "safetensors_format",
    "two_d",
    "zstd",
]


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    out = tmp_path_factory.mktemp("fresh")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, "-m", "tests.fresh.dcp_ranks", str(out)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return out


@pytest.fixture
def copy(fresh, tmp_path):
    def make(name: str = "fsdp2") -> Path:
        return Path(shutil.copytree(fresh / name, tmp_path / name))

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_tensors_that_torch_gathered(fresh, name):
    ckpt = check_reader(fresh / name, load_file(fresh / f"{name}.truth.safetensors"))
    assert ckpt.format == ("safetensors" if name == "hf_sharded" else "dcp")
    assert ckpt.world_size is None  # DCP stores none, and writers do not prove it
    if name not in ("hf_sharded", "safetensors_format", "fsdp1"):
        assert ckpt.step == 2 and ckpt.objects["note"] == "ein Gruß"
        assert ckpt.param("layers.0.wq.weight", role="exp_avg_sq").shape == (16, 16)
    assert set(ckpt.chunks["rank"].dropna()) == {0, 1, 2, 3}


def test_two_d_uneven_boxes_are_those_of_torch(fresh):
    """Vocab 515 over dp 2 × tp 2: _StridedShard leaves 129, 129, 129 and 128 rows, not in the order of the ranks."""
    chunks = wb.open(fresh / "two_d")["model.embed.weight"].chunks
    assert sorted(zip(chunks["offsets"], chunks["sizes"], strict=True)) == [
        ((0, 0), (129, 16)),
        ((129, 0), (129, 16)),
        ((258, 0), (129, 16)),
        ((387, 0), (128, 16)),
    ]


def test_no_collectives_keeps_every_ranks_copy(fresh):
    ckpt = wb.open(fresh / "no_collectives")
    step = ckpt["optim.state.embed.weight.step"]
    assert step.num_replicas == 4 and [step.replica(i).torch().item() for i in range(4)] == [2.0] * 4
    with pytest.raises(errors.TensorNotFoundError, match="no replica 4"):
        step.replica(4)
    assert ckpt["model.embed.weight"].num_replicas == 1


def test_writer_of_a_chunk_is_its_files_rank(fresh):
    chunks = wb.open(fresh / "fsdp2").chunks
    assert all(f"__{rank}_" in file for rank, file in zip(chunks["rank"], chunks["file"], strict=True))


def test_old_metadata_without_version_transforms_or_index(copy):
    """torch ≤ 2.2 wrote neither; the attributes are simply absent from the pickle."""
    folder = copy()
    with open(folder / ".metadata", "rb") as handle:
        old = pickle.load(handle)  # torch's own file, made a second ago
    for name in ("version", "storage_meta", "planner_data"):
        old.__dict__.pop(name, None)
    for index in old.storage_data:
        object.__setattr__(index, "index", None)
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(old, handle, protocol=2)
    ckpt = wb.open(folder)
    assert ckpt.param("embed.weight").shape == (515, 16)
    assert len(ckpt.select(role="exp_avg")) == 14


def test_storage_info_of_another_framework_is_known_by_its_name(copy):
    folder = copy()
    data = (folder / ".metadata").read_bytes()
    here, there = b"torch.distributed.checkpoint.filesystem", b"vescale.checkpoint.storage.filesystem12"
    assert len(here) == len(there) and data.count(here) == 1
    (folder / ".metadata").write_bytes(data.replace(here, there))
    assert wb.open(folder)["model.embed.weight"].torch().shape == (515, 16)


def test_an_interrupted_save_is_named(copy):
    folder = copy()
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    refused(errors.IncompleteError, folder, ".metadata", "interrupted", "earlier step")
    (folder / ".metadata").write_bytes(b"")
    refused(errors.IncompleteError, folder, "empty")


def test_missing_truncated_empty_and_swapped_files(copy):
    folder = copy()
    file = folder / "__2_0.distcp"
    whole = file.read_bytes()
    file.unlink()
    refused(errors.MissingFileError, folder, "__2_0.distcp", "partial=True")
    file.write_bytes(b"")
    refused(errors.TruncatedError, folder, "__2_0.distcp", "tensor", "byte", "has 0")
    file.write_bytes(whole[:-100])
    refused(errors.TruncatedError, folder, "__2_0.distcp", f"{len(whole) - 100:,}")
    kept = wb.open(folder, partial=True, cache=False)
    held = [key for key in kept if "__2_0.distcp" not in set(kept[key].chunks["file"])]
    assert held and all(kept[key].torch() is not None for key in held)
    lost = r"opened in part: \d+ of \d+ chunks cannot be read; absent or truncated: '__2_0.distcp'"
    assert len(kept.notes) == 1 and re.fullmatch(lost, kept.notes[0])
    file.write_bytes(whole)

    one, three = folder / "__1_0.distcp", folder / "__3_0.distcp"
    a, b = one.read_bytes(), three.read_bytes()
    size = max(len(a), len(b))
    one.write_bytes(b.ljust(size, b"\0"))
    three.write_bytes(a.ljust(size, b"\0"))
    refused(errors.CorruptError, folder, "tensor 'model.embed.weight'", "byte", read="model.embed.weight")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(copy):
    folder = copy()
    (folder / "__0_0.distcp").chmod(0)
    refused(errors.MissingFileError, folder, "permission", "chmod", read="model.embed.weight")


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/hostname", "a/../../outside.distcp", "link.distcp"])
def test_metadata_that_leaves_the_folder(copy, name):
    folder = copy()
    shutil.copy(folder / "__0_0.distcp", folder.parent / "outside.distcp")
    (folder / "link.distcp").symlink_to(folder.parent / "outside.distcp")
    with open(folder / ".metadata", "rb") as handle:
        meta = pickle.load(handle)
    for info in meta.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            info.relative_path = name
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(meta, handle)
    refused(
        errors.UnsafeError,
        folder,
        "out of the checkpoint" if name == "link.distcp" else "leaves the checkpoint",
    )


def edited(folder, change):
    with open(folder / ".metadata", "rb") as handle:
        meta = pickle.load(handle)
    change(meta)
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(meta, handle)


@pytest.mark.parametrize("change", [{"length": -5}, {"offset": -5}, {"offset": 1 << 62, "length": 1 << 62}])
def test_an_object_of_no_possible_bytes_is_refused(copy, change):
    folder = copy()

    def move(meta):
        kinds = meta.state_dict_metadata
        index = next(i for i in meta.storage_data if type(kinds[i.fqn]).__name__ == "BytesStorageMetadata")
        vars(meta.storage_data[index]).update(change)

    edited(folder, move)
    with pytest.raises(errors.CorruptError):
        wb.open(folder, cache=False)
    assert wb.verify(folder).exit_code == 2


def test_a_lost_chunk_is_a_hole_when_its_tensor_is_read_and_only_then(copy, fresh):
    folder = copy()

    def lose(meta):
        index = next(i for i in meta.storage_data if i.fqn == "model.embed.weight" and i.offset[0] == 129)
        del meta.storage_data[index]

    edited(folder, lose)
    ckpt = wb.open(folder)
    assert any("holes" in note for note in ckpt.notes)
    with pytest.raises(errors.HoleError, match=r"'model.embed.weight'.*\[129:258, 0:16\].*2,064 requested elements"):
        ckpt["model.embed.weight"].torch()
    truth = load_file(fresh / "fsdp2.truth.safetensors")
    same_bits(ckpt["model.embed.weight"][:129], truth["model.embed.weight"][:129], "above the hole")
    same_bits(ckpt["model.head.weight"].torch(), truth["model.head.weight"], "another tensor")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("offsets", torch.Size((0,)), ["dimensions"]),
        ("sizes", torch.Size((2**62, 2**62)), ["'model.embed.weight'", "outside its shape"]),
        ("sizes", (-1, 16), ["'model.embed.weight'"]),
        ("sizes", ("x", 16), ["not laid out"]),
        ("sizes", None, ["not laid out"]),
    ],
)
def test_impossible_boxes(copy, field, value, words):
    folder = copy()
    edited(folder, lambda meta: setattr(meta.state_dict_metadata["model.embed.weight"].chunks[0], field, value))
    refused(errors.CorruptError, folder, *words)


def test_impossible_shape_range_and_length(copy):
    folder = copy()
    edited(
        folder,
        lambda m: setattr(m.state_dict_metadata["model.embed.weight"], "size", torch.Size((2**40, 2**40))),
    )
    refused(errors.CorruptError, folder, "'model.embed.weight'", "an impossible shape")
    for offset, length in ((10**15, 10), (-5, 10), (5, -10), (2**70, 1)):

        def move(meta, offset=offset, length=length):
            meta.state_dict_metadata["model.embed.weight"].size = torch.Size((515, 16))
            info = next(v for k, v in meta.storage_data.items() if k.fqn == "model.embed.weight")
            info.offset, info.length = offset, length

        edited(folder, move)
        refused(errors.CorruptError, folder, "")


def test_metadata_that_is_none(copy):
    folder = copy()
    whole = (folder / ".metadata").read_bytes()
    for data, words in (
        (whole[: len(whole) // 2], "'.metadata'"),
        (pickle.dumps({"a": 1}), "instead of checkpoint metadata"),
        (b"\x80\x04.", "'.metadata'"),
        (b"cos\nsystem\n(S'touch ran'\ntR.", "os.system"),
        (os.urandom(1000), "'.metadata'"),
    ):
        (folder / ".metadata").write_bytes(data)
        refused(errors.OpenError, folder, words)
    assert not (folder / "ran").exists() and not Path("ran").exists()


def test_a_flipped_bit_in_an_archives_header_is_an_error_or_harmless(copy, fresh):
    """Headers of items are checked; a payload bit can only be found by a content check (a later command)."""
    folder = copy()
    truth = load_file(fresh / "fsdp2.truth.safetensors")["model.embed.weight"]
    row = wb.open(folder)["model.embed.weight"].chunks.iloc[0]
    path = folder / row["file"]
    whole = bytearray(path.read_bytes())
    chance = np.random.default_rng(0)
    payload = int(np.prod(row["sizes"])) * 4
    for at in chance.integers(row["start"], row["stop"] - payload, 60).tolist():
        # bytes before and after the payload: archive structure; leave the payload (the 64-byte aligned middle) alone
        at = at if at < row["start"] + 600 else row["stop"] - (row["stop"] - payload - at) % 700 - 1
        broken = bytearray(whole)
        broken[at] ^= 1 << int(chance.integers(8))
        path.write_bytes(broken)
        try:
            got = wb.open(folder, cache=False)["model.embed.weight"].torch()
        except errors.OpenError:
            continue
        same_bits(got, truth, f"flip at {at}")


def test_a_tensor_of_a_class_of_its_own_is_not_checked_and_not_called_damaged(tmp_path: Path) -> None:
    """torchao's weights are such: one DCP item, made of several tensors."""
    for side in (0.0, 1.0):
        state = {"w": TwoTensor(torch.zeros(3, 4), torch.full((3, 4), side)), "b": torch.ones(5)}
        dcp.save(state, checkpoint_id=tmp_path / str(side), no_dist=True)
    ckpt = wb.open(tmp_path / "0.0")
    with pytest.raises(errors.UnsupportedFormatError, match="class 'TwoTensor'"):
        ckpt["w"].torch()
    assert ckpt["b"].torch().tolist() == [1.0] * 5
    for deep in (False, True):
        report = wb.verify(ckpt, deep=deep)
        assert not report and "'w'" in report.not_checked["unread tensors"]  # neither damaged nor "zeros only"
    found = wb.diff(ckpt, tmp_path / "1.0")
    assert (found.exit_code, found.count("unread"), found.count("equal")) == (1, 1, 1)
    assert wb.export(ckpt, tmp_path / "out", select="b", verify=True).identical
    with pytest.raises(errors.UnsupportedFormatError, match=r"'w'.*select="):
        wb.export(ckpt, tmp_path / "all")


def test_flat_parameters_and_buffers_are_not_called_what_they_are_not(tmp_path: Path) -> None:
    model = {
        "fc.weight": torch.ones(3, 4),
        "fc.bias": torch.ones(3),
        "freqs": torch.ones(8),
        "flag": torch.ones(1).bool(),
    }
    state = {f"fc.{name}": {"exp_avg": torch.ones(model[f"fc.{name}"].shape)} for name in ("weight", "bias")}
    dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=tmp_path / "buffers", no_dist=True)
    (found,) = [one for one in wb.verify(tmp_path / "buffers") if one.rule == "state.none"]
    assert found.evidence["parameters"] == ["freqs"] and "buffers" in found.hint
    local = {"model._flat_param": torch.ones(20), "model.layers.0._flat_param": torch.ones(12)}
    dcp.save(local, checkpoint_id=tmp_path / "flat", no_dist=True)
    assert ["2 tensors are flat parameters of FSDP1" in note for note in wb.open(tmp_path / "flat").notes] == [True]


def test_tensors_within_objects_are_mentioned(tmp_path):
    state = {"model": {"w": torch.ones(2)}}
    for flat in (True, False):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=flat)
        dcp.save(state, checkpoint_id=tmp_path / str(flat), planner=planner, no_dist=True)
    assert list(wb.open(tmp_path / "True")) == ["model.w"] and wb.open(tmp_path / "True").notes == []
    (note,) = wb.open(tmp_path / "False").notes
    assert note.startswith("no tensor is listed: 1 object may hold tensors") and "flatten_state_dict=False" in note
