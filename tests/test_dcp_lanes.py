"""The fast decoder of huge ``.metadata`` says what the slow one says, or nothing: torch's pickles, damaged ones."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import pickle
import pickletools
import random
import resource
import struct
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import workbench as wb
from benchmarks.synthetic import ITEM, write_dcp_metadata
from workbench.core.pickles.standins import ByClass
from workbench.core.source import FileStat, Source
from workbench.errors import WorkbenchError
from workbench.formats.dcp import lanes as dcp_lanes
from workbench.formats.dcp import metadata as dcp_metadata
from workbench.formats.dcp import reader as dcp
from workbench.formats.dcp.lanes import cut as pickle_lanes
from workbench.formats.dcp.lanes.fields import distinct
from workbench.formats.dcp.lanes.pages import HeldBytes
from workbench.formats.dcp.lanes.records import match
from workbench.formats.dcp.lanes.templates import Unlike, derive

SLOW = os.environ.get("WORKBENCH_SLOW") == "1"
FUZZ = 9000 if SLOW else 300
EXAMPLES = 500 if SLOW else 50
WIDTHS = [
    0,
    1,
    255,
    256,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    -1,
    -(1 << 31),
    -(1 << 31) - 1,
    (1 << 63) - 1,
    -(1 << 63),
]


def slow(data: bytes) -> dcp_metadata.DcpMetadata:
    return dcp_metadata.decode(data, what="'.metadata'")


def fast(data: bytes) -> dcp_metadata.DcpMetadata | None:
    """Every other one is read a part at a time."""
    held = Paged(data) if zlib.crc32(data) % 2 else data
    return dcp_lanes.decode(held, what="'.metadata'", run=3, irregular=1.0)


class Paged(dcp_lanes.PagedBytes):
    """Bytes that are in memory only a few KiB at a time."""

    def __init__(self, data: bytes) -> None:
        bits = mmap.PAGESIZE.bit_length() - 1
        super().__init__(MemorySource(data), bits=bits, resident=3 << bits)


class MemorySource(Source):
    def __init__(self, data: bytes) -> None:
        self.data, self.stat = np.frombuffer(data, np.uint8), FileStat(len(data), 0)

    def read_into(self, buffer, start):
        buffer[:] = self.data[start : start + len(buffer)]


def difference(one: dcp_metadata.DcpMetadata, other: dcp_metadata.DcpMetadata) -> str | None:
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            same = a.dtype == b.dtype and np.array_equal(a, b)
        elif isinstance(a, Mapping):
            same = isinstance(b, Mapping) and repr(list(a.items())) == repr(list(b.items()))
        else:
            same = a == b
        if not same:
            return f"{field.name}: {a!r} and {b!r}"
    return None


def check(data: bytes, *, taken: bool = True) -> None:
    """Both decoders agree; ``taken``: the fast one had an answer at all."""
    found = fast(data)
    if taken:
        assert found is not None
    if found is not None:
        assert difference(found, slow(data)) is None


def metadata(
    rng: random.Random,
    *,
    tensors: int = 6,
    chunks: int = 12,
    dims: int | None = None,
    numbers: str = "small",
    share: str = "",
    hint: str = "right",
    zstd: bool = False,
    blobs: int = 2,
    names: list[str] | None = None,
    files: int = 3,
) -> Metadata:
    """A Metadata of torch's classes. ``share``: what is one object in several places, n(ames), f(iles), s(izes)."""

    def number() -> int:
        return rng.choice(WIDTHS) if numbers == "odd" else rng.randrange(300)

    def fresh(text: str, kind: str) -> str:
        return text if kind in share else text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")

    names = names or [f"model.layers.{t}.weight" for t in range(tensors)]
    paths = [f"__{r}_0.distcp" for r in range(files)]
    state: dict = {}
    storage: dict = {}
    for name in names:
        ndim = rng.randrange(6) if dims is None else dims
        box = torch.Size([number() for _ in range(ndim)])
        parts = []
        for place in range(chunks):
            offset = torch.Size([number() for _ in range(ndim)])
            if ndim and numbers == "small":  # an offset belongs to one chunk
                offset = torch.Size([300 * place, *offset[1:]])
            size = box if "s" in share else torch.Size([number() for _ in range(ndim)])
            parts.append(ChunkStorageMetadata(offset, size))
            at = offset if "s" in share else torch.Size(list(offset))
            which = {"right": place, "wrong": rng.randrange(chunks + 2), "none": None}[hint]
            info = _StorageInfo(
                fresh(rng.choice(paths), "f"),
                abs(number()) % (1 << 63),
                abs(number()) % (1 << 63),
                ["stream.zstd/1"] if zstd else None,
            )
            storage[MetadataIndex(fresh(name, "n"), at, which)] = info
        state[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), box, parts)
    for number_ in range(blobs):
        state[f"step{number_}"] = BytesStorageMetadata()
        storage[MetadataIndex(f"step{number_}")] = _StorageInfo(fresh(paths[0], "f"), number_, 100)
    planner = {name: tuple(name.split(".")) for name in state}
    return Metadata(state, planner, storage, StorageMeta(checkpoint_id="x", save_id="y"), "1.0.0")


def pickled(value: object, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol=protocol)


REGULAR = {
    "plain": {},
    "one dimension": {"dims": 1},
    "no dimension": {"dims": 0},
    "five dimensions": {"dims": 5},
    "shared names": {"share": "n"},
    "shared files": {"share": "f"},
    "shared sizes": {"share": "s", "dims": 2},
    "all shared": {"share": "nfs", "dims": 3},
    "no hints": {"hint": "none"},
    "wrong hints": {"hint": "wrong", "dims": 2},
    "integers of every width": {"numbers": "odd", "hint": "none"},
    "zstd items": {"zstd": True},
    "batches of a thousand": {"tensors": 2, "chunks": 2100, "dims": 2},
    "frames": {"tensors": 40, "chunks": 60, "dims": 2},
    "many files": {"files": 300, "tensors": 20, "chunks": 30, "share": "f"},
    "odd names": {"names": ["a", "ä.ö", "x" * 300, "y" * 70_000, "日本.語", "with space", "😀" * 30, "x" * 256]},
    "no bytes": {"blobs": 0},
}


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("kind", REGULAR)
def test_regular_metadata_takes_the_lanes_and_equals_the_slow_decoder(kind, protocol):
    data = pickled(metadata(random.Random(kind), **REGULAR[kind]), protocol)
    check(data)
    lanes = pickle_lanes.read(HeldBytes(data), what="x", allow=ByClass(dcp_metadata.CLASSES), run=3, irregular=1.0)
    assert lanes.cut >= 70


def test_values_are_those_that_were_pickled():
    """Not against the slow decoder: against torch's objects themselves."""
    made = metadata(random.Random(7), tensors=5, chunks=50, dims=3, hint="right", numbers="odd", share="f")
    found = fast(pickled(made))
    assert found is not None
    tensors = {k: v for k, v in made.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    assert found.keys == list(tensors)
    chunks = [chunk for value in tensors.values() for chunk in value.chunks]
    assert [tuple(row) for row in found.offsets.tolist()] == [tuple(chunk.offsets) for chunk in chunks]
    assert [tuple(row) for row in found.sizes.tolist()] == [tuple(chunk.sizes) for chunk in chunks]
    infos = list(made.storage_data.values())
    assert [found.files[i] for i in found.file.tolist()] == [info.relative_path for info in infos]
    assert found.start.tolist() == [info.offset for info in infos]
    assert found.length.tolist() == [info.length for info in infos]


def test_python_pickler_equals(monkeypatch):
    made = metadata(random.Random(3), dims=2)
    check(pickle._dumps(made, protocol=4))


def test_sequence_of_mixed_templates_equals():
    rng = random.Random(11)
    parts = [metadata(rng, share=share, hint=hint) for share in ("", "n", "f", "nf", "s") for hint in ("right", "none")]
    state = {f"{i}.{k}": v for i, part in enumerate(parts) for k, v in part.state_dict_metadata.items()}
    storage: dict = {}
    for i, part in enumerate(parts):
        for index, info in part.storage_data.items():
            storage[MetadataIndex(f"{i}.{index.fqn}", index.offset, index.index)] = info
    check(pickled(Metadata(state, None, storage)))


@pytest.mark.parametrize("protocol", [0, 2, 3])
def test_older_protocols_are_left_to_the_slow_decoder(protocol):
    made = metadata(random.Random(5), dims=2)
    assert fast(pickled(made, 4)) is not None
    assert fast(pickled(made, protocol)) is None


def test_number_beyond_64_bits_is_left_to_the_slow_decoder():
    made = metadata(random.Random(5), dims=2)
    info = list(made.storage_data.values())[20]
    info.offset = 1 << 70
    data = pickled(made)
    assert fast(data) is None
    with pytest.raises(WorkbenchError):
        slow(data)


def test_chunk_of_other_dimensions_is_left_to_the_slow_decoder():
    made = metadata(random.Random(5), dims=2)
    chunks = next(iter(made.state_dict_metadata.values())).chunks
    chunks[5] = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    assert fast(pickled(made)) is None


def test_names_that_are_no_utf8_are_refused():
    data = pickled(metadata(random.Random(5), names=["aaaa", "bbbb", "cccc"], dims=1))
    at = data.rindex(b"\x8c\x04bbbb")
    assert fast(data) is not None
    broken = data[: at + 2] + b"\xff\xfebb" + data[at + 6 :]
    assert fast(broken) is None
    with pytest.raises(WorkbenchError):
        slow(broken)


def test_huge_metadata_goes_through_the_lanes_by_itself(monkeypatch):
    data = pickled(metadata(random.Random(1), tensors=30, chunks=800, dims=2, share="f"))
    assert len(data) >= dcp_metadata.LANES_FROM // 2
    monkeypatch.setattr(dcp_metadata, "LANES_FROM", 1 << 20)
    monkeypatch.setattr(dcp_metadata, "Objects", None)  # what the slow decoder stands on
    found = dcp._decode(data, what="x")
    monkeypatch.undo()
    assert difference(found, slow(data)) is None


@st.composite
def settings_of_a_save(draw):
    return {
        "tensors": draw(st.integers(1, 5)),
        "chunks": draw(st.sampled_from([0, 1, 2, 3, 7, 20])),
        "dims": draw(st.sampled_from([None, 0, 1, 2, 4])),
        "numbers": draw(st.sampled_from(["small", "odd"])),
        "share": "".join(draw(st.sets(st.sampled_from("nfs")))),
        "hint": draw(st.sampled_from(["right", "wrong", "none"])),
        "zstd": draw(st.booleans()),
        "blobs": draw(st.integers(0, 5)),
        "files": draw(st.integers(1, 9)),
        "names": draw(st.lists(st.text(max_size=40), min_size=1, max_size=5, unique=True)),
    }


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(settings_of_a_save(), st.integers(0, 1 << 32), st.sampled_from([4, 5]))
def test_any_metadata_equals_the_slow_decoder(kind, seed, protocol):
    if kind["chunks"] < 1 and kind["hint"] == "wrong":
        kind["hint"] = "right"
    data = pickled(metadata(random.Random(seed), **kind), protocol)
    regular = kind["chunks"] >= 20 and kind["numbers"] == "small"
    check(data, taken=regular)


OPCODES = b"NK()M}]\x94\x85\x86\x87tuseabR\x81hjJ\x8c\x88\x95\x8aX.02Q1\x93"


def damage(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, added, left out or moved; mostly opcodes and small numbers, which get far."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(2, len(out))
        what = rng.randrange(8)
        if what == 0:
            out[at] = rng.randrange(256)
        elif what == 1:
            out[at] = rng.choice(OPCODES)
        elif what == 2:
            out[at] = (out[at] + rng.choice([-1, 1])) % 256
        elif what == 3:
            out.insert(at, rng.choice(OPCODES))
        elif what == 4:
            del out[at : at + rng.randrange(1, 9)]
        elif what == 5:
            start = rng.randrange(2, len(out))
            out[at:at] = out[start : start + rng.randrange(1, 200)]
        elif what == 6 and (marks := [i for i in range(max(2, at - 500), min(at + 500, len(out))) if out[i] in b"hj"]):
            out[min(rng.choice(marks) + 1, len(out) - 1)] = rng.randrange(256)
        else:
            del out[max(at, len(out) // 2) :]
            out += b"."
        if len(out) < 10:
            break
    return bytes(out)


def judge(data: bytes) -> str:
    """``none``, ``equal``, or a failure of the test."""
    found = fast(data)
    if found is None:
        return "none"
    try:
        truth = slow(data)
    except WorkbenchError as error:
        raise AssertionError(f"the fast decoder has an answer where the slow one raises {error}") from error
    assert difference(found, truth) is None
    return "equal"


@pytest.mark.parametrize("kind", ["plain", "all shared", "zstd items", "shared files", "no hints", "odd"])
def test_damaged_bytes_give_the_slow_decoders_answer_or_none(kind):
    rng = random.Random(f"damage {kind}")
    how = REGULAR.get(kind, {"numbers": "odd", "dims": None}) | {"tensors": 3, "chunks": 9}
    seen = {"none": 0, "equal": 0}
    for _ in range(FUZZ // 6):
        data = pickled(metadata(rng, **how), 4)
        seen[judge(damage(data, rng))] += 1
    assert seen["none"] and seen["equal"]  # both happen


def spliced(data: bytes, at: int, extra: bytes, drop: int = 0) -> bytes:
    return data[:at] + extra + data[at + drop :]


def test_opcodes_that_take_a_part_of_a_run_are_left_to_the_slow_decoder():
    data = pickled(metadata(random.Random(2), tensors=1, chunks=20, dims=2, blobs=0))
    plain = unframed(data)
    at = plain.index(b"e", plain.rindex(b"ChunkStorageMetadata") + 20 * 40)
    while plain[at : at + 3] != b"eub":
        at = plain.index(b"e", at + 1)
    assert judge(plain) == "equal"
    for extra in (
        b"a",
        b"s",
        b"0",
        b"2",
        b"\x86",
        b"\x85",
        b"b",
        b"NN\x87",
        b"(",
        b"1",
        b"R",
        b"\x94",
        b"Q",
        b"KQ",
        b"J\0\0\0\0Q",
    ):
        judge(spliced(plain, at, extra))
        judge(spliced(plain, at, extra, drop=1))
    assert fast(spliced(plain, at, b"\x86")) is None


def unframed(data: bytes) -> bytes:
    """The same pickle of one frame without its header, so that bytes can be put in."""
    assert struct.unpack_from("<Q", data, 3)[0] == len(data) - 11
    return data[:2] + data[11:]


@pytest.mark.parametrize("chunks", range(4, 14))
def test_chunks_that_are_a_dict_or_a_set_are_left_to_the_slow_decoder(chunks):
    data = unframed(pickled(metadata(random.Random(2), tensors=1, chunks=chunks, dims=0, blobs=0)))
    assert judge(data) == "equal"
    start, stop = data.index(b"]\x94(") + 0, data.index(b"eub")
    for opening, closing in ((b"}", b"u"), (b"}", b"Nu"), (b"\x8f", b"\x90"), (b"(", b"t"), (b"]", b"e0")):
        made = data[:start] + opening + data[start + 1 : stop] + closing + data[stop + 1 :]
        assert judge(made) == "none"


@pytest.mark.parametrize("chunks", range(14, 18))
def test_key_stored_twice_keeps_its_first_place_and_its_last_value(chunks):
    """Of a run behind the second use, only the first record is that value; the others come last."""
    data = unframed(pickled(metadata(random.Random(2), tensors=1, chunks=chunks, dims=2, blobs=0)))
    names = [(op.name, arg, pos) for op, arg, pos in pickletools.genops(data)]
    at = next(i for i, (_, arg, _) in enumerate(names) if arg == "MetadataIndex")
    made = next(i for i in range(at, len(names)) if names[i][0] == "NEWOBJ")
    key = b"j" + struct.pack("<I", sum(name == "MEMOIZE" for name, _, _ in names[:made]))  # the first index
    ends = [pos for name, _, pos in names[at:] if name == "BUILD"]
    first, second, third = ends[1] + 1, ends[3] + 1, ends[4] + 1
    pair = spliced(data[first:second], 5, b"\x95" + bytes(8))  # an empty frame: a record, but no lane
    twice = data[:first] + pair + key + data[third:]
    assert len(slow(twice).file) == chunks - 1
    assert judge(twice) == "equal"


def test_one_list_of_two_tensors_equals_or_is_left():
    made = metadata(random.Random(2), tensors=3, chunks=9, dims=1)
    first, second, *_ = made.state_dict_metadata.values()
    second.chunks = first.chunks
    check(pickled(made), taken=False)


def test_runs_do_not_show_where_other_things_stand():
    """The planner's paths, the version, the save id are handed on as decoded: not with a stand-in for records."""
    made = metadata(random.Random(2), tensors=3, chunks=9, dims=1)
    entry = made.state_dict_metadata["model.layers.0.weight"]
    assert fast(pickled(made)) is not None
    assert fast(pickled(dataclasses.replace(made, planner_data={"a": (entry,)}))) is None
    assert fast(pickled(dataclasses.replace(made, version=[entry]))) is None
    assert fast(pickled(dataclasses.replace(made, storage_meta=StorageMeta(save_id=[entry])))) is None


def test_list_that_holds_itself_is_left_to_the_slow_decoder():
    made = metadata(random.Random(2), tensors=3, chunks=9, dims=1)
    endless: list = []
    endless.append(endless)
    for info in made.storage_data.values():
        info.transform_descriptors = endless
    assert fast(pickled(made)) is None
    for info in made.storage_data.values():
        info.transform_descriptors = []
        info.transform_descriptors.append(info.transform_descriptors)
    assert fast(pickled(made)) is None


def test_stream_cut_short_anywhere_ends():
    data = pickled(metadata(random.Random(2), tensors=2, chunks=20, dims=1))
    for stop in range(len(data) - 1, 100, -41):
        assert fast(data[:stop]) is None


@pytest.mark.parametrize("key", ["relative_path", "length"])
def test_reference_to_what_comes_later_is_refused(key):
    """The last text of the stream is one that would do; but at that point it does not exist yet."""
    made = metadata(random.Random(2), tensors=2, chunks=20, dims=2, share="f")
    text = "__1_0.distcp" if key == "relative_path" else key
    data = pickled(dataclasses.replace(made, version=text.encode().decode()))
    ops = [(op.name, arg, pos) for op, arg, pos in pickletools.genops(data)]
    memo = {}
    for before, (name, _, _) in itertools.pairwise(ops):
        if name == "MEMOIZE":
            memo[len(memo)] = before[1]
    last = max(memo)
    assert memo[last] == text and fast(data) is not None
    first = min(index for index, held in memo.items() if held == text)
    places = [pos for name, arg, pos in ops if name == "LONG_BINGET" and arg == first]
    assert len(places) > 5
    later = spliced(data, places[5], b"j" + struct.pack("<I", last), 5)
    assert fast(later) is None
    with pytest.raises(WorkbenchError):
        slow(later)


def test_item_set_or_appended_without_a_mark_takes_one_record_not_the_run():
    made = metadata(random.Random(2), tensors=1, chunks=20, dims=2, blobs=0)
    made.storage_meta.save_id = "y" * 400  # so that the last record is no longer near the end, where there are no lanes
    data = unframed(pickled(made))
    assert judge(data) == "equal"
    stop = data.rindex(b"u\x8c\x0cstorage_meta")
    second = data.index(b"ub", data.index(b"ub", data.index(b"storage_data")) + 2) + 2  # the first pair ends
    for closing in (b"s", b"ss"):
        made = data[:second] + b"u" + data[second:stop] + closing + data[stop + 1 :]
        assert judge(made) == "none"
    stop = data.index(b"eub")
    second = data.index(b"ub", data.index(b"ChunkStorageMetadata")) + 2
    for closing in (b"a", b"aa"):
        made = data[:second] + b"e" + data[second:stop] + closing + data[stop + 1 :]
        assert judge(made) == "none"


def test_every_sample_equals_the_slow_decoder():
    """The repository's own, and those below the folder that ``WORKBENCH_SAMPLES`` names."""
    own = Path(__file__).resolve().parents[1] / "sample_ckpts"
    roots = [own, *(Path(one) for one in [os.environ.get("WORKBENCH_SAMPLES")] if one)]
    paths = [path for root in roots for path in sorted(root.rglob(".metadata"))]
    assert len(paths) >= 5
    for path in paths:
        check(path.read_bytes())


@pytest.mark.parametrize(("tensors", "ranks"), [(3, 1003), (1000, 2)])
def test_synthetic_metadata_is_what_torch_writes(tmp_path, tensors, ranks):
    """The metadata of ten million chunks is measured on files that torch did not write."""
    write_dcp_metadata(tmp_path, tensors, ranks)
    made = Metadata({}, {}, {}, StorageMeta(checkpoint_id="synthetic"), "1.0.0")
    for t in range(tensors):
        name = f"model.layers.{t // 10}.mlp.experts.{t % 10}.up_proj.weight_{t:05d}"
        chunks = [ChunkStorageMetadata(torch.Size((16 * r, 0)), torch.Size((16, 64))) for r in range(ranks)]
        shape = torch.Size((16 * ranks, 64))
        made.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(torch.float32), shape, chunks)
        made.planner_data[name] = tuple(name.split(".", 1))
        for r in range(ranks):
            own, path = name.encode().decode(), f"__{r}_0.distcp".encode().decode()
            made.storage_data[MetadataIndex(own, torch.Size((16 * r, 0)), r)] = _StorageInfo(path, t * ITEM, ITEM)
    one, other = (
        [(op.name, argument) for op, argument, _ in pickletools.genops(data) if op.name != "FRAME"]
        for data in (pickle.dumps(made, 4), (tmp_path / ".metadata").read_bytes())
    )
    assert one == other


def test_a_huge_file_is_read_a_part_at_a_time(tmp_path, monkeypatch):
    write_dcp_metadata(tmp_path, 40, 300)
    whole = wb.open(tmp_path, cache=False).catalog.digest()
    monkeypatch.setattr(dcp, "PAGED_FROM", 1)
    monkeypatch.setattr(dcp, "_decode", None)
    assert wb.open(tmp_path, cache=False).catalog.digest() == whole


def test_text_spans_are_numbered_by_value():
    rng = random.Random(0)
    words = [bytes(rng.choices(b"ab\0", k=rng.choice([0, 1, 7, 8, 9, 31, 32, 33, 64, 200, 300]))) for _ in range(5000)]
    buffer = np.frombuffer(b"".join(words) + bytes(256), np.uint8)
    stop = np.cumsum([len(word) for word in words])
    start = stop - [len(word) for word in words]
    number, where = distinct(buffer, start, stop)
    assert [words[where[n]] for n in number.tolist()] == words
    assert len(where) == len(set(words)) and len(set(number.tolist())) == len(where)


def test_template_reads_what_pickletools_reads():
    data = pickled(
        [ChunkStorageMetadata(torch.Size((i, 2)), torch.Size((70_000 * i, 1 << 40))) for i in range(500)]
    ) + bytes(600)
    starts = np.array([i for i in range(100, len(data)) if data[i + 2 : i + 8] == b")\x81\x94}\x94("])
    template = derive(data, int(starts[100]))
    index, _, columns = match(HeldBytes(data), template, starts)
    first = columns[template.fields[0].column]
    assert len(index) > 200 and first.tolist() == list(range(int(first[0]), int(first[0]) + len(first)))
    assert columns[template.fields[2].column].tolist() == [70_000 * i for i in first.tolist()]
    with pytest.raises(Unlike):
        derive(b"K\x01K\x02\x86b.", 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss has another unit")
def test_a_million_chunks_stay_under_the_memory_budget():
    made = metadata(random.Random(0), tensors=500, chunks=2000, dims=2)
    data = pickled(made)
    del made
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert dcp_lanes.decode(data, what="x") is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10
