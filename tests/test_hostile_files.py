"""Small files of formats without pickles that ask for much: each opens, or is refused, within 2 s of CPU and 512 MB.

They are opened as in :mod:`tests.test_pickle_bombs`, and all their objects are looked at.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests import tensorflow_files as tf
from tests.orbax_files import BYTES, MANIFEST, NODE, leaf, manifest, table, varint, wrapped
from tests.test_flax import pack
from tests.test_onnx import inside, model, outside
from tests.test_pickle_bombs import opened  # noqa: F401
from workbench.errors import TensorNotFoundError, WorkbenchError, bounded, quoted

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"

Maker = Callable[[Path], Path]


def u32(number: int) -> bytes:
    return struct.pack(">I", number)


def written(path: Path, data: bytes, size: int = 0) -> Path:
    """A file, with a hole behind it up to ``size``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if size:
        os.truncate(path, size)
    return path


# ---- flax ------------------------------------------------------------------------------------------------------------


def numbers(count: int) -> bytes:
    return b"\xdf" + u32(count) + b"".join(b"\xa5%05d\x01" % n for n in range(count))


def flax(value: bytes) -> Maker:
    return lambda folder: written(folder / "x.msgpack", value)


def extension(array: bytes) -> bytes:
    return b"\x81\xa1w\xc9" + u32(len(array)) + b"\1" + array


def pieces(count: int, axes: int) -> bytes:
    shape = {str(axis): 1 for axis in range(axes - 1)} | {str(axes - 1): count}
    return pack({"w": {"__msgpack_chunked_array__": True, "shape": shape}}).replace(
        b"\x00\x00\x00\x02", b"\x00\x00\x00\x03", 1
    ) + (pack("chunks") + b"\xdf" + u32(count) + b"".join(pack(str(n)) + pack(torch.zeros(1)) for n in range(count)))


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf(value: bytes, size: int = 0) -> Maker:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return lambda folder: written(folder / "x.gguf", head + value, size)


KEY = struct.pack("<Q", 1) + b"a"

# ---- numpy -----------------------------------------------------------------------------------------------------------


def npz(descr: str, shape: str, data: bytes = b"", count: int = 1) -> Maker:
    head = f"{{'descr':{descr},'fortran_order':False,'shape':({shape})}}".encode()

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.npz", "w") as file:
            for number in range(count):
                file.writestr(f"w{number}.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + data)
        return folder / "x.npz"

    return make


# ---- TensorFlow ------------------------------------------------------------------------------------------------------


def tensorflow(rows: dict[bytes, bytes], data: bytes = bytes(64), hole: int = 0) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "c.data-00000-of-00001").write_bytes(data)
        index = tf.table({b"": tf.number(1, 1) + tf.message(3, tf.number(1, 1)), **rows}, 1000)
        path = written(folder / "c.index", index, hole)
        if hole:
            with open(path, "r+b") as file:
                file.seek(hole - 48)
                file.write(index[-48:])
        return path

    return make


WEIGHT = tf.entry(1, (4,), 0, 0, bytes(16))


def texts(count: int, axes: int) -> dict[bytes, bytes]:
    return {b"t%d" % n: tf.text_entry([b"a"], (1,) * axes, 0)[0] for n in range(count)}


# ---- Orbax and zarr --------------------------------------------------------------------------------------------------


def database(count: int, common: int) -> Maker:
    """A leaf of ``count`` keys that have ``common`` bytes in common."""

    def make(folder: Path) -> Path:
        first = b"p" * common + b"%08d" % 0
        body = b"\0" + table(["d/values"]) + varint(count) + varint(common) * (count - 1) + varint(len(first))
        body += varint(8) * (count - 1) + first + b"".join(b"%08d" % n for n in range(1, count)) + bytes(2 * count)
        node = wrapped(NODE, body)
        written(folder / "d/values", b"")
        written(folder / "d/nodes", node)
        written(folder / "manifest.ocdbt", wrapped(MANIFEST, manifest(["d/nodes"], (0, 0, len(node)), 0, count)))
        return folder

    return make


def shard(count: int) -> Maker:
    """An array of one shard, whose index is a hole in the file."""
    inner = {"chunk_shape": [1], "codecs": [BYTES], "index_codecs": [BYTES], "index_location": "end"}
    told = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [count],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [count]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }

    def make(folder: Path) -> Path:
        written(folder / "w/zarr.json", json.dumps(told).encode())
        written(folder / "w/c/0", b"x", 16 * count + 1000)
        return folder

    return make


# ---- HDF5 ------------------------------------------------------------------------------------------------------------

NONE = (1 << 64) - 1


class WrittenHdf5:
    """A file in the oldest version: no checksums."""

    def __init__(self) -> None:
        self.data = bytearray(96)

    def put(self, part: bytes) -> int:
        self.data += bytes(-len(self.data) % 8)
        self.data += part
        return len(self.data) - len(part)

    def header(self, *messages: bytes, count: int = 0) -> int:
        body = b"".join(messages)
        return self.put(struct.pack("<BxHII4x", 1, count or len(messages), 1, len(body)) + body)

    def group(self, members: list[int], length: int = 6) -> int:
        links = b"".join(
            message(6, b"\1\1" + struct.pack("<H", length) + b"%0*d" % (length, n) + struct.pack("<Q", at))
            for n, at in enumerate(members)
        )
        return self.header(message(16, struct.pack("<QQ", self.put(links), len(links))), count=len(members) + 1)

    def save(self, root: int, folder: Path) -> Path:
        head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
        head += struct.pack("<QQQQ", 0, NONE, len(self.data), NONE) + struct.pack("<QQII16x", 0, root, 0, 0)
        self.data[: len(head)] = head
        return written(folder / "x.h5", bytes(self.data))


def message(kind: int, data: bytes) -> bytes:
    data += bytes(-len(data) % 8)
    return struct.pack("<HHBxxx", kind, len(data), 0) + data


def text_set(file: WrittenHdf5, shape: tuple[int, ...]) -> int:
    """A data set of texts of one byte."""
    size, space = 1, struct.pack("<BBB5x", 1, len(shape), 0) + struct.pack(f"<{len(shape)}Q", *shape)
    for axis in shape:
        size *= axis
    layout = struct.pack("<BBQQ", 3, 1, file.put(bytes(size)), size)
    return file.header(message(1, space), message(3, b"\x13\0\0\0\1\0\0\0"), message(8, layout))


def h5_common_block(folder: Path) -> Path:
    """Groups whose headers go on in one block."""
    file = WrittenHdf5()
    block = file.put(message(0, b"") * 60_000)
    more = message(2, b"\0\0" + struct.pack("<QQ", NONE, NONE)) + message(16, struct.pack("<QQ", block, 480_000))
    return file.save(file.group([file.header(more, count=60_002) for _ in range(200)]), folder)


def h5_long_names(folder: Path) -> Path:
    """A block of links with names of 60,000 bytes that many groups have in common."""
    file = WrittenHdf5()
    leaf = text_set(file, (1,))
    name = message(6, b"\1\1" + struct.pack("<H", 60_000) + b"n" * 60_000 + struct.pack("<Q", leaf))
    block = message(16, struct.pack("<QQ", file.put(name), len(name)))
    return file.save(file.group([file.header(block, count=2) for _ in range(8000)]), folder)


def h5_texts(folder: Path) -> Path:
    file = WrittenHdf5()
    return file.save(file.group([text_set(file, (1,)) for _ in range(1000)]), folder)


def h5_text_axes(folder: Path) -> Path:
    file = WrittenHdf5()
    return file.save(file.group([text_set(file, (500_000, *[1] * 31))]), folder)


# ---- torch_checkpointing ---------------------------------------------------------------------------------------------


def checkpointing(group: dict[str, Any], ranks: list[int], value: torch.Tensor, count: int) -> Maker:
    told = {"sharding_metadata": group, "ranks": ranks}
    paths = {json.dumps(["model", f"w{n}"]): [told] for n in range(count)}

    def make(folder: Path) -> Path:
        with open(folder / "model_0.pt", "wb") as file:
            torch.save({f"w{n}": value for n in range(count)}, file)
        document = {"version": "1.0", "world_size": 1, "metadata": paths, "rank_to_layout_info_mappings": {}}
        written(folder / "metadata.pkl", pickle.dumps(document, 4))
        return folder

    return make


def sharded(shape: tuple[int, ...], placement: dict[str, Any], ranks: list[int]) -> dict[str, Any]:
    mesh = {"mesh_shape": (len(ranks),), "mesh_data": ranks, "mesh_dim_names": ("a",)}
    data = {"global_shape": shape, "dtype": torch.float32, "placements": [placement], "mesh_spec": mesh}
    return {"type": "DTensorShardingMetadata", "data": data}


def listed(count: int) -> dict[str, Any]:
    places = [(n,) for n in range(count)]
    data = {"global_shape": (count,), "dtype": torch.float32, "global_offsets": places, "local_offsets": places}
    return {"type": "default_tensor_v1", "data": {**data, "local_sizes": [(1,)] * count}}


def parts(folder: Path) -> Path:
    strided = sharded((1 << 14, 4), {"type": "StridedShard", "dim": 0, "split_factor": 1 << 14}, [0])
    return checkpointing(strided, [0], torch.zeros(1).expand(1 << 14, 4), 100)(folder)


def ranks(folder: Path) -> Path:
    many = list(range(300_000))[::-1]
    return checkpointing(sharded((4,), {"type": "Replicate"}, many), many, torch.zeros(4), 500)(folder)


def boxes(folder: Path) -> Path:
    return checkpointing(listed(30_000), [0], torch.zeros(1).expand(30_000), 500)(folder)


# ---- all -------------------------------------------------------------------------------------------------------------

#: What takes long to write is written by the test: every worker imports this file.
FILES: dict[str, tuple[Maker, str]] = {
    "flax: a long key above 2,000 numbers": (flax(b"\x81\xda\xea\x60" + b"k" * 60_000 + numbers(2000)), "entries"),
    "flax: 30,000 numbers": (flax(numbers(30_000)), ""),
    "flax: many pieces of many axes": (lambda folder: flax(pieces(2000, 64))(folder), "pieces"),
    "flax: a shape of 60,000 sizes": (
        flax(extension(b"\x93\xdd" + u32(60_000) + (b"\xcf" + b"\xff" * 8) * 60_000 + pack("float32") + b"\xc4\0")),
        "",
    ),
    "gguf: a key of 1 GiB without stored bytes": (gguf(struct.pack("<Q", 1 << 30), 3 << 30), "a key has"),
    "gguf: an array of 31 million numbers": (
        gguf(KEY + struct.pack("<IIQ", 9, 0, 31_000_000), 32_000_000),
        "array elements",
    ),
    "npz: a million texts in 60 axes": (npz("'<U0'", "1000000," + "1," * 59), ""),
    "npz: an axis of 10**20": (npz("[('a','<f4',(0,99999999999999999999))]", "3,"), "impossible shape"),
    "npz: 300 axes": (npz(f"[('a','<f4',({'1,' * 300}))]", "1,", bytes(4)), "impossible shape"),
    "npz: 1,500 arrays of text": (npz("'<U1'", "1,", bytes(4), 1500), ""),
    "onnx: a million axes": (
        lambda folder: written(
            folder / "x.onnx", model(tf.message(5, b"\x08\x7f" * 1_000_000 + tf.number(2, 1) + tf.message(8, b"w")))
        ),
        "impossible shape",
    ),
    "tensorflow: an index with a hole of 1 GB": (tensorflow({b"w": WEIGHT}, hole=1 << 30), "over the limit"),
    "tensorflow: 60 axes of text": (
        lambda folder: tensorflow({b"t": tf.text_entry([b""] * 100_000, (100_000, *[1] * 59), 0)[0]}, bytes(100_004))(
            folder
        ),
        "",
    ),
    "tensorflow: 700 tensors of text": (
        lambda folder: tensorflow(texts(700, 1) | {b"w": WEIGHT}, tf.text_entry([b"a"], (1,), 0)[1] + bytes(16))(
            folder
        ),
        "",
    ),
    "orbax: a million keys of 300 bytes": (database(1_000_000, 300), "keys or paths"),
    "zarr: a shard index of 500 MB without stored bytes": (shard(1 << 25), "inner chunks"),
    "zarr: a shard's index that is a hole": (shard(1 << 10), "inner chunk 0"),
    "keras: headers with a block in common": (h5_common_block, "messages in all headers"),
    "keras: long names in common": (h5_long_names, "names of over"),
    "keras: 1,000 data sets of text": (h5_texts, ""),
    "keras: 32 axes of text": (h5_text_axes, ""),
    "torch_checkpointing: tensors in 16,384 parts": (parts, "boxes than bytes"),
    "torch_checkpointing: a list of ranks in common": (ranks, ""),
    "torch_checkpointing: boxes in common": (boxes, "boxes than bytes"),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_it_opens_or_is_refused(opened, name: str, tmp_path: Path) -> None:  # noqa: F811
    make, words = FILES[name]
    said = opened(str(make(tmp_path)))
    assert words in said


# ---- long names ------------------------------------------------------------------------------------------------------

LONG = "n" * 100_000


def holds(name: str, data: bytes | dict[str, Any]) -> Maker:
    """A file, and the JSON of a dict in it."""
    return lambda folder: written(folder / name, data if isinstance(data, bytes) else json.dumps(data).encode())


def safetensors(key: str, dtype: str, stop: int) -> Maker:
    head = json.dumps({key: {"dtype": dtype, "shape": [2], "data_offsets": [0, stop]}}).encode()
    return holds("x.safetensors", struct.pack("<Q", len(head)) + head + bytes(stop))


def storage(folder: Path) -> Path:
    """A tensor whose storage has the long name, and is not stored."""
    kept = b"(X\7\0\0\0storagectorch\nFloatStorage\nX" + struct.pack("<I", len(LONG)) + LONG.encode()
    kept += b"X\3\0\0\0cpuK\1tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + kept + b"K\0K\1\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
    with zipfile.ZipFile(folder / "x.pt", "w") as file:
        file.writestr("x/data.pkl", b"\x80\2}X\1\0\0\0w" + tensor + b"s.")
        file.writestr("x/version", b"3")
    return folder / "x.pt"


def nested(folder: Path) -> Path:
    value: dict[str, Any] = {"w": torch.zeros(1)}
    for _ in range(210):
        value = {LONG: value}
    torch.save(value, folder / "x.pt")
    return folder / "x.pt"


def dcp(file: str, **more: int) -> Maker:
    """A sample whose first item is in a file of another name."""

    def make(folder: Path) -> Path:
        shutil.copytree(SAMPLES / "dcp_single_odd", folder / "c")
        metadata = pickle.loads((folder / "c/.metadata").read_bytes())
        info = next(iter(metadata.storage_data.values()))
        for name, value in {"relative_path": file, **more}.items():
            setattr(info, name, value)
        (folder / "c/.metadata").write_bytes(pickle.dumps(metadata))
        return folder / "c"

    return make


def tracked(folder: Path) -> Path:
    shutil.copytree(SAMPLES / "deepspeed_zero1", folder / "c")
    (folder / "c/latest").write_text(LONG)
    return folder / "c"


def links(folder: Path) -> Path:
    """Two soft links of one name, the longest that fits."""
    file, name = WrittenHdf5(), LONG[:60_000].encode()
    link = message(6, b"\1\x09\1" + struct.pack("<H", len(name)) + name + struct.pack("<H", 1) + b"x")
    return file.save(file.header(link, link), folder)


def database_of(name: str) -> Maker:
    """A database whose only value is in a data file of that name."""

    def make(folder: Path) -> Path:
        node = wrapped(NODE, leaf([name], {b"w/.zarray": (0, 0, 2000)}))
        written(folder / "d/nodes", node)
        return written(
            folder / "manifest.ocdbt", wrapped(MANIFEST, manifest(["d/nodes"], (0, 0, len(node)), 0, 1))
        ).parent

    return make


def gguf_named(tensors: int, keys: int, more: bytes) -> Maker:
    """A file whose first tensor or key has a name of the most characters that are read."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, tensors, keys, 60_000) + LONG[:60_000].encode()
    return holds("x.gguf", head + more)


def checkpointed(**more: Any) -> Maker:
    whole = {"version": "1.0", "world_size": 1, "metadata": {}, "rank_to_layout_info_mappings": {}, **more}

    def make(folder: Path) -> Path:
        torch.save({"w": torch.zeros(1)}, folder / "model_0.pt")
        return written(folder / "metadata.pkl", pickle.dumps(whole, 4)).parent

    return make


ZARR = {
    "zarr_format": 2,
    "shape": [1],
    "chunks": [1],
    "compressor": None,
    "fill_value": 0,
    "order": "C",
    "filters": None,
}


LONG_NAMES: dict[str, Maker] = {
    "safetensors: a key": safetensors(LONG, "F32", 12),
    "safetensors: a key with spaces": safetensors("n " * 50_000, "F32", 12),
    "safetensors: a key of escapes": safetensors("\x1b" * 100_000, "F32", 12),
    "safetensors: a type": safetensors("w", LONG, 8),
    "index: a file": holds("model.safetensors.index.json", {"weight_map": {"w": LONG}}),
    "index: a file outside": holds("model.safetensors.index.json", {"weight_map": {"w": f"../{LONG}"}}),
    "index: a key": holds("model.safetensors.index.json", {"weight_map": {LONG: "x.safetensors"}}),
    "index: a value": holds("model.safetensors.index.json", {"weight_map": {LONG: [LONG]}}),
    "torch.save: a storage": storage,
    "torch.save: keys nested too deep": nested,
    "DCP: a file": dcp(LONG),
    "DCP: a file outside": dcp(f"/{LONG}"),
    "DeepSpeed: a tracker": tracked,
    "flax: a key": holds(
        "x.msgpack",
        b"\x82" + 2 * (b"\xdb" + u32(len(LONG)) + LONG.encode() + pack(torch.zeros(1))),
    ),
    "flax: a type": holds("x.msgpack", extension(b"\x93\x91\1\xdb" + u32(len(LONG)) + LONG.encode() + b"\xc4\0")),
    "gguf: a tensor": gguf_named(1, 0, struct.pack("<IQIQ", 1, 1, 999, 0)),
    "gguf: a key": gguf_named(0, 1, struct.pack("<IIQ", 9, 0, 1 << 40)),
    "onnx: a tensor": holds("x.onnx", model(inside(LONG, torch.zeros(2))[:-4])),
    "onnx: a file": holds("x.onnx", model(outside("w", torch.zeros(2), location=LONG, offset=0, length=8))),
    "onnx: an offset": holds("x.onnx", model(outside("w", torch.zeros(2), location="x", offset=LONG, length=8))),
    "tensorflow: a key": tensorflow({LONG.encode(): tf.entry(1, (9,), 0, 0, bytes(16))}),
    "orbax: a data file": database_of(LONG),
    "orbax: a data file outside": database_of(f"../{LONG}"),
    "zarr: a type": lambda folder: holds("w/.zarray", ZARR | {"dtype": LONG})(folder).parents[1],
    "keras: links of one name": links,
    "npz: a type": npz(repr(LONG[:60_000]), "1,", bytes(4)),
    "torch_checkpointing: a version": checkpointed(version=LONG),
    "torch_checkpointing: a path": checkpointed(metadata={LONG: []}),
}


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_message_is_short_whatever_the_length_of_a_name(name: str, tmp_path: Path) -> None:
    path = LONG_NAMES[name](tmp_path)
    said = []
    try:
        ckpt = wb.open(path, cache=False)
        said += ckpt.notes
        for key in ckpt:
            ckpt[key].torch()
    except WorkbenchError as error:
        said.append(str(error))
    said += [text for one in wb.verify(path) for text in (one.message, one.hint)]
    assert said, "nothing is wrong with it"
    assert "a known format" not in said[0]
    assert max(map(len, said)) <= 500, max(said, key=len)


def test_what_is_left_out_is_only_what_is_too_long() -> None:
    name = "optimizer.state.exp_avg.module.language_model.decoder.layers.117.mlp.experts.local_experts.0.fc1.weight"
    assert quoted(name) == repr(name) and quoted(name.encode()) == repr(name.encode())
    assert bounded(f"no file {'/' + 'd' * 250!r}") == f"no file {'/' + 'd' * 250!r}"
    assert quoted("a" * 500 + "b" * 500) == "'" + "a" * 78 + "…" + "b" * 78 + "'"
    assert len(bounded("word " * 100_000)) < 2000
    error = TensorNotFoundError(f"no tensor {LONG!r} among 3; did you mean 'w'?")
    assert str(error).startswith("no tensor 'nnn") and str(error).endswith("nnn' among 3; did you mean 'w'?")
