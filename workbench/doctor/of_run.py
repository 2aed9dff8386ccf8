"""Which checkpoints of a run the doctor compares for a jump of its loss.

::

    a step        the last checkpoint before it, the first after it
    nothing       those of the highest spike, or level shift soon after a resume; without, those around each resume, the
                  last one first; else, or if none of them has both, all neighbours
    nothing found, and a resume before the spike has another pair: that pair, too

A log whose learning rate is not the one that the checkpoints store may be of another run; a note says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from workbench.analysis.run import CheckpointPair, Run, spike_rank
from workbench.doctor.examine import doctor
from workbench.doctor.reasoning.diagnosis import Diagnosis
from workbench.errors import UsageError

AROUND = 3  #: logged points before and after a checkpoint whose learning rates may be the stored one
EARLIER = 4 << 30  #: bytes of the checkpoints around earlier resumes that are compared unasked
APART = 0.02  #: relative difference that rounding in the log explains


def diagnose_run(run: Run, step: int | None = None, **options: Any) -> Diagnosis:
    """Diagnose a jump of a run's loss; arguments and errors are those of :meth:`workbench.Run.diagnose`."""
    chosen = step
    why = "" if step is None else f"step {step:,} was asked for"
    if chosen is None:
        chosen, why = _worst(run)
    if chosen is None:
        return _each_resume(run, options) if len(run.resumes) else doctor(run.root, **options)
    pair = run.pair(chosen)
    if pair.before is None and pair.after is None:
        raise UsageError(f"{why}; {pair.advice}")
    found = _compare(run, pair, why, options)
    if found.exit_code == 0 and (other := _resumed(run, chosen)) is not None and _paths(other) != _paths(pair):
        second = _compare(
            run, other, f"the pair around {why} shows nothing; the resume before it was examined", options
        )
        if second.exit_code:
            return second
    return found


def _worst(run: Run) -> tuple[int | None, str]:
    """Return the step to explain, and why it was chosen."""
    row = min(run.spikes.to_dict("records"), key=spike_rank, default=None)
    if row is not None:
        step = int(row["step"])
        high = "is NaN or infinite" if row["kind"] == "nan" else f"rises by {row['height']:.2f}"
        return step, f"the loss {high} at step {step:,}"
    return None, ""


def _each_resume(run: Run, options: dict[str, Any]) -> Diagnosis:
    """Compare the checkpoints around each resume: the last one, then those before it while they are small."""
    compared: list[tuple[int, CheckpointPair, Diagnosis]] = []
    notes, seen, left = [], set(), EARLIER
    pairs = {step: run.pair(step) for step in reversed([int(step) for step in run.resumes["step"]])}
    if run.found and not any(pair.before and pair.after for pair in pairs.values()):
        found = doctor(run.root, **options)
        unseen = (f"the resume before step {step:,} was not compared: {pair.advice}" for step, pair in pairs.items())
        return replace(found, notes=(*found.notes, *unseen))
    for step, pair in pairs.items():
        if pair.before is None and pair.after is None:
            notes.append(f"the resume before step {step:,} was not compared: {pair.advice}")
            continue
        if compared and _paths(pair) in seen:
            notes.append(f"the resume before step {step:,} has the same two checkpoints")
            continue
        seen.add(_paths(pair))
        nbytes = sum(one.nbytes for one in (pair.before, pair.after) if one is not None)
        if compared and (pair.before is None or pair.after is None or nbytes > left):
            notes.append(f"the resume before step {step:,} was not compared; {pair.advice}")
            continue
        left -= nbytes if compared else 0
        compared.append((step, pair, _compare(run, pair, f"the run was resumed before step {step:,}", options)))
    if not compared:
        step = int(run.resumes["step"].iloc[-1])
        raise UsageError(f"the run was resumed before step {step:,}; {run.pair(step).advice}")
    chosen = max(compared, key=lambda one: one[2].exit_code)  # of equals, the last resume
    for step, pair, found in compared:
        if step != chosen[0]:
            verdict = (
                f"{found.verdict} {pair.advice[0].upper()}{pair.advice[1:]}."
                if found.exit_code
                else "nothing was found"
            )
            notes.append(f"the resume before step {step:,} was compared, too: {verdict}")
    return replace(chosen[2], notes=(*chosen[2].notes, *notes))


def _resumed(run: Run, step: int) -> CheckpointPair | None:
    resumes = run.resumes
    earlier = resumes[resumes["step"] <= step]
    return run.pair(int(earlier["step"].iloc[-1])) if len(earlier) else None


def _paths(pair: CheckpointPair) -> tuple[str | None, str | None]:
    return tuple(None if one is None else one.path for one in (pair.before, pair.after))  # type: ignore[return-value]


def _compare(run: Run, pair: CheckpointPair, why: str, options: dict[str, Any]) -> Diagnosis:
    if pair.before is None:
        assert pair.after is not None
        found = doctor(run.place_of(pair.after), **options)
    else:
        after = None if pair.after is None else run.place_of(pair.after)
        echo = None if pair.echo is None else run.place_of(pair.echo)
        found = doctor(run.place_of(pair.before), after, echo=echo, **options)
    notes = [*found.notes, f"chosen because {why}" if pair.before and pair.after else pair.advice]
    for which, one in (("before", pair.before), ("after", pair.after)):
        stored = found.facts.get(which, {}).get("lr")
        if one is not None and one.step is not None and stored is not None and _elsewhere(run, one.step, stored[0]):
            near = run.metrics["lr"].dropna()
            logged = near[near.index[np.abs(near.index.to_numpy() - one.step).argmin()]]
            notes.append(
                f"the log has a learning rate of {logged:.3g} at step {one.step:,}, and {one.path!r} stores "
                f"{stored[0]:.3g}: the log may belong to another run"
            )
            break
    return replace(found, notes=tuple(notes))


def _elsewhere(run: Run, step: int, stored: float) -> bool:
    """Return whether the log has learning rates around a step, but none is near the stored one. A trainer may store
    that of the step before or after, and a schedule changes it in between.
    """
    if "lr" not in run.metrics:
        return False
    series = run.metrics["lr"].dropna()
    steps = series.index.to_numpy()
    at = int(np.searchsorted(steps, step))
    near = series.to_numpy()[max(at - AROUND, 0) : at + AROUND]
    if not len(near) or not steps[0] <= step < steps[-1]:  # the rate after the last point is not known
        return False
    return not near.min() * (1 - APART) <= stored <= near.max() * (1 + APART)
