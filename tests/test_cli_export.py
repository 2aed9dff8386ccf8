"""``workbench export`` as people type it, in processes of its own where exit codes and streams matter."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from workbench import cli
from workbench.core import jsonsafe
from workbench.core.mesh.placement import Flat, Only, PartedShard, Replicate, Shard, StridedShard
from workbench.errors import UsageError
from workbench.export.sharding.rules_file import placement, read_rules


@pytest.fixture
def source(tmp_path):
    tensors = {"layers.0.q_proj.weight": torch.randn(8, 4), "odd": torch.randn(6, 2), "norm.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "in.safetensors")
    return str(tmp_path / "in.safetensors"), tensors


def run(capsys, *argv):
    code = cli.main(["export", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_export_says_what_it_wrote(source, tmp_path, capsys):
    path, tensors = source
    code, out, err = run(capsys, path, tmp_path / "out", "--verify")
    assert code == 0 and err == "" and "bit-identical to the source; verified by reading it back" in out
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    assert max(map(len, out.splitlines()[1:])) <= 100
    code, out, err = run(capsys, path, tmp_path / "out")
    assert code == 3 and out == "" and "exists" in err and "--overwrite" in err and err.count("\n") == 1


def test_a_dry_run_writes_nothing_and_tells_each_ranks_bytes(source, tmp_path, capsys):
    path, _ = source
    code, out, _ = run(capsys, path, tmp_path / "out", "--dry-run", "--tp", 2, "--json")
    told = json.loads(out)
    assert code == 0 and told["dry_run"] and not told["identical"] and not (tmp_path / "out").exists()
    assert [file["name"] for file in told["files"]] == [f"model-rank-0000{r}-of-00002.safetensors" for r in (0, 1)]
    assert told["read_nbytes"] == 2 * (16 + 12 + 4) * 4 and told["copies"] == 6 and told["mesh"] == "tp=2"
    assert any("odd" in note for note in told["notes"])  # not known by name: copied to both


def test_a_mesh_and_rules_of_ones_own(source, tmp_path, capsys):
    path, tensors = source
    rules = [{"pattern": "^odd$", "placements": {"tp": "Shard(1)"}}]
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    code, _, err = run(
        capsys, path, tmp_path / "out", "--mesh", "dp=1,tp=2", "--rules", tmp_path / "rules.json", "--no-manifest"
    )
    assert code == 0, err
    assert sorted(os.listdir(tmp_path / "out")) == [f"model-rank-0000{r}-of-00002.safetensors" for r in (0, 1)]
    got = load_file(tmp_path / "out" / "model-rank-00001-of-00002.safetensors")
    assert torch.equal(got["odd"], tensors["odd"][:, 1:])
    assert torch.equal(got["layers.0.q_proj.weight"], tensors["layers.0.q_proj.weight"][4:])


def test_names_from_a_file(source, tmp_path, capsys):
    path, _ = source
    (tmp_path / "names.json").write_text('{"odd": "even"}')
    code, *_ = run(capsys, path, tmp_path / "out.pt", "--to", "torch", "--rename", tmp_path / "names.json")
    assert code == 0 and "even" in torch.load(tmp_path / "out.pt", weights_only=True)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--to", "tensorflow"], 64, "choose safetensors"),
        (["--mesh", "tp=2", "--tp", "2"], 64, "both define the mesh; use only one"),
        (["--mesh", "tp=x"], 64, "is not a mesh axis"),
        (["--tp", "0"], 64, "is not a positive number"),
        (["--select", "("], 64, "not a valid regular expression"),
        (["--select", "zzz"], 64, "no tensor is selected"),
        (["--rules", "absent.json", "--tp", "2"], 64, "cannot be read"),
        (["--rename", "absent.json"], 64, "cannot be read"),
        (["--rename", "cat"], 64, "choose"),
        (["--dtype", "int8"], 64, "is not supported; choose"),
        (["--max-shard-size", "5 apples"], 64, "5 apples"),
        (["--max-shard-size", "1GB", "--tp", "2"], 64, "--max-shard-size is for a folder of safetensors"),
        (["--max-shard-size", "1GB", "--to", "dcp"], 64, "--max-shard-size is for a folder of safetensors"),
        (["--layers", "1,1"], 64, "pass one with --mesh"),
        (["--rank", "0"], 64, "--rank is for --to-device"),
    ],
)
def test_wrong_usage_is_one_line(source, tmp_path, capsys, argv, code, words):
    path, _ = source
    found, out, err = run(capsys, path, tmp_path / "out", *argv)
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_codes_without_a_scale_name_the_option(tmp_path, capsys):
    save_file({"model.q_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    code, out, err = run(capsys, tmp_path / "a.safetensors", tmp_path / "out", "--dtype", "bf16")
    assert (code, out) == (3, "") and err.endswith("its codes are its values: pass --unscaled\n")
    assert run(capsys, tmp_path / "a.safetensors", tmp_path / "out", "--dtype", "bf16", "--unscaled")[0] == 0


@pytest.mark.parametrize("option", [["--rename"], ["--hf-config"], ["--tp", "2", "--rules"]])
def test_what_is_no_small_regular_file_of_json_is_wrong_usage(source, tmp_path, capsys, monkeypatch, option):
    monkeypatch.setattr(jsonsafe.read_own, "__kwdefaults__", {"limit": 1000})
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "large.json").write_text("{" + " " * 1000 + "}")
    (tmp_path / "deep.json").write_text("[" * 900)
    (tmp_path / "twice.json").write_text('{"a": "b", "a": "c"}')
    for name, words in (
        ("zero", "not a regular file"),
        ("fifo", "not a regular file"),
        ("large", "more than 1,000 bytes"),
        ("deep", "not JSON"),
        ("twice", "twice"),
    ):
        found, out, err = run(capsys, source[0], tmp_path / "out", *option, str(tmp_path / f"{name}.json"))
        assert (found, out) == (64, "") and words in err and err.count("\n") == 1 and "checkpoint" not in err, err
        assert err.count(f"{name}.json") == 1 and "cannot be read" not in err
    monkeypatch.undo()
    (tmp_path / "deep.json").write_text("[" * 200_000)
    found, _, err = run(capsys, source[0], tmp_path / "out", *option, str(tmp_path / "deep.json"))
    assert found == 64 and "brackets nested too deeply" in err and "checkpoint" not in err


def test_placements_as_text():
    assert placement("Shard(-1)") == Shard(-1) and placement(" Replicate() ") == Replicate()
    assert placement("StridedShard(0, 2)") == StridedShard(0, 2) and placement("Flat()") == Flat()
    assert placement("PartedShard(0, 4, 2,2)") == PartedShard(0, (4, 2, 2)) and placement("Only(0,3)") == Only((0, 3))
    for wrong in ("Shard()", "Shard(0, 1)", "Only()", "shard(0)", "Shard(0", "__import__('os')", 3, None):
        with pytest.raises(UsageError, match="is not a placement"):
            placement(wrong)


@pytest.mark.parametrize(
    "document", ["{}", "[1]", '[{"pattern": 1}]', '[{"pattern": "x"}]', '[{"pattern": "x", "other": 1}]', "["]
)
def test_rules_that_are_none(tmp_path, document):
    (tmp_path / "rules.json").write_text(document)
    with pytest.raises(UsageError, match=r"rules\.json"):
        read_rules(tmp_path / "rules.json")


def test_the_facade_exports_too(source, tmp_path):
    path, _ = source
    with wb.open(path) as ckpt:
        report = wb.export(ckpt, tmp_path / "out", mesh=wb.Mesh(tp=2), dtype="bf16")
    assert "rounding changed" in str(report) and "<pre>" in report._repr_html_()


def test_onto_a_device(source, tmp_path, capsys):
    path, _ = source
    code, out, _ = run(capsys, path, "--to-device", "cpu", "--time", "--json", "--tp", 2, "--rank", 1)
    told = json.loads(out)
    assert code == 0 and told["tensors"] == 3 and told["nbytes"] == (16 + 12 + 4) * 4 and told["peak_gb_per_s"] > 0
    code, out, _ = run(capsys, path, "--to-device", "cpu", "--select", "norm", "--time")
    assert code == 0 and out.startswith("1 tensor, 16 B on cpu in ") and "GB/s" in out
    for argv in ([path], [path, tmp_path / "out", "--to-device", "cpu"], [path, "--to-device", "cpu", "--verify"]):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (64, "") and err.count("\n") == 1
    assert run(capsys, path, "--to-device", "nowhere")[0] == 64


def test_a_target_in_the_memory_of_the_process_is_refused(source, capsys):
    code, out, err = run(capsys, source[0], "memory://a/b")
    assert (code, out) == (64, "") and "ends with the command" in err
