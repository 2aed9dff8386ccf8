"""Memory for results: the right shape and type, writable, and huge pages only as a wish."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from workbench.core import memory


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20,), (1031, 1033), (2, 1 << 20), (0, 1 << 22)])
@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u8", "<c16"])
def test_like_numpy(shape: tuple[int, ...], dtype: str) -> None:
    out = memory.empty(shape, np.dtype(dtype))
    assert (out.shape, out.dtype) == (shape, np.dtype(dtype))
    assert out.flags.c_contiguous and out.flags.writeable and out.flags.aligned
    out[...] = 1
    assert (out == 1).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux only")
def test_large_arrays_begin_on_a_huge_page() -> None:
    assert memory.empty((3 << 20,), np.dtype("u1")).ctypes.data % memory.HUGE_PAGE == 0


def test_arrays_do_not_share_memory() -> None:
    first, second = (memory.empty((4 << 20,), np.dtype("u1")) for _ in range(2))
    first[:], second[:] = 1, 2
    assert first.min() == first.max() == 1


def test_no_room_for_another_map_is_still_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    assert memory.empty((4 << 20,), np.dtype("u1")).nbytes == 4 << 20
