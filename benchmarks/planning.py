"""Plans of millions of copies, beside torch DCP's planner on the same boxes.

``python benchmarks/planning.py`` prints Markdown; no file of any size is written. 10,000 tensors saved by 100 ranks in
row shards are planned for 64 ranks: 100 + 64 − 4 copies a tensor. DCP plans one tensor at a time: a hundred are
measured, and the figure of all is a hundred times that.
"""

from __future__ import annotations

from harness import best, machine

TENSORS, SAVED, WANTED = 10_000, 100, 64

CATALOG = f"""
import tempfile
import numpy as np
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.place import Place
from workbench.core.plan import plan_reads
from workbench.core.mesh.mesh import Mesh
from workbench.export.sharding.target import Target
T, S, ROWS, COLS = {TENSORS}, {SAVED}, {SAVED * WANTED}, 64
builder = CatalogBuilder('planning', Place(tempfile.mkdtemp()))
for t in range(T):
    builder.tensor(f'model.layers.{{t // 10}}.mlp.experts.{{t % 10}}.up_proj.weight', by_name('bfloat16'), (ROWS, COLS))
for s in range(S):
    builder.file(f'__{{s}}_0.distcp')
tensor, saved = np.repeat(np.arange(T), S), np.tile(np.arange(S), T)
offsets, sizes = np.zeros((T * S, 2), np.int64), np.full((T * S, 2), (ROWS // S, COLS))
offsets[:, 0] = saved * (ROWS // S)
at = tensor * (ROWS // S * COLS * 2)
builder.block(tensor, offsets, sizes, saved, at, at + ROWS // S * COLS * 2, rank=saved)
catalog = builder.build()
catalog.tensor
"""
LAYOUTS = (
    CATALOG
    + f"""
with timed():
    Target.of(catalog, Mesh(fsdp={WANTED}))
"""
)
LOCALS = (
    CATALOG
    + f"""
target = Target.of(catalog, Mesh(fsdp={WANTED}))
with timed():
    found = target.locals()
assert len(found) == T * {WANTED}
"""
)
PLAN = (
    CATALOG
    + f"""
found = Target.of(catalog, Mesh(fsdp={WANTED})).locals()
tensors = found.tensor[found.owner]
with timed():
    reads = plan_reads(catalog, tensors, found.offsets, found.sizes)
assert len(reads) == T * (S + {WANTED} - 4)
"""
)
WHOLE = (
    CATALOG
    + f"""
with timed():
    planned = Target.of(catalog, Mesh(fsdp={WANTED})).plan()
assert len(planned.reads) == T * (S + {WANTED} - 4)
"""
)
GRID = (
    CATALOG
    + f"""
with timed():
    planned = Target.of(catalog, Mesh(fsdp={WANTED // 8}, tp=8)).plan()
"""
)
ONE = (
    CATALOG
    + f"""
target = Target.of(catalog, Mesh(fsdp={WANTED}))
with timed():
    planned = target.plan(ranks=[5])
"""
)
DCP = f"""
from torch import Size, bfloat16
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
ROWS = {SAVED * WANTED}
def chunks(n):
    return [Chunk(Size((k * (ROWS // n), 0)), Size((ROWS // n, 64))) for k in range(n)]
saved = TensorStorageMetadata(TensorProperties(bfloat16), Size((ROWS, 64)), chunks({SAVED}))
wanted = chunks({WANTED})
with timed():
    for t in range(100):
        items = create_read_items_for_chunk_list(f't{{t}}', saved, wanted)
assert len(items) == {SAVED} + {WANTED} - 4
"""


def main() -> None:
    print(f"## Planning: {TENSORS:,} tensors, {SAVED} saved row shards → {WANTED} ranks\n\n{machine()}. Best of 3.\n")
    found = best(
        {
            "layouts by the rules (10,000 names)": LAYOUTS,
            "local tensors of all ranks (640,000 boxes)": LOCALS,
            "plan of 1.6 M copies, with the check of coverage": PLAN,
            "all three": WHOLE,
            "all three, onto fsdp=8 × tp=8": GRID,
            "plan of one rank": ONE,
            "torch DCP's planner, 100 of the tensors": DCP,
        }
    )
    theirs = found.pop("torch DCP's planner, 100 of the tensors")
    theirs = {**theirs, **{name: theirs[name] * TENSORS / 100 for name in ("wall", "cpu")}}
    print("| | wall s | CPU s | peak anon MB | DCP's CPU s ÷ |\n|---|---:|---:|---:|---:|")
    for name, one in {**found, "torch DCP's planner × 100 (extrapolated)": theirs}.items():
        ratio = theirs["cpu"] / one["cpu"]
        print(f"| {name} | {one['wall']:.3f} | {one['cpu']:.3f} | {one['anon']:,.0f} | {ratio:,.0f} |")
    print()


if __name__ == "__main__":
    main()
