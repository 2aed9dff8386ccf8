"""The lab is what it says: deterministic, readable to the last bit, lawful where healthy, wrong as described."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests import lab
from tests.lab import accuracy
from tests.lab.case import restored
from tests.lab.run import run
from tests.lab.save_megatron import fused
from tests.lab.state import STATES, State, fresh
from tests.lab.train import train
from tests.reading import bits
from workbench import errors

#: Two layers and sixty steps: what is tested here does not need more.
SMALL = lab.Config(layers=2, batch=4, warmup=20, total=120, resume=60)
KINDS = {
    "tied": SMALL,
    "experts": SMALL.but(experts=4, tied=False, betas=(0.9, 0.999)),
    "fp32 adam": SMALL.but(precision="fp32", optimizer="adam", clip=0.0),
    "bf16": SMALL.but(precision="bf16"),
    "extras": SMALL.but(ema=True, fp8=True),
    "multi-query": SMALL.but(heads=6, groups=1, hidden=72, padded=112, vocab=111),
}
STORED = [(kind, format) for kind in KINDS for format in lab.FORMATS if not lab.FORMATS[format].refuses(KINDS[kind])]


def stored(state: State, format: str) -> dict[tuple[str, str], torch.Tensor]:
    """What a save of a state holds, by ``(fqn, role)``; Megatron's tensors are fused."""
    found = {}
    for role, where in STATES.items():
        tensors = getattr(state, where)
        if role == "master" and format == "deepspeed":
            tensors = state.updated  # ZeRO keeps a flat copy even of fp32 weights
        tensors = fused(state, tensors) if format == "megatron" else tensors
        found |= {(name, role): tensor for name, tensor in tensors.items()}
    for name, role in [key for key in found if key[1] == "param" and ".lora_" in key[0]]:
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        found[f"{stem}.weight", part] = found.pop((name, role))
    return found


def differing(ckpt: wb.Checkpoint, truth: dict[tuple[str, str], torch.Tensor]) -> list[tuple[str, str]]:
    """Names whose bits are not the truth's."""
    return [key for key, want in truth.items() if not same(ckpt.param(key[0], role=key[1]).torch(), want)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def files(path: Path) -> dict[str, bytes]:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in found if file.is_file()}


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_catalogue_is_that_of_the_first_lab_and_more():
    """42 faults and how many of them each kind of evidence showed there, as errors or warnings."""
    counts = Counter(kind for fault in lab.FAULTS.values() for kind in fault.seen)
    assert len(lab.FAULTS) == 42 and len(lab.WIDER) >= 10 and len(lab.CONTROLS) >= 10
    assert {kind: counts[kind] for kind in ("alone", "echo", "next", "early", "late")} == {
        "alone": 28,
        "echo": 38,
        "next": 35,
        "early": 33,
        "late": 12,
    }
    for fault in (*lab.FAULTS.values(), *lab.WIDER.values()):
        assert all(re.fullmatch("[A-H][0-9]{1,2}", cause) for cause in (fault.cause, *fault.also)) and fault.seen
        assert sum(how is not None for how in (fault.restore, fault.second, fault.damage)) == 1
    assert all(control.healthy and not control.seen for control in lab.CONTROLS.values())


def test_the_halves_share_nothing_and_the_sealed_one_is_counted_without_names(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # other tests go on in this process
    dev, sealed = lab.HALVES["dev"], lab.HALVES["sealed"]
    assert not dev.keys() & sealed.keys()
    assert lab.EVERY.keys() == dev.keys() | sealed.keys() | lab.HALVES["gpu"].keys()
    if not sealed:  # the next half is not written yet
        sealed = {name: fault for name, fault in dev.items() if fault.live and fault.kind == "fault"}
        monkeypatch.setitem(lab.HALVES, "sealed", sealed)
    told = tmp_path / "told.json"
    chosen = ["--half", "sealed", "--cases", "1", "--seed", "7", "--formats", "live", "--ways", "echo"]
    assert not accuracy.main([*chosen, "--json", str(told), "--markdown", str(tmp_path / "told.md")])
    words = capsys.readouterr().out + told.read_text() + (tmp_path / "told.md").read_text()
    assert "sealed case   1" in words and not [name for name in sealed if name in words]
    assert "confusion" not in words and json.loads(told.read_text())["trials"] == []


def test_what_cannot_happen_is_refused():
    with pytest.raises(ValueError, match="one of megatron"):
        lab.case("c12_replica_norm", SMALL, "dcp")
    with pytest.raises(ValueError, match="always have masters"):
        lab.case("h0_exact", KINDS["bf16"], "megatron")
    with pytest.raises(ValueError, match="no averages"):
        lab.case("h0_exact", KINDS["extras"], "deepspeed")


# ---- saves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, format", STORED)
def test_every_tensor_and_step_reads_back(tmp_path, kind, format):
    state, _, _ = train(fresh(KINDS[kind]), 2)
    ckpt = wb.open(lab.FORMATS[format].save(tmp_path / "save", state, None), cache=False)
    truth = stored(state, format)
    assert not differing(ckpt, truth)
    assert {key for key in zip(ckpt.tensors.fqn, ckpt.tensors.role, strict=True) if key[1] in STATES} == set(truth)
    for name in {name for name, role in truth if role == "exp_avg"}:
        assert float(ckpt.param(name, role="step").torch()) == 2.0
    prefix = {"deepspeed": "module.", "megatron": ""}.get(format, "model.")
    buffers = fused(state, state.buffers) if format == "megatron" else state.buffers
    assert all(same(ckpt[prefix + name].torch(), buffer) for name, buffer in buffers.items())
    assert ckpt.step == 2 and not [note for note in ckpt.notes if "TP" not in note]


@pytest.mark.parametrize("format", lab.FORMATS)
def test_equal_configurations_have_equal_bytes(tmp_path, format):
    made = []
    for folder in ("a", "b"):
        state, losses, rates = train(fresh(SMALL), 3)
        made.append((losses, rates, files(lab.FORMATS[format].save(tmp_path / folder / "save", state, None))))
    assert made[0] == made[1]


def test_another_seed_is_another_run():
    (_, one, _), (_, other, _) = (train(fresh(SMALL.but(seed=seed)), 2) for seed in (0, 1))
    assert one != other


def test_a_mixed_pair_holds_the_same_state(tmp_path):
    """Before in one layout, after in another: joined by names they are of the same run."""
    case = lab.case("h0_exact", SMALL, "dcp", k=1, after_format="megatron")
    same_layout = lab.case("h0_exact", SMALL, "dcp", k=1)
    assert case.after is not None and same_layout.after is not None
    assert wb.open(case.after).format == "megatron_legacy" and wb.open(case.before).format == "dcp"
    found = wb.diff(same_layout.after, case.after).summary
    assert found["equal"] > 50 and not any(found[what] for what in ("changed", "type", "shape", "unknown", "unread"))


def test_a_series_is_a_run_that_can_be_listed():
    found = lab.series("f24_lr_peak", SMALL, "torch_save", every=5)
    steps = wb.timeline(found)
    assert steps.step.tolist() == [50, 55, 60, 65, 70, 75] and steps.complete.all()
    assert steps.change[4] > 2 * steps.change[2]  # at five times the peak
    with pytest.raises(ValueError, match="at step 0"):
        lab.series("f24_lr_peak", SMALL, every=30)


# ---- laws ----------------------------------------------------------------------------------------------------------


def bound(betas: tuple[float, float], k: int) -> float:
    """K of the invariants: Cauchy-Schwarz over k gradients."""
    ratio = betas[0] ** 2 / betas[1]
    return (1 - betas[0]) ** 2 / (1 - betas[1]) * (1 - ratio**k) / (1 - ratio)


def transition(before: State, after: State, k: int) -> float:
    """Share of elements whose moments cannot have come from those k updates earlier."""
    first, second = before.config.betas
    broken = total = 0
    for name in before.exp_avg:
        step = after.exp_avg[name].double() - first**k * before.exp_avg[name].double()
        room = after.exp_avg_sq[name].double() - second**k * before.exp_avg_sq[name].double()
        slack = 1e-5 * (after.exp_avg_sq[name].double() + before.exp_avg_sq[name].double()) + 1e-30
        broken += int((step**2 > bound((first, second), k) * 1.01 * (room + slack)).sum())
        total += step.numel()
    return broken / total


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.8, 0.95)])
def test_healthy_updates_keep_the_laws_and_lost_state_breaks_them(betas):
    config = SMALL.but(betas=betas)
    before = run(config).resumed
    after, _, rates = train(before, 20)
    assert transition(before, after, 20) == 0.0 and len(rates) == 20
    reach = math.sqrt(bound(betas, config.resume + 20)) * sum(rates)
    for name, weight in after.masters.items():
        decay = math.prod(1 - rate * config.weight_decay for rate in rates) if weight.ndim > 1 else 1.0
        assert float((weight - before.masters[name] * decay).abs().max()) < reach * 1.01
    for fault in ("f01_drop_opt", "f15_pg_perm_qo", "w04_round_robin"):
        broken, _ = restored(lab.ALL[fault], config, "dcp")
        assert transition(before, train(broken, 20)[0], 20) > 0.01, fault


def test_one_update_can_be_replayed_from_two_states():
    """What AdamW does, written out: decay, then the bias-corrected step."""
    before, after = run(SMALL).previous, run(SMALL).resumed
    (first, second), lr, t = SMALL.betas, SMALL.lr_at(SMALL.resume), SMALL.resume
    for name, weight in before.masters.items():
        m, v = after.exp_avg[name].double(), after.exp_avg_sq[name].double()
        decay = SMALL.weight_decay if weight.ndim > 1 else 0.0
        step = (m / (1 - first**t)) / ((v / (1 - second**t)).sqrt() + SMALL.eps)
        want = weight.double() * (1 - lr * decay) - lr * step
        np.testing.assert_allclose(after.masters[name].double(), want, rtol=1e-5, atol=1e-7)
        assert after.step[name] == t and same(after.params[name], after.masters[name].bfloat16())


@pytest.mark.parametrize("kind", ["tied", "fp32 adam"])
def test_a_resumed_run_is_the_uninterrupted_one(kind):
    history = run(KINDS[kind])
    resumed, _, _ = train(history.previous, 1)
    for (role, name, one), (*_, other) in zip(resumed.tensors(), history.resumed.tensors(), strict=True):
        assert same(one, other), (role, name)
    assert resumed.trainer == history.resumed.trainer and resumed.step == history.resumed.step
    assert not changed(train(history.at(50), 10)[0], history.resumed)  # from a step that is not kept


def test_padding_rows_only_decay():
    """Logits beyond the vocabulary are left out, so that those rows measure the learning rate."""
    before, after = run(SMALL).previous.masters, run(SMALL).resumed.masters
    name, decay = "model.embed_tokens.weight", 1 - SMALL.lr_at(SMALL.resume) * SMALL.weight_decay
    torch.testing.assert_close(after[name][SMALL.vocab :], before[name][SMALL.vocab :] * decay, rtol=1e-6, atol=0)
    assert not run(SMALL).resumed.exp_avg_sq[name][SMALL.vocab :].any()


# ---- faults --------------------------------------------------------------------------------------------------------


def changed(state: State, other: State) -> bool:
    if (state.config, state.trainer, state.step) != (other.config, other.trainer, other.step):
        return True
    pairs = itertools.zip_longest(state.tensors(), other.tensors())
    if any(a is None or b is None or a[:2] != b[:2] or not same(a[2], b[2]) for a, b in pairs):
        return True
    return any(not same(state.buffers[name], other.buffers[name]) for name in state.buffers)


def layout_of(fault: lab.Fault, number: int, config: lab.Config) -> str:
    """The layout to try a fault in: each in its turn of those that can hold it."""
    able = [name for name in fault.formats or lab.FORMATS if lab.FORMATS[name].refuses(fault.needs(config)) is None]
    return able[number % len(able)]


def check_fault(fault: lab.Fault, config: lab.Config, format: str) -> None:
    case = lab.case(fault.id, config, format, k=1)
    state, second = restored(fault, case.config, format)
    before = run(case.config).resumed
    assert not differing(wb.open(case.before), stored(before, format))
    if fault.damage is None:
        loaded = state if second is None else lab.FORMATS[format].merged(state, second)
        echo = wb.open(case.echo)
        assert not differing(echo, stored(loaded, format))
        if fault.id == "c12_replica_norm":  # no loader reads the second copy
            copies = [echo[key] for key in echo if echo[key].num_replicas > 1]
            assert sum(not same(copy.torch(), copy.replica(1).torch()) for copy in copies) == 1
        elif not fault.healthy:
            assert changed(loaded, before)
    elif case.after is None:
        with pytest.raises(errors.OpenError):
            wb.open(case.echo)
    else:
        check_pages(wb.open(case.echo), stored(before, format))
    if case.after is not None:
        step = wb.open(case.after).step
        assert step == state.trainer.step + 1 and len(case.facts.rates) == len(case.facts.losses) == case.facts.k == 1


def check_pages(echo: wb.Checkpoint, truth: dict[tuple[str, str], torch.Tensor]) -> None:
    """One tensor differs, and where it does whole pages of its bytes are zero."""
    (key,) = differing(echo, truth)
    got = np.frombuffer(bits(echo.param(key[0], role=key[1]).torch()).tobytes(), np.uint8)
    want = np.frombuffer(bits(truth[key]).tobytes(), np.uint8)
    odd = np.flatnonzero(got != want)
    assert 4000 < odd[-1] - odd[0] < 4 * 4096 and not got[odd[0] : odd[-1] + 1].any()


@pytest.mark.parametrize("number, fault", list(enumerate(lab.ALL.values())), ids=lab.ALL)
def test_every_fault_is_on_disk_what_it_is_in_memory(number, fault):
    check_fault(fault, SMALL, layout_of(fault, number, SMALL))


def test_which_step_jumps_depends_on_what_is_wrong():
    """Wrong weights show in the first loss, wrong masters in the second, lost moments in neither."""
    good = lab.case("h0_exact", SMALL, k=2).facts.losses
    layout, random, reset = (
        lab.case(fault, SMALL, k=2).facts.losses for fault in ("f08_gate_up_swap", "f07_random_master", "f01_drop_opt")
    )
    assert layout[0] > good[0] + 0.02
    assert random[0] == good[0] and random[1] > good[1] + 0.2
    assert reset[0] == good[0]


def test_the_seed_of_a_case_picks_another_element():
    picked = {lab.case("c04_bitflip_mantissa", SMALL, "torch_save", k=1, seed=seed).echo for seed in range(3)}
    states = [restored(lab.ALL["c04_bitflip_mantissa"], SMALL, "torch_save", seed)[0] for seed in range(3)]
    assert len(picked) == 3 and changed(states[0], states[1]) and changed(states[1], states[2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_runs_in_every_layout(seed):
    config = lab.random_config(seed)
    for number, fault in enumerate(lab.ALL.values()):
        check_fault(fault, config, layout_of(fault, number + seed, config))
