"""Checkpoints by URL: round trips, requests, bytes and seconds beside other libraries, over a slow network.

``python benchmarks/remote.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
~5 GB; what it made there is used again.

The store is a web server on loopback, a process of its own, that waits 30 ms before each answer and sends at most
100 MB/s over each connection. A read has two floors, which ask for 16 MiB at a time and drop what arrives: as many
plain HTTP connections as the workbench uses, and as many threads that call obstore, the library that it reads with.
Where all connections together have no limit, server and client share the machine's cores, and the figures say what the
client's CPU seconds are worth; with a limit, as of a network card, they say how much of it is used.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, machine, run
from synthetic import write_llama
from synthetic_trained import write_trained

GB = 2_000_000_000
LATENCY, BANDWIDTH = 0.03, 100e6
TOTAL = 800e6  #: bytes per second of a network card
PAIR = 300_000_000  #: bytes of each of two saves that are compared
ROUNDS = 3
SERVE = """
import json, sys
from pathlib import Path
from tests.range_server import RangeServer
latency, bandwidth, total = map(float, sys.argv[2:])
with RangeServer(sys.argv[1], latency=latency, bandwidth=bandwidth, total=total) as server:
    print(server.url, flush=True)
    for line in sys.stdin:
        log = list(server.log)
        told = {'requests': len(log), 'rounds': server.rounds, 'sent': sum(one.sent for one in log)}
        server.log.clear()
        print(json.dumps(told), flush=True)
"""


class Server:
    """The server's process: its URL, and what was asked of it since the last time."""

    def __init__(self, folder: Path, latency: float, bandwidth: float, total: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder), str(latency), str(bandwidth), str(total)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self.url = self._process.stdout.readline().strip()

    def asked(self) -> dict[str, int]:
        """Requests, sequential round trips and bytes since the last call."""
        assert self._process.stdout is not None and self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def serving(
    folder: Path, latency: float = LATENCY, bandwidth: float = BANDWIDTH, total: float = 0.0
) -> Iterator[Server]:
    """A server of a folder, for a while."""
    server = Server(folder, latency, bandwidth, total)
    try:
        yield server
    finally:
        server.close()


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(
        f"## Checkpoints by URL\n\n{machine()}. A web server on loopback: {LATENCY * 1e3:.0f} ms before each answer, "
        f"{BANDWIDTH / 1e6:.0f} MB/s over each connection; best of {ROUNDS} rounds.\n"
    )
    samples()
    llama = scratch / "llama"
    if not (llama / "dcp" / ".metadata").exists():
        write_llama(llama, GB)
    one_row(llama)
    questions(scratch)
    print("### Read a DCP checkpoint of 2 GB from 4 ranks\n")
    whole(llama)
    print(f"### The same where all connections together have {TOTAL / 1e6:,.0f} MB/s\n")
    whole(llama, TOTAL)


def samples() -> None:
    """Sequential round trips until a sample is open."""
    print("### Opening the samples\n\n| sample | requests | round trips | wall s |\n|---|---:|---:|---:|")
    names = sorted(path.stem for path in (ROOT / "tests" / "truth").glob("*.safetensors"))
    with serving(ROOT / "sample_ckpts") as server:
        for name in names:
            if (ROOT / "sample_ckpts" / name).exists():
                code = f"""
import workbench as wb
with timed():
    wb.open('{server.url}/{name}', cache=False)
"""
                found = one(server, code)
                print(f"| `{name}` | {found['requests']} | {found['rounds']} | {found['wall']:.2f} |")
    print()


def one_row(folder: Path) -> None:
    """One row of a tensor of 65 MB, opening included: what a look into a checkpoint costs."""
    print("### Open, and read one row of a 65 MB bf16 tensor\n")
    with serving(folder) as server:
        dcp, hf = f"{server.url}/dcp", f"{server.url}/hf/model-00001.safetensors"
        programs = {
            "workbench, DCP": f"""
import torch, workbench as wb
with timed():
    row = wb.open({dcp!r}, cache=False)['embed.weight'][12345]
assert row.shape == (2048,)
""",
            "DCP with FsspecReader": f"""
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
state = {{'embed.weight': torch.empty(16000, 2048, dtype=torch.bfloat16)}}
with timed():
    dcp.load(state, storage_reader=FsspecReader({dcp!r}), no_dist=True)
    row = state['embed.weight'][12345]
""",
            "workbench, safetensors": f"""
import torch, workbench as wb
with timed():
    row = wb.open({hf!r}, cache=False)['embed.weight'][12345]
assert row.shape == (2048,)
""",
            "safetensors through fsspec": f"""
import fsspec, json, struct, torch
from safetensors.torch import load
with timed():
    with fsspec.open({hf!r}) as file:
        size = struct.unpack('<Q', file.read(8))[0]
        head = json.loads(file.read(size))['embed.weight']
        file.seek(8 + size + head['data_offsets'][0] + 12345 * 2048 * 2)
        row = torch.frombuffer(bytearray(file.read(4096)), dtype=torch.bfloat16)
""",
            "safetensors, downloaded": f"""
import urllib.request, torch
from safetensors.torch import load
with timed():
    row = load(urllib.request.urlopen({hf!r}).read())['embed.weight'][12345]
""",
        }
        if importlib.util.find_spec("aiohttp") is None:
            print("Not measured: fsspec's readers, which need aiohttp.\n")
            programs = {name: code for name, code in programs.items() if "sspec" not in name}
        print("| | requests | round trips | MB received | wall s | CPU s |\n|---|---:|---:|---:|---:|---:|")
        for name, code in programs.items():
            found = one(server, code)
            print(
                f"| {name} | {found['requests']} | {found['rounds']} | {found['sent'] / 1e6:,.1f} | "
                f"{found['wall']:.2f} | {found['cpu']:.2f} |"
            )
    print()


def questions(scratch: Path) -> None:
    """Calls that read a checkpoint in many small pieces, or more than once."""
    sides = write_trained(scratch / "pair", PAIR)
    size = sum(file.stat().st_size for file in sides["before"].iterdir()) / 1e6
    print(f"### Ask about two saves of one training, {size:,.0f} MB each in 4 files\n")
    print("| | requests | round trips | MB received | wall s | on the disk, s |\n|---|---:|---:|---:|---:|---:|")
    with serving(scratch / "pair") as server:
        for name, code in {
            "verify(deep=True)": "wb.verify({0}, deep=True)",
            "diff": "wb.diff({0}, {1})",
            "doctor": "wb.doctor({0}, {1})",
        }.items():
            calls = [
                code.format(*(f"'{at}/{side}'" for side in ("before", "next"))) for at in (server.url, scratch / "pair")
            ]
            far, near = (one(server, f"import workbench as wb\nwith timed():\n    {call}") for call in calls)
            print(
                f"| `{name}` | {far['requests']:.0f} | {far['rounds']:.0f} | {far['sent'] / 1e6:,.0f} | "
                f"{far['wall']:.2f} | {near['wall']:.2f} |"
            )
    print()


def whole(folder: Path, total: float = 0.0) -> None:
    """Every tensor of 2 GB saved by four ranks."""
    size = sum(file.stat().st_size for file in (folder / "dcp").glob("*.distcp"))
    ranges = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
parts = [(file.name, at, min(at + (16 << 20), file.stat().st_size))
         for file in Path({str(folder / "dcp")!r}).glob('*.distcp') for at in range(0, file.stat().st_size, 16 << 20)]
"""
    ready = f"settle({str(folder / 'dcp')!r}, 500_000_000)"
    with serving(folder, total=total) as server:
        url = f"{server.url}/dcp"
        programs = {
            "floor: 32 plain connections": f"""
import http.client
from urllib.parse import urlsplit
{ranges}
host = urlsplit({url!r}).netloc
local = threading.local()
def get(part):
    name, first, last = part
    if not hasattr(local, 'c'): local.c = http.client.HTTPConnection(host)
    local.c.request('GET', '/dcp/' + name, headers={{'Range': f'bytes={{first}}-{{last - 1}}'}})
    answer, buffer, total = local.c.getresponse(), bytearray(1 << 20), 0
    while n := answer.readinto(buffer): total += n
    return total
{ready}
with timed():
    with ThreadPoolExecutor(32) as pool:
        assert sum(pool.map(get, parts)) == {size}
""",
            "floor: obstore in 32 threads": f"""
import obstore
{ranges}
store = obstore.store.from_url({url!r}, client_options={{'allow_http': True}})
def get(part):
    return len(obstore.get(store, part[0], options={{'range': part[1:]}}).bytes())
{ready}
with timed():
    with ThreadPoolExecutor(32) as pool:
        assert sum(pool.map(get, parts)) == {size}
""",
            "workbench, statistics (nothing is kept)": f"""
import torch, workbench as wb
wb.stats(wb.open({str(folder / "hf")!r}, cache=False), cache=False)  # compiled code is loaded
ckpt = wb.open({url!r}, cache=False)
{ready}
with timed():
    wb.stats(ckpt, cache=False)
""",
            "workbench, `state_dict()`": f"""
import torch, workbench as wb
ckpt = wb.open({url!r}, cache=False)
settle({str(folder / "dcp")!r}, {size})
with timed():
    state = ckpt.state_dict()
""",
            "DCP with FsspecReader": f"""
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
reader = FsspecReader({url!r})
state = {{key: torch.empty(one.size, dtype=torch.bfloat16)
         for key, one in reader.read_metadata().state_dict_metadata.items()}}
with timed():
    dcp.load(state, storage_reader=reader, no_dist=True)
""",
        }
        if importlib.util.find_spec("aiohttp") is None:
            print("Not measured: DCP's FsspecReader, which needs aiohttp.\n")
            programs.pop("DCP with FsspecReader")
        if total:
            programs.pop("DCP with FsspecReader", None)
        print("| | requests | wall s | MB/s | of plain connections | of obstore | CPU s | peak anon MB |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        found = {name: [one(server, code, 1)] for name, code in programs.items()}
        for _ in range(ROUNDS - 1):
            for name, code in programs.items():
                found[name] += [] if "Fsspec" in name else [one(server, code, 1)]
        best = {name: min(rounds, key=lambda one: one["wall"]) for name, rounds in found.items()}
        plain, obstore, *_ = (one["wall"] for one in best.values())
        for name, told in best.items():
            print(
                f"| {name} | {told['requests']} | {told['wall']:.2f} | {size / 1e6 / told['wall']:,.0f} | "
                f"{plain / told['wall']:.2f} | {obstore / told['wall']:.2f} | {told['cpu']:.1f} | "
                f"{max(one['anon'] for one in found[name]):,.0f} |"
            )
    print()


def one(server: Server, code: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """The fastest of some rounds of a program, with what it asked of the server."""
    found = []
    for _ in range(rounds):
        server.asked()
        found.append(run(code) | server.asked())
    return min(found, key=lambda one: one["wall"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()) / "workbench-bench")
