"""Sentences of a report: each states what was measured, counts what it names, and comes before what depends on it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.test_doctor_odd_facts import Run
from workbench.views.doctor import diagnosis_text


def messages(found: Any, rule: str) -> list[str]:
    return [one.message for one in found if one.rule == rule]


def rows(found: Any) -> list[str]:
    """Return the names of the rows of the first cause on the first screen, in their order."""
    names = [line[2:12].strip() for line in diagnosis_text(found).splitlines() if line[:2] == "  " and line[2] != " "]
    return [name for name in names if name not in ("before", "echo", "after")]


def test_counters_that_stood_still_and_slow_ones_are_two_sentences(tmp_path):
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    run.train(10)
    for number, count in {0: 30, 2: 33, 3: 34}.items():
        run.optimizer.state[run.optimizer.param_groups[0]["params"][number]]["step"].fill_(count)
    found = messages(wb.doctor(one, run.save(tmp_path / "b.pt", step=40)), "P01")
    assert found[0].startswith("1 of 4 of the optimizer's counters did not advance in 10 updates")
    assert found[1].startswith("2 of 4 of the optimizer's counters advanced by 3 … 4 instead of 10")


@pytest.mark.parametrize("advanced", [True, False])
def test_counts_that_advance_are_no_settings(tmp_path, advanced):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, ema_config={"num_updates": 10}, args={"total_updates": 10})
    by = 1 if advanced else 5
    held = {"ema_config": {"num_updates": 10 + by}, "args": {"total_updates": 10 + by}}
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=11, **held))
    assert bool(messages(found, "P52") or messages(found, "R12")) is not advanced, found.verdict


def test_a_question_makes_no_error_of_what_is_also_another_fault(tmp_path):
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for weight in (run.model[0].weight, *run.model[3].parameters()):
        weight.detach().copy_(torch.randn_like(weight) / 4)
    held = {"model": run.model.state_dict(), "optimizer": deepcopy(run.optimizer.state_dict()), "step": 20}
    for number in (6, 7):  # a new layer, without state
        del held["optimizer"]["state"][number]
    torch.save(held, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    asked = {cause.severity for cause in found.causes if cause.question}
    assert (found.causes[0].severity, found.causes[0].question, asked) == ("error", "", {"warn"}), found.verdict
    assert found.causes[0].tensors == ("0.weight",)


@pytest.mark.parametrize("asked", [True, False])
def test_what_follows_a_question_comes_after_it(tmp_path, asked):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    if asked:
        run.fresh()
    else:
        run.model[0].weight.detach().normal_()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert bool(found.causes[0].question) is asked
    last = ["sure", "otherwise", "do"] if asked else ["expect", "do", "sure"]
    assert rows(found)[-3:] == last


def test_changed_settings_are_named_in_the_title(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.optimizer.param_groups[0]["eps"] = 1e-6
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert (
        found.causes[0].title == "Settings of the run changed: eps changed from 1e-08 to 1e-06 in 1 of 1 param groups."
    )


def test_moments_of_another_run_are_one_sentence(tmp_path):
    run, other = Run().train(20), Run()
    torch.manual_seed(1)
    other.train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))
    (found,) = messages(wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)), "R09")
    assert found.startswith("exp_avg and exp_avg_sq of 4 of 4 parameters have different values")


def test_rounded_numbers_are_said_to_be_those_of_moments(tmp_path):
    run = Run().train(40)
    one = run.save(tmp_path / "a.pt", step=40)
    for state in run.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].bfloat16().float()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=40))
    assert "of the numbers in exp_avg and exp_avg_sq of '0.weight'" in messages(found, "S10")[0]
    assert found.causes[0].damage == ("no loss shows it",)


@pytest.mark.parametrize(("frozen", "beta"), [(True, 0.95), (False, 0.95), (False, 0.999)])
def test_a_clip_bounds_the_second_moments_of_the_same_updates(tmp_path, frozen, beta):
    """Those of frozen parameters stay large, and of another β2 no bound is known."""
    run = Run().train(60)
    total = sum(float(state["exp_avg_sq"].sum()) for state in run.optimizer.state.values())
    clip = (total / (1 - 0.95**60)) ** 0.5
    one = run.save(tmp_path / "a.pt", step=60, args={"clip_grad": clip})
    run.optimizer.param_groups[0]["betas"] = (0.9, beta)
    states = list(run.optimizer.state.values())
    for state in states:
        state["step"] += 1
        state["exp_avg_sq"] *= 1.2
    if frozen:
        for state in states[1:]:
            state["exp_avg_sq"] /= 2
        states[0]["step"] -= 1
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=61, args={"clip_grad": clip}))
    assert bool(messages(found, "S19")) is (not frozen and beta == 0.95)


def test_moments_that_fell_below_their_floor_measure_no_gradients(tmp_path):
    run = Run().train(60)
    one = run.save(tmp_path / "a.pt", step=60)
    states = list(run.optimizer.state.values())
    for number, state in enumerate(states):
        state["step"] += 1
        state["exp_avg_sq"] *= 30.0 if number == 1 else 0.1
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=61))
    assert not messages(found, "P30") and "did not continue" in found.not_checked["P30"]


def test_moments_of_a_shifted_line_are_one_fault(tmp_path):
    run = Run().train(60)
    one = run.save(tmp_path / "a.pt", step=60)
    states = list(run.optimizer.state.values())
    for name in ("exp_avg", "exp_avg_sq"):
        line = torch.cat([state[name].flatten() for state in states]).roll(24)
        parts = line.split([state[name].numel() for state in states])
        for state, part in zip(states, parts, strict=True):
            state[name] = part.view_as(state[name]).clone()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=60))
    assert [(cause.cause, cause.affected) for cause in found.causes] == [("E7", 4)], found.verdict


def test_an_older_save_is_named_as_such(tmp_path):
    run = Run().train(20)
    old = deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    one = run.train(10).save(tmp_path / "a.pt", step=30)
    run.model.load_state_dict(old[0])
    run.optimizer.load_state_dict(old[1])
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=30))
    assert found.causes[0].title == "The weights and the optimizer's state are those of an older save."
    assert found.causes[0].remedy.startswith("check which save the load opened")


def test_buffers_of_a_layer_of_an_older_save_are_part_of_it(tmp_path):
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))})
    for layer in run.model["layers"]:
        layer.register_buffer("seen", torch.zeros(8))
    run.fresh()

    def train(updates: int) -> None:
        for _ in range(updates):
            x = y = torch.randn(8, 16)
            for layer in run.model["layers"]:
                y = layer(y).tanh()
                layer.seen += torch.randn(8) * 0.01 + 1
            run.optimizer.zero_grad()
            (y - x.roll(1, 1)).square().mean().backward()
            run.optimizer.step()

    train(20)
    old = deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    train(10)
    one = run.save(tmp_path / "a.pt", step=30)
    held = {"model": run.model.state_dict(), "optimizer": deepcopy(run.optimizer.state_dict()), "step": 30}
    held["model"] |= {name: value for name, value in old[0].items() if ".1." in name}
    held["optimizer"]["state"] |= {number: old[1]["state"][number] for number in (2, 3)}
    torch.save(held, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    assert [(cause.cause, cause.affected) for cause in found.causes] == [("G6", 3)], found.verdict


def test_a_rate_that_an_argument_declares_is_asked_about_once(tmp_path):
    def save(path: Path, lr: float) -> Path:
        run.optimizer.param_groups[0]["lr"] = lr
        schedule = {"base_lrs": [lr], "last_epoch": 20, "_last_lr": [lr]}
        return run.save(path, step=20, scheduler=schedule, args={"lr": lr})

    run = Run().train(20)
    one = save(tmp_path / "a.pt", 1e-3)
    verdict = wb.doctor(one, echo=save(tmp_path / "echo.pt", 5e-4)).verdict
    assert verdict.count("?") == 1 and "lr 0.001 → 0.0005" in verdict


def test_numbers_are_written_alike(tmp_path):
    run = Run().train(20)
    scaler = {"scale": 2.0**20, "_growth_tracker": 3, "growth_interval": 2000}
    one = run.save(tmp_path / "a.pt", step=20, scaler=scaler)
    echo = run.save(tmp_path / "echo.pt", step=20, scaler=scaler | {"scale": 65536.0, "_growth_tracker": 0})
    found = wb.doctor(one, echo=echo)
    assert messages(found, "R11") == ["the loss scale was 1,048,576 and is 65,536 (scaler.scale)"]


def test_state_of_some_parameters_is_not_all_of_it(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    held = {"model": run.model.state_dict(), "optimizer": deepcopy(run.optimizer.state_dict()), "step": 20}
    del held["optimizer"]["state"][3]
    torch.save(held, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    assert found.causes[0].title == "The optimizer state of some parameters was not restored."
