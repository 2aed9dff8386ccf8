"""Signs from values on the lab: which rules a fault wakes, and that a healthy resume wakes none as an error."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import workbench as wb
from tests import lab
from tests.properties import in_turn
from tests.test_lab import SMALL
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.ledger.sign import RULES
from workbench.doctor.passes.blocks import BLOCK, MANY, TOGETHER, SlotBlock, TensorSlot, _SlotWork, stream
from workbench.doctor.rules.values import PassValues, check_one, check_pair

#: Fault → rules in its echo, one update later, 20 updates later.
WAKES = {
    "f01_drop_opt": ({"S05"}, {"P03", "P04", "P14"}, {"P03", "P04"}),
    # one update from the stored moments leads to these weights, so P05 is silent after one
    "f03_drop_v": ({"S04", "S05"}, {"P03", "P04"}, {"P03", "P04", "P05"}),
    "f05_master_from_bf16": ({"S09"}, {"P12"}, set()),
    "f07_random_master": ({"S08"}, {"P05", "P11", "P12"}, {"P05", "P11"}),
    "f10_qkv_contig": (set(), {"P03", "P04", "P05", "P12"}, {"P03", "P04", "P05"}),
    "f14_layer_dup": ({"S14"}, {"P04", "P05"}, {"P04", "P05"}),
    "f15_pg_perm_qo": (set(), {"P03", "P04"}, {"P03", "P04"}),
    "f17_missing_norm": ({"S15"}, {"P05", "P12"}, {"P05"}),
    "f22_v_bf16": ({"S10"}, {"P04"}, set()),
    "c02_bitflip_low_exp_master": ({"S08"}, {"P05", "P12"}, set()),
    "c05_bitflip_v_sign": ({"S03", "S04"}, {"P03"}, set()),
    "c11_zero_tail_w16": ({"S08"}, set(), set()),
    "c13_nan_m": ({"S01"}, {"P09"}, {"P09"}),
    "w14_nothing_matched": (set(), {"P05", "P12"}, {"P05"}),
}


def state(path: object) -> State:
    ckpt = wb.open(str(path), cache=False)
    return State(ckpt, gather(ckpt))


def rules(found: PassValues) -> set[str]:
    assert all(RULES[sign.rule].severity == "error" or sign.severity == "warn" for sign in found.signs)
    assert all(sign.message and sign.tensors and sign.hit for sign in found.signs)
    return {sign.rule for sign in found.signs}


@pytest.mark.parametrize("format, fault", in_turn(["dcp", "megatron"], list(WAKES)))
def test_a_fault_wakes_its_rules(fault, format):
    alone, soon, later = WAKES[fault]
    for k, wanted in ((1, soon), (20, later)):
        case = lab.case(fault, SMALL, format, k=k)
        before = state(case.before)
        assert case.after is not None
        assert wanted <= rules(check_pair(Evidence(before, state(case.after)).pair("before", "after")))
        assert not rules(check_one(before))
    assert alone <= rules(check_one(state(case.echo), before))


@pytest.mark.parametrize("number, control", list(enumerate(lab.CONTROLS)))
def test_a_healthy_resume_wakes_no_error(number, control):
    fault = lab.ALL[control]
    able = [name for name in fault.formats or lab.FORMATS if lab.FORMATS[name].refuses(fault.needs(SMALL)) is None]
    for k in (1, 20):
        case = lab.case(control, SMALL, able[number % len(able)], k=k)
        assert case.after is not None
        before, after = state(case.before), state(case.after)
        found = check_pair(Evidence(before, after).pair("before", "after"))
        signs = (*found.signs, *check_one(after, before).signs)
        assert not [sign for sign in signs if sign.severity == "error"], control


@pytest.mark.parametrize("fault", ["h0_exact", "f01_drop_opt", "f15_pg_perm_qo"])
def test_another_layout_of_the_later_state_gives_the_same_verdict(fault):
    mixed = lab.case(fault, SMALL, "dcp", k=1, after_format="megatron")
    plain = lab.case(fault, SMALL, "dcp", k=1)
    found = [
        check_pair(Evidence(state(case.before), state(case.after)).pair("before", "after")) for case in (mixed, plain)
    ]
    assert rules(found[0]) == rules(found[1]) and bool(rules(found[0])) == (fault != "h0_exact")


def test_the_learning_rate_and_the_decay_are_read_off():
    case = lab.case("h0_exact", SMALL, k=1)
    found = check_pair(Evidence(state(case.before), state(case.after)).pair("before", "after"))
    sums = found.states["model.layers.0.mlp.up_proj.weight"]
    fit = sums.replay.fit(None)
    assert fit[0] == pytest.approx(case.facts.rates[0], rel=1e-4)
    assert fit[1] == pytest.approx(case.facts.weight_decay, rel=0.05)
    ruler = found.states["model.embed_tokens.weight"].ruler
    assert ruler.count == 6 * SMALL.hidden
    assert 1 - ruler.slope == pytest.approx(case.facts.rates[0] * case.facts.weight_decay, rel=1e-3)


def test_without_facts_it_says_what_it_could_not_look_at():
    case = lab.case("f01_drop_opt", SMALL, k=1)
    ckpts = [wb.open(str(path), cache=False) for path in (case.before, case.after)]
    from workbench.doctor.facts.state import TrainingState

    blank = [State(ckpt, TrainingState()) for ckpt in ckpts]
    found = check_pair(Evidence(*blank).pair("before", "after"))
    assert not found.signs and "number of updates" in found.not_checked["updates"]
    assert "betas" in check_one(blank[0]).not_checked["S04"]


def test_few_numbers_with_empty_low_bits_are_chance(tmp_path):
    """Of 96 numbers one or two fit into bfloat16 now and then; a share of them all does not by chance."""
    for fitting, wanted in ((1, set()), (4, set()), (20, {"S09"})):
        master = torch.randn(96, generator=torch.Generator().manual_seed(3)) + 3.0e-3
        master[:fitting] = master[:fitting].bfloat16().float()
        held = {"exp_avg": torch.zeros(96), "exp_avg_sq": torch.zeros(96), "step": torch.tensor(9.0)}
        held["master_param"] = master
        path = tmp_path / f"{fitting}.pt"
        groups = [{"params": [0], "param_names": ["w"], "betas": (0.9, 0.95)}]
        torch.save(
            {"model": {"w": master.bfloat16()}, "optimizer": {"state": {0: held}, "param_groups": groups}, "step": 9},
            path,
        )
        found = state(path)
        assert set(found.params["w"]) >= {"param", "master"} and found.facts.step == 9
        assert {sign.rule for sign in check_one(found).signs} & {"S08", "S09"} == wanted


class Gathered:
    """Collects what a pass hands out."""

    def begin(self, slot: TensorSlot) -> list[tuple[int, np.ndarray]]:
        return []

    def fold(self, state: list[tuple[int, np.ndarray]], slot: TensorSlot, block: SlotBlock) -> None:
        state.append((block.start, block.values[0, "param"].copy()))

    def merge(self, state: list[tuple[int, np.ndarray]], later: list[tuple[int, np.ndarray]]) -> None:
        state += later


@pytest.mark.parametrize("shape", [(), (7,), (3 * BLOCK + 5,), (300, 700), (2, 3, BLOCK + 9), (0, 4)])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_are_the_tensor_in_order(tmp_path, shape, threads):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    torch.save({"w": whole, "v": whole.clone()}, tmp_path / "a.pt")
    ckpt = wb.open(tmp_path / "a.pt", cache=False)
    ticks: list[float] = []
    slots = [TensorSlot(name, {(0, "param"): ckpt[name]}) for name in ("w", "v")]
    found = {slot.fqn: got for slot, got in stream(slots, Gathered(), threads=threads, progress=ticks.append)}
    if not whole.numel():
        assert not found
        return
    for pieces in found.values():
        starts = [start for start, _ in pieces]
        assert starts == sorted(starts) and max(len(values) for _, values in pieces) <= BLOCK
        together = np.concatenate([values for _, values in pieces])
        np.testing.assert_array_equal(together, whole.float().numpy().reshape(-1))
    assert ticks == sorted(ticks) and ticks[-1] == 1.0


def test_a_thread_takes_small_parameters_together(tmp_path, monkeypatch):
    sizes = [2] * 100 + [TOGETHER + 1, 3]
    held = {f"w{at}": torch.randn(size) for at, size in enumerate(sizes)}
    torch.save(held, tmp_path / "a.pt")
    ckpt = wb.open(tmp_path / "a.pt", cache=False)
    slots = [TensorSlot(name, {(0, "param"): ckpt[name]}) for name in held]
    taken = []
    once = _SlotWork.__call__
    monkeypatch.setattr(_SlotWork, "__call__", lambda work, runs: taken.append(len(runs)) or once(work, runs))
    found = [(slot.fqn, got) for slot, got in stream(slots, Gathered(), threads=1)]
    assert [name for name, _ in found] == list(held)
    for name, pieces in found:
        np.testing.assert_array_equal(np.concatenate([values for _, values in pieces]), held[name].numpy())
    assert sum(taken) == len(sizes) and max(taken) == MANY and 1 in taken  # a large parameter is taken alone
    assert len(taken) == 100 // MANY + 3


def test_a_parameter_that_cannot_be_read_leaves_those_that_are_taken_with_it(tmp_path):
    save_file({f"w{at}": np.full(2, at, np.float32) for at in range(4)}, tmp_path / "a.safetensors")
    lost = wb.open(tmp_path / "a.safetensors", cache=False)
    os.utime(tmp_path / "a.safetensors", ns=(1, 1))
    kept = wb.open(tmp_path / "a.safetensors", cache=False)
    slots = [TensorSlot(f"w{at}", {(0, "param"): (lost if at == 1 else kept)[f"w{at}"]}) for at in range(4)]
    failed: list[str] = []
    found = {
        slot.fqn: float(got[0][1][0])
        for slot, got in stream(slots, Gathered(), threads=1, on_error=lambda name, _: failed.append(name))
    }
    assert failed == ["w1"] and found == {"w0": 0.0, "w2": 2.0, "w3": 3.0}


def test_shapes_are_made_once(tmp_path):
    save_file(
        {"a": np.zeros((2, 3)), "b": np.zeros((2, 3)), "c": np.zeros((4,)), "d": np.zeros(())},
        tmp_path / "a.safetensors",
    )
    found = state(tmp_path / "a.safetensors")
    shapes = {key: found.shape(at) for at, key in enumerate(found.ckpt.catalog.keys)}
    assert shapes == {"a": (2, 3), "b": (2, 3), "c": (4,), "d": ()}
    assert shapes["a"] is shapes["b"] is found.shape(0)
