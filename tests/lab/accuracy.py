"""How often the doctor is right: ``python -m tests.lab.accuracy --half dev [--seed N] [--cases N] [--markdown FILE]``.

::

    fault                   layout      answers   both      echo      pair1     pair20    alone
    f01_drop_opt            dcp         B1        + B1!e    + B1!e    + B1!e    + B1!e    + B1!e
    u12b_decay_on_norms…    folder      B7/C5/H1  . ·       . ·       - ·       . ·       . ·

``+`` right first, ``x`` wrong first, ``-`` missed, ``.`` nothing said where that kind of evidence shows nothing, ``?``
something said there; ``!`` certain, ``e w i`` severity, ``~`` the doctor failed. Only `workbench.doctor` is called.
Of what is healthy: ``+`` nothing said, ``w`` a warning, ``x`` an error.

Of a sealed half no line says what a case is, unless ``--reveal`` is given: what is read is no
longer sealed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

import workbench as wb
from tests.lab.catalogue import EVERY, HALVES
from tests.lab.drawn import EARLY, Paths, draw, fitting
from tests.lab.fault import Fault
from tests.lab.live import Loop

__all__ = ["WAYS", "Told", "Trial", "chosen", "main", "totals", "tried"]

#: Ways of looking, and the kinds of evidence (`fault.EVIDENCE`) that each has.
WAYS = {"both": ("echo", "early"), "echo": ("echo",), "pair1": ("next",), "pair20": ("early",), "alone": ("alone",)}
NOTHING = ("No fault found", "The files are healthy", "Nothing wrong")  #: how a verdict without a cause begins
MARKS = {"right": "+", "wrong": "x", "missed": "-", "blind": ".", "guess": "?", "crash": "~", "refused": "#"}


@dataclass(frozen=True)
class Told:
    """What the doctor said in one way of looking."""

    causes: list[tuple[str, str, str]] = field(default_factory=list)  #: ``(id, certainty, severity)``, the first first
    code: int = 0
    verdict: str = ""
    crash: str = ""
    refused: str = ""

    @property
    def first(self) -> str:
        return self.causes[0][0] if self.causes else ""

    @property
    def certain(self) -> bool:
        return bool(self.causes) and self.causes[0][1] == "certain"

    @property
    def error(self) -> bool:
        return self.code > 1 or any(how == "error" for *_, how in self.causes)

    @property
    def loud(self) -> set[str]:
        """Causes that are more than a hint."""
        return {one for one, _, how in self.causes if how != "info"}

    @property
    def sure(self) -> bool:
        return any(sure == "certain" for _, sure, how in self.causes if how != "info")

    def words(self) -> str:
        if self.crash or self.refused:
            return "~crash" if self.crash else "refused"
        marks = {"certain": "!", "likely": "", "possible": "?"}
        return " ".join(f"{one}{marks[sure]}{how[0]}" for one, sure, how in self.causes[:3]) or "·"


@dataclass(frozen=True)
class Trial:
    """A case as it was told in each way."""

    fault: str
    kind: str
    cause: str
    answers: list[str]
    seen: list[str]
    visible: bool
    format: str
    seed: int
    k: int
    told: dict[str, Told]
    made: float
    spent: float
    failed: str = ""

    def shows(self, way: str) -> bool:
        """Whether the files of that way show the fault."""
        return self.visible and any(kind in self.seen for kind in WAYS[way])

    def outcome(self, way: str) -> str:
        """``right``, ``wrong``, ``missed``; ``blind`` or ``guess`` where nothing shows; ``crash``, ``refused``."""
        told = self.told[way]
        if told.crash:
            return "crash"
        if told.refused:
            return "refused"
        if told.causes:
            return "right" if told.first in self.answers else "wrong" if self.shows(way) else "guess"
        return "missed" if self.shows(way) else "blind"


def chosen(
    half: str, cases: int, seed: int, prefixes: Sequence[str] = (), formats: Sequence[str] = ()
) -> list[tuple[Fault, int]]:
    """Which cases to make: every one of the half once, in an order of the seed's, and again with the next seed."""
    able = [one for one in HALVES[half].values() if not prefixes or one.id.startswith(tuple(prefixes))]
    able = [one for one in able if fitting(one, formats)]
    found = []
    for turn in range(-(-cases // len(able)) if able else 0):
        order = list(able)
        random.Random(f"order {seed} {turn}").shuffle(order)
        found += [(one, seed + turn) for one in order]
    return found[:cases]


def tried(
    fault: Fault, seed: int, formats: Sequence[str] = (), ways: Iterable[str] = WAYS, k: int | None = EARLY
) -> Trial:
    """Make a case, and have it diagnosed in every way; ``k`` is of a fault's later checkpoint, ``None`` draws it."""
    begun = time.process_time()
    facts: dict[str, Any] = {
        "fault": fault.id,
        "kind": fault.kind,
        "cause": fault.cause,
        "answers": sorted(fault.answers),
        "visible": fault.visible,
        "seed": seed,
    }
    try:
        case = draw(fault, seed, formats, k if fault.kind == "fault" else None)
    except (Exception, CheckpointException):  # the lab's own mistake, which must not end a run of hundreds
        failed = traceback.format_exc(limit=-3)
        return Trial(**facts, seen=[], format="?", k=0, told={}, made=0.0, spent=0.0, failed=failed)
    made = time.process_time()
    told = {way: _diagnosed(case, way) for way in ways}
    spent = time.process_time() - made
    seen = sorted(case.seen)
    return Trial(**facts, seen=seen, format=case.format, k=case.k, told=told, made=made - begun, spent=spent)


def _diagnosed(case: Paths, way: str) -> Told:
    later = {"both": case.early, "pair1": case.next, "pair20": case.early}.get(way)
    if way == "alone":
        arguments: tuple[Any, ...] = (case.echo if case.fault.kind == "fault" else case.early,)
    else:
        arguments = (case.before, later) if later is not None else (case.before,)
    if way in ("pair1", "pair20") and later is None:
        return Told(refused="nothing follows: the files cannot be loaded")
    try:
        found = wb.doctor(*arguments, **({"echo": case.echo} if way in ("both", "echo") else {}))
    except wb.errors.OpenError as error:
        return Told(refused=str(error)[:200])  # that is an answer of its own
    except Exception:  # counted, and shown
        return Told(crash=traceback.format_exc(limit=-4))
    causes = [(str(one.cause), str(one.certainty), str(one.severity)) for one in found.causes]
    return Told(causes, int(found.exit_code), str(found.verdict))


def totals(trials: Sequence[Trial], ways: Sequence[str]) -> dict[str, Any]:
    """Counts by way of faults and of what is healthy, the confusion of causes, and how far words can be trusted."""
    ill = [one for one in trials if one.kind == "fault" and not one.failed]
    counts: dict[str, Any] = {"faults": {}, "healthy": {}, "deliberate": {}, "confusion": {}, "calibration": {}}
    for way in ways:
        told = [(one, one.outcome(way)) for one in ill]
        found = Counter(outcome for _, outcome in told)
        counts["faults"][way] = {
            "shown": sum(one.shows(way) for one in ill),
            "right first": sum(outcome == "right" and one.shows(way) for one, outcome in told),
            "wrong first": found["wrong"],
            "wrong and certain": sum(outcome == "wrong" and one.told[way].certain for one, outcome in told),
            "missed": found["missed"],
            "missed, told no fault": sum(
                outcome == "missed" and one.told[way].verdict.startswith(NOTHING) for one, outcome in told
            ),
            "refused": found["refused"],
            "not shown": sum(not one.shows(way) for one in ill),
            "not shown, wrong": found["guess"],
            "crash": found["crash"],
        }
        for kind in ("healthy", "deliberate"):
            well = [(one, one.told[way]) for one in trials if one.kind == kind and not one.failed]
            counts[kind][way] = {
                "cases": len(well),
                "errors": sum(told.error for _, told in well),
                "warnings": sum(told.code == 1 for _, told in well),
                "warnings, of them not true": sum(
                    told.code == 1 and not told.loud <= set(one.answers) for one, told in well
                ),
                "certain": sum(told.sure for _, told in well),
                "certain and not true": sum(told.sure and not told.loud <= set(one.answers) for one, told in well),
                "crash": sum(bool(told.crash) for _, told in well),
            }
        counts["calibration"][way] = _calibration(trials, way)
        if way in ("both", "pair20"):
            table = Counter((one.cause, one.told[way].first or "-") for one, outcome in told if one.shows(way))
            counts["confusion"][way] = {f"{a} -> {b}": n for (a, b), n in sorted(table.items()) if a != b}
    return counts


def _calibration(trials: Sequence[Trial], way: str) -> dict[str, int]:
    """Of all that were told for certain, how many were right; of all "No fault found", how many had one to see."""
    made = [one for one in trials if not one.failed]
    sure = [one for one in made if one.told[way].certain]
    quiet = [one for one in made if one.told[way].verdict.startswith(NOTHING)]
    return {
        "certain": len(sure),
        "certain and right": sum(one.told[way].first in one.answers for one in sure),
        "no fault found": len(quiet),
        "no fault found, but shown": sum(one.kind == "fault" and one.shows(way) for one in quiet),
    }


def _line(one: Trial, ways: Sequence[str]) -> str:
    head = f"{one.fault:32.32} {one.format:13.13}"
    if one.failed:
        return f"{head} the case could not be made: {one.failed.strip().splitlines()[-1]}"
    marks = [f"{_mark(one, way)} {one.told[way].words():18.18}" for way in ways]
    answers = "/".join(one.answers) if one.kind == "fault" else one.kind
    return f"{head} {answers:15.15} k{one.k:<3} {' '.join(marks)} {one.made:4.1f}+{one.spent:.1f}s"


def _mark(one: Trial, way: str) -> str:
    told = one.told[way]
    if one.kind == "fault":
        return MARKS[one.outcome(way)]
    return "~" if told.crash else "x" if told.error else "w" if told.code else "+"


def _sign(one: Trial, number: int, ways: Sequence[str]) -> str:
    """The line printed for a sealed case: the outcome, without the name of the fault."""
    marks = " ".join(_mark(one, way) for way in ways) if not one.failed else "could not be made"
    return f"sealed case {number:3}  {marks}   {one.made:4.1f}+{one.spent:.1f}s"


def _tables(counts: dict[str, Any]) -> Iterator[str]:
    """As Markdown."""
    for title in ("faults", "healthy", "deliberate", "calibration"):
        rows = counts[title]
        columns = list(next(iter(rows.values())))
        yield f"\n### {title}\n"
        yield f"| way | {' | '.join(columns)} |"
        yield f"|---|{'---|' * len(columns)}"
        for way, row in rows.items():
            yield f"| {way} | {' | '.join(str(row[column]) for column in columns)} |"
    for way, table in counts.get("confusion", {}).items():
        yield f"\n### confusion, {way}\n"
        yield "; ".join(f"{pair} {number}" for pair, number in table.items()) or "none"


def _all(
    todo: Sequence[tuple[Fault, int]], how: tuple[Any, ...], device: str, workers: int, seconds: float
) -> Iterator[Trial]:
    """Try all, in this process or in several; in their order, or as they are done."""
    begun = time.monotonic()
    jobs = [(fault.id, seed, how, device) for fault, seed in todo]
    if workers == 1:
        yield from map(_one, itertools.takewhile(lambda _: time.monotonic() - begun < seconds, jobs))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_one, job) for job in jobs]
        for done in as_completed(waiting):
            if not done.cancelled():
                yield done.result()
            if time.monotonic() - begun > seconds:
                for one in waiting:
                    one.cancel()


def _one(job: tuple[str, int, tuple[Any, ...], str]) -> Trial:
    id, seed, how, device = job
    torch.set_num_threads(1)
    Loop.device = device
    return tried(EVERY[id], seed, *how)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=list(HALVES), default="dev")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many; without it, every one of the half once")
    parser.add_argument("--faults", nargs="*", default=[], help="first letters of their ids")
    parser.add_argument("--formats", nargs="*", default=[], help="layouts; 'live' for trainers of their own")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["fault", "healthy", "deliberate"])
    parser.add_argument("--device", default="cpu", help="where loops train; 'cuda' for the half 'gpu'")
    parser.add_argument("--workers", type=int, default=1, help="processes, which share WORKBENCH_LAB")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that")
    parser.add_argument("--any-k", action="store_true", help="draw a fault's later checkpoint too, 1 to 50 updates on")
    parser.add_argument("--reveal", action="store_true", help="name the cases of a sealed half: who reads it tunes")
    options = parser.parse_args(arguments)
    half = HALVES[options.half]
    todo = chosen(options.half, options.cases or len(half), options.seed, options.faults, options.formats)
    if options.cases is None:
        todo = list({fault.id: (fault, seed) for fault, seed in reversed(todo)}.values())[::-1]
    todo = [(fault, seed) for fault, seed in todo if fault.kind in options.kinds]
    open_ = options.half != "sealed" or options.reveal
    trials, lines = [], []
    how = (options.formats, options.ways, None if options.any_k else EARLY)
    for trial in _all(todo, how, options.device, options.workers, options.seconds):
        trials.append(trial)
        lines.append(_line(trials[-1], options.ways) if open_ else _sign(trials[-1], len(trials), options.ways))
        print(lines[-1], flush=True)
        for way, told in trials[-1].told.items():
            if told.crash:
                print(f"    crash in {way}: {told.crash.strip()}", flush=True)
    counts = totals(trials, options.ways)
    if not open_:
        del counts["confusion"]
    failed = [one for one in trials if one.failed]
    tables = list(_tables(counts))
    spent = [sum(one.made for one in trials), sum(one.spent for one in trials)]
    tables.append(
        f"\n{len(trials)} cases, half {options.half}, seed {options.seed}: {spent[0]:.0f} CPU-seconds to make, "
        f"{spent[1]:.0f} to diagnose; {len(failed)} could not be made"
    )
    print("\n".join(tables))
    if options.markdown:
        options.markdown.write_text("\n".join([*tables, "", "```", *lines, "```"]) + "\n")
    if options.json:
        kept = [asdict(one) for one in trials] if open_ else []
        options.json.write_text(json.dumps({"totals": counts, "trials": kept}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
