"""Keras' files: those of keras 3.15 and h5py 3.16 in ``fixtures/keras.zip``, and hostile HDF5 written here.

``sample_ckpts/make/make_keras.py`` made the fixtures and their truth: values as h5py reads them, names as
Keras has them.
"""

from __future__ import annotations

import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

import workbench as wb
from tests.reader_suite import check_reader, refused, same_bits
from workbench.core.crc32 import fletcher32
from workbench.core.source import PreadSource
from workbench.errors import (
    CorruptError,
    HoleError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
    WorkbenchError,
)
from workbench.formats.keras.names import meaning
from workbench.formats.keras.structures import lookup3

FIXTURES = zipfile.ZipFile(Path(__file__).parent / "fixtures" / "keras.zip")
WEIGHTS = "model.weights.h5"


def put(folder: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A fixture as a file, and its truth."""
    (folder / name).write_bytes(FIXTURES.read(name))
    return folder / name, load(FIXTURES.read(f"{name}.safetensors"))


# ---- Keras -----------------------------------------------------------------------------------------------------------


def test_an_archive_is_read_and_named_as_keras_names_it(tmp_path: Path) -> None:
    path, truth = put(tmp_path, "net.keras")
    ckpt = check_reader(path, truth)
    assert (ckpt.format, ckpt.step, ckpt.notes) == ("keras", 2, [])
    roles = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}
    named = json.loads(FIXTURES.read("variables.json"))
    assert len(named) > 60
    for key, variable in named.items():
        if key.startswith("optimizer/"):
            name, _, role = variable.removeprefix("adam_w/").rpartition("_")
            if role in roles:
                assert ckpt[key].role == roles[role] and ckpt[key].fqn.replace(".", "_") == name, key
        else:
            assert ckpt[key].fqn == variable.replace("/", "."), key
    assert {ckpt[key].fqn for key in ckpt if ckpt[key].role == "buffer"} == {"norm.moving_mean", "norm.moving_variance"}
    assert ckpt["optimizer/vars/0"].role == "step" and ckpt.objects["learning_rate"] == pytest.approx(1e-3)
    assert ckpt.objects["metadata"]["keras_version"] == "3.15.1" and ckpt.objects["config"]["config"]["name"] == "net"
    report = wb.verify(ckpt, deep=True)
    assert report.exit_code == 0 and "CRC-32 of 3 records of the archive" in report.checked["checksums"]


def test_weights_alone_keep_their_paths_as_names(tmp_path: Path) -> None:
    path, truth = put(tmp_path, "net.keras")
    with zipfile.ZipFile(path) as archive:
        (tmp_path / "net.weights.h5").write_bytes(archive.read(WEIGHTS))
    ckpt = check_reader(tmp_path / "net.weights.h5", truth)
    assert ckpt.step == 2 and all(ckpt[key].fqn == key for key in ckpt if key.startswith("layers/"))
    assert {ckpt[key].role for key in ckpt if key.startswith("optimizer/")} == {"step", "other"}
    assert len(wb.discover(tmp_path)) == 2


def test_a_whole_model_in_hdf5_has_the_same_tensors_by_name(tmp_path: Path) -> None:
    path, truth = put(tmp_path, "net.h5")
    bits = {key for key in truth if "head" in key}  # a bfloat16 without the attribute that says so
    ckpt = check_reader(path, {key: one for key, one in truth.items() if key not in bits}, rest=True)
    assert set(ckpt) == set(truth) and ckpt.step == 2 and "shown as bits" in ckpt.notes[0]
    assert all(ckpt[key].numpy().tobytes() == truth[key].numpy().tobytes() for key in bits)
    other, _ = put(tmp_path, "net.keras")
    archive = wb.open(other)
    for key in ckpt:
        if ckpt[key].fqn is not None:
            twin = archive.param(ckpt[key].fqn, role=ckpt[key].role)
            assert twin.numpy().tobytes() == ckpt[key].numpy().tobytes(), key
    assert len([key for key in ckpt if ckpt[key].role in ("exp_avg", "exp_avg_sq")]) == 40
    assert ckpt.objects["training_config"]["optimizer_config"]["class_name"] == "AdamW"


def test_keras_2_named_its_slots_in_other_ways() -> None:
    from workbench.formats.keras.names import legacy_meaning

    adam = {"optimizer_config": {"class_name": "Adam"}}
    weights = {"model_weights/fc": ["sequential/fc/kernel:0"], "optimizer_weights": []}
    sequential = {"class_name": "Sequential", "config": {"name": "sequential"}}
    names = {
        "optimizer_weights/Adam/sequential/fc/kernel/m:0": ("fc.kernel", "exp_avg"),
        "optimizer_weights/training/Adam/sequential/fc/kernel/v:0": ("fc.kernel", "exp_avg_sq"),
        "optimizer_weights/Adam/m/sequential/fc/kernel:0": ("fc.kernel", "exp_avg"),
        "optimizer_weights/Adam/iter:0": (None, "step"),
        "optimizer_weights/Adam/other:0": (None, "other"),
        "model_weights/fc/sequential/fc/kernel:0": ("fc.kernel", "param"),
    }
    assert legacy_meaning(list(names), weights, sequential, adam) == names
    slot = "optimizer_weights/Adam/sequential/fc/kernel/m:0"
    assert legacy_meaning([slot], weights, sequential, None)[slot] == (None, "other")


def dense(name: str, **config: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": "Dense", "config": {"name": name, "use_bias": True, **config}}


def model(*layers: Any, **optimizer: Any) -> dict[str, Any]:
    told = {"module": "keras.optimizers", "class_name": "Adam", "config": optimizer}
    return {"class_name": "Sequential", "config": {"layers": list(layers)}, "compile_config": {"optimizer": told}}


SHAPES = {
    "layers/dense/vars/0": (3, 4),
    "layers/dense/vars/1": (4,),
    "layers/dense_1/vars/0": (4, 2),
    "layers/dense_1/vars/1": (2,),
}


def slots(*shapes: tuple[int, ...], first: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"optimizer/vars/{n}": shape for n, shape in enumerate([*[()] * first, *shapes])}


def test_what_is_not_proved_stays_unknown() -> None:
    two = [(3, 4)] * 2 + [(4,)] * 2 + [(4, 2)] * 2 + [(2,)] * 2
    config = model(dense("a"), dense("b"))
    found, _ = meaning(SHAPES | slots(*two), {}, config)
    assert found["layers/dense_1/vars/0"] == ("b.kernel", "param")
    assert found["optimizer/vars/9"] == ("b.bias", "exp_avg_sq")
    schedule = model(dense("a"), dense("b"), learning_rate={"class_name": "CosineDecay"})
    assert meaning(SHAPES | slots(*two, first=1), {}, schedule)[0]["optimizer/vars/8"] == ("b.bias", "exp_avg_sq")
    frozen = model(dense("a", trainable=False), dense("b"))
    assert meaning(SHAPES | slots(*two[4:]), {}, frozen)[0]["optimizer/vars/2"] == ("b.kernel", "exp_avg")
    for shapes, odd in (
        (slots(*two[:-1]), config),  # another number
        (slots(*two[::-1]), config),  # other shapes
        (slots(*two), model(dense("a"), dense("b"), amsgrad=True)),
        (slots(*two), model(dense("a"), dense("b"), use_ema=True)),
        (slots(*two), model(dense("a"), {**dense("b"), "module": "mine"})),
    ):
        found, _ = meaning(SHAPES | shapes, {}, odd)
        assert {role for path, (_, role) in found.items() if path.startswith("optimizer/")} == {"step", "other"}
    assert found["layers/dense/vars/0"][0] == "a.kernel"
    assert found["layers/dense_1/vars/0"][0] == "layers/dense_1/vars/0"
    found, note = meaning(SHAPES, {"layers/dense": "c"}, config)
    assert "other names of layers" in note and found["layers/dense/vars/0"][0] == "layers/dense/vars/0"


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old.h5", "new.h5"])
def test_every_layout_filter_and_type_equals_what_h5py_reads(tmp_path: Path, name: str) -> None:
    path, truth = put(tmp_path, name)
    bits = truth.pop("plain/bits")
    ckpt = check_reader(path, truth, rest=True)
    assert set(ckpt) == {*truth, "plain/bits"} and ckpt["plain/bits"].numpy().tobytes() == bits.numpy().tobytes()
    assert ckpt.objects["plain/text"] == ["ab", "ä"]
    assert len(ckpt.notes) == 1 and "'plain/bits'" in ckpt.notes[0]


def test_what_was_never_written_is_a_hole(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(FIXTURES.read("holes.h5"))
    ckpt = wb.open(tmp_path / "x.h5")
    assert (ckpt["hole"][4:].numpy() == 1).all()
    assert ckpt["pages"][:900].tolist() == list(range(900)) and ckpt["pages"][2100:].tolist() == list(range(400))
    for key, part in (("hole", slice(3, 5)), ("never", slice(None)), ("pages", slice(2000, 2101))):
        with pytest.raises(HoleError, match=key):
            ckpt[key][part]
    assert any("'never'" in note and "never written" in note for note in ckpt.notes)


def test_a_slice_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1 << 20, dtype="<f4")
    path = tmp_path / "x.h5"
    write(path, {"w": data_set((1024, 1024), contiguous(values.tobytes()))})
    read: list[int] = []
    fill = PreadSource._fill
    monkeypatch.setattr(PreadSource, "_fill", lambda self, left, at: (read.append(len(left)), fill(self, left, at))[1])
    ckpt = wb.open(path, io="pread", cache=False)
    same_bits(ckpt["w"][1000:1002], torch.from_numpy(values.reshape(1024, 1024)[1000:1002]), "w")
    assert sum(read) < 64 << 10


def test_checksums_are_those_of_others() -> None:
    # Jenkins' lookup3.c, driver5; hdf5's test/tchecksum.c has the same phrase
    assert lookup3(b"") == 0xDEADBEEF and lookup3(b"Four score and seven years ago") == 0x17770551

    def slowly(data: bytes) -> int:  # H5_checksum_fletcher32
        first = second = 0
        for at in range(0, len(data), 2):
            first += data[at] << 8 | (data[at + 1] if at + 1 < len(data) else 0)
            second += first
            first, second = ((n & 0xFFFF) + (n >> 16) for n in (first, second))
        first, second = ((n & 0xFFFF) + (n >> 16) for n in (first, second))
        return second << 16 | first

    chance = random.Random(0)
    for length in (0, 1, 2, 7, 360, 721, 5000):
        for data in (chance.randbytes(length), bytes(length), b"\xff" * length):
            assert fletcher32(np.frombuffer(data, np.uint8)) == slowly(data)


def test_a_changed_byte_of_a_chunk_or_a_header_is_found(tmp_path: Path) -> None:
    path, _ = put(tmp_path, "new.h5")
    whole = path.read_bytes()
    ckpt = wb.open(path, cache=False)
    for key in ("chunked/f", "chunked/sgf"):
        start = int(ckpt.catalog.start[ckpt.catalog.row_ptr[ckpt.catalog.index[key]]])
        path.write_bytes(whole[: start + 9] + bytes([whole[start + 9] ^ 4]) + whole[start + 10 :])
        refused(CorruptError, path, key, "Fletcher-32", read=key)
    at = whole.index(b"OHDR") + 30
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    refused(CorruptError, path, "checksum of bytes 48")
    path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    refused(CorruptError, path, "checksum of bytes 0 to 44")
    path.write_bytes(whole[:-5])
    refused(TruncatedError, path, "is truncated", f"byte {len(whole):,}")


# ---- files written here ----------------------------------------------------------------------------------------------

Part = Callable[[int], tuple[list[tuple[int, bytes]], bytes]]
FLOAT = struct.pack("<BBBBIHHBBBBI", 0x11, 0x20, 31, 0, 4, 0, 32, 23, 8, 0, 23, 127)
UNDEFINED = (1 << 64) - 1


def header(messages: list[tuple[int, bytes]]) -> bytes:
    body = b"".join(
        struct.pack("<HHB3x", kind, len(data) + -len(data) % 8, 0) + data + bytes(-len(data) % 8)
        for kind, data in messages
    )
    return struct.pack("<BxHII4x", 1, len(messages), 1, len(body)) + body


def link(name: str, address: int, kind: int = 0) -> tuple[int, bytes]:
    text = name.encode()
    if kind:
        return 6, bytes([1, 8, kind, len(text)]) + text + struct.pack("<H", 1) + b"x"
    return 6, bytes([1, 0, len(text)]) + text + struct.pack("<Q", address)


def space(shape: tuple[int, ...]) -> tuple[int, bytes]:
    return 1, struct.pack("<BBBx4x", 1, len(shape), 0) + struct.pack(f"<{len(shape)}Q", *shape)


def contiguous(data: bytes, address: int | None = None, size: int | None = None) -> Part:
    def part(at: int) -> tuple[list[tuple[int, bytes]], bytes]:
        where = at if address is None else address
        return [(8, struct.pack("<BBQQ", 3, 1, where, len(data) if size is None else size))], data

    return part


def chunked(
    chunk: tuple[int, ...], rows: list[tuple[tuple[int, ...], bytes]], node: Callable[[bytes, int], bytes]
) -> Part:
    """A data set in chunks, with one node of the tree; ``node`` may change it, given where it is."""

    def part(at: int) -> tuple[list[tuple[int, bytes]], bytes]:
        payload, keys = b"", b""
        tree = at + sum(len(data) for _, data in rows)
        for offsets, data in rows:
            keys += struct.pack(f"<II{len(chunk) + 1}QQ", len(data), 0, *offsets, 0, at + len(payload))
            payload += data
        made = (
            b"TREE"
            + struct.pack("<BBHQQ", 1, 0, len(rows), UNDEFINED, UNDEFINED)
            + keys
            + bytes(8 + 8 * len(chunk) + 8)
        )
        layout = struct.pack(f"<BBBQ{len(chunk) + 1}I", 3, 2, len(chunk) + 1, tree, *chunk, 4)
        return [(8, layout)], payload + node(made, tree)

    return part


def data_set(shape: tuple[int, ...], part: Part, kind: bytes = FLOAT, *more: tuple[int, bytes]) -> Part:
    def made(at: int) -> tuple[list[tuple[int, bytes]], bytes]:
        messages, payload = part(at)
        return [space(shape), (3, kind), *messages, *more], payload

    return made


def write(path: Path, parts: dict[str, Part], *more: tuple[int, bytes], cut: int = 0) -> None:
    """A file with version 0 of the superblock, and a root whose links are messages."""
    root = 96
    links = [link(name, 0) for name in parts]
    at = root + len(header([*links, *more]))
    body, links = b"", []
    for name, part in parts.items():
        messages, payload = part(at + len(body))
        links.append(link(name, at + len(body) + len(payload)))
        body += payload + header(messages)
        body += bytes(-len(body) % 8)
    whole = header([*links, *more]) + body
    end = root + len(whole)
    head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
    head += struct.pack("<QQQQQQI4x16x", 0, UNDEFINED, end, UNDEFINED, 0, root, 0)
    path.write_bytes((head + whole)[: end - cut])


EIGHT = bytes(32)


def same(made: bytes, at: int) -> bytes:
    return made


def other_mark(made: bytes, at: int) -> bytes:
    return b"SNOD" + made[4:]


def own_child(made: bytes, at: int) -> bytes:
    return made[:5] + b"\1" + made[6:56] + struct.pack("<Q", at) + made[64:]


def many_keys(made: bytes, at: int) -> bytes:
    return made[:6] + b"\xff\xff" + made[8:]


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        (data_set((1 << 40, 1 << 40), contiguous(EIGHT)), CorruptError, "impossible shape"),
        (data_set((9,), contiguous(EIGHT)), CorruptError, "32 bytes are stored for (9,)"),
        (data_set((8,), contiguous(EIGHT, address=1 << 50)), TruncatedError, "w"),
        (data_set((8,), contiguous(EIGHT, address=UNDEFINED - 9)), WorkbenchError, "w"),
        (data_set((8,), contiguous(EIGHT, size=1 << 60)), CorruptError, "are stored for (8,)"),
        (data_set((4, 2), chunked((0, 2), [((0, 0), EIGHT)], same)), CorruptError, "chunks of (0, 2, 4)"),
        (data_set((4, 2), chunked((4, 2), [((1, 0), EIGHT)], same)), CorruptError, "its chunk at (1, 0)"),
        (data_set((4, 2), chunked((4, 2), [((4, 0), EIGHT)], same)), CorruptError, "its chunk at (4, 0)"),
        (data_set((4, 2), chunked((4, 2), [((0, 0), EIGHT[:-1])], same)), CorruptError, "31 bytes"),
        (data_set((4, 2), chunked((4, 2), [((0, 0), EIGHT)], other_mark)), CorruptError, "b'SNOD'"),
        (data_set((4, 2), chunked((4, 2), [((0, 0), EIGHT)], own_child)), CorruptError, "is referred to twice"),
        (data_set((4, 2), chunked((4, 2), [((0, 0), EIGHT)], many_keys)), TruncatedError, "are needed and the file"),
        (data_set((1 << 40,), chunked((1,), [((0,), bytes(4))], same)), UnsafeError, "over the limit"),
        (data_set((8,), contiguous(EIGHT), FLOAT, (8, bytes(18))), CorruptError, "a second message of type 8"),
        (data_set((8,), contiguous(EIGHT), FLOAT[:10]), CorruptError, "extends beyond"),
        (lambda at: ([space((8,))], b""), CorruptError, "neither a group nor a data set"),
        (lambda at: ([(200, b"")], b""), CorruptError, "neither a group nor a data set"),
        (lambda at: ([(2, struct.pack("<BBQQ", 0, 0, 512, 512))], b""), TruncatedError, "bytes 512 to 550"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, part: Part, kind: Any, words: str) -> None:
    write(tmp_path / "x.h5", {"w": part})
    refused(kind, tmp_path / "x.h5", words)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (FLOAT, (7, bytes(16)), "has its elements in another file"),
        (b"\x17" + FLOAT[1:], None, "are references"),
        (FLOAT[:8] + b"\1\0" + FLOAT[10:], None, "not IEEE's"),
        (struct.pack("<BBBBIHH", 0x10, 8, 0, 0, 4, 0, 24), None, "integers of 24 bits"),
        (FLOAT, (11, struct.pack("<BBHHH", 2, 1, 4, 0, 0)), None),
    ],
)
def test_what_cannot_be_shown_is_named(tmp_path: Path, kind: bytes, more: Any, words: str | None) -> None:
    held = chunked((8,), [((0,), EIGHT)], same) if words is None else contiguous(EIGHT)
    write(
        tmp_path / "x.h5",
        {"v": data_set((8,), contiguous(EIGHT)), "w": data_set((8,), held, kind, *([more] if more else []))},
    )
    ckpt = wb.open(tmp_path / "x.h5", cache=False)
    assert list(ckpt) == ["v"]
    (note,) = ckpt.notes
    assert "'w'" in note and (words or "filters that cannot be undone here: szip") in note


def test_cycles_and_links_out_are_not_followed(tmp_path: Path) -> None:
    write(
        tmp_path / "x.h5",
        {"v": data_set((8,), contiguous(EIGHT))},
        link("again", 96),
        link("soft", 0, 1),
        link("far", 0, 64),
    )
    ckpt = wb.open(tmp_path / "x.h5", cache=False)
    assert list(ckpt) == ["v"]
    notes = " ".join(ckpt.notes)
    assert "'again' is another name of '/'" in notes
    assert "b'soft' is a soft or external link" in notes and "b'far' is a soft" in notes
    write(tmp_path / "x.h5", {"v": data_set((8,), contiguous(EIGHT))}, link("v", 96))
    refused(CorruptError, tmp_path / "x.h5", "occurs twice")
    for name in ("..", "a/b", ""):
        write(tmp_path / "x.h5", {}, link(name, 96))
        refused(CorruptError, tmp_path / "x.h5", "occurs twice or is not valid")


def test_groups_are_nested_to_a_bounded_depth(tmp_path: Path) -> None:
    size = len(header([link("g", 0)]))
    for depth, good in ((60, True), (100, False)):
        write(tmp_path / "x.h5", {})
        end = 96 + depth * size
        messages, payload = data_set((8,), contiguous(EIGHT))(end)
        groups = b"".join(
            header([link("g", 96 + size * (n + 1) + len(payload) * (n == depth - 1))]) for n in range(depth)
        )
        (tmp_path / "x.h5").write_bytes((tmp_path / "x.h5").read_bytes()[:96] + groups + payload + header(messages))
        if good:
            assert list(wb.open(tmp_path / "x.h5", cache=False)) == ["/".join(["g"] * depth)]
        else:
            refused(UnsafeError, tmp_path / "x.h5", "more than 64 nested groups")


def test_a_user_block_a_compressed_member_and_other_weights_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x.h5", {"v": data_set((8,), contiguous(EIGHT))})
    data = (tmp_path / "x.h5").read_bytes()
    (tmp_path / "y.h5").write_bytes(data[:24] + struct.pack("<Q", 512) + data[32:])
    refused(UnsupportedFormatError, tmp_path / "y.h5", "a user block of 512 bytes")
    with zipfile.ZipFile(tmp_path / "z.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(WEIGHTS, data)
    refused(UnsupportedFormatError, tmp_path / "z.keras", "is compressed (zip method 8)")


@pytest.mark.parametrize("name", ["net.keras", "net.h5", "old.h5", "new.h5"])
def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path, name: str) -> None:
    whole, chance = FIXTURES.read(name), random.Random(name)
    begin = whole.find(b"\x89HDF")
    for _ in range(40):
        data = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.1 else whole)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(data)) if data else 0
            if data and (at > begin + 8 or at < begin):
                data[at : at + 1] = bytes([chance.choice((0, 1, 255, chance.randrange(256)))])
        (tmp_path / name).write_bytes(data)
        try:
            ckpt = wb.open(tmp_path / name, cache=False)
            for key in chance.sample(list(ckpt), min(len(ckpt), 8)):
                ckpt[key].torch()
        except WorkbenchError as error:
            assert "\n" not in str(error)
