"""The changes that an export asks for, planned in the order in which they apply."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import DType
from workbench.core.scan import Tick
from workbench.reshard.values import fp8, lora
from workbench.reshard.values.edits import Edited, Edits

__all__ = ["edit"]


def edit(
    ckpt: Checkpoint,
    tensors: Sequence[int],
    *,
    dtype: DType | None = None,
    adapters: Sequence[Checkpoint] = (),
    recipe: str | None = None,
    unscaled: bool = False,
    threads: int | None = None,
    tick: Tick | None = None,
) -> Edited:
    """What becomes of some tensors of a checkpoint: FP8 weights are multiplied out, adapters merged, weights quantised.

    Only a recipe reads tensors: once, to know the scales. All else is read when it is written.

    Args:
        ckpt: the whole source: scales are found in it, selected or not.
        tensors: positions of those that are selected.
        dtype: cast floats of 16, 32 and 64 bits, and FP8 weights times their scales, to one of
            :data:`workbench.reshard.values.casts.FLOATS`; without it, FP8 weights and their scales stay as they are.
            Weights quantised in another way keep their codes, and with them their scales and maps.
        adapters: PEFT checkpoints, merged one after the other; to stay open until the export is done.
        recipe: quantise the weights of linear layers, ``fp8`` or ``fp8-tensor``.
        unscaled: with ``dtype``, FP8 weights that have no scale are cast by the values of their codes.

    Raises:
        UnsupportedFormatError: what cannot be scaled or merged; names the tensor.
        UsageError: an adapter or a recipe that does not fit the tensors.
        OpenError: a weight that is to be quantised cannot be read.
    """
    edits = Edits(ckpt, tensors, dtype)
    if dtype is not None:
        fp8.dequantize(edits, unscaled=unscaled)
        edits.note_kept()
    for adapter in adapters:
        lora.merge(edits, adapter)
    if recipe is not None:
        fp8.quantize(edits, recipe, threads=threads, tick=tick)
    return edits.done()
