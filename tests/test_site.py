"""The documentation's site builds without a warning, without a network, and without asking for one when it is read."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import workbench as wb

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOOLS = ("sphinx", "myst_parser", "furo")

#: As `make docs` does it, in a process where every connection and every look-up of a name is an error.
BUILD = """
import socket, sys
def refused(*_, **__):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refused
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


def built(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    missing = [tool for tool in TOOLS if find_spec(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; pip install -c constraints.txt '.[docs]'")
    options = ["--fail-on-warning", "--keep-going", "-q", "-b", "html"]
    command = [sys.executable, "-c", BUILD, *options, str(source), str(target)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = built(DOCS, target)
    assert done.returncode == 0, done.stderr
    return target


def test_every_page_is_in_the_site_and_in_its_contents(site: Path) -> None:
    contents = (site / "index.html").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page.name
        assert page.stem == "index" or f'href="{page.stem}.html' in contents, page.name


def test_everything_public_is_in_the_reference(site: Path) -> None:
    reference = (site / "api.html").read_text("utf-8")
    named = {f"dcp.{name}": getattr(wb.dcp, name) for name in wb.dcp.__all__}
    named |= {name: getattr(wb, name) for name in wb.__all__ if name not in ("dcp", "errors")}
    public = [f"workbench.{name}" for name in named] + [f"workbench.errors.{name}" for name in wb.errors.__all__]
    where = {f"workbench.{name}": f"{one.__module__}.{name.rpartition('.')[2]}" for name, one in named.items()}
    missing = [n for n in public if f'id="{n}"' not in reference and f'id="{where.get(n)}"' not in reference]
    assert len(public) > 40 and not missing


def test_a_page_asks_nobody_for_scripts_or_styles(site: Path) -> None:
    for page in site.glob("*.html"):
        asked = re.findall(r'<(?:script|img|iframe)[^>]*src="((?:https?:)?//[^"]+)', page.read_text("utf-8"))
        asked += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="((?:https?:)?//[^"]+)', page.read_text("utf-8"))
        assert not asked, (page.name, asked)


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copy(DOCS / "conf.py", source)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (source / "index.md").write_text("# A page\n\n[there](nowhere.md)\n")
    done = built(source, tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr


def test_the_network_is_really_blocked_in_a_build() -> None:
    check = BUILD.replace("from sphinx.cmd.build import main\n", "").replace(
        "sys.exit(main(sys.argv[1:]))", "socket.create_connection(('127.0.0.1', int(sys.argv[1])), 1)"
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        command = [sys.executable, "-c", check, str(listening.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "no network here" in done.stderr
