"""Convert weights from and to FP8 with scales.

::

    fp8          q_proj.weight            F8_E4M3 (m, n)      code · scale of its 128 × 128 block
                 q_proj.weight_scale_inv  F32 (⌈m/128⌉, ⌈n/128⌉), multiplied all the same
    fp8-tensor   q_proj.weight            F8_E4M3 (m, n)      code · scale
                 q_proj.weight_scale      F32 (1,)

    amax of a block ─► forward = 1 / amax · 448 ─► code = nearest(value · forward), scale = 1 / forward

A block of zeros has scale 1. Values that are NaN stay NaN and infinite ones become the largest; neither counts for the
scale. Sources may have scales for blocks, rows or the tensor: float32, 16 bits, or E8M0, also as bytes.

Source: transformers 5.23 ``integrations/finegrained_fp8.py`` (``Fp8Quantize``, ``Fp8Dequantize``; ``FP8Linear`` for the
shape of the scales), which is the layout of DeepSeek-V3's files; compressed-tensors 0.20 (what llm-compressor writes)
``quantization/lifecycle/initialize.py``: names and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from workbench.core.arrays import Array
from workbench.core.decoding.floats import FP8, fp8_table
from workbench.core.dtypes import DType, by_name
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.casts import FLOATS, LARGEST, SOURCES, widened
from workbench.export.sharding.kinds import kind_of
from workbench.export.values.amax import largest
from workbench.export.values.edits import Added, Edits
from workbench.export.values.located import Quantised
from workbench.export.values.scales import Scales, grid_shape
from workbench.names.weights import parse

BLOCK = (128, 128)
#: Name → rows and columns of a block (``None``: one scale for the tensor) and the end of the scale's name.
RECIPES: Mapping[str, tuple[tuple[int, int] | None, str]] = {
    "fp8": (BLOCK, "_scale_inv"),
    "fp8-tensor": (None, "_scale"),
}
SUFFIXES = ("_scale_inv", "_scale")  #: names of weight scales; activation scales have other names
E4M3, FLOAT32 = by_name("float8_e4m3fn"), by_name("float32")
_LINEAR = re.compile(r"column|row|gate_up|thirds|qkv|fc1|stack .*|experts (?!same).*")


def quantize(
    edits: Edits, recipe: str = "fp8", *, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write the weights of linear layers as e4m3fn with scales; embeddings, norms, heads and routers stay.

    The weights are read once now, to compute their scales, and again when they are written. Weights that already have
    8 bits stay unchanged.

    Args:
        recipe: one of :data:`RECIPES`.
        progress: called with the fraction of bytes read.

    Raises:
        UsageError: the recipe is unknown, or there is nothing to quantise.
        OpenError: a weight cannot be read.
    """
    if recipe not in RECIPES:
        raise UsageError(f"no recipe {recipe!r}; choose {', '.join(RECIPES)}")
    block, suffix = RECIPES[recipe]
    catalog, blocks = edits.ckpt.catalog, {}
    for tensor in edits.tensors:
        if is_linear(edits, tensor) and catalog.numel[tensor] and edits.changes[tensor].wanted.name in SOURCES:
            blocks[tensor] = block or (catalog.shape_of(tensor)[-2], catalog.shape_of(tensor)[-1])
    if not blocks:
        raise UsageError(f"recipe {recipe!r}: no selected tensor has the name of a linear layer's weight")
    if uneven := [t for t, (m, n) in blocks.items() if catalog.shape_of(t)[-2] % m or catalog.shape_of(t)[-1] % n]:
        edits.notes.append(
            f"{plural(len(uneven), 'weight')}, for example {catalog.keys[uneven[0]]!r}, do not divide evenly into "
            f"blocks of {BLOCK[0]} × {BLOCK[1]}: the last blocks are smaller. transformers' FP8 layers handle this, "
            "but if transformers dequantises while loading (dequantize=True, or no GPU), it assumes blocks of equal "
            "size"
        )
    amax = largest(edits.ckpt.payloads, edits.changes, blocks, threads=threads, progress=progress)
    for tensor, grid in amax.items():
        key, forward = catalog.keys[tensor], _forward(grid)
        back = np.float32(1) / forward
        edits.quantise(tensor, E4M3, Quantised(Scales(forward, blocks[tensor]), Scales(back, blocks[tensor])))
        stored = back.reshape(1) if block is None and back.ndim == 2 else back
        edits.added.append(
            Added(key + suffix, edits.ckpt.fqns[tensor], "scale", FLOAT32, stored.view(FLOAT32.raw), tensor)
        )
    edits.notes.append(
        f"{plural(len(blocks), 'weight')} of linear layers written as {E4M3} with scales (recipe {recipe})"
    )


def dequantize(edits: Edits, *, unscaled: bool = False) -> None:
    """Write FP8 weights as values: code · scale, in float32, rounded once to the type that is written.

    Their scales are left out. Without ``dtype``, weights are written as bfloat16.

    Args:
        unscaled: take the codes of weights without a scale as their values.

    Raises:
        UnsupportedFormatError: a weight has no scale, or a scale of the wrong shape; the message names both.
    """
    catalog, block = edits.ckpt.catalog, _block(edits)
    wanted = edits.dtype or by_name("bfloat16")
    count = 0
    for tensor in edits.tensors:
        key, source = catalog.keys[tensor], catalog.dtype_of(tensor)
        if source.name not in FP8:
            continue
        scale = next((key + suffix for suffix in SUFFIXES if key + suffix in catalog.index), None)
        if scale is None and not unscaled:
            raise UnsupportedFormatError(
                f"tensor {key!r} has type {source} and no scale: neither {key + SUFFIXES[0]!r} nor "
                f"{key + SUFFIXES[1]!r} exists. If it was never scaled, its codes are its values: pass unscaled=True"
            )
        edits.step(tensor, _scales(edits, key, scale, block) if scale else _ONE, wanted)
        count += 1
    fqns = {edits.ckpt.fqns[t] for t, change in edits.changes.items() if change.source.name in FP8} - {None}
    scales = {t for t in edits.changes if edits.ckpt.roles[t] == "scale" and edits.ckpt.fqns[t] in fqns}
    edits.left_out |= scales
    if count:
        edits.notes.append(
            f"{count:,} 8-bit weights are written as {wanted}, code times scale; "
            f"{plural(len(scales), 'scale', 'are')} left out"
        )


def is_linear(edits: Edits, tensor: int) -> bool:
    """Return whether a tensor is the weight of a linear layer, by its name; stacks of experts are included."""
    fqn = edits.ckpt.fqns[tensor]
    if fqn is None or edits.ckpt.roles[tensor] != "param" or edits.ckpt.catalog.ndim[tensor] < 2:
        return False
    kind, bias = kind_of(fqn) or ("", False)
    latent = parse(fqn).kind in ("q_a", "kv_a")  # in DeepSeek's attention, which tensor parallelism leaves whole
    return not bias and (latent or (_LINEAR.fullmatch(kind) is not None and "transposed" not in kind))


def _forward(amax: Array) -> Array:
    with np.errstate(divide="ignore", over="ignore"):
        forward = np.float32(1) / amax * np.float32(LARGEST)  # equals torch's 448 / amax to the last bit
    forward[amax == 0] = 1
    return np.minimum(forward, np.finfo(np.float32).max)  # infinite for the tiniest blocks, and 0 · ∞ is NaN


_ONE = Scales(np.ones((1, 1), np.float32), (1 << 62, 1 << 62))


def _scales(edits: Edits, key: str, scale: str, block: tuple[int, int]) -> Scales:
    """Return the scales of a weight; the two shapes determine which elements each scale is for."""
    stored = edits.ckpt[scale]
    shape, found = edits.ckpt.catalog.shape_of(edits.ckpt.catalog.index[key]), stored.shape
    shape = (1,) * (2 - len(shape)) + shape
    rows, columns = shape[-2:]
    grid = _numbers(scale, stored.element, stored.numpy())
    if grid.size == 1:
        return Scales(np.broadcast_to(grid.reshape(1, 1), (*shape[:-2], 1, 1)), (max(rows, 1), max(columns, 1)))
    if found == (rows,) and len(shape) == 2:
        return Scales(grid.reshape(rows, 1), (1, max(columns, 1)))
    if found == grid_shape(shape, block):
        return Scales(grid, block)
    if (
        len(found) == len(shape)
        and found[:-2] == shape[:-2]
        and all(found)
        and not (rows % found[-2] or columns % found[-1])
    ):
        return Scales(grid, (rows // found[-2], columns // found[-1]))
    raise UnsupportedFormatError(
        f"tensor {key!r} of shape {shape} and its scale {scale!r} of shape {found} do not match: there must be one for "
        f"the tensor, one for each row, or one for each block of {block[0]} × {block[1]} or another size that divides "
        "it"
    )


def _numbers(key: str, dtype: DType, array: Array) -> Array:
    """Decode scales to float32."""
    if dtype.name in ("float8_e8m0fnu", "uint8"):
        return np.take(fp8_table("float8_e8m0fnu"), array)
    if dtype.name in FLOATS:
        return widened(np.ascontiguousarray(array).reshape(-1).view(dtype.raw), dtype).reshape(array.shape)
    raise UnsupportedFormatError(
        f"scale {key!r} has type {dtype}; supported are {', '.join(FLOATS)} and float8_e8m0fnu"
    )


def _block(edits: Edits) -> tuple[int, int]:
    """Return the rows and columns of a block, as the model's configuration states."""
    config = edits.ckpt.objects.get("config")
    quantization = config.get("quantization_config") if isinstance(config, Mapping) else None
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return BLOCK
