"""Layouts of trainers that save DCP, torch.save or safetensors: Composer, Colossal-AI, Megatron-FSDP, NeMo 2.

Files are written by torch and safetensors as those trainers call them (named at each writer); truths are the tensors
that were saved.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import workbench as wb
from tests.reader_suite import check_reader
from workbench.errors import CorruptError, MissingFileError


def trained(seed: int = 0, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Module()
    model.model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model.model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remark that this is one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def same_parts(ckpt: wb.Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter has its weight, both moments and its step under its own name, and there are no others."""
    named = dict(model.named_parameters())
    assert set(ckpt.catalog.fqns or ()) - {None} == set(named)
    for name, value in named.items():
        assert ckpt.param(name).torch().equal(value.detach())
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert ckpt.param(name, role=state).torch().equal(optimizer.state[value][state]), (name, state)


# ---- Composer 0.32: composer/utils/checkpoint.py, composer/core/state.py ---------------------------------------------


def composer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbered: bool) -> dict[str, Any]:
    names = optimizer.state_dict() if numbered else get_optimizer_state_dict(model, optimizer)
    clock = {"iteration": 0, "epoch": 0, "batch": 3, "sample": 15, "token": 0, "epoch_in_iteration": 0}
    state = {
        "model": get_model_state_dict(model),
        "optimizers": {"DecoupledAdamW": names},
        "schedulers": {"LambdaLR": {"last_epoch": 3}},
        "algorithms": [],
        "timestamp": {"Timestamp": clock},
        "rank_zero_seed": 17,
        "run_name": "run",
        "integrations": {},
        "metadata": {"composer_env_info": {"composer_version": "0.32.1"}, "precision": "fp32", "world_size": 2},
    }
    return {"state": state, "rng": [{"torch": torch.get_rng_state()}]}


@pytest.mark.parametrize("kind", ["sharded", "monolithic", "before torch 2.4"])
def test_composer(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    state = composer(model, optimizer, numbered=kind == "before torch 2.4")
    path = tmp_path / ("latest" if kind == "sharded" else "latest-rank0.pt")  # a name without a step
    save_dcp(state, path) if kind == "sharded" else torch.save(state, path)
    ckpt = wb.open(path)
    assert (ckpt.format, ckpt.step, ckpt.world_size) == ("dcp" if kind == "sharded" else "torch_save", 3, 2)
    same_parts(ckpt, model, optimizer)
    assert wb.verify(path, deep=True).exit_code == 0


def test_a_parameter_called_model_is_not_composers() -> None:
    from workbench.names.roles import resolve

    keys = ["state.model.exp_avg", "state.optimizers.exp_avg"]
    paths = {key: tuple(key.split(".")) for key in keys}
    assert resolve(keys, {"paths": paths}) == (["model", "optimizers"], ["exp_avg", "exp_avg"])


# ---- Megatron-FSDP: megatron/training/checkpointing.py (``fsdp_dtensor``), 0.18 --------------------------------------


def test_megatron_fsdp(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = {name: optimizer.state[value] for name, value in model.named_parameters()}
    state = {
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": {f"module.{name}": value for name, value in get_model_state_dict(model).items()},
        "optimizer": {
            "state": {f"module.module.module.{name}": value for name, value in states.items()},
            "param_to_group_meta": {f"module.module.module.{name}": {"lr": 0.01} for name in states},
        },
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state()}]},
    }
    path = tmp_path / "iter_0000007"
    save_dcp(state, path)
    ckpt = wb.open(path)
    assert (ckpt.format, ckpt.step) == ("dcp", 7)
    same_parts(ckpt, model, optimizer)


# ---- NeMo 2: nemo/lightning/io/pl.py, megatron_parallel.py (a model within ``module.``) ------------------------------


def test_nemo_2(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"decoder.layers.mlp.linear_fc2.weight": (2, 4, 8), "decoder.final_layernorm.weight": (4,)}
    state = {
        f"{part}module.{name}": torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
        for part in ("", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    }
    folder = tmp_path / "model--val_loss=1.00-step=9-consumed_samples=20.0"
    (folder / "context").mkdir(parents=True)
    (folder / "context" / "io.json").write_text("{}")
    save_dcp(state, folder / "weights")
    torch.save({"global_step": 10, "loops": {}, "lr_schedulers": []}, folder / "weights" / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "weights" / "metadata.json").write_text(json.dumps(backends))
    ckpt = wb.open(folder)
    assert (ckpt.format, ckpt.step) == ("megatron_dist", 10) and len(ckpt) == 12
    stacked = "decoder.layers.mlp.linear_fc2.weight"
    for role, part in (
        ("param", ""),
        ("master", "optimizer.state.fp32_param."),
        ("exp_avg", "optimizer.state.exp_avg."),
    ):
        for layer in range(2):
            found = ckpt.param(f"decoder.layers.{layer}.mlp.linear_fc2.weight", role=role)
            assert found.torch().equal(state[f"{part}module.{stacked}"][layer])
        want = state[f"{part}module.decoder.final_layernorm.weight"]
        assert ckpt.param("decoder.final_layernorm.weight", role=role).torch().equal(want)
    assert wb.discover(tmp_path)["step"].tolist() == [9]


# ---- Colossal-AI 0.5: colossalai/checkpoint_io, applications/Colossal-LLaMA ------------------------------------------


def colossal(folder: Path, kind: str = "bin", epoch: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    modeling, optim = folder / "modeling", folder / "optimizer"
    modeling.mkdir(parents=True)
    optim.mkdir()

    def shards(items: dict[Any, Any], stem: str, end: str) -> dict[str, dict[Any, Any]]:
        halves = list(items.items())[:3], list(items.items())[3:]
        middle = "-stage-{0:05d}-shard-00001" if kind == "pipeline" else "-{0:05d}"
        return {stem + middle.format(i) + end: dict(half) for i, half in enumerate(halves, 1)}

    def index(folder: Path, name: str, files: dict[str, dict[Any, Any]], **more: Any) -> None:
        order = reversed(files.items()) if kind == "pipeline" else files.items()  # as the system lists the stages
        where = {str(key): file for file, held in order for key in held}
        facts = {**more, "total_size": sum(value.nbytes for value in weights.values()) / 1024 / 1024}
        (folder / name).write_text(json.dumps({"metadata": facts, "weight_map": where}, indent=2))

    whole = "model" if kind == "async" else "pytorch_model"
    end = ".safetensors" if kind == "async" else ".bin"
    files = shards(weights, whole, end)
    for file, held in files.items():
        save_file(held, modeling / file, {"format": "pt"}) if kind == "async" else torch.save(held, modeling / file)
    index(modeling, f"{whole}{end}.index.json", files)
    (modeling / "config.json").write_text('{"model_type": "llama"}')
    stem = "optimizer" if kind == "async" else "pytorch_optim"
    files = shards(states["state"], stem, end)
    for file, held in files.items():
        flat = {f"state.{i}.{name}": value for i, one in held.items() for name, value in one.items()}
        save_file(flat, optim / file) if kind == "async" else torch.save(held, optim / file)
    index(optim, f"{stem}{end}.index.json", files, param_groups="pytorch_optim_group.bin")
    torch.save(states["param_groups"], optim / "pytorch_optim_group.bin")
    torch.save({"last_epoch": 3}, folder / "lr_scheduler")
    (folder / "running_states.json").write_text(json.dumps({"epoch": epoch, "step": 3, "sample_start_index": 12}))
    return model, optimizer


@pytest.mark.parametrize("kind", ["bin", "async", "pipeline"])
def test_colossal_ai(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "epoch-0_step-3"
    model, optimizer = colossal(folder, kind)
    truth = {name: value.detach() for name, value in model.named_parameters()}
    numbered = optimizer.state_dict()["state"]
    truth |= {f"optimizer.state.{i}.{name}": value for i, one in numbered.items() for name, value in one.items()}
    ckpt = check_reader(folder, truth)
    assert (ckpt.format, ckpt.step, ckpt.world_size, ckpt.notes) == ("colossalai", 3, None, [])
    same_parts(ckpt, model, optimizer)
    assert set(ckpt.objects) == {"running_states", "lr_scheduler", "param_groups", "config"}
    assert ckpt.objects["param_groups"][0]["params"] == list(range(5))
    assert wb.verify(folder, deep=True).exit_code == wb.verify(folder / "modeling", deep=True).exit_code == 0
    assert wb.discover(tmp_path)[["format", "step", "complete"]].values.tolist() == [["colossalai", 3, True]]


def test_colossal_ai_counts_steps_within_an_epoch(tmp_path: Path) -> None:
    colossal(tmp_path / "save", epoch=2)
    assert wb.open(tmp_path / "save").step is None


def test_an_optimizer_of_colossal_ai_without_its_weights_has_numbers(tmp_path: Path) -> None:
    colossal(tmp_path / "save")
    ckpt = wb.open(tmp_path / "save" / "optimizer")
    assert ckpt.format == "colossalai" and set(ckpt.catalog.fqns or ()) == {None} and len(ckpt) == 15
    assert ckpt.notes[0] == "there are no weights beside the optimizer: its parameters have numbers, not names"


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        ("optimizer/pytorch_optim-00002.bin", MissingFileError, "names the file 'pytorch_optim-00002.bin'"),
        ("modeling/pytorch_model-00001.bin", MissingFileError, "names the file 'pytorch_model-00001.bin'"),
    ],
)
def test_a_missing_file_of_colossal_ai(tmp_path: Path, file: str, error: type[Exception], message: str) -> None:
    colossal(tmp_path / "save")
    (tmp_path / "save" / file).unlink()
    with pytest.raises(error, match=message):
        wb.open(tmp_path / "save")
    (found,) = wb.discover(tmp_path).itertuples()
    assert not found.complete and file.rpartition("/")[2] in found.why


def test_swapped_files_of_colossal_ai(tmp_path: Path) -> None:
    colossal(tmp_path / "save")
    first, second = (tmp_path / "save" / "optimizer" / f"pytorch_optim-0000{i}.bin" for i in (1, 2))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with pytest.raises(CorruptError, match=r"maps the state of '0' to 'pytorch_optim-00001\.bin', which lacks it"):
        wb.open(tmp_path / "save")


# ---- averages beside a Trainer's or accelerate's files: diffusers' EMAModel.state_dict ------------------------------


@pytest.mark.parametrize("framework", ["hf_trainer", "accelerate"])
def test_what_a_file_of_averages_stores_beside_its_tensors_is_listed(tmp_path: Path, framework: str) -> None:
    model, optimizer = trained()
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    kept = {"decay": 0.999, "optimization_step": 36}
    torch.save(kept | {"shadow_params": list(weights.values())}, tmp_path / "ema_model.pt")
    if framework == "hf_trainer":
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 36}))
    else:
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
        torch.save({"step": 36}, tmp_path / "random_states_0.pkl")
    ckpt = wb.open(tmp_path)
    assert ckpt.format == framework
    found = ckpt.objects["ema_model"]
    assert {name: found[name] for name in kept} == kept
    assert ckpt["ema_model.shadow_params.0"].torch().equal(next(iter(weights.values())))
    (tmp_path / "ema_model.pt").unlink()
    torch.save(weights, tmp_path / "ema.pt")
    assert "ema" not in wb.open(tmp_path).objects  # it holds tensors only


def test_a_second_optimizer_of_the_trainer_is_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = optimizer.state_dict()
    second["state"][0]["exp_avg"] = second["state"][0]["exp_avg"] + 1
    torch.save(second, tmp_path / "optimizers.pt")
    ckpt = wb.open(tmp_path, cache=False)
    one, two = (ckpt[f"{name}.state.0.exp_avg"].torch() for name in ("optimizer", "optimizers"))
    assert torch.equal(one + 1, two)
    assert {"optimizer", "optimizers"} <= set(ckpt.objects)
