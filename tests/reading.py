"""Read a tensor of a catalog with nothing but ``open``: an independent second opinion for the readers' tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workbench.core.catalog import Catalog


def raw(root: Path, catalog: Catalog, key: str) -> np.ndarray:
    """The tensor's elements as unsigned integers of their size, assembled chunk by chunk; holes stay 0xff."""
    tensor = catalog.index[key]
    dtype, dims = catalog.dtype_of(tensor), int(catalog.ndim[tensor])
    whole = np.full(catalog.shape_of(tensor), -1, "i1").astype(dtype.raw)
    rows = catalog.rows_of(tensor)
    for row in range(rows.start, rows.stop):
        data = (root / catalog.files[catalog.file[row]]).read_bytes()[catalog.start[row] : catalog.stop[row]]
        raw = dtype.raw.newbyteorder(">") if catalog.codec[row] == 1 else dtype.raw
        offsets, sizes = catalog.offsets[row, :dims].tolist(), catalog.sizes[row, :dims].tolist()
        inner = 0 if catalog.inner is None else int(catalog.inner[row])
        strides = None
        if catalog.strides is not None:
            strides = [step * raw.itemsize for step in catalog.strides[row, :dims].tolist()]
        box = np.ndarray(sizes, raw, data, inner, strides) if 0 not in sizes else np.empty(sizes, raw)
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = box
    return whole


def bits(tensor: object) -> np.ndarray:
    """A torch tensor's elements as unsigned integers of their size."""
    import torch

    assert isinstance(tensor, torch.Tensor)
    flat = tensor.detach().contiguous().reshape(-1)
    size = tensor.element_size()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    kind = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "V16"}[size]
    return np.frombuffer(data, kind).reshape(tuple(tensor.shape))
