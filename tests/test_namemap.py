"""Name maps between Megatron's and Hugging Face's conventions, on catalogs made in code; no weight is copied."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from megatron_files import Model, write_dist, write_legacy
from safetensors.torch import save_file

import workbench as wb
from workbench.analysis.name_map import name_map
from workbench.names.frameworks import Geometry, links

HIDDEN, HEADS, GROUPS, ROWS, INTER, VOCAB, LAYERS = 8, 4, 2, 3, 10, 21, 2
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": ROWS, "vocab_size": VOCAB}


def hf_weights(experts: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "model.norm.weight": torch.randn(HIDDEN)}
    found["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    for n in range(LAYERS):
        p = f"model.layers.{n}"
        for side, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            found[f"{p}.self_attn.{side}_proj.weight"] = torch.randn(heads * ROWS, HIDDEN)
            found[f"{p}.self_attn.{side}_proj.bias"] = torch.randn(heads * ROWS)
        found[f"{p}.self_attn.o_proj.weight"] = torch.randn(HIDDEN, HEADS * ROWS)
        found[f"{p}.input_layernorm.weight"] = torch.randn(HIDDEN)
        found[f"{p}.post_attention_layernorm.weight"] = torch.randn(HIDDEN)
        if experts:
            found[f"{p}.block_sparse_moe.gate.weight"] = torch.randn(experts, HIDDEN)
            for e in range(experts):
                for name, shape in (("w1", (INTER, HIDDEN)), ("w3", (INTER, HIDDEN)), ("w2", (HIDDEN, INTER))):
                    found[f"{p}.block_sparse_moe.experts.{e}.{name}.weight"] = torch.randn(shape)
        else:
            for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER))):
                found[f"{p}.mlp.{name}_proj.weight"] = torch.randn(shape)
    return found


def megatron_weights(hf: dict[str, torch.Tensor], spelling: str, pad: int = 3) -> dict[str, torch.Tensor]:
    """The same model in Megatron (megatron-core 0.16: grouped QKV, [gate; up], padded vocabulary)."""
    padded = torch.zeros(pad, HIDDEN)
    found = {
        "embedding.word_embeddings.weight": torch.cat([hf["model.embed_tokens.weight"], padded]),
        "output_layer.weight": torch.cat([hf["lm_head.weight"], padded]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    norms = {
        "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
        "te": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
    }[spelling]
    for n in range(LAYERS):
        p, m = f"model.layers.{n}", f"decoder.layers.{n}"
        for leaf in ("weight", "bias"):
            q, k, v = (hf[f"{p}.self_attn.{s}_proj.{leaf}"] for s in "qkv")
            rest = q.shape[1:]
            q = q.reshape(GROUPS, HEADS // GROUPS * ROWS, *rest)
            k, v = k.reshape(GROUPS, ROWS, *rest), v.reshape(GROUPS, ROWS, *rest)
            found[f"{m}.self_attention.linear_qkv.{leaf}"] = torch.cat([q, k, v], dim=1).reshape(-1, *rest)
        found[f"{m}.self_attention.linear_proj.weight"] = hf[f"{p}.self_attn.o_proj.weight"]
        found[f"{m}.{norms[0]}"] = hf[f"{p}.input_layernorm.weight"]
        found[f"{m}.{norms[1]}"] = hf[f"{p}.post_attention_layernorm.weight"]
        if f"{p}.mlp.gate_proj.weight" in hf:
            found[f"{m}.mlp.linear_fc1.weight"] = torch.cat([hf[f"{p}.mlp.{s}_proj.weight"] for s in ("gate", "up")])
            found[f"{m}.mlp.linear_fc2.weight"] = hf[f"{p}.mlp.down_proj.weight"]
            continue
        moe = f"{p}.block_sparse_moe"
        found[f"{m}.mlp.router.weight"] = hf[f"{moe}.gate.weight"]
        for e in range(3):
            w1, w2, w3 = (hf[f"{moe}.experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3"))
            found[f"{m}.mlp.experts.local_experts.{e}.linear_fc1.weight"] = torch.cat([w1, w3])
            found[f"{m}.mlp.experts.local_experts.{e}.linear_fc2.weight"] = w2
    return found


def saved(folder, tensors, config=None):
    folder.mkdir()
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return wb.open(folder)


@pytest.mark.parametrize("spelling", ["local", "te"])
@pytest.mark.parametrize("experts", [0, 3])
def test_megatron_under_the_names_of_hugging_face_is_equal_bit_for_bit(tmp_path, spelling, experts):
    truth = hf_weights(experts)
    hf = saved(tmp_path / "hf", truth, CONFIG)
    megatron = saved(tmp_path / "megatron", megatron_weights(truth, spelling))
    found = name_map(megatron, hf)
    assert not found.only_b and not found.only_a, (found.only_a, found.only_b)
    aligned = found.apply()
    assert list(aligned) == list(hf)
    for key, want in truth.items():
        assert torch.equal(aligned[key].torch(), want), key
        assert aligned[key].fqn == hf[key].fqn and aligned[key].role == hf[key].role
    q = found.pairs.set_index("b").loc["model.layers.1.self_attn.q_proj.weight"]
    assert q["a"] == ("decoder.layers.1.self_attention.linear_qkv.weight",) and q["boxes"] == GROUPS


def test_hugging_face_under_the_names_of_megatron(tmp_path):
    truth = hf_weights()
    want = megatron_weights(truth, "te", pad=0)
    found = name_map(saved(tmp_path / "hf", truth, CONFIG), saved(tmp_path / "megatron", want))
    assert not found.only_a and not found.only_b
    aligned = found.apply()
    assert all(torch.equal(aligned[key].torch(), value) for key, value in want.items())


def test_padding_of_the_vocabulary_is_said_not_made_up(tmp_path):
    truth = hf_weights()
    padded = saved(tmp_path / "megatron", megatron_weights(truth, "te"))
    found = name_map(saved(tmp_path / "hf", truth, CONFIG), padded)
    assert set(found.only_b) == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert f"{VOCAB * HIDDEN:,} of its {(VOCAB + 3) * HIDDEN:,}" in found.only_b["output_layer.weight"]


def test_without_the_head_counts_rows_of_qkv_are_not_guessed(tmp_path):
    truth = hf_weights()
    found = name_map(saved(tmp_path / "m", megatron_weights(truth, "te")), saved(tmp_path / "hf", truth))
    assert any("query groups" in why for why in found.only_a.values())
    assert set(found.only_b) == {k for k in truth if any(f".{s}_proj" in k and "self_attn" in k for s in "qkv")}


def test_experts_fused_in_memory_and_apart_on_disk(tmp_path):
    truth = hf_weights(3)
    fused = {k: v for k, v in truth.items() if "experts" not in k and "block_sparse_moe" not in k}
    for n in range(LAYERS):
        p = f"model.layers.{n}.block_sparse_moe"
        fused[f"model.layers.{n}.mlp.gate.weight"] = truth[f"{p}.gate.weight"]
        w = {
            name: torch.stack([truth[f"{p}.experts.{e}.{name}.weight"] for e in range(3)])
            for name in ("w1", "w2", "w3")
        }
        fused[f"model.layers.{n}.mlp.experts.gate_up_proj"] = torch.cat([w["w1"], w["w3"]], dim=1)
        fused[f"model.layers.{n}.mlp.experts.down_proj"] = w["w2"]
    a, b = saved(tmp_path / "a", fused), saved(tmp_path / "b", truth)
    there, back = name_map(a, b), name_map(b, a)
    assert not (there.only_a or there.only_b or back.only_a or back.only_b)
    assert all(torch.equal(there.apply()[k].torch(), v) for k, v in truth.items())
    assert all(torch.equal(back.apply()[k].torch(), v) for k, v in fused.items())


def test_interleaved_experts_of_gpt_oss_are_not_cut_into_halves(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights = {name: torch.rand(2, 8, 12)}
    separate = {f"model.layers.0.mlp.experts.{e}.w{n}.weight": torch.rand(4, 12) for e in range(2) for n in (1, 3)}
    oss, plain = saved(tmp_path / "oss", weights, {"model_type": "gpt_oss"}), saved(tmp_path / "plain", weights)
    apart = saved(tmp_path / "apart", separate)
    assert not name_map(plain, apart).only_b, "two halves of rows"
    assert set(name_map(oss, apart).only_b) == set(separate)
    for a, b in ((oss, oss), (plain, oss)):
        assert torch.equal(name_map(a, b).apply()[name].torch(), weights[name])


def test_a_map_reads_no_weight(tmp_path, monkeypatch):
    truth = hf_weights()
    hf, megatron = saved(tmp_path / "hf", truth, CONFIG), saved(tmp_path / "m", megatron_weights(truth, "te"))
    from workbench.core.storage import SourcePool

    def never(*_):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(SourcePool, "source", never)
    monkeypatch.setattr(SourcePool, "private", never)
    assert len(name_map(megatron, hf).apply()) == len(truth)


def test_links_of_every_tensor_tile_it():
    facts = Geometry(HEADS, GROUPS, ROWS, VOCAB)
    truth = hf_weights(3)
    for name, tensor in [*truth.items(), *megatron_weights(truth, "te").items()]:
        found = links(name, tuple(tensor.shape), facts)
        assert not isinstance(found, str)
        count = np.zeros(tensor.shape, int)
        for link in found:
            count[tuple(slice(a, a + n) for a, n in zip(link.offsets, link.sizes, strict=True))] += 1
        assert (count == 1).all(), name


@pytest.mark.parametrize("layout", ["legacy tp2 pp2", "torch_dist tp2"])
@pytest.mark.parametrize("te", [False, True])
def test_a_megatron_run_beside_its_hugging_face_export(tmp_path, layout, te):
    """The same weights as Megatron's ranks hold them and as Llama is exported: equal to the last bit, none copied."""
    model = Model(te=te)
    hf = saved(tmp_path / "hf", exported(model), {"model_type": "llama"})
    if layout.startswith("legacy"):
        run = wb.open(write_legacy(tmp_path / "run", model, tp=2, pp=2))
    else:
        run = wb.open(write_dist(tmp_path / "run", model, tp=2, optimizer="float16"))
    found = name_map(run, hf)
    assert not found.only_b
    aligned = found.apply()
    assert list(aligned) == list(hf)
    for key in hf:
        assert torch.equal(aligned[key].torch(), hf[key].torch()), key
    assert set(found.only_a) == {key for key in run if run[key].role != "param"}


def exported(model):
    """Hugging Face's weights of a Megatron model, by dense cutting (megatron-core's ``[q … q k v]`` a group)."""
    each, kv = model.heads // model.groups, model.kv
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    names |= {"decoder.final_layernorm.weight": "model.norm.weight"}
    found = {}
    for name, weight in model.params.items():
        if name in names:
            # the export drops the rows that only pad the vocabulary to a multiple
            found[names[name]] = weight[: model.vocab - 3] if "norm" not in name else weight
            continue
        _, _, n, rest = name.split(".", 3)
        p = f"model.layers.{n}"
        leaf = rest.rsplit(".", 1)[1]
        if rest.startswith("self_attention.linear_qkv.") and "norm" not in rest:
            parts = weight.reshape(model.groups, each + 2, kv, *weight.shape[1:])
            for side, part in (("q", parts[:, :each]), ("k", parts[:, each]), ("v", parts[:, each + 1])):
                found[f"{p}.self_attn.{side}_proj.{leaf}"] = part.reshape(-1, *weight.shape[1:])
        elif rest == "mlp.linear_fc1.weight":
            found[f"{p}.mlp.gate_proj.weight"], found[f"{p}.mlp.up_proj.weight"] = weight.chunk(2)
        elif rest == "mlp.linear_fc2.weight":
            found[f"{p}.mlp.down_proj.weight"] = weight
        elif rest.startswith("self_attention.linear_proj."):
            found[f"{p}.self_attn.o_proj.{leaf}"] = weight
        else:
            first = rest in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
            found[f"{p}.{'input' if first else 'post_attention'}_layernorm.weight"] = weight
    return found


def test_paths_are_accepted_as_checkpoints(tmp_path):
    for name in "ab":
        torch.save({"model.norm.weight": torch.ones(3)}, tmp_path / f"{name}.pt")
    found = wb.name_map(tmp_path / "a.pt", str(tmp_path / "b.pt"))
    assert [one.key for one in found.targets] == ["model.norm.weight"]
