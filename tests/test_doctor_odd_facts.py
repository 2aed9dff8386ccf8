"""Facts that look like a fault and are none, each beside the fault that it looks like; and numbers that are none."""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from workbench.cli import main
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.numbers import betas_of, number, step_of
from workbench.doctor.ledger.rows import LedgerLeg, Row, Status
from workbench.errors import UsageError, WorkbenchError

HUGE = 10**400
NAN = float("nan")


class Run:
    """A small model that trains by itself; ``save`` writes what a script writes."""

    def __init__(self, *, frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        self.fresh()
        self.schedule: Any = None
        self.freeze(frozen)

    def fresh(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def freeze(self, frozen: bool) -> None:
        self.model[0].weight.requires_grad_(not frozen)

    def train(self, updates: int) -> Run:
        for _ in range(updates):
            self.optimizer.zero_grad()
            x = torch.randn(8, 16)
            (self.model(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        return self

    def save(self, path: Path, **more: Any) -> Path:
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **more}
        if self.schedule is not None:
            held["scheduler"] = self.schedule.state_dict()
        torch.save(held, path)
        return path


def grave(found: Any) -> list[tuple[str, str]]:
    return [(one.rule, one.severity) for one in found if one.severity != "info"]


def severities(found: Any, rule: str) -> list[str]:
    return [one.severity for one in found if one.rule == rule]


# ---- steps that are no updates -------------------------------------------------------------------------------------


def test_micro_batches_counted_in_both_files_are_no_reset(tmp_path):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=40)
    two = run.train(5).save(tmp_path / "b.pt", step=60)
    found = wb.doctor(one, two)
    assert grave(found) == [] and severities(found, "S07") == ["info", "info"]
    assert severities(wb.doctor(one), "S07") == ["warn"]  # alone it may be a reset at 30


@pytest.mark.parametrize(("weights", "moments"), [(0, 0), (6, 6), (0, 6), (-3, -3)])
def test_the_rows_of_a_resized_table_are_looked_for(tmp_path, weights, moments):
    """Tokens were added, or taken away, at the end or in front; each row is found again, if it is not where it was."""
    torch.manual_seed(0)
    rows, more = 40, 6 if weights >= 0 and moments >= 0 else -3

    def longer(tensor: torch.Tensor, by: int) -> torch.Tensor:
        made = torch.rand(rows + more, *tensor.shape[1:])
        first = max(by, 0)
        made[first : first + rows] = tensor[max(-by, 0) :][: rows + min(more, 0)]
        return made

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(rows, 8), "body": torch.nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model["body"](model["embed"](torch.arange(rows))).square().mean().backward()
        optimizer.step()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(held, tmp_path / "a.pt")
    held = deepcopy(held)
    held["model"]["embed.weight"] = longer(held["model"]["embed.weight"], weights)
    for name in ("exp_avg", "exp_avg_sq"):
        held["optimizer"]["state"][0][name] = longer(held["optimizer"]["state"][0][name], moments)
    torch.save(held, tmp_path / "b.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "b.pt")
    assert found.causes[0].cause == "F7"
    assert found.causes[0].severity == ("error" if moments else "warn")
    assert bool(found.causes[0].question) == (not moments)
    moved = [one for one in found if one.rule == "R18"]
    assert [one.evidence["by"] for one in moved] == ([moments] if moments else [])
    assert all((len(one.evidence["roles"]) == 3) == bool(weights) for one in moved)


def test_counters_that_began_anew_and_others_that_stand_still_are_two_facts(tmp_path):
    """A head is begun anew with its state, and another layer is frozen, in one load."""
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.model[2].reset_parameters()
    for weight in run.model[2].parameters():
        del run.optimizer.state[weight]
    run.freeze(True)
    run.optimizer.zero_grad(set_to_none=True)
    two = run.train(2).save(tmp_path / "b.pt", step=22)
    found = wb.doctor(one, two)
    assert severities(found, "P01") == ["warn", "warn"]
    assert ["went from 20 to 2" in one.message for one in found if one.rule == "P01"] == [True, False]
    assert found.causes[0].cause == "A2" and {one.severity for one in found.causes} <= {"warn", "info"}, found.causes


@pytest.mark.parametrize("updates", [0, 3, 9])
@pytest.mark.parametrize("schedule", [True, False])
def test_a_stage_whose_steps_are_counted_anew(tmp_path, updates, schedule):
    """Asked about if the schedule is new, too; whatever the steps are, the optimizer counts the updates since."""

    def begin() -> None:
        run.schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.5, 40)

    run = Run()
    begin()
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    if schedule:
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1e-3
        begin()
    two = run.train(updates).save(tmp_path / "b.pt", step=updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert found.causes[0].cause == "C9", found.causes
    assert found.causes[0].severity == ("warn" if schedule else "error")
    assert ("new stage" in found.causes[0].question) == schedule
    assert not [one for one in found if one.severity == "error" and one.rule in ("P01", "P05", "P03")]


def anew(found: Any) -> bool:
    """A whole optimizer that began anew may be meant: told as a warning with a question, and never certain."""
    first = found.causes[0]
    return (first.cause, first.severity, found.exit_code) == ("B1", "warn", 1) and bool(first.question)


def test_parameters_are_asked_for_by_the_forms_that_broke_a_law():
    forms = {"a": "zero", "b": "moved.layer", "c": "moved.row", "d": "rounded"}
    rows = [Row("train", "param", Status.BEYOND, form, (name,)) for name, form in forms.items()]
    leg = LedgerLeg("train", [*rows, Row("train", "exp_avg", Status.BEYOND, "zero", ("e",))])
    assert leg.hit(["param"]) == set("abcd") and leg.hit(["param", "exp_avg"], "zero") == {"a", "e"}
    assert leg.hit(["param"], "moved.", "rounded") == {"b", "c", "d"}
    assert leg.hit(["param"], "moved") == set() and leg.hit(["absent"], "zero") == set()


def test_a_reset_whose_counters_happen_to_divide_the_step_stays_a_reset(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.fresh()
    two = run.train(5).save(tmp_path / "b.pt", step=25)
    found = wb.doctor(one, two)
    assert severities(found, "S07") == ["warn"] and severities(found, "P01") == ["warn"] and anew(found)
    assert found.ledger.change("train").hit(["step"], "reset") == {"0.weight", "0.bias", "2.weight", "2.bias"}
    accumulating = Run().train(10)
    one = accumulating.save(tmp_path / "c.pt", step=40)
    accumulating.fresh()
    two = accumulating.train(5).save(tmp_path / "d.pt", step=60)
    found = wb.doctor(one, two)
    assert anew(found) and severities(found, "P01") == ["warn"]
    assert {"warn", "error"} & set(severities(found, "S07"))  # 5 updates at step 60 are not as 10 at step 40


def test_one_stray_counter_among_micro_batches_is_found(tmp_path):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=40)
    run.train(5)
    next(iter(run.optimizer.state.values()))["step"].fill_(7.0)
    two = run.save(tmp_path / "b.pt", step=60)
    assert severities(wb.doctor(one, two), "P01") == ["error"]


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "accumulate_grad_batches"])
def test_stated_accumulation_needs_no_second_file(tmp_path, name):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=42, args={name: 4})
    two = run.train(5).save(tmp_path / "b.pt", step=62, args={name: 4})
    assert severities(wb.doctor(one), "S07") == ["info"] and grave(wb.doctor(one, two)) == []
    assert severities(wb.doctor(run.save(tmp_path / "c.pt", step=420, args={name: 4})), "S07") == ["warn"]


@pytest.mark.parametrize(("updates", "step"), [(2, 400), (7, 400), (3, 900)])
def test_few_counted_updates_at_a_late_step_are_told(tmp_path, updates, step):
    path = Run().train(updates).save(tmp_path / "a.pt", step=step)
    assert severities(wb.doctor(path), "S07") == ["warn"]


def test_files_numbered_by_epochs(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "checkpoint_1.pt", epoch=1)
    two = run.train(20).save(tmp_path / "checkpoint_2.pt", epoch=2)
    assert gather(wb.open(one)).step is None
    found = wb.doctor(one, two)
    assert grave(found) == [] and found.exit_code == 0


def test_a_step_that_only_a_name_tells_makes_no_error(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "checkpoint_5.pt")
    two = run.train(20).save(tmp_path / "checkpoint_6.pt")
    found = wb.doctor(one, two)
    assert severities(found, "P01") == ["warn"] and "error" not in dict(map(reversed, grave(found)))
    two = run.save(tmp_path / "stated.pt", step=40)
    run.fresh()
    three = run.train(3).save(tmp_path / "checkpoint_45.pt", step=43)  # its own state tells the step
    found = wb.doctor(two, three)
    assert severities(found, "P01") == ["warn"] and anew(found)


def test_the_step_of_nanogpt(tmp_path):
    run = Run().train(6)
    path = run.save(tmp_path / "ckpt.pt", iter_num=6)
    assert gather(wb.open(path)).step == 6 and grave(wb.doctor(path)) == []
    assert severities(wb.doctor(run.save(tmp_path / "late.pt", iter_num=605)), "S07") == ["warn"]


# ---- numbers that are none -----------------------------------------------------------------------------------------


def _groups(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def put(held: dict[str, Any]) -> None:
        for group in held["optimizer"]["param_groups"]:
            group.update(fields)

    return put


def _counters(value: float) -> Callable[[dict[str, Any]], None]:
    def put(held: dict[str, Any]) -> None:
        for state in held["optimizer"]["state"].values():
            state["step"] = torch.tensor(value)

    return put


ODD: dict[str, Callable[[dict[str, Any]], None]] = {
    "eps nan": _groups(eps=NAN),
    "eps tiny": _groups(eps=1e-300),
    "eps negative": _groups(eps=-1.0),
    "lr huge": _groups(lr=HUGE),
    "lr nan": _groups(lr=NAN),
    "betas huge": _groups(betas=(HUGE, 0.9)),
    "betas 1": _groups(betas=(1.0, 1.0)),
    "betas 0": _groups(betas=(0.0, 0.0)),
    "betas negative": _groups(betas=(-0.5, 2.0)),
    "counters nan": _counters(NAN),
    "counters inf": _counters(float("inf")),
    "counters huge": _counters(1e30),
    "step": lambda held: held.update(step=HUGE),
    "unprintable": lambda held: held.update(args={"lr": 10**5000, "betas": (10**5000, 1)}),
    "scheduler": lambda held: held.update(scheduler={"last_epoch": HUGE, "base_lrs": [NAN], "_last_lr": [HUGE]}),
    "megatron": lambda held: held.update(
        opt_param_scheduler={"max_lr": HUGE, "num_steps": 10**30, "lr_warmup_steps": 0, "lr_decay_style": 7}
    ),
    "args": lambda held: held.update(
        args={
            "lr": HUGE,
            "clip_grad": 1e300,
            "global_batch_size": HUGE,
            "gradient_accumulation_steps": "auto",
            "adam_beta1": 1.0,
            "adam_beta2": 1.0,
            "max_grad_norm": "x",
            "min_lr": HUGE,
        }
    ),
    "batch auto": lambda held: held.update(consumed_samples=7, args={"global_batch_size": "auto"}),
    "scaler": lambda held: held.update(scaler={"scale": HUGE, "_growth_tracker": HUGE}),
    "scaler nan": lambda held: held.update(scaler={"scale": NAN}),
    "samples": lambda held: held.update(consumed_samples=HUGE),
    "epoch": lambda held: held.update(epoch=HUGE),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_are_unknown_and_never_a_traceback(tmp_path, name):
    run = Run().train(3)
    earlier = run.save(tmp_path / "earlier.pt", step=3)
    run.train(2).save(tmp_path / "b.pt", step=5)
    held = torch.load(tmp_path / "b.pt")
    ODD[name](held)
    torch.save(held, tmp_path / "b.pt")
    for given in ((tmp_path / "b.pt",), (earlier, tmp_path / "b.pt")):
        try:
            found = wb.doctor(*given)
        except WorkbenchError:
            continue
        assert found.to_dict() and str(found)


def test_what_a_number_is():
    odd = (NAN, float("inf"), HUGE, True, None, "1", [1])
    assert [number(one) for one in odd] == [None] * len(odd) and number(3) == 3.0
    assert [step_of(one) for one in (-1, 2**63, 5.0, True, HUGE)] == [None] * 5 and step_of(2**63 - 1) == 2**63 - 1
    assert (
        betas_of((0.0, 0.5)) == (0.0, 0.5) and betas_of((0.9, 0.0)) is betas_of((1.0, 0.9)) is betas_of((0.9,)) is None
    )


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 0.0), (-0.1, 0.9), (0.9, NAN), (0.9, 1.0)])
def test_betas_that_no_adam_has_are_refused(tmp_path, betas, capsys):
    path = Run().train(2).save(tmp_path / "a.pt", step=2)
    with pytest.raises(UsageError, match="betas"):
        wb.doctor(path, betas=betas)
    assert main(["doctor", str(path), f"--betas={betas[0]}", str(betas[1])]) == 64
    assert "betas" in capsys.readouterr().err


# ---- schedules of schedules ----------------------------------------------------------------------------------------


def _chained(optimizer: Any) -> Any:
    lrs = torch.optim.lr_scheduler
    return lrs.ChainedScheduler([lrs.LinearLR(optimizer, 0.1, 1, 9), lrs.CosineAnnealingLR(optimizer, 20)])


def _sequential(optimizer: Any) -> Any:
    lrs = torch.optim.lr_scheduler
    parts: Iterable[Any] = [lrs.LinearLR(optimizer, 0.01, 1, 9), lrs.CosineAnnealingLR(optimizer, 20)]
    return lrs.SequentialLR(optimizer, list(parts), [9])


@pytest.mark.parametrize("made", [_chained, _sequential])
def test_the_outermost_schedule_is_the_one_that_counts(tmp_path, made):
    run = Run()
    run.schedule = made(run.optimizer)
    one = run.train(8).save(tmp_path / "a.pt", step=8)
    two = run.train(4).save(tmp_path / "b.pt", step=12)
    assert grave(wb.doctor(one, two)) == [] and gather(wb.open(two)).schedule.count == 12
    run.optimizer.param_groups[0]["lr"] = 3e-3  # by hand: what N6 is for
    assert severities(wb.doctor(run.save(tmp_path / "c.pt", step=12)), "N6") == ["warn"]


# ---- state that appears --------------------------------------------------------------------------------------------


def test_state_of_the_first_update_is_no_rounding(tmp_path):
    run = Run()
    one = run.save(tmp_path / "a.pt", step=0)
    two = run.train(1).save(tmp_path / "b.pt", step=1)
    found = wb.doctor(one, two)
    assert grave(found) == [] and severities(found, "N3") == ["info"]
    assert not {"D4", "D7"} & {one.cause for one in found.causes}


def test_a_parameter_that_is_unfrozen_between_two_saves(tmp_path):
    run = Run(frozen=True)
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    run.freeze(False)
    two = run.train(4).save(tmp_path / "b.pt", step=14)
    found = wb.doctor(one, two)
    assert grave(found) == [] and severities(found, "S07") == ["info"]
    run.optimizer.state[run.model[0].bias]["step"].fill_(2.0)  # this one had state before
    assert ("S07", "warn") in grave(wb.doctor(one, run.save(tmp_path / "c.pt", step=14)))


@pytest.mark.parametrize(("what", "cause"), [("rounded", "D4"), ("gone", "B1")])
def test_moments_of_fewer_bytes_are_told_apart(tmp_path, what, cause):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10)
    run.train(2).save(tmp_path / "b.pt", step=12)
    held = torch.load(tmp_path / "b.pt")
    for state in held["optimizer"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].bfloat16()
    if what == "gone":
        held["optimizer"]["state"] = {}
    torch.save(held, tmp_path / "b.pt")
    found = wb.doctor(one, tmp_path / "b.pt")
    assert severities(found, "N3") == ["warn"] and cause in {one.cause for one in found.causes}


def test_the_counters_tell_how_many_updates_lie_between_where_no_step_is_stored(tmp_path):
    run = Run().train(10)
    one, two = run.save(tmp_path / "a.pt"), run.train(3).save(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert found.exit_code == 0 and found.verdict.startswith("No fault found") and "too many" not in found.verdict
    assert len(found.ledger.change("train").clean(("exp_avg", "exp_avg_sq"))) == 4  # by the laws of three updates
    later = wb.doctor(one, run.train(5).save(tmp_path / "d.pt"))
    assert later.exit_code == 0 and "cannot prove that the resume is right" in later.verdict
    late = wb.doctor(one, run.train(115).save(tmp_path / "c.pt"))
    assert late.exit_code == 0 and "With 123 updates in between, a load is no longer visible" in late.verdict


# ---- counters, positions and rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ({"remaining_steps": 90}, {"remaining_steps": 85}, None),  # contains "ema", but not as a word
        ({"swap": {"count": 9}}, {"swap": {"count": 1}}, None),
        ({"schema": {"version": 9}}, {"schema": {"version": 1}}, None),
        ({"ema": {"num_updates": 10}}, {"ema": {"num_updates": 15}}, None),
        ({"ema": {"num_updates": 10}}, {"ema": {"num_updates": 20}}, "F4"),  # twice in each update
        ({"ema": {"num_updates": 10}}, {"ema": {"num_updates": 5}}, "F4"),
        ({"swa": {"n_averaged": 4}}, {"swa": {"n_averaged": 6}}, None),  # every other update
        ({"swa": {"n_averaged": 4}}, {"swa": {"n_averaged": 2}}, "F4"),
        ({"sampler": {"epoch": 1, "index": 40}}, {"sampler": {"epoch": 2, "index": 3}}, None),
        ({"sampler": {"epoch": 1, "index": 0}}, {"sampler": {"epoch": 1, "index": 0}}, None),  # saved once an epoch
        ({"sampler": {"epoch": 1, "index": 40}}, {"sampler": {"epoch": 1, "index": 40}}, "C6"),
        ({"sampler": {"epoch": 1, "index": 40}}, {"sampler": {"epoch": 1, "index": 5}}, "C6"),
        ({"sampler": {"epoch": 1, "index": 40}}, {"sampler": {"epoch": 0, "index": 45}}, "C6"),
    ],
)
def test_counters_of_averages_and_positions_in_an_epoch(tmp_path, before, after, cause):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, **before)
    two = run.train(5).save(tmp_path / "b.pt", step=15, **after)
    assert [found.cause for found in wb.doctor(one, two).causes] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (lambda step: 1.0 if step < 60 else 0.1, True),  # a tenth at once
        (lambda step: max(0.0, 1 - step / 61), False),  # linear to 0: a third of little
        (lambda step: 1.0 if step % 20 else 0.9, False),
        (lambda step: 0.01 if step < 60 else 1.0, False),  # a cosine with restarts rises to its peak
    ],
)
def test_a_rate_that_falls_at_once_under_a_schedule_without_a_formula(tmp_path, shape, told):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, shape)
    run.train(59)
    one = run.save(tmp_path / "a.pt", step=59)
    two = run.train(1).save(tmp_path / "b.pt", step=60)
    found = wb.doctor(one, two)
    assert bool(severities(found, "P19")) == told and found.exit_code == int(told)


def test_frequencies_are_constants_and_statistics_are_not(tmp_path):
    run = Run().train(30)
    run.model.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 16, 2) / 16))
    run.model.register_buffer("running_mean", torch.randn(16))
    one = run.save(tmp_path / "a.pt", step=30)
    run.train(1).model.running_mean += 0.01
    assert wb.doctor(one, run.save(tmp_path / "b.pt", step=31)).causes == ()
    run.model.inv_freq = run.model.inv_freq.bfloat16().float()
    (found,) = wb.doctor(one, run.save(tmp_path / "c.pt", step=31)).causes
    assert (found.cause, found.severity) == ("A5", "warn") and "inv_freq" in found.tensors


def scaler(tracker: int, scale: float = 2.0**16, interval: int = 2000) -> dict[str, Any]:
    held = {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": interval}
    return {"scaler": {**held, "_growth_tracker": tracker}}


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (scaler(100), scaler(105), None),
        (scaler(100), scaler(5), "D8"),  # neither skipped nor grown: the scale is the same
        (scaler(100), scaler(5, scale=2.0**15), None),  # one was skipped first, and the trainer does not count it
        (scaler(7, interval=10), scaler(2, scale=2.0**17, interval=10), None),
        (scaler(7, interval=10), scaler(5, scale=2.0**14, interval=10), "D8"),  # as if it were 2^14 at the load
        (scaler(1, interval=2), scaler(1, scale=2.0**14, interval=2), "D8"),  # 2^12, and doubled twice
        (scaler(7, interval=10), scaler(3, scale=2.0**14, interval=10), None),  # skipped in between
        ({"consumed_samples": 40}, {"consumed_samples": 60}, None),
        ({"consumed_samples": 40}, {"consumed_samples": 64}, None),  # one update's data is counted elsewhere
        ({"consumed_samples": 40}, {"consumed_samples": 50}, "C6"),  # half of the ranks went on
    ],
)
def test_a_scaler_and_samples_go_on(tmp_path, before, after, cause):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, **before)
    two = run.train(5).save(tmp_path / "b.pt", step=15, **after)
    assert [found.cause for found in wb.doctor(one, two).causes] == ([cause] if cause else [])


def generators(seeds: Iterable[int], drawn: int) -> dict[str, Any]:
    """What four ranks would have drawn since their seeds."""
    states = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        torch.rand(drawn, generator=generator)
        states.append({"torch": generator.get_state()})
    return {"rng_states": states}


def loader(epoch: int, batches: int) -> dict[str, Any]:
    return {"dataloader": {"epoch": epoch, "batches_yielded": batches, "seed": 1}}


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (generators(range(4), 30), generators(range(4), 45), None),
        (generators([7] * 4, 30), generators([7] * 4, 45), None),  # GPUs of one process, seeded alike
        (generators(range(4), 30), generators([0] * 4, 45), "C8"),  # rank 0's were loaded everywhere
        (loader(1, 10), loader(1, 15), None),
        (loader(1, 10), loader(2, 3), None),
        (loader(1, 10), loader(1, 10), "C6"),
        (loader(4, 10), loader(0, 15), "C6"),
    ],
)
def test_generators_of_ranks_and_positions_of_loaders_go_on(tmp_path, before, after, cause):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, **before)
    two = run.train(5).save(tmp_path / "b.pt", step=15, **after)
    assert [found.cause for found in wb.doctor(one, two).causes if found.severity != "info"] == (
        [cause] if cause else []
    )


@pytest.mark.parametrize(("seed", "drawn", "told"), [(3, 70, False), (3, 0, True), (4, 45, True)])
def test_a_generator_is_known_by_its_form_whatever_its_name(tmp_path, seed, drawn, told):
    run = Run().train(10)
    state = generators([3], 45)["rng_states"][0]["torch"]
    one = run.save(tmp_path / "a.pt", step=10, dropout=state)
    later = generators([seed], drawn)["rng_states"][0]["torch"]
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=10, dropout=later))
    assert [cause.cause for cause in found.causes if cause.severity == "warn"] == (["C8"] if told else [])
    assert found.exit_code == int(told)


@pytest.mark.parametrize("kept", [True, False])
def test_a_network_that_generates_is_no_generator(tmp_path, kept):
    run = Run().train(10)
    net = {"random_features": torch.randn(40, 8)}
    one = run.save(tmp_path / "a.pt", step=10, generator=net)
    net = {"random_features": net["random_features"] + (0 if kept else 1)}
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=10, generator=net))
    assert grave(found) == ([] if kept else [("R16", "warn")])


SOURCES = {"web": 34, "code": 5, "math": 6, "stage": 2}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"web": 37, "code": 6, "math": 7, "stage": 2}, False),
        ({"web": 1, "code": 0, "math": 0, "stage": 2}, True),
        ({"web": 4, "code": 6, "math": 7, "stage": 2}, False),  # the end of an epoch of one source
    ],
)
def test_positions_in_several_sources_do_not_fall_together(tmp_path, after, told):
    run = Run().train(44)
    one = run.save(tmp_path / "a.pt", step=44, dataset_state=SOURCES)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=45, dataset_state=after))
    assert [cause.cause for cause in found.causes] == (["C6"] if told else [])
    assert ("data position not compared" in found.verdict) != told


def test_positions_that_the_load_set_to_zero_are_a_matter_of_the_data(tmp_path):
    run = Run().train(44)
    one = run.save(tmp_path / "a.pt", step=44, dataset_state=SOURCES)
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=44, dataset_state=dict.fromkeys(SOURCES, 0)))
    assert [cause.title for cause in found.causes] == ["The data restarted from the beginning."]
    assert "data position not compared" not in found.coverage


@pytest.mark.parametrize("seed", [1234, 4321])
def test_a_seed_of_the_data_among_the_arguments_is_named(tmp_path, seed):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, args={"data_seed": 1234})
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=11, args={"data_seed": seed}))
    told = "The order of the data changed: the data's seed was 1234 and is 4321"
    assert (told in found.verdict) == (seed != 1234) and found.exit_code == 0


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"round": 5}, {"round": 5}, False),
        ({"round": 5}, {"round": 0}, True),
        ({"round": 8}, {"round": 0}, False),  # a cycle of ten updates
        ({"remaining": 5}, {"remaining": 0}, False),
    ],
)
def test_a_number_that_counts_anew(tmp_path, before, after, told):
    run = Run().train(38)
    one = run.save(tmp_path / "a.pt", step=38, outer=before)
    found = wb.doctor(one, run.train(2).save(tmp_path / "b.pt", step=40, outer=after))
    assert grave(found) == ([("P34", "warn")] if told else [])


@pytest.mark.parametrize("lost", [False, True])
def test_tensors_that_are_stored_with_a_count_that_began_anew(tmp_path, lost):
    run = Run().train(38)
    outer = {"round": 5, "momentum": torch.randn(4, 4)}
    one = run.save(tmp_path / "a.pt", step=38, outer=outer)
    outer = {"round": 0, "momentum": torch.zeros(4, 4)} if lost else outer
    found = wb.doctor(one, run.train(2).save(tmp_path / "b.pt", step=40, outer=outer))
    assert [cause.cause for cause in found.causes] == (["A5"] if lost else [])
    assert not lost or "in 'outer', 1 of 1 tensor changed" in found.causes[0].title


@pytest.mark.parametrize("position", [45, 1])
def test_a_position_that_fell_is_no_setting(tmp_path, position):
    run = Run().train(44)
    one = run.save(tmp_path / "a.pt", step=44, dataloader={"batches": 44}, args={"lr": 1e-3})
    run.optimizer.param_groups[0]["lr"] = 5e-4
    two = run.train(1).save(tmp_path / "b.pt", step=45, dataloader={"batches": position}, args={"lr": 5e-4})
    causes = [cause.cause for cause in wb.doctor(one, two).causes]
    assert causes[0] == ("H1" if position == 45 else "C6")


@pytest.mark.parametrize("name", ["n_averaged", "further"])
def test_a_count_in_a_file_beside_the_checkpoint(tmp_path, name):
    run = Run().train(34)
    for folder, step, count in (("a", 34, 5), ("b", 35, 0), ("echo", 34, 0)):
        (tmp_path / folder).mkdir()
        save_file(run.model.state_dict(), tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        torch.save(run.optimizer.state_dict(), tmp_path / folder / "optimizer.pt")
        torch.save({name: torch.tensor(count)}, tmp_path / folder / "swa_state_dict.pt")
        run.train(1)
    paths = [tmp_path / folder for folder in ("a", "b", "echo")]
    found = wb.doctor(paths[0], paths[1])
    assert "'swa_state_dict." in " ".join(one.message for one in found if one.rule == "P34")
    echo = wb.doctor(paths[0], echo=paths[2])
    assert f"swa_state_dict.pt/{name} 5 → 0" in " ".join(one.message for one in echo if one.rule == "R17")


@pytest.mark.parametrize("lost", [False, True])
def test_the_counts_of_an_optimizer_without_moments(tmp_path, lost):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8), torch.randn(32, 8)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def trained(made: Any, updates: int, path: Path, step: int) -> Path:
        def closure() -> torch.Tensor:
            made.zero_grad()
            loss = (model(x) - x.roll(1, 1).tanh()).square().mean()
            loss.backward()
            return loss

        for _ in range(updates):
            made.step(closure)
        torch.save({"model": model.state_dict(), "optimizer": made.state_dict(), "step": step}, path)
        return path

    made = optimizer()
    one = trained(made, 10, tmp_path / "a.pt", 10)
    found = wb.doctor(one, trained(optimizer() if lost else made, 1, tmp_path / "b.pt", 11))
    assert [cause.cause for cause in found.causes] == (["B1"] if lost else [])
    assert not any("lr itself" in words for cause in found.causes for words in cause.damage)


def test_a_position_without_the_data_of_an_update_is_not_compared(tmp_path):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, consumed_samples=43)  # not a multiple of the steps
    two = run.train(1).save(tmp_path / "b.pt", step=11, consumed_samples=43)
    assert "data position not compared" in wb.doctor(one, two).verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_that_became_narrower(tmp_path, dtype):
    run = Run().train(20)
    average = {name: one.clone() for name, one in run.model.state_dict().items()}
    one = run.train(10).save(tmp_path / "a.pt", step=30, ema=average)
    run.train(1)
    later = {name: average[name].lerp(one, 0.01).to(dtype) for name, one in run.model.state_dict().items()}
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=31, ema=later)).causes
    assert [(one.cause, one.title) for one in found] == (
        [] if dtype == torch.float32 else [("D7", "The averaged weights were cast to a narrower type.")]
    )


def test_a_pointer_into_a_ring_begins_anew_and_is_a_buffer(tmp_path):
    run = Run().train(30)
    run.model.register_buffer("queue_ptr", torch.tensor([60]))
    one = run.save(tmp_path / "a.pt", step=30)
    run.model.queue_ptr.zero_()
    echo = run.save(tmp_path / "echo.pt", step=30)
    (found,) = wb.doctor(one, echo=echo).causes
    assert (found.cause, found.tensors) == ("A5", ("queue_ptr",))
    assert wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31)).causes == ()  # the ring may have been full


class Queue(Run):
    """A network, a copy that follows it, and a queue, all of them floats."""

    def __init__(self) -> None:
        super().__init__()
        held = [deepcopy(one) for one in self.model]
        for at, one in enumerate(held):
            self.model.add_module(f"follower{at}", one.requires_grad_(False))
        self.model.register_buffer("queue", torch.randn(64, 8))
        self.model.register_buffer("kept_mask", (torch.rand(32, 16) > 0.5).float())

    def train(self, updates: int) -> Run:
        for _ in range(updates):
            self.optimizer.zero_grad()
            x = torch.randn(8, 16)
            out = self.model[2](self.model[1](self.model[0](x)))
            (out - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
            self.model.queue.copy_(torch.cat([torch.randn(4, 8), self.model.queue[:-4]]))
        return self


@pytest.mark.parametrize("lost", ["queue", "kept_mask", None])
def test_what_the_optimizer_cannot_hold_is_a_buffer(tmp_path, lost):
    run = Queue()
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    if lost == "queue":
        run.model.queue.copy_(torch.randn(64, 8))
    elif lost:
        run.model.kept_mask.fill_(1.0)
    echo = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=30))
    assert [cause.cause for cause in echo.causes] == (["A5"] if lost else [])
    assert "8 of 8 weights" in echo.coverage and "2 of 2 buffers" in echo.coverage
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31))
    assert [cause.cause for cause in found.causes] == (["A5"] if lost else [])


def test_a_weight_that_the_optimizer_no_longer_holds_stays_a_weight(tmp_path):
    run = Run()
    run.model[2].table = torch.nn.Parameter(torch.randn(3, 5))
    run.fresh()
    run.model[2].table.grad = torch.ones(3, 5)
    run.optimizer.zero_grad = lambda: None
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    held = list(run.optimizer.state.items())
    run.optimizer = torch.optim.AdamW([weight for weight, _ in held if weight is not run.model[2].table], lr=1e-3)
    run.optimizer.state.update({weight: state for weight, state in held if weight is not run.model[2].table})
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert "5 of 5 weights" in found.coverage and "buffers" not in found.coverage


def test_most_of_a_model_that_is_frozen_is_no_buffer(tmp_path):
    run = Run()
    run.model[2].prompt = torch.nn.Parameter(torch.randn(4, 4))
    run.optimizer = torch.optim.AdamW([run.model[2].prompt], lr=1e-3)
    run.model[2].prompt.grad = torch.ones(4, 4)
    run.optimizer.step()
    one = run.save(tmp_path / "a.pt", step=1)
    coverage = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=1)).coverage
    assert "5 of 5 weights" in coverage and "buffers" not in coverage


@pytest.mark.parametrize("times", [1, 2])
def test_buffers_of_another_size_are_asked_about(tmp_path, times):
    run = Queue()
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    run.model.queue = torch.cat([run.model.queue] * times)
    title = ["Buffers have another shape."] if times > 1 else []
    echo = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=30))
    assert [cause.title for cause in echo.causes] == title and echo.exit_code == len(title)
    assert "with the same name and shape" in " ".join(one.message for one in echo.ruled_out)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31))
    assert [cause.title for cause in found.causes] == title and found.exit_code == len(title)


@pytest.mark.parametrize("kept", [True, False])
def test_buffers_that_begin_anew_beside_a_fresh_optimizer_are_named(tmp_path, kept):
    run = Run()
    run.model.register_buffer("seen_mean", torch.randn(16))
    run.model.register_buffer("seen_var", torch.rand(16))
    one = run.train(25).save(tmp_path / "a.pt", step=25)
    run.fresh()
    torch.nn.init.normal_(run.model[2].weight)
    if not kept:
        run.model.seen_mean.zero_()
        run.model.seen_var.fill_(1.0)
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=25))
    named = [cause for cause in found.causes if cause.cause == "A5"]
    assert [cause.title for cause in named] == ([] if kept else ["Buffers were not saved or not restored."])
    assert all(set(cause.tensors) == {"seen_mean", "seen_var"} for cause in named)


@pytest.mark.parametrize("lost", [False, True])
def test_warm_restarts_count_their_cycles(tmp_path, lost):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(run.optimizer, 9, T_mult=2)
    one = run.train(25).save(tmp_path / "a.pt", step=25)
    if lost:
        run.schedule.T_cur, run.schedule.T_i = 0, 9
    found = wb.doctor(one, run.train(5).save(tmp_path / "b.pt", step=30)).causes
    assert [one.cause for one in found] == (["C1"] if lost else [])


def test_two_updates_for_each_step_of_the_trainer(tmp_path):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10)
    (found,) = wb.doctor(one, run.train(10).save(tmp_path / "b.pt", step=15)).causes
    assert (found.cause, found.title) == ("C9", "The optimizer counted 2 updates for each step of the trainer.")
    assert {sign.rule for sign in found.signs} <= {"P01", "S07"}  # moments and weights obey the laws of ten updates


def test_a_schedule_that_is_not_stepped_did_not_restart(tmp_path):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 200)
    one = run.train(14).save(tmp_path / "a.pt", step=14)
    held, run.schedule = run.schedule, None
    run.train(20).schedule = held
    (found,) = wb.doctor(one, run.save(tmp_path / "b.pt", step=34)).causes
    assert (found.cause, found.title) == ("C3", "The schedule was not stepped.")


def test_state_is_numbered_anew_where_param_groups_have_other_sizes(tmp_path):
    """torch numbers parameters through all groups; each one's state is right, under another number."""
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    biases, matrices = ([one for one in run.model.parameters() if one.ndim == n] for n in (1, 2))

    def grouped(decayed: list[Any], rest: list[Any]) -> None:
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        held = getattr(run, "optimizer", None)
        run.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        if held is not None:
            run.optimizer.state.update(held.state)

    del run.optimizer
    grouped(matrices, biases)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    grouped([matrices[0], biases[0], matrices[1]], biases[1:])
    echo = run.save(tmp_path / "echo.pt", step=20)
    for later in ({"echo": echo}, {"after": run.train(1).save(tmp_path / "b.pt", step=21)}):
        found = wb.doctor(one, later.get("after"), echo=later.get("echo"))
        assert [cause.cause for cause in found.causes] == ["B7"] and found.causes[0].certainty != "certain"
        leg = found.ledger.change("load" if "echo" in later else "train")
        assert len(leg.clean(["exp_avg", "exp_avg_sq"], leg.seen("exp_avg"))) == 4  # values show who moved


def test_a_part_of_one_tensor_that_was_misread(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    with torch.no_grad():
        run.model[0].weight[6:12] = torch.randn(6, 16) * run.model[0].weight.std()
    (found,) = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes
    assert (found.cause, found.tensors) == ("G10", ("0.weight",))


def test_the_first_screen_names_what_is_affected(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    with torch.no_grad():
        run.model[2].weight.zero_()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert "are zero now" in str(found) and "2.weight" in str(found)


# ---- trainers that change weights and moments themselves, and layers without a gradient ----------------------------


class Table(Run):
    """With a table in which no gradient reaches the last rows; ``then`` is called after each update."""

    def __init__(self, then: Callable[[Table, int], None] | None = None) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(48, 16), *self.model)
        self.then, self.step = then, 0
        self.fresh()

    def fresh(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
        self.optimizer.param_groups[0]["initial_lr"] = 1e-3  # as schedules store it: no rate was higher

    def train(self, updates: int) -> Table:
        for _ in range(updates):
            self.optimizer.zero_grad()
            tokens = torch.arange(self.step, self.step + 8) % 32
            (self.model(tokens) - torch.sin(tokens[:, None] * torch.arange(1.0, 17))).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            if self.then is not None:
                with torch.no_grad():
                    self.then(self, self.step)
        return self

    def saved(self, path: Path) -> Path:
        return self.save(path, step=self.step)

    @property
    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


def centred(run: Table, step: int) -> None:
    run.weights[0].sub_(run.weights[0].mean(0))


@pytest.mark.parametrize("updates", [1, 10])
def test_a_table_that_is_centred_after_each_update_is_asked_about(tmp_path, updates):
    run = Table(centred).train(30)
    one, two = run.saved(tmp_path / "a.pt"), run.train(updates).saved(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert found.exit_code == 1 and "outside the optimizer's update" in found.causes[0].question


def _by_rows(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize(
    ("rounded", "through"),
    [
        (lambda weight: weight.bfloat16().float(), "bfloat16"),
        (lambda weight: weight.to(torch.float8_e4m3fn).float(), "float8_e4m3fn"),
        (_by_rows, "int8"),
    ],
)
def test_a_table_that_was_rounded_in_the_load_stays_an_error(tmp_path, rounded, through):
    run = Table().train(30)
    one = run.saved(tmp_path / "a.pt")
    with torch.no_grad():
        run.weights[0].copy_(rounded(run.weights[0]))
    found = wb.doctor(one, run.train(10).saved(tmp_path / "b.pt"))
    assert (found.causes[0].cause, found.causes[0].severity) == ("D7", "error")
    assert through in next(one.message for one in found if one.rule == "P11")


class Outer:
    """Every fourth update, an outer Nesterov step from the anchor."""

    def __init__(self) -> None:
        self.anchor: list[torch.Tensor] = []

    def __call__(self, run: Table, step: int) -> None:
        if not self.anchor:
            self.anchor = [weight.clone() for weight in run.weights]
            self.speed = [torch.zeros_like(weight) for weight in run.weights]
        if step % 4 == 0:
            for weight, anchor, speed in zip(run.weights, self.anchor, self.speed, strict=True):
                delta = anchor - weight
                speed.mul_(0.9).add_(delta)
                weight.copy_(anchor.sub_(delta + 0.9 * speed, alpha=0.7))


def test_outer_steps_that_lengthen_updates_and_decay_alike_are_asked_about(tmp_path):
    run = Table(Outer()).train(20)
    one, two = run.saved(tmp_path / "a.pt"), run.train(40).saved(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert {"P05", "P11"} <= {one.rule for one in found} and found.exit_code == 1
    assert [one.cause for one in found.causes] == ["C2"] and "outside the optimizer" in found.causes[0].question


@pytest.mark.parametrize(("fault", "cause"), [("fresh", "A2"), ("decay", "B7")])
def test_a_fresh_weight_and_another_decay_stay_errors(tmp_path, fault, cause):
    run = Table().train(20)
    one = run.saved(tmp_path / "a.pt")
    if fault == "fresh":
        torch.nn.init.normal_(run.weights[0])
    else:
        run.optimizer.param_groups[0]["weight_decay"] = 0.3
    run.train(40)
    run.optimizer.param_groups[0]["weight_decay"] = 0.1  # as stated in the files
    found = wb.doctor(one, run.saved(tmp_path / "b.pt"))
    assert (found.causes[0].cause, found.causes[0].severity) == (cause, "error")


def pruned(run: Table, step: int) -> None:
    if step % 12 == 0:
        for state in run.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                size = state[key].abs()
                state[key].mul_(size >= size.flatten().kthvalue(int(0.9 * size.numel()))[0])


def test_moments_that_are_pruned_now_and_then_are_asked_about(tmp_path):
    run = Table(pruned).train(26)
    one, two = run.saved(tmp_path / "a.pt"), run.train(36).saved(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert "P03" in {one.rule for one in found} and found.exit_code == 1
    assert "before the resume too" in found.causes[0].question


def test_moments_that_are_pruned_once_stay_an_error(tmp_path):
    run = Table().train(26)
    one = run.saved(tmp_path / "a.pt")
    pruned(run, 12)
    found = wb.doctor(one, run.train(4).saved(tmp_path / "b.pt"))
    assert found.exit_code == 2 and found.causes[0].cause in ("B3", "B4", "B6")


def regrown(run: Table, step: int) -> None:
    """Each tenth update, some of the smallest weights are dropped and grow from zero, their moments too (RigL)."""
    if step % 10 == 0:
        for weight in run.weights[1::2]:
            dropped = weight.abs().flatten().topk(weight.numel() // 20, largest=False).indices
            for one in (weight, *(run.optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))):
                one.view(-1)[dropped] = 0


@pytest.mark.parametrize(("then", "code"), [(None, 0), (regrown, 1)])
def test_single_moments_that_begin_anew_are_asked_about(tmp_path, then, code):
    run = Table(then)
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    one, two = run.train(152).saved(tmp_path / "a.pt"), run.train(26).saved(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert found.exit_code == code
    assert code == 0 or "set moments to zero" in found.causes[0].question


@pytest.mark.parametrize("often", [True, False])
def test_an_adam_that_begins_anew_in_each_round(tmp_path, often):
    run = Run()
    for step in range(83):
        if step == 44:
            one = run.save(tmp_path / "a.pt", step=44)
        if step % 6 == 0 and (often or step == 78):
            run.fresh()
        run.train(1)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=83))
    assert [cause.cause for cause in found.causes] == ([] if often else ["B1"])


@pytest.mark.parametrize("scaled", [True, False])
def test_an_update_of_another_size_for_each_parameter_is_the_optimizers_own(tmp_path, scaled):
    """Some optimizers scale each step by the size of its weight. One other learning rate for all is reported."""
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    old = [weight.detach().clone() for weight in run.model.parameters()]
    run.train(1)
    with torch.no_grad():
        for at, (weight, was) in enumerate(zip(run.model.parameters(), old, strict=True)):
            kept = was * (1 - 1e-3 * 0.01)
            weight.copy_(kept + (weight - kept) * (3.0 * 2**at if scaled else 3.0))
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=31))
    assert severities(found, "P13") == (["info"] if scaled else ["warn"]) and (found.exit_code == 0) == scaled


@pytest.mark.parametrize(
    ("masters", "moves", "told"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_weights_of_16_bits_that_stand_where_masters_move_or_nothing_does(tmp_path, masters, moves, told):
    run = Run()
    run.model.bfloat16()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-7)

    def train(updates: int) -> None:
        for _ in range(updates):
            run.optimizer.zero_grad()
            run.model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
            run.optimizer.step()

    train(10)
    wide = [weight.detach().float() for weight in run.model.parameters()]
    more = {"fp32_from_fp16": wide} if masters else {}
    one = run.save(tmp_path / "a.pt", step=10, **more)
    train(3 * moves)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=13, **more))
    assert ("D6" in [cause.cause for cause in found.causes]) == told


@pytest.mark.parametrize(("became", "cause"), [("ones", "A3"), ("cast", "D7"), ("kept", "")])
def test_norms_of_one_value_say_nothing_of_a_cast(tmp_path, became, cause):
    run = Run()
    norms = {f"norm{n}": torch.nn.LayerNorm(16, bias=False) for n in range(3)}
    run.model = torch.nn.Sequential(
        OrderedDict({"in": torch.nn.Linear(16, 16), **norms, "out": torch.nn.Linear(16, 16)})
    )
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 - n / 400)
    one = run.train(60).save(tmp_path / "a.pt", step=60)
    with torch.no_grad():
        for name, weight in run.model.named_parameters():
            if "norm" in name and became != "kept":
                weight.copy_(torch.ones_like(weight) if became == "ones" else weight.bfloat16().float())
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=61))
    assert (found.causes[0].cause if found.causes else "") == cause


@pytest.mark.parametrize("lowered", [True, False])
@pytest.mark.parametrize(("anew", "cause"), [(True, "A3"), (False, "A2")])
def test_norms_with_biases_began_anew_beside_a_lower_learning_rate(tmp_path, anew, cause, lowered):
    run = Run()
    run.model = torch.nn.Sequential(
        OrderedDict({"in": torch.nn.Linear(16, 16), "norm": torch.nn.LayerNorm(16), "out": torch.nn.Linear(16, 16)})
    )
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    one = run.train(60).save(tmp_path / "a.pt", step=60)
    if lowered:
        run.optimizer.param_groups[0]["lr"] = 6e-4
    with torch.no_grad():
        run.model.norm.weight.fill_(1)
        run.model.norm.bias.copy_(torch.zeros(16) if anew else torch.randn(16))
    echo = run.save(tmp_path / "echo.pt", step=60)
    after = run.train(1).save(tmp_path / "b.pt", step=61)
    assert wb.doctor(one, echo=echo).causes[0].cause == cause
    assert wb.doctor(one, after).causes[0].cause == cause


class Bundle(torch.nn.Module):
    """Experts in one tensor, and a table with short rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(48, 8))
        self.experts = torch.nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.table.view(24, 16).mean(0)
        return self.out(torch.einsum("bi,eij->bj", h, self.experts).tanh())


@pytest.mark.parametrize("updates", [1, 20])
@pytest.mark.parametrize(
    ("name", "change", "causes"),
    [
        ("experts", lambda x: x.mT, {"E1"}),
        ("table", lambda x: x.roll(1, 0), {"E1"}),
        ("experts", torch.randn_like, {"A2"}),
        ("table", torch.randn_like, {"A2"}),
    ],
)
def test_places_are_found_in_stacked_matrices_and_short_rows(tmp_path, name, change, causes, updates):
    run = Run()
    run.model = Bundle()
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    weight = getattr(run.model, name)
    weight.data = change(weight.data).contiguous()
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=20 + updates))
    assert {cause.cause for cause in found.causes[:1]} == causes, found.verdict


@pytest.mark.parametrize("flipped", [True, False])
def test_a_flipped_bit_is_found_in_a_table_that_grew(tmp_path, flipped):
    run = Run()
    run.model = torch.nn.Sequential(OrderedDict(embed=torch.nn.Linear(16, 64), out=torch.nn.Linear(64, 16)))
    run.fresh()
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    weight = run.model.embed.weight
    grown = torch.cat([weight.data, torch.randn(4, 16) / 10])
    grown[7, 3] *= 2.0**64 if flipped else 1.0
    held = torch.load(one)
    held["model"]["embed.weight"] = grown
    echo = tmp_path / "echo.pt"
    torch.save(held, echo)
    found = wb.doctor(one, echo=echo)
    causes = [cause.cause for cause in found.causes]
    assert bool(severities(found, "S02")) == (causes[0] == "G1") == flipped and set(causes) & {"F7", "H2"}


@pytest.mark.parametrize("lone", [True, False])
def test_biases_beside_moved_rows_are_no_second_fault(tmp_path, lone):
    run = Run()
    attention = torch.nn.Module()
    attention.query_key_value, attention.forward = torch.nn.Linear(16, 72), lambda x: attention.query_key_value(x)
    run.model = torch.nn.Sequential(OrderedDict(attention=attention, out=torch.nn.Linear(72, 16)))
    run.fresh()
    one = run.train(60).save(tmp_path / "a.pt", step=60)
    held = attention.query_key_value
    for weight in (held.bias,) if lone else (held.weight, held.bias):
        for tensor in (weight.data, run.optimizer.state[weight]["exp_avg"], run.optimizer.state[weight]["exp_avg_sq"]):
            tensor.copy_(tensor.unflatten(0, (3, 4, -1)).transpose(0, 1).reshape(tensor.shape).clone())
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=61))
    causes = [cause.cause for cause in found.causes if cause.severity == "error"]
    assert causes == ["G6"] if lone else causes == ["E4"]


@pytest.mark.parametrize("older", [True, False])
def test_counters_of_small_weights_belong_to_the_older_save(tmp_path, older):
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    run.train(40)
    then = [deepcopy(run.optimizer.state[one]) | {"w": one.data.clone()} for one in run.model[0].parameters()]
    if not older:
        then = [{name: torch.zeros_like(value) for name, value in one.items()} for one in then]
    one = run.train(12).save(tmp_path / "a.pt", step=52)
    for weight, state in zip(run.model[0].parameters(), then, strict=True):
        kept = state.pop("w")
        if weight.ndim > 1 or not older:
            run.optimizer.state[weight] = state
            weight.data = kept if older else weight.data
        else:
            run.optimizer.state[weight]["step"] = state["step"]  # as if its moments were still lawful
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=53))
    assert [cause.cause for cause in found.causes] == (["G6"] if older else ["B1"])


def test_a_schedule_that_stood_still_is_told_as_such(tmp_path):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    kept, run.schedule = run.schedule, None
    run.train(10)
    run.schedule = kept
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=40))
    assert any("did not move in 10 steps: it stayed at 30" in one.message for one in found)


@pytest.mark.parametrize("jumped", [True, False])
def test_updates_are_those_that_the_optimizer_and_the_schedule_counted(tmp_path, jumped):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=150 if jumped else 50))
    assert "With 20 updates in between" in found.coverage


@pytest.mark.parametrize("exchanged", [True, False])
def test_moments_of_twins_are_not_exchanged(tmp_path, exchanged):
    class Twins(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = (torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out((self.one(x) + self.two(x)).tanh())

    run = Run()
    run.model = Twins()
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    state = run.optimizer.state
    if exchanged:
        a, b = run.model.one.bias, run.model.out.bias
        state[a], state[b] = state[b], state[a]
    for weight in run.model.parameters():
        weight.data.mul_(0.9)  # makes them all suspicious
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert bool(severities(found, "P17")) == exchanged


@pytest.mark.parametrize("zeros", [True, False])
def test_zeros_are_told_beside_a_learning_rate_that_was_lowered(tmp_path, zeros):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 3e-4
    run.schedule.base_lrs = [3e-4]
    with torch.no_grad():
        run.model[0].weight.view(-1)[128:448] *= 1.0 - zeros
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31))
    causes = {cause.cause: cause for cause in found.causes}
    assert ("G5" in causes) == zeros and "H1" in causes
    assert not zeros or causes["G5"].title == "320 elements of '0.weight', from element 128 on, were replaced by zeros."


def noisy(run: Table, step: int) -> None:
    for weight in run.weights:
        weight.add_(1e-4 * torch.randn_like(weight))


def test_noise_is_no_export(tmp_path):
    run = Table(noisy)
    one, two = run.train(30).saved(tmp_path / "a.pt"), run.train(20).saved(tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert found.exit_code == 1 and "noise" in found.causes[0].remedy and "outside" in found.causes[0].question


@pytest.mark.parametrize("taken", [True, False])
def test_weights_that_are_those_of_another_member_are_asked_about(tmp_path, taken):
    run = Run().train(30)
    other = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in run.model.state_dict().items()}
    one = run.save(tmp_path / "a.pt", step=30, members=[other])
    run.train(5)
    if taken:
        run.model.load_state_dict(other)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=35, members=[other]))
    assert bool(found.causes) == taken == bool(severities(found, "P35"))
    assert not taken or (found.causes[0].cause == "F4" and "another member" in found.causes[0].question)


@pytest.mark.parametrize("anew", [True, False])
def test_laws_that_hold_by_chance_after_a_restart_show_no_flipped_bits(tmp_path, anew):
    """One of two optimizers began anew; a few second moments of the other one lost a bit."""
    run = Run()
    other = torch.nn.Linear(16, 48)
    critic = torch.optim.Adam(other.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def train(updates: int) -> None:
        for _ in range(updates):
            critic.zero_grad()
            (other(torch.randn(8, 16)).square().mean()).backward()
            critic.step()
        run.train(updates)

    def save(path: Path, step: int) -> Path:
        torch.save(
            {
                "model": {"a": run.model.state_dict(), "b": other.state_dict()},
                "optimizers": [run.optimizer.state_dict(), critic.state_dict()],
                "step": step,
            },
            path,
        )
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    if anew:
        critic.state.clear()
    else:
        critic.state[other.weight]["exp_avg_sq"].view(-1)[7] *= 2.0**-40
    train(4)
    found = wb.doctor(one, save(tmp_path / "b.pt", 34))
    assert found.causes[0].cause in ({"B1"} if anew else {"G1", "G2", "G3"})


def shifted(moments: list[torch.Tensor]) -> None:
    line = torch.cat([one.flatten() for one in moments]).roll(8)
    for one, part in zip(moments, line.split([one.numel() for one in moments]), strict=True):
        one.copy_(part.view(one.shape))


def exchanged_halves(moments: list[torch.Tensor]) -> None:
    for one in moments:
        one.copy_(one.roll(len(one) // 2, 0))


def older(part: int, old: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    def put(moments: list[torch.Tensor]) -> None:
        for one, was in zip(moments, old, strict=True):
            one[part * len(one) // 2 :] = was[part * len(one) // 2 :]

    return put


@pytest.mark.parametrize(
    ("fault", "causes"),
    [("none", {""}), ("shifted", {"E7"}), ("halves", {"B5", "E13"}), ("part", {"G6"}), ("zero", {"B3"})],
)
def test_what_second_moments_have_in_common_that_are_not_their_own(tmp_path, fault, causes):
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(48, 48, bias=False) for _ in range(5)))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int) -> None:
        for _ in range(updates):
            run.optimizer.zero_grad()
            x = torch.randn(1, 48) * torch.linspace(0.1, 3, 48)
            (run.model(x) - x.roll(1, 1)).square().mean().backward()
            run.optimizer.step()

    def moments(name: str) -> list[torch.Tensor]:
        return [run.optimizer.state[weight][name] for weight in run.model.parameters()]

    train(10)
    old = {name: [one.clone() for one in moments(name)] for name in ("exp_avg", "exp_avg_sq")}
    train(30)
    one = run.save(tmp_path / "a.pt", step=40)
    for name in ("exp_avg", "exp_avg_sq"):
        ways = {"shifted": shifted, "halves": exchanged_halves, "part": older(1, old[name])}
        if fault in ways:
            ways[fault](moments(name))
        elif fault == "zero":
            for each in moments(name):
                each.zero_()
    train(14)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=54))
    assert (found.causes[0].cause if found.causes else "") in causes


@pytest.mark.parametrize("fault", ["none", "lost", "flip"])
def test_second_moments_are_compared_where_beta2_changed(tmp_path, fault):
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    if fault != "flip":
        run.optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    for at, state in enumerate(run.optimizer.state.values()):
        if fault == "lost":
            state["exp_avg_sq"].zero_()
        elif fault == "flip" and at == 0:
            state["exp_avg_sq"].view(torch.int32).view(-1)[100] ^= 1 << 29
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31))
    causes = [cause.cause for cause in found.causes]
    assert causes == ["H1"] if fault == "none" else causes[0] in {"lost": {"B4"}, "flip": {"G1", "G3"}}[fault]
    assert {"P03"} & {sign.rule for sign in found} == ({"P03"} if fault != "none" else set())


class Rare(Table):
    """A layer has no gradient in the updates of ``without``."""

    def __init__(self, without: Iterable[int]) -> None:
        super().__init__()
        self.without = frozenset(without)
        self.optimizer.register_step_pre_hook(self.drop)

    def drop(self, *_: Any) -> None:
        if self.step in self.without:
            for weight in self.model[1].parameters():
                weight.grad = None


def test_counters_that_lag_on_are_no_reset_where_they_reach_the_updates_in_between(tmp_path):
    run = Rare([*range(0, 22, 2), *range(28, 62, 2)]).train(28)
    one, two = run.saved(tmp_path / "a.pt"), run.train(40).saved(tmp_path / "b.pt")
    assert [wb.open(path)["optimizer.state.1.step"].numpy() for path in (one, two)] == [17, 40]
    found = wb.doctor(one, two)
    assert grave(found) == [] and severities(found, "P01") == ["info"]


@pytest.mark.parametrize("without", [(), (3,)])
def test_counters_of_a_layer_that_were_reset_are_found(tmp_path, without):
    run = Rare(without).train(28)
    one = run.saved(tmp_path / "a.pt")
    for weight in run.model[1].parameters():
        run.optimizer.state[weight]["step"].zero_()
    found = wb.doctor(one, run.train(40).saved(tmp_path / "b.pt"))
    assert (found.causes[0].cause, found.causes[0].severity) == ("B2", "error")


@pytest.mark.parametrize(("kept", "lost"), [(0.95, False), (1.3, False), (0.2, True)])
def test_the_largest_of_a_block_falls_by_no_more_than_its_decay(tmp_path, kept, lost):
    """8-bit Adam: bitsandbytes stores the largest second moment of each block of 256 exactly."""

    def saved(path: Path, step: int, factor: float) -> Path:
        held = run.optimizer.state_dict()
        for at, one in held["state"].items():
            codes = torch.full(one["exp_avg"].shape, 200, dtype=torch.uint8)
            maxima = {"absmax1": torch.full((2,), 1e-3), "absmax2": torch.full((2,), 1e-5) * factor}
            tables = {"qmap1": torch.linspace(-1, 1, 256), "qmap2": torch.linspace(0, 1, 256)}
            held["state"][at] = {"step": step, "state1": codes, "state2": codes, **maxima, **tables}
        torch.save({"model": run.model.state_dict(), "optimizer": held, "step": step}, path)
        return path

    run = Run().train(30)
    one = saved(tmp_path / "a.pt", 30, 1.0)
    run.train(1)  # β2 is 0.95
    found = wb.doctor(one, saved(tmp_path / "b.pt", 31, kept))
    assert severities(found, "P25") == (["error"] if lost else [])


@pytest.mark.parametrize(("times", "told"), [(1, False), (3, False), (100, True)])
def test_gradients_of_another_scale_early_in_a_run(tmp_path, times, told):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10)
    for weight in run.model.parameters():
        weight.register_hook(lambda gradient: gradient * times)
    found = wb.doctor(one, run.train(10).save(tmp_path / "b.pt", step=20))
    assert bool(severities(found, "P30")) == told


@pytest.mark.parametrize(("name", "told"), [("output_path", False), ("data_path", True), ("tokenizer_file", True)])
def test_paths_of_this_launch_and_of_the_data(tmp_path, name, told):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, args={name: "/one"})
    echo = run.save(tmp_path / "echo.pt", step=10, args={name: "/two"})
    found = wb.doctor(one, echo=echo)
    assert found.exit_code == 0 and (f"{name} '/one' → '/two'" in found.verdict) == told


@pytest.mark.parametrize(("name", "told"), [("target", False), ("last_stage", True)])
def test_tables_of_a_network_that_follows_another_may_differ(tmp_path, name, told):
    torch.manual_seed(0)
    table = torch.randn(12, 8)
    held = {"model.embed_tokens.weight": table.clone(), f"{name}.embed_tokens.weight": table.clone()}
    torch.save({"model": held, "step": 4}, tmp_path / "a.pt")
    held["model.embed_tokens.weight"] += 0.01 * torch.randn(12, 8)
    torch.save({"model": held, "step": 5}, tmp_path / "b.pt")
    assert bool(severities(wb.doctor(tmp_path / "a.pt", tmp_path / "b.pt"), "P50")) == told


def test_rows_that_a_trainer_keeps_at_one_length(tmp_path):
    def put_back() -> None:
        with torch.no_grad():
            for weight, length in lengths.items():
                weight *= length / weight.norm(dim=1, keepdim=True)

    run = Run()
    lengths = {one: one.detach().norm(dim=1, keepdim=True) for one in run.model.parameters() if one.ndim == 2}
    for _ in range(20):
        run.train(1)
        put_back()
    one = run.save(tmp_path / "a.pt", step=20)
    run.train(1)
    put_back()
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=21))
    assert found.causes == () and "of 4 weights" in found.verdict
    with torch.no_grad():
        run.model[0].weight += 0.1 * torch.randn(32, 16)  # of another step: longer, too
    found = wb.doctor(one, run.save(tmp_path / "c.pt", step=21))
    assert found.exit_code == 1 and "outside the optimizer" in found.causes[0].question


@pytest.mark.parametrize(("name", "value"), [("T_cur", NAN), ("T_i", HUGE), ("T_0", 0), ("T_mult", -2), ("T_0", 0.5)])
def test_an_odd_cycle_of_a_schedule_is_no_traceback(tmp_path, name, value):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(run.optimizer, 9, T_mult=2)
    one = run.train(5).save(tmp_path / "a.pt", step=5)
    run.train(5)
    setattr(run.schedule, name, value)
    assert "S17" not in {sign.rule for sign in wb.doctor(one, run.save(tmp_path / "b.pt", step=10))}


@pytest.mark.parametrize("taken", [False, True])
def test_averages_that_were_taken_show_after_one_update(tmp_path, taken):
    run = Table()
    average = {name: one.clone() for name, one in run.model.state_dict().items()}

    def follow() -> None:
        for name, one in run.model.state_dict().items():
            average[name].lerp_(one, 0.3)

    for _ in range(30):
        run.train(1)
        follow()
    one = run.save(tmp_path / "a.pt", step=30, ema={name: one.clone() for name, one in average.items()})
    if taken:
        run.model.load_state_dict(average)
    run.train(1)
    follow()
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=31, ema=average))
    assert [one.cause for one in found.causes] == (["F4"] if taken else [])


@pytest.mark.parametrize(("times", "told"), [(1, False), (30, False), (1e4, True)])
def test_gradients_of_one_parameter_alone(tmp_path, times, told):
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    run.model[2].weight.register_hook(lambda gradient: gradient * times)
    found = wb.doctor(one, run.train(4).save(tmp_path / "b.pt", step=34))
    assert severities(found, "P30") == (["warn"] if told else [])
    if told:
        assert found.causes[0].tensors == ("2.weight",) and "grew far beyond" in found.causes[0].title


def test_gradients_that_begin_in_one_parameter_are_as_large_as_others(tmp_path):
    run = Run(frozen=True)
    run.freeze(False)
    run.model[0].weight.register_hook(lambda gradient: gradient * small)
    small = 1e-6  # an expert that is hardly ever chosen
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    small = 1.0
    found = wb.doctor(one, run.train(4).save(tmp_path / "b.pt", step=34))
    assert severities(found, "P30") == []


@pytest.mark.parametrize(("rate", "told"), [(1e-3, True), (0.0, False)])
def test_weights_of_a_layer_that_stand_while_their_moments_move(tmp_path, rate, told):
    run = Table()
    layer = list(run.model[1].parameters())
    rest = [one for one in run.model.parameters() if all(one is not other for other in layer)]
    groups = [{"params": layer, "lr": rate}, {"params": rest}]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    one = run.train(30).saved(tmp_path / "a.pt")
    old = [weight.detach().clone() for weight in layer]
    run.train(20)
    with torch.no_grad():
        for weight, kept in zip(layer, old, strict=True):
            weight.copy_(kept)
    found = wb.doctor(one, run.saved(tmp_path / "b.pt"))
    assert [one.cause for one in found.causes] == (["G6"] if told else [])


def test_what_an_adam_does_is_not_expected_of_another_optimizer(tmp_path):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2, momentum=0.9)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for state in run.optimizer.state.values():
        state["momentum_buffer"].zero_()
    (found,) = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes
    assert found.cause in ("B1", "B3") and not any("bias" in words or "lr itself" in words for words in found.damage)


@pytest.mark.parametrize("anew", [False, True])
def test_a_part_of_the_optimizers_state_that_began_anew(tmp_path, anew):
    run = Run().train(20)
    for weight, state in run.optimizer.state.items():
        state["slow_buffer"] = weight.detach() + 0.01
    one = run.save(tmp_path / "a.pt", step=20)
    for weight, state in run.optimizer.state.items() if anew else ():
        state["slow_buffer"] = weight.detach().clone()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert [cause.cause for cause in found.causes] == (["B1"] if anew else [])
    assert all("the moments were kept" in cause.title for cause in found.causes)
    assert not any("lr itself" in words for cause in found.causes for words in cause.damage)


@pytest.mark.parametrize("anew", [True, False])
def test_a_part_of_the_optimizers_state_that_began_anew_shows_after_one_update(tmp_path, anew):
    """Its own update is small beside the distance of the weights from it."""
    run = Run().train(20)
    for weight, state in run.optimizer.state.items():
        state["z"] = weight.detach() + 0.05 * torch.randn_like(weight)
    one = run.save(tmp_path / "a.pt", step=20)
    for weight, state in run.optimizer.state.items() if anew else ():
        state["z"] = weight.detach().clone()
    run.train(1)
    for state in run.optimizer.state.values():
        state["z"] -= 1e-3 * torch.randn_like(state["z"])
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=21))
    assert [cause.cause for cause in found.causes] == (["B1"] if anew else [])
    assert all("the moments were kept" in cause.title for cause in found.causes)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_number_in_an_average_shows_in_no_loss(tmp_path, damaged):
    run = Run().train(20)
    average = {name: one.clone() for name, one in run.model.state_dict().items()}
    one = run.train(1).save(tmp_path / "a.pt", step=21, ema=average)
    if damaged:
        average["0.weight"][0, 0] = NAN
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=21, ema=average))
    assert [cause.cause for cause in found.causes][:1] == (["G1"] if damaged else [])
    assert all("no loss shows averages" in cause.damage[0] for cause in found.causes[:1])


@pytest.mark.parametrize("loaded", [True, False])
def test_weights_that_were_not_loaded_have_their_names(tmp_path, loaded):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    if not loaded:
        for part in (run.model[0], run.model[2]):
            part.reset_parameters()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    titles = [cause.title for cause in found.causes]
    assert titles == ([] if loaded else ["None of the weights were loaded: they kept their initial values."])


def test_experts_that_are_all_copies_of_one(tmp_path):
    torch.manual_seed(0)
    held = {
        f"model.layers.0.mlp.experts.{n}.{kind}.weight": torch.randn(16, 8)
        for n in range(4)
        for kind in ("up_proj", "gate_proj")
    }
    held["model.layers.0.mlp.gate.weight"] = torch.randn(4, 8)
    torch.save({"model": held, "step": 4}, tmp_path / "a.pt")
    held |= {name: held[re.sub(r"experts\.\d", "experts.0", name)] for name in held if "experts" in name}
    torch.save({"model": {name: one.clone() for name, one in held.items()}, "step": 4}, tmp_path / "echo.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "echo.pt").causes[0]
    assert found.cause == "E10" and "duplicated" in found.title
    assert "6 tensors hold the values of 2" in found.signs[0].message


def test_a_loader_whose_state_the_load_kept_was_compared(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20, **loader(1, 20))
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20, **loader(1, 20)))
    assert "data position" not in found.verdict
    plain = run.save(tmp_path / "c.pt", step=20)
    assert "data position not compared" in wb.doctor(plain, echo=run.save(tmp_path / "d.pt", step=20)).verdict


# ---- what trainers keep beside the checkpoint, and copies of networks ------------------------------------------------


def folder(run: Run, path: Path, step: int, **files: Any) -> Path:
    """A folder as transformers' Trainer writes it, and files of a trainer's own."""
    path.mkdir()
    save_file(run.model.state_dict(), path / "model.safetensors")
    torch.save(run.optimizer.state_dict(), path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name, held in files.items():
        torch.save(held, path / f"{name}.pt")
    return path


def states(seeds: Iterable[int], drawn: int) -> list[torch.Tensor]:
    return [one["torch"] for one in generators(seeds, drawn)["rng_states"]]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"args": {"batch_size": 4}}, {"args": {"batch_size": 4}}, None),
        ({"args": {"batch_size": 4}}, {"args": {"batch_size": 8}}, ("H1", "args.pt/batch_size 4 → 8")),
        ({"args": {"iteration": 20}}, {"args": {"iteration": 25}}, None),
        ({"rng_states": states(range(4), 3)}, {"rng_states": states(range(4), 9)}, None),
        ({"rng_states": states(range(4), 3)}, {"rng_states": states([0] * 4, 9)}, ("C8", "are equal now")),
        ({"rng_states": states(range(4), 3)}, {"rng_states": []}, ("C8", "no longer stored")),
        ({"workers": [{"offset": 20}] * 2}, {"workers": [{"offset": 25}] * 2}, None),
        ({"workers": [{"offset": 20}] * 2}, {"workers": [{"offset": 5}] * 2}, ("C6", "since the load")),
        ({"curriculum": {"stage": 6}}, {"curriculum": {"stage": 7}}, None),
        ({"curriculum": {"stage": 6}}, {"curriculum": {"stage": 0}}, ("H1", "curriculum.stage' from 6 to 0")),
        ({"sampler": {"num_replicas": 4}}, {"sampler": {"num_replicas": 2}}, None),
        ({"dataloader": {"seed": 4321}}, {"dataloader": {"seed": 4321}}, None),
        ({"dataloader": {"seed": 4321}}, {"dataloader": {"seed": 99}}, ("C7", "dataloader.pt/seed 4321 → 99")),
    ],
)
def test_what_is_kept_beside_the_checkpoint(tmp_path, before, after, told):
    run = Run().train(20)
    one = folder(run, tmp_path / "a", 20, **before)
    two = folder(run.train(5), tmp_path / "b", 25, **after)
    found = wb.doctor(one, two)
    if told is None:
        assert [cause for cause in found.causes if cause.severity != "info"] == []
    else:
        cause, words = told
        assert found.causes[0].cause == cause and any(words in sign.message for sign in found.causes[0].signs)


@pytest.mark.parametrize(
    ("before", "after", "cause", "title"),
    [
        ("policy", "reference", "F6", "A copy that is not trained"),
        ("reference", "policy", "A2", "The weights are those of the copy"),
    ],
)
def test_a_network_and_the_copy_that_it_began_from(tmp_path, before, after, cause, title):
    run = Run().train(20)
    reference = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in run.model.state_dict().items()}
    nets = {"policy": run.model.state_dict(), "reference": reference}

    def saved(path: Path) -> Path:
        held = {f"{net}.{name}": weight.clone() for net, some in nets.items() for name, weight in some.items()}
        torch.save({"model": held, "step": 20}, path)
        return path

    one = saved(tmp_path / "a.pt")
    nets[after] = nets[before]
    found = wb.doctor(one, echo=saved(tmp_path / "echo.pt"))
    assert found.causes[0].cause == cause and found.causes[0].title.startswith(title)
    assert len([found for found in found.causes if found.severity == "error"]) <= 1


@pytest.mark.parametrize("exchanged", [False, True])
def test_decays_of_groups_that_were_exchanged(tmp_path, exchanged):
    run = Run()
    groups = [[one for one in run.model.parameters() if one.ndim == n] for n in (2, 1)]
    decays = [0.1, 0.0]
    run.optimizer = torch.optim.AdamW(
        [{"params": some, "weight_decay": decay} for some, decay in zip(groups, decays, strict=True)], lr=1e-3
    )
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for group, decay in zip(run.optimizer.param_groups, decays[::-1] if exchanged else (0.2, 0.0), strict=True):
        group["weight_decay"] = decay
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert found.causes[0].cause == ("B7" if exchanged else "H1")
    words = "from 0.1 to 0, from 0 to 0.1" if exchanged else "from 0.1 to 0.2 in 1 of 2"
    assert any(words in sign.message for sign in found.causes[0].signs)


def test_parameters_that_are_frozen_are_not_a_matter_of_decay(tmp_path):
    run = Run()
    matrices, biases = ([one for one in run.model.parameters() if one.ndim == n] for n in (2, 1))

    def optimizer(*groups: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        settings = zip(groups, (0.1, 0.0), strict=True)
        return torch.optim.AdamW([{"params": some, "weight_decay": decay} for some, decay in settings], lr=1e-3)

    run.optimizer = optimizer(matrices, biases)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    held = run.optimizer.state
    run.optimizer = optimizer(matrices[1:], biases)
    run.optimizer.state.update({weight: state for weight, state in held.items() if weight is not matrices[0]})
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert found.causes[0].title == "The optimizer holds other parameters." and found.exit_code == 1


def test_a_count_by_which_a_schedule_only_warns(tmp_path):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 200)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.schedule._step_count = 1
    echo = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert echo.exit_code == 0 and "_step_count 21 → 1" in echo.verdict
    assert grave(wb.doctor(one, run.train(5).save(tmp_path / "b.pt", step=25))) == []


class Adapted:
    """A frozen square weight with adapters of rank 2 that are trained."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.base = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.low, self.high = torch.nn.Linear(width, 2, bias=False), torch.nn.Linear(2, width, bias=False)
        self.optimizer = torch.optim.AdamW([self.low.weight, self.high.weight], lr=1e-3, betas=(0.9, 0.99))

    def train(self, updates: int) -> Adapted:
        for _ in range(updates):
            self.optimizer.zero_grad()
            x = torch.randn(8, self.base.in_features)
            (self.base(x) + self.high(self.low(x)) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
        return self

    def merge(self, anew: bool = True) -> None:
        with torch.no_grad():
            self.base.weight += self.high.weight @ self.low.weight
            if anew:
                torch.nn.init.normal_(self.low.weight, std=0.2)
                self.high.weight.zero_()

    def save(self, path: Path, step: int) -> Path:
        held = {"base_layer": self.base.weight, "lora_A": self.low.weight, "lora_B": self.high.weight}
        model = {f"model.q_proj.{name}.weight": weight.detach().clone() for name, weight in held.items()}
        torch.save({"model": model, "optimizer": self.optimizer.state_dict(), "step": step}, path)
        return path


@pytest.mark.parametrize("since", [4, 0])
def test_adapters_that_are_merged_and_begin_anew(tmp_path, since):
    """If it is saved right after the merge, B is still 0, although the state is not that of a new adapter."""
    run = Adapted(16)
    torch.nn.init.zeros_(run.high.weight)
    one = run.train(30).save(tmp_path / "a.pt", 30)
    run.train(4 - since).merge()
    for state in run.optimizer.state.values():
        keep = torch.rand_like(state["exp_avg"]) > 0.9
        state["exp_avg"].mul_(keep), state["exp_avg_sq"].mul_(keep)
    found = wb.doctor(one, run.train(since).save(tmp_path / "b.pt", 34))
    assert found.exit_code == 1 and found.causes[0].title == "Adapters were merged into the weights, and began anew."


@pytest.mark.parametrize("zero", [True, False])
def test_a_sector_of_zeros_shows_after_some_updates(tmp_path, zero):
    run = Run()
    run.optimizer.param_groups[0]["initial_lr"] = 1e-3
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    with torch.no_grad():
        run.model[0].weight.view(-1)[128:256] = torch.zeros(128) if zero else 0.2 * torch.randn(128)
    found = wb.doctor(one, run.train(10).save(tmp_path / "b.pt", step=20))
    assert (found.causes[0].cause == "G5") == zero


@pytest.mark.parametrize(("scale", "told"), [(2.0**15, False), (2.0**16, False), (2.0**20, True)])
def test_a_loss_scale_doubles_once_in_an_interval(tmp_path, scale, told):
    run = Run().train(60)
    one = run.save(tmp_path / "a.pt", step=60, scaler=scaler(1, 2.0**14, 10))
    found = wb.doctor(one, run.train(18).save(tmp_path / "b.pt", step=78, scaler=scaler(9, scale, 10)))
    assert bool(severities(found, "N14")) == told


@pytest.mark.parametrize("lost", [False, True])
def test_an_average_that_began_anew_may_be_as_large_after_some_updates(tmp_path, lost):
    """Lion's: its only state. Another save's would be as large after one update."""
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    run.fresh()
    state = {weight: torch.zeros_like(weight) for weight in run.model.parameters()}

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight, average in state.items():
                gradient = torch.randn_like(weight)
                with torch.no_grad():
                    weight -= 1e-4 * (0.9 * average + 0.1 * gradient).sign()
                average.lerp_(gradient, 0.01)

    def saved(path: Path, step: int) -> Path:
        held = run.optimizer.state_dict()
        held["state"] = {at: {"exp_avg": one.clone()} for at, one in enumerate(state.values())}
        held["param_groups"] = [{"params": [*held["state"]], "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}]
        torch.save({"model": run.model.state_dict(), "optimizer": held, "step": step}, path)
        return path

    train(60)
    one = saved(tmp_path / "a.pt", 60)
    if lost:
        for average in state.values():
            average.zero_()
    train(20)
    found = wb.doctor(one, saved(tmp_path / "b.pt", 80))
    assert [one.cause for one in found.causes] == (["B1"] if lost else [])


# ---- another model, optimizer or schedule, on purpose ----------------------------------------------------------------


class Mastered(Run):
    """Weights in bfloat16 beside their float32 masters, which the optimizer holds."""

    def held(self) -> dict[str, Any]:
        state = deepcopy(self.optimizer.state_dict())
        for one, master in zip(state["state"].values(), self.model.parameters(), strict=True):
            one["master_param"] = master.detach().clone()
        weights = {name: weight.detach().bfloat16() for name, weight in self.model.named_parameters()}
        return {"model": weights, "optimizer": state}

    def stored(self, path: Path, step: int, held: dict[str, Any]) -> Path:
        torch.save({**held, "step": step}, path)
        return path


@pytest.mark.parametrize(("stale", "updates"), [("weights", 1), ("weights", 9), ("masters", 1)])
def test_masters_that_no_update_reached_show_which_side_is_stale(tmp_path, stale, updates):
    """A frozen weight and its master differ. Masters that are equal to those before are right."""
    run = Mastered()
    old = run.train(8).held()
    one = run.train(6).stored(tmp_path / "a.pt", 14, run.held())
    run.freeze(True)
    later = run.train(updates).held()
    if stale == "weights":
        later["model"]["0.weight"] = old["model"]["0.weight"]
    else:
        later["optimizer"]["state"][0]["master_param"] = old["optimizer"]["state"][0]["master_param"]
    found = wb.doctor(one, run.stored(tmp_path / "b.pt", 14 + updates, later))
    first = found.causes[0]
    assert first.severity == "error" and (first.cause == "D3") == (stale == "weights")
    assert any("copy the masters into the weights" in one.remedy for one in found.causes) == (stale == "weights")
    assert ("every loss is wrong" in str(first.damage)) == (stale == "weights")


def test_weights_and_masters_that_never_matched_are_not_made_from_each_other(tmp_path):
    """They differ before the resume, too: nothing shows which of them is right."""
    run = Mastered()
    old = run.train(8).held()
    held = run.train(6).held()
    held["optimizer"]["state"][2]["master_param"] = old["optimizer"]["state"][2]["master_param"]
    first = wb.doctor(run.stored(tmp_path / "a.pt", 14, held)).causes[0]
    assert first.cause == "D2" and first.remedy.startswith("load both from one save")


@pytest.mark.parametrize(("steps", "rounded", "told"), [("Adam", True, "D1"), ("Adam", False, ""), ("LAMB", False, "")])
def test_one_update_tells_adam_from_what_looks_like_it(tmp_path, steps, rounded, told):
    """The fields of the param groups do not; nor does it matter that the learning rate was lowered in the load."""
    run = Mastered()
    run.train(20)
    began = [weight.detach().clone() for weight in run.model.parameters()]
    before = run.held()
    if rounded:
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.copy_(weight.bfloat16().float())
    run.optimizer.param_groups[0]["lr"] /= 2
    run.train(1)
    if steps == "LAMB":  # each parameter has a rate of its own
        with torch.no_grad():
            for at, (weight, old) in enumerate(zip(run.model.parameters(), began, strict=True)):
                weight.copy_(old + (1.2 + 0.1 * at) * (weight - old))
    after = run.held()
    for one in (before, after):
        (group,) = one["optimizer"]["param_groups"]
        for name in group.keys() - {"lr", "betas", "eps", "weight_decay", "params"}:
            del group[name]
    found = wb.doctor(run.stored(tmp_path / "a.pt", 20, before), run.stored(tmp_path / "b.pt", 21, after))
    masters = [row for row in found.ledger if (row.leg, row.quantity) == ("train", "master")]
    assert {str(row.status) for row in masters} == {
        "beyond" if told else "within" if steps == "Adam" else "not compared"
    }
    assert {row.form for row in masters} == {"rounded" if told else ""}
    assert [one.cause for one in found.causes if one.severity == "error"] == [told] * bool(told)


@pytest.mark.parametrize("rounded", [True, False])
def test_masters_that_were_rounded_are_no_cast_weights_beside_a_new_head(tmp_path, rounded):
    run = Mastered()
    one = run.train(20).stored(tmp_path / "a.pt", 20, run.held())
    if rounded:
        with torch.no_grad():
            for weight in run.model.parameters():
                weight.copy_(weight.bfloat16().float())
    held = run.train(1).held()
    held["model"] |= {"probe.weight": torch.randn(3, 16).bfloat16()}
    found = wb.doctor(one, run.stored(tmp_path / "b.pt", 21, held))
    assert [cause.cause for cause in found.causes] == (["D1", "A4"] if rounded else ["A4"])


@pytest.mark.parametrize("counters", [True, False])
def test_counters_and_squares_of_the_same_layer_are_of_another_save(tmp_path, counters):
    """Its weights, too, of which a few are farther than updates move them."""
    run = Stack(partial(torch.optim.RMSprop, alpha=0.9)).train(14)
    old = {weight: deepcopy(run.optimizer.state[weight]) for weight in run.model.layer1.parameters()}
    one = run.train(6).save(tmp_path / "a.pt", step=20)
    for weight, state in old.items():
        held = run.optimizer.state[weight]
        held["square_avg"].copy_(state["square_avg"] / 16)
        held["step"].copy_(state["step"] if counters else held["step"])
        with torch.no_grad():
            weight.view(-1)[:40] += 0.0012
    first = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21)).causes[0]
    assert (first.cause == "G6") == counters, first


class Deep(Run):
    """Layers of one shape between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [torch.nn.Linear(16, 16) for _ in range(layers)]
        self.outer = torch.nn.ModuleDict({"embed_tokens": torch.nn.Linear(16, 16), "lm_head": torch.nn.Linear(16, 16)})
        self.fresh()

    def fresh(self) -> None:
        parts = [*getattr(self, "layers", []), *getattr(self, "outer", {}).values()]
        weights = [weight for part in parts for weight in part.parameters()]
        self.optimizer = torch.optim.AdamW(weights or self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(self, updates: int) -> Deep:
        for _ in range(updates):
            self.optimizer.zero_grad()
            x = torch.randn(8, 16)
            y = self.outer["embed_tokens"](x)
            for layer in self.layers:
                y = y + torch.tanh(layer(y))
            (self.outer["lm_head"](y) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
        return self

    def saved(self, path: Path, step: int) -> Path:
        held = {
            f"layers.{at}.mlp.up_proj.{n}": w for at, one in enumerate(self.layers) for n, w in one.state_dict().items()
        }
        held |= self.outer.state_dict()
        torch.save({"model": held, "optimizer": self.optimizer.state_dict(), "step": step}, path)
        return path


@pytest.mark.parametrize(
    ("order", "title"),
    [
        ((0, 0, 1, 1, 2, 2), "The model has 3 more layers than before."),
        ((0, 1), "The model has 1 fewer layer than before."),
        ((0, 2), "The model has 1 fewer layer than before."),
        ((1, 0, 2), None),
    ],
)
def test_a_model_that_was_made_deeper_or_shallower(tmp_path, order, title):
    run = Deep(3).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    run.layers = [deepcopy(run.layers[at]) for at in order]
    run.fresh()
    echo = run.saved(tmp_path / "echo.pt", 20)
    two = run.train(3).saved(tmp_path / "b.pt", 23)
    for found in (wb.doctor(one, two), wb.doctor(one, echo=echo)):
        told = {cause.title: cause.severity for cause in found.causes}
        if title is None:
            assert told["Layers are duplicated, swapped or shifted."] == "error"
        else:
            assert "error" not in told.values()
            assert not any("not loaded" in title for title in told)
    if title is not None:
        assert {cause.title: cause.question for cause in wb.doctor(one, two).causes}[title]


def test_weights_that_are_new_beside_a_fresh_optimizer_are_named(tmp_path):
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.model.add_module("3", torch.nn.Linear(16, 4))
    run.fresh()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert {"B1", "A4"} <= {cause.cause for cause in found.causes}


def test_one_tensor_is_new_and_two_are(tmp_path):
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.model[2].scale = torch.nn.Parameter(torch.randn(3))  # the optimizer does not hold it
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert "1 tensor is new: 1 buffer" in [sign.message for sign in found.causes[0].signs]
    run.model[2].offset = torch.nn.Parameter(torch.randn(3))
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert "2 tensors are new: 2 buffer" in [sign.message for sign in found.causes[0].signs]


def test_parameters_that_vanished_are_named_and_not_called_tied(tmp_path):
    run = Deep(3).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    two = run.train(1).saved(tmp_path / "b.pt", 21)
    held = torch.load(two)
    del held["model"]["layers.1.mlp.up_proj.bias"]
    torch.save(held, two)
    found = wb.doctor(one, two)
    assert "1 parameter vanished: 'layers.1.mlp.up_proj.bias'" in found.causes[0].title and found.exit_code == 2


@pytest.mark.parametrize("fresh", [True, False])
def test_a_new_head_with_a_fresh_optimizer_is_asked_about(tmp_path, fresh):
    run = Deep(2).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    run.outer["lm_head"].reset_parameters()
    if fresh:
        run.fresh()
    found = wb.doctor(one, echo=run.saved(tmp_path / "echo.pt", 20))
    assert ("error" in {cause.severity for cause in found.causes}) != fresh
    assert "A2" in [cause.cause for cause in found.causes]


@pytest.mark.parametrize("inside", [True, False])
def test_weights_outside_of_the_layers_may_be_new_with_a_fresh_optimizer(tmp_path, inside):
    run = Deep(4).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    (run.layers[1] if inside else run.outer["embed_tokens"]).reset_parameters()
    run.fresh()
    found = wb.doctor(one, echo=run.saved(tmp_path / "echo.pt", 20))
    assert next(cause.severity for cause in found.causes if cause.cause == "A2") == ("error" if inside else "warn")


@pytest.mark.parametrize("more", [True, False])
def test_tensors_of_another_shape_are_another_model(tmp_path, more):
    run = Deep(2).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    for layer in run.layers:
        layer.weight = torch.nn.Parameter(torch.cat([layer.weight.detach()] * 2) if more else layer.weight.detach()[:8])
        layer.bias = torch.nn.Parameter(torch.zeros(len(layer.weight)))
    found = wb.doctor(one, echo=run.saved(tmp_path / "echo.pt", 20))
    told = {cause.title: cause.question for cause in found.causes}
    assert told["Some tensors of the model have another shape."] and found.exit_code == 1
    assert not any("shard" in title for title in told)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_under_another_name(tmp_path, same):
    """Where no embedding is, none was tied to it."""
    saves = []
    for step, head in ((20, "lm_head"), (21, "score")):
        shape = (16, 16) if same or head == "lm_head" else (8, 16)
        model = {"body.weight": torch.ones(16, 16) + step, f"{head}.weight": torch.randn(shape)}
        torch.save({"model": model, "step": step}, tmp_path / f"{step}.pt")
        saves.append(tmp_path / f"{step}.pt")
    found = wb.doctor(*saves)
    assert found.exit_code == 1 and "no longer one tensor" not in str(found)
    assert ("Some tensors of the model have another name." in [cause.title for cause in found.causes]) == same


def test_a_model_that_was_turned_into_a_mixture_of_experts(tmp_path):
    torch.manual_seed(0)
    dense = {f"model.layers.{n}.mlp.{kind}_proj.weight": torch.randn(16, 16) for n in (0, 1) for kind in ("up", "gate")}
    sparse = {
        name.replace("mlp.", f"mlp.experts.{expert}."): weight.clone()
        for name, weight in dense.items()
        for expert in range(4)
    }
    sparse |= {f"model.layers.{n}.mlp.gate.weight": torch.randn(4, 16) for n in (0, 1)}
    groups = {"state": {}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1]}]}
    for name, held in (("a", dense), ("echo", sparse)):
        norm = {"model.norm.weight": torch.ones(16)}
        torch.save({"model": norm | held, "optimizer": groups, "step": 20}, tmp_path / f"{name}.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "echo.pt")
    told = {cause.title: cause.question for cause in found.causes if cause.severity != "info"}
    assert told["The model has experts, and had none before."] and found.exit_code == 1
    assert not any("duplicated" in title for title in told)


@pytest.mark.parametrize("later", [True, False])
def test_steps_that_are_counted_anew_and_files_in_the_wrong_order(tmp_path, later):
    run = Run()
    early = run.train(5).save(tmp_path / "early.pt", step=5)
    late = run.train(15).save(tmp_path / "late.pt", step=20)
    os.utime(late, ns=(10**18, 10**18))
    os.utime(early, ns=(10**18 + (1 if later else -1),) * 2)
    found = wb.doctor(late, early)
    notes = " ".join(found.notes)
    assert ("was written later: it is taken as the later one" in notes) == later
    assert ("the second is older" in notes) == (not later)


@pytest.mark.parametrize("trained", [True, False])
def test_a_teacher_that_no_optimizer_holds_may_be_another_one(tmp_path, trained):
    run = Run().train(20)
    teacher = {"teacher.0.weight": torch.randn(64, 16), "teacher.2.weight": torch.randn(16, 64)}

    def saved(path: Path) -> Path:
        student = {f"student.{name}": weight.clone() for name, weight in run.model.state_dict().items()}
        torch.save({"model": student | teacher, "optimizer": run.optimizer.state_dict(), "step": 20}, path)
        return path

    one = saved(tmp_path / "a.pt")
    if trained:
        run.model[0].reset_parameters()
    else:
        teacher = {name: torch.randn_like(weight) for name, weight in teacher.items()}
    found = wb.doctor(one, echo=saved(tmp_path / "echo.pt")).causes[0]
    assert (found.cause, found.severity) == ("A2", "error" if trained else "warn") and bool(found.question) != trained


@pytest.mark.parametrize(
    ("factor", "second", "told"),
    [(0.1, True, ("B6", "warn")), (0.25, True, ("E12", "error")), (0.5, False, ("B6", "warn"))],
)
def test_moments_that_were_scaled(tmp_path, factor, second, told):
    """A quarter is what an average over four ranks leaves of both."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for state in run.optimizer.state.values():
        state["exp_avg"] *= factor
        state["exp_avg_sq"] *= factor if second else 1.0
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes[0]
    assert (found.cause, found.severity) == told


@pytest.mark.parametrize("lost", [False, True])
def test_groups_that_were_cut_anew_lose_no_state(tmp_path, lost):
    """With other groups, a number is another parameter's; those of a shape of their own are known by it."""
    run = Deep(2).train(20)
    run.outer["lm_head"] = torch.nn.Linear(16, 8)
    run.fresh()
    for weight in [one for group in run.optimizer.param_groups for one in group["params"]]:
        weight.grad = torch.randn_like(weight)
    run.optimizer.step()
    one = run.saved(tmp_path / "a.pt", 20)
    held = torch.load(one)
    count = len(held["optimizer"]["state"])
    order = [*range(4, count), *range(4)]
    states = {number: held["optimizer"]["state"][old] for number, old in enumerate(order)}
    if lost:
        states = {number: state for number, state in states.items() if state["exp_avg"].shape != (8, 16)}
    group = {name: value for name, value in held["optimizer"]["param_groups"][0].items() if name != "params"}
    groups = [group | {"params": list(range(count - 4))}, group | {"params": list(range(count - 4, count))}]
    torch.save({**held, "optimizer": {"state": states, "param_groups": groups}}, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    assert ("B1" in [cause.cause for cause in found.causes]) == lost
    assert severities(found, "R16") == []
    torch.save({**held, "step": 21, "optimizer": {"state": states, "param_groups": groups}}, tmp_path / "b.pt")
    assert lost or severities(wb.doctor(one, tmp_path / "b.pt"), "P33") == []


@pytest.mark.parametrize("reset", [False, True])
def test_scalars_whose_state_began_anew_are_read(tmp_path, reset):
    run = Run().train(20)
    scale = torch.nn.Parameter(torch.tensor(2.0))
    run.optimizer.add_param_group({"params": [scale]})
    run.optimizer.state[scale] = {
        "step": torch.tensor(20.0),
        "exp_avg": torch.tensor(0.1),
        "exp_avg_sq": torch.tensor(0.1),
    }

    def saved(path: Path, step: int) -> Path:
        model = run.model.state_dict() | {"logit_scale": scale.detach().clone()}
        torch.save({"model": model, "optimizer": run.optimizer.state_dict(), "step": step}, path)
        return path

    one = saved(tmp_path / "a.pt", 20)
    if reset:
        run.fresh()
        run.optimizer.add_param_group({"params": [scale]})
    for _ in range(2):
        scale.grad = torch.tensor(0.01)
        run.train(1)
    found = wb.doctor(one, saved(tmp_path / "b.pt", 22))
    assert ("B1" in [cause.cause for cause in found.causes]) == reset


@pytest.mark.parametrize(("counted", "severity"), [(True, "warn"), (False, "error")])
def test_an_average_that_began_anew_counts_anew(tmp_path, counted, severity):
    """Another count that fell says nothing of the average."""
    run = Run().train(20)
    average = {name: weight + 0.01 * torch.randn_like(weight) for name, weight in run.model.state_dict().items()}
    one = run.save(tmp_path / "a.pt", step=20, ema={**average, "num_updates": 20}, sampler={"index": 40})
    average = {name: weight * 1.001 for name, weight in run.model.state_dict().items()}
    ema, sampler = {**average, "num_updates": 0 if counted else 20}, {"index": 40 if counted else 0}
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20, ema=ema, sampler=sampler))
    assert next(cause.severity for cause in found.causes if cause.cause == "F4") == severity


@pytest.mark.parametrize("schedule", [True, False])
def test_a_rate_that_groups_and_schedule_agree_on_is_a_setting(tmp_path, schedule):
    """The rate with which a group began, which only a new schedule reads, may stay."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 100)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for group in run.optimizer.param_groups:
        group["lr"] /= 3
    if schedule:
        run.schedule.base_lrs = [rate / 3 for rate in run.schedule.base_lrs]
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert [cause.cause for cause in found.causes if cause.severity != "info"] == (["H1"] if schedule else ["B8"])
    assert ("changed on purpose" in found.causes[0].question) == schedule


@pytest.mark.parametrize("replaced", [True, False])
def test_an_optimizer_without_second_moments_takes_over_the_first(tmp_path, replaced):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    held = torch.load(one)
    for state in held["optimizer"]["state"].values():
        del state["exp_avg_sq"]
    if replaced:
        held["optimizer"]["param_groups"] = [
            {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1, "params": [0, 1, 2, 3]}
        ]
    torch.save(held, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    assert (found.causes[0].cause, bool(found.causes[0].question)) == ("B4", replaced)


def test_a_schedule_that_waits_for_a_metric_counts_no_updates(tmp_path):
    run = Run()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=3)

    def saved(path: Path, updates: int, step: int, *losses: float) -> Path:
        run.schedule = None
        run.train(updates)
        for loss in losses:
            plateau.step(loss)
        run.schedule = plateau
        return run.save(path, step=step)

    one = saved(tmp_path / "a.pt", 30, 30, 3.0, 2.0, 1.0)
    found = wb.doctor(one, saved(tmp_path / "b.pt", 10, 40, 0.9))
    assert grave(found) == [] and "schedule" not in found.verdict


@pytest.mark.parametrize("left", ["schedule", None])
def test_what_is_no_longer_stored_is_named(tmp_path, left):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 1.0)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.train(2)
    if left:
        run.schedule = None
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=22))
    assert [cause.title for cause in found.causes] == (
        ["Between the checkpoints, the schedule is no longer stored."] if left else []
    )
    assert found.exit_code == (1 if left else 0) and all(cause.question for cause in found.causes)


@pytest.mark.parametrize(("new", "told"), [(3228.0, False), (68.0, True)])
def test_a_count_that_is_stored_as_a_float(tmp_path, new, told):
    run = Run().train(20)
    run.model.register_buffer("obs_count", torch.tensor(3196.0))
    one = run.save(tmp_path / "a.pt", step=20)
    run.model.obs_count.fill_(new)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert ([cause.cause for cause in found.causes] == ["A5"]) == told


@pytest.mark.parametrize(("new", "told"), [(832.0001, False), (32.0001, True), (720.0, False)])
def test_a_count_that_began_at_a_fraction(tmp_path, new, told):
    run = Run().train(25)
    run.model.register_buffer("obs_count", torch.tensor(800.0001))
    one = run.save(tmp_path / "a.pt", step=25)
    run.model.obs_count.fill_(new)  # 720: one that decays
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=26))
    assert [(cause.cause, cause.severity) for cause in found.causes] == ([("A5", "warn")] if told else [])


@pytest.mark.parametrize(
    ("name", "told"), [("per_device_train_batch_size", True), ("device", False), ("local_rank", False)]
)
def test_a_batch_for_each_device_is_no_device(tmp_path, name, told):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20, trainer={"args": {name: 4}})
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21, trainer={"args": {name: 2}}))
    assert (f"{name} 4 → 2. Is that expected?" in found.verdict) == told and grave(found) == []


@pytest.mark.parametrize("fresh", [True, False])
def test_other_weights_are_asked_about_where_the_whole_optimizer_began_anew(tmp_path, fresh):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.lerp_(torch.randn_like(weight) * weight.std(), 0.2)
    if fresh:
        run.fresh()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert {cause.severity for cause in found.causes if cause.cause != "B1"} == {"warn" if fresh else "error"}


@pytest.mark.parametrize("restarted", [True, False])
def test_first_moments_that_are_reset_together_with_the_schedule(tmp_path, restarted):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 100)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
    if restarted:
        run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 100)
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert next(one.severity for one in found.causes if one.cause == "B3") == ("warn" if restarted else "error")


@pytest.mark.parametrize(("fill", "severity"), [(None, "warn"), (0.0, "error")])
def test_running_statistics_that_were_computed_anew(tmp_path, fill, severity):
    run = Run()
    run.model.insert(1, torch.nn.BatchNorm1d(32))
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    norm = run.model[1]
    with torch.no_grad():
        for statistic in (norm.running_mean, norm.running_var):
            statistic.fill_(fill) if fill is not None else statistic.mul_(0.9 + 0.2 * torch.rand_like(statistic))
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert [(cause.cause, cause.severity) for cause in found.causes] == [("A5", severity)]


def test_tables_that_were_resized_alike_are_asked_about(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    held = torch.load(one)
    for name in ("2.weight", "2.bias"):
        held["model"][name] = held["model"][name][:12].clone()
    for at in (2, 3):
        for moment in ("exp_avg", "exp_avg_sq"):
            held["optimizer"]["state"][at][moment] = held["optimizer"]["state"][at][moment][:12].clone()
    torch.save(held, tmp_path / "echo.pt")
    found = wb.doctor(one, echo=tmp_path / "echo.pt")
    assert [cause.severity for cause in found.causes] == ["warn"] and found.causes[0].question


@pytest.mark.parametrize("ratio", [1.5, 2.0])
def test_factors_that_are_no_number_of_ranks_are_asked_about(tmp_path, ratio):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    with torch.no_grad():
        run.model[0].weight.mul_(ratio)
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert (found.causes[0].cause, bool(found.causes[0].question)) == ("E12", ratio == 1.5)


@pytest.mark.parametrize("apart", [True, False])
def test_layers_that_are_equal_although_they_were_trained_apart(tmp_path, apart):
    run = Deep(3).train(20)
    one = run.saved(tmp_path / "a.pt", 20)
    run.train(5)
    for weight, other in zip(run.layers[1].parameters(), run.layers[0].parameters(), strict=True):
        with torch.no_grad():
            weight.copy_(other.lerp_(weight, 0.5) if apart else other)  # merged, or a copy with all its state
        for name, value in run.optimizer.state[other].items() if not apart else ():
            run.optimizer.state[weight][name].copy_(value)
    found = wb.doctor(one, run.saved(tmp_path / "b.pt", 25))
    told = {cause.cause: cause.severity for cause in found.causes}
    assert (told["E9"] == "warn") == apart


def test_state_that_has_another_shape_and_no_weight(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    held = torch.load(one)
    del held["model"]["0.bias"], held["model"]["2.bias"]
    torch.save(held, tmp_path / "b.pt")
    for at in (1, 3):
        for moment in ("exp_avg", "exp_avg_sq"):
            held["optimizer"]["state"][at][moment] = held["optimizer"]["state"][at][moment][:9].clone()
    torch.save(held, tmp_path / "echo.pt")
    assert wb.doctor(tmp_path / "b.pt", echo=tmp_path / "echo.pt").exit_code


@pytest.mark.parametrize("of", ["average", "largest"])
def test_second_moments_that_decay_are_no_largest_gradient_where_the_first_are_old(tmp_path, of):
    """Small gradients leave β2·v in an average, too; but a first moment that is old implies larger ones than v."""
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    run.fresh()
    run.train(20)
    old = [state["exp_avg"].clone() for state in run.optimizer.state.values()]
    run.train(20)
    one = run.save(tmp_path / "a.pt", step=40)
    for (weight, state), first in zip(run.optimizer.state.items(), old, strict=True):
        gradient = 1e-7 * torch.randn_like(weight)
        if of == "largest":
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"] = torch.maximum(0.95 * state["exp_avg_sq"], gradient**2)
        else:
            state["exp_avg"] = first.lerp_(gradient, 0.1)
            state["exp_avg_sq"].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        state["step"] += 1
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=41))
    assert bool(severities(found, "P04")) == (of == "average")


@pytest.mark.parametrize(("samples", "told"), [(90 + 20, []), (90 + 10, ["C6"])])
def test_a_batch_that_grew_before_the_load(tmp_path, samples, told):
    """The count of samples is off in both files; only what it advanced by says whether the load was right."""
    run = Run().train(20)
    args = {"global_batch_size": 10}
    one = run.save(tmp_path / "a.pt", step=20, args=args, consumed_samples=90)
    found = wb.doctor(one, run.train(2).save(tmp_path / "b.pt", step=22, args=args, consumed_samples=samples))
    assert [cause.cause for cause in found.causes if cause.severity != "info"] == told
    assert set(severities(found, "S18")) == ({"warn"} if told else {"info"})
    assert severities(wb.doctor(one), "S18") == ["warn"]


@pytest.mark.parametrize("batch", [48, 24])
def test_the_batch_size_among_the_arguments_of_a_callback(tmp_path, batch):
    """Lightning stores what a program adds as the state of a callback."""
    run = Run().train(10)
    callbacks = {"args": {"train_batch_size": 24}, "consumed_samples": 240}
    one = run.save(tmp_path / "a.pt", step=10, callbacks=callbacks)
    callbacks = {"args": {"train_batch_size": batch}, "consumed_samples": 240 + 20 * 48}
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=30, callbacks=callbacks))
    assert [cause.title for cause in found.causes if cause.severity != "info"] == (
        ["Data was skipped."] if batch == 24 else []
    )
    assert bool(severities(found, "N12")) == (batch == 48)


@pytest.mark.parametrize(("anew", "data"), [("", False), ("optimizer", False), ("both", True), ("both", False)])
def test_a_step_that_doubled_in_the_load_is_no_optimizer_that_began_anew(tmp_path, anew, data):
    """In all, the optimizer counts as many updates as the trainer's step advanced by."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 / (1 + n))
    one = run.train(25).save(tmp_path / "a.pt", step=25, **({"consumed_samples": 50} if data else {}))
    if anew:
        run.fresh()
        run.schedule.optimizer = run.optimizer
        run.optimizer.param_groups[0]["initial_lr"] = 1e-3
        run.schedule.last_epoch = run.schedule.last_epoch if anew == "optimizer" else 0
    more = {"consumed_samples": 102} if data else {}
    found = wb.doctor(one, run.train(26 if anew else 1).save(tmp_path / "b.pt", step=51, **more))
    assert found.causes[0].cause == ("B1" if anew else "C9") and bool(found.causes[0].question) == bool(anew)
    (said,) = [one.message for one in found if one.rule == "P01"]
    known = anew == "optimizer" or data
    assert known == ("they count only the updates since the load" in said)
    assert known != ("the schedule advanced alike" in said)


@pytest.mark.parametrize("beside", ["seed", "position", "schedule", None])
def test_a_rate_that_was_lowered_explains_no_other_cause(tmp_path, beside):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 / (1 + n / 100))
    sampler = {"seed": 311, "epoch": 0, "index": 20}
    one = run.train(20).save(tmp_path / "a.pt", step=20, sampler=sampler, args={"lr": 1e-3})
    run.schedule.base_lrs = [5e-4]
    for group in run.optimizer.param_groups:
        group["lr"], group["initial_lr"] = group["lr"] / 2, 5e-4
    for _ in range(2 * (beside == "schedule")):
        run.schedule.step()
    sampler = {"seed": 902 if beside == "seed" else 311, "epoch": 0, "index": 1 if beside == "position" else 21}
    two = run.train(1).save(tmp_path / "b.pt", step=21, sampler=sampler, args={"lr": 5e-4})
    told = [cause.cause for cause in wb.doctor(one, two).causes]
    own = {"seed": ["C7"], "position": ["C6"], "schedule": ["C3"], None: []}
    assert told == [*own[beside], "H1"]


@pytest.mark.parametrize("times", [1 / 3, 3.0])
def test_a_rate_that_was_scaled_everywhere_is_one_finding(tmp_path, times):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1 / (1 + n / 100))
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for group in run.optimizer.param_groups:
        group["lr"], group["initial_lr"] = group["lr"] * times, group["initial_lr"] * times
    run.schedule.base_lrs = [rate * times for rate in run.schedule.base_lrs]
    run.schedule._last_lr = [rate * times for rate in run.schedule._last_lr]
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert [(cause.cause, cause.severity) for cause in found.causes] == [("H1", "warn")]
    run.schedule.last_epoch = 0
    assert wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes[0].cause == "C1"


@pytest.mark.parametrize(("times", "later", "cause"), [(0.25, 1.0, "B8"), (4.0, 1.0, "C2"), (0.25, 0.5, "C1")])
def test_an_update_with_a_rate_that_no_file_states(tmp_path, times, later, cause):
    """The rate of a schedule that restarted is another one after the update, too."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    (group,) = run.optimizer.param_groups
    lr, group["lr"] = group["lr"], group["lr"] * times
    run.train(1)
    group["lr"] = lr * later
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=21))
    assert [one.cause for one in found.causes] == [cause] and severities(found, "P13") == ["warn"]


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_no_optimizer_updates_show_no_large_learning_rate(tmp_path, frozen):
    run = Run()
    layers = run.model[0], run.model[2]
    for weight in layers[0].parameters() if frozen else ():
        weight.requires_grad_(False)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    run.train(20)
    with torch.no_grad():
        for layer in layers[:1] if frozen else layers:
            for weight in layer.parameters():
                weight += 0.03 * torch.randn_like(weight).sign()
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=50))
    assert severities(found, "P05") and ("C2" in [cause.cause for cause in found.causes]) != frozen


@pytest.mark.parametrize("seed", [902, 311])
def test_a_new_stage_that_has_come_farther_than_the_old_one(tmp_path, seed):
    """All counts may be those of one run, or of the updates since; another seed says that a new sampler was made."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)
    one = run.train(20).save(tmp_path / "a.pt", step=20, sampler={"seed": 311})
    run.fresh()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)
    found = wb.doctor(one, run.train(30).save(tmp_path / "b.pt", step=30, sampler={"seed": seed}))
    told = {cause.cause: cause.severity for cause in found.causes}
    assert (told == {"C7": "warn", "B1": "warn"}) == (seed == 902) and ("error" in told.values()) == (seed == 311)


@pytest.mark.parametrize("anew", [True, False])
def test_counts_that_may_have_begun_anew_are_settled_by_the_moments(tmp_path, anew):
    """Optimizer and schedule rose from 11 to 20, and the step by 20: 9 updates and a wrong step, or 20 updates."""
    run = Run()

    def fresh() -> None:
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=2e-3)
        run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda n: 1.0)

    fresh()
    one = run.train(11).save(tmp_path / "a.pt", step=11)
    if anew:
        fresh()
    found = wb.doctor(one, run.train(20 if anew else 9).save(tmp_path / "b.pt", step=31))
    assert [cause.cause for cause in found.causes] == ["B1" if anew else "C9"]
    assert not [one for one in found if one.rule == "P05"]
    assert {k for one in found if one.rule == "P03" for k in one.evidence["k"]} == ({20} if anew else set())


@pytest.mark.parametrize("stale", [True, False])
def test_counters_that_fell_back_together_and_moments_that_do_not_continue_are_of_another_save(tmp_path, stale):
    """A layer is 6 counts behind: it was read from an older save, or left out of 6 updates."""
    run = Run()
    run.train(3)
    old = deepcopy(run.optimizer.state_dict()["state"])
    large = [weight.register_hook(lambda grad: 2 * grad) for weight in run.model[2].parameters()]
    one = run.train(6).save(tmp_path / "a.pt", step=9)
    for hook in large:
        hook.remove()
    if stale:
        state = run.optimizer.state_dict()
        state["state"] |= {at: old[at] for at in (2, 3)}
        run.optimizer.load_state_dict(state)
    else:
        run.model[2].requires_grad_(False)
        run.train(6)
        run.model[2].requires_grad_(True)
    found = wb.doctor(one, run.train(20 if stale else 14).save(tmp_path / "b.pt", step=29))
    assert [cause.cause for cause in found.causes] == (["G6"] if stale else [])


@pytest.mark.parametrize("old", [True, False])
def test_state_of_an_early_save_is_not_that_of_a_fresh_optimizer(tmp_path, old):
    """Counters are at 3, or at 1, after one update; that update shows whether it began at zero."""
    run = Run()
    early = deepcopy(run.train(2).optimizer.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=8)
    run.fresh()
    if old:
        run.optimizer.load_state_dict(early)
    first = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=9)).causes[0]
    assert first.cause in (("G6", "B6") if old else ("B1",))


@pytest.mark.parametrize("became", ["zeros", "others", "kept"])
def test_second_moments_that_fell_nearly_everywhere_were_lost(tmp_path, became):
    """Their profile does not show it in small tensors; those of other elements would be larger as often."""
    run = Run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    one = run.train(31).save(tmp_path / "a.pt", step=31)
    for state in run.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if became == "zeros":
                state[name].zero_()
            elif became == "others":
                state[name].view(-1).copy_(state[name].view(-1)[torch.randperm(state[name].numel())])
    if became != "kept":  # other gradients than before
        for weight in run.model.parameters():
            factors = 0.7 * (0.4 * torch.randn_like(weight)).exp()
            weight.register_hook(lambda grad, by=factors: grad * by)
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=51))
    told = {one.cause for one in found.causes if one.severity == "error"}
    assert ("B3" in told) == (became == "zeros") and bool(told) == (became != "kept")


@pytest.mark.parametrize("passed", [True, False])
def test_weights_that_sgd_passed_over_stand_with_their_momentum(tmp_path, passed):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    old = run.model[0].weight.detach().clone()
    run.optimizer.zero_grad(set_to_none=True)
    run.freeze(passed)
    run.train(1)
    with torch.no_grad():
        run.model[0].weight.copy_(old)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=21))
    assert severities(found, "P36") == ([] if passed else ["error"])


@pytest.mark.parametrize("bounded", [True, False])
def test_weights_at_their_bounds_are_of_no_other_save(tmp_path, bounded):
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16))
    run.fresh()

    def train(updates: int, bound: float) -> None:
        for _ in range(updates):
            for weight in run.model.parameters():
                weight.grad = torch.randn_like(weight)
            run.model[1].weight.grad = -torch.rand(32)
            run.optimizer.step()
            for weight in run.model.parameters():
                weight.data.clamp_(-bound, bound)

    train(20, 0.15)
    one = run.save(tmp_path / "a.pt", step=20)
    train(1, 0.15 if bounded else 1.0)
    run.model[1].weight.data.fill_(0.15)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=21))
    assert severities(found, "P36") == ([] if bounded else ["error"])


class Critic(Run):
    """An actor, a critic and a slow copy of it, with two optimizers that number their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {name: torch.nn.Linear(16, 16) for name in ("actor", "critic", "target_critic")}
        self.parts["target_critic"].load_state_dict(self.parts["critic"].state_dict())
        self.optimizers = {name: self.begun(name) for name in ("actor", "critic")}

    def begun(self, name: str) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parts[name].parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(self, updates: int) -> Critic:
        for _ in range(updates):
            x = torch.randn(8, 16)
            for name, optimizer in self.optimizers.items():
                optimizer.zero_grad()
                (self.parts[name](x) - x.roll(1, 1)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for slow, weight in zip(
                    *(self.parts[n].parameters() for n in ("target_critic", "critic")), strict=True
                ):
                    slow.lerp_(weight, 0.04)
        return self

    def saved(self, path: Path, step: int) -> Path:
        held = {f"net.{part}.{name}": w for part, one in self.parts.items() for name, w in one.state_dict().items()}
        states = [one.state_dict() for one in self.optimizers.values()]
        more = {"epoch": 0, "lr_schedulers": [], "pytorch-lightning_version": "2.5.0"}
        torch.save({"state_dict": held, "optimizer_states": states, "global_step": step, **more}, path)
        return path


@pytest.mark.parametrize("updates", [0, 1, 12])
@pytest.mark.parametrize("state", ["new", "kept"])
def test_networks_that_follow_new_ones_are_new_with_them(tmp_path, updates, state):
    run = Critic().train(30)
    one = run.saved(tmp_path / "a.ckpt", 30)
    run.parts["critic"].reset_parameters()
    run.parts["target_critic"].load_state_dict(run.parts["critic"].state_dict())
    if state == "new":
        run.optimizers["critic"] = run.begun("critic")
    two = run.train(updates).saved(tmp_path / "b.ckpt", 30 + updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert {cause.severity for cause in found.causes if cause.cause in ("A2", "B1")} == {
        "warn" if state == "new" or updates else "error"
    }
    title = "Some weights and their optimizer state are new."
    assert (title in [cause.title for cause in found.causes]) == (state == "new")


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_head_whose_moments_satisfy_the_laws_by_chance(tmp_path, kept):
    run = Run().train(23)
    one = run.save(tmp_path / "a.pt", step=23)
    run.model[2].reset_parameters()
    for weight in run.model[2].parameters():
        if not kept:
            del run.optimizer.state[weight]
    run.train(25)
    for weight in run.model[2].parameters():  # larger than before in every element
        run.optimizer.state[weight]["exp_avg_sq"].add_(1.0)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=48))
    assert severities(found, "P03") == []
    first = next(cause for cause in found.causes if cause.cause == "A2")
    assert (first.title == "Some weights and their optimizer state are new.") != kept


@pytest.mark.parametrize("anew", [True, False])
def test_units_that_began_anew_with_their_state_are_asked_about(tmp_path, anew):
    """If the moments of some rows began at zero but their weights continued, the trainer did not begin units anew."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    weight = run.model[0].weight
    for name in ("exp_avg", "exp_avg_sq"):
        run.optimizer.state[weight][name][:4] = 0
    if anew:
        weight.data[:4] = torch.randn(4, 16)
    run.train(4)
    first = wb.doctor(one, run.save(tmp_path / "b.pt", step=24)).causes[0]
    assert (first.cause, first.severity) == ("G5", "warn" if anew else "error")
    assert ("begin units anew" in first.question) == anew and ("zeros" in first.title) != anew


@pytest.mark.parametrize("fresh", [True, False])
def test_a_first_update_is_not_explained_by_small_moments_of_others(tmp_path, fresh):
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    run.fresh()
    run.train(20)
    state = list(run.optimizer.state.values())
    state[1]["exp_avg"].mul_(1e-9)
    state[1]["exp_avg_sq"].mul_(1e-18)  # as of a bias before a batch norm
    one = run.save(tmp_path / "a.pt", step=20)
    if fresh:
        run.fresh()
        for weight in run.model.parameters():
            weight.data.mul_(0.6)
    else:
        state[3]["exp_avg"], state[5]["exp_avg"] = state[5]["exp_avg"], state[3]["exp_avg"]
        state[3]["exp_avg_sq"], state[5]["exp_avg_sq"] = state[5]["exp_avg_sq"], state[3]["exp_avg_sq"]
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert (severities(found, "P17") == []) == fresh
    assert ("B5" in [cause.cause for cause in found.causes]) != fresh


@pytest.mark.parametrize("exchanged", [True, False])
def test_factors_that_were_exchanged_are_not_lost(tmp_path, exchanged):
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=1e-2)
    run.train = lambda updates: _of_columns(run, updates)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    states = [run.optimizer.state[layer.weight] for layer in run.model]
    columns = [states[at]["col_var"] for at in (1, 0, 2, 3)]
    for state, column in zip(states[:2], columns[:2], strict=True):
        state["col_var"] = column if exchanged else torch.zeros_like(column)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert ("B5" in [cause.cause for cause in found.causes]) == exchanged, found.causes


def _of_columns(run: Run, updates: int) -> Run:
    for _ in range(updates):
        for at, weight in enumerate(run.model.parameters()):
            scale = torch.linspace(-3, 3, 32).roll(7 * at).exp()
            weight.grad = torch.randn(weight.shape) * scale
        run.optimizer.step()
    return run


@pytest.mark.parametrize("teacher", [True, False])
def test_a_student_that_holds_its_teachers_weights(tmp_path, teacher):
    run = Run()
    slow = deepcopy(run.model)
    for _ in range(30):
        run.train(1)
        with torch.no_grad():
            for average, weight in zip(slow.parameters(), run.model.parameters(), strict=True):
                average.lerp_(weight, 0.1)

    def save(path: Path, student: torch.nn.Module) -> Path:
        held = {f"student.{n}": w for n, w in student.state_dict().items()}
        held |= {f"teacher.{n}": w for n, w in slow.state_dict().items()}
        torch.save({"model": held, "optimizer": run.optimizer.state_dict(), "step": 30}, path)
        return path

    one = save(tmp_path / "a.pt", run.model)
    if not teacher:
        torch.manual_seed(9)
        loaded = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    found = wb.doctor(one, echo=save(tmp_path / "echo.pt", slow if teacher else loaded))
    assert found.causes[0].cause == ("F4" if teacher else "A2") and len(found.causes) == 1
    assert ("teacher" in found.causes[0].title) == teacher and len(found.causes[0].tensors) == 4


@pytest.mark.parametrize("size", [1, 32])
def test_a_single_number_is_not_known_by_its_profile(tmp_path, size):
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.ModuleDict({"critic": torch.nn.Linear(16, size), "target_critic": torch.nn.Linear(16, size)})
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight in run.model.parameters():
                weight.grad = torch.randn_like(weight)
            run.optimizer.step()

    run.model["critic"].bias.data.add_(0.5)
    train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.model["target_critic"].bias.data.copy_(run.model["critic"].bias.detach())
    train(3)
    assert bool(severities(wb.doctor(one, run.save(tmp_path / "b.pt", step=23)), "P17")) == (size > 1)


@pytest.mark.parametrize("zeros", ["smallest", "masked", "two of four", "run"])
def test_zeros_where_the_smallest_weights_were_are_pruning(tmp_path, zeros):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for weight in (run.model[0].weight, run.model[2].weight):
        sizes = weight.detach().abs()
        if zeros == "smallest":
            weight.data[sizes < sizes.median()] = 0
        elif zeros == "masked":
            weight.data.mul_((sizes >= sizes.median()).float())  # negative ones become −0
        elif zeros == "two of four":
            sizes = sizes.view(-1, 4)
            weight.data.view(-1, 4).scatter_(1, sizes.argsort(1)[:, :2], 0.0)
        else:
            weight.data.view(-1)[70:390] = 0
    first = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes[0]
    assert (first.cause, first.severity) == ("G5", "error" if zeros == "run" else "warn")
    assert ("pruned" in first.question) == (zeros != "run")


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]])
def test_moments_of_one_layer_that_fell_are_those_of_another_save(tmp_path, layers):
    torch.manual_seed(0)
    names = [f"layers.{at}.mlp.{one}.weight" for at in range(3) for one in ("gate_proj", "up_proj", "down_proj")]
    weights = {name: torch.nn.Parameter(torch.randn(32, 32) / 6) for name in names}
    optimizer = torch.optim.AdamW(weights.items(), lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int, step: int) -> Path:
        for _ in range(updates):
            for weight in weights.values():
                weight.grad = 1e-3 * torch.randn_like(weight)
            optimizer.step()
        return save(tmp_path / f"{step}.pt", step)

    def save(path: Path, step: int) -> Path:
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    one = train(20, 20)
    old = {name: optimizer.state[weight]["exp_avg_sq"].clone() for name, weight in weights.items()}
    train(10, 30)
    for name in (name for name in names if int(name.split(".")[1]) in layers):
        floor, state = 0.95**10 * old[name], optimizer.state[weights[name]]
        state["exp_avg_sq"] = floor * torch.where(torch.rand_like(floor) < 0.015, 0.8, 1.1)
        state["exp_avg"].zero_()
    first = wb.doctor(one, save(tmp_path / "b.pt", 30)).causes[0]
    assert (first.cause, first.severity) == (("G6", "error") if len(layers) == 1 else ("D4", "warn")), first


@pytest.mark.parametrize(("state", "cause"), [(None, "G1"), ("exp_avg_sq", "G3")])
@pytest.mark.parametrize("factor", [2.0**40, 3.0])
def test_one_element_that_jumped_is_a_damaged_number(tmp_path, state, cause, factor):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    weight = run.model[2].weight
    with torch.no_grad():
        (weight if state is None else run.optimizer.state[weight][state])[3, 5] *= factor
    first = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20)).causes[0]
    assert (first.cause == cause) == (factor > 3), first
    if factor > 3:
        assert any("element (3, 5) was" in sign.message for sign in first.signs)
        later = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21)).causes[0]
        assert later.cause == cause


@pytest.mark.parametrize("seeds", [(50, 50, 50), (90, 91, 92)])
def test_ranks_that_took_one_seed_draw_the_same_numbers(tmp_path, seeds):
    run = Run().train(5)

    def save(name: str, step: int, seeds: Iterable[int]) -> Path:
        states = {}
        for rank, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            torch.rand(100 + rank, generator=generator)  # ranks draw different counts
            states[str(rank)] = generator.get_state()
        return run.save(tmp_path / name, step=step, rng_states=states)

    one = save("a.pt", 5, (50, 51, 52))
    run.train(1)
    report = wb.doctor(one, save("b.pt", 6, seeds))
    assert [one.cause for one in report.causes] == (["C8"] if len(set(seeds)) == 1 else [])


def test_counters_that_agreed_before_are_not_of_micro_batches(tmp_path):
    run = Run().train(2)
    old = deepcopy(run.optimizer.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=8)
    run.optimizer.load_state_dict(old)
    report = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=9))
    (sign,) = [one for cause in report.causes for one in cause.signs if one.rule == "S07"]
    assert "3 times as many; before the resume they agreed, at 8" in sign.message
    later = wb.doctor(one, run.train(19).save(tmp_path / "c.pt", step=28))
    assert "With 20 updates in between" in " ".join(str(later).split())


@pytest.mark.parametrize(
    ("broken", "since", "told"), [("buffer", 20, False), ("buffer", 21, True), ("weight", 20, True)]
)
def test_a_buffer_that_was_not_finite_before_either(tmp_path, broken, since, told):
    run = Run()
    run.model[0].register_buffer("unset", torch.zeros(4))

    def save(step: int) -> Path:
        if step >= since:
            (run.model[0].unset if broken == "buffer" else run.model[0].weight.data[0])[:4] = NAN
        return run.save(tmp_path / f"{step}.pt", step=step)

    run.train(20)
    one = save(20)
    found = wb.doctor(one, echo=one)
    assert bool({"error"} & set(severities(found, "S01"))) == (told and since == 20)
    found = wb.doctor(one, save(21))  # no update, or it would spread
    assert ("G1" in [cause.cause for cause in found.causes]) == told


@pytest.mark.parametrize("thawed", [True, False])
@pytest.mark.parametrize("updates", [1, 20])
def test_a_base_that_is_thawed_beside_its_adapters(tmp_path, thawed, updates):
    torch.manual_seed(0)
    base, low, high = torch.nn.Linear(16, 24), torch.nn.Linear(16, 4, bias=False), torch.nn.Linear(4, 24, bias=False)
    model = torch.nn.ModuleDict({"base_layer": base, "lora_A": low, "lora_B": high})
    optimizer = torch.optim.AdamW([low.weight, high.weight], lr=1e-3)

    def train(updates: int, step: int) -> Path:
        for _ in range(updates):
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            (base(x) + high(low(x)) - x.repeat(1, 2)[:, :24]).square().mean().backward()
            optimizer.step()
        weights = {f"net.proj.{name}": weight for name, weight in model.state_dict().items()}
        held = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
        path = tmp_path / f"{step}.ckpt"
        torch.save({**held, "global_step": step, "epoch": 0, "pytorch-lightning_version": "2.5.0"}, path)
        return path

    one = train(30, 30)
    if thawed:
        optimizer.add_param_group({"params": [*base.parameters()], "lr": 1e-3})
    else:
        with torch.no_grad():
            base.weight.mul_(1 + 0.1 * torch.rand_like(base.weight))
    causes = {cause.cause for cause in wb.doctor(one, train(updates, 30 + updates)).causes}
    assert not causes & {"F6", "B1"} and "H1" in causes if thawed else causes & {"F5", "F6"}


@pytest.mark.parametrize(("later", "cause"), [((0.1, 0.5), "H1"), ((0.1, 0.01), "B7"), ((0.0, 0.1), "B7")])
def test_decays_that_were_all_raised_are_a_setting(tmp_path, later, cause):
    run = Run()
    groups = [{"params": [w for w in run.model.parameters() if (w.ndim > 1) == large]} for large in (True, False)]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for group, decay in zip(run.optimizer.param_groups, (0.01, 0.1), strict=True):
        group["weight_decay"] = decay
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for group, decay in zip(run.optimizer.param_groups, later, strict=True):
        group["weight_decay"] = decay
    found = wb.doctor(one, run.train(12).save(tmp_path / "b.pt", step=32))
    assert {one.cause for one in found.causes} & {"H1", "B7"} == {cause}


def test_numbers_of_another_model_are_in_no_other_group(tmp_path):
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 16))
    run.model[1].requires_grad_(False)
    run.optimizer = torch.optim.AdamW([w for w in run.model.parameters() if w.requires_grad][::-1], lr=1e-3)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    parts = OrderedDict((name, torch.nn.Linear(16, 16)) for name in ("other", "more"))
    run.model = torch.nn.Sequential(parts)
    run.optimizer = torch.optim.AdamW(
        [
            {
                "params": [(n, w) for n, w in run.model.named_parameters() if (w.ndim > 1) == large],
                "weight_decay": decay,
            }
            for large, decay in ((True, 0.01), (False, 0.0))
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert not any("weight decay" in sign.message for sign in found)


@pytest.mark.parametrize("decay", [0.0, 0.999])
def test_an_average_without_a_decay_is_the_weights(tmp_path, decay):
    run = Run().train(200)

    def save(name: str, step: int) -> Path:
        kept = {key: weight.clone() for key, weight in run.model.state_dict().items()}
        if decay and step == 200:
            kept = {key: weight + 1e-2 * torch.randn_like(weight) for key, weight in kept.items()}
        return run.save(tmp_path / name, step=step, ema={"decay": decay, "shadow": kept})

    one = save("a.pt", 200)
    run.train(1)
    assert ("F4" in [cause.cause for cause in wb.doctor(one, save("b.pt", 201)).causes]) == (decay > 0)


@pytest.mark.parametrize("always", [True, False])
def test_weights_that_are_rounded_after_each_update(tmp_path, always):
    run = Run()

    def train(updates: int, rounded: bool) -> None:
        for _ in range(updates):
            run.train(1)
            for weight in run.model.parameters() if rounded else ():
                weight.data.copy_(weight.data.bfloat16())

    train(30, always)
    one = run.save(tmp_path / "a.pt", step=30)
    train(1, True)
    causes = [cause.cause for cause in wb.doctor(one, run.save(tmp_path / "b.pt", step=31)).causes]
    assert causes == ([] if always else ["D7"])


@pytest.mark.parametrize("later", ["gone", "others"])
def test_averages_that_are_no_longer_stored(tmp_path, later):
    run = Run().train(20)
    kept = {key: 0.9 * weight for key, weight in run.model.state_dict().items()}
    one = run.save(tmp_path / "a.pt", step=20, ema={"decay": 0.9, "shadow": kept})
    others = {key: weight * (1 + 0.1 * torch.rand_like(weight)) for key, weight in kept.items()}
    more = {"ema": {"decay": 0.9, "shadow": others}} if later == "others" else {}
    first = wb.doctor(one, echo=run.save(tmp_path / "b.pt", step=20, **more)).causes[0]
    assert first.cause == "F4" and ("no longer stored" in first.title) == (later == "gone")
    if later == "gone":
        titles = [one.title for one in wb.doctor(one, run.train(1).save(tmp_path / "c.pt", step=21)).causes]
        assert titles == ["The averaged weights are no longer stored."]


@pytest.mark.parametrize(("factors", "told"), [((0.3, 1.5), "some rose"), ((0.3, 0.5), "fell: its schedule")])
def test_rates_of_groups_that_rose_and_fell(tmp_path, factors, told):
    run = Run()
    groups = [{"params": [w for w in run.model.parameters() if (w.ndim > 1) == large]} for large in (True, False)]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for group, factor in zip(run.optimizer.param_groups, factors, strict=True):
        group["lr"] *= factor
    causes = wb.doctor(one, echo=run.save(tmp_path / "b.pt", step=20)).causes
    assert told in next(cause.title for cause in causes if cause.cause == "C1")


def test_maxima_that_amsgrad_begins_are_a_setting(tmp_path):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for group in run.optimizer.param_groups:
        group["amsgrad"] = True
    for state in run.optimizer.state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    assert [cause.cause for cause in wb.doctor(one, echo=run.save(tmp_path / "b.pt", step=20)).causes] == ["H1"]


def test_groups_of_numbers_count_each_parameter_once(tmp_path):
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    groups = [{"params": [w for w in run.model.parameters() if (w.ndim > 1) == large]} for large in (True, False)]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3)
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    run.train(20)
    save_file({f"h.{name}": weight for name, weight in run.model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.save(run.optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 20, "epoch": 1.0, "log_history": []}))
    found = [one.message for one in wb.doctor(tmp_path) if one.rule == "N27"]
    assert found == ["2 of 2 vectors decay, but 2 of 2 matrices do not"]


@pytest.mark.parametrize(("new", "told"), [(20, "began anew"), (10, "fell")])
def test_a_counter_that_is_larger_has_not_fallen(tmp_path, new, told):
    run = Run()
    run.model.insert(1, torch.nn.BatchNorm1d(32))
    run.fresh()
    one = run.train(18).save(tmp_path / "a.pt", step=18)
    run.train(20)
    run.model[1].num_batches_tracked.fill_(new)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=38))
    assert any(told in sign.message for sign in found if sign.rule == "P24")


@pytest.mark.parametrize("fell", [1, 2])
def test_a_zero_point_that_fell_is_no_counter(tmp_path, fell):
    """A restart makes all integers of a name fall; one of them alone is a setting that moved."""
    run = Run()
    for layer in (run.model[0], run.model[2]):
        layer.register_buffer("zero_point", torch.tensor(130))
    one = run.train(18).save(tmp_path / "a.pt", step=18)
    run.train(20)
    for layer in (run.model[0], run.model[2])[:fell]:
        layer.zero_point.fill_(121)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=38))
    assert bool(severities(found, "P24")) == (fell == 2)


@pytest.mark.parametrize("before", ["none", "some"])
def test_adapters_that_begin_in_the_load_are_zero(tmp_path, before):
    run = Run().train(20)
    held = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 20}
    names = [("base_layer", 1.0), ("lora_A", 1.0), ("lora_B", 0.0)]
    new = {f"0.{name}.weight": torch.full((4, 4), value) for name, value in names}
    one, two = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(held if before == "none" else held | {"model": {n: w + 0.5 for n, w in new.items()}}, one)
    torch.save(held | {"model": new}, two)
    assert bool(severities(wb.doctor(one, echo=two), "N22")) == (before == "some")


@pytest.mark.parametrize("changed", ["batch_size", "lr"])
def test_a_batch_size_sets_no_learning_rate(tmp_path, changed):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.95**at)
    args = {"batch_size": 8, "lr": 1e-3}
    one = run.train(20).save(tmp_path / "a.pt", step=20, args=args)
    two = run.train(12).save(tmp_path / "b.pt", step=32, args=args | {changed: 2 * args[changed]})
    assert bool(severities(wb.doctor(one, two), "P15")) == (changed == "lr")


@pytest.mark.parametrize("shape", [(), (4, 4)])
def test_one_number_does_not_show_a_learning_rate(tmp_path, shape):
    torch.manual_seed(0)
    weights = {"scale": torch.nn.Parameter(torch.ones(shape)), "w": torch.nn.Parameter(torch.randn(16, 16))}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def save(name: str, step: int) -> Path:
        state = {"model": weights, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, tmp_path / name)
        return tmp_path / name

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight in weights.values():
                weight.grad = weight.detach() + 0.1 * torch.randn(weight.shape)
            optimizer.step()

    train(10)
    one, old = save("a.pt", 10), weights["scale"].detach().clone()
    train(1)
    with torch.no_grad():
        weights["scale"] += 2 * (weights["scale"] - old)  # three times the update
    fired = {sign.rule for cause in wb.doctor(one, save("b.pt", 11)).causes for sign in cause.signs}
    assert ("P13" in fired) == bool(shape), fired


@pytest.mark.parametrize(("counts", "fired"), [((480.0001, 160.0001), True), ((480.43, 160.17), False)])
def test_a_count_of_samples_that_begins_above_zero_does_not_fall(tmp_path, counts, fired):
    """With a larger batch, it is more than what it would be at the old one; one that decays may fall."""
    run = Run()
    run.model.register_buffer("count", torch.tensor(counts[0]))
    one = run.train(60).save(tmp_path / "a.pt", step=60)
    run.model.count.fill_(counts[1])
    found = wb.doctor(one, run.train(10).save(tmp_path / "b.pt", step=70))
    assert bool(severities(found, "P24")) == fired
    assert [one.cause for one in found.causes] == (["A5"] if fired else [])


@pytest.mark.parametrize("through", [None, torch.bfloat16, torch.float16])
def test_low_bits_that_were_cut_off_show_after_some_updates(tmp_path, through):
    """The updates set them anew, but the weights moved by what the rounding took away, too."""
    run = Run()
    run.optimizer.param_groups[0]["lr"] = 1e-4 if through != torch.float16 else 2e-5
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    with torch.no_grad():
        for weight in run.model.parameters() if through is not None else ():
            weight.copy_(weight.to(through))
    found = wb.doctor(one, run.train(6).save(tmp_path / "b.pt", step=26))
    assert [one.cause for one in found.causes][:1] == ([] if through is None else ["D7"]), found.verdict
    told = [sign.evidence["through"] for sign in found if sign.rule == "P31"]
    assert told == ([] if through is None else [str(through).rpartition(".")[2]])


@pytest.mark.parametrize(("schedule", "first"), [(True, "F7"), (False, "C1")])
def test_a_larger_table_does_not_explain_a_restarted_schedule(tmp_path, schedule, first):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(40, 8), "body": torch.nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model["body"](model["embed"](torch.arange(40))).square().mean().backward()
        optimizer.step()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(held | {"scheduler": {"last_epoch": 3, "base_lrs": [1e-3], "_last_lr": [1e-3]}}, tmp_path / "a.pt")
    held = deepcopy(held)
    more = torch.nn.functional.pad
    held["model"]["embed.weight"] = more(held["model"]["embed.weight"], (0, 0, 0, 6), value=0.1)
    for name in ("exp_avg", "exp_avg_sq"):
        held["optimizer"]["state"][0][name] = more(held["optimizer"]["state"][0][name], (0, 0, 0, 6))
    last = 3 if schedule else 0
    torch.save(held | {"scheduler": {"last_epoch": last, "base_lrs": [1e-3], "_last_lr": [1e-3]}}, tmp_path / "b.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "b.pt")
    assert found.causes[0].cause == first and "F7" in {one.cause for one in found.causes}


@pytest.mark.parametrize("updates", [0, 1, 6])
@pytest.mark.parametrize(
    ("name", "cause", "axis"),
    [("gate_up_proj", "E3", -1), ("gate_up_proj", "E3", -2), ("down_proj", "E1", -1), ("", "", -1)],
)
def test_halves_of_fused_experts(tmp_path, name, cause, axis, updates):
    """Experts of transformers store [experts, in, out], so that gate and up are columns; elsewhere they are rows."""
    torch.manual_seed(0)
    shapes = {"gate_up_proj": (4, 24, 32), "down_proj": (4, 16, 24)}
    held = {f"h.0.mlp.experts.{n}": 0.2 * torch.randn(shape) for n, shape in shapes.items()}
    held = {n: torch.nn.Parameter(w if axis == -1 else w.mT.contiguous()) for n, w in held.items()}
    optimizer = torch.optim.AdamW(held.values(), lr=1e-4, betas=(0.9, 0.95))

    def train(updates: int) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            up, down = (w if axis == -1 else w.mT for w in held.values())
            gate, value = torch.bmm(torch.randn(4, 16, 24), up).chunk(2, -1)
            torch.bmm(gate.sigmoid() * value, down).sub(1).square().mean().backward()
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        torch.save({"model": dict(held), "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    for weight in [weight for key, weight in held.items() if name and key.endswith(name)]:
        state = optimizer.state[weight]
        for tensor in (weight.data, state["exp_avg"], state["exp_avg_sq"]):
            tensor.copy_(torch.cat(tensor.chunk(2, axis)[::-1], axis))
    train(updates)
    two = save(tmp_path / "b.pt", 30 + updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert [one.cause for one in found.causes][:1] == ([cause] if cause else []), found.verdict


@pytest.mark.parametrize("what", ["moment", "gradient"])
def test_a_large_second_moment_is_not_a_gradient_that_grew(tmp_path, what):
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    weight = run.model[0].weight
    if what == "moment":
        run.optimizer.state[weight]["exp_avg_sq"][7, 3] *= 2.0**32
    else:
        weight.register_hook(lambda grad: 1e4 * grad)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert severities(found, "P30") == ["warn"]
    assert ("B10" in {one.cause for one in found.causes}) == (what == "gradient")
    assert (found.causes[0].cause == "G3") == (what == "moment")


@pytest.mark.parametrize("twice", [False, True])
def test_several_updates_for_each_step_of_the_trainer(tmp_path, twice):
    """Before and after, as with inner steps; a load after which each is counted twice is not that."""
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30 if twice else 10)
    two = run.train(30 if twice else 6).save(tmp_path / "b.pt", step=40 if twice else 12)
    assert bool(grave(wb.doctor(one, two))) == twice


@pytest.mark.parametrize("rate", [0.0, 1e-3])
@pytest.mark.parametrize("updates", [1, 6])
def test_weights_of_a_group_whose_rate_is_zero_stand_still(tmp_path, rate, updates):
    run = Run()
    still = [run.model[0].bias]
    rest = [weight for weight in run.model.parameters() if weight is not still[0]]
    groups = [{"params": still, "lr": rate}, {"params": rest}]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 - step / 100)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    held = still[0].detach().clone()
    run.train(updates)
    still[0].data.copy_(held)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=20 + updates))
    assert severities(found, "P36") == ([] if rate == 0 else ["error"])


@pytest.mark.parametrize("new", [False, True])
def test_numbers_that_name_other_parameters_are_not_new_ones(tmp_path, new):
    """Order of the groups changed, so that numbers say nothing: counters of 1 belong to state that began anew."""
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    first, *rest = run.model.parameters()
    run.optimizer = torch.optim.AdamW(rest if new else [first, *rest], lr=1e-3)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    state = {weight: run.optimizer.state[weight] for weight in rest}
    run.optimizer = torch.optim.AdamW([{"params": rest}, {"params": [first]}], lr=1e-3)
    run.optimizer.state.update(state)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert ("had no state before" in str([sign.message for sign in found])) == new
    assert any(cause.severity != "info" for cause in found.causes) != new


@pytest.mark.parametrize("kept", ["before", "anew"])
def test_copies_of_the_weights_that_each_update_makes(tmp_path, kept):
    """SAM keeps the weights from before its update; state that was made from the weights by the load is no such."""
    run = Run().train(20)

    def saved(name: str, step: int, copies: list[torch.Tensor]) -> Path:
        held = run.optimizer.state_dict()
        state = {n: one | {"z": copy} for (n, one), copy in zip(held["state"].items(), copies, strict=True)}
        torch.save(
            {"model": run.model.state_dict(), "optimizer": held | {"state": state}, "step": step}, tmp_path / name
        )
        return tmp_path / name

    def weights() -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in run.model.parameters()]

    old = [weight + 0.1 * torch.randn_like(weight) for weight in weights()]
    one, now = saved("a.pt", 20, old), weights()
    run.train(1)
    moved = [copy - 2e-3 * torch.randn_like(copy).sign() for copy in now]
    two = saved("b.pt", 21, now if kept == "before" else moved)
    assert ("B1" in {cause.cause for cause in wb.doctor(one, two).causes}) == (kept == "anew")


def test_tensors_without_elements_change_nothing(tmp_path):
    run = Run()
    run.model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 4)))
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    assert grave(wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))) == []


@pytest.mark.parametrize(("index", "causes"), [(20, ["C6"]), (30, []), (24, ["C6"])])
def test_a_position_that_began_anew_may_be_beyond_the_old_one(tmp_path, index, causes):
    run = Run().train(10)
    one = run.save(tmp_path / "a.pt", step=10, sampler={"epoch": 0, "index": 10})
    two = run.train(20).save(tmp_path / "b.pt", step=30, sampler={"epoch": 0, "index": index})
    assert [found.cause for found in wb.doctor(one, two).causes] == causes


@pytest.mark.parametrize(("restarted", "first"), [(False, "A4"), (True, "C1")])
def test_new_tensors_do_not_explain_a_restarted_schedule(tmp_path, restarted, first):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 100)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.model.aux = torch.nn.Linear(16, 2)
    run.model.forward = lambda x: run.model[2](run.model[1](run.model[0](x)))
    held = run.schedule.state_dict() | ({"last_epoch": 0, "_step_count": 1} if restarted else {})
    run.schedule = None
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20, scheduler=held))
    assert found.causes[0].cause == first and "A4" in {cause.cause for cause in found.causes}


@pytest.mark.parametrize(("count", "causes"), [(11, []), (1, ["C1"])])
def test_a_schedule_advances_as_its_own_of_several_optimizers(tmp_path, count, causes):
    """The first optimizer makes an update in every third step."""
    torch.manual_seed(0)
    nets = [torch.nn.Linear(12, 10), torch.nn.Linear(12, 10)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=lr) for net, lr in zip(nets, (1e-3, 4e-3), strict=True)]
    schedules = [torch.optim.lr_scheduler.ConstantLR(one, factor=1.0, total_iters=0) for one in optimizers]

    def save(path: Path, step: int) -> Path:
        held = {
            "optimizers": [o.state_dict() for o in optimizers],
            "lr_schedulers": [s.state_dict() for s in schedules],
        }
        model = {f"{at}.{name}": w.clone() for at, net in enumerate(nets) for name, w in net.state_dict().items()}
        torch.save({"model": model, "step": step, **held}, path)
        return path

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            for at in (0, 1) if step % 3 == 0 else (1,):
                optimizers[at].zero_grad()
                nets[at](torch.randn(8, 12)).square().mean().backward()
                optimizers[at].step()
                schedules[at].step()

    train(0, 29)
    one = save(tmp_path / "a.pt", 29)
    train(29, 33)
    schedules[0].last_epoch = count
    found = wb.doctor(one, save(tmp_path / "b.pt", 33))
    assert [cause.cause for cause in found.causes if cause.cause[0] == "C"][:1] == causes, found.verdict


@pytest.mark.parametrize(("trained", "cause"), [(1e-3, "D7"), (0.1, "A3")])
def test_norms_that_are_rounded_to_one(tmp_path, trained, cause):
    torch.manual_seed(0)
    model = {"up.weight": torch.randn(32, 16), "down.weight": torch.randn(16, 32)}
    model["norm.weight"] = 1 + trained * torch.linspace(1, 2, 16)
    torch.save({"model": model, "step": 20}, tmp_path / "a.pt")
    halved = {name: weight.to(torch.bfloat16).float() for name, weight in model.items()}
    torch.save({"model": halved | {"norm.weight": torch.ones(16)}, "step": 20}, tmp_path / "echo.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "echo.pt")
    assert ("A3" in {one.cause for one in found.causes}) == (cause == "A3") and cause in {
        one.cause for one in found.causes
    }


@pytest.mark.parametrize("lost", [True, False])
def test_counters_that_begin_at_the_load_suggest_fresh_state(tmp_path, lost):
    """Parameters that moved to another group have other numbers: their state cannot be compared by name."""
    torch.manual_seed(0)
    shapes = [(64, 2), (64, 2), (8, 4), (8,), (4, 8)]
    names = ["encoding.0", "encoding.1", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight"]
    weights = [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in shapes]
    optimizer = torch.optim.Adam(weights, lr=1e-3, betas=(0.9, 0.99))

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        model = {name: weight.detach().clone() for name, weight in zip(names, weights, strict=True)}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    group = optimizer.param_groups[0]
    optimizer.param_groups = [{**group, "params": weights[2:]}, {**group, "params": weights[:2], "lr": 3e-4}]
    for weight in weights[:2] if lost else []:
        del optimizer.state[weight]
    train(4)
    causes = [cause.cause for cause in wb.doctor(one, save(tmp_path / "b.pt", 34)).causes]
    assert ("B1" in causes) == lost and "B2" not in causes


@pytest.mark.parametrize("exchanged", [True, False])
def test_sums_of_another_table_are_found_after_some_updates(tmp_path, exchanged):
    torch.manual_seed(2)
    tables = [torch.nn.Parameter(torch.randn(50, 8)) for _ in range(2)]
    scales = [torch.exp(1.5 * torch.randn(50, 8)) for _ in tables]
    optimizer = torch.optim.Adagrad(tables, lr=1e-2)

    def train(updates: int) -> None:
        for _ in range(updates):
            for table, scale in zip(tables, scales, strict=True):
                table.grad = scale * torch.randn(50, 8)
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        model = {f"tables.{at}.weight": one.detach().clone() for at, one in enumerate(tables)}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    if exchanged:
        a, b = (optimizer.state[table] for table in tables)
        a["sum"], b["sum"] = b["sum"], a["sum"]
    train(10)
    found = wb.doctor(one, save(tmp_path / "b.pt", 40))
    assert [cause.cause for cause in found.causes][:1] == (["B5"] if exchanged else []), found.verdict


class Normed(Run):
    """Inputs and outputs are normed by statistics of their own: five kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        inner = (torch.nn.Linear(16, 16) for _ in range(2))
        self.model = torch.nn.Sequential(*inner, torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.fresh()
        for name, size in (("mean", 20), ("var", 20), ("mu", 1), ("sigma", 1)):
            self.model.register_buffer(name, torch.ones(size))
        self.model.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def train(self, updates: int) -> Run:
        for _ in range(updates):
            super().train(1)
            self.model.count += 8
        return self


@pytest.mark.parametrize("lost", [True, False])
def test_a_count_in_float64_is_a_buffer(tmp_path, lost):
    run = Normed()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    if lost:
        with torch.no_grad():
            run.model[0].weight.copy_(torch.randn(16, 16))
    found = wb.doctor(one, run.train(3).save(tmp_path / "b.pt", step=23))
    assert [cause.cause for cause in found.causes] == (["A2"] if lost else []), found.verdict


def test_a_head_that_the_optimizer_holds_too_is_asked_about(tmp_path):
    torch.manual_seed(0)
    embed, norm, *body = (torch.nn.Parameter(torch.randn(size)) for size in ((40, 8), (8,), (8, 8), (8, 8)))
    model = {"embed_tokens.weight": embed, "up.weight": body[0], "down.weight": body[1], "norm.weight": norm}
    model["lm_head.weight"] = embed
    optimizer = torch.optim.AdamW([embed, norm, *body], lr=1e-3)

    def train(updates: int) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            hidden = model["embed_tokens.weight"] @ body[0] @ body[1] * norm
            (hidden @ model["lm_head.weight"].T).sub(torch.eye(40)).square().mean().backward()
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(20)
    one = save(tmp_path / "a.pt", 20)
    model["lm_head.weight"] = torch.nn.Parameter(embed.detach().clone())
    optimizer.add_param_group({"params": [model["lm_head.weight"]]})
    train(2)
    found = wb.doctor(one, save(tmp_path / "b.pt", 22))
    assert [(one.severity, bool(one.question)) for one in found.causes if one.cause == "F2"] == [("warn", True)]


@pytest.mark.parametrize(("size", "told"), [(1e-9, []), (1e-3, ["P33"])])
def test_averages_of_rounding_errors_do_not_continue(tmp_path, size, told):
    """A bias before a batch norm has no gradient but rounding errors."""
    torch.manual_seed(0)
    names = [f"{at}.{name}" for at in range(4) for name in ("weight", "bias")]
    model = {name: torch.randn(16, 16) if name.endswith("weight") else torch.randn(16) for name in names}
    averages = {name: 1e-3 * torch.randn_like(weight) for name, weight in model.items()}
    averages["1.bias"] = size * torch.randn(16)

    def save(path: Path, step: int) -> Path:
        state = {
            at: {"step": step, "exp_avg_fast": averages[name], "nu": torch.ones(1)} for at, name in enumerate(names)
        }
        group = {"lr": 1e-3, "betas": (0.9, 0.99), "params": list(range(len(names)))}
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}, "step": step}, path)
        return path

    one = save(tmp_path / "a.pt", 30)
    averages = {name: 0.99 * average for name, average in averages.items()}
    averages["1.bias"] = 0.3 * size * torch.randn(16)
    model = {name: weight + 1e-4 for name, weight in model.items()}
    found = wb.doctor(one, save(tmp_path / "b.pt", 31))
    assert [sign.rule for sign in found if sign.rule == "P33"] == told


@pytest.mark.parametrize("kept", [True, False])
def test_state_with_other_numbers_is_not_compared_by_number(tmp_path, kept):
    torch.manual_seed(0)
    sizes = {"layers.0.weight": (8, 4), "layers.1.weight": (8, 5), "layers.2.weight": (8, 5), "head.weight": (8, 6)}
    weights = {name: torch.nn.Parameter(torch.randn(size)) for name, size in sizes.items()}

    def save(path: Path, **more: Any) -> Path:
        model = {name: weight.detach().clone() for name, weight in weights.items()}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": 3, **more}, path)
        return path

    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)
    for _ in range(3):
        for weight in weights.values():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    one = save(tmp_path / "a.pt", table=torch.ones(8))
    gone = weights.pop("layers.1.weight")
    optimizer.param_groups[0]["params"] = list(weights.values())
    del optimizer.state[gone]
    found = wb.doctor(one, echo=save(tmp_path / "echo.pt", table=torch.ones(8) if kept else torch.zeros(8)))
    assert severities(found, "R16") == ([] if kept else ["warn"])


class Stack(Run):
    """Four equal layers between an embedding and a head, in groups of matrices and vectors; numbers follow groups."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        named = OrderedDict((f"layer{n}", torch.nn.Linear(16, 16)) for n in range(4))
        self.model = torch.nn.Sequential(OrderedDict(embed=torch.nn.Linear(16, 16, bias=False), **named))
        self.model.add_module("head", torch.nn.Linear(16, 16))
        self.model.add_module("norm", torch.nn.LayerNorm(16))
        self.model.add_module("out", torch.nn.Linear(16, 16, bias=False))
        self.model.head = torch.nn.Sequential(torch.nn.Linear(16, 12), torch.nn.Linear(12, 16))
        every = list(self.model.parameters())
        groups = [[one for one in every if one.ndim > 1], [one for one in every if one.ndim < 2]]
        self.optimizer = optimizer([{"params": some, "weight_decay": 0.0} for some in groups], lr=1e-3)
        self.schedule = None

    def regroup(self, *moved: torch.nn.Parameter, **settings: Any) -> None:
        """Move these parameters to a group of their own, which comes last."""
        groups, ids = self.optimizer.param_groups, set(map(id, moved))
        for group in groups:
            group["params"] = [one for one in group["params"] if id(one) not in ids]
        groups.append({**groups[0], "params": list(moved), **settings})

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[getattr(self.model, f"layer{n}").weight] for n in range(4)]


@pytest.mark.parametrize("fault", ["", "next", "lost", "zero"])
@pytest.mark.parametrize("later", ["echo", "after"])
def test_state_is_compared_where_parameters_moved_to_a_group_of_their_own(tmp_path, later, fault):
    """All numbers after it mean other parameters; order, shapes and values show which."""
    run = Stack()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.regroup(*run.model.layer1.parameters(), lr=5e-4)
    states = run.states()
    if fault == "next":
        held = [dict(state) for state in states]
        for state, other in zip(states, [*held[1:], held[0]], strict=True):
            state.update(other)
    elif fault == "lost":
        for weight in run.model.layer2.parameters():
            del run.optimizer.state[weight]
    elif fault == "zero":
        for state in run.optimizer.state.values():
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
    two = (run if later == "echo" else run.train(1)).save(tmp_path / "b.pt", step=20 + (later == "after"))
    found = wb.doctor(one, **{later: two})
    told = {"next": "B5", "lost": "B1", "zero": "B3"}.get(fault)
    assert [cause.cause for cause in found.causes if cause.severity != "info"][:1] == ([told] if told else [])
    if not fault:
        leg = found.ledger.change("load" if later == "echo" else "train")
        assert leg.seen("exp_avg") == {name for name, _ in run.model.named_parameters()}
        assert "32 of 32 moments" in found.coverage


def test_numbers_that_no_value_tells_apart_are_not_compared(tmp_path):
    """Two weights that are no module moved, and their state is that of others: nothing is said of any one."""
    run = Stack()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.regroup(run.model.layer0.weight, run.model.layer2.weight)
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    leg = found.ledger.change("load")
    assert found.causes[0].cause == "B3" and "layer1.weight" not in leg.hit(["exp_avg"]), found.verdict
    assert {"head.0.weight", "layer1.bias"} <= leg.hit(["exp_avg"])


@pytest.mark.parametrize("fault", ["", "next", "lost"])
@pytest.mark.parametrize("later", ["echo", "after"])
def test_state_by_numbers_is_compared_beside_a_new_head(tmp_path, later, fault):
    """The shape of the head's own state names it; the other numbers have no names, and mean what they meant."""
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(5)))
    run.fresh()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    states = [run.optimizer.state[layer.weight] for layer in run.model]
    run.model[4].probe = torch.nn.Linear(16, 3, bias=False)
    run.optimizer.add_param_group({"params": [run.model[4].probe.weight]})
    if fault == "next":
        held = [dict(state) for state in states]
        for state, other in zip(states, [*held[1:], held[0]], strict=True):
            state.update(other)
    elif fault == "lost":
        del run.optimizer.state[run.model[2].weight]
    run.optimizer.zero_grad()
    run.model[4].probe.weight.grad = torch.randn(3, 16)
    if later == "after":
        x = torch.randn(8, 16)
        (run.model(x) - x.roll(1, 1)).square().mean().backward()
        run.optimizer.step()
    found = wb.doctor(one, **{later: run.save(tmp_path / "b.pt", step=20 + (later == "after"))})
    told = {"next": ["B5", "A4"], "lost": ["B1", "A4"], "": ["A4"]}[fault]
    loud = [cause.cause for cause in found.causes if cause.severity != "info"]
    assert list(dict.fromkeys([*loud[:1], "A4"])) == told and "A4" in loud, found.verdict


@pytest.mark.parametrize("factor", [0.1, 1.0])
def test_settings_are_compared_where_a_group_was_added(tmp_path, factor):
    run = Stack()
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    run.regroup(*run.model.layer1.parameters(), lr=5e-4)
    for group in run.optimizer.param_groups[:2]:
        group["lr"] *= factor
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=10))
    assert severities(found, "R14") == (["warn"] if factor != 1 else [])


def test_weight_decay_of_a_group_that_was_added_is_a_setting(tmp_path):
    run = Stack()
    one = run.train(10).save(tmp_path / "a.pt", step=10)
    run.regroup(*run.model.layer1.parameters(), weight_decay=0.2)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=11))
    assert [cause.cause for cause in found.causes] == ["H1"]


@pytest.mark.parametrize("doubled", [True, False])
def test_young_counters_of_a_new_head_restart_no_others(tmp_path, doubled):
    run = Stack()
    run.schedule = torch.optim.lr_scheduler.ConstantLR(run.optimizer, 1.0, 1)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    run.model.add_module("probe", torch.nn.Linear(16, 16))
    run.regroup(*run.model.probe.parameters())
    run.schedule.base_lrs.append(1e-3)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=61 if doubled else 31))
    assert found.causes[0].cause == ("C9" if doubled else "A4"), found.verdict


@pytest.mark.parametrize("norms", [True, False])
def test_a_table_that_grew_explains_no_other_weight(tmp_path, norms):
    """Two optimizers number their state, and which parameter a number means is unknown."""
    torch.manual_seed(0)
    body = {
        f"layers.{n}.{name}": size for n in range(3) for name, size in (("fc.weight", (16, 16)), ("norm.weight", 16))
    }
    model = {name: 1 + 0.3 * torch.rand(size) for name, size in {"embed_tokens.weight": (40, 16), **body}.items()}

    def save(path: Path) -> Path:
        sides = [[one for name, one in model.items() if ("fc" in name) == first] for first in (True, False)]
        kept = [{n: {"step": torch.tensor(9.0), "exp_avg": one / 9} for n, one in enumerate(some)} for some in sides]
        optimizers = [
            {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(state)}]}
            for state in kept
        ]
        torch.save({"model": model, "optimizers": optimizers, "step": 9}, path)
        return path

    one = save(tmp_path / "a.pt")
    model["embed_tokens.weight"] = torch.cat([model["embed_tokens.weight"], torch.rand(6, 16)])
    kept = dict(model)
    two = save(tmp_path / "echo.pt")
    if norms:
        held = torch.load(two)
        held["model"] = {name: torch.ones(16) if "norm" in name else one for name, one in kept.items()}
        torch.save(held, two)
    found = wb.doctor(one, echo=two)
    assert [cause.cause for cause in found.causes] == (["A3", "F7"] if norms else ["F7"])


@pytest.mark.parametrize("adapters", [True, False])
def test_a_base_under_adapters_that_were_not_loaded_either(tmp_path, adapters):
    run = Adapted(24)
    one = run.train(30).save(tmp_path / "a.pt", 30)
    with torch.no_grad():
        for weight in (run.base.weight, run.low.weight, run.high.weight) if adapters else (run.base.weight,):
            torch.nn.init.normal_(weight, std=0.2)
    first = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", 31)).causes[0]
    assert (first.cause == "F6") != adapters


@pytest.mark.parametrize(("name", "value", "causes"), [("decay", 0.999, ["H1"]), ("num_updates", 3, ["F4"])])
def test_the_decay_of_an_average_is_a_setting(tmp_path, name, value, causes):
    run = Run().train(20)
    ema = {"decay": 0.98, "num_updates": 20}
    one = run.save(tmp_path / "a.pt", step=20, ema=ema)
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20, ema=ema | {name: value}))
    assert [cause.cause for cause in found.causes] == causes


def test_a_lower_rate_is_no_reason_for_moments_that_are_lost(tmp_path):
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()
    run.optimizer.param_groups[0]["lr"] /= 2
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))
    assert next(one.severity for one in found.causes if one.cause == "B3") == "error"


@pytest.mark.parametrize("stale", [True, False])
def test_rows_that_second_moments_of_an_older_save_moved_are_not_another_vocabulary(tmp_path, stale):
    torch.manual_seed(0)
    embed, body = torch.nn.Parameter(torch.randn(96, 8)), torch.nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.AdamW([embed, body], lr=1e-3)

    def train(updates: int, rows: int = 96) -> None:
        for _ in range(updates):
            optimizer.zero_grad()
            (embed[:rows] @ body).tanh().square().mean().backward()
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        model = {"embed_tokens.weight": embed, "body.weight": body}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(20)
    one = save(tmp_path / "a.pt", 20)
    with torch.no_grad():
        if stale:  # these rows had no gradient yet
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(0.9)
            optimizer.state[embed]["exp_avg_sq"][93:] = 1e-20
        else:
            embed[93:] = torch.randn(3, 8)
    train(6, 93)
    found = wb.doctor(one, save(tmp_path / "b.pt", 26))
    assert ("F7" in {cause.cause for cause in found.causes}) != stale, found.verdict
    assert not stale or found.causes[0].cause in {"B4", "B6"}


@pytest.mark.parametrize("updates", [1, 12])
@pytest.mark.parametrize("load", ["", "older", "fresh"])
def test_squares_of_an_older_save_are_not_fresh_or_multiplied(tmp_path, load, updates):
    """The counts tell: they fell behind by the updates in between, and do not begin at the load."""
    run = Run()
    run.optimizer = torch.optim.RMSprop(run.model.parameters(), lr=1e-4)
    older = deepcopy(run.train(5).optimizer.state_dict())
    for state in older["state"].values():
        state["square_avg"] *= 0.03  # as where gradients grew
    one = run.train(5).save(tmp_path / "a.pt", step=10)
    if load == "fresh":
        run.optimizer = torch.optim.RMSprop(run.model.parameters(), lr=1e-4)
    elif load:
        run.optimizer.load_state_dict(older)
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=10 + updates))
    assert [one.cause for one in found.causes][:1] == {"": [], "older": ["G6"], "fresh": ["B1"]}[load], found.verdict


@pytest.mark.parametrize(("role", "bit", "cause"), [("exp_avg_sq", 22, "G3"), ("exp_avg", 30, "G1")])
def test_a_flipped_bit_is_that_of_the_moment_that_broke_its_law(tmp_path, role, bit, cause):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    moment = run.optimizer.state[run.model[0].weight][role].reshape(-1)
    at = int((moment.view(torch.int32) >> 22 & 1).argmax())  # its second moment becomes smaller
    moment.view(torch.int32)[at] ^= 1 << bit
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert found.causes[0].cause == cause, found.verdict


@pytest.mark.parametrize("what", ["page", "rounded"])
def test_small_second_moments_of_one_part_were_not_rounded_away(tmp_path, what):
    """The smallest number of a narrow type is large beside all of them; those of the other rows continued."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(80, 32))
    optimizer = torch.optim.AdamW([weight], lr=1e-5, betas=(0.9, 0.95))
    scales = torch.logspace(-6, 0, 80 * 32)[torch.randperm(80 * 32)].reshape(80, 32)
    scales[32:64] *= 1e-3

    def train(updates: int) -> None:
        for _ in range(updates):
            weight.grad = scales * (1 + 0.1 * torch.randn(80, 32))
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        torch.save({"model": {"wte.weight": weight}, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    second = optimizer.state[weight]["exp_avg_sq"]
    if what == "page":
        second[32:64] = 0
    else:
        second.copy_(second.to(torch.float8_e4m3fn).float())
    train(8)
    found = wb.doctor(one, save(tmp_path / "b.pt", 38))
    causes = [cause.cause for cause in found.causes]
    assert causes[0] == "G5" if what == "page" else "G5" not in causes, found.verdict


@pytest.mark.parametrize("lost", [True, False])
def test_moments_that_began_anew_early_in_training(tmp_path, lost):
    """Second moments that still grow fall below their floor in about half of the elements if they begin at zero."""
    run = Run()
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    one = run.train(35).save(tmp_path / "a.pt", step=35)
    for state in run.optimizer.state.values() if lost else ():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=55))
    assert [cause.cause for cause in found.causes] == (["B3"] if lost else []), found.verdict


@pytest.mark.parametrize("updates", [1, 5])
@pytest.mark.parametrize(("way", "coefficients"), [("original", None), ("match_rms_adamw", None), (None, (3.0, -3, 1))])
def test_an_update_of_muon_has_a_reach(tmp_path, way, coefficients, updates):
    """A norm bounds every element of the matrix that its usual coefficients make; of others it is not known."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 8) / 4)
    more = {} if coefficients is None else {"ns_coefficients": coefficients}
    optimizer = torch.optim.Muon([weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn=way, **more)

    def save(path: Path, step: int) -> Path:
        torch.save({"model": {"fc.weight": weight}, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    def train(updates: int) -> None:
        for _ in range(updates):
            weight.grad = torch.outer(torch.randn(16), torch.randn(8)) + 0.1 * torch.randn(16, 8)
            optimizer.step()

    train(10)
    one = save(tmp_path / "a.pt", 10)
    train(updates)
    assert grave(wb.doctor(one, save(tmp_path / "b.pt", 10 + updates))) == []
    weight.data[3, 4] += 1.0
    found = wb.doctor(one, save(tmp_path / "b.pt", 10 + updates))
    assert ("P05" in {sign.rule for sign in found}) == (coefficients is None)
    assert coefficients is not None or found.causes[0].cause in ("G1", "G2")


@pytest.mark.parametrize("updates", [1, 6])
def test_complete_rows_that_a_trainer_replaces_are_asked_about(tmp_path, updates):
    """After several updates, these may be units that it begins anew; in the first one, they are damage."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.train(updates)
    run.model[0].weight.data[4:7] = torch.randn(3, 16) / 4
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=20 + updates))
    assert (found.causes[0].severity, bool(found.causes[0].question)) == (
        ("error", False) if updates == 1 else ("warn", True)
    ), found.verdict


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("smallest", [True, False])
def test_moments_that_were_masked_with_pruned_weights(tmp_path, smallest, updates):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    weight = run.model[0].weight.data
    keep = weight.abs() > weight.abs().median() if smallest else torch.arange(weight.numel()).view_as(weight) >= 256

    for tensor in (weight, *run.optimizer.state[run.model[0].weight].values()):
        if tensor.dim():
            tensor *= keep
    run.train(updates)
    weight *= keep
    more = {"mask": keep.float()} if smallest else {}
    masked = {"model": run.model.state_dict() | more, "optimizer": run.optimizer.state_dict()}
    torch.save(masked | {"step": 20 + updates, "config": {"sparsity": 0.5}}, tmp_path / "b.pt")
    found = wb.doctor(one, tmp_path / "b.pt") if updates else wb.doctor(one, echo=tmp_path / "b.pt")
    assert found.causes[0].cause == "G5", found.verdict
    assert (found.causes[0].severity == "warn") == smallest, found.verdict
    assert "B1" not in {cause.cause for cause in found.causes}
    words = [sign.message for sign in found if "sparsity" in sign.message]
    assert not updates or all("echo" not in one for one in words)


@pytest.mark.parametrize(("second", "updates"), [(True, 1), (True, 5), (False, 1)])
def test_adapters_that_stand_still_beside_those_of_another_name(tmp_path, second, updates):
    """A second adapter is trained instead of the first; without one, the save repeats an older one."""
    torch.manual_seed(0)
    model = {f"model.q_proj.lora_{side}.default.weight": torch.nn.Parameter(torch.randn(8, 4)) for side in "AB"}
    optimizer = torch.optim.AdamW(model.values(), lr=1e-3)

    def train(step: int) -> Path:
        for weight in list(model.values())[-2:]:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path := tmp_path / f"{step}.pt")
        return path

    train(9)
    one = train(10)
    if second:
        optimizer.zero_grad()
        more = [torch.nn.Parameter(torch.randn(8, 4)) for _ in "AB"]
        model |= {f"model.q_proj.lora_{side}.second.weight": weight for side, weight in zip("AB", more, strict=True)}
        optimizer.add_param_group({"params": more})
        for step in range(11, 10 + updates):
            train(step)
        two = train(10 + updates)
    else:
        torch.save(torch.load(one) | {"step": 12}, two := tmp_path / "b.pt")
    found = wb.doctor(one, two)
    assert severities(found, "N25") == ["info" if second else "warn"]
    told = next(sign.message for sign in found if sign.rule == "N25")
    assert not second or told.endswith(f"the trainer made {updates} step{'s' * (updates > 1)}")
    assert {"G7", "C9"}.isdisjoint(cause.cause for cause in found.causes) == second, found.verdict


@pytest.mark.parametrize(("moved", "cause"), [(4, "E8"), (0, "")])
@pytest.mark.parametrize("updates", [1, 6])
def test_a_few_rows_that_are_those_before_them(tmp_path, moved, cause, updates):
    """The last shard of a table holds the rows before it, and so do the squares of its gradients."""
    torch.manual_seed(0)
    model = {"embedding.weight": torch.nn.Parameter(torch.randn(60, 12)), "fc": torch.nn.Parameter(torch.randn(12, 12))}
    optimizer = torch.optim.Adagrad(model.values(), lr=1e-3)
    scales = torch.rand(60, 1)

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight in model.values():
                weight.grad = torch.randn_like(weight) * scales[: len(weight)]
            optimizer.step()

    def save(path: Path, step: int) -> Path:
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    train(30)
    one = save(tmp_path / "a.pt", 30)
    table = model["embedding.weight"]
    for tensor in (table.data, optimizer.state[table]["sum"]) if moved else ():
        tensor[-moved:] = tensor[-2 * moved : -moved].clone()
    train(updates)
    found = wb.doctor(one, save(tmp_path / "b.pt", 30 + updates))
    assert {one.cause for one in found.causes} <= {cause, "E1"} and bool(found.causes) == bool(moved), found.verdict


@pytest.mark.parametrize("what", ["other", "shifted"])
def test_squares_of_another_run_come_from_no_flat_line(tmp_path, what):
    """Squares have a high cosine with any others; those of another place are above what updates leave of it."""
    run = Run()
    shape = (24, 64)
    run.model = torch.nn.Sequential(*(torch.nn.Linear(shape[1], shape[0], bias=False) for _ in range(4)))
    run.fresh()

    def train(updates: int) -> None:
        for _ in range(updates):
            for weight in run.model.parameters():
                weight.grad = 1 + 0.3 * torch.randn(shape)
            run.optimizer.step()

    train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    states = [run.optimizer.state[weight] for weight in run.model.parameters()]
    for role in ("exp_avg", "exp_avg_sq"):
        line = torch.cat([state[role].flatten() for state in states])
        line = line.roll(-200) if what == "shifted" else line[torch.randperm(len(line))]
        for state, part in zip(states, line.split(shape[0] * shape[1]), strict=True):
            state[role].copy_(part.view(shape))
    train(1)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=31))
    told = any(sign.rule == "P17" and "windows" in sign.evidence for sign in found)
    assert told == (what == "shifted"), found.verdict


@pytest.mark.parametrize("made", [True, False])
def test_state_that_was_made_from_weights_of_an_unknown_number(tmp_path, made):
    """Matrices of one shape do not say which number is whose."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 8) for _ in range(4)]
    z = [weight + 0.1 * torch.randn(8, 8) for weight in weights]

    def save(path: Path, step: int) -> Path:
        state = {n: {"z": one, "exp_avg_sq": torch.full((8, 8), 1e-4)} for n, one in enumerate(z)}
        groups = [{"params": list(range(4)), "lr": 1e-3, "betas": (0.9, 0.95), "weight_lr_power": 2.0, "k": step}]
        model = {f"{n}.weight": weight for n, weight in enumerate(weights)}
        torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": step}, path)
        return path

    one = save(tmp_path / "a.pt", 20)
    z = [(old if made else own) - 2e-3 * torch.randn(8, 8) for old, own in zip(weights, z, strict=True)]
    weights = [weight - 1e-3 * torch.randn(8, 8) for weight in weights]
    found = wb.doctor(one, save(tmp_path / "b.pt", 21))
    assert ("B1" in {cause.cause for cause in found.causes}) == made, found.verdict


@pytest.mark.parametrize("alike", [True, False])
def test_the_reach_of_an_update_depends_on_whose_it_is(tmp_path, alike):
    """Matrices of one shape do not say which of two optimizers updates them."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(16, 16 if alike or n < 2 else 8)) for n in range(4)]
    optimizers = [torch.optim.Muon(weights[:2], lr=1e-3), torch.optim.AdamW(weights[2:], lr=1e-4)]

    def train(updates: int, step: int) -> Path:
        for _ in range(updates):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            for one in optimizers:
                one.step()
        held = {name: one.state_dict() for name, one in zip(("muon", "adamw"), optimizers, strict=True)}
        model = {f"{n}.weight": weight for n, weight in enumerate(weights)}
        torch.save({"model": model, "step": step, **held}, path := tmp_path / f"{step}.pt")
        return path

    found = wb.doctor(train(10, 10), train(1, 11))
    compared = found.ledger.count("train", ["param"], "within")[0]
    assert compared == (0 if alike else 4) and grave(found) == []


# ---- a change that is meant, beside one that it does not explain -----------------------------------------------------


@pytest.mark.parametrize(("length", "first"), [(30, "C4"), (100, "H1")])
def test_frozen_parameters_do_not_explain_another_schedule(tmp_path, length, first):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 100)
    one = run.train(12).save(tmp_path / "a.pt", step=12)
    run.freeze(True)
    run.schedule.T_max = length
    run.optimizer.param_groups[0]["eps"] = 1e-7
    found = wb.doctor(one, run.train(6).save(tmp_path / "b.pt", step=18))
    assert found.causes[0].cause == first, found.verdict
    frozen = next(one for one in found.causes if one.title == "No update reached some of the parameters.")
    assert {sign.rule for sign in frozen.signs} <= {"P01", "P36", "S07"}


@pytest.mark.parametrize(("stale", "first"), [(True, "B8"), (False, "H1")])
def test_another_weight_decay_sets_no_learning_rate(tmp_path, stale, first):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.95**at)
    one = run.train(12).save(tmp_path / "a.pt", step=12)
    run.optimizer.param_groups[0]["weight_decay"] = 0.02
    run.train(1)
    if stale:
        run.optimizer.param_groups[0]["lr"] = 1e-3
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=13))
    assert found.causes[0].cause == first, found.verdict


@pytest.mark.parametrize(("stated", "first"), [("weight_decay", "C2"), ("lr", "H1")])
def test_an_argument_explains_a_learning_rate_only_if_it_sets_one(tmp_path, stated, first):
    run, args = Run(), {"weight_decay": 0.01, "lr": 1e-3}
    one = run.train(12).save(tmp_path / "a.pt", step=12, args=args)
    run.optimizer.param_groups[0]["lr"] = 2e-2
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=13, args=args | {stated: 20 * args[stated]}))
    assert found.causes[0].cause == first, found.verdict


def in_folder(run: Run, path: Path, step: int, **files: Any) -> Path:
    """Save what transformers' Trainer saves, and further files of a script."""
    path.mkdir()
    save_file(run.model.state_dict(), path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name, held in {"optimizer": run.optimizer.state_dict(), **files}.items():
        torch.save(held, path / f"{name}.pt")
    return path


@pytest.mark.parametrize("stated", [True, False])
def test_a_weight_decay_that_a_further_file_states(tmp_path, stated):
    run = Run()
    one = in_folder(run.train(12), tmp_path / "checkpoint-12", 12, config={"weight_decay": 0.01})
    run.optimizer.param_groups[0]["weight_decay"] = 0.02
    config = {"weight_decay": 0.02 if stated else 0.01}
    found = wb.doctor(one, in_folder(run.train(4), tmp_path / "checkpoint-16", 16, config=config))
    sign = next(sign for sign in found if sign.rule == "R12")
    assert sign.severity == ("info" if stated else "warn")
    assert sign.message.endswith("as 'config.pt/weight_decay' states" if stated else "says why")


@pytest.mark.parametrize(("at", "causes"), [(128, []), (32, ["C6"])])
def test_the_position_of_a_sampler_in_a_file_of_its_own(tmp_path, at, causes):
    run = Run()
    one = in_folder(run.train(12), tmp_path / "checkpoint-12", 12, sampler={"epoch": 0, "next_index": 96})
    held = {"epoch": 0, "next_index": at}
    found = wb.doctor(one, in_folder(run.train(4), tmp_path / "checkpoint-16", 16, sampler=held, other=torch.ones(2)))
    assert [cause.cause for cause in found.causes] == causes, found.verdict
    assert causes or ("'sampler.pt'" not in found.verdict and "'other.pt'" in found.verdict)


@pytest.mark.parametrize(("lost", "first"), [(True, "B1"), (False, "A4")])
@pytest.mark.parametrize("updates", [0, 2])
def test_new_tensors_do_not_explain_a_lost_optimizer(tmp_path, lost, first, updates):
    run = Run()
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    run.model.aux = torch.nn.Linear(16, 2)
    run.model.forward = lambda x: run.model[2](run.model[1](run.model[0](x)))
    if lost:
        run.fresh()
    two = run.train(updates).save(tmp_path / "b.pt", step=20 + updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert found.causes[0].cause == first, found.verdict
    added = next(cause for cause in found.causes if cause.cause == "A4")
    assert not {"P01", "R10", "S07"} & {sign.rule for sign in added.signs}


@pytest.mark.parametrize(("fewer", "first"), [(True, "B1"), (False, "C9")])
def test_counters_of_other_parameters_began_anew(tmp_path, fewer, first):
    """The optimizer counted 14 updates of 26 steps: 2 more than before, or 14 since the load."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    one = run.train(12).save(tmp_path / "a.pt", step=12)
    if fewer:
        run.optimizer = torch.optim.AdamW(run.model[2].parameters(), lr=1e-3, betas=(0.9, 0.95))
        run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    found = wb.doctor(one, run.train(14 if fewer else 2).save(tmp_path / "b.pt", step=26))
    assert next(cause.cause for cause in found.causes if cause.cause in ("B1", "C9")) == first, found.verdict


@pytest.mark.parametrize(("anew", "first"), [(True, "B1"), (False, "C9")])
def test_the_count_of_an_average_shows_which_count_is_off(tmp_path, anew, first):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    one = run.train(15).save(tmp_path / "a.pt", step=15, ema_state={"optimization_step": 15})
    if anew:
        run.fresh()
        run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    run.train(24 if anew else 9)
    two = run.save(tmp_path / "b.pt", step=39, ema_state={"optimization_step": 39 if anew else 24})
    found = wb.doctor(one, two)
    assert found.causes[0].cause == first, found.verdict
    assert not severities(found, "P34")


@pytest.mark.parametrize("back", [6, 0])
def test_all_of_an_earlier_step_is_one_cause(tmp_path, back):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    run.train(31)
    older = deepcopy(run) if back else None
    one = run.train(6).save(tmp_path / "a.pt", step=37)
    held = (older or run).train(1).save(tmp_path / "b.pt", step=38)
    found = wb.doctor(one, held)
    assert [cause.cause for cause in found.causes if cause.severity != "info"] == (["C9"] if back else []), (
        found.verdict
    )


@pytest.mark.parametrize("by_head", [True, False])
def test_the_bias_of_a_fused_qkv_moves_as_its_weight(tmp_path, by_head):
    torch.manual_seed(0)
    held = {"blocks.0.attn.qkv.weight": torch.randn(72, 24), "blocks.0.attn.qkv.bias": torch.randn(72)}
    one, two = tmp_path / "a.pt", tmp_path / "echo.pt"
    torch.save({"model": held, "step": 5}, one)
    if by_head:
        held = {name: w.view(4, 3, 6, -1).transpose(0, 1).reshape(w.shape) for name, w in held.items()}
    torch.save({"model": held, "step": 5}, two)
    errors = [cause.cause for cause in wb.doctor(one, echo=two).causes if cause.severity == "error"]
    assert errors == (["E4"] if by_head else [])


@pytest.mark.parametrize("anew", [True, False])
def test_adapters_that_went_on_were_merged_by_mistake(tmp_path, anew):
    run = Adapted(24).train(30)
    one = run.save(tmp_path / "a.pt", 30)
    run.merge(anew)
    first = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", 31)).causes[0]
    assert (first.cause, first.severity) == ("F5", "warn" if anew else "error")


@pytest.mark.parametrize("wider", [True, False])
@pytest.mark.parametrize("echo", [True, False])
def test_a_wider_type_is_remarked(tmp_path, wider, echo):
    run = Run().train(10)
    if wider:
        run.model.bfloat16()
    one = run.save(tmp_path / "a.pt", step=10)
    run.model.float()
    two = run.save(tmp_path / "b.pt", step=10) if echo else run.train(1).save(tmp_path / "b.pt", step=11)
    found = wb.doctor(one, echo=two) if echo else wb.doctor(one, two)
    told = [cause.severity for cause in found.causes if "wider type" in cause.title]
    assert told == (["info"] if wider else []), found.verdict


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"config": {"world_size": 4}}, "1 stored value is in the later checkpoint only: config.world_size: 4"),
        ({"ema_state": {"decay": 0.995}}, "ema_state.decay 0.97 → 0.995"),
        ({}, ""),
    ],
)
def test_settings_that_changed_are_remarked(tmp_path, more, told):
    run = Run().train(10)
    before = {"config": {"width": 32}, "ema_state": {"decay": 0.97}}
    one = run.save(tmp_path / "a.pt", step=10, **before)
    after = {name: held | more.get(name, {}) for name, held in before.items()}
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=11, **after))
    assert [cause.severity for cause in found.causes] == (["info"] if told else [])
    assert told in found.verdict


@pytest.mark.parametrize("follows", [True, False])
def test_no_optimizer_moves_a_network_that_follows_another(tmp_path, follows):
    run, far = Run().train(10), torch.zeros(32, 16)
    name = "critic_target" if follows else "critic_other"
    model = {"critic.0.weight": run.model[0].weight.detach(), f"{name}.0.weight": run.model[0].weight.detach() + 0.5}

    def save(path: Path, step: int) -> Path:
        torch.save({"model": model, "optimizer": run.optimizer.state_dict(), "step": step}, path)
        return path

    one = save(tmp_path / "a.pt", 10)
    far[0, 0] = 0.3
    model[f"{name}.0.weight"] = model[f"{name}.0.weight"] + far
    run.train(1)
    model["critic.0.weight"] = run.model[0].weight.detach()
    found = [one for one in wb.doctor(one, save(tmp_path / "b.pt", 11)) if one.rule == "P05"]
    assert all(("networks that follow others" in one.message) == follows for one in found) and found


# ---- faults of counters and settings beside an innocent change ------------------------------------------------------


@pytest.mark.parametrize("gone", [True, False])
def test_an_empty_list_holds_no_schedule(tmp_path, gone):
    """As Lightning's, beside another learning rate that the arguments state."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda done: 1 - done / 200)
    run.train(30)
    schedule, run.schedule = run.schedule, None
    schedules = {"lr_schedulers": [schedule.state_dict()]}
    one = run.save(tmp_path / "a.pt", step=30, args={"lr": 1e-3}, **schedules)
    run.optimizer.param_groups[0]["lr"] = 5e-4
    schedules = {"lr_schedulers": []} if gone else schedules
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=30, args={"lr": 5e-4}, **schedules))
    assert (found.causes[0].cause == "C1") == gone
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=31, args={"lr": 5e-4}, **schedules))
    assert ("the schedule is no longer stored" in str(found.to_dict())) == gone


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_a_loss_scale_that_began_anew_beside_another_learning_rate(tmp_path, plain, lost):
    """It doubles every five updates; after twenty, its count is what it was. SGD counts no updates."""
    run = Run()
    if plain:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3, momentum=0.9)
    one = run.train(40).save(tmp_path / "a.pt", step=40, args={"lr": 1e-3}, **scaler(0, 2.0**22, 5))
    run.optimizer.param_groups[0]["lr"] = 5e-4
    scale = 2.0**20 if lost else 2.0**26
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=60, args={"lr": 5e-4}, **scaler(0, scale, 5)))
    assert ([cause.cause for cause in found.causes][:1] == ["D8"]) == lost, found.verdict
    assert ("none of them skipped" in str(found.to_dict())) == (lost and not plain)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**22])
def test_a_loss_scale_in_a_file_of_its_own(tmp_path, scale):
    run = Run().train(12)
    one = in_folder(run, tmp_path / "checkpoint-12", 12, grad_scaler=scaler(3, 2.0**22)["scaler"])
    held = scaler(4 if scale > 2.0**16 else 1, scale)["scaler"]
    found = wb.doctor(one, in_folder(run.train(1), tmp_path / "checkpoint-13", 13, grad_scaler=held))
    assert [cause.cause for cause in found.causes] == (["D8"] if scale == 2.0**16 else []), found.verdict


@pytest.mark.parametrize("step", ["anew", "doubled", "right", "stage"])
@pytest.mark.parametrize("updates", [0, 1, 20])
def test_a_step_that_is_off_where_no_optimizer_counts(tmp_path, step, updates):
    """The schedule and the sampler go on; in a new stage, the schedule counts anew as well."""
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3, momentum=0.9)
    begun = {"lr_lambda": lambda done: 1 - done / 200}
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, **begun)
    one = run.train(30).save(tmp_path / "a.pt", step=30, sampler={"epoch": 0, "next_index": 120})
    if step == "stage":
        run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, **begun)
    now = {"anew": 0, "doubled": 60, "right": 30, "stage": 0}[step] + updates
    index = 4 * updates + (0 if step == "stage" else 120)
    two = run.train(updates).save(tmp_path / "b.pt", step=now, sampler={"epoch": 0, "next_index": index})
    found = wb.doctor(one, echo=two) if not updates else wb.doctor(one, two)
    named = [cause.cause for cause in found.causes if cause.severity != "info"]
    assert (named[:1] == ["C9"]) == (step in ("anew", "doubled")), found.verdict
    assert named or step not in ("anew", "doubled")


@pytest.mark.parametrize("updates", [1, 20])
def test_a_step_that_is_doubled_beside_a_new_head(tmp_path, updates):
    """The head's counters tell how many updates there were since; those of a new optimizer would tell the same."""
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda done: 1 - done / 200)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    run.model.add_module("probe", torch.nn.Linear(16, 16))
    run.optimizer.add_param_group({"params": list(run.model.probe.parameters())})
    run.schedule.base_lrs.append(1e-3)
    run.schedule.lr_lambdas.append(run.schedule.lr_lambdas[0])
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=60 + updates))
    assert found.causes[0].cause == "C9", found.verdict


@pytest.mark.parametrize(
    ("index", "batch", "title"),
    [
        (160, 4, ""),
        (164, 4, ""),  # one update's data is counted elsewhere
        (200, 8, ""),
        (120, 4, "The data advanced less than the updates."),  # it was at 80 / 2 in the load
        (160, 8, "The data advanced less than the updates."),
        (240, 4, "Data was skipped."),
    ],
)
def test_a_position_that_is_behind_after_several_updates(tmp_path, index, batch, title):
    run = Run().train(20)
    stated = {"config": {"batch_size": 4, "max_grad_norm": 1.0}}
    one = run.save(tmp_path / "a.pt", step=20, sampler={"epoch": 0, "next_index": 80}, **stated)
    index = index if batch == 4 else index + 40
    stated = {"config": {"batch_size": batch, "max_grad_norm": 0.5}}
    two = run.train(20).save(tmp_path / "b.pt", step=40, sampler={"epoch": 0, "next_index": index}, **stated)
    found = wb.doctor(one, two)
    assert [cause.title for cause in found.causes if cause.cause in ("C6", "H1") and cause.severity == "warn"] == (
        [title] if title else []
    )


@pytest.mark.parametrize("updates", [20, 10])
def test_a_schedule_that_stands_where_as_many_updates_lead(tmp_path, updates):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda done: 1 - done / 200)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    schedule, run.schedule = run.schedule, None
    two = run.train(updates).save(tmp_path / "b.pt", step=20 + updates, scheduler=schedule.state_dict())
    first = wb.doctor(one, two).causes[0]
    also = "The learning-rate schedule restarted, or it was not stepped."
    assert first.title == (also if updates == 20 else "The schedule was not stepped.")


@pytest.mark.parametrize(("seed", "epoch", "severity"), [(78, 0, "warn"), (78, 1, "info"), (77, 0, "")])
def test_the_seed_of_a_sampler_in_a_file_of_its_own(tmp_path, seed, epoch, severity):
    """Beside another setting; an epoch may have a seed of its own."""
    run = Run().train(12)
    held = {"epoch": 0, "next_index": 96, "seed": 77}
    one = in_folder(run, tmp_path / "checkpoint-12", 12, sampler=held, config={"max_grad_norm": 1.0})
    held = {"epoch": epoch, "next_index": 104, "seed": seed}
    two = in_folder(run.train(1), tmp_path / "checkpoint-13", 13, sampler=held, config={"max_grad_norm": 0.5})
    told = [cause.severity for cause in wb.doctor(one, two).causes if cause.cause == "C7"]
    assert told == ([severity] if severity else [])


@pytest.mark.parametrize(("decays", "cause"), [((0.0, 0.05), "B7"), ((0.05, 0.0), "H1"), ((0.0, 0.0), "H1")])
def test_groups_that_exchanged_their_decay_which_was_halved(tmp_path, decays, cause):
    run = Run()
    groups = [{"params": list(run.model[n].parameters()), "weight_decay": d} for n, d in ((0, 0.1), (2, 0.0))]
    run.optimizer = torch.optim.AdamW(groups, lr=1e-3)
    one = run.train(10).save(tmp_path / "a.pt", step=10, config={"weight_decay": 0.1})
    for group, decay in zip(run.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    found = wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=10, config={"weight_decay": 0.05}))
    assert found.causes[0].cause == cause


@pytest.mark.parametrize("rows", [40, 4])
def test_masters_of_new_rows_may_have_16_bits(tmp_path, rows):
    """They were made from the rows; where more than the new rows have no low bits, the masters were rebuilt."""
    torch.manual_seed(0)
    master = torch.randn(40, 16)
    moments = {"exp_avg": torch.randn(40, 16) / 100, "exp_avg_sq": torch.rand(40, 16) / 100}

    def save(path: Path, master: torch.Tensor, **moments: torch.Tensor) -> Path:
        state = {0: {"master_param": master, "step": torch.tensor(10.0), **moments}}
        optimizer = {"state": state, "param_groups": [{"params": [0], "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}]}
        torch.save({"model": {"embed.weight": master.bfloat16()}, "optimizer": optimizer, "step": 10}, path)
        return path

    one = save(tmp_path / "a.pt", master, **moments)
    more = {name: torch.cat([held, torch.zeros(4, 16)]) for name, held in moments.items()}
    longer = torch.cat([master, torch.randn(4, 16)])
    longer[-rows:] = longer[-rows:].bfloat16().float()
    found = wb.doctor(one, echo=save(tmp_path / "echo.pt", longer, **more))
    assert bool(severities(found, "S09")) == (rows > 4)


class GroupCounting(torch.optim.AdamW):
    """Its state has no counters of parameters: as Transformer Engine's, each group counts."""

    def state_dict(self) -> dict[str, Any]:
        held = super().state_dict()
        steps = [float(state.pop("step")) for state in map(dict.copy, held["state"].values())]
        held["state"] = {n: {k: v for k, v in one.items() if k != "step"} for n, one in held["state"].items()}
        for group in held["param_groups"]:
            group["step"] = int(max(steps))
        return held


def test_a_frozen_parameter_whose_group_counts_updates(tmp_path):
    run = Run()
    run.optimizer = GroupCounting(run.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    one = in_folder(run.train(20), tmp_path / "checkpoint-20", 20)
    run.freeze(True)
    found = wb.doctor(one, in_folder(run.train(1), tmp_path / "checkpoint-21", 21))
    told = [sign.message for sign in found if sign.rule == "P36"]
    assert found.exit_code == 1 and told and all(one.endswith("were they frozen?") for one in told)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_counter_at_the_number_of_updates_since(tmp_path, frozen):
    """That of a frozen parameter stands; those of all parameters would be there if they had begun anew."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.freeze(frozen)
    if not frozen:
        for state in run.optimizer.state.values():
            state["step"].zero_()
    run.optimizer.zero_grad(set_to_none=True)
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=40))
    assert severities(found, "P01") == (["warn"] if frozen else ["error"]), found.verdict


@pytest.mark.parametrize(("skipped", "told"), [(0, True), (4, False)])
def test_a_schedule_lags_only_by_updates_that_a_scaler_skipped(tmp_path, skipped, told):
    run = Run()
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda done: 1 - done / 400)
    one = run.train(60).save(tmp_path / "a.pt", step=60, **scaler(60, 2.0**12))
    run.train(20 - skipped)
    run.schedule.last_epoch = 76
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=80, **scaler(10, 2.0**12)))
    assert any(cause.cause == "C3" for cause in found.causes) == told, found.verdict


class Signs(torch.optim.Optimizer):
    """Lion: https://arxiv.org/abs/2302.06675."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for weight in group["params"]:
                average = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                weight -= group["lr"] * average.lerp(weight.grad, 1 - one).sign()
                average.lerp_(weight.grad, 1 - two)


def test_a_teacher_is_not_moved_by_signs(tmp_path):
    """The numbers of the state are those of either network: both have its shapes."""
    student, teacher = Run(), Run()
    student.optimizer = Signs(student.model.parameters())
    model = torch.nn.ModuleDict({"student": student.model, "teacher": teacher.model})

    def save(path: Path, step: int) -> Path:
        torch.save({"model": model.state_dict(), "optimizer": student.optimizer.state_dict(), "step": step}, path)
        return path

    student.train(20)
    one = save(tmp_path / "a.pt", 20)
    student.train(1)
    with torch.no_grad():
        for a, b in zip(teacher.model.parameters(), student.model.parameters(), strict=True):
            a.lerp_(b, 0.03)
    assert severities(wb.doctor(one, save(tmp_path / "b.pt", 21)), "P12") == []


@pytest.mark.parametrize("stage", [True, False])
@pytest.mark.parametrize("updates", [0, 1])
def test_moments_that_are_halved_when_a_stage_begins(tmp_path, stage, updates):
    run = Run()

    def begin() -> None:
        run.optimizer.param_groups[0]["lr"] = 1e-3
        run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda done: 1 - done / 200)

    begin()
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    for state in run.optimizer.state.values():
        state["exp_avg"] /= 2
        state["exp_avg_sq"] /= 2
    if stage:
        begin()
    two = run.train(updates).save(tmp_path / "b.pt", step=30 + updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert found.causes[0].cause == "E12" and found.exit_code == (1 if stage else 2), found.verdict


@pytest.mark.parametrize(("index", "told"), [(112, False), (104, True), (64, True)])
def test_a_batch_size_that_a_further_file_states(tmp_path, index, told):
    run = Run().train(12)
    sampler = {"epoch": 0, "next_index": 96}
    one = in_folder(run, tmp_path / "checkpoint-12", 12, sampler=sampler, config={"batch_size": 8})
    sampler = {"epoch": 0, "next_index": index}
    two = in_folder(run.train(4), tmp_path / "checkpoint-16", 16, sampler=sampler, config={"batch_size": 4})
    assert any(cause.cause == "C6" for cause in wb.doctor(one, two).causes) == told


# ---- the optimizer's state, some updates later -----------------------------------------------------------------------


def state_of(run: Run, number: int = 0) -> dict[str, Any]:
    """The optimizer's state of one parameter: 0 is a matrix of 32 × 16."""
    return run.optimizer.state[list(run.model.parameters())[number]]


def first_cause(found: Any) -> str:
    return next((one.cause for one in found.causes if one.severity != "info"), "")


@pytest.mark.parametrize("kept", [True, False])
def test_first_moments_of_another_tensor_are_seen_many_updates_later(tmp_path, kept):
    """An older save has older second moments, too."""
    run = Run().train(20)
    older = deepcopy(run.optimizer.state_dict())
    one = run.train(12).save(tmp_path / "a.pt", step=32)
    if kept:
        state_of(run)["exp_avg"].copy_(0.5 * torch.randn(32, 16))
    else:
        run.optimizer.load_state_dict(older)
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=52))
    assert (first_cause(found) == "B6") == kept, found.verdict


@pytest.mark.parametrize(("also", "first"), [(False, "B4"), (True, "B3")])
def test_first_moments_that_stayed_beside_second_ones_that_fell(tmp_path, also, first):
    run = Run().train(60)
    one = run.save(tmp_path / "a.pt", step=60)
    for n in range(4):
        state_of(run, n)["exp_avg_sq"].mul_(0 if also else 1 / 64)
        state_of(run, n)["exp_avg"].mul_(not also)
    found = wb.doctor(one, run.train(14).save(tmp_path / "b.pt", step=74))
    assert first_cause(found) == first, found.verdict


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("updates", [1, 5])
def test_state_that_is_read_along_the_other_axis(tmp_path, turned, updates):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for key in ("exp_avg", "exp_avg_sq") if turned else ():
        state_of(run)[key].copy_(state_of(run)[key].T.reshape(32, 16).clone())
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=20 + updates))
    assert first_cause(found) == ("B5" if turned else ""), found.verdict
    assert not turned or "other elements" in found.causes[0].title


@pytest.mark.parametrize("turned", [True, False])
def test_a_single_momentum_that_is_read_along_the_other_axis(tmp_path, turned):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2, momentum=0.95)
    one = run.train(40).save(tmp_path / "a.pt", step=40)
    if turned:
        held = state_of(run)["momentum_buffer"]
        held.copy_(held.T.reshape(32, 16).clone())
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=41))
    assert first_cause(found) == ("B5" if turned else ""), found.verdict


@pytest.mark.parametrize("multiplied", [True, False])
def test_moments_that_all_grew_by_about_the_same(tmp_path, multiplied):
    """Larger gradients, of another loss, add to some elements more than to others."""
    run = Run().train(40)
    one = run.save(tmp_path / "a.pt", step=40)
    for n in range(4):
        for key in ("exp_avg", "exp_avg_sq") if multiplied else ():
            state_of(run, n)[key].mul_(8)
    for weight in () if multiplied else run.model.parameters():
        weight.register_hook(lambda gradient: 3 * gradient)
    found = wb.doctor(one, run.train(24).save(tmp_path / "b.pt", step=64))
    assert ("P21" in {sign.rule for sign in found}) == multiplied
    assert (first_cause(found) == "B6") == multiplied, found.verdict


@pytest.mark.parametrize("factor", [1 / 64, 8.0, 1.0])
def test_rows_without_a_gradient_show_a_factor_of_the_moments(tmp_path, factor):
    torch.manual_seed(0)
    table = torch.nn.Embedding(64, 8)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int, rows: int, step: int) -> Path:
        for _ in range(updates):
            optimizer.zero_grad()
            (table(torch.randint(rows, (40,))) - torch.randn(8)).square().mean().backward()
            optimizer.step()
        held = {"model": {"embed.weight": table.weight}, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(held, path := tmp_path / f"{step}.pt")
        return path

    one = train(20, 64, 20)
    optimizer.state[table.weight]["exp_avg_sq"].mul_(factor)
    found = wb.doctor(one, train(6, 16, 26))
    forms = {(row.quantity, row.form) for row in found.ledger if row.leg == "train" and row.status == "beyond"}
    assert (("exp_avg_sq", "ratio") in forms) == (factor < 1) and ("exp_avg", "ratio") not in forms


@pytest.mark.parametrize("updates", [1, 20])
@pytest.mark.parametrize("anew", [True, False])
def test_counters_that_restart_beside_a_frozen_layer(tmp_path, updates, anew):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for n in range(4) if anew else ():
        state_of(run, n)["step"].zero_()
    run.freeze(True)
    run.optimizer.zero_grad()
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=20 + updates))
    assert found.causes[0].cause == ("B2" if anew else "H1"), found.verdict
    assert anew or found.exit_code < 2


@pytest.mark.parametrize(("factor", "first"), [(1 / 64, "B6"), (1.0, "H1")])
def test_the_state_of_a_frozen_layer_stays_as_it_is(tmp_path, factor, first):
    run = Run().train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    state_of(run)["exp_avg_sq"].mul_(factor)
    run.freeze(True)
    run.optimizer.zero_grad()
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=50))
    assert found.causes[0].cause == first, found.verdict
    told = [row.form for row in found.ledger if row.leg == "train" and row.status == "beyond"]
    assert told == (["ratio"] if factor != 1 else [])


@pytest.mark.parametrize(("both", "first"), [(True, "E12"), (False, "B6")])
def test_ranks_add_up_both_kinds_of_moments(tmp_path, both, first):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    for n in range(4):
        state_of(run, n)["exp_avg_sq"].mul_(4)
        state_of(run, n)["exp_avg"].mul_(4 if both else 1)
    assert first_cause(wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=20))) == first


def test_a_momentum_of_an_older_save_has_no_second_moments(tmp_path):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2, momentum=0.9)
    older = deepcopy(run.train(20).optimizer.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=26)
    run.optimizer.load_state_dict(older)
    assert first_cause(wb.doctor(one, echo=run.save(tmp_path / "echo.pt", step=26))) == "G6"


@pytest.mark.parametrize(("frozen", "older"), [(True, True), (False, True), (True, False)])
def test_sums_of_an_older_save_beside_a_frozen_layer(tmp_path, frozen, older):
    run = Run()
    run.optimizer = torch.optim.Adagrad(run.model.parameters(), lr=1e-2)
    state = deepcopy(run.train(6).optimizer.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=12)
    if older:
        run.optimizer.load_state_dict(state)
    run.freeze(frozen)
    run.optimizer.zero_grad()
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=13))
    assert found.causes[0].cause == ("G6" if older else "H1"), found.verdict


@pytest.mark.parametrize(("lost", "causes"), [(True, ["B4"]), (False, [])])
def test_largest_second_moments_may_stay(tmp_path, lost, causes):
    run = Run()
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-3, betas=(0.9, 0.95), amsgrad=True)
    one = run.train(40).save(tmp_path / "a.pt", step=40)
    for n in range(4):
        state_of(run, n)["max_exp_avg_sq"].mul_(9)  # of steeper beginnings
    one = run.save(one, step=40)
    for n in range(4) if lost else ():
        state_of(run, n)["exp_avg_sq"].zero_()
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=41))
    assert [cause.cause for cause in found.causes if cause.severity != "info"] == causes, found.verdict


@pytest.mark.parametrize("shared", [True, False])
def test_the_count_of_a_group_advances_for_frozen_parameters(tmp_path, shared):
    """As that of Transformer Engine's FusedAdam; a counter of a parameter advances with its updates alone."""
    run, count = Run().train(30), 30

    def save(name: str) -> Path:
        held = run.optimizer.state_dict()
        if shared:
            held["param_groups"][0]["step"] = count
            held["state"] = {
                n: {key: one for key, one in state.items() if key != "step"} for n, state in held["state"].items()
            }
        model = run.model.state_dict()
        torch.save({"model": model, "optimizer": held, "step": count}, path := tmp_path / name)
        return path

    one = save("a.pt")
    run.freeze(True)
    run.optimizer.zero_grad()
    run.train(20)
    count = 50
    if not shared:
        state_of(run)["step"] += 20
    found = wb.doctor(one, save("b.pt"))
    assert [one.severity for one in found if one.rule == "P36"] == ["warn" if shared else "error"], found.verdict


@pytest.mark.parametrize(("what", "first"), [("all", "G6"), ("masters", "D2"), ("bound", "B5")])
@pytest.mark.parametrize("named", [True, False])
def test_masters_are_state_of_the_optimizer(tmp_path, what, first, named):
    """They are of an older save with the moments, or alone, or are given to other parameters with them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def state() -> dict[int, Any]:
        held = deepcopy(optimizer.state_dict()["state"])
        for n, weight in enumerate(model.parameters()):
            held[n]["master_param"] = weight.detach().clone()
        return held

    def train() -> dict[int, Any]:
        for _ in range(10):
            optimizer.zero_grad()
            x = torch.randn(8, 16)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
        return state()

    def save(name: str, held: dict[int, Any]) -> Path:
        groups = [{**optimizer.state_dict()["param_groups"][0], "params": [0, 1, 2]}]
        if named:
            groups[0]["param_names"] = list(weights)
        held = {"model": weights, "optimizer": {"state": held, "param_groups": groups}, "step": 20}
        torch.save(held, path := tmp_path / name)
        return path

    older, now = train(), train()
    weights = {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    wrong = {n: now[n] | (older[n] if what == "all" else {"master_param": older[n]["master_param"]}) for n in now}
    wrong = wrong if what != "bound" else {n: now[(n + 1) % 3] for n in now}
    found = wb.doctor(save("a.pt", now), echo=save("echo.pt", wrong))
    assert first_cause(found) == first, found.verdict


@pytest.mark.parametrize(("of_next", "form"), [(True, "moved.name"), (False, "zero")])
def test_one_moment_of_another_parameter_is_found_after_an_update(tmp_path, of_next, form):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(12, 8)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95))

    def train(updates: int, step: int) -> Path:
        for _ in range(updates):
            for n, weight in enumerate(weights):
                weight.grad = torch.randn(12, 8) / 10**n
            optimizer.step()
        model = {f"{n}.weight": weight for n, weight in enumerate(weights)}
        torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": step}, path := tmp_path / f"{step}.pt")
        return path

    one = train(30, 30)
    held = [optimizer.state[weight]["exp_avg_sq"] for weight in weights]
    held[0].copy_(held[1] if of_next else torch.zeros(12, 8))
    found = wb.doctor(one, train(1, 31))
    assert [row.form for row in found.ledger if row.quantity == "exp_avg_sq" and row.status == "beyond"] == [form]


# ---- weights beside a change that does not explain them --------------------------------------------------------------


class Counted(Run):
    """With a norm, which counts its batches."""

    def __init__(self, kind: type[torch.nn.Module] = torch.nn.BatchNorm1d) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(self.model[0], kind(32), *self.model[1:])
        self.fresh()


@pytest.mark.parametrize("change", ["eps", "frozen"])
@pytest.mark.parametrize("zeros", [True, False])
def test_no_setting_replaces_elements_of_one_weight(tmp_path, change, zeros):
    run = Run()
    run.optimizer = torch.optim.RMSprop(run.model.parameters(), lr=1e-4)
    run.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda at: 0.99**at)
    run.train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    if change == "eps":
        run.optimizer.param_groups[0]["eps"] = 1e-7
    else:
        run.model[0].bias.requires_grad_(False)
        run.optimizer.zero_grad()
    if zeros:
        run.model[2].weight.detach().view(-1)[170:234] = 0
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert found.causes[0].cause == ("G5" if zeros else "H1"), found.verdict
    assert "H1" in [one.cause for one in found.causes]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("updates", [0, 1, 10])
def test_a_weight_that_was_transposed_under_its_old_shape(tmp_path, updates, fresh):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    one = run.train(40).save(tmp_path / "a.pt", step=40)
    weight = run.model[2].weight.detach()
    weight.copy_(torch.randn(16, 32) * weight.std() if fresh else weight.t().reshape(16, 32).clone())
    two = run.train(updates).save(tmp_path / "b.pt", step=40 + updates)
    found = wb.doctor(one, two) if updates else wb.doctor(one, echo=two)
    assert [one.cause for one in found.causes][:1] in ([["A2"], []] if fresh else [["E1"]]), found.verdict


@pytest.mark.parametrize("swapped", [True, False])
def test_layers_with_short_rows_changed_places(tmp_path, swapped):
    torch.manual_seed(0)
    convs = torch.nn.ModuleList(torch.nn.Conv2d(4, 12, 1) for _ in range(2))
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.01, momentum=0.9)

    def train(updates: int) -> dict[str, Any]:
        for _ in range(updates):
            optimizer.zero_grad()
            sum(conv(torch.randn(2, 4, 3, 3)).square().mean() for conv in convs).backward()
            optimizer.step()
        return {"model": convs.state_dict(), "optimizer": optimizer.state_dict()}

    torch.save(train(20) | {"step": 20}, tmp_path / "a.pt")
    held = [conv.weight.detach().clone() for conv in convs]
    for conv, weight in zip(convs, held[::-1], strict=True):
        conv.weight.detach().copy_(weight if swapped else torch.randn_like(weight))
    torch.save(train(1) | {"step": 21}, tmp_path / "b.pt")
    causes = [one.cause for one in wb.doctor(tmp_path / "a.pt", tmp_path / "b.pt").causes]
    assert causes[0] == "E9" if swapped else "E9" not in causes


@pytest.mark.parametrize(("what", "first"), [("older", "G6"), ("new", "A2"), ("counts", "A5"), ("kept", None)])
@pytest.mark.parametrize("updates", [1, 12])
def test_counters_of_batches_tell_an_older_save_from_a_new_one(tmp_path, what, first, updates):
    run = Counted().train(30)
    older = deepcopy(run.model.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=36)
    if what == "older":
        run.model.load_state_dict(older)
    elif what == "new":
        run.model[1].reset_parameters()
        run.model[1].bias.detach().fill_(0.5)
    elif what == "counts":
        run.model[1].reset_running_stats()
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=36 + updates))
    causes = [one.cause for one in found.causes if one.severity != "info"]
    assert causes[:1] == ([first] if first else []), found.verdict
    assert what == "counts" or "A5" not in causes


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam, torch.optim.AdamW])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("updates", [1, 10])
def test_norms_that_went_back_to_where_they_begin(tmp_path, optimizer, reset, updates):
    run = Counted(torch.nn.LayerNorm)
    run.optimizer = optimizer(run.model.parameters(), lr=0.5 if optimizer is torch.optim.SGD else 1e-3)
    one = run.train(40).save(tmp_path / "a.pt", step=40)
    if reset:
        run.model[1].reset_parameters()
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=40 + updates))
    told = [sign for sign in found if sign.rule == "P08" and sign.evidence.get("kind") == "offset"]
    assert bool(told) == reset
    assert [one.cause for one in found.causes][:1] in ([["A2"], ["A3"]] if reset else [[]]), found.verdict


@pytest.mark.parametrize(("taken", "first"), [("weights", "F4"), ("average", "F4"), ("", None)])
def test_averages_and_weights_took_each_other_s_place(tmp_path, taken, first):
    run = Run()
    run.optimizer = torch.optim.NAdam(run.model.parameters(), lr=1e-3)  # with no law of its steps
    ema = {name: weight.clone() for name, weight in run.model.state_dict().items()}

    def train(path: Path, updates: int, step: int) -> Path:
        for _ in range(updates):
            run.train(1)
            for name, weight in run.model.state_dict().items():
                ema[name].lerp_(weight, 0.05)
        return run.save(path, ema_model=ema, step=step)

    one = train(tmp_path / "a.pt", 12, 12)
    for name, weight in run.model.state_dict().items():
        if taken == "weights":
            weight.copy_(ema[name])
        elif taken:
            ema[name].copy_(weight)
    found = wb.doctor(one, train(tmp_path / "b.pt", 1, 13))
    assert [one.cause for one in found.causes][:1] == ([first] if first else []), found.verdict


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])
@pytest.mark.parametrize("began", ["zero", "random", "kept"])
def test_a_run_of_zeros_beside_an_optimizer_without_a_law(tmp_path, optimizer, began):
    run = Run()
    run.optimizer = optimizer(run.model.parameters(), lr=1e-3)
    one = run.train(20).save(tmp_path / "a.pt", step=20)
    if began != "kept":
        part = run.model[2].weight.detach().view(-1)[170:234]
        part.copy_(torch.randn(64) * part.std() if began == "random" else torch.zeros(64))
    found = wb.doctor(one, run.train(2).save(tmp_path / "b.pt", step=22))
    assert ("G5" in [one.cause for one in found.causes]) == (began == "zero"), found.verdict


@pytest.mark.parametrize("older", [True, False])
def test_no_length_of_a_schedule_explains_where_an_update_led(tmp_path, older):
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    held = deepcopy(run.train(20).model.state_dict())
    one = run.train(6).save(tmp_path / "a.pt", step=26, args={"max_steps": 100})
    if older:
        run.model.load_state_dict(held)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=27, args={"max_steps": 200}))
    assert found.causes[0].cause == ("F4" if older else "H1"), found.verdict


@pytest.mark.parametrize("shared", [True, False])
def test_a_counter_of_all_parameters_shows_no_update_of_one(tmp_path, shared):
    run = Run().train(20)

    def save(path: Path) -> Path:
        held = deepcopy(run.optimizer.state_dict())
        for state in held["state"].values() if shared else ():
            held["param_groups"][0]["step"] = int(state.pop("step"))
        torch.save({"model": run.model.state_dict(), "optimizer": held, "step": 20 + (path.name == "b.pt")}, path)
        return path

    one, kept = save(tmp_path / "a.pt"), deepcopy(run.optimizer.state_dict()["state"][0])
    weight = run.model[0].weight.detach().clone()
    run.train(1)
    run.model[0].weight.detach().copy_(weight)
    for name in ("exp_avg", "exp_avg_sq"):
        run.optimizer.state[run.model[0].weight][name] = kept[name]
    stood = [sign.evidence["kind"] for sign in wb.doctor(one, save(tmp_path / "b.pt")) if sign.rule == "P36"]
    assert stood == ["frozen" if shared else "counted"]


@pytest.mark.parametrize("transposed", [True, False])
def test_rows_of_several_experts_are_no_permutation_of_experts(tmp_path, transposed):
    torch.manual_seed(0)
    experts, router = "layers.1.mlp.experts.down_proj", "layers.1.mlp.router.weight"
    held = {experts: torch.randn(4, 6, 24), router: torch.randn(4, 6)}
    torch.save({"model": held, "step": 5}, tmp_path / "a.pt")
    weight = held[experts]
    held[experts] = weight.transpose(0, 1).reshape(4, 6, 24).clone() if transposed else weight.roll(1, 0)
    torch.save({"model": held, "step": 5}, tmp_path / "echo.pt")
    found = wb.doctor(tmp_path / "a.pt", echo=tmp_path / "echo.pt")
    assert found.causes[0].cause == ("E1" if transposed else "E10"), found.verdict


@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_a_load_changed_while_they_were_frozen(tmp_path, moved):
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    run.freeze(True)
    run.optimizer.zero_grad()
    weight = run.model[0].weight.detach()
    weight.copy_(torch.cat([weight[::2], weight[1::2]]) if moved else weight)
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=21))
    assert [one.cause for one in found.causes] == (["E1", "H1"] if moved else ["H1"]), found.verdict


@pytest.mark.parametrize("updates", [0, 5])
def test_units_here_and_there_that_began_anew_are_asked_about(tmp_path, updates):
    """Rows of one weight, and the columns of the next one, here and there: of no shard, and of no damaged page."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    units = torch.tensor([3, 11, 12, 29])
    run.train(1)
    for weight, where in ((run.model[0].weight, units), (run.model[2].weight, (slice(None), units))):
        weight.data[where] = torch.randn_like(weight.data[where]) / 2
        for name in ("exp_avg", "exp_avg_sq"):
            run.optimizer.state[weight][name][where] = 0
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=21 + updates))
    assert [(cause.cause, cause.severity) for cause in found.causes] == [("G5", "warn")]
    assert "begin units anew" in found.causes[0].question


@pytest.mark.parametrize("moments", [True, False])
def test_columns_here_and_there_that_began_anew_twice_are_asked_about(tmp_path, moments):
    """Units of the last layer, of other units each time: more than half of its columns. State shows that they began."""
    run = Run().train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    weight = run.model[2].weight
    for first in (1, 0):
        units = torch.arange(first, weight.shape[1], 3)
        weight.data[:, units] = torch.randn_like(weight.data[:, units]) / 2
        for name in ("exp_avg", "exp_avg_sq") if moments else ():
            run.optimizer.state[weight][name][:, units] = 0
        run.train(4)
    found = wb.doctor(one, run.save(tmp_path / "b.pt", step=28))
    assert (found.causes[0].cause == "G5" and "begin units anew" in found.causes[0].question) == moments


@pytest.mark.parametrize("updates", [1, 8])
@pytest.mark.parametrize("masked", [True, False])
def test_weights_that_the_trainer_sets_to_zero_after_each_update(tmp_path, updates, masked):
    run = Run()
    mask = torch.rand(32, 16) < 0.5

    def train(count: int) -> None:
        for _ in range(count):
            run.train(1)
            weight = run.model[0].weight.data
            weight.copy_(weight * mask if masked else weight.sign() * (weight.abs() - 8e-3).clamp(min=0))

    train(20)
    one = run.save(tmp_path / "a.pt", step=20)
    train(updates)
    assert wb.doctor(one, run.save(tmp_path / "b.pt", step=20 + updates)).exit_code == 0


@pytest.mark.parametrize("updates", [1, 12])
def test_a_factor_of_a_bias_beside_another_learning_rate(tmp_path, updates):
    run = Run()
    run.model[0].bias.data.normal_()
    run.train(30)
    one = run.save(tmp_path / "a.pt", step=30)
    run.model[0].bias.data.mul_(2)
    run.optimizer.param_groups[0]["lr"] /= 2
    found = wb.doctor(one, run.train(updates).save(tmp_path / "b.pt", step=30 + updates))
    assert found.causes[0].cause == "E12"


def test_statistics_of_rows_and_columns_changed_places(tmp_path):
    torch.manual_seed(0)
    run = Run()
    run.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=1e-2)
    run.train(60)
    one = run.save(tmp_path / "a.pt", step=60)
    for kept in run.optimizer.state.values():
        if "row_var" in kept:
            kept["row_var"], kept["col_var"] = kept["col_var"].T.clone(), kept["row_var"].T.clone()
    found = wb.doctor(one, run.train(1).save(tmp_path / "b.pt", step=61))
    assert (found.causes[0].cause, found.causes[0].title) == (
        "B11",
        "Two states of the same parameters were exchanged.",
    )


def test_the_rates_of_groups_follow_from_the_formula_of_their_schedule(tmp_path):
    run = Run()
    weights = list(run.model.parameters())
    groups = [{"params": [w], "lr": 1e-3 * 0.9 ** (len(weights) - n)} for n, w in enumerate(weights)]
    run.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 9, 0.8)
    one = run.train(30).save(tmp_path / "a.pt", step=30)
    for group in run.optimizer.param_groups:
        group["lr"] = run.optimizer.param_groups[0]["lr"]
    found = wb.doctor(one, run.train(3).save(tmp_path / "b.pt", step=33))
    assert [cause.cause for cause in found.causes] == ["B8"]


def test_layers_that_are_trained_in_turn_are_clipped_one_by_one(tmp_path):
    run = Run()
    for turn in range(60):
        run.optimizer.zero_grad()
        x = torch.randn(8, 16)
        (100 * (run.model(x) - x).square().mean()).backward()
        for weight in (*run.model[2 * (turn % 2)].parameters(),):
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
    run.model[0].weight.grad = None
    kept = [run.optimizer.state[weight] for weight in run.model[0].parameters()]
    for one in kept:  # a turn more
        one["step"] += 1
    found = wb.doctor(run.save(tmp_path / "a.pt", step=60, args={"clip_grad": 1.0, "lr": 1e-3}))
    assert severities(found, "S19") == []
    assert "S19" in found.checked


@pytest.mark.parametrize("crossed", [True, False])
def test_second_moments_that_changed_places_with_larger_ones_are_not_lost(tmp_path, crossed):
    torch.manual_seed(0)
    names = [f"layers.{n}.{kind}.bias" for n in range(4) for kind in ("small", "large")]
    held = {name: torch.nn.Parameter(torch.randn(20)) for name in names}
    optimizer = torch.optim.AdamW(held.values(), lr=1e-3, betas=(0.9, 0.999))

    def train(updates: int, path: Path, step: int) -> Path:
        for _ in range(updates):
            optimizer.zero_grad()
            sum(((1e-3 if "small" in n else 1.0) * w * torch.randn(20)).sum() for n, w in held.items()).backward()
            optimizer.step()
        torch.save({"model": dict(held), "optimizer": optimizer.state_dict(), "step": step}, path)
        return path

    one = train(60, tmp_path / "a.pt", 60)
    states = [optimizer.state[weight] for weight in held.values()]
    for small, large in zip(states[::2], states[1::2], strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            if crossed:
                small[key], large[key] = large[key], small[key]
            else:
                large[key].zero_()
    found = wb.doctor(one, train(20, tmp_path / "b.pt", 80))
    assert (found.causes[0].cause == "B5") == crossed


@pytest.mark.parametrize("lost", [True, False])
def test_numbers_of_another_layout_are_those_of_the_same_parameters(tmp_path, lost):
    run = Run()
    run.model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    run.fresh()
    one = run.train(9).save(tmp_path / "a.pt", step=9)
    if lost:
        run.optimizer.state[run.model[2].weight]["exp_avg"].zero_()
    found = wb.doctor(one, echo=folder(run, tmp_path / "checkpoint-9", 9))
    assert [cause.cause for cause in found.causes] == (["B3"] if lost else []), found.verdict
    assert "8 of 8 moments" in found.verdict or lost


@pytest.mark.parametrize(("before", "kept"), [(4, False), (60, True)])
def test_moments_of_few_updates_do_not_show_that_they_were_kept(tmp_path, before, kept):
    """Fresh moments of 20 updates are larger than those that 4 updates left, as these would be by now."""
    run = Run()
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    one = run.train(before).save(tmp_path / "a.pt", step=before)
    for state in run.optimizer.state.values():
        state["step"].zero_()
    found = wb.doctor(one, run.train(20).save(tmp_path / "b.pt", step=before + 20))
    assert found.causes[0].severity == ("error" if kept else "warn"), found.causes
    assert (found.causes[0].cause == "B2") == kept
