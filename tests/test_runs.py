"""Discovery: what lies under a folder, what is complete, and which step of a run is opened."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import workbench as wb
from tests.fresh import deepspeed_like as like
from workbench.cli import main
from workbench.core.place import Place
from workbench.errors import CorruptError, IncompleteError, NotACheckpointError, OpenError, UnsafeError
from workbench.names.steps import step_of
from workbench.runs import Found, pick
from workbench.runs import discover as find

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # no_dist=True asks for it


def save_dcp(path: Path, value: float = 1.0) -> Path:
    dcp.save({"w": torch.full((3,), value)}, checkpoint_id=path, no_dist=True)
    return path


def run(root: Path, *steps: int, name: str = "step-{}") -> Path:
    for step in steps:
        save_dcp(root / name.format(step), step)
    return root


def by_path(root: Path, **more: int) -> dict[str, Found]:
    return {item.path: item for item in find(root, **more)}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-48000", 48000),
        ("step_12", 12),
        ("checkpoint-6", 6),
        ("iter_0000100", 100),
        ("global_step3", 3),
        ("epoch_2", 2),
        ("epoch=3-step=100.ckpt", 100),
        ("runs/step-4/model", 4),
        ("checkpoint_0", 0),
        ("llama-ckpt-7.pt", 7),
        ("model", None),
        ("footstep-3x", None),
        ("v2", None),
        ("step-", None),
        ("step-5/epoch", 5),
        ("global_step" + "9" * 30, None),
    ],
)
def test_steps_are_read_off_names(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_everything_under_a_root_is_listed_with_size_step_and_completeness(tmp_path: Path) -> None:
    run(tmp_path / "titan", 2, 10)
    (tmp_path / "titan" / "step-10" / ".metadata").unlink()
    (tmp_path / "export").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "export" / "model.safetensors")
    (tmp_path / "files").mkdir()
    torch.save({"w": torch.ones(4)}, tmp_path / "files" / "last.pt")
    (tmp_path / "files" / "notes.txt").write_text("no checkpoint")
    (tmp_path / "files" / "fake.pt").write_text("no checkpoint either")
    found = by_path(tmp_path)
    assert list(found) == ["export", "files/last.pt", "titan/step-2", "titan/step-10"]
    assert [item.format for item in found.values()] == ["safetensors", "torch_save", "dcp", "dcp"]
    assert [item.step for item in found.values()] == [None, None, 2, 10]
    assert [item.complete for item in found.values()] == [True, True, True, False]
    assert found["titan/step-10"].why == ".metadata is missing"
    size = sum(path.stat().st_size for path in (tmp_path / "titan" / "step-2").iterdir())
    assert found["titan/step-2"].nbytes == size
    newest = max(path.stat().st_mtime for path in (tmp_path / "titan" / "step-2").iterdir())
    assert abs(found["titan/step-2"].mtime - newest) < 1e-3


def test_files_that_the_metadata_names_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the files that a small ``.metadata`` names; longer strings that only contain such a name are none."""
    lost = save_dcp(tmp_path / "lost")
    torch_names = {"w": torch.ones(2), "x/__7_0.distcp": torch.ones(2), "__8_0.distcp.ema": torch.ones(2)}
    dcp.save(torch_names, checkpoint_id=tmp_path / "odd", no_dist=True)
    (file,) = lost.glob("*.distcp")
    found = by_path(tmp_path)
    assert found["lost"].complete and found["odd"].complete
    file.write_bytes(b"")
    assert by_path(tmp_path)["lost"].why == f"1 of 1 data files is missing or empty: '{file.name}'"
    file.unlink()
    assert not by_path(tmp_path)["lost"].complete and by_path(tmp_path)["odd"].complete
    monkeypatch.setattr("workbench.formats.dcp.reader.NAMES_UP_TO", 10)
    assert by_path(tmp_path)["lost"].complete


def test_the_headers_of_the_first_shards_must_hold_what_the_index_lists(tmp_path: Path) -> None:
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, name in zip(files, "ab", strict=True):
        save_file({name: torch.ones(4)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    assert by_path(tmp_path)["."].complete
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", files[0])}))
    why = f"'{files[0]}' lacks 1 tensor that 'model.safetensors.index.json' maps to it: 'b'"
    assert by_path(tmp_path)["."].why == why
    index.write_text(json.dumps({"weight_map": dict(zip("ab", files, strict=True))}))
    (tmp_path / files[1]).write_bytes((tmp_path / files[1]).read_bytes()[:-1])
    assert "truncated" in by_path(tmp_path)["."].why


def test_the_size_of_a_checkpoint_leaves_out_the_checkpoints_in_its_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "checkpoint-10"):
        folder.mkdir(exist_ok=True)
        save_file({"w": torch.ones(400)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "vocabulary.txt").write_text("abc")  # no checkpoint
    found = by_path(tmp_path)
    own = sum((tmp_path / "checkpoint-10" / name).stat().st_size for name in ("model.safetensors", "config.json"))
    assert found["checkpoint-10"].nbytes == own and found["."].nbytes == own + 3


def test_a_checkpoint_itself_is_found_as_a_dot(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-3")
    (item,) = find(tmp_path / "step-3")
    assert (item.path, item.step, item.complete) == (".", 3, True)
    torch.save({"w": torch.ones(1)}, tmp_path / "step-3.pt")
    (item,) = find(tmp_path / "step-3.pt")
    assert (item.path, item.format, item.step) == (".", "torch_save", 3)


def test_depth_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp(tmp_path / "a" / "b" / "c" / "d" / "run" / "step-1")
    assert len(find(tmp_path)) == 1 and find(tmp_path, depth=5) == [] and len(find(tmp_path, depth=6)) == 1
    save_dcp(tmp_path / "a" / "b" / "step-1")
    monkeypatch.setattr("workbench.runs.DEEP", 2)  # what lies higher is listed all the same
    assert [item.path for item in find(tmp_path)] == ["a/b/step-1"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = save_dcp(tmp_path / "outside" / "step-1")
    root = run(tmp_path / "root", 2)
    (root / "step-9").symlink_to(outside)
    (root / "latest-link").symlink_to(root / "step-2")
    (root / "loop").symlink_to(root)
    torch.save({"w": torch.ones(1)}, tmp_path / "outside" / "x.pt")
    (root / "x.pt").symlink_to(tmp_path / "outside" / "x.pt")
    found = by_path(root)
    assert set(found) == {"step-2", "x.pt"}
    assert found["x.pt"].format == "unreadable" and "link out of" in found["x.pt"].why


def test_one_planted_link_hides_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run(tmp_path / "root", 1, 2)
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    save_file({"w": torch.ones(1)}, root / "fine.safetensors")
    (root / "planted.safetensors").symlink_to(tmp_path / "outside.safetensors")
    found = by_path(root)
    assert {path for path, item in found.items() if item.complete} == {"step-1", "step-2", "fine.safetensors"}
    assert "link out of" in found["planted.safetensors"].why
    assert main(["ls", str(root)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("step-1", "step-2", "fine.safetensors", "planted.safetensors"))
    for path in ("step-1", "step-2"):
        for file in (root / path).iterdir():
            file.unlink()
    (root / "fine.safetensors").unlink()
    assert main(["ls", str(root)]) == 3  # nothing else lies there
    assert "link out of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["\ud800.safetensors", "a\0.safetensors"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(1)}, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UnsafeError, match="refused"):
        wb.open(folder)
    assert wb.verify(folder).exit_code == 2 and main(["verify", str(folder), "--deep"]) == 2
    run(tmp_path / "root", 1)
    assert by_path(tmp_path / "root")["step-1"].complete
    assert main(["ls", str(tmp_path / "root")]) == 0 and main(["ls", str(folder)]) == 3
    capsys.readouterr()
    with pytest.raises(NotACheckpointError):
        wb.open(str(tmp_path / name))


def test_what_does_not_begin_like_its_format_is_not_complete(tmp_path: Path) -> None:
    files = {
        "junk/model.safetensors": b"\xff" * 100,
        "text/model.safetensors": struct.pack("<Q", 50) + b"x" * 60,
        "count/m.gguf": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        "version/m.gguf": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "empty/model.safetensors": struct.pack("<Q", 2) + b"{}",
        "fine/m.gguf": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    found = by_path(tmp_path)
    assert [path for path, item in found.items() if item.complete] == ["empty", "fine"]
    for path, item in found.items():
        if not item.complete:  # the reason is that of an open
            with pytest.raises(OpenError) as caught:
                wb.open(tmp_path / path)
            assert item.why.partition(":")[0] in str(caught.value)


def test_a_checkpoint_whose_data_are_links_out_of_it_is_not_complete(tmp_path: Path) -> None:
    outside = save_dcp(tmp_path / "outside" / "step-1")
    save_file({"w": torch.ones(1)}, outside / "w.safetensors")
    weights, step, fine = (tmp_path / "root" / name for name in ("weights", "step-2", "step-3"))
    weights.mkdir(parents=True)
    (weights / "w.safetensors").symlink_to(outside / "w.safetensors")
    for folder in (step, fine):
        save_dcp(folder)
    (data,) = step.glob("*.distcp")
    data.unlink()
    data.symlink_to(outside / data.name)
    (fine / "config.json").symlink_to(outside / "w.safetensors")  # nothing that the checkpoint needs
    found = by_path(tmp_path / "root")
    assert [path for path, item in found.items() if item.complete] == ["step-3"]
    assert "'w.safetensors' is a symlink out of the checkpoint" in found["weights"].why
    assert "distcp' is a symlink out of the checkpoint" in found["step-2"].why
    for refused in (weights, step):
        with pytest.raises(UnsafeError, match="link out of the checkpoint"):
            wb.open(refused)
    assert reason(tmp_path / "root").startswith("opened 'step-3'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads what nobody may")
def test_a_folder_without_permission_is_listed_as_such(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-1").chmod(0)
    (item,) = find(tmp_path)
    assert item.format == "unreadable" and "Permission" in item.why
    (tmp_path / "step-1").chmod(0o700)


# ---- complete or not -----------------------------------------------------------------------------------------


def test_dcp_is_complete_with_its_commit_marker(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3)
    (tmp_path / "step-1" / ".metadata").rename(tmp_path / "step-1" / ".metadata.tmp")
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    found = by_path(tmp_path)
    assert found["step-1"].why == ".metadata is missing, .metadata.tmp is present"
    assert found["step-2"].why == ".metadata is empty"
    assert found["step-3"].complete


def test_metadata_by_rank_must_be_contiguous(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for rank in (0, 1, 3):
        (folder / f"__{rank}.metadata").write_bytes(b"x")
        (folder / f"__{rank}_0.distcp").write_bytes(b"x")
    assert by_path(tmp_path)["step-1"].why == "1 of 4 files __N.metadata is missing, first __2.metadata"
    (folder / "__2.metadata").write_bytes(b"x")
    assert by_path(tmp_path)["step-1"].complete


def test_weights_are_complete_with_every_file_of_their_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    assert by_path(tmp_path)["model"].why == "1 of 2 files 'model' is missing"
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    why = "file 'model-00002-of-00002.safetensors' of 'model.safetensors.index.json' is missing"
    assert by_path(tmp_path)["model"].why == why
    save_file({"b": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    assert by_path(tmp_path)["model"].complete
    (folder / "model.safetensors.index.json").write_text("{")
    assert "not JSON" in by_path(tmp_path)["model"].why


def test_a_trainers_step_comes_from_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-best"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 77}')
    (folder / "optimizer.pt").write_bytes(b"")
    found = by_path(tmp_path)["checkpoint-best"]
    assert (found.format, found.step, found.why) == ("hf_trainer", 77, "there are no weight files")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert by_path(tmp_path)["checkpoint-best"].complete


@pytest.mark.parametrize(("stage", "lost"), [(1, [3]), (1, [0, 2]), (3, [3])])
def test_deepspeeds_ranks_are_counted_by_what_its_files_say(tmp_path: Path, stage: int, lost: list[int]) -> None:
    names, shapes = [["a", "b"]], {"a": (5, 3), "b": (4,)}
    save = like.save_zero3 if stage == 3 else like.save_zero12
    save(tmp_path / "global_step4", names, shapes, like.full(shapes), 4)
    assert by_path(tmp_path)["global_step4"].complete
    for rank in lost:
        (file,) = (tmp_path / "global_step4").glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        file.unlink()
    are = "is" if len(lost) == 1 else "are"
    why = f"{len(lost)} of 4 files zero_pp_rank_N_mp_rank_00_optim_states.pt {are} missing"
    assert by_path(tmp_path)["global_step4"].why == why


def test_checkpoints_beside_final_weights_are_listed_too(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    run(tmp_path, 5)
    torch.save({"w": torch.ones(1)}, tmp_path / "best.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "training_args.bin")
    assert set(by_path(tmp_path)) == {".", "best.pt", "step-5"}


def test_final_weights_beside_the_steps_of_a_run_are_opened_with_a_note(tmp_path: Path) -> None:
    """As a trainer leaves them that saves the final model beside its checkpoints; the doctor reads the run."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "checkpoint-x").mkdir()
    assert wb.open(tmp_path).notes == []
    run(tmp_path, 5, 10)
    ckpt = wb.open(tmp_path)
    assert list(ckpt) == ["a"] and ckpt.notes == [
        f"opened the files of {str(tmp_path)!r} itself; the folder also has 2 steps of a run, 'step-5', 'step-10': "
        "open a step by its own path"
    ]
    assert wb.open(tmp_path / "step-5").notes == wb.open(tmp_path / "model.safetensors").notes == []
    facts = wb.doctor(tmp_path).facts
    assert [facts[which]["folder_step"][0] for which in ("before", "after")] == [5, 10]


def test_files_that_cannot_be_one_checkpoint_are_listed_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "loras").mkdir()
    for name in ("anime", "photo"):
        save_file({"lora_A": torch.ones(2)}, tmp_path / "loras" / f"{name}.safetensors")
    assert list(by_path(tmp_path)) == ["loras/anime.safetensors", "loras/photo.safetensors"]
    for path in by_path(tmp_path):
        assert list(wb.open(tmp_path / path)) == ["lora_A"]
    with pytest.raises(CorruptError, match="open one file alone"):
        wb.open(tmp_path / "loras")


@pytest.mark.parametrize(
    "held",
    [
        {"encoder": "a", "decoder": "b"},
        {"model-00001-of-00002": "a", "model-00002-of-00002": "b"},
        {"model": "a", "model.fp16": "a"},
    ],
)
def test_files_that_are_one_checkpoint_are_listed_as_one(tmp_path: Path, held: dict[str, str]) -> None:
    (tmp_path / "x").mkdir()
    for name, tensor in held.items():
        save_file({tensor: torch.ones(2)}, tmp_path / "x" / f"{name}.safetensors")
    assert list(by_path(tmp_path)) == ["x"]
    assert set(wb.open(tmp_path / "x")) == set(held.values())


# ---- which one to open ---------------------------------------------------------------------------------------


def reason(root: Path) -> str:
    picked = pick(Place(root))
    assert picked is not None
    return picked[1]


def test_the_newest_complete_step_is_opened_by_number_not_by_name(tmp_path: Path) -> None:
    run(tmp_path, 2, 10, 9)
    assert reason(tmp_path) == "opened 'step-10': the newest complete of 3 steps"
    ckpt = wb.open(tmp_path)
    assert ckpt.step == 10 and ckpt["w"].torch().tolist() == [10.0] * 3
    assert ckpt.notes == [reason(tmp_path)]


def test_an_incomplete_newer_step_is_named(tmp_path: Path) -> None:
    run(tmp_path, 4, 6)
    (tmp_path / "step-6" / ".metadata").unlink()
    wanted = "opened 'step-4': the newest complete of 2 steps; 'step-6' is incomplete (.metadata is missing)"
    assert reason(tmp_path) == wanted
    (tmp_path / "step-4" / ".metadata").unlink()
    with pytest.raises(
        IncompleteError, match=r"none of the 2 steps is complete; the newest is 'step-6': .metadata is missing"
    ):
        wb.open(tmp_path)


@pytest.mark.parametrize(
    ("tracker", "text"), [("latest_checkpointed_iteration.txt", "4\n"), ("latest", "iter_0000004")]
)
def test_a_tracker_is_believed_when_its_step_is_there(tmp_path: Path, tracker: str, text: str) -> None:
    run(tmp_path, 4, 6, name="iter_000000{}")
    (tmp_path / tracker).write_text(text)
    assert reason(tmp_path) == f"opened 'iter_0000004': the tracker '{tracker}' names it"
    (tmp_path / "iter_0000004" / ".metadata").unlink()
    text = reason(tmp_path)
    assert text.startswith("opened 'iter_0000006': the newest complete of 2 steps; the tracker")
    assert text.endswith("names 'iter_0000004', which is incomplete (.metadata is missing)")


@pytest.mark.parametrize("text", ["99", "global_step99", "../step-4", "/etc", "", "\x1b[31m" * 100])
def test_a_tracker_that_names_no_step_is_said_so_and_not_followed(tmp_path: Path, text: str) -> None:
    run(tmp_path / "run", 4)
    run(tmp_path, 4)
    (tmp_path / "run" / "latest").write_text(text)
    told = reason(tmp_path / "run")
    assert told.startswith("opened 'step-4': the newest complete of 1 step; the tracker 'latest' names ")
    assert told.endswith("which does not exist") and "\x1b" not in told and len(told) < 500


def test_one_unnumbered_checkpoint_is_opened_and_several_are_not(tmp_path: Path) -> None:
    save_dcp(tmp_path / "final")
    assert reason(tmp_path) == "opened 'final': the only checkpoint in the folder"
    save_dcp(tmp_path / "other")
    with pytest.raises(NotACheckpointError, match=r"2 checkpoints whose names contain no step: 'final', 'other'"):
        wb.open(tmp_path)


def test_a_step_of_several_checkpoints_is_not_guessed(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-3" / "model")
    save_dcp(tmp_path / "step-3" / "optim")
    with pytest.raises(NotACheckpointError, match=r"step 3 .* is 2 checkpoints: 'step-3/model', 'step-3/optim'"):
        wb.open(tmp_path)


def test_an_empty_folder_has_nothing_to_pick(tmp_path: Path) -> None:
    assert pick(Place(tmp_path)) is None
    with pytest.raises(NotACheckpointError, match="is empty: it has no files"):
        wb.open(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(NotACheckpointError, match=r"a known format: it has 'notes/', 'a\.txt'; `workbench formats`"):
        wb.open(tmp_path)


def test_checkpoints_of_other_formats_are_called_by_their_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("m/data/weights/weight_0", bytes(16))
        archive.writestr("m/archive_format", "pt2")
    (tmp_path / "m.pt.gz").write_bytes(gzip.compress(bytes(100)))
    (tmp_path / "m.pkl").write_bytes(pickle.dumps({"w": [1.0]}))
    found = {
        "m.pt2": "is a torch.export archive .* not supported$",
        "m.pt.gz": "is compressed with gzip: unpack it first$",
        "m.pkl": "is a pickle, and not one of torch.save",
    }
    for name, words in found.items():
        with pytest.raises(NotACheckpointError, match=words):
            wb.open(tmp_path / name)


def test_nothing_of_torch_or_pandas_is_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    run(tmp_path, 1)
    code = (
        "import sys; from workbench.runs import discover; print(len(discover(sys.argv[1])));"
        "print(sorted({'torch', 'pandas', 'panel'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]
