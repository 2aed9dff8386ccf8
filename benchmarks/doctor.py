"""The doctor's passes: GB of tensors read a CPU-second, beside what reading the same bytes costs.

``python benchmarks/doctor.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. SCRATCH needs
3 GB; what it made there is used again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness import best, machine
from synthetic_trained import UPDATES, write_trained

SIDE = 1_000_000_000  #: bytes of a checkpoint
ROUNDS = 3
CHUNK = 1 << 20


def main(scratch: Path) -> None:
    folders = write_trained(scratch / "doctor", SIDE)
    before, soon, later = (str(folder) for folder in folders.values())
    first, *_, last = UPDATES.values()
    load = os.getloadavg()[0]
    print(f"## The doctor's passes\n\n{machine()}. Load {load:.1f}, warm page cache, one thread, best of {ROUNDS} in")
    print(
        "turns, each a process of its own with imports and compilation done before. DCP of 1 GB a side, 4 ranks: bf16"
    )
    print(
        "weights, fp32 masters, exp_avg, exp_avg_sq of true AdamW. A pair reads what the optimizer holds on both sides,"
    )
    print("one checkpoint its weights too. Memory: anonymous, above that of the open checkpoints.\n")
    pairs = {"1 update": (before, soon), f"{last - first} updates": (before, later)}
    programs = {"floor: the files of a pair read": _floor(before, soon), "floor: of one checkpoint": _floor(before)}
    for name, (a, b) in pairs.items():
        programs |= {f"pair, {name}, {how}": _pair(a, b, how == "numba") for how in ("numba", "numpy")}
    programs |= {f"one checkpoint, {how}": _one(before, how == "numba") for how in ("numba", "numpy")}
    programs["pair, 1 update, numba, 2 threads"] = _pair(before, soon, True, 2)
    found = best(programs, ROUNDS)
    print("| | GB | CPU s | wall s | GB/CPU-s | memory, MB |\n|---|---:|---:|---:|---:|---:|")
    for name, result in found.items():
        size = _read(Path(before), 1 if "one checkpoint" in name else 2, not name.startswith("pair"))
        speed = size / result["cpu"]
        print(
            f"| {name} | {size:.2f} | {result['cpu']:.2f} | {result['wall']:.2f} | {speed:.2f} | {result['anon']:.0f} |"
        )
    print()


def _read(folder: Path, sides: int, weights: bool) -> float:
    """GB of elements that a pass reads: of the 14 bytes of a parameter, a pair leaves out the 2 of its weight."""
    import workbench

    ckpt = workbench.open(folder, cache=False)
    roles = dict(zip(ckpt.catalog.keys, ckpt.roles, strict=True))
    wanted = [key for key, role in roles.items() if role in ("master", "exp_avg", "exp_avg_sq", weights and "param")]
    return sides * sum(ckpt[key].nbytes for key in wanted) / 1e9


def _floor(*folders: str) -> str:
    """Every byte into one small buffer."""
    return f"""
with timed():
    buffer = bytearray({CHUNK})
    for folder in {folders!r}:
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), 'rb', buffering=0) as f:
                while f.readinto(buffer):
                    pass
"""


OPEN = """
import gc, numpy, pandas, workbench
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.rules.values import check_one, check_pair
def state(folder):
    ckpt = workbench.open(folder, cache=False)
    return State(ckpt, gather(ckpt))
def small(one):
    name = min(one.params, key=lambda fqn: one.shape(one.params[fqn]['param']))
    one.__dict__['params'] = {name: one.params[name]}
    return one
"""


def _pair(a: str, b: str, fast: bool, threads: int = 1) -> str:
    return f"""{OPEN}
check_pair(Evidence(small(state({a!r})), small(state({b!r}))).pair('before', 'after'), fast={fast})
pair = Evidence(state({a!r}), state({b!r})).pair('before', 'after')
gc.collect()
with timed():
    found = check_pair(pair, threads={threads}, fast={fast})
assert len(found.states) > 40 and not found.signs, found.signs
"""


def _one(a: str, fast: bool) -> str:
    return f"""{OPEN}
check_one(small(state({a!r})), fast={fast})
one = state({a!r})
gc.collect()
with timed():
    found = check_one(one, threads=1, fast={fast})
assert len(found.states) > 40 and not found.signs, found.signs
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
