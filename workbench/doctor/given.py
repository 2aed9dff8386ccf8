"""Which checkpoints are meant: two paths, a run's folder, a folder with two checkpoints; in what order, of what part.

::

    doctor(before, after, echo=…)   as said; two of one step: a checkpoint and its echo; an older second comes first
    doctor(run)                     the last two steps, or the first neighbours whose facts do not fit; of two
                                    checkpoints of one step the later is the echo
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import workbench.formats as formats
from workbench.analysis.echo_file import Echo, is_echo, read_echo
from workbench.checkpoint import Checkpoint, open
from workbench.core.place import Place
from workbench.doctor.echo.prints import echo_state
from workbench.doctor.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.numbers import usable
from workbench.doctor.facts.rules import check_facts
from workbench.errors import CorruptError, IncompleteError, MissingFileError, UsageError, WorkbenchError
from workbench.runs import TRACKERS, Found, discover

__all__ = ["Given", "Source", "choose"]

Source = str | os.PathLike[str] | Checkpoint
SCANNED = 64  #: last steps of a run whose facts are looked at


@dataclass(frozen=True)
class Given:
    """States to look at.

    Attributes:
        evidence: them.
        notes: what was chosen or exchanged, a sentence each.
        broken: ``echo`` or ``after`` → why it cannot be opened; path: of each that was given.
        prints: the echo, where it holds fingerprints and no payload.
    """

    evidence: Evidence
    notes: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    prints: Echo | None = None


def choose(
    before: Source, after: Source | None, echo: Source | None, format: str | None, given: Mapping[str, Any]
) -> Given:  # fmt: skip
    """Open what is meant.

    Args:
        given: betas, lr and weight_decay that the user said, for every state.

    Raises:
        OpenError: ``before`` cannot be opened. UsageError: a folder of several checkpoints without steps; betas, lr or
            weight_decay that no optimizer has.
    """
    usable(given.get("betas"), given.get("lr"), given.get("weight_decay"))
    notes: list[str] = []
    if after is None and isinstance(before, (str, os.PathLike)) and (run := _run(os.fspath(before), format)):
        return _of_run(os.fspath(before), run, echo, format, given)
    opened: dict[str, State] = {}
    broken: dict[str, str] = {}
    paths: dict[str, str] = {}
    prints = _prints(echo)
    for which, source in (("before", before), ("echo", echo), ("after", after)):
        if source is None:
            continue
        paths[which] = source.path if isinstance(source, Checkpoint) else os.fspath(source)
        if which == "echo" and prints is not None:
            opened[which] = echo_state(prints)
            continue
        try:
            opened[which] = _state(source, format, given, partial=which != "before")
        except (CorruptError, IncompleteError, MissingFileError) as error:
            if which == "before":
                raise
            broken[which] = str(error)
    first, last, middle = opened["before"], opened.get("after"), opened.get("echo")
    if last is not None and middle is None and "echo" not in broken:
        one, two = first.facts.step, last.facts.step
        if one is not None and one == two:
            middle, last = last, None
            paths["echo"] = paths.pop("after")
            notes.append(f"both are of step {one:,}: the second was taken for the echo of the first")
    if last is not None and None not in (first.facts.step, last.facts.step):
        assert first.facts.step is not None and last.facts.step is not None
        if last.facts.step < first.facts.step:
            first, last = last, first
            paths["before"], paths["after"] = paths["after"], paths["before"]
            notes.append(f"the second is older (step {first.facts.step:,}): it was taken for the one before")
    return Given(Evidence(first, last, middle), tuple(notes), broken, paths, prints)


def _prints(echo: Source | None) -> Echo | None:
    """An echo that was written without its payload."""
    if not isinstance(echo, (str, os.PathLike)) or not is_echo(echo):
        return None
    found = read_echo(echo)
    return None if found.payload else found


def _state(source: Source, format: str | None, given: Mapping[str, Any], *, partial: bool = True) -> State:
    if isinstance(source, Checkpoint):
        ckpt = source
    else:
        try:
            ckpt = open(source, format=format)
        except (CorruptError, IncompleteError, MissingFileError):
            if not partial:
                raise
            ckpt = open(source, format=format, partial=True)  # what is lost is told where it is read
    return State(ckpt, gather(ckpt, **given))


def _run(root: str, format: str | None) -> list[Found]:
    """The checkpoints of a folder that is none itself; none of a folder with less than two."""
    place = Place(root)
    if format is not None or place.file is not None:
        return []
    found = formats.detect(place)
    loose = found in ("safetensors", "torch_save") and (
        any(name in place.files for name in TRACKERS) or found == "torch_save"
    )
    if found is not None and not loose:
        return []
    listed = [one for one in discover(root, depth=2) if one.path != "."]
    return listed if len(listed) > 1 else []


def _of_run(
    root: str, listed: Sequence[Found], echo: Source | None, format: str | None, given: Mapping[str, Any]
) -> Given:  # fmt: skip
    whole = [one for one in listed if one.complete]
    if len(whole) < 2:
        return choose(os.path.join(root, (whole or list(listed))[-1].path), None, echo, "", given)
    states = [(one, _state(os.path.join(root, one.path), None, given)) for one in _latest(root, whole)]
    steps = [state.facts.step if state.facts.step is not None else one.step for one, state in states]
    if None in steps and len(states) != 2:
        names = ", ".join(repr(one.path) for one, _ in states[:4])
        raise UsageError(f"{root!r} holds {len(states)} checkpoints, and no telling their order: {names}; name two")
    order = sorted(
        range(len(states)),
        key=lambda n: (steps[n] or 0, "echo" in states[n][0].path, states[n][0].mtime, states[n][0].path),
    )
    states = [states[n] for n in order]
    twins: dict[str, tuple[Found, State]] = {}  # path → what was saved again at the same step
    distinct: list[tuple[Found, State]] = []
    for one, state in states:
        if distinct and state.facts.step is not None and state.facts.step == distinct[-1][1].facts.step:
            twins.setdefault(distinct[-1][0].path, (one, state))
        else:
            distinct.append((one, state))
    at, why = _suspicious(distinct) if len(distinct) > 1 else (0, "the only one")
    one, first = distinct[at]
    looked, paths = [repr(one.path)], {"before": os.path.join(root, one.path)}
    prints, middle, last, said = _prints(echo), None, None, ""
    if prints is not None:
        middle = echo_state(prints)
    elif echo is not None:
        middle = _state(echo, format, given)
    elif one.path in twins:
        (twin, middle) = twins[one.path]
        paths["echo"] = os.path.join(root, twin.path)
        said = f"; {twin.path!r} is of its step, and was taken for its echo"
    if at + 1 < len(distinct):
        two, last = distinct[at + 1]
        paths["after"] = os.path.join(root, two.path)
        looked.append(repr(two.path))
    note = f"of the {len(listed):,} checkpoints in {root!r}, {' and '.join(looked)}: {why}{said}"
    return Given(Evidence(first, last, middle), (note,), {}, paths, prints)


def _latest(root: str, whole: Sequence[Found]) -> list[Found]:
    return sorted(whole, key=lambda one: (one.step is None, one.step or 0, one.mtime))[-SCANNED:]


def _suspicious(states: Sequence[tuple[Found, State]]) -> tuple[int, str]:
    """The first neighbours whose facts do not fit, or the last two."""
    if len(states) == 2:
        return 0, "the only two"
    for at in range(len(states) - 1):
        try:
            found = check_facts(Evidence(states[at][1], states[at + 1][1]))
        except WorkbenchError:
            continue
        if any(sign.severity == "error" and "→" in str(sign.evidence.get("in")) for sign in found.signs):
            return at, "the first neighbours whose counters, names or schedules do not fit"
    return len(states) - 2, "the last two; name others to look at them"
