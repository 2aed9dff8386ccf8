"""Constructors of the plain Python types that a pickle calls by name: ``set``, ``dict``, ``int``, ``Path``.

::

    GLOBAL builtins bytearray · 10**12 · REDUCE          a terabyte from 30 bytes
    GLOBAL builtins tuple · range(10**12) · REDUCE       the same
    GLOBAL builtins set · [a tuple of 2**60 paths]       hashing it takes for ever
    GLOBAL builtins str · a list of 2**60 paths          so does writing it down

All are one REDUCE away, so these take only the argument types that real picklers emit (CPython 3.11,
``copyreg`` and ``Objects/*.c``) and raise TypeError or ValueError for the rest.
"""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Callable, Iterable
from typing import cast

from workbench.core.inert import Opaque, PickledDict, short

__all__ = ["defaultdict", "encode", "mapping", "newobj", "only", "path", "reconstructor", "sequence", "to_bytes"]

HASH_BUDGET = 1000  # elements that hashing the keys of one call may visit


def sequence(kind: Callable[..., object]) -> Callable[..., object]:
    def build(items: object = ()) -> object:
        if type(items) not in (list, tuple, set, frozenset, dict):
            raise TypeError(f"{kind.__name__} of something that is no list")
        _check_hashable(cast(Iterable[object], items))
        return kind(items)

    return build


def mapping(kind: str) -> Callable[..., object]:
    def build(items: object = None) -> PickledDict:
        if items is None:
            return PickledDict(kind)
        if isinstance(items, dict):
            _check_hashable(items)
            return PickledDict(kind, items)
        if type(items) is list and all(type(pair) in (tuple, list) and len(pair) == 2 for pair in items):
            _check_hashable(pair[0] for pair in items)
            return PickledDict(kind, dict(items))
        raise TypeError(f"{kind} of something that is no mapping")

    return build


def defaultdict(factory: object = None, items: object = None) -> PickledDict:
    made = cast(PickledDict, mapping("defaultdict")(items))
    made.factory = None if factory is None else short(factory)
    return made


def to_bytes(*args: object) -> bytes:
    if not args:
        return b""
    if type(args[0]) in (bytes, bytearray) and len(args) == 1:
        return bytes(cast(bytes, args[0]))
    if type(args[0]) is str and len(args) == 2:
        return encode(*args)
    raise TypeError("bytes of something else than bytes")


def encode(text: object, encoding: object = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "iso-8859-1"):
        raise TypeError("_codecs.encode of something else than latin1 text")
    return codecs.latin_1_encode(text)[0]


def only(kind: Callable[..., object], *types: type) -> Callable[..., object]:
    def build(*args: object) -> object:
        if len(args) > 3 or any(type(arg) not in types for arg in args):
            raise TypeError(f"{kind.__name__} of an odd argument")
        return kind(*args)

    return build


def path(kind: type[pathlib.PurePath]) -> Callable[..., object]:
    def build(*parts: object) -> str:
        if any(type(part) is not str for part in parts):
            raise TypeError("a path of something else than text")
        return str(kind(*cast(tuple[str, ...], parts)))

    return build


def reconstructor(cls: object, base: object = None, state: object = None) -> object:
    if not (isinstance(cls, type) and issubclass(cls, Opaque)):
        raise TypeError("copyreg._reconstructor of something else than a class")
    return cls() if state is None else cls(state)


def newobj(cls: object, *args: object) -> object:
    if not (isinstance(cls, type) and issubclass(cls, Opaque)):
        raise TypeError("copyreg.__newobj__ of something else than a class")
    return cls(*args)


def _check_hashable(items: Iterable[object]) -> None:
    """Refuse tuples whose hash would visit more than `HASH_BUDGET` elements. Raises ValueError."""
    for item in items:
        if type(item) is tuple:
            left, todo = HASH_BUDGET, [item]
            while todo:
                inner = todo.pop()
                left -= len(inner)
                if left < 0:
                    raise ValueError("a key nests too many elements")
                todo.extend(cast(tuple[object, ...], part) for part in inner if type(part) is tuple)
