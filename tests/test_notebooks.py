"""Every notebook runs from its own folder, shows what its story promises, and is stored without outputs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: What must be among the outputs of a notebook that was run. Numbers are torch's and numpy's, from the samples' truth:
#: 515 rows chunked twice (02), ‖b − a‖ / ‖a‖ of weights (04), bytes of a stage's tensors by tp (05).
PROMISES = {
    "01_open_and_look": [
        "dcp_fsdp2", "model.layers.2.mlp.up_proj.weight", "exp_avg_sq", "standard deviation", "(3, 3, (0.9, 0.95))",
        "-0.0240",
    ],
    "02_layouts_and_meshes": [
        "axis0=2, axis1=2", "(True, [(0, 129), (258, 387), (129, 258), (387, 515)])", "_StridedShard(dim=0, sf=2)",
        "48 proven, 15 partly, 21 unknown", "tp=2, pp=1, cp=1, dp=2", "args in common.pt", "tp=2, pp=2, sharding=2",
        "fits 2 GPUs",
    ],
    "03_debug_a_loss_spike": [
        "1.7411", "1.946", "D2", "certain", "The fp32 master weights do not match the weights", "0.118234",
        "0.4082", "0.4328", "the first loss is right; the second is wrong", "Differs_colon_20",
        "20 of 20 master tensors",
    ],
    "04_diff_two_runs": [
        "0.002455  0.030248  0.050793", "'lr_scheduler.last_epoch': '2 → 4'", "8 of 39 tensors changed, 31 equal",
        "interleave", "the rotary layout: half-split → interleaved", "master      changed    20", "DiffView",
    ],
    "05_reshard_and_load_on_gpu": [
        "1,004,032 bytes (1,001,728 unique, 2,304 in copies)", "250880", "251136", "True True", "'equal': 39",
        "{'up_proj': True, 'down_proj': True}", "(torch.bfloat16, True)", "135168, True)", "1 mismatched", "GB/s",
    ],
    "06_save_kill_resume_prove": [
        "ended by SIGKILL", "['.metadata', '.workbench-manifest.json', '__0_0', '__0_0']",
        "3 0 16 of 16 tensors were equal", "bytes that is not in the manifest", "(16, 0)", "One rank saved",
        "16 of 16 tensors are equal bit for bit", "The optimizer state was not restored", "the save is right",
    ],
}  # fmt: skip


def test_there_are_notebooks_and_each_has_promises():
    assert {path.stem for path in NOTEBOOKS} == set(PROMISES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    import nbformat

    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and not cell.get("execution_count"), "run nbstripout before committing"


#: What the notebooks import, but for ``hvplot.pandas``: it shows its scripts when it is imported.
IMPORTED = ["ipykernel.kernelapp", "torch.distributed.checkpoint", "panel_material_ui", "holoviews.ipython", "hvplot"]


class Forked:
    """A kernel that has imported what the notebooks need, as the ``subprocess.Popen`` that Jupyter would start."""

    stdin = stdout = stderr = None

    def __init__(self, context: Any, command: list[str], env: dict[str, str], cwd: str) -> None:
        self._process = context.Process(target=_kernel, args=(command[command.index("-f") :], env, cwd))
        self._process.start()
        self.pid = self._process.pid
        self.wait, self.kill, self.terminate = self._process.join, self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _kernel(arguments: list[str], env: dict[str, str], cwd: str) -> None:
    from ipykernel.kernelapp import IPKernelApp

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    os.chdir(cwd)
    IPKernelApp.launch_instance(arguments)


@pytest.fixture(scope="module", autouse=True)
def forked_kernels():
    """Kernels are forked from one process that has imported torch and panel, which takes longer than most cells."""
    from jupyter_client.provisioning.local_provisioner import LocalProvisioner

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)

    async def launch(self: Any, command: list[str], *, env: dict[str, str], cwd: str, **_: Any) -> Any:
        self.process = Forked(context, command, env, cwd)
        self.pid, self.cwd = self.process.pid, cwd
        return self.connection_info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalProvisioner, "launch_kernel", launch)
        yield


@pytest.fixture(scope="module")
def ran():
    """A function: a notebook's path → the notebook with its outputs, run once."""
    import nbformat
    from nbclient import NotebookClient

    @cache
    def run(path):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(path.parent)}}).execute()
        return notebook

    return run


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own event loop handling
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_promises(ran, path):
    cells = ran(path).cells
    shown = "\n".join(str(output) for cell in cells for output in cell.get("outputs", []))
    for promise in PROMISES[path.stem]:
        assert promise in shown, promise
    errors = [o for cell in cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert not errors, errors


#: Shows a checkpoint's tabs without `enable()`, as somebody does who has not read of it.
BARE = """
import workbench as wb
wb.open("../sample_ckpts/dcp_fsdp2").view()
"""


@pytest.mark.notebook
@pytest.mark.browser
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own event loop handling
# nbconvert, of outputs in JavaScript alone
@pytest.mark.filterwarnings("ignore:Your element with mimetype:UserWarning")
@pytest.mark.parametrize(
    "path",
    # 03 embeds pictures, panels and tabs; most others only representations
    [
        path if path is None or path.stem.startswith("03") else pytest.param(path, marks=pytest.mark.slow)
        for path in (*NOTEBOOKS, None)
    ],
    ids=lambda path: path.stem if path else "without_enable",
)
def test_a_notebook_saved_as_a_page_asks_nobody(ran, page, path):
    """What nbconvert itself would fetch (require.js, MathJax, Mermaid) is left out; what is left is ours."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    if path is None:
        path = ROOT / "notebooks" / "bare.ipynb"
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BARE)])
        NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(path.parent)}}).execute()
    else:
        notebook = ran(path)
    html, _ = HTMLExporter(require_js_url="", mathjax_url="", mermaid_js_url="").from_notebook_node(notebook)
    address = "http://127.0.0.1/saved.html"
    page.route(address, lambda route: route.fulfill(body=html, content_type="text/html; charset=utf-8"))
    page.goto(address)
    page.locator("canvas, .facts").first.wait_for(state="attached")
    page.wait_for_timeout(1000)
    assert page.external == []
