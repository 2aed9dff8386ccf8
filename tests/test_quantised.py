"""Quantised safetensors as numbers, against what the owning libraries return; and sets of tensors that do not fit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.reader_suite import check_reader, same_bits
from workbench.core.decoding.floats import E2M1, E8M0, rounded, widened
from workbench.core.dtypes import by_name
from workbench.errors import CorruptError, SelectionError

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
KEY = "model.layers.0.self_attn.k_proj"
SCHEMES = ("bnb_int8", "bnb_nf4", "ct_int8_channel", "ct_nvfp4", "ct_pack_int4_g32", "mlx_q4_g64", "torchao_fp8")


def copied(samples: Path, name: str, folder: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a sample with some tensors of the projection replaced, or left out."""
    source = samples / "quantised" / name
    shutil.copytree(source, folder / name)
    tensors = load_file(source / "model.safetensors")
    for part, value in changes.items():
        tensors.pop(f"{KEY}.{part}")
        if value is not None:
            tensors[f"{KEY}.{part}"] = value
    save_file(tensors, folder / name / "model.safetensors")
    return folder / name


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_names_and_roles_are_those_of_the_parameter(samples: Path, name: str) -> None:
    ckpt = wb.open(samples / "quantised" / name)
    values = ckpt.decode()
    assert set(values) == {f"{KEY}.weight", "model.layers.0.input_layernorm.weight"}
    assert set(values.roles) == {"param"} and values.param(f"{KEY}.weight").shape == (64, 128)
    first = next(key for key in ckpt if key.startswith(KEY))
    for way in (ckpt.decoded(f"{KEY}.weight"), ckpt.decoded(first), ckpt[first].decoded()):
        assert way.shape == (64, 128) and way.key == f"{KEY}.weight"
    assert ckpt[first].dtype != values[f"{KEY}.weight"].dtype or ckpt[first].shape != (64, 128)
    again = pickle.loads(pickle.dumps(ckpt))[first].decoded()
    same_bits(again.torch(), values[f"{KEY}.weight"].torch(), "pickled")


def test_a_difference_in_a_scale_alone_is_found(samples: Path, tmp_path: Path) -> None:
    """The bytes of the codes are the same, in files that are hard links of each other or not."""
    scale = load_file(samples / "quantised" / "ct_int8_channel" / "model.safetensors")[f"{KEY}.weight_scale"]
    changed = scale.clone()
    changed[7] *= 2
    other = copied(samples, "ct_int8_channel", tmp_path, weight_scale=changed)
    a, b = wb.open(samples / "quantised" / "ct_int8_channel"), wb.open(other)
    (row,) = wb.diff(a.decode(), b.decode()).changed_rows
    assert row.key_b == f"{KEY}.weight"


def test_fp8_in_blocks_is_code_times_scale(samples: Path) -> None:
    truth = {}
    for file in (samples / "hf_deepseek_fp8_block").glob("*.safetensors"):
        truth |= load_file(file)
    values = wb.open(samples / "hf_deepseek_fp8_block").decode()
    assert not [key for key in values if key.endswith("_scale_inv")]
    scaled = [key for key in truth if f"{key}_scale_inv" in truth]
    assert scaled
    for key in scaled:
        scale = truth[f"{key}_scale_inv"].repeat_interleave(128, -2).repeat_interleave(128, -1)
        rows, columns = truth[key].shape[-2:]
        same_bits(values[key].torch(), truth[key].float() * scale[..., :rows, :columns], key)
        same_bits(values[key][3:5, ::9], (truth[key].float() * scale[..., :rows, :columns])[3:5, ::9], key)


def test_mxfp4_of_gpt_oss_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (2, 12, 3), dtype=torch.uint8, generator=generator)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    assert want.shape == (2, 96, 12)
    ckpt = check_reader(tmp_path, {name: want.contiguous()}, decoded=True)
    assert ckpt[name].fqn == name
    with pytest.raises(SelectionError, match="decode it first"):
        wb.open(tmp_path)[f"{name}_blocks"].lazy[1].decoded()


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_mlx_streams_of_bits_cross_words(tmp_path: Path, bits: int) -> None:
    """Number k of a row is bits ``[k · bits, (k + 1) · bits)`` of the row, low bits first."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (4, 128))
    rows = [sum(int(code) << bits * at for at, code in enumerate(row)) for row in codes]
    words = np.array([list(row.to_bytes(16 * bits, "little")) for row in rows], np.uint8).view(np.uint32)
    scales, biases = torch.tensor(rng.standard_normal((4, 4)), dtype=torch.float32), torch.zeros(4, 4)
    tensors = {"w.weight": torch.from_numpy(words), "w.scales": scales, "w.biases": biases}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"group_size": 32, "bits": bits}}))
    want = torch.from_numpy(codes).float() * scales.repeat_interleave(32, 1) + 0  # a bias makes a zero of -0
    check_reader(tmp_path, {"w.weight": want}, decoded=True)


def test_small_floats_are_cast_as_torch_casts_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("float8_e4m3fn", "float8_e8m0fnu"):
        want = codes.view(getattr(torch, name)).float()
        got = torch.from_numpy(widened(codes.numpy(), by_name(name)))
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[~want.isnan()], want[~want.isnan()])
    assert E2M1[7] == 6 and E2M1[15] == -6 and E8M0[127] == 1
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (50_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    for name in ("bfloat16", "float16"):
        want = values.to(getattr(torch, name)).view(torch.int16).numpy().view(np.uint16)
        got, nan = rounded(values.numpy(), by_name(name)), values.isnan().numpy()
        assert np.array_equal(got[~nan], want[~nan])


# ---- what is not decoded, and what does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("ct_pack_int4_g32", {"weight_shape": torch.tensor([64, 100])}, "weight_shape"),
        ("ct_pack_int4_g32", {"weight_shape": torch.tensor([-1, 128])}, "weight_shape"),
        ("ct_pack_int4_g32", {"weight_scale": torch.ones(64, 3, dtype=torch.bfloat16)}, "weight_scale"),
        ("ct_int8_channel", {"weight_scale": torch.ones(65, 1, dtype=torch.bfloat16)}, "weight_scale"),
        ("ct_nvfp4", {"weight_scale": torch.ones(64, 9).to(torch.float8_e4m3fn)}, "weight_scale"),
        ("ct_nvfp4", {"weight_global_scale": torch.ones(2)}, "weight_global_scale"),
        ("bnb_int8", {"SCB": torch.ones(63)}, "SCB"),
        ("bnb_nf4", {"weight.absmax": torch.ones(127)}, "absmax"),
        ("bnb_nf4", {"weight.quant_map": torch.ones(15)}, "quant_map"),
        ("bnb_nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}, "quant_state"),
        ("mlx_q4_g64", {"scales": torch.ones(64, 3, dtype=torch.bfloat16)}, "scales"),
        ("mlx_q4_g64", {"weight": torch.ones(64, 15, dtype=torch.uint32)}, "weight"),
    ],
)
def test_parts_that_do_not_fit_are_refused(samples: Path, tmp_path: Path, name: str, changes, word: str) -> None:
    ckpt = wb.open(copied(samples, name, tmp_path, **changes))
    ckpt.state_dict()  # what is stored can be read all the same
    with pytest.raises(CorruptError, match=word):
        ckpt.decode()


@pytest.mark.parametrize(
    "bits, columns, words, decoded",
    [(8, 8, 2, True), (4, 8, 1, True), (4, 20, 3, False), (None, 8, 2, True), (2, 16, 1, False)],
)
def test_packed_integers_of_any_width_are_read_or_left_as_they_are(
    tmp_path: Path, bits, columns, words, decoded
) -> None:
    """Widths of 4 and 8 bits in whole words are read, with or without a configuration; no valid file is an error."""
    width = bits or 8
    codes = np.random.default_rng(0).integers(0, 1 << width, (4, 32 * words // width))
    packed = [sum(int(code) << width * at for at, code in enumerate(row)) for row in codes]
    data = np.array([list(row.to_bytes(4 * words, "little")) for row in packed], np.uint8).view(np.int32)
    scale = torch.tensor([[0.5], [2.0], [-1.0], [0.25]])
    tensors = {"w.weight_packed": torch.from_numpy(data), "w.weight_scale": scale,
               "w.weight_shape": torch.tensor([4, columns])}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    if bits:
        config = {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    values = wb.open(tmp_path).decode()
    assert ("w.weight" in values) == decoded and ("w.weight_packed" in values) != decoded
    if decoded:
        same_bits(values["w.weight"].torch(), (torch.from_numpy(codes).float() - (1 << width - 1)) * scale, "w.weight")


def test_a_weight_without_its_scales_stays_as_it_is_stored(samples: Path, tmp_path: Path) -> None:
    ckpt = wb.open(copied(samples, "ct_int8_channel", tmp_path, weight_scale=None))
    assert ckpt.decode() is ckpt and ckpt.decoded(f"{KEY}.weight").dtype == torch.int8


def test_a_zero_point_is_not_ignored(samples: Path, tmp_path: Path) -> None:
    """Nothing here decodes it, so the weight stays as it is stored."""
    path = copied(samples, "ct_int8_channel", tmp_path)
    tensors = load_file(path / "model.safetensors") | {f"{KEY}.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8)}
    save_file(tensors, path / "model.safetensors")
    assert wb.open(path).decode()[f"{KEY}.weight"].dtype == torch.int8


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", [*SCHEMES, "ct_fp8_channel", "byhand_modelopt_fp8"])
def test_whole_models_decode_to_their_truth(name: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / "quantised" / name
    check_reader(folder / "model", load_file(folder / "truth.safetensors"), rest=True, decoded=True)
