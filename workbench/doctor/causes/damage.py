"""What a cause does to the run from here on, with the run's own numbers.

::

    counter restarted   update × f(s) = √(1−β2^s)/(1−β1^s)    β .9 .95: 2.24, 1.64, 1.16 … 1    .9 .999: .32 … .15 … 1
    moments restarted   update × 1/f(s) where the counter went on; f and 1/f both tend to 1
    either              over after about 3/(1−β2) updates

The factors follow from Adam's bias correction (Kingma & Ba 2014, Algorithm 1), for a steady gradient.
"""

from __future__ import annotations

import math

from workbench.doctor.facts.state import TrainingState
from workbench.doctor.laws.bounds import bias_factor

__all__ = [
    "counters_restarted", "fresh", "lost_updates", "moments_lost", "recovery", "reset_extremes", "second_lost",
    "updates_lost", "wrong_steps",
]  # fmt: skip

Betas = tuple[float, float]
HALF_LAST_BIT = 2.0**-9  #: of a bf16 number, relative: smaller updates of it round away
LONG = 200_000  #: updates looked at at most; β2 = .9999 has settled by then


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
    return f"at lr {lr:.2g}, typical updates of weights above about {size:.1g} are too small for bf16 and were lost"


def counters_restarted(facts: TrainingState) -> list[str]:
    """Of counters that began anew under moments that were kept."""
    if facts.betas is None:
        return []
    first, far, at, settled = reset_extremes(facts.betas)
    words = f"the first update is ×{first:.2f} its usual size"
    if at > 1:
        words += f", update {at:,} ×{far:.2f}"
    kind = "updates are too small: expect a flat stretch" if far < 1 else "updates are too large: expect a bump"
    return [f"{words}; {kind} until about update {settled:,}"]


def moments_lost(facts: TrainingState) -> list[str]:
    """Of moments that are gone under counters that went on."""
    if facts.betas is None:
        return []
    betas = facts.betas
    steps = range(1, min(LONG, recovery(betas) + 50))
    worst = min(steps, key=lambda s: bias_factor(betas, s))
    most = 1 / bias_factor(betas, worst)
    words = f"without bias correction updates grow to ×{most:.1f} around update {worst:,}" if most > 1.01 else ""
    first = (1 - betas[0]) / math.sqrt(1 - betas[1])
    return [
        words or f"the first update is ×{first:.2f} of lr in every weight",
        f"the moments are as before after about 3/(1−β2) = {recovery(betas):,} updates",
    ]


def fresh(facts: TrainingState) -> list[str]:
    """Of an optimizer that began anew."""
    if facts.betas is None:
        return []
    return [
        "the first update moves every weight by the lr itself, some 3 to 5 times the usual",
        f"oversized updates for about 3/(1−β2) = {recovery(facts.betas):,} updates",
    ]


def second_lost(facts: TrainingState) -> list[str]:
    """Of second moments that are gone."""
    if facts.betas is None:
        return []
    most = facts.betas[0] / math.sqrt(1 - facts.betas[1])
    return [f"the first update is up to {most:.0f} times m/|g| · lr, without bound where the new gradient is small"]


def wrong_steps(facts: TrainingState) -> list[str]:
    """Of moments that belong to other parameters."""
    betas = facts.betas
    return [] if betas is None else [f"steps of wrong size for about 3/(1−β2) = {recovery(betas):,} updates"]


def updates_lost(facts: TrainingState) -> list[str]:
    """Of masters that were rounded."""
    return [lost_updates(facts.lr)] if facts.lr else []
