"""Checkpoints that are mutated: those of ``sample_ckpts/``, and small ones of the formats that have no sample there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.faults import SAMPLES_ROOT

Maker = Callable[[Path], object]


@dataclass(frozen=True)
class Sample:
    """A checkpoint, and how often it is drawn.

    Attributes:
        source: what is copied: a path in ``sample_ckpts/``, or what makes a folder.
        opened: what of the copy is opened.
        weight: how often it is drawn; small checkpoints cost less, and a mutation hits a header more often.
        spared: losses (:data:`tests.fuzz.mutate.LOSSES`) that leave a checkpoint: parts that stand by themselves, such
            as ``model.pdparams`` alone or weights without an optimizer; and the padding behind a tar archive, or
            behind the last tensor of a GGUF file; whole fields at the end of an ONNX model; and what no merged tree of
            an OCDBT database refers to any more.
    """

    title: str
    source: str | Maker
    opened: str = "."
    weight: int = 2
    spared: tuple[str, ...] = ()

    def copy(self, folder: Path) -> Path:
        """Put a copy into an empty folder; returns the folder, or file, that is to be opened."""
        if callable(self.source):
            self.source(folder)
            return folder / self.opened
        source = SAMPLES_ROOT / self.source
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
            return folder / source.name
        shutil.copytree(source, folder / source.name, copy_function=shutil.copyfile)
        return folder / source.name / self.opened


def _lightning(folder: Path) -> None:
    import torch

    from tests.test_layouts import lightning_state

    torch.save(lightning_state(), folder / "epoch=3-step=100.ckpt")


def _colossal(folder: Path) -> None:
    from tests.test_trainer_layouts import colossal

    colossal(folder / "save")


def _lightning_folder(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from tests.test_layouts import lightning_state

    state = lightning_state()
    dcp.save({"state_dict": state.pop("state_dict")}, checkpoint_id=folder / "last.ckpt", no_dist=True)
    del state["optimizer_states"]
    torch.save(state, folder / "last.ckpt" / "meta.pt")


def _accelerate(folder: Path) -> None:
    import torch

    from tests.test_layouts import write_fsdp

    write_fsdp(folder)
    for rank in range(2):
        torch.save({"step": 0, "torch_manual_seed": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")


def _tar(folder: Path) -> None:
    from tests.test_torch_save import write_tar

    write_tar(folder / "old.pt")


def _torch_shards(folder: Path) -> None:
    import torch

    files = [f"pytorch_model-{n:05d}-of-00002.bin" for n in (1, 2)]
    names = [["a.weight", "a.bias"], ["b.weight", "b.bias"]]
    for file, keys in zip(files, names, strict=True):
        torch.save({key: torch.arange(24.0).reshape(4, 6) for key in keys}, folder / file)
    index = {key: file for file, keys in zip(files, names, strict=True) for key in keys}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _vescale(folder: Path) -> None:
    import torch

    from tests.test_vescale import SHAPES, distributed, save

    torch.manual_seed(0)
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    save(folder / "model", model)
    save(folder / "optimizer/pp_0", distributed(list(SHAPES)[:2], model, master=True))
    save(folder / "optimizer/pp_1", distributed(list(SHAPES)[2:], model))


def _megatron(folder: Path) -> None:
    from tests.megatron_files import Model, write_legacy

    write_legacy(folder / "iter_0000010", Model(layers=2), tp=2, optimizer="flat")


def _universal(folder: Path) -> None:
    from collections import OrderedDict

    import torch

    from tests.fresh import deepspeed_like as like
    from tests.test_deepspeed import NAMES, SHAPES, save_universal

    save_universal(folder, like.full(SHAPES), flat_tensors=True)
    module = OrderedDict((name, torch.empty(0)) for group in NAMES for name in group)
    like.save(like.model_states(NAMES, SHAPES, module, 2), folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _fleet(folder: Path) -> None:
    from tests.test_paddlenlp import fleet

    fleet(folder)


def _unified(folder: Path) -> None:
    from tests.test_paddlenlp import unified

    unified(folder)


def _zarr(folder: Path) -> None:
    from tests.orbax_files import BYTES, zarr3

    for array in (one for one in (SAMPLES_ROOT / "zarr" / "orbax").iterdir() if one.is_dir()):
        shutil.copytree(array, folder / array.name, copy_function=shutil.copyfile)
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    for key, value in zarr3("third", values, (4, 6), [BYTES], encode=np.ndarray.tobytes, inside=(4, 3)).items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(value)


def _npz(folder: Path) -> None:
    from tests.test_npz import ARRAYS

    np.savez(folder / "x.npz", **ARRAYS, words=np.array(["a", "bc"]))  # type: ignore[arg-type]


def _npz_compressed(folder: Path) -> None:
    from tests.test_npz import ARRAYS

    np.savez_compressed(folder / "x.npz", **ARRAYS)  # type: ignore[arg-type]


def _local(folder: Path) -> None:
    from tests.megatron_local_files import write_session

    write_session(folder)


def _flax(folder: Path) -> None:
    from tests.test_flax import pack, tree

    (folder / "checkpoint_9").write_bytes(pack(tree()))


def _tensorflow(folder: Path) -> None:
    from tests.tensorflow_files import write
    from tests.test_tensorflow import PARTS, tensors

    write(folder / "ckpt-7", tensors(), {"words": [b"a", b"bc"]}, {"emb": PARTS}, 2)


def _onnx(folder: Path) -> None:
    import torch

    from tests.reader_suite import raw
    from tests.test_onnx import inside, model, outside, varints

    values = torch.arange(40.0).reshape(8, 5)
    (folder / "m.data").write_bytes(raw(values))
    parts = inside("w", values), outside("far", values, location="m.data"), varints("ids", 7, (3,), [1, -1, 1 << 40], 7)
    (folder / "m.onnx").write_bytes(model(*parts))


def _nemo(folder: Path) -> None:
    from tests.test_nemo import packed, saved, state

    packed(folder / "m.nemo", {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": saved(state())})


def _keras(folder: Path) -> None:
    from tests.test_keras import put

    put(folder, "net.keras")


def _hdf5(folder: Path) -> None:
    from tests.test_keras import put

    put(folder, "new.h5")


SAMPLES = (
    Sample("DCP, one file", "dcp_single_odd", weight=6),
    Sample("DCP, FSDP2", "dcp_fsdp2", weight=1),
    Sample("DCP, HSDP", "dcp_hsdp_2x2", weight=1),
    Sample("DCP, TP", "dcp_tp2_fsdp2_vocab515", weight=1),
    Sample("torchtitan", "titan_run/step-2", weight=1),
    Sample("Megatron torch_dist", "megatron_dp_reshardable", weight=1),
    Sample("ByteCheckpoint", "bytecheckpoint_fsdp1_flat", "global_step_3", weight=1),
    Sample("ByteCheckpoint, run", "bytecheckpoint_fsdp1_flat", weight=1),
    Sample("DeepSpeed", "deepspeed_zero1", "global_step4", weight=1),
    Sample("DeepSpeed, run", "deepspeed_zero1", weight=1),
    Sample("safetensors", "hf_llama_bf16_sharded", weight=3),
    Sample("safetensors, FP8", "hf_deepseek_fp8_block", weight=3),
    Sample("compressed-tensors", "quantised/ct_pack_int4_g32", weight=2),
    Sample("bitsandbytes", "quantised/bnb_nf4", weight=2),
    Sample("MLX", "quantised/mlx_q4_g64", weight=2),
    Sample("PEFT", "hf_peft_lora", weight=6),
    Sample("HF Trainer", "trainer_run/checkpoint-3", weight=3, spared=("gone",)),
    Sample("torch.save", "torch_save/ckpt.pt", weight=2),
    Sample("torch.save, odd", "torch_save/odd.pt", weight=6),
    Sample("torch.save, legacy", "torch_save/ckpt_legacy.pt", weight=2),
    Sample("nanoGPT", "loss_spike/step-240.pt", weight=2),
    Sample("torch.save, tar", _tar, "old.pt", weight=5, spared=("cut",)),
    Sample("torch.save, shards", _torch_shards, weight=5),
    Sample("paddle.distributed", "paddle_dist", weight=6),
    Sample("paddle.save", "paddle_save", weight=2, spared=("gone",)),
    Sample("PaddleNLP", "paddlenlp_legacy", weight=1),
    Sample("PaddleNLP, unified", _unified, weight=5),
    Sample("PaddleNLP, fleet", _fleet, weight=4),
    Sample("Lightning", _lightning, "epoch=3-step=100.ckpt", weight=5),
    Sample("Lightning, folder", _lightning_folder, "last.ckpt", weight=4),
    Sample("accelerate", _accelerate, weight=3),
    Sample("Colossal-AI", _colossal, "save", weight=4),
    Sample("veScale", _vescale, weight=3),
    Sample("torch_checkpointing", "torch_checkpointing/step-3", weight=3),
    Sample("torch_checkpointing, one rank", "torch_checkpointing/single", weight=3, spared=("gone",)),
    Sample("zarr", _zarr, weight=2, spared=("gone",)),
    Sample("Orbax", "orbax/2", weight=2, spared=("cut",)),
    Sample("GGUF", "gguf/types.gguf", weight=4),
    Sample("GGUF, split", "gguf/split", weight=4, spared=("cut",)),
    Sample("Megatron mp_rank", _megatron, "iter_0000010", weight=2),
    Sample("Megatron, NVRx local", _local, weight=2),
    Sample("DeepSpeed, universal", _universal, weight=2),
    Sample("numpy", _npz, "x.npz", weight=3),
    Sample("numpy, deflated", _npz_compressed, "x.npz", weight=3),
    Sample("Flax", _flax, "checkpoint_9", weight=3),
    Sample("TensorFlow", _tensorflow, weight=3),
    Sample("ONNX", _onnx, "m.onnx", weight=3, spared=("cut",)),
    Sample("Keras", _keras, "net.keras", weight=3),
    Sample("HDF5", _hdf5, "new.h5", weight=3),
    Sample("NeMo", _nemo, "m.nemo", weight=3, spared=("cut",)),
)
