"""Damage, done to copies of real checkpoints: what the fault matrix injects.

::

    sample_ckpts/titan_run/step-2  ──copy──►  case/step-2  ──inject──►  bytes, headers or metadata changed
                                                                        names: what a finding must mention

Faults of the bytes are here and the same for every format; those of the metadata are in faults_metadata. Where a
fault could have happened before the file was written (NaN, another step), checksums are made to fit, so that only
what the values say can give it away. Times of files are all made equal, but where a time is the fault.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import workbench as wb
from tests.megatron_local_files import write_session
from workbench.core import catalog as cat
from workbench.core import codecs

SAMPLES_ROOT = Path(__file__).resolve().parents[1] / "sample_ckpts"
PAGE = 4096
NANS = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00, "float64": 0x7FF8 << 48}
DAY = 86_400
NOW = 1_700_000_000  #: seconds; when every file was written


@dataclass(frozen=True)
class Sample:
    """A checkpoint of ``sample_ckpts``, or one that is written here: what is copied, which of it is opened, and another
    save of the same run.
    """

    title: str
    copied: str
    opened: str = "."
    other: str | None = None
    write: Callable[[Path], object] | None = None


SAMPLES = (
    Sample("DCP", "titan_run/step-2", other="titan_run/step-4"),
    Sample("Megatron torch_dist", "megatron_dp_reshardable"),
    Sample("ByteCheckpoint", "bytecheckpoint_fsdp1_flat", "global_step_3"),
    Sample("DeepSpeed", "deepspeed_zero1", "global_step4"),
    Sample("safetensors", "hf_llama_bf16_sharded"),
    Sample("HF Trainer", "trainer_run/checkpoint-6", other="trainer_run/checkpoint-3"),
    Sample("torch.save", "torch_save/ckpt.pt"),
    Sample("torch.save, legacy", "torch_save/ckpt_legacy.pt"),
    Sample("paddle.distributed", "paddle_dist"),
    Sample("paddle.save", "paddle_save"),
    Sample("PaddleNLP", "paddlenlp_legacy"),
    Sample("torch_checkpointing", "torch_checkpointing/step-3"),
    Sample("GGUF", "gguf/types.gguf"),
    Sample("Keras", "keras/net.keras"),
    Sample("Megatron, NVRx local", "session", write=write_session),
)


class DoesNotApply(Exception):
    """The format has no such thing; the message says why."""


@dataclass(frozen=True)
class Injected:
    """What was done, and the files and tensors of which a finding must name one."""

    how: str
    names: tuple[str, ...]
    older: str | None = None  #: a file that is to be a day older than the others


class Case:
    """A copy of a sample, to be damaged.

    Args:
        healthy: an undamaged copy to copy from; its open checkpoint stands for that of this copy.
    """

    def __init__(self, sample: Sample, folder: Path, healthy: Case | None = None) -> None:
        self.sample = sample
        source = SAMPLES_ROOT / sample.copied if healthy is None else healthy.root
        self.root = folder / source.name
        if sample.write is not None and healthy is None:
            sample.write(self.root)
        elif source.is_dir():
            shutil.copytree(source, self.root)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.root)
        self.path = self.root if sample.opened == "." else self.root / sample.opened
        self.folder = self.path if self.path.is_dir() else self.path.parent
        if healthy is not None:
            self.ckpt = healthy.ckpt
        self.settle()

    @cached_property
    def ckpt(self) -> wb.Checkpoint:
        """The healthy copy; opened before it is damaged."""
        return wb.open(self.path, cache=False)

    @property
    def catalog(self) -> cat.Catalog:
        return self.ckpt.catalog

    def inject(self, fault: Callable[[Case], Injected]) -> Injected:
        """Do the damage; every file is of one age afterwards, but one whose age is the fault."""
        _ = self.ckpt
        done = fault(self)
        self.settle()
        if done.older is not None:
            os.utime(self.folder / done.older, (NOW - DAY, NOW - DAY))
        return done

    def settle(self) -> None:
        """All files of one age."""
        paths = [p for p in self.root.rglob("*") if p.is_file()] if self.root.is_dir() else [self.root]
        for path in paths:
            os.utime(path, (NOW, NOW))

    # ---- where things are ----------------------------------------------------------------------------------------

    def file(self, row: int) -> Path:
        return self.folder / self.catalog.files[self.catalog.file[row]]

    def key(self, row: int) -> str:
        return self.catalog.keys[self.catalog.tensor[row]]

    def span(self, row: int) -> tuple[int, int]:
        """Bytes of the file that a chunk's elements fill, in order."""
        c = self.catalog
        start = int(c.start[row]) + (0 if c.inner is None else int(c.inner[row]))
        if c.codec[row] in (codecs.TORCH_ZIP, codecs.TORCH_PART):
            start += self.ckpt.payloads.item(row)[0].start
        return start, start + int(c.chunk_nbytes[row])

    def solid(self, row: int) -> bool:
        """Whether the chunk's elements lie one after the other."""
        c = self.catalog
        if c.strides is None or c.codec[row] == codecs.TORCH_ZIP:
            return True
        ndim = int(c.ndim[c.tensor[row]])
        return tuple(c.strides[row, :ndim].tolist()) == cat.row_major(c.sizes[row, :ndim].tolist())

    def floats(self, roles: tuple[str, ...] = (), file: str | None = None) -> list[int]:
        """Solid chunk rows of floating point tensors, the largest first."""
        c = self.catalog
        rows = [
            row
            for row in range(c.chunks)
            if c.dtype_of(int(c.tensor[row])).name in NANS and c.chunk_nbytes[row] and self.solid(row)
            if not roles or self.ckpt.roles[c.tensor[row]] in roles
            if file is None or c.files[c.file[row]] == file
        ]
        return sorted(rows, key=lambda row: (-int(c.chunk_nbytes[row]), row))

    def weight(self) -> int:
        """The largest chunk of a weight."""
        return (self.floats(("param",)) or self.floats())[0]

    def data_files(self) -> list[str]:
        """Files that hold chunks, the largest first."""
        c = self.catalog
        there = {c.files[number] for number in np.unique(c.file).tolist()}
        return sorted(there, key=lambda name: (-(self.folder / name).stat().st_size, name))

    def keys_in(self, file: str) -> tuple[str, ...]:
        c = self.catalog
        return tuple(dict.fromkeys(self.key(row) for row in range(c.chunks) if c.files[c.file[row]] == file))

    def siblings(self) -> list[str]:
        """The largest family of data files that ranks or parts wrote alike."""
        families: dict[str, list[str]] = {}
        for name in self.data_files():
            families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
        return sorted(max(families.values(), key=len))

    # ---- changing bytes ------------------------------------------------------------------------------------------

    def poke(self, path: Path, at: int, data: bytes) -> None:
        with open(path, "r+b") as handle:
            handle.seek(at)
            handle.write(data)

    def peek(self, path: Path, at: int, count: int) -> bytes:
        with open(path, "rb") as handle:
            handle.seek(at)
            return handle.read(count)

    def reseal(self, name: str) -> None:
        """Make the CRCs of all archives in a file fit its bytes."""
        path = self.folder / name
        data = bytearray(path.read_bytes())
        c = self.catalog
        if c.format in ("dcp", "megatron_dist") and name.endswith(".distcp"):
            rows = [row for row in range(c.chunks) if c.files[c.file[row]] == name]
            ranges = {(int(c.start[row]), int(c.stop[row])) for row in rows}
        else:
            ranges = {(0, len(data))}
        for start, stop in sorted(ranges):
            if data[start : start + 4] == b"PK\x03\x04":
                data[start:stop] = resealed(bytes(data[start:stop]))
        path.write_bytes(data)


def resealed(archive: bytes) -> bytes:
    """A zip archive with every CRC computed anew, in the directory and behind each record."""
    data = bytearray(archive)
    end = data.rindex(b"PK\x05\x06")
    count, _, at = struct.unpack_from("<HLL", data, end + 10)
    if at == 0xFFFFFFFF or count == 0xFFFF:
        end64 = data.rindex(b"PK\x06\x06")
        count, _, at = struct.unpack_from("<QQQ", data, end64 + 32)
    for _ in range(count):
        flags, size = struct.unpack_from("<H", data, at + 8)[0], struct.unpack_from("<L", data, at + 20)[0]
        names, extras, comments = struct.unpack_from("<3H", data, at + 28)
        offset = struct.unpack_from("<L", data, at + 42)[0]
        begin = offset + 30 + sum(struct.unpack_from("<2H", data, offset + 26))
        crc = zlib.crc32(data[begin : begin + size])
        struct.pack_into("<L", data, at + 16, crc)
        if flags & 8 and data[begin + size : begin + size + 4] == b"PK\x07\x08":
            struct.pack_into("<L", data, begin + size + 4, crc)
        elif not flags & 8:
            struct.pack_into("<L", data, offset + 14, crc)
        at += 46 + names + extras + comments
    return bytes(data)


def checked_records(data: bytes) -> list[tuple[str, int, int]]:
    """Name, start and stop of every record with a CRC-32, of every archive in a file: found by the end records, and
    read by the standard library.
    """
    found = []
    for match in re.finditer(b"PK\x05\x06", data):
        at, end = match.start(), match.start() + 22
        size, offset = struct.unpack_from("<LL", data, at + 12)
        directory = at
        if data[at - 20 : at - 16] == b"PK\x06\x07":
            directory = at - 20 - 56
            size, offset = struct.unpack_from("<QQ", data, directory + 40)
        start = directory - size - offset
        infos = zipfile.ZipFile(io.BytesIO(data[start:end])).infolist()
        markers = [info.CRC for info in infos if info.filename.endswith(("/byteorder", "/version"))]
        if markers and not any(markers):
            continue  # saved without checksums
        for info in infos:
            head = start + info.header_offset
            begin = head + 30 + sum(struct.unpack_from("<2H", data, head + 26))
            if info.compress_size:
                found.append((info.filename, begin, begin + info.compress_size))
    return found


# ---- faults of the bytes -------------------------------------------------------------------------------------------


def bit_flip(case: Case) -> Injected:
    row = case.weight()
    start, stop = case.span(row)
    itemsize = case.catalog.dtype_of(int(case.catalog.tensor[row])).itemsize
    at = start + (stop - start) // itemsize // 2 * itemsize
    case.poke(case.file(row), at, bytes([case.peek(case.file(row), at, 1)[0] ^ 1]))
    return Injected("the last bit of one number of the largest weight", (case.key(row), case.file(row).name))


def zeroed_page(case: Case) -> Injected:
    for row in case.floats(("param",)) + case.floats():
        start, stop = case.span(row)
        page = -(-start // PAGE) * PAGE
        inside = case.peek(case.file(row), page, PAGE)
        if page > start and page + PAGE < stop and np.count_nonzero(np.frombuffer(inside, np.uint8)) > PAGE // 2:
            break
    else:  # no chunk is that large: the page cuts several
        row = case.weight()
        page = case.span(row)[0] // PAGE * PAGE
    size = min(PAGE, case.file(row).stat().st_size - page)
    case.poke(case.file(row), page, bytes(size))
    return Injected("4,096 bytes of a file, from page to page, are zero", (case.file(row).name,))


def zeroed_tail(case: Case) -> Injected:
    name = case.data_files()[0]
    size = (case.folder / name).stat().st_size
    at = max((size - 2 * PAGE) // PAGE * PAGE, size // 2 // PAGE * PAGE)
    case.poke(case.folder / name, at, bytes(size - at))
    return Injected("the last two pages of the largest file are zero", (Path(name).name,))


def truncation(case: Case) -> Injected:
    name = case.data_files()[0]
    path = case.folder / name
    os.truncate(path, path.stat().st_size * 6 // 10)
    return Injected("the largest file lost its last 40 %", (Path(name).name,))


def missing_file(case: Case) -> Injected:
    if case.path.is_file():
        raise DoesNotApply("the checkpoint is one file")
    name = case.data_files()[0]
    (case.folder / name).unlink()
    ranks = re.fullmatch(r"optimizer\.tp0(\d)_pp0(\d)_shard0(\d)\.pdopt", name)
    words = (f"pp {ranks[2]}, sharding {ranks[3]}, tp {ranks[1]}",) if ranks else ()
    return Injected("the largest file is gone", (Path(name).name, name, *words))


def swapped_ranks(case: Case) -> Injected:
    family = case.siblings()
    if len(family) < 2:
        raise DoesNotApply("one rank writes everything")
    sizes = {name: (case.folder / name).stat().st_size for name in family}
    alike = [name for name in family[1:] if sizes[name] == sizes[family[0]]]
    family = [family[0], (alike or family[1:])[0]]  # of one size, if there are such: harder to see
    a, b = (case.folder / name for name in family)
    left, right = a.read_bytes(), b.read_bytes()
    a.write_bytes(right)
    b.write_bytes(left)
    keys = case.keys_in(family[0]) + case.keys_in(family[1])
    return Injected(f"`{family[0]}` and `{family[1]}` changed places", (a.name, b.name, *keys))


def other_step(case: Case) -> Injected:
    """One shard of another save: a real one where the run has one, else every number a little different."""
    family = case.siblings()
    if len(family) < 2 and case.sample.other is None:
        raise DoesNotApply("the checkpoint is one file" if case.path.is_file() else "each part is one file")
    if case.sample.other is not None:
        name = family[-1] if len(family) > 1 else "optimizer.pt"
        shutil.copyfile(SAMPLES_ROOT / case.sample.other / name, case.folder / name)
        return Injected(f"`{name}` is of the run's other save", (name, *case.keys_in(name)))
    name = family[-1]
    path = case.folder / name
    data = bytearray(path.read_bytes())
    done: set[tuple[int, int]] = set()
    for row in case.floats(file=name):
        span = case.span(row)
        if any(a < span[1] and span[0] < b for a, b in done):
            continue
        done.add(span)
        _earlier(case, row, data)
    path.write_bytes(data)
    case.reseal(name)
    return Injected(
        f"`{name}` is of a save one step earlier (weights 0.1 % less, checksums fit)", (path.name, *case.keys_in(name))
    )


def nan(case: Case) -> Injected:
    row = case.weight()
    start, stop = case.span(row)
    dtype = case.catalog.dtype_of(int(case.catalog.tensor[row]))
    at = start + (stop - start) // dtype.itemsize // 3 * dtype.itemsize
    case.poke(case.file(row), at, NANS[dtype.name].to_bytes(dtype.itemsize, "little"))
    case.reseal(case.file(row).relative_to(case.folder).as_posix())
    return Injected("one NaN in the largest weight, checksums fit", (case.key(row), case.file(row).name))


def _earlier(case: Case, row: int, data: bytearray) -> None:
    start, stop = case.span(row)
    dtype = case.catalog.dtype_of(int(case.catalog.tensor[row]))
    raw = np.frombuffer(bytes(data[start:stop]), dtype.raw)
    if dtype.name == "bfloat16":
        wide = (raw.astype(np.uint32) << 16).view(np.float32) * np.float32(0.99)
        data[start:stop] = (wide.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        values = raw.view(dtype.numpy)
        step = case.ckpt.roles[case.catalog.tensor[row]] == "step"
        data[start:stop] = (values - 1 if step else values * values.dtype.type(0.999)).astype(values.dtype).tobytes()


BYTES: dict[str, Callable[[Case], Injected]] = {
    "bit flip": bit_flip,
    "zeroed page": zeroed_page,
    "zeroed tail": zeroed_tail,
    "truncation": truncation,
    "missing file": missing_file,
    "swapped rank files": swapped_ranks,
    "shard of another step": other_step,
    "NaN": nan,
}
