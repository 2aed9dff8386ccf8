"""The only unpickler of the project: decodes a pickle without importing or running anything that it names.

::

    80 04 95 …                     PROTO 4, FRAME
    8c 08 'my.mod'… 93             STACK_GLOBAL   find_class looks here, in this order:
                                     1. the caller's ``allow``    the very object is handed back
                                     2. constructors.TABLE        torch, numpy, collections … as stand-ins
                                     3. anything else             an `Opaque` leaf; UnsafeError if strict
    81 · 52 · 62                   NEWOBJ · REDUCE · BUILD        act on stand-ins only (standins.py)
    2e                             STOP

The C unpickler (CPython 3.11, ``Modules/_pickle.c``) does the work, after `guard.walk` has read every
opcode of the stream. `core.jsonable` turns the result into bounded JSON.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workbench.core.garbage import uncollected
from workbench.core.pickles import guard
from workbench.core.pickles.budget import ACTIVE, Allowance
from workbench.core.pickles.constructors import OPAQUE, RECORDS, TABLE
from workbench.core.pickles.opcodes import line_end
from workbench.core.pickles.standins import Opaque, Record, opaque_class, short
from workbench.errors import CorruptError, UnsafeError, WorkbenchError

SLICE = 4096  # bytes that the C unpickler gets at once


class Unpickled(NamedTuple):
    """A decoded value, the foreign globals that the pickle names, and where the stream ended."""

    value: object
    globals: set[str]
    stop: int


def loads(data: bytes | memoryview, *, what: str, **options: Any) -> Any:
    """Decode one pickle (protocols 0 to 5). Arguments and errors as of `loads_with_globals`."""
    return loads_with_globals(data, what=what, **options).value


def load_prefix(data: bytes | memoryview, offset: int, *, what: str, **options: Any) -> tuple[Any, int]:
    """Decode the pickle at byte ``offset``; returns it and the offset after its STOP (legacy torch.save: several in a
    row).
    """
    found = loads_with_globals(data, offset, what=what, **options)
    return found.value, found.stop


def nested(value: bytes, what: str) -> object:
    """Decode a pickle that is stored as bytes inside another one, by the same rules. Raises like `loads`."""
    if type(value) not in (bytes, bytearray):
        raise CorruptError(f"{what} is a {type(value).__name__}, not the bytes of a pickle")
    return loads(bytes(value), what=what)


def loads_with_globals(
    data: bytes | memoryview,
    offset: int = 0,
    *,
    what: str,
    allow: Mapping[tuple[str, str], object] | None = None,
    strict: bool = False,
    persistent_load: Callable[[object], object] | None = None,
) -> Unpickled:
    """Decode one pickle, and say which foreign globals (``module.qualname``) became opaque leaves.

    Args:
        data: the stream; bytes after its STOP are ignored, as by ``pickle.loads``.
        what: how messages name it, e.g. ``"'.metadata'"``.
        allow: (module, qualname) to stand-in, before the table; each is handed to the stream as it is, so it
            must survive a hostile BUILD: a class needs ``__setstate__``, a bare function must not be given.
        strict: refuse any global outside ``allow`` and the table, if the structure is needed.
        persistent_load: decodes persistent ids (see `torch_storage`); without it they are refused.

    Raises:
        CorruptError: no pickle, cut short, or contradicting itself.
        UnsafeError: a bomb, or (strict) a foreign global.
    """
    if not isinstance(data, bytes):
        data = memoryview(data).cast("B")
    start = time.thread_time()
    walked = guard.walk(data, offset, what)
    seconds = time.thread_time() - start
    with uncollected():  # collections would take two thirds of the time, and one alone may take more than is allowed
        budget = Allowance(what, offset, walked.stop - offset, walked.memory, seconds)
        reader = _Reader(memoryview(data), offset, walked.frames, budget)
        unpickler = _Unpickler(reader, what, allow or {}, strict, persistent_load)
        before = ACTIVE.set(budget)
        try:
            value = unpickler.load()
        except WorkbenchError:
            raise
        except Exception as error:  # any error that hostile bytes provoke in the C unpickler or a stand-in ends here
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, pickle.UnpicklingError) else str(error)
            raise CorruptError(
                f"{what} cannot be unpickled, in bytes {reader.low:,} to {reader.high:,}: {_line(reason)}; the file is "
                "damaged, or its pickle is not one that a checkpoint would contain"
            ) from None
        finally:
            ACTIVE.reset(before)
    return Unpickled(value, unpickler.foreign, reader.pos)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: _Reader,
        what: str,
        allow: Mapping[tuple[str, str], object],
        strict: bool,
        persistent: Callable[[object], object] | None,
    ) -> None:
        # Python 2's str is read as latin1: any byte is a character.
        super().__init__(file, encoding="latin1")  # type: ignore[arg-type]
        self.what = what
        self.allow = allow
        self.strict = strict
        self.persistent = persistent
        self.foreign: set[str] = set()
        self.made: dict[tuple[str, str], object] = {}

    def find_class(self, module: str, qualname: str) -> object:
        key = (module, qualname)
        if key in self.allow:
            return self.allow[key]
        if key in TABLE:
            return TABLE[key]
        if key in self.made:
            return self.made[key]
        if key not in OPAQUE and key not in RECORDS:
            if self.strict:
                raise UnsafeError(
                    f"{self.what} names a foreign global {_line(module + '.' + qualname)!r}, which no "
                    "checkpoint of this format contains; it was not imported. Do not load this file with torch "
                    "or pickle unless you know who wrote it"
                )
            self.foreign.add(f"{module}.{qualname}")
        made = opaque_class(module, qualname, Record if key in RECORDS else Opaque)
        self.made[key] = made
        return made

    def persistent_load(self, pid: object) -> object:
        if self.persistent is None:
            raise ValueError(f"an unexpected persistent id {short(pid)}")
        return self.persistent(pid)


class _Reader:
    """A file over a buffer for the C unpickler: no copy, and ``pos`` ends exactly after STOP.

    With ``peek`` the unpickler prefetches, then says by ``read`` how much of it was used. It gets a little at a time,
    and none of the FRAME opcodes (a frame is executed in one go) so that the clock is read in between.
    """

    __slots__ = ("ahead", "budget", "frame", "frames", "low", "pos", "view")

    def __init__(self, view: memoryview, pos: int, frames: list[int], budget: Allowance) -> None:
        self.view = view
        self.pos = self.low = self.ahead = pos
        self.frames = iter([*frames, len(view)])
        self.frame = next(self.frames)
        self.budget = budget

    def _skip_frame(self) -> None:
        while self.pos == self.frame < len(self.view):
            self.pos += 9
            self.frame = next(self.frames)

    def peek(self, size: int) -> memoryview:
        self._skip_frame()
        self.budget.position = self.pos
        self.budget.tick()
        self.low, self.ahead = self.pos, min(self.pos + SLICE, self.frame)
        return self.view[self.pos : self.ahead]

    @property
    def high(self) -> int:
        """The end of the bytes that may have been executed since :attr:`low`; the unpickler does not report it."""
        return max(self.pos, self.ahead)

    def read(self, size: int) -> memoryview:
        self._skip_frame()
        part = self.view[self.pos : self.pos + size]
        self.pos += len(part)
        return part

    def readinto(self, target: memoryview) -> int:
        part = self.read(len(target))
        target[: len(part)] = part
        return len(part)

    def readline(self) -> bytes:
        self._skip_frame()
        start = self.pos
        try:
            self.pos = line_end(self.view, start)
        except IndexError:
            self.pos = len(self.view)
        return bytes(self.view[start : self.pos])


def _line(text: str) -> str:
    """Format text as one printable line of bounded length."""
    safe = repr(text)[1:-1]
    return safe if len(safe) <= 200 else safe[:199] + "…"
