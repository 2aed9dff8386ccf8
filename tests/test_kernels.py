"""Compiled code: which pass takes it, where it is kept, and what happens where that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.core.engine import WORTH_NUMBA, engine
from workbench.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("numba")

STATS = """
import numpy as np
from workbench.analysis.moments import Moments
from workbench.core.dtypes import by_name
reducer = Moments("numba")
state = reducer.begin(by_name("float32"))
reducer.fold_bits(state, np.array([1, 2, 6], "<f4").view("<u4"))
print(state.min, state.max, state.average)
"""
COMPARE = """
import numpy as np
from workbench.analysis import compare_numpy, fast_compare
sides = [np.array(side, "<f4").view("<u4") for side in ([1, 2, 6], [1, 2, 7])]
mask, counts, sums = np.zeros(3, np.uint8), np.zeros(compare_numpy.COUNTS, np.int64), np.zeros(4)
ulps, octaves = np.zeros(compare_numpy.ULPS, np.int64), np.zeros(compare_numpy.OCTAVES, np.int64)
fast_compare.tally("float32", *sides, (mask, ulps, octaves, counts, sums), True)
print(counts[compare_numpy.CHANGED], sums[0])
"""
DOCTOR = """
import numpy as np
from workbench.doctor.compiled import fast_one, fast_pair, fast_rows
ones = np.ones(300, np.float32)
print(fast_one.numbers(ones, 0)[0][3])
print(fast_pair.fold((ones,) * 6, 1 | 8, np.zeros(20), (0.0, 0.0, 0.0, 1.0))[0][6])
print(fast_rows.square_sums(ones.reshape(20, 15))[2])
"""


def test_numba_is_taken_where_it_is_worth_its_import():
    assert engine(WORTH_NUMBA - 1) == "numpy" and engine(1 << 40, False) == "numpy"
    assert engine(WORTH_NUMBA) == engine(1, True) == "numba"


def test_where_numba_cannot_be_imported_numpy_does_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it raises ImportError
    assert engine(1 << 40) == "numpy"
    with pytest.raises(MissingExtraError, match="numba"):
        engine(1, True)


def run(code: str, package: Path, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    kept |= {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"} | env
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package whose folders cannot hold a ``__pycache__``, not even for root."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "workbench", folder / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    for here in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        (here / "__pycache__").write_text("a file, so that there cannot be a folder of this name")
    return folder


@pytest.mark.parametrize(
    "code, words",
    [(STATS, "1.0 6.0 3.0"), (COMPARE, "1 1.0"), (DOCTOR, "300 300 300.0")],
    ids=["stats", "compare", "doctor"],
)
def test_nothing_has_to_be_written(package, code, words):
    nowhere = str(package / "__pycache__" / "home")  # below a file
    before = sorted(package.rglob("*"))
    assert run(code, package, HOME=nowhere, XDG_CACHE_HOME=nowhere).split() == words.split()
    assert sorted(package.rglob("*")) == before


FORMULA = """
from workbench.core.kernels import kernel, loop
import numpy as np
from formula import FACTOR, formula
inner = loop(formula)
@kernel
def outer(x):
    return inner(x[0]) * FACTOR
print(outer(np.array([3.0])), sum(outer.stats.cache_hits.values()))
"""


def test_compiled_code_is_kept_until_anything_that_it_calls_changes(tmp_path):
    """numba itself asks for the kernel's file alone."""
    (tmp_path / "main.py").write_text(FORMULA)
    told, code = [], f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import main"
    for body, factor in (("x + 1", 1), ("x + 1", 1), ("x + 2", 1), ("x + 2", 10), ("x + 1", 1)):
        (tmp_path / "formula.py").write_text(f"FACTOR = {factor}\ndef formula(x):\n    return {body}\n")
        told.append(run(code, ROOT).split())
    assert told == [["4.0", "0"], ["4.0", "1"], ["5.0", "0"], ["50.0", "0"], ["4.0", "1"]]


@pytest.mark.parametrize(
    "damage", ["index", *(pytest.param(one, marks=pytest.mark.slow) for one in ("data", "folder"))]
)
def test_a_damaged_cache_is_compiled_again(tmp_path, damage):
    cache = tmp_path / "cache"
    assert run(STATS, ROOT, NUMBA_CACHE_DIR=str(cache)).split() == ["1.0", "6.0", "3.0"]
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        if damage == "folder":
            path.unlink()
        elif path.suffix == (".nbi" if damage == "index" else ".nbc"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(STATS, ROOT, NUMBA_CACHE_DIR=str(cache)).split() == ["1.0", "6.0", "3.0"]


def test_import_workbench_imports_no_numba():
    run("import sys, workbench; assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules", ROOT)
