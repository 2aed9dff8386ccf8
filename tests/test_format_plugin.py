"""A format of another package: the reader that docs/architecture.md shows, installed beside the workbench.

Nothing in the workbench knows it, and every command and the dashboard work on its files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import workbench as wb
from workbench import formats
from workbench.app.found import checkpoints
from workbench.app.jail import Jail
from workbench.app.registry import Registry
from workbench.app.state import WorkbenchState
from workbench.cli import main
from workbench.core.place import Place
from workbench.errors import NotACheckpointError, OpenError, UsageError

ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., tuple[int, str, str]]


def package(site: Path, name: str, entry: str, source: str) -> None:
    """An installed package of one module, with one entry point."""
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[workbench.formats]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages with the toy reader in it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = next(body for body in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if 'name="toy"' in body)
    folder = tmp_path / "site"
    folder.mkdir()
    package(folder, "toy_reader", "toy = toy_reader:FORMAT", source)
    monkeypatch.syspath_prepend(str(folder))
    formats.third_party.cache_clear()
    yield folder
    formats.third_party.cache_clear()
    sys.modules.pop("toy_reader", None)


def write(path: Path, step: int, **tensors: np.ndarray) -> Path:
    head = {"step": step, "tensors": {key: [str(array.dtype), array.shape] for key, array in tensors.items()}}
    path.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(array.tobytes() for array in tensors.values()))
    return path


@pytest.fixture
def run(tmp_path: Path, site: Path) -> Path:
    """A folder of two toy checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    norm = np.ones(4, np.float32)
    write(folder / "step-5.toy", 5, **{"layers.0.mlp.up_proj.weight": weight, "norm.weight": norm})
    write(folder / "step-6.toy", 6, **{"layers.0.mlp.up_proj.weight": weight + 1, "norm.weight": norm})
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def invoke(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return invoke


def test_it_opens_and_is_listed(run: Path) -> None:
    ckpt = wb.open(run / "step-5.toy")
    assert (ckpt.format, ckpt.step, dict(ckpt.objects)) == ("toy", 5, {"step": 5})
    assert np.array_equal(ckpt["layers.0.mlp.up_proj.weight"][1:, 2].numpy(), [6, 10])
    assert list(formats.FORMATS)[-1] == "toy" and formats.reader("toy").title == "toy files"
    assert [(one.path, one.format, one.step) for one in wb.runs.discover(run)] == [
        ("step-5.toy", "toy", 5),
        ("step-6.toy", "toy", 6),
    ]
    assert wb.open(run).notes == ["opened 'step-6.toy': the newest complete of 2 steps"]


def test_every_command_knows_it(run: Path, tmp_path: Path, call: Call) -> None:
    first, second = run / "step-5.toy", run / "step-6.toy"
    code, out, _ = call("formats")
    assert code == 0 and "toy files" in out
    code, out, _ = call("ls", run)
    assert code == 0 and out.count(" toy ") == 2
    code, out, _ = call("ls", first)
    assert code == 0 and out.startswith("toy ") and "up_proj" in out
    code, out, _ = call("show", first, "norm.weight")
    assert code == 0 and "f32" in out and "[1, 1, 1, 1]" in out
    code, out, _ = call("verify", first, "--deep")
    assert code == 0, out
    code, out, _ = call("layout", first, "--json")
    assert code == 0 and json.loads(out)
    code, out, _ = call("diff", first, second)
    assert code == 1 and "up_proj" in out
    code, out, err = call("doctor", first, second)
    assert code in (0, 1) and "toy" in out, err
    code, _, err = call("export", first, tmp_path / "out", "--to", "safetensors")
    assert code == 0, err
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["norm.weight"], np.ones(4, np.float32))


def test_a_process_of_its_own_finds_it(run: Path, site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "ls", str(run / "step-5.toy")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("toy ")


def test_the_dashboard_lists_and_opens_it(run: Path) -> None:
    found = checkpoints(Jail(run))
    assert found.paths == ["step-5.toy", "step-6.toy"] and found.texts[1][0].startswith("toy · step 5")
    state = WorkbenchState(Jail(run), Registry())
    state.show("step-5.toy")
    assert state.wait(30) and state.status == "open" and state.ckpt.format == "toy"
    state.close()


def test_a_layout_that_contains_a_format_of_ours_is_asked_before_it(site: Path, tmp_path: Path) -> None:
    source = "FORMAT = Format(name='nest', before=('safetensors',), detect=lambda place: 'nest.txt' in place.files)\n"
    package(site, "nest_reader", "nest = nest_reader:FORMAT", f"from workbench.formats import Format\n{source}")
    formats.third_party.cache_clear()
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert formats.detect(Place(tmp_path)) == "safetensors"
    (tmp_path / "nest.txt").touch()
    assert formats.detect(Place(tmp_path)) == "nest"


def test_a_file_with_the_name_of_a_format_of_ours_is_asked_for_too(site: Path, tmp_path: Path) -> None:
    source = "FORMAT = Format(name='other', before=('safetensors',), detect=lambda place: place.file is not None)\n"
    package(site, "other_reader", "other = other_reader:FORMAT", f"from workbench.formats import Format\n{source}")
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "any.safetensors")
    formats.third_party.cache_clear()
    assert formats.detect(Place(tmp_path / "any.safetensors")) == "other"
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert formats.detect(Place(tmp_path / "model.safetensors")) == "safetensors"  # plainly ours


def test_what_is_damaged_is_refused_by_the_same_checks(run: Path) -> None:
    path = run / "step-5.toy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(wb.errors.TruncatedError, match=r"norm\.weight"):
        wb.open(path)


@pytest.mark.parametrize(
    ("entry", "source", "why"),
    [
        ("bad = bad_reader:FORMAT", "import no_such_module\n", "cannot be loaded .*no_such_module"),
        ("bad = bad_reader:FORMAT", "FORMAT = 1\n", "is not a Format with that name"),
        (
            "dcp = bad_reader:FORMAT",
            "from workbench.formats import Format\nFORMAT = Format(name='dcp')\n",
            "a format of that name already exists",
        ),
        (
            "bad = bad_reader:FORMAT",
            "from workbench.formats import Format\nFORMAT = Format(name='bad', detect=lambda place: 1 / 0)\n",
            "failed at .*ZeroDivisionError",
        ),
    ],
)
def test_a_broken_package_is_named_and_breaks_nothing(
    site: Path, run: Path, entry: str, source: str, why: str, samples: Path
) -> None:
    package(site, "bad_reader", entry, source)
    formats.third_party.cache_clear()
    sys.modules.pop("bad_reader", None)
    name = entry.split()[0]
    assert wb.open(samples / "hf_llama_bf16_sharded").format == "safetensors"  # ours are asked first, and one is enough
    with pytest.warns(UserWarning, match=f"format '{name}' of another package.*{why}"):
        assert wb.open(samples / "titan_run").format == "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert wb.open(run).format == "toy"
        assert formats.reader("dcp").title == "PyTorch distributed checkpoint"


def test_what_another_reader_raises_is_an_error_of_ours(site: Path, run: Path) -> None:
    source = "FORMAT = Format(name='bad', single_file=True, suffixes=('.bad',), missing=lambda place: 1 / 0,\n"
    source += "    detect=lambda place: (place.file or '').endswith('.bad'), read_catalog=lambda place: {}['header'])\n"
    package(site, "bad_reader", "bad = bad_reader:FORMAT", f"from workbench.formats import Format\n{source}")
    formats.third_party.cache_clear()
    sys.modules.pop("bad_reader", None)
    (run / "step-9.bad").write_bytes(b"\0" * 64)
    assert (
        wb.open(run).notes[0].startswith("opened 'step-6.toy': the newest complete of 3 steps; 'step-9.bad' is incomp")
    )
    with pytest.raises(OpenError, match=r"'bad' of another package failed in read_catalog: KeyError: 'header'"):
        wb.open(run / "step-9.bad")


def test_a_name_without_a_reader_has_an_empty_record(site: Path) -> None:
    assert formats.record("made up") == formats.Format(name="made up")
    with pytest.raises(UsageError, match="did you mean 'toy'"):
        formats.reader("toi")
    with pytest.raises(NotACheckpointError, match="without a reader"):
        formats.record("made up").read_catalog(Place(site))
