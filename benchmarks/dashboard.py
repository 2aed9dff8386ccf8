"""The dashboard on 100,000 tensors in 1,000,000 chunks: what the server spends on each thing that a person does.

``python benchmarks/dashboard.py [SCRATCH]`` prints Markdown; ``make bench`` puts it into ``RESULTS.md``. No browser:
the page's own classes are driven with the events that a browser sends, in a Bokeh document, so that what would go over
the websocket is made as well. Liveness is that of a real server, asked from another process.

::

    viewer    CPU seconds of the process, a new one each round; the best of the rounds
    pictures  the same of what the Layout and Diff tabs draw
    memory    bytes in use (glibc's mallinfo2, all of Python's through malloc), per further session
    serve     GET /liveness each 50 ms while a job verifies every byte; wall milliseconds
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, machine

TENSORS, RANKS = 100_000, 10
ROUNDS = 3
SESSIONS = 4
PATTERN = r"layers\.1\d+\..*up_proj"
#: What is measured, in words, and the most it may take (issue 7); seconds of CPU.
GOALS = {
    "open, from the cache of catalogs": None,
    "rows, ranks and sums of all sessions": None,
    "paint the Overview": None,
    "list to Overview, all of these": 3.0,
    "turn to Tensors": None,
    "a page": 0.3,
    "sort by bytes": 1.0,
    "sort by name, first time": 1.0,
    "sort by name, again": 1.0,
    "a page of the sorted table": 0.3,
    "filter by a regular expression": 0.3,
    "filter by role": 0.3,
    "select a tensor": 0.3,
}
#: The pictures of a layout: of the bytes of those chunks, and of one tensor in a million boxes; and a comparison of as
#: many tensors.
PICTURES = {
    "bytes of the files, painted first": None,
    "bytes of the files, moved on": 0.15,
    "bytes of the files, zoomed in": 0.15,
    "boxes of a tensor, painted first": 0.15,
    "boxes of a tensor, again": 0.15,
    "diff: filter by a regular expression": 0.3,
    "diff: filter by role": 0.3,
    "diff: select a tensor": 0.3,
}


def main(scratch: Path) -> None:
    root = scratch / "dashboard"
    make(root)
    print(f"## Dashboard: {TENSORS:,} tensors, {TENSORS * RANKS:,} chunks\n")
    print(f"{machine()}, load average {os.getloadavg()[0]:.1f}. CPU seconds of the server.\n")
    child("viewer", root)  # fills the cache of catalogs
    rounds = [child("viewer", root) for _ in range(ROUNDS)]
    drawn = [child("pictures", root) for _ in range(ROUNDS)]
    print("| | CPU s | at most |\n|---|---:|---:|")
    for goals, told in ((GOALS, rounds), (PICTURES, drawn)):
        for name, most in goals.items():
            best = min(one[name] for one in told)
            print(f"| {name} | {best:.3f} | {'' if most is None else f'{most:g}'} |")
    used = child("memory", root, PYTHONMALLOC="malloc")
    print(f"\nA further session on it (Overview, Tensors sorted and filtered): {used['MB']:.1f} MB (at most 20).\n")
    print("### Liveness while a job verifies every byte (wall ms of 100 requests, one each 50 ms)\n")
    print("| | median | 95th of 100 | longest | verify, wall s |\n|---|---:|---:|---:|---:|")
    for name, folder in {
        "idle": "",
        "2 GB of DCP": str(scratch / "llama" / "dcp"),
        "1,000,000 chunks, each damaged": "big",  # its files are holes
    }.items():
        if folder.startswith(os.sep) and not Path(folder, ".metadata").exists():
            continue
        answers, took = alive(root, folder)
        print(f"| {name} | {answers[50]:.0f} | {answers[95]:.0f} | {answers[-1]:.0f} | {took} |")


def make(root: Path) -> None:
    if not (root / "big" / ".metadata").exists():
        from synthetic import write_dcp_metadata

        write_dcp_metadata(root / "big", TENSORS, RANKS)


def child(what: str, root: Path, **environment: str) -> dict[str, float]:
    """Run a part of this file in a process of its own; the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, __file__, what, str(root)],
        env=_environment(root, **environment),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def alive(root: Path, folder: str) -> tuple[list[float], str]:
    """Milliseconds of 100 answers, sorted, while a served process verifies; and how long that took."""
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", str(root), folder],
        env=_environment(root),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready"))
        answers = []
        for _ in range(100):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{url}liveness", timeout=60) as reply:
                reply.read()
            answers.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.05)
        ended = _ended(url)
    finally:
        process.terminate()
        process.wait(30)
    return sorted(answers), "" if not folder else ended or "longer than the requests"


def _ended(url: str) -> str:
    with urllib.request.urlopen(f"{url}verified", timeout=60) as reply:
        return str(reply.read().decode())


def _environment(root: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BOKEH_", "PANEL_"))}
    cache = str(root.parent / "cache")
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "WORKBENCH_CACHE": cache, **more}


# ---- in the child --------------------------------------------------------------------------------------------------


class Session:
    """A page without a browser: a document, and what its event loop would run."""

    def __init__(self, root: str, registry: Any) -> None:
        import queue

        import panel as pn
        from bokeh.document import Document

        from workbench.app.jail import Jail
        from workbench.app.page import Workbench
        from workbench.app.state import WorkbenchState

        self._handed: queue.Queue[Callable[[], None]] = queue.Queue()
        self.state = WorkbenchState(Jail(root), registry, self._handed.put)
        self.workbench = Workbench(self.state, self._handed.put)
        self.document = Document()
        self.document.add_root(pn.panel(self.workbench).get_root(self.document))
        self.until(lambda: self.workbench.picker.job.status != "running")

    def until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._handed.get(timeout=120)()

    def open(self) -> Any:
        self.state.show("big", tab="overview")
        self.until(lambda: self.state.status != "opening")
        assert self.state.status == "open", self.state.error
        self.state.tab = "tensors"
        return self.workbench.made["tensors"]


def clock() -> tuple[dict[str, float], Callable[[str], AbstractContextManager[None]]]:
    """A table, and what times a block into it, in seconds of CPU."""
    found: dict[str, float] = {}

    @contextmanager
    def spent(name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        found[name] = time.process_time() - begin

    return found, spent


def viewer(root: str) -> dict[str, float]:
    import panel as pn

    pn.extension("tabulator", notifications=False)
    from workbench.app.registry import Registry
    from workbench.app.tabs import overview, tensors

    found, spent = clock()
    registry, _ = Registry(), (overview, tensors)  # imported before the clock starts
    session = Session(root, registry)
    state = session.state
    with spent("open, from the cache of catalogs"):
        lease = registry.acquire(Path(root) / "big")
    with spent("rows, ranks and sums of all sessions"):
        assert len(lease.rows) == TENSORS
    with spent("paint the Overview"):
        state.show("big")
        session.until(lambda: state.status != "opening")
    found["list to Overview, all of these"] = sum(found.values())
    with spent("turn to Tensors"):
        state.tab = "tensors"
    tab = session.workbench.made["tensors"]
    table = tab.table
    with spent("a page"):
        table._process_events({"page": 7000})
    with spent("sort by bytes"):
        table._process_events({"sorters": [{"field": "nbytes", "dir": "desc"}]})
    for name in ("sort by name, first time", "sort by name, again"):
        with spent(name):
            table._process_events({"sorters": [{"field": "name", "dir": "desc"}]})
        if name.endswith("time"):
            table._process_events({"sorters": []})
    with spent("a page of the sorted table"):
        table._process_events({"page": 5})
    with spent("filter by a regular expression"):
        state.pattern = PATTERN
        session.until(lambda: tab.search.status != "running")
    assert len(table.chosen) == 11_100, len(table.chosen)
    state.pattern = ""
    with spent("filter by role"):
        state.role = lease.checkpoint.roles[0]
    state.role = ""
    with spent("select a tensor"):
        state.tensor = lease.checkpoint.catalog.keys[50_000]
    return found


def pictures(root: str) -> dict[str, float]:
    import numpy as np
    import panel as pn

    import workbench as wb
    from workbench.app.tabs.diff_view import DiffView
    from workbench.views.layout_bytes import Bytes
    from workbench.views.layout_canvas import PaintBoxes, PaintWindow, raster

    pn.extension("tabulator", notifications=False)
    found, spent = clock()
    index = Bytes(wb.layout(wb.open(Path(root) / "big")))
    end, files = float(index.size.max()), len(index.files)
    with spent("bytes of the files, painted first"):
        index.paint(PaintWindow(0, end, 0, files, 1200, 500))
    with spent("bytes of the files, moved on"):
        index.paint(PaintWindow(0.01 * end, end, 0, files, 1200, 500))
    with spent("bytes of the files, zoomed in"):
        index.paint(PaintWindow(0.3 * end, 0.3 * end + end / 4000, 0, files, 1200, 500))
    side = np.arange(1_000_000, dtype=np.int64)
    boxes = PaintBoxes(side % 1000, side % 1000 + 1, side // 1000, side // 1000 + 1, side % 7)
    for name in ("boxes of a tensor, painted first", "boxes of a tensor, again"):
        with spent(name):
            raster(boxes, PaintWindow(0, 1000, 0, 1000, 1200, 500))
    board = compared()
    view = DiffView(board.diff, board)
    pn.panel(view).get_root()
    with spent("diff: filter by a regular expression"):
        view.param.update(pattern=r"layers\.1\d\.")
    with spent("diff: filter by role"):
        view.param.update(role="exp_avg")
    with spent("diff: select a tensor"):
        view.param.update(pattern="", tensor="layers.5.part7.w0")
    return found


def compared() -> Any:
    """A comparison of 100,000 tensors: the rows of a small one under other names."""
    from dataclasses import replace

    import torch
    from safetensors.torch import save_file

    import workbench as wb
    from workbench.views.diff_grid import Board

    with tempfile.TemporaryDirectory() as folder:
        for name, scale in (("a", 1.0), ("b", 1.01)):
            save_file({f"w{n}": scale * torch.ones(n + 1) for n in range(8)}, Path(folder, f"{name}.safetensors"))
        small = wb.diff(Path(folder, "a.safetensors"), Path(folder, "b.safetensors"))
    names = (f"layers.{n % 250}.part{n // 250 % 100}.w{n // 25_000}" for n in range(TENSORS))
    rows = tuple(
        replace(small.rows[n % 8], keys_a=(name,), key_b=name, fqn=name, role=("param", "exp_avg")[n % 2])
        for n, name in enumerate(names)
    )
    return Board(replace(small, rows=rows))


def memory(root: str) -> dict[str, float]:
    import panel as pn

    pn.extension("tabulator", notifications=False)
    from workbench.app.registry import Registry

    registry, kept, used = Registry(), [], []
    for _ in range(SESSIONS + 1):
        session = Session(root, registry)
        table = session.open().table
        table._process_events({"sorters": [{"field": "name", "dir": "desc"}]})
        session.state.pattern = "layers"
        session.until(lambda: session.workbench.made["tensors"].search.status != "running")  # noqa: B023
        kept.append(session)
        gc.collect()
        used.append(_in_use())
    return {"MB": (used[-1] - used[0]) / SESSIONS / 1e6}


def _in_use() -> int:
    import ctypes

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    kind = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    call = ctypes.CDLL(None).mallinfo2
    call.restype = kind
    told = call()
    return int(told.uordblks + told.hblkhd)


def serve(root: str, folder: str) -> None:
    """The dashboard's server on a free port; its jobs' pool verifies a folder meanwhile."""
    from tornado.web import RequestHandler

    import workbench as wb
    from workbench.app.jobs import Job
    from workbench.app.serve import start

    took = []

    class Verified(RequestHandler):
        def get(self) -> None:
            self.finish(took[0] if took else "")

    server = start(root, port=0, extra_patterns=[(r"/verified", Verified)])
    job = Job()
    if folder:
        ckpt = wb.open(Path(root) / folder)

        def work(progress: Any) -> None:
            began = time.perf_counter()
            wb.verify(ckpt, deep=True, progress=progress)
            took.append(f"{time.perf_counter() - began:.1f}")

        server.io_loop.call_later(0.5, lambda: job.start(work))
    server.io_loop.call_later(1, lambda: print(f"ready http://127.0.0.1:{server.port}/", flush=True))
    server.start()
    server.io_loop.start()


if __name__ == "__main__":
    part, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if part in ("viewer", "memory", "pictures"):
        print(json.dumps({"viewer": viewer, "memory": memory, "pictures": pictures}[part](*rest)))
    elif part == "serve":
        serve(rest[0], rest[1] if len(rest) > 1 else "")
    elif part:
        main(Path(part))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
