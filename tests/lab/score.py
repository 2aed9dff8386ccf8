"""Which causes the doctor names for every fault: ``python -m tests.lab.score [--seed N] [--faults f01 …]``.

::

    fault              format     expected  echo + pair                echo alone   pair alone
    f01_drop_opt       dcp        B1        B1 certain                 B1           B1
    f09_gate_up_naive  megatron   E2        E2 certain, E3 likely      –            E3 E2

A table to mend misrankings by; the tests assert their totals.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import workbench as wb
from tests import lab
from workbench.doctor.reasoning.diagnosis import Diagnosis

__all__ = ["Score", "chosen", "score"]

EARLY = 20
WAYS = ("both", "echo", "pair", "alone")


@dataclass(frozen=True)
class Score:
    """A fault as it was diagnosed.

    Attributes:
        told: way of looking → the diagnosis, where one was made.
    """

    fault: str
    format: str
    seed: int
    answers: frozenset[str]
    told: dict[str, Diagnosis]
    seconds: float

    def flagged(self, way: str) -> bool:
        found = self.told.get(way)
        return found is not None and found.exit_code > 0

    def right(self, way: str) -> bool:
        """Whether the first cause is the right one."""
        found = self.told.get(way)
        return found is not None and bool(found.causes) and found.causes[0].cause in self.answers


def chosen(fault: str, seed: int, format: str | None = None) -> tuple[lab.Config, str]:
    """A run and a layout for a fault that nobody chose; layouts that refuse the run are passed over."""
    rng = random.Random(f"{fault} {seed}")
    config = lab.ALL[fault].needs(lab.random_config(rng.randrange(1 << 30)))
    formats = list(lab.ALL[fault].formats or lab.FORMATS)
    fitting = [name for name in formats if lab.FORMATS[name].refuses(config) is None]
    return config, format if format in fitting else rng.choice(fitting)


def score(
    fault: str, seed: int = 0, format: str | None = None, ways: Sequence[str] = WAYS, after_format: str | None = None
) -> Score:
    """Diagnose one fault in the ways that are asked for: with echo and pair, with either, from the echo alone."""
    config, layout = chosen(fault, seed, format)
    case = lab.case(fault, config, layout, k=EARLY, seed=seed, after_format=after_format)
    begun, told = time.perf_counter(), {}
    for way in ways:
        if way == "both":
            told[way] = wb.doctor(case.before, case.after, echo=case.echo)
        elif way == "echo":
            told[way] = wb.doctor(case.before, echo=case.echo)
        elif way == "pair" and case.after is not None:
            told[way] = wb.doctor(case.before, case.after)
        elif way == "alone":
            try:
                told[way] = wb.doctor(case.echo)
            except wb.errors.OpenError:  # what cannot be opened is told by that
                continue
    seconds = time.perf_counter() - begun
    return Score(fault, layout, seed, frozenset({case.cause, *case.fault.also}), told, seconds)


def _words(found: Diagnosis | None) -> str:
    if found is None:
        return "-"
    return " ".join(f"{one.cause}{_MARKS[one.certainty]}{one.severity[0]}" for one in found.causes[:4]) or "·"


_MARKS = {"certain": "!", "likely": "", "possible": "?"}


def _table(options: argparse.Namespace) -> Iterator[str]:
    every = lab.WIDER if options.wider else lab.CONTROLS if options.healthy else lab.FAULTS
    names = [name for name in every if not options.faults or name.startswith(tuple(options.faults))]
    ways = options.ways
    totals = dict.fromkeys(((way, what) for way in ways for what in ("flagged", "right")), 0)
    for name in names:
        one = score(name, options.seed, options.format, ways, options.after_format)
        marks = " | ".join(f"{'+' if one.right(way) else ' '}{_words(one.told.get(way)):28.28}" for way in ways)
        yield f"{name:26.26} {one.format:12} {'/'.join(sorted(one.answers)):12.12} {marks} {one.seconds:5.1f}s"
        for way in ways:
            totals[way, "flagged"] += one.flagged(way)
            totals[way, "right"] += one.right(way)
        if options.signs:
            for way in ways:
                for found in one.told.get(way, ()):
                    yield f"      {way:6}{found.severity:6}{found.rule:5}{found.where:.60}  {found.message:.110}"
    yield "  ".join(f"{way} {what}: {count}/{len(names)}" for (way, what), count in totals.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", help="first letters of their ids")
    parser.add_argument("--format")
    parser.add_argument("--after-format")
    parser.add_argument("--wider", action="store_true")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--signs", action="store_true", help="every finding too")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    for line in _table(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
