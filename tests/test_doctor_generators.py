"""States of torch's generators, against torch itself, and stored orders of the data; and what a pair shows of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.doctor.facts.generators import WORDS, drawn, seed


def state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


@pytest.mark.parametrize("number", [0, 1, 42, 2**31, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("count", [0, 1, 2, WORDS - 1, WORDS, WORDS + 1, 5 * WORDS, 100_003])
def test_a_generator_knows_how_much_it_has_drawn(number: int, count: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for _ in range(min(count, 3)):
        torch.randint(1000, (1,), generator=generator)  # one word each
    if count > 3:
        torch.randint(1000, (count - 3,), generator=generator)
    found = state(generator)
    assert seed(found) == number
    assert drawn(found) == count


def test_a_state_of_no_seed_has_no_number() -> None:
    words = torch.Generator().manual_seed(3).get_state().clone()
    words[24 + 8] ^= 1
    assert drawn(words.numpy().tobytes()) is None
    assert drawn((7).to_bytes(8, "little") + (12).to_bytes(8, "little")) == 12  # CUDA's seed and offset


def saved(path: Path, step: int, generator: torch.Generator) -> Path:
    torch.manual_seed(0)
    content: dict[str, Any] = {"model": {"weight": torch.randn(8, 8)}, "step": step, "rng_state": generator.get_state()}
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: torch.rand(50, generator=one), ""),
        (lambda one: one, ""),
        (lambda one: torch.rand(5, generator=one.manual_seed(11)), "has drawn 5 numbers since its seed"),
        (lambda one: one.manual_seed(12), "was seeded with 11, and now with 12"),
    ],
)
def test_a_pair_shows_that_a_seed_was_set_again(tmp_path: Path, change: Any, words: str) -> None:
    generator = torch.Generator().manual_seed(11)
    torch.rand(1000, generator=generator)
    before = saved(tmp_path / "step-10.pt", 10, generator)
    change(generator)
    for report in (
        wb.doctor(before, saved(tmp_path / "step-11.pt", 11, generator)),
        wb.doctor(before, echo=saved(tmp_path / "step-10-echo.pt", 10, generator)),
    ):
        found = [sign for cause in report.causes for sign in cause.signs if sign.rule == "P51"]
        if report.subjects[-1].which == "after" and "and now with" in words:
            assert not found  # each epoch may have its own seed
            continue
        assert bool(found) == bool(words)
        assert all(words in one.message and one.severity == "warn" for one in found)
        assert any(one.cause == "C8" for one in report.causes) == bool(words)


def test_a_program_that_sets_a_seed_for_each_step_is_healthy(tmp_path: Path) -> None:
    first, second = (
        saved(tmp_path / f"step-{step}.pt", step, torch.Generator().manual_seed(step)) for step in (10, 11)
    )
    assert not [one for one in wb.doctor(first, second).causes if one.cause == "C8"]


def ordered(path: Path, order: torch.Tensor, epoch: int) -> Path:
    torch.manual_seed(0)
    sampler = {"permutation": order, "epoch": epoch}
    torch.save(
        {"model": {"weight": torch.randn(8, 8)}, "step": int(path.stem.rpartition("-")[2]), "sampler": sampler}, path
    )
    return path


@pytest.mark.parametrize(("later", "epoch", "fires"), [(1, 0, False), (2, 0, True), (2, 1, False)])
def test_an_epoch_keeps_its_order(tmp_path: Path, later: int, epoch: int, fires: bool) -> None:
    first, second = (torch.randperm(100, generator=torch.Generator().manual_seed(one)) for one in (1, later))
    report = wb.doctor(ordered(tmp_path / "step-10.pt", first, 0), ordered(tmp_path / "step-11.pt", second, epoch))
    assert any(one.cause == "C7" for one in report.causes) == fires


def test_a_damaged_order_is_not_called_another_order(tmp_path: Path) -> None:
    order = torch.arange(100).flip(0)
    before, after = ordered(tmp_path / "step-10.pt", order, 0), ordered(tmp_path / "step-11.pt", order, 0)
    damaged = after.read_bytes()
    at = damaged.index(order.numpy().tobytes())
    after.write_bytes(damaged[:at] + bytes(8) + damaged[at + 8 :])
    assert not [one for one in wb.doctor(before, after).causes if one.cause == "C7"]
