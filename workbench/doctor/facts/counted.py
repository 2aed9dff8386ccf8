"""What a trainer's step counts: updates, micro-batches of them, or the epochs that a file is numbered by.

::

    trainer   40 ──▶ 60      optimizer  10 ──▶ 15     ¼ of the steps are updates: gradients of 4 are accumulated
    the name   1 ──▶  2      optimizer  20 ──▶ 40     20 updates an epoch
    trainer   60 ──▶ 80      optimizer  60 ──▶ 20     1, then ¼: the counters were reset

One file cannot tell 4 micro-batches an update from a reset that long ago; two files, or an argument, can.
"""

from __future__ import annotations

from fractions import Fraction

from workbench.doctor.facts.state import NAME, TrainingState

__all__ = ["accumulated", "per_step", "stated", "whole_ratio"]

MOST = 128  #: micro-batches an update that one file alone makes likely
LEAST = 3  #: updates from which on a whole ratio is no chance


def whole_ratio(facts: TrainingState) -> int | None:
    """Trainer's steps an update, where that is one whole number above 1."""
    ratio = _ratio(facts)
    return ratio.denominator if ratio is not None and ratio.numerator == 1 and ratio < 1 else None


def stated(facts: TrainingState) -> int | None:
    """The stated micro-batches of an update, where trainer's step and optimizer's counter are that far apart."""
    times, usual, step = facts.value("accumulation"), facts.steps.usual, facts.step
    if not times or times < 2 or not usual or step is None:
        return None
    return times if abs(step - usual * times) <= times else None


def accumulated(facts: TrainingState) -> bool:
    """Whether one file alone may be of a trainer that counts micro-batches: warned of, where nothing states it."""
    ratio, usual = whole_ratio(facts), facts.steps.usual or 0
    if facts.value("accumulation"):
        return False
    return ratio is not None and ratio <= MOST and usual >= LEAST


def per_step(a: TrainingState, b: TrainingState) -> Fraction | None:
    """Updates a step of the trainer, where two files of different steps say the same, or both as their arguments do.

    1 is what is usual; ``None``: they do not fit.
    """
    if a.step is None or b.step is None or a.step == b.step:
        return None
    one, two = _ratio(a), _ratio(b)
    named = NAME in (a.source("step"), b.source("step"))  # of epochs, whose files are numbered
    if one is not None and one == two and (one.numerator == 1 or (named and one.denominator == 1)):
        return one
    times = stated(a)
    if times is None or times != stated(b):
        return None
    due = (b.step - a.step) / times
    moved = (b.steps.usual or 0.0) - (a.steps.usual or 0.0)
    return Fraction(int(moved), b.step - a.step) if abs(moved - due) <= 1 and moved > 0 else None


def _ratio(facts: TrainingState) -> Fraction | None:
    usual, step = facts.steps.usual, facts.step
    if not usual or not step or usual < 0 or step < 0 or usual != int(usual):
        return None
    return Fraction(int(usual), step)
