"""Faults beside innocent changes: `tests.lab.crossed`, some of its cases, and many if slow tests run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from tests.lab.accuracy import Trial, tried
from tests.lab.crossed import drawn

MANY = range(5_000, 5_400)  #: seeds that no rule was made with


def told(seed: int, *ways: str, control: bool = False) -> Trial:
    return tried(drawn(seed, control), seed, (), ways, 20)


def share(way: str) -> float:
    found = [one for one in (told(seed, way) for seed in MANY) if not one.failed and one.shows(way)]
    assert len(found) > len(MANY) // 2
    return sum(one.outcome(way) == "right" for one in found) / len(found)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "least"), [("echo", 0.93), ("pair1", 0.85), ("pair20", 0.7)])
def test_most_faults_are_named_beside_a_change(way: str, least: float) -> None:
    assert share(way) >= least


@pytest.mark.slow
def test_no_change_alone_is_an_error() -> None:
    found = [told(seed, "echo", "pair1", "pair20", control=True) for seed in MANY]
    assert not [(one.fault, way) for one in found for way, said in one.told.items() if said.error or said.crash]
