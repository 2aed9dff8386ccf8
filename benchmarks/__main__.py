"""``python -m benchmarks [--only NAME …] [SCRATCH]``: run the benchmarks and write ``RESULTS.md`` beside this file.

Each table is a section of the page, so that one can be taken again and the others stay as they were, with their date.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "RESULTS.md"
TABLES = [
    "opening",
    "scale",
    "workers",
    "remote",
    "statistics",
    "decoding",
    "differences",
    "fingerprints",
    "planning",
    "exporting",
    "saving",
    "saving_async",
    "saving_stores",
    "saving_plans",
    "doctor",
    "dashboard",
    "soak",
    "device",
]
HEAD = """# Benchmark results

Written by `make bench`: each figure beside its peers and its physical floor, taken in one run on one machine. CPU
seconds count user and system time of all threads. Trust ratios inside a table, not seconds across machines.
"""
NOT_MEASURED = "Not measured:"  #: what a table says where the machine lacks something
MARK = "<!-- {} -->\n"


def main() -> None:
    there = [name for name in TABLES if (HERE / f"{name}.py").exists()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=there, help="this table; the others stay as they are")
    parser.add_argument("scratch", nargs="*", help="folder for the data (some 10 GB)")
    options = parser.parse_args()
    found = sections(PAGE.read_text() if PAGE.exists() else "")
    for name in options.only or there:
        command = [sys.executable, str(HERE / f"{name}.py"), *options.scratch]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        print(done.stdout, flush=True)
        if NOT_MEASURED in done.stdout and name in found:
            continue  # figures of a machine that could take them stay, with their date
        found[name] = done.stdout.strip() + "\n"
        # written after each, so that a table that fails takes no other with it
        PAGE.write_text("\n".join([HEAD, *(MARK.format(one) + found[one] for one in there if one in found)]))


def sections(page: str) -> dict[str, str]:
    """The tables of a page by name."""
    parts = re.split(MARK.format(r"(\w+)"), page)
    return {name: body.strip() + "\n" for name, body in zip(parts[1::2], parts[2::2], strict=True)}


if __name__ == "__main__":
    main()
