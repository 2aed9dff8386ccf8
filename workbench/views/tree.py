"""Names as a tree of modules, repeats folded: a transformer of 80 layers fits on a screen.

Siblings with integer names and equal subtrees (names, shapes, dtypes) are folded into one::

    layers.0.wq.weight   (64, 64)
    layers.1.wq.weight   (64, 64)      ─▶      layers.[0-2]
    layers.2.wq.weight   (64, 64)                wq.weight    ×3   [64, 64] bf16   24 KiB

Equality is decided by interning: the number of a subtree is that of the tuple (names and numbers of its children), so
the work is linear in the names. A module with a single child is joined with it (``wq.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.views.names import safe
from workbench.views.units import ranges

ITSELF = "(itself)"  #: a tensor whose name is also that of a module
DEPTH = 24  #: levels of a name that become modules; deeper levels stay one name


@dataclass(frozen=True, slots=True)
class Node:
    """A module or a tensor, or several equal ones.

    Attributes:
        name: safe to print; relative to the parent (can be empty); ``layers.[0-31]`` for folded repeats.
        times: number of places this node represents, including repeats of its parents.
        tensors: number of tensors below, including repeats; equals ``times`` for a tensor.
        nbytes: their bytes, including repeats.
        shape, dtype: of a tensor; ``None`` for a module.
        children: empty for a tensor.
    """

    name: str
    times: int
    tensors: int
    nbytes: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    children: tuple[Node, ...] = ()


def build(
    keys: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], nbytes: Sequence[int]
) -> tuple[Node, ...]:
    """Return the top-level modules, in the order of the names."""
    root: dict[Any, Any] = {}
    homes: dict[str, dict[Any, Any]] = {}  # module → its dict: the name of each module is split once
    for position, key in enumerate(keys):
        dot = key.rfind(".")
        home = root if dot < 0 else homes.get(key[:dot])
        if home is None:
            home = homes[key[:dot]] = _descend(root, key[:dot].split(".", DEPTH - 1))
        leaf = key[dot + 1 :]
        if leaf in home:  # a tensor "a" next to "a.b": it goes inside under None, which is not a possible name
            home[leaf][None] = position
        else:
            home[leaf] = position
    return _Builder(shapes, dtypes, nbytes).children(root, 1)


def walk(nodes: Sequence[Node], depth: int = 0) -> Iterator[tuple[int, Node]]:
    """Yield every node with its depth, parents first."""
    for node in nodes:
        yield depth, node
        yield from walk(node.children, depth + 1)


def _descend(node: dict[Any, Any], parts: list[str]) -> dict[Any, Any]:
    for part in parts:
        inner = node.get(part)
        if not isinstance(inner, dict):
            inner = node[part] = {} if inner is None else {None: inner}
        node = inner
    return node


class _Builder:
    """Convert raw trees (a dict per module, a position per tensor) to nodes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], nbytes: Sequence[int]) -> None:
        self._shapes, self._dtypes, self._nbytes = shapes, dtypes, nbytes
        self._interned: dict[Any, int] = {}
        self._tensors = [self._intern(what) for what in zip(shapes, dtypes, strict=True)]
        self._modules: dict[int, int] = {}  # id of a raw module → its number; the raw tree lives as long as this

    def children(self, node: dict[Any, Any], times: int) -> tuple[Node, ...]:
        return tuple(self._node(name, child, times * repeats) for name, child, repeats in self._groups(node))

    def _node(self, name: str, node: Any, times: int) -> Node:
        if not isinstance(node, dict):
            size = self._nbytes[node] * times
            return Node(name, times, times, size, self._shapes[node], self._dtypes[node])
        inside = self.children(node, times)
        if len(inside) == 1 and inside[0].name != ITSELF:
            only = inside[0]
            joined = f"{name}.{only.name}"
            return Node(joined, only.times, only.tensors, only.nbytes, only.shape, only.dtype, only.children)
        return Node(name, times, sum(c.tensors for c in inside), sum(c.nbytes for c in inside), children=inside)

    def _groups(self, node: dict[Any, Any]) -> Iterator[tuple[str, Any, int]]:
        """Return the children: printed name, first of its kind, count. Equal ones take the place of the first."""
        alike: dict[int, list[int]] = {}
        numbered = {part for part in node if part is not None and _NUMBER(part)}
        for part in numbered:
            alike.setdefault(self._number(node[part]), []).append(int(part))
        for part, child in node.items():
            if part not in numbered:
                yield ITSELF if part is None else safe(part), child, 1
            elif members := alike.pop(self._number(child), None):
                members.sort()
                yield str(members[0]) if len(members) == 1 else f"[{ranges(members)}]", child, len(members)

    def _number(self, node: Any) -> int:
        if not isinstance(node, dict):
            return self._tensors[node]
        known = self._modules.get(id(node))
        if known is None:
            known = self._intern(frozenset((part, self._number(child)) for part, child in node.items()))
            self._modules[id(node)] = known
        return known

    def _intern(self, what: Any) -> int:
        return self._interned.setdefault(what, len(self._interned))


_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}").fullmatch
