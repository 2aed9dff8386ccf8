"""Executors and parts: the same results, to the bit, wherever the tasks of a call run; whatever fails is one error."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import workbench as wb
from tests.range_server import RangeServer
from tests.test_stores import S3, SECRET, s3, server, upload
from workbench.analysis import manifest
from workbench.cli import main
from workbench.core import blocks, checksums, executors, work
from workbench.errors import ChangedError, UsageError, WorkbenchError, WorkerError

__all__ = ["s3", "server"]  # fixtures

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "sample_ckpts"
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of 40 KB and batches of 200 KB, so that small samples are cut everywhere; and a clock that stops."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(executors, "LEAST", 0)
    monkeypatch.setattr(executors, "BATCH", 200 << 10)
    for module in (work, blocks, checksums):
        monkeypatch.setattr(module, "TASK", 40 << 10)
    monkeypatch.setattr(manifest, "datetime", Clock)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
        yield pool


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from distributed import Client, LocalCluster

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0")
    with cluster, Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(params=["pool", "dask"])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "dask":
        return request.getfixturevalue("client").get_executor()
    return request.getfixturevalue("pool")


class Counting(Executor):
    """Counts what is sent to another executor, so that a test cannot pass without it."""

    _max_workers = 1

    def __init__(self, executor: Executor) -> None:
        self.executor, self.futures = executor, list[Future[Any]]()

    def submit(self, function: Any, /, *given: Any, **named: Any) -> Future[Any]:
        self.futures.append(self.executor.submit(function, *given, **named))
        return self.futures[-1]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- the same to the bit ---------------------------------------------------------------------------------------------

Call = Callable[[Path, Path, Executor | None], Any]


def _stats(sample: Path, folder: Path, executor: Executor | None) -> Any:
    ckpt = wb.open(sample)
    tables = [
        wb.stats(ckpt, "tensor", quantiles=True, cache=False, executor=executor),
        wb.stats(ckpt.model, "shard", cache=False, executor=executor),
    ]
    return [repr(table.to_dict()) for table in tables]


def _verify(sample: Path, folder: Path, executor: Executor | None) -> Any:
    return wb.verify(sample, deep=True, executor=executor).to_dict()


def _manifest(sample: Path, folder: Path, executor: Executor | None) -> Any:
    manifest.write(wb.open(sample), folder / "manifest.json", executor=executor)
    return files(folder)


def _export(sample: Path, folder: Path, executor: Executor | None) -> Any:
    made = wb.export(wb.open(sample), folder / "plain", dtype="float32", executor=executor)
    again = wb.export(wb.open(sample), folder / "dcp", "dcp", role="all", verify=True, executor=executor)
    return files(folder), [one.to_dict()["tensors"] for one in (made, again)]


CALLS: dict[str, Call] = {"stats": _stats, "verify": _verify, "manifest": _manifest, "export": _export}
CHOSEN = ["dcp_hsdp_2x2", "hf_llama_bf16_sharded"]
_alone: dict[tuple[str, str], Any] = {}
_both: list[Any] = []


@pytest.mark.parametrize("sample", CHOSEN)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_the_same_on_an_executor(call: str, sample: str, executor: Executor, tmp_path: Path) -> None:
    counting = Counting(executor)
    for name, where in (("alone", None), ("spread", counting)):
        (tmp_path / name).mkdir()
        if where is None and (call, sample) in _alone:
            continue
        found = CALLS[call](SAMPLES / sample, tmp_path / name, where)
        if where is None:
            _alone[call, sample] = found
    assert found == _alone[call, sample]
    assert len(counting.futures) > 2


def test_a_diff_and_a_diagnosis_are_the_same_on_an_executor(executor: Executor) -> None:
    a, b = SAMPLES / "titan_run" / "step-2", SAMPLES / "titan_run" / "step-4"
    if not _both:
        _both.extend((wb.diff(a, b).to_dict(), wb.doctor(a, b, echo=a).to_dict()))
    counting = Counting(executor)
    assert wb.diff(a, b, executor=counting).to_dict() == _both[0]
    sent = len(counting.futures)
    assert wb.doctor(a, b, echo=a, executor=counting).to_dict() == _both[1]
    assert sent > 2 and len(counting.futures) > 2 * sent


def test_threads_are_an_executor_too_and_progress_arrives(tmp_path: Path) -> None:
    seen: list[float] = []
    with ThreadPoolExecutor(2) as pool:
        found = wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=pool, threads=2, progress=seen.append)
    assert found.equals(wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False))
    assert len(seen) > 10 and seen == sorted(seen) and seen[-1] == 1.0


def test_a_small_pass_stays_in_this_process(monkeypatch: pytest.MonkeyPatch, pool: Executor) -> None:
    monkeypatch.setattr(executors, "LEAST", 32 << 20)
    counting = Counting(pool)
    wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=counting)
    assert not counting.futures


def test_a_batch_does_not_carry_the_catalog() -> None:
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    sizes = []

    class Sizes(ThreadPoolExecutor):
        def submit(self, function: Any, /, *given: Any, **named: Any) -> Any:
            sizes.append(len(given[-1]))
            return super().submit(function, *given, **named)

    with Sizes(1) as pool:
        wb.stats(ckpt.model, cache=False, executor=pool)
    assert sizes and max(sizes) < 16_000


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_damage_is_reported_alike(pool: Executor, tmp_path: Path) -> None:
    sample = tmp_path / "damaged"
    shutil.copytree(SAMPLES / "dcp_fsdp2", sample)
    shard = sorted(sample.glob("*.distcp"))[0]
    with open(shard, "r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\xff" * 3000)
        file.truncate(shard.stat().st_size * 3 // 4)
    alone, spread = wb.verify(sample, deep=True), wb.verify(sample, deep=True, executor=pool)
    assert alone.to_dict() == spread.to_dict() and alone.count("error")
    ckpt = wb.open(sample, partial=True)
    tables = [wb.stats(ckpt, cache=False, executor=one) for one in (None, pool)]
    assert tables[0].equals(tables[1]) and tables[0]["error"].notna().any()
    errors = []
    for one in (None, pool):
        with pytest.raises(WorkbenchError) as caught:
            wb.export(ckpt, tmp_path / "out", role="all", executor=one)
        errors.append((type(caught.value), str(caught.value)))
        assert not (tmp_path / "out").exists()
    assert errors[0] == errors[1]


def test_a_replaced_file_is_a_changed_error(executor: Executor, tmp_path: Path) -> None:
    sample = tmp_path / "changed"
    shutil.copytree(SAMPLES / "dcp_fsdp2", sample)
    ckpt = wb.open(sample)
    shard = sorted(sample.glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    tables = [wb.stats(ckpt, cache=False, executor=one) for one in (None, executor)]  # rows of other files are right
    assert tables[0].equals(tables[1]) and tables[0]["error"].str.contains("rewritten after").any()
    with pytest.raises(ChangedError, match="rewritten after"):
        wb.export(ckpt, tmp_path / "out", "dcp", role="all", executor=executor)
    ckpt, metadata = wb.open(sample), sample / ".metadata"
    metadata.write_bytes(metadata.read_bytes())
    with pytest.raises(ChangedError):  # of a checkpoint that a worker has not opened yet
        wb.stats(ckpt, cache=False, executor=executor)


def test_a_lost_process_is_one_error() -> None:
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:

        def lose(done: float) -> None:
            for process in pool._processes.values():
                process.kill()

        with pytest.raises(WorkerError, match=r"executor did not finish.*BrokenProcessPool"):
            wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=pool, progress=lose)
        with pytest.raises(WorkerError):
            wb.verify(SAMPLES / "dcp_fsdp2", deep=True, executor=pool)
    with pytest.raises(WorkerError, match="executor did not finish"):
        wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=pool)


def test_what_is_no_executor_is_refused_with_what_to_pass(client: Any, tmp_path: Path) -> None:
    sample = SAMPLES / "dcp_fsdp2"
    for given, words in [
        (client, "not Client: pass client.get_executor()"),
        (client.cluster, "not LocalCluster: pass distributed.Client(cluster).get_executor()"),
        (4, "not int: pass a ProcessPoolExecutor, or get_executor() of a Dask client"),
        (ProcessPoolExecutor, "not type: pass a ProcessPoolExecutor"),
    ]:
        calls: list[Callable[[Any], object]] = [
            lambda one: wb.stats(sample, cache=False, executor=one),
            lambda one: wb.verify(sample, deep=True, executor=one),
            lambda one: wb.diff(sample, sample, executor=one),
            lambda one: wb.doctor(sample, sample, executor=one),
            lambda one: wb.export(sample, tmp_path / "out", executor=one),
            lambda one: manifest.write(wb.open(sample), tmp_path / "m.json", executor=one),
        ]
        for call in calls:
            with pytest.raises(UsageError, match=re.escape(words)):
                call(given)
    assert not list(tmp_path.iterdir())


def test_other_versions_are_refused(pool: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "VERSION", "0")
    with pytest.raises(WorkerError, match="install the same versions"):
        wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=pool)


def test_cancelling_cancels_what_waits() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        counting = Counting(pool)
        first = pool.submit(lambda: None)

        def stop(done: float) -> None:
            pool.submit(release.wait)
            raise KeyboardInterrupt

        first.result()
        with pytest.raises(KeyboardInterrupt):
            wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False, executor=counting, progress=stop)
        release.set()
    assert all(future.done() for future in counting.futures)
    assert len(counting.futures) < 10


def test_a_store_is_read_by_spawned_processes_and_refused_to_forked_ones(pool: Executor) -> None:
    with RangeServer(SAMPLES) as server:
        ckpt = wb.open(f"{server.url}/dcp_fsdp2", cache=False)
        near = wb.stats(wb.open(SAMPLES / "dcp_fsdp2"), cache=False)
        assert near.equals(wb.stats(ckpt, cache=False, executor=pool))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as forked:
            with pytest.raises(UsageError, match=r"get_context\('spawn'\)"):
                wb.stats(ckpt, cache=False, executor=forked)
            with pytest.raises(UsageError, match=r"get_context\('spawn'\)"):
                wb.doctor(ckpt, executor=forked)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """A client of a scheduler and a worker in processes of their own."""
    from distributed import Client

    address, logs = str(tmp_path / "scheduler.json"), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    one = subprocess.Popen([*words, "--no-dashboard", "--scheduler-file", address], env=env, **logs)
    words = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", address, "--nthreads", "1"]
    other = subprocess.Popen([*words, "--no-dashboard", "--no-nanny"], env=env, **logs)
    try:
        while not os.path.exists(address):
            assert one.poll() is None
            time.sleep(0.05)
        with Client(scheduler_file=address, timeout=30, set_as_default=False) as client:
            yield client, one
    finally:
        for process in (one, other):
            process.kill()
            process.wait()


def test_a_scheduler_that_dies_is_one_error(scheduler: tuple[Any, subprocess.Popen[bytes]]) -> None:
    client, process = scheduler
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    with pytest.raises(WorkerError, match=r"lost its Dask scheduler|connection to its scheduler"):
        wb.stats(ckpt, cache=False, executor=client.get_executor(), progress=lambda done: process.kill())
    with pytest.raises(WorkerError):
        wb.stats(ckpt, cache=False, executor=client.get_executor())


def test_cluster_without_workers_is_one_error_and_a_worker_that_comes_back_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dask
    from distributed import Client, LocalCluster

    monkeypatch.setattr(executors, "POLL", 0.1)
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    alone = wb.stats(ckpt, cache=False)
    timeout = executors.NO_WORKERS_KEY
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with dask.config.set({timeout: "300ms"}), pytest.raises(WorkerError, match=r"no workers for 0\.3 s"):
            wb.stats(ckpt, cache=False, executor=client.get_executor())
        with dask.config.set({timeout: "60s"}):
            threading.Timer(0.5, cluster.scale, [1]).start()
            assert wb.stats(ckpt, cache=False, executor=client.get_executor()).equals(alone)


def test_result_that_arrives_as_its_worker_is_lost_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LEAST", 0)
    monkeypatch.setattr(executors, "BATCH", 200 << 10)
    runs = []

    class Racing(Executor):
        """Does with every third result what distributed's executor does in this case."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            result = fn(*args)
            runs.append(len(runs) % 3)
            try:
                if runs[-1] == 0:
                    _, error, trace = result
                    raise error.with_traceback(trace)
                future.set_result(result)
            except BaseException as error:
                future.set_exception(error)
            return future

    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    assert wb.stats(ckpt, cache=False, executor=Racing()).equals(wb.stats(ckpt, cache=False))
    assert runs.count(0) > 1


@pytest.mark.slow
def test_fifty_lost_workers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask
    from distributed import Client, LocalCluster
    from distributed.core import Status

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(executors, "BATCH", 20 << 10)
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    alone = wb.stats(ckpt, cache=False)
    chance, killed = random.Random(0), 0
    settings = {
        "distributed.scheduler.allowed-failures": 1000,
        "distributed.comm.timeouts.connect": "10s",
        "distributed.deploy.lost-worker-timeout": "1h",  # a cluster gives up nannies that it sees without a worker
        "distributed.worker.multiprocessing-method": "forkserver",  # 100 workers start, most of them import nothing
    }
    with (
        dask.config.set(settings),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):

        def kill(done: float) -> None:
            nonlocal killed
            nanny = chance.choice(list(cluster.workers.values()))
            if chance.random() < 0.2 and done < 0.9 and nanny.status is Status.running:  # it gives up one that starts
                process = nanny.process
                if process is not None and process.status is Status.running and process.is_alive():
                    with suppress(ProcessLookupError):  # it ended meanwhile, and is not counted
                        os.kill(process.process.pid, 9)
                        killed += 1

        while killed < 50:
            found = wb.stats(ckpt, cache=False, executor=client.get_executor(), progress=kill)
            assert found.equals(alone)


# ---- the command line ------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def parts_of(capsys: pytest.CaptureFixture[str], count: int, *words: object) -> list[str]:
    made = [run(capsys, *words, "--part", f"{number}/{count}") for number in range(1, count + 1)]
    assert [code for code, *_ in made] == [0] * count, made
    return [out.strip() for _, out, _ in made]


def test_parts_beside_a_file_are_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.arange(6.0)}, "one.safetensors")
    parts = parts_of(capsys, 2, "verify", "--deep", "one.safetensors")
    assert parts == ["one.safetensors.verify.1-of-2.part", "one.safetensors.verify.2-of-2.part"]
    merged = run(capsys, "merge", *parts)
    assert merged[0] == 0 and "leftover" not in merged[1]
    Path("one.safetensors.part").write_bytes(b"of a download")
    assert "files.leftover" in run(capsys, "verify", "one.safetensors")[1]


@pytest.mark.parametrize("sample", ["dcp_hsdp_2x2", "hf_llama_bf16_sharded"])
@pytest.mark.parametrize(
    "words",
    [("stats", "--quantiles"), ("stats", "--by", "shard", "--role", "model"), ("verify", "--deep")],
    ids=" ".join,
)
def test_merged_parts_are_the_result_of_one_process(
    words: tuple[str, ...], sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    # on a busy machine, a result that took a second would be kept, and the merge would say so
    monkeypatch.setattr(importlib.import_module("workbench.analysis.stats"), "WORTH_KEEPING", float("inf"))
    command = (words[0], SAMPLES / sample, *words[1:])
    alone = run(capsys, *command, "--json")
    parts = parts_of(capsys, 3, *command)

    def never(*_: Any) -> Any:
        raise AssertionError("a merge reads nothing")

    monkeypatch.setattr("workbench.core.scan._Task.__call__", never)
    monkeypatch.setattr("workbench.core.checksums._CheckRecords.__call__", never)
    assert run(capsys, "merge", *reversed(parts), "--json") == alone


def test_merged_parts_write_the_manifest_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("manifest", "write", SAMPLES / "dcp_fsdp2", "--output", "manifest.json")
    alone = run(capsys, *words)
    wanted = Path("manifest.json").read_bytes()
    os.unlink("manifest.json")
    parts = parts_of(capsys, 4, *words)
    assert not Path("manifest.json").exists()
    assert run(capsys, "merge", *parts) == alone
    assert Path("manifest.json").read_bytes() == wanted


def test_a_merge_after_damage_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Chunks that cannot be read are in no later pass, which a part does not know."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "dcp_hsdp_2x2", "sample")
    shard = sorted(Path("sample").glob("*.distcp"))[0]
    with open(shard, "r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\xff" * 5000)
    alone = run(capsys, "verify", "sample", "--deep", "--json")
    merged = run(capsys, "merge", *parts_of(capsys, 2, "verify", "sample", "--deep"), "--json")
    assert merged[:2] == alone[:2] and alone[0] == 2


def test_parts_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "dcp_fsdp2", "sample")
    one, two, three = parts_of(capsys, 3, "stats", "sample")

    def refused(*parts: str) -> str:
        code, out, error = run(capsys, "merge", *parts)
        assert code in (3, 64) and not out and error.count("\n") == 1
        return error

    assert "part 2 of 3 is missing" in refused(one, three)
    assert "are both part 1 of 3" in refused(one, one, two, three)
    assert "does not exist: run that part" in refused(one, two, "3.part")
    assert "is not a part" in refused(one, two, "sample/.metadata")
    text = Path(three).read_text()
    Path("cut.part").write_text(text[: len(text) // 2])
    assert "damaged" in refused(one, two, "cut.part")
    Path("flipped.part").write_text(text.replace('"state"', '"stale"', 1))
    assert "damaged or incomplete" in refused(one, two, "flipped.part")
    (other,) = parts_of(capsys, 1, "stats", "sample", "--by", "shard", "--part-file", "other.part")
    assert "one of 1 parts and one of 3" in refused(one, other)
    assert run(capsys, "stats", "sample", "--by", "shard", "--part", "2/3", "--part-file", "shard.part")[0] == 0
    assert "parts of different calls: options differ" in refused(one, "shard.part", three)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    above = [f"../{part}" for part in (one, two, three)]
    assert "the parts name it relative to the folder in which they ran" in refused(*above)
    assert run(capsys, "merge", *above, "--checkpoint", "../sample")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert "--storage-option is for URLs, and 'sample' is a local path" in refused(
        one, two, three, "--storage-option", "region=x"
    )
    shard = sorted(Path("sample").glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert "changed after its parts were computed" in refused(one, two, three)
    assert run(capsys, "stats", "sample", "--part", "2/3", "--part-file", "new.part")[0] == 0
    assert "parts of different contents" in refused(one, "new.part", three)


def test_parts_hold_no_storage_options_and_merge_with_other_credentials(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    upload(s3, SAMPLES / "hf_llama_bf16_sharded", "st")
    named = [f"{name}={s3.options[name]}" for name in ("endpoint", "access_key_id", "secret_access_key", "region")]
    options = [word for one in named for word in ("--storage-option", one)]
    words = ("verify", "s3://bucket/st", "--deep")
    alone = run(capsys, *words, *options, "--json")
    assert run(capsys, *words, *options, "--part", "1/2", "--part-file", "1.part")[0] == 0
    with monkeypatch.context() as patch:
        for name in ("endpoint_url", "access_key_id", "secret_access_key", "region"):
            patch.setenv(f"AWS_{name.upper()}", s3.options[name.removesuffix("_url")])
        assert run(capsys, *words, "--part", "2/2", "--part-file", "2.part")[0] == 0
        assert run(capsys, "merge", "1.part", "2.part", "--json") == alone
    assert run(capsys, "merge", "1.part", "2.part", "--json", *options) == alone
    for part in map(Path, ("1.part", "2.part")):
        assert SECRET not in part.read_text() and "storage_option" not in part.read_text()


@pytest.mark.parametrize("words", [("stats", "URL"), ("manifest", "write", "URL", "--output", "m.json")], ids=" ".join)
def test_parts_of_differently_signed_urls_hold_no_signature_and_merge(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLES / "hf_peft_lora" / "adapter_model.safetensors", "one.safetensors")
    with RangeServer(tmp_path) as server:
        host = server.url.removeprefix("http://")
        for number in (1, 2):
            url = f"http://usr:s3cret{number}@{host}/one.safetensors?sig=s3cret{number}"
            given = [url if word == "URL" else word for word in words]
            assert run(capsys, *given, "--part", f"{number}/2", "--part-file", f"{number}.part")[0] == 0
        assert not [part for part in ("1.part", "2.part") if "s3cret" in Path(part).read_text()]
        for words in ((), ("--checkpoint", f"http://usr:s3cret3@{host}/one.safetensors?sig=s3cret3")):
            code, out, error = run(capsys, "merge", "1.part", "2.part", *words)
            assert code == 0 and out and "s3cret" not in out + error
        server.fault = lambda request: 403
        code, _, error = run(capsys, "merge", "1.part", "2.part")
        assert code == 3 and "no permission" in error and "give it again with --checkpoint" in error
        server.fault = None
        shutil.copy("one.safetensors", "two.safetensors")
        Path("two.safetensors").touch()
        code, _, error = run(capsys, "merge", "1.part", "2.part", "--checkpoint", f"{server.url}/two.safetensors")
        assert code == 3 and "changed after its parts were computed" in error


def test_wrong_uses_of_the_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLES / "dcp_fsdp2", "sample")
    for words, why in [
        (("stats", "sample", "--workers", "2", "--dask", "tcp://127.0.0.1:1"), "either --workers or --dask"),
        (("stats", "sample", "--part", "1/2", "--workers", "2"), "leave out --workers"),
        *(
            (("stats", "sample", "--part", part), f"'{part}' is not a part: write 3/8 for the third of eight")
            for part in ("3/2", "0/3", "1/0", "3", "/3", "a/3", "1/100001", "1/1234567")
        ),
        (("stats", "sample", "--part", "1/2", "--part-file", "sample/x.part"), "is inside the checkpoint"),
        (("verify", "sample", "--part", "1/2"), "give --deep as well"),
        (("manifest", "check", "sample", "--part", "1/2"), "--part is for manifest write"),
        (("export", "sample", "--to-device", "cpu", "--workers", "2"), "loads into this process"),
    ]:
        code, out, error = run(capsys, *words)
        assert (code, out) == (64, "") and why in error, words
    monkeypatch.setitem(sys.modules, "distributed", None)
    code, _, error = run(capsys, "stats", "sample", "--dask", "tcp://127.0.0.1:1")
    assert code == 3 and "pip install 'ckpt-workbench[dask]'" in error


def test_no_scheduler_is_one_line_in_time(
    capfd: Any, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    monkeypatch.setattr("workbench.cli.workers.CONNECT", 0.4)
    late = "|Timed out"  # on a busy machine, before anything is known
    other = f"(what listens there does not answer as a scheduler does{late})"
    with RangeServer(SAMPLES) as web, socket.create_server(("127.0.0.1", 0)) as silent:
        for address, why in [
            (f"tcp://127.0.0.1:{free_port()}", f"(Connection refused{late})"),
            (web.url.replace("http", "tcp"), other),
            (f"tcp://127.0.0.1:{silent.getsockname()[1]}", other),
            ("nonsense", "missing port number"),
            ("", "missing port number"),
            (web.url, "unknown address scheme 'http'"),
            ("tls://127.0.0.1:1", "TLS"),
        ]:
            began = time.monotonic()
            code, out, error = run(capfd, "stats", SAMPLES / "dcp_fsdp2", "--no-cache", "--dask", address)
            gc.collect()  # of what is left of a client, nothing may be printed later
            assert (code, out, *capfd.readouterr()) == (3, "", "", "") and error.count("\n") == 1
            assert re.search(f"no Dask scheduler answers at '{re.escape(address)}': {why}", error)
            assert time.monotonic() - began < 5


def test_a_command_runs_on_a_scheduler_and_in_processes(capsys: Any, client: Any) -> None:
    words = ("stats", SAMPLES / "hf_llama_bf16_sharded", "--no-cache", "--json")
    alone = run(capsys, *words)
    on_dask = run(capsys, *words, "--dask", client.scheduler.address)
    assert on_dask[:2] == alone[:2] and "Dask dashboard" in on_dask[2]

    async def in_a_loop() -> tuple[int, str, str]:  # as in a notebook
        return run(capsys, *words, "--dask", client.scheduler.address)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, in_a_loop()).result()[:2] == alone[:2]
    assert run(capsys, *words, "--workers", "1") == alone
    assert json.loads(alone[1])["rows"]


def test_tasks_that_nobody_waits_for_any_more_do_not_run() -> None:
    """The pool may be shared: when a call ends early, its tasks that have not begun are dropped, the others awaited."""
    done: list[int] = []

    def run(task: int) -> int:
        time.sleep(0.02)
        done.append(task)
        return task

    with ThreadPoolExecutor(2) as pool:
        results = executors.in_order(pool, run, range(100))
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        ended = len(done)
        time.sleep(0.1)
        assert len(done) == ended < 10
