"""What decoding one pickle may cost: memory and work in proportion to its length.

::

    ] } \x8f \x85 …              containers, counted by the guard before anything is made
    list(a million) · REDUCE     copies, counted by the constructors as they make them      one sum of bytes
    c 'a' 'b'                    classes, counted as they are made
    keys of equal hash           a clock, read every few thousand bytes

Twenty bytes of a pickle can ask for a copy of everything decoded before them, and a thousand dict keys of the same hash
for a million comparisons. Which keys collide cannot be told from the opcodes, since that depends on the order in which
a table fills; how long the guard took for the same opcodes can, and it hashes nothing.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import NoReturn

from workbench.errors import UnsafeError

__all__ = ["ACTIVE", "Allowance", "allowed", "charge", "refuse", "tick"]

SPARE, DENSITY = 64 << 20, 24  # bytes of memory that any pickle may take, and more for each byte of it
SECONDS = 0.4  # of CPU that any pickle may take
PACE = 8.0  # times as long as the guard took; decoding a healthy pickle takes 0.2 to 1.5 times as long


def allowed(size: int) -> int:
    """The bytes of memory that a pickle of ``size`` bytes may take."""
    return SPARE + DENSITY * size


class Allowance:
    """What is left for one pickle. ``position`` is the byte reached, for messages."""

    def __init__(self, what: str, start: int, size: int, spent: int, seconds: float) -> None:
        self.what, self.size, self.spent = what, size, spent
        self.limit = allowed(size)
        self.seconds = SECONDS + PACE * seconds
        self.deadline = time.thread_time() + self.seconds
        self.position = start

    def tick(self) -> None:
        """Look at the clock. Raises UnsafeError when the time is over."""
        if time.thread_time() > self.deadline:
            self.refuse(
                f"its {self.size:,} bytes take more than {self.seconds:.1f} s of CPU, {PACE:.0f} times what reading "
                "their opcodes took and more, as keys of equal hashes do"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise an UnsafeError that says which pickle, and where."""
        raise UnsafeError(
            f"{self.what}, at or before byte {self.position:,}: {reason}. It was not decoded further; do not load this "
            "file with torch or pickle before you know who wrote it"
        )


#: The budget of the pickle that this thread decodes; None: a constructor is called by itself.
ACTIVE: ContextVar[Allowance | None] = ContextVar("workbench pickle budget", default=None)


def charge(nbytes: int) -> None:
    """Count memory that a constructor takes. Raises UnsafeError beyond the limit."""
    if (budget := ACTIVE.get()) is not None:
        budget.spent += nbytes
        if budget.spent > budget.limit:
            budget.refuse(
                f"its {budget.size:,} bytes ask for more than the {budget.limit >> 20:,} MB of memory that a pickle of "
                "this length may take"
            )


def refuse(reason: str) -> NoReturn:
    """Refuse what a constructor is asked for."""
    if (budget := ACTIVE.get()) is not None:
        budget.refuse(reason)
    raise UnsafeError(reason)


def tick() -> None:
    """Look at the clock, in a constructor that hashes many keys."""
    if (budget := ACTIVE.get()) is not None:
        budget.tick()
