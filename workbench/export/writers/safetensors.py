"""safetensors: one file, or Hugging Face's shards with their index.

::

    model-00001-of-00003.safetensors     0        8              8 + n, a multiple of 8
    …                                    │ n: u64 │ JSON, spaces │ tensors, no gaps │
    model.safetensors.index.json         {"metadata": {"total_size": …}, "weight_map": {name: file}}

Tensors of a file are stored in the order of their element type (largest alignment first), then of their names, as
safetensors itself writes them; its files and ours are equal byte for byte.

Source: safetensors 0.8 ``src/tensor.rs`` (``prepare``, ``Dtype``); huggingface_hub 1.x ``serialization/_base.py``
(``split_state_dict_into_shards_factory``), ``constants.SAFETENSORS_WEIGHTS_FILE_PATTERN``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from workbench.core.words import plural
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.filemap import FileMap, Pieces

MAX_SHARD_SIZE = 5_000_000_000  #: bytes; Hugging Face's default
MAX_HEADER = 100_000_000  #: bytes; safetensors refuses longer headers
#: The types in the order in which they are stored: the reverse of safetensors 0.8's list.
ORDER = (
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E5M2FNUZ",
    "F8_E4M3FNUZ",
    "F8_E8M0",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "F6_E3M2",
    "F6_E2M3",
    "F4",
    "BOOL",
)
RESERVED = "__metadata__"


def one_file(pieces: Pieces, name: str, *, metadata: Mapping[str, str] | None = None) -> FileMap:
    """Write all pieces in one file.

    Args:
        metadata: in addition to ``{"format": "pt"}``, which transformers requires.

    Raises:
        UnsupportedFormatError: an element type without a name in safetensors; the message names the tensor.
        UsageError: two tensors of the same name, or a reserved name.
    """
    types = [_type(pieces, at) for at in range(len(pieces))]
    _check_names(pieces.names)
    rank = {name: at for at, name in enumerate(ORDER)}
    order = sorted(range(len(pieces)), key=lambda at: (rank[types[at]], pieces.names[at].encode("utf-8", "replace")))
    laid = pieces.take(np.array(order, np.int64))
    ends = np.cumsum(laid.nbytes)
    starts = ends - laid.nbytes
    header: dict[str, object] = {RESERVED: {"format": "pt", **(metadata or {})}}
    for at, old in enumerate(order):
        shape = list(laid.shape_of(at))
        if laid.dtype_of(at).name == "float4_e2m1fn_x2":  # torch counts pairs
            shape[-1] *= 2
        header[laid.names[at]] = {
            "dtype": types[old],
            "shape": shape,
            "data_offsets": [int(starts[at]), int(ends[at])],
        }
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise UsageError("a tensor's name is not valid Unicode text; rename it") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UsageError(
            f"file {name!r} would have a header of {plural(len(text), 'byte')}, over the {MAX_HEADER:,} that "
            "safetensors can read; write more, smaller shards (max_shard_size)"
        )
    head = len(text).to_bytes(8, "little") + text
    return FileMap(name, len(head) + int(laid.nbytes.sum()), ((0, head),), laid, len(head) + starts)


def shards(pieces: Pieces, *, max_shard_size: int = MAX_SHARD_SIZE, stem: str = "model") -> list[FileMap]:
    """Return files of up to ``max_shard_size`` bytes of tensors each (a larger tensor has its own file), and their
    index.

    One ``model.safetensors`` without an index if everything fits. Raises as :func:`one_file`.
    """
    if max_shard_size < 1:
        raise UsageError(f"max_shard_size={max_shard_size}: must be 1 byte or more")
    _check_names(pieces.names)
    groups = _split(pieces.nbytes.tolist(), max_shard_size)
    if len(groups) == 1:
        return [one_file(pieces, f"{stem}.safetensors")]
    names = [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    maps = [one_file(pieces.take(np.array(group)), name) for group, name in zip(groups, names, strict=True)]
    weights = {pieces.names[at]: name for group, name in zip(groups, names, strict=True) for at in group}
    index = {"metadata": {"total_size": int(pieces.nbytes.sum())}, "weight_map": weights}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    return [*maps, FileMap.of_bytes(f"{stem}.safetensors.index.json", data, pieces.shape.shape[1])]


def _split(nbytes: list[int], most: int) -> list[list[int]]:
    """Group positions by shard, greedily and in order; a tensor that is too large has its own shard."""
    groups: list[list[int]] = []
    under_way: list[int] = []
    filled = 0
    for at, size in enumerate(nbytes):
        if size > most:
            groups.append([at])
            continue
        if filled + size > most:
            groups.append(under_way)
            under_way, filled = [], 0
        under_way.append(at)
        filled += size
    if under_way or not groups:
        groups.append(under_way)
    return groups


def _type(pieces: Pieces, at: int) -> str:
    dtype = pieces.dtype_of(at)
    name = "F4" if dtype.name == "float4_e2m1fn_x2" and pieces.ndim[at] else dtype.safetensors
    if name not in ORDER:
        instead = (
            " or write the format torch, which has it (--to torch)" if dtype.torch_name and not dtype.packed else ""
        )
        raise UnsupportedFormatError(
            f"tensor {pieces.names[at]!r}: safetensors has no element type {dtype}; leave it out{instead}"
        )
    return name


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"two tensors would be named {name!r}; rename one of them, or leave it out")
        if name == RESERVED:
            raise UsageError(f"a tensor may not be named {RESERVED!r} in safetensors; rename it")
        seen.add(name)
