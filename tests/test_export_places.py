"""Targets in odd places: links, odd names, file systems that lack calls, folders that go or change meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

import workbench as wb
from tests.filling import fill
from tests.test_export_transaction import put_old, state
from workbench import errors
from workbench.export.atomic import leftovers, owners, transaction
from workbench.export.atomic.journal import Journal
from workbench.export.atomic.transaction import clean, staging
from workbench.export.export import export


def refused(error: int):
    def call(*args, **named):
        raise OSError(error, os.strerror(error))

    return call


NAMES = {
    "not UTF-8": os.fsdecode(b"out-\xff\xfe"),
    "255 bytes": "x" * 255,
    "255 bytes of more than one each": "é" * 127 + "x",
    "as our own temps": ".out.tmp-00000000.00000000.1.1.000000000000",
    "with their mark": "a.tmp-b.old-c",
    "spaces and newlines": " a\n b ",
    "a pattern": "[a-z]*?",
}


@pytest.mark.parametrize("plan", [None, "p"], ids=["plain", "resumable"])
@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_any_name_will_do(tmp_path, monkeypatch, name, folder, plan):
    target = tmp_path / "parent.tmp-x" / name
    target.parent.mkdir()
    for exchange in (True, False):
        with monkeypatch.context() as patch:
            if not exchange:
                patch.setattr(transaction, "rename_exchange", lambda *_: False)
            with staging(target, folder=folder, nbytes=1, overwrite=True, plan=plan) as made:
                fill(made, "old")
            with staging(target, folder=folder, nbytes=1, overwrite=True, plan=plan) as made:
                fill(made, "new")
        assert state(target) == "new" and os.listdir(target.parent) == [name]


@pytest.mark.parametrize("folder", [True, False])
def test_a_link_stays_and_what_it_names_is_replaced(tmp_path, folder):
    (tmp_path / "store").mkdir()
    put_old(tmp_path / "store" / "real", folder)
    link = tmp_path / "link"
    link.symlink_to("store/real")
    with staging(link, folder=folder, nbytes=1, overwrite=True) as made:
        fill(made)
        assert Path(made.work).parent == tmp_path / "store"
    assert link.is_symlink() and state(link) == state(tmp_path / "store" / "real") == "new"
    with pytest.raises(errors.WriteError, match="exists"), staging(link, folder=folder, nbytes=1):
        pytest.fail("the block ran")


def test_links_to_nowhere_and_in_circles(tmp_path):
    (tmp_path / "new").symlink_to("made")
    with staging(tmp_path / "new", folder=True, nbytes=1) as made:
        fill(made)
    assert state(tmp_path / "made") == "new" and (tmp_path / "new").is_symlink()
    (tmp_path / "nowhere").symlink_to("no/such")
    (tmp_path / "circle").symlink_to("circle")
    for name, words in (("nowhere", "does not exist"), ("circle", "is not a")):
        with pytest.raises(errors.WriteError, match=words), staging(tmp_path / name, folder=True, nbytes=1):
            pytest.fail("the block ran")


def test_a_target_inside_its_source_is_refused(samples, tmp_path):
    """It would become part of the checkpoint. One that would be replaced by its own export: test_export."""
    source = tmp_path / "source"
    shutil.copytree(samples / "hf_llama_bf16_sharded", source)
    (tmp_path / "link").symlink_to(source)
    (source / "deeper").mkdir()
    before = sorted(path.name for path in source.iterdir())
    with wb.open(source) as ckpt:
        for target in (source / "again", source / "deeper" / "again", tmp_path / "link" / "again"):
            for more in ({}, {"dry_run": True}, {"overwrite": True}):
                with pytest.raises(errors.UsageError, match="inside the checkpoint being exported"):
                    export(ckpt, target, **more)
    assert sorted(path.name for path in source.iterdir()) == before
    with wb.open(samples / "torch_save" / "ckpt.pt") as ckpt:  # beside a file is not inside it
        shutil.copy(samples / "torch_save" / "ckpt.pt", source / "ckpt.pt")
    with wb.open(source / "ckpt.pt") as ckpt:
        assert export(ckpt, source / "beside").identical


def test_an_adapter_is_not_overwritten_by_its_merge(samples, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(samples / "hf_peft_lora", adapter)
    with wb.open(samples / "hf_llama_bf16_sharded") as ckpt:
        for target in (adapter, adapter / "merged"):
            with pytest.raises(errors.UsageError, match="the checkpoint being exported"):
                export(ckpt, target, lora=adapter, overwrite=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("format", ["bytecheckpoint", "safetensors"])
def test_a_folder_that_cannot_be_made_is_our_error(samples, tmp_path, monkeypatch, code, format):
    made = os.mkdir
    for allowed in range(4):
        left = [allowed]

        def refusing(path, *rest, left=left, **more):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code), path)
            made(path, *rest, **more)

        with wb.open(samples / "dcp_hsdp_2x2") as ckpt, monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", refusing)
            try:
                export(ckpt, tmp_path / f"out{allowed}", format)
            except errors.WriteError as error:
                assert os.strerror(code) in str(error)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("out")]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_target_that_no_file_system_can_hold(samples, tmp_path, name):
    with (
        wb.open(samples / "hf_llama_bf16_sharded") as ckpt,
        pytest.raises(errors.UsageError, match="not a valid file name"),
    ):
        export(ckpt, f"{tmp_path}/{name}")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS], ids=["EACCES", "EROFS"])
def test_a_parent_that_cannot_be_written_to(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "mkdir", refused(code))
    words = {errno.EACCES: "ask the folder's owner", errno.EROFS: "read-only"}[code]
    with pytest.raises(errors.WriteError, match=words), staging(tmp_path / "out", folder=True, nbytes=1):
        pytest.fail("the block ran")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_a_parent_that_is_replaced_meanwhile(tmp_path, folder, old):
    parent = tmp_path / "parent"
    parent.mkdir()
    if old:
        put_old(parent / "out", folder)
    with (
        pytest.raises(errors.WriteError, match="'out' cannot be written"),
        staging(parent / "out", folder=folder, nbytes=1, overwrite=True) as made,
    ):
        fill(made)
        parent.rename(tmp_path / "away")
        parent.mkdir()
        (parent / "mine").write_text("x")
    assert os.listdir(parent) == ["mine"]
    assert state(tmp_path / "away" / "out") == ("old" if old else "absent")


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("old", [True, False])
def test_a_file_system_without_locks_links_and_flags(tmp_path, monkeypatch, folder, old):
    """As NFS and FAT are: the process alone tells who is alive, and names are taken by plain renames."""
    monkeypatch.setattr(fcntl, "flock", refused(errno.ENOLCK))
    monkeypatch.setattr(os, "link", refused(errno.EPERM))
    monkeypatch.setattr(transaction, "rename_exchange", lambda *_: False)
    monkeypatch.setattr(transaction, "rename_noreplace", lambda *_: False)
    target = tmp_path / "out"
    if old:
        put_old(target, folder)
    with staging(target, folder=folder, nbytes=1, overwrite=True) as made:
        assert clean(str(target)) == []
        fill(made)
    assert state(target) == "new" and os.listdir(tmp_path) == ["out"]
    with pytest.raises(errors.WriteError, match="exists"), staging(target, folder=folder, nbytes=1):
        pytest.fail("the block ran")


def test_a_file_that_appears_meanwhile_where_there_are_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refused(errno.EOPNOTSUPP))
    monkeypatch.setattr(transaction, "rename_noreplace", lambda *_: False)
    target = tmp_path / "out"
    with pytest.raises(errors.WriteError, match="exists"), staging(target, folder=False, nbytes=1) as made:
        fill(made)
        target.write_text("somebody's")
    assert target.read_text() == "somebody's" and os.listdir(tmp_path) == ["out"]


def test_every_folder_of_a_target_is_synced(tmp_path, monkeypatch):
    synced = []
    real = transaction.sync_folder
    monkeypatch.setattr(transaction, "sync_folder", lambda path: (synced.append(path), real(path)))
    with staging(tmp_path / "out", folder=True, nbytes=1) as made:
        os.makedirs(os.path.join(made.path, "model", "deep"))
        inside = made.path
    assert synced == [os.path.join(inside, "model", "deep"), os.path.join(inside, "model"), inside, str(tmp_path)]


# ---- whose temps they are --------------------------------------------------------------------------------------------


@pytest.fixture
def dead(tmp_path):
    """The temp of a process that is gone."""
    host, boot, _, *rest = owners.token().split(".")
    path = tmp_path / f".out.tmp-{'.'.join([host, boot, '3fffff', *rest])}"
    path.mkdir()
    return path


def test_a_lock_counts_more_than_a_name(tmp_path, dead):
    with owners.locked(str(dead)):
        assert clean(str(tmp_path / "out")) == [] and dead.is_dir()
    assert clean(str(tmp_path / "out")) == [dead.name] and os.listdir(tmp_path) == []


def test_one_that_looks_is_not_taken_for_the_owner(tmp_path, dead):
    fd = os.open(dead, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # as somebody does who looks at the same moment
        assert clean(str(tmp_path / "out")) == [dead.name]
    finally:
        os.close(fd)


def test_of_one_that_removes_and_one_that_goes_on_one_wins(tmp_path, dead, monkeypatch):
    """A temp is renamed before it is removed: nobody goes on with one that is half gone."""
    Journal(str(dead), "p").close()
    real, seen = leftovers.remove, []

    def meanwhile(path):
        seen.append(leftovers.adopt(str(tmp_path / "out"), "p", str(tmp_path / "mine")))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "remove", meanwhile)
        clean(str(tmp_path / "out"))
    assert seen == [False] and os.listdir(tmp_path) == []


def test_a_removal_that_died_is_ended_by_the_next_run(tmp_path, dead):
    (dead / "half").mkdir()
    left = dead.rename(dead.with_name(dead.name.replace(leftovers.TEMP, leftovers.GONE)))
    assert not leftovers.adopt(str(tmp_path / "out"), "p", str(tmp_path / "mine"))
    assert clean(str(tmp_path / "out")) == [left.name] and os.listdir(tmp_path) == []
