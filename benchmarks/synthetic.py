"""Synthetic DCP metadata of any size, byte for byte as torch writes it, without the data files' bytes.

Names are repeated per chunk, as in real saves: they reach the coordinator from different ranks, so pickle does not
share them (~200 bytes of ``.metadata`` a chunk). Data files are created sparse, of the right length.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

ITEM = 4096 + 1577  #: bytes of one stored item: payload of a (16, 64) float32 chunk + archive overhead
ROWS, COLUMNS = 16, 64  #: of a chunk
BATCH = 1000  #: elements of a list or dictionary between two of the pickle's MARKs
DCP = "torch.distributed.checkpoint.metadata"
OFFSET = 1 << 30  #: stands for an item's
FRAME = 1 << 16  #: bytes


def write_dcp_metadata(folder: str | Path, tensors: int = 2000, ranks: int = 512) -> int:
    """Write ``.metadata`` (and sparse ``.distcp`` files) of ``tensors`` row-sharded tensors; returns the chunks."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".metadata", "wb") as handle:
        _Metadata(handle, tensors, ranks).write()
    _sparse(folder, dict.fromkeys(range(ranks), tensors * ITEM))
    return tensors * ranks


def finish_sparse(folder: Path, metadata: Any, ends: Mapping[int, int]) -> None:
    """``.metadata``, and data files by rank that are holes of the right length."""
    with open(folder / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)
    _sparse(folder, ends)


def _sparse(folder: Path, ends: Mapping[int, int]) -> None:
    for rank, end in ends.items():
        with open(folder / f"__{rank}_0.distcp", "wb") as handle:
            os.ftruncate(handle.fileno(), end)


class _Metadata:
    """The pickle of torch's objects, which at ten million chunks would take 25 GB, written from repeated pieces.

    Objects are numbered as pickle does; ``memo`` has the numbers of those that occur again. Frames end after the first
    object beyond their size, mostly inside a record.
    """

    def __init__(self, out: BinaryIO, tensors: int, ranks: int) -> None:
        self.out, self.tensors, self.ranks = out, tensors, ranks
        self.ops, self.memo, self.count = bytearray(), dict[str, int](), 0

    def write(self) -> None:
        self.out.write(b"\x80\x04")
        self.new("Metadata")
        self.text("state_dict_metadata")
        self.tensor_entries()
        self.text("planner_data")
        self.stored(b"}")
        for t in range(self.tensors):
            self.mark(t)
            self.text(f"tensor {t}")
            for part in self.name(t).split(".", 1):
                self.fresh(part)
            self.stored(b"\x86")
        self.marked(self.tensors)
        self.text("storage_data")
        self.stored(b"}")
        self.items()
        self.text("storage_meta")
        self.new("StorageMeta")
        self.text("checkpoint_id")
        self.fresh("synthetic")
        for field in ("save_id", "load_id"):
            self.text(field)
            self.ops += b"N"
        self.text("modules")
        self.stored(b"]")
        self.ops += b"ub"
        self.text("version")
        self.fresh("1.0.0")
        self.ops += b"ub."
        self.frames(0)

    def tensor_entries(self) -> None:
        """Write ``TensorStorageMetadata`` of each tensor, with its chunks."""
        self.stored(b"}")
        for t in range(self.tensors):
            self.mark(t)
            self.fresh(self.name(t), f"tensor {t}")
            self.new("TensorStorageMetadata")
            self.properties()
            self.text("size")
            self.size(ROWS * self.ranks, COLUMNS)
            self.text("chunks")
            self.stored(b"]")
            if t < 2:
                begin, count = len(self.ops), self.count
                for r in range(self.ranks):
                    self.mark(r, b"e")
                    self.chunk(r)
                self.ops += b"e"
                steady, each = bytes(self.ops[begin:]), self.count - count  # in the second, nothing is new
            else:
                self.ops += steady
                self.count += each
            self.ops += b"ub"
            self.frames()
        self.marked(self.tensors)

    def items(self) -> None:
        """Write ``MetadataIndex`` and ``_StorageInfo`` of each chunk, in turn."""
        for r in range(self.ranks):
            self.mark(r)
            self.item(self.name(0), r, 0)
        count, begin = self.count, len(self.ops)
        ranks = []  # of each item what differs by rank, once nothing in it is new
        for r in range(self.ranks):
            self.item("NAME", r, OFFSET)
            first, _, rest = bytes(self.ops[begin:]).partition(_text("NAME"))
            between, _, last = rest.partition(_number(OFFSET))
            ranks.append(between)
            del self.ops[begin:]
        each, self.count = (self.count - count) // self.ranks, count
        for t in range(1, self.tensors):
            low, high = first + _text(self.name(t)), _number(t * ITEM) + last
            r = 0
            while r < self.ranks:
                self.mark(t * self.ranks + r)
                stop = min(self.ranks, r + BATCH - (t * self.ranks + r) % BATCH)
                self.ops += low + (high + low).join(ranks[r:stop]) + high
                r = stop
            self.count += each * self.ranks
            self.frames()
        self.marked(self.tensors * self.ranks)

    def item(self, name: str, rank: int, offset: int) -> None:
        self.new("MetadataIndex")
        self.text("fqn")
        self.fresh(name)
        self.text("index")
        self.ops += _number(rank)
        self.text("offset")
        self.size(rank * ROWS, 0)
        self.ops += b"ub"
        self.new("_StorageInfo", "torch.distributed.checkpoint.filesystem")
        self.text("relative_path")
        self.fresh(f"__{rank}_0.distcp")
        self.text("offset")
        self.ops += _number(offset)
        self.text("length")
        self.ops += _number(ITEM) + b"ub"

    def chunk(self, rank: int) -> None:
        self.new("ChunkStorageMetadata")
        self.text("offsets")
        self.size(rank * ROWS, 0)
        self.text("sizes")
        self.size(ROWS, COLUMNS)
        self.ops += b"ub"

    def properties(self) -> None:
        self.text("properties")
        self.made("TensorProperties")
        self.ops += b"("
        self.named("float32", "torch")
        if "strided" in self.memo:
            self.text("strided")
        else:
            self.named("_get_layout", "torch.serialization")
            self.fresh("torch.strided")
            self.stored(b"\x85")
            self.stored(b"R", "strided")
        self.ops += b"\x89"
        if "contiguous" in self.memo:
            self.text("contiguous")
        else:
            self.named("_MEM_FORMAT_ENCODING")
            self.ops += b"K\x00"
            self.stored(b"\x85")
            self.stored(b"R", "contiguous")
        self.ops += b"\x89"
        self.stored(b"t")
        self.ops += b"b"

    def name(self, tensor: int) -> str:
        return f"model.layers.{tensor // 10}.mlp.experts.{tensor % 10}.up_proj.weight_{tensor:05d}"

    # ---- opcodes ----

    def stored(self, ops: bytes, name: str = "") -> None:
        """An object that enters the memo."""
        self.ops += ops + b"\x94"
        if name:
            self.memo[name] = self.count
        self.count += 1

    def text(self, text: str) -> None:
        """A string or another object that occurs again, where it is the same object."""
        if (number := self.memo.get(text)) is None:
            self.stored(_text(text)[:-1], text)
        else:
            self.ops += bytes((0x68, number)) if number < 256 else b"j" + number.to_bytes(4, "little")

    def fresh(self, text: str, name: str = "") -> None:
        self.stored(_text(text)[:-1], name)

    def named(self, name: str, module: str = DCP) -> None:
        """A class or another global."""
        if f"{module} {name}" in self.memo:
            self.text(f"{module} {name}")
            return
        self.fresh(module) if module == "torch" else self.text(module)
        self.fresh(name)
        self.stored(b"\x93", f"{module} {name}")

    def made(self, name: str, module: str = DCP) -> None:
        self.named(name, module)
        self.stored(b")\x81")

    def new(self, name: str, module: str = DCP) -> None:
        """An instance, and the beginning of its state."""
        self.made(name, module)
        self.stored(b"}")
        self.ops += b"("

    def size(self, *numbers: int) -> None:
        self.named("Size", "torch")
        self.ops += b"".join(map(_number, numbers))
        self.stored(b"\x86")
        self.stored(b"\x85")
        self.stored(b"R")

    def mark(self, element: int, end: bytes = b"u") -> None:
        """Begin a batch of elements, before the first of each."""
        if element % BATCH == 0:
            self.ops += end + b"(" if element else b"("

    def marked(self, elements: int) -> None:
        """End a dictionary."""
        self.ops += b"u(u" if elements % BATCH == 0 else b"u"

    def frames(self, least: int = FRAME) -> None:
        while len(self.ops) >= FRAME + 1024 or (self.ops and not least):
            end = self.ops.find(b"\x85\x94R\x94", FRAME) + 4 if len(self.ops) >= FRAME + 1024 else len(self.ops)
            self.out.write(b"\x95" + end.to_bytes(8, "little") + self.ops[:end])
            del self.ops[:end]


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes((0x8C, len(data))) + data + b"\x94"


def _number(number: int) -> bytes:
    for op, width in ((b"K", 1), (b"M", 2), (b"J", 4)):
        if number < 1 << 8 * width - (width == 4):
            return op + number.to_bytes(width, "little")
    raise OverflowError(number)


def write_llama(folder: str | Path, nbytes: int, ranks: int = 4, moved: str | None = None) -> None:
    """Llama-shaped bf16 weights of ``nbytes``: ``hf/`` safetensors, and ``dcp/`` saved by ``ranks`` row shards.

    The DCP files hold ``torch.save`` items as torch writes them, laid down through torch's own serialiser.
    """
    import io

    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder = Path(folder)
    (folder / "dcp").mkdir(parents=True, exist_ok=True)
    (folder / "hf").mkdir(exist_ok=True)
    torch.manual_seed(0)
    shapes = {"embed.weight": (16000, 2048)}
    layer = 0
    while sum(2 * a * b for a, b in shapes.values()) < nbytes:
        for name, shape in (
            ("q", (2048, 2048)),
            ("k", (512, 2048)),
            ("o", (2048, 2048)),
            ("up", (5632, 2048)),
            ("down", (2048, 5632)),
            ("norm", (2048, 1)),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = shape
        layer += 1
    state, storage = {}, {}
    opened = ExitStack()
    files = [opened.enter_context((folder / "dcp" / f"__{r}_0.distcp").open("wb")) for r in range(ranks)]
    shard: dict[str, torch.Tensor] = {}
    count = 0
    for name, shape in shapes.items():
        tensor = torch.randn(shape, dtype=torch.float32)
        if moved and re.search(moved, name):  # as if some steps had been taken
            tensor *= 1 + 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
        tensor = tensor.bfloat16()
        shard[name] = tensor
        chunks = []
        for r, piece in enumerate(tensor.chunk(ranks)):
            at = r * (-(-shape[0] // ranks))
            buffer = io.BytesIO()
            torch.save(piece.clone(), buffer)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size((at, 0)), piece.size()))
            index = dcp.MetadataIndex(name, torch.Size((at, 0)), r)
            storage[index] = _StorageInfo(f"__{r}_0.distcp", files[r].tell(), buffer.tell())
            files[r].write(buffer.getbuffer())
        state[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.bfloat16), tensor.size(), chunks)
        if sum(t.nbytes for t in shard.values()) > nbytes // 4:
            count += 1
            save_file(shard, folder / "hf" / f"model-{count:05d}.safetensors")
            shard = {}
    if shard:
        save_file(shard, folder / "hf" / f"model-{count + 1:05d}.safetensors")
    opened.close()
    metadata = dcp.Metadata(state, None, storage, dcp.StorageMeta(checkpoint_id="synthetic"), "1.0.0")
    with open(folder / "dcp" / ".metadata", "wb") as handle:
        pickle.dump(metadata, handle, protocol=4)
