"""``config.json`` of a model whose weights became FP8, or ceased to be.

Source: transformers 5.23 ``FineGrainedFP8Config``, ``quantizers/quantizers_utils.py`` (``should_convert_module``: a
listed module is left alone with all that is in it); compressed-tensors 0.20 ``QuantizationConfig``, ``FP8_DYNAMIC`` of
``quantization/quant_scheme.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.reshard.edits import Edits
from workbench.reshard.float8 import CODES
from workbench.reshard.kinds import end_of

__all__ = ["configured"]

_TYPES = ("torch_dtype", "dtype")


def configured(config: Mapping[str, Any], edits: Edits, names: Mapping[int, str], recipe: str | None) -> dict[str, Any]:
    """The configuration of what is written; otherwise unchanged.

    Args:
        names: new names by position of the tensor.
        recipe: that the weights were quantised by, if they were.
    """
    made = dict(config)
    changes = [edits.changes[tensor] for tensor in edits.tensors.tolist()]
    values = {one.wanted.name for one in changes if one.source.name in CODES and one.wanted.name not in CODES}
    if values:
        made.pop("quantization_config", None)
        made |= {key: min(values) for key in _TYPES if key in made}
    if recipe == "fp8":
        made["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": _left_alone(edits, names),
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
            "ignore": _left_alone(edits, names),
        }
    return made


def _left_alone(edits: Edits, names: Mapping[int, str]) -> list[str]:
    """Modules whose weights could be quantised, and are not; the head too where it is the embedding again."""
    found = {"lm_head"}
    for tensor in edits.tensors.tolist():
        fqn, name = edits.ckpt.fqns[tensor], names[tensor]
        matrix = edits.ckpt.roles[tensor] == "param" and edits.ckpt.catalog.ndim[tensor] >= 2
        if matrix and edits.changes[tensor].wanted.name not in CODES and fqn is not None and end_of(fqn) != "first":
            found.add(name.removesuffix(".weight"))
    return sorted(found)
