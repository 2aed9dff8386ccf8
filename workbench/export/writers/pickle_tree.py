"""The content of a pickle as a tree: classes, instances and calls by name, for ``pickled.dumps``.

::

    Global("torch", "Size")                         GLOBAL / STACK_GLOBAL
    Call(Global("torch", "Size"), ((4, 8),))        … (4, 8) TUPLE1 REDUCE
    Instance(Global("m", "Chunk"), {"offsets": …})  … EMPTY_TUPLE NEWOBJ {…} BUILD
    Persistent(("storage", …))                      … BINPERSID

Hundreds of thousands of records are :class:`PickleRow` of one :class:`PickleForm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Global(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str


class PickleCall(NamedTuple):
    """The result of a function or class for arguments."""

    function: Global
    args: tuple[Any, ...]


class Instance(NamedTuple):
    """An object created without arguments, then given a state, unless that is ``None``."""

    cls: Global
    state: Any = None


class Pairs(NamedTuple):
    """A dict whose keys may be any of these."""

    items: list[tuple[Any, Any]]


class Opcodes(NamedTuple):
    """Opcodes that make one value and do not touch the memo."""

    data: bytes


class Hole(NamedTuple):
    """A place in a form."""

    number: int


class PickleForm:
    """An instance or a call with holes, for many rows. A hole holds a number or a text."""

    def __init__(self, tree: Instance | PickleCall) -> None:
        self.tree = tree


class PickleRow(NamedTuple):
    """A form filled in; ``values[number]`` goes into a hole."""

    form: PickleForm
    values: tuple[int | str, ...]


class Persistent(NamedTuple):
    """The value that the reader's ``persistent_load`` returns for an id."""

    id: tuple[Any, ...]


def filled(tree: Any, values: tuple[int | str, ...]) -> Any:
    """Return a form's tree with values in its holes."""
    if isinstance(tree, Hole):
        return values[tree.number]
    if isinstance(tree, dict):
        return {key: filled(one, values) for key, one in tree.items()}
    if isinstance(tree, PickleCall):
        return PickleCall(tree.function, filled(tree.args, values))
    if isinstance(tree, Instance):
        return Instance(tree.cls, filled(tree.state, values))
    if type(tree) is tuple:
        return tuple(filled(one, values) for one in tree)
    return tree
