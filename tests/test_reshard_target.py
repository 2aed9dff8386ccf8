"""Plans of whole targets: what every rank is given is what slicing the dense tensor gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import chunkings, examples, shapes
from tests.resharding import assembled
from tests.test_reshard_placement import split_by_torch, torch_placements
from workbench import open as open_checkpoint
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import by_name
from workbench.core.mesh.layout import TensorLayout
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, Shard, of_torch
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.errors import HoleError, TensorNotFoundError, UsageError
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.export.sharding.target import Target


def stored(folder, tensors, chunked, skip=()):
    """A catalog of dense tensors, each chunk in a file of its own choice."""
    builder = CatalogBuilder("test", Place(folder))
    blobs = [b"\xff", b""]
    for position, (key, dense) in enumerate(tensors.items()):
        builder.tensor(key, by_name("int32"), dense.shape)
        for number, (low, size) in enumerate(chunked[key]):
            piece = dense[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))].tobytes()
            file = (position + number) % 2
            if (key, number) not in skip:
                start = len(blobs[file])
                builder.chunk(key, low, size, f"{file}.bin", start, start + len(piece))
            blobs[file] += piece
    for file, blob in enumerate(blobs):
        (folder / f"{file}.bin").write_bytes(blob)
        builder.file(f"{file}.bin")
    catalog = builder.build()
    catalog.check()
    return Payloads(catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, "mmap"))


@examples(200)
@given(st.data())
def test_any_target_of_any_chunking_is_the_slice_of_the_dense_tensor(tmp_path_factory, data):
    wholes = data.draw(st.lists(shapes(max_dims=3, max_side=6), min_size=1, max_size=3))
    tensors = {f"t{k}": np.arange(int(np.prod(s)), dtype=np.int32).reshape(s) for k, s in enumerate(wholes)}
    chunked = {
        key: data.draw(chunkings(dense.shape)) if dense.size else [((0,) * dense.ndim, dense.shape)]
        for key, dense in tensors.items()
    }
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=3))
    mesh = Mesh(**{f"a{k}": n for k, n in enumerate(sizes)})
    payloads = stored(tmp_path_factory.mktemp("case"), tensors, chunked)
    placements = {key: data.draw(torch_placements(dense.ndim, len(sizes))) for key, dense in tensors.items()}
    flat = {key: bool(sizes) and data.draw(st.booleans()) for key in tensors}
    layouts = []
    for key in tensors:
        ours = [of_torch(placement) for placement in placements[key]]
        if flat[key]:
            ours[-1] = Flat()
        layouts.append(TensorLayout(tuple(zip(mesh.axes, ours, strict=True)), "drawn"))
    target = Target(payloads.catalog, mesh, layouts, [])
    ranks = data.draw(st.none() | st.lists(st.integers(0, mesh.world_size - 1)))
    got = assembled(payloads, target.plan(ranks=ranks))
    mine = sorted(set(range(mesh.world_size) if ranks is None else ranks))
    assert list(got) == [(t, rank) for t in range(len(tensors)) for rank in mine]
    for (t, rank), value in got.items():
        key = f"t{t}"
        coordinate = mesh.coordinates([rank])[0].tolist()
        cuts = list(zip(placements[key], sizes, coordinate, strict=True))
        want = torch.from_numpy(tensors[key])
        if flat[key]:
            *cuts, (_, count, at) = cuts
        want = split_by_torch(want, *zip(*cuts, strict=True)) if cuts else want
        if flat[key]:
            each = -(-want.numel() // count)
            want = want.reshape(-1)[each * at : each * (at + 1)]
        assert value.shape == tuple(want.shape) and (value == want.numpy()).all(), (key, rank)


def grid(shape, rows):
    return [((at, 0), (min(rows, shape[0] - at), shape[1])) for at in range(0, shape[0], rows)]


def test_a_hole_is_found_by_the_plan_of_whoever_wants_it(tmp_path):
    dense = np.arange(48, dtype=np.int32).reshape(12, 4)
    payloads = stored(tmp_path, {"w": dense}, {"w": grid(dense.shape, 4)}, skip={("w", 1)})
    target = Target.of(payloads.catalog, Mesh(fsdp=3))
    for rank in (0, 2):
        assert len(target.plan(ranks=[rank]).reads) == 1
    for ranks in (None, [1]):
        with pytest.raises(HoleError, match=r"'w' \(12, 4\) has a hole: \[4:8, 0:4\]"):
            target.plan(ranks=ranks)


def test_a_plan_reads_another_checkpoint_of_the_same_tensors(tmp_path):
    """A target made of one layout reads any other: other chunks, other order of keys, more axes beside."""
    w, b = np.arange(24, dtype=np.int32).reshape(6, 4), np.arange(6, dtype=np.int32)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    small = stored(tmp_path / "a", {"b": b}, {"b": [((0,), (6,))]})
    large = stored(tmp_path / "b", {"w": w, "b": b}, {"w": grid(w.shape, 2), "b": [((4,), (2,)), ((0,), (4,))]})
    target = Target.of(small.catalog, Mesh(fsdp=4))
    for payloads in (small, large):
        got = assembled(payloads, target.plan(payloads.catalog))
        assert [got[0, rank].tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], []]
    wide = Target.of(large.catalog, Mesh(fsdp=2))
    with pytest.raises(TensorNotFoundError, match="'w' of the target"):
        wide.plan(small.catalog)
    narrow = Target(large.catalog.take(np.array([1])), Mesh(), [TensorLayout((), "")], [])
    assert assembled(small, narrow.plan(small.catalog))[0, 0].tolist() == b.tolist()
    (tmp_path / "c").mkdir()
    other = stored(tmp_path / "c", {"b": b[:5]}, {"b": [((0,), (5,))]})
    with pytest.raises(UsageError, match=r"\(5,\) in the checkpoint and \(6,\)"):
        target.plan(other.catalog)


def test_a_placement_that_does_not_fit_names_its_tensor(tmp_path):
    payloads = stored(tmp_path, {"b": np.arange(6, dtype=np.int32)}, {"b": [((0,), (6,))]})
    target = Target.of(payloads.catalog, Mesh(tp=2), Rules((PlacementRule("b", {"tp": Shard(1)}),)))
    with pytest.raises(UsageError, match="tensor 'b': Shard"):
        target.plan()


@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=4", "dp=2,fsdp=3", "dp_replicate=2,dp_shard=2,tp=2"])
@pytest.mark.parametrize("sample", ["dcp_tp2_fsdp2_vocab515", "megatron_dp_reshardable", "hf_deepseek_fp8_block"])
def test_samples_on_meshes_hold_every_element(sample, mesh):
    """Ranks that cut a tensor hold all of it between them: laid side by side they are the tensor that is read whole."""
    ckpt = open_checkpoint(f"sample_ckpts/{sample}").select("weight|bias", role="param")
    target = Target.of(ckpt, Mesh.parse(mesh))
    planned = target.plan()
    got = assembled(ckpt.payloads, planned)
    for tensor, key in enumerate(ckpt):
        whole = ckpt.catalog.numel[tensor]
        raw = ckpt.payloads.catalog.dtype_of(tensor).raw
        want = ckpt[key].torch().contiguous().view(torch.uint8).numpy().reshape(-1).view(raw)
        firsts = (planned.locals.tensor == tensor) & (planned.locals.copy == 0)
        ranks = planned.locals.rank[firsts].tolist()
        assert sum(got[tensor, rank].size for rank in ranks) == whole
        values = np.concatenate([got[tensor, rank].ravel() for rank in ranks])
        assert (np.sort(values) == np.sort(want)).all()


def test_what_a_plan_would_do_is_told_before_it_does_it():
    ckpt = open_checkpoint("sample_ckpts/hf_llama_bf16_sharded")
    told = Target.of(ckpt, Mesh(dp=2, tp=2)).explain()
    stored_bytes = sum(t.nbytes for t in ckpt.values())
    assert (
        told.unique_nbytes
        == told.ranks["nbytes"][:2].sum() - sum(t.nbytes for k, t in ckpt.items() if "norm" in k)
        == stored_bytes
    )
    assert told.nbytes == told.ranks["nbytes"].sum() == told.tensors["nbytes"].sum() == told.files["nbytes"].sum()
    assert told.ranks["copies"].sum() == told.copies == told.files["copies"].sum()
    row = told.tensors.set_index("key").loc["model.layers.0.self_attn.q_proj.weight"]
    assert (row["placements"], row["why"], row["ranks"], row["times"]) == ("tp Shard(0)", "column", 4, 2)
    assert row["largest"] == (32, 64) and list(told.ranks.columns[:3]) == ["rank", "dp", "tp"]
    assert f"{stored_bytes:,} unique" in str(told)


def test_an_empty_selection_is_an_empty_plan():
    ckpt = open_checkpoint("sample_ckpts/hf_llama_bf16_sharded").select("no such tensor")
    planned = Target.of(ckpt, Mesh(tp=2)).plan()
    assert len(planned.locals) == len(planned.reads) == 0
    assert Target.of(ckpt, Mesh(tp=2)).explain().copies == 0
