"""Paddle's formats: what paddle wrote against its truth, what Python's pickle writes in paddle's shapes, and bad input.

Truth is paddle's own gathered tensors (sample_ckpts/truth), or the numpy arrays that went into a pickle here.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import struct
import sys
import tracemalloc
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.reader_suite import check_catalog, check_frames, check_objects, check_reader, random_key, same_bits
from workbench.core import catalog as cat
from workbench.core.place import Place
from workbench.errors import (
    CorruptError,
    IncompleteError,
    MissingFileError,
    TensorNotFoundError,
    TruncatedError,
    UnsafeError,
    UnsupportedFormatError,
    WorkbenchError,
)
from workbench.formats import paddle_names, paddle_spans, paddlenlp_axes

TABLE = "StructuredToParameterName@@"
ROLES = {"param": "param", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.fixture
def outside() -> Path:
    """The folder of further samples."""
    told = os.environ.get("WORKBENCH_SAMPLES")
    if not told or not (Path(told) / "paddle").is_dir():
        pytest.skip("WORKBENCH_SAMPLES names no folder of further samples")
    return Path(told) / "paddle"


# ---- writing as paddle does ------------------------------------------------------------------------------------------


class Pair:
    """A Tensor inside a nested state: paddle reduces it to the tuple (name, array)."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.array = name, array

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self.name, self.array),)


class Dense:
    """A static graph's DenseTensor: paddle reduces it to eval("data", {"data": array})."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, self.args


def save(path: Path, state: Any, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(state, protocol))
    return path


def flat(state: Mapping[str, Any], statics: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {**state, TABLE: dict(statics or {name: name for name in state})}


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    chance = np.random.default_rng(seed + math.prod(shape))
    return (
        chance.integers(0, 1 << 16, shape).astype("uint16")
        if dtype == "uint16"
        else chance.normal(size=shape).astype(dtype)
    )


def same(got: wb.tensor.LazyTensor, want: np.ndarray) -> None:
    dtype = torch.bfloat16 if want.dtype == np.uint16 else None
    plain = torch.from_numpy(np.array(want.astype(want.dtype.newbyteorder("=")), order="C"))  # keeps 0-d
    same_bits(got.torch(), plain.view(dtype) if dtype else plain, got.key)


@pytest.fixture
def metadata() -> Iterator[types.SimpleNamespace]:
    """The metadata classes of paddle under their own module's name, as long as a test writes them."""

    @dataclass
    class LocalTensorMetadata:
        global_offset: Any
        local_shape: Any
        dtype: str
        global_shape: Any = None
        is_flattened: bool = False
        flattened_range: Any = None

    @dataclass(frozen=True)
    class LocalTensorIndex:
        tensor_key: str
        global_offset: Any
        is_flattened: bool = False
        flattened_range: Any = None
        replica_id: Any = None
        local_shape: Any = None

    @dataclass
    class Metadata:
        state_dict_metadata: Any
        storage_metadata: Any
        flat_mapping: Any = None

    classes = (Metadata, LocalTensorMetadata, LocalTensorIndex)
    made: list[str] = []

    def settle(module: str) -> None:
        parts = module.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                made.append(name)
        for kind in classes:
            kind.__module__, kind.__qualname__ = module, kind.__name__
            setattr(sys.modules[module], kind.__name__, kind)

    settle("paddle.distributed.flex_checkpoint.dcp.metadata")
    yield types.SimpleNamespace(Metadata=Metadata, Local=LocalTensorMetadata, Index=LocalTensorIndex, settle=settle)
    for name in made:
        del sys.modules[name]


class DistSave:
    """Writes a folder as paddle.distributed does: shards by file, then the metadata."""

    def __init__(self, kinds: types.SimpleNamespace, folder: Path) -> None:
        self.kinds, self.folder = kinds, folder
        self.files: dict[str, dict[str, np.ndarray]] = {}
        self.tensors: dict[str, list[Any]] = {}
        self.storage: dict[Any, str] = {}

    def shard(
        self, key: str, whole: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...], file: str,
        flat_range: tuple[int, int] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        local = whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        if flat_range is not None:
            local = local.reshape(-1)[slice(*flat_range)]
        self.files.setdefault(file, {})[key] = np.ascontiguousarray(local)
        dtype = "bfloat16" if whole.dtype == np.uint16 else str(whole.dtype)
        told = {"is_flattened": flat_range is not None, "flattened_range": flat_range}
        local_meta = self.kinds.Local(offset, shape, dtype, more.pop("global_shape", whole.shape), **told)
        if local_meta not in self.tensors.setdefault(key, []):
            self.tensors[key].append(local_meta)
        self.storage[self.kinds.Index(key, offset, **told, local_shape=shape, **more)] = file

    def write(self, name: str | None = "0.metadata", mapping: Any = None) -> Path:
        self.folder.mkdir(exist_ok=True, parents=True)
        for file, shards in self.files.items():
            save(self.folder / file, flat(shards))
        if name is not None:
            save(self.folder / name, self.kinds.Metadata(self.tensors, self.storage, mapping))
        return self.folder


# ---- what paddle wrote -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paddle_save", "paddle_dist"])
def test_samples_pass_the_shared_suite(samples: Path, name: str) -> None:
    ckpt = check_reader(samples / name, load_file(samples / "truth" / f"{name}.safetensors"))
    assert ckpt.format == name


def test_paddle_save_joins_the_optimizer_to_its_parameters(samples: Path) -> None:
    statics = wb.open(samples / "paddle_save" / "model.pdparams").objects[TABLE]
    whole = wb.open(samples / "paddle_save")
    for name, static in statics.items():
        if static.startswith("eager_tmp"):
            assert whole[name].role == "buffer"
            continue
        assert whole[name].fqn == name and whole[name].role == "param"
        for state, role in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq"), ("beta1_pow_acc", "beta1_pow")):
            assert whole.param(name, role=role).key == f"optimizer.{static}_{state}_0"
    assert whole.step == 3 and whole.objects["beta_pow"]["formula"] == "t = log(beta_pow) / log(beta) - 1"
    assert any("assumed" in note for note in whole.notes)
    assert whole.objects["optimizer.LR_Scheduler"]["last_epoch"] == 3


def test_an_optimizer_alone_takes_its_names_from_the_model_beside_it(samples: Path, tmp_path: Path) -> None:
    beside = wb.open(samples / "paddle_save" / "model.pdopt")
    assert beside.param("embed.weight", role="exp_avg").key == "embedding_0.w_0_moment1_0"
    assert "model.pdparams" in " ".join(beside.notes) and "model.pdparams" in beside.catalog.metadata_files
    (tmp_path / "model.pdopt").write_bytes((samples / "paddle_save" / "model.pdopt").read_bytes())
    alone = wb.open(tmp_path / "model.pdopt")
    assert set(alone.fqns) == {None} and alone["embedding_0.w_0_moment1_0"].role == "exp_avg"
    assert "'model.pdparams'" in " ".join(alone.notes) and alone.step == 3


def _check_by_meaning(ckpt: wb.Checkpoint, truth: Mapping[str, torch.Tensor]) -> None:
    check_catalog(ckpt.catalog)
    check_frames(ckpt)
    check_objects(ckpt)
    chance = random.Random(0)
    for key, want in truth.items():
        group, name = key.split(".", 1)
        tensor = ckpt.param(name, role=ROLES[group])
        same_bits(tensor.torch(), want, key)
        for _ in range(2):
            where = random_key(tuple(want.shape), chance)
            bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
            expected = torch.from_numpy(np.array(want.view(bits).numpy()[where])).view(want.dtype)
            same_bits(tensor[where], expected, f"{key}[{where}]")


def test_legacy_paddlenlp_is_merged_where_the_files_prove_how(samples: Path) -> None:
    ckpt = wb.open(samples / "paddlenlp_legacy")
    assert ckpt.format == "paddlenlp" and ckpt.step == 30
    _check_by_meaning(ckpt, load_file(samples / "truth" / "paddlenlp_legacy.safetensors"))
    assert ckpt["llama.norm.weight"].dtype == torch.bfloat16
    norms = ckpt.tensors.set_index("key").loc["llama.norm.weight"]
    assert norms["replicas"] == 2, "both tp ranks stored it"
    assert ckpt.mesh["axes"] == {"tp": 2, "pp": 2, "sharding": 2} and "order of ranks" in ckpt.mesh["unknown"]
    assert ckpt.mesh["ranks"]["optimizer.tp01_pp00_shard01.pdopt"] == {"tp": 1, "pp": 0, "sharding": 1}
    assert any("config.json" in note and "30 parameters" in note for note in ckpt.notes)
    assert ckpt.objects["beta_pow"]["step"] == 30 and ckpt.objects["scaler"]["incr_count"] == 30


def test_further_files_of_paddle_save(outside: Path) -> None:
    folder = outside / "a_paddle_save" / "fp32"
    model, optimizer = (
        load_file(folder / "truth_model_fp32.safetensors"),
        load_file(folder / "truth_opt_fp32.safetensors"),
    )
    proto2 = check_reader(folder / "model_proto2.pdparams", model)
    assert set(proto2.chunks["codec"]) == {"latin1_text"}
    combined = {**{f"model.{k}": v for k, v in model.items()}, **{f"opt.{k}": v for k, v in optimizer.items()}}
    both = check_reader(folder / "combined.pdckpt", combined)
    assert both.param("layers.0.up.bias", role="exp_avg_sq").key == "opt.linear_2.b_0_moment2_0"
    scalars = wb.open(folder / "scalars.pdckpt")
    assert scalars.step == 3 and scalars["rng"].role == "other" and list(scalars) == ["rng"]


def test_distributed_saves_as_safetensors(outside: Path) -> None:
    truth = load_file(outside / "b_dist_save" / "truth.safetensors")
    truth["scalar0d"] = truth["scalar0d"].reshape(())
    for kind in ("distcp", "safetensors"):
        check_reader(outside / "b_dist_save" / kind, truth)


@pytest.mark.parametrize("layout", ["legacy_tp2_pp2_shard2", "unified_tp2_pp2_shard2", "unified_quant_O1"])
def test_further_layouts_of_paddlenlp(outside: Path, layout: str) -> None:
    names = {"bf16": "param", "fp32": "fp32_param", "m1": "exp_avg", "m2": "exp_avg_sq"}
    truth = {}
    for key, value in load_file(outside / "c_paddlenlp" / "truth.safetensors").items():
        group, name = key.split("/", 1)
        if not (group.startswith("m") and "quant" in layout):
            truth[f"{names[group]}.{name}"] = value.to(torch.bfloat16) if group == "bf16" else value
    ckpt = wb.open(outside / "c_paddlenlp" / layout)
    _check_by_meaning(ckpt, truth)
    assert ckpt.world_size == 8 and ckpt.step == 30 and "checkpoint-30" in ckpt.notes[0]
    if layout.startswith("legacy"):
        assert ckpt.mesh["axes"]["dp"] == 1, "8 ranks are 2 x 2 x 2: nothing is left for dp"
    else:
        assert ckpt.mesh["axes"] == {"tp": 2}
    if "quant" in layout:
        assert any("O1" in note and "117 scales" in note for note in ckpt.notes)
        assert ckpt["llama.norm.weight/moment1_0"].dtype == torch.int8
        assert ckpt["llama.norm.weight/moment1_0@scales"].role == "scale"


def test_fleet_folders_without_a_configuration_stay_apart_by_rank(outside: Path) -> None:
    truth = load_file(outside / "c_paddlenlp" / "truth.safetensors")
    axes = json.loads((outside / "c_paddlenlp" / "truth.json").read_text())["tp_axis"]
    ckpt = wb.open(outside / "c_paddlenlp" / "fleet_rank_dirs")
    check_catalog(ckpt.catalog)
    assert ckpt.step == 30 and ckpt.world_size is None and ckpt.mesh["axes"] == {"tp": 2, "sharding": 2, "pp": 2}
    for name, axis in axes.items():
        for group, suffix, copies in (("fp32", "", 2), ("m1", "/moment1_0", 1)):
            whole = truth[f"{group}/{name}"]
            for rank in range(2):
                piece = ckpt[f"{name}{suffix}@tp{rank:02d}"]
                want = whole if axis is None else whole.chunk(2, axis)[rank].contiguous()
                same_bits(piece.torch(), want, piece.key)
                assert piece.fqn == name
                assert ckpt.tensors.set_index("key").loc[piece.key, "replicas"] == copies
    with pytest.raises(TensorNotFoundError, match=r"2 tensors of role 'param'.*@tp00"):
        ckpt.param("lm_head.weight")
    assert any("39 parameters are kept apart" in note for note in ckpt.notes)


def test_fleet_folders_beside_a_configuration_are_merged_where_it_tells(outside: Path, tmp_path: Path) -> None:
    shutil.copytree(outside / "c_paddlenlp" / "fleet_rank_dirs", tmp_path / "f")
    config = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 4}
    (tmp_path / "f" / "config.json").write_text(json.dumps(config))
    ckpt = wb.open(tmp_path / "f")
    for key, want in load_file(outside / "c_paddlenlp" / "truth.safetensors").items():
        group, name = key.split("/", 1)
        if group in ("fp32", "m1"):
            same_bits(ckpt.param(name, role="param" if group == "fp32" else "exp_avg").torch(), want, key)


# ---- pickles ---------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "float64", "float16", "uint16", "int8", "uint8", "bool", "int64", "complex64", ">f4", ">i8")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    array = np.frombuffer(data, np.uint8).copy() & 1 if dtype.kind == "b" else np.frombuffer(data, dtype).copy()
    array = array.astype(dtype).reshape(shape)
    return np.asfortranarray(array) if draw(st.booleans()) else array


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["b", "<", "f4", "w", "latin1", "fc.weight", "ünïcode", "x" * 300]), arrays(), max_size=5
    ),
    st.sampled_from([2, 3, 4, 5]),
    st.booleans(),
)
def test_any_arrays_in_any_protocol_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, np.ndarray], protocol: int, pairs: bool
) -> None:
    tree = {"model": {k: Pair("p_" + k, v) for k, v in state.items()}} if pairs else flat(state)
    path = save(tmp_path_factory.mktemp("p") / "x.pdparams", tree, protocol)
    ckpt = wb.open(path, cache=False)
    ckpt.catalog.check()
    assert set(ckpt) == {f"model.{key}" if pairs else key for key in state}
    for key, want in state.items():
        tensor = ckpt[f"model.{key}" if pairs else key]
        if protocol == 2 and want.dtype.byteorder == ">" and want.size:
            with pytest.raises(UnsupportedFormatError):
                tensor.numpy()
            continue
        same(tensor, want)


def test_protocol_2_reads_every_byte_value_and_slices(tmp_path: Path) -> None:
    want = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 48)
    halves = numbers(33, 7, dtype="uint16")
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": want, "h": halves, "one": want[:1, :1].copy()}), 2))
    same(ckpt["w"], want)
    same(ckpt["h"], halves)
    same(ckpt["one"], want[:1, :1])
    assert np.array_equal(ckpt["w"][3:9, ::-5].numpy(), want[3:9, ::-5])


def test_opening_reads_no_tensor_byte(tmp_path: Path) -> None:
    big = np.zeros(64 << 20, np.uint8)
    for protocol in (3, 4):
        path = save(tmp_path / f"{protocol}.pdparams", flat({"a": big, "b": big[: 32 << 20].copy()}), protocol)
        wb.open(path, cache=False)  # imports
        tracemalloc.start()
        ckpt = wb.open(path, cache=False)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert ckpt["a"].nbytes == 64 << 20
        data, spans = paddle_spans.thin(memoryview(path.read_bytes()), "x")
        assert len(data) < 2000 and sum(s.stop - s.start for s in spans if not isinstance(s, str)) >= 96 << 20


def test_arrays_outside_and_inside_frames_and_shared_ones(tmp_path: Path) -> None:
    big, small = numbers(300, 300), numbers(4)
    state = {"a": big, "s": small, "tied": big, "list": [small, {"deep": big}]}
    ckpt = wb.open(save(tmp_path / "x.pdckpt", state))
    assert list(ckpt) == ["a", "s", "tied", "list.0", "list.1.deep"]
    for key in ("a", "tied", "list.1.deep"):
        same(ckpt[key], big)
    assert ckpt.catalog.meta["aliases"] == [["a", "tied", "list.1.deep"], ["s", "list.0"]]


def test_big_parameters_cut_into_slices_are_one_tensor(tmp_path: Path) -> None:
    want = numbers(7, 5, 3)
    parts = {f"w@@.{n}": want.reshape(-1)[n * 32 : (n + 1) * 32].copy() for n in range(4)}
    facts = {"w": {"OriginShape": want.shape, "slices": list(parts)}}
    for protocol in (2, 3):
        state = {"first": numbers(2), **parts, TABLE: {"w": "linear_0.w_0"}, "UnpackBigParamInfor@@": facts}
        ckpt = wb.open(save(tmp_path / f"{protocol}.pdparams", state, protocol))
        assert list(ckpt) == ["first", "w"] and ckpt["w"].fqn == "w"
        same(ckpt["w"], want)
        assert np.array_equal(ckpt["w"][1:6, 2, ::2].numpy(), want[1:6, 2, ::2])
        check_catalog(ckpt.catalog)
    del state["w@@.2"]
    with pytest.raises(CorruptError, match=r"'w' was cut into 4 slices, 'w@@.2' is not there"):
        wb.open(save(tmp_path / "lost.pdparams", state))
    state["w@@.2"] = numbers(31)
    with pytest.raises(CorruptError, match=r"4 slices of 'w' hold 104 elements, its shape \(7, 5, 3\) has 105"):
        wb.open(save(tmp_path / "short.pdparams", state))


def test_a_dense_tensor_is_recognised_and_eval_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = numbers(3, 4)
    path = save(tmp_path / "x.pdparams", {"fc_0.w_0": Dense("data", {"data": want}), "plain": numbers(2)})
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("eval was called"))
    ckpt = wb.open(path)
    same(ckpt["fc_0.w_0"], want)
    assert not ckpt.catalog.meta["foreign_globals"]


@pytest.mark.parametrize(
    "args",
    [
        ("__import__('os').system('touch {mark}')",),
        ("data", {"data": "no array"}),
        ("data", {"data": np.zeros(2), "more": 1}),
        ("open('{mark}', 'w')", {"data": np.zeros(2)}),
        ("data", {"data": np.zeros(2)}, {}),
    ],
)
def test_any_other_eval_is_an_inert_leaf_and_called_hostile(tmp_path: Path, args: tuple[Any, ...]) -> None:
    mark = tmp_path / "mark"
    args = tuple(arg.format(mark=mark) if isinstance(arg, str) else arg for arg in args)
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": numbers(3), "evil": Dense(*args)})))
    same(ckpt["w"], numbers(3))
    assert "evil" not in ckpt and "builtins.eval" in ckpt.catalog.meta["foreign_globals"]
    assert any("hostile" in note and "builtins.eval" in note for note in ckpt.notes)
    assert ckpt.objects["evil"].name == "builtins.eval" and not mark.exists()
    check_objects(ckpt)


def test_uint16_is_bfloat16_and_int8_may_be_float8(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xBF80, 0x7FC1, 0x8000], np.uint16)
    ckpt = wb.open(save(tmp_path / "x.pdparams", flat({"w": bits, "q": np.arange(-4, 4, dtype=np.int8)})))
    assert ckpt["w"].dtype == torch.bfloat16
    assert ckpt["w"].torch().view(torch.uint16).tolist() == bits.tolist(), "bits are not touched, NaN payloads included"
    assert ckpt["q"].dtype == torch.int8
    notes = " ".join(ckpt.notes)
    assert "1 tensors are stored as uint16" in notes and "float8 as int8" in notes


def test_master_weights_and_moments_join_by_static_names(tmp_path: Path) -> None:
    table = {"fc.weight": "linear_0.w_0", "fc.bias": "linear_0.b_0"}
    save(tmp_path / "m.pdparams", flat({"fc.weight": numbers(3, 2, dtype="uint16"), "fc.bias": numbers(2)}, table))
    save(
        tmp_path / "m.pdopt",
        {
            "linear_0.w_0_fp32_master_0_moment1_0": Pair("linear_0.w_0_fp32_master_0_moment1_0", numbers(3, 2)),
            "linear_0.b_0_velocity_0": Pair("v", numbers(2)),
            "linear_9.w_0_moment2_0": Pair("x", numbers(5)),
            "master_weights": {"linear_0.w_0": Pair("linear_0.w_0_fp32_master_0", numbers(3, 2, seed=4))},
            "LR_Scheduler": {"last_epoch": 2},
        },
    )
    ckpt = wb.open(tmp_path)
    assert ckpt.param("fc.weight", role="exp_avg").key == "optimizer.linear_0.w_0_fp32_master_0_moment1_0"
    same(ckpt.param("fc.weight", role="master"), numbers(3, 2, seed=4))
    assert ckpt.param("fc.bias", role="momentum").key == "optimizer.linear_0.b_0_velocity_0"
    stranger = ckpt["optimizer.linear_9.w_0_moment2_0"]
    assert stranger.fqn is None and stranger.role == "exp_avg_sq"


def test_a_static_name_of_two_parameters_joins_nothing(tmp_path: Path) -> None:
    state = {
        "gen": {"fc.weight": Pair("linear_0.w_0", numbers(2))},
        "disc": {"out.weight": Pair("linear_0.w_0", numbers(2))},
        "opt": {"linear_0.w_0_moment1_0": Pair("m", numbers(2))},
    }
    ckpt = wb.open(save(tmp_path / "x.pdckpt", state))
    assert ckpt["opt.linear_0.w_0_moment1_0"].fqn is None and ckpt["opt.linear_0.w_0_moment1_0"].role == "exp_avg"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.sampled_from([0.999, 0.95, 0.98, 0.99]))
def test_powers_of_beta_tell_the_step_or_nothing(step: int, beta2: float) -> None:
    powers = {}
    for name, beta in (("beta1_pow", 0.9), ("beta2_pow", beta2)):
        value = np.float32(1)  # multiplied after each update, in float32
        value = np.multiply.reduce(np.full(step + 1, beta, np.float32), dtype=np.float32, initial=value)
        powers[name] = float(value)
    told = paddle_names._step(powers, 0.9, beta2)
    assert told in (step, None)
    assert told == step or step > 600, "float32 does not run out that early"


def test_powers_that_disagree_tell_no_step(tmp_path: Path) -> None:
    def opt(steps: list[int]) -> dict[str, Any]:
        return {f"linear_{n}.w_0_beta{b}_pow_acc_0": np.array([beta ** (t + 1)], np.float32)
                for n, t in enumerate(steps) for b, beta in ((1, 0.9), (2, 0.999))}  # fmt: skip

    agreed = wb.open(save(tmp_path / "a.pdopt", opt([7, 7])))
    assert agreed.step == 7 and agreed.objects["beta_pow"]["steps"] == {"7": 2}
    mixed = wb.open(save(tmp_path / "b.pdopt", opt([7, 9])))
    assert mixed.step is None and mixed.objects["beta_pow"]["steps"] == {"7": 1, "9": 1}
    reset = wb.open(save(tmp_path / "c.pdopt", {"x.w_0_beta1_pow_acc_0": np.zeros(1, np.float32)}))
    assert reset.step is None


# ---- paddle's C++ layout ---------------------------------------------------------------------------------------------


def binary(array: np.ndarray, code: int, lod: bytes = b"", packed: bool = False) -> bytes:
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    dims = b"".join(map(varint, array.shape))
    desc = b"\x08" + varint(code)
    desc += b"\x12" + varint(len(dims)) + dims if packed else b"".join(b"\x10" + varint(n) for n in array.shape)
    levels = struct.pack("<Q", 1) + struct.pack("<Q", len(lod)) + lod if lod else struct.pack("<Q", 0)
    return struct.pack("<I", 0) + levels + struct.pack("<Ii", 0, len(desc)) + desc + array.tobytes()


def test_the_binary_layout(tmp_path: Path) -> None:
    one = numbers(4, 600)
    (tmp_path / "w").write_bytes(binary(one, 5))
    single = wb.open(tmp_path / "w")
    assert single.format == "paddle_save" and list(single) == ["tensor"] and single.fqns == [None]
    same(single["tensor"], one)
    half, whole = numbers(3, dtype="uint16"), np.arange(6).reshape(2, 3)
    many = tmp_path / "x.pdiparams"
    many.write_bytes(binary(half, 22, packed=True) + binary(whole, 3, lod=b"12345678") + binary(np.float64(3), 6))
    several = wb.open(many)
    same(several["tensor.0"], half)
    same(several["tensor.1"], whole)
    assert several["tensor.2"].torch().item() == 3
    many.write_bytes(many.read_bytes()[:-3])
    with pytest.raises(TruncatedError, match=r"'x.pdiparams': the tensor of shape \(\) at byte .* the file at"):
        wb.open(many)
    (tmp_path / "odd").write_bytes(binary(one, 77))
    with pytest.raises(UnsupportedFormatError, match="element type 77"):
        wb.open(tmp_path / "odd")


# ---- bad pickles -----------------------------------------------------------------------------------------------------


def test_cut_files_say_where(tmp_path: Path) -> None:
    whole = pickle.dumps(flat({"w": numbers(200, 100)}), 4)
    for cut, words in (
        (len(whole) // 2, "within 80,000 bytes from byte"),
        (len(whole) - 1, "without the end"),
        (0, "empty"),
    ):
        (tmp_path / "x.pdparams").write_bytes(whole[:cut])
        with pytest.raises(TruncatedError, match=words):
            wb.open(tmp_path / "x.pdparams")


def test_every_damage_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    path = tmp_path / "x.pdparams"
    for protocol in (2, 4):
        state = {
            **flat({"w": numbers(9, 3), "b": np.zeros(1, bool)}),
            "o": [1, ("a", {2}), OrderedDict(c=np.float32(2))],
        }
        good = pickle.dumps(state, protocol)
        for _ in range(400):
            bad = bytearray(good)
            for at in chance.integers(2, len(good), chance.integers(1, 4)):
                bad[at] = chance.integers(0, 256)
            path.write_bytes(bad[: chance.integers(len(bad) // 2, len(bad) + 1)])
            try:
                ckpt = wb.open(path, format="paddle_save", cache=False)
                for key in ckpt:
                    ckpt[key].numpy()
                dict(ckpt.objects)
            except WorkbenchError:
                pass


def test_foreign_globals_become_leaves(tmp_path: Path) -> None:
    evil = b"cos\nsystem\n(X\x04\0\0\0truetR"
    body = pickle.dumps(flat({"w": numbers(3)}), 2)[:-2]  # without SETITEMS, STOP
    (tmp_path / "x.pdparams").write_bytes(body + b"X\x04\0\0\0evil" + evil + b"u.")
    ckpt = wb.open(tmp_path / "x.pdparams")
    same(ckpt["w"], numbers(3))
    assert ckpt.objects["evil"].name == "os.system" and ckpt.catalog.meta["foreign_globals"] == ["os.system"]
    assert len(body) and set(ckpt) == {"w"}


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"\x80\x04K\x01Q.", CorruptError, "persistent id, which paddle does not write"),
        (b"\x80\x02Pabc\n.", CorruptError, "persistent id"),
        (b"\x80\x04\xff.", CorruptError, "byte 2: 0xff is no pickle opcode"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", UnsafeError, "memo index"),
        (b"\x80\x04\x82\x01.", UnsafeError, "extension registry"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", TruncatedError, "cut short"),
    ],
)
def test_pickles_that_paddle_never_writes(tmp_path: Path, data: bytes, error: type[Exception], words: str) -> None:
    (tmp_path / "x.pdparams").write_bytes(data)
    with pytest.raises(error, match=words):
        wb.open(tmp_path / "x.pdparams")


def test_a_shape_that_its_bytes_do_not_fill(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros(77, np.uint8)}, 4).replace(b"K\x01KM\x85", b"K\x01KN\x85")
    (tmp_path / "x.pdparams").write_bytes(data)
    with pytest.raises(CorruptError, match=r"shape \(78,\) and uint8 has 77 bytes, not 78"):
        wb.open(tmp_path / "x.pdparams")


def test_objects_arrays_and_records_are_left_out_with_a_note(tmp_path: Path) -> None:
    record = np.zeros(2, [("a", "i4"), ("b", "f8")])
    ckpt = wb.open(
        save(tmp_path / "x.pdparams", flat({"w": numbers(2), "o": np.array([None, {}], object), "r": record}))
    )
    assert list(ckpt) == ["w"] and sum("Python objects or records" in note for note in ckpt.notes) == 2


def test_strangers_are_not_taken_for_paddle(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    save(tmp_path / "c.pkl", {"a": 1})
    save_file({"w": torch.zeros(2)}, tmp_path / "d.pdparams")  # paddle.save(safetensors=True)
    for name, want in (("a.pt", "torch_save"), ("b.pt", "torch_save"), ("c.pkl", None), ("d.pdparams", "safetensors")):
        assert wb.formats.detect(Place(tmp_path / name)) == want
    assert wb.formats.detect(Place(save(tmp_path / "e.any", flat({"w": numbers(2)})))) == "paddle_save"


# ---- paddle.distributed ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_flattened_ranges_land_where_numpy_puts_them(
    tmp_path_factory: pytest.TempPathFactory, local: list[int], data: st.DataObject
) -> None:
    """A global tensor of two local shards along a drawn axis, each cut into flat ranges over ranks."""
    kinds = next(metadata_classes := metadata.__wrapped__())  # type: ignore[attr-defined]
    axis = data.draw(st.integers(0, len(local) - 1))
    whole = numbers(*(n * 2 if at == axis else n for at, n in enumerate(local)))
    out = DistSave(kinds, tmp_path_factory.mktemp("d"))
    numel, rank = math.prod(local), 0
    for half in range(2):
        offset = tuple(half * local[axis] if at == axis else 0 for at in range(len(local)))
        cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
        for start, stop in pairwise(cuts):
            out.shard("w", whole, offset, tuple(local), f"{rank}_0.distcp", (start, stop))
            rank += 1
    ckpt = wb.open(out.write(), cache=False)
    next(metadata_classes, None)
    same(ckpt["w"], whole)
    check_catalog(ckpt.catalog)


def test_replicas_old_modules_and_absent_fields(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    metadata.settle("paddle.distributed.checkpoint.metadata")
    whole, bf16 = numbers(6, 4), numbers(5, dtype="uint16")
    out = DistSave(metadata, tmp_path)
    for copy, rank in enumerate((0, 2)):
        out.shard("w", whole, (0, 0), (3, 4), f"{rank}_0.distcp", replica_id=copy, global_shape=None)
        out.shard("w", whole, (3, 0), (3, 4), f"{rank + 1}_0.distcp", replica_id=copy, global_shape=None)
    out.shard("h", bf16, (0,), (5,), "1_0.distcp", (0, 5))
    for shards in out.tensors.values():
        for shard in shards:
            if shard.flattened_range is None:
                del shard.__dict__["global_shape"], shard.__dict__["is_flattened"], shard.__dict__["flattened_range"]
    for index in out.storage:
        if index.flattened_range is None:
            object.__delattr__(index, "is_flattened")
    out.tensors["h"][0].flattened_range = slice(0, 5)
    ckpt = wb.open(out.write())
    same(ckpt["w"], whole)
    same(ckpt["h"], bf16)
    assert ckpt.tensors.set_index("key")["replicas"].to_dict() == {"w": 2, "h": 1}
    assert ckpt["w"].chunks["rank"].tolist() == [0, 2, 1, 3]
    assert any("no global shape" in note for note in ckpt.notes)
    raw = bytearray((tmp_path / "2_0.distcp").read_bytes())
    raw[raw.find(whole[:3].tobytes()) + 1] ^= 1
    (tmp_path / "2_0.distcp").write_bytes(raw)
    again = wb.open(tmp_path, cache=False)
    assert not torch.equal(again["w"].replica(0).torch(), again["w"].replica(1).torch()), "copies are told apart"


def test_float8_pickled_as_int8_has_the_type_of_the_metadata(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = np.arange(-8, 8, dtype=np.int8)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0,), (16,), "0_0.distcp")
    out.tensors["w"][0].dtype = "float8_e4m3fn"
    ckpt = wb.open(out.write())
    assert ckpt["w"].dtype == torch.float8_e4m3fn and ckpt["w"].torch().view(torch.int8).tolist() == whole.tolist()


def test_stale_metadata_names_both_files(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    first = DistSave(metadata, tmp_path)
    first.shard("w", numbers(4, 4), (0, 0), (4, 4), "0_0.distcp")
    first.shard("gone", numbers(2), (0,), (2,), "0_0.distcp")
    first.write()
    save(tmp_path / "0_0.distcp", flat({"w": numbers(8, 4), "new": numbers(3)}))
    with pytest.raises(
        CorruptError, match=r"'0.metadata' is not the metadata of '0_0.distcp'.*'gone'.*'new'.*two saves"
    ):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(8, 4), "gone": numbers(2)}))
    with pytest.raises(
        CorruptError, match=r"'0.metadata' says that 'w' at \(0, 0\) has shape \[4, 4\], '0_0.distcp' holds \[8, 4\]"
    ):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(4, 4, dtype="float64"), "gone": numbers(2)}))
    with pytest.raises(CorruptError, match=r"'w' is float32, '0_0.distcp' holds float64"):
        wb.open(tmp_path)
    save(tmp_path / "0_0.distcp", flat({"w": numbers(4, 4), "gone": numbers(2), "new": numbers(3)}))
    ckpt = wb.open(tmp_path)
    same(ckpt["w"], numbers(4, 4))
    assert any("'new'" in note and "two saves" in note for note in ckpt.notes)


def test_the_highest_id_is_read_and_matched_whole(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    for number in (0, 10):
        out = DistSave(metadata, tmp_path)
        out.shard("w", numbers(4, seed=number), (0,), (4,), f"0_{number}.distcp")
        out.write(f"{number}.metadata")
    ckpt = wb.open(tmp_path)
    same(ckpt["w"], numbers(4, seed=10))
    assert any("2 saves" in note and "10 is read" in note for note in ckpt.notes)


def test_missing_and_cut_data_files(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = numbers(4, 6)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0, 0), (2, 6), "0_0.distcp")
    out.shard("w", whole, (2, 0), (2, 6), "1_0.distcp")
    out.shard("f", whole, (0, 0), (4, 6), "1_0.distcp", (0, 24))
    out.shard("v", whole, (0, 0), (4, 6), "0_0.distcp")
    out.write()
    data = (tmp_path / "1_0.distcp").read_bytes()
    (tmp_path / "1_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedError, match=r"'1_0.distcp'"):
        wb.open(tmp_path)
    (tmp_path / "1_0.distcp").unlink()
    with pytest.raises(MissingFileError, match=r"'1_0.distcp' is missing"):
        wb.open(tmp_path)
    rest = wb.open(tmp_path, partial=True)
    same(rest["v"], whole)
    assert np.array_equal(rest["w"][:2].numpy(), whole[:2])
    with pytest.raises(MissingFileError):
        rest["w"][3].numpy()
    with pytest.raises(MissingFileError):
        rest["f"].numpy()


def test_bad_metadata(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    out = DistSave(metadata, tmp_path)
    out.shard("w", numbers(4), (0,), (4,), "0_0.distcp")
    out.write(None)
    with pytest.raises(IncompleteError, match=r"no N.metadata: the save was interrupted"):
        wb.open(tmp_path)
    (tmp_path / "0.metadata").write_bytes(b"")
    with pytest.raises(IncompleteError, match=r"'0.metadata' is empty"):
        wb.open(tmp_path)
    save(tmp_path / "0.metadata", {"not": "metadata"})
    with pytest.raises(CorruptError, match="instead of checkpoint metadata"):
        wb.open(tmp_path)
    out.storage = dict.fromkeys(out.storage, "../../etc/passwd")
    out.write()
    with pytest.raises(UnsafeError, match="leaves the checkpoint"):
        wb.open(tmp_path)
    out.storage = {metadata.Index("w", (0,), True, (2, 9), None, (4,)): "0_0.distcp"}
    out.write()
    with pytest.raises(CorruptError, match=r"range \[2, 9\] is not inside a shard of shape \[4\]"):
        wb.open(tmp_path)
    out.storage = {metadata.Index("other", (0,), local_shape=(4,)): "0_0.distcp"}
    save(tmp_path / "0_0.distcp", flat({"other": numbers(4)}))
    save(tmp_path / "0.metadata", metadata.Metadata(out.tensors, out.storage))
    with pytest.raises(CorruptError, match="names 'other'"):
        wb.open(tmp_path)


def test_a_shard_without_a_file_is_a_hole_that_is_told(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    whole = numbers(4, 2)
    out = DistSave(metadata, tmp_path)
    out.shard("w", whole, (0, 0), (2, 2), "0_0.distcp")
    out.tensors["w"].append(metadata.Local((2, 0), (2, 2), "float32", (4, 2)))
    ckpt = wb.open(out.write())
    assert any("1 shards" in note and "holes" in note for note in ckpt.notes)
    assert np.array_equal(ckpt["w"][:2].numpy(), whole[:2])
    with pytest.raises(wb.errors.HoleError):
        ckpt["w"].numpy()


def test_parts_of_paddleformers(tmp_path: Path, metadata: types.SimpleNamespace) -> None:
    for folder, key, seed in (
        ("model_state", "fc.weight", 1), ("optimizer_state", "fc.weight.moment1_0", 2),
        ("master_weight", "fc.weight.w_0", 3), ("ema_state", "fc.weight", 4),
    ):  # fmt: skip
        out = DistSave(metadata, tmp_path / folder)
        out.shard(key, numbers(4, 3, seed=seed), (0, 0), (4, 3), "0_0.distcp", (0, 7))
        out.shard(key, numbers(4, 3, seed=seed), (0, 0), (4, 3), "1_0.distcp", (7, 12))
        out.write()
    ckpt = wb.open(tmp_path)
    assert ckpt.format == "paddle_dist" and len(ckpt) == 4
    for seed, role in enumerate(("param", "exp_avg", "master", "ema"), 1):
        same(ckpt.param("fc.weight", role=role), numbers(4, 3, seed=seed))


# ---- PaddleNLP -------------------------------------------------------------------------------------------------------

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "vocab_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {
    "llama.embed_tokens.weight": ((20, 8), 0), "llama.layers.0.self_attn.q_proj.weight": ((8, 8), 1),
    "llama.layers.0.self_attn.k_proj.weight": ((8, 4), 1), "llama.layers.0.mlp.down_proj.weight": ((12, 8), 0),
    "llama.norm.weight": ((8,), None), "llama.layers.0.mlp.gate_up_fused_proj.weight": ((8, 24), 1),
}  # fmt: skip


def whole_of(name: str, seed: int = 0) -> np.ndarray:
    return numbers(*SHAPES[name][0], seed=seed + list(SHAPES).index(name) * 100)


def piece_of(name: str, tp: int, seed: int = 0) -> np.ndarray:
    axis = SHAPES[name][1]
    whole = whole_of(name, seed)
    return whole if axis is None else np.ascontiguousarray(np.split(whole, 2, axis)[tp])


def write_legacy(
    folder: Path,
    names: list[str],
    *,
    config: bool = True,
    meta: bool = True,
    flat_ranks: int = 0,
    cut_flags: bool = True,
) -> Path:
    """tp 2, and sharding over ``flat_ranks`` with flat slices of each moment (stage 1 v2), or whole moments without."""
    statics = {name: f"linear_{n}.w_0" for n, name in enumerate(names)}
    for tp in range(2):
        label = f"tp{tp:02d}"
        save(folder / f"model_state.{label}.pdparams", flat({name: piece_of(name, tp) for name in names}, statics))
        for shard in range(max(flat_ranks, 1)):
            moments: dict[str, Any] = {}
            for name in names:
                local = piece_of(name, tp, seed=7)
                if flat_ranks:
                    size = -(-local.size // flat_ranks)
                    padded = np.concatenate([local.reshape(-1), np.full(size * flat_ranks - local.size, 9, "float32")])
                    local = padded[shard * size : (shard + 1) * size].copy()
                moments[f"{statics[name]}_moment1_0"] = Pair("m", local)
                moments[f"{statics[name]}_beta1_pow_acc_0"] = Pair("b", np.array([0.9**4], np.float32))
            save(folder / f"optimizer.{label}{f'_shard{shard:02d}' if flat_ranks else ''}.pdopt", moments)
    if config:
        (folder / "config.json").write_text(json.dumps(CONFIG))
    if meta:
        table = {name: [list(piece_of(name, 0).shape), 5, SHAPES[name][1] is not None] for name in names}
        metas = {
            f"tp{tp:02d}": {"structure_name_mapping": statics, "param_meta": table if cut_flags else {}}
            for tp in range(2)
        }
        degrees = {"mp_degree": 2, "pp_degree": 1, "sharding_degree": max(flat_ranks, 1)}
        (folder / "model_meta.json").write_text(json.dumps({"parallel_config": degrees, "sharding_metas": metas}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


MERGED = [name for name in SHAPES if "fused" not in name]


@pytest.mark.parametrize("flat_ranks", [0, 2, 3])
def test_legacy_pieces_are_merged_flat_slices_included(tmp_path: Path, flat_ranks: int) -> None:
    ckpt = wb.open(write_legacy(tmp_path, list(SHAPES), flat_ranks=flat_ranks))
    check_catalog(ckpt.catalog)
    for name in MERGED:
        same(ckpt.param(name), whole_of(name))
        same(ckpt.param(name, role="exp_avg"), whole_of(name, seed=7))
        assert ckpt.param(name, role="beta1_pow").shape == (1,)
    fused = "llama.layers.0.mlp.gate_up_fused_proj.weight"
    for tp in range(2):
        same(ckpt[f"{fused}@tp{tp:02d}"], piece_of(fused, tp))
    assert any("1 parameters are kept apart" in note and "fused" in note for note in ckpt.notes)
    assert ckpt.mesh["axes"]["tp"] == 2 and ckpt.mesh["axes"]["sharding"] == max(flat_ranks, 1)


def test_without_records_the_configuration_must_prove_the_axis(tmp_path: Path) -> None:
    proven = wb.open(write_legacy(tmp_path / "config", MERGED, meta=False))
    for name in MERGED:
        same(proven.param(name), whole_of(name))
    apart = wb.open(write_legacy(tmp_path / "nothing", MERGED, meta=False, config=False))
    for name in MERGED:
        for tp in range(2):
            same(apart[f"{name}@tp{tp:02d}"], piece_of(name, tp))
    flags = wb.open(write_legacy(tmp_path / "flags", MERGED, config=False))
    same(flags.param("llama.norm.weight"), whole_of("llama.norm.weight"))
    assert flags.tensors.set_index("key").loc["llama.norm.weight", "replicas"] == 2
    assert "llama.embed_tokens.weight@tp01" in flags, "cut, but on which axis is not recorded"


def test_axes_that_no_configuration_proves() -> None:
    proven = paddlenlp_axes.proven_axis
    name, config = "llama.layers.0.self_attn.k_proj.weight", {"hidden_size": 8}
    assert proven(name, (8, 2), 2, config, cut=True) == 1
    assert proven(name, (8, 2), 2, config, cut=False) is None, "key heads may be too few to cut"
    assert proven(name, (4, 4), 2, config, cut=True) is None, "two axes are short or unknown"
    assert proven("llama.norm.weight", (8,), 2, {}, cut=True) is None
    assert proven("llama.embed_tokens.weight", (11, 8), 2, CONFIG, cut=True) is None, "a padded vocabulary"
    assert proven("h.0.attn.qkv_proj.weight", (8, 12), 2, CONFIG, cut=True) is None
    assert proven("llama.norm.weight", (8,), 2, CONFIG, cut=False) == paddlenlp_axes.REPLICATED


def test_incomplete_and_mixed_grids(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path / "a", MERGED, flat_ranks=2)
    (folder / "optimizer.tp01_shard00.pdopt").unlink()
    with pytest.raises(IncompleteError, match="1 of 4 optimizer files are missing, first of sharding 0, tp 1"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "b", MERGED)
    (folder / "model_state.tp00.pdparams").unlink()
    with pytest.raises(IncompleteError, match="1 of 2 model_state files are missing, first of tp 0"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "c", MERGED)
    save(folder / "model_state.tp02.pdparams", flat({"w": numbers(2)}))
    with pytest.raises(CorruptError, match=r"'model_state.tp02.pdparams' is of tp rank 2, but the degree of tp is 2"):
        wb.open(folder)
    folder = write_legacy(tmp_path / "d", MERGED, flat_ranks=2)
    short = folder / "optimizer.tp01_shard01.pdopt"
    cut = {key: value[1] for key, value in pickle.loads(short.read_bytes()).items()}
    save(short, {key: Pair("m", value[: max(1, value.size - 3)].copy()) for key, value in cut.items()})
    with pytest.raises(CorruptError, match=r"slices of 2 sharding ranks hold .* elements, the piece of shape .* has"):
        wb.open(folder)


def fleet(folder: Path, *, steps: Callable[[int], int] = lambda _: 5) -> Path:
    for rank in range(2):
        name = folder / f"mp_{rank:02d}_sharding_00_pp_00"
        save(name / "model.pdparams", flat({"w": numbers(2, seed=rank)}))
        save(name / "model_state.pdopt", {"w_moment1_0": numbers(2, seed=rank + 9)})
        save(name / "meta_state.pdopt", {"step": steps(rank)})
    return folder


def test_fleet_ranks_of_two_steps_are_told(tmp_path: Path) -> None:
    good = wb.open(fleet(tmp_path / "a"))
    assert good.step == 5 and list(good) == ["w@tp00", "w@tp01", "w/moment1_0@tp00", "w/moment1_0@tp01"]
    mixed = wb.open(fleet(tmp_path / "b", steps=lambda rank: 5 + rank))
    assert any("different steps" in note and "mp_01_sharding_00_pp_00" in note for note in mixed.notes)
    shutil.copytree(tmp_path / "a" / "mp_01_sharding_00_pp_00", tmp_path / "a" / "mp_01_sharding_01_pp_00")
    with pytest.raises(IncompleteError, match="1 of 4 model files are missing, first of pp 0, sharding 1, tp 0"):
        wb.open(tmp_path / "a")


def unified(folder: Path, **optimizer: Any) -> Path:
    """Two model files, one optimizer file, one of master weights, with their indices."""
    folder.mkdir(exist_ok=True)
    bits = torch.arange(6, dtype=torch.int32).to(torch.uint16).reshape(2, 3)
    groups = {
        "model": [{"a.weight": bits}, {"b.weight": bits.clone()}],
        "optimizer": [{f"{n}.weight/moment1_0": torch.full((2, 3), 2.0) for n in "ab"}],
        "master_weights": [{f"{n}.weight": torch.full((2, 3), 3.0) for n in "ab"}],
    }
    for stem, files in groups.items():
        weights = {}
        for number, tensors in enumerate(files, 1):
            name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(tensors, folder / name, {"format": "np"})
            weights |= dict.fromkeys(tensors, name)
        more = {"master_weights": True, **optimizer} if stem == "optimizer" else {}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weights, **more})
        )
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    return folder


def test_unified_groups_and_their_faults(tmp_path: Path) -> None:
    ckpt = wb.open(unified(tmp_path))
    assert ckpt.format == "paddlenlp" and ckpt.step == 8 and not ckpt.notes
    assert ckpt["a.weight"].dtype == torch.bfloat16 and ckpt["a.weight"].torch().view(torch.uint16)[1, 2] == 5
    assert ckpt.param("b.weight", role="master").key == "master_weights/b.weight"
    assert ckpt.param("b.weight", role="exp_avg").torch()[0, 0] == 2
    found = wb.discover(tmp_path)
    assert found["format"].tolist() == ["paddlenlp"] and found["step"].tolist() == [8] and found["complete"].all()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"'model-00002-of-00002.safetensors', which is absent .* holds 1 of 2"):
        wb.open(tmp_path)
    assert not wb.discover(tmp_path)["complete"].any()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteError, match="1 of 2 files 'model' are missing, first model-00002-of-00002"):
        wb.open(tmp_path)
    unified(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model-00003-of-00004.safetensors")
    with pytest.raises(CorruptError, match="files 'model' are numbered as of 2, 4"):
        wb.open(tmp_path)


def test_a_quantised_optimizer_may_lack_what_its_index_lists(tmp_path: Path) -> None:
    folder = unified(tmp_path, ckpt_quant_stage="O2")
    packed = {f"{n}.weight/moment2_0": torch.ones(2, 3, dtype=torch.int8) for n in "ab"}
    scales = {f"{key}@scales": torch.ones(3) for key in packed}
    save_file({**packed, **scales}, folder / "optimizer-00001-of-00001.safetensors")
    ckpt = wb.open(folder)
    assert any("quantised (O2), 2 scales" in note and "2 of the index's names" in note for note in ckpt.notes)
    assert ckpt["a.weight/moment2_0@scales"].role == "scale" and ckpt["a.weight/moment2_0@scales"].fqn == "a.weight"
    index = folder / "optimizer.safetensors.index.json"
    index.write_text(index.read_text().replace("O2", "O0"))
    with pytest.raises(
        CorruptError, match=r"puts 'a.weight/moment1_0' into 'optimizer-00001-of-00001.safetensors', which lacks it"
    ):
        wb.open(folder)


def test_masters_under_the_models_names_are_told(tmp_path: Path) -> None:
    folder = unified(tmp_path)
    for path in folder.glob("master_weights*"):
        path.unlink()
    (folder / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 8}))
    ckpt = wb.open(folder)
    assert any("skip_save_model_weight" in note for note in ckpt.notes) and ckpt.objects["scheduler"] == {
        "last_epoch": 8
    }


def test_a_run_folder_opens_its_newest_step(samples: Path, tmp_path: Path) -> None:
    for step in (10, 30):
        shutil.copytree(samples / "paddlenlp_legacy", tmp_path / f"checkpoint-{step}")
    state = tmp_path / "checkpoint-10" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 30', '"global_step": 10'))
    assert wb.open(tmp_path).step == 30
    assert wb.discover(tmp_path)["step"].tolist() == [10, 30]


def test_the_text_codec_has_a_name_and_checks_its_bytes(tmp_path: Path) -> None:
    assert cat.CODECS[cat.LATIN1_TEXT] == "latin1_text"
    path = save(tmp_path / "x.pdparams", flat({"w": np.full(300, 200, np.uint8)}), 2)
    raw = path.read_bytes()
    at = raw.index(b"\xc3\x88" * 300)
    path.write_bytes(raw[:at] + b"\xc4" + raw[at + 1 :])  # a character beyond latin-1
    with pytest.raises(CorruptError, match=r"'w': item at byte .* is no text of one character a byte"):
        wb.open(path)["w"].numpy()
