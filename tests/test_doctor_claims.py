"""Sentences of a diagnosis against the files: numbers that a parser here knows are counted again, with torch alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests import lab
from tests.lab.drawn import draw
from tests.properties import in_turn

States = dict[int, dict[str, torch.Tensor]]


class Stored:
    """What a file of the lab holds, read by torch and safetensors."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self.weights = load_file(path / "model.safetensors")
            self.optimizer = torch.load(path / "optimizer.pt", weights_only=False)
        else:
            whole = torch.load(path, weights_only=False)
            self.weights, self.optimizer = whole["model"], whole["optimizer"]
        self.states: States = self.optimizer["state"]

    def role(self, role: str) -> dict[Any, torch.Tensor]:
        if role == "the weights":
            return dict(self.weights)
        key = {"the masters": "master_param"}.get(role, role)
        return {number: state[key] for number, state in self.states.items() if key in state}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if (a.ndim)
        else torch.equal(a, b)
    )


def number(text: str) -> int:
    return int(text.replace(",", ""))


# ---- one function a kind of sentence --------------------------------------------------------------


def equal_tensors(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``26 of 26 weights (129,456 elements) are equal bit for bit``."""
    roles = {"weights": ["the weights"], "masters": ["the masters"], "moments": ["exp_avg", "exp_avg_sq"]}[got[3]]
    pairs = [(t, echo.role(role)[name]) for role in roles for name, t in before.role(role).items()]
    if got[3] == "weights":  # the lab's buffers stand beside its weights
        pairs = [(a, b) for a, b in pairs if a.is_floating_point()]
    assert number(got[1]) == number(got[2]) <= len(pairs)
    assert sum(same(a, b) for a, b in pairs) >= number(got[1])
    if number(got[2]) == len(pairs):
        assert number(got[4]) == sum(a.numel() for a, _ in pairs)


def roles_of(words: str) -> list[str]:
    """``exp_avg and exp_avg_sq``, ``the exp_avg tensors``, ``the weights``."""
    return [re.sub(r"^the (\w+) tensors$", r"\1", one) for one in re.split(r", | and ", words)]


def zero_now(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``exp_avg and exp_avg_sq of 52 of 52 parameters are zero now``."""
    roles = roles_of(got[1])
    lost = {
        name
        for role in roles
        for name, tensor in echo.role(role).items()
        if not tensor.any() and before.role(role)[name].any()
    }
    assert number(got[2]) == len(lost) and number(got[3]) == len(before.role(roles[0]))


def changed(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``the exp_avg tensors of 3 of 52 parameters have different values``: at least so many are not equal."""
    roles = roles_of(got[1])
    if not set(roles) <= {"the weights", "the masters", "exp_avg", "exp_avg_sq"}:
        return
    off = {(name) for role in roles for name, t in before.role(role).items() if not same(t, echo.role(role)[name])}
    assert number(got[2]) <= len(off)


def counters(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``14 of 37 of the optimizer's counters went from 120 to 0``."""
    pairs = [(float(state["step"]), float(echo.states[n]["step"])) for n, state in before.states.items()]
    off = [(a, b) for a, b in pairs if a != b]
    assert number(got[1]) == len(off) and number(got[2]) == len(pairs)
    assert (float(number(got[3])), float(number(got[4]))) in off


def not_finite(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``3 elements of 'x' are NaN or infinite``, of the echo."""
    every = [
        *echo.weights.values(),
        *(t for role in ("exp_avg", "exp_avg_sq", "the masters") for t in echo.role(role).values()),
    ]
    assert number(got[1]) == sum(int((~torch.isfinite(t.float())).sum()) for t in every if t.is_floating_point())


def fresh(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``6 of 6 optimizer counters are at 0 or 1``."""
    steps = [float(state["step"]) for state in echo.states.values()]
    assert number(got[1]) == sum(step <= 1 for step in steps) and number(got[2]) == len(steps)


def unrounded(before: Stored, echo: Stored, got: re.Match[str]) -> None:
    """``5,137 of 5,200 elements of weights differ from their rounded master``: all weights have one in the lab."""
    masters = torch.cat([t.to(torch.bfloat16).flatten().sort().values for t in echo.role("the masters").values()])
    assert number(got[2]) == masters.numel()


KINDS: dict[str, Callable[[Stored, Stored, re.Match[str]], None]] = {
    r"([\d,]+) of ([\d,]+) (weights|masters|moments) \(([\d,]+) elements\) are equal bit for bit": equal_tensors,
    r"([\w, ]+?) of ([\d,]+) of ([\d,]+) parameters are zero now": zero_now,
    r"([\w, ]+?) of ([\d,]+) of ([\d,]+) parameters have different values": changed,
    r"([\d,]+) of ([\d,]+) of the optimizer's counters went from ([\d,]+) to ([\d,]+)": counters,
    r"([\d,]+) elements? of .*? (?:are|is) NaN or infinite": not_finite,
    r"([\d,]+) of ([\d,]+) optimizer counters are at 0 or 1": fresh,
    r"([\d,]+) of ([\d,]+) elements of weights differ from their rounded master": unrounded,
}


def sentences(found: Any) -> Iterator[str]:
    """Everything that is said of the load, and of the echo by itself."""
    for one in found.causes:
        for sign in one.signs:
            if sign.evidence.get("in") in ("before → echo", "echo"):
                yield sign.message
    yield from (f"{one.what}: {one.message}" for one in found.ruled_out if not one.what.endswith(" (before)"))


FAULTS = [
    "h0_exact",
    "f01_drop_opt",
    "f02_step_reset",
    "f03_drop_v",
    "f04_drop_mv_keep_step",
    "f06_stale_master",
    "f07_random_master",
    "f16_missing_layer",
    "f17_missing_norm",
    "f21_ema_loaded",
    "c13_nan_m",
    "u20c_step_reset_vectors",
    "u27b_older_moments",
    "u27c_older_weights",
    "u28b_infinite_weight",
    "u39_exp_avg_lost",
    "u53_state_lost_vectors",
]


def every_fault() -> dict[str, Any]:
    import tests.lab.catalogue as catalogue

    tables = [value for value in vars(catalogue).values() if isinstance(value, dict)]
    return {name: fault for table in tables for name, fault in table.items() if isinstance(fault, lab.fault.Fault)}


MASTERED = {"f06_stale_master", "f07_random_master"}  #: which a folder of transformers cannot hold
CASES = [
    *in_turn(["folder", "torch_save"], [fault for fault in FAULTS if fault not in MASTERED]),
    *(("torch_save", fault) for fault in sorted(MASTERED)),
]


@pytest.mark.parametrize("layout, fault", CASES)
def test_what_is_said_of_a_load_is_so_in_the_files(fault, layout):
    paths = draw(every_fault()[fault], 5, [layout], 1)
    found = wb.doctor(paths.before, echo=paths.echo)
    before, echo = Stored(Path(paths.before)), Stored(Path(paths.echo))
    checked = 0
    for sentence in sentences(found):
        for pattern, check in KINDS.items():
            if got := re.search(pattern, sentence):
                check(before, echo, got)
                checked += 1
    assert checked, list(sentences(found))
    moments = 2 * len(before.states)
    assert f" of {moments:,} moments" in found.coverage  # what is there is counted, compared or not


@pytest.mark.parametrize(
    "layout, fault", in_turn(["folder", "torch_save"], ["f01_drop_opt", "f03_drop_v", "f04_drop_mv_keep_step"])
)
def test_elements_below_the_floor_are_counted_as_torch_counts_them(fault, layout):
    paths = draw(every_fault()[fault], 5, [layout], 1)
    assert paths.next is not None
    found = wb.doctor(paths.before, paths.next)
    before, after = Stored(Path(paths.before)), Stored(Path(paths.next))
    said = [re.search(r"in ([\d,]+) of ([\d,]+) elements exp_avg_sq fell", one.message) for one in found]
    (got,) = [one for one in said if one]
    beta2 = before.optimizer["param_groups"][0]["betas"][1]
    below = of = 0
    for name, state in before.states.items():
        old, new = state["exp_avg_sq"].double(), after.states[name]["exp_avg_sq"].double()
        below += int((new < beta2 * old * (1 - 1e-5)).sum())
        of += old.numel()
    assert number(got[2]) == of and abs(number(got[1]) - below) <= max(3, 0.001 * of)
