"""The expected effect of a cause on the rest of the run, computed from the run's own numbers.

::

    counter restarted   update × f(s) = √(1−β2^s)/(1−β1^s)    β .9 .95: 2.24, 1.64, 1.16 … 1    .9 .999: .32 … .15 … 1
    moments restarted   update × 1/f(s) if the counter continued; f and 1/f both tend to 1
    either              over after about 3/(1−β2) updates

The factors follow from Adam's bias correction (Kingma & Ba 2014, Algorithm 1), for a steady gradient.
"""

from __future__ import annotations

import math

from workbench.core.words import plural
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.laws.bounds import bias_factor

Betas = tuple[float, float]
HALF_LAST_BIT = 2.0**-9  #: half an ulp of a bf16 number, relative: smaller updates are rounded away
LONG = 200_000  #: most updates to examine; β2 = .9999 has settled by then


def recovery(betas: Betas) -> int:
    """Return the number of updates until moments and counters have forgotten a restart, 3/(1−β2)."""
    return math.ceil(3 / (1 - betas[1]) - 1e-6)


def reset_extremes(betas: Betas) -> tuple[float, float, int, int]:
    """Return the extremes of f(s) over the updates s after a counter restart.

    They are the first value, the value farthest from 1, its s, and the first s from which f stays within 5 % of 1.
    """
    steps = range(1, min(LONG, 4 * recovery(betas) + 50))
    factors = [bias_factor(betas, s) for s in steps]
    far = max(range(len(factors)), key=lambda i: abs(math.log(factors[i])))
    settled = next((i for i in range(len(factors) - 1, -1, -1) if abs(factors[i] - 1) > 0.05), -1) + 1
    return factors[0], factors[far], far + 1, settled + 1


def lost_updates(lr: float, share: float = 0.3) -> str:
    """Name the weight size above which typical updates (``share`` of the lr) are below half an ulp of bf16."""
    size = share * lr / HALF_LAST_BIT
    return f"at lr {lr:.2g}, typical updates of weights above about {size:.1g} are too small for bf16 and were lost"


def counters_restarted(facts: TrainingState) -> list[str]:
    """Return what to expect if the counters restarted and the moments were kept."""
    if facts.betas is None:
        return []
    first, far, at, settled = reset_extremes(facts.betas)
    words = f"the first update has {first:.2f} times its usual size"
    if at > 1:
        words += f", update {at:,} has {far:.2f} times"
    then = "then " if at > 1 and (first > 1) != (far > 1) else ""
    kind = "updates are too small: expect a plateau" if far < 1 else "updates are too large: expect a bump"
    kind = f"{then}{kind}"
    return [f"{words}; {kind} until about update {settled:,}"]


def moments_lost(facts: TrainingState) -> list[str]:
    """Return what to expect if the moments are lost and the counters continued."""
    if facts.betas is None:
        return []
    betas = facts.betas
    steps = range(1, min(LONG, recovery(betas) + 50))
    worst = min(steps, key=lambda s: bias_factor(betas, s))
    most = 1 / bias_factor(betas, worst)
    words = f"without bias correction, updates grow to ×{most:.1f} around update {worst:,}" if most > 1.01 else ""
    first = (1 - betas[0]) / math.sqrt(1 - betas[1])
    return [
        words or f"the first update changes every weight by {first:.2f} times the lr",
        f"the moments recover after about 3/(1−β2) = {plural(recovery(betas), 'update')}",
    ]


def fresh(facts: TrainingState) -> list[str]:
    """Return what to expect if the optimizer started fresh."""
    if facts.betas is None:
        return []
    return [
        "the first update changes each of these weights by the lr itself, about 3 to 5 times the usual amount",
        f"updates are too large for about 3/(1−β2) = {plural(recovery(facts.betas), 'update')}",
    ]


def second_lost(facts: TrainingState) -> list[str]:
    """Return what to expect if the second moments are lost."""
    if facts.betas is None:
        return []
    most = facts.betas[0] / math.sqrt(1 - facts.betas[1])
    return [f"the first update is about {most:.0f} times its usual size, and larger where the new gradient is small"]


def wrong_steps(facts: TrainingState) -> list[str]:
    """Return what to expect if the moments belong to other parameters."""
    betas = facts.betas
    return [] if betas is None else [f"update sizes are wrong for about 3/(1−β2) = {plural(recovery(betas), 'update')}"]


def updates_lost(facts: TrainingState) -> list[str]:
    """Return what to expect if the masters were rounded."""
    return [lost_updates(facts.lr)] if facts.lr else []
