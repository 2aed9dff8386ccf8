"""How two tensor-parallel ranks share a parameter, and what a loader gets when they wrote different things.

::

    q k v gate up embed_tokens lm_head     rows       ┌ rank 0 ┐      o_proj down_proj   columns   [ rank 0 │ rank 1 ]
                                                      └ rank 1 ┘      norms, routers     both hold the whole
"""

from __future__ import annotations

import torch

from tests.lab.model import is_norm
from tests.lab.state import STATES, State

__all__ = ["axis_of", "halves", "merged"]


def axis_of(name: str) -> int | None:
    """The axis along which ranks share a parameter; ``None`` where each holds the whole."""
    if is_norm(name) or ".mlp.gate." in name or "lora_" in name:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def halves(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    axis = axis_of(name)
    if axis is None:
        return tensor, tensor
    first, second = tensor.chunk(2, axis)
    return first, second


def merged(first: State, second: State) -> State:
    """What is loaded when rank 0 wrote ``first`` and rank 1 ``second``; of what both hold, rank 0's counts."""
    found = first.clone()
    for where in STATES.values():
        mine, theirs = getattr(found, where), getattr(second, where)
        for name in mine:
            axis = axis_of(name)
            if axis is not None:
                mine[name] = torch.cat([halves(name, mine[name])[0], halves(name, theirs[name])[1]], axis)
    return found
