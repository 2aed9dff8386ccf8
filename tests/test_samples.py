"""sample_ckpts/ itself: small, accounted for, and equal to its truth by libraries other than this one."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
TRUTH = ROOT.parent / "tests"  #: the truth files named in the README are below it
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \| (?:`([^`]+)`|itself) \|$", re.MULTILINE)
README = {name: (origin, truth) for name, origin, truth in ROW.findall((ROOT / "README.md").read_text("utf-8"))}
NOT_CHECKPOINTS = {"logs", "make"}
# state that differs by rank and has no gathered value, so its truth file cannot hold it
RANK_LOCAL = {*(f"rng.rank{r}" for r in range(4)), "rng_shared_key", "train_state.tokens"}
RUNS = {
    "gguf",
    "keras",
    "loss_spike",
    "orbax",
    "quantised",
    "zarr",
    "titan_run",
    "torch_checkpointing",
    "trainer_run",
    "torch_save",
}  # each entry inside is a checkpoint


def _on_disk() -> set[str]:
    names = set()
    for entry in ROOT.iterdir():
        if entry.is_dir() and entry.name not in NOT_CHECKPOINTS:
            names |= {f"{entry.name}/{e.name}" for e in entry.iterdir()} if entry.name in RUNS else {entry.name}
    return names


def _truth(name: str) -> dict[str, torch.Tensor]:
    return load_file(TRUTH / README[name][1])


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def test_all_samples_together_stay_below_40_mb():
    sizes = {
        p: p.stat().st_size
        for top in (ROOT, TRUTH / "truth")
        for p in top.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert sum(sizes.values()) <= 40_000_000, sorted(sizes.items(), key=lambda item: -item[1])[:5]


def test_each_checkpoint_has_a_line_on_its_origin_and_the_reverse():
    assert _on_disk() == set(README)
    assert all(len(origin) > 20 for origin, _ in README.values())


def test_each_truth_file_belongs_to_a_checkpoint_and_the_reverse():
    named = {truth for _, truth in README.values() if truth}
    assert named == {p.relative_to(TRUTH).as_posix() for p in (TRUTH / "truth").rglob("*") if p.is_file()}
    same = {"torch_save/ckpt_legacy.pt": "torch_save/ckpt.pt"}  # one state, saved twice
    assert all(truth == f"truth/{same.get(name, name)}.safetensors" for name, (_, truth) in README.items() if truth)


def test_every_file_is_readable_by_everyone():
    assert [p for p in ROOT.rglob("*") if p.is_file() and p.stat().st_mode & 0o044 != 0o044] == []


def test_no_file_names_the_machine_that_made_it():
    roots = [f"/{name}/".encode() for name in ("tmp", "root", "home", "work")]
    needles = [*roots, tempfile.gettempdir().encode() + b"/", str(ROOT.parent).encode()]
    for path in ROOT.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and "make" not in path.parts:
            found = [n for n in needles if n in path.read_bytes()]
            assert not found, (path, found)


@pytest.mark.parametrize("name", [n for n in README if n.startswith(("dcp_", "titan_"))])
def test_dcp_truth_agrees_with_torchs_own_reader(name):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(ROOT / name)
    metadata = reader.read_metadata()
    truth = _truth(name)
    stored = {k for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    assert stored - set(truth) == (RANK_LOCAL if name == "dcp_fsdp2" else set())

    nested: dict = {}
    _load_state_dict(nested, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for key in truth:
        value = nested
        for part in metadata.planner_data[key]:
            value = value[part]
        assert _same_bits(value, truth[key]), key


@pytest.mark.parametrize("name", [n for n in README if n.startswith(("loss_spike/", "torch_save/"))])
def test_torch_save_truth_agrees_with_torch_load(name):
    # weights_only=False: our own file, with numpy and argparse objects in it
    state = torch.load(ROOT / name, weights_only=False)
    truth = _truth(name)
    found = dict(_tensors(state))
    assert set(found) == set(truth)
    for key, value in found.items():
        assert _same_bits(value.detach(), truth[key]), key


def test_hf_truth_agrees_with_safetensors():
    truth = _truth("hf_llama_bf16_sharded")
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted((ROOT / "hf_llama_bf16_sharded").glob("*.safetensors")):
        stored |= load_file(shard)
    assert set(stored) == set(truth)
    assert all(_same_bits(stored[k], truth[k]) for k in truth)


@pytest.mark.parametrize("name", [n for n, (_, truth) in README.items() if not truth])
def test_what_is_its_own_truth_can_be_read_by_its_own_library(name):
    files = sorted((ROOT / name).glob("*.safetensors"))
    assert files
    for path in files:
        with safe_open(path, "pt") as f:
            keys = list(f.keys())
            assert keys
            assert all(list(f.get_tensor(key).shape) == f.get_slice(key).get_shape() for key in keys)


def test_the_trainer_run_is_resumable_state_with_integer_ids():
    optimizer = torch.load(ROOT / "trainer_run/checkpoint-6/optimizer.pt", weights_only=True)
    ids = [i for group in optimizer["param_groups"] for i in group["params"]]
    assert len(optimizer["param_groups"]) == 2
    assert sorted(ids) == sorted(optimizer["state"]) == list(range(len(ids)))
    with safe_open(ROOT / "trainer_run/checkpoint-6/model.safetensors", "pt") as f:
        keys = list(f.keys())
    assert len(keys) == len(ids)
    assert "lm_head.weight" not in keys
    assert {s["step"].item() for s in optimizer["state"].values()} == {6.0}


def test_the_uneven_2d_sample_is_uneven_and_out_of_order():
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(ROOT / "dcp_tp2_fsdp2_vocab515").read_metadata()
    chunks = metadata.state_dict_metadata["model.tok_embeddings.weight"].chunks
    assert [(c.offsets[0], c.sizes[0]) for c in chunks] == [(0, 129), (258, 129), (129, 129), (387, 128)]


def test_the_loss_spike_is_one_of_masters_alone():
    """Weights, moments and counters came through the load; each master is the one that weights no longer round from."""
    before, echo, after = (_truth(f"loss_spike/{name}") for name in ("step-240.pt", "step-240-echo.pt", "step-245.pt"))
    assert set(before) == set(echo) == set(after)
    differ = {key for key in before if not _same_bits(before[key], echo[key])}
    assert differ == {key for key in before if key.endswith(".master_param")} and len(differ) == 20
    names = torch.load(ROOT / "loss_spike/step-240.pt", weights_only=True)["model"]
    order = [n for n in names if not n.endswith("norm.weight")] + [n for n in names if n.endswith("norm.weight")]
    fits = [
        [
            _same_bits(state[f"model.{name}"], state[f"optimizer.state.{number}.master_param"].bfloat16())
            for state in (before, echo, after)
        ]
        for number, name in enumerate(order)
    ]
    assert all(one == [True, False, True] for one in fits)


def test_the_loss_spike_has_its_curve():
    lines = (ROOT / "loss_spike.csv").read_text("utf-8").splitlines()
    assert lines[0] == "step,loss,loss_repaired"
    rows = [line.split(",") for line in lines[1:]]
    assert [int(step) for step, *_ in rows] == list(range(201, 281))
    went, goes = ([float(row[n]) for row in rows[40:]] for n in (1, 2))
    assert went[0] == goes[0]  # the first loss is right
    assert went[1] > max(float(row[1]) for row in rows[20:40]) and goes[1] < went[1]  # the second is not
    assert all(row[2] == "" for row in rows[:40])


def _tensors(value: object, path: str = ""):
    """(path joined by dots, tensor) for each tensor of a nested state."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in items:
        yield from _tensors(item, f"{path}.{name}" if path else str(name))
