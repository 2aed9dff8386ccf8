"""Saves into S3 beside a floor that only sends the same bytes.

``python benchmarks/saving_stores.py [SCRATCH]``; ``python -m benchmarks --only saving_stores`` puts it into
``RESULTS.md``. SCRATCH needs 1 GB.

The store is moto, in a process of its own on loopback. It is written in Python and takes most of the time, so the CPU
seconds of the client say what a save costs, and the wall seconds only that it does not wait for anything else.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from harness import best, machine
from saving import code

GB = 0.25
SERVE = """
import sys
from moto.server import ThreadedMotoServer
running = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
running.start()
print(running.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
#: ``again(save)`` times saves into an empty bucket.
STORE = """
import urllib.request
ENDPOINT = 'http://127.0.0.1:PORT'
ACCESS = {'endpoint': ENDPOINT, 'access_key_id': 'a', 'secret_access_key': 'b', 'region': 'us-east-1'}
def ask(method, path):
    urllib.request.urlopen(urllib.request.Request(ENDPOINT + path, method=method)).read()
def again(save, rounds=3):
    for _ in range(rounds):
        ask('POST', '/moto-api/reset')
        ask('PUT', '/bucket')
        with timed():
            save('s3://bucket/save')
"""
FLOOR = """
import obstore
from concurrent.futures import ThreadPoolExecutor
from obstore.store import from_url
def send(store, name, tensors):
    def parts():
        for one in tensors:
            data = memoryview(one.reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), 8 << 20):
                yield bytes(data[start : start + (8 << 20)])
    obstore.put(store, name, parts(), chunk_size=8 << 20, max_concurrency=8)
def save(url):
    store = from_url(url, client_options={'allow_http': True}, checksum_algorithm='SHA256', **ACCESS)
    tensors = list(state.values())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: send(store, str(n), tensors[n::2]), range(2)))
again(save)
"""
OURS = """
import workbench as wb
def save(url):
    writer = wb.dcp.Writer(url, OPTIONS storage_options=ACCESS)
    dcp.save(state, storage_writer=writer, planner=wb.dcp.Planner())
again(save)
"""


@contextmanager
def moto() -> Iterator[str]:
    """The port of an S3 of its own."""
    with Popen([sys.executable, "-c", SERVE], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as one:
        assert one.stdout is not None
        try:
            yield one.stdout.readline().strip()
        finally:
            one.terminate()


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Saves into a store\n\n{machine()}, load {os.getloadavg()[0]:.0f}. One process, {GB} GB of float32, two")
    print("objects; the store is moto, another process of this machine. CPU seconds of the client.\n")
    with moto() as port:
        made = {
            "floor: obstore's multipart upload": code(scratch, STORE + FLOOR, SIZE=GB, PORT=port),
            "`wb.dcp.Writer`": code(scratch, STORE + OURS, SIZE=GB, OPTIONS="", PORT=port),
            "`wb.dcp.Writer`, no manifest": code(scratch, STORE + OURS, SIZE=GB, OPTIONS="manifest=False,", PORT=port),
        }
        found = best(made, 2, "wall")
    floor = next(iter(found.values()))
    print("| | wall s | CPU s | MB/s | wall ÷ floor | CPU ÷ floor | anon MB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, one in found.items():
        wall, cpu = one["wall"], one["cpu"]
        ratios = f"{wall / floor['wall']:.2f} | {cpu / floor['cpu']:.2f}"
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {GB * 1000 / wall:.0f} | {ratios} | {one['anon']:.0f} |")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
