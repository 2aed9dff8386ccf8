"""DCP of ours: torch's own bytes, loaded by torch alone into plain tensors, DTensors and modules."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import workbench as wb
from tests.megatron_files import Model, write_dist
from tests.reader_suite import check_reader, raw
from tests.writing import everything, write
from workbench import errors
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import ALL, by_name
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat
from workbench.core.place import Place
from workbench.export.selection import ExportSelection
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.export.sharding.target import Target
from workbench.export.writers.dcp import dcp_files
from workbench.export.writers.dcp_items import lay_out
from workbench.export.writers.dcp_metadata import metadata
from workbench.export.writers.flatten import flatten
from workbench.export.writers.tensor_archive import TensorArchive
from workbench.formats.dcp import lanes as dcp_lanes

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "sample_ckpts"
SHAPES = [(), (0,), (3,), (2, 0, 4), (5, 7), (1, 1, 2, 3), (300, 300), (1, 2, 3, 4, 5), (70_000,)]
MESHES = {
    "dcp_fsdp2": Mesh(fsdp=3),
    "dcp_hsdp_2x2": Mesh(dp_replicate=2, tp=2),
    "dcp_tp2_fsdp2_vocab515": Mesh(tp=2, fsdp=4),
    "dcp_single_odd": None,
}


def types() -> list:
    return [one for one in ALL if one.torch_name is not None and hasattr(torch, one.torch_name)]


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def loaded(folder: Path) -> dict[str, object]:
    """Everything in a folder, by torch, in one process, into memory that held something else."""
    state: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental; no process group
        for key, one in metadata_of(folder).state_dict_metadata.items():
            blob = isinstance(one, BytesStorageMetadata)
            state[key] = None if blob else torch.empty(one.size, dtype=one.properties.dtype)
        for one in state.values():
            if isinstance(one, torch.Tensor) and one.numel():
                one.reshape(-1).view(torch.uint8).fill_(0x55)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


# ---- the archive of one chunk ----


@pytest.mark.parametrize("dtype", types(), ids=str)
def test_an_archive_is_what_torch_writes_byte_for_byte(dtype):
    rng = np.random.default_rng(3)
    for shape in SHAPES:
        count = int(np.prod(shape))
        payload = rng.integers(0, 2, count * dtype.itemsize, dtype=np.uint8)
        out = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex32 is experimental
            tensor = torch.from_numpy(payload).view(dtype.torch) if count else torch.empty(0, dtype=dtype.torch)
            torch.save(tensor.reshape(shape), out)
        archive = TensorArchive.of(dtype, shape)
        ours = archive.head + payload.tobytes() + archive.tail(zlib.crc32(payload))
        assert ours == out.getvalue() and len(ours) == archive.size, shape


@pytest.mark.parametrize("name", ["float6_e2m3fn", "qint8"])
def test_types_that_torch_cannot_load_are_refused(name):
    with pytest.raises(errors.UnsupportedFormatError, match=name):
        TensorArchive.of(by_name(name), (3,))


# ---- whole checkpoints ----


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Each sample on a mesh of its own, and its truth beside it."""
    out = tmp_path_factory.mktemp("dcp")
    for name, mesh in MESHES.items():
        with wb.open(SAMPLES / name) as ckpt:
            selection = everything(ckpt, mesh)
            write(selection, dcp_files(selection), out / name)
        shutil.copy(SAMPLES.parent / "tests/truth" / f"{name}.safetensors", out)
    return out


@pytest.mark.parametrize("name", MESHES)
def test_an_export_opens_as_its_source_did(exported, name):
    again, source = (
        check_reader(exported / name, load_file(exported / f"{name}.safetensors"), rest=True),
        SAMPLES / name,
    )
    with wb.open(source) as ckpt:
        assert again.format == "dcp" and list(again) == list(ckpt)
        assert (again.fqns, again.roles) == (ckpt.fqns, ckpt.roles)
        assert list(again.objects) == list(ckpt.objects)
        assert {key: again.objects[key] for key in again.objects} == {key: ckpt.objects[key] for key in ckpt.objects}
        assert all(raw(again[key].torch()) == raw(ckpt[key].torch()) for key in ckpt)
    assert wb.verify(again, deep=True).findings.empty
    mesh = MESHES[name]
    ranks = range(mesh.world_size if mesh else 1)
    assert sorted(one.name for one in (exported / name).iterdir()) == [".metadata", *(f"__{r}_0.distcp" for r in ranks)]


@pytest.mark.parametrize("name", MESHES)
def test_torch_loads_plain_tensors_and_objects(exported, name):
    got = loaded(exported / name)
    truth = load_file(exported / f"{name}.safetensors")
    with wb.open(SAMPLES / name) as ckpt:
        assert {key: value for key, value in got.items() if not isinstance(value, torch.Tensor)} == {
            key: ckpt.objects[key] for key in ckpt.objects
        }
    for key, want in truth.items():
        value = got[key]
        assert isinstance(value, torch.Tensor) and (value.dtype, value.shape) == (want.dtype, want.shape)
        assert raw(value) == raw(want), key


def test_torch_loads_dtensors_and_a_sharded_module_on_four_ranks(exported):
    made = subprocess.run(
        [sys.executable, "-m", "tests.write_dcp_worker", str(exported)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr[-3000:]


def test_torch_makes_its_nested_state_dict_of_it(exported, tmp_path):
    """``dcp_to_torch_save`` nests by ``planner_data``: the model under ``model``, AdamW as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(exported / "dcp_fsdp2", tmp_path / "ours.pt")
        dcp_to_torch_save(SAMPLES / "dcp_fsdp2", tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "theirs.pt"))
    assert list(ours["model"]) == list(theirs["model"])
    assert ours["optim"]["param_groups"] == theirs["optim"]["param_groups"]
    assert {key: list(one) for key, one in ours["optim"]["state"].items()} == {
        key: list(one) for key, one in theirs["optim"]["state"].items()
    }
    for name, value in theirs["model"].items():
        assert raw(ours["model"][name]) == raw(value)


def test_metadata_is_numbered_as_torch_does(exported):
    """Equal to torch's own on the same layout, but for places, folder and save."""
    with wb.open(SAMPLES / "dcp_fsdp2") as ckpt:
        selection = everything(ckpt, Mesh(fsdp=4), select=r"^model\.")
        maps = dcp_files(dataclasses.replace(selection, objects={}))
    ours, theirs = pickle.loads(maps[-1].literals[0][1]), metadata_of(SAMPLES / "dcp_fsdp2")
    keys = set(ours.state_dict_metadata)
    assert ours.version == theirs.version
    assert ours.planner_data == {key: path for key, path in theirs.planner_data.items() if key in keys}
    assert ours.state_dict_metadata == {k: one for k, one in theirs.state_dict_metadata.items() if k in keys}
    assert _indices(ours.storage_data, keys) == _indices(theirs.storage_data, keys)


def _indices(data: dict[MetadataIndex, object], keys: set[str]) -> set[tuple[object, ...]]:
    """With their numbers, and the writer's rank; sizes of the items are torch's."""
    return {
        (key.fqn, key.offset, key.index, place.relative_path, place.length)
        for key, place in data.items()
        if key.fqn in keys
    }


# ---- every type, and edges ----


@pytest.fixture(scope="module")
def every_type(tmp_path_factory):
    folder = tmp_path_factory.mktemp("every")
    builder, blob, truth = CatalogBuilder("test", Place(folder)), b"", {}
    rng = np.random.default_rng(9)
    for dtype in types():
        for number, shape in enumerate(SHAPES[:6]):
            count = int(np.prod(shape))
            name = f'z/{number} "é.\n{dtype.name}'
            data = rng.integers(0, 2 if dtype.name == "bool" else 256, count * dtype.itemsize, np.uint8).tobytes()
            builder.tensor(name, dtype, shape)
            builder.chunk(name, (0,) * len(shape), shape, "data", len(blob), len(blob) + len(data))
            blob += data
            truth[name] = (dtype, shape, data)
    (folder / "data").write_bytes(blob)
    builder.file("data")
    return folder, builder.build(), truth


class Opened:
    """What a writer asks of a checkpoint, of a catalog that no reader made."""

    def __init__(self, folder: Path, catalog: object) -> None:
        from workbench.core.payload import Payloads
        from workbench.core.storage import SourcePool

        self.path, self.catalog, self.fqns = str(folder), catalog, [None] * len(catalog)
        self.payloads = Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, "mmap"))


def selected(
    folder: Path, catalog: object, mesh: Mesh | None = None, rules: Rules | None = None, **rest
) -> ExportSelection:
    target = Target.of(catalog, mesh, rules) if mesh is not None else None
    positions = np.arange(len(catalog))
    return ExportSelection(Opened(folder, catalog), positions, list(catalog.keys), catalog.dtype.copy(), target, **rest)


@pytest.mark.parametrize("mesh", [None, Mesh(fsdp=4)], ids=str)
def test_every_type_and_shape(every_type, mesh, tmp_path):
    folder, catalog, truth = every_type
    selection = selected(folder, catalog, mesh)
    write(selection, dcp_files(selection), tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert list(got) == list(truth)
    for name, (dtype, shape, data) in truth.items():
        value = got[name]
        assert isinstance(value, torch.Tensor)
        assert (value.dtype, tuple(value.shape), raw(value)) == (dtype.torch, shape, data), name


def test_flat_ranges_and_fused_weights_become_boxes(tmp_path):
    rules = Rules((PlacementRule("q_proj", {"fsdp": Flat()}),))
    with wb.open(SAMPLES / "hf_llama_bf16_sharded") as ckpt:
        selection = everything(ckpt, Mesh(fsdp=3, tp=2), rules=rules)
        write(selection, dcp_files(selection), tmp_path / "out")
    truth = load_file(SAMPLES.parent / "tests/truth" / "hf_llama_bf16_sharded.safetensors")
    again = check_reader(tmp_path / "out", truth)
    assert len(again["model.layers.0.self_attn.q_proj.weight"].chunks) > 6
    got = loaded(tmp_path / "out")
    assert all(raw(got[key]) == raw(want) for key, want in truth.items())


def test_names_are_flat_where_nothing_tells_their_nesting(tmp_path):
    with wb.open(SAMPLES / "hf_llama_bf16_sharded") as ckpt:
        files = dcp_files(dataclasses.replace(everything(ckpt), objects={"epoch": 3}))
        told = pickle.loads(files[-1].literals[0][1])
        assert told.planner_data == {key: (key,) for key in [*ckpt, "epoch"]}


def test_objects_are_flattened_as_torch_flattens_them(every_type, tmp_path):
    folder, catalog, _ = every_type
    nested = {
        "train": {"step": 7, "empty": {}, "seen": {"a": [1, 2], "b": (3, {"c": 4})}},
        "optim": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "betas": None}],
        "rng": {"cpu": torch.arange(5, dtype=torch.uint8), "cuda": [torch.ones(2, 3), torch.zeros(())]},
        "words": ["a", ["b"]],
        "raw": b"\0\1",
    }
    selection = selected(folder, catalog, Mesh(fsdp=2), objects=nested)
    write(selection, dcp_files(selection), tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {**nested, "train": {**nested["train"], "empty": "torch drops empty dicts"}},
            checkpoint_id=tmp_path / "theirs",
            no_dist=True,
        )
    ours, theirs = metadata_of(tmp_path / "ours"), metadata_of(tmp_path / "theirs")
    added = set(ours.state_dict_metadata) - set(catalog.keys)
    assert added == set(theirs.state_dict_metadata)
    assert {key: ours.planner_data[key] for key in added} == dict(theirs.planner_data)
    assert all(ours.state_dict_metadata[key] == theirs.state_dict_metadata[key] for key in added)
    got = loaded(tmp_path / "ours")
    assert (got["train.step"], got["train.empty"], got["optim.1.lr"]) == (7, {}, 0.2)
    assert raw(got["rng.cuda.0"]) == raw(torch.ones(2, 3))


def test_arrays_in_objects_may_have_more_axes_than_any_tensor(tmp_path):
    objects = {"np": np.arange(8.0).reshape(2, 2, 2), "seen": [{"t": torch.ones(1, 2, 3, 4)}]}
    torch.save({"w": torch.ones(3), "rng": objects}, tmp_path / "in.pt")
    wb.export(wb.open(tmp_path / "in.pt"), tmp_path / "out", "dcp", role="all", verify=True)
    got = loaded(tmp_path / "out")
    assert raw(got["w"]) == raw(torch.ones(3)) and got["rng.np"].tolist() == objects["np"].tolist()
    assert wb.open(tmp_path / "out")["rng.seen.0.t"].shape == (1, 2, 3, 4)


def test_a_tensor_that_is_in_the_objects_too_is_written_once(tmp_path):
    """Megatron's common step: a tensor, and a part of the common state, in common.pt or (since 0.19) an item."""
    source = write_dist(tmp_path / "in", Model(), optimizer="float16", common="object")
    ckpt = wb.open(source)
    assert wb.export(ckpt, tmp_path / "out", "dcp", role=None, verify=True).identical
    again = wb.open(tmp_path / "out")
    assert set(ckpt) <= set(again) and again["optimizer.optimizer.state.common_step"].torch() == 10.0
    assert again.objects["iteration"] == 10


def test_names_must_differ(every_type):
    folder, catalog, _ = every_type
    name = catalog.keys[0]
    with pytest.raises(errors.UsageError, match="two entries would be named"):
        dcp_files(selected(folder, catalog, objects={name: 1}))
    with pytest.raises(errors.UsageError, match=r"'a\.b'"):
        dcp_files(selected(folder, catalog, objects={"a.b": 1, "a": {"b": 2}}))


def test_a_type_that_torch_lacks_names_the_tensor(tmp_path):
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "data").write_bytes(bytes(8))
    builder.tensor("packed", by_name("float4_e2m1fn"), (4, 4))
    builder.chunk("packed", (0, 0), (4, 4), "data", 0, 8)
    builder.file("data")
    with pytest.raises(errors.UnsupportedFormatError, match="'packed'"):
        dcp_files(selected(tmp_path, builder.build()))


def test_the_same_export_is_the_same_bytes(every_type):
    folder, catalog, _ = every_type
    first, second = (dcp_files(selected(folder, catalog, Mesh(fsdp=2), objects={"step": 3})) for _ in range(2))
    assert [(one.name, one.size, one.literals) for one in first] == [(b.name, b.size, b.literals) for b in second]


def test_many_chunks_are_laid_out_and_read_again_as_columns(tmp_path):
    """20,000 chunks: as CPython pickles torch's objects, so that our reader decodes it as columns."""
    builder = CatalogBuilder("test", Place(tmp_path))
    (tmp_path / "data").write_bytes(b"")
    for number in range(500):
        builder.tensor(f"layers.{number}.weight", by_name("bfloat16"), (400, 8))
        builder.chunk(f"layers.{number}.weight", (0, 0), (400, 8), "data", 0, 6400)
    builder.file("data")
    selection = selected(tmp_path, builder.build(), Mesh(fsdp=40))
    items = lay_out(selection, flatten({}))
    assert len(items.chunks) == 20_000
    data = metadata(items.chunks, items.blobs, None, selection.names)
    meta = pickle.loads(data)
    assert len(meta.storage_data) == 20_000
    assert [len(one.chunks) for one in meta.state_dict_metadata.values()] == [40] * 500
    columns = dcp_lanes.decode(data, what="x")
    assert columns is not None and columns.keys == selection.names and len(columns.start) == 20_000
    assert len(pickle.dumps(meta, 4)) - len(data) < 0.01 * len(data)
