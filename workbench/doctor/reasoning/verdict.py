"""The sentences that are read first: what happened and how certain it is, or what was compared and what was not.

::

    no fault   No fault found in what was compared: 26 of 26 weights, 52 of 52 moments; learning rate not compared.
    unproved   These checkpoints cannot prove that the resume is right. Nothing was found in: 26 of 26 weights, …
    a remark   Settings were changed on purpose. (possible) Nothing else was found in what was compared: …
    a fault    The optimizer's step counters were reset; the moments were kept. (certain: the moments of 52 of 52 …)
    a question The learning-rate schedule restarted. (likely) Was it restarted on purpose? If so, nothing is wrong.

Every number is a count of rows of the ledger.
"""

from __future__ import annotations

from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.doctor.causes.case import Case
from workbench.doctor.causes.table import CAUSES
from workbench.doctor.facts.counted import began_anew
from workbench.doctor.facts.evidence import is_numbered
from workbench.doctor.facts.schedule import sets_rates
from workbench.doctor.ledger.roles import MASTERS
from workbench.doctor.ledger.rows import GROUPS, Status
from workbench.doctor.reasoning.diagnosis import Suspect
from workbench.doctor.rules.leaves import SETTINGS, topic_of

FORGOTTEN = 0.05  #: β2^k below which a later checkpoint no longer shows the load
SOON = 3  #: updates up to which the laws of Adam are nearly equalities
COMPARED = (Status.EQUAL, Status.WITHIN, Status.BEYOND)
FIELDS = {"group.lr": "learning rate", "schedule": "schedule", "loader": "data position"}


def verdict(suspects: tuple[Suspect, ...], case: Case) -> str:
    """Return what happened and how certain it is, or that nothing was found and in what."""
    real = [one for one in suspects if one.severity in ("error", "warn")]
    if real:
        first = real[0]
        words = f"{_headline(first)} {_why(first)}"
        others = [one for one in real[1:] if one.severity == first.severity and one.cause != first.cause]
        if others:
            words += " Also: " + " ".join(one.title for one in others[:2])
        return words
    two = case.evidence.after is not None or case.evidence.echo is not None
    if two and not any(row.status in COMPARED for row in case.ledger):
        return f"Nothing could be compared, so nothing is known about the resume: {_lacking(case)}."
    words, remarks = coverage(case), _remarks(suspects, case)
    if two and not _decisive(case):
        return _joined(remarks, "Too little was compared to decide whether the resume is right.", words)
    if two and _unseen(case):
        return _joined(remarks, "Not everything that is stored was compared, so a fault may be unseen.", words)
    if two and weak(case):
        return _joined(remarks, "These checkpoints cannot prove that the resume is right.", words)
    if remarks:  # never "no fault" above a list that names a cause or a difference
        return f"{remarks} Nothing else was found in what was compared: {words}."
    return f"No fault found in what was compared: {words}."


def _joined(remarks: str, limits: str, words: str) -> str:
    if remarks:
        return f"{remarks} {limits} Nothing else was found in: {words}."
    return f"{limits} Nothing was found in: {words}."


def _remarks(suspects: tuple[Suspect, ...], case: Case) -> str:
    """Return the most likely causes among the remarks, and the differences that no cause explains."""
    heads = [_remark(one) for one in suspects[:2]]
    named = [sign for one in suspects for sign in one.signs]
    differing = [
        one
        for one in case.fired("N1", "R01", "R11", "R16", "R17", where="before → echo", info=True)
        if one not in named
    ]
    differing = [one for one in differing if one.evidence.get("kind") != "drawn"]  # as in any launch
    if any(map(sets_rates, case.declared)):  # which says it
        differing = [one for one in differing if not all("lr" in path for path in one.evidence.get("changed", [""]))]
    if differing:
        heads.append(f"In the load, {'; '.join(one.message for one in differing)}. Is that expected?")
    if beyond := _unexplained(case):
        heads.append(f"{beyond}, and no known cause explains it.")
    return " ".join(heads)


def _headline(one: Suspect) -> str:
    """Return the title; of a remark with a cause's own title, also what was seen."""
    if one.title != CAUSES[one.cause].title or not one.signs or one.severity != "info":
        return one.title
    return f"{one.title.removesuffix('.')}: {one.signs[0].message}."


def _remark(one: Suspect) -> str:
    """Return what was seen, and a question about it."""
    asked = f"{one.question[0].upper()}{one.question[1:]} If so, nothing is wrong." if one.question else ""
    return f"{_headline(one)} {asked or 'Is that expected?'}"


def _unexplained(case: Case) -> str:
    """Return what the ledger lists as changed in the load, or as beyond its law, although no rule reported it."""
    rows = [row for row in case.ledger if row.leg in ("load", "train") and row.status is Status.BEYOND]
    rows = [row for row in rows if any(row.quantity in names for names in GROUPS.values())]
    if not rows:
        return ""
    first = rows[0]
    where = "changed in the load" if first.leg == "load" else "moved farther than the updates can move it"
    return f"The {first.quantity} of {plural(sum(len(row.names) for row in rows), 'parameter')} {where}"


def _decisive(case: Case) -> bool:
    """Return whether most weights and optimizer state were compared by a law."""
    leg = case.leg
    if leg == "train" and (_forgotten(case) or not case.change("train").seen(*GROUPS["moments"])):
        return False
    of = {name: case.ledger.count(leg, GROUPS[name])[0] for name in ("weights", "masters", "moments")}
    seen = {name: case.ledger.count(leg, GROUPS[name], *COMPARED)[0] for name in of}
    return all(2 * seen[name] > of[name] for name in of if of[name]) and any(of.values())


def _unseen(case: Case) -> list[str]:
    """Return what is stored and was not compared. A fault in it would not have been seen."""
    leg = case.leg
    found = []
    for group, quantities in GROUPS.items():
        of, seen = (case.ledger.count(leg, quantities, *statuses)[0] for statuses in ((), COMPARED))
        # the rules on averages and buffers have no rows for updates
        rule = {"averages": "P23", "buffers": "P24"}.get(group) if leg == "train" else None
        lawless = leg == "train" and group in case.outcome.not_checked
        held = all(set(quantities) & case.roles(which) for which in ("before", case.resumed))
        if group == "weights" and leg == "train" and case.ledger.count(leg, MASTERS)[0]:
            continue  # those of their masters, by another rule
        if seen < of or lawless or (held and not of and rule not in case.outcome.checked):
            found.append(group)
    if leg == "train" and (others := _others(case.later.ckpt)):  # no law of what else a program stores is known
        found.append(plural(others, "other tensor"))
    if leg == "load" and "R17" in case.outcome.checked:
        both = [(set(one.loose or ()), set(one.opened)) for one in (case.evidence.before, case.later)]
        more = len((both[0][0] & both[1][0]) - (both[0][1] & both[1][1]))
        return found + ([plural(more, "further file")] if more > 0 else [])
    return found + [repr(name) for name in case.later.unread if not _judged(name, case)]


def _judged(file: str, case: Case) -> bool:
    """Return whether rules on pairs compared a file beside the checkpoint: settings, positions, or generators."""
    rules, topic = case.outcome.checked, topic_of(file.lower())
    counted = any(path.startswith(f"{file.rpartition('.')[0]}.") for path in case.later.counts)
    if topic == "data" and counted and "P20" in rules:
        return True
    return (topic in SETTINGS and "P52" in rules) or ("rng" in file and "P51" in rules)


def _others(ckpt: Checkpoint) -> int:
    """Return how many tensors of floats belong to no parameter and no optimizer."""
    rows = zip(ckpt.catalog.keys, ckpt.roles, strict=True)
    names = [key for key, role in rows if role == "other"]
    return sum(ckpt[key].element.kind == "f" and ckpt[key].numel() > 1 for key in names)


def _lacking(case: Case) -> str:
    if not any(row.quantity in GROUPS["weights"] for row in case.ledger):
        return "no weights, moments or settings that both checkpoints have were read"
    return "none of the tensors that both checkpoints have could be read"


def _why(one: Suspect) -> str:
    if one.question:
        return f"({one.certainty}) {one.question[0].upper() + one.question[1:]} If so, nothing is wrong."
    if one.certainty == "certain":
        reason = next(iter(one.excludes.values()), "")
        return f"(certain{': ' + reason if reason else ''})"
    other = f"; otherwise: {one.runner_up}" if one.runner_up else ""
    return f"({one.certainty}{other})"


def coverage(case: Case) -> str:
    """Return what was compared: ``26 of 26 weights, 2 of 52 moments; learning rate not compared``."""
    if not any(row.quantity in GROUPS["weights"] for row in case.ledger):
        return "the trainer's state; weights and moments were not read"
    leg = next((leg for leg in ("load", "train") if case.change(leg).rows), case.resumed)
    parts: list[str] = []
    for group, quantities in GROUPS.items():
        of, _ = case.ledger.count(leg, quantities)
        seen, _ = case.ledger.count(leg, quantities, *COMPARED)
        gone, _ = case.ledger.count(leg, quantities, Status.ABSENT)
        if of:
            reasons = sorted(case.ledger.reasons(leg, quantities).items(), key=lambda one: -one[1])[:2]
            notes = [f"{gone:,} absent"] if gone else []
            notes += [f"{count:,} not: {why}" for why, count in reasons if not any(why in part for part in parts)]
            parts.append(f"{seen:,} of {of:,} {group}" + (f" ({'; '.join(notes)})" if notes else ""))
        elif group == "moments" or (group == "weights" and not case.ledger.count(leg, MASTERS)[0]):
            parts.append(f"no {group}")
    known = {row.quantity for row in case.ledger if row.leg == leg and row.status is not Status.SKIPPED}
    lawless = _moved(case, "group.lr") and not {"P15", "P19"} & case.outcome.checked.keys()
    if leg == "train" and lawless:
        known.discard("group.lr")  # no stored schedule says what it should be
    if "samples" in known or (leg == "load" and _data_compared(case)):
        known.add("loader")
    if leg == "train":  # a position that is stored on both sides may not be comparable
        (known.add if "P20" in case.outcome.checked else known.discard)("loader")
    missed = [words for quantity, words in FIELDS.items() if quantity not in known]
    missed += ["learning rate after the load"] if leg == "load" and lawless else []
    missed += [one for one in _unseen(case) if one not in GROUPS or not case.ledger.count(leg, GROUPS[one])[0]]
    if "step" not in known:
        missed.insert(0, "optimizer's counters")
    done = ", ".join(parts) or "no tensors"
    if not any(case.ledger.count(leg, quantities, *COMPARED)[0] for quantities in GROUPS.values()):
        done = "the trainer's state and settings; no weights or moments could be compared"
    if missed:
        done += f"; {', '.join(missed)} not compared"
    lacking = weak(case)
    return f"{done}. {lacking}" if lacking else done


def _data_compared(case: Case) -> bool:
    """Return whether both sides of a load store values of a data loader or sampler, which R17 compared."""
    sides = (case.evidence.before.facts.parts, case.later.facts.parts)
    differ = any(one.evidence["kind"] == "data" for one in case.fired("R17"))
    return differ or ("R17" in case.outcome.checked and all("data loader" in parts for parts in sides))


def _moved(case: Case, quantity: str) -> bool:
    rows = [row for row in case.ledger if row.leg == "train" and row.quantity == quantity]
    return any(row.detail.get("before") != row.detail.get("after") for row in rows)


def weak(case: Case) -> str:
    """Return why finding nothing proves little; empty if it proves much."""
    evidence = case.evidence
    if evidence.echo is not None and case.change("load").rows:
        return ""
    if evidence.after is None:
        return (
            "One checkpoint cannot show what a load changed: save an echo right after the load, or pass a later "
            "checkpoint"
        )
    facts = evidence.after.facts
    betas = facts.betas or evidence.before.facts.betas
    if not case.change("train").seen(*GROUPS["moments"]):
        return "Without moments, a later checkpoint shows little: save an echo right after the load"
    first, second = _ends(case)
    if first is None or second is None:
        return "The number of updates in between is not stored: save an echo right after the load"
    if betas is None:
        if second - first <= 1:
            return ""
        return "It is unknown how long this optimizer remembers: save an echo right after the load"
    if betas[1] ** max(second - first, 0) < FORGOTTEN:
        return (
            f"With {second - first:,.0f} updates in between, a load is no longer visible: save an echo right after it"
        )
    if second - first > SOON:
        return (
            f"With {second - first:,.0f} updates in between, laws are bounds, and some faults stay within them: save "
            "an echo right after the load"
        )
    if all(map(is_numbered, case.change("train").seen(*GROUPS["moments"]))):
        return (
            "The optimizer's state is stored by number, so no update could be replayed with it: save an echo right "
            "after the load"
        )
    return ""


def _ends(case: Case) -> tuple[float | None, float | None]:
    """Return the updates that both checkpoints have made: the optimizer's count, or the trainer's if that is wrong."""
    sides = (case.evidence.before.facts, case.state("after").facts)
    counters, steps = ([one.steps.usual for one in sides], [one.step for one in sides])
    wrong = None in counters or (bool(case.fired("P01")) and None not in steps)
    if None not in (*counters, *steps) and counters[0] == steps[0]:  # as the trainer counted, until the resume
        wrong |= counters[1] < steps[1]  # type: ignore[operator]
    schedule = [one.schedule.count if one.schedule is not None else None for one in sides]
    ends = [*counters, *schedule]
    if began_anew(*sides):
        wrong = True
    elif None not in ends and ends[1] - ends[0] == ends[3] - ends[2]:  # type: ignore[operator]
        wrong = False  # the schedule went on as the optimizer's count did
    first, second = steps if wrong else counters
    return first, second


def _forgotten(case: Case) -> bool:
    """Return whether so many updates came in between that nothing of the loaded state is visible."""
    before, after = case.evidence.before.facts, case.evidence.after
    if after is None:
        return False
    betas, (first, second) = after.facts.betas or before.betas, _ends(case)
    if betas is None or first is None or second is None:
        return bool(weak(case))
    return bool(betas[1] ** max(second - first, 0) < FORGOTTEN)
