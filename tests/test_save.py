"""``wb.dcp``: loaded by torch alone, never visible and wrong, every flip found, and what a save must not do."""

from __future__ import annotations

import collections
import dataclasses
import errno
import gc
import io
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import workbench as wb
from tests.properties import SLOW
from tests.rank_jobs import ROOT, told_by
from tests.save_loader import FOLDER, raw
from workbench import errors
from workbench.analysis import manifest
from workbench.analysis.manifest_file import INSIDE, pending
from workbench.core.transfer.streams import BLOCK
from workbench.dcp import balance, datafile, outputs, staging, writer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What four ranks said of each case, by rank; and the folder."""
    out = tmp_path_factory.mktemp("saved")
    command = [sys.executable, "-m", "tests.save_worker", "4", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(4)]
    for told in ranks:
        for case, one in told.items():
            assert "result" in one, f"{case}: {one['error']}"
    return out, [{case: one["result"] for case, one in told.items()} for told in ranks]


def everything() -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    tied = torch.randn(30, 40, generator=made)
    return {
        "model": {
            "tied": tied,
            "head": tied,
            "large": torch.randn(2500, 900, generator=made),
            "bf16": torch.randn(3, 5, generator=made).bfloat16(),
            "bool": torch.tensor([True, False]),
            "fp8": torch.randn(5, 7, generator=made).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 4),
            "view": torch.randn(4, 5, generator=made).t()[1:],
            "complex": torch.randn(3, dtype=torch.complex64, generator=made),
        },
        "optim": {"lr": 0.1, "betas": (0.9, 0.95), "rng": torch.arange(4)},
        "step": 3,
    }


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros(one) for key, one in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def check_loads(path: Path, state: dict[str, Any]) -> None:
    """torch's loader, and the bits."""
    found = zeros(state)
    dcp.load(found, checkpoint_id=path)
    assert found["step"] == state["step"] and found["optim"]["betas"] == state["optim"]["betas"]
    for key, one in state["model"].items():
        assert raw(found["model"][key]) == raw(one), key


def save(path: Path, state: dict[str, Any] | None = None, **options: Any) -> None:
    dcp.save(state or everything(), storage_writer=wb.dcp.Writer(path, **options), planner=wb.dcp.Planner())


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_torch_alone_loads_every_save_onto_other_meshes(saved, tmp_path_factory, monkeypatch):
    out, _ = saved
    monkeypatch.setenv(FOLDER, str(out))
    ranks = told_by("tests.save_loader", tmp_path_factory)(4 if SLOW else 2)
    for told in ranks:
        wrong = told["case_load"]["result"]
        assert len(wrong) == 14 and not any(wrong.values()), wrong


@pytest.mark.parametrize("case", ["case_hsdp", "case_ddp"])
def test_ranks_write_equal_shares(saved, case):
    found = saved[1][0][case]
    shares = found["shares"] if case == "case_ddp" else found
    assert max(shares) <= 1.02 * sum(shares) / len(shares), shares
    assert case != "case_ddp" or not found["differences"]


def test_the_lowest_rank_writes_all_that_it_has(saved):
    first, *others = saved[1][0]["case_lowest"]
    assert first and not any(others)


def test_real_modules_have_strided_shards(saved):
    assert "_StridedShard" in saved[1][0]["case_tp_fsdp"]


def test_a_lone_strided_shard_is_several_boxes(saved):
    chunks = wb.open(saved[0] / "case_strided" / "ckpt")["qkv"].chunks
    assert len(chunks) == 12  # of each of q, k and v, one for each rank


def test_plans_are_kept_for_equal_structures_only(saved):
    for told in saved[1]:
        assert told["case_kept_plans"] == {"cached": [False, True, False, True, False, True], "errors": 0}


def test_kept_plans_still_compare_replicas(saved):
    for rank, told in enumerate(saved[1]):
        cached, differences, whole = zip(*told["case_kept_replicas"], strict=True)
        assert all(whole) and cached == (False, True, False, False, False, True, False, False)
        of_b, alone = ["'b': rank 0, 1, 3 ≠ rank 2"], ["'alone': rank 1 ≠ rank 3"]
        assert rank or differences == ([], [], of_b, of_b, [], [], [], alone)


def test_plans_that_torch_keeps_do_not_name_old_files(saved):
    assert len(saved[1][0]["case_torch_planner"]) > 2


def test_rename_makes_the_path_appear_at_once(saved):
    for told in saved[1]:
        present = told["case_rename"]["present"]
        half = len(present) // 2
        assert present == [False] * half + [True] * half and half
        assert set(told["case_rename"]["left"]) <= {"ckpt", "truth.pt"}


def test_replicas_that_differ_are_named(saved):
    told = saved[1][0]["case_different_replicas"]
    assert [one.split(":")[0] for one in told["differences"]] == ["'model.b'", "'seed'"]
    assert "rank 0, 1, 3 ≠ rank 2" in told["differences"][0] and len(told["warned"]) == 1
    kept = manifest.load(saved[0] / "case_different_replicas" / "ckpt").save["differences"]
    assert kept == told["differences"]


def test_a_rank_that_fails_is_named_on_all_ranks_and_nothing_remains(saved):
    for told in saved[1]:
        assert told["case_rank_raises"]["same"]
        assert "rank 2, writing data" in told["case_rank_raises"]["words"]
        assert "No space left on device" in told["case_rank_raises"]["words"]


def test_the_manifest_has_the_phases_of_every_rank(saved):
    told = saved[1][0]["case_async"]
    assert told == [[0, "gather"], *([rank, name] for rank in range(4) for name in ("stage", "write"))]


@pytest.mark.parametrize("case", ["case_fsdp", "case_hsdp", "case_tp_fsdp", "case_strided", "case_ddp", "case_rename"])
def test_the_manifest_is_that_of_the_files(saved, case):
    """The one that was made while writing, and the one that is made of the files: the same, block for block."""
    ckpt = wb.open(saved[0] / case / "ckpt")
    check_manifest(ckpt)
    assert wb.verify(ckpt, deep=True).exit_code == 0


def check_manifest(ckpt: wb.Checkpoint) -> None:
    made, found = manifest.load(ckpt.place), manifest.computed(ckpt)
    assert made.files.keys() == found.files.keys() and made.tensors.keys() == found.tensors.keys()
    assert (made.step, made.format, made.name, made.grain) == (found.step, found.format, found.name, found.grain)
    for name, one in found.files.items():
        mine = made.files[name]
        assert (mine.size, mine.kind) == (one.size, one.kind)
        assert np.array_equal(mine.lengths, one.lengths) and np.array_equal(mine.digests, one.digests)
        assert [made.labels[k] for k in mine.owners] == [found.labels[k] for k in one.owners]
    for key, one in made.tensors.items():
        assert one.fingerprint in (None, found.tensors[key].fingerprint)
        assert one.fingerprint or len(ckpt[key].chunks) > 1, key


# ---- one process -----------------------------------------------------------------------------------------------------


def test_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "FILE", 1 << 20)
    path = tmp_path / "ckpt"
    for round in range(3):
        state = everything() | {"step": round}
        save(path, state)
        check_loads(path, state)
        assert len(list(path.iterdir())) == 4  # two data files, .metadata, the manifest
    check_manifest(wb.open(path))
    report = wb.verify(path, deep=True)
    assert report.exit_code == 0 and "manifest" in report.checked
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert {type(one) for one in metadata.storage_data.values()} == {_StorageInfo}


def test_items_are_byte_for_byte_those_of_torch(tmp_path):
    """All of them, except torch's number of the archive, which it only logs."""
    state = everything()
    save(tmp_path / "ours", state, manifest=False, thread_count=1)
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    ours, theirs = (wb.open(tmp_path / name) for name in ("ours", "torch"))
    assert sorted(os.listdir(tmp_path / "ours"))[1].startswith("__0_0.") and len(os.listdir(tmp_path / "ours")) == 2
    assert list(ours) == list(theirs)
    for key in ours:
        assert raw(ours[key].torch()) == raw(theirs[key].torch()) and ours[key].dtype == theirs[key].dtype
    sizes = [
        {i.fqn: s.length for i, s in pickle.loads((tmp_path / name / ".metadata").read_bytes()).storage_data.items()}
        for name in ("ours", "torch")
    ]
    same = {key for key in sizes[0] if sizes[0][key] == sizes[1][key]}
    assert same >= {key for key in sizes[0] if key != "model.view"}  # torch keeps the strides of a view


def test_types_that_only_torch_can_write(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of quantised tensors
        state = {
            "sparse": torch.eye(3).to_sparse(),
            "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        }
        save(tmp_path / "a", state)
    found = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    assert set(found.state_dict_metadata) == set(state)
    for index, place in found.storage_data.items():
        with open(tmp_path / "a" / place.relative_path, "rb") as handle:
            handle.seek(place.offset)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = torch.load(io.BytesIO(handle.read(place.length)))
        both = [
            one.to_dense() if one.layout != torch.strided else one.dequantize() for one in (loaded, state[index.fqn])
        ]
        assert torch.equal(*both)


@pytest.mark.parametrize("options", [{}, {"echo": True}])
def test_views_that_negate_or_conjugate(tmp_path, gloo, options):
    """Their memory holds other values than they have."""
    values = torch.randn(3, 2, dtype=torch.complex64)
    state = {"conj": values.conj(), "neg": values.conj().imag}
    dcp.save(state, storage_writer=wb.dcp.Writer(tmp_path / "a", **options), planner=wb.dcp.Planner())
    made = wb.dcp.Writer(tmp_path / "b", **options)
    dcp.async_save(state, storage_writer=made, planner=wb.dcp.Planner()).result()
    for name in "ab":
        found = {"conj": torch.zeros(3, 2, dtype=torch.complex64), "neg": torch.zeros(3, 2)}
        dcp.load(found, checkpoint_id=tmp_path / name)
        assert torch.equal(found["conj"].imag, -values.imag) and torch.equal(found["neg"], -values.imag)
        assert wb.verify(tmp_path / name, deep=True).exit_code == 0


def test_a_kept_plan_is_for_one_layout(tmp_path):
    for name, value in {"dense": torch.eye(4), "sparse": torch.eye(4).to_sparse()}.items():
        dcp.save({"w": value}, storage_writer=wb.dcp.Writer(tmp_path / name), planner=wb.dcp.Planner())
        stored = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata["w"]
        assert stored.properties.layout == value.layout


@pytest.mark.parametrize("guarded", [True, False])
def test_a_kept_plan_is_for_tensors_that_have_not_changed_their_kind(monkeypatch, guarded):
    """Values may change, and a tensor may have two names; the same object may have another type or shape later."""
    if not guarded:
        monkeypatch.setattr("workbench.dcp.planner.TensorGuards", None)

    def planned(state: dict[str, Any]) -> tuple[bool, Any]:
        made = wb.dcp.Planner()
        made.set_up_planner(state, None, True)
        plans, metadata = made.create_global_plan([made.create_local_plan()])
        made.finish_plan(plans[0])
        return made.cached, metadata.state_dict_metadata["w"]

    weight = torch.nn.Parameter(torch.ones(4, 6))
    state = {"w": weight, "tied": weight, "view": torch.ones(5, 3).t(), "n": 1, f"{guarded}": torch.ones(2)}
    assert [planned(state)[0] for _ in range(2)] == [False, True]
    assert planned(state | {"view": torch.ones(3, 5), "n": 2})[0]
    weight.data = weight.data.bfloat16()
    cached, stored = planned(state)
    assert not cached and stored.properties.dtype == torch.bfloat16
    weight.data = weight.data[:2]
    cached, stored = planned(state)
    assert not cached and stored.size == (2, 6)
    weight.requires_grad_(False)
    with torch.no_grad():
        cached, stored = planned(state)
    assert not cached and not stored.properties.requires_grad and planned(state)[0]
    assert not planned({key: one for key, one in state.items() if key != "n"})[0]


def test_a_subclass_of_torchs_planner_that_casts(tmp_path):
    """What the planner returns is stored, and the metadata say what the plan said, as with torch's writer."""

    class Casting(dcp.DefaultSavePlanner):
        def transform_object(self, item: Any, value: Any) -> Any:
            value = super().transform_object(item, value)
            return value.half() if isinstance(value, torch.Tensor) else value

    state = {"w": torch.randn(20, 30)}
    dcp.save(state, storage_writer=wb.dcp.Writer(tmp_path / "a"), planner=Casting())
    found = {"w": torch.zeros(20, 30)}
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert torch.equal(found["w"], state["w"].half().float())


def test_a_planner_whose_global_plan_is_not_what_it_keeps(tmp_path):
    """As Megatron's: it changes the plans that torch made, which torch also keeps."""

    class Own(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [dataclasses.replace(plan, items=plan.items[::-1]) for plan in plans], metadata

    state = {"a": torch.randn(4, 5), "b": torch.randn(6, 7), "c": torch.randn(2)}
    dcp.save(state, storage_writer=wb.dcp.Writer(tmp_path / "a"), planner=Own())
    found = zeros(state)
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert all(raw(found[key]) == raw(one) for key, one in state.items())

    class Late(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            self.late = plans[0].items[::-1]
            return plans, metadata

    class Other(wb.dcp.Writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            return super().write_data(dataclasses.replace(plan, items=planner.late), planner)

    with pytest.raises(CheckpointException, match="differ from the 3 planned ones"):
        dcp.save(state, storage_writer=Other(tmp_path / "b"), planner=Late())


def test_every_flip_is_found_and_named(tmp_path):
    path = tmp_path / "step-1"
    state = {f"layer.{n}": torch.randn(40, 30 + n) for n in range(6)} | {"lr": 0.5}
    save(path, state)
    chance = random.Random(3)
    files = [name for name in os.listdir(path) if name != INSIDE]
    named = 0
    for _ in range(1000 if SLOW else 60):
        name = chance.choice(files)
        at = chance.randrange((path / name).stat().st_size)
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1 << chance.randrange(8)
        kept = (path / name).read_bytes()
        (path / name).write_bytes(data)
        found = [one for one in wb.verify(path, deep=True) if one.rule == "manifest.changed"]
        assert len(found) == 1 and found[0].evidence["start"] <= at < found[0].evidence["stop"], (name, at)
        assert found[0].evidence["file"] == name
        named += bool(found[0].evidence["tensors"])
        (path / name).write_bytes(kept)
    assert named > 10


def test_diff_needs_no_payload(tmp_path):
    state = {f"{n}": torch.randn(300, 300) for n in range(3)}
    save(tmp_path / "step-1", state)
    state["1"] = state["1"] + 1
    save(tmp_path / "step-2", state)
    found = wb.diff(wb.open(tmp_path / "step-1"), wb.open(tmp_path / "step-2"), values=False)
    assert [found.tensor(key).status for key in "012"] == ["equal", "changed", "equal"]
    assert "manifest" in found.checked


@pytest.mark.parametrize("step", [1 if SLOW else 40])
def test_a_death_at_any_call_leaves_the_old_or_the_new(tmp_path, step):
    """Kills, torn and lost writes, failing calls: what is visible is whole, is one of the two, and has its manifest."""
    told = deaths(tmp_path, step)
    assert told["wrong"] == 0 and told["old"] and told["new"] and told["deaths"] >= 2000 // step, told


@pytest.mark.slow
@pytest.mark.skipif(not SLOW, reason="a minute; WORKBENCH_SLOW=1 runs it")
def test_the_same_deaths_spoil_saves_of_torch(tmp_path):
    """So the test above means something."""
    assert deaths(tmp_path, 1, "torch")["wrong"] > 50


def deaths(folder: Path, step: int, *commits: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.save_job", str(folder), str(step), *commits]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_what_the_disk_refuses(tmp_path, monkeypatch, code):
    path = tmp_path / "a"
    save(path, {"w": torch.ones(5)})
    before = {one.name: one.read_bytes() for one in path.iterdir()}

    def refuse(fd: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(outputs, "allocate", refuse)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("a byte was written"))
    words = rf"rank 0, writing data: '__0_0\.\w+\.distcp' cannot be written: {os.strerror(code)}"
    with pytest.raises(CheckpointException, match=words):
        save(path, {"w": torch.zeros(5)})
    assert {one.name: one.read_bytes() for one in path.iterdir()} == before


def test_a_full_disk_is_met_before_the_first_byte(tmp_path):
    """A real limit of the system: files of this process may have 1 MB."""
    code = """
import resource, signal, sys, os, torch, torch.distributed.checkpoint as dcp, workbench as wb
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
real, count = os.pwritev, []
os.pwritev = lambda *a: count.append(a) or real(*a)
try:
    dcp.save({"w": torch.ones(1 << 19)}, storage_writer=wb.dcp.Writer(sys.argv[1]))
except dcp.api.CheckpointException as error:
    assert "File too large" in str(error), error
    import gc; gc.collect()
    print("refused", len(count), os.listdir(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "refused 0 []", done.stdout + done.stderr


def test_a_rank_that_is_killed_leaves_the_old_checkpoint(tmp_path):
    """Of two ranks, one dies: the other one gets an error, and the old checkpoint is what torch loads."""
    points = ("plan", "write", "sync", "gather")
    code = """
import os, signal, socket, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from datetime import timedelta
import workbench as wb
warnings.simplefilter("ignore")
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def job(rank, port, path, point):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    class Planner(wb.dcp.Planner):
        def create_local_plan(self):
            return die() if rank and number and point == "plan" else super().create_local_plan()
    class Writer(wb.dcp.Writer):
        def write_data(self, plan, planner):
            found = super().write_data(plan, planner)
            return die() if rank and number and point == "gather" else found
    for number in range(2):
        if rank and number and point in ("write", "sync"):
            setattr(os, {"write": "pwritev", "sync": "fdatasync"}[point], die)
        state = {f"{n}": torch.full((50, 60), n + number) for n in range(8)}
        dcp.save(state, storage_writer=Writer(path), planner=Planner())
for point in sys.argv[2:]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(2):
        if not (pid := os.fork()):
            try:
                job(rank, port, f"{sys.argv[1]}/{point}", point)
            except BaseException as error:
                os._exit(7)
            os._exit(0)
        pids.append(pid)
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *points],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.stdout.splitlines() == ["[7, -9]"] * len(points), done.stdout + done.stderr[-3000:]
    for point in points:
        found = {f"{n}": torch.zeros(50, 60, dtype=torch.int64) for n in range(8)}
        dcp.load(found, checkpoint_id=tmp_path / point)
        assert all((found[f"{n}"] == n).all() for n in range(8)), point
        assert not wb.verify(tmp_path / point, deep=True).count("error")


def test_a_path_below_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointException, match="cannot be written"):
        save(tmp_path / "file" / "a", {"w": torch.ones(2)})


def test_two_jobs_save_into_one_folder(tmp_path):
    """Interleaved at the worst point: the one that commits last is there, whole."""
    path = tmp_path / "a"
    states = [everything() | {"step": n} for n in range(2)]
    entered, go_on = threading.Event(), threading.Event()

    class Slow(wb.dcp.Writer):
        def finish(self, metadata: Any, results: Any) -> None:
            entered.set()
            assert go_on.wait(60)
            super().finish(metadata, results)

    save(path, everything())
    first = threading.Thread(
        target=lambda: dcp.save(states[0], storage_writer=Slow(path), planner=wb.dcp.Planner(cache=False))
    )
    first.start()
    assert entered.wait(60)
    save(path, states[1])
    check_loads(path, states[1])
    go_on.set()
    first.join()
    check_loads(path, states[0])
    assert wb.verify(path, deep=True).exit_code == 0 and len(list(path.iterdir())) == 3


def test_saves_of_many_threads(tmp_path):
    path = tmp_path / "a"

    def work(number: int) -> None:
        for _ in range(4):
            save(path, everything() | {"step": number})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wb.verify(path, deep=True).exit_code == 0 and len(list(path.iterdir())) == 3


def test_a_failed_commit_leaves_no_files(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path, {"w": torch.ones(5)})
    before = sorted(os.listdir(path))
    monkeypatch.setattr(writer, "manifest_of", lambda *_: 1 / 0)
    with pytest.raises(CheckpointException):
        save(path, {"w": torch.zeros(5)})
    gc.collect()
    assert sorted(os.listdir(path)) == before
    monkeypatch.undo()
    assert wb.verify(path, deep=True).exit_code == 0


def test_a_save_that_was_interrupted_before_the_manifest_was_renamed(tmp_path):
    path = tmp_path / "a"
    save(path)
    old = (path / INSIDE).read_bytes()
    save(path)
    os.rename(path / INSIDE, path / pending((path / ".metadata").read_bytes()))
    (path / INSIDE).write_bytes(old)
    report = wb.verify(path, deep=True)
    assert report.exit_code == 0 and "manifest" in report.checked
    save(path)
    assert wb.verify(path, deep=True).exit_code == 0


def test_metadata_of_others_is_not_followed(tmp_path):
    """The checkpoint that is overwritten names files; only data files of the folder itself are removed."""
    path, other = tmp_path / "a", tmp_path / "__0_0.distcp"
    other.write_bytes(b"kept")
    save(path, {"w": torch.ones(5), "v": torch.ones(6)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    names = iter(["../__0_0.distcp", "notes.txt"])
    for one in metadata.storage_data.values():
        one.relative_path = next(names)
    (path / "notes.txt").write_bytes(b"kept")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    save(path, {"w": torch.zeros(5)})
    assert other.read_bytes() == (path / "notes.txt").read_bytes() == b"kept"
    (path / ".metadata").write_bytes(b"not a pickle")
    save(path, {"w": torch.zeros(5)})
    assert set(wb.open(path)) == {"w"}


def test_leftovers_are_removed_after_a_day(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    for name in ("__0_0.0123abcd.distcp", "__0_1.0123abce.distcp", "mine.distcp"):
        (path / name).write_bytes(b"x")
    for name in ("__0_0.0123abcd.distcp", "mine.distcp"):
        os.utime(path / name, (0, 0))
    save(path, {"w": torch.ones(2)})
    assert {"mine.distcp", "__0_1.0123abce.distcp"} == {n for n in os.listdir(path) if "0123" in n or "mine" in n}


@pytest.mark.parametrize("commit", ["metadata", "rename"])
def test_overwrite_false(tmp_path, commit):
    save(tmp_path / "a", {"w": torch.ones(5)}, commit=commit)
    with pytest.raises(CheckpointException, match="exists"):
        save(tmp_path / "a", {"w": torch.zeros(5)}, commit=commit, overwrite=False)
    assert torch.equal(wb.open(tmp_path / "a")["w"].torch(), torch.ones(5))


def test_arguments_that_are_refused(tmp_path):
    for options in (
        {"commit": "now"},
        {"thread_count": 0},
        {"serialization_format": SerializationFormat.SAFETENSORS},
        {"_extensions": [object()]},
        {"speed": 3},
    ):
        with pytest.raises(errors.UsageError):
            wb.dcp.Writer(tmp_path, **options)
    with pytest.raises(errors.UsageError, match="can be written to"):
        wb.dcp.Writer("https://host/step-1")
    with pytest.raises(errors.UsageError, match="nothing can be renamed"):
        wb.dcp.Writer("memory://bucket/step-1", commit="rename")
    with pytest.raises(errors.UsageError, match="balance"):
        wb.dcp.Planner(balance="random")


def test_without_collectives_each_rank_commits_its_own(tmp_path):
    state = {"w": torch.randn(30, 30), "lr": 0.5}
    for _ in range(2):
        dcp.save(state, storage_writer=wb.dcp.Writer(tmp_path / "a"), planner=wb.dcp.Planner(), use_collectives=False)
    data, metadata = sorted(os.listdir(tmp_path / "a"), key=len, reverse=True)
    assert metadata == "__0.metadata" and data.startswith("__0_0.")
    assert raw(wb.open(tmp_path / "a")["w"].torch()) == raw(state["w"])


# ---- asynchronous ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gloo(tmp_path):
    """A group of one rank: asynchronous saves in processes need one."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_an_asynchronous_save_holds_the_values_of_the_call(tmp_path, gloo):
    state = everything()
    kept = {key: one.clone() for key, one in state["model"].items()}
    for _ in range(3):
        saved = dcp.async_save(state, storage_writer=wb.dcp.Writer(tmp_path / "a"), planner=wb.dcp.Planner())
        for one in state["model"].values():
            one.zero_()
        saved.result()
        for key, one in state["model"].items():
            one.copy_(kept[key])
        check_loads(tmp_path / "a", everything())
    assert manifest.load(tmp_path / "a").save["staged"]


Pair = collections.namedtuple("Pair", "first second")  # pickled by its name in this module


@pytest.mark.parametrize("options", [{}, {"manifest": False}, {"echo": True}])
def test_objects_with_tensors_in_them_hold_the_values_of_the_call(tmp_path, gloo, options):
    """Those that are pickled as a whole: tensors in tuples, also where memory of an earlier save is used again."""
    for number in (3.0, 7.0):
        state = {
            "rng": (torch.full((5,), number), 1),
            "groups": (Pair(torch.full((2, 3), number), "x"), Pair(1, 2)),
            "file": io.BytesIO(b"%d" % number),
            "counts": (collections.Counter("aab"),),
            "w": torch.ones(3),
        }
        saved = dcp.async_save(state, storage_writer=wb.dcp.Writer(tmp_path / "a", **options), planner=wb.dcp.Planner())
        state["rng"][0].zero_(), state["groups"][0].first.zero_(), state["file"].write(b"zz")
        saved.result()
        del saved
        gc.collect()
        found: dict[str, Any] = dict.fromkeys(state) | {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path / "a")
        assert torch.equal(found["rng"][0], torch.full((5,), number)) and found["rng"][1] == 1
        first, second = found["groups"]
        assert torch.equal(first.first, torch.full((2, 3), number)) and second == Pair(1, 2)
        assert type(first) is type(second) is Pair and type(found["counts"][0]) is collections.Counter
        assert found["file"].getvalue() == b"%d" % number


def test_a_staged_copy_that_changes_is_an_error(tmp_path, gloo):
    """As by a stager that gives its buffers to the next save too early."""
    path, state = tmp_path / "a", everything()
    save(path, state)

    class Careless(wb.dcp.Writer):
        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            staged = super().stage(state_dict)
            staged["model"]["large"][2000, 3] += 1
            return staged

    saved = dcp.async_save(state, storage_writer=Careless(path), planner=wb.dcp.Planner())
    with pytest.raises(CheckpointException, match=r"tensor 'model\.large' changed between staging and writing"):
        saved.result()
    check_loads(path, state)


def test_a_staged_copy_has_the_values_and_digests_of_the_trainers_tensors():
    sizes = (0, 1, staging.PIECE - 1, staging.PIECE, staging.PART + 5, 2 * staging.PART)
    state = {f"n{size}": torch.randint(256, (size,), dtype=torch.uint8) for size in sizes}
    wide = torch.randn(300, 40, dtype=torch.complex64)
    state |= {
        "scalar": torch.tensor(3.0),
        "turned": wide.T,
        "expanded": torch.ones(1, 9).expand(7, 9),
        "c": wide.conj(),
    }
    state |= {"param": torch.nn.Parameter(torch.randn(5).bfloat16()), "b": torch.tensor([True, False])}
    for _ in range(2):  # into memory that holds other values, too
        staged, digests, _ = staging.stage(state, buffers=1, hashed=True, echo=False)
        assert digests.keys() == state.keys()
        assert all(torch.equal(staged[name], one) for name, one in state.items())
        for name, one in state.items():
            data = one.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
            assert digests[name][:2] == (len(data), [xxhash.xxh3_128_digest(block) for block in blocks]), name
        for size in sizes:
            state[f"n{size}"] ^= 255
        del staged


def test_staging_memory_is_used_again_and_never_while_in_use(tmp_path, gloo):
    seen: list[int] = []

    class Seen(wb.dcp.Writer):
        def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            staged = super().stage(state_dict)
            seen.append(staged["model"]["large"].data_ptr())
            return staged

    state = everything()
    for _ in range(3):
        dcp.async_save(state, storage_writer=Seen(tmp_path / "a"), planner=wb.dcp.Planner()).result()
        gc.collect()
    assert len(set(seen)) == 1
    staged = [Seen(tmp_path / "a").stage(state) for _ in range(2)]
    assert seen[-1] != seen[-2] and staged[0]["model"]["large"].data_ptr() != staged[1]["model"]["large"].data_ptr()


def test_an_asynchronous_save_in_a_process(tmp_path):
    """In a process of its own, as it starts one: the writer and the planner are pickled into a daemon."""
    code = """
import os, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import workbench as wb
from workbench.analysis import manifest
def main():
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = {"w": torch.arange(5_000_000.0), "lr": 0.5}
    for n in range(2):
        state["w"][0] = n
        saved = dcp.async_save(state, storage_writer=wb.dcp.Writer(sys.argv[1]), planner=wb.dcp.Planner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        state["w"][0] = -1
        saved.result()
        found = {"w": torch.zeros(5_000_000), "lr": 0}
        dcp.load(found, checkpoint_id=sys.argv[1])
        assert found["w"][0] == n and torch.equal(found["w"][1:], state["w"][1:]) and found["lr"] == 0.5
    assert manifest.load(sys.argv[1]).save["staged"]
    print("saved")
    dist.destroy_process_group()
if __name__ == "__main__":
    main()
"""
    (tmp_path / "job.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "a")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.stdout.endswith("saved\n"), done.stdout + done.stderr[-3000:]


def test_a_planner_or_writer_that_another_process_cannot_get_is_refused_at_once(tmp_path, gloo):
    class Local(wb.dcp.Planner):
        pass

    class Locking(wb.dcp.Writer):
        def __init__(self, path: Any) -> None:
            super().__init__(path)
            self.lock = threading.Lock()

    path, process = tmp_path / "a", AsyncCheckpointerType.PROCESS
    state = {"w": torch.ones(2)}
    for made, planner, words in (
        (wb.dcp.Writer(path), Local(), r"the planner, which .*Local"),
        (Locking(path), wb.dcp.Planner(), r"the writer, which .*lock"),
    ):
        with pytest.raises(errors.UsageError, match=words):
            dcp.async_save(state, storage_writer=made, planner=planner, async_checkpointer_type=process)
        dcp.async_save(state, storage_writer=made, planner=planner).result()


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_state_dict_is_flattened_as_torch_does_it():
    one, two = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    nested = {
        "model": {"a": one, "b.c": two, 7: one, "empty": {}, "none": None},
        "optim": {"state": {0: {"exp_avg": one, "step": 3.0}, "x": OrderedDict(y=one)}, "groups": [{"lr": 0.1}, 5]},
        "lists": [one, [2, {"k": two}], (one, 3)],
        "plain": [1, 2],
        "tuple": (one, {"q": 1}),
        "nothing": [],
        3: "text",
    }
    ours, theirs = wb.dcp.Planner(), DefaultSavePlanner()
    for planner in (ours, theirs):
        planner.set_up_planner(nested, None, True)
    assert list(ours.state_dict) == list(theirs.state_dict) and ours.mappings == theirs.mappings
    assert all(ours.state_dict[key] is value for key, value in theirs.state_dict.items() if torch.is_tensor(value))
    assert [one for one in ours.state_dict.values() if not torch.is_tensor(one)] == [
        one for one in theirs.state_dict.values() if not torch.is_tensor(one)
    ]
    with pytest.raises(ValueError, match="duplicated flatten key a"):
        wb.dcp.Planner().set_up_planner({"a": {"b": one}, "a.b": one})


def test_parts_of_a_cut_box_cover_it_once():
    chance = random.Random(5)
    for _ in range(300):
        sizes = tuple(chance.randint(1, 40) for _ in range(chance.randint(1, 4)))
        offsets = tuple(chance.randint(0, 9) for _ in sizes)
        seen = np.zeros([a + n for a, n in zip(offsets, sizes, strict=True)], int)
        parts = balance.cut(offsets, sizes, 4, chance.randint(1, 5000))
        for at, extent in parts:
            seen[tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))] += 1
        inside = tuple(slice(a, None) for a in offsets)
        assert (seen[inside] == 1).all() and seen.sum() == np.prod(sizes)


def test_large_tensors_are_cut_at_blocks_of_their_fingerprint():
    parts = balance.cut((0, 0), (40_000, 1024), 4, 64 << 20)
    assert len(parts) >= 9 and all(at[0] * 4096 % (4 << 20) == 0 for at, _ in parts)


def test_parts_are_spread_largest_first():
    weights = [30, *[1] * 70]
    chosen = balance.spread([0] * 4, weights, [range(4)] * len(weights))
    loads = [sum(w for w, rank in zip(weights, chosen, strict=True) if rank == k) for k in range(4)]
    assert sorted(loads) == [23, 23, 24, 30]


def test_a_data_file_whose_writes_are_short(tmp_path, monkeypatch):
    """The system may write less than it is given."""
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [b"".join(parts)[:1001]], at))
    monkeypatch.setattr(datafile, "COPIED", 100)
    state = {f"{n}": torch.randn(50, 60) for n in range(3)}
    save(tmp_path / "a", state)
    ckpt = wb.open(tmp_path / "a")
    assert all(raw(ckpt[key].torch()) == raw(one) for key, one in state.items())
    assert wb.verify(ckpt, deep=True).exit_code == 0


@pytest.mark.parametrize("refusal", ["none", "open", "write", "short"])
def test_around_the_page_cache(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(outputs, "DIRECT", 1 << 20)
    real_open, real_write = os.open, os.pwrite
    refused, lengths = refusal in ("open", "write"), []

    def opened(path: str, flags: int, *mode: int) -> int:
        if refusal == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags & ~os.O_DIRECT, *mode)  # of whatever file system the tests run on

    def written(fd: int, data: Any, at: int) -> int:
        lengths.append((len(data), at))
        if refusal == "write" and len(lengths) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data[: max(len(data) // 2, 1)] if refusal == "short" else data, at)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    state = everything()
    save(tmp_path / "a", state, direct=True)
    monkeypatch.undo()
    check_loads(tmp_path / "a", state)
    assert wb.verify(tmp_path / "a", deep=True).exit_code == 0
    assert bool(manifest.load(tmp_path / "a").save["notes"]) == refused
    if refusal == "none":
        assert len(lengths) > 3 and all(not size % 4096 and not at % 4096 for size, at in lengths)


def test_around_the_page_cache_of_this_machine(tmp_path):
    state = everything()
    save(tmp_path / "a", state, direct=True)
    check_loads(tmp_path / "a", state)
    assert wb.verify(tmp_path / "a", deep=True).exit_code == 0


# ---- the echo --------------------------------------------------------------------------------------------------------


def live(path: Path) -> Any:
    return manifest.load(path).save["echo"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_record_says_what_was_the_trainers(tmp_path, gloo, monkeypatch, mode):
    monkeypatch.setattr(writer, "FILE", 1 << 20)
    state = everything()
    made = wb.dcp.Writer(tmp_path / "a", echo=True)
    planner = wb.dcp.Planner(split_above=1 << 20)
    if mode == "sync":
        dcp.save(state, storage_writer=made, planner=planner)
    else:
        dcp.async_save(state, storage_writer=made, planner=planner).result()
    tensors = sum(isinstance(one, torch.Tensor) for one in (*state["model"].values(), state["optim"]["rng"]))
    assert live(tmp_path / "a") == {"tensors": tensors, "equal": tensors, "not_compared": []}
    report = wb.verify(tmp_path / "a", deep=True)
    assert report.checked["live"] == f"{tensors} of {tensors} tensors were equal to the trainer's when they were saved"
    assert "echo" in {row["name"] for row in manifest.load(tmp_path / "a").save["phases"]} or mode == "async"


def test_views_of_one_buffer_are_compared_where_they_are(tmp_path):
    flat = torch.randn(5 << 20)
    state = {"a": flat[: 1 << 20], "b": flat[1 << 20 : 2 << 20], "c": flat[2 << 20 :].view(3, 1 << 20)[:, 1:]}
    save(tmp_path / "a", state, echo=True)
    assert live(tmp_path / "a")["equal"] == 3


def test_a_damaged_staging_is_named(tmp_path, gloo, monkeypatch):
    """With the echo, also if the copy is damaged before it is hashed; without, nobody can know."""
    real, state = staging._filled, everything()
    nbytes = state["model"]["large"].nbytes

    def damaged(flat: Any, source: Any, wait: Any) -> list[bytes]:
        if source is None or len(flat) != nbytes:
            return real(flat, source, wait)
        flat[:] = source
        flat[nbytes // 2] ^= 4
        return real(flat, None, wait)

    monkeypatch.setattr(staging, "_filled", damaged)
    dcp.async_save(state, storage_writer=wb.dcp.Writer(tmp_path / "a"), planner=wb.dcp.Planner()).result()
    assert wb.verify(tmp_path / "a", deep=True).exit_code == 0
    with pytest.raises(errors.WriteError, match=r"tensor 'model\.large': the staged copy differs from the trainer's"):
        dcp.async_save(state, storage_writer=wb.dcp.Writer(tmp_path / "b", echo=True), planner=wb.dcp.Planner())
    assert not (tmp_path / "b" / ".metadata").exists()


@pytest.mark.parametrize("name", ["large", "view"])
def test_a_tensor_that_changes_during_a_synchronous_save_is_named(tmp_path, monkeypatch, name):
    state = everything()
    real = writer.DataFile.flush

    def trained_on(self: Any, *, sync: bool) -> None:
        state["model"][name].add_(1)  # after it was written
        real(self, sync=sync)

    def during(self: Any, where: Any, own: str, sizes: Any) -> None:
        state["model"][name].add_(1)  # before
        created(self, where, own, sizes)

    created = writer._Files.create
    monkeypatch.setattr(writer._Files, "create", during)
    with pytest.raises(CheckpointException, match=rf"tensor 'model\.{name}' changed between"):
        save(tmp_path / "a", state, echo=True)
    assert os.listdir(tmp_path / "a") == []
    monkeypatch.undo()
    monkeypatch.setattr(writer.DataFile, "flush", trained_on)
    save(tmp_path / "a", state, echo=True)  # what was written is still what the trainer held


def test_what_a_planner_changes_is_not_said_to_be_the_trainers(tmp_path):
    class Casting(wb.dcp.Planner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return (
                object.half().float() if write_item.index.fqn == "w" else super().transform_object(write_item, object)
            )

    state = {"w": torch.randn(9, 9), "v": torch.randn(5)}
    dcp.save(state, storage_writer=wb.dcp.Writer(tmp_path / "a", echo=True), planner=Casting())
    assert live(tmp_path / "a") == {"tensors": 2, "equal": 1, "not_compared": ["w"]}
    with pytest.raises(errors.UsageError, match="echo"):
        wb.dcp.Writer(tmp_path, echo=True, manifest=False)


def test_the_doctor_tells_a_bad_load_from_a_bad_save(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    state = {
        "model": model.state_dict(),
        "train_state": {"step": 3},
        "optimizer": {"state": {names[k]: one for k, one in optimizer.state_dict()["state"].items()}},
    }
    save(tmp_path / "step-3", state, echo=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))  # a load that did nothing
    wb.echo(model, optimizer, tmp_path / "echo.json", payload=False, step=3)
    found = wb.doctor(tmp_path / "step-3", echo=tmp_path / "echo.json")
    assert found.exit_code == 2
    note = "the save is right; the load caused the differences: 16 of 16 tensors were equal to the trainer's"
    assert any(one.startswith(note) for one in found.notes), (found.notes, str(found))
    assert "the save is right" in str(found) and not any(one.cause == "G6" for one in found.causes)
    data = next((tmp_path / "step-3").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert not wb.doctor(tmp_path / "step-3", echo=tmp_path / "echo.json").notes
