"""Split a paddle pickle into tensors by path and the rest.

::

    {"embed.weight": A,                          flat state_dict: raw arrays, and a table of
     "StructuredToParameterName@@": {…}}         structured name → static name
    {"model": {"fc.weight": ("linear_0.w_0", A)},    nested: each tensor is the pair (static name, array)
     "big@@.0": A, "big@@.1": A,                 protocols 2 and 3 split more than 2**30 bytes into flat slices
     "UnpackBigParamInfor@@": {"big": {"OriginShape": (…), "slices": ["big@@.0", "big@@.1"]}}}

Arrays that are not paddle tensors (such as generator states) cannot be distinguished from tensors; all are listed.
Source: paddlepaddle 3.3.1 ``framework/io.py`` (``_build_saved_state_dict``, ``_pickle_save``), ``io_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.build import CatalogBuilder
from workbench.core.pickles.budget import GONE, leaves, prune
from workbench.core.pickles.standins import Opaque, short
from workbench.core.source import LazyBytes
from workbench.core.words import plural
from workbench.errors import CorruptError, UnsupportedFormatError
from workbench.formats.paddle.pickle import SMALL, ArrayRef, DecodedPickle, Span, Text, plain
from workbench.formats.torch.file import tree_name

TABLE = "StructuredToParameterName@@"
BIG = "UnpackBigParamInfor@@"  #: paddle's spelling


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Attributes:
        path: dict keys and list positions that lead to it.
        shape: elements.
        pieces: the arrays that hold it, in flat order; one unless it was split.
        static: paddle's own name (``linear_0.w_0``), if stored with the tensor.
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    pieces: tuple[ArrayRef, ...]
    static: str | None = None

    @property
    def key(self) -> str:
        """The path joined by dots."""
        return ".".join(map(tree_name, self.path)) if self.path else "tensor"


def tensors(loaded: DecodedPickle, what: str) -> list[Stored]:
    """Return every tensor of a file in stored order, with slices of big ones joined.

    Raises:
        CorruptError: the tree is nested too deeply, or slices do not add up to their tensor.
        UnsafeError: shared references would make the list endless, or names are far larger than the file.
    """
    found = [_stored(path, node) for path, node in leaves(loaded.tree, _children, _is_tensor, what=what)]
    return _joined(loaded.tree, found, what)


def names_of(loaded: DecodedPickle) -> dict[str, str]:
    """Return static name → structured name from the file's table."""
    table = loaded.tree.get(TABLE) if isinstance(loaded.tree, dict) else None
    if not isinstance(table, dict):
        return {}
    return {
        str(static): str(name) for name, static in table.items() if isinstance(static, str) and isinstance(name, str)
    }


def declare(
    builder: CatalogBuilder, file: str, key: str, stored: Stored, notes: list[str], *, rank: int = -1, **names: Any
) -> bool:
    """Declare a tensor and its chunks. If its elements cannot be read, add a note and return ``False``."""
    try:
        dtype = stored.pieces[0].element()
    except UnsupportedFormatError as error:
        notes.append(f"{key!r} of {file!r} is left out: {error}")
        return False
    tensor = builder.tensor(key, dtype, stored.shape, **names)
    if len(stored.pieces) == 1:
        ref, shape = stored.pieces[0], stored.shape
        builder.chunk(
            key,
            (0,) * len(shape),
            shape,
            file,
            ref.span.start,
            ref.span.stop,
            codec=ref.codec(),
            rank=rank,
            strides=ref.strides(),
        )
        return True
    at = 0
    for ref in stored.pieces:
        size = math.prod(ref.shape)
        _, offsets, sizes, flat = box.flat_ranges(np.array([stored.shape]), np.array([at]), np.array([at + size]))
        builder.block(
            np.full(len(flat), tensor),
            offsets,
            sizes,
            builder.file(file),
            ref.span.start,
            ref.span.stop,
            codec=ref.codec(),
            rank=rank,
            inner=(flat - at) * dtype.itemsize,
        )
        at += size
    return True


def rest(loaded: DecodedPickle, what: str, *, arrays: bool = False) -> object:
    """Return the tree without tensors (with ``arrays``, small ones as numpy arrays); ``None`` if nothing is left."""
    kept = _kept(loaded.view, arrays)
    return prune(loaded.tree, kept, what=what, keys=kept)


def _stored(path: tuple[Any, ...], node: Any) -> Stored:
    static, array = (str(node[0]), node[1]) if type(node) is tuple else (None, node)
    return Stored(path, array.shape, (array,), static)


def _is_tensor(node: object) -> bool:
    """Return whether a node is an array, or a pair of paddle's name and an array."""
    if type(node) is tuple:
        return len(node) == 2 and isinstance(node[0], str) and isinstance(node[1], ArrayRef)
    return isinstance(node, ArrayRef)


def _children(node: object) -> Any:
    if isinstance(node, dict):
        return ((str(key) if isinstance(key, Text) else key, child) for key, child in node.items())
    if isinstance(node, Opaque):
        state = node.state.items() if isinstance(node.state, dict) else enumerate(node.items)
        return [("args", node.args), *state, *node.pairs]
    return enumerate(node) if isinstance(node, (list, tuple)) else None


def _joined(tree: object, found: list[Stored], what: str) -> list[Stored]:
    """Join the slices of split tensors; each takes the place of its first slice."""
    split_info = tree.get(BIG) if isinstance(tree, dict) else None
    if not isinstance(split_info, dict):
        return found
    at_top = {stored.path[0]: stored for stored in found if len(stored.path) == 1}
    whole: dict[str, Stored] = {}
    taken: set[str] = set()
    for name, facts in split_info.items():
        shape: Any = facts.get("OriginShape") if isinstance(facts, dict) else None
        slices = facts.get("slices") if isinstance(facts, dict) else None
        if not _is_shape(shape) or not isinstance(slices, (list, tuple)) or not slices:
            raise CorruptError(f"{what}: {BIG} does not describe how {short(name, 60)} was split")
        parts = [at_top.get(part) if isinstance(part, str) else None for part in slices]
        lost = [part for part, stored in zip(slices, parts, strict=True) if stored is None]
        if lost:
            raise CorruptError(
                f"{what}: {name!r} was split into {plural(len(slices), 'slice')}, but {short(lost[0], 60)} is missing"
            )
        pieces = tuple(stored.pieces[0] for stored in parts if stored is not None)
        total, expected = sum(math.prod(ref.shape) for ref in pieces), math.prod(shape)
        if total != expected or len({ref.dtype for ref in pieces}) > 1:
            raise CorruptError(
                f"{what}: the {plural(len(pieces), 'slice')} of {name!r} hold {plural(total, 'element')}; its shape "
                f"{tuple(shape)} has {expected:,}; the file is damaged"
            )
        whole[str(slices[0])] = Stored((str(name),), tuple(shape), pieces)
        taken |= set(map(str, slices))
    return [
        whole.get(stored.path[0], stored) if len(stored.path) == 1 else stored
        for stored in found
        if not (len(stored.path) == 1 and stored.path[0] in taken) or stored.path[0] in whole
    ]


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)


def _kept(view: LazyBytes, arrays: bool) -> Callable[[object], object]:
    """Return what :func:`rest` keeps of a value."""

    def kept(node: object) -> object:
        if isinstance(node, ArrayRef):
            return _array(view, node) if arrays else GONE
        if type(node) is tuple and len(node) == 2 and isinstance(node[0], str) and isinstance(node[1], ArrayRef):
            return (str(node[0]), _array(view, node[1])) if arrays else GONE
        if isinstance(node, Span):
            return plain(view, node) if node.stop - node.start <= SMALL else node
        if isinstance(node, Text):
            return str(node) or bytes(view[node.span.start : node.span.stop]).decode("utf-8", "surrogatepass")
        return node

    return kept


def _array(view: LazyBytes, ref: ArrayRef) -> object:
    if ref.dtype is None or ref.span.stop - ref.span.start > SMALL:
        return ref
    flat = np.frombuffer(plain(view, ref.span), ref.dtype)
    return flat.reshape(ref.shape, order="F" if ref.fortran else "C")
