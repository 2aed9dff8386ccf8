"""Parse numbers from untrusted files: impossible values become ``None``, never an exception.

::

    3e-4 ──▶ 3e-4     nan, inf, 10**400, true, "3e-4" ──▶ None
    240  ──▶ 240      240.0, -1, 2**63                ──▶ None as a step
    (0.9, 0.95) ──▶ the same                 (1.0, 1.0), (0.9, 0.0) ──▶ None: 1 − β and β2 are divided by
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.errors import UsageError

BITS = 63  #: most bits of a counter


def number(value: Any) -> float | None:
    """Return an int or float as a finite float; ``None`` for other types and for values that no float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def flag(value: Any) -> bool | None:
    """Return a boolean, otherwise ``None``."""
    return value if isinstance(value, bool) else None


def whole(value: Any) -> int | None:
    """Return an integer below 2⁶³ in magnitude, otherwise ``None``."""
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << BITS
    return value if fits else None


def step_of(value: Any) -> int | None:
    """Return an integer from 0 to below 2⁶³, otherwise ``None``."""
    found = whole(value)
    return found if found is not None and found >= 0 else None


def betas_of(value: Any) -> tuple[float, float] | None:
    """Return β1 and β2 if 0 <= β1 < 1 and 0 < β2 < 1, otherwise ``None``."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return None
    one, two = number(value[0]), number(value[1])
    return (one, two) if one is not None and two is not None and 0 <= one < 1 and 0 < two < 1 else None


def usable(betas: Sequence[float] | None, lr: float | None, weight_decay: float | None) -> None:
    """Check values that a user passed.

    Raises:
        UsageError: betas outside [0, 1) and (0, 1); an lr or weight decay that is not a finite number.
    """
    if betas is not None and betas_of(tuple(betas)) is None:
        words = ", ".join(format(one, "g") if isinstance(one, float) else repr(one) for one in betas)
        raise UsageError(
            f"betas {words}: give two, β1 from 0 to below 1 and β2 above 0 and below 1, as in 0.9 and 0.95"
        )
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is not None and number(value) is None:
            raise UsageError(f"{name} {value!r} is not a finite number")


def in_words(*values: Any) -> list[str]:
    """Return settings as text, floats with six digits, or with all of them if six do not distinguish the values."""
    found = [_short(value) for value in values]
    return (
        found if len(set(found)) == len({repr(value) for value in values}) else [repr(value)[:60] for value in values]
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)) and len(value) <= 4:
        inside = ", ".join(map(_short, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return repr(value)[:60]
