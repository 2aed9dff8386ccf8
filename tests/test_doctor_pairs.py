"""Faults of pairs by construction: `tests.lab.grid_pairs`, some of its cells, and all of them if slow tests run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from tests.lab.grid_pairs import CELLS, EVERY, Cell, Made, healthy, made, started, told

BY_ID = {cell.id: cell for cell in CELLS}
#: One cell or two of each kind of law.
SOME = (
    "sgd/weights/others",
    "lion/weights/zero@shard",
    "sgd/weights/doubled",
    "rmsprop/weights/rounded",
    "adafactor/weights/initial@one",
    "sgd/first/rows",
    "lion/first/zero@shard",
    "adamw/first/others",
    "adamw/buffers/initial@layer",
    "rmsprop/updates/optimizer-repeated",
    "sgd/trainer/ahead",
    "adamw-mixed/masters/absent",
)


@pytest.mark.parametrize("id", SOME)
def test_a_fault_is_named_one_update_later(id: str) -> None:
    one = made(BY_ID[id], 1)
    found = told(one)
    assert one.shown
    assert found.causes and found.causes[0].cause in BY_ID[id].causes, str(found)


@pytest.mark.parametrize("kind", EVERY)
def test_a_healthy_pair_has_no_cause(kind: str) -> None:
    found = told(Made(None, 1, started(kind), healthy(kind, 1, 500)))
    assert not [one for one in found.causes if one.severity != "info"], str(found)


@pytest.mark.slow
def test_most_cells_are_named_one_update_later() -> None:
    """The goal of docs/doctor_accuracy.md, over all cells that the files show; that for 20 updates is not reached."""

    def right(cell: Cell) -> bool | None:
        one = made(cell, 1)
        if not one.shown:
            return None
        found = told(one)
        return bool(found.causes) and found.causes[0].cause in cell.causes

    named = [one for cell in CELLS if 1 in cell.ks and (one := right(cell)) is not None]
    assert sum(named) >= 0.85 * len(named)
