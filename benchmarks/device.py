"""Onto the GPU: GB/s beside the pinned copy peak of the same run, and beside what safetensors and others reach.

``python benchmarks/device.py [SCRATCH]`` prints Markdown; it needs a CUDA device, 18 GB of disk and as much memory for
the page cache, and takes some minutes. What it made in SCRATCH is used again. fastsafetensors is measured where it can
be imported. Every program is a process of its own, with a CUDA context and a warm page cache when the clock starts;
pinned buffers and device memory are its own to allocate, inside of the measured time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness import best, machine, run

HIDDEN, INNER, KEYS, VOCAB, LAYERS = 4096, 14336, 1024, 128256, 16  # Llama-3-8B, half as deep
SHARD = 2 << 30  #: bytes of tensors a file
BLOCK = 64 << 20  #: bytes of noise of which all tensors are made

START = """
import torch, workbench as wb
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import load_file
from workbench.load.device import to_device
from workbench.core.mesh.mesh import Mesh
torch.zeros(1, device='cuda')
torch.cuda.synchronize()
files = sorted(map(str, Path(FOLDER).glob('*.safetensors')))
settle(FOLDER, 1 << 30)
"""
PEAK = """
host = torch.empty(32 << 20, dtype=torch.uint8, pin_memory=True).fill_(1)
there = torch.empty(32 << 20, dtype=torch.uint8, device='cuda')
there.copy_(host)
torch.cuda.synchronize()
with timed():
    for at in range(0, NBYTES, len(host)):
        there[:NBYTES - at].copy_(host[:NBYTES - at], non_blocking=True)
    torch.cuda.synchronize()
"""
OURS = """
with timed():
    with wb.open(FOLDER) as ckpt:
        tensors = to_device(ckpt, 'cuda'OPTIONS)
    torch.cuda.synchronize()
"""
AGAIN = """
with wb.open(FOLDER) as ckpt:
    to_device(ckpt, 'cuda')
torch.cuda.synchronize()
torch.cuda.empty_cache()
"""
LOAD_FILE = """
with timed():
    tensors = {}
    for name in files:
        tensors |= load_file(name, device='cuda')
    torch.cuda.synchronize()
"""
SAFE_OPEN = """
with timed():
    tensors = {}
    for name in files:
        with safe_open(name, 'pt', device='cuda') as f:
            tensors |= {key: f.get_tensor(key) for key in f.keys()}
    torch.cuda.synchronize()
"""
FAST = """
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
with timed():
    loader = SafeTensorsFileLoader(SingleGroup(), torch.device('cuda:0'), nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    tensors = {key: buffers.get_tensor(key) for key in loader.get_keys()}
    torch.cuda.synchronize()
"""
EQUAL = """
with timed(), wb.open(FOLDER) as ckpt:
    ours = to_device(ckpt, 'cuda')
    half = to_device(ckpt, 'cuda', mesh=Mesh(tp=2), rank=1)
    cast = to_device(ckpt, 'cuda', dtype='fp32', select='layers.0|weight_0')
    seen = set()
    for name in files:
        with safe_open(name, 'pt') as f:
            for key in f.keys():
                seen.add(key)
                theirs = f.get_tensor(key).cuda()
                bits = theirs.view(torch.int16)
                assert torch.equal(ours[key].view(torch.int16), bits), key
                rows = len(half[key]) < len(theirs)
                part = bits if half[key].shape == theirs.shape else bits.chunk(2, 0 if rows else 1)[1]
                assert torch.equal(half[key].view(torch.int16), part), key
                if key in cast:
                    assert torch.equal(cast[key].nan_to_num(), theirs.float().nan_to_num()), key
    assert seen == set(ours) == set(half) and cast
"""


def main(scratch: Path) -> None:
    print("## Onto the GPU\n")
    import torch

    if not torch.cuda.is_available():
        print(f"Not measured: no CUDA device here ({machine()}).")
        return
    print(f"{machine()}, {torch.cuda.get_device_name()}. Warm page cache; wall time, best of the rounds of each.")
    print(
        "All results were compared with safetensors' on the device, bit by bit: whole, as rank 1 of tp=2, and cast.\n"
    )
    scratch.mkdir(parents=True, exist_ok=True)
    table(write(scratch / "device-llama", llama()), "a Llama-3-8B of 16 layers, bf16, files of 2 GiB")
    table(write(scratch / "device-long", {f"weight_{n}": (1 << 16, 4096) for n in range(16)}), "tensors of 512 MiB")


def table(folder: Path, what: str) -> None:
    """Compare, measure, print."""
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    settings = {"FOLDER": repr(str(folder)), "NBYTES": str(nbytes)}
    run(_filled(START + EQUAL, settings))
    programs = {
        "floor: copies from one pinned buffer": PEAK,
        "safetensors `load_file`": LOAD_FILE,
        "safetensors `safe_open`": SAFE_OPEN,
        "ours": OURS.replace("OPTIONS", ""),
        "ours, again in the same process": AGAIN + OURS.replace("OPTIONS", ""),
        "ours, 16 threads": OURS.replace("OPTIONS", ", threads=16"),
        "ours, cast to fp16": OURS.replace("OPTIONS", ", dtype='fp16'"),
        "ours, rank 1 of tp=2 (half of it)": OURS.replace("OPTIONS", ", mesh=Mesh(tp=2), rank=1"),
    }
    if find_spec("fastsafetensors") is not None:
        programs["fastsafetensors"] = FAST
    found = best({name: _filled(START + code, settings) for name, code in programs.items()}, 2, by="wall")
    peak, peer = (found[name]["wall"] for name in list(programs)[:2])
    print(f"### {nbytes / 1e9:.2f} GB: {what}\n")
    head = ("wall s", "CPU s", "GB/s", "speed ÷ floor", "speed ÷ `load_file`")
    print(f"| | {' | '.join(head)} |\n|---|{'---:|' * len(head)}")
    for name, one in found.items():
        wall, size = one["wall"], nbytes / 2 if "half" in name else nbytes
        share = size / nbytes / wall
        ratios = f"{size / 1e9 / wall:.2f} | {peak * share:.2f} | {peer * share:.1f}"
        print(f"| {name} | {wall:.3f} | {one['cpu']:.2f} | {ratios} |")
    print()


def llama() -> dict[str, tuple[int, ...]]:
    """Names and shapes as Hugging Face has them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        shapes |= {f"{head}self_attn.{name}_proj.weight": (KEYS if name in "kv" else HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{head}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{head}mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{head}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """bf16 tensors of noise in safetensors files, written as a stream; no two begin alike."""
    index = folder / "model.safetensors.index.json"
    if index.exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    noise, places = memoryview(os.urandom(BLOCK)), {}
    shards: list[list[str]] = [[]]
    sizes = {name: 2 * _volume(shape) for name, shape in shapes.items()}
    for name, nbytes in sizes.items():
        if shards[-1] and sum(sizes[one] for one in shards[-1]) + nbytes > SHARD:
            shards.append([])
        shards[-1].append(name)
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= dict.fromkeys(names, file)
        header, at = {}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + sizes[name]]}
            at += sizes[name]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                _noise(out, noise, sizes[name], seed=len(name) * 7919 + len(places) + sum(name.encode()) * 104729)
    index.write_text(json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}))
    return folder


def _noise(out, noise: memoryview, nbytes: int, *, seed: int) -> None:
    at = seed * 2 % len(noise)
    while nbytes:
        part = noise[at : at + nbytes]
        out.write(part)
        nbytes, at = nbytes - len(part), 0


def _volume(shape: tuple[int, ...]) -> int:
    found = 1
    for n in shape:
        found *= n
    return found


def _filled(code: str, settings: dict[str, str]) -> str:
    for word, value in settings.items():
        code = code.replace(word, value)
    return code


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
