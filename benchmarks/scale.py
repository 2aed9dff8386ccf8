"""From 0.1 to 10 million chunks: what opening, reopening, listing and laying out cost.

``python benchmarks/scale.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
6 GB. Each figure is that of a process of its own; the largest are taken once.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, machine
from synthetic import write_dcp_metadata

SHAPES = [(2_000, 51), (2_000, 512), (20_000, 51), (2_000, 5_120), (20_000, 512)]  #: tensors, ranks
ONCE = 5_000_000  #: chunks from which on there is one round
PATTERN = r"layers\.1\d\..*up_proj"


def main(scratch: Path) -> None:
    print(f"## Ten million chunks\n\n{machine()}, load average {os.getloadavg()[0]:.1f}. CPU seconds.\n")
    found = {}
    for tensors, ranks in SHAPES:
        folder = scratch / "scale" / f"{tensors}x{ranks}"
        if not (folder / "big" / ".metadata").exists():
            write_dcp_metadata(folder / "big", tensors, ranks)
        rounds = 1 if tensors * ranks >= ONCE else 3
        found[folder] = best("first", folder, rounds) | best("again", folder, rounds)
    print("| tensors × ranks | chunks | `.metadata`, MB | first open | µs a chunk | peak MB | reopen | peak MB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for (tensors, ranks), (folder, one) in zip(SHAPES, found.items(), strict=True):
        stored = (folder / "big" / ".metadata").stat().st_size / 1e6
        print(
            f"| {tensors:,} × {ranks:,} | {tensors * ranks:,} | {stored:,.0f} | {one['open']:.2f} | "
            f"{1e6 * one['open'] / tensors / ranks:.2f} | {one['open, MB']:,.0f} | {one['reopen']:.2f} | "
            f"{one['reopen, MB']:,.0f} |"
        )
    print("\nPeaks are the largest resident sizes of the process; imports take some 230 MB of them.\n")
    print(
        "| tensors × ranks | catalog, MB | its cache, MB | `workbench ls` | filter | layout "
        "| dashboard: open | filter | sort |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (tensors, ranks), one in zip(SHAPES, found.values(), strict=True):
        print(
            f"| {tensors:,} × {ranks:,} | {one['catalog, MB']:,.0f} | {one['cache, MB']:,.0f} | {one['ls']:.2f} | "
            f"{one['filter']:.4f} | {one['layout']:.2f} | {one['page']:.2f} | {one['page: filter']:.2f} | "
            f"{one['page: sort']:.2f} |"
        )
    print(
        "\n`ls` is a process from its start to its end. The dashboard: from the list of runs to the Overview, a "
        "regular expression in the Tensors tab, and its rows by bytes.\n"
    )


def best(part: str, folder: Path, rounds: int) -> dict[str, float]:
    """The least of each figure of some rounds of a part of this file."""
    environment = os.environ | {"WORKBENCH_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    told = []
    for _ in range(rounds):
        command = [sys.executable, __file__, part, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{part} of {folder} failed:\n{done.stderr[-3000:]}")
        told.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: min(one[name] for one in told) for name in told[0]}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def first(folder: Path) -> dict[str, float]:
    """Open without a cache, and fill it."""
    import torch  # noqa: F401  imported first, so that opening does not include it

    import workbench as wb

    for left in folder.glob("cache/*"):  # of an earlier round
        left.unlink()
    begin = time.process_time()
    ckpt = wb.open(folder / "big")
    kept = next((folder / "cache").iterdir())
    found = {"open": time.process_time() - begin, "open, MB": peak(), "catalog, MB": ckpt.catalog.nbytes / 1e6}
    found["cache, MB"] = kept.stat().st_size / 1e6
    return found


def again(folder: Path) -> dict[str, float]:
    """What follows once the catalog is in the cache."""
    import torch  # noqa: F401
    from dashboard import Session, clock

    import workbench as wb
    from workbench.app.registry import Registry
    from workbench.app.tabs import overview, tensors  # noqa: F401

    found, spent = clock()
    with spent("reopen"):
        ckpt = wb.open(folder / "big")
    found["reopen, MB"] = peak()
    with spent("filter"):
        assert len(ckpt.catalog.match(PATTERN)) == 100
    with spent("layout"):
        wb.layout(ckpt)
    del ckpt
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "workbench", "ls", str(folder / "big")], check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["ls"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    page(folder, found, spent, Session, Registry)
    return found


def page(folder: Path, found: dict[str, float], spent: Any, session: Any, registry: Any) -> None:
    import panel as pn

    pn.extension("tabulator", notifications=False)
    one = session(str(folder), registry())
    with spent("page"):
        one.state.show("big")
        one.until(lambda: one.state.status != "opening")
    with spent("turn"):
        one.state.tab = "tensors"
    tab = one.workbench.made["tensors"]
    with spent("page: sort"):
        tab.table._process_events({"sorters": [{"field": "nbytes", "dir": "desc"}]})
    with spent("page: filter"):
        one.state.pattern = PATTERN
        one.until(lambda: tab.search.status != "running")
    assert len(tab.table.chosen) == 100, len(tab.table.chosen)


if __name__ == "__main__":
    if sys.argv[1:2] in (["first"], ["again"]):
        print(json.dumps({"first": first, "again": again}[sys.argv[1]](Path(sys.argv[2]))))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
