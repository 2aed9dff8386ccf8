"""Orbax: OCDBT databases, zarr 3, the layouts of its saves, and every kind of damage."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load_file

import workbench as wb
from tests import orbax_files as made
from tests.orbax_files import BYTES, MANIFEST, NODE, database, wrapped, zarr2, zarr3
from tests.reader_suite import check_reader, raw, refused, same_bits
from workbench.core.crc32 import crc32c, crc32c_rows
from workbench.core.source import PreadSource
from workbench.errors import (
    CorruptError,
    HoleError,
    IncompleteError,
    MissingFileError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
    WorkbenchError,
)

OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
GZIP = {"name": "gzip", "configuration": {"level": 5}}
CRC = {"name": "crc32c"}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}


def numbers(*shape: int, dtype: str = "<f4") -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(1, 1 << 30, shape).astype(dtype)


def squeezed(part: np.ndarray) -> bytes:
    return zstandard.compress(part.tobytes())


def summed(data: bytes) -> bytes:
    return data + struct.pack("<I", made.crc32c(data))


# ---- real saves ------------------------------------------------------------------------------------------------------


def test_items_of_a_step_are_one_checkpoint(samples: Path) -> None:
    ckpt = wb.open(samples / "orbax" / "2")
    assert ckpt.format == "orbax" and ckpt.step == 2 and not ckpt.notes
    assert ckpt.objects["iterator"] == {"position": 16}
    assert ckpt.objects["state._sharding"]["params.wo"]["partition_spec"] == ["data", "model"]
    assert dict(ckpt.mesh["axes"]) == {"data": 2, "model": 2}
    for role, part in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        assert ckpt.param("wi", role=role).key == f"opt_state.0.{part}.wi"
    assert ckpt["opt_state.0.count"].role == "step" and ckpt.param("wi").key == "params.wi"
    assert wb.verify(samples / "orbax" / "2", deep=True).exit_code == 0


def test_an_item_opens_alone(samples: Path) -> None:
    truth = load_file(samples.parent / "tests/truth" / "orbax" / "2.safetensors")
    step = samples / "orbax" / "2"
    check_reader(step / "ema", {key[4:]: one for key, one in truth.items() if key.startswith("ema.")})
    check_reader(step / "state", {key: one for key, one in truth.items() if key[:3] not in ("ema", "rng")})


FURTHER = {
    **{f"manager_trainstate/ckpt/{step}": f"manager_trainstate/truth_{step}" for step in (3, 6)},
    "multihost_2proc/ckpt/1": "multihost_2proc/truth",
    "v1_pytree/ckpt": "v1_pytree/truth",
    "nocdbt_zarr2/ckpt": "nocdbt_zarr2/truth",
    "../../orbax/ocdbt_sharded": "../../orbax/truth",
    "../../orbax/standard": "../../orbax/truth",
}


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
@pytest.mark.parametrize("name", FURTHER)
def test_further_saves_equal_their_truth(name: str) -> None:
    folder = Path(str(OUTSIDE)) / "round2" / "orbax"
    truth = load_file(folder / f"{FURTHER[name]}.safetensors")
    ckpt = wb.open(folder / name)
    if name.startswith(".."):  # one truth of two saves, widened to float32, scalars as one element
        truth = {key: truth[key].reshape(ckpt[key].shape).to(ckpt[key].torch().dtype) for key in ckpt}
    if "manager" in name:
        truth["step"] = truth["step"].to(torch.int64)  # JAX narrowed the Python number when it restored it
    check_reader(folder / name, truth)
    assert wb.verify(folder / name, deep=True).exit_code == 0


@pytest.mark.skipif(not OUTSIDE, reason="WORKBENCH_SAMPLES names no folder of further samples")
def test_a_real_save_of_two_processes_can_be_read_without_its_merge(tmp_path: Path) -> None:
    source = Path(str(OUTSIDE)) / "round2" / "orbax" / "multihost_2proc"
    kept = shutil.ignore_patterns("manifest.ocdbt", "d")
    shutil.copytree(source / "ckpt" / "1" / "default", tmp_path / "default", ignore=kept, copy_function=shutil.copyfile)
    for process in ("ocdbt.process_0", "ocdbt.process_1"):
        shutil.copytree(
            source / "ckpt" / "1" / "default" / process,
            tmp_path / "default" / process,
            dirs_exist_ok=True,
            copy_function=shutil.copyfile,
        )
    ckpt = wb.open(tmp_path, partial=True)
    for key, want in load_file(source / "truth.safetensors").items():
        same_bits(ckpt[key].torch(), want, key)


# ---- databases -------------------------------------------------------------------------------------------------------


def arrays() -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Values of a database, and its arrays: scalars, inline values, values apart, an odd grid, names with slashes."""
    held = {
        "step": (numbers(dtype="<i8"), ()),
        "params.w": (numbers(40, 30), (16, 16)),
        "params.a.b/c": (numbers(9), (4,)),
        "params.big": (numbers(600), (300,)),
        "opt_state.0.mu.w": (numbers(40, 30), (20, 30)),
    }
    values: dict[str, bytes] = {}
    for name, (array, chunk) in held.items():
        values |= zarr2(name, array, chunk)
    values |= zarr3("params.third", numbers(12, 8), (6, 8), [BYTES, ZSTD], encode=squeezed, inside=(3, 4))
    values |= zarr2("params.half", numbers(6, 4, dtype="<u2"), (3, 4), dtype="bfloat16")
    truth = {name: torch.from_numpy(array.copy()) for name, (array, _) in held.items()}
    truth["params.third"] = torch.from_numpy(numbers(12, 8))
    truth["params.half"] = torch.from_numpy(numbers(6, 4, dtype="<i2")).view(torch.bfloat16)
    return values, truth


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"leaf_keys": 3},
        {"leaf_keys": 2, "prefix": 6},
        {"inline": 0},
        {"inline": 1 << 20},
        {"compress": False},
        {"compress": False, "inline": 0, "leaf_keys": 5},
        {"numbered": True},
        {"data": "ocdbt.process_3/d/0"},
    ],
)
def test_every_form_of_a_database_is_read(tmp_path: Path, how: dict[str, Any]) -> None:
    values, truth = arrays()
    path = database(tmp_path / "7", values, **how)
    ckpt = check_reader(path, truth) if len(how) != 1 else wb.open(path, cache=False)
    assert list(ckpt) == sorted(truth)
    for key, want in truth.items():
        same_bits(ckpt[key].torch(), want, key)
    assert ckpt.step == 7 and ckpt.notes == []
    if "data" in how:
        assert set(ckpt.chunks["rank"].dropna()) == {3}


def test_the_newest_of_several_versions_counts(tmp_path: Path) -> None:
    old, new = numbers(4), numbers(4) * 2
    database(tmp_path, zarr2("w", old, (4,)))
    nodes = (tmp_path / "d" / "nodes").read_bytes()
    part = wrapped(NODE, made.leaf([], {k.encode(): v for k, v in sorted(zarr2("w", new, (4,)).items())}))
    (tmp_path / "d" / "nodes").write_bytes(nodes + part)
    content = made.manifest(["d/nodes"], (0, len(nodes), len(part)), 0, 2, generations=(3, 4, 9))
    (tmp_path / "manifest.ocdbt").write_bytes(wrapped(MANIFEST, content))
    check_reader(tmp_path, {"w": torch.from_numpy(new)})


def test_an_empty_database_is_no_checkpoint(tmp_path: Path) -> None:
    content = made.manifest([""], (0, made.NONE, made.NONE), 0, 0)
    (tmp_path / "manifest.ocdbt").write_bytes(wrapped(MANIFEST, content))
    refused(wb.errors.NotACheckpointError, tmp_path, "holds no array")


def test_keys_of_no_array_are_noted(tmp_path: Path) -> None:
    ckpt = wb.open(database(tmp_path, {**zarr2("w", numbers(4), (4,)), "x/.zgroup": b"{}", "y": b"1"}))
    assert list(ckpt) == ["w"] and "2 keys belong to no array" in ckpt.notes[0]


# ---- zarr 3 ----------------------------------------------------------------------------------------------------------

THIRD: dict[str, tuple[Any, list[dict[str, Any]], dict[str, Any]]] = {
    "plain": (lambda part: part.tobytes(), [BYTES], {}),
    "zstd": (squeezed, [BYTES, ZSTD], {}),
    "gzip": (lambda part: gzip.compress(part.tobytes()), [BYTES, GZIP], {}),
    "crc32c": (lambda part: summed(part.tobytes()), [BYTES, CRC], {}),
    "zstd, crc32c": (lambda part: summed(squeezed(part)), [BYTES, ZSTD, CRC], {}),
    "crc32c, zstd": (lambda part: zstandard.compress(summed(part.tobytes())), [BYTES, CRC, ZSTD], {}),
    "transposed": (lambda part: squeezed(np.ascontiguousarray(part.T)), [TRANSPOSE, BYTES, ZSTD], {}),
    "shards": (squeezed, [BYTES, ZSTD], {"inside": (2, 3)}),
    "shards, index first": (lambda part: part.tobytes(), [BYTES], {"inside": (4, 1), "first": True}),
    "shards of one": (squeezed, [BYTES, ZSTD], {"inside": (4, 3)}),
    "shards, transposed": (lambda part: np.ascontiguousarray(part.T).tobytes(), [TRANSPOSE, BYTES], {"inside": (2, 3)}),
}


@pytest.mark.parametrize("where", ["folder", "inline", "apart"])
def test_zarr_3_is_read(tmp_path: Path, where: str) -> None:
    values = zarr3("b", numbers(5, dtype="<i8"), (2,), [BYTES, ZSTD], encode=squeezed)
    values |= zarr3("s", numbers(dtype="<i4"), (), [BYTES], encode=lambda part: part.tobytes())
    truth = {"b": numbers(5, dtype="<i8"), "s": numbers(dtype="<i4")}
    for how, (encode, codecs, more) in THIRD.items():
        values |= zarr3(f"a.{how}", numbers(10, 7), (4, 3), codecs, encode=encode, **more)
        truth[f"a.{how}"] = numbers(10, 7)
    if where == "folder":
        for key, value in values.items():
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(value)
    else:
        database(tmp_path, values, inline=1 << 20 if where == "inline" else 0)
    ckpt = check_reader(tmp_path, {key: torch.from_numpy(array) for key, array in truth.items()})
    assert ckpt.format == ("zarr" if where == "folder" else "orbax")


@pytest.mark.parametrize(("name", "key"), [("v2", "0.1"), ("default", "c.0.1")])
def test_other_keys_of_chunks(tmp_path: Path, name: str, key: str) -> None:
    encoding = {"name": name, "configuration": {"separator": "."}}
    found = zarr3("w", numbers(4, 6), (4, 3), [BYTES, ZSTD], encode=squeezed, chunk_key_encoding=encoding)
    renamed = {("w/" + key.replace("1", one[-1]) if one.startswith("w/c/") else one): v for one, v in found.items()}
    check_reader(database(tmp_path, renamed), {"w": torch.from_numpy(numbers(4, 6))})


def test_an_absent_inner_chunk_is_a_hole(tmp_path: Path) -> None:
    array = numbers(8, 6)
    path = database(tmp_path, zarr3("w", array, (4, 6), [BYTES, ZSTD], encode=squeezed, inside=(4, 3), absent=(1,)))
    ckpt = wb.open(path)
    same_bits(ckpt["w"][:, :3], torch.from_numpy(array[:, :3]), "beside the hole")
    with pytest.raises(HoleError, match="'w'"):
        ckpt["w"].torch()
    assert any(one.rule == "coverage.hole" for one in wb.verify(path))


def test_what_cannot_be_undone_is_listed(tmp_path: Path) -> None:
    values = zarr3("w", numbers(4), (4,), [BYTES, {"name": "blosc", "configuration": {}}], encode=squeezed)
    values |= zarr3("odd", numbers(4), (4,), [BYTES, ZSTD], encode=squeezed, dtype="r24")
    ckpt = wb.open(database(tmp_path, values))
    assert list(ckpt) == ["w"] and any("'odd' is left out" in note for note in ckpt.notes)
    with pytest.raises(UnsupportedFormatError):
        ckpt["w"].torch()


# ---- only what is asked for is read ----------------------------------------------------------------------------------


def test_opening_reads_no_payload_and_a_slice_only_its_chunks(tmp_path: Path, monkeypatch) -> None:
    array = numbers(64, 64)
    values = zarr2("w", array, (16, 64))
    values |= zarr3("s", array, (64, 64), [BYTES], encode=lambda part: part.tobytes(), inside=(16, 16))
    path = database(tmp_path, values)
    reads: list[tuple[int, int]] = []
    fill = PreadSource._fill

    def counted(self: PreadSource, left: memoryview, at: int) -> None:
        if self._name == "d/values":
            reads.append((at, at + len(left)))
        fill(self, left, at)

    monkeypatch.setattr(PreadSource, "_fill", counted)
    ckpt = wb.open(path, cache=False, io="pread")
    assert reads and all(stop - start == 16 * 16 + 4 for start, stop in reads)  # the index of the shard
    for key in ("w", "s"):
        rows = ckpt.chunks[ckpt.chunks["key"] == key]
        wanted = rows[[offsets[0] == 16 and offsets[-1] == 0 for offsets in rows["offsets"]]].iloc[0]
        reads.clear()
        same_bits(ckpt[key][17:20, :5], torch.from_numpy(array[17:20, :5].copy()), key)
        assert reads and all(wanted["start"] <= start and stop <= wanted["stop"] for start, stop in reads)


# ---- saves that were not finished ------------------------------------------------------------------------------------


def test_torn_saves_are_named(samples: Path, tmp_path: Path) -> None:
    step = samples / "orbax" / "2"
    for name in ("2", "4.orbax-checkpoint-tmp-17", "6", "8", "10"):
        shutil.copytree(step, tmp_path / name)
    (tmp_path / "6" / "state").rename(tmp_path / "6" / "state.orbax-checkpoint-tmp")
    document = json.loads((step / "_CHECKPOINT_METADATA").read_text()) | {"commit_timestamp_nsecs": None}
    (tmp_path / "8" / "_CHECKPOINT_METADATA").write_text(json.dumps(document))
    (tmp_path / "10" / "ema" / "manifest.ocdbt").unlink()
    found = {Path(row.path).name: row for row in wb.discover(tmp_path).itertuples()}
    assert found["2"].complete and not any(row.complete for name, row in found.items() if name != "2")
    assert "not renamed to '4'" in found["4.orbax-checkpoint-tmp-17"].why
    assert "not renamed to 'state'" in found["6"].why and "no commit time" in found["8"].why
    assert "'ema/manifest.ocdbt' is missing" in found["10"].why
    assert [one.rule for one in wb.verify(tmp_path / "6") if one.severity == "error"] == ["commit.incomplete"]
    assert wb.open(tmp_path).place.name == "2"


def test_databases_that_were_not_merged_are_named_and_can_be_read(tmp_path: Path) -> None:
    """As two processes of Orbax write them: the first one alone describes the array."""
    array = numbers(8, 300)
    for process, held in ((0, ("w/.zarray", "w/0.0")), (1, ("w/1.0",))):
        values = {key: value for key, value in zarr2("w", array, (4, 300)).items() if key in held}
        database(tmp_path / f"ocdbt.process_{process}", values)
    refused(IncompleteError, tmp_path, "'manifest.ocdbt' is missing", "2 processes", "not merged")
    ckpt = wb.open(tmp_path, partial=True)
    same_bits(ckpt["w"].torch(), torch.from_numpy(array), "salvaged")
    assert sorted(ckpt.chunks["rank"]) == [0, 1]
    assert any("not merged" in one.message for one in wb.verify(tmp_path) if one.rule == "commit.incomplete")


def test_an_array_that_is_described_twice_is_refused(tmp_path: Path) -> None:
    values = zarr2("w", numbers(4), (4,)) | zarr3("w", numbers(4), (4,), [BYTES, ZSTD], encode=squeezed)
    refused(CorruptError, database(tmp_path, values), "'w' is described twice")


def test_a_process_that_was_left_out_of_the_merge_is_named(tmp_path: Path) -> None:
    values = zarr2("w", numbers(8, 300), (4, 300))
    one = {key: value for key, value in values.items() if key != "w/1.0"}
    database(tmp_path, one, data="ocdbt.process_0/d/values")
    database(tmp_path / "ocdbt.process_1", {key: value for key, value in values.items() if key != "w/0.0"})
    refused(IncompleteError, tmp_path, "1 tensor lacks chunks", "'ocdbt.process_1'", "was not merged")


def test_an_array_that_the_tree_lists_and_nobody_stored_is_an_error(samples: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(samples / "orbax" / "2" / "rng", tmp_path / "rng"))
    state = Path(shutil.copytree(samples / "zarr" / "orbax", tmp_path / "3"))
    shutil.rmtree(state / "params.decoder.layers_0.norm.scale")
    refused(IncompleteError, state, "1 of 9 leaves", "'params.decoder.layers_0.norm.scale'")
    assert len(wb.open(state, partial=True)) == 6 and len(wb.open(path)) == 1


# ---- damage ----------------------------------------------------------------------------------------------------------


def small(folder: Path, **how: Any) -> Path:
    values = zarr2("params.w", numbers(20, 30), (10, 30)) | zarr2("params.b", numbers(5), (5,))
    values |= zarr3("params.s", numbers(8, 40), (4, 40), [BYTES, ZSTD], encode=squeezed, inside=(4, 20))
    return database(folder, values, leaf_keys=3, inline=100, **how)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/nodes"])
@pytest.mark.parametrize("compress", [True, False])
def test_a_flip_in_a_manifest_or_a_node_is_found(tmp_path: Path, name: str, compress: bool) -> None:
    path = small(tmp_path, compress=compress)
    whole = (path / name).read_bytes()
    for at in range(0, len(whole), 3 if name == "manifest.ocdbt" else 23):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (path / name).write_bytes(data)
        refused(CorruptError, path, "manifest" if name == "manifest.ocdbt" else "node", name)


def test_a_flip_in_the_index_of_a_shard_is_found(tmp_path: Path) -> None:
    path = small(tmp_path)
    row = wb.open(path).chunks.query("key == 'params.s'").iloc[1]
    data = bytearray((path / "d" / "values").read_bytes())
    data[row["stop"] + 3] ^= 16
    (path / "d" / "values").write_bytes(data)
    refused(CorruptError, path, "'params.s/c/0/0'", "CRC-32C")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/nodes", "d/values"])
def test_a_file_that_was_cut_is_found(tmp_path: Path, name: str) -> None:
    path = small(tmp_path)
    whole = (path / name).read_bytes()
    for keep in (0, 3, 15, 16, 40, len(whole) // 2, len(whole) - 5, len(whole) - 1):
        (path / name).write_bytes(whole[: min(keep, len(whole) - 1)])
        refused(CorruptError, path, f"{name}'")
        assert wb.verify(path).exit_code == 2
    (path / name).write_bytes(whole)
    assert wb.verify(path).exit_code == 0


def test_a_cut_or_missing_data_file_leaves_the_rest_readable(tmp_path: Path) -> None:
    path = database(tmp_path, arrays()[0], inline=600)
    size = (path / "d" / "values").stat().st_size
    os.truncate(path / "d" / "values", size - 30)
    refused(TruncatedError, path, "'d/values'")
    same_bits(wb.open(path, partial=True)["params.a.b/c"].torch(), arrays()[1]["params.a.b/c"], "inline")
    (path / "d" / "values").unlink()
    refused(MissingFileError, path, "'d/values' is missing")
    assert any(
        one.rule == "open.missing" or "missing" in one.rule for one in wb.verify(path) if one.severity == "error"
    )
    (path / "d" / "nodes").unlink()
    refused(MissingFileError, path, "'d/nodes'")


def test_files_of_another_save_are_found(tmp_path: Path) -> None:
    one = small(tmp_path / "one")
    other = database(tmp_path / "other", zarr2("v", numbers(20, 31), (10, 31)), inline=100)
    for name in ("d/nodes", "manifest.ocdbt"):
        whole = (one / name).read_bytes()
        shutil.copy(other / name, one / name)
        with pytest.raises(CorruptError):
            wb.open(one, cache=False)
        (one / name).write_bytes(whole)
    shutil.copy(other / "d" / "values", one / "d" / "values")
    with pytest.raises(WorkbenchError):
        wb.open(one, cache=False).state_dict()


def written(
    folder: Path, nodes: list[bytes], root: int, height: int, keys: int, files: list[str] | None = None
) -> Path:
    """A database of nodes as they are; ``root`` is the position of the root."""
    (folder / "d").mkdir(parents=True, exist_ok=True)
    starts = np.cumsum([0, *map(len, nodes)]).tolist()
    (folder / "d" / "nodes").write_bytes(b"".join(nodes))
    content = made.manifest(files or ["d/nodes"], (0, starts[root], len(nodes[root])), height, keys)
    (folder / "manifest.ocdbt").write_bytes(wrapped(MANIFEST, content))
    return folder


LEAF = {key.encode(): value for key, value in sorted(zarr2("w", numbers(4), (4,)).items())}
Damage = Callable[[Path], Path]


def cyclic(folder: Path) -> Path:
    """Two nodes, each the only child of the other."""
    size = len(wrapped(NODE, made.inner(1, ["d/nodes"], [(b"a", 0, (0, 100, 100), 2)]), compress=False))
    ends = ((0, size, size), (0, 0, size))
    nodes = [
        wrapped(NODE, made.inner(9 - i, ["d/nodes"], [(b"a", 0, at, 2)]), compress=False) for i, at in enumerate(ends)
    ]
    return written(folder, nodes, 0, 9, 2)


def shared_node(folder: Path) -> Path:
    part = wrapped(NODE, made.leaf([], LEAF))
    children = [(b"a", 0, (0, 0, len(part)), 2), (b"b", 0, (0, 0, len(part)), 2)]
    return written(folder, [part, wrapped(NODE, made.inner(1, ["d/nodes"], children))], 1, 1, 4)


def leaf_with(**change: Any) -> Damage:
    """A leaf whose content is changed before its checksum is made."""

    def damage(folder: Path) -> Path:
        content = made.leaf(change.get("files", []), change.get("entries", LEAF))
        content = change.get("edit", lambda one: one)(content)
        return written(
            folder, [wrapped(NODE, content, **change.get("how", {}))], 0, change.get("height", 0), change.get("keys", 2)
        )

    return damage


def reference(file: str, *, value: bool = True, at: made.Place = (0, 0, 16)) -> Damage:
    def damage(folder: Path) -> Path:
        if value:
            return leaf_with(files=[file], entries={**LEAF, b"w/0": at})(folder)
        return written(folder, [wrapped(NODE, made.leaf([], LEAF))], 0, 0, 2, [file])

    return damage


HOSTILE: dict[str, tuple[Damage, type[WorkbenchError], str]] = {
    "cycle": (cyclic, CorruptError, "is reached twice"),
    "one node twice": (shared_node, CorruptError, "reached twice"),
    "another height": (leaf_with(height=3), CorruptError, "height 0 where its parent says 3"),
    "another number of keys": (leaf_with(keys=3), CorruptError, "2 keys where its parent says 3"),
    "no entries": (leaf_with(edit=lambda one: one[:2] + b"\0" + one[3:]), CorruptError, "0 entries"),
    "too many entries": (leaf_with(edit=lambda one: one[:2] + made.varint(1 << 40)), CorruptError, "776 entries"),
    "more entries": (leaf_with(edit=lambda one: one[:2] + made.varint(1 << 19)), CorruptError, "fewer than"),
    "too many files": (leaf_with(edit=lambda one: one[:1] + made.varint(1 << 60)), CorruptError, "data files in"),
    "bytes behind": (leaf_with(edit=lambda one: one + b"x"), CorruptError, "1 byte after"),
    "bytes lacking": (leaf_with(edit=lambda one: one[:-1]), CorruptError, "1 bytes too early"),
    "keys out of order": (leaf_with(entries=dict(reversed(LEAF.items()))), CorruptError, "out of order"),
    "a key that is no text": (leaf_with(entries={**LEAF, b"w/\xff": b""}, keys=3), CorruptError, "UTF-8"),
    "a number of 71 bits": (leaf_with(edit=lambda one: one[:2] + b"\xff" * 10 + b"\1"), CorruptError, "number"),
    "a newer version": (leaf_with(how={"version": 1}), UnsupportedFormatError, "version 1"),
    "bytes that cannot exist": (reference("d/x", at=(0, 1 << 63, 16)), CorruptError, "cannot"),
    "a file that is not listed": (reference("d/x", at=(7, 0, 16)), CorruptError, "cannot"),
    "value up and out": (reference("../../etc/passwd"), UnsafeError, "not inside"),
    "value at the root": (reference("/etc/passwd"), UnsafeError, "not inside"),
    "value through a dot": (reference("d/./x"), UnsafeError, "not inside"),
    "node up and out": (reference("d/../../nodes", value=False), UnsafeError, "not inside"),
    "node with NUL": (reference("d/no\0des", value=False), UnsafeError, "not inside"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_crafted_database_is_one_clear_error(tmp_path: Path, name: str) -> None:
    damage, kind, words = HOSTILE[name]
    path = damage(tmp_path / "ckpt")
    refused(kind, path, words)
    assert wb.verify(path).exit_code == 2


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    path = small(tmp_path / "ckpt")
    shutil.move(path / "d" / "values", tmp_path / "values")
    (path / "d" / "values").symlink_to(tmp_path / "values")
    refused(UnsafeError, path, "values")


def test_a_node_that_becomes_too_long_is_refused(tmp_path: Path, monkeypatch) -> None:
    from workbench.formats.zarr import ocdbt

    monkeypatch.setattr(ocdbt, "LARGEST", 1 << 16)
    entries = {**LEAF, b"w/1": bytes(1 << 20)}
    path = written(tmp_path, [wrapped(NODE, made.leaf([], entries))], 0, 0, 3)
    refused(CorruptError, path, "more than the expected 65,536 bytes")


def test_keys_that_share_long_prefixes_do_not_fill_memory(tmp_path: Path) -> None:
    """Six bytes an entry would become keys of 60,000."""
    n, size = 5000, 60_000
    content = (
        b"\0" + made.table([]) + made.varint(n, *range(size, size + n - 1), size, *[1] * (n - 1)) + b"w" * (size + n)
    )
    path = written(tmp_path, [wrapped(NODE, content + bytes(2 * n))], 0, 0, n)
    refused(UnsafeError, path, "keys or paths of 312,", "over the limit of 134,217,728")


def test_nodes_that_become_too_long_together_are_refused(tmp_path: Path, monkeypatch) -> None:
    from workbench.formats.zarr import ocdbt

    path = database(tmp_path, {f"w{i}/x": bytes(1000) for i in range(2000)}, leaf_keys=1000)
    monkeypatch.setattr(ocdbt, "EXPANDED_LEAST", 1 << 20)
    refused(UnsafeError, path, "256 times as many")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 40]}}}, "chunks of"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 40]}}}, "which they do not fill"),
        ({"shape": [1 << 50, 1 << 50]}, "the shape"),
        ({"shape": [4, 40]}, "outside of the array's grid"),
        ({"codecs": []}, "codecs"),
        ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "x"}}}, "separator"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(tmp_path: Path, change: dict, word: str) -> None:
    values = zarr3("a", numbers(8, 40), (4, 40), [BYTES, ZSTD], encode=squeezed, inside=(4, 20))
    values["a/zarr.json"] = json.dumps(json.loads(values["a/zarr.json"]) | change).encode()
    refused(CorruptError, database(tmp_path, values), "'a/", word)


def test_an_index_that_points_out_of_its_shard_is_refused(tmp_path: Path) -> None:
    values = zarr3("a", numbers(4, 4), (4, 4), [BYTES, ZSTD], encode=squeezed, inside=(4, 2))
    body = values["a/c/0/0"][:-36]
    values["a/c/0/0"] = body + summed(struct.pack("<4Q", 0, 10, 5, 1 << 63))
    refused(CorruptError, database(tmp_path, values), "'a/c/0/0'", "inner chunk 1")
    values["a/c/0/0"] = b"short"
    refused(CorruptError, database(tmp_path, values), "'a/c/0/0'", "5 bytes", "36")


# ---- checksums and meaning -------------------------------------------------------------------------------------------


def test_crc32c_equals_its_specification() -> None:
    """RFC 3720, appendix B.4, and bit by bit at every length around the cuts."""
    known = {b"123456789": 0xE3069283, bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}
    for data, value in known.items():
        assert crc32c(np.frombuffer(data, np.uint8)) == value == made.crc32c(data)
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for size in (0, 1, 2, 3, 4, 5, 255, 256, 257, 511, 512, 1025, 4999):
        assert crc32c(data[:size]) == made.crc32c(data[:size].tobytes())
    rows = data[:4800].reshape(100, 48)
    assert crc32c_rows(rows).tolist() == [made.crc32c(row.tobytes()) for row in rows]
    assert zlib.crc32(b"") == 0


class Run:
    """Adam in float32, as torch and optax compute it; the second moments are lost before step ``lost``."""

    def __init__(self, steps: int, lost: int = 0) -> None:
        chance = np.random.default_rng(0)
        shapes = {"wi": (48, 32), "wo": (32, 16), "norm": (32,)}
        self.params = {key: chance.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
        self.mu = {key: np.zeros_like(one) for key, one in self.params.items()}
        self.nu = {key: np.zeros_like(one) for key, one in self.params.items()}
        self.step = steps
        for n in range(1, steps + 1):
            for key, one in self.params.items():
                gradient = (one + chance.standard_normal(one.shape)).astype(np.float32)
                nu = np.zeros_like(one) if n == lost else self.nu[key]
                self.mu[key] = np.float32(0.9) * self.mu[key] + np.float32(0.1) * gradient
                self.nu[key] = np.float32(0.999) * nu + np.float32(0.001) * gradient**2
                root = np.sqrt(self.nu[key] / np.float32(1 - 0.999**n)) + np.float32(1e-8)
                self.params[key] = one - np.float32(1e-3) * self.mu[key] / np.float32(1 - 0.9**n) / root

    def emptied(self) -> Run:
        self.nu = {key: np.zeros_like(one) for key, one in self.nu.items()}
        return self

    def torch(self, path: Path) -> Path:
        slots = [("exp_avg", self.mu), ("exp_avg_sq", self.nu)]
        state = {
            i: {"step": torch.tensor(float(self.step)), **{name: torch.from_numpy(held[key]) for name, held in slots}}
            for i, key in enumerate(self.params)
        }
        groups = [{"params": list(state), "param_names": list(self.params)}]
        model = {key: torch.from_numpy(one) for key, one in self.params.items()}
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": self.step}, path)
        return path

    def orbax(self, path: Path) -> Path:
        values = zarr2("step", np.array(self.step, np.int64), ()) | zarr2(
            "opt_state.0.count", np.array(self.step, np.int32), ()
        )
        for part, held in (("params", self.params), ("opt_state.0.mu", self.mu), ("opt_state.0.nu", self.nu)):
            for key, one in held.items():
                values |= zarr2(f"{part}.{key}", one, one.shape)
        return database(path, values)


def test_a_lost_second_moment_is_diagnosed_as_in_torch(tmp_path: Path) -> None:
    found = []
    for write, end in ((Run.torch, ".pt"), (Run.orbax, "")):
        folder = tmp_path / write.__name__
        folder.mkdir()
        before, after = write(Run(1), folder / f"step-1{end}"), write(Run(2, lost=2), folder / f"step-2{end}")
        echo = write(Run(1).emptied(), folder / f"echo-1{end}")
        found.append(wb.doctor(before, after, echo=echo).to_dict())
        law = {"betas": (0.9, 0.999), "lr": 1e-3}  # Orbax stores none
        healthy = wb.doctor(before, write(Run(2), folder / f"step-2-well{end}"), **law).to_dict()
        alone = wb.doctor(before, after, **law).to_dict()
        assert healthy["causes"] == [] and "6 of 6 moments" in healthy["verdict"]
        assert [(one["cause"], one["certainty"]) for one in alone["causes"]] == [("B4", "likely")]
    same = ("cause", "title", "severity", "certainty", "excludes", "since", "tensors", "affected", "remedy", "damage")
    ours, torchs = ([{name: one[name] for name in same} for one in each["causes"]] for each in found)
    assert torchs and ours == torchs
    assert found[0]["verdict"] == found[1]["verdict"]
    assert [one["title"] for one in ours] == ["exp_avg_sq was lost; exp_avg was kept."]


def test_a_moment_that_a_resume_of_optax_lost_is_diagnosed_as_in_torch(tmp_path: Path) -> None:
    """Real saves of Orbax, and torch's of the same state: sample_ckpts/make/make_optax.py."""
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "optax.zip") as archive:
        archive.extractall(tmp_path)
    found = []
    for end in ("", ".pt"):
        before, echo, after = (f"{tmp_path}/{name}{end}" for name in ("step-1", "echo-1", "step-2"))
        found.append(wb.doctor(before, after, echo=echo).to_dict())
        assert wb.open(before).format == ("torch_save" if end else "orbax")
        assert all(wb.verify(path, deep=True).exit_code == 0 for path in (before, echo, after))
    assert found[0]["verdict"] == found[1]["verdict"]
    assert [one["title"] for one in found[0]["causes"]] == ["exp_avg_sq was lost; exp_avg was kept."]
    same = ("cause", "certainty", "excludes", "since", "tensors", "remedy", "damage")
    ours, torchs = ([{name: one[name] for name in same} for one in each["causes"]] for each in found)
    assert ours == torchs
    model = torch.load(tmp_path / "step-2.pt")["model"]
    ckpt = wb.open(tmp_path / "step-2")
    assert {name: raw(ckpt.param(name).torch()) for name in model} == {name: raw(one) for name, one in model.items()}


def test_items_whose_files_are_gone_are_named(tmp_path: Path, samples: Path) -> None:
    """Orbax leaves ``commit_success.txt`` in every folder, which is no reason to take an item for saved."""
    first, second = (shutil.copytree(samples / "orbax" / "2", tmp_path / one / "2") for one in ("a", "b"))
    (first / "iterator" / "metadata").unlink()
    (first / "iterator" / "commit_success.txt").write_text("")
    assert wb.discover(first.parent)["why"].tolist()[0].startswith("the item 'iterator', which")
    shutil.rmtree(second / "rng" / "jax_random_key" / "checkpoint")
    refused(IncompleteError, second, "the generator's key of the item 'rng' is not stored")
    assert "rng" not in wb.open(second, partial=True)
