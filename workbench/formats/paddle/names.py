"""The meaning of paddle's stored names (fqn and role), and the step inferred from ``beta_pow``.

::

    linear_0.w_0                               static name of a parameter; restarts at 0 in every process
    linear_0.w_0_moment1_0                     exp_avg      dynamic graph, a ``.pdopt``
    linear_0.w_0_fp32_master_0_moment1_0       exp_avg      with master weights
    master_weights.linear_0.w_0                master
    fc.weight.moment1_0   fc.weight.w_0        exp_avg, master     paddle 3.3 ``sharded_state_dict``
    fc.weight/moment1_0   …/moment1_0@scales   exp_avg, its scale  PaddleNLP unified checkpoints

Static names are mapped to structured ones by a table that the same process wrote; without it the fqn is None.

Adam keeps powers of its betas instead of a step. They start at beta and are multiplied by it after each update, so
after t steps a file holds ``beta ** (t + 1)``, and ``t = log(beta_pow) / log(beta) - 1``. The betas are not stored.
Source: paddlepaddle 3.3.1 ``optimizer/*.py``, PaddleNLP 3.0.0b4 ``trainer/plugins/unified_checkpoint*.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.core.catalog import Catalog
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.storage import SourcePool
from workbench.names.roles import resolve as resolve_names

#: paddle's accumulators (``optimizer/*.py``) → role.
STATES = {
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moment2_max": "max_exp_avg_sq",
    "velocity": "momentum",
    "beta1_pow_acc": "beta1_pow",
    "beta2_pow_acc": "beta2_pow",
    "inf_norm": "exp_inf",
    "momentum": "momentum",
    "mean_square": "square_avg",
    "mean_grad": "grad_avg",
    "_avg_squared_grad": "square_avg",
    "_avg_squared_update": "acc_delta",
    "moment": "other",
}
SCALES = ("scales", "min_scales", "max_scales")  #: of a quantized state; the role is the state's plus ``_scale``
MASTERS = {"master_weights", "master_weight"}
BUFFER_LEAVES = {"_mean", "_variance"}  #: batch norm's
FORMULA = "t = log(beta_pow) / log(beta) - 1"
BETA1, BETA2 = (0.9,), (0.999, 0.95, 0.98, 0.99)  #: tried in this order; the first is paddle's default

_STATE = re.compile(
    r"(?P<base>.+?)(?:_fp32_master_\d+)?[_./](?P<state>(?P<kind>"
    + "|".join(sorted(STATES, key=len, reverse=True))
    + r")_\d+(?:@(?P<scale>"
    + "|".join(SCALES)
    + r"))?)",
    re.DOTALL,
)
_MASTER_LEAF = re.compile(r"(.+)\.w_\d+", re.DOTALL)


def split_state(name: str) -> tuple[str, str, str] | None:
    """Split the name of an optimizer tensor into the parameter's name, static or structured; the role; and the state
    as spelled (``moment1_0``). ``None`` for any other name.
    """
    match = _STATE.fullmatch(name)
    if match is None:
        return None
    return match["base"], STATES[match["kind"]] + ("_scale" if match["scale"] else ""), match["state"]


def master_of(name: str) -> str:
    """Return the parameter of a master weight's name in paddle 3.3 (``fc.weight.w_0``), or the name unchanged."""
    match = _MASTER_LEAF.fullmatch(name)
    return match[1] if match else name


def static_table(pairs: Iterable[tuple[str | None, str | None]]) -> dict[str, str]:
    """Return static name → fqn. A static name of two parameters is ambiguous and left out."""
    table: dict[str, str] = {}
    twice: set[str] = set()
    for static, fqn in pairs:
        if static and fqn and table.setdefault(static, fqn) != fqn:
            twice.add(static)
    return {static: fqn for static, fqn in table.items() if static not in twice}


def resolve(
    keys: Sequence[str],
    paths: Mapping[str, tuple[Any, ...]],
    statics: Mapping[str, str | None],
    table: Mapping[str, str],
) -> tuple[list[str | None], list[str]]:
    """Return fqn and role of each tensor of a ``paddle.save`` file.

    Args:
        keys: stored paths joined by dots, distinct.
        paths: by key, the dict keys and list positions that lead there.
        statics: by key, the static name stored with it, if any.
        table: static → structured, from the file or the model's file next to it; pairs in the file are added.
    """
    leaf = {key: str(paths[key][-1]) if paths.get(key) else key for key in keys}
    master = {key for key in keys if len(paths.get(key, ())) > 1 and str(paths[key][-2]) in MASTERS}
    states = {key: found for key in keys if key not in master and (found := split_state(leaf[key]))}
    plain = [key for key in keys if key not in master and key not in states]
    fqns, roles = resolve_names(plain, {"paths": {key: paths[key] for key in plain if paths.get(key)}})
    named = dict(zip(plain, zip(fqns, roles, strict=True), strict=True))
    joined = {**static_table((statics.get(key), named[key][0]) for key in plain), **table}
    known = {fqn for fqn, role in named.values() if fqn and role == "param"}
    for key in keys:
        if key in master:
            named[key] = joined.get(leaf[key], leaf[key] if leaf[key] in known else None), "master"
        elif key in states:
            base, role, _ = states[key]
            named[key] = joined.get(base, base if base in known else None), role
        else:
            fqn, role = named[key]
            if role == "param" and (_is_buffer(statics.get(key)) or leaf[key].rpartition(".")[2] in BUFFER_LEAVES):
                named[key] = fqn, "buffer"
            elif (base := master_of(leaf[key])) != leaf[key] and base in known:
                named[key] = base, "master"
    return [named[key][0] for key in keys], [named[key][1] for key in keys]


def step_facts(place: Place, catalog: Catalog) -> dict[str, Any] | None:
    """Infer the step from the powers of beta in a checkpoint; ``None`` if it has none.

    ``step`` is set only if both powers of every parameter give the same integer for the assumed betas (also named).
    ``steps`` counts the parameters by their step (None for float32 underflow and resets).
    """
    roles = catalog.roles or []
    wanted = [(t, roles[t]) for t in range(len(catalog)) if roles[t] in ("beta1_pow", "beta2_pow")]
    if not wanted:
        return None
    pool = SourcePool(place, catalog.files, catalog.file_stats)
    values: dict[str, dict[str, float]] = {}
    try:
        payloads = Payloads(catalog, pool)
        for t, role in wanted:
            rows = catalog.rows_of(t)
            if rows.stop > rows.start and catalog.dtype_of(t).kind == "f" and catalog.dtype_of(t).numpy_name:
                raw = payloads.array(rows.start)
                owner = (catalog.fqns or [])[t] or catalog.keys[t].replace("beta2_pow", "beta1_pow")
                if raw.size == 1:
                    values.setdefault(owner, {})[role] = float(raw.reshape(-1).view(catalog.dtype_of(t).numpy)[0])
    finally:
        pool.close()
    beta1, beta2, steps = _best(list(values.values()))
    counted: dict[int | None, int] = {}
    for step in steps:
        counted[step] = counted.get(step, 0) + 1
    agreed = next(iter(counted)) if len(counted) == 1 else None
    return {
        "formula": FORMULA,
        "betas_assumed": [beta1, beta2],
        "step": agreed,
        "steps": {str(step): count for step, count in counted.items()},
        "parameters": len(values),
    }


def _is_buffer(static: str | None) -> bool:
    return bool(static) and str(static).startswith("eager_tmp_")


def _best(values: Sequence[Mapping[str, float]]) -> tuple[float, float, list[int | None]]:
    """Return the betas for which most parameters have an integer step, and those steps."""
    tried = [(b1, b2, [_step(one, b1, b2) for one in values]) for b2 in BETA2 for b1 in BETA1]
    return max(tried, key=lambda found: sum(step is not None for step in found[2]))


def _step(powers: Mapping[str, float], beta1: float, beta2: float) -> int | None:
    """Return the step by both powers, or by one if the other is not stored or underflowed in float32."""
    estimates = []
    for name, beta in (("beta1_pow", beta1), ("beta2_pow", beta2)):
        value = powers.get(name)
        if value is not None and np.finfo(np.float32).tiny < value < 1:
            estimates.append((math.log(value) / math.log(beta) - 1, beta))
    if not estimates:
        return None
    # a product of t factors in float32 is off by up to t · 2**-24, and its logarithm is divided by log(beta)
    with_slack = [(t, max(1e-3, (t + 2) * 2.0**-24 / -math.log(beta))) for t, beta in estimates]
    step = round(min(with_slack, key=lambda pair: pair[1])[0])
    return step if step >= 0 and all(abs(t - step) <= slack < 0.5 for t, slack in with_slack) else None
