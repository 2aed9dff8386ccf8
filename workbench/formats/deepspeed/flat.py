"""Compute the elements of each parameter that a rank's flat partition holds.

Stages 1 and 2 concatenate a group's parameters and divide the line into equal parts. Some parameters cross ranks::

    line     a a a a a b b b c c c c c · ·       · pads the line to a multiple of 2 × ranks
    rank     0─────────── 1───────────           P elements each; the last rank's file may lack the padding

Stage 3 divides each parameter separately, ``ceil(numel / ranks)`` elements each. A rank concatenates its pieces::

    5 a, 2 ranks     rank 0  a a a │ b b │ …     rank 1  a a · │ b · │ …

Both become rows of :class:`Ranges`; :func:`boxes` turns those into boxes of the parameters. Read from deepspeed 0.19.8
(``runtime/zero/stage_1_and_2.py``, ``runtime/zero/partition_parameters.py``, ``utils/zero_to_fp32.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core import box
from workbench.core.arrays import Ints
from workbench.core.catalog import MAX_ELEMENTS
from workbench.core.words import plural
from workbench.errors import CorruptError

BLOCK = 1 << 18  #: ranges turned into boxes at a time, which bounds temporary memory


@dataclass(frozen=True)
class Ranges:
    """Ranges of flattened parameters, one per row, ordered by parameter, then by position.

    Attributes:
        param: ``(N,)`` index of the parameter.
        rank, segment: the rank, and the flat tensor of that rank, that hold the range.
        at: first element in that flat tensor.
        start, stop: the range in elements of the flattened parameter.
    """

    param: Ints
    rank: Ints
    segment: Ints
    at: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True)
class Boxes:
    """The ranges as boxes: ``offsets``, ``sizes`` ``(M, D)``; each is contiguous in its flat tensor at ``at``."""

    param: Ints
    rank: Ints
    segment: Ints
    at: Ints
    offsets: Ints
    sizes: Ints


def by_line(numel: Ints, pads: Ints, part: int, ranks: Ints, segment: int) -> Ranges:
    """Return one group's ranges (stages 1 and 2). ``pads`` follow parameters; ``ranks`` hold ``part`` elements each."""
    begin = np.cumsum(numel + pads) - numel - pads
    real = np.flatnonzero(numel > 0)
    first, last = begin[real] // part, (begin[real] + numel[real] - 1) // part
    count = last - first + 1
    param = np.repeat(real, count)
    place = box.spans(first, count)
    low = np.maximum(begin[param], place * part)
    high = np.minimum(begin[param] + numel[param], (place + 1) * part)
    fixed = np.full(len(param), segment, np.int64)
    return Ranges(param, ranks[place], fixed, low - place * part, low - begin[param], high - begin[param])


def by_param(numel: Ints, segments: Ints, ranks: int) -> Ranges:
    """Return all parameters' ranges (stage 3). ``segments`` are the lengths of a rank's concatenated flat tensors."""
    piece = -(-numel // ranks)
    begin = np.cumsum(piece) - piece
    edges = np.concatenate([[0], np.cumsum(segments)])
    # a piece may cross flat tensors if param_shapes and the files have different groups
    real = np.flatnonzero(piece > 0)
    first = np.searchsorted(edges, begin[real], side="right") - 1
    last = np.searchsorted(edges, begin[real] + piece[real], side="left") - 1
    count = last - first + 1
    param = np.repeat(real, count)
    segment = box.spans(first, count)
    low = np.maximum(begin[param], edges[segment])
    high = np.minimum(begin[param] + piece[param], edges[segment + 1])
    # every rank has the same pieces; the last ranks' end before the padding
    rank = np.arange(ranks)
    start = (low - begin[param])[:, None] + rank * piece[param][:, None]
    stop = np.minimum((high - begin[param])[:, None] + rank * piece[param][:, None], numel[param][:, None])
    row, column = np.nonzero(stop > start)
    if count.max(initial=1) > 1:  # pieces of a crossing parameter: restore the order by rank
        order = np.lexsort((start[row, column], param[row]))
        row, column = row[order], column[order]
    at = (low - edges[segment])[row]
    return Ranges(param[row], column, segment[row], at, start[row, column], stop[row, column])


def boxes(ranges: Ranges, shapes: Sequence[Sequence[int]]) -> Iterator[Boxes]:
    """Yield the boxes of ranges in the same order, about 100,000 at a time."""
    dims = max([1, *map(len, shapes)])
    padded = np.array([(*shape, *([1] * (dims - len(shape)))) for shape in shapes], np.int64).reshape(-1, dims)
    for begin in range(0, len(ranges.param), BLOCK):
        rows = slice(begin, begin + BLOCK)
        param, start = ranges.param[rows], ranges.start[rows]
        index, offsets, sizes, first = box.flat_ranges(padded[param], start, ranges.stop[rows])
        at = ranges.at[rows][index] + first - start[index]
        yield Boxes(param[index], ranges.rank[rows][index], ranges.segment[rows][index], at, offsets, sizes)


def counted(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Ints:
    """Return the elements of each parameter; raises CorruptError for impossibly large shapes."""
    counts = []
    for name, shape in zip(names, shapes, strict=True):
        count = 1
        for size in shape:
            count *= size
        if count > MAX_ELEMENTS:
            raise CorruptError(f"param_shapes gives {name!r} the impossibly large shape {shape}")
        counts.append(count)
    if sum(counts) > MAX_ELEMENTS:
        raise CorruptError(f"param_shapes adds up to {plural(sum(counts), 'element')}, which is impossibly large")
    return np.array(counts, np.int64)


def check_line(need: int, part: int, ranks: int, paddings: int | None, what: str) -> None:
    """Check that ``need`` elements, with DeepSpeed's padding, are ``ranks`` partitions of ``part``.

    Raises:
        CorruptError: with the numbers. ``paddings`` is the stored amount of padding, if there is one.
    """
    have = part * ranks
    align = 2 * ranks
    if need <= have and (have - need == paddings or -(-need // align) == -(-have // align)):
        return
    added = "" if paddings is None else f", including {paddings:,} of padding by the files' own count"
    raise CorruptError(
        f"{what}: param_shapes add up to {plural(need, 'element')} but {ranks} partitions of {part:,} hold "
        f"{have:,}{added}, {abs(have - need):,} too {'many' if have > need else 'few'}; the model and optimizer files "
        "are from different saves"
    )


def check_param(numel: Ints, segments: Ints, ranks: int, what: str) -> None:
    """Check that every rank's flat tensors hold exactly one piece of every parameter.

    Raises:
        CorruptError: with the numbers.
    """
    need, have = int((-(-numel // ranks)).sum()), int(segments.sum())
    if need != have:
        raise CorruptError(
            f"{what}: param_shapes of {plural(len(numel), 'parameter')} over {ranks} ranks need "
            f"{plural(need, 'element')} each, but the flat groups have {have:,}, {abs(have - need):,} too "
            f"{'many' if have > need else 'few'}; the model and optimizer files are from different saves"
        )
