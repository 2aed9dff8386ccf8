"""One checkpoint by itself: which faults show in it, that healthy ones do not, and each rule on what it is made for."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import workbench as wb
from tests import lab
from tests.test_lab import SMALL, layout_of
from workbench.analysis import manifest
from workbench.analysis.verify import boxes, commit, files, headers, pairs, siblings, stored, values
from workbench.analysis.verify import state as verify_state
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.state import Statement
from workbench.doctor.ledger.sign import RULES
from workbench.doctor.passes.blocks import BLOCK, TensorSlot, stream
from workbench.doctor.passes.profiles import Independence, MatrixProfile, Sums
from workbench.doctor.rules.alone import Alone, check_alone
from workbench.doctor.rules.facts import check_facts
from workbench.doctor.rules.files import MEANS, check_files
from workbench.doctor.rules.shards import check_shards
from workbench.errors import OpenError

#: Fault → a rule that shows it in the echo by itself, whatever the layout, and the cause that the sign names first.
SHOWS = {
    "f01_drop_opt": ("S06", "B1"), "f02_step_reset": ("S07", "B2"), "f03_drop_v": ("S05", "B3"),
    "f04_drop_mv_keep_step": ("S05", "B3"), "f05_master_from_bf16": ("S09", "D1"), "f06_stale_master": ("S08", "D2"),
    "f07_random_master": ("S08", "D2"), "f10_qkv_contig": ("N17", "E4"), "f11_tp_order": ("N20", "E1"),
    "f14_layer_dup": ("S14", "E9"), "f15_pg_perm_qo": ("N5", "B5"), "f17_missing_norm": ("S15", "A3"),
    "f18_untied_init": ("S13", "F2"), "f19_untied_copy": ("S13", "F2"), "f20_vocab_shift": ("N20", "F7"),
    "f22_v_bf16": ("S10", "D4"), "f23_lr_rewarm": ("S17", "C1"), "f25_lr_double_step": ("S17", "C1"),
    "f27_beta2": ("S19", "H1"), "f28_data_replay": ("S18", "C6"), "c01_bitflip_exp_master": ("S02", "G1"),
    "c03_bitflip_w16": ("S08", "D2"), "c05_bitflip_v_sign": ("S03", "G3"), "c06_bitflip_v_exp": ("N28", "G3"),
    "c08_stale_shard_w16": ("S08", "D2"), "c09_zero_page_master": ("S11", "G5"), "c10_zero_page_v": ("S11", "G5"),
    "c11_zero_tail_w16": ("S11", "G5"), "c12_replica_norm": ("S12", "F1"), "c13_nan_m": ("S01", "G1"),
    "c14_step_mixed": ("S07", "B2"),
    "w01_fp8_amax": ("N15", "D9"), "w03_zero_shift": ("S08", "D2"), "w04_round_robin": ("S08", "D2"),
    "w05_padded_vocab": ("N20", "E11"), "w06_expert_bias": ("N26", "A5"), "w08_ema_as_weights": ("N21", "F4"),
    "w11_opt_absent": ("S06", "B1"), "w12_dummy_step": ("S05", "B3"), "w13_stale_checkpoint": ("S07", "B2"),
}  # fmt: skip  # not w18_late_step: 3 updates of 77 may have been skipped, so that file alone proves nothing
#: Rules that say something of a healthy control, truly: data were skipped, the clip was halved, bf16 pins norms at 1.
TRUE = {"h5_skip_data": {"S18"}, "h8_larger_batch": {"S18"}, "h10_other_clip": {"S19"}, "h12_pure_bf16": {"S15"}}


def state(path: object) -> State:
    ckpt = wb.open(str(path), cache=False)
    return State(ckpt, gather(ckpt))


def everything(path: object) -> Alone | None:
    """All that one checkpoint tells; ``None`` where it cannot even be opened."""
    try:
        one = state(path)
    except OpenError:
        return None
    found = check_alone(one, threads=1)
    found.add(check_facts(Evidence(one)))
    return found


def graver(found: Alone) -> set[str]:
    return {sign.rule for sign in found.signs if sign.severity != "info"}


# ---- the lab -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, fault", list(enumerate(SHOWS)))
def test_a_fault_shows_in_its_echo(number, fault):
    format = layout_of(lab.ALL[fault], number, SMALL)
    found = everything(lab.case(fault, SMALL, format, k=1).echo)
    rule, cause = SHOWS[fault]
    signs = [sign for sign in found.signs if sign.rule == rule and sign.severity != "info"]
    assert signs, graver(found)
    assert cause == (signs[0].causes or RULES[rule].causes)[0]
    for sign in found.signs:
        assert sign.message and set(sign.causes) <= set(RULES[sign.rule].causes) | {"G6", "G7", "G8"}


@pytest.mark.parametrize("number, control", list(enumerate(lab.CONTROLS)))
def test_a_healthy_resume_shows_nothing(number, control):
    format = layout_of(lab.ALL[control], number, SMALL)
    case = lab.case(control, SMALL, format, k=20)
    for path in (case.echo, case.after):
        found = everything(path)
        assert not [sign for sign in found.signs if sign.severity == "error"]
        assert graver(found) <= TRUE.get(control, set()) | ({"S19"} if control == "h10_other_clip" else set())
        assert {one.what for one in found.cleared} >= {"files", "zero pages", "numbers"}


def test_second_moments_of_16_bits_are_not_held_to_a_bound_of_exact_decay():
    found = everything(lab.case("h12_pure_bf16", SMALL, "dcp", k=1).echo)
    assert "rounded up" in found.not_checked["S19"]


@pytest.mark.parametrize("format", lab.FORMATS)
def test_most_rules_are_looked_at_in_every_layout(format):
    found = everything(lab.case("h0_exact", SMALL, format, k=1).echo)
    assert {"S06", "S07", "S11", "V01", "V02", "N5", "N17", "N18", "N19", "N20", "N28", "S19", "N16"} <= set(
        found.checked
    )
    assert found.not_checked["N8"] and found.not_checked["N22"] and "manifest" in found.not_checked["V03"]
    cleared = {one.what for one in found.cleared}
    assert {"masters", "moments", "precision of the masters", "stored checksums"} <= cleared
    assert ("replicas" in cleared) == (format in ("megatron", "deepspeed"))
    assert all(rule in RULES for rule in found.checked if rule not in ("values",))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 24))
@pytest.mark.parametrize("format", lab.FORMATS)
def test_of_the_first_faults_most_show_in_runs_that_nobody_chose(seed, format):
    """At least 26 of 42 from one checkpoint, and no healthy one is called an error."""
    config = lab.random_config(seed)
    shown = set()
    for name, fault in lab.FAULTS.items():
        if fault.formats is None or format in fault.formats:
            found = everything(lab.case(name, config, format, k=1).echo)
            if found is None or graver(found):
                shown.add(name)
    assert len(shown) >= 26, sorted(set(lab.FAULTS) - shown)
    for name, fault in lab.CONTROLS.items():
        able = fault.formats is None or format in fault.formats
        if able and lab.FORMATS[format].refuses(fault.needs(config)) is None:
            found = everything(lab.case(name, config, format, k=1).echo)
            assert not [sign for sign in found.signs if sign.severity == "error"], name
            assert graver(found) <= TRUE.get(name, set()), name


# ---- files ---------------------------------------------------------------------------------------------------------


def test_every_finding_that_is_translated_is_one_of_verifys():
    modules = (boxes, commit, files, headers, pairs, siblings, stored, values, verify_state)
    words = " ".join(Path(module.__file__).read_text() for module in modules)
    words += (Path(values.__file__).parent / "pages.py").read_text()
    words += (Path(manifest.__file__).parent / "manifest_check.py").read_text()
    known = set(re.findall(r'"([a-z]+\.[a-z_]+)"', words))
    assert not set(MEANS) - known and set(MEANS.values()) <= set(RULES)


@pytest.mark.parametrize("fault", ["c04_bitflip_mantissa", "c06_bitflip_v_exp"])
@pytest.mark.parametrize("format", ["torch_save", "dcp", "megatron"])
def test_a_manifest_of_before_finds_what_no_law_does(fault, format, tmp_path):
    case = lab.case(fault, SMALL, format, k=1)
    written = tmp_path / "manifest.json"
    manifest.write(wb.open(str(case.before), cache=False), str(written))
    found = check_files(state(case.echo), manifest=str(written), threads=1)
    (sign,) = [sign for sign in found.signs if sign.rule == "V03"]
    assert sign.severity == "error" and {"G2", "G3"} <= set(sign.causes)
    healthy = check_files(state(lab.case("h0_exact", SMALL, format, k=1).echo), manifest=str(written), threads=1)
    assert not healthy.signs and "manifest" in {one.what for one in healthy.cleared}


def test_zeros_under_a_wrong_checksum_are_proved():
    found = check_files(state(lab.case("c09_zero_page_master", SMALL, "dcp", k=1).echo), threads=1)
    signs = {sign.rule: sign for sign in found.signs}
    assert signs["S11"].severity == "error" and signs["S11"].causes == ("G5",)
    assert signs["V02"].causes[0] == "G5" and signs["S11"].tensors[0].endswith(("gate_proj.weight", "up_proj.weight"))
    assert not {"zero pages", "stored checksums"} & {one.what for one in found.cleared}


@pytest.mark.parametrize("fault, first", [("c12_replica_norm", "F1"), ("c07_stale_shard", "G6")])
def test_a_copy_that_drifted_is_not_a_stale_rank(fault, first):
    found = check_files(state(lab.case(fault, SMALL, "megatron", k=1).echo), threads=1)
    (sign,) = [sign for sign in found.signs if sign.rule == "S12"]
    assert sign.severity == "error" and sign.causes[0] == first


def test_without_bytes_only_the_structure_is_judged():
    found = check_files(state(lab.case("c09_zero_page_master", SMALL, "dcp", k=1).echo), deep=False)
    assert not found.signs and {"S11", "S12", "V02", "V03"} <= set(found.not_checked)


@pytest.mark.parametrize("format, files_", [("deepspeed", "*_rank_1_*optim*"), ("dcp_sharded", "__1_0.distcp")])
def test_a_rank_of_the_checkpoint_before_is_found(format, files_, tmp_path):
    """The later checkpoint with one rank's file of the earlier one."""
    run = lab.series("h0_exact", SMALL, format, every=20, count=2)
    steps = sorted(run.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    earlier, later = steps[1], tmp_path / steps[2].name
    shutil.copytree(steps[2], later)
    first, second = opened(earlier), opened(later)
    assert not check_shards(Evidence(state(first), state(second)).pair("before", "after"), threads=1).signs
    moved = 0
    for path in first.rglob(files_):
        there = second / path.relative_to(first)
        if there.stat().st_size == path.stat().st_size:
            shutil.copyfile(path, there)
            moved += 1
    assert moved == 1
    pair = Evidence(state(first), state(second)).pair("before", "after")
    (sign,) = check_shards(pair, threads=1).signs
    assert sign.rule == "N24" and sign.severity == "error" and sign.evidence["share"] == 1.0
    assert sign.hit == sign.of > 1000 and sign.tensors


def opened(folder: Path) -> Path:
    from tests.lab.case import opened as inner

    return inner(folder)


# ---- values --------------------------------------------------------------------------------------------------------


def test_an_outlier_that_was_there_before_is_none(tmp_path):
    echo = state(lab.case("c01_bitflip_exp_master", SMALL, "dcp", k=1).echo)
    before = state(lab.case("c01_bitflip_exp_master", SMALL, "dcp", k=1).before)
    for earlier, wanted in ((None, True), (before, True), (echo, False)):
        found = check_alone(echo, earlier, files=False, threads=1)
        assert ("S02" in {sign.rule for sign in found.signs}) == wanted


def trained(path: Path, optimizer: type = torch.optim.AdamW, steps: int = 3, **options: object) -> dict:
    """A small model after some updates, as ``torch.save`` leaves it; the caller damages and writes it."""
    torch.manual_seed(7)
    layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(5))
    made = optimizer(layers.parameters(), lr=0.02, **options)
    for _ in range(steps):
        made.zero_grad()
        x = torch.randn(64, 32) * torch.logspace(-1, 1, 32)
        for layer in layers:
            x = layer(x).tanh() * torch.logspace(-1, 1, 32)
        x.square().mean().backward()
        made.step()
    return {
        "model": {f"layers.{n}": w for n, w in layers.state_dict().items()},
        "optimizer": made.state_dict(),
        "step": steps,
    }


def saved(path: Path, content: dict) -> Alone:
    torch.save(content, path)
    return check_alone(state(path), files=False, threads=1)


def test_a_matrix_that_was_just_drawn_among_trained_ones(tmp_path):
    content = trained(tmp_path)
    for weight in content["model"].values():
        if weight.ndim > 1:
            weight *= torch.linspace(0.5, 2.0, 32)  # inputs of many sizes
    healthy = saved(tmp_path / "a.pt", content)
    assert "N29" in healthy.checked and "N29" not in graver(healthy)
    content["model"]["layers.2.weight"] = torch.nn.Linear(32, 32).weight.detach()
    found = saved(tmp_path / "b.pt", content)
    (sign,) = [sign for sign in found.signs if sign.rule == "N29"]
    assert sign.tensors == ("layers.2.weight",) and sign.severity == "warn" and "uniform" in sign.message


def test_the_largest_second_moment_is_never_below_the_present_one(tmp_path):
    content = trained(tmp_path, amsgrad=True)
    assert "N8" not in graver(saved(tmp_path / "a.pt", content))
    content["optimizer"]["state"][4]["max_exp_avg_sq"][3, 5] = 0.0
    found = saved(tmp_path / "b.pt", content)
    (sign,) = [sign for sign in found.signs if sign.rule == "N8"]
    assert sign.severity == "error" and sign.evidence["elements"] == 1 and sign.tensors == ("layers.2.weight",)


def test_an_epsilon_above_all_gradients(tmp_path):
    assert "N16" not in graver(saved(tmp_path / "a.pt", trained(tmp_path)))
    assert "N16" in graver(saved(tmp_path / "b.pt", trained(tmp_path, eps=1e3)))


def test_decay_on_the_biases_alone(tmp_path):
    content = trained(tmp_path)
    group, names = content["optimizer"]["param_groups"][0], list(content["model"])
    for decays, wanted in (((0.1, 0.0), False), ((0.0, 0.1), True)):
        groups = [
            {
                **group,
                "weight_decay": decay,
                "params": [n for n, name in enumerate(names) if name.endswith(end)],
                "param_names": [name for name in names if name.endswith(end)],
            }
            for decay, end in zip(decays, (".weight", ".bias"), strict=True)
        ]
        content["optimizer"]["param_groups"] = groups
        assert ("N27" in graver(saved(tmp_path / f"{wanted}.pt", content))) == wanted


def test_a_loss_scale_that_began_anew():
    one = state(lab.case("h0_exact", SMALL, "dcp", k=1).echo)

    def scaled(scale: float) -> State:
        return State(
            one.ckpt,
            replace(one.facts, statements={**one.facts.statements, "loss_scale": (Statement(scale, "scaler"),)}),
        )

    for before, after, wanted in (
        (256.0, 65536.0, True),
        (32768.0, 65536.0, False),
        (256.0, 2048.0, False),
        (65536.0, 1.0, True),
        (65536.0, 4096.0, False),
        (524288.0, 65536.0, True),  # halved three times to the initial value, and no update was skipped
        (131072.0, 65536.0, False),
        (65536.0, -1.0, False),
        (math.inf, 1.0, False),
    ):
        found = check_alone(scaled(after), scaled(before), files=False, threads=1)
        assert ("N14" in graver(found)) == wanted


def test_adapters_that_are_still_zero(tmp_path):
    config = SMALL.but(lora=4)
    case = lab.case("h0_exact", config, "torch_save", k=1)
    assert "N22" not in graver(everything(case.echo))
    content = torch.load(case.echo, weights_only=False)
    zeroed = [weight for name, weight in content["model"].items() if "lora_B" in name]
    for weight in zeroed:
        weight.zero_()
    torch.save(content, tmp_path / "zero.pt")
    found = everything(tmp_path / "zero.pt")
    (sign,) = [sign for sign in found.signs if sign.rule == "N22"]
    assert zeroed and sign.severity == "error" and sign.hit == len(zeroed)


# ---- profiles ------------------------------------------------------------------------------------------------------


class Fold:
    """Sums of a weight and its second moments."""

    def begin(self, slot: TensorSlot) -> Sums:
        found = Sums.of(slot)
        assert found is not None
        return found

    def fold(self, state: Sums, slot: TensorSlot, block) -> None:
        state.take(block, block.values[0, "param"], block.values[0, "exp_avg_sq"])

    def merge(self, state: Sums, later: Sums) -> None:
        state.merge(later)


def profile(tmp_path: Path, weight: torch.Tensor, v: torch.Tensor, name: str = "linear_fc1.") -> MatrixProfile:
    torch.save({"w": weight, "v": v}, tmp_path / "p.pt")
    ckpt = wb.open(tmp_path / "p.pt", cache=False)
    slot = TensorSlot("w", {(0, "param"): ckpt["w"], (0, "exp_avg_sq"): ckpt["v"]})
    ((_, sums),) = stream([slot], Fold(), threads=3)
    return sums.close(name)


@pytest.mark.parametrize("shape", [(16, 16), (700, 300), (3, 50, 40), (BLOCK * 20 // 64, 64)])
def test_a_profile_in_blocks_is_that_of_the_whole(tmp_path, shape):
    made = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=made)
    v = torch.rand(shape, generator=made) + 0.5
    rows = v.reshape(-1, shape[-1])
    rows[3:5] = 0.0
    found, other = (profile(tmp_path, weight, v, name) for name in ("q_proj.weight", "linear_fc1.weight"))
    assert found.shape == (math.prod(shape[:-1]), shape[-1]) and found.idle == ((3, 5),)
    logs = np.log2(rows.numpy()[5:])
    assert np.abs(found.rows[5:] - 127 - logs.mean(axis=1)).max() < 0.09
    assert found.rows[3] == 0
    half = found.shape[0] // 2
    lower = np.log2(rows.numpy()[half:]).sum(axis=0) + 127 * (found.shape[0] - half)
    assert np.abs(other.columns[1] - lower).max() < 0.09 * (found.shape[0] - half)
    squares = weight.numpy().reshape(found.shape).astype(np.float64) ** 2
    tails = (squares**2).mean() / squares.mean() ** 2
    assert found.drawn.tails == pytest.approx((tails - 3.0) / math.sqrt(24 / squares.size), abs=0.05) or (
        found.drawn.law != "normal"
    )


@pytest.mark.parametrize(
    "law, draw",
    [
        ("normal", lambda shape, made: torch.randn(shape, generator=made)),
        ("uniform", lambda shape, made: torch.rand(shape, generator=made) - 0.5),
        ("normal, cut at 2σ", lambda shape, made: torch.nn.init.trunc_normal_(torch.empty(shape), generator=made)),
    ],
)
def test_numbers_just_drawn_are_told_from_others(tmp_path, law, draw):
    for seed in range(5):
        made = torch.Generator().manual_seed(seed)
        weight = draw((400, 300), made)
        fresh: Independence = profile(tmp_path, weight, torch.ones(400, 300)).drawn
        assert fresh.law == law and fresh.worst < 4.0
        gains = 1 + 0.2 * torch.rand(300, generator=made)
        assert profile(tmp_path, weight * gains, torch.ones(400, 300)).drawn.worst > 12.0


def test_one_element_far_above_row_and_column(tmp_path):
    made = torch.Generator().manual_seed(3)
    rows, columns = (torch.rand(n, generator=made) * 10 + 0.1 for n in (300, 200))
    v = torch.outer(rows, columns) * (0.5 + torch.rand(300, 200, generator=made)) * 1e-8
    plain = profile(tmp_path, torch.ones(300, 200), v.clone())
    assert plain.above - plain.next < 1.0 and plain.above < 4.0
    v[17, 23] *= 65536
    found = profile(tmp_path, torch.ones(300, 200), v)
    assert found.at == 17 * 200 + 23 and 14 < found.above < 18 and found.next < 4.0
