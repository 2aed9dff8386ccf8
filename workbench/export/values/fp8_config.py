"""Update ``config.json`` of a model whose weights were converted to or from FP8.

Source: transformers 5.23 ``FineGrainedFP8Config``, ``quantizers/quantizers_utils.py`` (``should_convert_module``: a
listed module is left alone with all that is in it); compressed-tensors 0.20 ``QuantizationConfig``, ``FP8_DYNAMIC`` of
``quantization/quant_scheme.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core.decoding.floats import FP8
from workbench.core.dtypes import ALL
from workbench.export.sharding.kinds import end_of
from workbench.export.values.edits import Edited

_TYPES = ("torch_dtype", "dtype")


def configured(config: Mapping[str, Any], edited: Edited, names: Sequence[str], recipe: str | None) -> dict[str, Any]:
    """Return the configuration of the written model; the same one if nothing was converted.

    Args:
        names: the new names of its tensors.
        recipe: by which the weights were quantised, if they were.
    """
    made = dict(config)
    values = {
        one.wanted.name for one in edited.changes.values() if one.source.name in FP8 and one.wanted.name not in FP8
    }
    if values:
        made.pop("quantization_config", None)
        made |= {key: min(values) for key in _TYPES if key in made}
    if recipe == "fp8":
        made["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": _left_alone(edited, names),
        }
    elif recipe == "fp8-tensor":
        each = {"num_bits": 8, "type": "float", "symmetric": True}
        made["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**each, "strategy": "tensor", "dynamic": False},
                    "input_activations": {**each, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": _left_alone(edited, names),
        }
    return made


def _left_alone(edited: Edited, names: Sequence[str]) -> list[str]:
    """Return the modules whose weights could be quantised but are not; the head too if it is tied to the embedding."""
    ckpt, found = edited.ckpt, {"lm_head"}
    for tensor, (fqn, role, code) in enumerate(zip(ckpt.fqns, ckpt.roles, edited.codes.tolist(), strict=True)):
        matrix = fqn is not None and role == "param" and ckpt.catalog.ndim[tensor] >= 2 and end_of(fqn) != "first"
        if matrix and ALL[code].name not in FP8:
            found.add(names[tensor].removesuffix(".weight"))
    return sorted(found)
