"""A case that nobody chose: run, layout, start and distance drawn from one seed, whatever kind of case it is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.cache import made
from tests.lab.case import case, opened
from tests.lab.config import Config, random_config
from tests.lab.fault import Fault
from tests.lab.formats import FORMATS, LAYOUTS, PLAIN
from tests.lab.run import EARLIER

__all__ = ["EARLY", "Paths", "draw", "fitting"]

EARLY = 20  #: updates to the later checkpoint of a fault
POOL = 6  #: runs that the faults of a seed share: training costs more than all else


@dataclass(frozen=True)
class Paths:
    """What to look at: before, its echo, one update later and ``k`` updates later, where these could be made.

    ``seen`` are the kinds of evidence (`fault.EVIDENCE`) that can show the fault in this run and layout.
    """

    fault: Fault
    format: str
    k: int
    before: Path
    echo: Path
    next: Path | None
    early: Path | None
    seen: frozenset[str]


def fitting(fault: Fault, formats: Sequence[str] = (), seed: int = 0) -> list[str]:
    """The layouts, of those that are asked for, which can hold a fault."""
    able = [name for name in fault.formats or LAYOUTS if not formats or name in formats]
    return able if fault.live else [name for name in able if LAYOUTS[name].refuses(_run(fault, name, seed)) is None]


def draw(fault: Fault, seed: int, formats: Sequence[str] = (), k: int | None = EARLY, *, near: bool = True) -> Paths:
    """Make it, or find it made; ``k`` of ``None`` is drawn as well, and ``near`` leaves out ``next`` if it is false.

    Raises:
        ValueError: no layout that is asked for can hold it.
    """
    rng = random.Random(f"{fault.id} {seed}")
    k = k or rng.randrange(1, 51)
    pool = seed * 1000 + rng.randrange(POOL)
    able = fitting(fault, formats, pool)
    if not able:
        raise ValueError(f"{fault.id} in {', '.join(formats)}: no such layout can hold it")
    chances = [name for name in able if name in FORMATS or name in PLAIN or len(able) == 1]
    layout = rng.choice(chances or able)
    if fault.live is not None:
        far = _live(fault, seed, k)
        before, echo, after = (opened(far / part) for part in ("before", "echo", "after"))
        first = opened(_live(fault, seed, 1) / "after") if near else None
        return Paths(fault, layout, k, before, echo, first, after, fault.seen)
    config = _run(fault, layout, pool)
    late = case(fault.id, config, layout, k=k, seed=seed)
    first = case(fault.id, config, layout, k=1, seed=seed).after if near else None
    return Paths(fault, layout, k, late.before, late.echo, first, late.after, late.expected)


def _live(fault: Fault, seed: int, k: int) -> Path:
    def write(folder: Path) -> None:
        assert fault.live is not None
        fault.live(folder, random.Random(f"{fault.id} {seed}"), k)

    return made(f"live-{fault.id}-{seed}-{k}", write)


def _run(fault: Fault, layout: str, seed: int) -> Config:
    """A run of that kind, with a step to resume from that was drawn too."""
    rng = random.Random(f"run {seed}")
    config = random_config(seed).but(resume=rng.randrange(2 * EARLIER + 1, 141))
    precision = {"torch_masters": "mixed"}.get(layout, "fp32" if layout in PLAIN else config.precision)
    config = config.but(precision=precision)
    return fault.needs(config)
