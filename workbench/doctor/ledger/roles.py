"""The quantity that a stored role stands for: a weight, a first or second moment, an average, a buffer or other state.

Optimizers choose the names of their state. Roles outside the lists are averages or squares of gradients if their words
say so (``exp_avg_var``, ``m``, ``nu``), otherwise other state: an echo compares all of it bit for bit, and no law of
updates is known for it.
"""

from __future__ import annotations

import re

WEIGHTS = ("param",)
MASTERS = ("master",)
#: Averages of gradients, or of updates: torch.optim (SGD, Adam, RMSprop, Adadelta), bitsandbytes, AdEMAMix.
FIRST = (
    "exp_avg", "momentum", "momentum_buffer", "state1", "grad_avg", "exp_avg_slow", "exp_avg_diff", "acc_delta",
    "average",
)  # fmt: skip
#: Sums and averages of squared gradients: torch.optim (Adam, Adamax, RMSprop, Adagrad, Adafactor), bitsandbytes.
SECOND = (
    "exp_avg_sq", "max_exp_avg_sq", "state2", "square_avg", "sum", "exp_inf", "row_var", "col_var", "variance",
    "exp_avg_sq_row", "exp_avg_sq_col", "square",
)  # fmt: skip
MAXIMA = "max_exp_avg_sq"  #: of AMSGrad
#: Of 8-bit Adam, the largest second moment of a block: it is stored exactly, as the code 1.0 times ``absmax2``.
BLOCK_MAXIMA = "absmax2"
STATE = "state"  #: the quantity of every other tensor of an optimizer
MOMENTS = (*FIRST, *SECOND)
AVERAGES = ("ema",)
BUFFERS = ("buffer", "amax_history", "scale", "scale_inv", "extra_state")
#: Counters and generators are compared as facts, the rest by its key. NAdam's product counts updates, too.
ELSEWHERE = ("step", "mu_product", "rng", "other")
#: Words of other names of such state; squares are searched first. Parts of codes (``exp_avg.scale``) are neither.
_SQUARES = re.compile(r"(?:^|_)(?:sq|squares?|var|variance|second|hess|hessian|v|nu)(?:_|$)")
_AVERAGES = re.compile(r"(?:^|_)(?:avg|average|mom|momentum|first|m|mu)(?:_|$)")
LISTED = frozenset({*WEIGHTS, *MASTERS, *MOMENTS, *AVERAGES, *BUFFERS})


def quantity(role: str) -> str | None:
    """Return the quantity under which the ledger lists a stored role; ``None`` if it is compared elsewhere."""
    if role in LISTED:
        return role
    if role in ELSEWHERE:
        return None
    return "square" if _SQUARES.search(role) else "average" if _AVERAGES.search(role) else STATE
