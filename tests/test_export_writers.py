"""Files of our writers, opened by safetensors and torch themselves; safetensors' are equal byte for byte."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import workbench as wb
from workbench import errors
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import ALL, by_name
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.export.filemap import Pieces
from workbench.export.moving.engine import prepare
from workbench.export.writers.safetensors import ORDER, one_file, shards
from workbench.export.writers.torch import torch_file

SHAPES = [(), (0,), (3,), (2, 0, 4), (5, 7), (1, 1, 2, 3)]


def of_every_type() -> dict[str, torch.Tensor]:
    """Random bits of each element type that torch can hold, in several shapes, under awkward names."""
    found, rng = {}, np.random.default_rng(9)
    for dtype in ALL:
        if dtype.torch_name is None or not hasattr(torch, dtype.torch_name):
            continue
        for number, shape in enumerate(SHAPES):
            count = int(np.prod(shape))
            raw = rng.integers(0, 2 if dtype.name == "bool" else 256, count * dtype.itemsize, dtype=np.uint8)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # complex32 is experimental
                bits_of = torch.from_numpy(raw).view(dtype.torch) if count else torch.empty(0, dtype=dtype.torch)
                found[f'z/{number} "é\n{dtype.name}'] = bits_of.reshape(shape)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A catalog of all of them, raw in one file, and the truth."""
    folder = tmp_path_factory.mktemp("every")
    tensors = of_every_type()
    builder, blob = CatalogBuilder("test", Place(folder)), b""
    for name, tensor in tensors.items():
        raw = bits(tensor)
        builder.tensor(name, by_name(tensor.dtype), tuple(tensor.shape))
        builder.chunk(name, (0,) * tensor.ndim, tuple(tensor.shape), "data", len(blob), len(blob) + len(raw))
        blob += raw
    (folder / "data").write_bytes(blob)
    builder.file("data")
    return folder, builder.build(), tensors


def write(folder, catalog, maps, out):
    from workbench.core.payload import Payloads

    pool = SourcePool(Place(folder), catalog.files, catalog.file_stats)
    prepare(Payloads(catalog, pool), maps).run([str(out / one.name) for one in maps])


def test_a_torch_archive_is_what_torch_loads(source, tmp_path):
    folder, catalog, tensors = source
    one = torch_file(Pieces.whole(catalog, np.arange(len(catalog))), "all.pt")
    write(folder, catalog, [one], tmp_path)
    path = tmp_path / "all.pt"
    for options in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **options)
        assert list(loaded) == list(tensors)
        for name, truth in tensors.items():
            got = loaded[name]
            assert (got.dtype, got.shape, got.stride()) == (truth.dtype, truth.shape, truth.stride()), name
            assert bits(got) == bits(truth), name
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every CRC
        assert [one.compress_type for one in archive.infolist()] == [0] * len(archive.infolist())
        pickletools.dis(archive.read("archive/data.pkl"), out=io.StringIO())
    assert torch._C.PyTorchFileReader(str(path)).has_record("data.pkl")
    assert len(path.read_bytes()) == one.size
    with wb.open(path) as again:
        assert {k: bits(again[k].torch()) for k in again} == {k: bits(t) for k, t in tensors.items()}


def test_torch_lays_its_payloads_down_as_we_do(tmp_path):
    """Same records, flags, alignment and CRCs as torch's own file of the same dict (but for its id of the content)."""
    tensors = {"a": torch.arange(6.0), "b": torch.arange(4, dtype=torch.int64), "none": torch.empty(0)}
    torch.save(tensors, tmp_path / "theirs.pt")
    with wb.open(tmp_path / "theirs.pt") as ckpt:
        pieces = Pieces.whole(ckpt.catalog, np.arange(3))
        write(tmp_path, ckpt.catalog, [torch_file(pieces, "ours.pt")], tmp_path)

    def records(name):
        with zipfile.ZipFile(tmp_path / name) as archive:
            found = {}
            for one in archive.infolist():
                with open(tmp_path / name, "rb") as handle:
                    handle.seek(one.header_offset + 26)
                    start = one.header_offset + 30 + sum(struct.unpack("<HH", handle.read(4)))
                assert start % 64 == 0
                found[one.filename.split("/", 1)[1]] = (one.CRC, one.file_size, one.flag_bits)
            return found

    theirs, ours = records("theirs.pt"), records("ours.pt")
    theirs.pop(".data/serialization_id")
    assert ours.pop("data.pkl")[2] == theirs.pop("data.pkl")[2]  # the pickles name their memo differently
    assert ours == theirs


@pytest.mark.slow
def test_archives_beyond_4_gib(tmp_path):
    """A record, and records behind it, that need zip64 fields; the source is a hole."""
    size = (4 << 30) + 4096
    with open(tmp_path / "data", "wb") as handle:
        handle.truncate(size)
        handle.seek(size - 4)
        handle.write(b"\1\2\3\4")
    builder = CatalogBuilder("test", Place(tmp_path))
    for name, low, high in (("big", 0, size), ("behind", size - 8, size)):
        builder.tensor(name, by_name("uint8"), (high - low,))
        builder.chunk(name, (0,), (high - low,), "data", low, high)
    builder.file("data")
    catalog = builder.build()
    write(tmp_path, catalog, [torch_file(Pieces.whole(catalog, np.arange(2)), "x.pt")], tmp_path)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert loaded["behind"].tolist() == [0, 0, 0, 0, 1, 2, 3, 4] and loaded["big"].numel() == size
    assert loaded["big"][-4:].tolist() == [1, 2, 3, 4] and int(loaded["big"][:-4].max()) == 0
    with wb.open(tmp_path / "x.pt") as again:
        assert again["big"][-4:].tolist() == [1, 2, 3, 4]
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None


def savable(tensors):
    from safetensors.torch import save

    keep = {}
    for name, tensor in tensors.items():
        try:
            save({"x": tensor})
        except Exception:  # what safetensors has no name for
            continue
        keep[name] = tensor
    return keep


def test_safetensors_are_equal_byte_for_byte(source, tmp_path):
    folder, catalog, tensors = source
    keep = savable(tensors)
    assert len({tensor.dtype for tensor in keep.values()}) >= 18
    save_file(keep, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    wanted = np.array([catalog.index[name] for name in keep], np.int64)
    write(folder, catalog, [one_file(Pieces.whole(catalog, wanted), "ours.safetensors")], tmp_path)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    loaded = load_file(tmp_path / "ours.safetensors")
    assert {name: bits(t) for name, t in loaded.items()} == {name: bits(t) for name, t in keep.items()}


def test_every_type_that_safetensors_names_has_its_place():
    assert set(ORDER) >= {dtype.safetensors for dtype in ALL if dtype.safetensors} - {"C128"}
    assert len(set(ORDER)) == len(ORDER)


def test_types_that_a_format_lacks_are_refused_by_name(source):
    _, catalog, tensors = source
    lacking = [name for name in tensors if name not in savable(tensors)]
    assert lacking
    for name in lacking:
        pieces = Pieces.whole(catalog, np.array([catalog.index[name]]))
        with pytest.raises(errors.UnsupportedFormatError, match=str(tensors[name].dtype)[6:]):
            one_file(pieces, "x")
    packed = Pieces.whole(catalog, np.array([0]), dtype=np.array([by_name("float4_e2m1fn").code], np.uint8))
    with pytest.raises(errors.UnsupportedFormatError, match="float4"):
        torch_file(packed, "x")


def test_packed_elements_pass_through_whole(tmp_path):
    header = {"f4": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(6)))
    with wb.open(tmp_path / "model.safetensors") as ckpt:
        write(tmp_path, ckpt.catalog, [one_file(Pieces.whole(ckpt.catalog, np.array([0])), "out")], tmp_path)
    with safe_open(tmp_path / "out", "pt") as handle:
        assert handle.keys() == ["f4"] and handle.get_slice("f4").get_shape() == [3, 4]
    assert (tmp_path / "out").read_bytes()[-6:] == bytes(range(6))


def test_names_that_collide_or_are_reserved(source):
    _, catalog, _ = source
    for names, words in (
        (["a", "a"], "would be named 'a'"),
        (["__metadata__", "b"], "may not be named '__metadata__'"),
    ):
        pieces = Pieces.whole(catalog, np.array([0, 1]), names=names)
        with pytest.raises(errors.UsageError, match=words):
            shards(pieces)
    with pytest.raises(errors.UsageError, match="would be named"):
        torch_file(Pieces.whole(catalog, np.array([0, 1]), names=["a", "a"]), "x")
    with pytest.raises(errors.UsageError, match="Unicode"):
        one_file(Pieces.whole(catalog, np.array([0]), names=["\ud800"]), "x")


@pytest.mark.parametrize("most", [1, 64, 100, 333, 1000])
def test_shards_are_cut_where_hugging_face_cuts_them(tmp_path, most):
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = [3, 40, 90, 2, 2, 300, 7, 0, 64, 64, 1]
    tensors = {f"t{n}": torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)}
    save_file(tensors, tmp_path / "x.safetensors")
    with wb.open(tmp_path / "x.safetensors") as ckpt:
        pieces = Pieces.whole(ckpt.catalog, np.array([ckpt.catalog.index[name] for name in tensors]))
        maps = shards(pieces, max_shard_size=most)
        write(tmp_path, ckpt.catalog, maps, tmp_path)
    truth = split_torch_state_dict_into_shards(tensors, max_shard_size=most)
    ours = {one.name: sorted(one.pieces.names) for one in maps if len(one.pieces)}
    assert ours == {name: sorted(names) for name, names in truth.filename_to_tensors.items() if names}
    if truth.is_sharded:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index == {"metadata": {"total_size": sum(sizes)}, "weight_map": truth.tensor_to_filename}
    loaded = {k: v for name in ours for k, v in load_file(tmp_path / name).items()}
    assert {k: bits(v) for k, v in loaded.items()} == {k: bits(v) for k, v in tensors.items()}
