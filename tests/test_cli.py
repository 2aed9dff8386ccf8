"""The command line: what it prints, what it imports, and how it ends when the input is bad."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from tests.properties import in_turn
from tests.range_server import RangeServer
from workbench import checkpoint
from workbench.cli import main
from workbench.cli.common import as_typed
from workbench.cli.show import locate, parse_slice
from workbench.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
ESCAPES = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def run(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user starts it."""
    there = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **env}
    command = [sys.executable, "-m", "workbench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=there, cwd=ROOT, timeout=120)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """The command in this process: exit code, stdout, stderr."""

    def invoke(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return invoke


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one.safetensors"
    tensors = {
        "w": torch.arange(24.0).reshape(4, 6),
        "w[0]": torch.tensor([7.0]),
        "half": torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.bfloat16),
        "esc\x1b[2J\u202e": torch.ones(2),
    }
    save_file(tensors, path)
    return path


def json_of(call, *words: object):
    code, out, _ = call(*words, "--json")
    assert code == 0
    assert out.isascii() and out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ---- what it prints ------------------------------------------------------------------------------------------------


def test_formats(call) -> None:
    code, out, _ = call("formats")
    names = [row["name"] for row in json_of(call, "formats")]
    assert code == 0 and names == list(wb.formats.FORMATS) and all(name in out for name in names)


def test_ls_tree_and_flat(call, samples: Path) -> None:
    path = samples / "hf_llama_bf16_sharded"
    code, out, err = call("ls", path)
    assert (code, err) == (0, "")
    assert "safetensors" in out.splitlines()[0] and "model" in out and "×" in out
    ckpt = wb.open(path)
    code, out, _ = call("ls", path, "--flat")
    assert [line.split()[0] for line in out.splitlines()] == list(ckpt)
    code, out, _ = call("ls", path, "--flat", "q_proj", r"norm\.")
    assert [line.split()[0] for line in out.splitlines()] == [k for k in ckpt if re.search(r"q_proj|norm\.", k)]
    code, out, _ = call("ls", path, "--depth", 1)
    assert len(out.splitlines()) == 1 + len({key.split(".")[0] for key in ckpt})


def test_ls_json_rows_are_those_of_the_data_frame(call, samples: Path) -> None:
    for name in ("dcp_fsdp2", "hf_deepseek_fp8_block"):
        ckpt = wb.open(samples / name)
        document = json_of(call, "ls", samples / name)
        assert (document["format"], document["step"]) == (ckpt.format, ckpt.step)
        truth = json.loads(ckpt.tensors.to_json(orient="records"))
        assert document["tensors"] == truth
        roles = json_of(call, "ls", samples / name, "--role", "param")["tensors"]
        assert roles == [row for row in truth if row["role"] == "param"]


def test_ls_of_a_root_lists_its_checkpoints(call, samples: Path) -> None:
    code, out, _ = call("ls", samples)
    assert code == 0 and re.search(r"titan_run/step-4 +dcp +4 .* yes", out)
    rows = {row["path"]: row for row in json_of(call, "ls", samples)["checkpoints"]}
    assert rows["trainer_run/checkpoint-6"]["step"] == 6 and rows["trainer_run/checkpoint-6"]["complete"] is True


def test_an_interrupted_save_is_listed_as_such(call, tmp_path: Path, samples: Path) -> None:
    for step in (2, 4):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        for file in (samples / f"titan_run/step-{step}").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "step-4" / ".metadata").unlink()
    code, out, _ = call("ls", tmp_path)
    assert code == 0 and re.search(r"step-2 .* yes", out) and re.search(r"step-4 .* no: .*\.metadata is missing", out)
    code, out, err = call("ls", tmp_path, "--flat", "wq")
    assert code == 0 and "wq" in out
    assert err.startswith("note: opened 'step-2'") and "step-4" in err  # which one, and why not the newer


def test_show_prints_line_chunks_and_values(call, samples: Path) -> None:
    key = "model.model.embed_tokens.weight"
    code, out, _ = call("show", samples / "dcp_fsdp2", f"{key}[126:130, -1]")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(f"{key} [4] f32")
    assert lines[1].startswith("  [0, 0] + [128, 64]  __0_0.distcp bytes 0–") and len(lines) == 1 + 2 + 1 + 1
    assert lines[2].startswith("  [128, 0]") and lines[3] == "  2 other chunks of the tensor"
    from safetensors.torch import load_file

    truth = load_file(samples.parent / "tests/truth/dcp_fsdp2.safetensors")[key][126:130, -1]
    assert [float(word) for word in lines[-1].strip("[]").split(",")] == pytest.approx(truth.tolist(), rel=1e-4)


def test_show_json(call, samples: Path, one: Path) -> None:
    key = "model.model.embed_tokens.weight"
    document = json_of(call, "show", samples / "dcp_fsdp2", f"{key}[2:4, :3]")
    tensor = wb.open(samples / "dcp_fsdp2")[key]
    assert document["values"] == tensor[2:4, :3].tolist() and document["shape"] == [2, 3]
    assert document["chunks"] == json.loads(tensor.chunks.to_json(orient="records"))
    assert document["stats"]["exact"] is True and document["stats"]["min"] == tensor[2:4, :3].min().item()
    assert json_of(call, "show", samples / "dcp_fsdp2", key)["values"] is None  # 32,768 are too many
    document = json_of(call, "show", one, "half")
    assert document["values"] == [1.5, "nan", "-inf"] and document["stats"]["nan"] == 1


def test_stats_json_tells_what_is_not_a_number_from_what_is_not_known(call, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    tensors = {"n": [1.0, nan], "i": [1.0, -inf], "a": [nan, nan], "e": []}
    save_file({k: torch.tensor(v) for k, v in tensors.items()}, tmp_path / "x.safetensors")
    rows = {row["key"]: row for row in json_of(call, "stats", tmp_path / "x.safetensors")["rows"]}
    assert [rows["n"][name] for name in ("min", "norm", "rms", "nan")] == [1.0, "nan", "nan", 1]
    assert [rows["i"][name] for name in ("max", "norm", "rms", "neginf")] == [1.0, "inf", "inf", 1]
    assert [rows["a"][name] for name in ("min", "mean", "norm", "error")] == [None, None, "nan", None]
    assert rows["e"]["max"] is None


def test_objects(call, samples: Path) -> None:
    code, out, _ = call("objects", samples / "dcp_fsdp2")
    assert code == 0 and "optim.param_groups.0.lr: 0.001" in out.splitlines()
    found = json_of(call, "objects", samples / "dcp_fsdp2", "optim.param_groups.0")["objects"]
    assert found["optim.param_groups.0.betas"] == [0.9, 0.95] and "optim.param_groups.1.betas" not in found
    code, _, err = call("objects", samples / "dcp_fsdp2", "absent")
    assert code == 64 and err.count("\n") == 1 and "'absent'" in err


def test_every_sample_lists_shows_and_tells_its_objects(call, samples: Path) -> None:
    for row in json_of(call, "ls", samples)["checkpoints"]:
        if row["path"].startswith("logs/"):
            continue  # files of unrelated checkpoints side by side: names are there twice; a state without weights
        path = samples / row["path"]
        first = json_of(call, "ls", path, ".")["tensors"][0]["key"]
        for words in (("ls", path, "."), ("show", path, first), ("objects", path)):
            code, _, err = call(*words)
            assert code == 0 and all(line.startswith("note: ") for line in err.splitlines()), words
            json_of(call, *words)


# ---- KEY[SLICE] ----------------------------------------------------------------------------------------------------

ends = st.one_of(st.none(), st.integers(-7, 7))
parts = st.one_of(
    st.integers(-3, 2).map(str),
    st.just("..."),
    st.tuples(ends, ends, st.one_of(st.none(), st.sampled_from([1, 2, 3, -1, -2]))).map(
        lambda row: ":".join("" if n is None else str(n) for n in (row if row[2] is not None else row[:2]))
    ),
)


@given(st.lists(parts, min_size=1, max_size=3), st.sampled_from(["", " "]))
def test_slices_mean_what_they_mean_in_numpy(words: list[str], space: str) -> None:
    text = f"{space},{space}".join(words)
    dense = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    try:
        truth = eval(f"dense[{text}]")
    except IndexError:
        truth = None  # two ellipses
    key = parse_slice(text)
    if truth is not None:
        assert np.array_equal(dense[key], truth)
    else:
        with pytest.raises(IndexError):
            dense[key]


def test_lists_are_indices_too() -> None:
    assert parse_slice(" [0, -2] , : ") == ([0, -2], slice(None))
    assert parse_slice("[]") == ([],)


@pytest.mark.parametrize(
    "text", ["", ",", "1,,2", "a", "1;2", "[1,[2]]", "1]", "1:2:3:4", "1.0", "None", "__import__('os')"]
)
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_slice(text)


def test_a_key_may_hold_brackets(one: Path) -> None:
    ckpt = wb.open(one)
    assert locate(ckpt, "w[0]")[0].key == "w[0]"
    assert [locate(ckpt, "w[0][:]")[0].key, locate(ckpt, "w[1]")[0].key] == ["w[0]", "w"]
    assert locate(ckpt, "w[[0, 1], 2]")[1] == ([0, 1], 2)
    assert locate(ckpt, r"esc\x1b[2J\u202e[0]")[0].key == "esc\x1b[2J\u202e"  # as it was printed


@pytest.mark.parametrize("text", ["w[", "w[0:1", "w[0:1]x", "w[0, 0:1"])
def test_a_slice_without_its_bracket_is_not_the_whole_tensor(one: Path, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{text[1:]!r} is not a slice: brackets do not match")):
        locate(wb.open(one), text)


# ---- how it ends ---------------------------------------------------------------------------------------------------


def one_line(result: tuple[int, str, str] | subprocess.CompletedProcess[str], code: int) -> str:
    """Checks the contract of a failure and returns the line."""
    if isinstance(result, subprocess.CompletedProcess):
        result = (result.returncode, result.stdout, result.stderr)
    assert result[0] == code, result
    assert result[1] == "" and result[2].count("\n") == 1 and result[2].startswith("workbench"), result
    assert not ESCAPES.search(result[2]) and "Traceback" not in result[2]
    return result[2]


def test_wrong_usage_is_64(call, one: Path) -> None:
    for words in (
        (),
        ("frobnicate",),
        ("ls",),
        ("ls", one, "--bogus\x1b[2J"),
        ("ls", one, "("),
        ("ls", one, "--depth", "0"),
        ("ls", one, "--format", "nonsense"),
        ("show", one, "w[1.5]"),
        ("show", one, "w[9]"),
        ("show", one, "w[0,0,0]"),
        ("show", one, "w[::0]"),
        ("serve", one.parent, "--port", "70000"),
    ):
        one_line(call(*words), 64)
    assert "required: b;" in one_line(call("diff", one), 64)  # not the patterns, which may be left out


LOCAL: list[tuple[str, ...]] = [
    ("ls", "CKPT", "w"),
    ("show", "CKPT", "w"),
    ("objects", "CKPT"),
    ("stats", "CKPT", "--by", "module"),
    ("verify", "CKPT"),
    ("manifest", "write", "CKPT", "--output", "m.json"),
    ("diff", "CKPT", "CKPT"),
    ("layout", "CKPT"),
    ("export", "CKPT", "out", "--dry-run"),
    ("report", "CKPT", "-o", "page.html"),
    ("watch", "CKPT", "--once", "--interval", "0.01"),
]


@pytest.mark.parametrize("words", LOCAL, ids=lambda words: words[0])
def test_storage_options_are_for_the_paths_of_a_command_and_a_cache_is_for_its_urls(
    call, one: Path, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(one) if word == "CKPT" else word for word in words]
    assert call(*given, "--cache-dir", tmp_path / "cache")[0] == 0 and not (tmp_path / "cache").exists()
    assert f"--storage-option is for URLs, and {str(one)!r} is a local path" in one_line(
        call(*given, "--storage-option", "region=x"), 64
    )


def test_a_url_is_shown_without_its_secrets(call, samples: Path, tmp_path: Path, monkeypatch) -> None:
    titles: list[str] = []

    @contextmanager
    def titled(title: str) -> Iterator[object]:
        titles.append(title)
        yield lambda share: None

    for module in ("verify", "seal", "manifest"):
        monkeypatch.setattr(f"workbench.cli.{module}.progress_bar", titled)
    with RangeServer(samples) as server:
        at = server.url.replace("://", "://usr:s3cret@") + "/titan_run"
        results = [
            call("ls", at, "--json"),
            call("diff", f"{at}/step-4", f"{at}/step-2"),
            call("verify", at + "/step-4"),
        ]
        assert json.loads(results[0][1])["root"] == f"{server.url}/titan_run"
        assert f"note: a is '{server.url}/titan_run/step-2'" in results[1][2]
        one, manifest = f"{at}/step-4/__0_0.distcp?sig=s3cret", tmp_path / "m.json"
        results += [call("seal", f"{at}/step-4"), call("manifest", "write", f"{at}/step-4", "--output", manifest)]
        results += [call("manifest", "check", one, manifest)]
        page = tmp_path / "run.html"
        results += [call("report", at, "-o", page), call("doctor", at, "--json"), call("doctor", f"{at}/step-4")]
        assert [code for code, _, _ in results[-3:]] == [0, 0, 0]
        results += [(0, page.read_text("utf-8"), "")]
    assert titles == [
        f"verify {server.url}/titan_run/step-4",
        f"seal {server.url}/titan_run/step-4",
        "manifest step-4",
        "check __0_0.distcp",
    ]
    assert "s3cret" not in str(results)


def test_storage_options_reach_the_urls_of_any_argument(call, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.core.remote.url import current_options

    monkeypatch.setattr("workbench.cli.diff.diff", lambda options: seen.append(dict(current_options())) or 0)
    monkeypatch.setattr("workbench.cli.export.export", lambda options: seen.append(dict(current_options())) or 0)
    seen: list[dict[str, object]] = []
    for words in (("diff", one, "s3://b/k"), ("export", one, "s3://b/k"), ("export", "s3://b/k", "out", "--lora", one)):
        assert call(*words, "--storage-option", "region=x", "--cache-dir", "c")[0] == 0
    assert seen == [{"region": "x", "cache_dir": "c"}] * 3
    assert call("diff", one, one, "s3://is-a-pattern", "--storage-option", "region=x")[0] == 64


def test_help_and_version_are_0(call) -> None:
    code, out, _ = call("--version")
    assert (code, out) == (0, f"workbench {wb.__version__}\n")
    for words in ([], ["ls"], ["show"], ["objects"], ["formats"], ["serve"]):
        code, out, _ = call(*words, "--help")
        assert code == 0 and "usage: workbench" in out


def test_bad_input_is_3_and_one_line(call, tmp_path: Path, one: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "zero.safetensors").write_bytes(b"")
    (tmp_path / "cut.safetensors").write_bytes(one.read_bytes()[:-4])
    (tmp_path / "huge.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    (tmp_path / "deep.safetensors").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in ("absent", "empty", "text.txt", "zero.safetensors", "cut.safetensors", "huge.safetensors", "loop"):
        for command in ("ls", "objects"):
            assert path in one_line(call(command, tmp_path / path), 3)
    one_line(call("ls", tmp_path / "deep.safetensors"), 3)
    one_line(call("ls", "nul\0byte"), 3)
    one_line(call("ls", "esc\x1b[2J\n\u202e"), 3)
    line = one_line(call("show", one, "halv"), 64)
    assert "did you mean 'half'" in line
    for wrong, meant in [
        ("verfy x", "verify"),
        (f"ls {one} --format safetensor", "safetensors"),
        (f"stats {one} --by modul", "module"),
        (f"stats {one} --sort nor", "norm"),
        (f"ls {one} --role parm", "param"),
    ]:
        assert f"did you mean '{meant}'" in one_line(call(*wrong.split()), 64)


def test_diff_of_a_pattern_that_matches_nothing_is_an_error(call, samples):
    a, b = samples / "titan_run" / "step-2", samples / "titan_run" / "step-4"
    code, out, err = call("diff", a, b, r"layer\.0")
    words = r"no tensor of either checkpoint matches 'layer\\.0'; `workbench ls` lists their names"
    assert code == 64 and out == "" and words in err and err.count("\n") == 1 and "(?:" not in err


def test_diff_notes_once_which_side_a_pattern_matches_nothing_of(call, tmp_path):
    for name in "ab":
        save_file({f"{name}.w": torch.ones(2), "both.w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    code, _, err = call("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", r"^a\.")
    assert (
        code == 1 and err.count("\n") == 1 and "b.safetensors' has a name that matches '^a" in err and "(?:" not in err
    )


@pytest.mark.parametrize("command", ["ls", "stats", "layout"])
def test_a_pattern_that_matches_nothing_is_wrong_usage(call, samples, command):
    path = samples / "dcp_fsdp2"
    code, out, err = call(command, path, "zzzz", "yyyy")
    assert code == 64 and out == "" and err.count("\n") == 1
    assert f"none of 162 tensors in '{path}' has a name that matches 'zzzz' or 'yyyy'; the stored roles are" in err
    assert call(command, path, "zzzz", "lm_head")[0] == 0  # one of them does


def test_a_target_that_cannot_be_written_is_one_exit_code(call, samples, tmp_path):
    missing, source = tmp_path / "missing", samples / "hf_peft_lora"
    for argv in (
        ("export", source, missing / "x"),
        ("manifest", "write", source, "--output", missing / "x.json"),
        ("stats", source, "--part", "1/2", "--part-file", missing / "x"),
        ("report", source, "-o", missing / "x.html"),
    ):
        code, out, err = call(*argv)
        assert (code, out) == (3, "") and err.count("\n") == 1, argv


@pytest.mark.parametrize(
    "words", [("diff", "{}", "{}", "--part", "1/2"), ("ls", "{}", "--fla"), ("layout", "{}", "--part", "1/2")]
)
def test_an_option_is_written_out(call, samples, words):
    path = samples / "dcp_fsdp2"
    code, out, err = call(*(word.format(path) for word in words))
    option = next(word for word in words if word.startswith("--"))
    assert (code, out) == (64, "") and f"there is no option {option}" in err


def test_an_empty_path_is_not_the_current_directory(call, samples, monkeypatch):
    monkeypatch.chdir(samples / "dcp_fsdp2")
    assert call("ls", ".")[0] == 0
    for words in (("ls", ""), ("verify", ""), ("doctor", "")):
        code, out, err = call(*words)
        assert (code, out) == (64, "") and "the path is empty" in err


def test_a_damaged_checkpoint_is_not_sealed_as_verify_says(call, samples, tmp_path):
    shutil.copytree(samples / "dcp_fsdp2", tmp_path / "c")
    (tmp_path / "c" / "__1_0.distcp").unlink()
    for extra in ((), ("--partial",)):
        code, out, err = call("seal", tmp_path / "c", *extra)
        *notes, line = err.splitlines()
        assert (code, out) == (2, "") and "is not sealed" in line and "__1_0.distcp" in line
        assert [one.startswith("note: opened in part") for one in notes] == [True] * len(extra)
        assert ("with --partial to read the rest" in err) == (not extra) and "partial=True" not in err
    assert "1 error was found" in err
    assert call("verify", tmp_path / "c")[0] == 2
    assert call("seal", tmp_path / "absent")[0] == 3 == call("verify", tmp_path / "absent")[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--tp", "2"), "--tp is for --fit GPUS GB"),
        (("--inference",), "--inference is for --fit GPUS GB"),
        (("--rank", "0", "--tensor", "x"), "--tensor and --rank"),
        (("--fit", "8", "1", "--role", "param"), "leave out patterns and --role"),
    ],
)
def test_layout_refuses_options_without_effect(call, samples, argv, words):
    code, out, err = call("layout", samples / "dcp_fsdp2", *argv)
    assert (code, out) == (64, "") and words in err


def test_messages_name_options_where_python_has_arguments():
    lost = "file 'a b' is missing; restore it, or open with partial=True to read the rest"
    assert as_typed(lost) == "file 'a b' is missing; restore it, or open with --partial to read the rest"
    assert as_typed(lost, partial=True) == "file 'a b' is missing; restore it"
    assert as_typed("pass unscaled=True") == "pass --unscaled" and as_typed("use dtype=, or") == "use --dtype, or"
    assert as_typed("by select=['x'], role='model'; x") == "by --select ['x'], --role 'model'; x"
    for path in ("'run/rank=0/role=x'", "'rank=0'", "dp_rank=0"):
        assert as_typed(f"{path} is not a checkpoint") == f"{path} is not a checkpoint"


def test_diff_tells_what_changed_in_the_order_of_time(call, samples: Path) -> None:
    older, newer = samples / "titan_run" / "step-2", samples / "titan_run" / "step-4"
    forward, backward = call("diff", older, newer), call("diff", newer, older)
    assert forward[:2] == backward[:2] and "2 → 4" in forward[1] and forward[2] == ""
    words = "(step 2), the older of the two: changes are shown from old to new"
    assert backward[2].count("\n") == 1 and words in backward[2]
    document = json.loads(call("diff", newer, older, "--json")[1])
    assert [document["a"]["step"], document["b"]["step"]] == [2, 4]


def test_a_truncated_file_opens_in_part(call, tmp_path: Path, one: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(one.read_bytes()[:-4])
    line = one_line(call("ls", cut), 3)
    assert "partial" in line
    code, out, _ = call("ls", cut, "--partial", "--flat")
    assert code == 0 and len(out.splitlines()) == 4
    ends = [call("show", "--partial", cut, key)[0] for key in wb.open(cut, partial=True)]
    assert sorted(ends) == [0, 0, 0, 3]


def test_verify_opens_as_the_options_say(call, tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []
    plain = checkpoint.open_place
    monkeypatch.setattr(checkpoint, "open_place", lambda path, **how: ways.append(how) or plain(path, **how))
    path = samples / "hf_llama_bf16_sharded"
    code, out, _ = call("verify", path, "--deep", "--json", "--format", "safetensors")
    assert ways == [{"format": "safetensors", "cache": False}]
    assert code == 0 and out == call("verify", path, "--deep", "--json")[1]
    assert "open.unrecognised" in call("verify", path, "--format", "dcp")[1]
    assert "'nonsense'" in one_line(call("verify", path, "--format", "nonsense"), 64)

    folder = shutil.copytree(samples / "dcp_fsdp2", tmp_path / "c")
    (folder / "__2_0.distcp").unlink()
    code, out, _ = call("verify", folder, "--partial")
    assert code == 2 and (code, out) == call("verify", folder)[:2]


def test_a_forced_format_that_it_is_not_is_no_interrupted_save(call, tmp_path: Path, one: Path, samples: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, format, looks in (
        (one, "dcp", "it looks like safetensors"),
        (one, "megatron_dist", "it looks like safetensors"),
        (samples / "torch_save/ckpt.pt", "dcp", "it looks like torch_save (torch.save)"),
        (samples / "torch_save/ckpt.pt", "safetensors", "it looks like torch_save (torch.save)"),
        (samples / "dcp_fsdp2", "megatron_dist", "it looks like dcp"),
        (empty, "dcp", "looked for .metadata"),
    ):
        line = one_line(call("ls", path, "--format", format), 3)
        assert f"is not a {format} checkpoint" in line and looks in line and "interrupted" not in line, line
    for format in wb.formats.FORMATS:
        assert "empty" in one_line(call("ls", empty, "--format", format), 3)
    interrupted = shutil.copytree(samples / "dcp_fsdp2", tmp_path / "c")
    (interrupted / ".metadata").unlink()
    assert "interrupted" in one_line(call("ls", interrupted, "--format", "dcp"), 3)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(b"\xff" * 9)
    assert "header" in one_line(call("ls", cut, "--format", "safetensors"), 3)  # what is wrong with its bytes


def test_a_foreign_pickle_is_not_run(tmp_path: Path, call) -> None:
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload()))
    one_line(call("ls", tmp_path, "."), 3)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": Payload()}))
        archive.writestr("x/version", "3\n")
    call("objects", tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_links_that_circle_end(tmp_path: Path, call) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    one_line(call("ls", tmp_path), 3)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path, one: Path, call) -> None:
    one.chmod(0)
    one_line(call("ls", one), 3)


def test_names_cannot_reach_the_terminal(call, one: Path) -> None:
    for words in (("ls", one), ("ls", one, "--flat"), ("show", one, "esc\x1b[2J\u202e"), ("show", one, "esc")):
        _, out, err = call(*words)
        assert not ESCAPES.search(out + err)
    assert r"esc\x1b[2J\u202e" in call("ls", one, "--flat")[1]
    assert json_of(call, "show", one, "esc\x1b[2J\u202e")["key"] == "esc\x1b[2J\u202e"


def test_no_colours_in_pipes(call, samples: Path) -> None:
    assert "\x1b" not in run("ls", samples).stdout


def test_recursion_memory_and_interrupt_end_in_order(call, monkeypatch: pytest.MonkeyPatch, one: Path) -> None:
    for error, code in ((RecursionError, 3), (MemoryError, 3), (KeyboardInterrupt, 130)):

        def fail(*_, error=error):
            interrupted = error()
            interrupted.add_note("the store holds a part of it")
            raise interrupted

        monkeypatch.setattr("workbench.cli.list.ls", fail)
        got = call("ls", one)
        assert got[0] == code and "Traceback" not in got[2]
        assert error is not KeyboardInterrupt or got[2] == "workbench: the store holds a part of it\n"
    monkeypatch.setattr("workbench.cli.list.ls", lambda _: {}["a bug"])
    with pytest.raises(KeyError):  # a bug of ours is not dressed up as bad input
        call("ls", one)


# ---- in a process of its own ---------------------------------------------------------------------------------------


def test_failures_in_a_real_process(tmp_path: Path, one: Path) -> None:
    one_line(run("ls", tmp_path / "absent"), 3)
    one_line(run("show", one, "w[1.5]"), 64)
    one_line(run("ls", one, "--bogus"), 64)


def test_other_encodings_get_every_name(one: Path) -> None:
    result = run("show", one, "w[1]", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.returncode == 0 and "\\u2208" in result.stdout  # ∈


def test_a_closed_pipe_is_no_traceback(samples: Path) -> None:
    script = f"'{sys.executable}' -m workbench ls --flat '{samples}/dcp_fsdp2' | head -1; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, cwd=ROOT, timeout=60)
    assert result.stderr == "" and result.stdout.splitlines()[1] in ("141", "0")


@pytest.mark.parametrize("name", ["hf_llama_bf16_sharded", "dcp_fsdp2", "dcp_tp2_fsdp2_vocab515"])
def test_listing_and_showing_need_no_heavy_package(samples: Path, name: str) -> None:
    code = (
        "import sys; from workbench.cli import main\n"
        "assert main(['ls', sys.argv[1]]) == main(['show', sys.argv[1], sys.argv[2]]) == 0\n"
        "print(sorted({'torch', 'pandas', 'panel', 'bokeh', 'holoviews'} & set(sys.modules)), file=sys.stderr)"
    )
    key = next(iter(wb.open(samples / name)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(samples / name), key], capture_output=True, text=True, env=env, timeout=60
    )
    assert result.stderr.splitlines()[-1] == "[]"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_stream_that_cannot_be_written_has_one_exit_code(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    for words, code in (
        ("ls nope 2>/dev/full", 3),
        ("--help >/dev/full", 3),
        ("--json ls a.safetensors >/dev/full 2>/dev/full", 3),
        ("diff a.safetensors a.safetensors >&-", 0),
        ("diff a.safetensors b.safetensors >/dev/full", 3),
        ("ls a.safetensors nosuch 2>/dev/full", 64),
    ):
        command = f"{sys.executable} -m workbench {words}"
        path = os.pathsep.join([str(Path(wb.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            ["sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert done.returncode == code and "Traceback" not in done.stderr, (words, done)


@pytest.mark.parametrize(
    ("closed", "words"),
    in_turn(["1", "2", "1>&- 2", "0<&- 1>&- 2"], ["ls", "verify", "ls --json", "--help", "formats"], 2),
)
def test_a_closed_stream_is_no_traceback(closed, words, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    path = "" if words in ("--help", "formats") else str(tmp_path)
    command = f"{sys.executable} -m workbench {words} {path} {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done


def test_a_slice_of_many_digits_is_not_printed_whole(call, one: Path) -> None:
    line = one_line(call("show", one, f"w[{'9' * 300_000}]"), 64)
    assert len(line) < 500 and "up to 19 digits" in line


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, *words: object) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", Terminal())
    main([str(word) for word in words])
    return sys.stdout.getvalue()


@pytest.mark.parametrize("command", ["verify", "doctor", "layout"])
def test_a_narrow_terminal_gets_whole_words_in_narrow_lines(command, samples, monkeypatch):
    path = samples / ("loss_spike" if command == "doctor" else "dcp_fsdp2")
    monkeypatch.chdir(samples)
    monkeypatch.setenv("NO_COLOR", "1")
    wide = on_terminal(monkeypatch, 200, command, path.name)
    narrow = on_terminal(monkeypatch, 60, command, path.name)
    assert narrow.split() == wide.split()
    assert 60 < max(map(len, wide.splitlines())) <= 100
    assert all(len(line) <= 60 or len(line.split()) == 1 for line in narrow.splitlines())
    document = on_terminal(monkeypatch, 60, command, path.name, "--json")
    assert len(document.splitlines()) == 1 and json.loads(document)


def test_in_a_pipe_no_name_is_cut_or_broken(tmp_path, call):
    long, folder = f"first.{'a_module_with_a_long_name.' * 9}last", tmp_path / f"begin{'_and_a_long_name' * 9}_end"
    folder.mkdir()
    save_file({long: torch.full((4,), torch.nan)}, folder / "model.safetensors")
    save_file({long: torch.ones(4)}, tmp_path / "model.safetensors")
    one = (["verify", "--deep"], ["doctor"], ["doctor", "--all"], ["layout"], ["stats"], ["ls", "--flat"])
    two = (["diff", tmp_path, folder], ["export", folder, f"{folder}.copy", "--dry-run"])
    for command in (*([*words, folder] for words in one), *two):
        _, out, _ = call(*command)
        assert out.count(long) + out.count(folder.name), command
        assert (out.count(long), out.count(folder.name)) == (out.count("first."), out.count("begin_")), (command, out)


def test_differences_come_before_what_only_one_side_has(samples, call):
    _, out, _ = call("diff", samples / "dcp_fsdp2", samples / "hf_llama_bf16_sharded")
    assert out.index("rel L2") < out.index("only in a: optim")
