"""Layouts of several parts: HF Trainer, accelerate, Lightning, and torch's own Hugging Face writer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from reading import bits
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.hf_writer import FULL
from tests.rank_jobs import told_by
from tests.reader_suite import check_reader
from workbench import formats
from workbench.core.place import Place
from workbench.errors import CorruptError, HoleError, IncompleteError, NotACheckpointError, WorkbenchError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",  # dcp.save(no_dist=True) says what was asked for
    "ignore:.*pin_memory.*:UserWarning",  # transformers' data loader without a GPU
)


def same(ckpt: wb.Checkpoint, truth: dict[str, torch.Tensor]) -> None:
    for key, tensor in truth.items():
        assert np.array_equal(bits(ckpt[key].torch()), bits(tensor)), key


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer


# ---- HF Trainer ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of transformers' own Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    rows = [{"input_ids": torch.randint(0, 32, (6,)), "labels": torch.randint(0, 32, (6,))} for _ in range(8)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_total_limit=None,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
    return folder


def test_a_trainer_checkpoint_is_one_view_of_all_its_files(trainer_run: Path) -> None:
    folder = trainer_run / "checkpoint-2"
    ckpt = wb.open(folder)
    assert (ckpt.format, ckpt.step, ckpt.world_size) == ("hf_trainer", 2, 1)
    weights = load_file(folder / "model.safetensors")
    stored = torch.load(folder / "optimizer.pt", weights_only=True)
    moments = {f"optimizer.state.{n}.{name}": t for n, state in stored["state"].items() for name, t in state.items()}
    assert set(ckpt) == set(weights) | set(moments)
    same(ckpt, weights | moments)
    assert {ckpt[key].role for key in weights} == {"param"}
    assert ckpt["optimizer.state.0.exp_avg"].role == "exp_avg"
    assert ckpt.objects["trainer_state"]["global_step"] == 2
    assert ckpt.objects["optimizer"]["param_groups"][0]["params"] == stored["param_groups"][0]["params"]
    assert torch.equal(
        ckpt.objects["rng_state"]["cpu"], torch.load(folder / "rng_state.pth", weights_only=False)["cpu"]
    )
    assert ckpt.objects["scheduler"]["last_epoch"] == 2
    assert ckpt.objects["training_args"].qualname == "TrainingArguments"
    assert ckpt.objects["config"]["hidden_size"] == 8


def test_ids_of_a_trainer_are_joined_only_where_the_shape_is_alone(trainer_run: Path) -> None:
    """safetensors sorts names, so that the order of the ids is lost: what is joined must be right, the rest is open."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = trainer_run / "checkpoint-2"
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    model = LlamaForCausalLM(config)
    decay = [name for name, value in model.named_parameters() if value.ndim > 1]
    order = decay + [name for name, value in model.named_parameters() if value.ndim == 1]
    ckpt = wb.open(folder)
    joined = {key: ckpt[key].fqn for key in ckpt if key.startswith("optimizer.") and ckpt[key].fqn is not None}
    assert joined
    for key, fqn in joined.items():
        assert order[int(key.split(".")[2])] == fqn
    (note,) = [note for note in ckpt.notes if "numbered" in note]
    assert note.startswith("optimizer: ") and "not certain" in note


def test_a_run_folder_opens_its_newest_step_and_says_so(trainer_run: Path) -> None:
    ckpt = wb.open(trainer_run)
    assert ckpt.step == 4
    assert ckpt.notes[0] == "opened 'checkpoint-4': the newest complete of 2 steps"


def test_a_trainer_checkpoint_without_parts_says_which(trainer_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(trainer_run / "checkpoint-2", folder)
    (folder / "optimizer.pt").unlink()
    (folder / "scheduler.pt").unlink()
    ckpt = wb.open(folder)
    assert any("no optimizer state" in note and "silently" in note for note in ckpt.notes)
    assert any("no scheduler.pt" in note for note in ckpt.notes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(IncompleteError, match=r"has 'trainer_state.json' but no weights"):
        wb.open(folder)
    (folder / "trainer_state.json").write_text("[]")
    with pytest.raises(CorruptError, match=r"'trainer_state.json' is a JSON list"):
        wb.open(folder)


def test_a_trainers_fsdp_parts_are_read_as_dcp(trainer_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(trainer_run / "checkpoint-2", folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).unlink()
    first = next(iter(weights))
    state = {first: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": {"state": state}}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    ckpt = wb.open(folder)
    assert ckpt.format == "hf_trainer"
    same(ckpt, {f"model.{name}": value for name, value in weights.items()})
    assert ckpt.param(first).key == f"model.{first}"
    assert ckpt.param(first, role="exp_avg").torch().tolist() == [1.0] * 3


def test_a_bin_trainer_checkpoint_joins_every_id(tmp_path: Path) -> None:
    """torch stores a state_dict in the model's order, so here the two groups of the Trainer are certain."""
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(5, 4), "norm": torch.nn.LayerNorm(4), "up": torch.nn.Linear(4, 4)}
    )
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    model["up"](model["norm"](model["embed"](torch.arange(5)))).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1}')
    ckpt = wb.open(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(ckpt.param(name, role="exp_avg").torch(), optimizer.state[parameter]["exp_avg"])
    assert not [note for note in ckpt.notes if "numbered" in note]


def test_the_trainers_files_without_its_state_keep_their_optimizer(tmp_path: Path) -> None:
    """Scripts, and people who copy checkpoints by hand, leave out ``trainer_state.json``."""
    target = tmp_path / "checkpoint-6"
    shutil.copytree(Path(__file__).parents[1] / "sample_ckpts" / "trainer_run" / "checkpoint-6", target)
    whole = wb.open(target)
    (target / "trainer_state.json").unlink()
    ckpt = wb.open(target)
    assert ckpt.format == "hf_trainer" and ckpt.step == 6 and set(ckpt) == set(whole)
    moments = torch.load(target / "optimizer.pt", weights_only=True)["state"]
    assert torch.equal(ckpt["optimizer.state.0.exp_avg"].torch(), moments[0]["exp_avg"])
    assert any("no trainer_state.json" in note for note in ckpt.notes)


# ---- accelerate ----------------------------------------------------------------------------------------------


def test_accelerates_own_save_state(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.save_state(str(tmp_path / "state"))
    ckpt = wb.open(tmp_path / "state")
    assert (ckpt.format, ckpt.world_size) == ("accelerate", 1)
    truth = load_file(tmp_path / "state" / "model.safetensors")
    for number, moments in optimizer.state_dict()["state"].items():
        truth |= {f"optimizer.state.{number}.{name}": value for name, value in moments.items()}
    assert set(ckpt) == set(truth)
    same(ckpt, truth)
    assert ckpt.objects["scheduler"]["step_size"] == 2
    assert "param_groups" in ckpt.objects["optimizer"]
    random_states = ckpt.objects["random_states_0"]
    assert torch.equal(random_states["torch_manual_seed"], torch.get_rng_state())
    assert random_states["step"] == 0


def test_two_models_and_optimizers_of_accelerate_are_kept_apart(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    first, second = small(), small()
    accelerator.prepare(*first, *second)
    accelerator.save_state(str(tmp_path / "state"))
    ckpt = wb.open(tmp_path / "state")
    assert {"0.weight", "model_1.0.weight", "optimizer.state.0.exp_avg", "optimizer_1.state.0.exp_avg"} <= set(ckpt)


def write_fsdp(folder: Path) -> dict[str, torch.Tensor]:
    """The two DCP folders with the containers that accelerate's ``save_fsdp_model`` and ``…_optimizer`` use."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = small()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    truth = {f"model.{name}": value for name, value in weights.items()}
    for name, state in moments["state"].items():
        truth |= {f"optimizer.state.{name}.{moment}": value for moment, value in state.items()}
    return truth


def test_accelerates_fsdp_folders_are_one_checkpoint(tmp_path: Path) -> None:
    truth = write_fsdp(tmp_path)
    for rank in range(2):
        torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, tmp_path / f"random_states_{rank}.pkl")
    ckpt = wb.open(tmp_path)
    assert (ckpt.format, ckpt.world_size, ckpt.notes) == ("accelerate", 2, [])
    assert set(ckpt) == set(truth)
    same(ckpt, truth)
    assert ckpt.param("0.weight").key == "model.0.weight"
    assert torch.equal(ckpt.param("0.weight", role="exp_avg").torch(), truth["optimizer.state.0.weight.exp_avg"])
    assert any(name.startswith("optimizer.param_groups") for name in ckpt.objects)
    assert ckpt.objects[next(name for name in ckpt.objects if name.endswith(".lr"))] == 0.01
    assert {"random_states_0", "random_states_1"} <= set(ckpt.objects)


def test_an_interrupted_accelerate_save_is_an_error(tmp_path: Path) -> None:
    write_fsdp(tmp_path)
    (tmp_path / "optimizer_0" / ".metadata").unlink()
    with pytest.raises(IncompleteError, match=r"no .metadata"):
        wb.open(tmp_path)
    shutil.rmtree(tmp_path / "optimizer_0")
    assert any("no optimizer state" in note for note in wb.open(tmp_path).notes)
    shutil.rmtree(tmp_path / "pytorch_model_fsdp_0")
    torch.save({}, tmp_path / "random_states_0.pkl")
    with pytest.raises(IncompleteError, match="holds no weights"):
        wb.open(tmp_path)


# ---- Lightning -----------------------------------------------------------------------------------------------


def lightning_state() -> dict[str, Any]:
    """The dict that Lightning 2.6 passes to ``torch.save`` (``dump_checkpoint``)."""
    model, optimizer = small()
    return {
        "epoch": 3,
        "global_step": 100,
        "pytorch-lightning_version": "2.6.0",
        "loops": {"fit_loop": {"state_dict": {}}},
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.01},
    }


def test_a_lightning_file_has_its_fqns_and_joined_ids(tmp_path: Path) -> None:
    state = lightning_state()
    torch.save(state, tmp_path / "epoch=3-step=100.ckpt")
    ckpt = wb.open(tmp_path / "epoch=3-step=100.ckpt")
    assert (ckpt.format, ckpt.step) == ("lightning", 100)
    assert ckpt["state_dict.model.0.weight"].fqn == "model.0.weight"
    same(ckpt, {f"state_dict.{name}": value for name, value in state["state_dict"].items()})
    expected = state["optimizer_states"][0]["state"][2]["exp_avg"]
    assert torch.equal(ckpt.param("model.1.weight", role="exp_avg").torch(), expected)
    assert ckpt.objects["hyper_parameters"] == {"lr": 0.01}


def test_a_lightning_folder_joins_dcp_and_meta(tmp_path: Path) -> None:
    state = lightning_state()
    folder = tmp_path / "epoch=3-step=100.ckpt"
    dcp.save({"state_dict": state.pop("state_dict")}, checkpoint_id=folder, no_dist=True)
    del state["optimizer_states"]
    torch.save(state, folder / "meta.pt")
    ckpt = wb.open(folder)
    assert (ckpt.format, ckpt.step) == ("lightning", 100)
    assert ckpt["state_dict.model.0.weight"].fqn == "model.0.weight"
    assert ckpt.objects["epoch"] == 3 and ckpt.objects["hyper_parameters"] == {"lr": 0.01}


def test_an_ordinary_file_named_ckpt_is_not_lightnings(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.ckpt")
    assert wb.open(tmp_path / "x.ckpt").format == "torch_save"


# ---- torch's HuggingFaceStorageWriter ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pieces/`` and ``both/`` (pieces and consolidated files), by three ranks."""
    told = told_by("tests.hf_writer", tmp_path_factory)(3)
    assert all("result" in one["case_write"] for one in told), told
    return Path(told[0]["case_write"]["result"])


def test_pieces_of_three_ranks_are_whole(written: Path) -> None:
    ckpt = wb.open(written / "pieces")
    assert ckpt.format == "safetensors" and ckpt.world_size is None
    assert all(path.name.startswith("shard-0000") for path in (written / "pieces").iterdir())
    same(ckpt, FULL)
    assert set(ckpt.chunks[ckpt.chunks.key == "w"]["rank"]) == {0, 1, 2}


def test_consolidated_files_win_over_the_pieces(written: Path) -> None:
    ckpt = wb.open(written / "both")
    assert not any(name.startswith("sharded") for name in ckpt.catalog.files)
    same(ckpt, FULL)
    same(wb.open(written / "both" / "sharded"), FULL)


def test_lost_ranks_are_a_hole_or_a_note_never_zeros(written: Path, tmp_path: Path) -> None:
    middle = tmp_path / "middle"
    shutil.copytree(written / "pieces", middle)
    for path in middle.glob("shard-00002-*"):
        path.unlink()
    ckpt = wb.open(middle)
    assert "1 of 3 ranks have no file ('shard-00002')" in ckpt.notes[0]
    with pytest.raises(HoleError, match="'w'"):
        ckpt["w"].torch()
    assert torch.equal(ckpt["w"][:3], FULL["w"][:3])
    last = tmp_path / "last"
    shutil.copytree(written / "pieces", last)
    for path in last.glob("shard-00003-*"):
        path.unlink()
    ckpt = wb.open(last)  # nothing in the files tells that there were three: the layout stores no shape
    assert ckpt["w"].shape == (6, 3) and any("no global shapes" in note for note in ckpt.notes)


# ---- telling them apart --------------------------------------------------------------------------------------


def test_every_layout_is_detected_as_itself(tmp_path: Path, trainer_run: Path) -> None:
    makers: dict[str, Callable[[Path], object]] = {
        "accelerate": write_fsdp,
        "dcp": lambda path: dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True),
        "safetensors": lambda path: save_file({"w": torch.ones(2)}, path / "model.safetensors"),
        "torch_save": lambda path: torch.save({"w": torch.ones(2)}, path / "pytorch_model.bin"),
    }
    for name, make in makers.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder)
        assert formats.detect(Place(folder)) == name
        assert wb.open(folder).format == name
    assert formats.detect(Place(trainer_run / "checkpoint-2")) == "hf_trainer"
    assert formats.detect(Place(trainer_run)) is None  # a run's folder, not a checkpoint
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match="is empty: it has no files"):
        wb.open(tmp_path / "empty")


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_no_detector_raises_for_a_strangers_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "dangling.pt").symlink_to("/nonexistent/x")
    (tmp_path / "loop.ckpt").symlink_to("loop.ckpt")
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "folder.safetensors").mkdir()
    formats.reader(name).detect(Place(tmp_path))
    for path in tmp_path.iterdir():
        if path.is_file():
            assert not formats.reader(name).detect(Place(path)) or path.suffix == ".safetensors"
    with pytest.raises(WorkbenchError):
        wb.open(tmp_path)


# ---- transformers' sharded checkpoints -------------------------------------------------------------------------------


def test_pieces_of_ranks_are_read_with_their_optimizer(tmp_path):
    """``save_pretrained(distributed_checkpoint=True)`` and ``save_optimizer_distributed`` of transformers 5.23."""
    weight = torch.arange(24.0).reshape(6, 4)
    for rank, rows in enumerate((slice(3, 6), slice(0, 3))):  # pieces need not be in the order of the ranks
        info = {"w.weight": {"saved_offsets": [rows.start, 0]}}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w.weight": weight[rows].clone()}, tmp_path / name, {"DCP_SHARDING_INFO": json.dumps(info)})
    moments = {"state": {"w.weight": {"exp_avg": weight * 2, "step": torch.tensor(3.0)}}}
    dcp.save({"optimizer": moments}, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    ckpt = wb.open(tmp_path)
    assert ckpt.format == "hf_trainer" and ckpt.step == 3
    assert torch.equal(ckpt.param("w.weight").torch(), weight)
    assert torch.equal(ckpt.param("w.weight", role="exp_avg").torch(), weight * 2)
    (row,) = wb.discover(tmp_path).itertuples()
    assert row.complete
    (tmp_path / "optimizer" / ".metadata").unlink()
    (row,) = wb.discover(tmp_path).itertuples()
    assert not row.complete and "optimizer" in row.why


@pytest.mark.skipif("WORKBENCH_SAMPLES" not in os.environ, reason="WORKBENCH_SAMPLES is not set")
def test_a_sharded_checkpoint_of_transformers_equals_its_truth():
    folder = Path(os.environ["WORKBENCH_SAMPLES"]) / "round2" / "transformers_sharded" / "fsdp2"
    ckpt = wb.open(folder / "checkpoint-3")
    truth = {}
    for name, want in load_file(folder / "truth.safetensors").items():
        fqn = name.removeprefix("param.")
        truth[ckpt.param(fqn).key if fqn != name else name] = want
    check_reader(folder / "checkpoint-3", truth)
