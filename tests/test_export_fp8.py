"""FP8 with scales, against torch's casts and transformers' own quantiser; samples of DeepSeek's layout."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.edited import write_edited
from tests.properties import boxes, examples
from workbench import errors
from workbench.core.decoding.floats import FP8
from workbench.core.dtypes import by_name
from workbench.export.casts import CastError, narrowed, widened
from workbench.export.values import amax
from workbench.export.values.edits import Edits
from workbench.export.values.fp8 import dequantize, quantize
from workbench.export.values.fp8_config import configured
from workbench.export.values.scales import Scales

E4M3 = torch.float8_e4m3fn
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
BF16, FP16, FP32 = (by_name(name) for name in ("bfloat16", "float16", "float32"))


def patterns() -> np.ndarray:
    """Bits of float32: random ones, and the neighbourhood of every tie and every code of e4m3fn, of both signs."""
    values = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    near = torch.cat([values, (values[1:] + values[:-1]) / 2]).float().numpy().view(np.uint32)
    some = np.random.default_rng(3).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    special = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x43E80000, 0x43E7FFFF, 1, 0x007FFFFF], np.uint32)
    found = np.concatenate([some, near, near + 1, np.maximum(near, 1) - 1, special]).astype(np.uint32)
    return np.concatenate([found, found ^ np.uint32(1 << 31)])


def test_codes_are_those_of_torchs_saturating_cast():
    values = patterns().view(np.float32)
    truth = torch.from_numpy(values).clamp(-448, 448).to(E4M3).view(torch.uint8).numpy()
    assert np.array_equal(narrowed(values, by_name("float8_e4m3fn")), truth)


@pytest.mark.parametrize("name", [*FP8, "float8_e8m0fnu"])
def test_values_are_torchs(name):
    codes = torch.arange(256, dtype=torch.uint8)
    truth, ours = codes.view(getattr(torch, name)).float(), torch.from_numpy(widened(codes.numpy(), by_name(name)))
    nan = torch.isnan(truth)
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours[~nan].view(torch.int32), truth[~nan].view(torch.int32))


@examples(200)
@given(st.data())
def test_scales_of_a_box_are_those_of_its_place(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    block = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    grid = (*shape[:-2], -(-((1, *shape)[-2]) // block[0]), -(-shape[-1] // block[1]))
    numbers = np.arange(1, 1 + np.prod(grid), dtype=np.float32).reshape(grid)
    full = np.repeat(np.repeat(numbers, block[0], -2), block[1], -1)[..., : (1, *shape)[-2], : shape[-1]].reshape(shape)
    low, size = data.draw(boxes(shape))
    key = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
    values = np.full(size, 3, np.float32)
    Scales(numbers, block)(low, values)
    assert np.array_equal(values, 3 * full[key])


# ---- to FP8 ----------------------------------------------------------------------------------------------------------


def model(dtype=torch.bfloat16, seed=0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 256),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(384, 256) * 0.02,
        "model.layers.0.self_attn.q_proj.bias": torch.randn(384),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.randn(128, 256) * 3,
        "model.layers.0.mlp.down_proj.weight": torch.randn(256, 512) * 1e-3,
        "model.layers.0.mlp.gate.weight": torch.randn(4, 256),
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 256, 128) * 0.1,
        "model.layers.0.input_layernorm.weight": torch.randn(256),
        "model.layers.0.something.weight": torch.randn(128, 128),
        "lm_head.weight": torch.randn(64, 256),
        "model.layers.0.mlp.experts.7.up_proj.weight": torch.empty(0, 256),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["model.layers.0.mlp.down_proj.weight"][:128, 128:256] = 0
    tensors["model.layers.0.self_attn.q_proj.weight"][130, 7] = 1000  # one block of very small codes
    return tensors


QUANTISED = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
}


def opened(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return wb.open(folder)


def hf(block) -> SimpleNamespace:
    return SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", ["fp8", "fp8-tensor"])
def test_codes_and_scales_are_transformers_own(tmp_path, recipe, dtype, monkeypatch):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    tensors = model(dtype)
    ckpt = opened(tmp_path / "in", tensors)
    monkeypatch.setattr("workbench.core.scan.PIECE", 5000)  # many runs a block
    edits = Edits(ckpt, range(len(ckpt)))
    quantize(edits, recipe, threads=2)
    found, written = write_edited(edits, tmp_path / "out.safetensors")
    theirs = Fp8Quantize(hf([128, 128] if recipe == "fp8" else None))
    suffix = "_scale_inv" if recipe == "fp8" else "_scale"
    assert set(found) == set(tensors) | {name + suffix for name in QUANTISED}
    for name, tensor in tensors.items():
        if name not in QUANTISED:
            assert found[name].dtype == dtype and torch.equal(found[name], tensor), name
            continue
        made = theirs.convert({name: tensor})
        codes, scale = made[name], next(value for key, value in made.items() if key != name)
        assert found[name].dtype == E4M3 and torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8)), name
        mine = found[name + suffix]
        assert mine.dtype == torch.float32 and torch.equal(mine.reshape(scale.shape), scale), name
        assert mine.shape == ((1,) if recipe == "fp8-tensor" and tensor.ndim == 2 else scale.shape)
        stands_for = theirs.reverse_op._dequantize_one(codes, scale, torch.float32)
        gaps = (tensor.float() - stands_for).abs().double()
        want = CastError(tensor.numel(), int((gaps > 0).sum()), 0, float(gaps.max()))
        assert written[name].cast == want


def test_blocks_at_the_ends_are_smaller(tmp_path):
    torch.manual_seed(1)
    weight = torch.randn(200, 300)
    ckpt = opened(tmp_path / "in", {"a.q_proj.weight": weight})
    edits = Edits(ckpt, [0])
    quantize(edits)
    assert "do not divide evenly into blocks of 128 × 128" in edits.notes[0]
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    scale = found["a.q_proj.weight_scale_inv"]
    assert scale.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            part = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            forward = 448 / weight[part].abs().max()
            assert scale[i, j] == 1 / forward
            want = (weight[part] * forward).clamp(-448, 448).to(E4M3)
            assert torch.equal(found["a.q_proj.weight"][part].view(torch.uint8), want.view(torch.uint8))


def test_odd_values_keep_to_themselves(tmp_path):
    weight = torch.full((128, 512), 0.5)
    weight[0, 0], weight[1, 1], weight[2, 2] = torch.nan, torch.inf, -torch.inf
    weight[:, 128:256] = 0
    weight[:, 256:384] = 1e-44
    weight[0, 256] = 0
    weight[:, 384:] = torch.nan
    edits = Edits(opened(tmp_path / "in", {"a.q_proj.weight": weight}), [0])
    quantize(edits)
    found, written = write_edited(edits, tmp_path / "out.safetensors")
    scale = found["a.q_proj.weight_scale_inv"]
    assert bool(torch.isfinite(scale).all()) and scale[0, 0] == 1 / torch.tensor(448 / 0.5) and scale[0, 1] == 1
    values = found["a.q_proj.weight"].float() * scale.repeat_interleave(128, 1)
    assert torch.equal(torch.isnan(values), torch.isnan(weight))
    assert values[1, 1] == 0.5 and values[2, 2] == -0.5 and values[3, 3] == 0.5 and values[0, 256] == 0
    assert written["a.q_proj.weight"].cast.changed >= 2


@examples(100)
@given(st.data())
def test_the_largest_of_each_block_is_found_whatever_the_chunks(tmp_path_factory, data):
    from tests.properties import chunkings
    from tests.test_reading import stored
    from workbench.core.payload import Payloads
    from workbench.core.place import Place
    from workbench.core.storage import SourcePool
    from workbench.export.values.located import TensorChange

    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    dense = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, data.draw(chunkings(shape)), dtype="float32")
    payloads = Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, "mmap"))
    rows, columns = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 10))
    found = amax.largest(payloads, {0: TensorChange(FP32, FP32)}, {0: (rows, columns)})[0]
    for at in np.ndindex(*found.shape):
        i, j = at[-2] * rows, at[-1] * columns
        assert found[at] == np.abs(dense[(*at[:-2], slice(i, i + rows), slice(j, j + columns))]).max()


def test_what_is_quantised_is_said_in_the_configuration(tmp_path):
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    ckpt = opened(tmp_path / "in", model(), config)
    edits = Edits(ckpt, range(len(ckpt)))
    quantize(edits)
    edited = edits.done()
    names = edited.ckpt.catalog.keys
    made = configured(config, edited, names, "fp8")
    left = made["quantization_config"].pop("modules_to_not_convert")
    assert left == [
        "lm_head",
        "model.layers.0.mlp.experts.7.up_proj",
        "model.layers.0.mlp.gate",
        "model.layers.0.something",
    ]
    assert made["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizers_utils import should_convert_module

    FineGrainedFP8Config(**made["quantization_config"])
    for name in ckpt.catalog.keys:
        module, matrix = name.removesuffix(".weight"), name.endswith(".weight") and "norm" not in name
        if matrix and "embed" not in name:
            assert should_convert_module(module, left) == (name in QUANTISED), name
    assert made["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    tensor = configured(config, edited, names, "fp8-tensor")["quantization_config"]
    assert tensor["config_groups"]["group_0"]["weights"]["strategy"] == "tensor" and tensor["ignore"] == left


def test_transformers_loads_what_was_quantised(tmp_path):
    """On CPU it multiplies the scales out again: the logits are those of the weights that the codes stand for."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    ckpt = wb.open(tmp_path / "in")
    edits = Edits(ckpt, range(len(ckpt)))
    quantize(edits)
    out = tmp_path / "out"
    out.mkdir()
    found, _ = write_edited(edits, out / "model.safetensors")
    edited = edits.done()
    config = configured(ckpt.objects["config"], edited, edited.ckpt.catalog.keys, "fp8")
    (out / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert sum(name.endswith("_scale_inv") for name in found) == 7
    for name in ckpt:
        want = found[name]
        if name + "_scale_inv" in found:
            scale = found[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            want = (want.float() * scale).to(torch.bfloat16)
        assert torch.equal(loaded[name], want), name


def test_nothing_to_quantise_is_an_error(tmp_path):
    ckpt = opened(tmp_path / "in", {"model.norm.weight": torch.ones(4), "model.embed_tokens.weight": torch.ones(4, 4)})
    with pytest.raises(errors.UsageError, match="no selected tensor has the name of a linear layer's weight"):
        quantize(Edits(ckpt, [0, 1]))
    with pytest.raises(errors.UsageError, match="no recipe 'fp4'; choose fp8, fp8-tensor"):
        quantize(Edits(ckpt, [0, 1]), "fp4")


# ---- from FP8 --------------------------------------------------------------------------------------------------------


def full(scale: torch.Tensor, shape: tuple[int, int], block: int) -> torch.Tensor:
    return scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("wanted", [BF16, FP16, FP32])
def test_a_sample_of_deepseeks_layout_is_multiplied_out(samples, tmp_path, wanted):
    folder = samples / "hf_deepseek_fp8_block"
    truth: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        truth |= load_file(file)
    ckpt = wb.open(folder)
    edits = Edits(ckpt, range(len(ckpt)), wanted)
    dequantize(edits)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    assert set(found) == {name for name in truth if not name.endswith("_scale_inv")}
    for name, got in found.items():
        tensor = truth[name]
        if tensor.dtype == E4M3:
            tensor = tensor.float() * full(truth[name + "_scale_inv"], tensor.shape, 128)
        assert torch.equal(got, tensor.to(wanted.torch)), name
    config = configured(ckpt.objects["config"], edits.done(), [], None)
    assert "quantization_config" not in config and "quantization_config" in ckpt.objects["config"]
    assert edits.notes == [f"14 8-bit weights are written as {wanted}, code times scale; 14 scales are left out"]


def codes(shape, dtype=E4M3, seed=2) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    return made.clamp(-448, 448).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_scales_of_every_kind(tmp_path, dtype):
    weight = codes((96, 64), dtype)
    rows = torch.rand(96, 1) + 0.5
    powers = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.uint8) + 122
    tensors = {
        "a.weight": weight.clone(),
        "a.weight_scale": torch.tensor(0.25),
        "a.input_scale": torch.tensor(1.0),
        "b.weight": weight.clone(),
        "b.weight_scale": torch.tensor([3.0], dtype=torch.bfloat16),
        "c.weight": weight.clone(),
        "c.weight_scale": rows,
        "d.weight": weight.clone(),
        "d.weight_scale": rows[:, 0].clone(),
        "e.weight": codes((192, 384), dtype),
        "e.weight_scale_inv": powers.view(torch.float8_e8m0fnu),
        "f.weight": weight.clone(),
        "f.weight_scale": (torch.rand(96, 2) + 1).half(),  # blocks of (1, 32)
        "g.down_proj": codes((2, 130, 64), dtype),
        "g.down_proj_scale_inv": torch.rand(2, 2, 1) + 1,
        "h.weight": codes((5,), dtype),
        "h.weight_scale": torch.tensor(2.0),
        "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    }
    ckpt = opened(tmp_path / "in", tensors)
    edits = Edits(ckpt, range(len(ckpt)))
    dequantize(edits)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    w = weight.float()
    want = {
        "a.weight": w * 0.25,
        "b.weight": w * 3,
        "c.weight": w * rows,
        "d.weight": w * rows,
        "e.weight": tensors["e.weight"].float() * full(2.0 ** (powers.float() - 127), (192, 384), 128),
        "f.weight": w * tensors["f.weight_scale"].float().repeat_interleave(32, 1),
        "g.down_proj": tensors["g.down_proj"].float()
        * tensors["g.down_proj_scale_inv"].repeat_interleave(128, 1)[:, :130],
        "h.weight": tensors["h.weight"].float() * 2,
        "norm.weight": tensors["norm.weight"],
    }
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor.bfloat16()), name


def test_a_weight_and_its_scale_have_to_fit(tmp_path):
    ckpt = opened(tmp_path / "a", {"x.weight": codes((4, 6)), "norm.weight": torch.ones(3)})
    with pytest.raises(
        errors.UnsupportedFormatError,
        match=r"'x.weight' has type float8_e4m3fn .* "
        r"'x.weight_scale_inv'",
    ):
        dequantize(Edits(ckpt, [0, 1]))
    edits = Edits(ckpt, range(2), FP32)
    dequantize(edits, unscaled=True)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    assert torch.equal(found["x.weight"], codes((4, 6)).float())
    for shape in ((3,), (5, 1), (2, 4), (4, 6, 1)):
        ckpt = opened(tmp_path / "b", {"x.weight": codes((4, 6)), "x.weight_scale": torch.ones(shape)})
        with pytest.raises(errors.UnsupportedFormatError, match=r"'x.weight' of shape .* 'x.weight_scale' of shape"):
            dequantize(Edits(ckpt, [0, 1]))
    ckpt = opened(tmp_path / "c", {"x.weight": codes((4, 6)), "x.weight_scale": torch.ones(1, dtype=torch.int32)})
    with pytest.raises(errors.UnsupportedFormatError, match=r"scale 'x.weight_scale' has type int32"):
        dequantize(Edits(ckpt, [0, 1]))


def test_there_and_back_loses_nothing_more(tmp_path):
    """Codes with blocks full of largest magnitudes are fixed points: multiplied out and quantised again, they stay."""
    weight = codes((256, 128))
    weight[0, 0] = weight[128, 0] = 448
    scale = torch.tensor([[0.5], [2.0]])
    ckpt = opened(tmp_path / "in", {"a.q_proj.weight": weight, "a.q_proj.weight_scale_inv": scale})
    edits = Edits(ckpt, range(2), FP32)
    dequantize(edits)
    quantize(edits)
    found, written = write_edited(edits, tmp_path / "out.safetensors")
    assert torch.equal(found["a.q_proj.weight"].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(found["a.q_proj.weight_scale_inv"], scale)
    assert written["a.q_proj.weight"].cast == CastError(256 * 128, 0, 0, 0.0)


def test_local_tensors_are_changed_by_the_place_of_their_boxes(tmp_path):
    """Rows and columns that ranks hold, and two weights joined, have the bits of the whole ones."""
    from tests.test_export_engine import cut_pieces, job_of, laid

    weight = codes((192, 160))
    scale = torch.rand(2, 2) + 0.5
    ckpt = opened(tmp_path / "in", {"x.weight": weight, "x.weight_scale_inv": scale})
    edits = Edits(ckpt, range(2), BF16)
    dequantize(edits)
    edited = edits.done()
    catalog = edited.ckpt.catalog
    tensor = catalog.index["x.weight"]
    boxes_ = [
        ((192, 70), [((0, 90), (192, 70), (0, 0))]),
        ((100, 160), [((92, 0), (50, 160), (50, 0)), ((0, 0), (50, 160), (0, 0))]),
    ]
    pieces = cut_pieces(catalog, boxes_, tensor)
    pieces.dtype[:] = BF16.code
    one = laid(edited.applied(pieces))
    job_of(tmp_path / "in", catalog, [one]).run([str(tmp_path / "out")])
    blob = (tmp_path / "out").read_bytes()
    whole = (weight.float() * full(scale, (192, 160), 128)).bfloat16()
    for start, want in zip(one.start.tolist(), (whole[:, 90:], torch.cat([whole[:50], whole[92:142]])), strict=True):
        raw = want.contiguous().view(torch.int16).numpy().tobytes()
        assert blob[start : start + len(raw)] == raw


@pytest.mark.parametrize("layout", ["whole", "ranks", "chunks"])
def test_scales_are_cut_where_their_weights_are(tmp_path, layout):
    """Every rank's codes and scales are the slices of the whole ones, under their new names."""
    from tests.test_export_engine import job_of, laid
    from workbench.core.mesh.mesh import Mesh
    from workbench.export.moving.pieces import chunk_pieces, rank_pieces, whole_pieces
    from workbench.export.selection import ExportSelection
    from workbench.export.sharding.target import Target

    torch.manual_seed(4)
    tensors = {"a.q_proj.weight": torch.randn(512, 256), "a.o_proj.weight": torch.randn(130, 512)}
    ckpt = opened(tmp_path / "in", tensors)
    edits = Edits(ckpt, range(2))
    quantize(edits)
    truth, _ = write_edited(edits, tmp_path / "whole.safetensors")
    edited = edits.done()
    names = edited.named([f"new.{key}" if key.endswith("weight") else "lost" for key in edited.ckpt])
    target = None if layout == "whole" else Target.of(edited.ckpt, Mesh(tp=2))
    selection = ExportSelection(edited.ckpt, np.arange(4), names, edited.codes, target, edited=edited)
    if layout == "whole":
        pieces = [whole_pieces(selection)]
    elif layout == "ranks":
        pieces = [one for one, _ in rank_pieces(selection)]
    else:
        pieces = [one.pieces for one in chunk_pieces(selection)]
    maps = [laid(one, f"rank{rank}") for rank, one in enumerate(pieces)]
    job_of(tmp_path / "in", edited.ckpt.catalog, maps).run([str(tmp_path / one.name) for one in maps])
    for rank, one in enumerate(maps):
        blob = (tmp_path / one.name).read_bytes()
        assert set(one.pieces.names) == {f"new.{key}" for key in truth}
        for start, nbytes, name in zip(one.start.tolist(), one.pieces.nbytes.tolist(), one.pieces.names, strict=True):
            want = truth[name.removeprefix("new.")]
            if layout != "whole":
                want = want.chunk(2, 0 if "q_proj" in name else 1)[rank]
            assert blob[start : start + nbytes] == want.contiguous().view(torch.uint8).numpy().tobytes(), name


@pytest.mark.skipif(OUTSIDE is None, reason="WORKBENCH_SAMPLES is not set")
def test_outside_samples_are_multiplied_out(tmp_path):
    """Damaged scales too: one is NaN, one is zero."""
    path = f"{OUTSIDE}/fp8/deepseek_block128.safetensors"
    truth = load_file(path)
    ckpt = wb.open(path)
    edits = Edits(ckpt, range(len(ckpt)))
    dequantize(edits)
    assert set(edits.done().ckpt) == {name for name in truth if not name.endswith("_scale_inv")}
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    for name, got in found.items():
        want = truth[name]
        if want.dtype == E4M3:
            want = (want.float() * full(truth[name + "_scale_inv"], want.shape, 128)).bfloat16()
        nan = torch.isnan(want)
        assert torch.equal(torch.isnan(got), nan) and torch.equal(got[~nan], want[~nan]), name
