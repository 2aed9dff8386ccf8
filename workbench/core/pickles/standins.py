"""The inert stand-ins for the classes and functions that a pickle names.

::

    GLOBAL torch._utils _rebuild_tensor_v2   →  Call("…", a function of ours)  → TensorRef
    GLOBAL torch bfloat16                    →  DTypeRef("bfloat16")
    GLOBAL my.lib Config                     →  a fresh subclass of Opaque     → args, state
    GLOBAL my.fork MetadataIndex             →  a fresh subclass of Held       → [state]   if ByClass is requested

Opcodes can reach an object in five ways: call it (REDUCE, NEWOBJ, OBJ, INST), give it state (BUILD), append,
add, set an item. Nothing here runs code that a pickle brought along in any of them, and none of them changes
a class or a function of ours::

    BUILD looks for __setstate__, and only without one falls back on setattr   → every stand-in has one
    BUILD on a class would set attributes that all its instances see           → classes are sealed
    BUILD on a function would reach its __defaults__                           → `Call` wraps each one
    repr of hostile nesting may take forever, or fill a terminal              → `short` bounds and escapes

numpy's arrays and dtypes: arrays.py.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from workbench.core.pickles.budget import charge
from workbench.errors import CorruptError

INSTANCE, CLASS = 300, 4000  # bytes counted for an `Opaque` and for a class of them; a class takes 20 µs to make


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
        made = self.function(*args)
        if type(made) in _COPIES:
            charge(sys.getsizeof(made))
        return made

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


_COPIES = frozenset((bytes, bytearray, str, int, list, tuple, set, frozenset, dict, PickledDict))


class Opaque(metaclass=_Sealed):
    """An instance of an unknown class: what the pickle stores about it, and nothing that runs.

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
        charge(INSTANCE + 8 * len(args) + (sys.getsizeof(kwargs) if kwargs else 0))
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
    """Create a class for a global, a new one for each load, to share nothing between two pickles."""
    charge(CLASS + 4 * len(module) + 4 * len(qualname))
    body = {"__slots__": (), "module": module, "qualname": qualname}
    return _Sealed(base.__name__, (base,), body)  # type: ignore[return-value]


def short(value: object, limit: int = 120) -> str:
    """Return a one-line, escaped, bounded repr of any decoded value."""
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
            if type(x) in (set, frozenset):  # reprlib sorts sets: comparing deep keys could take forever
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


MAX_DIMS = 64  # torch's own limit
TENSOR = 400  # bytes of a `TensorRef`, and of its part of a catalog


class DTypeRef(Inert):
    """A dtype by its torch name, such as ``bfloat16``."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        self._set(name=name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypeRef) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class StorageType(Inert):
    """A storage class: its dtype's torch name, or None when untyped (then sizes are in bytes)."""

    __slots__ = ("dtype",)
    dtype: str | None

    def __init__(self, dtype: str | None) -> None:
        self._set(dtype=dtype)

    def __repr__(self) -> str:
        return f"<storage of {self.dtype or 'bytes'}>"


class StorageRef(Inert):
    """One storage of a torch.save file: ``numel`` counts elements of ``dtype``, or bytes when ``dtype`` is
    None.

    ``view`` is the legacy format's (key, offset, numel) of a storage inside another one, otherwise None.
    """

    __slots__ = ("dtype", "key", "location", "numel", "view")
    dtype: str | None
    key: str
    location: str
    numel: int
    view: tuple[str, int, int] | None

    def __init__(
        self, dtype: str | None, key: str, location: str, numel: int, view: tuple[str, int, int] | None = None
    ) -> None:
        self._set(dtype=dtype, key=key, location=location, numel=numel, view=view)

    def __repr__(self) -> str:
        return f"<storage {self.key!r} of {self.numel} {self.dtype or 'bytes'}>"


class TensorRef(Inert):
    """A tensor that was not read: its storage and its position there.

    ``storage`` is what ``persistent_load`` returned; ``storage_offset`` and ``stride`` count elements.
    ``kind`` names a subclass (``torch.nn.parameter.Parameter``) or is None; ``attrs`` are the Python
    attributes that the file keeps with it (Megatron's ``partition_dim``), inert values only.
    """

    __slots__ = ("attrs", "dtype", "kind", "requires_grad", "shape", "storage", "storage_offset", "stride")
    storage: Any
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    attrs: dict[str, object]
    kind: str | None

    def __init__(
        self,
        storage: object,
        dtype: str,
        storage_offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool = False,
        attrs: dict[str, object] | None = None,
        kind: str | None = None,
    ) -> None:
        if type(dtype) is not str:
            raise ValueError("a tensor's storage has no dtype")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride) or len(shape) > MAX_DIMS:
            raise ValueError("a tensor's shape and stride do not fit each other")
        for number in (storage_offset, *shape, *stride):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise ValueError("a tensor's shape, stride or offset is not a valid size")
        charge(TENSOR)
        set_ = object.__setattr__  # this constructor is hot: once a tensor
        set_(self, "storage", storage)
        set_(self, "dtype", dtype)
        set_(self, "storage_offset", storage_offset)
        set_(self, "shape", shape)
        set_(self, "stride", stride)
        set_(self, "requires_grad", requires_grad is True)
        set_(self, "attrs", {} if attrs is None else attrs)
        set_(self, "kind", kind)

    def replace(self, **changes: Any) -> TensorRef:
        """Return a copy with some fields changed."""
        return TensorRef(**{name: getattr(self, name) for name in TensorRef.__slots__} | changes)

    def __repr__(self) -> str:
        return f"<tensor {self.dtype} {list(self.shape)}>"


FAULTS = (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError)  # errors of another layout


class Held(list[Any]):
    """Stand-in that keeps the state BUILD hands it as its only element: no Python call per object.

    A million chunks make three million of these, so ``__setstate__`` is ``list.append`` itself.
    """

    __slots__ = ()
    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class ByClass(Mapping[tuple[str, str], object]):
    """(module, name) → stand-in class, for classes of these names in any module.

    Frameworks bring copies of each other's classes, and move their own from module to module; their state stays the
    same. Classes of any other name become opaque leaves, as everywhere.

    The classes are created anew for each load, so a hostile BUILD on one cannot outlive its pickle.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._made = {name: type(name, (Held,), {"__slots__": ()}) for name in names}

    def __getitem__(self, key: tuple[str, str]) -> object:
        return self._made[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (("*", name) for name in self._made)

    def __len__(self) -> int:
        return len(self._made)


def not_run(foreign: Iterable[str]) -> str:
    """Return the end of a message on a pickle that names globals from outside torch; empty if it names none."""
    names = sorted(name for name in foreign if not name.startswith("torch."))[:3]
    return f"; it names the foreign globals {names}, which were not run" if names else ""


def state_of(value: object, names: Iterable[str], what: str, foreign: set[str]) -> Any:
    """Return the state of a decoded root object.

    Args:
        names: classes that it may be of.
        foreign: globals that the pickle names and that were not run, for the message.

    Raises:
        CorruptError: it is something else.
    """
    if not isinstance(value, Held) or type(value).__name__ not in names:
        raise CorruptError(f"{what} contains {short(value)} instead of checkpoint metadata{not_run(foreign)}")
    return value[0] if value else {}
