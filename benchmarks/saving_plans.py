"""Plans of many tensors, what the ranks send for them, and memory over many saves.

``python benchmarks/saving_plans.py [SCRATCH]``; ``python -m benchmarks --only saving_plans`` puts it into
``RESULTS.md``. A million tensors need 4 GB of memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness import machine, run
from saving import code

PLAN = """
ITEMS = COUNT
state = {'model': {f'layers.{n}.w': torch.empty(2, 2) for n in range(ITEMS)}}
def plan(planner):
    planner.set_up_planner(state, None, True)
    local = planner.create_local_plan()
    plans, metadata = planner.create_global_plan([local])
    planner.finish_plan(plans[0])
    return planner
took, flat = [], []
for n in range(4):
    begin = time.process_time()
    planned = plan(PLANNER)
    took.append(time.process_time() - begin)
    begin = time.process_time()
    planned.state_dict
    flat.append(time.process_time() - begin)
found = {'first': took[0], 'second': min(took[1:]), 'flat': min(flat[1:])}
print('@@' + json.dumps(found | {'wall': 0, 'cpu': 0, 'anon': 0}))
"""
#: Ranks that plan together, and the bytes of what each of them sends to rank 0 in the first and in the second save.
RANKS = """
import pickle, socket, torch.multiprocessing as mp, torch.distributed as dist
def job(rank, port):
    import warnings
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    dist.init_process_group('gloo', rank=rank, world_size=4)
    import workbench as wb
    from torch.distributed.checkpoint.utils import _DistWrapper
    state = {'model': {f'layers.{rank}.{n}.w': torch.empty(2, 2) for n in range(COUNT // 4)}}
    sent, spent, real = [], [], _DistWrapper.gather_object
    def gather(self, one):
        sent.append(len(pickle.dumps(one)))
        return real(self, one)
    _DistWrapper.gather_object = gather
    for n in range(3):
        planner = wb.dcp.Planner()
        begin = time.process_time()
        planner.set_up_planner(state, None, not rank)
        local = planner.create_local_plan()
        took = time.process_time() - begin
        plans = _DistWrapper(None, True, 0).gather_object(local)
        begin = time.process_time()
        made = planner.create_global_plan(plans)[0] if not rank else None
        took += time.process_time() - begin
        mine = _DistWrapper(None, True, 0).scatter_object(made)
        begin = time.process_time()
        planner.finish_plan(mine)
        spent.append(took + time.process_time() - begin)
    sent.clear()
    path = FOLDER + '/save'
    dcp.save(state, storage_writer=wb.dcp.Writer(path), planner=wb.dcp.Planner())
    if not rank:
        found = {'first': spent[0], 'second': min(spent[1:]), 'plan': sent[0] / (COUNT / 4)}
        found['record'] = sent[1] / (COUNT / 4)
        print('@@' + json.dumps(found | {'wall': 0, 'cpu': 0, 'anon': 0}), flush=True)
        shutil.rmtree(path)
    dist.destroy_process_group()
if __name__ == '__main__':
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(4):
        if not (pid := os.fork()):
            job(rank, port)
            os._exit(0)
        pids.append(pid)
    assert not any(os.waitpid(pid, 0)[1] for pid in pids)
"""
MEMORY = """
import workbench as wb, gc
for n in range(50):
    dcp.save(state, storage_writer=wb.dcp.Writer(FOLDER + '/save'), planner=wb.dcp.Planner())
    if n == 9:
        gc.collect(); begin = _anon()
gc.collect()
with timed() as clock:
    clock.base = begin
shutil.rmtree(FOLDER + '/save')
"""


def main(scratch: Path) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    print(f"## Plans of saves\n\n{machine()}, load {os.getloadavg()[0]:.0f}.\n")
    print("| one rank | tensors | first, CPU s | later, CPU s | later ÷ first | flat dict when writing, CPU s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, planner, count in (
        ("`wb.dcp.Planner`", "wb.dcp.Planner()", 100_000),
        ("`DefaultSavePlanner`", "dcp.DefaultSavePlanner(enable_plan_caching=True)", 100_000),
        ("`wb.dcp.Planner`", "wb.dcp.Planner()", 1_000_000),
    ):
        one = run(code(scratch, "import workbench as wb\n" + PLAN, SIZE=0.01, COUNT=count, PLANNER=planner))
        first, later, flat = one["first"], one["second"], one["flat"]
        print(f"| {name} | {count:,} | {first:.2f} | {later:.3f} | {later / first:.2%} | {flat:.3f} |", flush=True)
    one = run(code(scratch, RANKS, SIZE=0.01, COUNT=100_000))
    print(
        f"\nFour ranks with 25,000 tensors each: rank 0 plans for {one['first']:.2f} CPU s at the first save and "
        f"{one['second']:.3f} at the second ({one['second'] / one['first']:.2%}). At the second, a rank sends "
        f"{one['plan']:.3f} bytes for each of its tensors with its plan, and {one['record']:.1f} after writing.\n"
    )
    one = run(code(scratch, MEMORY, SIZE=0.05))
    print(f"Anonymous memory after 50 synchronous saves of 50 MB, beyond that after 10: {one['anon']:.1f} MB.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "workbench-bench")
