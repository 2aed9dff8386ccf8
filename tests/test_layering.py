"""Imports run one way, `__all__` is what is exported, and `import workbench` stays light."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from functools import cache
from pathlib import Path

import layering
import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "workbench"
MODULES = layering.modules(PACKAGE)

#: What takes a second or more to import, or is optional: only inside functions.
HEAVY = {
    "torch",
    "pandas",
    "panel",
    "panel_material_ui",
    "holoviews",
    "hvplot",
    "bokeh",
    "transformers",
    "zstandard",
}
LIGHT_ROOMS = {
    "errors",
    "core",
    "names",
    "formats",
    "tensor",
    "runs",
    "checkpoint",
    "workbench",
    "cli",
}

#: Modules whose names users meet.
PUBLIC = {
    "",
    ".errors",
    ".formats",
    ".names",
    ".tensor",
    ".checkpoint",
    ".runs",
    ".analysis",
    ".notebook",
    ".cli",
}


@cache
def every_import() -> list[layering.Import]:
    """Not while tests are collected: each process does that."""
    return [i for name, path in MODULES.items() for i in layering.imports(name, path, set(MODULES))]


def test_the_tree_was_read():
    assert {"workbench", "workbench.errors", "workbench.core.catalog"} <= set(MODULES)
    assert any(i.function is not None for i in every_import())
    assert any(i.type_only for i in every_import())


def test_imports_run_one_way():
    broken = [
        f"{i.source}:{i.line} imports {i.target}: {why}" for i in every_import() if (why := layering.forbidden(i))
    ]
    assert not broken, "\n".join(broken)


def test_no_files_form_a_circle():
    """Counting imports inside functions and those for types alone."""
    known = set(MODULES)
    edges = {(i.source, i.target) for i in every_import() if i.target in known}
    assert len(edges) > 1000
    assert not layering.circles(edges), sorted(layering.circles(edges))


FOLDERS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py" and name != "workbench")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folders_form_a_circle(folder):
    """The files and folders of a folder can be put in an order."""
    edges = layering.inside(folder, every_import())
    assert not layering.circles(edges), sorted(layering.circles(edges))


def test_the_front_door_is_small():
    files = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(files) <= 6, files


def test_pickles_stand_on_errors_and_the_collector_alone():
    """What decodes pickles knows no format and no catalog."""
    inside = [
        i for i in every_import() if i.source.startswith("workbench.core.pickles") and i.target.startswith("workbench")
    ]
    outside = {i.target for i in inside if not i.target.startswith("workbench.core.pickles")}
    assert outside == {"workbench.errors", "workbench.core.garbage"}


def test_light_rooms_import_nothing_heavy_when_they_are_imported():
    broken = [
        f"{i.source}:{i.line} imports {i.target}"
        for i in every_import()
        if i.function is None and not i.type_only
        if layering.room(i.source) in LIGHT_ROOMS and i.target.split(".")[0] in HEAVY
    ]
    assert not broken, "\n".join(broken)


def test_import_workbench_loads_nothing_heavy():
    code = f"import sys, workbench; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]"


def test_shared_decoders_are_not_readers():
    for name in layering.SHARED_DECODERS:
        tree = layering.parsed(MODULES[name])
        defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert not defined & {"detect", "read_catalog", "read_objects"}, name


@pytest.mark.parametrize("name", sorted("workbench" + p for p in PUBLIC if "workbench" + p in MODULES))
def test_all_agrees_with_what_is_exported(name):
    module = importlib.import_module(name)
    exported = list(getattr(module, "__all__", ()))
    assert len(exported) == len(set(exported))
    assert [n for n in exported if not hasattr(module, n)] == []
    assert public_names(module) - set(exported) == set()


def public_names(module: types.ModuleType) -> set[str]:
    """Public functions and classes a module defines; for the facade, everything public but submodules."""
    names = set()
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if module.__name__ == "workbench":
            names |= {name} - {"annotations", "TYPE_CHECKING"}
        elif (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__:
            names.add(name)
    return names


# ---- the test itself can fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("core/box.py", "from workbench.tensor import LazyTensor", "core may not import tensor"),
        ("core/box.py", "def f():\n    import workbench.checkpoint", "core may not import checkpoint"),
        ("core/box.py", "from ..formats import dcp", "core may not import formats"),
        ("core/box.py", "def f():\n    import_module('workbench.app.main')", "core may not import app"),
        ("core/box.py", "def f():\n    import workbench as wb", "core may not import workbench"),
        ("names/roles.py", "from workbench import formats", "names may not import formats"),
        ("formats/dcp/reader.py", "from workbench.formats.torch import save", "a format may not import another"),
        ("formats/dcp/reader.py", "from ..torch.save import detect", "a format may not import another"),
        (
            "checkpoint.py",
            "def summary():\n    from workbench.views import text",
            "checkpoint may not import views",
        ),
        ("checkpoint.py", "from workbench.views import text", "checkpoint may not import views"),
        ("analysis/stats.py", "from workbench.export import filemap", "analysis may not import export"),
        (
            "views/html.py",
            "class A:\n    def f(self):\n        from workbench.app import state",
            "views may not import app",
        ),
        (
            "views/html.py",
            "if TYPE_CHECKING:\n    from workbench.app import state",
            "views may not import app",
        ),
        ("stray.py", "import workbench.errors", "room 'stray' has no place in the order"),
        ("core/box.py", "from workbench.errors import HoleError", None),
        ("formats/dcp/reader.py", "from workbench.formats.dcp.metadata import decode", None),
        ("formats/dcp/reader.py", "from workbench import names", None),
        (
            "checkpoint.py",
            "def _repr_html_(self):\n    from workbench.views import html",
            "checkpoint may not import views",
        ),
        ("cli/serve.py", "def serve():\n    from workbench.app.serve import serve", None),
        ("cli/show.py", "import workbench as wb", None),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path, path, line, expected):
    package = tmp_path / "workbench"
    for room in (
        "core/box",
        "formats/dcp/reader",
        "formats/torch/save",
        "formats/dcp/metadata",
        "app/state",
        "views/html",
        "names/roles",
    ):
        above = [package / folder / "__init__.py" for folder in Path(f"{room}.py").parents]
        for file in (package / f"{room}.py", *above):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    for file in ("errors", "tensor", "checkpoint", "analysis", "export", "__init__"):
        (package / f"{file}.py").touch()
    target = package / path
    target.parent.mkdir(exist_ok=True)
    target.write_text(line + "\n")

    known = layering.modules(package)
    name = next(n for n, p in known.items() if p == target)
    reasons = [why for i in layering.imports(name, target, set(known)) if (why := layering.forbidden(i))]
    if expected is None:
        assert reasons == []
    else:
        assert any(expected in why for why in reasons), reasons


def test_a_heavy_import_under_type_checking_or_in_a_function_is_told_apart(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        "import torch\nif TYPE_CHECKING:\n    import pandas\nelse:\n    import bokeh\n"
        "def f():\n    import panel\nclass C:\n    import hvplot\n"
    )
    found = {i.target: (i.function, i.type_only) for i in layering.imports("m", file, {"m"})}
    assert found == {
        "torch": (None, False),
        "pandas": (None, True),
        "bokeh": (None, False),
        "panel": ("f", False),
        "hvplot": (None, False),
    }


def test_circles_are_found():
    chain = [("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]
    assert not layering.circles(chain)
    assert layering.circles([*chain, ("c", "b")]) == {("b", "c"), ("c", "b")}
    assert layering.circles([*chain, ("d", "a")]) == {*chain, ("d", "a")}


def test_a_class_name_means_one_thing():
    """Across the whole package, so that a name in a traceback or a docstring is found at once."""
    where: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in layering.parsed(path).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert len(where) > 300
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}
