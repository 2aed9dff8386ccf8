"""safetensors: what safetensors and torch wrote comes back bit for bit, and no broken header gets past."""

from __future__ import annotations

import json
import os
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import bits, raw
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save_file

import workbench as wb
from workbench import runs
from workbench.core.dtypes import by_name
from workbench.core.place import Place
from workbench.core.words import Ordinary
from workbench.errors import (
    CorruptError,
    MissingFileError,
    NotACheckpointError,
    OpenError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
)
from workbench.formats.safetensors import reader
from workbench.formats.safetensors.header import MAX_HEADER, parse

SAMPLES = os.environ.get("WORKBENCH_SAMPLES_HF")


def document(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop], **more}


# ---- what is there -------------------------------------------------------------------------------------------


DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "complex64",
]


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.rand(shape) > 0.5
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def test_every_dtype_that_torch_can_save_comes_back_bit_for_bit(tmp_path: Path) -> None:
    truth = {f"t.{name}": random_tensor(name, (3, 5)) for name in DTYPES}
    truth |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 7), "ключ/with.odd name": torch.ones(2)}
    save_file(truth, tmp_path / "a.safetensors", {"format": "pt", "note": "x"})
    place = Place(tmp_path / "a.safetensors")
    catalog = reader.read_catalog(place)
    catalog.check()
    catalog.check_files()
    assert set(catalog.keys) == set(truth)
    for key, tensor in truth.items():
        at = catalog.index[key]
        assert catalog.dtype_of(at).torch is tensor.dtype
        assert catalog.shape_of(at) == tuple(tensor.shape)
        assert np.array_equal(raw(tmp_path, catalog, key), bits(tensor))
    assert catalog.metadata_files == ["a.safetensors"]
    assert reader.read_objects(place, catalog)["__metadata__"] == {"format": "pt", "note": "x"}


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [("F4", [2, 4], 4), ("F6_E2M3", [4, 2], 6), ("F6_E3M2", [8], 6), ("F4", [0, 3], 0), ("F8_E8M0", [3], 3)],
)
def test_packed_types_take_whole_bytes_exactly(code: str, shape: list[int], nbytes: int) -> None:
    data = document({"t": entry(shape, 0, nbytes, code)}, bytes(nbytes))
    deserialize(data)  # safetensors itself agrees
    (found,) = parse(data, "x").entries
    assert (found.dtype, found.shape, found.stop - found.start) == (by_name(code), tuple(shape), nbytes)


def test_packed_elements_that_end_inside_a_byte_are_refused() -> None:
    data = document({"t": entry([3], 0, 2, "F4")}, bytes(2))
    with pytest.raises(SafetensorError):
        deserialize(data)
    with pytest.raises(CorruptError, match=r"'x'.*'t'.*inside a byte"):
        parse(data, "x")


def test_offsets_are_absolute_whatever_the_order_of_the_header() -> None:
    data = document({"b": entry([2], 4, 12), "a": entry([1], 0, 4), "e": entry([0], 4, 4)}, bytes(12))
    header = parse(data, "x")
    assert [e.name for e in header.entries] == ["b", "a", "e"]
    assert header.data_start == len(data) - 12
    assert {e.name: (e.start - header.data_start, e.stop - header.data_start) for e in header.entries} == {
        "b": (4, 12),
        "a": (0, 4),
        "e": (4, 4),
    }


# ---- what must not pass --------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[bytes, type[OpenError], str]] = {
    "empty file": (b"", TruncatedError, r"'x' has 0 bytes"),
    "too short": (b"\x01\0\0", TruncatedError, r"'x' has 3 bytes"),
    "header beyond the cap": (document({}, length=MAX_HEADER + 1), CorruptError, r"'x'.*100,000,001 bytes at byte 0"),
    "huge header": (document({}, length=2**64 - 1), CorruptError, r"'x'.*over the limit of 100,000,000"),
    "header beyond the file": (document({}, length=1000), TruncatedError, r"'x'.*ends at byte 10, 998 bytes too"),
    "not UTF-8": (document(b'{"\xff": 1}'), CorruptError, r"header of 'x' is not UTF-8 at byte 2"),
    "half a character": (
        document(b'{"\\ud800": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        CorruptError,
        r"'x'.*'\\ud800' has a name that is not Unicode",
    ),
    "not JSON": (document(b'{"a": '), CorruptError, r"header of 'x' is not JSON.*at character 6"),
    "deep JSON": (document(b'{"a": ' + b"[" * 200_000), CorruptError, r"header of 'x' has brackets nested too deeply"),
    "a list": (document(b"[]"), CorruptError, r"header of 'x' is a JSON list"),
    "same name twice": (
        document(
            b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b' "a": {"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"\0\0",
        ),
        CorruptError,
        r"header of 'x' has the key 'a' twice",
    ),
    "no object": (document({"a": 3}), CorruptError, r"'x'.*'a' is described by a int"),
    "no dtype": (document({"a": {"shape": [], "data_offsets": [0, 0]}}), CorruptError, r"'x'.*'a' has no dtype"),
    "odd dtype": (document({"a": entry([1], 0, 4, ["F32"])}, bytes(4)), CorruptError, r"'x'.*'a'.*\['F32'\]"),
    "unknown dtype": (
        document({"a": entry([1], 0, 4, "F128")}, bytes(4)),
        UnsupportedFormatError,
        r"'x'.*'a'.*'F128'.*newer",
    ),
    "negative size": (document({"a": entry([-1], 0, 4)}, bytes(4)), CorruptError, r"'x'.*'a' has the shape \[-1\]"),
    "no number": (document({"a": entry([True], 0, 4)}, bytes(4)), CorruptError, r"'a' has the shape \[True\]"),
    "fraction": (document({"a": entry([1.0], 0, 4)}, bytes(4)), CorruptError, r"'a' has the shape \[1.0\]"),
    "no shape": (document({"a": entry(4, 0, 4)}, bytes(4)), CorruptError, r"'a' has the shape 4"),
    "overflow": (document({"a": entry([2**33, 2**33], 0, 4)}, bytes(4)), CorruptError, r"'a'.*impossibly large shape"),
    "hidden by 0": (document({"a": entry([0, 2**70], 0, 0)}), CorruptError, r"'a'.*impossibly large shape"),
    "many dims": (document({"a": entry([1] * 65, 0, 4)}, bytes(4)), CorruptError, r"'a'.*65 dimensions, over"),
    "one offset": (document({"a": {"dtype": "U8", "shape": [], "data_offsets": [0]}}), CorruptError, r"'a'.*\[0\]"),
    "reversed": (document({"a": entry([1], 4, 0)}, bytes(4)), CorruptError, r"'a'.*\[4, 0\].*not a byte range"),
    "negative": (document({"a": entry([1], -4, 0)}, bytes(4)), CorruptError, r"'a'.*\[-4, 0\]"),
    "too few": (document({"a": entry([2], 0, 4)}, bytes(4)), CorruptError, r"'a'.*needs 8 bytes.*has 4, 4 too few"),
    "too many": (document({"a": entry([1], 0, 8)}, bytes(8)), CorruptError, r"'a'.*needs 4.*has 8, 4 too many"),
    "overlap": (
        document({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        CorruptError,
        r"'x'.*'b' begins at byte \d+, 4 bytes before the end of tensor 'a'",
    ),
    "hole": (
        document({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        CorruptError,
        r"'x': 4 bytes from byte \d+ on, between tensor 'a' and tensor 'b', belong to no tensor",
    ),
    "hole first": (document({"a": entry([1], 4, 8)}, bytes(8)), CorruptError, r"4 bytes.*between the header and"),
    "trailing": (
        document({"a": entry([1], 0, 4)}, bytes(9)),
        CorruptError,
        r"'x': 5 bytes from byte \d+ on, after tensor 'a'",
    ),
    "cut": (
        document({"a": entry([4], 0, 16)}, bytes(9)),
        TruncatedError,
        r"'x'.*'a' ends at byte \d+, 7 bytes beyond the end of the file at \d+",
    ),
    "metadata": (document({"__metadata__": {"n": 3}}), CorruptError, r"'x'.*__metadata__ 'n' is a int"),
    "metadata list": (document({"__metadata__": []}), CorruptError, r"'x'.*__metadata__ is a list"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_violation_is_refused_by_name_and_byte(case: str) -> None:
    data, kind, message = BROKEN[case]
    with pytest.raises(kind, match=message) as caught:
        parse(data, "x")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_all_violations_are_reported_at_once_and_bounded() -> None:
    header = {f"t{i}": entry([2], 0, 4) for i in range(1000)}
    with pytest.raises(CorruptError, match=r"'t0'.*and 999 more: .*'t1'.*'t4'.*; …$") as caught:
        parse(document(header, bytes(4)), "x")
    assert len(str(caught.value)) < 1000


def test_a_header_of_endless_values_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = document(b'{"a": [' + b"{}," * 8_000_000 + b"{}]}")
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(UnsafeError, match=r"header of 'x' contains about 8,000,001 values in 24,000,011 bytes"):
        parse(bomb, "x")


def test_control_characters_of_a_name_never_reach_the_message() -> None:
    with pytest.raises(CorruptError) as caught:
        parse(document({"\x1b[31m" + "a" * 500: entry([2], 0, 4)}, bytes(4)), "\x07x")
    assert "\x1b" not in str(caught.value) and "\x07" not in str(caught.value)
    assert len(str(caught.value)) < 400


STRICTER = ("names the key", "impossibly large shape", "dimensions, over", "a name that is not")  # on purpose


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nothing_that_safetensors_refuses_is_accepted(data: st.DataObject) -> None:
    """Mutated headers, judged by safetensors itself; where it accepts, so do we, but for what we refuse on purpose."""
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    header, at = {}, 0
    for i, size in enumerate(sizes):
        header[f"t{i}"] = entry([size, 2], at, at + size * 8)
        at += size * 8
    numbers = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63, 2**64, 2**70, 1.0, True, None, "1"]))
    for _ in range(data.draw(st.integers(0, 2))):
        victim = header[data.draw(st.sampled_from(list(header)))]
        field = data.draw(st.sampled_from(["shape", "data_offsets", "dtype"]))
        if field == "dtype":
            victim[field] = data.draw(st.sampled_from(["F16", "F4", "F64", "X", 3]))
        else:
            victim[field] = victim[field][:]
            victim[field][data.draw(st.integers(0, 1))] = data.draw(numbers)
    blob = document(header, bytes(at + data.draw(st.sampled_from([0, 0, 0, -1, 1]))) if at else b"")
    try:
        theirs = {name: info["shape"] for name, info in deserialize(blob)}
    except SafetensorError:
        with pytest.raises(OpenError):
            parse(blob, "x")
        return
    try:
        assert {e.name: list(e.shape) for e in parse(blob, "x").entries} == theirs
    except OpenError as error:
        assert any(reason in str(error) for reason in STRICTER), error


def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5)}, tmp_path / "a.safetensors", {"format": "pt"})
    whole = (tmp_path / "a.safetensors").read_bytes()
    rng = random.Random(7)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged) - 68)] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        with suppress(OpenError):  # anything else fails the test
            parse(bytes(damaged), "x")


def test_a_truncated_file_opens_for_a_partial_read_and_says_so_when_checked(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-7])
    catalog = reader.read_catalog(Place(tmp_path))
    with pytest.raises(TruncatedError, match=r"tensor '[ab]'.*ends at byte \d+.*'model.safetensors'"):
        catalog.check_files()


# ---- folders -------------------------------------------------------------------------------------------------


def save_indexed(folder: Path, files: dict[str, dict[str, torch.Tensor]], stem: str = "model") -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    weights = {}
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
        weights |= dict.fromkeys(tensors, file)
    total = sum(t.nbytes for tensors in files.values() for t in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights})
    (folder / f"{stem}.safetensors.index.json").write_text(text)
    return weights


TWO = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(6.0), "b": torch.ones(2, 2)},
    "model-00002-of-00002.safetensors": {"c": torch.zeros(3)},
}


def test_transformers_own_sharded_save_opens_whole(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    place = Place(tmp_path)
    assert reader.detect(place)
    catalog = reader.read_catalog(place)
    catalog.check()
    truth = dict(model.state_dict())
    assert set(catalog.keys) == set(truth) and len(catalog.files) > 3
    for key, tensor in truth.items():
        assert np.array_equal(raw(tmp_path, catalog, key), bits(tensor))
    assert catalog.meta["notes"] == []
    objects = reader.read_objects(place, catalog)
    assert objects["config"]["hidden_size"] == 16
    assert objects["generation_config"]
    assert objects["model.safetensors.index"]["total_size"] == sum(t.nbytes for t in truth.values())
    assert objects["__metadata__"][catalog.files[0]] == {"format": "pt"}
    assert set(catalog.metadata_files) == {*(p.name for p in tmp_path.glob("*.safetensors*"))}


def test_tensors_that_the_index_does_not_list_are_noted_and_left_out(tmp_path: Path) -> None:
    save_indexed(tmp_path, TWO)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["b"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    catalog = reader.read_catalog(Place(tmp_path))
    assert catalog.keys == ["a", "c"]
    assert any("1 tensor that" in note and "'b'" in note for note in catalog.meta["notes"])
    assert any("states 52 bytes" in note and "there are 36" in note for note in catalog.meta["notes"])


def test_an_index_that_names_an_absent_file_says_what_is_lost(tmp_path: Path) -> None:
    save_indexed(tmp_path, TWO)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    message = r"index 'model.safetensors.index.json' names the file 'model-00001.*2 of 3 tensors, 'a' first"
    with pytest.raises(MissingFileError, match=message):
        wb.open(tmp_path)
    ckpt = wb.open(tmp_path, partial=True)
    assert list(ckpt) == ["c"] and torch.equal(ckpt["c"].torch(), torch.zeros(3))
    assert any("2 tensors of absent files" in note and "model-00001" in note for note in ckpt.notes)
    errors = [finding for finding in wb.verify(tmp_path) if finding.severity == "error"]
    assert [finding.rule for finding in errors] == ["open.missing"]


def test_an_index_that_names_an_absent_or_misplaced_tensor_is_refused(tmp_path: Path) -> None:
    weights = save_indexed(tmp_path, TWO)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights | {"d": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CorruptError, match=r"maps tensor 'd' to 'model-00001.*lacks it; no other file.*: restore"):
        wb.open(tmp_path)
    ckpt = wb.open(tmp_path, partial=True)
    assert set(ckpt) == set(weights) and any("'d'" in note for note in ckpt.notes)
    index.write_text(json.dumps({"weight_map": weights | {"a": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(
        CorruptError, match=r"tensor 'a' to 'model-00002.*it is in 'model-00001-of-00002.*: correct the index"
    ):
        wb.open(tmp_path)
    ckpt = wb.open(tmp_path, partial=True)
    assert set(ckpt) == set(weights) and torch.equal(ckpt["a"].torch(), torch.arange(6.0))
    assert any("'a' in 'model-00001-of-00002.safetensors'" in note for note in ckpt.notes)


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    weights = save_indexed(tmp_path, TWO)
    save_file({"a": torch.ones(9)}, tmp_path / "model.safetensors")
    (tmp_path / next(iter(TWO))).unlink()  # of no consequence: the index is not used
    ckpt = wb.open(tmp_path)
    assert list(ckpt) == ["a"] and ckpt["a"].shape == (9,)
    assert "'model.safetensors.index.json' lists other files" in ckpt.notes[0]
    assert [found.complete for found in runs.discover(tmp_path)] == [True]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "c": weights["c"]}}))
    assert set(wb.open(tmp_path)) == {"a", "c"}  # it is one of the files of the index
    assert list(wb.open(index)) == ["a", "c"]


def test_weights_of_torch_beside_safetensors_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert wb.open(tmp_path).notes == []
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    ckpt = wb.open(tmp_path)
    (note,) = ckpt.notes
    assert torch.equal(ckpt["a"].torch(), torch.ones(2)) and isinstance(note, Ordinary) and "pytorch_model.bin" in note


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, text: str) -> None:
    save_indexed(tmp_path, TWO)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=r"'model.safetensors.index.json' has no weight_map"):
        reader.read_catalog(Place(tmp_path))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "link.safetensors", "a\0b"])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: str) -> None:
    inner = tmp_path / "ckpt"
    weights = save_indexed(inner, TWO)
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (inner / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights | {"a": file}}))
    with pytest.raises(UnsafeError, match="refused"):
        reader.read_catalog(Place(inner))


def test_of_several_variants_the_plain_one_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    save_indexed(tmp_path, TWO)
    half = {"model.fp16-00001-of-00001.safetensors": {k: v.half() for f in TWO.values() for k, v in f.items()}}
    save_indexed(tmp_path, half, "model.fp16")
    catalog = reader.read_catalog(Place(tmp_path))
    assert {catalog.dtype_of(t).name for t in range(len(catalog))} == {"float32"}
    assert any("'model.fp16.safetensors.index.json'" in note for note in catalog.meta["notes"])
    assert any("'model.fp16-00001-of-00001.safetensors'" in note for note in catalog.meta["notes"])
    picked = reader.read_catalog(Place(tmp_path / "model.fp16.safetensors.index.json"))
    assert {picked.dtype_of(t).name for t in range(len(picked))} == {"float16"}
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": torch.ones(2)}, single / "model.safetensors")
    save_file({"a": torch.ones(2).half()}, single / "model.fp16.safetensors")
    catalog = reader.read_catalog(Place(single))
    assert catalog.files == ["model.safetensors"] and "model.fp16" in catalog.meta["notes"][0]


def test_files_without_an_index_are_joined_and_missing_parts_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00003.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-00003-of-00003.safetensors")
    catalog = reader.read_catalog(Place(tmp_path))
    assert catalog.keys == ["a", "b"]
    (note,) = catalog.meta["notes"]
    assert note.startswith("1 of 3 files 'model-N-of-00003' is missing") and "'00002'" in note


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CorruptError, match=r"tensor 'a' is in 'one.safetensors' and in 'two.safetensors'"):
        reader.read_catalog(Place(tmp_path))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks transformers
def test_an_adapter_keeps_its_facts(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    catalog = reader.read_catalog(Place(tmp_path))
    truth = load_file(tmp_path / "adapter_model.safetensors")
    assert set(catalog.keys) == set(truth)
    for key, tensor in truth.items():
        assert np.array_equal(raw(tmp_path, catalog, key), bits(tensor))
    assert catalog.meta["peft"]["peft_type"] == "LORA" and catalog.meta["peft"]["r"] == 4
    objects = reader.read_objects(Place(tmp_path), catalog)
    assert objects["adapter_config"]["lora_alpha"] == 8


def test_a_folder_without_safetensors_is_not_detected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert not reader.detect(Place(tmp_path)) and not reader.detect(Place(tmp_path / "notes.txt"))
    with pytest.raises(NotACheckpointError):
        reader.read_catalog(Place(tmp_path))


def test_a_safetensors_file_under_another_name_is_recognised(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    assert reader.detect(Place(tmp_path / "blob"))
    (tmp_path / "short").write_bytes(b"\x02")
    assert not reader.detect(Place(tmp_path / "short"))


# ---- pieces written by torch's HuggingFaceStorageWriter --------------------------------------------------------


def write_pieces(folder: Path, pieces: dict[int, dict[str, tuple[torch.Tensor, list[int]]]], of: str = "00001") -> None:
    """The same bytes as the writer's; `test_layouts` checks against the writer itself."""
    folder.mkdir(exist_ok=True)
    for rank, tensors in pieces.items():
        info = {name: {"saved_offsets": offsets} for name, (_, offsets) in tensors.items()}
        facts = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{rank + 1:05d}-model-00001-of-{of}.safetensors"
        save_file({key: tensor for key, (tensor, _) in tensors.items()}, folder / name, facts)


def rows(full: torch.Tensor, ranks: int) -> dict[int, dict[str, tuple[torch.Tensor, list[int]]]]:
    found, at = {}, 0
    for rank, part in enumerate(torch.chunk(full, ranks)):
        found[rank] = {"w": (part.clone(), [at, 0])}
        at += len(part)
    return found


def test_pieces_are_assembled_by_their_saved_offsets(tmp_path: Path) -> None:
    full = torch.randn(10, 3)
    pieces = rows(full, 4)
    pieces[0]["scalar"] = (torch.tensor(3.5), [])
    write_pieces(tmp_path, pieces)
    catalog = reader.read_catalog(Place(tmp_path))
    catalog.check()
    assert catalog.shape_of(catalog.index["w"]) == (10, 3)
    assert np.array_equal(raw(tmp_path, catalog, "w"), bits(full))
    assert np.array_equal(raw(tmp_path, catalog, "scalar"), bits(torch.tensor(3.5)))
    assert catalog.rank[catalog.rows_of(catalog.index["w"])].tolist() == [0, 1, 2, 3]
    assert catalog.meta["writers"] == 4


def test_a_lost_middle_rank_leaves_a_hole_and_a_note(tmp_path: Path) -> None:
    write_pieces(tmp_path, {rank: part for rank, part in rows(torch.randn(8, 3), 4).items() if rank != 2})
    catalog = reader.read_catalog(Place(tmp_path))
    covered = catalog.sizes[:, 0].sum()
    assert catalog.shape_of(0) == (8, 3) and covered == 6
    (note,) = catalog.meta["notes"]
    assert "1 of 4 ranks have no file ('shard-00003')" in note and "lower bounds" in note
    assert catalog.meta["ranks_absent"] == [2]


def test_file_names_that_disagree_make_the_shape_a_lower_bound(tmp_path: Path) -> None:
    pieces = rows(torch.randn(8, 3), 2)
    write_pieces(tmp_path, {0: pieces[0]}, "00001")
    write_pieces(tmp_path, {1: pieces[1]}, "00002")
    (note,) = reader.read_catalog(Place(tmp_path)).meta["notes"]
    assert "disagree on the number of files (1, 2)" in note and "lower bounds" in note


def test_equal_boxes_of_two_ranks_are_replicas(tmp_path: Path) -> None:
    same = torch.ones(2, 3)
    write_pieces(tmp_path, {0: {"w": (same, [0, 0])}, 1: {"w": (same.clone(), [0, 0])}})
    catalog = reader.read_catalog(Place(tmp_path))
    assert catalog.replica.tolist() == [0, 1]


def test_consolidated_files_beside_pieces_are_the_checkpoint(tmp_path: Path) -> None:
    full = torch.randn(8, 3)
    write_pieces(tmp_path / "sharded", rows(full, 2))
    alone = reader.read_catalog(Place(tmp_path))
    assert alone.files[0].startswith("sharded/shard-") and "not consolidated" in alone.meta["notes"][0]
    assert np.array_equal(raw(tmp_path, alone, "w"), bits(full))
    save_file({"w": full}, tmp_path / "model-00001-of-00001.safetensors")
    catalog = reader.read_catalog(Place(tmp_path))
    assert catalog.files == ["model-00001-of-00001.safetensors"] and catalog.meta["notes"] == []
    write_pieces(tmp_path, rows(full, 2))
    catalog = reader.read_catalog(Place(tmp_path))
    assert catalog.files == ["model-00001-of-00001.safetensors"] and "2 pieces" in catalog.meta["notes"][0]


@pytest.mark.parametrize(
    "info", ['{"w": {}}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}', "{}", "[]", "nonsense"]
)
def test_pieces_without_a_place_are_refused(tmp_path: Path, info: str) -> None:
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 3)}, tmp_path / name, {"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptError, match=f"DCP_SHARDING_INFO of '{name}'"):
        reader.read_catalog(Place(tmp_path))


def test_pieces_of_different_dtype_or_rank_are_refused(tmp_path: Path) -> None:
    write_pieces(tmp_path, {0: {"w": (torch.ones(2, 3), [0, 0])}, 1: {"w": (torch.ones(2, 3).half(), [2, 0])}})
    with pytest.raises(CorruptError, match=r"tensor 'w' is float32 .* and float16"):
        reader.read_catalog(Place(tmp_path))
    write_pieces(tmp_path, {1: {"w": (torch.ones(2), [2])}})
    with pytest.raises(CorruptError, match=r"tensor 'w' has pieces of \[1, 2\] dimensions"):
        reader.read_catalog(Place(tmp_path))


# ---- samples -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SAMPLES, reason="WORKBENCH_SAMPLES_HF names no folder of Hugging Face samples")
def test_every_sample_equals_safetensors_own_reading() -> None:
    for folder in sorted(Path(SAMPLES or "").iterdir()):
        place = Place(folder)
        if folder.name.endswith("_truth") or not reader.detect(place):
            continue
        catalog = reader.read_catalog(place)
        catalog.check()
        catalog.check_files()
        seen = set()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as theirs:
                for key in theirs.keys():  # noqa: SIM118  (safe_open is no dict)
                    assert np.array_equal(raw(folder, catalog, key), bits(theirs.get_tensor(key)))
                    seen.add(key)
        assert seen == set(catalog.keys)


@pytest.mark.parametrize(("claimed", "said"), [("1e999", "inf"), ("NaN", "nan"), ("-7", "-7"), ("12.0", "12")])
def test_a_total_size_of_any_number_is_a_note(tmp_path, claimed, said):
    save_file({"w": torch.ones(4)}, tmp_path / "model-00001-of-00001.safetensors")
    index = json.dumps({"metadata": {"total_size": 0}, "weight_map": {"w": "model-00001-of-00001.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index.replace("0}", f"{claimed}}}", 1))
    notes = reader.read_catalog(Place(tmp_path)).meta["notes"]
    assert any(f"states {said} bytes of tensors, but there are 16" in note for note in notes), notes
