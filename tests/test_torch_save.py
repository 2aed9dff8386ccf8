"""torch.save: what torch wrote in any of its three formats comes back bit for bit, by path, and nothing runs."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import re
import struct
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from reading import bits, raw

import workbench as wb
from workbench.core.place import Place
from workbench.errors import (
    CorruptError,
    MissingFileError,
    OpenError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
    WorkbenchError,
)
from workbench.formats.torch import save as reader


def save(path: Path, value: object, legacy: bool = False, **more: Any) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy, **more)
    return path


def check(path: Path, truth: dict[str, torch.Tensor]) -> wb.Checkpoint:
    """The checkpoint at a path, after comparing every tensor by two ways of reading."""
    ckpt = wb.open(path)
    assert set(ckpt) == set(truth)
    for key, tensor in truth.items():
        assert ckpt[key].torch().dtype is tensor.dtype
        assert np.array_equal(bits(ckpt[key].torch()), bits(tensor)), key
        assert np.array_equal(raw(path.parent, ckpt.catalog, key), bits(tensor)), key
    return ckpt


def trained() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A model, its optimizer and the loop's state as most scripts save them, with the truth by path."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "global_step": 17,
        "args": argparse.Namespace(lr=0.01),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "history": [1.5, {"loss": 0.5}],
    }
    truth = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        truth |= {f"optimizer.state.{number}.{name}": value for name, value in moments.items()}
    return state, truth | {"rng.torch": torch.get_rng_state()}


@pytest.mark.parametrize("legacy", [False, True])
def test_nested_state_becomes_tensors_by_path_and_objects(tmp_path: Path, legacy: bool) -> None:
    state, truth = trained()
    ckpt = check(save(tmp_path / "ckpt.pt", state, legacy), truth)
    assert ckpt.format == "torch_save" and ckpt.step == 17
    assert set(ckpt.objects) == {"optimizer", "scheduler", "epoch", "global_step", "args", "rng", "history"}
    assert ckpt.objects["optimizer"] == {"param_groups": state["optimizer"]["param_groups"]}
    assert ckpt.objects["scheduler"]["step_size"] == 2
    assert ckpt.objects["history"] == [1.5, {"loss": 0.5}]
    assert ckpt.objects["args"].fields == {"lr": 0.01}
    assert ckpt.objects["rng"] == {"python": state["rng"]["python"]}
    assert not [note for note in ckpt.notes if "numbered" in note]


@pytest.mark.parametrize("legacy", [False, True])
def test_numbered_optimizer_state_is_joined_in_the_models_own_order(tmp_path: Path, legacy: bool) -> None:
    state, _ = trained()
    ckpt = wb.open(save(tmp_path / "ckpt.pt", state, legacy))
    names = [name for name in state["model"] if "running" not in name and "num_batches" not in name]
    for number, name in enumerate(names):
        expected = state["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(ckpt.param(name, role="exp_avg").torch(), expected)
        assert torch.equal(ckpt.param(name).torch(), state["model"][name])
    assert ckpt.param("1.running_mean", role="buffer").shape == (6,)


def test_numbers_stay_numbers_where_the_parameters_do_not_fit(tmp_path: Path) -> None:
    state, _ = trained()
    del state["model"]["2.weight"]
    ckpt = wb.open(save(tmp_path / "ckpt.pt", state))
    assert {fqn for fqn, role in zip(ckpt.fqns, ckpt.roles, strict=True) if role == "exp_avg"} == {None}
    (note,) = [note for note in ckpt.notes if "numbered" in note]
    assert note.startswith("optimizer: 5 of its parameters")


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(6, 10)
    shared = torch.randn(8)
    return {
        "base": base,
        "transposed": base.t(),
        "strided": base[1::2, 3:9:3],
        "row": base[2],
        "scalar": base[3, 4],
        "expanded": torch.tensor([[5.0]]).expand(3, 4),
        "empty": base[6:],
        "zero_d": torch.tensor(7),
        "tied_a": shared,
        "tied_b": shared,
        "half": shared[4:],
        "reshaped": shared.view(2, 4),
        "bf16": torch.randn(3, 5).bfloat16().t(),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "u16": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "param": torch.nn.Parameter(torch.randn(2, 2)),
    }


def test_views_and_shared_storages_keep_offset_and_stride(tmp_path: Path) -> None:
    truth = views()
    ckpt = check(save(tmp_path / "views.pt", truth), truth)
    assert ckpt.catalog.meta["aliases"] == [["tied_a", "tied_b"]]
    assert ckpt["transposed"][2:5, ::2].tolist() == truth["transposed"][2:5, ::2].tolist()


def test_views_in_the_legacy_format(tmp_path: Path) -> None:
    truth = {name: value for name, value in views().items() if name not in ("fp8", "u16")}  # no legacy storage class
    check(save(tmp_path / "views.pt", truth, legacy=True), truth)


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("value", "name"),
    [(ONES, "tensor"), ([ONES], "0"), ({"": ONES}, ""), ({3: {"x": ONES}}, "3.x"), ({"a": (1, ONES)}, "a.1")],
)
def test_odd_places_of_a_tensor_have_a_name(tmp_path: Path, value: object, name: str) -> None:
    ckpt = wb.open(save(tmp_path / "x.pt", value))
    (key,) = ckpt
    assert key == name
    assert torch.equal(ckpt[key].torch(), ONES)
    assert dict(ckpt.objects) == ({"a": (1,)} if name == "a.1" else {})


def test_a_file_without_tensors_has_objects_only(tmp_path: Path) -> None:
    ckpt = wb.open(save(tmp_path / "x.pt", ["a", {"b": 1}]))
    assert len(ckpt) == 0 and ckpt.objects["value"] == ["a", {"b": 1}]


def test_paths_that_collide_are_numbered_and_noted(tmp_path: Path) -> None:
    value = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b#2": torch.full((1,), 2.0)}
    ckpt = wb.open(save(tmp_path / "x.pt", value))
    assert [ckpt[key].torch().item() for key in ("a.b", "a.b#2", "a.b#2#2")] == [1.0, 0.0, 2.0]
    assert "dotted paths occur more than once" in ckpt.notes[0] and "'a.b'" in ckpt.notes[0]


def test_a_whole_module_shows_its_state_dict_and_nothing_of_it_runs(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for legacy in (False, True):
        path = tmp_path / f"model{legacy}.pt"
        ckpt = check(
            save(path, {"net": model}, legacy), {f"net.{name}": value for name, value in model.state_dict().items()}
        )
        assert "torch.nn.modules.linear.Linear" in ckpt.catalog.meta["foreign_globals"]
        assert ckpt.objects["net"].qualname == "Sequential"


def test_containers_are_stripped_by_their_path_not_by_their_spelling(tmp_path: Path) -> None:
    ckpt = wb.open(save(tmp_path / "a.pt", {"model": {"model.norm.weight": torch.ones(2)}, "epoch": 1}))
    assert ckpt.fqns == ["model.norm.weight"]
    ckpt = wb.open(save(tmp_path / "b.pt", {"model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}))
    assert ckpt.fqns == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("legacy", [False, True, "dcp"])
def test_conjugate_and_negative_views_are_read_as_their_values(tmp_path: Path, legacy: Any) -> None:
    stored = torch.randn(300, 5, dtype=torch.complex64)
    stored[0, 0], stored[1, 1] = complex(1e-45, -0.0), 0
    value = {
        "conj": stored.conj(),
        "turned": stored.t().conj()[1:, ::3],
        "neg": stored.clone().conj().imag,
        "w": torch.ones(3),
    }
    assert value["conj"].is_conj() and value["neg"].is_neg()
    truth = {key: tensor.resolve_conj().resolve_neg() for key, tensor in value.items()}
    if legacy == "dcp":
        dcp.save(value, checkpoint_id=tmp_path / "x", no_dist=True)
    else:
        save(tmp_path / "x", value, legacy)
    ckpt = wb.open(tmp_path / "x")
    for key, tensor in truth.items():
        assert np.array_equal(bits(ckpt[key].torch()), bits(tensor)), key
    assert np.array_equal(bits(ckpt["conj"][7:200:3]), bits(truth["conj"][7:200:3]))
    assert not wb.verify(ckpt, deep=True) and not ckpt.notes
    assert wb.diff(ckpt, save(tmp_path / "plain.pt", truth)).exit_code == 0
    assert wb.diff(ckpt, save(tmp_path / "other.pt", truth | {"conj": stored})).count("changed") == 1
    wb.export(ckpt, tmp_path / "out.pt", "torch", role=None, verify=True)
    assert all(np.array_equal(bits(one), bits(truth[key])) for key, one in torch.load(tmp_path / "out.pt").items())


def test_sparse_tensors_are_read_and_unknown_lazy_ones_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    monkeypatch.setattr(  # as a torch to come may write
        "torch._utils.get_tensor_metadata", lambda tensor: {"new": True} if tensor.shape == (7,) else {}
    )
    ckpt = wb.open(save(tmp_path / "x.pt", {"sparse": sparse, "lazy": torch.ones(7)}))
    assert ckpt["sparse.values"].torch().tolist() == [1.0, 2.0]
    assert ckpt["sparse.indices"].torch().tolist() == [[0, 2]]
    assert ckpt.objects["sparse"] == {"layout": "sparse_coo", "shape": (3,), "is_coalesced": False}
    assert any("'lazy' are not its values" in note for note in ckpt.notes)
    with pytest.raises(UnsupportedFormatError):
        ckpt["lazy"].torch()
    report = wb.verify(ckpt, deep=True)  # nothing is wrong with the file, and nothing is known of the values
    assert report.exit_code == 0 and [finding.rule for finding in report] == ["open.note"]
    assert "'lazy'" in report.not_checked["unread tensors"]


@pytest.mark.filterwarnings("ignore:Sparse ", "ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_a_compressed_sparse_tensor_is_listed_by_torchs_names(tmp_path: Path, layout: str) -> None:
    block = ((2, 2),) if layout[0] == "b" else ()
    values = getattr(torch.randn(4, 6), f"to_sparse_{layout}")(*block)
    names = (
        ("crow_indices", "col_indices", "values") if layout[-1] == "r" else ("ccol_indices", "row_indices", "values")
    )
    for legacy in (False, True):
        path = save(tmp_path / "x.pt", {"s": values}, legacy)
        check(path, {f"s.{name}": getattr(values, name)() for name in names})
        assert dict(wb.open(path).objects) == {"s": {"layout": f"sparse_{layout}", "shape": (4, 6)}}
    other = save(tmp_path / "y.pt", {"s": values * 2})
    assert [row.key_b for row in wb.diff(tmp_path / "x.pt", other).changed_rows] == ["s.values"]


def test_big_endian_files_are_read_as_little(tmp_path: Path) -> None:
    truth = {
        "a": torch.arange(6.0).reshape(2, 3),
        "c": torch.randn(3, dtype=torch.complex64),
        "b": torch.ones(3).byte(),
    }
    little = save(tmp_path / "little.pt", truth)
    with zipfile.ZipFile(little) as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
        for index, name in enumerate(old.namelist()):
            data = old.read(name)
            if name.endswith("byteorder"):
                data = b"big"
            elif "/data/" in name:
                data = np.frombuffer(data, f"<u{(4, 4, 1)[int(name[-1])]}").byteswap().tobytes()
            new.writestr(name, data)
            assert index < 20
    ckpt = wb.open(tmp_path / "big.pt")
    for key, tensor in truth.items():
        assert np.array_equal(bits(ckpt[key].torch()), bits(tensor)), key
    assert np.array_equal(raw(tmp_path, ckpt.catalog, "a"), bits(truth["a"]))


# ---- the oldest: tar -----------------------------------------------------------------------------------------


def write_tar(path: Path) -> dict[str, torch.Tensor]:
    """A file as torch 0.1.11 wrote it, by hand, checked against torch's own reader of that format."""

    class Writer(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return value.key if isinstance(value, Ref) else None

    class Ref:
        def __init__(self, key: int) -> None:
            self.key = key

    data = np.arange(12, dtype="<f4") * 1.5
    longs = np.array([3, -4], "<i8")
    storages = pickle.dumps(2, 2)
    storages += pickle.dumps((100, "cpu", torch.FloatStorage), 2) + struct.pack("<q", 12) + data.tobytes()
    storages += pickle.dumps((101, "cpu", torch.LongStorage), 2) + struct.pack("<q", 2) + longs.tobytes()
    storages += pickle.dumps([(102, 100, 4, 6)], 2)  # a storage that is elements 4 to 10 of another

    def tensor(key: int, storage: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bytes:
        numbers = struct.pack(f"<{2 * len(size) + 1}q", *size, *stride, offset)
        return pickle.dumps((key, storage, torch.FloatTensor), 2) + struct.pack("<ii", len(size), 0) + numbers

    tensors = pickle.dumps(3, 2) + tensor(1, 100, (3, 4), (4, 1), 0) + tensor(2, 101, (2,), (1,), 0)
    tensors += tensor(3, 102, (2, 2), (1, 3), 1)
    body = io.BytesIO()
    Writer(body, 2).dump({"w": Ref(1), "n": Ref(2), "view": Ref(3), "epoch": 4})
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("storages", storages), ("tensors", tensors), ("pickle", body.getvalue())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return {name: value for name, value in torch.load(path, weights_only=False).items() if name != "epoch"}


def test_the_tar_format_equals_torchs_own_reading(tmp_path: Path) -> None:
    truth = write_tar(tmp_path / "old.pt")
    assert truth["view"].tolist() == [[7.5, 12.0], [9.0, 13.5]]
    ckpt = check(tmp_path / "old.pt", truth)
    assert ckpt.objects["epoch"] == 4


def test_damaged_tar_archives_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "old.pt")
    data = (tmp_path / "old.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[:700])
    with pytest.raises(CorruptError, match=r"'cut.pt'"):
        wb.open(tmp_path / "cut.pt")
    at = data.index(struct.pack("<q", 12) + struct.pack("<f", 0.0))
    (tmp_path / "long.pt").write_bytes(data[:at] + struct.pack("<q", 1 << 40) + data[at + 8 :])
    with pytest.raises(TruncatedError, match=r"'long.pt': storage '100' ends at byte [\d,]+, [\d,]+ bytes beyond"):
        wb.open(tmp_path / "long.pt")


# ---- folders -------------------------------------------------------------------------------------------------


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    files = {
        "pytorch_model-00001-of-00002.bin": {"a": torch.randn(3, 2), "b": torch.arange(4)},
        "pytorch_model-00002-of-00002.bin": {"c": torch.randn(5)},
    }
    for name, tensors in files.items():
        torch.save(tensors, folder / name)
    weights = {key: name for name, tensors in files.items() for key in tensors}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (folder / "config.json").write_text('{"hidden_size": 2}')
    return {key: value for tensors in files.values() for key, value in tensors.items()}


def test_sharded_bin_weights_follow_their_index(tmp_path: Path) -> None:
    truth = write_shards(tmp_path)
    ckpt = wb.open(tmp_path)
    assert ckpt.format == "torch_save" and set(ckpt) == set(truth)
    for key, tensor in truth.items():
        assert torch.equal(ckpt[key].torch(), tensor)
    assert ckpt.objects["config"] == {"hidden_size": 2}
    assert set(ckpt.catalog.metadata_files) == {name.name for name in tmp_path.glob("pytorch_model*")}


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"d": "pytorch_model-00001-of-00002.bin"}, CorruptError, r"tensor 'd' to 'pytorch_model-00001.*lacks it"),
        ({"d": "gone.bin"}, MissingFileError, r"index 'pytorch_model.bin.index.json' names the file 'gone.bin'"),
        ({"d": "../x.bin"}, UnsafeError, r"'../x.bin' leaves the checkpoint"),
        ({"d": 3}, CorruptError, r"has no weight_map"),
    ],
)
def test_a_bin_index_is_not_trusted(tmp_path: Path, change: Any, kind: type[OpenError], message: str) -> None:
    write_shards(tmp_path)
    index = tmp_path / "pytorch_model.bin.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] |= change
    index.write_text(json.dumps(document))
    with pytest.raises(kind, match=message):
        wb.open(tmp_path)


def test_a_bin_index_is_followed_in_part(tmp_path: Path) -> None:
    truth = write_shards(tmp_path)
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(MissingFileError, match=r"00002-of-00002.bin', which is missing.*1 of 3 tensors, 'c'"):
        wb.open(tmp_path)
    ckpt = wb.open(tmp_path, partial=True)
    assert set(ckpt) == {"a", "b"} and torch.equal(ckpt["a"].torch(), truth["a"])
    assert any("1 tensor of absent files" in note for note in ckpt.notes)


def test_one_bin_file_in_a_folder(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(wb.open(tmp_path)) == ["w"]


# ---- what must not pass --------------------------------------------------------------------------------------


def test_a_truncated_zip_says_so(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(TruncatedError, match=r"'x.pt' starts like a zip archive.*truncated"):
        wb.open(path)


def test_a_truncated_legacy_file_names_the_storage_and_the_byte(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)}, legacy=True)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(TruncatedError, match=r"'x.pt': storage '\d+' ends at byte [\d,]+, 300 bytes beyond the end"):
        wb.open(path)


def test_a_legacy_file_whose_counts_disagree_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)}, legacy=True)
    data = path.read_bytes()
    path.write_bytes(data[:-4008] + struct.pack("<q", 999) + data[-4000:])
    with pytest.raises(CorruptError, match=r"storage '\d+' at byte [\d,]+ has 999 elements, but 1,000 in the object"):
        wb.open(path)


def test_compressed_payloads_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(UnsupportedFormatError, match=r"'y.pt': record 'x/data/0' is compressed"):
        wb.open(tmp_path / "y.pt")


def replaced(path: Path, **records: bytes | None) -> Path:
    """The archive with some records changed or left out."""
    made = path.with_name("made.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            content = records.get(name.partition("/")[2].replace("/", "_").replace(".", "_"), old.read(name))
            if content is not None:
                new.writestr(name, content)
    return made


def test_storages_that_are_missing_or_too_short_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(1000)})
    with pytest.raises(CorruptError, match=r"'made.pt': data.pkl names the storage '0', but its record is missing"):
        wb.open(replaced(path, data_0=None))
    with pytest.raises(
        CorruptError, match=r"storage '0' should have 4,000 bytes, but its record at byte [\d,]+ has 3,996"
    ):
        wb.open(replaced(path, data_0=bytes(3996)))


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"w": torch.ones(2, 3)})
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("x/data.pkl")
    for old, new in ((b"K\x02K\x03\x86", b"K\x02K\x04\x86"), (b"K\x03K\x01\x86", b"J\xff\xff\xff\x7fK\x01\x86")):
        assert pickled.count(old) == 1
        message = r"'made.pt': tensor 'w' of shape .* ends at byte [\d,]+ of a storage of 24 bytes at byte"
        with pytest.raises(CorruptError, match=message):
            wb.open(replaced(path, data_pkl=pickled.replace(old, new)))


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_foreign_globals_never_run_and_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "x.pt", {"w": torch.ones(2), "bomb": Bomb()})
    ckpt = wb.open(path)
    assert ckpt["w"].torch().tolist() == [1.0, 1.0]
    assert str(ckpt.objects["bomb"])
    assert [name for name in ckpt.catalog.meta["foreign_globals"] if name.endswith(".system")]
    assert not (tmp_path / "ran").exists()


def test_depth_and_sharing_are_bounded(tmp_path: Path) -> None:
    deep: Any = torch.ones(1)
    for _ in range(300):
        deep = [deep]
    with pytest.raises(CorruptError, match=r"'deep.pt' has more than 200 nested containers"):
        wb.open(save(tmp_path / "deep.pt", deep))
    laughs: Any = {"w": torch.ones(1)}
    for _ in range(40):
        laughs = [laughs] * 10
    with pytest.raises(UnsafeError, match=r"'laughs.pt' shares its containers so often"):
        wb.open(save(tmp_path / "laughs.pt", laughs))


def test_a_structure_that_holds_itself_is_cut(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": torch.ones(2), "n": 1}
    loop["self"] = loop
    ckpt = wb.open(save(tmp_path / "x.pt", loop))
    assert list(ckpt) == ["w"] and ckpt.objects["n"] == 1


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x03\x04data.pkl", b"hello" * 200, b"\x80\x02."])
def test_strangers_are_not_detected_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(WorkbenchError):
        wb.open(tmp_path / "x.pt")
    with pytest.raises(WorkbenchError):
        wb.open(tmp_path / "x.pt", format="torch_save")


def test_another_zip_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    assert not reader.detect(Place(tmp_path / "x.npz"))


@pytest.mark.parametrize("kind", ["zip", "legacy", "tar"])
def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.pt"
    if kind == "tar":
        write_tar(path)
    else:
        save(path, {"w": torch.ones(3, 4), "b": [torch.zeros(5)], "n": 3}, legacy=kind == "legacy")
    whole = path.read_bytes()
    rng = random.Random(11)
    for _ in range(int(os.environ.get("WORKBENCH_SLOW", "0")) * 3000 + 250):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        with suppress(WorkbenchError):  # anything else fails the test
            ckpt = wb.open(path, format="torch_save")
            for key in ckpt:
                ckpt[key].torch()
            list(ckpt.objects.values())


# torch 2.13 announces the end of its quantised types; files that hold them stay
@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:.*quantized")
def test_a_quantised_tensor_does_not_keep_the_others_from_opening(tmp_path: Path) -> None:
    weights = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.quint8)
    packed = torch.quantize_per_channel(torch.randn(4, 8), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    for zipped in (True, False):
        torch.save(
            {"q": weights, "p": packed, "w": torch.arange(5.0)},
            tmp_path / "x.pt",
            _use_new_zipfile_serialization=zipped,
        )
        ckpt = wb.open(tmp_path / "x.pt")
        assert ckpt["w"].torch().tolist() == [0, 1, 2, 3, 4]
        shown = {"q.int_repr": weights, "p.int_repr": packed}
        for key, tensor in shown.items():
            assert torch.equal(ckpt[key].torch(), tensor.int_repr().reshape(ckpt[key].shape)), key
        assert torch.equal(ckpt["p.q_per_channel_scales"].torch(), packed.q_per_channel_scales())
        assert torch.equal(ckpt["p.q_per_channel_zero_points"].torch(), packed.q_per_channel_zero_points())
        assert (ckpt["q.int_repr"].fqn, ckpt["q.int_repr"].role) == ("q", "param")
        assert {ckpt[f"p.q_per_channel_{name}"].role for name in ("scales", "zero_points")} == {"scale", "zero_point"}
        assert ckpt.objects["q"] == {
            "dtype": "quint8",
            "qscheme": "per_tensor_affine",
            "shape": (3, 4),
            "scale": 0.1,
            "zero_point": 0,
        }


@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:.*quantized", "ignore:TypedStorage")
def test_no_stored_value_goes_uncompared_unsaid(tmp_path: Path) -> None:
    codes = {side: torch.quantize_per_tensor(torch.full((3, 4), side), 0.1, 0, torch.qint8) for side in (1.0, 2.0)}
    a, b = (save(tmp_path / f"q{side}.pt", {"n": [codes[side]], "w": torch.ones(2)}) for side in codes)
    assert [row.key_b for row in wb.diff(a, b).changed_rows] == ["n.0.int_repr"]
    a, b = (save(tmp_path / f"s{side}.pt", {"s": torch.full((3,), side).storage()}) for side in codes)
    found = wb.diff(a, b)  # no tensor: what a storage's bytes mean is not known
    assert found.exit_code == 1 and "no difference" not in repr(found) and list(found.not_checked) == ["object 's'"]
    assert "'s'" in wb.verify(b, deep=True).not_checked["undecoded objects"]
    for side in codes:  # an item of a DCP folder is decoded whole, with the tensors of any object in it
        value = argparse.Namespace(t=torch.full((3,), side), q=codes[side])
        dcp.save({"o": value, "w": torch.ones(2)}, checkpoint_id=tmp_path / f"d{side}", no_dist=True)
    found = wb.diff(tmp_path / "d1.0", tmp_path / "d2.0")
    assert [(change.path, change.text) for change in found.objects] == [
        ("o.t", "float32[3] differs in 3 of 3 elements"),
        ("o.q.args[0]", "differs in 12 of 12 bytes"),
    ]


def test_a_cut_pickle_of_a_legacy_file_is_placed_in_the_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "x.pt").read_bytes()
    for cut in (14, 40, 200):
        (tmp_path / "x.pt").write_bytes(whole[:cut])
        with pytest.raises(wb.errors.TruncatedError) as told:
            wb.open(tmp_path / "x.pt")
        start = re.search(r"counted from byte (\d+)", str(told.value))
        end = re.search(r"ends at byte (\d+)", str(told.value))
        assert end is not None and (int(start[1]) if start else 0) + int(end[1]) == cut


def test_a_file_of_nothing_and_one_of_something_else(tmp_path: Path) -> None:
    for data, words in ((b"", "is empty"), (b"some text", "known format; `workbench formats` shows")):
        (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(wb.errors.NotACheckpointError, match=words):
            wb.open(tmp_path / "x.pt")
