"""Every notebook in a real JupyterLab in Chromium, with loopback alone to talk to: tables and plots are drawn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WAIT = 240_000  #: ms
FLAGS = [
    "--no-browser",
    "--ip=127.0.0.1",
    "--IdentityProvider.token=",
    "--ServerApp.password=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.expose_app_in_browser=True",
    "--LabApp.news_url=None",
    "--allow-root",
]
#: How many plots a notebook draws at least.
PLOTS = {
    "01_open_and_look": 1,
    "02_layouts_and_meshes": 3,
    "03_debug_a_loss_spike": 3,
    "04_diff_two_runs": 3,
    "05_reshard_and_load_on_gpu": 1,
}
KERNEL = "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
#: ``[number of cells without a count, text of errors]`` of the notebook that is open.
STATE = """() => {
  const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
  const prompts = cells.map(cell => cell.querySelector('.jp-InputPrompt')?.textContent.trim() ?? '');
  const errors = [...document.querySelectorAll('.jp-RenderedText[data-mime-type*=error], '
    + '.jp-OutputArea-output[data-mime-type*=stderr]')];
  return [prompts.filter(text => !/\\d/.test(text)).length, errors.map(one => one.textContent).join('')];
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, free_port):
    """URL of a JupyterLab on a copy of the notebooks and the samples, with settings of its own."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed; pip install '.[lab]'")
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    shutil.copytree(ROOT / "sample_ckpts", folder / "sample_ckpts")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    # Cells that are off the screen would not be in the page.
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "spaces",
        "JUPYTER_RUNTIME_DIR": "runtime",
    }
    environment = os.environ | {name: str(folder / place) for name, place in places.items()}
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "jupyterlab", f"--port={port}", f"--ServerApp.root_dir={folder}", *FLAGS]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            _wait(f"{url}/api", process, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyterlab(page, lab, path):
    page.set_default_timeout(WAIT)
    page.goto(f"{lab}/lab/tree/notebooks/{path.name}?reset")
    page.wait_for_function("() => window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')")
    page.wait_for_function(KERNEL)
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => null)")
    page.wait_for_function(f"() => {{ const [left, wrong] = ({STATE})(); return left === 0 || wrong !== ''; }}")
    assert page.evaluate(STATE) == [0, ""]
    page.locator(".jp-OutputArea canvas").nth(PLOTS[path.stem] - 1).wait_for(state="attached")
    assert page.external == []
    if shots := os.environ.get("WORKBENCH_SHOTS"):
        figure = page.locator(".jp-OutputArea .bk-Figure").first
        figure.scroll_into_view_if_needed()
        page.screenshot(path=Path(shots) / f"{path.stem}.png")
