"""The requested changes of an export, planned in the order in which they apply."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import DType
from workbench.core.scan import Progress
from workbench.export.values import fp8, lora
from workbench.export.values.edits import Edited, Edits


def edit(
    ckpt: Checkpoint,
    tensors: Sequence[int],
    *,
    dtype: DType | None = None,
    adapters: Sequence[Checkpoint] = (),
    recipe: str | None = None,
    unscaled: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Edited:
    """Plan the changes of some tensors: FP8 weights are dequantised, adapters merged, weights quantised.

    Only a recipe reads tensors now, once, to compute the scales. Everything else is read when it is written.

    Args:
        ckpt: the whole source; scales are found in it whether selected or not.
        tensors: positions of the selected tensors.
        dtype: cast floats of 16, 32 and 64 bits, and FP8 weights times their scales, to one of
            :data:`workbench.export.casts.FLOATS`; without it, FP8 weights and their scales stay as they are.
            Weights quantised in another way keep their codes, and with them their scales and maps.
        adapters: PEFT checkpoints, merged one after the other; they must stay open until the export is done.
        recipe: quantise the weights of linear layers, ``fp8`` or ``fp8-tensor``.
        unscaled: with ``dtype``, cast FP8 weights without a scale by their raw values.

    Raises:
        UnsupportedFormatError: a tensor cannot be scaled or merged; the message names it.
        UsageError: an adapter or a recipe does not fit the tensors.
        OpenError: a weight to be quantised cannot be read.
    """
    edits = Edits(ckpt, tensors, dtype)
    if dtype is not None:
        fp8.dequantize(edits, unscaled=unscaled)
        edits.note_kept()
    for adapter in adapters:
        lora.merge(edits, adapter)
    if recipe is not None:
        fp8.quantize(edits, recipe, threads=threads, progress=progress)
    return edits.done()
