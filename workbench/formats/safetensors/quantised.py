"""Quantised weights in safetensors: which tensors belong together, and how they are decoded.

::

    compressed-tensors   weight_packed I32, weight_scale, weight_shape                              pack-quantized
                         … and weight_zero_point, weight_g_idx, if present
                         weight I8 or F8, weight_scale [, weight_zero_point]        int-, float-quantized
                         weight_packed U8, weight_scale F8, weight_global_scale             nvfp4-pack-quantized
                         weight_packed U8, weight_scale U8                                  mxfp4-pack-quantized
    GPTQ                 qweight, qzeros I32, scales [, g_idx]; 2, 3, 4 or 8 bits; zeros less 1 unless gptq_v2
    AWQ                  qweight, qzeros I32, scales; 4 bits, version gemm
    bitsandbytes         weight U8, absmax, quant_map, quant_state.bitsandbytes__nf4              4 bits
                         absmax U8, nested_absmax, nested_quant_map                               double quantisation
                         weight I8, SCB                                                           8 bits
    torchao              _weight_qdata F8, _weight_scale; I8, and _weight_zero_point
    MLX                  weight U32, scales [, biases]; without biases, mode mxfp4, mxfp8 or nvfp4
    FP8                  weight F8, weight_scale_inv F32 for each 128 × 128; ModelOpt: weight_scale, one for all
    ModelOpt             weight U8, weight_scale F8, weight_scale_2: NVFP4, all three multiplied
    gpt-oss              X_blocks U8 (experts, rows, groups, 16), X_scales U8; transposed, as transformers loads it

The result has the element type that the owning library returns; of ModelOpt's NVFP4, whose files do not state it,
float32. Tensors of unlisted schemes stay as stored. Tensors that contradict each other are listed as stored; reading
them as numbers is an error.

Sources: compressed-tensors 0.20, bitsandbytes 0.50, torchao 0.18, mlx 0.32, transformers 5.23
(``integrations/mxfp4.py``, ``finegrained_fp8.py``), AutoGPTQ 0.7.1 (``qlinear_cuda_old.py``), AutoAWQ 0.2.9
(``WQLinear_GEMM``, ``dequantize_gemm``) and ModelOpt 0.47 (``NVFP4QTensor``): their files, and the values that they
return, bit for bit. GPTQModel 7.7 by its source. A zero point of 0, less 1, is the largest code: AutoGPTQ decodes it as
0 (its kernels for 3 bits and ``qlinear_cuda.py`` do not, and are off by 2 ** bits steps), and GPTQModel borrows from
the next zero of the word (``convert_gptq_v2_to_v1_format_module``; not with 3 bits).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from workbench.core import codecs, jsonsafe
from workbench.core.arrays import Array
from workbench.core.catalog import Catalog
from workbench.core.decoding.scaled import Codes, Scaled, Transposed, unit_of
from workbench.core.decoding.values import Recipe, StoredParts
from workbench.core.dtypes import by_name, nbytes_of
from workbench.core.place import Place
from workbench.core.words import plural
from workbench.errors import CorruptError
from workbench.formats.safetensors.header import parse

CONFIG = "config.json"
ALONE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  #: files of AutoGPTQ and AutoAWQ
STATE = 1 << 16  #: bytes of a bitsandbytes state
_NF4 = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
_FLOATS = ("float32", "bfloat16", "float16")
#: MLX's modes without biases: numbers of a group and their bits, what codes and scales are.
_MLX_FLOATS = {
    "mxfp4": (32, 4, "e2m1", "e8m0"),
    "mxfp8": (32, 8, "e4m3", "e8m0"),
    "nvfp4": (16, 4, "e2m1", "float8_e4m3fn"),
}
SCB = 7.874015718698502e-3  #: 1 / 127, as bitsandbytes multiplies


def recipes(place: Place, catalog: Catalog) -> Sequence[Recipe]:
    """Return a recipe for each quantised weight; if tensors do not fit each other, it raises CorruptError."""
    return list(_Finder(place, catalog).found())


class _Finder:
    """Examines the names and types of all tensors, and the model's configuration."""

    def __init__(self, place: Place, catalog: Catalog) -> None:
        self.place, self.catalog, self.index = place, catalog, catalog.index
        self.config = _config(place)
        self._texts: dict[str, dict[str, str]] = {}  #: file → the texts of its header

    def found(self) -> Iterator[Recipe]:
        """Yield recipes in the order of the keys."""
        for key in self.catalog.keys:
            try:
                made = self._found(key)
            except CorruptError as error:
                state = _NF4.fullmatch(key)
                codes = state[1] if state and state[1] in self.index else key
                dtype = self.catalog.dtype_of(self.index[codes])
                made = Recipe(codes, "contradictory", (codes,), dtype, self._shape(codes), 1, _Refused(str(error)))
            if made is not None:
                yield made

    def _found(self, key: str) -> Recipe | None:
        if key.endswith(".weight_packed"):
            return self._packed(key.removesuffix(".weight_packed"))
        if match := _NF4.fullmatch(key):
            return self._four_bits(match[1], key)
        if key.endswith("._weight_qdata"):
            return self._torchao(key.removesuffix("._weight_qdata"))
        if key.endswith("_blocks") and self._type(f"{key[:-7]}_scales") == "uint8":
            return self._mxfp4(key.removesuffix("_blocks"))
        if key.endswith(".qweight"):
            return self._transposed(key.removesuffix(".qweight"))
        return self._weight(key) if key.endswith(".weight") else None

    # ---- schemes -----------------------------------------------------------------------------------------------------

    def _packed(self, stem: str) -> Recipe | None:
        """Read compressed-tensors: integers in words, or NVFP4."""
        key, scale, total = (f"{stem}.weight_{part}" for part in ("packed", "scale", "global_scale"))
        if self._type(key) == "uint8" and self._type(total) == "float32" and self._type(scale) == "float8_e4m3fn":
            rows, half = self._matrix(key)
            self._fits(scale, (rows, 2 * half // 16), key)
            self._fits(total, (1,), key)
            codes, shape = Codes(key, bits=4, kind="e2m1"), (rows, 2 * half)
            how = Scaled(codes, scale, "float8_e4m3fn", shape, (1, 16), 16, "bfloat16", total=total, divide=True)
            return Recipe(f"{stem}.weight", "NVFP4", (key, scale, total), by_name("bfloat16"), shape, 16, how)
        if self._type(key) == "uint8" and self._type(scale) == "uint8" and total not in self.index:
            rows, half = self._matrix(key)
            if half % 16:
                raise CorruptError(f"tensor {key!r} has rows of {half} bytes, not of groups of 32 numbers")
            self._fits(scale, (rows, half // 16), key)
            codes, shape = Codes(key, bits=4, kind="e2m1"), (rows, 2 * half)
            how = Scaled(codes, scale, "e8m0", shape, (1, 32), 32, "bfloat16")
            return Recipe(f"{stem}.weight", "MXFP4", (key, scale), by_name("bfloat16"), shape, 32, how)
        sizes, zeros, named = (f"{stem}.weight_{part}" for part in ("shape", "zero_point", "g_idx"))
        if self._type(key) != "int32" or self._type(sizes) != "int64" or self._type(scale) not in _FLOATS:
            return None
        extra = tuple(part for part in (zeros, named) if part in self.index)
        if any(self._type(part) != "int32" for part in extra):
            return None
        rows, words = self._matrix(key)
        unpacked = [int.from_bytes(self._bytes(sizes)[at : at + 8], "little") for at in (0, 8)]
        bits = _bits(self.config) or next((n for n in (4, 8) if unpacked[1] * n == words * 32), 0)
        inside = unpacked[0] == rows and unpacked[1] * bits % 32 and -(-unpacked[1] * bits // 32) == words
        if bits not in (4, 8) or inside:  # valid, but not read here: another width, or rows that end inside a word
            return None
        if unpacked[0] != rows or unpacked[1] * bits != words * 32:
            raise CorruptError(
                f"tensor {sizes!r} says {unpacked}, but {key!r} has {rows} rows of {words} words, {32 * words // bits} "
                f"numbers of {bits} bits"
            )
        shape = rows, unpacked[1]
        if zeros in extra and prod(self._shape(scale)) == 1:
            return None
        if zeros in extra:
            across = prod(self._shape(scale)[1:])
            self._fits(zeros, (-(-shape[0] * bits // 32), across), key)
        self._fits(named, shape[1:], key)
        codes, parts = Codes(key, bits=bits, offset=1 << bits - 1), (key, scale, sizes, *extra)
        zeros, named = (part if part in extra else "" for part in (zeros, named))
        return self._grouped(f"{stem}.weight", f"INT{bits}", codes, scale, shape, parts, zeros, named)

    def _transposed(self, stem: str) -> Recipe | None:
        """Read GPTQ and AWQ, whose files have a row for each input. Only the configuration states what their words
        mean.
        """
        key, zeros, scales, named = (f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
        dtype, version = self._type(scales), self.config.get("checkpoint_format", "gptq")
        method = self.config.get("quant_method"), version if self.config.get("quant_method") == "gptq" else "gemm"
        awq = method[0] == "awq" and str(self.config.get("version", "gemm")).lower() == "gemm"
        if not awq and method not in (("gptq", "gptq"), ("gptq", "gptq_v2")):
            return None
        if self._type(key) != "int32" or self._type(zeros) != "int32" or dtype not in _FLOATS:
            return None
        (words, _), (groups, outputs) = self._matrix(key), self._matrix(scales)
        bits = self._matrix(zeros)[1] * 32 // outputs
        if bits not in ((4,) if awq else (2, 3, 4, 8)) or self._shape(zeros) != (groups, outputs * bits // 32):
            raise CorruptError(
                f"tensor {zeros!r} has the shape {self._shape(zeros)}; for {scales!r} of {self._shape(scales)}, "
                f"{groups} rows of words of {'4' if awq else '2, 3, 4 or 8'} bits were expected"
            )
        self._fits(key, (words, outputs // 8) if awq else (words, outputs), scales)
        inputs = words if awq else words * 32 // bits
        if not awq and (words % bits or inputs % 32):
            raise CorruptError(f"tensor {key!r} has {words} rows of words, not {bits} for each 32 inputs")
        listed = self._type(named) == "int32" and not awq
        if listed:
            self._fits(named, (inputs,), key)
        elif inputs % groups:
            raise CorruptError(f"tensor {scales!r} has {groups} groups for the {inputs} inputs of {key!r}")
        more, group = int(method == ("gptq", "gptq")), inputs // groups
        carry = _by_gptqmodel(self.config)
        how = Transposed(key, zeros, scales, dtype, outputs, bits, group, named if listed else "", more, awq, carry)
        parts = (key, zeros, scales, *((named,) if named in self.index else ()))
        scheme, unit = ("AWQ", outputs) if awq else (f"GPTQ {bits}", 32 * outputs)
        return Recipe(f"{stem}.weight", scheme, parts, by_name(dtype), (outputs, inputs), unit, how, (1, outputs))

    def _weight(self, key: str) -> Recipe | None:
        """Read weights that keep their name: 8-bit codes, or MLX's words."""
        stem, kind = key.removesuffix(".weight"), self._type(key)
        scale = f"{stem}.weight_scale"
        if kind == "uint32" and f"{stem}.scales" in self.index:
            return self._mlx(stem) if f"{stem}.biases" in self.index else self._mlx_floats(stem)
        total = f"{stem}.weight_scale_2"
        if kind == "uint8" and self._type(scale) == "float8_e4m3fn" and self._type(total) == "float32":
            rows, half = self._matrix(key)
            self._fits(scale, (rows, 2 * half // 16), key)
            if prod(self._shape(total)) != 1 or half % 8:
                raise CorruptError(f"tensors {total!r} and {key!r} are not one number and rows of groups of 16 numbers")
            how = Scaled(
                Codes(key, bits=4, kind="e2m1+"),
                scale,
                "float8_e4m3fn",
                (rows, 2 * half),
                (1, 16),
                16,
                "float32",
                total=total,
            )
            return Recipe(key, "NVFP4", (key, scale, total), by_name("float32"), (rows, 2 * half), 16, how)
        if kind == "int8" and self._type(f"{stem}.SCB") == "float32":
            shape = self._matrix(key)
            self._fits(f"{stem}.SCB", shape[:1], key)
            unit = unit_of(shape[1], shape[1])
            codes = Codes(key, "int8")
            how = Scaled(codes, f"{stem}.SCB", "float32", shape, (1, shape[1]), unit, "float32", factor=SCB)
            layout = [f"{stem}.weight_format"] if f"{stem}.weight_format" in self.index else []
            parts = (key, f"{stem}.SCB", *layout)
            return Recipe(key, "LLM.int8", parts, by_name("float32"), shape, unit, how)
        zeros = f"{stem}.weight_zero_point"
        if zeros in self.index and (kind != "int8" or self._type(zeros) != "int8"):
            return None
        if kind == "float8_e4m3fn" and self._type(f"{stem}.weight_scale_inv") == "float32":
            return self._blocks(key, f"{stem}.weight_scale_inv")
        if kind in ("int8", "float8_e4m3fn") and self._type(scale) in _FLOATS and len(self._shape(key)) == 2:
            self._fits(zeros, self._shape(scale), key)
            named = f"{stem}.weight_g_idx"
            if named in self.index and self._type(named) != "int32":
                return None
            extra = tuple(part if part in self.index else "" for part in (zeros, named))
            return self._grouped(
                key,
                "FP8" if kind[0] == "f" else "INT8",
                Codes(key, kind),
                scale,
                self._matrix(key),
                (key, scale, *filter(None, extra)),
                *extra,
            )
        return None

    def _grouped(
        self,
        name: str,
        scheme: str,
        codes: Codes,
        scale: str,
        shape: tuple[int, int],
        parts: tuple[str, ...],
        zeros: str = "",
        named: str = "",
    ) -> Recipe:
        """Create a recipe of scales for groups of columns, for rows, or one for all; the result has their type."""
        rows, columns = shape
        scale_shape, dtype = self._shape(scale), self._type(scale)
        if prod(scale_shape) == 1:
            block = rows, columns
        elif len(scale_shape) == 2 and scale_shape[0] == rows and scale_shape[1] and columns % scale_shape[1] == 0:
            block = 1, columns // scale_shape[1]
        else:
            raise CorruptError(
                f"tensor {scale!r} has the shape {scale_shape}, but {name!r} has {rows} rows of {columns} columns"
            )
        unit = unit_of(columns, block[1])
        unit = columns if named or (codes.bits and unit * codes.bits % 32) else unit
        how = Scaled(
            codes,
            scale,
            dtype,
            shape,
            (max(block[0], 1), max(block[1], 1)),
            max(unit, 1),
            dtype,
            zeros=zeros,
            groups=named,
        )
        return Recipe(name, scheme, parts, by_name(dtype), shape, max(unit, 1), how)

    def _blocks(self, key: str, scale: str) -> Recipe | None:
        """Read FP8 with a scale for each block of a matrix, or of each of several matrices."""
        shape = self._shape(key)
        size = self.config.get("weight_block_size", [128, 128])
        known = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        if len(shape) < 2 or not known:
            return None
        rows, columns = shape[-2:]
        self._fits(scale, (*shape[:-2], -(-rows // size[0]), -(-columns // size[1])), key)
        unit = max(unit_of(columns, size[1]), 1)
        how = Scaled(
            Codes(key, "float8_e4m3fn"),
            scale,
            "float32",
            (max(rows, 1), max(columns, 1)),
            (size[0], size[1]),
            unit,
            "float32",
        )
        return Recipe(key, "FP8", (key, scale), by_name("float32"), shape, unit, how)

    def _four_bits(self, key: str, state: str) -> Recipe | None:
        """Read bitsandbytes: the shape is in the state. Scales may be 8-bit codes with scales of their own."""
        absmax, table = f"{key}.absmax", f"{key}.quant_map"
        kind = self._type(absmax)
        if self._type(key) != "uint8" or kind not in ("float32", "uint8") or self._type(table) != "float32":
            return None
        quant_state = jsonsafe.loads(self._bytes(state), what=f"tensor {state!r}")
        if not isinstance(quant_state, dict):
            quant_state = {}
        shape, size, dtype = (quant_state.get(name) for name in ("shape", "blocksize", "dtype"))
        if (
            not isinstance(shape, list)
            or not all(type(n) is int and 0 < n < 1 << 40 for n in shape)
            or type(size) is not int
            or size < 2
            or size % 2
            or dtype not in _FLOATS
        ):
            raise CorruptError(f"tensor {state!r} has no shape, block size or element type")
        numel = prod(shape)
        stored = prod(self._shape(key))
        self._fits(table, (16,), key)
        if -(-numel // 2) != stored or prod(self._shape(absmax)) != -(-numel // size):
            raise CorruptError(
                f"tensor {state!r} says the shape {tuple(shape)} in blocks of {size}, but {key!r} has "
                f"{plural(stored, 'byte')} and {absmax!r} {plural(prod(self._shape(absmax)), 'scale')}"
            )
        unit = unit_of(numel, size)
        if unit % 2:
            return None
        codes = Codes(key, bits=4, kind="high", table=table)
        nested = self._nested(key, absmax, quant_state, state) if kind == "uint8" else None
        how = Scaled(codes, absmax, "float32", (1, numel), (1, size), unit, str(dtype), nested=nested)
        parts = (key, absmax, table, state, *(nested or ())[:2])
        return Recipe(key, "NF4" if state.endswith("nf4") else "FP4", parts, by_name(dtype), tuple(shape), unit, how)

    def _nested(self, key: str, absmax: str, quant_state: Any, state: str) -> tuple[str, str, int, float]:
        """Return the table and the scales of a scale's codes, how many codes share a scale, and the offset to add."""
        table, own = f"{key}.nested_quant_map", f"{key}.nested_absmax"
        block, more = quant_state.get("nested_blocksize"), quant_state.get("nested_offset")
        if type(block) is not int or block < 1 or not isinstance(more, int | float):
            raise CorruptError(
                f"tensor {state!r} has no nested_blocksize or nested_offset, but {absmax!r} is quantised"
            )
        for part, count in ((table, 256), (own, -(-prod(self._shape(absmax)) // block))):
            if self._type(part) != "float32" or prod(self._shape(part)) != count:
                raise CorruptError(
                    f"tensor {part!r} is not {plural(count, 'number')} of float32, which {absmax!r} needs"
                )
        return table, own, block, float(more)

    def _mlx_floats(self, stem: str) -> Recipe | None:
        """Read MLX's mxfp4, mxfp8 and nvfp4, whose scales are the bits of 8-bit floats."""
        key, scale = f"{stem}.weight", f"{stem}.scales"
        own = self.config.get(stem)
        mode = (own if isinstance(own, dict) and "mode" in own else self.config).get("mode")
        if mode not in _MLX_FLOATS or self._type(scale) != "uint8" or len(self._shape(key)) < 2:
            return None
        group, bits, code, kind = _MLX_FLOATS[mode]
        *outer, rows, words = self._shape(key)
        columns = words * 32 // bits
        self._fits(scale, (*outer, rows, columns // group), key)
        if columns % group:
            raise CorruptError(
                f"tensor {key!r} has rows of {words} words, not groups of {group} numbers of {bits} bits"
            )
        how = Scaled(
            Codes(key, bits=bits, kind=code),
            scale,
            kind,
            (max(rows, 1), max(columns, 1)),
            (1, group),
            group,
            "bfloat16",
        )
        shape = (*outer, rows, columns)
        return Recipe(key, f"MLX {mode}", (key, scale), by_name("bfloat16"), shape, group, how)

    def _torchao(self, stem: str) -> Recipe | None:
        """Read torchao's Float8Tensor and Int8Tensor; the header states the type of their numbers."""
        key, scale, zero = (f"{stem}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
        kind, scale_shape = self._type(key), self._shape(scale)
        zeros = zero if kind == "int8" and self._type(zero) == "int8" and self._shape(zero) == scale_shape else ""
        if kind not in ("float8_e4m3fn", "int8") or self._type(scale) != "float32":
            return None
        shape = self._matrix(key)
        if (kind == "int8" and not zeros) or scale_shape not in ((shape[0], 1), (1, 1), (1,), ()):
            return None
        block = (1, shape[1]) if scale_shape == (shape[0], 1) else shape
        unit = unit_of(shape[1], shape[1])
        dtype = self._stated(key, f"{stem}.weight")
        how = Scaled(Codes(key, kind), scale, "float32", shape, block, unit, dtype, zeros=zeros)
        stored = (key, scale, zeros) if zeros else (key, scale)
        name = "INT8" if zeros else "FP8"
        return Recipe(f"{stem}.weight", name, stored, by_name(dtype), shape, unit, how)

    def _stated(self, key: str, name: str) -> str:
        """Return the element type that a file's header states for one of torchao's tensors; bfloat16 without one.

        Source: torchao 0.18 ``prototype/safetensors/safetensors_support.py`` (``flatten_tensor_state_dict``).
        """
        file = self.catalog.files[self.catalog.file[self.catalog.rows_of(self.index[key]).start]]
        if file not in self._texts:
            self._texts = {file: parse(self.place, file, cut=True).metadata}  # of one file: keys are in its order
        found: Any = jsonsafe.loads(self._texts[file].get(name, "null").encode(), what=f"{file!r}, {name!r}")
        for part in ("_data", "dtype", "_data"):
            found = found.get(part) if isinstance(found, dict) else None
        return found if found in _FLOATS else "bfloat16"

    def _mlx(self, stem: str) -> Recipe | None:
        """Read MLX's affine groups; the configuration states bits and group sizes, per module where they differ."""
        key, scale, bias = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
        own = self.config.get(stem)
        config = {**self.config, **own} if isinstance(own, dict) else self.config
        bits, group, dtype = config.get("bits"), config.get("group_size"), self._type(scale)
        if bits not in (2, 3, 4, 5, 6, 8) or type(group) is not int or group < 1 or dtype not in _FLOATS:
            return None
        *outer, rows, words = self._shape(key) if len(self._shape(key)) >= 2 else (0, 0)
        columns = words * 32 // bits
        for part in (scale, bias):
            self._fits(part, (*outer, rows, columns // group), key)
        if columns * bits != words * 32 or columns % group or group * bits % 32 or self._type(bias) != dtype:
            raise CorruptError(
                f"tensor {key!r} has rows of {words} words, not groups of {group} numbers of {bits} bits"
            )
        how = Scaled(
            Codes(key, bits=bits), scale, dtype, (max(rows, 1), max(columns, 1)), (1, group), group, dtype, bias=bias
        )
        return Recipe(key, f"MLX {bits}", (key, scale, bias), by_name(dtype), (*outer, rows, columns), group, how)

    def _mxfp4(self, stem: str) -> Recipe | None:
        """Read gpt-oss: groups of 32 in 16 bytes; the model's matrices are the transposes of the file's."""
        key, scale = f"{stem}_blocks", f"{stem}_scales"
        shape = self._shape(key)
        if self._type(key) != "uint8" or len(shape) != 4 or shape[3] != 16:
            return None
        self._fits(scale, shape[:3], key)
        experts, rows, columns = shape[0], shape[1], shape[2] * 32
        how = Scaled(
            Codes(key, bits=4, kind="e2m1"), scale, "e8m0", (max(rows, 1), max(columns, 1)), (1, 32), 32, "bfloat16"
        )
        strides = (rows * columns, 1, columns)
        return Recipe(stem, "MXFP4", (key, scale), by_name("bfloat16"), (experts, columns, rows), 32, how, strides)

    # ---- what is stored ----------------------------------------------------------------------------------------------

    def _type(self, key: str) -> str:
        """Return the name of a tensor's element type; empty if no tensor has this key."""
        tensor = self.index.get(key)
        return "" if tensor is None else self.catalog.dtype_of(tensor).name

    def _shape(self, key: str) -> tuple[int, ...]:
        return self.catalog.shape_of(self.index[key])

    def _matrix(self, key: str) -> tuple[int, int]:
        shape = self._shape(key)
        if len(shape) != 2 or 0 in shape:
            raise CorruptError(f"tensor {key!r} of quantised numbers has the shape {shape}; a matrix was expected")
        return shape[0], shape[1]

    def _fits(self, key: str, shape: tuple[int, ...], of: str) -> None:
        if key in self.index and self._shape(key) != shape:
            raise CorruptError(f"tensor {key!r} has the shape {self._shape(key)}; for {of!r}, {shape} was expected")

    def _bytes(self, key: str) -> bytes:
        """Read the bytes of a small tensor of metadata."""
        tensor = self.index[key]
        rows = self.catalog.rows_of(tensor)
        nbytes = nbytes_of(self.catalog.dtype_of(tensor), prod(self._shape(key)))
        if rows.stop - rows.start != 1 or nbytes > STATE or self.catalog.codec[rows.start] != codecs.RAW:
            raise CorruptError(f"tensor {key!r} of {nbytes:,} bytes is not metadata of a quantised weight")
        file, start = self.catalog.files[self.catalog.file[rows.start]], int(self.catalog.start[rows.start])
        return self.place.read(file, start=start, length=nbytes)


@dataclass(frozen=True)
class _Refused:
    """The recipe of contradictory tensors: raises when they are read as numbers."""

    why: str

    def __call__(self, stored: StoredParts, first: int, stop: int) -> Array:
        raise CorruptError(self.why)


def _config(place: Place) -> Mapping[str, Any]:
    """Return the model's quantisation configuration; empty if it has none."""
    document = place.read_json(CONFIG) if place.exists(CONFIG) else {}
    names = ("quantization_config", "quantization", "compression_config")
    found = [document[name] for name in names if isinstance(document, dict) and isinstance(document.get(name), dict)]
    for name, method in ALONE.items():
        if not found and place.exists(name) and isinstance(own := place.read_json(name), dict):
            found.append({"quant_method": method, **own})
    return found[0] if found else {}


def _bits(config: Mapping[str, Any]) -> int:
    """Return the bits of compressed-tensors' integers; 0 if the configuration's groups do not state them."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if type(bits) is int:
            return bits
    return 0


def _by_gptqmodel(config: Mapping[str, Any]) -> bool:
    """Return whether GPTQModel wrote a file: it subtracts 1 from each packed word of zeros, not from each zero."""
    meta = config.get("meta")
    names = meta.get("quantizer") if isinstance(meta, dict) else None
    return any(str(name).startswith("gptqmodel") for name in (names if isinstance(names, list) else [names]))
