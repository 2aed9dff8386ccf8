"""Checkpoints by URL: the same bytes and answers as from disk; every fault is one error; secrets stay secret."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.range_server import RangeServer
from workbench.analysis import manifest
from workbench.cli import main
from workbench.core.blocks import FileBlocks, file_digests
from workbench.core.checksums import check_archives
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.remote import bucket, objects, ranged, requests
from workbench.core.remote.url import parse
from workbench.core.stop import going_on
from workbench.errors import (
    ChangedError,
    MissingExtraError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    UnsupportedFormatError,
    UsageError,
    WorkbenchError,
)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*flat)


ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
PAUSES = objects.PAUSES
SAMPLES = sorted(
    path.stem for path in (ROOT.parent / "tests/truth").glob("*.safetensors") if (ROOT / path.stem).exists()
)


@pytest.fixture(scope="module")
def server():
    with RangeServer(ROOT) as server:
        yield server


@pytest.fixture
def one(tmp_path):
    """A folder with one safetensors file of 6 MB."""
    torch.manual_seed(0)
    save_file({"w": torch.randn(1000, 1000), "b": torch.randn(500_000)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Retries without their pauses."""
    brief = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(objects, "BACKOFF", brief)
    monkeypatch.setattr(objects, "PAUSES", (0.001,))


# ---- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_sample_is_the_same_by_url(server, sample):
    near, far = wb.open(ROOT / sample, cache=False), wb.open(f"{server.url}/{sample}", cache=False)
    assert list(near) == list(far) and near.format == far.format
    for key in near.objects:
        assert repr(far.objects[key]) == repr(near.objects[key])
    truth = load_file(ROOT.parent / "tests/truth" / f"{sample}.safetensors")
    state = far.state_dict()
    for key in near:
        assert same_bits(far[key].torch(), near[key].torch()), key
        assert same_bits(state[key], near[key].torch()), key
        if key in truth:
            assert same_bits(far[key].torch(), truth[key]), key
    found = wb.diff(far, near)
    assert found.summary["changed"] == found.summary["unread"] == 0


@pytest.mark.parametrize("sample", ["dcp_fsdp2", "hf_llama_bf16_sharded", "titan_run", "paddlenlp_legacy"])
def test_every_question_has_the_same_answer_by_url(server, sample, tmp_path):
    url, path = f"{server.url}/{sample}", ROOT / sample
    answers = [
        (
            [(one.rule, one.where, one.severity) for one in wb.verify(where, deep=True)],
            str(wb.layout(wb.open(where)).to_dict()).replace(str(where), ""),
            wb.stats(wb.open(where), cache=False).to_dict(),
            wb.open(where).step,
            wb.discover(where)[["path", "format", "step", "complete"]].to_dict(),
        )
        for where in (url, path)
    ]
    assert str(answers[0]) == str(answers[1])
    wb.export(wb.open(url), tmp_path / "out")
    assert wb.diff(wb.open(tmp_path / "out"), wb.open(path).model).summary["changed"] == 0


AXIS = st.one_of(
    st.integers(-60, 59),
    st.builds(slice, st.integers(-70, 70), st.integers(-70, 70), st.sampled_from([1, 1, 2, 7, -1, -3])),
    st.lists(st.integers(-60, 59), min_size=1, max_size=6),
)


@settings(max_examples=40, deadline=None)
@given(AXIS, AXIS)
def test_slices_are_those_of_a_dense_array(striped, rows, columns):
    url, dense = striped
    if isinstance(rows, list) and isinstance(columns, list):
        columns = slice(None)
    ckpt = wb.open(url, cache=False)
    wanted = dense[rows][..., columns] if isinstance(rows, list) else dense[rows, columns]
    with pytest.MonkeyPatch.context() as patch:  # so that ranges of a small file are merged, split and fetched apart
        patch.setattr(ranged, "GAP", 100)
        patch.setattr(ranged, "PART", 700)
        assert np.array_equal(ckpt["w"][rows, columns], wanted)


@pytest.fixture(scope="module")
def striped(tmp_path_factory):
    """URL of a matrix, and the matrix."""
    folder = tmp_path_factory.mktemp("striped")
    dense = np.arange(60 * 60, dtype=np.float32).reshape(60, 60)
    save_file({"w": torch.from_numpy(dense)}, folder / "model.safetensors")
    with RangeServer(folder) as server:
        yield f"{server.url}/model.safetensors", dense


def test_ranges_are_merged_and_split(one):
    with RangeServer(one) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        for rows, sizes in ((slice(200), [200 * 4000]), ([0, 1, 500, 501, 999], [4000, 8000, 8000])):
            server.log.clear()
            assert ckpt["w"][rows].shape[1] == 1000  # rows of 4 kB: neighbours together, the others apart
            # `wb.open` asks for a listing too, in case this is a folder; it does not wait for it, so it may come late
            asked = [request for request in server.log if request.start is not None]
            assert sorted(request.stop - request.start for request in asked) == sizes


def test_small_reads_that_follow_each_other_share_requests(one):
    with RangeServer(one) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        dense = load_file(one / "model.safetensors")["b"]
        server.log.clear()
        for first in (*range(0, 500_000, 500), 0, 250_000):  # the last ones once more
            assert torch.equal(ckpt["b"][first : first + 500], dense[first : first + 500])
        sizes = [asked.stop - asked.start for asked in server.log if asked.start is not None]
        assert sizes[0] == 2000 and len(sizes) < 10 and sum(sizes) < 2 * dense.nbytes
        server.log.clear()
        with ckpt.place._files._connection.uncached():  # a proof asks the store
            assert torch.equal(ckpt["b"][:500], dense[:500]) and len(server.log) == 1


def test_a_comparison_and_a_diagnosis_of_small_tensors_ask_for_many_at_once(server, capsys):
    """Two steps of 149 chunks in two files each; a request for each read of a chunk would be hundreds."""
    steps = f"{server.url}/titan_run/step-2", f"{server.url}/titan_run/step-4"
    for words, most in ((("diff", *steps), 100), (("verify", "--deep", steps[0]), 70), (("doctor", *steps), 200)):
        server.log.clear()
        assert main(list(words)) in (0, 1)
        assert len(server.log) < most, words


@pytest.mark.parametrize("change", ["noise", "rows", "scaled"])
def test_what_changed_in_a_large_tensor_is_the_same_by_url(one, change):
    """Its boxes are read from a store at the same time, and from a disk one after the other."""
    held = load_file(one / "model.safetensors")
    w = held["w"]
    held["w"] = {"noise": w + 1e-3 * torch.randn_like(w), "rows": w.roll(3, 0), "scaled": 2 * w}[change]
    save_file(held, one / "b.safetensors")
    names = ("model.safetensors", "b.safetensors")
    with RangeServer(one) as server:
        far = wb.diff(*(wb.open(f"{server.url}/{name}", cache=False) for name in names))
    near = wb.diff(*(wb.open(one / name, cache=False) for name in names))
    found, expected = far.to_dict(), near.to_dict()
    assert found["tensors"] == expected["tensors"] and near.summary["changed"] == 1


@pytest.mark.parametrize(
    "sample, part, most, gap",
    [
        ("dcp_tp2_fsdp2_vocab515", 20_000, 64 << 20, 100),
        ("dcp_tp2_fsdp2_vocab515", 8 << 20, 64 << 20, 256 << 10),
        ("paddlenlp_legacy", 5000, 90_000, 0),
        ("paddlenlp_legacy", 8 << 20, 64 << 20, 256 << 10),
        ("hf_llama_bf16_sharded", 700, 64 << 20, 100),
        ("hf_llama_bf16_sharded", 5000, 9000, 0),
    ],
)
def test_what_is_fetched_ahead_is_what_is_stored(server, tmp_path, monkeypatch, sample, part, most, gap):
    """In requests that cut headers and payloads anywhere, or with too little room for all of them."""
    for name, value in {"AHEAD_PART": part, "AHEAD_MOST": most, "GAP": gap}.items():
        monkeypatch.setattr(ranged, name, value)
    near, far = wb.open(ROOT / sample, cache=False), wb.open(f"{server.url}/{sample}", cache=False)
    state = far.state_dict()
    assert all(same_bits(state[key], near[key].torch()) for key in near)
    assert wb.diff(near, far).summary["changed"] == 0
    assert wb.stats(far, cache=False).to_dict() == wb.stats(near, cache=False).to_dict()
    assert dict(tensor_fingerprints(far.payloads)) == dict(tensor_fingerprints(near.payloads))
    there, here = (list(check_archives(ckpt.payloads, ckpt.place)) for ckpt in (far, near))
    assert there == here and {check.status for check in here} <= {"ok"}
    wb.export(far, tmp_path / "out", format="safetensors")
    assert wb.diff(tmp_path / "out", near).summary["changed"] == 0


def test_a_pass_asks_for_many_chunks_at_once(tmp_path):
    (tmp_path / "served").mkdir()
    tensors = {f"w{k}": torch.full((1000,), float(k)) for k in range(300)}
    save_file(tensors, tmp_path / "served" / "model.safetensors")
    torch.save(tensors, tmp_path / "served" / "model.pt")
    with RangeServer(tmp_path / "served") as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        archive = wb.open(f"{server.url}/model.pt", cache=False)
        blocks = FileBlocks("model.safetensors", np.arange(0, 1_200_000, 1000), np.arange(1000, 1_201_000, 1000))
        for read in (
            ckpt.state_dict,
            lambda: wb.stats(ckpt, cache=False),
            lambda: list(tensor_fingerprints(ckpt.payloads)),
            lambda: list(file_digests(ckpt.place, [blocks])),
            lambda: list(check_archives(archive.payloads, archive.place)),
            lambda: wb.export(ckpt, tmp_path / "out", format="safetensors"),
        ):
            server.log.clear()
            read()
            assert len(server.log) <= 5, len(server.log)  # one for each of a few threads, and a look whether it changed


def test_a_verification_reads_each_byte_once(tmp_path):
    (tmp_path / "served").mkdir()
    tensors = {f"w{k}": torch.randn(1 << 18) for k in range(12)}
    torch.save(tensors, tmp_path / "served" / "model.pt")
    with warnings.catch_warnings(action="ignore"):  # torch's remark that this is one process
        dcp.save(tensors, checkpoint_id=tmp_path / "served" / "dcp")
    with RangeServer(tmp_path / "served") as server:
        for name in ("model.pt", "dcp"):
            server.log.clear()
            report = wb.verify(f"{server.url}/{name}", deep=True)
            assert not report.exit_code and "checksums" in report.checked and "values" in report.checked
            assert sum(one.sent for one in server.log) <= 1.25 * (12 << 20)


def test_passes_share_a_bounded_room(monkeypatch):
    monkeypatch.setattr(requests, "AHEAD", 100)
    room = requests._Ahead()
    monkeypatch.setattr(requests, "_ahead", room)
    free = []

    def fetch(start: int, stop: int, into: np.ndarray) -> None:
        time.sleep(0.001)
        into[:] = np.arange(start, stop) % 251

    def run(sizes: list[int]) -> None:
        ends = np.cumsum([0, *sizes]).tolist()
        parts = list(pairwise(ends))
        # two sides of a pass: threads that hold one side must not all wait for the other
        with requests.ahead(fetch, parts) as first, requests.ahead(fetch, parts[::-1]) as second:
            for one in (*first, *second):
                row = np.empty(one.stop - one.start, np.uint8)
                assert one.copy(one.start, one.stop, row)
                assert (row == np.arange(one.start, one.stop) % 251).all()
                free.append(room.free)
                one.passed(one.start, one.stop)
                assert not one.copy(one.start, one.stop, row)  # its memory is another's now

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, [[60, 40], [100], [30, 30, 30], [], [10, 90], [50] * 9] * 5, timeout=30))
        assert room.free == 100 and not room._waiting and not room._turns
        assert min(free) >= -100  # beyond the room is only what the first thread waits for
        list(pool.map(run, [[500, 10], [70, 60]] * 3, timeout=30))
    assert room.free == 100


def test_what_nobody_waits_for_is_given_up():
    begun, ended = threading.Barrier(3), []

    def call(item: int) -> None:
        begun.wait(10)
        if not item:
            raise OpenError("no")
        try:
            while True:
                going_on()
                time.sleep(0.001)
        finally:
            ended.append(item)

    with pytest.raises(OpenError):
        requests.together(call, [0, 1, 2])
    assert sorted(ended) == [1, 2]


@pytest.fixture
def interruptible():
    """Ctrl-C raises, even in a process that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "read", [lambda ckpt: wb.stats(ckpt, cache=False), wb.Checkpoint.state_dict, lambda ckpt: ckpt["w"].torch()]
)
def test_an_interrupt_does_not_wait_for_the_network(tmp_path, read, interruptible):
    save_file({"w": torch.zeros(24 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with RangeServer(tmp_path, bandwidth=2e6) as server:  # 12 s
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        sent = []
        timer = threading.Timer(0.5, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT)))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            read(ckpt)
        assert time.monotonic() - sent[0] < 1


@pytest.mark.parametrize("command, first", [("ls", 0), ("stats", 4), ("verify", 2), ("show", 4)])
def test_an_interrupt_ends_a_command_whose_server_never_answers(one, command, first):
    count = itertools.count()
    with RangeServer(one, fault=lambda request: "stall" if next(count) >= first else None) as server:
        line = [command, server.url, *(["w"] if command == "show" else [])]
        with subprocess.Popen(
            [sys.executable, "-m", "workbench", *line],
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            stdout=subprocess.DEVNULL,
        ) as process:
            assert server.stalls.wait(20)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            assert process.wait(20) == 130
            assert time.monotonic() - sent < 5  # a request takes 20 s at least


def test_what_was_left_behind_takes_no_place(interruptible):
    """After Ctrl-C, other calls are not in line behind those whose answer never comes."""
    end, begun = threading.Event(), threading.Barrier(requests.IN_FLIGHT + 1)

    def stuck(_: int) -> None:
        begun.wait(10)
        end.wait(20)

    def interrupt() -> None:
        begun.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        requests.together(stuck, range(requests.IN_FLIGHT))
    assert requests.together(lambda item: item, range(100)) == list(range(100))
    end.set()


@pytest.mark.parametrize("read", [lambda ckpt: ckpt["w"].torch(), wb.Checkpoint.state_dict])
def test_a_server_that_never_answers_is_one_error_by_the_deadline(one, read, monkeypatch):
    monkeypatch.setattr(objects, "DEADLINE", timedelta(seconds=0.5))
    stalling = []
    with RangeServer(one, fault=lambda request: "stall" if stalling else None) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        stalling.append(True)
        before = time.monotonic()
        with pytest.raises(OpenError, match=r"model\.safetensors.*(sent nothing for 0\.5 s|not answer in time); try"):
            read(ckpt)
        assert time.monotonic() - before < 1.5


def test_a_store_that_stays_silent_is_not_waited_for_again_by_each_tensor(tmp_path, monkeypatch):
    """A pass ends soon after; a request that tries again now and then finds out when the store is back."""
    monkeypatch.setattr(objects, "GONE", 0.3)
    monkeypatch.setattr(objects, "PROBE", 0.2)
    save_file({f"w{k}": torch.zeros(1 << 18) for k in range(60)}, tmp_path / "model.safetensors")
    gone = []
    with RangeServer(tmp_path, fault=lambda request: "reset" if gone else None) as server:
        how = {"retry_config": {"max_retries": 0}}
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False, storage_options=how)
        gone.append(True)
        asked, errors, begin = len(server.log), [], time.monotonic()
        while time.monotonic() - begin < 1.5:
            with pytest.raises(OpenError) as caught:
                ckpt["w7"].torch()
            errors.append(str(caught.value))
            time.sleep(0.01)
        silent = [error for error in errors if "has served no request for" in error]
        assert len(silent) > len(errors) // 3 and "model.safetensors" in silent[0]
        tries = len(server.log) - asked
        assert 2 < tries <= len(errors) - len(silent)
        gone.clear()
        time.sleep(0.25)
        assert not ckpt["w7"].torch().any() and not ckpt["w8"].torch().any()  # it is back


def test_a_request_without_an_answer_does_not_end_those_beside_it():
    end = threading.Event()

    def call(start: int, stop: int, into: np.ndarray) -> None:
        if not start:
            with requests.answered(0.1, "late"):
                end.wait(10)
        time.sleep(0.4)
        requests.arrived()
        into[...] = 1

    out = np.zeros(10, np.uint8)
    with requests.ahead(call, [(0, 10), (10, 20)]) as (first, second):
        with pytest.raises(OpenError, match="late"):
            first.copy(0, 10, out)
        assert second.copy(10, 20, out) and out.all()
    end.set()


def test_a_slow_answer_is_not_a_missing_one(tmp_path, monkeypatch):
    save_file({"w": torch.zeros(2 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with RangeServer(tmp_path, bandwidth=2e6) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        monkeypatch.setattr(ckpt.place._files._connection.objects, "_deadline", 0.4)
        assert not ckpt["w"].torch().any()


def test_a_checkpoint_opens_in_few_requests(server):
    """What a reader looks at is fetched at once: no request for each small field, none twice."""
    for sample in ("hf_llama_bf16_sharded", "dcp_fsdp2", "titan_run", "paddlenlp_legacy"):
        server.log.clear()
        wb.open(f"{server.url}/{sample}", cache=False)
        asked = [(one.method, one.path, one.start, one.stop) for one in server.log]
        assert len(asked) == len(set(asked)), sorted(asked)


def test_the_command_ls_asks_for_nothing_twice(server, capsys):
    for path in ("/dcp_fsdp2", "/trainer_run", ""):
        server.log.clear()
        assert main(["ls", f"{server.url}{path}"]) in (0, None)
        asked = [(one.method, one.path, one.start, one.stop) for one in server.log]
        assert len(asked) == len(set(asked)), sorted(asked)


def test_a_folder_of_many_objects_is_listed_level_by_level(server, monkeypatch):
    monkeypatch.setattr(bucket, "MANY", 2)
    for sample in ("bytecheckpoint_fsdp1_flat", "paddlenlp_legacy", "trainer_run"):
        far, near = wb.open(f"{server.url}/{sample}", cache=False), wb.open(ROOT / sample, cache=False)
        assert wb.diff(far, near).summary["changed"] == 0 and list(far.objects) == list(near.objects)


@pytest.mark.slow  # it waits for answers that come late, so that parallel requests overlap
@pytest.mark.parametrize("sample", [*SAMPLES, "loss_spike", "trainer_run", "titan_run"])
def test_a_checkpoint_opens_in_few_round_trips(sample):
    with RangeServer(ROOT, latency=0.2) as server:
        wb.open(f"{server.url}/{sample}", cache=False)
        assert server.rounds <= 6


def test_a_file_is_known_and_open_after_one_request_and_a_row_takes_one_more(one):
    with RangeServer(one) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        ranges = [(request.start, request.stop) for request in server.log if request.start is not None]
        assert ranges == [(0, ranged.BLOCK)] and {request.method for request in server.log} == {"GET"}
        server.log.clear()
        row = ckpt["w"][-1]
        ranges = [request for request in server.log if request.start is not None]  # the listing may come late
        assert len(ranges) == 1 and same_bits(row, wb.open(one / "model.safetensors")["w"][-1])


def test_names_with_dots_are_folders_and_empty_files_too(tmp_path):
    shutil.copytree(ROOT / "dcp_fsdp2", tmp_path / "step.100")
    (tmp_path / "empty.safetensors").touch()
    with RangeServer(tmp_path) as server:
        assert wb.diff(wb.open(f"{server.url}/step.100"), wb.open(ROOT / "dcp_fsdp2")).summary["changed"] == 0
        with pytest.raises(OpenError, match=r"'empty\.safetensors' has 0 bytes"):
            wb.open(f"{server.url}/empty.safetensors", cache=False)
        with pytest.raises(NotACheckpointError, match="does not exist"):
            wb.open(f"{server.url}/none.safetensors", cache=False)


def test_bytes_that_go_to_a_device_in_one_read_are_not_cut_in_requests(tmp_path):
    from workbench.load.device import to_device

    save_file({f"t{k}.weight": torch.randn(512, 2048) for k in range(4)}, tmp_path / "model.safetensors")
    with RangeServer(tmp_path) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        server.log.clear()
        got = to_device(ckpt, "cpu", buffer=8 << 20, threads=1)
        assert len(server.log) == 2  # of 8 MiB each
    for key, want in load_file(tmp_path / "model.safetensors").items():
        assert same_bits(got[key], want)


def test_folders_of_a_server_that_form_a_circle_are_listed_as_far_as_asked(one):
    (one / "again").symlink_to(one, target_is_directory=True)
    with RangeServer(one) as server:
        assert wb.open(server.url, cache=False)["w"].shape == (1000, 1000)
        assert len(server.log) < 50
        assert len(wb.discover(server.url, depth=2)) == 3


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_memory_and_other_schemes_go_through_fsspec():
    system = fsspec.filesystem("memory")
    for file in (ROOT / "dcp_fsdp2").iterdir():
        system.pipe_file(f"/bucket-of-tests/a folder/{file.name}", file.read_bytes())
    try:
        ckpt = wb.open("memory://bucket-of-tests/a folder", cache=False)
        assert wb.diff(ckpt, wb.open(ROOT / "dcp_fsdp2")).summary["changed"] == 0
        assert wb.discover("memory://bucket-of-tests")["path"].tolist() == ["a folder"]
    finally:
        system.rm("/bucket-of-tests", recursive=True)


def test_a_repository_of_the_hub_is_read_at_one_commit(tmp_path):
    """``hf://`` against a server that answers as the hub does: one call for the names, ranges of ``/resolve/``."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(ROOT / "hf_llama_bf16_sharded", tmp_path / "org" / "model" / "resolve" / commit / "sub")
    files = [
        {"rfilename": f"sub/{file.name}", "size": file.stat().st_size}
        for file in (ROOT / "hf_llama_bf16_sharded").iterdir()
    ]
    answer = json.dumps({"id": "org/model", "modelId": "org/model", "sha": commit, "siblings": files}).encode()
    with RangeServer(tmp_path, pages={"api/models/org/model/revision/v1": answer}) as server:
        options = {"endpoint": server.url, "token": "hf_s3cret"}
        ckpt = wb.open("hf://org/model@v1/sub", cache=False, storage_options=options)
        assert ckpt.path == "hf://org/model@v1/sub"
        assert wb.diff(ckpt, wb.open(ROOT / "hf_llama_bf16_sharded")).summary["changed"] == 0
        assert b"hf_s3cret" not in pickle.dumps(ckpt.place) and "hf_s3cret" not in repr(vars(ckpt.place))
        assert {request.path.split("/")[0] for request in server.log} == {"api", "org"}
        with pytest.raises(NotACheckpointError, match="cannot be opened"):
            wb.open("hf://org/other", storage_options=options)


@pytest.mark.parametrize("name", ["a b", "100%", "ümlaut", "what?", "x#y", "a+b&c=d", "%41"])
def test_any_name_can_be_opened(tmp_path, name):
    from urllib.parse import quote

    (tmp_path / name).mkdir()
    save_file({"w": torch.arange(6.0)}, tmp_path / name / "model.safetensors")
    with RangeServer(tmp_path) as server:
        ckpt = wb.open(f"{server.url}/{quote(name)}", cache=False)
        assert ckpt["w"].torch().tolist() == list(range(6))
        assert wb.open(ckpt.path, cache=False).path == ckpt.path
        assert wb.discover(server.url)["path"].tolist() == [name]


def test_urls_are_split_as_their_schemes_say():
    assert parse("s3://b/a/%20/c//d/")[:3] == ("s3", "b", "a/%20/c/d")
    assert parse("https://h:8/a%20b?X-Amz-Signature=1#f")[:4] == ("https", "h:8", "a b", "X-Amz-Signature=1")
    assert parse("gcs://b")[:3] == ("gs", "b", "")
    assert parse("https://ann:pw@h/a").shown == "https://h/a"
    for bad in ("s3:///x", "https://h/../x", "s3://b/../c", "s3://b/\0"):
        with pytest.raises(NotACheckpointError):
            parse(bad)


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_what_goes_over_is_tried_again(one):
    faults: list[int | str] = []
    with RangeServer(one, fault=lambda request: faults.pop() if faults else None) as server:
        faults += [503, "reset", 429]
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        faults += ["short", 500, "short"]
        assert same_bits(ckpt["w"].torch(), load_file(one / "model.safetensors")["w"])
        assert not faults


@pytest.mark.parametrize(
    "fault, error, words",
    [
        (403, MissingFileError, "no permission to read"),
        (404, MissingFileError, "does not exist"),
        (412, ChangedError, "rewritten"),
        (416, ChangedError, "shorter"),
        (429, OpenError, "answered 429 10 times"),
        (500, OpenError, "answered 500 10 times"),
        ("reset", OpenError, "cut the connection"),
        ("short", OpenError, "model.safetensors"),
    ],
)
def test_a_lasting_fault_is_one_clear_error(one, fault, error, words):
    failing = []
    with RangeServer(one, fault=lambda request: fault if failing else None) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        failing.append(True)
        with pytest.raises(error, match=words) as caught:
            ckpt["w"].torch()
        text = str(caught.value)
        assert "model.safetensors" in text and "\n" not in text and "Debug" not in text


def test_an_object_that_is_replaced_is_never_mixed(one):
    with RangeServer(one) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        before = ckpt["w"][:10]
        save_file({"w": torch.zeros(1000, 1000), "b": torch.zeros(500_000)}, one / "model.safetensors")
        with pytest.raises(ChangedError, match="open it again"):
            ckpt["w"].torch()
        assert (before != 0).all()
        assert not wb.open(f"{server.url}/model.safetensors", cache=False)["w"].torch().any()


def test_a_server_without_ranges_or_lists_is_refused_with_a_reason(one):
    with (
        RangeServer(one, ranges=False) as server,
        pytest.raises(UnsupportedFormatError, match=r"ignores byte ranges.*download"),
    ):
        wb.open(f"{server.url}/model.safetensors", cache=False)
    with RangeServer(one, lists=False) as server:
        with pytest.raises(NotACheckpointError, match="does not exist"):
            wb.open(server.url, cache=False)
        assert wb.open(f"{server.url}/model.safetensors", cache=False)["w"].shape == (1000, 1000)


def test_a_page_in_place_of_a_file_is_not_read(one):
    (one / "page").mkdir()
    with RangeServer(one) as server, pytest.raises(WorkbenchError):
        wb.open(f"{server.url}/page", cache=False)


def test_a_link_that_leaves_the_folder_is_not_followed(one):
    links = ("../../etc/passwd", "/etc/passwd", "http://x/y", "..%2Fz", "a/../../b")
    page = "".join(f"<a href='{link}'>x</a>" for link in links).encode()

    def answer(handler, request, body, answered=RangeServer._answer):
        folder = request.path == ""
        return server._send(handler, 200, page, body) if folder else answered(server, handler, request, body)

    with RangeServer(one) as server:
        server._answer = answer
        with pytest.raises(NotACheckpointError):
            wb.open(server.url, cache=False)
        assert {request.path for request in server.log} == {""}


# ---- secrets, processes, extras --------------------------------------------------------------------------------------


def test_a_url_that_is_signed_for_get_alone_opens(tmp_path):
    (tmp_path / "a b").mkdir()
    save_file({"w": torch.arange(6.0)}, tmp_path / "a b" / "model.safetensors")
    with RangeServer(tmp_path, fault=lambda request: 403 if request.method == "HEAD" else None) as server:
        ckpt = wb.open(f"{server.url}/a%20b/model.safetensors?X-Signature=1%2F2", cache=False)
        assert ckpt["w"].torch().tolist() == list(range(6))


def test_no_secret_is_shown_or_pickled(one):
    with RangeServer(one) as server:
        url = server.url.replace("http://", "http://ann:pa55word@") + "/model.safetensors"
        ckpt = wb.open(
            f"{url}?signature=s1gned", cache=False, storage_options={"client_options": {"user_agent": "t0ken"}}
        )
        assert ckpt["b"][:3].shape == (3,)
        (one / "model.safetensors").unlink()
        with pytest.raises(WorkbenchError) as caught:
            ckpt["w"].torch()
        texts = [repr(ckpt), str(ckpt.path), str(caught.value), ckpt._repr_html_(), repr(vars(ckpt.place))]
        texts.append(pickle.dumps(ckpt).decode("latin-1"))
        for secret in ("pa55word", "s1gned", "t0ken"):
            assert not [text for text in texts if secret in text], secret


def test_a_checkpoint_pickles_by_its_url(server):
    ckpt = wb.open(f"{server.url}/hf_llama_bf16_sharded", cache=False)
    assert b"config.json" not in pickle.dumps(ckpt.place._files)  # names are listed again
    again = pickle.loads(pickle.dumps(ckpt))
    key = next(iter(ckpt))
    assert same_bits(again[key].torch(), ckpt[key].torch())


def test_a_forked_process_is_told_rather_than_left_to_wait(server):
    code = f"""
import os, sys, workbench as wb
ckpt = wb.open({server.url + "/hf_peft_lora"!r}, cache=False)
key = next(iter(ckpt))
pid = os.fork()
if not pid:
    try:
        ckpt[key].torch()
    except wb.errors.UsageError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False).returncode == 7


@pytest.mark.parametrize("package, url", [("obstore", "s3://bucket/x"), ("fsspec", "webhdfs://host/x")])
def test_a_missing_extra_says_what_to_install(monkeypatch, package, url):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ckpt-workbench\[remote\]'"):
        wb.open(url)


def test_options_are_for_urls(tmp_path):
    with pytest.raises(UsageError, match="storage_options"):
        wb.open(tmp_path, storage_options={"region": "x"})
    with pytest.raises(NotACheckpointError, match="unknown"):
        wb.open("nosuch://host/x")
    with pytest.raises(UsageError, match="storage options"):
        wb.open("s3://bucket/x", storage_options={"no_such_option": 1})


def test_nothing_is_written_under_the_name_of_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckpt = wb.open(ROOT / "hf_peft_lora")
    for call in (
        lambda: wb.export(ckpt, "https://ann:pw@host/out"),
        lambda: wb.export(ckpt, "hf://user/repo/out"),
        lambda: wb.export(ckpt, "webhdfs://ann:pw@host/out"),
        lambda: wb.echo(torch.nn.Linear(2, 2), path="https://ann:pw@host/x"),
        lambda: manifest.write(ckpt, "https://ann:pw@host/m.json"),
    ):
        with pytest.raises(UsageError, match="not written to") as caught:
            call()
        assert "pw" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_urls(server, tmp_path, monkeypatch, capsys):
    """In a process of its own once, then here, as a process takes a second to start."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        code = main(list(arguments))
        return code, *capsys.readouterr()

    url = f"{server.url}/titan_run"
    command = [sys.executable, "-m", "workbench", "ls", url]
    assert "step-4" in subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert run("verify", f"{url}/step-4")[0] == 0
    assert run("diff", f"{url}/step-2", str(ROOT / "titan_run" / "step-2"))[0] == 0
    assert "No fault found" in run("doctor", url)[1]
    assert run("export", f"{url}/step-4", str(tmp_path / "out"))[0] == 0
    shutil.rmtree(tmp_path / "out")
    code, _, said = run("manifest", "write", f"{url}/step-4")
    assert code == 64 and "name one of these or a local path" in said


# ---- what servers get wrong ------------------------------------------------------------------------------------------


def changed_headers(server, **headers):
    """Have a server send other headers with its files; ``None`` leaves one out."""

    def answer(handler, request, body, answered=RangeServer._answer):
        send = handler.send_header

        def send_header(name, value):
            value = headers.get(name.replace("-", "_"), value)
            if value is not None:
                send(name, value)

        handler.send_header = send_header
        return answered(server, handler, request, body)

    server._answer = answer


def test_two_saves_are_told_apart_without_an_etag(one):
    path = one / "model.safetensors"
    with RangeServer(one) as server:
        changed_headers(server, ETag=None)
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        assert ckpt["w"][:10].shape == (10, 1000)
        save_file({"w": torch.zeros(1000, 1000), "b": torch.zeros(500_000)}, path)
        os.utime(path, (0, path.stat().st_mtime + 2))
        with pytest.raises(ChangedError, match="rewritten after the checkpoint was opened"):
            ckpt["w"].torch()


def test_user_and_password_are_sent(one):
    seen = []

    def answer(handler, request, body, answered=RangeServer._answer):
        seen.append(handler.headers.get("Authorization"))
        return answered(server, handler, request, body)

    with RangeServer(one) as server:
        server._answer = answer
        url = server.url.replace("http://", "http://ann:p%40ss@")
        assert wb.open(url, cache=False)["b"][:3].shape == (3,)
    assert set(seen) == {"Basic YW5uOnBAc3M="}
    with (
        RangeServer(one, fault=lambda request: 401) as server,
        pytest.raises(MissingFileError, match=r"no permission to read.*USER:PASSWORD@HOST"),
    ):
        wb.open(f"{server.url}/model.safetensors", cache=False)


@pytest.mark.parametrize("content_range", ["bytes 7-9/11", None])
def test_an_answer_that_is_not_the_range_has_a_reason(one, content_range):
    with RangeServer(one) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        changed_headers(server, Content_Range=content_range)
        with pytest.raises(UnsupportedFormatError, match=r"byte range with something else.*download"):
            ckpt["w"].torch()


def test_a_server_that_compresses_is_called_one(one):
    size = (one / "model.safetensors").stat().st_size

    def answer(handler, request, body):
        handler.send_response(206)
        for name, value in (("Range", f"bytes 0-{request.stop - 1}/{size}"), ("Encoding", "gzip"), ("Length", "12")):
            handler.send_header(f"Content-{name}", value)
        handler.end_headers()
        handler.wfile.write(b"x" * 12)

    with RangeServer(one) as server:
        server._answer = answer
        with pytest.raises(UnsupportedFormatError, match=r"compresses the file \(Content-Encoding: gzip\)"):
            wb.open(f"{server.url}/model.safetensors", cache=False)


def test_a_login_page_is_called_one(one):
    pages = []
    with RangeServer(one, fault=lambda request: "page" if pages else None) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        pages.append(True)
        with pytest.raises(MissingFileError, match="HTML page instead of the file"):
            ckpt["w"].torch()
        for url in ("model.safetensors", "model.safetensors?sig=1", "folder"):
            with pytest.raises(NotACheckpointError, match=r"HTML page.*login page"):
                wb.open(f"{server.url}/{url}", cache=False)


@pytest.mark.parametrize(
    "url, words",
    [
        ("http://127.0.0.1:1/x", "connection was refused; check host and port"),
        ("http://no-such-host.invalid/x", "host name is unknown; check the URL"),
    ],
)
def test_a_server_that_is_not_there_is_told_at_once(url, words):
    with pytest.raises(OpenError, match=words):
        wb.open(url)


def test_a_plain_server_does_not_speak_tls(server):
    with pytest.raises(OpenError, match="does not speak TLS"):
        wb.open(server.url.replace("http:", "https:"))


def test_one_file_of_a_server_is_never_sent_whole(one):
    with RangeServer(one) as server:
        for query in ("", "?token=1"):
            wb.open(f"{server.url}/model.safetensors{query}", cache=False)
        assert {one.path for one in server.log} == {"model.safetensors"}
        assert all(one.start is not None for one in server.log)


def test_an_overloaded_server_is_asked_again_for_longer(one, monkeypatch):
    monkeypatch.setattr(objects, "PAUSES", (0.01, 0.01, 0.01))
    faults: list[int] = []
    with RangeServer(one, fault=lambda request: faults.pop() if faults else None) as server:
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False)
        faults += [503] * 13
        assert ckpt["b"][-3:].shape == (3,) and not faults
        options = {"retry_config": {"max_retries": 1}}
        ckpt = wb.open(f"{server.url}/model.safetensors", cache=False, storage_options=options)
        faults += [503] * 13
        with pytest.raises(OpenError, match="answered 503 2 times; try again later"):
            ckpt["b"][-3:]
    assert 45 <= sum(PAUSES) + 1.5 * (len(PAUSES) + 1) <= objects.DEADLINE.total_seconds()


def test_an_index_names_the_files_beside_it_by_url(server):
    near = ROOT / "hf_llama_bf16_sharded"
    name = next(path.name for path in near.glob("*.index.json"))
    far = wb.open(f"{server.url}/{near.name}/{name}", cache=False)
    assert list(far) == list(wb.open(near / name, cache=False))
    key = next(iter(far))
    assert same_bits(far[key].torch(), wb.open(near, cache=False)[key].torch())


# ---- what users get wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "az://container/x?sv=1&sig=s3cret",
        "abfs://c@acc/x?sig=s3cret",
        "ftp://127.0.0.1:1/x?token=s3cret",
        "foo://h/x?token=s3cret",
        "http://usr:s3cret/pw@127.0.0.1/x",
        "http:/usr:s3cret@127.0.0.1/x",
        "memory://h/x?X-Amz-Signature=s3cret",
    ],
)
def test_a_url_that_cannot_be_opened_keeps_its_secret(url):
    with pytest.raises(OpenError) as caught:
        wb.open(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1:99999", "exa mple", "h:8x"])
def test_a_host_that_is_none_is_named(host):
    with pytest.raises(NotACheckpointError, match=r"host.*is not a name or a name:port"):
        wb.open(f"http://{host}/x")


def test_a_file_url_is_the_path(one, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "from").mkdir()
    one = (one / "model.safetensors").rename(tmp_path / "from" / "model.safetensors").parent
    for url in (f"file://{one}", f"file:{one}/model.safetensors", f"file://localhost{one}"):
        assert wb.open(url, cache=False)["b"].shape == (500_000,)
    ckpt = wb.open(one, cache=False)
    wb.export(ckpt, f"file://{tmp_path}/a%20b/out")
    assert wb.diff(ckpt, tmp_path / "a b" / "out").summary["changed"] == 0
    with pytest.raises(NotACheckpointError, match="write the path"):
        wb.open("file://h/x")


@pytest.mark.parametrize(
    "url, options, words",
    [
        ("s3://b/x", {"endpoint": "minio.local:9000"}, "'minio.local:9000' is not a URL: begin it with http://"),
        ("https://h/x", {"client_options": "30s"}, "client_options is '30s'; give a dict"),
        ("s3://b/x", {"retry_config": 3}, "retry_config is 3; give a dict"),
        ("https://h/x", {"cache_dir": 5}, "cache_dir is 5; give the path"),
    ],
)
def test_an_option_of_the_wrong_type_is_named(url, options, words):
    with pytest.raises(UsageError, match=words):
        wb.open(url, storage_options=options)


def test_an_endpoint_in_the_environment_is_a_url(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(UsageError, match="begin it with http://"):
        wb.open("s3://b/x")


def test_a_panic_of_a_library_is_an_error():
    class PanicException(BaseException):  # as pyo3's
        pass

    def fail() -> None:
        raise PanicException("unwrap on\nNone")

    with pytest.raises(OpenError, match="library that talks to the store failed: unwrap on None"):
        requests.alone(fail).wanted()


def test_a_hub_out_of_reach_is_an_error(monkeypatch):
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise Elsewhere("[Errno -2] Name or service not known")

    class Elsewhere(Exception):  # as httpx.ConnectError, which is no OSError
        pass

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(OpenError, match=r"the hub could not be reached.*Name or service not known"):
        wb.open("hf://openai/gpt2")
