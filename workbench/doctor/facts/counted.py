"""Find what a trainer's step counts: updates, micro-batches, or the epochs in file names.

::

    trainer   40 ──▶ 60      optimizer  10 ──▶ 15     ¼ of the steps are updates: gradients of 4 are accumulated
    the name   1 ──▶  2      optimizer  20 ──▶ 40     20 updates per epoch
    trainer   60 ──▶ 80      optimizer  60 ──▶ 20     1, then ¼: the counters were reset
    trainer   60 ──▶ 20      optimizer  60 ──▶ 80     the trainer counts from 0 again: 20 updates

One file cannot distinguish 4 micro-batches per update from a reset that long ago; two files or an argument can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from workbench.doctor.facts.groups import OF_AVERAGES
from workbench.doctor.facts.state import TrainingState

MOST = 128  #: most micro-batches per update that a single file makes likely
LEAST = 3  #: updates from which an integer ratio is not a coincidence
LOADS = re.compile(r"loader|sampler|dataset")  #: of a path to the data's position
COUNT = re.compile(r"(?:updates|steps?|iterations?|count|averaged)$")  #: at the end of a path
SIGMAS = 3.0  #: standard deviations within which a parameter has its updates as often as before
#: Name of a position in an epoch.
_INDEX = re.compile(
    r"(?:(?:next|start|batch|sample)_)?index|(?:batch|sample)_idx|position|offset|(?:batches|samples)_yielded"
)


def began_anew(before: TrainingState, after: TrainingState) -> bool:
    """Return whether the optimizer's counter agreed with the trainer's step, and counts only the steps since then.

    If it rose and the schedule rose with it, both continue, and the trainer's step is the one that is off, unless the
    position in the data, or an average's count, agrees with the step, or the optimizer holds more or fewer parameters.
    Parameters that were added in the load count the updates since then: the others, if they count more, go on.
    """
    first, last = before.step, after.step
    one, two = before.steps.usual, after.steps.usual
    if first is None or last is None or one is None or two is None:
        return False
    counts = [side.schedule.count if side.schedule is not None else None for side in (before, after)]
    data = [[side.value(kind) for side in (before, after)] for kind in ("consumed_samples", "loader")]
    data += [
        [side.counts.get(path) for side in (before, after)]
        for path in before.counts
        if any(word in path.lower() for word in OF_AVERAGES)
    ]
    right = any(was and now is not None and now * first == was * last for was, now in data)
    held = [sum(group.count or 0 for group in side.groups) for side in (before, after)]
    added = [after.steps.by_name[name] for name in after.steps.by_name.keys() - before.steps.by_name.keys()]
    other = all(held) and held[0] != held[1] and all(count >= two for count in added)
    return first == one and two == last - first and (right or other or not (one < two and counts == [one, two]))


def counts(name: str, old: object, new: object, before: TrainingState, after: TrainingState) -> bool:
    """Return whether a value with the name of a count advanced as the trainer's step, or the optimizer's count, did."""
    if not (isinstance(old, int) and isinstance(new, int) and COUNT.search(name)):
        return False
    ends = ((before.step, after.step), (before.steps.usual, after.steps.usual))
    return any(None not in two and old < new and new - old == two[1] - two[0] for two in ends)  # type: ignore[operator]


def counts_anew(before: TrainingState, after: TrainingState) -> bool:
    """Return whether the trainer's step fell, and counts only the updates that the optimizer, counting on, made since.

    Of an optimizer without counters, those of its schedule. A step that is higher than before may just as well be that
    of an optimizer whose counters were doubled.
    """
    first, last = before.step, after.step
    one, two = (
        side.schedule.count if side.steps.usual is None and side.schedule is not None else side.steps.usual
        for side in (before, after)
    )
    if first is None or last is None or one is None or two is None:
        return False
    return last < first == one and two - one == last


def may_count_anew(before: TrainingState, after: TrainingState, seeded: bool = False) -> bool:
    """Return whether optimizer and schedule agree on a count that may have begun at the load as well.

    The trainer's step may begin there, too, if the sampler has another seed (``seeded``): a new one was made.
    """
    counts = [one.schedule.count if one.schedule is not None else one.steps.usual for one in (before, after)]
    if before.step is None or after.step is None or counts != [before.steps.usual, after.steps.usual]:
        return False
    if before.step != before.steps.usual or after.step <= before.step:
        return False
    return (seeded and after.step == after.steps.usual) or after.step - before.step == after.steps.usual


def fell_back(before: TrainingState, after: TrainingState, names: Iterable[str], k: int | None) -> set[str]:
    """Return those of ``names`` whose counters were level with most, and together advanced by fewer than ``k`` or fell.

    Updates that have no gradient for a parameter leave it out one by one. Counters that fell to ``k`` or less
    restarted.
    """
    first, last = before.steps.by_name, after.steps.by_name
    by = {name: last[name] - first[name] for name in names if first.get(name) == before.steps.usual and name in last}
    late = {name: more for name, more in by.items() if 0 < more < (k or 0) or (more < 0 < (k or 0) < last[name])}
    most = max(late.values(), default=0.0)
    return set(late) if {*late.values()} <= {most, most - (k or 0)} else set()  # or had no update since


def lagging(before: TrainingState, after: TrainingState, k: int | None) -> frozenset[str]:
    """Return the parameters that had updates about as rarely as before, while others had all ``k``.

    As those of a layer that is left out of some updates; a counter that happens to be at ``k`` was then not reset.
    """
    first, last = before.steps.by_name, after.steps.by_name
    most = max(first.values(), default=0.0)
    if not k or most <= 0 or not any(last.get(name) == value + k for name, value in first.items() if value == most):
        return frozenset()
    found = set()
    for name, value in first.items():
        if not 0 < value < most:
            continue
        by, share = last.get(name, 0.0) - value, value / most
        deviation = math.sqrt(share * (1 - share) * (k + k * k / most))  # of k draws, by the share of earlier ones
        if 0 <= by < k and abs(by - share * k) <= SIGMAS * deviation:
            found.add(name)
    return frozenset(found)


def in_epochs(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Return the path of each position in an epoch, where data loaders count both: ``(epoch, index)`` on both sides."""
    found = {}
    for path in sorted(a.keys() & b.keys()):
        parent, _, name = path.rpartition(".")
        epoch = f"{parent}.epoch"
        if LOADS.search(parent.lower()) and _INDEX.fullmatch(name) and epoch in a and epoch in b:
            found[path] = (a[epoch], a[path]), (b[epoch], b[path])
    return found


def of_epochs(a: TrainingState, b: TrainingState) -> bool:
    """Return whether the schedule is stepped once in a fixed number of updates, as one of epochs is, in both states."""
    steps = [one.step if one.step is not None else one.steps.usual for one in (a, b)]
    counts = [one.schedule.count if one.schedule is not None else None for one in (a, b)]
    known = [number for number in (*steps, *counts) if number is not None]
    if len(known) < 4 or not 2 <= known[2] <= known[0] / 2:
        return False
    first, last, one, two = known
    lengths = range(int(first / (one + 1)), int(first / one) + 1)
    return any(first // n == one and last // n == two for n in lengths if n > 1)


def whole_ratio(facts: TrainingState) -> int | None:
    """Return the trainer's steps per update, if that is an integer above 1."""
    ratio = _ratio(facts)
    return ratio.denominator if ratio is not None and ratio.numerator == 1 and ratio < 1 else None


def stated(facts: TrainingState) -> int | None:
    """Return the stated micro-batches per update, if the trainer's step and the optimizer's counter match them."""
    times, usual, step = facts.value("accumulation"), facts.steps.usual, facts.step
    if not times or times < 2 or not usual or step is None:
        return None
    return times if abs(step - usual * times) <= times else None


def accumulated(facts: TrainingState) -> bool:
    """Return whether a single file may come from a trainer that counts micro-batches although nothing states it."""
    ratio, usual = whole_ratio(facts), facts.steps.usual or 0
    if facts.value("accumulation"):
        return False
    return ratio is not None and ratio <= MOST and usual >= LEAST


def per_step(a: TrainingState, b: TrainingState) -> Fraction | None:
    """Return the updates per step of the trainer if two files of different steps agree, or match their arguments.

    The usual value is 1; ``None`` if they do not agree.
    """
    if a.step is None or b.step is None or a.step == b.step:
        return None
    one, two = _ratio(a), _ratio(b)
    if one is not None and one == two and 1 in (one.numerator, one.denominator):
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
