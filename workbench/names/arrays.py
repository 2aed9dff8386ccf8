"""The meaning of array names in JAX checkpoints and zarr stores: optax's and Megatron's by their own rules.

::

    params.decoder.wi.kernel                    decoder.wi.kernel   param
    opt_state.1.0.mu.decoder.wi.kernel          decoder.wi.kernel   exp_avg       optax: positions in chains, a field
    opt_state.1.0.count                         —                   step
    optimizer.state.exp_avg.decoder.weight      decoder.weight      exp_avg       Megatron

optax names no parameters: its moments have the tree of the parameters, which a train state stores below ``params``.

Sources: optax 0.2.8 (``ScaleByAdamState``, ``TraceState``, ``MultiStepsState``, ``PartitionState``); flax's
``TrainState``; megatron-core 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workbench.names.roles import resolve

_OPTAX = re.compile(
    r"(?:[a-z_]+\.)?(?:opt_state|optimizer_state|optimizer|opt)"
    r"((?:\.(?:\d+|inner_opt_state|inner_state|inner_states\.[^.]+))*)\.(mu|nu|trace|count)(?:\.(.+))?",
    re.DOTALL,
)
_MEGATRON = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)", re.DOTALL)
PARAMS = "params."
ROLES = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum", "count": "step", "fp32_param": "master"}


def meaning(keys: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Return the parameter and the role of each key."""
    states = {key: match for key in keys if "opt" in key and (match := _state(key))}
    found = zip(*resolve([key for key in keys if key not in states]), strict=True)  # in the order of the keys
    fqns: list[str | None] = []
    roles: list[str] = []
    for key in keys:
        match = states.get(key)
        if match is None:
            fqn, role = next(found)
            fqn = fqn.removeprefix(PARAMS) if fqn is not None else None
        elif match.re is _MEGATRON:
            fqn, role = match[2], ROLES.get(match[1], match[1])
        else:
            fqn, role = match[3], ROLES[match[2]]
        fqns.append(fqn)
        roles.append(role)
    return fqns, roles


def _state(key: str) -> re.Match[str] | None:
    """Match the name of an optimizer's tensor."""
    return (_MEGATRON.fullmatch(key) if key.startswith("optimizer.state.") else None) or _OPTAX.fullmatch(key)
