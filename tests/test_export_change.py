"""Changes that depend on where an element lies, and pieces whose bytes are known: through the pass and the writers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from tests.test_export_engine import job_of, laid
from tests.test_reading import stored
from workbench import errors
from workbench.core.dtypes import DType, by_name
from workbench.core.transfer import streams
from workbench.export.casts import CastError
from workbench.export.filemap import Literal, Pieces, join, literals
from workbench.export.writers.safetensors import one_file, shards
from workbench.export.writers.torch import torch_file

INT32, INT64 = by_name("int32"), by_name("int64")


@dataclass
class Numbered:
    """Adds its position to every element, as 64 bits."""

    source: DType = INT32
    wanted: DType = INT64
    identity: str = "numbered"

    def __call__(self, first, raw):
        out = raw.view(np.int32).astype(np.int64) + np.arange(first, first + len(raw))
        return out.view(np.uint64), CastError(len(raw), len(raw), 0, float(first + len(raw)))


def fingerprint(array: np.ndarray, name: str) -> str:
    head = f"workbench tensor 1\n{name}[{','.join(map(str, array.shape))}]\n".encode()
    raw = array.tobytes()
    blocks = [xxhash.xxh3_128_digest(raw[at : at + (4 << 20)]) for at in range(0, len(raw), 4 << 20)]
    return xxhash.xxh3_128_hexdigest(head + b"".join(blocks))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("step", [64, 1 << 20])
def test_a_change_sees_every_element_once_with_its_position(tmp_path, monkeypatch, columns, step):
    dense = np.arange(37 * 23, dtype=np.int32).reshape(37, 23) * 5
    half = [((0, 0), (37, 9)), ((0, 9), (37, 14))] if columns else [((0, 0), (20, 23)), ((20, 0), (17, 23))]
    catalog = stored(tmp_path, dense, half)
    monkeypatch.setattr(streams, "STEP", step)
    codes = np.array([INT64.code], np.uint8)
    plain = Pieces.whole(catalog, np.array([0]))
    pieces = join([plain, Pieces.whole(catalog, np.array([0]), names=["new"], dtype=codes)])
    pieces = replace(pieces, change={1: Numbered()}).take(np.array([1, 0]))
    one = laid(pieces)
    written = job_of(tmp_path, catalog, [one]).run([str(tmp_path / "out")])[0]
    blob = (tmp_path / "out").read_bytes()
    truth = dense.astype(np.int64) + np.arange(dense.size).reshape(dense.shape)
    for at, want, result in zip(one.start.tolist(), [truth, dense], written, strict=True):
        assert blob[at : at + want.nbytes] == want.tobytes()
        assert result.target.hex == fingerprint(want, str(want.dtype))
        assert result.source.hex == fingerprint(dense, "int32")
    assert written[0].cast == CastError(dense.size, dense.size, 0, float(dense.size)) and written[1].cast is None


def test_a_change_of_other_types_than_its_piece_is_refused(tmp_path):
    catalog = stored(tmp_path, np.arange(6, dtype=np.int32), [((0,), (6,))])
    pieces = Pieces.whole(catalog, np.array([0]))
    wrong = replace(pieces, change={0: Numbered()})
    with pytest.raises(
        errors.UsageError, match="int32 and is written as int32, but its change converts from int32 to int64"
    ):
        job_of(tmp_path, catalog, [laid(wrong)])


def with_literals(catalog):
    big = np.arange(3 << 20, dtype=np.float32).reshape(3, 1 << 20)
    items = [
        Literal("scale", by_name("float32"), (2, 3), np.arange(6, dtype=np.float32).tobytes()),
        Literal("big", by_name("float32"), big.shape, big.reshape(-1).view(np.uint8)),
        Literal("one", by_name("bfloat16"), (), b"\x80\x3f"),
        Literal("none", by_name("int64"), (0, 3), b""),
    ]
    truth = {
        "scale": torch.arange(6.0).reshape(2, 3),
        "big": torch.from_numpy(big),
        "one": torch.tensor(1.0).bfloat16(),
        "none": torch.empty(0, 3, dtype=torch.int64),
        "t": torch.arange(35, dtype=torch.int32).reshape(5, 7),
    }
    return join([literals(items[:2], 2), Pieces.whole(catalog, np.array([0])), literals(items[2:], 2)]), truth


@pytest.mark.parametrize("format", ["safetensors", "shards", "torch"])
def test_literals_are_tensors_as_any_other(tmp_path, format):
    catalog = stored(tmp_path, np.arange(35, dtype=np.int32).reshape(5, 7), [((0, 0), (5, 7))])
    pieces, truth = with_literals(catalog)
    if format == "shards":
        maps = shards(pieces, max_shard_size=150)
    else:
        maps = [one_file(pieces, "out") if format == "safetensors" else torch_file(pieces, "out")]
    paths = [str(tmp_path / one.name) for one in maps]
    job = job_of(tmp_path, catalog, maps)
    assert job.read_nbytes == 35 * 4
    written = job.run(paths)
    found: dict[str, torch.Tensor] = {}
    for path, one in zip(paths, maps, strict=True):
        if len(one.pieces):
            found |= torch.load(path) if format == "torch" else load_file(path)
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    results = {
        name: one
        for file, made in zip(maps, written, strict=True)
        for name, one in zip(file.pieces.names, made, strict=True)
    }
    assert results["big"].target.hex == fingerprint(truth["big"].numpy(), "float32")
    assert results["none"].target.hex == fingerprint(truth["none"].numpy(), "int64")
    assert results["scale"].cast is None and results["scale"].source == results["scale"].target


def test_literals_that_do_not_fit_are_refused(tmp_path):
    catalog = stored(tmp_path, np.arange(6, dtype=np.int32), [((0,), (6,))])
    short = literals([Literal("s", by_name("float32"), (3,), b"\0" * 8)], 1)
    with pytest.raises(errors.UsageError, match="'s' has 12 bytes by its shape and type; 8 were given"):
        job_of(tmp_path, catalog, [laid(short)])
    with pytest.raises(errors.UsageError, match="'s' has 2 axes"):
        literals([Literal("s", by_name("float32"), (3, 1), b"\0" * 12)], 1)
