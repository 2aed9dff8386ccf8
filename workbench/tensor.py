"""A checkpoint's tensor before it is read: a name, a location, and an index key.

Reading is only arithmetic on boxes. ``t[2:9, :, -1]`` reads only the bytes that it needs;
``t.lazy[…]`` composes keys without reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.decoding.values import Decoding
from workbench.core.dtypes import BLOCKS, DType, nbytes_of
from workbench.core.payload import Payloads
from workbench.core.plan import slices
from workbench.core.read import read_boxes, read_selection, single_chunk
from workbench.core.select import Selection, whole
from workbench.core.shown import Shown
from workbench.core.transfer.arrays import gather
from workbench.core.transfer.regions import ahead_of
from workbench.errors import SelectionError, TensorNotFoundError, UnsupportedFormatError

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor as TorchTensor  # in LazyTensor, ``torch`` is a method
    from torch import device as TorchDevice

__all__ = ["LazyTensor", "as_torch", "fetched", "read_whole"]


class LazyTensor(Shown):
    """One global tensor of a checkpoint.

    Functions that take arrays read it whole: ``np.asarray(t)``, ``torch.as_tensor(t)``. ``==`` reads nothing: lazy
    tensors are equal if they are the same object, and every ``ckpt[key]`` is a new one. Compare ``ckpt[key].torch()``.

    Attributes:
        key: stored name.
        fqn: parameter that it belongs to, or ``None`` if the files do not say.
        role: ``param``, ``exp_avg``, ``buffer`` …
    """

    def __init__(
        self,
        payloads: Payloads,
        tensor: int,
        fqn: str | None,
        role: str,
        *,
        selection: Selection | None = None,
        replica: int = 0,
    ) -> None:
        self._payloads, self._tensor, self._replica = payloads, tensor, replica
        self._selection = selection or whole(payloads.catalog.shape_of(tensor))
        self.key, self.fqn, self.role = payloads.catalog.keys[tensor], fqn, role

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis (of the selection, for a lazy slice)."""
        return self._selection.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def element(self) -> DType:
        """Element type as the workbench's :class:`DType`, which includes types that torch lacks."""
        return self._payloads.catalog.dtype_of(self._tensor)

    @property
    def dtype(self) -> torch.dtype | DType:
        """``torch.dtype``, or the workbench's :class:`DType` for types that torch lacks (F4, F6, quantised)."""
        return self.element if self.element.torch_name is None else self.element.torch

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes, counting each element once."""
        return nbytes_of(self.element, self.numel())

    @property
    def num_replicas(self) -> int:
        """Largest number of stored copies of any box of this tensor; 1 without replication."""
        rows = self._payloads.catalog.rows_of(self._tensor)
        return int(self._payloads.catalog.replica[rows].max(initial=-1)) + 1

    @property
    def inflated(self) -> bool:
        """Whether reading is refused because the elements take far more bytes than are stored (strides of 0)."""
        catalog = self._payloads.catalog
        return bool(catalog.inflated[catalog.rows_of(self._tensor)].any())

    @property
    def _far(self) -> bool:
        """Whether it is in a store, where each read is a request."""
        return self._payloads.pool.at_once > 1

    @property
    def chunks(self) -> pd.DataFrame:
        """Stored chunks of this tensor, one row each, with the columns of ``Checkpoint.chunks``."""
        from workbench.core.frames import chunk_frame

        return chunk_frame(self._payloads.catalog.take(np.array([self._tensor])))

    # ---- reading -------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a part, given by integers, slices with any step, ``...``, and a list or mask on one axis.

        Returns:
            a ``torch.Tensor`` in its own memory, bit for bit as stored; it outlives the checkpoint and its files.

        Raises:
            SelectionError: the key does not fit the shape.
            HoleError: a selected element is not stored.
            ChangedError: the file was truncated or rewritten since the checkpoint was opened, or during the read.
            OpenError: the file is truncated or damaged.
            UnsafeError: the tensor would take far more bytes than are stored.
        """
        return self.lazy[key].torch()

    @property
    def lazy(self) -> _Lazy:
        """Indexer for lazy slices: ``t.lazy[key]`` is a part as a lazy tensor; nothing is read."""
        return _Lazy(self)

    def torch(self, *, copy: bool = True) -> torch.Tensor:
        """Read the whole tensor as a ``torch.Tensor``.

        Element types that torch lacks are returned raw: F4 and F6 as packed bytes, quantised ones as unsigned integers.

        Args:
            copy: read into newly allocated memory, which outlives the file. ``False`` allows a view of the file
                instead: a private copy-on-write map that uses no memory until it is touched; writes to it change
                neither the file nor other tensors. A view is returned only if one chunk of a local file holds the
                tensor in order and the checkpoint was not opened with ``io="pread"``; otherwise the result is still a
                copy. **A view does not survive its file**: if the file is rewritten the values change, and if the file
                is truncated, touching the view kills the process (``SIGBUS``). Use it only for files that nobody
                writes.

        Raises:
            as :meth:`__getitem__`.
        """
        return as_torch(self._raw(copy=copy), self.element)

    def to(self, device: str | TorchDevice) -> TorchTensor:
        """Read the whole tensor and move it to a device; for many tensors :meth:`Checkpoint.to_device` is faster.

        Raises:
            as :meth:`__getitem__`.
        """
        return self.torch().to(device)

    def numpy(self, *, copy: bool = True) -> np.ndarray[Any, Any]:
        """Read the whole tensor as an array; types that numpy lacks (bfloat16, small floats) as unsigned integers.

        Args:
            copy: as in :meth:`torch`.
        """
        raw = self._raw(copy=copy)
        return raw if self.element.packed else raw.view(self.element.numpy)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("reading a stored tensor makes a copy; use numpy(copy=False) for a view of the file")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **how: Any) -> Any:
        return self.torch().__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return (1, 0)  # kDLCPU: it is read into memory

    def decoded(self) -> LazyTensor:
        """Return the numbers that a quantised tensor represents, as a lazy tensor; other tensors are returned as is.

        The stored elements remain available as ``ckpt[key]``. Elements are decoded when read, and a slice reads only
        the blocks that it needs. The result equals that of the reference implementation of the scheme bit for bit; its
        element type is the one that the reference returns (``float32`` for the block types of GGUF).

        Raises:
            SelectionError: a slice of a tensor whose stored elements are not those of the decoded one.
            CorruptError: the tensors that belong together (weights, scales …) contradict each other.
            OpenError: those of :meth:`__getitem__`, for scales and the like.
        """
        decoding = self._payloads.decoding or Decoding(self._payloads)
        name = decoding.names.get(self.key)
        if name is None:
            return self
        payloads = decoding.payloads
        tensor = payloads.catalog.index[name]
        same = payloads.catalog.shape_of(tensor) == self._stored_shape
        if not same and not (self._selection.is_whole and self.shape == self._stored_shape):
            raise SelectionError(f"tensor {self.key!r} has another shape than {name!r}: decode it first, then slice it")
        fqn, role = (self.fqn, self.role) if name == self.key else (name, "param")
        made = LazyTensor(payloads, tensor, fqn, role, replica=self._replica)
        return made._with(self._selection) if same else made

    def replica(self, i: int) -> LazyTensor:
        """Return copy ``i`` of a replicated tensor, as stored by another rank.

        Raises:
            TensorNotFoundError: there are fewer stored copies.
        """
        if not 0 <= i < max(self.num_replicas, 1):
            raise TensorNotFoundError(
                f"tensor {self.key!r} has {self.num_replicas} stored copies; there is no replica {i}"
            )
        return self._with(self._selection, replica=i)

    def boxes(self, offsets: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Read many boxes one after the other, as :meth:`numpy` returns them, with a single read plan.

        Args:
            offsets, sizes: ``(R, ndim) int64``, inside the shape.

        Yields:
            a read-only array for each box, valid until the next one is yielded.

        Raises:
            as :meth:`__getitem__`.
        """
        if self.element.packed or not self._selection.is_whole or self.shape != self._stored_shape:
            for low, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
                yield self.lazy[slices(low, size)].numpy()
            return
        for raw in read_boxes(self._payloads, self._tensor, offsets, sizes, replica=self._replica):
            yield raw.view(self.element.numpy)

    # ---- representation ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    # ---- inside --------------------------------------------------------------------------------------------------

    def _with(self, selection: Selection, replica: int | None = None) -> LazyTensor:
        return LazyTensor(
            self._payloads,
            self._tensor,
            self.fqn,
            self.role,
            selection=selection,
            replica=self._replica if replica is None else replica,
        )

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        return self._payloads.catalog.shape_of(self._tensor)

    def _raw(self, *, copy: bool) -> np.ndarray[Any, Any]:
        full = self._stored_shape
        everything = self._selection.is_whole and self.shape == full
        if self.element.packed:
            return self._packed(everything, full)
        if everything and not copy:
            mapped = self._mapped()
            if mapped is not None:
                return mapped
        return read_selection(self._payloads, self._tensor, self._selection, replica=self._replica)

    def _mapped(self) -> np.ndarray[Any, Any] | None:
        """Map the whole tensor privately, if one chunk holds it in order and aligned to its elements."""
        row = single_chunk(self._payloads, self._tensor, self._replica)
        catalog = self._payloads.catalog
        if row is None:
            return None
        start = self._payloads.straight(row)
        raw = self.element.raw
        # Code compiled for aligned loads may fault on unaligned elements, so those are copied instead.
        if start is None or start % raw.alignment or start % raw.itemsize:
            return None
        private = self._payloads.pool.private(int(catalog.file[row]), start, start + self.nbytes)
        return None if private is None else private.view(raw).reshape(catalog.shape_of(self._tensor))

    def _packed(self, everything: bool, full: tuple[int, ...]) -> np.ndarray[Any, Any]:
        row = single_chunk(self._payloads, self._tensor, self._replica)
        if not everything:
            raise SelectionError(
                f"tensor {self.key!r}: {self.element} packs elements of {self.element.bits} bits; read the whole tensor"
                f"{', or slice decoded()' if self.element.name in BLOCKS else ''}"
            )
        if row is None:
            raise UnsupportedFormatError(
                f"tensor {self.key!r}: {self.element} is stored in several chunks, which cannot be joined"
            )
        flat = np.array(self._payloads.region(row).load())
        if not full or full[-1] % self.element.block:
            return flat
        return flat.reshape(*full[:-1], nbytes_of(self.element, full[-1]))


class _Lazy:
    """The indexer behind :attr:`LazyTensor.lazy`."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: Any) -> LazyTensor:
        return self._tensor._with(self._tensor._selection.compose(key))


@contextmanager
def fetched(wanted: Iterable[tuple[LazyTensor, Ints, Ints]]) -> Iterator[None]:
    """Fetch boxes of tensors from stores, all at once, before this thread reads them piece by piece.

    Args:
        wanted: tensors with offsets and sizes as of :meth:`LazyTensor.boxes`.
    """
    by_side: dict[tuple[int, int], tuple[LazyTensor, list[Ints], list[Ints], list[Ints]]] = {}
    for tensor, offsets, sizes in wanted:
        if not tensor._far or tensor.shape != tensor._stored_shape:  # a disk reads on demand; the boxes are of a slice
            continue
        payloads = tensor._payloads
        _, tensors, low, extent = by_side.setdefault((id(payloads), tensor._replica), (tensor, [], [], []))
        pad = ((0, 0), (0, payloads.catalog.shape.shape[1] - offsets.shape[1]))
        tensors.append(np.full(len(offsets), tensor._tensor))
        low.append(np.pad(offsets, pad))
        extent.append(np.pad(sizes, pad, constant_values=1))
    with ExitStack() as held:
        for tensor, *columns in by_side.values():
            held.enter_context(ahead_of(tensor._payloads, *map(np.concatenate, columns), replica=tensor._replica))
        yield


def read_whole(
    payloads: Payloads, *, threads: int, progress: Callable[[float], None] | None = None
) -> list[torch.Tensor]:
    """Read every tensor of a catalog as :meth:`LazyTensor.torch` does, but in a single pass.

    Args:
        threads: number of reading threads.
        progress: called with the fraction of bytes done.

    Raises:
        as :meth:`LazyTensor.__getitem__`.
    """
    catalog = payloads.catalog
    packed = [at for at in range(len(catalog)) if catalog.dtype_of(at).packed]
    found = {at: LazyTensor(payloads, at, None, "other").torch() for at in packed}
    rest = np.setdiff1d(np.arange(len(catalog)), packed)
    raws = gather(payloads, rest, threads=threads, progress=progress)
    found |= {at: as_torch(raw, catalog.dtype_of(at)) for at, raw in zip(rest.tolist(), raws, strict=True)}
    return [found[at] for at in range(len(catalog))]


def as_torch(raw: np.ndarray[Any, Any], element: DType) -> torch.Tensor:
    """Return an array of the raw type as a tensor over the same memory; types that torch lacks stay raw."""
    import torch

    if element.torch_name is None:
        return torch.from_numpy(raw)
    if raw.dtype.kind == "V":  # complex128: torch cannot take numpy's void type
        return torch.from_numpy(raw.view(np.complex128))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.dtype.itemsize]
    bits = torch.from_numpy(raw.view(np.uint8 if carrier is torch.uint8 else f"<i{raw.dtype.itemsize}"))
    return bits.view(element.torch)
