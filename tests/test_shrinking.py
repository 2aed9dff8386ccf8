"""Files that are cut or rewritten while they are read: an error, never the end of the process, never a mixture.

Each case runs in a process of its own, for what it guards against is a signal (SIGBUS). The race is made certain: the
file is cut at a call of the reader's own, after every check that comes before the read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from workbench.core.catalog import INFLATED_LEAST
from workbench.core.place import Place

SHAPE = (2048, 1024)  # 8 MiB: several pieces of any pass

PREAMBLE = """
import json, os, sys, traceback, numpy as np, torch, workbench as wb
from workbench.core import source, storage
from workbench.errors import ChangedError, WorkbenchError

def cut(keep=4096):
    os.truncate(path, keep)

def cut_before_read(count=1):
    '''Cut the file before the count-th system call that reads: all checks have passed by then.'''
    real, left = os.preadv, [count]
    def preadv(fd, buffers, at):
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            left[0] -= 1
            if left[0] == 0:
                cut()
        return real(fd, buffers, at)
    os.preadv = preadv

def blind():
    '''No check of a path sees that the file is cut, as if it happened right after it.'''
    storage.SourcePool.check = lambda self, file: None

def refused(call):
    try:
        call()
    except ChangedError as error:
        text = str(error)
        assert os.path.basename(path) in text, text
        assert 'open it again' in text or 'write it again' in text, text
    else:
        raise AssertionError('no error')

torch.set_num_threads(1)  # threads of OpenMP do not survive a fork: a parallel loop in the child may wait for them
healthy = wb.open(sys.argv[1])  # what a pass imports and compiles, once for all
wb.stats(healthy, cache=False), wb.diff(healthy, healthy), wb.doctor(healthy), wb.verify(healthy, deep=True)
wb.export(healthy, sys.argv[2]), healthy.to_device('cpu')
for line in sys.stdin:
    path, folder, said, code = json.loads(line)
    pid = os.fork()
    if not pid:
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1), os.dup2(1, 2)
            exec(code)
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

READS = {
    "slice": "refused(lambda: ckpt['w1'][5:900, ::2])",
    "row": "refused(lambda: ckpt['w1'][-1])",
    "list": "refused(lambda: ckpt['w2'][[2000, 3, 3]])",
    "whole": "refused(lambda: ckpt['w1'].torch())",
    "array": "refused(lambda: np.asarray(ckpt['w1']))",
    "state_dict": "refused(ckpt.state_dict)",
    "device": "refused(lambda: ckpt.to_device('cpu'))",
    "export": "refused(lambda: wb.export(ckpt, folder + '/out'))",
    "manifest": "from workbench.analysis import manifest\nrefused(lambda: manifest.write(ckpt, folder + '/m.json'))",
    "fingerprints": "from workbench.core.fingerprint import tensor_fingerprints\n"
    "refused(lambda: list(tensor_fingerprints(ckpt.payloads)))",
    "stats": "frame = wb.stats(ckpt, cache=False)\n"
    "assert frame['error'].str.contains('open it again').any(), frame['error'].tolist()",
    "diff": "found = wb.diff(ckpt, wb.open(folder + '/same.safetensors'))\n"
    "assert found.summary['unread'] and not found.summary['equal'] + found.summary['changed'] == 3, found.summary",
    "doctor": "text = str(wb.doctor(ckpt)); assert text",
    "repr": "repr(ckpt['w1']); repr(ckpt); ckpt._repr_html_(); ckpt['w1']._repr_html_()",
    "load": "refused(lambda: wb.load({'w1': torch.zeros(2048, 1024)}, ckpt, strict=False))",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    state = {f"w{n}": torch.randn(SHAPE) for n in range(3)}
    save_file(state, folder / "x.safetensors")
    torch.save(state, folder / "x.pt")
    return folder


@pytest.fixture(scope="module")
def told(saved, tmp_path_factory):
    """A function that runs a program in a process forked from one that has done all once: its exit code, its output."""
    work = tmp_path_factory.mktemp("told")
    command = [sys.executable, "-c", PREAMBLE, os.fspath(saved / "x.safetensors"), os.fspath(work / "warm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:

        def run(path, folder, code):
            said = work / "said"
            said.unlink(missing_ok=True)
            parent.stdin.write(json.dumps([*map(os.fspath, (path, folder, said)), textwrap.dedent(code)]) + "\n")
            parent.stdin.flush()
            return int(parent.stdout.readline()), said.read_text()

        yield run


@pytest.fixture
def run(told):
    """Run a program of the tests below, which ends by itself."""

    def run(path, folder, code):
        status, said = told(path, folder, code)
        assert status >= 0, f"ended by signal {-status}: {said[-2000:]}"
        assert status == 0, said[-3000:]
        return said

    return run


@pytest.fixture
def ends(told, saved, tmp_path):
    """How each read ended, with files of its own, where that was not well: its exit code, or a signal below zero."""

    def ends(name, reads, prepare):
        bad = {}
        for read, code in reads.items():
            own = copied(saved, tmp_path / read)
            status, said = told(own / name, own, f"{prepare}\n{code}")
            if status:
                bad[read] = (status, said[-2000:])
            shutil.rmtree(own)
        return bad

    return ends


def copied(saved, folder):
    """Copies that a test may damage."""
    folder.mkdir(exist_ok=True)
    for name in ("x.safetensors", "x.pt"):
        shutil.copyfile(saved / name, folder / name)
    os.link(saved / "x.safetensors", folder / "same.safetensors")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return copied(saved, tmp_path)


def test_a_file_that_is_cut_after_it_was_opened_is_a_changed_file(ends):
    assert not ends("x.safetensors", READS, "ckpt = wb.open(path)\nckpt['w0'][0]\ncut()")


def test_a_file_that_is_cut_between_the_check_and_the_read_is_a_changed_file(ends):
    assert not ends("x.safetensors", READS, "ckpt = wb.open(path)\nblind()\ncut_before_read(1)")


@pytest.mark.parametrize("name", ["x.safetensors", pytest.param("x.pt", marks=pytest.mark.slow)])
def test_a_file_that_is_cut_in_the_middle_of_a_pass_is_a_changed_file(ends, name):
    reads = {read: READS[read] for read in ("state_dict", "stats", "diff", "manifest", "export", "doctor")}
    assert not ends(name, reads, "ckpt = wb.open(path)\nblind()\ncut_before_read(4)")


@pytest.mark.parametrize("name", [pytest.param("x.safetensors", marks=pytest.mark.slow), "x.pt"])
def test_verify_reports_a_file_that_is_cut_while_every_byte_is_checked(ends, name):
    check = "report = wb.verify(path, deep=True)\nassert report[0].severity == 'error', report"
    counts = {f"read {count}": f"blind()\ncut_before_read({count})\n{check}" for count in (3, 9, 20)}
    assert not ends(name, counts, "")


def test_opening_survives_a_file_that_is_cut_while_its_directory_is_read(ends):
    code = """
cut_before_read({count})
try:
    wb.open(path, cache=False)
except WorkbenchError:
    pass
"""
    assert not ends("x.pt", {f"read {n}": code.format(count=n) for n in (1, 2, 3)}, "")


@pytest.mark.parametrize(
    "how", ["cut", *(pytest.param(how, marks=pytest.mark.slow) for how in ("emptied", "rewritten"))]
)
def test_what_was_handed_out_outlives_the_file(run, folder, how):
    changes = {
        "cut": "cut()",
        "emptied": "open(path, 'wb').close()",
        "rewritten": "size = os.path.getsize(path); open(path, 'r+b').write(b'\\xff' * size)",
    }
    run(
        folder / "x.safetensors",
        folder,
        f"""
        ckpt = wb.open(path)
        held = [ckpt["w0"].torch(), ckpt["w1"][...], ckpt["w1"][5:], torch.from_numpy(ckpt["w2"].numpy()),
                torch.from_numpy(np.asarray(ckpt["w2"])), *ckpt.state_dict().values()]
        before = [tensor.clone() for tensor in held]
        ckpt.close()
        {changes[how]}
        assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
        assert all(tensor.is_contiguous() for tensor in held)
        refused_now = lambda: ckpt["w0"].torch()
        try:
            refused_now()
        except ChangedError:
            pass
        else:
            raise SystemExit("the change was not seen")
        """,
    )


def test_a_view_is_handed_out_to_who_asks_for_one_only(saved):
    ckpt = wb.open(saved / "x.safetensors")
    mapped = ckpt["w1"].numpy(copy=False)
    assert mapped.base is not None and (mapped == ckpt["w1"].numpy()).all()
    with open("/proc/self/maps") as maps:
        assert sum("x.safetensors" in line for line in maps) == 1
    held = [
        ckpt["w1"].torch(),
        ckpt["w1"].numpy(),
        np.asarray(ckpt["w1"]),
        ckpt["w1"][...],
        *ckpt.state_dict().values(),
    ]
    plain = wb.open(saved / "x.safetensors", io="pread")["w1"].torch(copy=False)
    with open("/proc/self/maps") as maps:
        assert sum("x.safetensors" in line for line in maps) == 1, "something else was mapped"
    assert torch.equal(plain, held[0])
    with pytest.raises(ValueError, match="copy"):
        np.array(ckpt["w1"], copy=False)


def test_a_file_that_is_rewritten_in_the_middle_of_a_read_is_a_changed_file(run, folder):
    found = run(
        folder / "x.safetensors",
        folder,
        """
        ckpt = wb.open(path)
        real = os.preadv
        def preadv(fd, buffers, at):
            count = real(fd, [buffers[0][: len(buffers[0]) // 2]], at)
            with open(path, "r+b") as handle:
                handle.seek(at)
                handle.write(bytes(100))
            os.utime(path, ns=(1, 1))
            return count
        os.preadv = preadv
        try:
            ckpt["w1"].torch()
        except ChangedError as error:
            print(error)
        """,
    )
    assert "'x.safetensors' was rewritten while bytes" in found


def test_a_read_that_ends_early_is_read_on(run, saved):
    """A system call may give less than it was asked for; only nothing at all is the end of the file."""
    truth = wb.open(saved / "x.safetensors")["w1"].torch()
    run(
        saved / "x.safetensors",
        saved,
        """
        ckpt = wb.open(path)
        want = ckpt["w1"].torch()
        real = os.preadv
        os.preadv = lambda fd, buffers, at: real(fd, [buffers[0][:100_000]], at)
        assert torch.equal(ckpt["w1"].torch(), want)
        """,
    )
    assert truth.shape == SHAPE


def test_a_failing_disk_is_an_error_that_names_the_byte(run, saved):
    found = run(
        saved / "x.safetensors",
        saved,
        """
        ckpt = wb.open(path)
        def preadv(fd, buffers, at):
            raise OSError(5, "Input/output error")
        os.preadv = preadv
        try:
            ckpt["w1"].torch()
        except WorkbenchError as error:
            print(error)
        """,
    )
    assert "'x.safetensors', byte " in found and "Input/output error" in found


# ---- tensors that are far larger than what is stored -----------------------------------------------------------------


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    path = tmp_path_factory.mktemp("expanded") / "x.pt"
    torch.save(
        {
            "huge": torch.zeros(1).expand(1 << 20, 1 << 20),
            "mask": torch.arange(4096.0).expand(64, 4096),
            "row": torch.arange(3.0).expand(100, 3),
        },
        path,
    )
    return path


def test_a_tensor_of_terabytes_in_a_few_bytes_is_listed_and_refused(expanded):
    ckpt = wb.open(expanded)
    huge = ckpt["huge"]
    assert huge.nbytes == 1 << 42 and huge.inflated and not ckpt["mask"].inflated
    assert "4,398,046,511,104" in repr(huge) or "4 TiB" in repr(huge)
    reads = (huge.torch, huge.numpy, lambda: huge[0], lambda: huge.torch(copy=False), ckpt.state_dict)
    for read in reads:
        with pytest.raises(wb.errors.UnsafeError, match=r"'huge'.*4,398,046,511,104 bytes is stored in 4"):
            read()
    assert torch.equal(ckpt["mask"].torch(), torch.arange(4096.0).expand(64, 4096))
    assert torch.equal(ckpt["row"][5:7], torch.arange(3.0).expand(2, 3))


def test_passes_over_a_tensor_of_terabytes_end_at_once(expanded, tmp_path):
    begin = time.monotonic()
    ckpt = wb.open(expanded)
    frame = wb.stats(ckpt, cache=False).set_index("key")
    assert "was not read: its logical size of 4,398,046,511,104 bytes is stored in 4" in frame.loc["huge", "error"]
    assert frame.loc["row", "sum" if "sum" in frame else "numel"] == 300
    report = wb.verify(expanded, deep=True)
    (refused,) = [one for one in report if one.rule == "read.refused"]
    assert refused.where == "huge" and refused.severity == "warn" and "was not read" in refused.message
    assert "expanded tensors" in report.not_checked
    assert not any("'huge'" in one.message for one in report if one.rule != "read.refused")
    found = wb.diff(ckpt, wb.open(expanded, cache=False))
    assert found.summary["unread"] == 1 and found.summary["equal"] == 2
    assert str(wb.doctor(expanded))
    with pytest.raises((wb.errors.WriteError, wb.errors.UnsafeError)):
        wb.export(ckpt, tmp_path / "out")
    assert time.monotonic() - begin < 60


def test_many_tensors_over_the_same_bytes_are_refused_together(tmp_path):
    base = torch.arange(2048.0)
    windows = {f"w{n}": base.as_strided((1024, 1024), (0, 1), n % 1000) for n in range(1200)}
    torch.save({**windows, "plain": torch.ones(5)}, tmp_path / "x.pt")
    ckpt = wb.open(tmp_path / "x.pt")
    with pytest.raises(wb.errors.UnsafeError, match=r"the tensors of 'x\.pt' have a logical size of 5,033"):
        ckpt["w7"].torch()
    assert torch.equal(ckpt["plain"].torch(), torch.ones(5))
    torch.save(dict(list(windows.items())[:10]), tmp_path / "few.pt")
    few = wb.open(tmp_path / "few.pt")
    assert few["w3"].nbytes < INFLATED_LEAST and torch.equal(few["w3"].torch(), windows["w3"])
    assert np.isfinite(wb.stats(few, cache=False)["mean"]).all()


def in_order(path, order):
    """Tensors ``a`` of zeros and ``b`` of ones, stored one after the other in that order."""
    dense = {key: np.full((64, 64), float(key == "b"), np.float32) for key in order}
    if path.suffix == ".pt":
        torch.save({key: torch.from_numpy(dense[key]) for key in order}, path)
        return
    places = {key: [at * 16384, (at + 1) * 16384] for at, key in enumerate(order)}
    head = json.dumps({key: {"dtype": "F32", "shape": [64, 64], "data_offsets": places[key]} for key in "ab"}).encode()
    head = head.ljust(200)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(dense[key].tobytes() for key in order))


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
@pytest.mark.parametrize("method", ["stat", "read", "window"])
def test_a_file_replaced_while_it_is_opened_is_never_taken_for_the_other(tmp_path, monkeypatch, name, method):
    one, other = tmp_path / name, tmp_path / "beside" / name
    other.parent.mkdir()
    kept, left = getattr(Place, method), [0]

    def then_replaced(place, *args, **options):
        found = kept(place, *args, **options)
        left[0] -= 1
        if not left[0]:
            os.replace(other, one)
        return found

    monkeypatch.setattr(Place, method, then_replaced)
    for number in range(1, 9):
        in_order(one, "ab")
        in_order(other, "ba")
        os.utime(other, (2e9, 2e9))
        assert one.stat().st_size == other.stat().st_size
        left[0] = number
        try:
            with wb.open(one, cache=False) as ckpt:
                assert torch.equal(ckpt["a"][:], torch.zeros(64, 64)) and torch.equal(ckpt["b"][:], torch.ones(64, 64))
        except wb.errors.ChangedError:
            pass
