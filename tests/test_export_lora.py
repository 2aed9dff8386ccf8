"""Merged adapters against PEFT's own ``merge_and_unload`` on tiny models.

Factors are small multiples of 1/64, and so are the base's weights: every product and sum is exact in float32, in any
order, so that what is left is the one rounding at the end, and results are equal to the last bit. With random factors,
sums of ``r`` products may differ in their last bits by their order (another matrix product than torch's).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.edited import write_edited
from workbench import errors
from workbench.core.dtypes import by_name
from workbench.export.values import lora, lora_config
from workbench.export.values.edits import Edits
from workbench.export.values.fp8 import dequantize, quantize
from workbench.export.values.lora import merge
from workbench.views.export import export_text

BF16, FP32 = by_name("bfloat16"), by_name("float32")
pytestmark = [  # of peft, on transformers and on embeddings that it saves
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


# peft and transformers' models are imported by the tests: they take seconds, and every worker imports this file.


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **more,
        )
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8))


class Convolutions(torch.nn.Module):
    """A convolution of 1 × 1 and a linear layer."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Conv2d(6, 10, 1)
        self.fc = torch.nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.proj(x).mean((2, 3)))


def fill(model, dtype, seed=0, exact=True):
    """Weights of the base, or random ones."""
    torch.manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randint(-100, 101, tensor.shape) / 64 if exact else torch.randn(tensor.shape) * 0.05)
    return model.to(dtype)


def trained(model, config, folder, exact=True, dtype=torch.float32):
    """A PEFT model whose adapter is no longer zero, and the adapter saved; ``config`` is of a ``LoraConfig``."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(**config))
    torch.manual_seed(7)
    for name, parameter in peft.named_parameters():
        if "lora_" in name or parameter.requires_grad:
            made = torch.randint(-8, 9, parameter.shape) / 64 if exact else torch.randn(parameter.shape) * 0.1
            parameter.data = made.to(dtype)
    peft.save_pretrained(folder)
    return peft


def case(tmp_path, model, config, dtype, *, exact=True, adapter=torch.float32):
    """The base and the adapter as checkpoints, and the merged weights that PEFT makes of them."""
    fill(model, dtype, exact=exact)
    base = tmp_path / "base"
    base.mkdir(exist_ok=True)
    tied = {name for names in getattr(model, "_tied_weights_keys", None) or () for name in [names]}
    keep = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        keep = {k: v for k, v in keep.items() if k not in tied}
    save_file(keep, base / "model.safetensors")
    peft = trained(model, config, tmp_path / "adapter", exact, adapter)
    truth = {k: v.clone() for k, v in peft.merge_and_unload().state_dict().items()}
    return wb.open(base), wb.open(tmp_path / "adapter"), truth, keep


CASES = {
    "attention": (llama, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "patterns": (
        llama,
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "rank_pattern": {"down_proj": 2, "0.self_attn.q_proj": 8},
            "alpha_pattern": {"^model.layers.1.mlp.up_proj": 4, r".*\.k_proj": 16},
        },
    ),
    "rslora": (llama, {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["o_proj"]}),
    "saved": (llama, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "embedding": (llama, {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "k_proj"]}),
    "gpt2": (gpt2, {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "convolution": (Convolutions, {"r": 2, "lora_alpha": 4, "target_modules": ["proj", "fc"]}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_merged_weights_are_pefts_to_the_last_bit(tmp_path, monkeypatch, name, dtype):
    make, config = CASES[name]
    ckpt, adapter, truth, base = case(tmp_path, make(), config, dtype)
    monkeypatch.setattr(lora, "BLOCK", 100)  # blocks of a few rows
    edits = Edits(ckpt, range(len(ckpt)))
    merge(edits, adapter)
    found, written = write_edited(edits, tmp_path / "out.safetensors")
    changed = 0
    for key, tensor in truth.items():
        if key not in found:
            assert key == "lm_head.weight" and name == "gpt2"  # tied
            continue
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
        if key in base and not torch.equal(tensor.float(), base[key].float()):
            changed += 1
            assert written[key].source.hex != written[key].target.hex
    pairs = sum("lora_A" in key or "lora_embedding_A" in key for key in adapter)
    saved = sum(
        "lora_" not in key and not torch.equal(adapter[key].torch().float(), base[key[17:]].float())
        for key in adapter
        if key[17:] in base
    )
    assert changed == pairs + saved > 0
    assert found.keys() == base.keys()


def test_random_factors_differ_in_the_order_of_sums_only(tmp_path):
    config = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}
    for dtype, limit in ((torch.float32, 2.0**-21), (torch.bfloat16, 2.0**-7)):
        ckpt, adapter, truth, base = case(tmp_path, llama(), config, dtype, exact=False)
        edits = Edits(ckpt, range(len(ckpt)))
        merge(edits, adapter)
        found, _ = write_edited(edits, tmp_path / "out.safetensors")
        for key, tensor in truth.items():
            gaps = (found[key].double() - tensor.double()).abs()
            if torch.equal(tensor, base[key]):
                assert not gaps.any()
            # float32: a few of its last digits of the largest term; bfloat16: the same bits but where a tie is near
            assert bool((gaps <= limit * tensor.abs().max()).all()), key
            if dtype == torch.bfloat16:
                assert int((gaps > 0).sum()) <= 2, key  # of some 1,000; a few in a million


def test_a_cast_is_part_of_the_one_rounding(tmp_path):
    make, config = CASES["saved"]
    ckpt, adapter, truth, _ = case(tmp_path, make(), config, torch.float32)
    edits = Edits(ckpt, range(len(ckpt)), BF16)
    merge(edits, adapter)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    for key, tensor in truth.items():
        assert torch.equal(found[key], tensor.bfloat16()), key


def test_factors_of_16_bits_are_not_rounded_on_the_way(tmp_path):
    """PEFT rounds B·A to the factors' type before it adds; the difference is at most that rounding."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    ckpt, adapter, truth, base = case(tmp_path, llama(), config, torch.float32, adapter=torch.bfloat16)
    edits = Edits(ckpt, range(len(ckpt)))
    merge(edits, adapter)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    a, b = (adapter[f"base_model.model.{key[:-6]}lora_{one}.weight"].torch().double() for one in "AB")
    assert torch.equal(found[key].double(), base[key].double() + 2 * b @ a)
    delta = truth[key] - base[key]
    assert bool(((found[key] - truth[key]).abs() <= 2.0**-8 * delta.abs() + 1e-7).all())


def test_what_lies_where_does_not_change_a_bit(tmp_path):
    """A tensor whole, cut by columns, and in steps of any size: the same bits, of random factors."""
    torch.manual_seed(0)
    up, down = torch.randn(700, 24).numpy(), torch.randn(24, 900).numpy()
    update = lora.LowRankUpdate(up, down, np.float32(0.3), lora.Scratch())
    whole = np.zeros((700, 900), np.float32)
    update((0, 0), whole)
    rng = np.random.default_rng(1)
    for _ in range(40):
        low = rng.integers(0, (699, 899))
        size = rng.integers(1, np.array([700, 900]) - low + 1)
        part = np.zeros(size, np.float32)
        update(low.tolist(), part)
        assert np.array_equal(part, whole[low[0] : low[0] + size[0], low[1] : low[1] + size[1]])


def test_into_fp8_and_out_of_it(tmp_path):
    """Weights of 8 bits are multiplied out, updated, and quantised again with scales of their new values."""
    weight = (torch.randint(-400, 401, (128, 256)) / 1.0).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0]])
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    save_file({"a.q_proj.weight": weight, "a.q_proj.weight_scale_inv": scale}, base / "model.safetensors")
    up, down = torch.randint(-8, 9, (128, 2)).float(), torch.randint(-8, 9, (2, 256)).float()
    save_file(
        {f"base_model.model.a.q_proj.lora_{k}.weight": v for k, v in (("A", down), ("B", up))},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 1}))
    ckpt = wb.open(base)
    with pytest.raises(errors.UnsupportedFormatError, match=r"'a.q_proj.weight' has type float8_e4m3fn; cast it"):
        merge(Edits(ckpt, range(2)), wb.open(folder))
    edits = Edits(ckpt, range(2), FP32)
    dequantize(edits)
    merge(edits, wb.open(folder))
    values, _ = write_edited(edits, tmp_path / "values.safetensors")
    truth = weight.float() * scale.repeat_interleave(128, 1) + up @ down / 2
    assert torch.equal(values["a.q_proj.weight"], truth)
    quantize(edits)
    found, _ = write_edited(edits, tmp_path / "codes.safetensors")
    forward = torch.stack([448 / part.abs().max() for part in truth.split(128, 1)])[None]
    assert torch.equal(found["a.q_proj.weight_scale_inv"], 1 / forward)
    codes = (truth * forward.repeat_interleave(128, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found["a.q_proj.weight"].view(torch.uint8), codes.view(torch.uint8))


def test_saved_modules_of_another_shape_or_alone_are_added(tmp_path):
    ckpt, _, _, base = case(tmp_path, *_made("saved"), torch.bfloat16)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    resized = torch.randn(50, 32)
    tensors["base_model.model.lm_head.weight"] = resized
    tensors["base_model.model.score.weight"] = torch.randn(3, 32)
    save_file(tensors, path)
    for dtype in (None, BF16):
        edits = Edits(ckpt, range(len(ckpt)), dtype)
        merge(edits, wb.open(tmp_path / "adapter"))
        found, written = write_edited(edits, tmp_path / "out.safetensors")
        for name in ("lm_head.weight", "score.weight"):
            want = tensors[f"base_model.model.{name}"].to(torch.bfloat16 if dtype else torch.float32)
            assert found[name].dtype == want.dtype and torch.equal(found[name], want)
        assert found.keys() == base.keys() | {"score.weight"} and written["score.weight"].cast is None
        assert any("'lm_head.weight', of shape (48, 32), is replaced" in note for note in edits.notes)


def _made(name):
    make, config = CASES[name]
    return make(), config


def test_every_tensor_of_the_adapter_is_used_or_the_export_stops(tmp_path):
    ckpt, adapter, *_ = case(tmp_path, *_made("attention"), torch.float32)
    some = [t for t, key in enumerate(ckpt.catalog.keys) if ".layers.0." in key]
    with pytest.raises(errors.UsageError, match=r"4 tensors of the adapter without a .*layers.1.self_attn.q_proj"):
        merge(Edits(ckpt, some), adapter)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    one = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, words in (
        ({one: None}, "has no counterpart"),
        ({one: torch.ones(4, 31)}, "does not fit it"),
        ({one: torch.ones(3, 32)}, "does not fit it"),
        ({one: torch.ones(4, 32, dtype=torch.int32)}, "only matrices of"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(4)}, "cannot be merged"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.ones(4)}, "cannot be merged"),
        ({one.replace("lora_A", "lora_A.default"): torch.ones(4, 32)}, "duplicates"),
    ):
        made = {k: v for k, v in (tensors | change).items() if v is not None}
        save_file(made, path)
        with pytest.raises(errors.WorkbenchError, match=words):
            merge(Edits(ckpt, range(len(ckpt))), wb.open(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "a part was subtracted"),
        ({"r": 8}, "have rank 4, but 'adapter_config.json' has r=8"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"rank_pattern": {"(a+)+$": 4}}, "has an unknown form"),
        ({"rank_pattern": {"[": 4}}, "pattern '\\['"),
        ({"rank_pattern": 3}, "is not a mapping"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(tmp_path, samples, change, words):
    folder = samples / "hf_peft_lora"
    config = json.loads((folder / "adapter_config.json").read_text()) | change
    with pytest.raises(errors.WorkbenchError, match=words):
        lora_config.LoraConfig.of(config).scale("model.layers.0.self_attn.q_proj", 4)
    ckpt = wb.open(samples / "hf_llama_bf16_sharded")
    if "peft_type" in change:
        with pytest.raises(errors.UnsupportedFormatError, match=r"no 'adapter_config.json'"):
            merge(Edits(ckpt, range(len(ckpt))), ckpt)


def test_a_real_adapter_is_what_peft_loads(tmp_path, samples):
    """The sample adapter on a base of its shape."""
    adapter = wb.open(samples / "hf_peft_lora")
    shapes = {
        key[17:].rpartition(".lora")[0]: (adapter[key], adapter[key.replace("lora_A", "lora_B")])
        for key in adapter
        if "lora_A" in key
    }
    hidden = next(iter(shapes.values()))[0].shape[1]
    queries = next(b.shape[0] for name, (_, b) in shapes.items() if "q_proj" in name)
    values = next(b.shape[0] for name, (_, b) in shapes.items() if "v_proj" in name)
    layers = 1 + max(int(name.split(".")[2]) for name in shapes)
    head = 8
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=queries // head,
        num_key_value_heads=values // head,
        head_dim=head,
    )
    model = fill(LlamaForCausalLM(config), torch.bfloat16)
    (tmp_path / "base").mkdir()
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "base" / "model.safetensors")
    truth = PeftModel.from_pretrained(model, samples / "hf_peft_lora").merge_and_unload().state_dict()
    ckpt = wb.open(tmp_path / "base")
    edits = Edits(ckpt, range(len(ckpt)))
    merge(edits, adapter)
    found, _ = write_edited(edits, tmp_path / "out.safetensors")
    for key, tensor in truth.items():
        gaps = (found[key].double() - tensor.double()).abs()
        assert bool((gaps <= 2.0**-8 * tensor.abs().double()).all()) and int((gaps > 0).sum()) <= 1e-2 * gaps.numel()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_report_counts_the_merge_and_the_rounding_apart(tmp_path, dtype):
    torch.manual_seed(3)
    key = "model.layers.0.self_attn.q_proj.weight"
    base = {key: torch.randn(12, 8), "model.norm.weight": torch.randn(8)}
    up, down = torch.randn(12, 2), torch.randn(2, 8)
    up[0] = 0  # a row that the adapter leaves as it is
    (tmp_path / "adapter").mkdir()
    save_file(base, tmp_path / "base.safetensors")
    stem = f"base_model.model.{key.removesuffix('weight')}"
    factors = {f"{stem}lora_A.weight": down, f"{stem}lora_B.weight": up}
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    target = tmp_path / "out.safetensors"
    report = wb.export(tmp_path / "base.safetensors", target, lora=tmp_path / "adapter", dtype=dtype)
    one = next(one for one in report.tensors if one.key == key)
    assert one.updated == 11 * 8 and one.max_update == pytest.approx(float((up @ down).abs().max()), rel=1e-5)
    assert f"adapters changed 88 elements by up to {one.max_update:.3g} (in '{key}')" in str(report)
    assert f"88 changed by up to {one.max_update:.3g}" in export_text(report)
    if dtype is None:
        assert (one.changed, one.max_abs) == (0, 0.0) and "round" not in export_text(report)
    else:
        merged = base[key] + up @ down
        gap = float((merged - load_file(target)[key].float()).abs().max())
        assert one.changed > 80 and one.max_abs == pytest.approx(gap, rel=1e-3)
        assert one.max_abs < one.max_update / 50
        assert f"{one.changed} rounded by up to {one.max_abs:.3g}" in export_text(report)
    norm = next(one for one in report.tensors if one.key == "model.norm.weight")
    assert (norm.updated, norm.max_update) == (0, 0.0)
