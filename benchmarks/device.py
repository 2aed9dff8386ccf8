"""Onto the GPU: GB/s beside the pinned copy peak of the same run, and beside what safetensors and others reach.

``python benchmarks/device.py [SCRATCH]`` prints Markdown; it needs a CUDA device, 15 GB of disk and as much memory for
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

HIDDEN, INNER, KEYS, VOCAB, LAYERS = 4096, 14336, 1024, 128256, 8  # Llama-3-8B, a quarter as deep
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

#: Saves in turns; the first ones allocate the buffers.
SAVES = """
import shutil, torch.distributed.checkpoint as dcp
torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())
shapes = {'attention': (4096, 4096), 'mlp': (12288, 4096), 'norm': (4096,)}
state = {f'layers.{n}.{name}': torch.randn(shape, device='cuda') for n in range(8) for name, shape in shapes.items()}
nbytes = sum(one.nbytes for one in state.values())
host = [torch.empty_like(one, device='cpu', pin_memory=True).fill_(1) for one in state.values()]
path = FOLDER + '/save'
ways = {
    'ours': lambda: {'storage_writer': wb.dcp.Writer(path)},
    'bare': lambda: {'storage_writer': wb.dcp.Writer(path, manifest=False)},
    'torch': lambda: {'storage_writer': dcp.FileSystemWriter(path)},
    'pinned': lambda: {'storage_writer': pinned},
}
pinned = dcp.FileSystemWriter(path, cache_staged_state_dict=True)
stall, whole = {name: [] for name in ('copy', *ways)}, {name: [] for name in ways}
for n in range(ROUNDS):
    for name, way in ways.items():
        shutil.rmtree(path, ignore_errors=True)
        options = way()
        torch.cuda.synchronize()
        gc.collect()
        begin = time.perf_counter()
        saved = dcp.async_save(state, **options)
        returned = time.perf_counter()
        getattr(saved, 'upload_completion', saved).result()
        ended = time.perf_counter()
        del saved, options
        gc.collect()
        if n > 1:
            stall[name].append(returned - begin)
            whole[name].append(ended - begin)
    begin = time.perf_counter()
    for one, copy in zip(state.values(), host):
        copy.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    stall['copy'].append(time.perf_counter() - begin)
del host
want = {name: one.clone() for name, one in state.items()}
loads = {
    'peak': lambda: [one.copy_(page[:one.nbytes].view(one.dtype).view(one.shape), non_blocking=True) for one in
                     state.values()],
    'ours': lambda: wb.load(state, path),
    'torch': lambda: dcp.load(state, checkpoint_id=path),
    'onto': lambda: to_device(wb.open(path), 'cuda', role=None),
}
page = torch.empty(max(one.nbytes for one in state.values()), dtype=torch.uint8, pin_memory=True)
load = {name: [] for name in loads}
for n in range(ROUNDS - 1):
    for name, way in loads.items():
        for one in state.values():
            one.zero_()
        torch.cuda.synchronize()
        gc.collect()
        begin = time.perf_counter()
        got = way()
        torch.cuda.synchronize()
        load[name].append(time.perf_counter() - begin)
        if name != 'peak':
            got = got if name == 'onto' else state
            assert all(torch.equal(got[key], one) for key, one in want.items()), name
        del got
shutil.rmtree(path)
least = lambda times: {name: min(one) for name, one in times.items()}
found = {'stall': least(stall), 'whole': least(whole), 'load': least(load)}
found['first'] = {name: one[0] for name, one in load.items()}
print('@@' + json.dumps(found | {'nbytes': nbytes, 'wall': 0, 'cpu': 0, 'anon': 0}))
torch.distributed.destroy_process_group()
"""
SAVED = {
    "copy": "floor: copies into pinned memory",
    "ours": "`wb.dcp.Writer`",
    "bare": "`wb.dcp.Writer`, no manifest",
    "torch": "`FileSystemWriter`",
    "pinned": "`FileSystemWriter`, `cache_staged_state_dict=True`",
}
LOADED = {
    "peak": "floor: copies from one pinned buffer",
    "ours": "`wb.load` into the tensors",
    "torch": "`dcp.load` into the tensors",
    "onto": "`ckpt.to_device`, into new tensors",
}


def main(scratch: Path) -> None:
    print("## On the GPU\n")
    import torch

    if not torch.cuda.is_available():
        print(f"Not measured: no CUDA device here ({machine()}).")
        return
    print(f"{machine()}, {torch.cuda.get_device_name()}. Warm page cache; wall time, best of the rounds of each.")
    print(
        "All results were compared with safetensors' on the device, bit by bit: whole, as rank 1 of tp=2, and cast.\n"
    )
    scratch.mkdir(parents=True, exist_ok=True)
    saves(scratch)
    table(write(scratch / "device-llama", llama()), "a Llama-3-8B of 8 layers, bf16, files of 2 GiB")
    table(write(scratch / "device-long", {f"weight_{n}": (1 << 16, 4096) for n in range(16)}), "tensors of 512 MiB")


def saves(scratch: Path) -> None:
    """How long an asynchronous save of tensors on the GPU holds the training up, and loads of what was saved."""
    rounds = 5
    (scratch / "device-saves").mkdir(exist_ok=True)
    code = START.replace("settle(FOLDER, 1 << 30)", "") + SAVES
    found = run(_filled(code, {"FOLDER": repr(str(scratch / "device-saves")), "ROUNDS": str(rounds)}))
    stall, whole, nbytes = found["stall"], found["whole"], found["nbytes"]
    print(f"### Asynchronous saves of {nbytes / 1e9:.2f} GB of float32 on the GPU\n")
    print(f"Best of {rounds - 2} saves in turns in one process, the third and later ones.\n")
    print("| | returns after, s | GB/s | ÷ floor | on the disk after, s |\n|---|---:|---:|---:|---:|")
    for name, shown in SAVED.items():
        took = stall[name]
        ratio, ended = f"{took / stall['copy']:.2f}", f"{whole[name]:.2f}" if name in whole else ""
        print(f"| {shown} | {took:.3f} | {nbytes / took / 1e9:.1f} | {ratio} | {ended} |", flush=True)
    print(f"\n### Loads of these {nbytes / 1e9:.2f} GB (DCP, one file) onto the GPU\n")
    print(
        f"Warm page cache; best of {rounds - 1} loads in turns in one process, and the first one. Each was compared.\n"
    )
    print("| | s | GB/s | ÷ floor | first, s |\n|---|---:|---:|---:|---:|")
    for name, shown in LOADED.items():
        took = found["load"][name]
        ratio = took / found["load"]["peak"]
        print(f"| {shown} | {took:.3f} | {nbytes / took / 1e9:.1f} | {ratio:.2f} | {found['first'][name]:.3f} |")
    print(flush=True)


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
    print(flush=True)


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
