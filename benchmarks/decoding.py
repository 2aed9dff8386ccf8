"""GGUF, Orbax and quantised weights: opening, statistics of decoded numbers, slices; beside gguf and tensorstore.

``python benchmarks/decoding.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
~1 GB; what it made there is used again. Of the peers, those that Python can import are measured.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import ROOT, best, machine, table

sys.path.insert(0, str(ROOT))
TENSORS = 100_000
OPENED = 1_000  #: arrays that tensorstore opens, one by one
TYPES = {"Q4_0": (2, 0), "Q8_0": (8, 0), "Q4_K": (12, 0, 2), "Q6_K": (14, 208), "IQ3_S": (21, 0), "IQ4_XS": (23, 0)}
SHAPE = (4096, 8192)  #: of each quantised matrix; four in a file, 537 MB as float32
DECODED = 4 * SHAPE[0] * SHAPE[1] * 4


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Formats that are decoded\n\n{machine()}. Warm page cache; best of the rounds of each, taken in turns.\n")
    opening(scratch)
    statistics(scratch)
    rows(scratch)
    for name in ("gguf", "tensorstore"):
        if not _installed(name):
            print(f"\nNot measured: {name} is not installed.")


def opening(scratch: Path) -> None:
    """100,000 tensors of four bytes to 32."""
    print(f"### Open {TENSORS:,} tensors\n")
    gguf, zarr2, zarr3 = scratch / "many.gguf", scratch / "many-zarr2", scratch / "many-zarr3"
    if not gguf.exists():
        _many_gguf(gguf)
    for folder, sharded in ((zarr2, False), (zarr3, True)):
        if not (folder / "manifest.ocdbt").exists():
            _many_arrays(folder, sharded)
    programs = {
        f"workbench, {name}": f"""
import workbench as wb
wb.open({str(ROOT / "sample_ckpts" / "gguf" / "types.gguf")!r}, cache=False)
with timed():
    assert len(wb.open({str(path)!r}, cache=False)) == {TENSORS}
"""
        for name, path in (("GGUF", gguf), ("Orbax, zarr 2", zarr2), ("Orbax, zarr 3 in shards", zarr3))
    }
    if _installed("gguf"):
        programs["gguf.GGUFReader"] = f"""
from gguf import GGUFReader
with timed():
    assert len(GGUFReader({str(gguf)!r}).tensors) == {TENSORS}
"""
    if _installed("tensorstore"):
        programs[f"tensorstore.open of {OPENED:,} arrays, zarr 2"] = f"""
import tensorstore as ts
context = ts.Context({{'cache_pool': {{'total_bytes_limit': 100_000_000}}}})
with timed():
    for n in range({OPENED}):
        kvstore = {{'driver': 'ocdbt', 'base': 'file://{zarr2}/', 'path': _name(n) + '/'}}
        ts.open({{'driver': 'zarr', 'kvstore': kvstore}}, context=context, open=True).result()
""".replace("_name(n)", "f'params.layer_{n // 100}.part_{n % 100}'")
    print(table(best(programs, 3), "workbench, GGUF"))
    print()


def statistics(scratch: Path) -> None:
    """Min, max, mean, std, norms, zeros … of decoded numbers, imports and compilation done before."""
    print("### Statistics of 537 MB of decoded numbers; one thread\n")
    peer = _installed("gguf")
    print(
        "| GB of decoded numbers per CPU-s | stored bits per number | workbench |" + (" gguf.dequantize alone |" * peer)
    )
    print("|---|---:|---:|" + "---:|" * peer)
    for name, (kind, *_) in TYPES.items():
        path = scratch / f"{name}.gguf"
        if not path.exists():
            _quantised(path, name)
        programs = {
            "ours": f"""
import workbench as wb
values = wb.open({str(path)!r}, cache=False).decode()
wb.stats(values, threads=1, cache=False)
with timed():
    wb.stats(values, threads=1, cache=False)
"""
        }
        if peer:
            programs["gguf"] = f"""
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
tensors = GGUFReader({str(path)!r}).tensors
with timed():
    for one in tensors:
        for row in range(0, {SHAPE[0]}, 32):  # what fits a core's cache
            dequantize(one.data[row:row + 32], one.tensor_type)
"""
        found = best(programs, 3)
        bits = 8 * path.stat().st_size / (4 * SHAPE[0] * SHAPE[1])
        speeds = " | ".join(f"{DECODED / 1e9 / result['cpu']:.2f}" for result in found.values())
        print(f"| {name} ({kind}) | {bits:.2f} | {speeds} |")
    print()


def rows(scratch: Path) -> None:
    """One row of a matrix."""
    print("### One row of a quantised matrix of 134 MB as float32 (opened before; the read alone)\n")
    path = str(scratch / "Q4_K.gguf")
    programs = {
        "workbench": f"""
import torch, workbench as wb
row = wb.open({path!r}, cache=False).decode()['blk.1.w']
row[7]
with timed():
    assert row[1234].shape == ({SHAPE[1]},)
"""
    }
    if _installed("gguf"):
        programs["gguf, that row's blocks"] = f"""
from gguf import GGUFReader
from gguf.quants import dequantize
one = GGUFReader({path!r}).tensors[1]
dequantize(one.data[7:8], one.tensor_type)
with timed():
    dequantize(one.data[1234:1235], one.tensor_type)
"""
    print(table(best(programs, 3, by="wall"), "workbench", by="wall"))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _name(number: int) -> str:
    return f"params.layer_{number // 100}.part_{number % 100}"


def _many_gguf(path: Path) -> None:
    from tests.gguf_files import Writer

    writer = Writer()
    head = [b"GGUF" + struct.pack("<I", 3), writer.size(TENSORS), writer.size(1)]
    kind, value = 8, writer.text(b"llama")
    head.append(writer.text(b"general.architecture") + struct.pack("<I", kind) + value)
    for number in range(TENSORS):
        name = f"blk.{number // 100}.part.{number % 100}.weight".encode()
        head.append(writer.text(name) + struct.pack("<IQQIQ", 2, 4, 2, 0, 32 * number))
    data = b"".join(head)
    path.write_bytes(data + bytes(-len(data) % 32 + 32 * TENSORS))


def _many_arrays(folder: Path, sharded: bool) -> None:
    """Arrays of 16 float32 in an OCDBT database as Orbax makes it."""
    from tests import orbax_files
    from workbench.core.crc32 import crc32c

    orbax_files.crc32c = lambda data: crc32c(np.frombuffer(data, np.uint8))
    values: dict[str, bytes] = {}
    array = np.arange(16, dtype=np.float32)
    described = (
        orbax_files.zarr3("x", array, (16,), [orbax_files.BYTES], inside=(8,))
        if sharded
        else (orbax_files.zarr2("x", array, (16,)))
    )
    metadata = {}
    for number in range(TENSORS):
        name = _name(number)
        values |= {f"{name}{key.removeprefix('x')}": value for key, value in described.items()}
        keys = name.split(".")
        metadata[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": [16]},
        }
    folder.mkdir(parents=True, exist_ok=True)
    orbax_files.database(folder, values, leaf_keys=2000, inline=1024 if not sharded else 64)
    document = {"tree_metadata": metadata, "use_zarr3": sharded, "use_ocdbt": True}
    (folder / "_METADATA").write_text(json.dumps(document))


def _quantised(path: Path, name: str) -> None:
    """Random codes with scales of 0.01."""
    from tests.gguf_files import write
    from workbench.core.dtypes import BLOCKS

    kind, *scales = TYPES[name]
    each, nbytes = BLOCKS[name]
    draw, tensors = np.random.default_rng(0), []
    for number in range(4):
        blocks = draw.integers(0, 256, (SHAPE[0] * SHAPE[1] // each, nbytes), dtype=np.uint8)
        for at in scales:
            blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        tensors.append((f"blk.{number}.w", kind, SHAPE, blocks.tobytes()))
    write(path, tensors)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
