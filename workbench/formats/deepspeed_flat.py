"""Which elements of which parameter every rank's flat partition holds: arithmetic only.

Stages 1 and 2 lay a group's parameters end to end and deal the line out in equal parts; some cross ranks::

    line     a a a a a b b b c c c c c · ·       · pads the line to a multiple of 2 × ranks
    rank     0─────────── 1───────────           P elements each; the last one's file may lack its padding

Stage 3 deals out every parameter by itself, ``ceil(numel / ranks)`` elements each; a rank lays its pieces end to end::

    a 5 of 2 ranks   rank 0  a a a │ b b │ …     rank 1  a a · │ b · │ …

Both become rows of :class:`Ranges`; :func:`boxes` turns those into boxes of the parameters. Read from deepspeed 0.19.8
(``runtime/zero/stage_1_and_2.py``, ``runtime/zero/partition_parameters.py``, ``utils/zero_to_fp32.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.catalog import MAX_ELEMENTS
from workbench.errors import CorruptError

__all__ = ["Boxes", "Ranges", "boxes", "by_line", "by_param", "check_line", "check_param", "counted"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
BLOCK = 1 << 18  #: ranges turned into boxes at a time, which bounds what the arithmetic needs beside its result


@dataclass(frozen=True)
class Ranges:
    """Ranges of flattened parameters, one row each, ordered by parameter, then by position in it.

    Attributes:
        param: ``(N,)`` position among the parameters.
        rank, segment: which rank's which flat tensor holds the range.
        at: first element in that flat tensor.
        start, stop: the range, elements of the flattened parameter.
    """

    param: Ints
    rank: Ints
    segment: Ints
    at: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True)
class Boxes:
    """The same as boxes: ``offsets``, ``sizes`` ``(M, D)``; each lies contiguous in its flat tensor at ``at``."""

    param: Ints
    rank: Ints
    segment: Ints
    at: Ints
    offsets: Ints
    sizes: Ints


def by_line(numel: Ints, pads: Ints, part: int, ranks: Ints, segment: int) -> Ranges:
    """Stages 1 and 2: one group. ``pads`` follow each parameter; ``ranks`` hold ``part`` elements each, in order."""
    begin = np.cumsum(numel + pads) - numel - pads
    real = np.flatnonzero(numel > 0)
    first, last = begin[real] // part, (begin[real] + numel[real] - 1) // part
    count = last - first + 1
    param = np.repeat(real, count)
    place = np.repeat(first, count) + np.arange(len(param)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begin[param], place * part)
    high = np.minimum(begin[param] + numel[param], (place + 1) * part)
    fixed = np.full(len(param), segment, np.int64)
    return Ranges(param, ranks[place], fixed, low - place * part, low - begin[param], high - begin[param])


def by_param(numel: Ints, segments: Ints, ranks: int) -> Ranges:
    """Stage 3: all parameters. ``segments`` are the lengths of a rank's flat tensors, laid end to end."""
    piece = -(-numel // ranks)
    begin = np.cumsum(piece) - piece
    edges = np.concatenate([[0], np.cumsum(segments)])
    # a piece may cross flat tensors where the groups of param_shapes are not those of the files
    real = np.flatnonzero(piece > 0)
    first = np.searchsorted(edges, begin[real], side="right") - 1
    last = np.searchsorted(edges, begin[real] + piece[real], side="left") - 1
    count = last - first + 1
    param = np.repeat(real, count)
    segment = np.repeat(first, count) + np.arange(len(param)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begin[param], edges[segment])
    high = np.minimum(begin[param] + piece[param], edges[segment + 1])
    # every rank has the same pieces; the last ones end before the padding
    rank = np.arange(ranks)
    start = (low - begin[param])[:, None] + rank * piece[param][:, None]
    stop = np.minimum((high - begin[param])[:, None] + rank * piece[param][:, None], numel[param][:, None])
    row, column = np.nonzero(stop > start)
    if count.max(initial=1) > 1:  # pieces of a parameter that crosses: rank by rank again
        order = np.lexsort((start[row, column], param[row]))
        row, column = row[order], column[order]
    at = (low - edges[segment])[row]
    return Ranges(param[row], column, segment[row], at, start[row, column], stop[row, column])


def boxes(ranges: Ranges, shapes: Sequence[Sequence[int]]) -> Iterator[Boxes]:
    """The boxes of ranges, some 100,000 at a time, in the same order."""
    dims = max([1, *map(len, shapes)])
    padded = np.array([(*shape, *([1] * (dims - len(shape)))) for shape in shapes], np.int64).reshape(-1, dims)
    for begin in range(0, len(ranges.param), BLOCK):
        rows = slice(begin, begin + BLOCK)
        param, start = ranges.param[rows], ranges.start[rows]
        index, offsets, sizes, first = box.flat_ranges(padded[param], start, ranges.stop[rows])
        at = ranges.at[rows][index] + first - start[index]
        yield Boxes(param[index], ranges.rank[rows][index], ranges.segment[rows][index], at, offsets, sizes)


def counted(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Ints:
    """Elements of each parameter; raises CorruptError for shapes beyond any machine."""
    counts = []
    for name, shape in zip(names, shapes, strict=True):
        count = 1
        for size in shape:
            count *= size
        if count > MAX_ELEMENTS:
            raise CorruptError(f"param_shapes gives {name!r} the shape {shape}, more elements than any machine")
        counts.append(count)
    if sum(counts) > MAX_ELEMENTS:
        raise CorruptError(f"param_shapes adds up to {sum(counts):,} elements, more than any machine")
    return np.array(counts, np.int64)


def check_line(need: int, part: int, ranks: int, paddings: int | None, what: str) -> None:
    """Raise unless ``need`` elements, padded as DeepSpeed pads, are ``ranks`` partitions of ``part``.

    Raises:
        CorruptError: with the numbers. ``paddings`` is what the files say was added, where they do.
    """
    have = part * ranks
    align = 2 * ranks
    if need <= have and (have - need == paddings or -(-need // align) == -(-have // align)):
        return
    added = "" if paddings is None else f", of which {paddings:,} are padding as the files say"
    raise CorruptError(
        f"{what}: param_shapes add up to {need:,} elements but {ranks} partitions of {part:,} hold {have:,}{added}, "
        f"{abs(have - need):,} too {'many' if have > need else 'few'}; the model and optimizer files are of "
        "different saves"
    )


def check_param(numel: Ints, segments: Ints, ranks: int, what: str) -> None:
    """Raise unless every rank's flat tensors hold exactly one piece of every parameter.

    Raises:
        CorruptError: with the numbers.
    """
    need, have = int((-(-numel // ranks)).sum()), int(segments.sum())
    if need != have:
        raise CorruptError(
            f"{what}: param_shapes of {len(numel):,} parameters over {ranks} ranks need {need:,} elements a rank, but "
            f"the flat groups have {have:,}, {abs(have - need):,} too {'many' if have > need else 'few'}; the model "
            "and optimizer files are of different saves"
        )
