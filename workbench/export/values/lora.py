"""Low-rank adapters merged into the weights they were trained for: ``W' = W + s · B · A``, as PEFT merges them.

::

    base        layers.0.q_proj.weight   (out, in)
    adapter     base_model.model.layers.0.q_proj.lora_A.weight   (r, in)          s = alpha / r, or alpha / √r (rsLoRA)
                base_model.model.layers.0.q_proj.lora_B.weight   (out, r)
                base_model.model.embed.lora_embedding_A, _B      (r, tokens), (width, r)       W' = W + s · (B · A)ᵀ
                base_model.model.lm_head.weight                  saved whole: replaces the base's

Products and sums are float32, rounded once to the type that is written. Factors of 32 bits are read in place from the
file; those of 16 bits are held as float32.

Source: peft 0.21 ``tuners/lora/layer.py`` (``get_delta_weight`` of ``Linear``, ``Embedding``, ``_ConvNd``),
``utils/save_and_load.py``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.core.decoding.floats import FP8
from workbench.core.dtypes import DType
from workbench.core.words import plural, some_of
from workbench.errors import UnsupportedFormatError, UsageError
from workbench.export.casts import FLOATS, SOURCES, cast, widened
from workbench.export.sharding.kinds import kind_of
from workbench.export.values.edits import Added, Edits
from workbench.export.values.lora_config import LoraConfig
from workbench.export.values.scales import segments
from workbench.tensor import LazyTensor

Pair = dict[str, LazyTensor]  #: lora_A and lora_B
BLOCK = 1 << 18  #: elements of a product that are computed together
SHOWN = 5  #: names spelled out in one message


def merge(edits: Edits, adapter: Checkpoint) -> None:
    """Merge an adapter into the tensors that an export selected.

    Tensors that the adapter saved whole (``modules_to_save``) replace the base's, in their own type unless the export
    casts; one of another shape, or that the base lacks, is added.

    Args:
        adapter: a PEFT checkpoint, with its ``adapter_config.json``; it must stay open until the export is done.

    Raises:
        UnsupportedFormatError: an adapter of another kind, or with settings that cannot be merged, which are named.
        UsageError: an adapter that does not fit: tensors without a counterpart in the base, or of other shapes.
    """
    config = LoraConfig.of(adapter.objects.get("adapter_config"))
    ckpt = edits.ckpt
    base = {fqn: t for t in edits.tensors if ckpt.roles[t] == "param" and (fqn := ckpt.fqns[t]) is not None}
    pairs, whole = _sorted(adapter)
    unused = [tensor.key for fqn, pair in pairs.items() if fqn not in base for tensor in pair.values()]
    if unused:
        raise UsageError(
            f"{plural(len(unused), 'tensor')} of the adapter without a weight to merge into: {some_of(unused, SHOWN)}; "
            "select their weights too, or give the base model that the adapter was trained for"
        )
    for fqn, stored in whole.items():
        _replace(edits, base.get(fqn), fqn, stored)
    scratch = Scratch()
    for fqn, pair in pairs.items():
        _update(edits, base[fqn], pair, config, scratch)
    edits.notes.append(
        f"adapter {adapter.path!r}: {plural(len(pairs), 'weight')} updated by W + s·B·A, "
        f"{plural(len(whole), 'tensor')} replaced"
    )


def _sorted(adapter: Checkpoint) -> tuple[dict[str, Pair], dict[str, LazyTensor]]:
    """Sort the adapter's tensors by parameter: the two factors, and the tensors saved whole."""
    pairs: dict[str, Pair] = defaultdict(dict)
    whole: dict[str, LazyTensor] = {}
    for key, fqn, role in zip(adapter.catalog.keys, adapter.fqns, adapter.roles, strict=True):
        factor = role in ("lora_A", "lora_B")
        if fqn is None or not (factor or role in ("param", "buffer")) or (factor and not fqn.endswith(".weight")):
            raise UnsupportedFormatError(f"tensor {key!r} of the adapter, of role {role}, cannot be merged")
        held, name = (pairs[fqn], role) if factor else (whole, fqn)
        if name in held:
            raise UnsupportedFormatError(f"tensor {key!r} of the adapter duplicates {held[name].key!r}")
        held[name] = adapter[key]
    for pair in pairs.values():
        if len(pair) != 2:
            raise UsageError(
                f"tensor {next(iter(pair.values())).key!r} of the adapter has no counterpart (lora_A or lora_B)"
            )
    return dict(pairs), whole


def _update(edits: Edits, tensor: int, pair: Pair, config: LoraConfig, scratch: Scratch) -> None:
    key, shape, change = edits.ckpt.catalog.keys[tensor], edits.ckpt.catalog.shape_of(tensor), edits.changes[tensor]
    fqn = edits.ckpt.fqns[tensor] or ""
    if change.wanted.name not in FLOATS or (change.source.name in FP8 and not change.steps):
        raise UnsupportedFormatError(
            f"tensor {key!r} has type {change.source}; cast it to a floating-point type to merge into it (dtype)"
        )
    up, down = _matrix(pair["lora_B"]), _matrix(pair["lora_A"])
    product_shape, flat = (up.shape[0], down.shape[1]), (*shape[:2], *(n for n in shape[2:] if n != 1))
    if flat not in (product_shape, product_shape[::-1]) or up.shape[1] != down.shape[0]:
        raise UsageError(
            f"tensor {key!r} of shape {shape}: {pair['lora_B'].key!r} of shape {pair['lora_B'].shape} times "
            f"{pair['lora_A'].key!r} of shape {pair['lora_A'].shape} does not fit it"
        )
    scale = np.float32(config.scale(fqn.removesuffix(".weight"), len(down)))
    turned = product_shape != flat or (product_shape == product_shape[::-1] and _is_transposed(fqn, pair, config))
    edits.update(
        tensor, LowRankUpdate(down.T, up.T, scale, scratch) if turned else LowRankUpdate(up, down, scale, scratch)
    )


def _is_transposed(fqn: str, pair: Pair, config: LoraConfig) -> bool:
    """Return whether a square weight is stored ``(in, out)``: inferred from its name or else from the configuration."""
    kind = kind_of(fqn)
    if "lora_embedding_" in pair["lora_A"].key:
        return True
    return config.transposed if kind is None else "transposed" in kind[0]


def _matrix(tensor: LazyTensor) -> Array:
    """Return a factor as float32; a 32-bit factor is a view of the file."""
    if tensor.element.name not in FLOATS or tensor.ndim < 2 or any(n != 1 for n in tensor.shape[2:]):
        raise UnsupportedFormatError(
            f"tensor {tensor.key!r} of the adapter has type {tensor.element} and shape {tensor.shape}: only matrices "
            f"of {', '.join(FLOATS)} can be merged, and convolutions of 1 × 1"
        )
    return widened(_bits(tensor), tensor.element).reshape(tensor.shape[:2])


def _replace(edits: Edits, tensor: int | None, fqn: str, stored: LazyTensor) -> None:
    """Replace a tensor with the one that the adapter saved whole."""
    catalog, element = edits.ckpt.catalog, stored.element
    wanted = edits.dtype if edits.dtype is not None and element.name in SOURCES else element
    floats = wanted.name in FLOATS and element.name in FLOATS
    if tensor is not None and floats and catalog.shape_of(tensor) == stored.shape and _is_float(edits, tensor):
        edits.update(tensor, Replaced(_bits(stored).reshape(stored.shape), element), wanted)
        return
    raw = cast(_bits(stored), element, wanted)[0] if wanted != element else _bits(stored)
    key = catalog.keys[tensor] if tensor is not None else fqn
    edits.added.append(Added(key, fqn, "param", wanted, raw.reshape(stored.shape)))
    if tensor is not None:
        edits.left_out.add(tensor)
        edits.notes.append(
            f"tensor {catalog.keys[tensor]!r}, of shape {catalog.shape_of(tensor)}, is replaced by the adapter's, "
            f"of shape {stored.shape}"
        )
    else:
        edits.notes.append(f"tensor {fqn!r} exists only in the adapter and is added")


def _is_float(edits: Edits, tensor: int) -> bool:
    return edits.changes[tensor].source.name in (*SOURCES, *FP8)


def _bits(tensor: LazyTensor) -> Array:
    """Return the bits, flat, in the raw type."""
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(tensor.element.raw)


# ---- the steps of a merge --------------------------------------------------------------------------------------------


class Scratch(threading.local):
    """The last block that a thread computed: neighbouring parts of a tensor need it again."""

    def __init__(self) -> None:
        self.key: tuple[int, int] | None = None
        self.block = np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class LowRankUpdate:
    """Adds ``scale · left · right`` to a matrix (axes of 1 may follow).

    The same blocks of rows are always computed whole, so an element's last bit does not depend on the cuts.

    Attributes:
        left: float32 ``(rows, r)``.
        right: float32 ``(r, columns)``.
        scratch: shared by the updates of one export.
    """

    left: Array
    right: Array
    scale: np.float32
    scratch: Scratch

    @property
    def identity(self) -> str:
        """A digest of both factors, and the scale."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.left))
        digest.update(np.ascontiguousarray(self.right))
        return f"update {digest.hexdigest()} {self.scale!r} {self.left.shape} {self.right.shape}"

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Add to a box of the tensor."""
        flat = values.reshape(values.shape[:2])
        step = max(BLOCK // max(self.right.shape[1], 1), 1)
        for number, run in segments(begin[0], len(flat), step):
            first = begin[0] + run.start - number * step
            rows = self._block(number, step)[first : first + run.stop - run.start]
            flat[run] += rows[:, begin[1] : begin[1] + flat.shape[1]]

    def _block(self, number: int, step: int) -> Array:
        held = self.scratch
        if held.key != (id(self), number):
            held.block = self.left[number * step : (number + 1) * step] @ self.right
            held.block *= self.scale
            held.key = id(self), number
        return held.block


@dataclass(frozen=True, eq=False)
class Replaced:
    """Replaces a tensor's values.

    Attributes:
        raw: their bits, of the tensor's shape.
        element: their type.
    """

    raw: Array
    element: DType

    @property
    def identity(self) -> str:
        """A digest of the bits."""
        return f"replaced {self.element} {xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.raw))}"

    def __call__(self, begin: Sequence[int], values: Array) -> None:
        """Replace the values of a box."""
        box = self.raw[tuple(slice(a, a + n) for a, n in zip(begin, values.shape, strict=True))]
        values[...] = widened(np.ascontiguousarray(box).reshape(-1), self.element).reshape(values.shape)
