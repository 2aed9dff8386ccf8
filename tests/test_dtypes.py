"""Sizes of element types: one function for a number, one for columns; blocks of elements that share bytes."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.core.dtypes import ALL, BLOCKS, DType, by_name, nbytes_of, nbytes_of_codes
from workbench.errors import UnsupportedFormatError

NUMEL = np.arange(20, dtype=np.int64)


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype.name not in BLOCKS], ids=str)
def test_bytes_are_bits_rounded_up(dtype: DType) -> None:
    want = [(count * dtype.bits + 7) // 8 for count in NUMEL.tolist()]
    assert [nbytes_of(dtype, count) for count in NUMEL.tolist()] == want
    assert nbytes_of_codes(np.full(len(NUMEL), dtype.code, np.uint8), NUMEL).tolist() == want
    assert dtype.packed == (dtype.bits % 8 != 0) == (dtype.block > 1)


def test_blocks_of_packed_types_are_the_fewest_whole_bytes() -> None:
    found = {name: (by_name(name).block, by_name(name).block_nbytes) for name in ("F32", "F4", "F6_E2M3", "quint2x4")}
    assert found == {"F32": (1, 4), "F4": (2, 1), "F6_E2M3": (4, 3), "quint2x4": (4, 1)}


def test_a_quantised_block_has_a_size_and_no_item_size() -> None:
    q4_k = by_name("Q4_K")
    assert [nbytes_of(q4_k, count) for count in (0, 256, 4096)] == [0, 144, 2304]
    assert q4_k.packed and q4_k.raw == np.uint8
    with pytest.raises(UnsupportedFormatError, match="Q4_K packs"):
        _ = q4_k.itemsize
