"""GGUF files by gguf 0.19: every type that it can decode, and a file in two parts.

``gguf/types.gguf``: a tensor of each block type and each plain one, and metadata of each kind. Blocks are those of
gguf's own quantisers where it has them; elsewhere random bytes with finite scales.
``gguf/split``: the parts that llama.cpp's ``gguf-split`` makes, the first one without tensors.

Truth is what ``gguf.quants.dequantize`` returns. Needs ``pip install gguf==0.19.0``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from common import publish, write_truth
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
#: Bytes of float16 scales in a block, which random bytes would make infinite.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
SHAPE = (2, 256)


def blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor of :data:`SHAPE`."""
    kind = GGMLQuantizationType[name]
    try:
        return quantize(rng.standard_normal(SHAPE, dtype=np.float32), kind)
    except NotImplementedError:
        size, nbytes = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (SHAPE[0] * SHAPE[1] // size, nbytes), dtype=np.uint8)
        for at in HALVES.get(name, ()):
            data[:, at : at + 2] = rng.uniform(0.001, 0.1, (len(data), 1)).astype(np.float16).view(np.uint8)
        if name == "IQ1_M":  # its scale is in the high nibbles of four words
            data[:, 49:56:2] = data[:, 49:56:2] & 0x0F | np.array([0x10, 0x20, 0x30, 0x20], np.uint8)
        return data.reshape(SHAPE[0], -1)


def types() -> None:
    rng = np.random.default_rng(0)
    Path("gguf").mkdir(exist_ok=True)
    writer = GGUFWriter("gguf/types.gguf", "llama")
    writer.add_uint8("test.uint8", 7)
    writer.add_int64("test.int64", -5)
    writer.add_float32("test.float32", 0.5)
    writer.add_bool("test.bool", True)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.words", ["<s>", "wörd", ""])
    truth: dict[str, np.ndarray] = {}
    plain = {
        "token_embd.weight": np.float32, "output.weight": np.float16, "counts.i8": np.int8, "counts.i16": np.int16,
        "counts.i32": np.int32, "counts.i64": np.int64, "output_norm.weight": np.float64,
    }  # fmt: skip
    for name, dtype in plain.items():
        truth[name] = (100 * rng.standard_normal((5, 7))).astype(dtype)
        writer.add_tensor(name, truth[name])
    bits = rng.integers(0, 1 << 14, (4, 6), dtype=np.uint16)
    writer.add_tensor("blk.0.bf16.weight", bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    for name in TYPES:
        key, data = f"blk.0.{name.lower()}.weight", blocks(name, rng)
        writer.add_tensor(key, data, raw_dtype=GGMLQuantizationType[name])
        truth[key] = dequantize(data, GGMLQuantizationType[name])
    experts = quantize(rng.standard_normal((2, 3, 64), dtype=np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up_exps.weight", experts, raw_dtype=GGMLQuantizationType.Q8_0)
    truth["blk.0.ffn_up_exps.weight"] = dequantize(experts, GGMLQuantizationType.Q8_0)
    truth["token_types.weight"] = rng.standard_normal((4, 700), dtype=np.float32)
    writer.add_tensor("token_types.weight", truth["token_types.weight"])
    finish(writer)
    whole = {name: torch.from_numpy(value) for name, value in truth.items()}
    whole["blk.0.bf16.weight"] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    write_truth("gguf/types.gguf", whole)


def split() -> None:
    rng = np.random.default_rng(1)
    Path("gguf/split").mkdir(parents=True)
    writer = GGUFWriter("gguf/split/model.gguf", "llama", split_max_tensors=2, small_first_shard=True)
    truth = {}
    for layer in range(2):
        for part in ("attn_norm", "ffn_norm"):
            truth[f"blk.{layer}.{part}.weight"] = rng.standard_normal(9, dtype=np.float32)
    for name, value in truth.items():
        writer.add_tensor(name, value)
    finish(writer)
    write_truth("gguf/split", {name: torch.from_numpy(value) for name, value in truth.items()})


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    with publish("gguf"):
        types()
        split()
