"""PaddleNLP's folders: pieces of ranks merged where the files prove how, against the whole arrays; and bad input."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests.paddle_files import Pair, flat, numbers, same, save
from tests.reader_suite import check_catalog
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingFileError,
)
from workbench.export.selection import choose
from workbench.formats.paddle import nlp_axes as paddlenlp_axes

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "vocab_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {
    "llama.embed_tokens.weight": ((20, 8), 0),
    "llama.layers.0.self_attn.q_proj.weight": ((8, 8), 1),
    "llama.layers.0.self_attn.k_proj.weight": ((8, 4), 1),
    "llama.layers.0.mlp.down_proj.weight": ((12, 8), 0),
    "llama.norm.weight": ((8,), None),
    "llama.layers.0.mlp.gate_up_fused_proj.weight": ((8, 24), 1),
}


def whole_of(name: str, seed: int = 0) -> np.ndarray:
    return numbers(*SHAPES[name][0], seed=seed + list(SHAPES).index(name) * 100)


def piece_of(name: str, tp: int, seed: int = 0) -> np.ndarray:
    axis = SHAPES[name][1]
    whole = whole_of(name, seed)
    return whole if axis is None else np.ascontiguousarray(np.split(whole, 2, axis)[tp])


def write_legacy(
    folder: Path,
    names: list[str],
    *,
    config: bool = True,
    meta: bool = True,
    flat_ranks: int = 0,
    cut_flags: bool = True,
) -> Path:
    """tp 2, and sharding over ``flat_ranks`` with flat slices of each moment (stage 1 v2), or whole moments without."""
    statics = {name: f"linear_{n}.w_0" for n, name in enumerate(names)}
    for tp in range(2):
        label = f"tp{tp:02d}"
        save(folder / f"model_state.{label}.pdparams", flat({name: piece_of(name, tp) for name in names}, statics))
        for shard in range(max(flat_ranks, 1)):
            moments: dict[str, Any] = {}
            for name in names:
                local = piece_of(name, tp, seed=7)
                if flat_ranks:
                    size = -(-local.size // flat_ranks)
                    padded = np.concatenate([local.reshape(-1), np.full(size * flat_ranks - local.size, 9, "float32")])
                    local = padded[shard * size : (shard + 1) * size].copy()
                moments[f"{statics[name]}_moment1_0"] = Pair("m", local)
                moments[f"{statics[name]}_beta1_pow_acc_0"] = Pair("b", np.array([0.9**4], np.float32))
            save(folder / f"optimizer.{label}{f'_shard{shard:02d}' if flat_ranks else ''}.pdopt", moments)
    if config:
        (folder / "config.json").write_text(json.dumps(CONFIG))
    if meta:
        table = {name: [list(piece_of(name, 0).shape), 5, SHAPES[name][1] is not None] for name in names}
        metas = {
            f"tp{tp:02d}": {"structure_name_mapping": statics, "param_meta": table if cut_flags else {}}
            for tp in range(2)
        }
        degrees = {"mp_degree": 2, "pp_degree": 1, "sharding_degree": max(flat_ranks, 1)}
        (folder / "model_meta.json").write_text(json.dumps({"parallel_config": degrees, "sharding_metas": metas}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


MERGED = [name for name in SHAPES if "fused" not in name]


@pytest.mark.parametrize("flat_ranks", [0, 2, 3])
def test_legacy_pieces_are_merged_flat_slices_included(tmp_path: Path, flat_ranks: int) -> None:
    ckpt = wb.open(write_legacy(tmp_path, list(SHAPES), flat_ranks=flat_ranks))
    check_catalog(ckpt.catalog)
    for name in MERGED:
        same(ckpt.param(name), whole_of(name))
        same(ckpt.param(name, role="exp_avg"), whole_of(name, seed=7))
        assert ckpt.param(name, role="beta1_pow").shape == (1,)
    fused = "llama.layers.0.mlp.gate_up_fused_proj.weight"
    for tp in range(2):
        same(ckpt[f"{fused}@tp{tp:02d}"], piece_of(fused, tp))
    assert any("1 parameter is kept separate by rank" in note and "fused" in note for note in ckpt.notes)
    assert ckpt.mesh["axes"]["tp"] == 2 and ckpt.mesh["axes"]["sharding"] == max(flat_ranks, 1)


def test_without_records_the_configuration_must_prove_the_axis(tmp_path: Path) -> None:
    proven = wb.open(write_legacy(tmp_path / "config", MERGED, meta=False))
    for name in MERGED:
        same(proven.param(name), whole_of(name))
    apart = wb.open(write_legacy(tmp_path / "nothing", MERGED, meta=False, config=False))
    for name in MERGED:
        for tp in range(2):
            same(apart[f"{name}@tp{tp:02d}"], piece_of(name, tp))
    flags = wb.open(write_legacy(tmp_path / "flags", MERGED, config=False))
    same(flags.param("llama.norm.weight"), whole_of("llama.norm.weight"))
    assert flags.tensors.set_index("key").loc["llama.norm.weight", "replicas"] == 2
    assert "llama.embed_tokens.weight@tp01" in flags, "cut, but on which axis is not recorded"


def test_axes_that_no_configuration_proves() -> None:
    proven = paddlenlp_axes.proven_axis
    name, config = "llama.layers.0.self_attn.k_proj.weight", {"hidden_size": 8}
    assert proven(name, (8, 2), 2, config, cut=True) == 1
    assert proven(name, (8, 2), 2, config, cut=False) is None, "key heads may be too few to cut"
    assert proven(name, (4, 4), 2, config, cut=True) is None, "two axes are short or unknown"
    assert proven("llama.norm.weight", (8,), 2, {}, cut=True) is None
    assert proven("llama.embed_tokens.weight", (11, 8), 2, CONFIG, cut=True) is None, "a padded vocabulary"
    assert proven("h.0.attn.qkv_proj.weight", (8, 12), 2, CONFIG, cut=True) is None
    assert proven("llama.norm.weight", (8,), 2, CONFIG, cut=False) == paddlenlp_axes.REPLICATED


def test_a_moment_on_a_rank_without_its_weight_is_kept_apart(tmp_path: Path) -> None:
    names = list(SHAPES)
    copied = next(name for name in names if SHAPES[name][1] is None)
    write_legacy(tmp_path, names)
    statics = {name: f"linear_{n}.w_0" for n, name in enumerate(names)}
    rest = flat({name: piece_of(name, 1) for name in names if name != copied}, statics)
    save(tmp_path / "model_state.tp01.pdparams", rest)
    ckpt = wb.open(tmp_path)
    same(ckpt.param(copied), whole_of(copied))
    assert sum(role == "exp_avg" and fqn == copied for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True)) == 2


def test_incomplete_and_mixed_grids(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "a", MERGED, flat_ranks=2)
    (folder / "optimizer.tp01_shard00.pdopt").unlink()
    with pytest.raises(IncompleteError, match="1 of 4 optimizer files is missing, first of sharding 0, tp 1"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "b", MERGED)
    (folder / "model_state.tp00.pdparams").unlink()
    with pytest.raises(IncompleteError, match="1 of 2 model_state files is missing, first of tp 0"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "c", MERGED)
    save(folder / "model_state.tp02.pdparams", flat({"w": numbers(2)}))
    with pytest.raises(CorruptError, match=r"'model_state.tp02.pdparams' is from tp rank 2, but the degree of tp is 2"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "d", MERGED, flat_ranks=2)
    short = folder / "optimizer.tp01_shard01.pdopt"
    cut = {key: value[1] for key, value in pickle.loads(short.read_bytes()).items()}
    save(short, {key: Pair("m", value[: max(1, value.size - 3)].copy()) for key, value in cut.items()})
    with pytest.raises(CorruptError, match=r"slices of 2 sharding ranks hold .* elements; the piece of shape .* has"):
        wb.open(folder)


def fleet(folder: Path, *, steps: Callable[[int], int] = lambda _: 5) -> Path:
    for rank in range(2):
        name = folder / f"mp_{rank:02d}_sharding_00_pp_00"
        save(name / "model.pdparams", flat({"w": numbers(2, seed=rank)}))
        save(name / "model_state.pdopt", {"w_moment1_0": numbers(2, seed=rank + 9)})
        save(name / "meta_state.pdopt", {"step": steps(rank)})
    return folder


def test_fleet_ranks_of_two_steps_are_told(tmp_path: Path) -> None:
    good = wb.open(fleet(tmp_path / "a"))
    assert good.step == 5 and list(good) == ["w@tp00", "w@tp01", "w/moment1_0@tp00", "w/moment1_0@tp01"]
    mixed = wb.open(fleet(tmp_path / "b", steps=lambda rank: 5 + rank))
    assert any("different steps" in note and "mp_01_sharding_00_pp_00" in note for note in mixed.notes)
    shutil.copytree(tmp_path / "a" / "mp_01_sharding_00_pp_00", tmp_path / "a" / "mp_01_sharding_01_pp_00")
    with pytest.raises(IncompleteError, match="1 of 4 model files is missing, first of pp 0, sharding 1, tp 0"):
        wb.open(tmp_path / "a")


def test_a_fleet_rank_without_its_optimizer_is_told(tmp_path: Path) -> None:
    folder = fleet(tmp_path)
    (folder / "mp_00_sharding_00_pp_00" / "model_state.pdopt").unlink()
    with pytest.raises(IncompleteError, match="1 of 2 optimizer files is missing, first of pp 0, sharding 0, tp 0"):
        wb.open(folder)
    assert wb.verify(folder).exit_code == 2
    (folder / "mp_01_sharding_00_pp_00" / "model_state.pdopt").unlink()
    assert list(wb.open(folder)) == ["w@tp00", "w@tp01"]  # weights alone


def unified(folder: Path, **optimizer: Any) -> Path:
    """Two model files, one optimizer file, one of master weights, with their indices."""
    folder.mkdir(exist_ok=True)
    bits = torch.arange(6, dtype=torch.int32).to(torch.uint16).reshape(2, 3)
    groups = {
        "model": [{"a.weight": bits}, {"b.weight": bits.clone()}],
        "optimizer": [{f"{n}.weight/moment1_0": torch.full((2, 3), 2.0) for n in "ab"}],
        "master_weights": [{f"{n}.weight": torch.full((2, 3), 3.0) for n in "ab"}],
    }
    for stem, files in groups.items():
        weights = {}
        for number, tensors in enumerate(files, 1):
            name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(tensors, folder / name, {"format": "np"})
            weights |= dict.fromkeys(tensors, name)
        more = {"master_weights": True, **optimizer} if stem == "optimizer" else {}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weights, **more})
        )
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    return folder


def test_unified_groups_and_their_faults(tmp_path: Path) -> None:
    ckpt = wb.open(unified(tmp_path))
    assert ckpt.format == "paddlenlp" and ckpt.step == 8 and not ckpt.notes
    assert ckpt["a.weight"].dtype == torch.bfloat16 and ckpt["a.weight"].torch().view(torch.uint16)[1, 2] == 5
    assert ckpt.param("b.weight", role="master").key == "master_weights/b.weight"
    assert ckpt.param("b.weight", role="exp_avg").torch()[0, 0] == 2
    found = wb.discover(tmp_path)
    assert found["format"].tolist() == ["paddlenlp"] and found["step"].tolist() == [8] and found["complete"].all()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"'model-00002-of-00002.safetensors', which is missing .* holds 1 of 2"):
        wb.open(tmp_path)
    assert not wb.discover(tmp_path)["complete"].any()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteError, match="1 of 2 files 'model' is missing, first model-00002-of-00002"):
        wb.open(tmp_path)
    unified(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model-00003-of-00004.safetensors")
    with pytest.raises(CorruptError, match="names of files 'model' count 2, 4 files"):
        wb.open(tmp_path)


def test_a_quantised_optimizer_may_lack_what_its_index_lists(tmp_path: Path) -> None:
    folder = unified(tmp_path, ckpt_quant_stage="O2")
    packed = {f"{n}.weight/moment2_0": torch.ones(2, 3, dtype=torch.int8) for n in "ab"}
    scales = {f"{key}@scales": torch.ones(3) for key in packed}
    save_file({**packed, **scales}, folder / "optimizer-00001-of-00001.safetensors")
    ckpt = wb.open(folder)
    assert any("quantized (O2) with 2 scales" in note and "2 names of the index" in note for note in ckpt.notes)
    scale = ckpt["a.weight/moment2_0@scales"]
    assert scale.role == "exp_avg_sq_scale" and scale.fqn == "a.weight"
    assert set(choose(ckpt).names) == {"a.weight", "b.weight"}
    index = folder / "optimizer.safetensors.index.json"
    index.write_text(index.read_text().replace("O2", "O0"))
    with pytest.raises(
        CorruptError, match=r"maps 'a.weight/moment1_0' to 'optimizer-00001-of-00001.safetensors', which lacks it"
    ):
        wb.open(folder)


def test_masters_under_the_models_names_are_told(tmp_path: Path) -> None:
    folder = unified(tmp_path)
    for path in folder.glob("master_weights*"):
        path.unlink()
    (folder / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 8}))
    ckpt = wb.open(folder)
    assert any("skip_save_model_weight" in note for note in ckpt.notes) and ckpt.objects["scheduler"] == {
        "last_epoch": 8
    }


def test_a_run_folder_opens_its_newest_step(samples: Path, tmp_path: Path) -> None:
    for step in (10, 30):
        shutil.copytree(samples / "paddlenlp_legacy", tmp_path / f"checkpoint-{step}")
    state = tmp_path / "checkpoint-10" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 30', '"global_step": 10'))
    assert wb.open(tmp_path).step == 30
    assert wb.discover(tmp_path)["step"].tolist() == [10, 30]
