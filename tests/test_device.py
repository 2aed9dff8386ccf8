"""Onto a device: the same path on the CPU, in tiny buffers, and on a lane whose copies happen as late as they may."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import workbench as wb
from tests.properties import chunkings, examples, in_turn, shapes
from tests.reader_suite import same_bits
from tests.test_export import key_of
from tests.test_reading import stored
from tests.test_reshard_placement import split_by_torch, torch_placements
from workbench import errors
from workbench.checkpoint import Checkpoint
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import ALL, by_name, nbytes_of
from workbench.core.mesh.mesh import Mesh
from workbench.core.mesh.placement import Flat, Only, PartedShard, Replicate, Shard, StridedShard, of_torch
from workbench.core.place import Place
from workbench.core.storage import PreadSource, SourcePool
from workbench.core.transfer import regions
from workbench.export.sharding.rules import PlacementRule, Rules
from workbench.export.sharding.target import Target
from workbench.load import device as module
from workbench.load.device import to_device
from workbench.load.onto_device import loads as device_loads
from workbench.load.onto_device import memory as device_memory
from workbench.load.onto_device import ring
from workbench.load.onto_device.lane import HostLane, measure_peak
from workbench.load.onto_device.results import DeviceResults

ROOT = Path(__file__).resolve().parents[1]
TRUTHS = sorted(path.stem for path in (ROOT / "tests" / "truth").glob("*.safetensors"))
SMALL = {"buffer": 4096, "buffers": 3, "threads": 2}


class LateLane(HostLane):
    """Copies are done when somebody waits for them, and no sooner: a device that is always behind."""

    def __init__(self):
        self.waiting = []

    @contextmanager
    def queue(self):
        waiting = self.waiting

        class Late(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.copy_.default:
                    waiting.append(args[:2])
                    return args[0]
                return func(*args, **kwargs or {})

        with Late():
            yield

    def mark(self):
        return _Mark(self, len(self.waiting))

    def join(self):
        self.drain()

    def drain(self):
        self.work(len(self.waiting))

    def work(self, until):
        for at in range(until):
            if self.waiting[at] is not None:
                target, source = self.waiting[at]
                target.copy_(source)
                self.waiting[at] = None


class _Mark:
    def __init__(self, lane, at):
        self.lane, self.at = lane, at

    def synchronize(self):
        self.lane.work(self.at)


def opened(folder, catalog, io="mmap"):
    return Checkpoint(Place(folder), catalog, SourcePool(Place(folder), catalog.files, catalog.file_stats, io), {})


def piece(whole, steps, mesh, coordinate):
    """What a rank holds of a tensor, cut axis by axis with torch; ``None`` if it does not hold it."""
    for axis, one in steps:
        count, at = mesh.size(axis), coordinate[axis]
        if isinstance(one, Only) and at not in one.coordinates:
            return None
        if isinstance(one, Replicate | Only):
            continue
        dim = 0 if isinstance(one, Flat) else one.dim
        whole = whole.reshape(-1) if isinstance(one, Flat) else whole
        size = whole.shape[dim]
        parts = [size]
        if isinstance(one, StridedShard):
            parts = [len(part) for part in torch.arange(size).split(-(-size // one.split_factor))]
        elif isinstance(one, PartedShard):
            parts = list(one.parts)
        cut = []
        for part in whole.split(parts, dim):
            each = -(-part.shape[dim] // count)
            low = min(each * at, part.shape[dim])
            cut.append(part.narrow(dim, low, min(each, part.shape[dim] - low)))
        whole = torch.cat(cut, dim)
    return whole


@pytest.mark.parametrize("name", TRUTHS)
def test_every_tensor_of_every_format_is_the_truth_in_tiny_buffers(samples, name):
    truth = load_file(samples.parent / "tests/truth" / f"{name}.safetensors")
    with wb.open(samples / name) as ckpt:
        found = {want: key_of(ckpt, want) for want in truth}
        read = ckpt.state_dict()
        got = to_device(ckpt, "cpu", role=None, **SMALL)
        default = to_device(ckpt, "cpu")
    assert list(got) == list(read)
    for key, want in read.items():
        same_bits(got[key], want, key)
    direct = {want: key for want, key in found.items() if key in got}
    assert len(direct) > 0.7 * len(truth)
    for want, key in direct.items():
        same_bits(got[key], truth[want], key)
    for key, one in default.items():
        same_bits(one, read[key], key)


@pytest.mark.parametrize("text, name", in_turn(["tp=2", "fsdp=4", "pp=2", "fsdp=3,tp=2"], list(TRUTHS), 2))
def test_every_rank_of_every_format_gets_its_piece(samples, name, text):
    mesh = Mesh.parse(text)
    with wb.open(samples / name) as ckpt:
        if name == "dcp_single_odd" and "pp" in text:  # its tensors are in no layers
            with pytest.raises(errors.UsageError, match="needs a Rule for 'pp'"):
                to_device(ckpt, "cpu", role=None, mesh=mesh, rank=0)
            return
        read, layouts = ckpt.state_dict(), Target.of(ckpt, mesh).layouts
        for rank in range(mesh.world_size):
            coordinate = mesh.coordinate(rank)
            want = {
                k: piece(t, layout.steps, mesh, coordinate)
                for (k, t), layout in zip(read.items(), layouts, strict=True)
            }
            got = to_device(ckpt, "cpu", role=None, mesh=mesh, mesh_coord=coordinate, **SMALL)
            assert list(got) == [key for key, one in want.items() if one is not None]
            for key, one in got.items():
                same_bits(one, want[key].contiguous(), key)


@examples(200)
@given(st.data())
def test_any_chunks_on_any_mesh_in_any_ring_are_the_dense_slices(tmp_path_factory, data):
    shape = data.draw(shapes(max_dims=4, max_side=7))
    dense = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    chunks = data.draw(chunkings(shape)) if all(shape) else [((0,) * len(shape), shape)]
    order = data.draw(st.none() | st.permutations(range(len(shape))))
    folder = tmp_path_factory.mktemp("case")
    catalog = stored(folder, dense, chunks, order=order, big=data.draw(st.booleans()))
    ckpt = opened(folder, catalog, data.draw(st.sampled_from(["mmap", "pread"])))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=2))
    mesh = Mesh(**{f"a{k}": n for k, n in enumerate(sizes)})
    placements = data.draw(torch_placements(len(shape), len(sizes)))
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    rules = Rules((PlacementRule("t", [of_torch(one) for one in placements]),))
    lane = data.draw(st.sampled_from([HostLane(), LateLane()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "lane_to", lambda device: lane)
        patch.setattr(module, "SMALLEST", 64)
        patch.setattr(regions, "SPREAD", data.draw(st.sampled_from([1, 2, 100])))
        patch.setattr(device_loads, "RUN", data.draw(st.sampled_from([1, 8, 1 << 20])))
        got = to_device(
            ckpt,
            "cpu",
            role=None,
            mesh=mesh,
            rules=rules,
            rank=rank,
            dtype=data.draw(st.sampled_from([None, "bf16"])),
            buffer=data.draw(st.sampled_from([64, 100, 4096])),
            buffers=data.draw(st.integers(1, 4)),
            threads=2,
        )
    want = split_by_torch(torch.from_numpy(dense), placements, sizes, mesh.coordinates([rank])[0].tolist())
    assert got["t"].shape == want.shape and got["t"].dtype == torch.int32 and torch.equal(got["t"], want)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_element_type_comes_as_a_lazy_tensor_gives_it(tmp_path, dtype):
    noise = np.random.default_rng(3).integers(0, 256, nbytes_of(dtype, 6 * 16), np.uint8)
    if dtype.kind == "b":
        noise &= 1
    (tmp_path / "f").write_bytes(b"x" + noise.tobytes())
    builder = CatalogBuilder("test", Place(tmp_path))
    builder.tensor("t", dtype, (6, 16))
    builder.chunk("t", (0, 0), (6, 16), "f", 1, 1 + len(noise))
    builder.file("f")
    ckpt = opened(tmp_path, builder.build())
    want = ckpt["t"].torch()
    got = to_device(ckpt, "cpu", role=None, dtype="bf16" if dtype.bits < 16 else None, **SMALL)["t"]
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.view(-1).view(torch.uint8).numpy().tobytes() == noise.tobytes()
    columns = {"mesh": Mesh(tp=2), "rules": Rules((PlacementRule("t", {"tp": Shard(1)}),)), "rank": 1}
    if dtype.packed:
        with pytest.raises(errors.UnsupportedFormatError, match=r"'t'.*share bytes"):
            to_device(ckpt, "cpu", role=None, **columns)
    else:
        half = to_device(ckpt, "cpu", role=None, **columns, **SMALL)["t"]
        raw = noise.view(f"V{dtype.itemsize}").reshape(6, 16)[:, 8:]
        assert half.shape == (6, 8) and half.view(-1).view(torch.uint8).numpy().tobytes() == raw.tobytes()


def floats(folder):
    """A safetensors file of every float type that is cast, with values of all kinds, and of types that are not."""
    from safetensors.torch import save_file

    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    wide = torch.randn(300, 50, dtype=torch.float64) * torch.logspace(-50, 50, 50, dtype=torch.float64)
    tensors = {
        "double.weight": wide,
        "single.weight": wide.float(),
        "half.weight": bits.view(torch.float16).reshape(256, 256),
        "brain.weight": bits.view(torch.bfloat16).reshape(256, 256),
        "small.weight": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "number.weight": bits.reshape(256, 256),
        "scalar.weight": torch.tensor(0.1),
        "empty.weight": torch.empty(0, 3),
    }
    save_file({key: one.clone() for key, one in tensors.items()}, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", ["bf16", "float16", torch.float32])
@pytest.mark.parametrize("tp", [1, 2])
def test_casts_are_torchs(tmp_path, dtype, tp):
    tensors = floats(tmp_path)
    wanted = {"bf16": torch.bfloat16, "float16": torch.float16}.get(dtype, dtype)
    rules = Rules((PlacementRule("double|single|half|brain", {"tp": Shard(1)}),))
    got = to_device(wb.open(tmp_path), "cpu", dtype=dtype, mesh=Mesh(tp=tp), rules=rules, rank=tp - 1, **SMALL)
    assert set(got) == set(tensors)
    for key, one in tensors.items():
        cut = one.chunk(tp, 1)[-1] if key.split(".")[0] in ("double", "single", "half", "brain") else one
        want = cut.to(wanted) if one.dtype.itemsize > 1 and one.is_floating_point() else cut
        assert got[key].dtype == want.dtype
        same_bits(without_nan(got[key]), without_nan(want), key)


def without_nan(tensor):
    """NaN as 7: which NaN comes of a cast depends on the instructions that torch uses."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return tensor
    return torch.where(tensor.isnan(), 7, tensor)


def rows(folder, count=1024, width=4096):
    """16 MiB of float32 in two files, rows one after the other; nothing is aligned."""
    dense = np.random.default_rng(4).standard_normal((count, width), np.float32)
    builder = CatalogBuilder("test", Place(folder))
    builder.tensor("t.weight", by_name("float32"), dense.shape)
    for number, part in enumerate(np.split(dense, 2)):
        (folder / f"f{number}").write_bytes(b"xyz" + part.tobytes())
        builder.chunk("t.weight", (number * len(part), 0), part.shape, f"f{number}", 3, 3 + part.nbytes)
        builder.file(f"f{number}")
    return builder.build(), dense


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("late", [False, True])
def test_long_tensors_take_many_rounds_of_the_ring(tmp_path, tp, late, monkeypatch):
    catalog, dense = rows(tmp_path)
    lane = LateLane() if late else HostLane()
    monkeypatch.setattr(ring, "lane_to", lambda device: lane)
    rules = Rules((PlacementRule("t", {"tp": Shard(1)}),))
    seen = []
    got = to_device(
        opened(tmp_path, catalog),
        "cpu",
        mesh=Mesh(tp=tp),
        rules=rules,
        rank=tp - 1,
        buffer=1 << 20,
        progress=seen.append,
    )
    assert (got["t.weight"].numpy() == np.split(dense, tp, axis=1)[-1]).all()
    assert seen == sorted(set(seen)) and seen[-1] == 1.0 and len(seen) >= 16 // tp
    assert seen == sorted(set(seen)) and seen[-1] == 1.0 and len(seen) >= 16 // tp


def test_bytes_that_are_read_are_those_that_are_wanted(tmp_path, monkeypatch):
    """A quarter of the rows is read and nothing else; half of the columns brings the other half along."""
    catalog, dense = rows(tmp_path)
    read, real = [], PreadSource.read_into

    def counted(self, buffer, start):
        read.append(len(buffer))
        real(self, buffer, start)

    monkeypatch.setattr(PreadSource, "read_into", counted)
    for dim, ranks, times in ((0, 4, 1), (1, 2, 2)):
        read.clear()
        rules = Rules((PlacementRule("t", {"tp": Shard(dim)}),))
        got = to_device(opened(tmp_path, catalog), "cpu", mesh=Mesh(tp=ranks), rules=rules, rank=1, threads=3)
        assert (got["t.weight"].numpy() == np.split(dense, ranks, axis=dim)[1]).all()
        assert 0.95 * times * dense.nbytes / ranks < sum(read) <= times * dense.nbytes / ranks


def test_neighbours_in_a_file_are_read_as_one(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    tensors = {f"t{n}.weight": torch.randn(5, n + 1) for n in range(500)}
    save_file(tensors, tmp_path / "model.safetensors")
    reads, real = [], PreadSource.read_into
    monkeypatch.setattr(PreadSource, "read_into", lambda *one: reads.append(len(one[1])) or real(*one))
    got = to_device(wb.open(tmp_path), "cpu", select=r"t\d*[02468]\.")
    assert len(got) == 250 and len(reads) <= 3 and sum(reads) < (tmp_path / "model.safetensors").stat().st_size
    for key, one in got.items():
        same_bits(one, tensors[key], key)


def test_the_default_device_of_the_caller_is_not_used(samples):
    ckpt = wb.open(samples / "hf_llama_tied_fp32")
    with torch.device("meta"):
        got = to_device(ckpt, "cpu", mesh=Mesh(tp=2), rank=1, dtype="bf16")
    assert all(one.device.type == "cpu" and one.dtype == torch.bfloat16 for one in got.values())


@contextmanager
def nothing_stays(monkeypatch):
    """No tensor of the results lives on, though the error that is looked at keeps its traceback; no thread either."""
    made, real = [], DeviceResults.allocate

    def watched(self, device, *, scratch):
        real(self, device, scratch=scratch)
        made.extend(map(weakref.ref, [*self._tensors, *self._bytes, *self._elements, self._scratch]))

    monkeypatch.setattr(DeviceResults, "allocate", watched)
    yield
    gc.collect()
    assert made and not [one for one in made if one() is not None]
    assert not [one for one in threading.enumerate() if one.name.startswith("workbench-device")]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_a_reader_is_raised_and_nothing_stays(tmp_path, monkeypatch, late):
    catalog, _ = rows(tmp_path)
    lane = LateLane() if late else HostLane()
    monkeypatch.setattr(ring, "lane_to", lambda device: lane)
    reads, real = [], PreadSource.read_into

    def failing(self, buffer, start):
        reads.append(start)
        if len(reads) > 9:
            raise errors.TruncatedError("the file ends")
        real(self, buffer, start)

    monkeypatch.setattr(PreadSource, "read_into", failing)
    with nothing_stays(monkeypatch), pytest.raises(errors.TruncatedError, match="the file ends") as info:
        to_device(opened(tmp_path, catalog), "cpu", buffer=1 << 20)
    assert info.value.__traceback__ is not None and len(reads) < 30
    assert not late or not any(lane.waiting)


def test_raising_in_tick_ends_the_pass_and_nothing_stays(tmp_path, monkeypatch):
    catalog, _ = rows(tmp_path)

    def stop(share):
        raise KeyboardInterrupt

    with nothing_stays(monkeypatch), pytest.raises(KeyboardInterrupt):
        to_device(opened(tmp_path, catalog), "cpu", buffer=1 << 20, progress=stop)


def test_files_that_changed_or_ended_are_the_same_errors_as_elsewhere(tmp_path):
    catalog, _ = rows(tmp_path)
    ckpt = opened(tmp_path, catalog)
    os.utime(tmp_path / "f1", ns=(1, 1))
    with pytest.raises(errors.ChangedError, match="'f1'"):
        to_device(ckpt, "cpu")
    os.truncate(tmp_path / "f1", 5)
    with pytest.raises(errors.ChangedError, match="'f1'"):
        to_device(ckpt, "cpu")


def test_a_hole_is_told_before_anything_is_read_or_allocated(tmp_path, monkeypatch):
    dense = np.arange(48, dtype=np.int32).reshape(12, 4)
    catalog = stored(tmp_path, dense, [((0, 0), (4, 4)), ((4, 0), (4, 4)), ((8, 0), (4, 4))], skip={1})
    ckpt = opened(tmp_path, catalog)
    rules = Rules((PlacementRule("t", {"fsdp": Shard(0)}),))
    got = to_device(ckpt, "cpu", role=None, mesh=Mesh(fsdp=3), rules=rules, rank=2)
    assert got["t"].tolist() == dense[8:].tolist()
    monkeypatch.setattr(DeviceResults, "allocate", None)
    with pytest.raises(errors.HoleError, match=r"\[4:8, 0:4\]"):
        to_device(ckpt, "cpu", role=None)


def test_chunks_that_overlap_are_compared(tmp_path):
    (tmp_path / "f").write_bytes(bytes([0, 1, 2, 3, 2, 3, 4, 5, 9, 9]))
    builder = CatalogBuilder("test", Place(tmp_path))
    for key, second in (("same", 4), ("other", 5)):
        builder.tensor(key, by_name("uint8"), (6,))
        builder.chunk(key, (0,), (4,), "f", 0, 4)
        builder.chunk(key, (2,), (4,), "f", second, second + 4)
    ckpt = opened(tmp_path, builder.build())
    assert to_device(ckpt, "cpu", role=None, select="same")["same"].tolist() == list(range(6))
    half = to_device(
        ckpt,
        "cpu",
        role=None,
        select="same",
        mesh=Mesh(tp=2),
        rank=1,
        rules=Rules((PlacementRule("", {"tp": Shard(0)}),)),
    )
    assert half["same"].tolist() == [3, 4, 5]
    with pytest.raises(errors.CorruptError, match=r"'other'.*overlaps"):
        to_device(ckpt, "cpu", role=None)


def test_memory_is_checked_before_anything_is_allocated(tmp_path, monkeypatch):
    catalog, dense = rows(tmp_path)
    ckpt = opened(tmp_path, catalog)
    scratch = module.BUFFER // module.PARTS
    monkeypatch.setattr(device_memory, "_free", lambda device: dense.nbytes + scratch - 1)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceResults, "allocate", None)
        told = rf"1 tensor needs {dense.nbytes:,} bytes and {scratch:,} bytes of scratch on cpu.*: 1 too few"
        with pytest.raises(errors.DeviceMemoryError, match=told) as info:
            to_device(ckpt, "cpu")
    assert isinstance(info.value, MemoryError)
    to_device(ckpt, "cpu", dtype="bf16")
    monkeypatch.setattr(device_memory, "_free", lambda device: dense.nbytes + scratch)
    to_device(ckpt, "cpu")


def test_free_memory_of_a_gpu_counts_what_torch_keeps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)
    gpu = torch.device("cuda", 0)
    assert device_memory.check_room(gpu, [1, 512], scratch=276) == 1024
    with pytest.raises(errors.DeviceMemoryError, match=r"cuda:0, which has 1,300 free: 1 too few"):
        device_memory.check_room(gpu, [1, 512], scratch=277)


@pytest.mark.parametrize(
    ("device", "options", "told"),
    [
        ("meta", {}, "no memory to read into"),
        ("gpu", {}, "device='gpu'"),
        ("cpu", {"buffer": 100}, "4,096"),
        ("cpu", {"buffers": 0}, "one or more buffers"),
        ("cpu", {"select": "nothing"}, "no tensor is selected"),
        ("cpu", {"rank": 1}, "pass one with mesh="),
        ("cpu", {"mesh_coord": {"tp": 1}}, "pass one with mesh="),
        ("cpu", {"mesh": Mesh(tp=2)}, "choose one with"),
        ("cpu", {"mesh": Mesh(tp=2), "rank": 0, "mesh_coord": {"tp": 0}}, "choose one with"),
        ("cpu", {"mesh": Mesh(tp=2), "rank": 2}, "rank 2"),
        ("cpu", {"mesh": Mesh(tp=2), "mesh_coord": {"pp": 0}}, "'pp'"),
        ("cpu", {"dtype": "int8"}, "int8"),
    ],
)
def test_wrong_arguments_are_told(samples, device, options, told):
    with pytest.raises((errors.UsageError, errors.UnsupportedFormatError), match=told):
        to_device(wb.open(samples / "hf_llama_tied_fp32"), device, **options)


def test_a_mesh_of_one_rank_needs_no_coordinate(samples):
    ckpt = wb.open(samples / "hf_llama_tied_fp32")
    assert set(to_device(ckpt, "cpu", mesh=Mesh(tp=1))) == set(to_device(ckpt, torch.device("cpu")))


def test_the_peak_is_measured_on_any_device():
    assert measure_peak("cpu") > 0.1
