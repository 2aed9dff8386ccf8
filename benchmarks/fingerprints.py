"""Fingerprints, CRC-32 and manifests: bytes a CPU second beside the raw hash and a floor that only reads.

``python benchmarks/fingerprints.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH
needs ~5 GB (the same files as ``opening.py``'s).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness import best, machine
from synthetic import write_llama

GB = 2_000_000_000

FLOOR = """
import glob, numpy as np
maps = [np.memmap(name, np.uint64, 'r', shape=os.path.getsize(name) // 8) for name in glob.glob(FOLDER + '/*.*')]
with timed():
    for view in maps:
        for at in range(0, len(view), 1 << 17):
            view[at : at + (1 << 17)].sum()
"""
HASH = """
import glob, mmap, xxhash
views = []
for name in glob.glob(FOLDER + '/*.*'):
    with open(name, 'rb') as f:
        views.append(memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)))
with timed():
    for view in views:
        for at in range(0, len(view), 4 << 20):
            xxhash.xxh3_128_digest(view[at : at + (4 << 20)])
"""
ZLIB = HASH.replace("xxhash.xxh3_128_digest", "zlib.crc32").replace("mmap, xxhash", "mmap, zlib")
OURS = """
import workbench as wb
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.checksums import check_archives, stored_crcs
from workbench.analysis import manifest, manifest_check
ckpt = wb.open(FOLDER)
"""
FINGERPRINT = (
    OURS
    + """
with timed():
    assert len(list(tensor_fingerprints(ckpt.payloads, threads=THREADS))) == len(ckpt)
"""
)
CRC = (
    OURS
    + """
with timed():
    assert all(one.status == 'ok' for one in check_archives(ckpt.payloads, threads=THREADS))
"""
)
STORED = (
    OURS
    + """
with timed():
    assert (stored_crcs(ckpt.payloads).crc >= 0).all()
"""
)
WRITE = (
    OURS
    + """
with timed():
    manifest.write(ckpt, FOLDER + '/../bench.manifest.json', threads=THREADS)
"""
)
CHECK = (
    OURS
    + """
manifest.write(ckpt, FOLDER + '/../bench.manifest.json')
with timed():
    assert not manifest_check.check(ckpt, FOLDER + '/../bench.manifest.json', threads=THREADS)
"""
)


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    llama = scratch / "llama"
    if not (llama / "dcp" / ".metadata").exists():
        write_llama(llama, GB)
    print(f"## Fingerprints and checksums\n\n{machine()}. Warm page cache; best of the rounds of each.\n")
    for folder in (llama / "dcp", llama / "hf"):
        hashes(folder)
    checksums(llama / "dcp")


def hashes(folder: Path) -> None:
    programs = {
        "floor: sum of the mapped files": FLOOR,
        "xxh3_128 alone, mapped files": HASH,
        "tensor fingerprints, 1 thread": FINGERPRINT.replace("THREADS", "1"),
        "tensor fingerprints, 2 threads": FINGERPRINT.replace("THREADS", "2"),
        "manifest write, 1 thread": WRITE.replace("THREADS", "1"),
        "manifest check, 1 thread": CHECK.replace("THREADS", "1"),
        "manifest check, 2 threads": CHECK.replace("THREADS", "2"),
    }
    rows(f"Hashing {folder.name}", folder, programs, "xxh3_128 alone, mapped files")


def checksums(folder: Path) -> None:
    programs = {
        "zlib.crc32 alone, mapped files": ZLIB,
        "CRC-32 of every record, 1 thread": CRC.replace("THREADS", "1"),
        "CRC-32 of every record, 2 threads": CRC.replace("THREADS", "2"),
        "stored CRCs of every chunk (no payload)": STORED,
    }
    rows(f"CRC-32 of {folder.name}", folder, programs, "zlib.crc32 alone, mapped files")


def rows(title: str, folder: Path, programs: dict[str, str], against: str) -> None:
    size = sum(entry.stat().st_size for entry in os.scandir(folder)) / 1e9
    named = {name: code.replace("FOLDER", repr(str(folder))) for name, code in programs.items()}
    found = best(named, 3)
    print(f"### {title}: {size:.2f} GB\n")
    head = ("wall s", "CPU s", "GB/CPU-s", f"speed ÷ {against.split(',')[0]}", "peak anon MB")
    print(f"| | {' | '.join(head)} |\n|---|{'---:|' * len(head)}")
    for name, one in found.items():
        speed, ratio = size / one["cpu"], found[against]["cpu"] / one["cpu"]
        print(f"| {name} | {one['wall']:.3f} | {one['cpu']:.3f} | {speed:.1f} | {ratio:.2f} | {one['anon']:.0f} |")
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
