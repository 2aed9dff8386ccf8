"""The cache of what was fetched: the same bits, fewer requests, never stale or damaged bytes, bounded, shared."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.range_server import RangeServer
from workbench.analysis.verify import verify
from workbench.core.remote.payload_cache import PayloadCache
from workbench.errors import UsageError

ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*flat)


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def opened(server: RangeServer, path: str, cache: Path, **options: object) -> wb.Checkpoint:
    return wb.open(f"{server.url}/{path}", cache=False, storage_options={"cache_dir": str(cache), **options})


@pytest.mark.parametrize("sample", ["hf_llama_bf16_sharded", "dcp_fsdp2", "dcp_hsdp_2x2"])
def test_what_was_read_once_is_not_requested_again(cache, sample):
    truth = load_file(ROOT.parent / "tests/truth" / f"{sample}.safetensors")
    with RangeServer(ROOT) as server:
        for again in (False, True):
            ckpt = opened(server, sample, cache)
            for key, tensor in truth.items():
                assert same_bits(ckpt[key].torch(), tensor), key
            assert ckpt.io is not None and (ckpt.io["received"] == 0) == again, ckpt.io
            assert not again or ckpt.io["cached"] >= ckpt.catalog.tensor_nbytes.sum()


def test_another_content_is_another_entry(cache, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    save_file({"w": torch.ones(5000)}, folder / "w.safetensors")
    with RangeServer(folder) as server:
        assert opened(server, "w.safetensors", cache)["w"].torch().sum() == 5000
        save_file({"w": torch.zeros(5000)}, folder / "w.safetensors")
        os.utime(folder / "w.safetensors", ns=(1, 1))
        assert opened(server, "w.safetensors", cache)["w"].torch().sum() == 0


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_file_of_the_cache_is_fetched_again(cache, harm):
    truth = load_file(ROOT.parent / "tests/truth/dcp_fsdp2.safetensors")
    with RangeServer(ROOT) as server:
        first = opened(server, "dcp_fsdp2", cache)
        first.state_dict()
        for path in files(cache):
            data = bytearray(path.read_bytes())
            data[random.Random(path.name).randrange(len(data))] ^= 16
            if harm == "gone":
                path.unlink()
            else:
                path.write_bytes(data if harm == "flip" else data[: len(data) // 2])
        ckpt = opened(server, "dcp_fsdp2", cache)
        assert all(same_bits(ckpt[key].torch(), truth[key]) for key in truth)
        assert first.io is not None and ckpt.io is not None and ckpt.io["received"] >= first.io["received"]


def test_verify_reads_what_is_in_the_store(cache, tmp_path):
    """A bit that flips in the store without a new ETag: the cache has the old bytes, and verify does not ask it."""
    shutil.copytree(ROOT / "dcp_fsdp2", tmp_path / "served/run")
    file = tmp_path / "served/run/__0_0.distcp"
    with RangeServer(tmp_path / "served") as server:
        ckpt = opened(server, "run", cache)
        ckpt.state_dict()
        assert not [one for one in verify(ckpt, deep=True) if one.severity == "error"]
        stat, data = file.stat(), bytearray(file.read_bytes())
        data[data.index(bytes(ckpt["model.model.embed_tokens.weight"][0].view(torch.uint8)))] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert opened(server, "run", cache).io is not None
        for subject in (ckpt, opened(server, "run", cache)):
            assert [one for one in verify(subject, deep=True) if one.severity == "error"]


def test_the_size_is_bounded_and_what_is_longest_unused_goes_first(cache):
    held = PayloadCache(str(cache), size=1_000_000)
    blocks = {at: random.Random(at).randbytes(50_000) for at in range(0, 2_000_000, 50_000)}
    for number, (at, data) in enumerate(blocks.items()):
        held.keep("s3://b/key", 10**9, "etag", at, memoryview(data))
        assert held.find("s3://b/key", 10**9, "etag", 0, 50_000) is not None  # in use
        os.utime(next(cache.rglob("0-50000")), ns=(2**61 + number, 2**61 + number))
        assert sum(path.stat().st_size for path in files(cache)) <= 1_000_000 + 2 * 62_500
    assert bytes(held.find("s3://b/key", 10**9, "etag", 10, 50_000) or b"") == blocks[0][10:]
    assert held.find("s3://b/key", 10**9, "etag", 50_000, 100_000) is None  # the oldest after it
    assert held.find("s3://b/key", 10**9, "other", 0, 50_000) is None
    assert held.find("s3://b/key", 10**9, "etag", 0, 50_001) is None


def test_several_processes_share_a_folder(cache):
    """Each finds its bytes or nothing, while all write, read and remove in a folder that is too small for them."""
    code = """if True:
        import random, sys
        from workbench.core.remote.payload_cache import PayloadCache
        held, pick, hits = PayloadCache(sys.argv[1], 300_000), random.Random(int(sys.argv[2])), 0
        for _ in range(1500):
            at = 10_000 * pick.randrange(60)
            found = held.find("u", 1, "e", at, at + 10_000)
            want = random.Random(at).randbytes(10_000)
            assert found is None or bytes(found) == want
            hits += found is not None
            if found is None:
                held.keep("u", 1, "e", at, memoryview(want))
        assert hits
    """
    runs = [subprocess.Popen([sys.executable, "-c", code, str(cache), str(n)]) for n in range(3)]
    assert [run.wait(120) for run in runs] == [0, 0, 0]
    assert not [path for path in files(cache) if path.suffix == ".tmp"]


def test_threads_share_a_cache(cache):
    held, wrong = PayloadCache(str(cache), size=200_000), []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(300):
            at = 5_000 * pick.randrange(60)
            want = random.Random(at).randbytes(5_000)
            found = held.find("u", 1, "e", at, at + 5_000)
            if found is None:
                held.keep("u", 1, "e", at, memoryview(want))
            elif bytes(found) != want:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_folder_that_cannot_be_used_is_one_clear_error(cache, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with RangeServer(ROOT) as server:
        with pytest.raises(UsageError, match=r"cache folder .* cannot be written"):
            opened(server, "dcp_fsdp2", tmp_path / "file")
        with pytest.raises(UsageError, match=r"cache_size is 'much'; give a number of bytes"):
            opened(server, "dcp_fsdp2", cache, cache_size="much")


def test_the_command_line_keeps_what_it_fetched(cache, capsys):
    from workbench.cli import main

    with RangeServer(ROOT) as server:
        shown = []
        for _ in range(2):
            assert main(["stats", f"{server.url}/hf_llama_bf16_sharded", "--cache-dir", str(cache)]) == 0
            shown.append((capsys.readouterr().out, sum(one.sent for one in server.log)))
        assert shown[0][0] == shown[1][0] and files(cache)
        assert shown[1][1] - shown[0][1] < shown[0][1] / 10  # names and identities only
    kept = files(cache)
    assert main(["ls", str(ROOT / "dcp_fsdp2"), "--cache-dir", str(cache)]) == 0 and files(cache) == kept
