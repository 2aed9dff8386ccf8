"""pyproject.toml, constraints.txt, Makefile and .ci/run agree, and a wheel holds what the package needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = ["demo", "test", "test-all", "lint", "bench", "notebooks", "docs", "screenshots", "help"]


def _pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def _installed_set() -> list[Requirement]:
    """What `make test` asks for: the core and the extras it names."""
    extras = re.search(r"-e '\.\[([a-z,]+)\]'", MAKEFILE)[1].split(",")
    return [Requirement(line) for line in PROJECT["dependencies"] + [r for e in extras for r in EXTRAS[e]]]


def test_the_extras_that_the_design_promises_exist():
    assert {"lab", "remote", "dask", "orbax", "zstd", "test", "docs", "dev"} <= set(EXTRAS)


def test_the_console_script_is_the_command_line():
    assert PROJECT["scripts"] == {"workbench": "workbench.cli:main"}
    assert PROJECT["name"] == "ckpt-workbench"


def test_the_version_is_told_once():
    import workbench

    assert workbench.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_constraints_pin_each_requirement_within_its_bounds():
    pins = _pins()
    for requirement in _installed_set():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned in constraints.txt"
        assert pins[name] in requirement.specifier, f"{name} {pins[name]} is outside {requirement.specifier}"


def test_constraints_pin_everything_those_requirements_bring():
    pins = _pins()
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    todo = [(canonicalize_name(r.name), frozenset(r.extras)) for r in _installed_set()]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name not in installed:
            continue
        seen.add((name, extras))
        assert name in pins, f"{name} comes with the tests but is not pinned in constraints.txt"
        for line in installed[name].requires or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    assert len(seen) > 50  # the walk walked


def test_constraints_name_no_host_and_no_local_file():
    text = (ROOT / "constraints.txt").read_text("utf-8")
    assert not re.search(r"://|@ |^-|^/|\+", text.replace("2.13.0+cpu", ""), re.MULTILINE)


def test_make_installs_the_torch_that_constraints_pin():
    assert f"TORCH  ?= torch=={_pins()['torch']}" in MAKEFILE


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^  make ([a-z-]+)", done.stdout, re.MULTILINE)
    assert set(TARGETS) <= set(listed)


def test_ci_runs_make_test_and_is_sound_bash():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text("utf-8")
    assert "set -euo pipefail" in text
    assert "make test" in text
    assert "CI=true" in text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """Names inside a wheel built from a copy of what packaging reads."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "workbench", source / "workbench", ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--disable-pip-version-check", "-w", "dist"], cwd=source, check=True)
    (built,) = (source / "dist").glob("ckpt_workbench-*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_a_wheel_holds_every_file_of_the_package(wheel):
    wanted = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "workbench").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")
    }
    assert wanted - wheel == set()
    assert "workbench/py.typed" in wheel


def test_a_wheel_holds_only_the_package_and_its_licence(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"workbench", f"ckpt_workbench-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
