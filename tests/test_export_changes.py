"""Exports that change values, from the call or the command line to what other libraries read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from workbench import cli

NAME = "model.layers.0.self_attn.q_proj.weight"


def test_an_fp8_model_as_bfloat16(samples, tmp_path):
    """DeepSeek's blocks: code · scale in float32, rounded once; no scales and no quantisation are left."""
    source = samples / "hf_deepseek_fp8_block"
    stored = {name: one for file in source.glob("*.safetensors") for name, one in load_file(file).items()}
    with wb.open(source) as ckpt:
        report = wb.export(ckpt, tmp_path / "out", dtype="bf16", verify=True)
    assert report.verified and not report.identical
    got = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    assert set(got) == {name for name in stored if not name.endswith("_scale_inv")}
    seen = 0
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = tensor.shape
            want = (tensor.float() * scale[:rows, :columns]).bfloat16()
            assert torch.equal(got[name], want), name
            seen += 1
    assert seen > 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert any("quantization_config is now absent" in note for note in report.notes)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_cast_leaves_codes_and_what_decodes_them_alone(tmp_path, dtype):
    """Names and types as bitsandbytes 0.50, AutoGPTQ and transformers (MXFP4) store them."""
    nf4, int8, gptq = (f"model.layers.0.mlp.{name}_proj" for name in ("down", "up", "gate"))
    kept = {
        f"{nf4}.weight": torch.randint(0, 255, (32, 1)).byte(),
        f"{nf4}.weight.absmax": torch.rand(2),
        f"{nf4}.weight.quant_map": torch.rand(16),
        f"{nf4}.weight.nested_absmax": torch.rand(1),
        f"{nf4}.weight.nested_quant_map": torch.rand(256),
        f"{nf4}.weight.quant_state.bitsandbytes__nf4": torch.randint(0, 255, (90,)).byte(),
        f"{int8}.weight": torch.randint(-128, 127, (8, 8)).to(torch.int8),
        f"{int8}.SCB": torch.rand(8),
        f"{int8}.weight_format": torch.tensor(0, dtype=torch.uint8),
        f"{gptq}.qweight": torch.randint(0, 99, (1, 8), dtype=torch.int32),
        f"{gptq}.qzeros": torch.randint(0, 99, (1, 1), dtype=torch.int32),
        f"{gptq}.scales": torch.rand(1, 8),
        f"{gptq}.g_idx": torch.zeros(8, dtype=torch.int32),
        "model.layers.0.mlp.experts.down_proj_blocks": torch.randint(0, 255, (2, 4)).byte(),
        "model.layers.0.mlp.experts.down_proj_scales": torch.randint(0, 255, (2,)).byte(),
    }
    norm = torch.rand(8)
    save_file(kept | {"model.norm.weight": norm}, tmp_path / "in.safetensors")
    ckpt = wb.open(tmp_path / "in.safetensors")
    assert (ckpt[f"{int8}.weight_format"].fqn, ckpt[f"{int8}.weight_format"].role) == (f"{int8}.weight", "other")
    report = wb.export(ckpt, tmp_path / "out.safetensors", dtype=dtype)
    got = load_file(tmp_path / "out.safetensors")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert torch.equal(got.pop("model.norm.weight"), norm.to(wanted)) and set(got) == set(kept)
    for name, tensor in kept.items():
        assert got[name].dtype is tensor.dtype and torch.equal(got[name], tensor), name
    (note,) = (note for note in report.notes if "quantised weights keep their codes" in note)
    assert note.startswith("4 quantised weights") and [one.key for one in report.casts] == ["model.norm.weight"]


def test_weights_as_fp8_and_back(tmp_path, capsys):
    """The recipe's scales are named and cut as transformers has them, for one rank and for two."""
    tensors = {NAME: torch.randn(256, 384).bfloat16(), "model.norm.weight": torch.ones(384).bfloat16()}
    save_file(tensors, tmp_path / "in.safetensors")
    assert cli.main(["export", str(tmp_path / "in.safetensors"), str(tmp_path / "q"), "--dtype", "fp8"]) == 0
    got = load_file(tmp_path / "q" / "model.safetensors")
    assert got[NAME].dtype == torch.float8_e4m3fn and got["model.norm.weight"].dtype == torch.bfloat16
    blocks = tensors[NAME].float().reshape(2, 128, 3, 128).abs().amax((1, 3))
    assert torch.allclose(got[f"{NAME}_scale_inv"], blocks / 448, rtol=1e-6)
    args = ["export", str(tmp_path / "in.safetensors"), str(tmp_path / "tp"), "--dtype", "fp8", "--tp", "2"]
    assert cli.main(args) == 0
    for rank in range(2):
        mine = load_file(tmp_path / "tp" / f"model-rank-0000{rank}-of-00002.safetensors")
        assert mine[NAME].equal(got[NAME][128 * rank : 128 * rank + 128])
        assert mine[f"{NAME}_scale_inv"].equal(got[f"{NAME}_scale_inv"][rank : rank + 1])
    with wb.open(tmp_path / "q") as ckpt:
        wb.export(ckpt, tmp_path / "back.pt", "torch", dtype="bf16")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    gap = (back[NAME].float() - tensors[NAME].float()).abs()
    assert gap.max() <= tensors[NAME].abs().max().float() / 16 and set(back) == set(tensors)
    capsys.readouterr()


def test_an_adapter_merged_on_the_way(tmp_path, capsys):
    weight = torch.randint(-8, 9, (6, 4)).float()
    save_file({NAME: weight}, tmp_path / "in.safetensors")
    (tmp_path / "lora").mkdir()
    up, down = torch.randint(-3, 4, (6, 2)).float(), torch.randint(-3, 4, (2, 4)).float()
    stem = f"base_model.model.{NAME.removesuffix('.weight')}"
    save_file(
        {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, tmp_path / "lora" / "adapter_model.safetensors"
    )
    (tmp_path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    argv = ["export", str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "--lora", str(tmp_path / "lora")]
    assert cli.main(argv) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")[NAME].equal(weight + 2 * up @ down)
    assert "1 weight updated by W + s·B·A" in capsys.readouterr().out
    assert cli.main([*argv[:2], str(tmp_path / "dcp"), "--to", "dcp", "--tp", "2", *argv[3:]]) == 0
    with wb.open(tmp_path / "dcp") as ckpt:
        assert ckpt[NAME].torch().equal(weight + 2 * up @ down) and len(ckpt[NAME].chunks) == 2
    capsys.readouterr()


def test_onto_a_device_a_cast_is_a_cast(samples):
    with wb.open(samples / "hf_deepseek_fp8_block") as ckpt:
        got, stored = ckpt.to_device("cpu", dtype="fp16"), ckpt.state_dict()
    assert set(got) == set(stored)
    for name, tensor in stored.items():
        assert got[name].dtype == (tensor.dtype if tensor.dtype == torch.float8_e4m3fn else torch.float16), name
