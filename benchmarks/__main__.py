"""``python -m benchmarks [SCRATCH]``: run every benchmark and write ``RESULTS.md`` beside this file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLES = ["opening.py"]
HEAD = """# Benchmark results

Written by `make bench`: each figure beside its peers and its physical floor, taken in one run on one machine. CPU
seconds count user and system time of all threads. Trust ratios inside a table, not seconds across machines.
"""


def main() -> None:
    parts = [HEAD]
    for name in TABLES:
        done = subprocess.run([sys.executable, str(HERE / name), *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(done.returncode)
        parts.append(done.stdout)
    (HERE / "RESULTS.md").write_text("\n".join(parts))
    print("\n".join(parts))


if __name__ == "__main__":
    main()
