"""ByteCheckpoint: real saves equal their truth, layouts that no sample has, and what can be wrong with one."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import workbench as wb
from tests import bytecheckpoint_files as files
from tests.reader_suite import check_catalog, check_frames, check_objects, check_slices, raw, refused, same_bits
from workbench import errors
from workbench.formats.bytecheckpoint import flat, log, metadata

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "sample_ckpts" / "bytecheckpoint_fsdp1_flat"
OUTSIDE = os.environ.get("WORKBENCH_SAMPLES")
STEP = "global_step_3"
REFERENCE = "layers.1.self_attn.k_proj.weight"


def meanings(truth):
    """Truth keys are role and parameter: ``exp_avg.layers.0.wq.weight``."""
    return {tuple(key.split(".", 1)): tensor for key, tensor in truth.items()}


def check_sample(folder: Path, truth: dict[str, torch.Tensor]) -> wb.Checkpoint:
    """The shared suite for a checkpoint whose truth is by meaning: bits, slices, names, coverage."""
    ckpt = wb.open(folder, cache=False)
    assert ckpt.format == "bytecheckpoint" and not [n for n in ckpt.notes if not n.startswith("opened")]
    by_key = {}
    for (role, fqn), want in meanings(truth).items():
        tensor = ckpt.param(fqn, role=role)
        assert tensor.fqn == fqn and tensor.role == role and tensor.key not in by_key
        same_bits(tensor.torch(), want, tensor.key)
        assert tensor.numpy().tobytes() == raw(want)
        by_key[tensor.key] = want
    named = set(meanings(truth))
    for key, fqn, role in zip(ckpt, ckpt.fqns, ckpt.roles, strict=True):
        # what has no truth: steps (some samples), and FSDP1's counts of elements, which belong to no parameter
        assert (role, fqn) in named or role == "step" or key.endswith("_requires_grad_numel"), key
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    check_slices(ckpt, by_key)
    same_bits(
        wb.open(folder, io="pread", cache=False)[next(iter(by_key))].torch(), next(iter(by_key.values())), "pread"
    )
    return ckpt


@pytest.fixture
def copy(tmp_path):
    """A fresh copy of the sample's run, to be damaged."""
    return Path(shutil.copytree(HERE, tmp_path / "run"))


# ---- real saves ----------------------------------------------------------------------------------------------------


def test_the_sample_equals_its_truth():
    ckpt = check_sample(HERE, load_file(ROOT / "tests/truth/bytecheckpoint_fsdp1_flat.safetensors"))
    assert ckpt.step == 3 and ckpt.world_size is None
    assert ckpt.catalog.meta["bytecheckpoint_version"] == "0.0.2"
    assert ckpt.notes == ["opened 'global_step_3': the tracker 'latest_checkpointed_iteration.txt' names it"]
    assert ckpt.mesh["writers"] == 4 and ckpt.mesh["axes"] == {} and "tp" in ckpt.mesh["unknown"]


@pytest.mark.parametrize("name", ["ddp_w4", "fsdp2_w4", "fsdp1_w4_flat"])
@pytest.mark.skipif(OUTSIDE is None, reason="WORKBENCH_SAMPLES is not set")
def test_outside_samples_equal_their_truth(name):
    folder = Path(OUTSIDE) / "bytecheckpoint" / name
    ckpt = check_sample(folder / STEP, load_file(folder / "truth.safetensors"))
    assert ckpt.step == 3 and ckpt.roles.count("step") == 39
    assert {row["rank"] for row in ckpt.objects["save_log"]["durations"]} == {0}
    extra = [ckpt.objects[f"extra_state_rank_{rank}"] for rank in range(4)]
    assert [state["global_step"] for state in extra] == [3] * 4
    assert all(isinstance(state["torch_rng_state"], torch.Tensor) for state in extra)
    groups = ckpt.objects["optimizer.param_groups"]
    assert [len(group["params"]) for group in groups] == [30, 9]


def test_flat_tensors_stay_reachable_as_views_and_are_not_listed():
    ckpt = wb.open(HERE / STEP)
    assert not [key for key in ckpt if key.endswith("_flat_param")]
    view = ckpt["model.layers.0._flat_param"]
    assert view.shape == (49536,) and view.fqn is None and len(ckpt.views) == 15
    norm = ckpt["model.layers.0.input_layernorm.weight"].torch()
    same_bits(view[:64], norm, "the first parameter of the flat tensor")
    assert ckpt.catalog.meta["flat_parameters"][-1] == {
        "key": "_flat_param",
        "numel": 65600,
        "padding": 0,
        "parameters": 3,
    }


def test_a_parameters_boxes_come_from_the_ranks_that_flat_ranges_give_them():
    chunks = wb.open(HERE / STEP)["model.layers.0.self_attn.v_proj.weight"].chunks
    # the flat tensor has 49,536 elements, a quarter a rank; v_proj lies at 8,256 to 12,352
    assert chunks["rank"].tolist() == [0]
    down = wb.open(HERE / STEP)["model.layers.0.mlp.gate_proj.weight"].chunks  # at 16,512 to 27,520: ranks 1 and 2
    assert sorted(set(down["rank"])) == [1, 2]


def test_a_part_opens_alone():
    model = wb.open(HERE / STEP / "model", cache=False)
    assert model.format == "bytecheckpoint" and len(model) == 39 and model.param(REFERENCE).key == REFERENCE
    optimizer = wb.open(HERE / STEP / "optimizer", cache=False)
    assert "state.layers.0._flat_param.exp_avg" in optimizer
    assert any("their parameters are listed only in the model part's metadata" in note for note in optimizer.notes)
    assert optimizer.param(REFERENCE, role="step").torch().item() == 3.0


def test_discovery_lists_steps_not_their_parts(copy):
    found = wb.discover(copy)
    assert found["path"].tolist() == [STEP] and found["format"].tolist() == ["bytecheckpoint"]
    assert found["complete"].tolist() == [True] and found["step"].tolist() == [3]


def test_extra_state_that_a_save_in_the_background_did_not_come_to(copy):
    gone = copy / STEP / "extra_state" / "extra_state_rank_2.pt"
    gone.unlink()
    assert "the extra state of 1 of 4 ranks is missing, first of rank 2" in wb.discover(copy)["why"].tolist()
    said = [one.message for one in wb.verify(copy / STEP) if one.severity == "error"]
    assert "the extra state of 1 of 4 ranks is missing, first of rank 2" in said


def test_the_written_inner_pickles_are_the_packages_own():
    """`files.inner` stands for the package in the tests below; here it is held against real bytes."""
    found = files.read(HERE / STEP / "model")
    index = next(iter(found.all_tensor_metadata))
    assert found.all_tensor_metadata[index] == files.inner(torch.empty(12384))
    step = next(
        i for i in files.read(HERE / STEP / "optimizer").all_tensor_metadata if i.fqn.endswith("norm.weight.step")
    )
    assert files.read(HERE / STEP / "optimizer").all_tensor_metadata[step] == files.inner(torch.tensor(3.0))


# ---- layouts without a sample --------------------------------------------------------------------------------------


def rows(name, tensor, ranks):
    """A tensor as row shards."""
    at, out = 0, []
    for rank, piece in enumerate(tensor.chunk(ranks)):
        out.append(((at, *[0] * (tensor.dim() - 1)), piece.clone(), rank))
        at += len(piece)
    return {name: out}


def test_dtypes_strides_scalars_and_empty_tensors(tmp_path):
    torch.manual_seed(0)
    strided = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    offset = torch.arange(40.0)[8:32].view(4, 6)  # starts 8 elements into its storage
    want = {
        "conv": strided,
        "transposed": torch.randn(5, 7).t(),
        "offset": offset,
        "one": torch.randn(1, 4).expand(1, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(4, 4).bfloat16(),
        "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "u16": torch.arange(6).to(torch.uint16),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    files.save(tmp_path / "model", {k: [((0,) * v.dim(), v, 0)] for k, v in want.items()})
    ckpt = wb.open(tmp_path, cache=False)
    assert list(ckpt) == [f"model.{name}" for name in want]
    for name, tensor in want.items():
        same_bits(ckpt[f"model.{name}"].torch(), tensor, name)
    check_catalog(ckpt.catalog)
    check_slices(ckpt, {f"model.{k}": v for k, v in want.items() if v.dtype != torch.float8_e4m3fn})


def test_bytes_before_tensors_leave_them_unaligned_and_empty_files_are_read_by_nobody(tmp_path):
    want = torch.randn(33)
    files.save(tmp_path / "optimizer", {"state.w.exp_avg": [((0,), want, 0)]}, {"param_groups": [{"lr": 0.1}]}, ranks=3)
    files.save(tmp_path / "model", {"w": [((0,), want * 2, 0)]}, ranks=3)
    ckpt = wb.open(tmp_path, cache=False)
    assert (tmp_path / "optimizer/__2_0.distcp").stat().st_size == 0 and ckpt.notes == []
    start = int(ckpt.chunks.set_index("key")["start"]["optimizer.state.w.exp_avg"])
    assert start > 0 and ckpt.objects["optimizer.param_groups"] == [{"lr": 0.1}]
    same_bits(ckpt.param("w", role="exp_avg").torch(), want, "after the bytes item")
    assert ckpt.mesh["writers"] == 3


def test_two_axes_and_strided_shard_order(tmp_path):
    want = torch.randn(8, 6)
    pieces = [
        ((r, c), want[r : r + 2, c : c + 3].clone(), i)
        for i, (r, c) in enumerate((r, c) for r in (0, 4, 2, 6) for c in (0, 3))
    ]
    files.save(tmp_path / "model", {"w": pieces})
    ckpt = wb.open(tmp_path, cache=False)
    same_bits(ckpt["model.w"].torch(), want, "w")
    assert ckpt["model.w"].chunks["rank"].tolist() == list(range(8))
    check_catalog(ckpt.catalog)


def test_the_bytes_own_dtype_counts_where_the_properties_say_another(tmp_path):
    want = torch.randn(4, 4)
    files.save(tmp_path / "model", rows("w", want, 2), dtypes={"w": torch.bfloat16})
    ckpt = wb.open(tmp_path, cache=False)
    same_bits(ckpt["model.w"].torch(), want, "w")
    assert any("'w' in float32 instead of bfloat16" in note for note in ckpt.notes)


def ddp(folder, names, *, groups, order=None):
    """A DDP save: ``module.`` prefixes, integer ids, everything in rank 0's file."""
    torch.manual_seed(1)
    model = {name: torch.randn(*shape) for name, shape in names.items()}
    order = order or list(names)
    moments = {name: torch.randn_like(model[name]) for name in names}
    state = {}
    for number, name in enumerate(order):
        state[f"state.{number}.step"] = [((), torch.tensor(5.0), 0)]
        state[f"state.{number}.exp_avg"] = [((0,) * model[name].dim(), moments[name], 0)]
    paths = {key: tuple(key.split(".", 2)) for key in state}
    files.save(folder / "model", {f"module.{n}": [((0,) * t.dim(), t, 0)] for n, t in model.items()}, ranks=2)
    files.save(folder / "optimizer", state, {"param_groups": groups}, paths=paths, ranks=2)
    return moments


def test_ddp_numbers_are_joined_where_that_is_certain(tmp_path):
    names = {
        "emb.weight": (6, 4),
        "a.weight": (4, 4),
        "a.bias": (4,),
        "b.weight": (4, 4),
        "b.bias": (4,),
        "norm.weight": (4,),
    }
    moments = ddp(tmp_path, names, groups=[{"lr": 0.1, "params": list(range(6))}])
    ckpt = wb.open(tmp_path, cache=False)
    for name, want in moments.items():
        same_bits(ckpt.param(name, role="exp_avg").torch(), want, name)
        assert ckpt.param(name).key == f"model.module.{name}" and ckpt.param(name, role="step").torch().item() == 5
    assert ckpt.notes == []


def test_ddp_says_that_channels_last_cannot_be_seen(tmp_path):
    """ByteCheckpoint 0.0.2 writes such tensors in memory order under contiguous strides (its pinned-memory pool)."""
    names = {"conv.weight": (6, 4, 3, 3), "point.weight": (6, 4, 1, 1), "a.bias": (4,)}
    ddp(tmp_path, names, groups=[{"params": [0, 1, 2]}])
    (note,) = [note for note in wb.open(tmp_path, cache=False).notes if "channels_last" in note]
    assert note.startswith("2 tensors of a DDP save with 4 or more axes") and "conv.weight" in note  # it and its moment


def test_ddp_numbers_stay_numbers_where_nothing_proves_them(tmp_path):
    names = {"a.weight": (4, 4), "b.weight": (4, 4), "c.weight": (4, 4)}
    ddp(tmp_path, names, groups=[{"params": [0, 1, 2]}], order=["c.weight", "a.weight", "b.weight"])
    ckpt = wb.open(tmp_path, cache=False)
    numbered = [fqn for key, fqn in zip(ckpt, ckpt.fqns, strict=True) if key.startswith("optimizer.")]
    assert numbered == [None] * 6 and ckpt.roles.count("exp_avg") == 3
    assert any("3 of its parameters are numbered" in note for note in ckpt.notes)


def test_ddp_numbers_with_stored_names_are_joined_whatever_the_order(tmp_path):
    names = {"a.weight": (4, 4), "b.weight": (4, 4), "c.weight": (4, 4)}
    order = ["c.weight", "a.weight", "b.weight"]
    groups = [{"params": [0, 1, 2], "param_names": [f"module.{name}" for name in order]}]
    moments = ddp(tmp_path, names, groups=groups, order=order)
    ckpt = wb.open(tmp_path, cache=False)
    for name, want in moments.items():
        same_bits(ckpt.param(name, role="exp_avg").torch(), want, name)


# ---- flat parameters -----------------------------------------------------------------------------------------------


def flat_save(folder, units, ranks, *, frozen=(), pad=4, tail=True):
    """FSDP1's decomposed save of ``units``: {prefix: {name: tensor}}, flattened as FlatParamHandle does.

    Parameters are aligned to ``pad`` elements and the unit is padded to a multiple of the ranks; the optimizer stores
    one range a (rank, parameter) and nothing of padding or of ``frozen`` parameters.
    """
    model, state, user = {}, {}, {name: {} for name in (flat.NAMES, flat.MASK, flat.NUMELS, flat.SHAPES)}
    moments = {}
    for prefix, params in units.items():
        parts, mask, numels = [], [], []
        for tensor in params.values():
            parts.append(tensor.reshape(-1))
            mask.append(False)
            numels.append(tensor.numel())
            if short := -tensor.numel() % pad:
                parts.append(torch.full((short,), 42.0))
                mask.append(True)
                numels.append(short)
        if short := -sum(numels) % ranks if tail else 0:
            parts.append(torch.full((short,), 42.0))
            mask.append(True)
            numels.append(short)
        whole = torch.cat(parts)
        key, each = f"{prefix}_flat_param", -(-len(whole) // ranks)
        model[key] = [
            ((r * each,), whole[r * each : (r + 1) * each].clone(), r) for r in range(ranks) if r * each < len(whole)
        ]
        user[flat.NAMES][key], user[flat.MASK][key] = list(params), mask
        user[flat.NUMELS][key] = tuple(numels)
        user[flat.SHAPES][key] = [tensor.shape for tensor in params.values()]
        pieces = []
        at = 0
        names = iter(params)
        for padding, numel in zip(mask, numels, strict=True):
            name = None if padding else next(names)
            fqn = f"{prefix}{name}"
            if name is not None and fqn not in frozen:
                moments[fqn] = torch.randn_like(params[name])
                for r in range(ranks):
                    a, b = max(at, r * each), min(at + numel, (r + 1) * each)
                    if b > a:
                        pieces.append(((a,), moments[fqn].reshape(-1)[a - at : b - at].clone(), r))
                state[f"state.{fqn}.step"] = [((), torch.tensor(1.0), 0)]
            at += numel
        if pieces:
            state[f"state.{key}.exp_avg"] = pieces
        total = sum(p.numel() for _, p, _ in pieces)
        state[f"state.{key}.{flat.NUMEL}"] = [((), torch.tensor(total), 0)]
    shapes = {f"state.{key}.exp_avg": (sum(user[flat.NUMELS][key]),) for key in model}
    paths = {key: ("state", key.removeprefix("state.")) for key in state}
    files.save(folder / "model", model, user=user, ranks=ranks)
    files.save(folder / "optimizer", state, {"param_groups": []}, shapes=shapes, paths=paths, ranks=ranks)
    return moments


def check_flat(folder, units, moments):
    ckpt = wb.open(folder, cache=False)
    for prefix, params in units.items():
        for name, want in params.items():
            same_bits(ckpt.param(prefix + name).torch(), want, prefix + name)
    for name, want in moments.items():
        same_bits(ckpt.param(name, role="exp_avg").torch(), want, name)
    check_catalog(ckpt.catalog)  # exactly one writer an element: padding and frozen parameters are no holes
    return ckpt


def test_padding_and_frozen_parameters_are_no_holes(tmp_path):
    torch.manual_seed(2)
    units = {
        "layers.0.": {"w.weight": torch.randn(5, 3), "w.bias": torch.randn(3), "norm.weight": torch.randn(7)},
        "": {"embed.weight": torch.randn(11, 2), "head.weight": torch.randn(2, 3)},
    }
    moments = flat_save(tmp_path, units, 3, frozen={"layers.0.w.bias", "embed.weight"})
    ckpt = check_flat(tmp_path, units, moments)
    with pytest.raises(errors.TensorNotFoundError, match=r"'embed.weight' has no tensor of role 'exp_avg'"):
        ckpt.param("embed.weight", role="exp_avg")
    assert [n for n in ckpt.notes if "2 parameters have no state, first 'layers.0.w.bias'" in n]
    assert ckpt.catalog.meta["flat_parameters"][0]["padding"] == 1 + 1 + 1 + 2


@pytest.mark.parametrize(
    "names",
    [
        (".weight", ".bias"),  # a module that is wrapped itself
        ("_checkpoint_wrapped_module.weight", "_orig_mod.bias"),
        ("head.weight", "head.bias"),  # older saves repeat the prefix
    ],
)
def test_names_in_a_flat_parameter_are_spelt_in_three_ways(tmp_path, names):
    units = {"head.": dict(zip(names, (torch.randn(4, 4), torch.randn(4)), strict=True))}
    flat_save(tmp_path, units, 2)
    ckpt = wb.open(tmp_path / "model", cache=False)
    assert list(ckpt) == ["head.weight", "head.bias"]
    same_bits(ckpt["head.weight"].torch(), units["head."][names[0]], "weight")


def test_flat_parameters_of_two_models_in_one_state_dict(tmp_path):
    one = {"": {"w": torch.randn(3, 3)}}
    flat_save(tmp_path / "a", one, 2)
    kept = files.read(tmp_path / "a/model")
    user = {"model_dict_keys": ["actor"], "actor": kept.user_defined_dict}
    whole = torch.cat([one[""]["w"].reshape(-1), torch.full((3,), 42.0)])
    files.save(tmp_path / "b/model", {"actor._flat_param": [((0,), whole, 0)]}, user=user)
    ckpt = wb.open(tmp_path / "b", cache=False)
    assert list(ckpt) == ["model.actor.w"]
    same_bits(ckpt["model.actor.w"].torch(), one[""]["w"], "w")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flat_save_reads_back(tmp_path, data):
    """Property: whatever the shapes, ranks and alignment, boxes cover each parameter once with its own elements."""
    shape = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)
    shapes = data.draw(st.lists(shape, min_size=1, max_size=4))
    ranks, pad, tail = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5)), data.draw(st.booleans())
    params = {f"p{i}": torch.randn(s) for i, s in enumerate(shapes)}
    frozen = {name for name in params if data.draw(st.booleans())}
    folder = Path(shutil.rmtree(tmp_path / "any", ignore_errors=True) or tmp_path / "any")
    check_flat(folder, {"": params}, flat_save(folder, {"": params}, ranks, frozen=frozen, pad=pad, tail=tail))


def test_a_lost_optimizer_range_is_a_hole_and_is_told_from_frozen(tmp_path):
    units = {"": {"a": torch.randn(8, 4), "b": torch.randn(8, 4)}}
    moments = flat_save(tmp_path, units, 2)
    meta = files.read(tmp_path / "optimizer")
    for index in [i for i in meta.storage_data if i.fqn.endswith("exp_avg") and i.offset[0] == 0]:
        del meta.storage_data[index], meta.all_tensor_metadata[index]
    files.write(tmp_path / "optimizer", meta)
    ckpt = wb.open(tmp_path, cache=False)
    assert any("1 chunk of the metadata without a stored item" in note for note in ckpt.notes)
    with pytest.raises(errors.HoleError, match=r"'optimizer.state.a.exp_avg'.*\[0:8, 0:4\]"):
        ckpt.param("a", role="exp_avg").torch()
    same_bits(ckpt.param("b", role="exp_avg").torch(), moments["b"], "the other parameter")


# ---- huge metadata -------------------------------------------------------------------------------------------------


def test_metadata_in_pieces_is_what_it_is_whole(tmp_path, monkeypatch):
    files.write_synthetic(tmp_path / "model", tensors=40, ranks=64)
    data = (tmp_path / "model/.metadata").read_bytes()
    whole = metadata.decode(data, what="whole")
    pieces = metadata._in_pieces(data, "pieces")
    assert pieces is not None and pieces.version == whole.version == "0.0.2"
    for one, other in ((whole, pieces), (whole.dcp, pieces.dcp), (whole.layouts, pieces.layouts)):
        for name in (f.name for f in dataclasses.fields(one)):
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(a, np.ndarray):
                assert a.shape == b.shape and (a == b).all(), name
            elif name not in ("dcp", "layouts", "user"):
                assert a == b, name
    monkeypatch.setattr(metadata, "LANES_FROM", 1000)
    ckpt = wb.open(tmp_path, cache=False)
    assert ckpt.catalog.chunks == 40 * 64
    check_catalog(ckpt.catalog)
    with open(tmp_path / "model/__3_0.distcp", "r+b") as handle:  # tensor 2, rank 3
        handle.seek(2 * 4096)
        handle.write(torch.arange(1024.0).numpy().tobytes())
    name = next(key for key in ckpt if key.endswith("_00002"))
    same_bits(wb.open(tmp_path, cache=False)[name][48:64], torch.arange(1024.0).view(16, 64), name)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_real_metadata_in_pieces_is_what_it_is_whole(part):
    folders = [HERE, *((Path(OUTSIDE) / "bytecheckpoint" / n for n in ("ddp_w4", "fsdp2_w4")) if OUTSIDE else ())]
    cut = 0
    for folder in folders:
        data = (folder / STEP / part / ".metadata").read_bytes()
        whole, pieces = metadata.decode(data, what="whole"), metadata._in_pieces(data, "pieces", irregular=0.9)
        if whole.user:  # the model part of a flat save: its dictionaries come after the section
            assert pieces is None
        elif pieces is not None:
            cut += 1
            assert (pieces.layout == whole.layout).all() and pieces.dcp.objects == whole.dcp.objects
            assert (pieces.dcp.start == whole.dcp.start).all() and (pieces.layouts.sizes == whole.layouts.sizes).all()
            assert pieces.dcp.keys == whole.dcp.keys and pieces.dcp.paths == whole.dcp.paths
    assert cut or (part == "model" and not OUTSIDE)


def test_pieces_that_do_not_fit_are_decoded_whole(tmp_path):
    """Fuzz: a changed byte in the section either fails, or means the same in both decoders."""
    files.write_synthetic(tmp_path / "model", tensors=12, ranks=64)
    data = (tmp_path / "model/.metadata").read_bytes()
    at = data.find(metadata.SECTION)
    chance = random.Random(0)
    same = 0
    for _ in range(60):
        broken = bytearray(data)
        broken[chance.randrange(at, len(data))] ^= 1 << chance.randrange(8)
        try:
            whole = metadata.decode(bytes(broken), what="whole")
        except errors.OpenError:
            whole = None
        try:
            pieces = metadata._in_pieces(bytes(broken), "pieces")
        except errors.OpenError:
            assert whole is None
            continue
        if pieces is not None and whole is not None:
            same += 1
            assert len(pieces.layouts.sizes) == len(whole.layouts.sizes) and (pieces.layout == whole.layout).all()
    assert same


# ---- bad input -----------------------------------------------------------------------------------------------------


def edited(folder, change):
    meta = files.read(folder)
    change(meta)
    files.write(folder, meta)


def test_an_interrupted_save_names_the_part(copy):
    (copy / STEP / "optimizer/.metadata").rename(copy / STEP / "optimizer/.metadata.tmp")
    refused(errors.IncompleteError, copy / STEP, "'optimizer'", ".metadata.tmp", "interrupted", "'model' folder alone")
    refused(errors.IncompleteError, copy, "is not complete", "optimizer: .metadata is missing")
    (copy / STEP / "model/.metadata").unlink()
    refused(errors.IncompleteError, copy / STEP, "'model'", "interrupted", "earlier step")
    (copy / STEP / "optimizer/.metadata.tmp").unlink()
    (copy / STEP / "optimizer/.metadata").write_bytes(b"")
    refused(errors.IncompleteError, copy / STEP, "'model'")


def test_a_tracker_that_names_an_absent_step_is_told_and_passed_over(copy):
    (copy / "latest_checkpointed_iteration.txt").write_text("7")
    ckpt = wb.open(copy, cache=False)
    assert ckpt.step == 3 and "names '7', which does not exist" in ckpt.notes[0]


def test_missing_and_truncated_data_files(copy):
    file = copy / STEP / "model/__2_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    refused(errors.TruncatedError, copy / STEP, "model/__2_0.distcp", f"{len(whole) - 1000:,}", "model.")
    file.unlink()
    refused(errors.MissingFileError, copy / STEP, "model/__2_0.distcp", "partial=True")
    kept = wb.open(copy / STEP, partial=True, cache=False)
    assert any("ranks [2] have no data file" in note for note in kept.notes)
    assert any("not written by the same ranks" in note and "[2]" in note for note in kept.notes)
    assert kept.param("layers.0.input_layernorm.weight").torch().shape == (64,)
    with pytest.raises(errors.MissingFileError, match="__2_0"):
        kept.param("layers.0.mlp.up_proj.weight").torch()


def test_files_of_another_save_are_told_and_not_read(copy):
    shutil.copy(copy / STEP / "model/__0_0.distcp", copy / STEP / "model/__7_0.distcp")
    with open(copy / STEP / "optimizer/__1_0.distcp", "ab") as handle:
        handle.write(bytes(100))
    notes = " ".join(wb.open(copy / STEP, cache=False).notes)
    for words in (
        "1 data file does not belong to this save, first '__7_0.distcp'",
        "'__1_0.distcp' by 100 bytes",
        "not written by the same ranks (model by 5, optimizer by 4, extra_state by 4)",
        "another world size",
    ):
        assert words in notes, notes


def test_a_part_of_another_step_is_told(copy):
    torch.save({"global_step": 2}, copy / STEP / "extra_state/extra_state_rank_0.pt")
    ckpt = wb.open(copy / STEP, cache=False)
    assert any("named after step 3, but the extra state of rank 0 has step 2" in note for note in ckpt.notes)
    (copy / STEP / "extra_state/extra_state_rank_0.pt").write_bytes(b"PK\x03\x04 not any more")
    assert any("extra state of rank 0 cannot be read" in n for n in wb.open(copy / STEP, cache=False).notes)
    moved = copy / STEP
    moved.rename(copy / "anything")
    torch.save({"global_step": 11}, copy / "anything/extra_state/extra_state_rank_0.pt")
    assert wb.open(copy / "anything", cache=False).step == 11


def test_state_of_parameters_that_the_model_has_not_is_told(tmp_path):
    files.save(tmp_path / "model", {"a": [((0,), torch.randn(3), 0)]})
    state = {"state.gone.exp_avg": [((0,), torch.randn(3), 0)]}
    files.save(tmp_path / "optimizer", state, paths={"state.gone.exp_avg": ("state", "gone", "exp_avg")})
    assert wb.open(tmp_path, cache=False).notes == [
        "the optimizer has state of 1 parameter that the model lacks, first 'gone'"
    ]


def change_first(field, value):
    def change(meta):
        table = meta.user_defined_dict[field]
        table[next(iter(table))] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_first(flat.NUMELS, (64, 4096)), ["2 lengths and 9 padding flags"]),
        (change_first(flat.NUMELS, (64,) * 9), ["'self_attn.q_proj.weight' of shape (64, 64) needs 4,096", "not 64"]),
        (change_first(flat.NAMES, ["only one"]), ["9 parameters, but 1 names"]),
        (change_first(flat.SHAPES, [(64,)] * 8 + [("x",)]), ["an invalid name or shape"]),
        (change_first(flat.MASK, None), ["'layers.0._flat_param'", "incomplete"]),
        (lambda m: m.user_defined_dict.pop(flat.MASK), ["some of FSDP's dictionaries"]),
        (lambda m: change_first(flat.NUMELS, (-1,) * 9)(m), ["9 lengths"]),
    ],
)
def test_dictionaries_that_contradict_themselves(copy, change, words):
    edited(copy / STEP / "model", change)
    refused(errors.CorruptError, copy / STEP, "part 'model'", *words)


def test_a_flat_tensor_of_another_length_than_its_dictionary(tmp_path):
    units = {"": {"a": torch.randn(8, 4)}}
    flat_save(tmp_path, units, 2)
    other = tmp_path / "other"
    flat_save(other, {"": {"a": torch.randn(8, 5)}}, 2)
    shutil.rmtree(tmp_path / "optimizer")
    (other / "optimizer").rename(tmp_path / "optimizer")
    refused(errors.CorruptError, tmp_path, "'state._flat_param.exp_avg' has 40", "adds up to 32", "different saves")


def inner_edit(value):
    def change(meta):
        index = next(i for i, v in meta.all_tensor_metadata.items() if v is not None)
        meta.all_tensor_metadata[index] = value

    return change


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (files.inner(torch.empty(12)), ["'layers.0._flat_param'", "chunk at (0,)", "a shape that differs"]),
        (files.inner(torch.empty(12384, dtype=torch.int32)), ["differs in dtype from the tensor's other chunks"]),
        (files.inner(torch.empty(2, 12384)[1]), ["needs more bytes than its range"]),
        (files.inner(torch.empty(12384, 2)[:, 0]), ["needs more bytes than its range"]),
        (b"\x80\x02]q\x00.", ["holds [], not a tensor"]),
        (b"cos\nsystem\n(S'touch ran'\ntR.", ["not a tensor"]),
        (b"\x80\x02", ["all_tensor_metadata"]),
        ("text", ["holds 'text' where bytes belong"]),
    ],
)
def test_inner_pickles_that_lie(copy, value, words):
    edited(copy / STEP / "model", inner_edit(value))
    refused(errors.CorruptError, copy / STEP, *words)
    assert not Path("ran").exists()


def test_an_item_without_an_inner_tensor_is_read_only_if_its_length_proves_it(copy):
    edited(copy / STEP / "model", inner_edit(None))
    ckpt = wb.open(copy / STEP, cache=False)
    truth = load_file(ROOT / "tests/truth/bytecheckpoint_fsdp1_flat.safetensors")
    same_bits(
        ckpt.param("layers.0.input_layernorm.weight").torch(), truth["param.layers.0.input_layernorm.weight"], "norm"
    )
    assert any("1 chunk has no layout" in note for note in ckpt.notes)

    def shorten(meta):
        index = next(i for i, v in meta.all_tensor_metadata.items() if v is None)
        meta.storage_data[index].length -= 4

    edited(copy / STEP / "model", shorten)
    refused(errors.CorruptError, copy / STEP, "'layers.0._flat_param'", "no layout")


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/hostname", "link.distcp"])
def test_metadata_that_leaves_the_folder(copy, name):
    part = copy / STEP / "model"
    shutil.copy(part / "__0_0.distcp", copy / "outside.distcp")
    (part / "link.distcp").symlink_to(copy / "outside.distcp")

    def move(meta):
        for info in meta.storage_data.values():
            info.relative_path = name if info.relative_path == "__0_0.distcp" else info.relative_path

    edited(part, move)
    refused(errors.UnsafeError, copy / STEP, "checkpoint")


def test_metadata_that_is_none(copy):
    file = copy / STEP / "model/.metadata"
    whole = file.read_bytes()
    mark = whole[:60]
    for data, word in ((whole[: len(whole) // 2], ".metadata"), (mark + os.urandom(300), ".metadata")):
        file.write_bytes(data)
        refused(errors.OpenError, copy / STEP, word)
    edited_root = files.Metadata({"w": 3}, {}, {}, {}, "0.0.2")
    files.write(copy / STEP / "model", edited_root)
    refused(errors.CorruptError, copy / STEP, "not laid out as ByteCheckpoint metadata", "neither a tensor nor bytes")
    with files.package():
        file.write_bytes(pickle.dumps([files.Metadata({})], protocol=4))
    refused(errors.CorruptError, copy / STEP, "instead of checkpoint metadata")


def test_a_folder_without_parts_is_none(copy):
    with pytest.raises(errors.NotACheckpointError, match="open one of its global_step_N folders"):
        wb.open(copy, format="bytecheckpoint", cache=False)


def test_strangers_are_not_taken_for_it(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/.metadata").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "model/__0_0.distcp").write_bytes(b"")
    with pytest.raises(errors.OpenError):
        wb.open(tmp_path, format="bytecheckpoint", cache=False)
    from workbench import formats
    from workbench.core.place import Place

    assert formats.detect(Place(tmp_path)) != "bytecheckpoint"


# ---- the log -------------------------------------------------------------------------------------------------------


def test_the_log_beside_a_save_becomes_an_object():
    found = wb.open(HERE / STEP).objects["save_log"]
    assert found["files"] == ["log_rank0.txt"]
    [save] = found["saves"]
    assert (save["rank"], save["step"], save["begin"], save["end"]) == (
        0,
        3,
        "2026-11-21 07:57:22",
        "2026-11-21 07:57:46",
    )
    assert save["seconds"] == 23.581674814224243 and save["path"].endswith("/fsdp1_w4_flat")
    seconds = {(row["phase"], row["part"]): row["seconds"] for row in found["durations"]}
    assert seconds["planning", "model"] == 0.04643654823303223
    assert seconds["planning", "optimizer"] == 0.14862680435180664
    assert seconds["write", "optimizer"] == 0.14147686958312988
    assert seconds["extra_state", "extra_state"] == 0.011631250381469727
    assert {row["rank"] for row in found["durations"]} == {0} and len(found["durations"]) == 13


def test_ranks_of_several_processes_in_one_log_are_told_apart():
    def line(pid, text):
        return f"[2026-01-02 03:04:05][INFO][x.py:1][x][pid:{pid}] - {text}\n"

    text = (
        line(7, "Start save function call. ")
        + line(8, "Start save function call. ")
        + line(8, "[Rank = 3] Finish planning. Time cost: 0.5 s")
        + "noise\n"
        + line(7, "[Rank = 12] Finish planning. Time cost: 2e-06 s")
        + line(7, "End save function call. Total time cost: 1.5 s")
        + line(8, "FSDP got model shard state dict, cost time: 0.25 s")
        + line(8, "[Rank = 3] Finish planning. Time cost: broken s")
    )
    found = log.parse([("log.txt", text)])
    assert found["lines"] == 7
    assert [(s["rank"], s["seconds"], s["end"] is None) for s in found["saves"]] == [(12, 1.5, False), (3, None, True)]
    assert [(d["save"], d["rank"], d["phase"], d["part"], d["seconds"]) for d in found["durations"]] == [
        (1, 3, "planning", None, 0.5),
        (0, 12, "planning", None, 2e-06),
        (1, 3, "model_state_dict", "model", 0.25),
    ]
    assert log.parse([("log.txt", "[x\n\0\xff")])["lines"] == 0


def test_other_logs_are_left_alone(copy):
    (copy / "log_rank0.txt").write_text("epoch 1 loss 0.5\n")
    assert "save_log" not in wb.open(copy / STEP, cache=False).objects
