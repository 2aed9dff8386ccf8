"""The bar: drawn on a terminal only, wiped at the end, harmless whatever the title."""

from __future__ import annotations

import io

import pytest

from workbench.views import progress as module
from workbench.views.names import columns
from workbench.views.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0)
    monkeypatch.setattr(module, "EVERY", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_pipe_gets_nothing(at_once):
    out = io.StringIO()
    with progress_bar("stats", out) as progress:
        progress(0.5)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_line_that_is_wiped(at_once):
    out = Terminal()
    with progress_bar("stats", out) as progress:
        progress(0.5)
        assert "stats" in out.getvalue() and "50%" in out.getvalue() and "█" * 12 in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


def test_it_is_wiped_when_the_work_raises(at_once):
    out = Terminal()
    with pytest.raises(ZeroDivisionError), progress_bar("stats", out) as progress:
        progress(0.1)
        raise ZeroDivisionError
    assert out.getvalue().endswith("\r\x1b[K")


def test_short_work_shows_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress_bar("stats", out) as progress:
        progress(0.5)
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", ["20", "30", "40", "60", "200"])
@pytest.mark.parametrize("title", ["", "x" * 300, "模型" * 60, "a\x1b[2Jb\u202ec"])
@pytest.mark.parametrize("share", [-1.0, 0.0, 0.031, 0.5, 0.999, 1.0, 7.0])
def test_a_line_fits_the_terminal_and_obeys_nothing(at_once, monkeypatch, width, title, share):
    monkeypatch.setenv("COLUMNS", width)
    out = Terminal()
    with progress_bar(title, out) as progress:
        progress(share)
        line = out.getvalue()
    plain = line.removeprefix("\r").removesuffix("\x1b[K")
    assert columns(plain) < int(width) and plain.isprintable()


def test_a_terminal_that_cannot_draw_it_stops_nothing(at_once):
    class Ascii(Terminal):
        def write(self, text):
            text.encode("ascii")
            return super().write(text)

    with progress_bar("stats", Ascii()) as progress:
        progress(0.5)


@pytest.fixture(scope="module")
def kernel():
    """A function: lines of Python → what a notebook's cell shows of them, every message in order."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> list[dict]:
        shown = []
        reply = client.execute_interactive(code, output_hook=lambda message: shown.append(message), timeout=120)
        assert reply["content"]["status"] == "ok", reply
        return [
            one | {"kind": message["msg_type"]}
            for message in shown
            if "data" in (one := message["content"]) and message["msg_type"] != "execute_result"
        ]

    run("import workbench as wb\nfrom workbench.views import progress\nprogress.CELL_PATIENCE = progress.EVERY = 0")
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


LONG = {
    "verify": "wb.verify(ckpt, deep=True)",
    "stats": "wb.stats(ckpt)",
    "diff": "wb.diff({samples!r} + '/titan_run/step-2', {samples!r} + '/titan_run/step-4')",
    "doctor": "__import__('workbench.doctor.examine') and wb.doctor(ckpt)",  # which puts the package in its place
    "layout": "wb.layout(ckpt)",
    "timeline": "wb.timeline({samples!r} + '/titan_run')",
    "plan_memory": "wb.plan_memory(ckpt, 2, 80)",
    "export": "wb.export(ckpt, __import__('tempfile').mkdtemp() + '/new')",
    "to_device": "ckpt.to_device('cpu')",
    "state_dict": "ckpt.state_dict()",
    "echo": "wb.echo({{key: ckpt[key].torch().clone() for key in ckpt}}, against=ckpt)",
    "load": "wb.load({{key: ckpt[key].torch().clone() for key in ckpt}}, ckpt)",
}


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own event loop handling
@pytest.mark.parametrize("name", LONG)
def test_a_long_call_in_a_notebook_shows_a_bar_that_is_removed(kernel, samples, name):
    code = f"ckpt = wb.open({str(samples / 'dcp_fsdp2')!r})\nfound = {LONG[name].format(samples=str(samples))}"
    shown = kernel(code)
    assert shown, "no bar"
    assert [one["kind"] for one in shown] == ["display_data", *["update_display_data"] * (len(shown) - 1)]
    assert len({one["transient"]["display_id"] for one in shown}) == 1
    assert f"{name} <progress" in shown[0]["data"]["text/html"] and "%" in shown[0]["data"]["text/plain"]
    assert shown[-1]["data"] == {"text/plain": "", "text/html": ""}


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own event loop handling
def test_the_bar_of_a_notebook_can_be_replaced_or_left_out(kernel, samples):
    path = str(samples / "dcp_fsdp2")
    assert kernel(f"wb.verify({path!r}, progress=False)") == []
    assert kernel(f"told = []\nwb.verify({path!r}, progress=told.append)\nassert told") == []
    thread = f"import threading\none = threading.Thread(target=wb.verify, args=[{path!r}])\none.start()\none.join()"
    assert kernel(thread) == []


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own event loop handling
def test_the_bar_of_a_call_that_is_interrupted_is_removed(kernel, samples):
    shown = kernel(f"""
draw = progress._Cell._draw
def interrupted(cell, *how):
    draw(cell, *how)
    raise KeyboardInterrupt

progress._Cell._draw = interrupted
try:
    wb.verify({str(samples / "dcp_fsdp2")!r}, deep=True)
except KeyboardInterrupt:
    progress._Cell._draw = draw
""")
    assert len(shown) == 2 and shown[-1]["data"] == {"text/plain": "", "text/html": ""}


def test_outside_of_ipython_a_function_is_called_as_it_is(monkeypatch):
    import pickle
    import sys

    import workbench as wb

    asked = []
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    call = module.followed(lambda path, **options: asked.append((path, options)))
    call("one"), call("two", progress=False), call("three", progress=print)
    assert asked == [("one", {}), ("two", {}), ("three", {"progress": print})]
    assert pickle.loads(pickle.dumps(wb.verify)) is wb.verify
