"""What a cause does to the run from here on, with the run's own numbers.

::

    counter restarted   update × f(s) = √(1−β2^s)/(1−β1^s)    β .9 .95: 2.24, 1.64, 1.16 … 1    .9 .999: .32 … .15 … 1
    moments restarted   update × 1/f(s) where the counter went on; f and 1/f both tend to 1
    either              over after about 3/(1−β2) updates

The factors follow from Adam's bias correction (Kingma & Ba 2014, Algorithm 1), for a steady gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from workbench.doctor.facts.state import TrainingState
from workbench.doctor.laws.bounds import bias_factor

__all__ = ["FIRST_LOSSES", "expected", "lost_updates", "recovery", "reset_extremes"]

Betas = tuple[float, float]
HALF_LAST_BIT = 2.0**-9  #: of a bf16 number, relative: smaller updates of it round away
LONG = 200_000  #: updates looked at at most; β2 = .9999 has settled by then

#: Chapter or cause → which loss jumps first after the resume (catalogue, 5: decision table).
FIRST_LOSSES = {
    "B": "the first loss is right, then a slow bump", "C": "the first loss is right; what follows goes with the lr",
    "B2": "the first loss is right; what follows goes with the size of the updates",
    "B4": "the first loss is right, the second wrong", "D2": "the first loss is right, the second wrong",
    "D1": "no loss shows it", "D4": "no loss shows it", "D3": "the first loss is wrong, the second right",
    "A": "the first losses are wrong, and heal over 10² to 10³ updates",
    "E": "the first losses are wrong, and heal over 10² to 10³ updates",
    "E13": "the first loss is right, then a slow bump", "E7": "the first loss is right where only the state is shifted",
    "F4": "the first loss is better than before, then worse", "F7": "the first losses are wrong",
    "F2": "a fresh head: the first losses are wrong; a copy: none is",
    "G": "damaged weights show in the first loss, damaged masters and moments from the second on",
    "H": "the loss goes with the setting",
    "C6": "the loss drops where the data was seen before",
}  # fmt: skip


def expected(cause: str, facts: TrainingState, share: float | None = None) -> tuple[str, ...]:
    """What to expect, a sentence each.

    Args:
        facts: of the run: its betas and lr put numbers in.
        share: of the weights' elements that are affected.
    """
    said = []
    if cause in _OF and facts.betas is not None:
        said += _OF[cause](facts.betas)
    if cause == "D1" and facts.lr:
        said.append(lost_updates(facts.lr))
    if share is not None and 0 < share < 1 and cause[0] in "ADEFG":
        said.append(f"{_percent(share)} of the weights are affected")
    words = FIRST_LOSSES.get(cause) or FIRST_LOSSES.get(cause[0])
    return (*said, words) if words else tuple(said)


def recovery(betas: Betas) -> int:
    """Updates until moments and counters have forgotten a restart: 3/(1−β2)."""
    return math.ceil(3 / (1 - betas[1]) - 1e-6)


def reset_extremes(betas: Betas) -> tuple[float, float, int, int]:
    """Of f(s) over the updates after a restart of the counter: the first, the farthest from 1, at which s, and the
    first s from which it stays within 5 %.
    """
    steps = range(1, min(LONG, 4 * recovery(betas) + 50))
    factors = [bias_factor(betas, s) for s in steps]
    far = max(range(len(factors)), key=lambda i: abs(math.log(factors[i])))
    settled = next((i for i in range(len(factors) - 1, -1, -1) if abs(factors[i] - 1) > 0.05), -1) + 1
    return factors[0], factors[far], far + 1, settled + 1


def lost_updates(lr: float, share: float = 0.3) -> str:
    """From which size of a weight usual updates (``share`` of the lr) are below half a last bit of bf16."""
    size = share * lr / HALF_LAST_BIT
    return f"at lr {lr:.2g} updates of weights above about {size:.1g} were below half a last bit of bf16, and are lost"


def _counters(betas: Betas) -> list[str]:
    first, far, at, settled = reset_extremes(betas)
    words = f"the first update is ×{first:.2f} its size"
    if at > 1:
        words += f", update {at:,} ×{far:.2f}"
    kind = "too small: a flat stretch" if far < 1 else "too large: a bump"
    return [f"{words}; {kind}, until about update {settled:,}"]


def _moments(betas: Betas) -> list[str]:
    steps = range(1, min(LONG, recovery(betas) + 50))
    worst = min(steps, key=lambda s: bias_factor(betas, s))
    most = 1 / bias_factor(betas, worst)
    words = f"without bias correction updates grow to ×{most:.1f} around update {worst:,}" if most > 1.01 else ""
    first = (1 - betas[0]) / math.sqrt(1 - betas[1])
    return [
        words or f"the first update is ×{first:.2f} of lr in every weight",
        f"the moments are as before after about 3/(1−β2) = {recovery(betas):,} updates",
    ]


def _fresh(betas: Betas) -> list[str]:
    return [
        "the first update moves every weight by the lr itself, some 3 to 5 times the usual",
        f"oversized updates for about 3/(1−β2) = {recovery(betas):,} updates",
    ]


def _variance(betas: Betas) -> list[str]:
    most = betas[0] / math.sqrt(1 - betas[1])
    return [f"the first update is up to {most:.0f} times m/|g| · lr, without bound where the new gradient is small"]


_OF: Mapping[str, Callable[[Betas], list[str]]] = {
    "B1": _fresh, "B2": _counters, "B3": _moments, "B4": _variance,
    "B5": lambda betas: [f"steps of wrong size for about 3/(1−β2) = {recovery(betas):,} updates"],
    "E13": lambda betas: [f"steps of wrong size for about 3/(1−β2) = {recovery(betas):,} updates"],
}  # fmt: skip


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{share:.1e}"
