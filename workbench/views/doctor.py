"""A diagnosis in text: verdict, causes with their proof, what is ruled out, what was not checked; one screen.

::

    RESUME DOCTOR
      before  dcp, step 240  runs/step-240
      echo    dcp, step 240  echo/step-240
    VERDICT  The optimizer state did not survive the load.
      1 ERROR  B1  optimizer state not loaded (certain, since step 240)
          proof     S06  291 of 291 parameters have fresh moments
          excludes  B2: the moments are gone, too
          damage    β2 = 0.95: about 60 updates too large
          remedy    …
    RULED OUT    weights: 291 of 291 equal bit for bit (no A1, A2, E1, …)
    NOT CHECKED  S18: no data position is stored

What does not fit is counted, never dropped in silence: further causes share a line,
further rules are their ids.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from workbench.analysis.report import SEVERITIES
from workbench.doctor.diagnosis import Diagnosis, Subject, Suspect
from workbench.doctor.sign import Cleared, Sign
from workbench.views import units
from workbench.views.names import pad, safe, shorten

__all__ = [
    "MARK", "also_seen", "cleared_sentence", "diagnosis_lines", "diagnosis_text", "most_excluding", "reasons",
    "suspect_rows", "suspect_title",
]  # fmt: skip

WIDTH = 100  #: columns
SCREEN = 40  #: lines of a typical diagnosis
MARK = {"error": "ERROR", "warn": "WARN", "info": "info"}
HEAD = 13  #: columns of a section's name


class Room(NamedTuple):
    """How much is shown: signs and lines of a row of the first cause, of further ones; causes; rows of a section."""

    first: int
    others: int
    long: int
    causes: int
    section: int


#: From generous to terse: the first that fits the screen is taken, else the last.
ROOMS = (
    Room(6, 4, 4, 5, 8), Room(6, 3, 3, 5, 4), Room(5, 2, 3, 4, 3), Room(5, 1, 2, 4, 3), Room(4, 1, 2, 3, 2),
    Room(4, 0, 2, 3, 2), Room(3, 0, 1, 3, 2),
)  # fmt: skip
BRIEF = ("proof", "remedy")  #: rows of a cause that has no room
ALL = Room(10_000, 10_000, 10_000, 10_000, 10_000)


def diagnosis_text(d: Diagnosis) -> str:
    """At most a screen for a typical case, 100 columns wide."""
    found: list[str] = []
    for room in ROOMS:
        found = list(_lines(d, room))
        if len(found) <= SCREEN:
            break
    return "\n".join(found)


def diagnosis_lines(d: Diagnosis) -> list[str]:
    """Everything, however long."""
    return list(_lines(d, ALL))


def suspect_title(one: Suspect) -> str:
    """``optimizer state not loaded (certain, since step 240)``."""
    since = "" if one.since is None else f", since step {one.since:,}"
    return f"{safe(one.title).rstrip('.')} ({safe(one.certainty)}{since})"


def suspect_rows(one: Suspect, signs: int | None = None) -> Iterator[tuple[str, str]]:
    """What is said of a cause as ``(row, sentence)``; rows of one name follow one another."""
    # every rule once before any twice: many kinds of proof say more than many places
    first = {sign.rule: sign for sign in reversed(one.signs)}
    first = {sign.rule: sign for sign in one.signs if first[sign.rule] is sign}
    ordered = [sign for sign in one.signs if first[sign.rule] is sign]
    ordered += [sign for sign in one.signs if first[sign.rule] is not sign]
    for sign in ordered[:signs]:
        yield "proof", _proof(sign)
    shown = {sign.rule for sign in ordered[:signs]}
    if rest := [safe(rule) for rule in first if rule not in shown]:
        yield "proof", f"{'also ' if signs else ''}{', '.join(rest)}"
    excluded = list(reasons(one.excludes))
    kept = excluded if signs is None else excluded[: max(signs // 2, 1)]
    for words in kept:
        yield "excludes", words
    if len(excluded) > len(kept):
        yield "excludes", f"… {units.plural(len(excluded) - len(kept), 'more reason')}"
    if one.affected or one.tensors:
        yield "affected", _affected(one)
    for sentence in one.damage:
        yield "damage", safe(sentence)
    if one.remedy:
        yield "remedy", safe(one.remedy)
    if one.settle:
        yield "settle", safe(one.settle)


def also_seen(d: Diagnosis) -> list[str]:
    """Findings that no cause rests on, gravest first."""
    told = {sign.rule for one in d.causes for sign in one.signs}
    rest = [one for one in d.found if one.rule not in told]
    rest.sort(key=lambda one: SEVERITIES.index(one.severity))
    return [f"{safe(one.rule)} ({MARK[one.severity].lower()}) {safe(one.message)}" for one in rest]


def cleared_sentence(one: Cleared) -> str:
    """``weights: 291 of 291 equal (not A1, A2)``."""
    return f"{safe(one.what)}: {safe(one.message)}{f' (not {_ids(one.causes)})' if one.causes else ''}"


def most_excluding(cleared: Iterable[Cleared]) -> list[Cleared]:
    """What excludes most causes first."""
    return sorted(cleared, key=lambda one: -len(one.causes))


def reasons(told: Mapping[str, str]) -> Iterator[str]:
    """Rules (or causes) of one reason together."""
    together: dict[str, list[str]] = {}
    for rule, why in told.items():
        together.setdefault(why, []).append(rule)
    for why, rules in together.items():
        yield f"{', '.join(safe(rule) for rule in rules)}: {safe(why)}"


def _lines(d: Diagnosis, room: Room) -> Iterator[str]:
    yield "RESUME DOCTOR"
    for one in d.subjects:
        yield _subject(one)
    yield from _wrapped(pad("VERDICT", HEAD), safe(d.verdict), max(room.long, 4))
    for number, suspect in enumerate(d.causes[: room.causes], 1):
        yield from _suspect(number, suspect, room)
    if len(d.causes) > room.causes:
        rest = d.causes[room.causes :]
        titled = "; ".join(f"{safe(one.cause)} {safe(one.title).rstrip('.')} ({one.certainty})" for one in rest)
        words = titled if len(titled) < 2 * (WIDTH - HEAD) else _ids(one.cause for one in rest)
        yield from _wrapped("  further    ", words, 3)
    yield from _section("ALSO SEEN", also_seen(d), room, f"further {'findings' if d.causes else 'ones'}")
    yield from _section("RULED OUT", map(cleared_sentence, most_excluding(d.ruled_out)), room, "more")
    yield from _section("NOT CHECKED", reasons(d.not_checked), room, "more")
    if d.not_applicable:
        yield from _section("NOT NEEDED", reasons(d.not_applicable), room, "more")


def _subject(one: Subject) -> str:
    step = "no step stored" if one.step is None else f"step {one.step:,}"
    head = f"  {pad(safe(one.which), 6)}  {safe(one.format)}, {step}  "
    return head + shorten(safe(one.path), max(WIDTH - len(head), 20))


def _suspect(number: int, one: Suspect, room: Room) -> Iterator[str]:
    yield from _wrapped(f"  {number} {pad(MARK[one.severity], 5)}  {pad(safe(one.cause), 4)}", suspect_title(one), 2)
    before = ""
    signs = None if room is ALL else room.first if number == 1 else room.others
    for name, words in suspect_rows(one, signs):
        if signs == 0 and name not in BRIEF:
            continue
        head = f"      {pad('' if name == before else name, 9)} "
        # what to do is never cut, but where nothing else helps
        most = 8 if name == "remedy" and room.long > 1 else min(room.long, 3)
        yield from _wrapped(head, words, room.long if room is ALL else most, 5 * (name == "proof"))
        before = name


def _proof(sign: Sign) -> str:
    """``P01  before → after: steps went from 240 to 0``; a mild sign says that it is one."""
    mild = "" if sign.severity == "error" else f"({MARK[sign.severity].lower()}) "
    where = f"{safe(sign.evidence['in'])}: " if sign.evidence.get("in") else ""
    return f"{pad(safe(sign.rule), 4)} {mild}{where}{safe(sign.message)}"


def _affected(one: Suspect) -> str:
    share = "" if one.share is None else f", {units.percent(one.share, 1)} of the trained weights"
    names = [shorten(safe(name), 40) for name in one.tensors[:2]]
    listed = f": {', '.join(names)}{', …' if one.affected > len(names) else ''}" if names else ""
    return f"{units.plural(one.affected or len(one.tensors), 'parameter')}{share}{listed}"


def _ids(causes: Iterable[str]) -> str:
    """``A1, A2, E1–E4``: runs of a letter's numbers joined."""
    runs: list[list[str]] = []
    for cause in dict.fromkeys(causes):
        if runs and _follows(runs[-1][-1], cause):
            runs[-1].append(cause)
        else:
            runs.append([cause])
    ends = [(safe(run[0]), "–" if len(run) > 2 else ", ", safe(run[-1])) for run in runs]
    return ", ".join(first if first == last else f"{first}{dash}{last}" for first, dash, last in ends)


def _follows(one: str, other: str) -> bool:
    digits = one[1:].isdecimal() and other[1:].isdecimal()
    return digits and one[:1] == other[:1] and int(other[1:]) == int(one[1:]) + 1


def _section(name: str, sentences: Iterable[str], room: Room, more: str) -> Iterator[str]:
    listed = list(sentences)
    for at, words in enumerate(listed[: room.section]):
        yield from _wrapped(pad("" if at else name, HEAD), words, min(room.long, 2) if room is not ALL else room.long)
    if len(listed) > room.section:
        yield f"{' ' * HEAD}… {len(listed) - room.section:,} {more}"


def _wrapped(head: str, words: str, most: int, deeper: int = 0) -> Sequence[str]:
    lines = textwrap.wrap(
        words, WIDTH, initial_indent=head, subsequent_indent=" " * (len(head) + deeper), break_on_hyphens=False
    ) or [head.rstrip()]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: WIDTH - 2].rstrip() + " …"]
    return lines
