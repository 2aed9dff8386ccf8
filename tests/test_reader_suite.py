"""Every shipped sample passes the one suite that all readers share, against its truth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.reader_suite import check_reader

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
TRUTH = ROOT.parent / "tests" / "truth"

#: Samples that are their own truth, read by the library that owns the format.
OWN = ("hf_llama_tied_fp32", "hf_deepseek_fp8_block", "hf_peft_lora")
#: Samples whose truth is keyed by meaning, ``exp_avg.<fqn>``, because their files hold pieces of flat buffers.
BY_MEANING = ("bytecheckpoint_fsdp1_flat", "deepspeed_zero1", "megatron_dp_reshardable")
ROLES = {"fp32_param": "master"}
#: PaddleNLP's pieces stay apart per rank, under keys of their own: tests/test_paddle.py joins and compares them.
ELSEWHERE = ("paddlenlp_legacy",)
#: Samples whose truth is that of quantised tensors as numbers.
DECODED = (
    "gguf/types.gguf",
    *(f"quantised/{path.name}" for path in sorted((ROOT / "quantised").iterdir())),
)
WITH_TRUTH = sorted(
    {str(p.relative_to(TRUTH)).removesuffix(".safetensors") for p in TRUTH.rglob("*.safetensors")}
    - {*BY_MEANING, *ELSEWHERE, *DECODED}
)


@pytest.mark.parametrize("name", WITH_TRUTH)
def test_sample_equals_its_truth(name):
    # dcp_fsdp2 keeps generator states that differ by rank, of which the save kept an arbitrary one: not in the truth
    check_reader(ROOT / name, load_file(TRUTH / f"{name}.safetensors"), rest=name == "dcp_fsdp2")


@pytest.mark.parametrize("name", DECODED)
def test_sample_decodes_to_its_truth(name):
    check_reader(ROOT / name, load_file(TRUTH / f"{name}.safetensors"), decoded=True)


@pytest.mark.parametrize("name", BY_MEANING)
def test_sample_equals_its_truth_by_meaning(name):
    ckpt = wb.open(ROOT / name)
    truth = {}
    for key, want in load_file(TRUTH / f"{name}.safetensors").items():
        role, _, fqn = key.partition(".")
        truth[ckpt.param(fqn, role=ROLES.get(role, role)).key] = want
    check_reader(ROOT / name, truth, rest=True)


@pytest.mark.parametrize("name", OWN)
def test_sample_equals_what_safetensors_reads(name):
    truth = {}
    for file in sorted((ROOT / name).glob("*.safetensors")):
        truth |= load_file(file)
    check_reader(ROOT / name, truth)


@pytest.mark.parametrize("step", [3, 6])
def test_trainer_sample_equals_what_safetensors_and_torch_read(step):
    folder = ROOT / "trainer_run" / f"checkpoint-{step}"
    truth = dict(load_file(folder / "model.safetensors"))
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    truth |= {f"optimizer.state.{i}.{k}": v for i, slot in state.items() for k, v in slot.items()}
    ckpt = check_reader(folder, truth, rest=True)
    assert ckpt.step == step
    assert not [key for key in set(ckpt) - set(truth) if not key.startswith(("rng", "scheduler", "scaler"))]


OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
#: Larger samples that are not shipped: folder → truth beside it, where there is one.
MORE = {
    "dcp/a_fsdp2": "dcp/a_fsdp2_truth",
    "dcp/a3_fsdp2_zstd": "dcp/a_fsdp2_truth",
    "dcp/d_fsdp1_flat": "dcp/d_fsdp1_flat_truth",
    "dcp/x_single_odd": "dcp/x_single_odd_truth",
    "hf/f1_llama_bf16_sharded": "hf/f1_llama_bf16_sharded_truth",
    "hf/f2_llama_tied_fp32": None,
    "hf/k_deepseek_v3_fp8_block": None,
    "hf/n_peft_lora": None,
}


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", MORE)
def test_further_sample_equals_its_truth(name):
    folder = Path(str(OUTSIDE))
    beside = MORE[name]
    truth = {}
    for file in [folder / beside / "truth.safetensors"] if beside else sorted((folder / name).glob("*.safetensors")):
        truth |= load_file(file)
    check_reader(folder / name, truth, rest=beside is not None)
