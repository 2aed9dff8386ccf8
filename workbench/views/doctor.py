"""A diagnosis as text: what happened, the proof, the remedy and the certainty; then what was compared and what was not.

::

    RESUME DOCTOR  dcp, step 240 → echo → step 260
      before  runs/step-240
    ERROR  The optimizer's step counters were reset; the moments were kept.
      since     step 240
      proof     in the load, 291 of 291 of the optimizer's counters went from 240 to 0
      do        restore step with exp_avg and exp_avg_sq
      sure      certain: the moments of 291 of 291 parameters are equal bit for bit
    COMPARED   291 of 291 weights, 582 of 582 moments; data position not compared

The first screen has no rule ids; :func:`diagnosis_lines` has everything, with the ids. Items that do not fit are
counted, never dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from workbench.analysis.report import SEVERITIES, Finding
from workbench.core.words import plural
from workbench.doctor.ledger.sign import Cleared, Sign
from workbench.doctor.reasoning.diagnosis import Diagnosis, Subject, Suspect
from workbench.views import units
from workbench.views.lines import room, wrap
from workbench.views.names import pad, safe, shorten

SCREEN = 40  #: lines of the first screen
MARK = {"error": "ERROR", "warn": "WARN", "info": "info"}
HEAD = 15  #: columns of a section's name
PROOFS, FURTHER, SECTION = 3, 3, 4  #: lines of proof; further causes; lines of a section, on the first screen
#: Where a sign was observed → how a sentence about it begins.
PLACES = {
    "before → echo": "in the load",
    "before → after": "between the checkpoints",
    "echo → after": "after the load",
    "before": "in the checkpoint",
    "echo": "in the echo",
    "after": "in the later checkpoint",
}
SURE = {
    "certain": "certain",
    "likely": "likely: it fits the measurements best",
    "possible": "possible: it rests on a statistic, or the change may be intended",
}
_EXPECTED = ("expect", "otherwise")  #: names of the row on damage; the second after a question
EXACT = "it is exact, and no other known cause leaves it"


def diagnosis_text(d: Diagnosis) -> str:
    """Return the first screen: up to 40 lines of 100 columns, without rule ids."""
    return "\n".join(_screen(d))


def diagnosis_lines(d: Diagnosis) -> list[str]:
    """Return the full report, however long."""
    return list(_lines(d))


def suspect_title(one: Suspect) -> str:
    """Return ``optimizer state not loaded (certain, since step 240)``."""
    since = "" if one.since is None else f", since step {one.since:,}"
    return f"{safe(one.title).rstrip('.')} ({safe(one.certainty)}{since})"


def suspect_rows(one: Suspect) -> Iterator[tuple[str, str]]:
    """Return the facts about a cause as ``(row name, sentence)``; rows of the same name are consecutive."""
    for sign in one.signs:
        yield "proof", _proof(sign)
    for words in reasons(one.excludes):
        yield "excludes", words
    yield "sure", _sure(one)
    if one.affected or one.tensors:
        yield "affected", _affected(one)
    for sentence in one.damage:
        yield _EXPECTED[bool(one.question)], safe(sentence)
    if one.remedy:
        yield "do", safe(one.remedy)
    if one.settle:
        yield "settle", safe(one.settle)


def also_seen(d: Diagnosis) -> list[str]:
    """Return findings that no cause is based on, most severe first."""
    used = {sign.rule for one in d.causes for sign in one.signs}
    rest = [one for one in d if one.rule not in used]
    rest.sort(key=lambda one: SEVERITIES.index(one.severity))
    return [f"{safe(one.rule)} ({MARK[one.severity].lower()}) {safe(one.message)}" for one in rest]


def cleared_sentence(one: Cleared) -> str:
    """Return ``weights: 291 of 291 equal (not A1, A2)``."""
    return f"{safe(one.what)}: {safe(one.message)}{f' (not {_ids(one.causes)})' if one.causes else ''}"


def most_excluding(cleared: Iterable[Cleared]) -> list[Cleared]:
    """Sort facts by the number of causes that they exclude, most first."""
    return sorted(cleared, key=lambda one: -len(one.causes))


def reasons(found: Mapping[str, str]) -> Iterator[str]:
    """Group rules (or causes) by their reason."""
    together: dict[str, list[str]] = {}
    for rule, why in found.items():
        together.setdefault(why, []).append(rule)
    for why, rules in together.items():
        yield f"{', '.join(safe(rule) for rule in rules)}: {safe(why)}"


# ---- the first screen ------------------------------------------------------------------------------------------------


def _screen(d: Diagnosis) -> Iterator[str]:
    yield _heading(d)
    for one in d.subjects:
        yield f"  {pad(safe(one.which), 6)}  {shorten(safe(one.path), _beside(10))}"
    real = [one for one in d.causes if one.severity != "info"]
    if not real:
        yield from wrap(pad("VERDICT", HEAD), safe(d.verdict), most=10)
    for number, cause in enumerate(real[: 1 + FURTHER]):
        yield from wrap(pad(MARK[cause.severity], 7), safe(cause.title), most=3)
        if number == 0:
            yield from _first(cause)
    if len(real) > 1 + FURTHER:
        yield f"       and {plural(len(real) - 1 - FURTHER, 'further cause')}"
    if real:
        for note in _notes(d):
            yield from wrap(pad("NOTE", HEAD), note, most=3)
        yield from wrap(pad("COMPARED", HEAD), safe(d.coverage), most=5)
    rest = [one for one in d if one.severity != "info" and not _explained(one, real) and one.message != d.verdict]
    seen = [safe(one.message) for one in rest]
    if real:  # otherwise the verdict has them
        named = {one.cause for one in real} | {"H1"}
        seen += [_plain(sign) for one in d.causes if one.cause not in named for sign in one.signs[:1]]
    yield from _section("ALSO SEEN", dict.fromkeys(seen), SECTION)
    kept = [one for one in d.ruled_out if not one.what.endswith((" (before)", " (after)"))]
    yield from _section("FOUND CORRECT", map(_cleared, kept), SECTION)
    if d.not_checked:
        lacking = plural(len(d.not_checked), "check")
        yield from wrap(pad("", HEAD), f"{lacking} could not be made; list them with --all")


def _heading(d: Diagnosis) -> str:
    """Return ``RESUME DOCTOR  dcp, step 240 → echo → step 260``."""
    parts: list[str] = []
    for one in d.subjects:
        step = "no step stored" if one.step is None else f"step {one.step:,}"
        kind = f"{safe(one.format)}, " if not parts or one.format != d.subjects[0].format else ""
        parts.append("echo" if one.which == "echo" and d.subjects[0].step == one.step else f"{kind}{step}")
    return f"RESUME DOCTOR  {' → '.join(parts)}"


def _first(one: Suspect) -> Iterator[str]:
    rows = []
    if one.since is not None:
        rows.append(("since", f"step {one.since:,}"))
    proof = [sign for sign in one.signs if sign.severity != "info"] or list(one.signs)
    rows += [("proof", _plain(sign)) for sign in proof[:PROOFS] if sign.message not in one.title]
    if len(proof) > PROOFS:
        rows.append(("proof", f"… and {plural(len(proof) - PROOFS, 'further measurement')}"))
    if (one.affected or one.tensors) and not _named(one, proof[:PROOFS]):
        rows.append(("affected", _affected(one)))
    rows += [("sure", _sure(one))] if one.question else []  # what follows is only true if the answer is no
    rows += [(_EXPECTED[bool(one.question)], safe(sentence)) for sentence in one.damage[:1]]
    rows.append(("do", safe(one.remedy)))
    rows += [] if one.question else [("sure", _sure(one))]
    before = ""
    for name, words in rows:
        yield from wrap(f"  {pad('' if name == before else name, 9)} ", words, most=4 if name in ("do", "proof") else 3)
        before = name


def _named(one: Suspect, proof: Sequence[Sign]) -> bool:
    """Return whether the proof names the tensors, or all that were examined are affected."""
    every = any(0 < sign.hit == sign.of for sign in proof)
    return every or any(name in sign.message for sign in proof for name in one.tensors)


def _sure(one: Suspect) -> str:
    """Return ``certain: the moments of 14 of 14 parameters are equal bit for bit``."""
    words = SURE[one.certainty]
    if one.certainty == "certain" and one.excludes:
        words += f": {safe(next(iter(one.excludes.values())))}"
    elif one.certainty == "certain":
        words += f": {EXACT}"
    if one.question:
        return f"{words}. {safe(one.question[0].upper() + one.question[1:])} If so, nothing is wrong"
    return f"{words}. It could also be: {safe(one.runner_up)}" if one.runner_up else words


def _plain(sign: Sign) -> str:
    where = PLACES.get(str(sign.evidence.get("in", "")), "")
    return f"{where}: {safe(sign.message)}" if where else safe(sign.message)


def _explained(finding: Finding, causes: Sequence[Suspect]) -> bool:
    return any(sign.rule == finding.rule and sign.message == finding.message for one in causes for sign in one.signs)


def _notes(d: Diagnosis) -> list[str]:
    """Return notes on substituted inputs: the checkpoint chosen in a run's folder, an echo of another step."""
    return [safe(note) for note in d.notes]


def _cleared(one: Cleared) -> str:
    return f"{safe(one.what)}: {safe(one.message)}"


# ---- everything ------------------------------------------------------------------------------------------------------


def _lines(d: Diagnosis) -> Iterator[str]:
    yield _heading(d)
    for one in d.subjects:
        yield _subject(one)
    yield from wrap(pad("VERDICT", HEAD), safe(d.verdict))
    yield from wrap(pad("COMPARED", HEAD), safe(d.coverage))
    for number, suspect in enumerate(d.causes, 1):
        yield from _suspect(number, suspect)
    yield from _section("ALSO SEEN", also_seen(d))
    yield from _section("FOUND CORRECT", map(cleared_sentence, most_excluding(d.ruled_out)))
    yield from _section("NOT CHECKED", reasons(d.not_checked))
    yield from _section("NOT NEEDED", reasons(d.not_applicable))


def _subject(one: Subject) -> str:
    step = "no step stored" if one.step is None else f"step {one.step:,}"
    head = f"  {pad(safe(one.which), 6)}  {safe(one.format)}, {step}  "
    return head + shorten(safe(one.path), _beside(len(head)))


def _suspect(number: int, one: Suspect) -> Iterator[str]:
    yield from wrap(f"  {number} {pad(MARK[one.severity], 5)}  {pad(safe(one.cause), 4)}", suspect_title(one), most=2)
    before = ""
    for name, words in suspect_rows(one):
        yield from wrap(f"      {pad('' if name == before else name, 9)} ", words, hang=17 + 5 * (name == "proof"))
        before = name


def _proof(sign: Sign) -> str:
    """Return ``P01  before → after: steps went from 240 to 0``; weak signs are marked as such."""
    mild = "" if sign.severity == "error" else f"({MARK[sign.severity].lower()}) "
    where = f"{safe(sign.evidence['in'])}: " if sign.evidence.get("in") else ""
    return f"{pad(safe(sign.rule), 4)} {mild}{where}{safe(sign.message)}"


def _affected(one: Suspect) -> str:
    share = "" if one.share is None else f", {units.percent(one.share, 1)} of the stored weights"
    names = [shorten(safe(name), room() and 40) for name in one.tensors[:2]]
    listed = f": {', '.join(names)}{', …' if one.affected > len(names) else ''}" if names else ""
    what = "tensor" if one.share is None else "parameter"
    return f"{plural(one.affected or len(one.tensors), what)}{share}{listed}"


def _ids(causes: Iterable[str]) -> str:
    """Return ``A1, A2, E1–E4``: consecutive numbers of a letter are joined."""
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


def _section(name: str, sentences: Iterable[str], most: int | None = None) -> Iterator[str]:
    listed = list(sentences)
    for at, words in enumerate(listed[:most]):
        yield from wrap(pad("" if at else name, HEAD), words, most=None if most is None else 2)
    if most is not None and len(listed) > most:
        yield f"{' ' * HEAD}… {len(listed) - most:,} more (--all)"


def _beside(taken: int) -> int | None:
    """Return the room for a path in a line, beside the columns that are taken."""
    width = room()
    return width and max(width - taken, 20)
