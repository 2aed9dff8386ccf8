"""One file of a DeepSpeed checkpoint: its tree, and the byte ranges of its tensors.

::

    bf16_zero_pp_rank_0_…_optim_states.pt       torch.save zip
      data.pkl   {"optimizer_state_dict": …}    decoded; tensors remain references
      data/6     131,945 × f32                  located: bytes start to stop of the file

Every rank writes the same structure: 512 stage-3 ``model_states`` have byte-identical ``data.pkl`` (except for device
names), so one of them is decoded for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from workbench.core import ziparchive
from workbench.core.catalog import reach
from workbench.core.dtypes import DType, by_name
from workbench.core.pickles import unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import StorageRef, TensorRef
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError, TruncatedError
from workbench.formats.torch.file import load_tree, storage_range

_DEVICE = re.compile(rb"X\x06\x00\x00\x00cuda:[0-9]")  #: a storage's device, the only difference between local ranks
_SAME_DEVICE = b"X\x06\x00\x00\x00cuda:0"
MAX_DEPTH = 60


class Located(NamedTuple):
    """A tensor in a file: payload bytes ``[start, stop)``, offset ``inner`` of the first element, element strides."""

    file: str
    start: int
    stop: int
    inner: int
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    big: bool


class States:
    """A decoded file. Files with equal pickles share ``tree``; ``end`` is that of ``LegacyFile.stop``."""

    def __init__(self, file: str, tree: Any, storages: Any, big: bool, same: bool, end: int | None = None) -> None:
        self.file, self.tree, self.same, self.end = file, tree, same, end
        self._storages, self._big = storages, big

    def locate(self, ref: TensorRef, what: str) -> Located:
        """Return where a tensor's bytes are stored.

        Raises:
            CorruptError: its storage is missing, has the wrong size, or is shorter than the tensor.
        """
        dtype = by_name(ref.dtype)
        if not isinstance(ref.storage, StorageRef):
            raise CorruptError(f"{self.file!r}: {what} has no storage")
        start, stop = self._storages(ref.storage)
        last = reach(ref.shape, ref.stride)
        end = (ref.storage_offset + last) * dtype.itemsize
        if last and end > stop - start:
            raise CorruptError(
                f"{self.file!r}: {what} ends at byte {end:,} of a storage of {plural(stop - start, 'byte')} at byte "
                f"{start:,}; the file is damaged"
            )
        inner = ref.storage_offset * dtype.itemsize if last else 0
        return Located(self.file, start, stop, inner, dtype, ref.shape, ref.stride, self._big and dtype.itemsize > 1)


class FileDecoder:
    """Decodes files of one kind; keeps the last pickle, because the next rank's is usually equal."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._seen: tuple[bytes, Any] | None = None

    def read(self, file: str, *, any_tree: bool = False) -> States:
        """Decode one file's tree, which must be a dict unless ``any_tree`` is set.

        Raises:
            MissingFileError, TruncatedError, CorruptError: missing, truncated, damaged, or not DeepSpeed's dict.
        """
        what = repr(file)
        view = self.place.window(file)
        if view[:4] != b"PK\x03\x04":
            return self._legacy(file, any_tree)
        archive = ziparchive.read_directory(view, what=what)
        record = archive.find("data.pkl")
        if record is None:
            raise CorruptError(f"{what} is a zip archive without data.pkl, so not from torch.save")
        pickled = archive.read(record)
        plain = _DEVICE.sub(_SAME_DEVICE, pickled)
        same = self._seen is not None and self._seen[0] == plain
        if same:
            assert self._seen is not None
            tree = self._seen[1]
        else:
            tree = unpickle.loads(pickled, what=f"{what} (data.pkl)", persistent_load=torch_storage)
            self._seen = plain, tree
        tree = tree if any_tree else _mapping(tree, what)
        archive.fetch_headers()
        return States(file, tree, partial(storage_range, archive, what=what), archive.byteorder == "big", same)

    def _legacy(self, file: str, any_tree: bool) -> States:
        """Read a file from before torch 1.6, or one that torch did not write; its reader raises then."""
        if self.place.stat(file).size == 0:
            raise TruncatedError(f"file {file!r} is empty; the save was interrupted, use an earlier step")
        loaded = load_tree(self.place, file)
        storages = {key: loaded.storages[key] for key in loaded.storages}
        tree = loaded.tree if any_tree else _mapping(loaded.tree, repr(file))
        return States(file, tree, lambda ref: storages[ref.key], loaded.big, False, loaded.stop)


def items(value: object) -> Sequence[Any]:
    """Return a list's or tuple's items; none if a damaged file has something else in its place."""
    return value if isinstance(value, (list, tuple)) else ()


def tensors(node: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], TensorRef]]:
    """Yield every tensor in plain containers, with the keys and positions that lead to it."""
    if isinstance(node, TensorRef):
        yield path, node
    elif len(path) > MAX_DEPTH:
        raise CorruptError(f"more than {MAX_DEPTH} nested containers at {path[:3]!r} …")
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from tensors(child, (*path, key))
    elif isinstance(node, (list, tuple)):
        for position, child in enumerate(node):
            yield from tensors(child, (*path, position))


def _mapping(tree: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(tree, Mapping):
        raise CorruptError(f"{what} holds a {type(tree).__name__}, not the dict that DeepSpeed writes")
    return tree
