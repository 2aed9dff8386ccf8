"""``python -m tests.fuzz SEED …``: what cases do, and what fails. A range is ``0-9999``.

``--workers N``, ``--quick`` as ``make test`` runs them, ``--all`` to tell of each case, ``--keep FOLDER`` to leave the
mutated checkpoints there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz import pool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seeds", nargs="+", metavar="SEED")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args()
    seeds = [seed for text in chosen.seeds for seed in _range(text)]
    if chosen.keep is not None:
        from tests.fuzz.worker import Worker

        with tempfile.TemporaryDirectory() as folder:
            worker = Worker(Path(folder))
            for seed in seeds:
                _tell(worker.case(seed, chosen.keep.absolute(), quick=chosen.quick))
        return 0
    loud = chosen.all or len(seeds) < 20
    found = pool.run(
        seeds,
        chosen.workers,
        quick=chosen.quick,
        tell=lambda one: _tell(one) if loud or one["failures"] else None,
    )
    steps = Counter(f"{name}: {how}" for one in found for name, how in one.get("steps", {}).items())
    print(json.dumps(dict(sorted(steps.items())), indent=1))
    failed = [one for one in found if one["failures"]]
    cpu = sum(one.get("cpu", 0) for one in found)
    slow = sorted(((one.get("wall", 0), one.get("cpu", 0), one["case"]) for one in found), reverse=True)[:5]
    grown = max((one.get("grown", 0) for one in found), default=0)
    print(
        f"{len(found):,} cases, {len(failed):,} failed, {cpu:,.0f} s of CPU, most memory +{grown:,} MB; slowest {slow}"
    )
    return bool(failed)


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _tell(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1) if found["failures"] else json.dumps(found), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
