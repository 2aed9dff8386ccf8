"""Select the checkpoints to compare, from paths or from the folder of a run.

::

    doctor(before, after, echo=…)   as given; two of one step: a checkpoint and its echo; an older second comes first
    doctor(run)                     all neighbours; the first pair between which something is wrong, else the last two;
                                    of two checkpoints of one step, the later one is the echo
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

import workbench.formats as formats
from workbench.analysis.echo_file import Echo, is_echo, read_echo
from workbench.checkpoint import Checkpoint, open, open_place
from workbench.core.dtypes import PACKED
from workbench.core.place import Place
from workbench.core.remote.url import shown
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.doctor.facts.counted import counts_anew
from workbench.doctor.facts.evidence import Evidence, State, stripped
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.numbers import usable
from workbench.doctor.rules.prints import echo_state
from workbench.errors import CorruptError, IncompleteError, MissingFileError, UnsafeError, UsageError
from workbench.runs import TRACKERS, Found, discover, steps_beside

Source = str | os.PathLike[str] | Checkpoint
Look = Callable[[State, State], int]
FOREIGN = 0.1  #: share of parameters in common below which two checkpoints come from different models
SMALLEST = 4  #: tensors that show whether an update was made
SCANNED = 64  #: most last steps of a run that are examined
LOOKED_AT = 64  #: files whose times are compared
#: Damage that is reported of a later checkpoint, and raised of ``before``. A wrong path or an unknown format is raised.
DAMAGED = (CorruptError, IncompleteError, MissingFileError, UnsafeError)


@dataclass(frozen=True)
class Given:
    """The states to compare.

    Attributes:
        evidence: the states.
        notes: what was chosen or exchanged, one sentence each.
        broken: ``echo``, ``after``, or a step's path in the run → why it cannot be opened.
        paths: ``before``, ``echo`` or ``after`` → the path that was given.
        prints: the echo, if it holds fingerprints and no payload.
        strange: ``echo`` or ``after`` → why it belongs to another model; it is then ignored.
    """

    evidence: Evidence
    notes: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    prints: Echo | None = None
    strange: Mapping[str, str] = field(default_factory=dict)


def choose(
    before: Source,
    after: Source | None,
    echo: Source | None,
    format: str | None,
    given: Mapping[str, Any],
    look: Look,
    progress: Progress | None = None,
) -> Given:
    """Open the selected checkpoints.

    Args:
        given: betas, lr and weight_decay that the user passed, for every state.
        look: returns the severity of faults between two neighbours of a run: 0 none, 1 a warning, 2 an error.
        progress: called with the fraction of the checkpoints whose facts are known, unless they are of a run.

    Raises:
        OpenError: ``before`` cannot be opened.
        UsageError: a folder of several checkpoints without steps; impossible betas, lr or weight_decay.
    """
    usable(given.get("betas"), given.get("lr"), given.get("weight_decay"))
    notes: list[str] = []
    if after is None and isinstance(before, (str, bytes, os.PathLike)) and (run := _run(os.fsdecode(before), format)):
        return _of_run(os.fsdecode(before), run, echo, format, given, look)
    opened: dict[str, State] = {}
    broken: dict[str, str] = {}
    paths: dict[str, str] = {}
    prints = _prints(echo)
    sources = {"before": before, "echo": echo, "after": after}
    selected = {which: source for which, source in sources.items() if source is not None}
    for done, (which, source) in enumerate(selected.items()):
        if progress is not None:
            progress(done / len(selected))
        paths[which] = source.path if isinstance(source, Checkpoint) else shown(os.fsdecode(source))
        if which == "echo" and prints is not None:
            opened[which] = echo_state(prints)
            continue
        try:
            opened[which] = _state(source, format, given, partial=which != "before")
        except DAMAGED as error:
            if which == "before":
                raise
            broken[which] = str(error)
    first, last, middle = opened["before"], opened.get("after"), opened.get("echo")
    if last is not None and middle is None and "echo" not in broken:
        one, two = first.facts.step, last.facts.step
        if one is not None and one == two:
            middle, last = last, None
            paths["echo"] = paths.pop("after")
            notes.append(f"both are from step {one:,}: the second was used as the echo of the first")
    if last is not None and None not in (first.facts.step, last.facts.step):
        assert first.facts.step is not None and last.facts.step is not None
        counts = [state.facts.steps.usual or 0 for state in (first, last)]
        onward = counts[1] > counts[0] == first.facts.step  # the optimizer went on: the trainer's step is another
        onward = onward or counts_anew(first.facts, last.facts) or (not any(counts) and _goes_on(first, last))
        if last.facts.step < first.facts.step and not onward and middle is None:  # an echo shows which was loaded
            steps = f"at step {last.facts.step:,}; the first is at {first.facts.step:,}"
            if _written(last) > _written(first):
                notes.append(
                    f"the second counts its steps anew ({steps}), but was written later: it is taken as the later one"
                )
            else:
                first, last = last, first
                paths["before"], paths["after"] = paths["after"], paths["before"]
                notes.append(f"the second is older ({steps}): the two are exchanged")
    if middle is not None and prints is None and (why := _no_echo(first, middle)):
        notes.append(f"{why}: it was {'left out' if last is not None else 'used as a later checkpoint'}")
        last, middle = last if last is not None else middle, None
        paths.setdefault("after", paths.pop("echo"))
    strange = {}
    for which, other in (("echo", middle), ("after", last)):
        if other is not None and (shared := _shared(first, other)) is not None:
            strange[which] = (
                f"the {'echo' if which == 'echo' else 'later checkpoint'} belongs to another model: it shares "
                f"{shared:,} of {plural(len(first.params), 'parameter')} and was not compared"
            )
    middle, last = None if "echo" in strange else middle, None if "after" in strange else last
    prints = None if "echo" in strange else prints
    return Given(Evidence(first, last, middle), tuple(notes), broken, paths, prints, strange)


def _written(state: State) -> int:
    """Return when the newest of a checkpoint's first files was written, in nanoseconds."""
    names = list(state.ckpt.catalog.files)[:LOOKED_AT]  # a store may need a request for each
    return max((state.ckpt.place.stat(name).mtime_ns for name in names), default=0)


def _goes_on(first: State, last: State) -> bool:
    """Return whether the schedule and the data's position went on from the first, whose schedule is at its step."""
    one, two = first.facts, last.facts
    counts = [None if facts.schedule is None else facts.schedule.count for facts in (one, two)]
    samples = [facts.value("consumed_samples") or facts.value("loader") for facts in (one, two)]
    return (
        None not in (*counts, *samples)
        and counts[0] == one.step
        and (counts[1] or 0) > (counts[0] or 0)
        and (samples[1] or 0) > (samples[0] or 0)
    )


def _no_echo(first: State, echo: State) -> str:
    """Return why a checkpoint is not an echo of the first, because it was trained on; empty if it may be one."""
    steps, counts = (first.facts.step, echo.facts.step), (first.facts.steps.usual, echo.facts.steps.usual)
    if None in steps or None in counts or steps[0] == steps[1] or _alike(first, echo):
        return ""
    one, two = (pair[1] - pair[0] for pair in (steps, counts))  # type: ignore[operator]
    return f"the echo is at step {steps[1]:,}, the checkpoint at step {steps[0]:,}" if one == two else ""


def _alike(a: State, b: State) -> bool:
    """Return whether some small second moments are equal bit for bit, which proves that no update came between."""
    pair = Evidence(a, b).pair("before", "after")
    small = sorted(
        (
            (pair.a.ckpt.catalog.numel[one], one, two)
            for _, roles in pair.shared()
            for role, (one, two) in roles.items()
            if role == "exp_avg_sq"
        ),
        key=lambda each: int(each[0]),
    )[:SMALLEST]
    if not small:
        return True
    sides = [
        [state.tensor(at).numpy().tobytes() for at in positions]
        for state, positions in ((pair.a, [one for _, one, _ in small]), (pair.b, [two for _, _, two in small]))
    ]
    return sides[0] == sides[1]


def _shared(first: State, other: State) -> int | None:
    """Return how many parameters another model has in common; ``None`` if it is the same model."""
    mine = {fqn for fqn, roles in first.params.items() if "param" in roles or "master" in roles}
    theirs = {fqn for fqn, roles in other.params.items() if "param" in roles or "master" in roles}
    if not mine or not theirs:
        return None
    bare = [{stripped(fqn) for fqn in names} for names in (mine, theirs)]
    if 2 * len(bare[0] & bare[1]) >= min(map(len, bare)):
        return None
    shared = sum(1 for _ in Evidence(first, other).pair("before", "after").shared())
    return shared if shared < FOREIGN * min(len(mine), len(theirs)) else None


def _prints(echo: Source | None) -> Echo | None:
    """Return the echo if it was written without its payload."""
    if not isinstance(echo, (str, bytes, os.PathLike)) or not is_echo(echo):
        return None
    found = read_echo(echo)
    return None if found.payload else found


def _state(source: Source, format: str | None, given: Mapping[str, Any], *, partial: bool = True) -> State:
    if isinstance(source, Checkpoint):
        ckpt = source
    else:
        try:
            ckpt = open(source, format=format)
        except DAMAGED:
            if not partial:
                raise
            ckpt = open(source, format=format, partial=True)  # reading lost data reports it
            if {"absent", "contradiction"} & ckpt.catalog.meta.keys():  # of an index: its tensors would look removed
                raise
    ckpt = _numbers(ckpt)
    return State(ckpt, gather(ckpt, **given))


def _numbers(ckpt: Checkpoint) -> Checkpoint:
    """Decode tensors whose elements share bytes, and leave out those that nothing decodes: no law holds for bytes."""
    if not PACKED[ckpt.catalog.dtype].any():
        return ckpt
    ckpt = ckpt.decode()
    return ckpt.take(np.flatnonzero(~PACKED[ckpt.catalog.dtype]))


def _run(root: str, format: str | None) -> list[Found]:
    """Return the checkpoints in the folder of a run; empty if there are fewer than two, or if it is a checkpoint.

    A model beside the steps, as trainers save it at the end, is not a step.
    """
    place = Place(root)
    if format is not None or place.file is not None:
        return []
    found = formats.detect(place)
    its = formats.record(found or "")
    loose = its.loose and (any(name in place.files for name in TRACKERS) or bool(its.beside))
    if found is not None and not loose and len(steps_beside(place, found)) < 2:
        return []
    listed = [one for one in discover(place, depth=2) if one.path != "."]
    return listed if len(listed) > 1 else []


def _of_run(
    root: str, listed: Sequence[Found], echo: Source | None, format: str | None, given: Mapping[str, Any], look: Look
) -> Given:
    whole = [one for one in listed if one.complete]
    if not whole:
        newest = open_place(Place(root).sub(listed[-1].path))  # a link out of the run is refused
        return choose(newest, None, echo, "", given, look)
    notes = [f"{one.path!r} is incomplete ({one.why}): it was left out" for one in listed if not one.complete]
    states: list[tuple[Found, State]] = []
    broken: dict[str, str] = {}
    for one in sorted(whole, key=lambda one: (one.step is None, one.step or 0, one.mtime))[-SCANNED:]:
        try:
            states.append((one, _state(os.path.join(root, one.path), None, given)))
        except DAMAGED as error:
            broken[one.path] = str(error)
            if len(broken) == min(len(whole), SCANNED):
                raise
    if len(states) == 1:
        alone = choose(os.path.join(root, states[0][0].path), None, echo, "", given, look)
        return replace(alone, notes=(*alone.notes, *notes), broken={**alone.broken, **broken})
    steps = [state.facts.step if state.facts.step is not None else one.step for one, state in states]
    if None in steps and len(states) != 2:
        names = ", ".join(repr(one.path) for one, _ in states[:4])
        raise UsageError(
            f"{root!r} holds {plural(len(states), 'checkpoint')} without steps, so their order is unknown: "
            f"{names}; pass two"
        )
    order = sorted(
        range(len(states)),
        key=lambda n: (steps[n] or 0, "echo" in states[n][0].path, states[n][0].mtime, states[n][0].path),
    )
    states = [states[n] for n in order]
    twins: dict[str, tuple[Found, State]] = {}  # path → a second save at the same step
    distinct: list[tuple[Found, State]] = []
    for one, state in states:
        if distinct and state.facts.step is not None and state.facts.step == distinct[-1][1].facts.step:
            twins.setdefault(distinct[-1][0].path, (one, state))
        else:
            distinct.append((one, state))
    at, words = _first_bad(distinct, twins, look) if len(distinct) > 1 else (0, "")
    one, first = distinct[at]
    paths = {"before": os.path.join(shown(root), one.path)}
    prints, middle, last = _prints(echo), None, None
    if prints is not None:
        middle = echo_state(prints)
    elif echo is not None:
        try:
            middle = _state(echo, format, given)
        except DAMAGED as error:
            broken["echo"] = str(error)
    elif one.path in twins:
        (twin, middle) = twins[one.path]
        paths["echo"] = os.path.join(shown(root), twin.path)
        words += f"; {twin.path!r} is from the same step and was used as its echo"
    if at + 1 < len(distinct):
        two, last = distinct[at + 1]
        paths["after"] = os.path.join(shown(root), two.path)
    if len(whole) > SCANNED:
        words += f"; the {plural(len(whole) - SCANNED, 'oldest checkpoint', 'were')} not read"
    words = words.removeprefix("; ")
    return Given(Evidence(first, last, middle), (*([words] if words else []), *notes), broken, paths, prints)


def _first_bad(
    states: Sequence[tuple[Found, State]], twins: Mapping[str, tuple[Found, State]], look: Look
) -> tuple[int, str]:
    """Return the first pair of neighbours with a fault, with a sentence; the last pair if there is none."""
    worst: tuple[int, int] | None = None
    for at, ((one, a), (_, b)) in enumerate(pairwise(states)):
        grave = 2 if one.path in twins and look(a, twins[one.path][1]) == 2 else look(a, b)
        if grave and (worst is None or grave > worst[1]):
            worst = at, grave
        if grave == 2:
            break
    many = len(states)
    if worst is None:
        if many == 2:
            return 0, "the folder holds two checkpoints"
        return (
            many - 2,
            f"all {plural(many - 1, 'pair')} of neighbouring checkpoints were compared, the last pair in full",
        )
    good, bad = (_name(one) for one in states[worst[0] : worst[0] + 2])
    if not worst[0]:
        return 0, f"{good} is the earliest checkpoint, with none before it to compare; {bad} is the first faulty one"
    last = states[worst[0]][0].path
    return worst[0], f"healthy up to {good}; {bad} is the first faulty one. Last good checkpoint: {last!r}"


def _name(one: tuple[Found, State]) -> str:
    found, state = one
    step = state.facts.step if state.facts.step is not None else found.step
    return repr(found.path) if step is None else f"step {step:,}"
