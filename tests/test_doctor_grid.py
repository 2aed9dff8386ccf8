"""Faults of a load by construction: what was changed is what the doctor names first (`tests.lab.grid`)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.lab import grid

#: A few cells of every kind of quantity and form; more of them run with the slow tests.
FEW = (
    "adamw/weights/other/layer",
    "adamw/weights/scaled/rank",
    "adamw/buffers/zero/all",
    "adamw/exp_avg/bf16/rank",
    "adamw/exp_avg_sq/squared/one",
    "adamw/exp_avg_sq/noise/kind",
    "adamw/moments/line/all",
    "adamw/exp_avg/absent/all",
    "adamw/counters/half earlier",
    "adamw/schedule/base",
    "sgd/momentum_buffer/zero/all",
    "sgd/momentum_buffer/rows/all",
    "adabelief/exp_avg_var/zero/all",
)


def test_every_cell_has_a_name_of_its_own_and_answers():
    names = [cell.name for cell in grid.cells()]
    assert len(set(names)) == len(names) and set(FEW) <= set(names)
    assert all(cell.answers for cell in grid.cells())


@pytest.mark.parametrize("name", FEW)
def test_the_change_of_a_load_is_named(name, tmp_path):
    cell = next(one for one in grid.cells() if one.name == name)
    found = grid.judge(cell, tmp_path)
    assert found is not None and found.right, found and found.line()


@pytest.mark.parametrize("cell", [one for one in grid.healthy_cells() if one.base == "adamw"], ids=lambda one: one.name)
def test_a_load_that_changes_nothing_is_no_error(cell, tmp_path):
    found = grid.judge(cell, tmp_path)
    assert found is not None and found.right, found and found.line()


@pytest.mark.slow
def test_a_sample_of_the_whole_grid(tmp_path):
    """Of some 4,000 cells every twentieth; ``python -m tests.lab.grid`` runs them all."""
    cells = (*list(grid.cells())[::20], *grid.healthy_cells())
    results = [one for cell in cells if (one := grid.judge(cell, tmp_path))]
    wrong = [one for one in results if not one.right]
    assert not [one.line() for one in wrong if one.sure or (not one.causes and one.cell.kind == "fault")]
    counts = Counter(one.cell.base for one in wrong)
    assert len(wrong) < 0.05 * len(results), (counts, [one.line() for one in wrong[:40]])
