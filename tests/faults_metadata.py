"""Damage to what a checkpoint says of itself: pickled metadata, JSON indices and headers, directories of archives.

Pickles are changed as objects and written again. Classes of packages that are not installed are made up on the way,
under their names, so that what is written names them as before.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.faults import Case, DoesNotApply, Injected

EMBEDDING = "embedding.word_embeddings.weight"
PICKLED = ("paddle_save", "paddlenlp")  #: formats that are pickles and nothing else


def lost_chunk(case: Case) -> Injected:
    kind, catalog = case.catalog.format, case.catalog
    if kind in ("dcp", "megatron_dist", "bytecheckpoint"):
        name = _metadata(case)
        with _edited(case.folder / name) as document:
            index = _victims(document)[0]
            tensor = document.state_dict_metadata[index.fqn]
            tensor.chunks = [c for c in tensor.chunks if tuple(c.offsets) != tuple(index.offset)]
            del document.storage_data[index]
        return Injected("a chunk is in the metadata no more", (index.fqn, *_parts_of(case, index.fqn)))
    if kind == "paddle_dist":
        with _edited(case.folder / "0.metadata") as document:
            key = "model.embed.weight"
            gone = document.state_dict_metadata[key].pop()
            index = next(
                i for i in document.storage_metadata if i.tensor_key == key and i.global_offset == gone.global_offset
            )
            del document.storage_metadata[index]
        return Injected("a chunk is in the metadata no more", (key,))
    if kind == "safetensors":
        index = str(catalog.meta["index"])
        document = json.loads((case.folder / index).read_text())
        key = sorted(document["weight_map"])[5]
        del document["weight_map"][key]
        (case.folder / index).write_text(json.dumps(document))
        return Injected("a tensor is in the index no more", (key,))
    if kind == "hf_trainer":
        with _header(case.folder / "model.safetensors") as header:
            key = [name for name in header if name != "__metadata__"][3]
            del header[key]
        return Injected("a tensor is in the header no more, its bytes are", (key, "model.safetensors"))
    if kind == "gguf":
        infos = gguf_infos(case.path)
        data, start = case.path.read_bytes(), gguf_start(case.path)
        low, high, _ = infos[3]
        count = struct.pack("<Q", len(infos) - 1)
        head = data[:8] + count + data[16:low] + data[high : infos[-1][1]]
        case.path.write_bytes(head + bytes(-len(head) % 32) + data[start:])
        return Injected("a tensor is in the header no more, its bytes are", (infos[4][2], case.path.name))
    if kind == "keras":
        data = case.path.read_bytes()
        group = data.index(b"0\0\0\0\0\0\0\x001\0", data.index(b"\x89HDF"))  # names of the variables: "0" and "1"
        case.poke(case.path, data.index(b"SNOD\1\0\2\0", group) + 6, b"\1\0")
        case.reseal(case.path.name)
        return Injected("a variable is in its group no more, its bytes are, checksums fit", (case.path.name,))
    if kind == "torch_checkpointing":
        path = case.folder / "optimizer_1.pt"
        with _resaved(path) as document:
            del document["state"]["norm.weight"]["step"]
        return Injected("a rank's step is in the optimizer no more", ("optimizer.state.norm.weight.step", path.name))
    if kind == "megatron_local":
        path = case.folder / "1" / "iter_0000010_1_local.pt"
        with _resaved(path) as document:
            document.sharded_state_dict["model"][EMBEDDING].data = None
        return Injected("a rank's part of a weight is in its state no more", (EMBEDDING, path.name))
    if kind == "deepspeed":
        path = case.folder / "mp_rank_00_model_states.pt"
        with _resaved(path) as document:
            key = sorted(document["module"])[3]
            del document["module"][key]
        return Injected("a weight is in the state dict no more", (key, path.name))
    if kind == "torch_save":
        with _resaved(case.path, legacy="legacy" in case.path.name) as document:
            del document["optimizer"]["state"][3]["exp_avg_sq"]
        names = ("optimizer.state.3", *_fqn(case, "optimizer.state.3.exp_avg"))
        return Injected("a moment is in the optimizer no more", names)
    name = "model.pdopt" if kind == "paddle_save" else "optimizer.tp00_pp00_shard00.pdopt"
    with _edited(case.folder / name) as document:
        key = next(k for k in document if "moment2_0" in k)
        del document[key]
    fqns = {f for f in case.ckpt.fqns if f is not None}
    return Injected("a moment is in the optimizer no more", (key, name, *fqns))


def overlapping_chunk(case: Case) -> Injected:
    kind = case.catalog.format
    if kind in ("dcp", "megatron_dist", "bytecheckpoint"):
        name = _metadata(case)
        with _edited(case.folder / name) as document:
            index = _victims(document)[0]
            tensor = document.state_dict_metadata[index.fqn]
            chunk = next(c for c in tensor.chunks if tuple(c.offsets) == tuple(index.offset))
            axis = next(a for a, at in enumerate(index.offset) if at > 0)
            moved = [*index.offset]
            moved[axis] -= 1
            info = document.storage_data.pop(index)
            chunk.offsets = torch.Size(moved)
            document.storage_data[type(index)(fqn=index.fqn, offset=torch.Size(moved), index=index.index)] = info
            if hasattr(document, "all_tensor_metadata"):
                told = document.all_tensor_metadata.pop(index)
                document.all_tensor_metadata[type(index)(index.fqn, torch.Size(moved), index.index)] = told
        return Injected("a chunk begins one row too early", (index.fqn, *_parts_of(case, index.fqn)))
    if kind == "paddle_dist":
        with _edited(case.folder / "0.metadata") as document:
            key = "model.embed.weight"
            chunk = document.state_dict_metadata[key][-1]
            index = next(
                i for i in document.storage_metadata if i.tensor_key == key and i.global_offset == chunk.global_offset
            )
            where = document.storage_metadata.pop(index)
            moved = (chunk.global_offset[0] - 1, *chunk.global_offset[1:])
            for one in (chunk, index):  # paddle's own index is frozen
                object.__setattr__(one, "global_offset", moved)
            document.storage_metadata[index] = where
        return Injected("a chunk begins one row too early", (key,))
    if kind in ("safetensors", "hf_trainer"):
        name = "model.safetensors" if kind == "hf_trainer" else case.siblings()[0]
        with _header(case.folder / name) as header:
            key = [n for n in header if n != "__metadata__"][3]
            start, stop = header[key]["data_offsets"]
            header[key]["data_offsets"] = [start - 64, stop - 64]
        return Injected("a tensor begins 64 bytes too early", (key, name))
    if kind == "gguf":
        _, high, key = gguf_infos(case.path)[3]
        (offset,) = struct.unpack("<Q", case.peek(case.path, high - 8, 8))
        case.poke(case.path, high - 8, struct.pack("<Q", offset - 32))
        return Injected("a tensor begins 32 bytes too early", (key, case.path.name))
    if kind == "keras":
        first, second = (int(case.catalog.start[row]) for row in range(2))
        data = case.path.read_bytes()
        begin = data.index(b"\x89HDF")
        at = data.index(struct.pack("<BBQ", 3, 1, second - begin)) + 2
        case.poke(case.path, at, struct.pack("<Q", first - begin + 64))
        case.reseal(case.path.name)
        return Injected("a tensor begins within another, checksums fit", (*case.catalog.keys, case.path.name))
    if kind == "torch_checkpointing":
        raise DoesNotApply("boxes follow from the placements; no offset is stored")
    raise DoesNotApply("every tensor has bytes of its own; bytes are shared only by views, on purpose")


def wrong_dtype(case: Case) -> Injected:
    kind = case.catalog.format
    if kind in ("dcp", "megatron_dist", "bytecheckpoint"):
        with _edited(case.folder / _metadata(case)) as document:
            fqn = _victims(document)[0].fqn
            properties = document.state_dict_metadata[fqn].properties
            same = {torch.float32: torch.int32, torch.bfloat16: torch.float16}
            properties.dtype = same[properties.dtype]
            # ByteCheckpoint keeps the tensor's own pickle beside it, and believes that
            for index in getattr(document, "all_tensor_metadata", {}):
                if index.fqn == fqn:
                    told = document.all_tensor_metadata[index]
                    document.all_tensor_metadata[index] = told.replace(b"FloatStorage", b"IntStorage")
        return Injected("the metadata states another type of the same size", (fqn, *_parts_of(case, fqn)))
    if kind == "paddle_dist":
        with _edited(case.folder / "0.metadata") as document:
            key = "model.embed.weight"
            for chunk in document.state_dict_metadata[key]:
                chunk.dtype = "int32"
        return Injected("the metadata states another type of the same size", (key,))
    if kind in ("safetensors", "hf_trainer"):
        name = "model.safetensors" if kind == "hf_trainer" else case.siblings()[1]
        with _header(case.folder / name) as header:
            key = next(n for n in header if n != "__metadata__" and ".layers.1." in n)
            header[key]["dtype"] = {"BF16": "F16", "F32": "I32"}[header[key]["dtype"]]
        return Injected("a header states another type of the same size", (key, name))
    if kind == "gguf":
        infos = gguf_infos(case.path)
        at = next(number for number, (*_, key) in enumerate(infos) if key == "blk.0.q4_0.weight")
        case.poke(case.path, infos[at][1] - 12, struct.pack("<I", 8))
        return Injected("the header states another type of another size", (infos[at + 1][2], case.path.name))
    if kind == "keras":
        at = case.path.read_bytes().index(struct.pack("<BBBBI", 0x11, 0x20, 31, 0, 4))
        double = struct.pack("<BBBBIHHBBBBI", 0x11, 0x20, 63, 0, 8, 0, 64, 52, 11, 0, 52, 1023)
        case.poke(case.path, at, double)
        case.reseal(case.path.name)
        return Injected("a header states another type of another size, checksums fit", (*case.catalog.keys,))
    if kind == "torch_checkpointing":
        with _edited(case.folder / "metadata.pkl") as document:
            _spec(document, "output.weight")["dtype"] = "torch.int32"
        return Injected("the metadata states another type of the same size", ("model.output.weight",))
    if kind in ("torch_save", "deepspeed", "megatron_local"):
        name = case.path.name if kind == "torch_save" else case.siblings()[0]
        path = case.folder / name
        data = path.read_bytes()
        assert data.count(b"FloatStorage") > 0
        path.write_bytes(data.replace(b"FloatStorage", b"ShortStorage"))
        case.reseal(name)
        return Injected("the pickle states another type of another size, checksums fit", (name,))
    name = "model.pdopt" if kind == "paddle_save" else "optimizer.tp00_pp00_shard00.pdopt"
    path = case.folder / name
    data = path.read_bytes()
    assert data.count(b"\x8c\x02f4") > 0
    path.write_bytes(data.replace(b"\x8c\x02f4", b"\x8c\x02i4"))
    return Injected("the pickle states another type of the same size", (name, *case.keys_in(name)))


def tampered_index(case: Case) -> Injected:
    kind = case.catalog.format
    if kind in ("dcp", "megatron_dist", "bytecheckpoint"):
        with _edited(case.folder / _metadata(case)) as document:
            first, second = _victims(document)[:2]
            document.storage_data[first] = document.storage_data[second]
        keys = (first.fqn, second.fqn, *_parts_of(case, first.fqn), *_parts_of(case, second.fqn))
        return Injected("a chunk's place is that of another tensor's", keys)
    if kind == "paddle_dist":
        with _edited(case.folder / "0.metadata") as document:
            index = next(i for i in document.storage_metadata if i.tensor_key == "model.embed.weight")
            files = sorted(set(document.storage_metadata.values()) - {document.storage_metadata[index]})
            document.storage_metadata[index] = files[-1]
        return Injected("the metadata places a chunk in another file", ("model.embed.weight",))
    if kind == "gguf":
        ends = {key: high for _, high, key in gguf_infos(case.path)}
        a, b = ends["blk.0.q4_0.weight"] - 8, ends["blk.0.iq4_nl.weight"] - 8
        left, right = case.peek(case.path, a, 8), case.peek(case.path, b, 8)
        case.poke(case.path, a, right)
        case.poke(case.path, b, left)
        return Injected("the metadata exchanges two tensors", ("blk.0.q4_0.weight", case.path.name))
    if kind == "torch_checkpointing":
        with _edited(case.folder / "metadata.pkl") as document:
            mesh = _spec(document, "output.weight")["mesh_spec"]
            mesh["mesh_data"] = (mesh["mesh_data"][1], mesh["mesh_data"][0], *mesh["mesh_data"][2:])
        return Injected("two ranks have each other's place on the mesh", ("metadata.pkl", "model_0.pt"))
    if kind == "safetensors":
        path = case.folder / str(case.catalog.meta["index"])
        document = json.loads(path.read_text())
        key = sorted(document["weight_map"])[5]
        document["weight_map"][key] = next(f for f in case.siblings() if f != document["weight_map"][key])
        path.write_text(json.dumps(document))
        return Injected("the metadata places a tensor in another file", (key,))
    if kind == "hf_trainer":
        with _header(case.folder / "model.safetensors") as header:
            alike = [n for n in header if n.endswith(("q_proj.weight", "o_proj.weight"))][:2]
            a, b = (header[name]["data_offsets"] for name in alike)
            header[alike[0]]["data_offsets"], header[alike[1]]["data_offsets"] = b, a
        return Injected("the metadata exchanges two tensors of one shape", (*alike, "model.safetensors"))
    name = case.path.name if kind == "torch_save" else case.data_files()[0]
    if kind in PICKLED or not (case.folder / name).read_bytes().startswith(b"PK"):
        raise DoesNotApply("no position is stored: the file is read from its beginning")
    data = bytearray((case.folder / name).read_bytes())
    records = [m.start() for m in re.finditer(rb"PK\x01\x02", data)]
    one, other = records[-6:-4] if len(records) > 5 else records[-2:]
    offset = struct.unpack_from("<L", data, one + 42)[0]
    struct.pack_into("<L", data, other + 42, offset)
    (case.folder / name).write_bytes(data)
    return Injected("the directory of the archive gives one record the place of another", (name,))


def stale_metadata(case: Case) -> Injected:
    """Metadata of an older save beside the data of this one."""
    kind = case.catalog.format
    if kind in ("dcp", "megatron_dist", "bytecheckpoint", "paddle_dist"):
        name = "0.metadata" if kind == "paddle_dist" else _metadata(case)
        if case.sample.other:
            from tests.faults import SAMPLES_ROOT

            (case.folder / name).write_bytes((SAMPLES_ROOT / case.sample.other / name).read_bytes())
        return Injected("the metadata is of a save of the day before, laid out alike", (name,), older=name)
    if kind == "safetensors":
        path = case.folder / str(case.catalog.meta["index"])
        document = json.loads(path.read_text())
        key = sorted(document["weight_map"])[-1]
        del document["weight_map"][key]
        document["metadata"]["total_size"] -= case.ckpt[key].nbytes
        path.write_text(json.dumps(document))
        return Injected("the index is of a save before a tensor was added", (key, path.name))
    if kind in ("hf_trainer", "paddlenlp"):
        path = case.folder / "trainer_state.json"
        document = json.loads(path.read_text())
        document["global_step"] -= 3
        path.write_text(json.dumps(document))
        return Injected("the trainer's state is three steps older", ("trainer", case.folder.name, path.name))
    if kind == "deepspeed":
        (case.root / "latest").write_text("global_step3")
        return Injected("the run's tracker names another step, which does not exist", ("latest",))
    if kind == "torch_checkpointing":
        return Injected(
            "the metadata is of a save of the day before, laid out alike", ("metadata.pkl",), older="metadata.pkl"
        )
    raise DoesNotApply("the metadata is part of the data file")


METADATA: dict[str, Callable[[Case], Injected]] = {
    "lost chunk": lost_chunk,
    "overlapping chunk": overlapping_chunk,
    "wrong dtype": wrong_dtype,
    "tampered index": tampered_index,
    "stale metadata": stale_metadata,
}


# ---- pickles -------------------------------------------------------------------------------------------------------


class _Faking(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _made_up(module, name)


def _made_up(module: str, name: str) -> Any:
    """The class of that name; one of our own where the package is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pass
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        parent = ".".join(parts[:count])
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
    if not hasattr(sys.modules[module], name):
        made = type(name, (), {"__module__": module, "__hash__": _hash, "__eq__": lambda a, b: vars(a) == vars(b)})
        setattr(sys.modules[module], name, made)
    return getattr(sys.modules[module], name)


def _hash(self: Any) -> int:
    return hash(repr(sorted(vars(self).items(), key=repr)))


@contextmanager
def _edited(path: Path) -> Iterator[Any]:
    """A pickle as an object; written again, in its protocol, when the block is left."""
    before = set(sys.modules)
    data = path.read_bytes()
    try:
        document = _Faking(io.BytesIO(data)).load()
        yield document
        path.write_bytes(pickle.dumps(document, protocol=data[1]))
    finally:
        for name in set(sys.modules) - before:
            if not getattr(sys.modules[name], "__spec__", None):
                del sys.modules[name]


@contextmanager
def _resaved(path: Path, legacy: bool = False) -> Iterator[Any]:
    """A file of torch.save as an object; saved again by torch when the block is left."""
    before = set(sys.modules)
    faking = types.SimpleNamespace(Unpickler=_Faking, load=lambda f, **_: _Faking(f).load(), __name__="faking")
    try:
        document = torch.load(path, weights_only=False, pickle_module=faking)
        yield document
        torch.save(document, path, _use_new_zipfile_serialization=not legacy)
    finally:
        for name in set(sys.modules) - before:
            if not getattr(sys.modules[name], "__spec__", None):
                del sys.modules[name]


@contextmanager
def _header(path: Path) -> Iterator[dict[str, Any]]:
    """A safetensors header as a dict; written again, padded to its length, when the block is left."""
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    yield header
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size
    path.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])


# ---- who is hit ----------------------------------------------------------------------------------------------------


def gguf_infos(path: Path) -> list[tuple[int, int, str]]:
    """Bytes and name of each tensor info of a little endian file, found by the names that the reader lists."""
    import workbench as wb

    data, found, at = path.read_bytes(), [], 24
    for key in wb.open(path, cache=False):
        low = data.index(struct.pack("<Q", len(key)) + key.encode(), at)
        at = low + 8 + len(key)
        high = at + 4 + 8 * struct.unpack_from("<I", data, at)[0] + 12
        found.append((low, high, key))
    return found


def gguf_start(path: Path) -> int:
    """First byte of the data of a file."""
    return -(-gguf_infos(path)[-1][1] // 32) * 32


def _spec(document: Any, path: str) -> Any:
    """The sharding metadata of a tensor of torch_checkpointing's model."""
    (group,) = document["metadata"]["model"]["nested_path_to_metadata"][json.dumps([path])]
    return group["sharding_metadata"]["data"]


def _metadata(case: Case) -> str:
    return "model/.metadata" if case.catalog.format == "bytecheckpoint" else ".metadata"


def _victims(document: Any) -> list[Any]:
    """Chunks of weights that do not begin at 0, of tensors of different sizes."""
    found = []
    for index in document.storage_data:
        tensor = document.state_dict_metadata[index.fqn]
        state = ("optim", "exp_avg", "rng", "step", "_extra_state")
        if index.offset and any(index.offset) and not any(word in index.fqn for word in state):
            found.append((tuple(tensor.size), index))
    by_size = dict(reversed(found))
    return [index for _, index in sorted(by_size.items(), key=lambda item: (-len(item[0]), item[0]))]


def _parts_of(case: Case, fqn: str) -> tuple[str, ...]:
    """Tensors of the catalog that a stored one was taken apart into: layers of a stack, parameters of a flat one."""
    stems = [part for part in re.split(r"[./]", fqn) if not part.isdigit()]
    if fqn.endswith("_flat_param"):
        prefix = fqn.removesuffix("_flat_param")
        return tuple(k for k in case.catalog.keys if k.removeprefix("model.").startswith(prefix))
    return tuple(k for k in case.catalog.keys if [p for p in re.split(r"[./]", k) if not p.isdigit()] == stems)


def _fqn(case: Case, key: str) -> tuple[str, ...]:
    found = case.catalog.index.get(key)
    fqn = None if found is None else case.ckpt.fqns[found]
    return () if fqn is None else (fqn,)
