"""Limits for decoding one pickle and listing its contents: memory and work in proportion to its length.

::

    ] } \x8f \x85 …              containers, counted by the guard before anything is made
    list(a million) · REDUCE     copies, counted by the constructors as they make them      one sum of bytes
    c 'a' 'b'                    classes, counted as they are made
    keys of equal hash           a clock, read every few thousand bytes

Twenty bytes of a pickle can request a copy of everything decoded before them, and a thousand dict keys of equal hash
for a million comparisons. Which keys collide cannot be inferred from the opcodes, since that depends on the order in
which a table fills. The limit follows from the time that the guard took for the same opcodes, as it hashes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NoReturn

from workbench.errors import CorruptError, UnsafeError, quoted

SPARE, DENSITY = 64 << 20, 24  # bytes of memory that any pickle may take, and more for each of its bytes
SECONDS = 0.4  # of CPU that any pickle may take
MAX_DEPTH = 200  #: nested containers; modules nest some 30 deep
GONE = object()  #: of :func:`prune`: what is left out
MAX_AGAIN = 500_000  #: repeated visits; a pickle can share one list a million times
NAMES, NAME = 16 << 20, 256  #: characters of all names together, and more for each; a key is part of many names
PACE = 6.0  # times as long as the guard took; decoding a healthy pickle takes 0.2 to 1.5 times as long


def allowed(size: int) -> int:
    """Return the bytes of memory that a pickle of ``size`` bytes may take."""
    return SPARE + DENSITY * size


class Allowance:
    """The remaining budget of one pickle. ``position`` is the byte reached, for messages."""

    def __init__(self, what: str, start: int, size: int, spent: int, seconds: float) -> None:
        self.what, self.size, self.spent = what, size, spent
        self.limit = allowed(size)
        self.seconds = SECONDS + PACE * seconds
        self.deadline = time.thread_time() + self.seconds
        self.position = start

    def tick(self) -> None:
        """Check the clock. Raises UnsafeError when the time is over."""
        if time.thread_time() > self.deadline:
            self.refuse(
                f"its {self.size:,} bytes take more than {self.seconds:.1f} s of CPU, over {PACE:.0f} times what "
                "reading their opcodes took, as keys with equal hashes do"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise an UnsafeError that says which pickle, and where."""
        raise UnsafeError(
            f"{self.what}, near byte {self.position:,}: {reason}. Decoding stopped; do not load this "
            "file with torch or pickle unless you know who wrote it"
        )


#: The budget of the pickle that this thread decodes; None: a constructor is called by itself.
ACTIVE: ContextVar[Allowance | None] = ContextVar("workbench pickle budget", default=None)


def charge(nbytes: int) -> None:
    """Count memory that a constructor takes. Raises UnsafeError beyond the limit."""
    if (budget := ACTIVE.get()) is not None:
        budget.spent += nbytes
        if budget.spent > budget.limit:
            budget.refuse(
                f"its {budget.size:,} bytes request more than the {budget.limit >> 20:,} MB of memory allowed for a "
                "pickle of this length"
            )


def refuse(reason: str) -> NoReturn:
    """Refuse the request to a constructor."""
    if (budget := ACTIVE.get()) is not None:
        budget.refuse(reason)
    raise UnsafeError(reason)


def tick() -> None:
    """Check the clock in a constructor that hashes many keys."""
    if (budget := ACTIVE.get()) is not None:
        budget.tick()


def check_names(count: int, characters: int, what: str, last: Callable[[], str]) -> None:
    """Raise UnsafeError if ``count`` names have far more characters in all than those of a model.

    ``last`` describes the last of them.
    """
    if characters > NAMES + NAME * count:
        raise UnsafeError(
            f"{what}: the names of its first {count:,} entries have {characters:,} characters in all, too many for a "
            f"model; refused. The last begins with {last()}"
        )


def leaves(
    tree: object,
    children: Callable[[Any], Iterable[tuple[Any, object]] | None],
    is_leaf: Callable[[Any], bool],
    *,
    what: str,
) -> list[tuple[tuple[Any, ...], Any]]:
    """Return every leaf of a decoded tree with the keys and positions that lead to it, in the tree's order.

    Args:
        children: named children of a container, ``None`` for values that are neither container nor leaf. A name
            ``None`` is a level that the path leaves out.
        what: the file, for messages.

    Raises:
        CorruptError: nested more than :data:`MAX_DEPTH` deep.
        UnsafeError: shared so often that listing it would never end, or with names that are far larger than the file.
    """
    found: list[tuple[tuple[Any, ...], Any]] = []
    seen: set[int] = set()
    above: set[int] = set()
    again = characters = 0

    def visit(node: object, path: tuple[Any, ...], length: int, shared: bool) -> None:
        nonlocal again, characters
        if shared:  # the first visits are bounded by the file's size, these are not
            again += 1
            if again > MAX_AGAIN:
                raise UnsafeError(f"{what} shares its containers so often that listing them would never end; refused")
        if is_leaf(node):
            found.append((path, node))
            characters += length
            check_names(len(found), characters, what, lambda: _start(path))
            return
        inside = None if id(node) in above else children(node)
        if inside is None:
            return  # plain, or a module that refers to its parent, whose contents have been listed
        if len(above) >= MAX_DEPTH:
            raise CorruptError(f"{what} has more than {MAX_DEPTH} nested containers at {_start(path)}")
        shared = shared or id(node) in seen
        seen.add(id(node))
        above.add(id(node))
        for key, child in inside:
            if key is None:
                visit(child, path, length, shared)
            else:
                visit(child, (*path, key), length + (len(key) if isinstance(key, str) else 1) + 1, shared)
        above.discard(id(node))

    visit(tree, (), 0, False)
    return found


def prune(tree: object, kept: Callable[[Any], Any], *, what: str, keys: Callable[[Any], Any] | None = None) -> object:
    """Return a decoded tree without some of its values, nor the containers that only had those.

    Args:
        kept: value → what is kept of it, :data:`GONE` for nothing. A container that it returns unchanged is entered.
        keys: converts the keys of dicts, in the same way.
        what: the file, for messages.

    Returns:
        ``None`` if nothing is left.

    Raises:
        CorruptError: nested more than :data:`MAX_DEPTH` deep.
    """
    done: dict[int, object] = {}

    def visit(node: object, depth: int) -> object:
        found = kept(node)
        if found is not node or not isinstance(node, (dict, list, tuple)):
            return found
        if id(node) in done:
            return done[id(node)]
        if depth > MAX_DEPTH:
            raise CorruptError(f"{what} has more than {MAX_DEPTH} nested containers")
        done[id(node)] = GONE  # while it is open, so that a container in itself is dropped
        if isinstance(node, dict):
            pairs = [(key if keys is None else keys(key), visit(child, depth + 1)) for key, child in node.items()]
            left: Any = {key: child for key, child in pairs if child is not GONE}
        else:
            left = [child for child in (visit(child, depth + 1) for child in node) if child is not GONE]
            left = tuple(left) if isinstance(node, tuple) else left
        done[id(node)] = GONE if len(node) and not len(left) else left
        return done[id(node)]

    found = visit(tree, 0)
    return None if found is GONE else found


def _start(path: tuple[Any, ...]) -> str:
    """Return the first characters of a path."""
    text = ""
    for key in path:
        text += "." * bool(text) + (key[:NAME] if isinstance(key, str) else repr(key))
        if len(text) > NAME:
            break
    return quoted(text)
