"""Memory for results: the right shape and type, writable, and huge pages only as a wish."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import workbench as wb
from workbench.analysis import manifest, manifest_check
from workbench.core import memory
from workbench.core.memory import map_file
from workbench.core.source import PreadSource


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20,), (1031, 1033), (2, 1 << 20), (0, 1 << 22)])
@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u8", "<c16"])
def test_like_numpy(shape: tuple[int, ...], dtype: str) -> None:
    out = memory.empty(shape, np.dtype(dtype))
    assert (out.shape, out.dtype) == (shape, np.dtype(dtype))
    assert out.flags.c_contiguous and out.flags.writeable and out.flags.aligned
    out[...] = 1
    assert (out == 1).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux only")
def test_large_arrays_begin_on_a_huge_page() -> None:
    assert memory.empty((3 << 20,), np.dtype("u1")).ctypes.data % memory.HUGE_PAGE == 0


def test_arrays_do_not_share_memory() -> None:
    first, second = (memory.empty((4 << 20,), np.dtype("u1")) for _ in range(2))
    first[:], second[:] = 1, 2
    assert first.min() == first.max() == 1


def test_no_room_for_another_map_is_still_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    assert memory.empty((4 << 20,), np.dtype("u1")).nbytes == 4 << 20


# ---- maps and descriptors --------------------------------------------------------------------------------------------


def _descriptors(folder) -> int:
    """How many descriptors of files below a folder are open: threads of other tests may just close theirs."""
    return sum(target.startswith(f"{folder}/") for target in map(_target, os.listdir("/proc/self/fd")))


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # that of the listing itself
        return ""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_an_open_checkpoint_holds_no_descriptor(samples, tmp_path):
    for name in ("hf_llama_bf16_sharded", "torch_save/ckpt.pt", "dcp_fsdp2"):
        before = _descriptors(samples)
        with wb.open(samples / name, cache=False) as ckpt:
            held = [ckpt[key].torch() for key in ckpt] + [ckpt[key].numpy() for key in ckpt]
            assert _descriptors(samples) <= before, name
        assert _descriptors(samples) <= before and len(held) == 2 * len(ckpt)
    with open(samples / "torch_save/ckpt.pt", "rb"):
        assert _descriptors(samples) > 0  # it would be seen


def test_an_operation_opens_each_file_once(samples, monkeypatch):
    opened = Counter()
    made = PreadSource.__init__

    def counted(self, path, name):
        opened[name] += 1
        made(self, path, name)

    monkeypatch.setattr(PreadSource, "__init__", counted)
    with wb.open(samples / "dcp_hsdp_2x2", cache=False) as ckpt:
        opened.clear()
        ckpt.state_dict()
        assert len(opened) == 8 and set(opened.values()) == {1}
        opened.clear()
        key = max(ckpt, key=lambda one: len(ckpt[one].chunks))
        ckpt[key][::2]
        assert set(opened.values()) == {1}


@pytest.fixture
def without_descriptors():
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    @contextlib.contextmanager
    def taken():
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return taken


ASKED = {
    "open": lambda path, _: wb.open(path, cache=False),
    "discover": lambda path, _: wb.discover(path),
    "verify": lambda path, _: wb.verify(path, deep=True),
    "verify, opened": lambda _, ckpt: wb.verify(ckpt, deep=True),
    "doctor": lambda path, _: wb.doctor(path, path),
    "doctor, opened": lambda _, ckpt: wb.doctor(ckpt, ckpt),
    "stats": lambda _, ckpt: wb.stats(ckpt, cache=False),
    "diff": lambda _, ckpt: wb.diff(ckpt, ckpt),
    "timeline": lambda path, _: wb.timeline([path]),
    "manifest": lambda path, _: manifest_check.check(path),
}


@pytest.mark.parametrize("sample", ["hf_llama_bf16_sharded", "torch_save/ckpt.pt", "dcp_single_odd"])
def test_what_needs_files_says_that_no_descriptor_is_free(samples, tmp_path, without_descriptors, sample):
    path = tmp_path / "c"
    (shutil.copytree if (samples / sample).is_dir() else shutil.copyfile)(samples / sample, path)
    manifest.write(wb.open(path, cache=False))
    told = {}
    for name, ask in ASKED.items():
        ckpt = wb.open(path, cache=False)
        with without_descriptors():
            try:
                told[name] = repr(ask(path, ckpt))
            except wb.errors.OpenError as error:
                told[name] = "no free file descriptor" if "no free file descriptor" in str(error) else str(error)
    assert told == dict.fromkeys(ASKED, "no free file descriptor")
    assert wb.verify(path, deep=True).exit_code == 0  # nothing of it is remembered


def test_a_module_that_is_imported_late_says_that_no_descriptor_is_free(samples):
    code = (
        "import resource, workbench as wb\n"
        f"ckpt = wb.open({os.fspath(samples / 'dcp_fsdp2')!r}, cache=False)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 64))\n"
        "for name in ('layout', 'verify', 'doctor'):\n"
        "    try:\n"
        "        getattr(wb, name)(ckpt)\n"
        "    except wb.errors.OpenError as error:\n"
        "        print('no free file descriptor' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


def test_a_map_outlives_its_descriptor_and_goes_with_its_last_view(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 64)
    with open(path, "rb") as handle:
        shared = map_file(handle.fileno(), 1 << 14)
        own = map_file(handle.fileno(), 1 << 12, private=True)
    view = shared[100:104]
    del shared
    gc.collect()
    assert view.tolist() == [100, 101, 102, 103] and not view.flags.writeable
    own[0] = 77
    assert own[0] == 77 and path.read_bytes()[0] == 0
    with open(path, "rb") as handle, pytest.raises(OSError):
        map_file(handle.fileno(), 1 << 14, offset=1)


def test_open_checkpoints_need_no_descriptors_and_a_process_without_any_is_told_so(samples):
    code = (
        "import resource, sys, workbench as wb\n"
        f"path = {os.fspath(samples / 'hf_llama_bf16_sharded')!r}\n"
        f"first = wb.open(path, cache=False)\n"
        "[first[key].torch().sum() for key in first]\n"
        "wb.verify(path)\n"  # what it imports is there
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "held = []\n"
        "try:\n"
        "    for _ in range(100):\n"
        f"        held.append(wb.open(path, cache=False))\n"
        "        [held[-1][key].torch().sum() for key in held[-1]]\n"
        "except wb.errors.WorkbenchError as error:\n"
        "    print(type(error).__name__, error)\n"
        "print(len(held))\n"
        "taken = []\n"
        "try:\n"
        "    while True:\n"
        "        taken.append(open('/dev/null'))\n"
        "except OSError:\n"
        "    pass\n"
        "try:\n"
        "    first[next(iter(first))].torch()\n"
        "except wb.errors.WorkbenchError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, told = done.stdout.splitlines()
    assert count == "100"
    assert told.startswith("OpenError") and "too many files are open" in told and "ulimit" in told
