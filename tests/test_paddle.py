"""What paddle wrote, against paddle's own gathered tensors (tests/truth)."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.paddle_files import TABLE
from tests.reader_suite import check_catalog, check_frames, check_objects, check_reader, random_key, same_bits
from workbench.errors import (
    TensorNotFoundError,
)

ROLES = {"param": "param", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.fixture
def outside() -> Path:
    """The folder of further samples."""
    told = os.environ.get("WORKBENCH_SAMPLES")
    if not told or not (Path(told) / "paddle").is_dir():
        pytest.skip("WORKBENCH_SAMPLES names no folder of further samples")
    return Path(told) / "paddle"


@pytest.mark.parametrize("name", ["paddle_save", "paddle_dist"])
def test_samples_pass_the_shared_suite(samples: Path, name: str) -> None:
    ckpt = check_reader(samples / name, load_file(samples.parent / "tests/truth" / f"{name}.safetensors"))
    assert ckpt.format == name


def test_paddle_save_joins_the_optimizer_to_its_parameters(samples: Path) -> None:
    statics = wb.open(samples / "paddle_save" / "model.pdparams").objects[TABLE]
    whole = wb.open(samples / "paddle_save")
    for name, static in statics.items():
        if static.startswith("eager_tmp"):
            assert whole[name].role == "buffer"
            continue
        assert whole[name].fqn == name and whole[name].role == "param"
        for state, role in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq"), ("beta1_pow_acc", "beta1_pow")):
            assert whole.param(name, role=role).key == f"optimizer.{static}_{state}_0"
    assert whole.step == 3 and whole.objects["beta_pow"]["formula"] == "t = log(beta_pow) / log(beta) - 1"
    assert any("assumed" in note for note in whole.notes)
    assert whole.objects["optimizer.LR_Scheduler"]["last_epoch"] == 3


def test_an_optimizer_alone_takes_its_names_from_the_model_beside_it(samples: Path, tmp_path: Path) -> None:
    beside = wb.open(samples / "paddle_save" / "model.pdopt")
    assert beside.param("embed.weight", role="exp_avg").key == "embedding_0.w_0_moment1_0"
    assert "model.pdparams" in " ".join(beside.notes) and "model.pdparams" in beside.catalog.metadata_files
    (tmp_path / "model.pdopt").write_bytes((samples / "paddle_save" / "model.pdopt").read_bytes())
    alone = wb.open(tmp_path / "model.pdopt")
    assert set(alone.fqns) == {None} and alone["embedding_0.w_0_moment1_0"].role == "exp_avg"
    assert "'model.pdparams'" in " ".join(alone.notes) and alone.step == 3


def _check_by_meaning(ckpt: wb.Checkpoint, truth: Mapping[str, torch.Tensor]) -> None:
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    chance = random.Random(0)
    for key, want in truth.items():
        group, name = key.split(".", 1)
        tensor = ckpt.param(name, role=ROLES[group])
        same_bits(tensor.torch(), want, key)
        for _ in range(2):
            where = random_key(tuple(want.shape), chance)
            bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
            expected = torch.from_numpy(np.array(want.view(bits).numpy()[where])).view(want.dtype)
            same_bits(tensor[where], expected, f"{key}[{where}]")


def test_legacy_paddlenlp_is_merged_where_the_files_prove_how(samples: Path) -> None:
    ckpt = wb.open(samples / "paddlenlp_legacy")
    assert ckpt.format == "paddlenlp" and ckpt.step == 30
    _check_by_meaning(ckpt, load_file(samples.parent / "tests/truth" / "paddlenlp_legacy.safetensors"))
    assert ckpt["llama.norm.weight"].dtype == torch.bfloat16
    norms = ckpt.tensors.set_index("key").loc["llama.norm.weight"]
    assert norms["replicas"] == 2, "both tp ranks stored it"
    assert ckpt.mesh["axes"] == {"tp": 2, "pp": 2, "sharding": 2} and "order of ranks" in ckpt.mesh["unknown"]
    assert ckpt.mesh["ranks"]["optimizer.tp01_pp00_shard01.pdopt"] == {"tp": 1, "pp": 0, "sharding": 1}
    assert any("config.json" in note and "30 parameters" in note for note in ckpt.notes)
    assert ckpt.objects["beta_pow"]["step"] == 30 and ckpt.objects["scaler"]["incr_count"] == 30


def test_further_files_of_paddle_save(outside: Path) -> None:
    folder = outside / "a_paddle_save" / "fp32"
    model, optimizer = (
        load_file(folder / "truth_model_fp32.safetensors"),
        load_file(folder / "truth_opt_fp32.safetensors"),
    )
    proto2 = check_reader(folder / "model_proto2.pdparams", model)
    assert set(proto2.chunks["codec"]) == {"latin1_text"}
    combined = {**{f"model.{k}": v for k, v in model.items()}, **{f"opt.{k}": v for k, v in optimizer.items()}}
    both = check_reader(folder / "combined.pdckpt", combined)
    assert both.param("layers.0.up.bias", role="exp_avg_sq").key == "opt.linear_2.b_0_moment2_0"
    scalars = wb.open(folder / "scalars.pdckpt")
    assert scalars.step == 3 and scalars["rng"].role == "other" and list(scalars) == ["rng"]


def test_distributed_saves_as_safetensors(outside: Path) -> None:
    truth = load_file(outside / "b_dist_save" / "truth.safetensors")
    truth["scalar0d"] = truth["scalar0d"].reshape(())
    for kind in ("distcp", "safetensors"):
        check_reader(outside / "b_dist_save" / kind, truth)


@pytest.mark.parametrize("layout", ["legacy_tp2_pp2_shard2", "unified_tp2_pp2_shard2", "unified_quant_O1"])
def test_further_layouts_of_paddlenlp(outside: Path, layout: str) -> None:
    names = {"bf16": "param", "fp32": "fp32_param", "m1": "exp_avg", "m2": "exp_avg_sq"}
    truth = {}
    for key, value in load_file(outside / "c_paddlenlp" / "truth.safetensors").items():
        group, name = key.split("/", 1)
        if not (group.startswith("m") and "quant" in layout):
            truth[f"{names[group]}.{name}"] = value.to(torch.bfloat16) if group == "bf16" else value
    ckpt = wb.open(outside / "c_paddlenlp" / layout)
    _check_by_meaning(ckpt, truth)
    assert ckpt.world_size == 8 and ckpt.step == 30 and "checkpoint-30" in ckpt.notes[0]
    if layout.startswith("legacy"):
        assert ckpt.mesh["axes"]["dp"] == 1, "8 ranks are 2 x 2 x 2: nothing is left for dp"
    else:
        assert ckpt.mesh["axes"] == {"tp": 2}
    if "quant" in layout:
        assert any("O1" in note and "117 scales" in note for note in ckpt.notes)
        assert ckpt["llama.norm.weight/moment1_0"].dtype == torch.int8
        assert ckpt["llama.norm.weight/moment1_0@scales"].role == "exp_avg_scale"


def test_fleet_folders_without_a_configuration_stay_apart_by_rank(outside: Path) -> None:
    truth = load_file(outside / "c_paddlenlp" / "truth.safetensors")
    axes = json.loads((outside / "c_paddlenlp" / "truth.json").read_text())["tp_axis"]
    ckpt = wb.open(outside / "c_paddlenlp" / "fleet_rank_dirs")
    check_catalog(ckpt.catalog)
    assert ckpt.step == 30 and ckpt.world_size is None and ckpt.mesh["axes"] == {"tp": 2, "sharding": 2, "pp": 2}
    for name, axis in axes.items():
        for group, suffix, copies in (("fp32", "", 2), ("m1", "/moment1_0", 1)):
            whole = truth[f"{group}/{name}"]
            for rank in range(2):
                piece = ckpt[f"{name}{suffix}@tp{rank:02d}"]
                want = whole if axis is None else whole.chunk(2, axis)[rank].contiguous()
                same_bits(piece.torch(), want, piece.key)
                assert piece.fqn == name
                assert ckpt.tensors.set_index("key").loc[piece.key, "replicas"] == copies
    with pytest.raises(TensorNotFoundError, match=r"2 tensors of role 'param'.*@tp00"):
        ckpt.param("lm_head.weight")
    assert any("39 parameters are kept separate by rank" in note for note in ckpt.notes)


def test_fleet_folders_beside_a_configuration_are_merged_where_it_tells(outside: Path, tmp_path: Path) -> None:
    shutil.copytree(outside / "c_paddlenlp" / "fleet_rank_dirs", tmp_path / "f")
    config = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 4}
    (tmp_path / "f" / "config.json").write_text(json.dumps(config))
    ckpt = wb.open(tmp_path / "f")
    for key, want in load_file(outside / "c_paddlenlp" / "truth.safetensors").items():
        group, name = key.split("/", 1)
        if group in ("fp32", "m1"):
            same_bits(ckpt.param(name, role="param" if group == "fp32" else "exp_avg").torch(), want, key)
