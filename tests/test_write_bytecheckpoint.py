"""ByteCheckpoint of ours: opened again, and its pickles against torch's and the package's own."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests import bytecheckpoint_files as package
from tests.reader_suite import check_catalog, raw
from tests.writing import everything, write
from workbench import errors
from workbench.core.mesh.mesh import Mesh
from workbench.export.selection import choose
from workbench.export.writers.bytecheckpoint import _metadata, bytecheckpoint_files
from workbench.export.writers.bytecheckpoint_names import named, param_groups, stored_names
from workbench.export.writers.dcp_items import Blob, Chunk
from workbench.formats.bytecheckpoint import metadata as bytecheckpoint_metadata

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
FLAT = SAMPLES / "bytecheckpoint_fsdp1_flat" / "global_step_3"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run of flat FSDP1 parameters, and a DCP, as parts of 4 and 3 ranks."""
    out = tmp_path_factory.mktemp("bytecheckpoint")
    for source, ranks in ((FLAT, 4), (SAMPLES / "dcp_fsdp2", 3)):
        with wb.open(source) as ckpt:
            selection = everything(ckpt, Mesh(fsdp=ranks))
            write(selection, bytecheckpoint_files(selection), out / source.name / "global_step_3")
    return out


def test_an_export_of_its_own_format_opens_as_its_source_did(exported):
    truth = load_file(SAMPLES.parent / "tests/truth" / "bytecheckpoint_fsdp1_flat.safetensors")
    with wb.open(FLAT) as ckpt, wb.open(exported / "global_step_3" / "global_step_3") as again:
        assert again.format == "bytecheckpoint" and again.step == 3 and set(again) == set(ckpt)
        assert again.catalog.meta["notes"] == []
        check_catalog(again.catalog)
        for key, fqn, role in zip(ckpt, ckpt.fqns, ckpt.roles, strict=True):
            assert (again.fqns[again.catalog.index[key]], again.roles[again.catalog.index[key]]) == (fqn, role)
            assert raw(again[key].torch()) == raw(ckpt[key].torch()), key
            if role not in ("other", "step"):
                assert raw(again[key].torch()) == raw(truth[f"{role}.{fqn}"]), key
        assert wb.verify(again, deep=True).findings.empty
        names = [name for name in ckpt.objects if name != "save_log"]
        assert list(again.objects) == names
        assert all(str(again.objects[name]) == str(ckpt.objects[name]) for name in names)


def test_other_formats_get_its_names(exported):
    truth = load_file(SAMPLES.parent / "tests/truth" / "dcp_fsdp2.safetensors")
    with wb.open(exported / "dcp_fsdp2" / "global_step_3") as again:
        for key, want in truth.items():
            _, _, name = key.partition("optim.state.") if key.startswith("optim.") else key.partition("model.")
            ours = f"optimizer.state.{name}" if key.startswith("optim.") else f"model.{name}"
            assert raw(again[ours].torch()) == raw(want), key
        assert again.param("model.norm.weight", role="exp_avg").shape == (64,)
        groups = again.objects["optimizer.param_groups"]
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.001, 0.1), (0.001, 0.0)]
        assert again.objects["extra_state_rank_2"]["train_state.step"] == 3
    files = {os.fspath(one.relative_to(exported / "dcp_fsdp2")) for one in (exported / "dcp_fsdp2").rglob("*.*")}
    assert {name for name in files if name.endswith("_1_0.distcp")} == {
        f"global_step_3/{part}/__1_0.distcp" for part in ("model", "optimizer")
    }


def test_its_metadata_is_what_the_packages_own_classes_hold(exported):
    """Read by pickle itself; each inner pickle is the one that torch makes of such a tensor."""
    for part in ("model", "optimizer"):
        folder = exported / "dcp_fsdp2" / "global_step_3" / part
        meta = package.read(folder)
        assert isinstance(meta, package.Metadata) and (meta.bytecheckpoint_version, meta.user_defined_dict) == (
            "0.0.2",
            {},
        )
        assert list(meta.storage_data) == list(meta.all_tensor_metadata)
        with wb.open(folder) as ckpt:
            for index, place in meta.storage_data.items():
                data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
                layout = meta.all_tensor_metadata[index]
                if layout is None:
                    assert torch.load(io.BytesIO(data), weights_only=True)[0]["lr"] == 0.001
                    continue
                tensor = meta.state_dict_metadata[index.fqn]
                chunk = tensor.chunks[index.index]
                assert index.offset == chunk.offsets
                assert layout == package.inner(torch.empty(chunk.sizes, dtype=tensor.properties.dtype))
                low = [slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
                assert data == raw(ckpt[index.fqn].torch()[tuple(low)])
        planner = meta.planner_data
        assert set(planner) == set(meta.state_dict_metadata)
        if part == "optimizer":
            key = "state.model.norm.weight.exp_avg"
            assert planner[key] == ("state", "model.norm.weight", "exp_avg")
            assert planner["param_groups"] == ("param_groups",)


@pytest.mark.skipif(OUTSIDE is None, reason="WORKBENCH_SAMPLES names no folder of samples")
def test_a_real_save_on_the_same_ranks_has_the_same_metadata(tmp_path):
    """But for the places in the files, and which rank writes a replicated step."""
    source = Path(OUTSIDE or "") / "bytecheckpoint" / "fsdp2_w4" / "global_step_3"
    with wb.open(source) as ckpt:
        selection = everything(ckpt, Mesh(fsdp=4))
        write(selection, bytecheckpoint_files(selection), tmp_path)
    for part in ("model", "optimizer"):
        shutil.copytree(source / part, tmp_path / "theirs" / part)
        ours, theirs = package.read(tmp_path / part), package.read(tmp_path / "theirs" / part)
        assert ours.state_dict_metadata == theirs.state_dict_metadata
        assert ours.planner_data == theirs.planner_data
        assert ours.all_tensor_metadata == theirs.all_tensor_metadata
        assert set(ours.storage_data) == set(theirs.storage_data)
        for key, one in theirs.storage_data.items():
            assert key.fqn == "param_groups" or ours.storage_data[key].length == one.length
            assert key.fqn.endswith(".step") or ours.storage_data[key].relative_path == one.relative_path
    for rank in range(4):
        name = f"extra_state/extra_state_rank_{rank}.pt"
        assert _decoded(tmp_path / name) == _decoded(source / name)


def _decoded(path: Path) -> str:
    return str(torch.load(path, weights_only=False))


@pytest.mark.parametrize("name", ["dcp_fsdp2", "trainer_run/checkpoint-6", "paddle_dist", "torch_save/ckpt.pt"])
def test_names_are_those_that_the_reader_shows(name, tmp_path):
    with wb.open(SAMPLES / name) as ckpt:
        selection = everything(ckpt)
        write(selection, bytecheckpoint_files(selection), tmp_path)
        with wb.open(tmp_path) as again:
            names = stored_names(selection)
            assert set(names) == set(again)
            for mine, position in zip(names, selection.tensors.tolist(), strict=True):
                assert raw(again[mine].torch()) == raw(ckpt[ckpt.catalog.keys[position]].torch()), mine


def test_a_renamed_tensor_keeps_its_name(tmp_path):
    with wb.open(SAMPLES / "dcp_fsdp2") as ckpt:
        renamed = {"model.model.norm.weight": "my.norm", "optim.state.model.norm.weight.exp_avg": "my.norm.exp_avg"}
        places = {one.key: one for one in named(choose(ckpt, role=None, rename=renamed))}
    assert (places["my.norm"].part, places["my.norm.exp_avg"].part) == ("model", "optimizer")
    assert places["state.model.norm.weight.exp_avg_sq"].path == ("state", "model.norm.weight", "exp_avg_sq")


def test_groups_of_the_first_optimizer_are_found_however_flat():
    flat = {"optim.param_groups.0.lr": 1, "optim.param_groups.1.lr": 2, "epoch": 3}
    assert param_groups(flat) == ([{"lr": 1}, {"lr": 2}], {"epoch": 3})
    nested = {"optimizer": {"param_groups": [{"lr": 1, "betas": (1, 2)}]}, "optimizer2": {"param_groups": [{"lr": 4}]}}
    assert param_groups(nested) == ([{"lr": 1, "betas": (1, 2)}], {"optimizer2": nested["optimizer2"]})
    assert param_groups({"optimizer": {"param_groups": [{"lr": 1}], "more": 2}})[0] is None


def test_a_model_alone_is_one_part(tmp_path):
    with wb.open(SAMPLES / "hf_deepseek_fp8_block") as ckpt:
        selection = dataclasses.replace(everything(ckpt, Mesh(tp=2)), objects={})
        write(selection, bytecheckpoint_files(selection), tmp_path)
        assert {one.name for one in tmp_path.iterdir()} == {"model"}
        with wb.open(tmp_path) as again:
            assert {key.removeprefix("model."): raw(again[key].torch()) for key in again} == {
                key: raw(ckpt[key].torch()) for key in ckpt
            }


def test_two_names_that_become_one_are_refused():
    with wb.open(SAMPLES / "dcp_fsdp2") as ckpt:
        selection = choose(ckpt, select="norm.weight$", rename=lambda key: "same")
        with pytest.raises(errors.UsageError, match="'same'"):
            bytecheckpoint_files(selection)


def test_huge_metadata_is_read_as_columns():
    chunks = [
        Chunk(f"layers.{t}.mlp.up_proj.weight", 0, (6400, 64), (16 * r, 0), (16, 64), f"__{r}_0.distcp", t * 4096, 4096)
        for r in range(400)
        for t in range(50)
    ]
    data = _metadata(chunks, [Blob("param_groups", "__0_0.distcp", 9, 100)], {}, [])
    found = bytecheckpoint_metadata._in_pieces(data, "x")
    assert found is not None and len(found.dcp.item) == 20_000 and found.version == "0.0.2"
    with package.package():
        meta = pickle.loads(data)
    assert len(meta.storage_data) == 20_001
