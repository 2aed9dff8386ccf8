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
from workbench.core import engine
from workbench.core.decoding.floats import E2M1, E8M0, rounded, widened
from workbench.core.dtypes import by_name
from workbench.errors import CorruptError, SelectionError

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
KEY = "model.layers.0.self_attn.k_proj"
SCHEMES = ("bnb_int8", "bnb_nf4", "ct_int8_channel", "ct_nvfp4", "ct_pack_int4_g32", "mlx_q4_g64", "torchao_fp8")


@pytest.fixture(params=["numpy", "compiled"], autouse=True)
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either code that decodes."""
    monkeypatch.setattr(engine, "compiled_in_use", lambda: request.param == "compiled")


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
    values, norm = ckpt.decode(), "model.layers.0.input_layernorm.weight"
    assert torch.equal(values[norm].torch(), ckpt[norm].torch()) and ckpt.decoded(norm).shape == ckpt[norm].shape
    key = next(key for key in values if key in (f"{KEY}.weight", f"{KEY}.weight_packed"))
    for way in (values[key], ckpt.decoded(key), ckpt[key].decoded(), pickle.loads(pickle.dumps(values))[key]):
        with pytest.raises(CorruptError, match=word):
            way.torch()
    (row,) = [
        row
        for row in wb.diff(ckpt, samples / "quantised" / name).rows
        if row.key_b.startswith(f"{KEY}.weight") and row.status == "unread"
    ] or [None]
    assert row is None or word in row.why


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
    tensors = {
        "w.weight_packed": torch.from_numpy(data),
        "w.weight_scale": scale,
        "w.weight_shape": torch.tensor([4, columns]),
    }
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
    """Of floats nothing here decodes it, so the weight stays as it is stored."""
    path = copied(samples, "ct_int8_channel", tmp_path)
    tensors = load_file(path / "model.safetensors")
    zero = torch.arange(-32, 32, dtype=torch.int8)[:, None]
    save_file(tensors | {f"{KEY}.weight_zero_point": zero}, path / "model.safetensors")
    code, scale = tensors[f"{KEY}.weight"].int(), tensors[f"{KEY}.weight_scale"]
    same_bits(wb.open(path).decode()[f"{KEY}.weight"].torch(), (code - zero).to(scale.dtype) * scale, "zero point")
    fp8 = {
        "w.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "w.weight_scale": torch.ones(4, 1),
        "w.weight_zero_point": torch.ones(4, 1, dtype=torch.int8),
    }
    (tmp_path / "fp8").mkdir()
    save_file(fp8, tmp_path / "fp8" / "model.safetensors")
    assert wb.open(tmp_path / "fp8").decode()["w.weight"].dtype == torch.float8_e4m3fn


# ---- schemes after their formulas, packed and decoded here without the workbench -------------------------------------


def stored(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def down(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Columns of numbers as columns of words: number k is bits ``[k · bits, (k + 1) · bits)``."""
    columns = [sum(int(n) << bits * at for at, n in enumerate(column)) for column in numbers.T]
    data = [np.frombuffer(one.to_bytes(-(-len(numbers) * bits // 32) * 4, "little"), "<i4") for one in columns]
    return torch.from_numpy(np.stack(data, axis=1).copy())


@pytest.mark.parametrize(
    "bits, version, act_order",
    [
        (2, "gptq", True),
        (3, "gptq", False),
        (3, "gptq_v2", True),
        (4, "gptq", True),
        (4, "gptq_v2", False),
        (8, "gptq", False),
        (2, "gptqmodel", False),
        (3, "gptqmodel", False),
        (4, "gptqmodel", True),
        (8, "gptqmodel", False),
    ],
)
def test_gptq_is_code_less_zero_times_scale(tmp_path: Path, bits: int, version: str, act_order: bool) -> None:
    """``W[o, i] = scales[g[i], o] · (q[i, o] - z[g[i], o])``.

    AutoGPTQ 0.7.1 stores z - 1 and decodes ``(z + 1) & (2 ** bits - 1)`` (``qlinear_cuda_old.py``). GPTQModel 7.7
    subtracts 1 from every field of a packed word at once, so a z of 0 borrows from its neighbour, unless there are 3
    bits (``utils/model.py``, ``convert_gptq_v2_to_v1_format_module``).
    """
    rng, (inputs, outputs, group) = np.random.default_rng(bits), (128, 96, 32)
    q, z = rng.integers(0, 1 << bits, (inputs, outputs)), rng.integers(0, 1 << bits, (inputs // group, outputs))
    scales = torch.from_numpy(rng.uniform(0.001, 0.02, z.shape).astype(np.float16))
    g = rng.permutation(np.arange(inputs) // group) if act_order else np.arange(inputs) // group
    tensors = {
        "l.qweight": down(q, bits),
        "l.qzeros": down((z if version == "gptq_v2" else (z - 1) % (1 << bits)).T, bits).T,
        "l.scales": scales,
        "l.bias": torch.ones(outputs),
    }
    if version == "gptqmodel" and bits != 3:
        ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
        words = down(z.T, bits).T.numpy().view(np.uint32) - np.uint32(ones)
        tensors["l.qzeros"] = torch.from_numpy(words.view(np.int32))
    if act_order:
        tensors["l.g_idx"] = torch.from_numpy(g.astype(np.int32))
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    if version == "gptqmodel":
        config |= {"checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    want = torch.from_numpy((q - z[g]).T.astype(np.float16)) * scales[torch.from_numpy(g)].T
    check_reader(
        stored(tmp_path, tensors, config), {"l.weight": want.contiguous(), "l.bias": torch.ones(outputs)}, decoded=True
    )


def test_awq_is_code_less_zero_times_scale_in_its_order_of_columns(tmp_path: Path) -> None:
    rng, (inputs, outputs, group) = np.random.default_rng(0), (64, 48, 32)
    q, z = rng.integers(0, 16, (inputs, outputs)), rng.integers(0, 16, (inputs // group, outputs))
    scales = torch.from_numpy(rng.uniform(0.001, 0.02, z.shape).astype(np.float16))

    def packed(numbers: np.ndarray) -> torch.Tensor:
        wide = numbers.reshape(len(numbers), -1, 8).astype(np.uint32)
        words = sum(wide[:, :, column] << np.uint32(4 * at) for at, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]))
        return torch.from_numpy(np.asarray(words, np.uint32).view(np.int32))

    tensors = {"l.qweight": packed(q), "l.qzeros": packed(z), "l.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    g = np.arange(inputs) // group
    want = torch.from_numpy((q - z[g]).T.astype(np.float16)) * scales[torch.from_numpy(g)].T
    check_reader(stored(tmp_path, tensors, config), {"l.weight": want.contiguous()}, decoded=True)


def test_words_whose_configuration_is_unknown_stay_as_they_are_stored(tmp_path: Path) -> None:
    tensors = {
        "l.qweight": torch.ones(8, 32, dtype=torch.int32),
        "l.qzeros": torch.ones(2, 4, dtype=torch.int32),
        "l.scales": torch.ones(2, 32, dtype=torch.float16),
    }
    for config in (
        {},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "awq", "version": "gemv"},
    ):
        assert "l.qweight" in wb.open(stored(tmp_path, tensors, config)).decode()
    (tmp_path / "config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert wb.open(tmp_path).decoded("l.weight").shape == (32, 64)
    tensors["l.g_idx"] = torch.full((64,), 2, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptError, match="names group 2"):
        wb.open(tmp_path).decoded("l.weight").torch()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_packed_integers_with_zero_points_and_activation_order(tmp_path: Path, bits: int, ordered: bool) -> None:
    """compressed-tensors: zero points are packed down the rows, codes along them, both plus half the range."""
    rng, (rows, columns, group) = np.random.default_rng(bits), (12, 64, 16)
    q, z = rng.integers(0, 1 << bits, (rows, columns)), rng.integers(0, 1 << bits, (rows, columns // group))
    scale = torch.from_numpy(rng.uniform(0.01, 0.02, z.shape)).bfloat16()
    g = rng.permutation(np.arange(columns) // group) if ordered else np.arange(columns) // group
    tensors = {
        "w.weight_packed": down(q.T, bits).T,
        "w.weight_zero_point": down(z, bits),
        "w.weight_scale": scale,
        "w.weight_shape": torch.tensor([rows, columns]),
        "w.weight_g_idx": torch.from_numpy((g if ordered else g * 0 - 1).astype(np.int32)),
    }
    want = torch.from_numpy(q - z[:, g]).bfloat16() * scale[:, torch.from_numpy(g)]
    groups = {"group_0": {"weights": {"num_bits": bits}}}
    check_reader(stored(tmp_path, tensors, {"config_groups": groups}), {"w.weight": want}, decoded=True)


def floats_of_four_bits(rng: np.random.Generator, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two in a byte with the first one low, and their values."""
    code = rng.integers(0, 16, (rows, columns))
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * np.where(code & 8, -1.0, 1.0)
    return torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)), torch.from_numpy(value).float()


def test_nvfp4_of_modelopt_multiplies_where_compressed_tensors_divides(tmp_path: Path) -> None:
    packed, value = floats_of_four_bits(np.random.default_rng(0), 8, 64)
    scale = torch.linspace(0.5, 400, 32).reshape(8, 4).to(torch.float8_e4m3fn)
    total = torch.tensor(0.00037)
    tensors = {"l.weight": packed, "l.weight_scale": scale, "l.weight_scale_2": total, "l.input_scale": total.clone()}
    want = (
        value * (scale.float() * total).repeat_interleave(16, 1) + 0.0
    )  # NVFP4QTensor.e2m1_values: code 8 is 0, not -0
    values = check_reader(
        stored(tmp_path, tensors, {"quant_algo": "NVFP4"}), {"l.weight": want, "l.input_scale": total}, decoded=True
    )
    assert values["l.weight"].dtype == torch.float32
    again = {"l.weight_packed": packed, "l.weight_scale": scale, "l.weight_global_scale": total.reshape(1)}
    divided = (value * (scale.float() / total).repeat_interleave(16, 1)).bfloat16()
    same_bits(wb.open(stored(tmp_path, again, {})).decoded("l.weight").torch(), divided, "divided")


@pytest.mark.parametrize("who", ["mlx mxfp4", "mlx nvfp4", "compressed-tensors"])
def test_floats_of_four_bits_with_a_byte_for_a_scale(tmp_path: Path, who: str) -> None:
    packed, value = floats_of_four_bits(np.random.default_rng(0), 8, 64)
    bits = torch.arange(110, 110 + 8 * (4 if "nvfp4" in who else 2), dtype=torch.uint8).reshape(8, -1) % 126
    scale = bits.view(torch.float8_e4m3fn).float() if "nvfp4" in who else torch.exp2(bits.float() - 127)
    want = (value * scale.repeat_interleave(64 // scale.shape[1], 1)).bfloat16()
    if who == "compressed-tensors":
        tensors, config = {"l.weight_packed": packed, "l.weight_scale": bits}, {"format": "mxfp4-pack-quantized"}
    else:
        tensors, config = {"l.weight": packed.view(torch.uint32), "l.scales": bits}, {"mode": who.split()[1], "bits": 4}
    check_reader(stored(tmp_path, tensors, config), {"l.weight": want}, decoded=True)


@pytest.mark.parametrize("shape", [(8, 1), (1, 1)])
def test_int8_of_torchao(tmp_path: Path, shape: tuple[int, int]) -> None:
    """``dequantize_affine`` of torchao 0.18: the difference of integers, times the scale in float32."""
    make = torch.Generator().manual_seed(0)
    code = torch.randint(-128, 128, (8, 32), dtype=torch.int8, generator=make)
    zero = torch.randint(-9, 9, shape, dtype=torch.int8, generator=make)
    scale = torch.rand(shape, generator=make) + 0.01
    tensors = {"l._weight_qdata": code, "l._weight_scale": scale, "l._weight_zero_point": zero}
    want = ((code.int() - zero.int()).bfloat16() * scale).bfloat16()
    check_reader(stored(tmp_path, tensors, {"quant_method": "torchao"}), {"l.weight": want}, decoded=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
def test_fp8_of_torchao_has_the_type_that_the_header_states(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """``_dequantize_affine_float8`` of torchao 0.18: the product in float32, then the tensor's own type."""
    make = torch.Generator().manual_seed(0)
    code = torch.randn(8, 32, generator=make).to(torch.float8_e4m3fn)
    scale = torch.rand(8, 1, generator=make) + 0.01
    stated = {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
    texts = {"l.weight": json.dumps({"_type": "Float8Tensor", "_data": {"dtype": stated}})} if dtype else {}
    folder = stored(tmp_path, {}, {"quant_method": "torchao"})
    save_file({"l._weight_qdata": code, "l._weight_scale": scale}, folder / "model.safetensors", metadata=texts)
    want = (code.float() * scale).to(dtype or torch.bfloat16)
    check_reader(folder, {"l.weight": want}, decoded=True)


def test_mxfp8_of_mlx(tmp_path: Path) -> None:
    codes = torch.arange(8 * 64, dtype=torch.int16).reshape(8, 64) % 127 + 128 * (torch.arange(64) % 2)
    bits = torch.arange(110, 110 + 16, dtype=torch.uint8).reshape(8, 2)
    codes = codes.to(torch.uint8)
    value = codes.view(torch.float8_e4m3fn).float() * torch.exp2(bits.float() - 127).repeat_interleave(32, 1)
    tensors, config = {"l.weight": codes.view(torch.uint32), "l.scales": bits}, {"mode": "mxfp8", "bits": 8}
    check_reader(stored(tmp_path, tensors, config), {"l.weight": value.bfloat16()}, decoded=True)


@pytest.mark.parametrize("offset", [0.0173, 0])
def test_scales_of_bitsandbytes_that_are_quantised_themselves(tmp_path: Path, offset: float) -> None:
    """``absmax = nested_quant_map[code] · nested_absmax[block of 256] + nested_offset``."""
    rng = np.random.default_rng(0)
    rows, columns, size = 160, 128, 64
    code, table = rng.integers(0, 16, rows * columns), rng.uniform(-1, 1, 16).astype(np.float32)
    scale, numbers = rng.integers(0, 256, rows * columns // size), rng.uniform(-1, 1, 256).astype(np.float32)
    nested = rng.uniform(0.1, 1, 2).astype(np.float32)
    state = {
        "quant_type": "nf4",
        "blocksize": size,
        "dtype": "bfloat16",
        "shape": [rows, columns],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    said = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors = {
        "l.weight": (code[::2] << 4 | code[1::2]).astype(np.uint8)[:, None],
        "l.weight.quant_map": table,
        "l.weight.absmax": scale.astype(np.uint8),
        "l.weight.nested_quant_map": numbers,
        "l.weight.nested_absmax": nested,
        "l.weight.quant_state.bitsandbytes__nf4": said,
    }
    absmax = numbers[scale] * nested.repeat(256)[: len(scale)] + np.float32(offset)
    want = torch.from_numpy((table[code] * absmax.repeat(size)).reshape(rows, columns)).bfloat16()
    folder = stored(tmp_path, {key: torch.from_numpy(value.copy()) for key, value in tensors.items()}, {})
    check_reader(folder, {"l.weight": want}, decoded=True)
    tensors["l.weight.nested_absmax"] = nested[:1]
    stored(tmp_path, {key: torch.from_numpy(value.copy()) for key, value in tensors.items()}, {})
    with pytest.raises(CorruptError, match="nested_absmax"):
        wb.open(tmp_path).decoded("l.weight").torch()


def test_a_quantised_model_is_compared_with_its_source_by_name_and_as_numbers(samples: Path, tmp_path: Path) -> None:
    """Of the same tensors under the same scheme, the stored codes are compared."""
    path = samples / "quantised" / "ct_pack_int4_g32"
    state = wb.open(path).decode().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    found = wb.diff(tmp_path, path)
    assert found.summary["equal"] == len(state) == len(found.rows) and not found.added and not found.removed
    assert any("INT4" in note for note in found.notes)
    assert {row.key_b for row in wb.diff(path, path).rows} == set(wb.open(path))


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", [*SCHEMES, "ct_fp8_channel", "byhand_modelopt_fp8"])
def test_whole_models_decode_to_their_truth(name: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / "quantised" / name
    check_reader(folder / "model", load_file(folder / "truth.safetensors"), rest=True, decoded=True)
