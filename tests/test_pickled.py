"""Pickles of ours against CPython's pickler of the real objects: the same opcodes, frames apart."""

from __future__ import annotations

import argparse
import collections
import pickle
import pickletools

import pytest

from workbench.export.writers.pickle_tree import (
    Global,
    Hole,
    Instance,
    Opcodes,
    Pairs,
    PickleCall,
    PickleForm,
    PickleRow,
)
from workbench.export.writers.pickled import dumps

NAMESPACE = Global("argparse", "Namespace")
ORDERED = Global("collections", "OrderedDict")


def opcodes(data: bytes) -> list[tuple[str, object]]:
    return [(op.name, arg) for op, arg, _ in pickletools.genops(data) if op.name != "FRAME"]


def long_text(number: int) -> str:
    return f"é{number}" * 100


VALUES = [
    None,
    [True, False, 0, 255, 256, 65535, 65536, -1, (1 << 31) - 1, 1 << 31, -(1 << 31) - 1, 1 << 200, 0.1, -0.0],
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], {}, {"a": 1}],
    ["", "a", "é\ud800", long_text(3)],
    list(range(2500)),
    {f"k{n}": n for n in range(2001)},
]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_plain_values_are_pickled_as_cpython_does(value, protocol):
    assert opcodes(dumps(value, protocol)) == opcodes(pickle.dumps(value, protocol))


def test_bytes():
    value = [b"", b"a" * 255, b"a" * 256]
    assert pickle.loads(dumps(value)) == value
    with pytest.raises(TypeError, match="bytes need protocol 4"):
        dumps(value, 2)


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_are_pickled_as_cpython_does_without_importing_their_classes(protocol):
    shared = (1, 2)
    real = [argparse.Namespace(a=shared, b="x"), collections.OrderedDict(), argparse.Namespace(a=shared)]
    tree = [Instance(NAMESPACE, {"a": shared, "b": "x"}), PickleCall(ORDERED, ()), Instance(NAMESPACE, {"a": shared})]
    assert opcodes(dumps(tree, protocol)) == opcodes(pickle.dumps(real, protocol))
    missing = dumps(Instance(Global("no.such.module", "Thing"), {"x": 1}), protocol)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(missing)


def test_rows_are_what_their_forms_say_in_full():
    """Names that are new in a row are memoised at their places, so that what follows still finds its own."""
    form = PickleForm(
        Instance(NAMESPACE, {"name": Hole(0), "size": PickleCall(Global("builtins", "tuple"), ((Hole(1), 7),))})
    )
    rows = [(f"n{n // 3}", n * 100) for n in range(300)]
    made = [PickleRow(form, row) for row in rows]
    tree = [*made, "n5", "end", "end", made[0], made[299]]
    full = [
        Instance(NAMESPACE, {"name": a, "size": PickleCall(Global("builtins", "tuple"), ((b, 7),))}) for a, b in rows
    ]
    assert dumps(tree) == dumps([*full, "n5", "end", "end", full[0], full[299]])
    found = pickle.loads(dumps(tree))
    assert [(one.name, one.size) for one in found[:300]] == [(a, (b, 7)) for a, b in rows]
    assert found[300:303] == ["n5", "end", "end"] and found[303] is found[0] and found[304] is found[299]
    with pytest.raises(TypeError, match="rows need protocol 4"):
        dumps(tree, 2)


def test_keys_that_are_objects_and_opcodes_of_others():
    tree = Pairs([(PickleCall(Global("builtins", "frozenset"), ([1, 2],)), Opcodes(b"\x8f(K\x01\x90")), ("b", 2)])
    assert pickle.loads(dumps(tree)) == {frozenset((1, 2)): {1}, "b": 2}


def test_what_it_does_not_know_is_refused():
    with pytest.raises(TypeError, match="a set cannot be written into this pickle"):
        dumps([{1}])
