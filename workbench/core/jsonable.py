"""Convert any decoded object to plain JSON types, with bounded nodes, depth and text, safe against cycles.

::

    TensorRef                       {"type": "tensor", "dtype": "float32", "shape": [4, 6]}
    my.lib.Config, kept as written  {"type": "my.lib.Config", "state": {"width": 3}}
    a list of a million numbers     [0, 1, 2, …, "… 900,001 more"]
    nan, b"…", (1, 2) as a key      "nan", {"type": "bytes", …}, "(1, 2)"

A pickle of 200 bytes can describe a list with 2**60 paths, or one that contains itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from workbench.core.pickles.standins import DTypeRef, Inert, Opaque, TensorRef, short
from workbench.core.words import plural
from workbench.errors import UnsafeError

LISTED = 2_000_000  #: texts that are listed, times their axes
TEXT, ARRAY = 10_000, 1000  # characters of a string and elements of an array that are shown


def finite(value: float) -> float | str:
    """Return a float, or ``"nan"``, ``"inf"`` or ``"-inf"``, which JSON lacks; ``null`` means unknown."""
    return value if math.isfinite(value) else str(value)


def jsonable(value: object, *, max_nodes: int = 100_000, max_depth: int = 64) -> object:
    """Convert any decoded value to plain JSON types, bounded and safe against cycles.

    Omitted parts are replaced by a description.

    Numbers, text, lists and dicts are unchanged; other values become a dict with a ``"type"``, or a word.
    Non-finite floats become ``"nan"``, ``"inf"``, ``"-inf"``; keys that are not text become their bounded
    repr.
    """
    return _Json(max_nodes, max_depth).render(value, max_depth)


def check_listed(shape: Sequence[int], what: str) -> None:
    """Raise UnsafeError if elements in nested lists would take far more memory than they do in a file."""
    if (count := prod(shape)) * max(len(shape), 1) > LISTED:
        raise UnsafeError(
            f"{what} has {plural(count, 'text')} in {len(shape)} axes, more than are listed; they were not read"
        )


def nested(values: Sequence[object], shape: Sequence[int], *, fortran: bool = False) -> object:
    """Return elements in row-major order (or the reverse) as nested lists."""
    found = np.empty(len(values), object)
    found[:] = values
    return (found.reshape(tuple(shape)[::-1]).T if fortran else found.reshape(shape)).tolist()


class _Json:
    def __init__(self, nodes: int, depth: int) -> None:
        self.left = nodes
        self.depth = depth
        self.open: set[int] = set()  # containers being rendered: meeting one again is a cycle

    def render(self, value: object, depth: int) -> object:
        self.left -= 1
        if value is None or type(value) is bool:
            return value
        if type(value) is int:
            return value if abs(value) < 1 << 256 else short(value)
        if type(value) is float:
            return finite(value)
        if type(value) is str:
            self.left -= len(value[:TEXT]) >> 6  # long text is not one node
            text = value if len(value) <= TEXT else f"{value[:TEXT]}… {len(value) - TEXT:,} more"
            return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates are not valid JSON text
        if isinstance(value, np.generic):
            return (
                self.render(value.item(), depth)
                if value.dtype.kind in "biufSU" and value.dtype != np.longdouble
                else str(value)
            )
        if isinstance(value, (bytes, bytearray)):
            return {"type": "bytes", "length": len(value), "start": short(bytes(value[:32]), 200)}
        if isinstance(value, (Inert, type, complex, range, slice)):
            return self._leaf(value, depth)
        if id(value) in self.open:
            return "… the object that contains this one"
        if depth <= 0:
            return f"… nested deeper than {self.depth}"
        if self.left <= 0:
            return "… more"
        self.open.add(id(value))
        try:
            return self._container(value, depth - 1)
        finally:
            self.open.discard(id(value))

    def _leaf(self, value: object, depth: int) -> object:
        if isinstance(value, TensorRef):
            leaf: dict[str, object] = {"type": "tensor", "dtype": value.dtype, "shape": list(value.shape)}
            if value.kind:
                leaf["class"] = self.render(value.kind, 0)
            if value.attrs and depth > 0:
                leaf["attributes"] = self.render(value.attrs, depth - 1)
            return leaf
        if isinstance(value, DTypeRef):
            return f"torch.{value.name}"
        return short(value)

    def _container(self, value: object, depth: int) -> object:
        if isinstance(value, dict):
            return self._pairs(value.items(), len(value), depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._list(value, len(value), depth)
        if isinstance(value, np.ndarray):
            refused = getattr(value, "refused", None)
            if refused is not None:
                return {"type": "numpy.ndarray, not decoded", "what": short(refused)}
            shown = self._list(value.reshape(-1)[: min(value.size, ARRAY)], value.size, depth)
            return {
                "type": "numpy.ndarray",
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "values": shown,
            }
        if isinstance(value, Opaque):
            leaf: dict[str, object] = {"type": value.name}
            for name in ("args", "kwargs", "state", "items"):
                if part := getattr(value, name):
                    leaf[name] = self.render(part, depth)
            if value.pairs:
                leaf["pairs"] = self._pairs(value.pairs, len(value.pairs), depth)
            return leaf
        return short(value)

    def _list(self, items: Iterable[object], total: int, depth: int) -> list[object]:
        shown: list[object] = []
        for item in items:
            if self.left <= 0:
                break
            shown.append(self.render(item, depth))
        if len(shown) < total:
            shown.append(f"… {total - len(shown):,} more")
        return shown

    def _pairs(self, pairs: Iterable[tuple[object, object]], total: int, depth: int) -> dict[str, object]:
        shown: dict[str, object] = {}
        done = 0
        for key, item in pairs:
            if self.left <= 0:
                break
            text = str(self.render(key, 0)) if type(key) is str else short(key)
            if text in shown:  # 1 and '1' are two keys
                text = f"{text} (key {done + 1:,})"
            shown[text] = self.render(item, depth)
            done += 1
        if done < total:
            shown["…"] = f"{total - done:,} more"
        return shown
