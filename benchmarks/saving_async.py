"""How long ``dcp.async_save`` holds the training up: until it returns, and while the copy is being written.

``python benchmarks/saving_async.py [SCRATCH]``; ``python -m benchmarks --only saving_async`` puts it into
``RESULTS.md``. Everything takes turns in one process, so that a busy moment of the machine hurts all alike.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness import machine, run
from saving import code

GB = 0.15
#: A step of training uses one core, as one that drives a GPU does.
PROGRAM = """
import gc, statistics
torch.set_num_threads(1)
torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())
import workbench as wb
path = FOLDER + '/save'
copies = [torch.empty_like(one).fill_(1) for one in state.values()]
writers = {
    'ours': lambda: wb.dcp.Writer(path),
    'bare': lambda: wb.dcp.Writer(path, manifest=False),
    'torch': lambda: dcp.FileSystemWriter(path),
}
a, b = torch.randn(384, 384), torch.randn(384, 384)
def step():
    begin = time.perf_counter()
    for _ in range(4):
        a @ b
    return time.perf_counter() - begin
stall = {name: [] for name in ('copy', *writers)}
alone, during = [], {name: [] for name in writers}
for n in range(ROUNDS):
    for name, writer in writers.items():
        made = writer()
        begin = time.perf_counter()
        saved = dcp.async_save(state, storage_writer=made)
        took = time.perf_counter() - begin
        while not saved.done():
            during[name].append(step())
        saved.result()
        del saved
        gc.collect()
        alone += [step() for _ in range(10)]
        if n > 1:  # the first saves make the buffers
            stall[name].append(took)
    begin = time.perf_counter()
    for one, copy in zip(state.values(), copies):
        copy.copy_(one)
    stall['copy'].append(time.perf_counter() - begin)
shutil.rmtree(path)
found = {'stall': {name: min(times) for name, times in stall.items()}, 'alone': alone, 'during': during}
print('@@' + json.dumps(found | {'wall': 0, 'cpu': 0, 'anon': 0}))
torch.distributed.destroy_process_group()
"""
NAMES = {
    "copy": "floor: copy into touched memory",
    "ours": "`wb.dcp.Writer`",
    "bare": "`wb.dcp.Writer`, no manifest",
    "torch": "`FileSystemWriter`",
}


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    rounds = 10
    print(f"## Asynchronous saves\n\n{machine()}, load {os.getloadavg()[0]:.0f}. One process, {GB} GB of float32.")
    print(f"Until `dcp.async_save` returns: best of {rounds - 2} saves in turns, the third and later ones. Steps of")
    print("training on one core: the fastest quarter of those during the uploads, over that of those between them.\n")
    found = run(code(scratch, PROGRAM, ROUNDS=rounds, SIZE=GB))
    stall, alone, during = (found[name] for name in ("stall", "alone", "during"))
    print("| | returns after, s | ÷ floor | steps seen | step during an upload ÷ alone |\n|---|---:|---:|---:|---:|")
    for name, shown in NAMES.items():
        steps = during.get(name, [])
        slower = f"{quarter(steps) / quarter(alone):.3f}" if steps else ""
        ratio = stall[name] / stall["copy"]
        print(f"| {shown} | {stall[name]:.3f} | {ratio:.2f} | {len(steps) or ''} | {slower} |")
    print()


def quarter(times: list[float]) -> float:
    """The time that a quarter of the steps did not exceed."""
    return sorted(times)[len(times) // 4]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
