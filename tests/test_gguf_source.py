"""A GGUF against the checkpoint that it was made from: every transform of llama.cpp's converter, every type's rounding.

The converter here is written from the formulas of llama.cpp's, in numpy, and quantises by taking the nearest code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests.gguf_files import Writer, scalar
from workbench.core.decoding import ggml
from workbench.core.dtypes import BLOCKS
from workbench.names.gguf import ARCHITECTURES

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
HEADS, GROUPS, ROWS, HIDDEN, INTER, VOCAB, EXPERTS = 4, 2, 16, 256, 256, 24, 3
SIDES = (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
F32, F16, Q4_0, Q8_0, Q4_K, BF16, IQ3_S, NVFP4 = 0, 1, 2, 8, 12, 30, 21, 40
State = dict[str, torch.Tensor]


# ---- a model, and its conversion ------------------------------------------------------------------------------------


def model(kind: str, dtype: torch.dtype) -> tuple[State, dict[str, Any]]:
    """A decoder of one layer as transformers names it, and its configuration."""
    make = torch.Generator().manual_seed(len(kind))
    draw = lambda *shape: (torch.randn(*shape, generator=make) * 0.05).to(dtype)  # noqa: E731
    layer = {f"self_attn.{s}_proj.weight": draw(n * ROWS, HIDDEN) for s, n in SIDES}
    layer |= {"self_attn.o_proj.weight": draw(HIDDEN, HEADS * ROWS)}
    layer |= {"input_layernorm.weight": draw(HIDDEN), "post_attention_layernorm.weight": draw(HIDDEN)}
    if kind == "qwen2":
        layer |= {f"self_attn.{s}_proj.bias": draw(n * ROWS) for s, n in SIDES}
    if kind == "gemma3":
        layer |= {"self_attn.q_norm.weight": draw(ROWS), "self_attn.k_norm.weight": draw(ROWS)}
        layer |= {f"{side}_feedforward_layernorm.weight": draw(HIDDEN) for side in ("pre", "post")}
    if kind == "mixtral":
        layer["block_sparse_moe.gate.weight"] = draw(EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for w, shape in (("w1", (INTER, HIDDEN)), ("w3", (INTER, HIDDEN)), ("w2", (HIDDEN, INTER))):
                layer[f"block_sparse_moe.experts.{e}.{w}.weight"] = draw(*shape)
    else:
        layer |= {f"mlp.{s}_proj.weight": draw(INTER, HIDDEN) for s in ("gate", "up")}
        layer["mlp.down_proj.weight"] = draw(HIDDEN, INTER)
    state = {f"model.layers.0.{name}": value for name, value in layer.items()}
    state |= {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    tied = kind != "llama"
    if not tied:
        state["lm_head.weight"] = draw(VOCAB, HIDDEN)
    config = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": ROWS,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "tie_word_embeddings": tied,
    }
    return state, config


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def converted(kind: str, state: State) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter writes, as float32."""
    names, out, experts = NAMES | (GEMMA3 if kind == "gemma3" else {}), {}, {}
    for key, value in state.items():
        w = value.float().numpy()
        stem, leaf = key.rsplit(".", 1)
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            w = w + np.float32(1)
        if kind in ("llama", "mixtral") and stem.endswith(("q_proj", "k_proj")):
            heads = HEADS if stem.endswith("q_proj") else GROUPS
            w = w.reshape(heads, 2, ROWS // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if ".experts." in key:
            experts[stem.split(".")[-1], int(stem.split(".")[-2])] = w
        elif stem.startswith("model.layers.0."):
            out[f"blk.0.{names[stem.removeprefix('model.layers.0.')]}.{leaf}"] = w
        else:
            out[f"{WHOLE[stem]}.weight"] = w
    for w, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        if experts:
            out[f"blk.0.ffn_{name}_exps.weight"] = np.stack([experts[w, e] for e in range(EXPERTS)])
    return out


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


def q4_0(x: np.ndarray) -> bytes:
    x = x.reshape(-1, 32)
    top = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    d = f16(top / -8)
    q = np.clip(np.rint(x / np.where(d == 0, 1, d.astype(np.float32))) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([d.view(np.uint8), q[:, :16] | q[:, 16:] << 4], axis=1).tobytes()


def q8_0(x: np.ndarray) -> bytes:
    x = x.reshape(-1, 32)
    d = np.abs(x).max(1, keepdims=True) / 127
    q = np.rint(x / np.where(d == 0, 1, d)).astype(np.int8)
    return np.concatenate([f16(d).view(np.uint8), q.view(np.uint8)], axis=1).tobytes()


def q4_k(x: np.ndarray) -> bytes:
    x = x.reshape(-1, 8, 32)
    low = np.maximum(-x.min(2), 0)
    step = (x.max(2) + low) / 15
    d, dmin = (f16(one.max(1, keepdims=True) / 63).astype(np.float32) for one in (step, low))
    s, m = (np.clip(np.rint(one / np.where(u == 0, 1, u)), 0, 63) for one, u in ((step, d), (low, dmin)))
    scale, least = (d * s)[:, :, None], (dmin * m)[:, :, None]
    q = np.clip(np.rint((x + least) / np.where(scale == 0, 1, scale)), 0, 15).astype(np.uint8)
    s, m = s.astype(np.uint8), m.astype(np.uint8)
    packed = np.concatenate(
        [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1
    )
    codes = (q[:, ::2] | q[:, 1::2] << 4).reshape(len(x), -1)
    return np.concatenate([f16(d).view(np.uint8), f16(dmin).view(np.uint8), packed, codes], axis=1).tobytes()


PACK = {
    F32: lambda x: x.astype("<f4").tobytes(),
    F16: lambda x: f16(x).tobytes(),
    Q4_0: q4_0,
    Q8_0: q8_0,
    Q4_K: q4_k,
    NVFP4: lambda x: nvfp4(x.astype(np.float32))[0].tobytes(),
    BF16: lambda x: torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().tobytes(),
}


def pair(folder: Path, kind: str, to: int, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Path, Path]:
    """A checkpoint and the GGUF made of it; ``more``: tensors in other bytes, or metadata (``llama_expert_count``)."""
    state, config = model(kind, dtype)
    (folder / "hf").mkdir()
    save_file(state, folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    writer, arch = Writer(), "llama" if kind == "mixtral" else more.get("arch", kind)
    numbers = {"head_count": HEADS, "head_count_kv": GROUPS, "key_length": ROWS}
    facts = {f"{arch}.attention.{name}": scalar(4, value) for name, value in numbers.items()}
    facts |= {"general.architecture": (8, writer.text(arch.encode())), **more.get("facts", {})}
    tensors = []
    for name, value in (converted(kind, state) | more.get("values", {})).items():
        narrow = to in (Q4_0, Q8_0, Q4_K, NVFP4) and value.shape[-1] % 256
        of = F32 if value.ndim == 1 or "ffn_gate_inp" in name else F16 if narrow else to
        tensors.append((name, of, value.shape, more.get("bytes", {}).get(name) or PACK[of](value)))
    (folder / "m.gguf").write_bytes(writer.file(tensors, facts))
    return folder / "hf", folder / "m.gguf"


# ---- what is mapped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "gemma", "gemma3"])
def test_every_tensor_is_mapped_and_the_same_in_both_directions(tmp_path: Path, kind: str) -> None:
    hf, gguf = map(wb.open, pair(tmp_path, kind, F32))
    there, back = wb.name_map(hf, gguf), wb.name_map(gguf, hf)
    for found in (there, back):
        assert not found.only_a and not found.only_b, (found.only_a, found.only_b)
    made, again = there.apply(), back.apply()
    assert all(torch.equal(made[key].torch(), gguf[key].torch()) for key in gguf)
    for key in hf:
        norm = kind.startswith("gemma") and "norm" in key  # plus 1, minus 1: in float32
        assert torch.equal(again[key].torch(), (hf[key].torch() + 1) - 1 if norm else hf[key].torch()), key
    found = wb.diff(hf, gguf)
    assert found.same and found.exit_code == 0 and found.summary["equal"] == len(gguf)


@pytest.mark.parametrize(
    "to, dtype",
    [
        (F16, torch.bfloat16),
        (F16, torch.float32),
        (BF16, torch.float16),
        (Q8_0, torch.float16),
        (Q4_0, torch.bfloat16),
        (Q4_K, torch.bfloat16),
        (Q4_K, torch.float32),
        (NVFP4, torch.bfloat16),
    ],
)
def test_what_rounding_explains_is_no_difference(tmp_path: Path, to: int, dtype: torch.dtype) -> None:
    hf, gguf = pair(tmp_path, "llama", to, dtype)
    for found in (wb.diff(hf, gguf), wb.diff(gguf, hf)):  # the source is always a
        assert found.a == str(hf) and found.same and found.exit_code == 0, found
        assert found.summary["equal"] + found.summary["rounded"] == len(wb.open(gguf))
    row = found.tensor("blk.0.attn_v.weight")
    if to in (Q8_0, Q4_0, Q4_K, NVFP4):
        assert row.rounding is not None and not row.rounding.beyond
        assert row.rounding.sentence == f"equal up to {({8: 'Q8_0', 2: 'Q4_0', 12: 'Q4_K', 40: 'NVFP4'})[to]} rounding"


def test_rows_of_a_vocabulary_that_the_converter_drops_are_not_missed(tmp_path: Path) -> None:
    """Gemma 3: rows beyond the tokenizer's words."""
    short = {"token_embd.weight": model("gemma3", torch.float32)[0]["model.embed_tokens.weight"].numpy()[:20]}
    assert wb.diff(*pair(tmp_path, "gemma3", Q8_0, values=short)).same


def test_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    state, _ = model("llama", torch.float32)
    made = converted("llama", state)
    fused = np.concatenate([made[f"blk.0.attn_{s}.weight"] for s in "qkv"])
    row = wb.diff(*pair(tmp_path, "llama", F32, values={"blk.0.attn_qkv.weight": fused})).tensor(
        "blk.0.attn_qkv.weight"
    )
    assert row.status == "equal" and len(row.keys_a) == 3


def test_a_tied_head_that_both_store_is_compared_and_one_that_is_left_out_is_said(tmp_path: Path) -> None:
    hf, gguf = pair(tmp_path, "qwen2", F32)
    state, _ = model("qwen2", torch.float32)
    embedding = state["model.embed_tokens.weight"]
    save_file(state | {"lm_head.weight": embedding.clone()}, hf / "model.safetensors")
    found = wb.diff(hf, gguf)
    assert found.same and "ties" in found.not_checked["tensor 'lm_head.weight'"]
    (tmp_path / "b").mkdir()
    other = pair(tmp_path / "b", "qwen2", F32, values={"output.weight": embedding.numpy()})
    assert wb.diff(*other).tensor("output.weight").keys_a == ("model.embed_tokens.weight",)


def test_what_is_made_from_the_configuration_is_not_a_difference(tmp_path: Path) -> None:
    hf, gguf = pair(tmp_path, "llama", Q8_0, values={"rope_freqs.weight": np.ones(ROWS // 2, np.float32)})
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(ROWS // 2)}
    save_file(model("llama", torch.float32)[0] | old, hf / "model.safetensors")
    found = wb.diff(hf, gguf)
    assert found.same and "configuration" in found.not_checked["tensor 'rope_freqs.weight'"]
    assert "leaves it out" in found.not_checked[f"tensor {next(iter(old))!r}"]


def test_a_gguf_that_was_quantised_from_another_one(tmp_path: Path) -> None:
    (tmp_path / "floats").mkdir()
    _, floats = pair(tmp_path / "floats", "llama", F16)
    _, gguf = pair(tmp_path, "llama", Q4_K)
    found = wb.diff(floats, gguf)
    assert found.same and found.summary["rounded"] and not found.objects
    row = found.tensor("blk.0.ffn_up.weight")
    assert row.rounding is not None and row.rounding.scheme == "Q4_K"
    assert found.to_dict()["rounded"]["blk.0.ffn_up.weight"] == "Q4_K"


@pytest.mark.parametrize("arch", ["mamba", "gemma4"])
def test_an_unknown_architecture_is_said_and_nothing_is_guessed(tmp_path: Path, arch: str) -> None:
    hf, gguf = pair(tmp_path, "llama", F32, arch=arch)
    found = wb.name_map(wb.open(hf), wb.open(gguf))
    assert not found.targets and set(found.only_b) == set(wb.open(gguf))
    assert all(repr(arch) in why and all(known in why for known in ARCHITECTURES) for why in found.only_b.values())
    assert not wb.diff(hf, gguf).same


def test_heads_that_no_file_states_leave_q_and_k_unmapped(tmp_path: Path) -> None:
    facts = {"llama.attention.head_count_kv": (9, b"\4\0\0\0" + (2).to_bytes(8, "little") + b"\2\0\0\0\4\0\0\0")}
    hf, gguf = pair(tmp_path, "llama", F32, facts=facts)
    found = wb.name_map(wb.open(hf), wb.open(gguf))
    assert list(found.only_b) == ["blk.0.attn_k.weight"] and "not one number" in found.only_b["blk.0.attn_k.weight"]


@pytest.mark.parametrize("shape, heads", [((0, HIDDEN), 1 << 31), ((1 << 30, 0), 1 << 29), ((64, HIDDEN), 48)])
def test_impossible_heads_are_said(tmp_path: Path, shape: tuple[int, int], heads: int) -> None:
    """At once: a count of heads in the file costs nothing by itself."""
    q = {"blk.0.attn_q.weight": np.zeros(shape, np.float32)}
    facts = {"llama.attention.head_count": scalar(4, heads)}
    hf, gguf = pair(tmp_path, "llama", F32, values=q, facts=facts)
    assert "are not" in wb.name_map(wb.open(hf), wb.open(gguf)).only_b["blk.0.attn_q.weight"]


# ---- what is damaged -------------------------------------------------------------------------------------------------


def only(found: wb.Diff, key: str) -> str:
    """The text of a diff in which one tensor alone is named."""
    assert [row.key_b for row in found.changed_rows] == [key] and not found.added and not found.removed
    assert found.summary["changed"] == 1 and found.exit_code == 1
    return " ".join(repr(found).split())


@pytest.mark.parametrize("to", [F16, Q4_K])
def test_rows_that_were_not_permuted_are_named(tmp_path: Path, to: int) -> None:
    state, _ = model("llama", torch.float32)
    plain = {"blk.0.attn_q.weight": state["model.layers.0.self_attn.q_proj.weight"].numpy()}
    said = only(wb.diff(*pair(tmp_path, "llama", to, values=plain)), "blk.0.attn_q.weight")
    assert "its rows were not permuted" in said


@pytest.mark.parametrize("to", [F16, Q4_K])
def test_a_norm_without_its_one_is_named(tmp_path: Path, to: int) -> None:
    state, _ = model("gemma", torch.bfloat16)
    plain = {"blk.0.ffn_norm.weight": state["model.layers.0.post_attention_layernorm.weight"].float().numpy()}
    said = only(wb.diff(*pair(tmp_path, "gemma", to, torch.bfloat16, values=plain)), "blk.0.ffn_norm.weight")
    assert "1 was not added" in said


@pytest.mark.parametrize("times", [0, 1.25, 2])
@pytest.mark.parametrize("to, nbytes", [(Q8_0, 34), (Q4_0, 18), (Q4_K, 144)])
def test_one_block_with_another_scale_is_found_and_located(tmp_path: Path, to: int, nbytes: int, times: float) -> None:
    state, _ = model("qwen2", torch.bfloat16)
    data = bytearray(PACK[to](state["model.layers.0.mlp.up_proj.weight"].float().numpy()))
    per_row = len(data) // INTER
    at = per_row * 7 + nbytes * (per_row // nbytes - 1)  # the last block of row 7
    data[at : at + 2] = (np.frombuffer(data[at : at + 2], np.float16) * np.float16(times)).tobytes()
    found = wb.diff(*pair(tmp_path, "qwen2", to, torch.bfloat16, bytes={"blk.0.ffn_up.weight": bytes(data)}))
    only(found, "blk.0.ffn_up.weight")
    rounding = found.tensor("blk.0.ffn_up.weight").rounding
    assert rounding is not None and 0 < rounding.beyond <= 256 and rounding.at is not None and rounding.at[0] == 7


def test_a_transposed_expert_is_named(tmp_path: Path) -> None:
    state, _ = model("mixtral", torch.float32)
    stack = converted("mixtral", state)["blk.0.ffn_up_exps.weight"].copy()
    stack[1] = stack[1].T
    found = wb.diff(*pair(tmp_path, "mixtral", Q4_K, values={"blk.0.ffn_up_exps.weight": stack}))
    only(found, "blk.0.ffn_up_exps.weight")
    assert found.tensor("blk.0.ffn_up_exps.weight").rounding.at[0] == 1


def test_types_without_a_bound_are_said_to_have_none(tmp_path: Path) -> None:
    facts = {"quantize.imatrix.file": (8, Writer().text(b"some.dat"))}
    hf, gguf = pair(tmp_path, "llama", Q4_0, facts=facts)
    found = wb.diff(hf, gguf)
    row = found.tensor("blk.0.attn_q.weight")
    assert row.status == "type" and "importance matrix" in row.why and not found.same
    writer, data = Writer(), bytes(INTER * 110)
    base = {"general.architecture": (8, writer.text(b"llama"))}
    gguf.write_bytes(writer.file([("blk.0.ffn_up.weight", IQ3_S, (INTER, HIDDEN), data)], base))
    row = wb.diff(hf, gguf).tensor("blk.0.ffn_up.weight")
    assert row.status == "type" and "IQ3_S" in row.why
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "config.json").unlink()
    (tmp_path / "hf").rmdir()
    apart = pair(tmp_path, "llama", NVFP4, values={"blk.0.attn_q.scale": np.ones(1, np.float32)})
    row = wb.diff(*apart).tensor("blk.0.attn_q.weight")
    assert row.status == "type" and "a scale in a tensor of its own" in row.why


# ---- cells -----------------------------------------------------------------------------------------------------------

#: Bytes of a block that are scales; the others are codes.
SCALES = {
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "Q5_0": (0, 2),
    "Q5_1": (0, 4),
    "Q8_0": (0, 2),
    "Q4_K": (0, 16),
    "Q5_K": (0, 16),
    "Q6_K": (192, 210),
    "Q3_K": (96, 110),
    "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 8),
    "MXFP4": (0, 1),
    "NVFP4": (0, 4),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_cell_ends_half_way_to_the_next_number_that_the_block_can_hold(name: str) -> None:
    """All numbers that an element can be are found by drawing its codes, under the scales of one block."""
    rng = np.random.default_rng(7)
    nbytes, (first, stop) = BLOCKS[name][1], SCALES[name]
    blocks = rng.integers(0, 256, (3000, nbytes), np.uint8)
    fixed = rng.integers(0, 256, stop - first, np.uint8)
    halves = {
        "Q6_K": [16],
        "Q3_K": [12],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q4_1": [0, 2],
        "Q5_1": [0, 2],
        "MXFP4": [],
        "NVFP4": [],
    }
    for at in halves.get(name, [0]):  # a float16 of about 0.01
        fixed[at : at + 2] = np.frombuffer(np.float16(0.0123).tobytes(), np.uint8)
    if name in ("MXFP4", "NVFP4"):
        fixed[:] = 120
    blocks[:, first:stop] = fixed
    values = ggml.decode(name, blocks.reshape(-1)).reshape(3000, -1)
    ends = ggml.cells(name, blocks.reshape(-1)).reshape(3000, -1, 2)
    for element in (0, 5, values.shape[1] - 1):
        levels = np.unique(values[:, element])
        assert len(levels) > 7
        middle = (levels[1:] + levels[:-1]) / 2
        near = 0.01 * np.diff(levels).max() + 2**-11 * np.abs(levels).max()
        for value, (low, high) in zip(values[:, element], ends[:, element], strict=True):
            at = int(np.searchsorted(levels, value))
            assert low <= value <= high
            inside = 2 if name == "Q8_0" else 1  # its code -128 is not used
            if inside <= at < len(levels) - 1:
                assert abs(low - middle[at - 1]) <= near and abs(high - middle[at]) <= near


def nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(N, 64) float32`` as ggml's ``quantize_row_nvfp4_ref`` stores it, and the codes' numbers over the scale."""
    runs = x.reshape(-1, 4, 16)
    scale = np.abs(runs).max(-1) / np.float32(6)
    man, exp = np.frexp(np.minimum(scale, np.float32(448)))  # 0.5 <= man < 1
    small = np.minimum(np.floor(scale * 512 + np.float32(0.5)), 7)
    large = (exp + 6) * 8 + np.floor((man * 2 - 1) * 8 + 0.5)  # a carry out of the mantissa goes into the exponent
    ue = np.where(exp - 1 + 7 <= 0, small, np.where(exp - 1 + 7 >= 15, 0x7E, np.minimum(large, 0x7E))).astype(np.uint8)
    half = np.where(ue < 8, ue * 2.0**-9, (1 + ue % 8 / 8) * 2.0 ** (ue // 8 - 7.0)).astype(np.float32) / 2
    table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
    codes = np.abs(table * half[..., None, None] - runs[..., None]).argmin(-1).astype(np.uint8)
    packed = codes[..., :8] | codes[..., 8:] << 4
    return np.concatenate([ue, packed.reshape(-1, 32)], axis=1), table[codes] * half[..., None]


@pytest.mark.parametrize("size", [1e-4, 1e-3, 0.02, 0.1, 1.0, 1e4])
def test_what_nvfp4_makes_of_a_number_has_that_number_in_its_cell(size: float) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_t(2, (4000, 64)) * size).astype(np.float32)
    x[:50] = 0
    blocks, values = nvfp4(x)
    assert np.array_equal(ggml.decode("NVFP4", blocks.reshape(-1)), values.reshape(-1))
    low, high = ggml.cells("NVFP4", blocks.reshape(-1)).T
    assert ((low <= x.reshape(-1)) & (x.reshape(-1) <= high)).all()
    if size == 0.1:  # the cells are narrow: of two steps and a half on average, and of six at the most
        scale = np.repeat(np.abs(x.reshape(-1, 16)).max(-1) / 6, 16)
        assert np.median((high - low) / np.maximum(scale, 2**-9)) < 1.1


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", ["llama/llama-f16", "llama/llama-q8_0", "gemma/gemma-bf16"])
def test_files_of_llama_cpp_itself(name: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / "gguf"
    found = wb.diff(folder / name.split("/")[0] / "hf", folder / f"{name}.gguf")
    assert found.same and not found.added and not found.removed
