"""What makes a stand-in harmless: sealed classes, values without state, a leaf for whatever is not ours.

Opcodes can reach an object in five ways: call it (REDUCE, NEWOBJ, OBJ, INST), give it state (BUILD), append,
add, set an item. Nothing here runs code that a pickle brought along in any of them, and none of them changes
a class or a function of ours::

    BUILD looks for __setstate__, and only without one falls back on setattr   → every stand-in has one
    BUILD on a class would set attributes that all its instances see           → classes are sealed
    BUILD on a function would reach its __defaults__                           → `Call` wraps each one
    repr of what a stranger nested may take for ever, or fill a terminal       → `short` bounds and escapes
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable

__all__ = ["Call", "Inert", "Opaque", "PickledDict", "Record", "opaque_class", "short"]


class _Sealed(type):
    """Metaclass of classes whose attributes a BUILD opcode must not reach."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("a stand-in class cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise TypeError("a stand-in class cannot be changed")

    def __repr__(cls) -> str:
        if "qualname" in cls.__dict__:
            return f"<class {_name(cls)}>"
        return type.__repr__(cls)


class Inert(metaclass=_Sealed):
    """Base of the values that take no state and no attribute."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{type(self).__name__} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise TypeError(f"{type(self).__name__} cannot be changed")

    def __setstate__(self, state: object) -> None:
        raise TypeError(f"{type(self).__name__} takes no state")

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Call(Inert):
    """A function of ours under a pickled name; callable, not a class, without state."""

    __slots__ = ("function", "name")
    function: Callable[..., object]
    name: str

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self._set(name=name, function=function)

    def __call__(self, *args: object) -> object:
        return self.function(*args)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class PickledDict(dict):
    """An OrderedDict, defaultdict or Counter: a plain dict plus the attributes that were pickled with it.

    ``kind`` says which; ``attrs`` holds e.g. a state_dict's ``_metadata``; a default factory is kept as a
    word, never called.
    """

    __slots__ = ("attrs", "factory", "kind")

    def __init__(self, kind: str, items: dict[object, object] | None = None, factory: str | None = None) -> None:
        super().__init__(items or ())
        self.kind = kind
        self.factory = factory
        self.attrs: dict[str, object] = {}

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict:
            raise TypeError("the state of a dict must be a dict")
        self.attrs = state

    def __repr__(self) -> str:
        return f"<{self.kind} of {len(self)}>"


class Opaque(metaclass=_Sealed):
    """An instance of a class that is not ours: what the pickle says about it, and nothing that runs.

    The class attributes ``module`` and ``qualname`` name it; ``args`` and ``kwargs`` are what it was called
    with, ``state`` what BUILD gave (None before), ``items`` what was appended or added, ``pairs`` what was
    set as items. Equal only to itself.
    """

    __slots__ = ("args", "items", "kwargs", "pairs", "state")
    module: str = ""
    qualname: str = ""
    args: tuple[object, ...]
    kwargs: dict[str, object]
    state: object
    items: list[object]
    pairs: list[tuple[object, object]]

    def __new__(cls, *args: object, **kwargs: object) -> Opaque:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.items = []
        self.pairs = []
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: list[object]) -> None:
        self.items.extend(items)

    add = append

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    @property
    def name(self) -> str:
        """``module.qualname``, escaped and bounded: safe to print."""
        return _name(type(self))

    def __repr__(self) -> str:
        return short(self)


class Record(Opaque):
    """A plain bag of attributes: argparse.Namespace, types.SimpleNamespace."""

    __slots__ = ()

    @property
    def fields(self) -> dict[str, object]:
        """The attributes, as pickled."""
        return self.state if type(self.state) is dict else dict(self.kwargs)


def opaque_class(module: str, qualname: str, base: type[Opaque] = Opaque) -> type[Opaque]:
    """A fresh class for a global (fresh per load, so that nothing is shared between two pickles)."""
    body = {"__slots__": (), "module": module, "qualname": qualname}
    return _Sealed(base.__name__, (base,), body)  # type: ignore[return-value]


def short(value: object, limit: int = 120) -> str:
    """A one-line, escaped, bounded repr of any decoded value."""
    text = _REPR.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _name(cls: type) -> str:
    text = f"{cls.module[:121]}.{cls.qualname[:121]}"  # type: ignore[attr-defined]
    text = repr(text)[1:-1]  # escapes control characters
    return text if len(text) <= 120 else text[:119] + "…"


_PLAIN = (list, tuple, dict, set, frozenset, str, int, bytes, bytearray, float, complex, bool, type(None))


class _Repr(reprlib.Repr):
    """reprlib bounds depth and width; it dispatches on the class name, so ours are caught here first."""

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, Opaque):
            if level <= 0:
                return f"<{x.name} …>"
            inner = [self.repr1(item, level - 1) for item in x.args[:4]]
            if len(x.args) > 4:
                inner.append("…")
            return f"<{x.name}({', '.join(inner)})>"
        if isinstance(x, PickledDict | Inert | type):
            return repr(x)
        if type(x) is int and abs(x) >= 1 << 256:  # its repr is quadratic, and limited by the interpreter
            return f"<int of {x.bit_length()} bits>"
        if type(x) in _PLAIN:
            if type(x) in (bytes, bytearray):
                return repr(bytes(x[:40])) + ("…" if len(x) > 40 else "")  # type: ignore[index,arg-type]
            if type(x) in (set, frozenset):  # reprlib sorts sets: comparing deep keys could take for ever
                return f"<{type(x).__name__} of {len(x)}>"  # type: ignore[arg-type]
            if type(x) is dict:
                return self._dict(x, level)
            return super().repr1(x, level)
        if type(x).__module__ == "numpy":
            if getattr(x, "ndim", 0):
                return f"<numpy {type(x).__name__} {getattr(x, 'dtype', '')}>"
            return repr(x)[:80]
        return f"<{type(x).__name__}>"

    def _dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0:
            return "{…}"
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in list(x.items())[:4]]
        return "{" + ", ".join(shown) + (", …" if len(x) > 4 else "") + "}"


_REPR = _Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 60
