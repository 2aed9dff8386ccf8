"""``adapter_config.json``: the settings of an adapter that a merge needs, and those that cannot be merged.

Source: peft 0.21 ``tuners/lora/config.py``, ``tuners/lora/layer.py`` (``update_layer``: the scaling),
``utils/other.py`` (``get_pattern_key``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.pickles.standins import short
from workbench.errors import UnsupportedFormatError, UsageError, quoted

#: Settings that change what merging means, wherever they are set.
_REFUSED = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "arrow_config",
    "monteclora_config",
)
#: Prefixes of ``init_lora_weights`` that subtract from the base's own weights.
_RESIDUAL = ("pissa", "corda", "olora", "loftq", "lora_ga")
MAX_PATTERN = 200  #: characters


@dataclass(frozen=True)
class LoraConfig:
    """The settings that merging needs.

    Attributes:
        ranks, alphas: by pattern of a module's name, if they differ from ``r`` and ``alpha``.
        rslora: the scale is ``alpha / √r`` instead of ``alpha / r``.
        transposed: weights are stored ``(in, out)``, as GPT-2's are.
    """

    r: object
    alpha: object
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    rslora: bool
    transposed: bool

    @classmethod
    def of(cls, config: object) -> LoraConfig:
        """Create the configuration from its JSON document.

        Raises:
            UnsupportedFormatError: no configuration, another kind of adapter, or a setting that is not merged.
        """
        if not isinstance(config, Mapping):
            raise UnsupportedFormatError("the adapter has no 'adapter_config.json'; pass the folder that PEFT saved")
        if config.get("peft_type") != "LORA":
            raise UnsupportedFormatError(f"adapter of peft_type {config.get('peft_type')!r}: only LORA can be merged")
        set_so = [name for name in _REFUSED if config.get(name)]
        if config.get("bias", "none") != "none":
            set_so.append("bias")
        if set_so:
            settings = ", ".join(f"{name}={short(config[name])}" for name in set_so)
            raise UnsupportedFormatError(f"adapter with {settings}: merging it is not supported; merge it with PEFT")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_RESIDUAL):
            raise UnsupportedFormatError(
                f"adapter with init_lora_weights={quoted(start)}: it does not belong to the base model's own weights, "
                "because a part was subtracted when training began; convert it with PEFT's save_pretrained first"
            )
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        if not isinstance(ranks, Mapping) or not isinstance(alphas, Mapping):
            raise UnsupportedFormatError("'adapter_config.json': rank_pattern or alpha_pattern is not a mapping")
        return cls(
            config.get("r"),
            config.get("lora_alpha"),
            ranks,
            alphas,
            bool(config.get("use_rslora")),
            bool(config.get("fan_in_fan_out")),
        )

    def scale(self, module: str, rank: int) -> float:
        """Return the factor by which the product of a module's factors is multiplied.

        Args:
            rank: rank of the stored factors.

        Raises:
            UsageError: the rank differs from the configuration's, or there is no alpha.
        """
        r, alpha = _of_module(self.ranks, module, self.r), _of_module(self.alphas, module, self.alpha)
        if r != rank or not rank or isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise UsageError(
                f"the factors of {module!r} have rank {rank}, but 'adapter_config.json' has r={r!r}, "
                f"lora_alpha={alpha!r}"
            )
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _of_module(patterns: Mapping[str, Any], module: str, default: object) -> object:
    """Return the value of the first pattern that matches the end of a module's name."""
    for pattern, value in patterns.items():
        # without groups, and with few repeats, no pattern takes for ever
        if len(pattern) > MAX_PATTERN or "(" in pattern or sum(map(pattern.count, "*+{")) > 3:
            raise UnsupportedFormatError(f"'adapter_config.json': pattern {quoted(pattern)} has an unknown form")
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise UnsupportedFormatError(f"'adapter_config.json': pattern {pattern!r}: {error}") from None
    return default
