"""What a pair shows of values that updates carry on: each law on a healthy run of plain torch, and on a spoilt one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.lab.optimizers import AdaBelief, QHAdam
from workbench.doctor.laws.exact import Line
from workbench.doctor.passes.pair import PairState, Update
from workbench.doctor.rules import carried, pair

torch = pytest.importorskip("torch")
WIDTH, FIRST = 24, 80


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
    )


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


class Run:
    """A regression with an average of the weights."""

    def __init__(self, optimizer: Callable[[Any], Any] = adamw) -> None:
        self.net = model()
        self.optimizer = optimizer(self.net.parameters())
        self.averages = True
        self.average = {name: one.detach().clone() for name, one in self.net.named_parameters()}
        self.step = 0

    def train(self, count: int) -> None:
        for _ in range(count):
            draw = torch.Generator().manual_seed(self.step)
            given = torch.randn(16, WIDTH, generator=draw)
            self.optimizer.zero_grad()
            (self.net(given) - given.roll(1, 1).sin()).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            for name, one in self.net.named_parameters() if self.averages else ():
                self.average[name].lerp_(one.detach(), 0.02)

    def save(self, path: Path) -> Path:
        torch.save(
            {
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "ema": copy.deepcopy(self.average),
            },
            path,
        )
        return path


def resumed(folder: Path, spoil: Callable[[Run], None] | None, k: int, optimizer: Callable[[Any], Any] = adamw) -> Any:
    """The diagnosis of a pair; with ``k`` 0, of an echo."""
    run = Run(optimizer)
    run.train(FIRST)
    before = run.save(folder / f"step-{FIRST}.pt")
    if spoil is not None:
        with torch.no_grad():
            spoil(run)
    if not k:
        return wb.doctor(before, echo=run.save(folder / "echo.pt"))
    run.train(k)
    return wb.doctor(before, run.save(folder / f"step-{FIRST + k}.pt"))


def state(run: Run, layer: int) -> dict[str, Any]:
    found: dict[str, Any] = run.optimizer.state[run.net[layer].weight]
    return found


def times(run: Run) -> None:
    for one in run.optimizer.state.values():
        one["exp_avg"].mul_(1024)
        one["exp_avg_sq"].mul_(1024**2)


def root(run: Run) -> None:
    for one in run.optimizer.state.values():
        one["exp_avg_sq"].sqrt_()


def first_lost(run: Run) -> None:
    for one in run.optimizer.state.values():
        one["exp_avg"].zero_()


def exchanged(run: Run) -> None:
    one, two = state(run, 0), state(run, 5)
    for name in ("exp_avg", "exp_avg_sq"):
        kept = one[name].clone()
        one[name].copy_(two[name])
        two[name].copy_(kept)


def half_lost(run: Run) -> None:
    for layer in (0, 2, 5):
        for name in ("exp_avg", "exp_avg_sq"):
            state(run, layer)[name][WIDTH // 2 :] = 0


def second_lost_in_part(run: Run) -> None:
    state(run, 2)["exp_avg_sq"][WIDTH // 2 :] = 0


def summed(run: Run) -> None:
    for layer in (0, 2):
        for name in ("exp_avg", "exp_avg_sq"):
            state(run, layer)[name].mul_(2)


def average_restarted(run: Run) -> None:
    run.average = {name: one.detach().clone() for name, one in run.net.named_parameters()}


def average_of_another(run: Run) -> None:
    torch.manual_seed(1)
    run.average = {name: torch.randn_like(one) * 0.2 for name, one in run.average.items()}


def average_loaded(run: Run) -> None:
    for name, one in run.net.named_parameters():
        one.copy_(run.average[name])


def statistics_lost(run: Run) -> None:
    run.net[1].reset_running_stats()


def transposed(run: Run) -> None:
    run.net[2].weight.copy_(run.net[2].weight.T.clone())


def vectors_exchanged(run: Run) -> None:
    one, two = run.net[0].bias, run.net[5].bias
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


@pytest.mark.parametrize("k", [1, 5, 20, 60])
def test_a_healthy_run_breaks_none(tmp_path: Path, k: int) -> None:
    found = resumed(tmp_path, None, k)
    assert not found.causes
    assert {"P22", "P23", "P24"} <= set(found.checked)
    assert ("P21" in found.checked) == (k < 60)  # .95^60 of the old second moments is less than a twentieth


@pytest.mark.parametrize(
    ("spoil", "k", "cause", "rule"),
    [
        (times, 5, "B6", "P21"),
        (root, 5, "B6", "P21"),
        (first_lost, 1, "B3", "P04"),
        (first_lost, 5, "B3", "P04"),
        (exchanged, 1, "B5", "P17"),
        (exchanged, 10, "B5", "P17"),
        (half_lost, 5, "G5", "P03"),
        (average_restarted, 5, "F4", "P23"),
        (average_of_another, 5, "F4", "P22"),
        (average_loaded, 1, "F4", "P05"),
        (second_lost_in_part, 1, "G5", "P04"),
        (summed, 1, "E12", "P04"),
        (statistics_lost, 3, "A5", "P24"),
        (transposed, 3, "E1", "P17"),
        (vectors_exchanged, 3, "E9", "P17"),
    ],
)
def test_each_is_named(tmp_path: Path, spoil: Callable[[Run], None], k: int, cause: str, rule: str) -> None:
    found = resumed(tmp_path, spoil, k)
    assert found.causes[0].cause == cause, found.verdict
    assert rule in {one.rule for one in found}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_reported_and_nothing_is_derived_from_them(tmp_path: Path, value: float) -> None:
    def spoilt(run: Run) -> None:
        for net in (run.net[0].weight, run.average["0.weight"], *state(run, 0).values()):
            net.view(-1)[::7] = value

    found = resumed(tmp_path, spoilt, 5)
    assert found.causes[0].cause in ("G1", "G3"), found.verdict
    assert not {"P21", "P22", "P23"} & {one.rule for one in found}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_raise_no_warning_of_numpy(value: float) -> None:
    old, new = np.linspace(0.1, 9, 500), np.linspace(0.2, 18, 500)
    new[::7] = value
    assert carried._line(old, new) == pytest.approx((1, 2))
    assert carried._outside(old, new, new, 1.0, 1e-7) == 0
    assert carried._outside(new, new, old, value, 1e-7) == 0
    assert carried._way(old, new, new) is None


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),
}


def zeroed(name: str) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        for one in run.optimizer.state.values():
            if name in one:
                one[name].zero_()

    return spoil


@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_that_go_on_are_healthy(tmp_path: Path, name: str, k: int) -> None:
    found = resumed(tmp_path, None, k, OPTIMIZERS[name])
    assert not found.causes, found.verdict


@pytest.mark.parametrize(
    ("name", "state", "k", "cause", "rule"),
    [
        ("Adagrad", "sum", 1, "B3", "P25"),  # its counters continue
        ("Adagrad", "sum", 7, "B3", "P25"),
        ("RMSprop", "square_avg", 7, "B4", "P25"),
        ("Adadelta", "square_avg", 2, "B4", "P25"),
        ("Adamax", "exp_inf", 3, "B4", "P25"),
        ("Adafactor", "row_var", 2, "B3", "P25"),
        ("AMSGrad", "max_exp_avg_sq", 1, "B11", "P25"),
        ("SGD", "momentum_buffer", 1, "B1", "P26"),
    ],
)
def test_a_pair_shows_state_that_other_optimizers_lost(
    tmp_path: Path, name: str, state: str, k: int, cause: str, rule: str
) -> None:
    found = resumed(tmp_path, zeroed(state), k, OPTIMIZERS[name])
    assert rule in {one.rule for one in found}
    assert found.causes[0].cause == cause, found.verdict


def turned(name: str) -> Callable[[Run], None]:
    """Each weight of one shape has the state of the next one."""

    def spoil(run: Run) -> None:
        held = [run.optimizer.state[run.net[layer].weight] for layer in (0, 2, 5)]
        old = [one[name].clone() for one in held]
        for one, other in zip(held, [*old[1:], *old[:1]], strict=True):
            one[name].copy_(other)

    return spoil


def scaled(name: str, factor: float) -> Callable[[Run], None]:
    def spoil(run: Run) -> None:
        for one in run.optimizer.state.values():
            one[name].mul_(factor)

    return spoil


CENTERED: Any = lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True)  # noqa: E731


@pytest.mark.parametrize(
    ("optimizer", "spoil", "causes", "rule"),
    [
        (OPTIMIZERS["SGD"], turned("momentum_buffer"), {"B5"}, "P32"),
        (OPTIMIZERS["RMSprop"], turned("square_avg"), {"B5"}, "P32"),
        (CENTERED, zeroed("grad_avg"), {"B1", "B3", "B11"}, "P33"),
        (OPTIMIZERS["RMSprop"], scaled("square_avg", 8.0), {"B6", "E12"}, "P33"),
        (OPTIMIZERS["Adagrad"], scaled("sum", 0.5), {"B6", "E12"}, "P25"),
    ],
)
def test_state_without_a_law_continues_its_own_old_values(
    tmp_path: Path, optimizer: Any, spoil: Callable[[Run], None], causes: set[str], rule: str
) -> None:
    found = resumed(tmp_path, spoil, 1, optimizer)
    assert rule in {one.rule for one in found}
    assert found.causes[0].cause in causes and found.causes[0].certainty != "certain", found.verdict


@pytest.mark.parametrize("k", [1, 12])
def test_rows_of_second_moments_at_other_places_are_found(tmp_path: Path, k: int) -> None:
    def transposed(run: Run) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            state(run, 2)[name].copy_(state(run, 2)[name].T.clone())

    found = resumed(tmp_path, transposed, k)
    assert "P32" in {one.rule for one in found}
    assert found.causes[0].cause in {"B5", "E13"}, found.verdict


def test_a_parameter_that_a_saver_left_out_is_not_one_that_was_frozen(tmp_path: Path) -> None:
    run = Run()
    run.train(FIRST)
    before = run.save(tmp_path / f"step-{FIRST}.pt")
    old = copy.deepcopy((run.net[2].weight.detach(), {k: v for k, v in state(run, 2).items() if k != "step"}))
    run.train(3)
    with torch.no_grad():
        run.net[2].weight.copy_(old[0])
        for name, tensor in old[1].items():
            state(run, 2)[name].copy_(tensor)
    found = wb.doctor(before, run.save(tmp_path / f"step-{FIRST + 3}.pt"))
    assert found.causes[0].cause == "G6" and found.causes[0].tensors == ("2.weight",), found.verdict

    run = Run()
    run.train(FIRST)
    run.net[2].weight.requires_grad_(False)
    run.optimizer.zero_grad(set_to_none=True)
    frozen = wb.doctor(before, _trained(run, 3, tmp_path))
    assert all(one.severity != "error" for one in frozen.causes), frozen.verdict


def _trained(run: Run, k: int, folder: Path) -> Path:
    run.train(k)
    return run.save(folder / f"frozen-step-{run.step}.pt")


def test_a_copy_of_the_weights_is_found_where_another_tensor_was(tmp_path: Path) -> None:
    run = Run()
    run.averages = False
    run.train(FIRST)
    kept = {name: torch.full_like(one, 0.5) + torch.rand_like(one) for name, one in run.average.items()}
    run.average = kept
    before = run.save(tmp_path / f"step-{FIRST}.pt")
    run.average = {name: one.detach().clone() for name, one in run.net.named_parameters()}
    run.train(2)
    found = wb.doctor(before, run.save(tmp_path / f"step-{FIRST + 2}.pt"))
    assert "P35" in {one.rule for one in found} and found.causes[0].cause in {"F4", "F6"}, found.verdict


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("Adagrad", "sum"),
        ("RMSprop", "square_avg"),
        ("Adadelta", "acc_delta"),
        ("Adamax", "exp_inf"),
        ("Adafactor", "col_var"),
        ("AMSGrad", "max_exp_avg_sq"),
        ("SGD", "momentum_buffer"),
        ("ASGD", "ax"),
    ],
)
def test_an_echo_compares_all_state_that_is_stored(tmp_path: Path, name: str, state: str) -> None:
    assert not resumed(tmp_path, None, 0, OPTIMIZERS[name]).causes

    def one_element(run: Run) -> None:
        held = run.optimizer.state[run.net[2].weight][state]
        held.view(-1)[3] = held.view(-1)[3] * 1.5 + 1e-3

    found = resumed(tmp_path, one_element, 0, OPTIMIZERS[name])
    assert found.causes, found.verdict
    assert any(state in one.message or "momentum" in one.message for one in found if one.severity != "info")


def test_averages_that_stand_still_are_asked_about(tmp_path: Path) -> None:
    def stand(run: Run) -> None:
        run.averages = False

    found = resumed(tmp_path, stand, 12)
    assert found.causes[0].cause == "F4" and found.causes[0].severity == "warn", found.verdict
    assert "P28" in {one.rule for one in found}


def test_weights_that_went_through_int8_are_named(tmp_path: Path) -> None:
    def quantised(run: Run) -> None:
        for layer in (0, 2, 5):
            weight = run.net[layer].weight
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)

    found = resumed(tmp_path, quantised, 0)
    assert found.causes[0].cause == "D7" and "int8" in str([one.message for one in found]), found.verdict


@pytest.mark.parametrize(
    ("what", "cause", "words", "updates"),
    [
        ("square", "E1", "transposed", 0),
        ("square", "E1", "transposed", 1),
        ("state", "B4", "zero", 0),
        ("z", "B1", "copies of the weights", 0),
    ],
)
def test_a_form_is_named_by_what_the_values_became(
    tmp_path: Path, what: str, cause: str, words: str, updates: int
) -> None:
    """Transposed weights, a part of the second moments, and state that was made anew from the weights."""

    def changed(run: Run) -> None:
        state = run.optimizer.state
        for one in (run.net[0].weight, run.net[2].weight, run.net[5].weight):
            if what == "square":
                for tensor in (one, *(state[one][name] for name in ("exp_avg", "exp_avg_sq"))):
                    tensor.copy_(tensor.T.clone())
            elif what == "state":
                state[one]["row_var"].zero_()
            else:
                state[one]["z"].copy_(one)

    def made(params: Any) -> Any:
        params = list(params)
        if what == "state":
            return torch.optim.Adafactor(params, lr=1e-2)
        optimizer = adamw(params)
        if what == "z":
            optimizer.register_step_post_hook(
                lambda *_: [optimizer.state[one].setdefault("z", torch.randn_like(one)) for one in params]
            )
        return optimizer

    found = resumed(tmp_path, changed, updates, made)
    assert found.causes[0].cause == cause and words in str([one.message for one in found]), found.verdict
    assert found.causes[0].certainty != "certain"


def test_shards_that_were_joined_along_the_other_axis_are_named(tmp_path: Path) -> None:
    def joined(run: Run) -> None:
        weight = run.net[2].weight
        weight.copy_(torch.cat(weight.detach().clone().chunk(2, 1), 0).reshape(weight.shape))

    found = resumed(tmp_path, joined, 0)
    assert found.causes[0].cause == "E1" and "wrong axis" in str([one.message for one in found]), found.verdict


def test_weights_that_shrank_without_a_learning_rate_are_a_finding() -> None:
    update = Update(1, (0.9, 0.95), lr=(0.0, 0.0), certain=True, decays=(0.1,), decoupled=True)
    sums = PairState(count=4096, ruler=Line(4096, 1.0, 0.9, 0.81), aa=1.0, bb=0.81, ab=0.9, dd=0.01)
    (sign,) = pair._rulers({"wte": update}, {"wte": sums}, [])
    assert sign.rule == "P11" and not sign.evidence["slow"]


def test_only_what_is_off_is_named(tmp_path: Path) -> None:
    found = resumed(tmp_path, exchanged, 10)
    (sign,) = [one for one in found if one.rule == "P17"]
    numbers = [
        number for number, (name, _) in enumerate(model().named_parameters()) if name in ("0.weight", "5.weight")
    ]
    moved = {"0.weight", "5.weight"} | {f"optimizer state {number}" for number in numbers}
    assert {name for pair in sign.evidence["from"] for name in pair} <= moved


# ---- what a single update shows --------------------------------------------------------------------------------------


class Scheduled(Run):
    """With a schedule, and a data loader's position."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.position, self.strides = 0, (1, 1)

    def train(self, count: int) -> None:
        for _ in range(count):
            super().train(1)
            for _ in range(self.strides[0]):
                self.schedule.step()
            self.position += self.strides[1]

    def save(self, path: Path) -> Path:
        stored = torch.load(super().save(path), weights_only=False)
        stored |= {"lr_scheduler": self.schedule.state_dict(), "dataloader": {"batches": self.position}}
        torch.save(stored, path)
        return path


@pytest.mark.parametrize("k", [1, 12])
@pytest.mark.parametrize(("factor", "cause"), [(16.0, "B10"), (1 / 16, "B10"), (2.0, None)])
def test_gradients_of_another_scale_are_asked_about(tmp_path: Path, factor: float, cause: str | None, k: int) -> None:
    def scaled(run: Run) -> None:
        for one in run.net.parameters():
            one.register_hook(lambda gradient: gradient * factor)

    found = resumed(tmp_path, scaled, k)
    assert [(one.cause, str(one.severity)) for one in found.causes[:1]] == ([(cause, "warn")] if cause else [])
    if cause:
        times = next(one.evidence["times"] for one in found if one.rule == "P30")
        assert factor / 2 < times < factor * 2, "the batches differ in their gradients, too"


def test_a_layer_that_was_always_trained_and_now_stands_is_asked_about(tmp_path: Path) -> None:
    found = resumed(tmp_path, lambda run: run.net[2].requires_grad_(False), 1)
    assert (found.causes[0].cause, found.causes[0].severity) == ("H1", "warn"), found.verdict
    assert "did not advance in 1 update" in str([one.message for one in found])


def test_a_step_in_which_nothing_was_trained_is_a_warning(tmp_path: Path) -> None:
    def orphaned(run: Run) -> None:
        run.optimizer.step = lambda: None
        run.averages = False

    found = resumed(tmp_path, orphaned, 1)
    assert found.causes[0].severity == "warn" and "N25" in {one.rule for one in found}, found.verdict


@pytest.mark.parametrize(
    ("strides", "cause", "words"),
    [
        ((1, 1), None, ""),
        ((2, 1), "C3", "more often"),
        ((0, 1), "C3", "not stepped"),
        ((1, 0), "C6", "did not advance"),
    ],
)
def test_a_schedule_and_data_that_leave_the_step_show_after_one_update(
    tmp_path: Path, strides: tuple[int, int], cause: str | None, words: str
) -> None:
    run = Scheduled()
    run.train(FIRST)
    before = run.save(tmp_path / f"step-{FIRST}.pt")
    run.strides = strides
    run.train(1)
    found = wb.doctor(before, run.save(tmp_path / f"step-{FIRST + 1}.pt"))
    assert [one.cause for one in found.causes] == ([cause] if cause else []), found.verdict
    assert not cause or words in found.causes[0].title


def test_an_update_that_is_longer_than_any_stated_rate_is_no_average(tmp_path: Path) -> None:
    def doubled(run: Run) -> None:
        step, group = run.optimizer.step, run.optimizer.param_groups[0]

        def twice() -> None:
            group["lr"] *= 2
            step()
            group["lr"] /= 2

        run.optimizer.step = twice

    found = resumed(tmp_path, doubled, 1)
    assert found.causes[0].cause == "C2", found.verdict


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_save_that_rounds_the_weights_is_named(tmp_path: Path, kind: Any) -> None:
    def rounding(run: Run) -> None:
        save = run.save

        def rounded(path: Path) -> Path:
            stored = torch.load(save(path), weights_only=False)
            model = {name: one.to(kind).to(one.dtype) for name, one in stored["model"].items()}
            torch.save(stored | {"model": model}, path)
            return path

        run.save = rounded

    found = resumed(tmp_path, rounding, 1)
    assert found.causes[0].cause == "D7", found.verdict


# ---- adapters --------------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank adapter, under PEFT's names."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({adapter: torch.nn.Linear(WIDTH, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({adapter: torch.nn.Linear(4, WIDTH, bias=False)})
        torch.nn.init.zeros_(self.lora_B[adapter].weight)

    def forward(self, x: Any) -> Any:
        (a,), (b,) = self.lora_A.values(), self.lora_B.values()
        return self.base_layer(x) + b(a(x))


def adapters(folder: Path, spoil: Callable[[Any], None] | None, k: int) -> Any:
    """The diagnosis of a pair, or of an echo, whose optimizer knows adapters by name, as FSDP's state dict does."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(Adapted("default"), torch.nn.GELU(), Adapted("default"))
    trained = {name: one for name, one in net.named_parameters() if one.requires_grad}
    optimizer = adamw(trained.values())

    def train(first: int, last: int) -> Path:
        for step in range(first, last):
            given = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (net(given) - given.roll(1, 1).sin()).square().mean().backward()
            optimizer.step()
        group = {**optimizer.param_groups[0], "params": list(trained)}
        moments = {name: optimizer.state[one] for name, one in trained.items()}
        saved = {"model": net.state_dict(), "optimizer": {"state": moments, "param_groups": [group]}, "step": last}
        torch.save(saved, folder / f"step-{last}.pt")
        return folder / f"step-{last}.pt"

    before = train(0, FIRST)
    if spoil is not None:
        with torch.no_grad():
            spoil(net)
    if not k:
        return wb.doctor(before.rename(folder / "before.pt"), echo=train(FIRST, FIRST))
    return wb.doctor(before, train(FIRST, FIRST + k))


@pytest.mark.parametrize("k", [1, 7])
def test_adapters_that_go_on_over_a_frozen_base_are_healthy(tmp_path: Path, k: int) -> None:
    report = adapters(tmp_path, None, k)
    assert not report.causes, report
    assert "8 of 8 weights, 8 of 8 moments" in " ".join(str(report).split())


@pytest.mark.parametrize("k", [1, 7])
def test_adapters_that_were_not_loaded_are_named_alone(tmp_path: Path, k: int) -> None:
    report = adapters(tmp_path, lambda net: net[0].lora_B["default"].weight.zero_(), k)
    assert report.causes[0].cause == "F5"
    assert "0.lora_B.weight" in str(report) and "2.lora_B.weight" not in str(report)


def other_base(net: Any) -> None:
    net[0].base_layer.weight += 0.01 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3))


def merged_base(net: Any) -> None:
    one = net[0]
    one.base_layer.weight += 2 * one.lora_B["default"].weight @ one.lora_A["default"].weight


@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("spoil", "cause"), [(other_base, "F6"), (merged_base, "F5")])
def test_only_a_change_of_the_rank_of_its_adapter_is_a_merge(tmp_path: Path, spoil: Any, cause: str, k: int) -> None:
    report = adapters(tmp_path, spoil, k)
    assert report.causes[0].cause == cause, report
    assert not report.causes[1:], report


def shuffled(run: Run) -> None:
    for one in run.optimizer.state.values():
        at = torch.randperm(one["exp_avg_var"].numel())
        for name in ("exp_avg", "exp_avg_var"):
            one[name].copy_(one[name].flatten()[at].view_as(one[name]))


@pytest.mark.parametrize(
    ("spoil", "causes"),
    [(None, {""}), (zeroed("exp_avg_var"), {"B3", "B4"}), (shuffled, {"B5", "B6", "G6"})],
)
def test_squares_of_an_optimizer_without_adams_laws_are_held_to_their_decay(
    tmp_path: Path, spoil: Callable[[Run], None] | None, causes: set[str]
) -> None:
    found = resumed(tmp_path, spoil, 20, lambda params: AdaBelief(params, lr=1e-3))
    assert "P25" in found.checked
    assert next((one.cause for one in found.causes), "") in causes, found.verdict


@pytest.mark.parametrize("k", [1, 20])
def test_squares_that_an_optimizer_corrects_in_each_update_keep_less(tmp_path: Path, k: int) -> None:
    found = resumed(tmp_path, None, k, lambda params: QHAdam(params, lr=1e-3))
    assert "P25" in found.checked
    assert not found.causes, found


@pytest.mark.parametrize("later", [False, True])
def test_param_groups_that_have_one_anothers_learning_rates(tmp_path: Path, later: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW([{"params": one.parameters(), "lr": 1e-3 * 2**n} for n, one in enumerate(net)])

    def save(name: str, step: int) -> Path:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, tmp_path / name)
        return tmp_path / name

    def train() -> None:
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()

    for _ in range(9):
        train()
    before = save("before.pt", 9)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, rates[::-1], strict=True):
        group["lr"] = lr
    if later:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        train()
        found = wb.doctor(before, save("after.pt", 10))
    else:
        found = wb.doctor(before, echo=save("echo.pt", 9))
    assert found.causes[0].cause == "B7"
    assert found.causes[0].title == "The param groups have one another's learning rates."
    assert found.causes[0].severity == "warn"
