"""Manifests: every bit of every file of every committed sample, flipped at random, is found and named."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import workbench as wb
from tests.properties import SLOW, examples
from workbench import errors
from workbench.analysis import manifest as module
from workbench.analysis import manifest_file
from workbench.analysis.folder import files_of
from workbench.analysis.manifest import find, load, write
from workbench.analysis.manifest_check import check
from workbench.analysis.manifest_diff import compare
from workbench.analysis.manifest_entries import cut, runs
from workbench.analysis.manifest_file import INSIDE, decode, encode
from workbench.core import blocks as blocks_module
from workbench.core.blocks import FileBlocks, file_digests
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.place import Place

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"
RUNS = (
    "gguf",
    "loss_spike",
    "orbax",
    "quantised",
    "titan_run",
    "torch_checkpointing",
    "trainer_run",
    "torch_save",
    "zarr",
)
#: every committed sample; folders of several hold each of them
ALL = sorted(
    str(path.relative_to(SAMPLES))
    for folder in SAMPLES.iterdir()
    if folder.name not in ("make", "logs") and folder.is_dir()
    for path in (sorted(folder.iterdir()) if folder.name in RUNS else [folder])
)


def copied(name, tmp_path):
    """A copy of a sample, and what opens it."""
    target = tmp_path / Path(name).name
    if (SAMPLES / name).is_dir():
        shutil.copytree(SAMPLES / name, target)
    else:
        shutil.copy(SAMPLES / name, target)
    return target


def flip(path, at, bit):
    with open(path, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0] ^ 1 << bit
        handle.seek(at)
        handle.write(bytes([byte]))


def rules(report):
    return [(one.rule, one.where) for one in report]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("flips", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_flipped_bit_is_found_and_located(name, flips, tmp_path):
    path = copied(name, tmp_path)
    ckpt = wb.open(path, cache=False)
    root, single = Path(Place(ckpt.path).root), Place(ckpt.path).file
    write(ckpt, tmp_path / "m.json")
    manifest = load(tmp_path / "m.json")
    assert not check(ckpt.path, manifest)
    files = [single] if single else sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    assert sorted(manifest.files) == files, "a file of the checkpoint is not covered"
    sizes = [os.path.getsize(root / file) for file in files]
    rng = random.Random(f"{name} {flips}")
    elements = ckpt.catalog.chunk_nbytes
    for _ in range(flips):
        file = (
            rng.choices(files, sizes)[0]
            if rng.random() < 0.7
            else rng.choice([f for f, n in zip(files, sizes, strict=True) if n])
        )
        at, bit = rng.randrange(os.path.getsize(root / file)), rng.randrange(8)
        flip(root / file, at, bit)
        entry = manifest.files[file]
        one = replace_files(manifest, {file: entry}) if flips > 20 else manifest  # the other files were not touched
        found = [x for x in check(ckpt.path, one) if x.rule != "manifest.added"]
        flip(root / file, at, bit)
        assert [x.rule for x in found] == ["manifest.changed"], (file, at, bit)
        evidence = found[0].evidence
        assert evidence["file"] == file and evidence["start"] <= at < evidence["stop"]
        assert evidence["stop"] - evidence["start"] <= 4 << 20
        # what lies there, by the catalog: raw elements must be called by their tensor, whose other bytes are as told
        rows = np.flatnonzero(
            (ckpt.catalog.file == (ckpt.catalog.files.index(file) if file in ckpt.catalog.files else -1))
            & (ckpt.catalog.start <= at)
            & (at < ckpt.catalog.stop)
            & (elements > 0)
        )
        keys = {ckpt.catalog.keys[ckpt.catalog.tensor[row]] for row in rows.tolist()}
        if keys and entry.kind == "data":
            kind, *named = evidence["parts"][0]
            if kind == "tensor":
                assert set(named) <= keys, (evidence, keys)
            assert len(evidence["parts"]) == 1 and (keys & set(named) or kind in ("rest", "record")), (evidence, keys)


@pytest.mark.parametrize("what", ["file", "folder", "stray"])
def test_a_link_out_of_the_checkpoint_is_a_finding_and_not_followed(what, tmp_path):
    path = copied("bytecheckpoint_fsdp1_flat", tmp_path) / "global_step_3"
    manifest = write(wb.open(path, cache=False), tmp_path / "m.json")
    moved = {"file": path / "model/__0_0.distcp", "folder": path / "model", "stray": tmp_path / "stray.pt"}[what]
    if what == "stray":
        moved.write_bytes(b"x" * 100)
    else:
        moved.rename(tmp_path / "outside")
    link = path / "stray.pt" if what == "stray" else moved
    link.symlink_to(tmp_path / ("stray.pt" if what == "stray" else "outside"))
    with pytest.raises(errors.UnsafeError, match="link out of the checkpoint"):
        check(path, manifest)
    lost = [name for name in manifest.files if what != "stray" and (path / name).is_relative_to(link)]
    for report in (check(path, manifest, partial=True), wb.verify(path, manifest=manifest)):
        found = {one.where: one for one in report if one.rule in ("manifest.missing", "manifest.added")}
        assert set(found) == set(lost or ["stray.pt"])
        assert all("link out of the checkpoint" in one.message for one in found.values())


def replace_files(manifest, files):
    return replace(manifest, files=files)


@pytest.mark.parametrize("name", ["dcp_fsdp2", "hf_llama_bf16_sharded", "deepspeed_zero1", "megatron_dp_reshardable"])
def test_a_flip_in_an_element_is_called_by_its_tensor(name, tmp_path):
    """Where the truth of an element's place is the reading itself: flip a byte, and see which tensor changed."""
    path = copied(name, tmp_path)
    ckpt = wb.open(path, cache=False)
    root = Path(Place(ckpt.path).root)
    manifest = write(ckpt, tmp_path / "m.json")
    before = {t: found.hex for t, found in tensor_fingerprints(ckpt.payloads)}
    assert {ckpt.catalog.keys[t]: hex for t, hex in before.items()} == {
        key: entry.fingerprint for key, entry in manifest.tensors.items()
    }
    rng = random.Random(3)
    file = max(manifest.files, key=lambda name: manifest.files[name].size)
    for _ in range(12):
        at = rng.randrange(manifest.files[file].size)
        flip(root / file, at, 0)
        found = check(ckpt.path, manifest)
        try:
            changed = {
                ckpt.catalog.keys[t]
                for t, found in tensor_fingerprints(wb.open(path, cache=False).payloads)
                if found.hex != before[t]
            }
        except errors.WorkbenchError:
            changed = set()  # damaged beyond reading
        flip(root / file, at, 0)
        assert len(found) == 1
        if changed:
            assert set(found[0].evidence["tensors"]) <= changed and found[0].evidence["tensors"]


def test_a_checkpoint_that_no_longer_opens_is_still_checked(tmp_path):
    path = copied("dcp_fsdp2", tmp_path)
    write(wb.open(path))
    flip(path / ".metadata", 0, 7)
    with pytest.raises(errors.WorkbenchError):
        wb.open(path, cache=False)
    found = check(path)
    assert rules(check(path)) == [("manifest.changed", ".metadata")]
    assert found[0].evidence["start"] == 0


@pytest.mark.parametrize("name", ALL)
def test_a_manifest_inside_changes_nothing_for_readers(name, tmp_path):
    path = copied(name, tmp_path)
    before = wb.open(path, cache=False)
    if Path(before.path).is_file():
        with pytest.raises(errors.UsageError, match="has no folder of its own"):
            write(before, inside=True)
        return
    listed = wb.discover(path)[["path", "format", "step", "complete"]]
    manifest = write(before, inside=True)
    assert manifest.path == os.path.join(Place(before.path).root, INSIDE) and os.path.isfile(manifest.path)
    after = wb.open(path, cache=False)
    assert (after.format, after.path, after.catalog.keys) == (before.format, before.path, before.catalog.keys)
    assert (after.catalog.files, after.notes) == (before.catalog.files, before.notes)
    assert wb.discover(path)[["path", "format", "step", "complete"]].equals(listed)
    assert not check(after)
    again = write(after, inside=True)  # an older manifest is no part of the checkpoint
    assert sorted(again.files) == sorted(manifest.files) and INSIDE not in again.files


def test_missing_added_truncated_and_grown_files(tmp_path):
    path = copied("hf_llama_bf16_sharded", tmp_path)
    ckpt = wb.open(path)
    manifest = write(ckpt)
    assert manifest.path == str(path) + ".manifest.json"
    assert not check(ckpt) and check(ckpt).exit_code == 0
    names = sorted(name for name in manifest.files if name.endswith(".safetensors"))
    first, second, third = (path / name for name in names[:3])
    size = second.stat().st_size
    kept = third.read_bytes()
    (path / "notes.txt").write_text("new")
    (path / "folder").mkdir()
    first.unlink()
    with open(second, "r+b") as handle:
        handle.truncate(size - 10)
    third.write_bytes(kept + b"\0\0")
    report = check(path)
    assert rules(report) == [
        ("manifest.missing", names[0]),
        ("manifest.truncated", names[1]),
        ("manifest.size", names[2]),
        ("manifest.added", "notes.txt"),
        ("manifest.added", "folder"),
    ]
    by_rule = {one.rule: one for one in report}
    rows = ckpt.chunks
    assert set(by_rule["manifest.missing"].evidence["tensors"]) == set(rows[rows.file == names[0]].key)
    end = rows[(rows.file == names[1]) & (rows.stop > size - 10)]
    assert by_rule["manifest.truncated"].evidence["tensors"] == list(end.key)
    assert (
        by_rule["manifest.truncated"].evidence | {"start": size - 10, "stop": size}
        == by_rule["manifest.truncated"].evidence
    )
    assert report.exit_code == 2
    third.write_bytes(b"\xff" * 100 + kept[100:])  # of the right size: only the bytes tell
    assert ("manifest.changed", names[2]) in rules(check(path))


def test_a_file_rewritten_from_end_to_end_is_told_in_a_few_findings(tmp_path, monkeypatch):
    path = copied("paddle_save", tmp_path)
    write(wb.open(path))
    name = "model.pdparams"
    raw = np.frombuffer((path / name).read_bytes(), np.uint8)
    (path / name).write_bytes((raw ^ 1).tobytes())
    found = check(path)
    assert 10 < len(found) <= 101 and {one.evidence["file"] for one in found} == {name}


def test_a_sector_that_cannot_be_read_is_a_finding(tmp_path, monkeypatch):
    path = copied("hf_llama_bf16_sharded", tmp_path)
    manifest = write(wb.open(path))
    name = next(name for name in manifest.files if name.endswith(".safetensors"))
    one = manifest.files[name].blocks(name, 0)
    bad = range(int(one.starts[3]) + 5, int(one.starts[3]) + 6)
    real = os.preadv

    def preadv(fd, buffers, offset):
        if (
            os.readlink(f"/proc/self/fd/{fd}").endswith(name)
            and offset < bad.stop
            and offset + len(buffers[0]) > bad.start
        ):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("files are told apart in /proc")
    monkeypatch.setattr(os, "preadv", preadv)
    found = check(path, threads=1)
    assert [one.rule for one in found] == ["manifest.unreadable"]
    assert found[0].evidence["start"] == one.starts[3] and "Input/output error" in found[0].message
    with pytest.raises(errors.MissingFileError, match="Input/output error"):
        write(wb.open(path))


def test_two_manifests_tell_what_became_of_each_tensor(tmp_path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: torch.randn(64, 8, generator=torch.Generator().manual_seed(k)) for k, name in enumerate("abcdefgh")}
    state["zeros1"], state["zeros2"] = torch.zeros(4), torch.zeros(4)
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    safetensors.save_file(state, tmp_path / "one" / "model.safetensors")
    later = {name: value.clone() for name, value in state.items()}
    later["b"][3, 3] += 1
    later["renamed"] = later.pop("c")
    later["new"] = torch.ones(3)
    del later["d"]
    later["e"] = later["e"].reshape(8, 64)
    later["zeros3"], later["zeros4"] = later.pop("zeros1"), later.pop("zeros2")
    safetensors.save_file({k: later[k] for k in list(later)[:3]}, tmp_path / "two" / "model-00001-of-00002.safetensors")
    safetensors.save_file({k: later[k] for k in list(later)[3:]}, tmp_path / "two" / "model-00002-of-00002.safetensors")
    one, two = (write(wb.open(tmp_path / name)) for name in ("one", "two"))
    shutil.rmtree(tmp_path / "one"), shutil.rmtree(tmp_path / "two")  # manifests are enough
    found = compare(load(one.path), load(two.path))
    assert found.renamed == [("c", "renamed")]
    assert sorted(found.changed) == ["b", "e"]
    assert sorted(found.added) == ["new", "zeros3", "zeros4"]  # equal content, but which is which nobody knows
    assert sorted(found.removed) == ["d", "zeros1", "zeros2"]
    assert sorted(found.equal) == sorted(found.moved) == ["a", "f", "g", "h"]
    assert not found.same and found.files["equal"] == [] and found.files["removed"] == ["model.safetensors"]
    same = compare(one, one)
    assert same.same and not same.moved and len(same.equal) == 10 and same.files["equal"] == ["model.safetensors"]
    json.dumps(found.to_dict())


def test_the_same_state_under_another_sharding_is_equal(samples, tmp_path):
    """The same tensors stored by DCP and by torch.save, pieces in other files."""
    torch = pytest.importorskip("torch")
    ckpt = wb.open(samples / "dcp_tp2_fsdp2_vocab515")
    torch.save(dict(ckpt.state_dict()), tmp_path / "whole.pt")
    one, two = write(ckpt, tmp_path / "one.json"), write(wb.open(tmp_path / "whole.pt"), tmp_path / "two.json")
    found = compare(one, two)
    assert found.same and len(found.equal) == len(ckpt) and len(found.moved) == len(ckpt)


def test_tied_weights_are_named_together(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.randn(6, 10)
    state = {"embed": weight, "head": weight, "row": weight[2], "own": torch.randn(6, 10)}
    torch.save(state, tmp_path / "x.pt")
    ckpt = wb.open(tmp_path / "x.pt")
    write(ckpt)
    rows = ckpt.chunks.set_index("key")
    base = int(rows.start["embed"])
    for at, keys in ((0, ["embed", "head"]), (80, ["embed", "head", "row"]), (120, ["embed", "head"])):
        flip(tmp_path / "x.pt", base + at, 2)
        found = check(tmp_path / "x.pt")
        flip(tmp_path / "x.pt", base + at, 2)
        assert len(found) == 1 and sorted(found[0].evidence["tensors"]) == keys
        assert "shared with" in found[0].message
    flip(tmp_path / "x.pt", int(rows.start["own"]), 2)
    assert [one.where for one in check(tmp_path / "x.pt")] == ["own"]


def test_a_hole_is_kept_as_unknown(tmp_path):
    path = copied("dcp_fsdp2", tmp_path)
    (path / "__2_0.distcp").unlink()
    ckpt = wb.open(path, partial=True)
    manifest = write(ckpt)
    lost = [key for key, entry in manifest.tensors.items() if entry.fingerprint is None]
    assert lost and all(manifest.tensors[key].why for key in lost)
    assert load(manifest.path).tensors == manifest.tensors
    assert sorted(compare(manifest, manifest).unknown) == sorted(lost) and not compare(manifest, manifest).same
    assert not check(path)  # as it was when the manifest was made


@examples(300)
@given(st.lists(st.integers(1, 60), max_size=30), st.sampled_from([0, 1, 7, 20, 100]))
def test_blocks_cover_a_file_and_end_where_segments_end(lengths, grain):
    lengths = np.array(lengths, np.int64)
    hashed = runs(lengths, grain)
    assert hashed.sum() == lengths.sum() and set(np.cumsum(hashed)) <= set(np.cumsum(lengths))
    assert (hashed[:-1] >= grain).all()
    starts, stops = cut(hashed)
    covered = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)]) if len(starts) else []
    assert list(covered) == list(range(int(lengths.sum())))


def test_large_checkpoints_share_digests_between_small_neighbours(tmp_path, monkeypatch):
    path = copied("dcp_fsdp2", tmp_path)
    fine = write(wb.open(path))
    monkeypatch.setattr(module, "BUDGET", 100)
    coarse = write(wb.open(path))
    count = [sum(len(entry.digests) for entry in one.files.values()) for one in (fine, coarse)]
    assert fine.grain == 0 and coarse.grain > 0 and count[1] <= 100 < count[0]
    assert load(path).grain == coarse.grain
    assert {key: one.fingerprint for key, one in fine.tensors.items()} == {
        key: one.fingerprint for key, one in coarse.tensors.items()
    }
    name = max(fine.files, key=lambda name: fine.files[name].size)
    flip(path / name, 5000, 3)
    found = check(path)
    assert len(found) == 1 and found[0].evidence["start"] <= 5000 < found[0].evidence["stop"]
    assert check(path, fine)[0].evidence["parts"][0] in found[0].evidence["parts"]


@pytest.mark.parametrize("threads", [1, 3])
def test_digests_of_blocks_are_those_of_the_bytes(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(blocks_module, "WINDOW", 64)
    monkeypatch.setattr(blocks_module, "TASK", 300)
    monkeypatch.setattr(blocks_module, "TASK_BLOCKS", 5)
    rng = random.Random(0)
    files = []
    for number, size in enumerate((0, 1, 1000, 777)):
        (tmp_path / str(number)).write_bytes(rng.randbytes(size))
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(12))})
        files.append(FileBlocks(str(number), np.array(cuts[:-1], np.int64), np.array(cuts[1:], np.int64)))
    files.append(FileBlocks("2", np.array([990, 2000]), np.array([1001, 2001])))
    files.append(FileBlocks("absent", np.array([0]), np.array([1])))
    shares = []
    found = list(file_digests(Place(tmp_path), files, threads=threads, progress=shares.append))
    assert [number for number, _, _ in found] == list(range(6)) and shares[-1] == 1.0
    for number, digests, failed in found[:4]:
        raw = (tmp_path / str(number)).read_bytes()
        one = files[number]
        want = [xxhash.xxh3_128_digest(raw[a:b]) for a, b in zip(one.starts, one.stops, strict=True)]
        assert [row.tobytes() for row in digests] == want and not failed
    assert set(found[4][2]) == {0, 1} and "ends at byte 1,000" in found[4][2][0]
    assert "missing" in found[5][2][0]


def test_a_pass_that_is_stopped_leaves_the_old_manifest(tmp_path):
    path = copied("dcp_fsdp2", tmp_path)
    ckpt = wb.open(path)
    write(ckpt)
    before = Path(find(path)).read_bytes()

    def stop(share):
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(ckpt, progress=stop)
    assert Path(find(path)).read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp_fsdp2", "dcp_fsdp2.manifest.json"]
    shares = []
    write(ckpt, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)


def test_a_checkpoint_that_changes_meanwhile_has_no_manifest(tmp_path):
    path = copied("dcp_fsdp2", tmp_path)
    ckpt = wb.open(path)

    def touch(share):
        os.utime(path / ".metadata")

    with pytest.raises(errors.ChangedError, match=r"'.metadata' changed while"):
        write(ckpt, progress=touch)
    assert [p.name for p in tmp_path.iterdir()] == ["dcp_fsdp2"]


def test_what_is_not_covered_is_said(tmp_path):
    path = copied("hf_llama_bf16_sharded", tmp_path)
    (path / "evals").mkdir()
    (path / "evals" / "x.json").write_text("{}")
    (tmp_path / "outside.txt").write_text("x")
    os.symlink(tmp_path / "outside.txt", path / "link.txt")
    manifest = write(wb.open(path))
    assert set(manifest.left_out) == {"evals", "link.txt"} and "link.txt" not in manifest.files
    report = check(path)
    assert not report and "evals" in report.not_checked["left out"]
    assert files_of(wb.open(path))[1].keys() == {"evals", "link.txt"}


def test_outside_samples_are_covered_to_the_last_byte(tmp_path):
    root = os.environ.get("WORKBENCH_SAMPLES")
    if not root:
        pytest.skip("WORKBENCH_SAMPLES is not set")
    rng = random.Random(11)
    done = 0
    for row in wb.discover(root, depth=6).itertuples():
        if not row.complete or row.format == "unreadable" or (row.nbytes > 30 << 20 and not SLOW):
            continue
        ckpt = wb.open(Path(root) / row.path)
        place = Place(ckpt.path)
        copy = tmp_path / str(done)
        if place.file:
            copy.mkdir()
            shutil.copy(os.path.join(place.root, place.file), copy)
        else:
            shutil.copytree(place.root, copy)
        target = copy / place.file if place.file else copy
        manifest = write(wb.open(target, format=ckpt.format), tmp_path / "m.json")
        assert not check(target, manifest), row.path
        files = [name for name, entry in manifest.files.items() if entry.size]
        for _ in range(5):
            file = rng.choice(files)
            at, bit = rng.randrange(manifest.files[file].size), rng.randrange(8)
            flip(copy / file, at, bit)
            found = check(target, replace(manifest, files={file: manifest.files[file]}))
            flip(copy / file, at, bit)
            found = [one for one in found if one.rule != "manifest.added"]
            assert len(found) == 1 and found[0].evidence["start"] <= at < found[0].evidence["stop"], (row.path, file)
        shutil.rmtree(copy)
        done += 1
    assert done


# ---- a manifest is a stranger's file too -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.json"
    write(wb.open(SAMPLES / "hf_peft_lora"), path)
    return path.read_bytes()


def signed(document):
    body = json.dumps(document)[:-1].encode()
    return body + f',\n"digest": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def test_what_is_written_is_what_is_read(good):
    once = decode(good, None)
    assert encode(once) == good
    assert json.loads(good)["version"] == 1


def test_a_flip_anywhere_in_the_manifest_itself_is_noticed(good):
    rng = random.Random(1)
    for _ in range(3000 if SLOW else 300):
        at = rng.randrange(len(good) - 1)  # but for the newline at its end
        with pytest.raises(errors.OpenError):
            decode(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :], None)
    for at in range(0, len(good) - 1, 97):
        with pytest.raises(errors.OpenError):
            decode(good[:at], None)


def test_a_manifest_that_lies_is_refused(good):
    document = json.loads(good)
    del document["digest"]
    assert decode(signed(document), None).files.keys() == decode(good, None).files.keys()
    name, entry = next((name, row) for name, row in document["files"].items() if row["segments"] > 2)
    bomb = base64.b64encode(__import__("zlib").compress(bytes(50_000_000))).decode()
    lies = [
        ("version", 2, errors.UnsupportedFormatError),
        ("version", "1", errors.CorruptError),
        ("version", True, errors.CorruptError),
        ("block", 0, errors.CorruptError),
        ("format", "something", errors.CorruptError),
        ("grain", -1, errors.CorruptError),
        ("grain", 1 << 40, errors.CorruptError),
        ("grain", 4096, errors.CorruptError),  # the digests are then too many
        ("labels", [], errors.CorruptError),
        ("labels", [["tensor"]], errors.CorruptError),
        ("labels", {}, errors.CorruptError),
        ("files", [], errors.CorruptError),
        ("files", {"../../etc/passwd": entry}, errors.UnsafeError),
        ("files", {"/etc/passwd": entry}, errors.UnsafeError),
        ("files", {"a\0b": entry}, errors.UnsafeError),
        ("files", {name: entry | {"size": entry["size"] + 1}}, errors.CorruptError),
        ("files", {name: entry | {"size": 1.5}}, errors.CorruptError),
        ("files", {name: entry | {"size": True}}, errors.CorruptError),
        ("files", {name: entry | {"segments": 1}}, errors.CorruptError),
        ("files", {name: entry | {"segments": 1 << 62}}, errors.CorruptError),
        ("files", {name: entry | {"lengths": bomb}}, errors.CorruptError),
        ("files", {name: entry | {"lengths": "????"}}, errors.CorruptError),
        ("files", {name: entry | {"owners": entry["lengths"]}}, errors.CorruptError),
        ("files", {name: entry | {"digests": entry["digests"][4:]}}, errors.CorruptError),
        ("files", {name: entry | {"kind": "device"}}, errors.CorruptError),
        ("files", {name: 7}, errors.CorruptError),
        ("tensors", {"t": {"dtype": "float32", "shape": [-1], "fingerprint": None}}, errors.CorruptError),
        ("tensors", {"t": {"dtype": "float32", "shape": 3, "fingerprint": None}}, errors.CorruptError),
        ("tensors", {"t": {"dtype": "float99", "shape": [], "fingerprint": None}}, errors.UnsupportedFormatError),
        ("tensors", {"t": {"dtype": "float32", "shape": [], "fingerprint": "xyz"}}, errors.CorruptError),
        ("checkpoint", None, errors.CorruptError),
        ("made", None, errors.CorruptError),
    ]
    for member, value, expected in lies:
        with pytest.raises(expected):
            decode(signed(document | {member: value}), None)
    many = document | {"files": {name: entry | {"segments": 6_250_000, "lengths": bomb}}}
    with pytest.raises(errors.CorruptError, match=r"'segments' is not a number from 0 to 1,0"):  # before it is unpacked
        decode(signed(many), None)
    with pytest.raises(errors.CorruptError):
        decode(b"[]", None)


def test_a_manifest_leads_nowhere_outside(good, tmp_path):
    """A link planted where a file was is not followed out of the checkpoint."""
    path = copied("hf_peft_lora", tmp_path)
    (tmp_path / "secret").write_text("secret")
    (path / "adapter_config.json").unlink()
    os.symlink(tmp_path / "secret", path / "adapter_config.json")
    with pytest.raises(errors.UnsafeError, match="link out of the checkpoint"):
        check(path, decode(good, None))


def test_absent_manifests_are_named(tmp_path):
    path = copied("hf_peft_lora", tmp_path)
    with pytest.raises(errors.MissingFileError, match=r"neither '.workbench-manifest.json' inside nor 'hf_peft_lora"):
        check(path)
    with pytest.raises(errors.MissingFileError):
        load(tmp_path / "nowhere.json")
    with pytest.raises(errors.WriteError, match="cannot write a manifest"):
        write(wb.open(path), tmp_path / "no" / "folder" / "m.json")
    assert manifest_file.LIMIT > 1 << 20


# ---- the command -----------------------------------------------------------------------------------------------------


def command(action, *paths, output=None, inside=False, json=False):
    from workbench.cli.manifest import manifest
    from workbench.cli.parser import parser

    given = ["manifest", action, *map(str, paths), "--no-cache"]
    given += ["--output", output] if output else []
    return manifest(parser().parse_args(given + ["--inside"] * inside + ["--json"] * json))


def test_the_command_writes_checks_and_compares(tmp_path, capsys):
    path = copied("hf_peft_lora", tmp_path)
    assert command("write", path) == 0
    assert capsys.readouterr().out.startswith(f"{path}.manifest.json\n  3 files, ")
    assert command("check", path) == 0
    assert "nothing found" in capsys.readouterr().out
    assert command("write", path, output=str(tmp_path / "second.json"), json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["files"], made["tensors"], made["without_fingerprint"]) == (3, 16, 0)
    assert command("diff", path, tmp_path / "second.json") == 0
    name = path / "adapter_model.safetensors"
    flip(name, name.stat().st_size - 1, 0)
    assert command("check", path) == 2
    out = capsys.readouterr().out
    assert "manifest.changed" in out and "lora_" in out
    assert command("check", path, tmp_path / "second.json", json=True) == 2
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [one["rule"] for one in found] == ["manifest.changed"] and len(found[0]["evidence"]["tensors"]) == 1
    key = found[0]["where"]
    assert command("write", path, inside=True) == 0
    assert command("diff", tmp_path / "second.json", path) == 1
    assert f"changed  {key}" in capsys.readouterr().out
    assert command("diff", tmp_path / "second.json", path / INSIDE, json=True) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["changed"] == [key]
    with pytest.raises(errors.UsageError, match="takes 2 paths"):
        command("diff", path)


def test_a_run_is_checked_at_the_step_that_would_be_opened(tmp_path, capsys):
    shutil.copytree(SAMPLES / "titan_run", tmp_path / "run")
    with pytest.raises(errors.MissingFileError):
        command("check", tmp_path / "run")
    assert command("write", tmp_path / "run") == 0
    assert (tmp_path / "run" / "step-4.manifest.json").is_file()
    assert command("check", tmp_path / "run") == 0
    assert wb.open(tmp_path / "run").path.endswith("step-4")
    with pytest.raises(errors.MissingFileError, match="neither"):
        command("check", tmp_path / "nothing")


def test_nothing_but_an_older_manifest_is_replaced(tmp_path):
    path, other = tmp_path / "x.safetensors", tmp_path / "note.txt"
    save_file({"w": np.ones(4, np.float32)}, path)
    other.write_text("mine")
    before = path.read_bytes()
    for target in (path, other):
        with pytest.raises(errors.UsageError, match="exists and is not a manifest"):
            write(wb.open(path, cache=False), target)
    assert path.read_bytes() == before and other.read_text() == "mine"
    write(wb.open(path, cache=False), tmp_path / "m.json")
    write(wb.open(path, cache=False), tmp_path / "m.json")
