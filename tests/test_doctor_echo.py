"""Echoes on the lab: every fault that changes a tensor has a sign of its cause, and a healthy load has none."""

from __future__ import annotations

import math
import re
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from tests import lab
from tests.properties import in_turn
from tests.test_lab import SMALL
from workbench.doctor import examine
from workbench.doctor.causes.layout import TAGS
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.origins.became import on_grid
from workbench.doctor.origins.index import MovedRows, RowIndex, blocks_text, row_keys
from workbench.doctor.origins.look import rejoined
from workbench.doctor.origins.match import some
from workbench.doctor.rules.elsewhere import check_rows
from workbench.doctor.rules.load import EchoValues, check_echo
from workbench.doctor.rules.load_signs import ECHO

#: Faults of counters, schedules, data and names alone: facts' rules show them, no tensor differs.
OF_FACTS = {
    "f02_step_reset",
    "f18_untied_init",
    "f19_untied_copy",
    "f23_lr_rewarm",
    "f25_lr_double_step",
    "f28_data_replay",
    "c14_step_mixed",
    "w09_loader_reset",
    "w17_truncated",
    "w18_late_step",
}
FAULTS = [name for name, fault in {**lab.FAULTS, **lab.WIDER}.items() if "echo" in fault.seen and name not in OF_FACTS]
#: Fault → cause that rows of before and after tell, one and twenty updates after the load.
ROWS = {
    "f08_gate_up_swap": "E3",
    "f09_gate_up_naive": "E2",
    "f10_qkv_contig": "E4",
    "f11_tp_order": "E1",
    "f12_rope_layout": "E5",
    "f13_layer_swap": "E9",
    "f14_layer_dup": "E9",
    "f16_missing_layer": "A2",
    "f20_vocab_shift": "F7",
    "w02_expert_permutation": "E10",
    "w03_zero_shift": "E7",
    "w04_round_robin": "E13",
    "w05_padded_vocab": "E11",
    "w14_nothing_matched": "A1",
    "w15_head_permutation": "E6",
}


def state(path: object) -> State:
    ckpt = wb.open(str(path), cache=False)
    return State(ckpt, gather(ckpt))


def resumed(fault: str, config: lab.Config, format: str, seed: int = 0) -> lab.Case:
    """The case; skips what cannot happen in that layout."""
    try:
        case = lab.case(fault, config, format, k=1, seed=seed)
    except ValueError as why:
        pytest.skip(str(why))
    if "echo" not in case.expected and not case.fault.healthy:
        pytest.skip("does not show in an echo of that layout")
    return case


def echo(fault: str, config: lab.Config, format: str) -> EchoValues:
    """What the echo of a case says."""
    case = resumed(fault, config, format)
    return check_echo(Evidence(state(case.before), echo=state(case.echo)).pair("before", "echo"))


def answers(case: lab.Case) -> set[str]:
    return {case.cause, *case.fault.also}


def well_made(sign: Sign) -> bool:
    return bool(sign.message and sign.tensors and 0 < sign.hit <= sign.of and sign.severity != "info")


def diagnosed(case: lab.Case, monkeypatch: pytest.MonkeyPatch) -> tuple[EchoValues, list[str], list[str]]:
    """What an echo says on the way to its diagnosis; the causes, and those that rest on what was read of tensors."""
    said: list[EchoValues] = []
    monkeypatch.setattr(examine, "check_echo", lambda *a, **how: said.append(check_echo(*a, **how)) or said[-1])
    found = wb.doctor(case.before, echo=case.echo)
    grave = [one for one in found.causes if one.severity != "info"]
    rests = [one.cause for one in grave if any(sign.rule in ECHO and sign.severity != "info" for sign in one.signs)]
    (one,) = said
    return one, [one.cause for one in grave], rests


@pytest.mark.parametrize("format, fault", in_turn(["dcp", "megatron"], FAULTS))
def test_an_echo_tells_the_cause(fault, format, monkeypatch):
    case = resumed(fault, SMALL, format)
    found, causes, rests = diagnosed(case, monkeypatch)
    assert found.signs and all(well_made(sign) for sign in found.signs)
    # no sign leads elsewhere, and nothing that was called healthy excludes the truth
    assert causes[0] in answers(case) and rests and set(rests) <= answers(case), causes
    assert not answers(case) & {cause for one in found.cleared for cause in one.causes}
    hit = {key for key, one in found.status.items() if one.status != "equal"}
    assert {fqn for fqn, _ in hit} >= {name for sign in found.signs for name in sign.tensors} - lost(found)


def lost(found: EchoValues) -> set[str]:
    return {name for sign in found.signs if sign.evidence.get("gone") for name in sign.tensors}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [201, 202, 203])
@pytest.mark.parametrize("format", list(lab.FORMATS))
@pytest.mark.parametrize("fault", FAULTS)
def test_an_echo_tells_the_cause_in_runs_that_nobody_chose(fault, format, seed, monkeypatch):
    case = resumed(fault, lab.random_config(seed), format, seed)
    found, causes, _ = diagnosed(case, monkeypatch)
    assert found.signs and answers(case) & set(causes[:2])
    assert not answers(case) & {cause for one in found.cleared for cause in one.causes}


KINDS_OF_GRIDS = ["int8 per row", "int8 with a zero point", "int4 in blocks", "float8_e4m3", "float8_e5m2"]


def quantized(kind: str, w: torch.Tensor) -> torch.Tensor:
    """``w`` through eight or four bits, by torch, or as block-wise quantizers do it."""
    if kind == "int8 per row":
        zeros = torch.zeros(len(w), dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(w, w.abs().amax(1) / 127, zeros, 0, -128, 127)
    if kind == "int8 with a zero point":
        low, high = float(w.min()), float(w.max())
        scale = (high - low) / 255
        return torch.fake_quantize_per_tensor_affine(w, scale, round(-low / scale), 0, 255)
    if kind.startswith("float8"):
        dtype = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}[kind]
        scale = w.abs().amax() / torch.finfo(dtype).max
        return (w / scale).to(dtype).float() * scale
    blocks = w.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    return ((blocks / scale).round() * scale).view_as(w)


@pytest.mark.parametrize("kind", KINDS_OF_GRIDS)
def test_weights_that_went_through_few_bits_are_told_from_others_on_a_grid(tmp_path, kind):
    made = torch.Generator().manual_seed(5)
    w = 0.02 * torch.randn(64, 256, generator=made)
    changed = w + 0.006 * torch.randn(w.shape, generator=made)  # near, and rounded, but not the old ones rounded
    save_file({"w": w, "through": quantized(kind, w), "other": quantized(kind, changed)}, tmp_path / "m.safetensors")
    ckpt = wb.open(str(tmp_path / "m.safetensors"), cache=False)
    assert on_grid(ckpt["w"], ckpt["through"]) == kind.split()[0]
    assert on_grid(ckpt["w"], ckpt["other"]) is None and on_grid(ckpt["w"], ckpt["w"]) is None


@pytest.mark.parametrize("shape", [(48, 96), (1500, 1024)])
def test_shards_joined_along_the_other_axis_are_told_at_any_size(tmp_path, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    for shards in (2, 8):
        joined = torch.cat(w.chunk(shards, 1), 0).reshape(shape)
        spoilt = joined.clone()
        spoilt[-1] = 0
        save_file({"w": w, "joined": joined, "spoilt": spoilt}, tmp_path / f"{shards}.safetensors")
        ckpt = wb.open(str(tmp_path / f"{shards}.safetensors"), cache=False)
        assert rejoined(ckpt["w"], ckpt["joined"]) == shards
        assert not rejoined(ckpt["w"], ckpt["w"]) and not rejoined(ckpt["w"], ckpt["spoilt"])


@pytest.mark.parametrize("format, control", in_turn(["dcp", "megatron", "torch_save"], list(lab.CONTROLS)))
def test_a_healthy_load_is_cleared(control, format):
    found = echo(control, SMALL, format)
    assert not found.signs and not found.not_checked
    assert {"weights", "moments", "echo"} <= {one.what for one in found.cleared}
    assert {one.status for one in found.status.values()} == {"equal"}


def test_the_block_structure_is_named():
    found = echo("f09_gate_up_naive", SMALL, "megatron")
    (sign,) = (sign for sign in found.signs if "exp_avg" not in sign.evidence["roles"])
    assert sign.rule == "R13" and sign.evidence["blocks"] == [
        [0, 96, "layers.0.mlp.gate_proj.weight", 0],
        [96, 192, "layers.0.mlp.up_proj.weight", 0],
    ]
    assert "rows 96:192 are 'layers.0.mlp.up_proj.weight' 0:96" in sign.message
    assert sign.tensors[0] == "decoder.layers.0.mlp.linear_fc1.weight"
    found = echo("f20_vocab_shift", SMALL, "dcp")
    assert "rolled by +1" in found.signs[0].message
    found = echo("w03_zero_shift", SMALL, "dcp")
    assert found.signs[0].evidence["form"] == "flat" and re.search(r"by \+[1-9]", found.signs[0].message)


def test_an_optimizer_that_numbers_its_parameters_anew_did_not_change_them():
    """With the head untied, ids after it mean other parameters: they are compared by what they mean."""
    case = lab.case("f18_untied_init", SMALL, "torch_save", k=1)
    found = check_echo(Evidence(state(case.before), echo=state(case.echo)).pair("before", "echo"))
    assert not found.signs and found.status["model.norm.weight", "exp_avg"].status == "equal"


def test_a_file_cut_short_is_told_and_raises_nothing():
    case = lab.case("w17_truncated", SMALL, "dcp", k=1)
    paths = (case.before, case.echo)
    both = [State(wb.open(str(path), cache=False, partial=True), TrainingState()) for path in paths]
    found = check_echo(Evidence(both[0], echo=both[1]).pair("before", "echo"))
    assert "could not be read" in found.not_checked["echo"] and not found.signs
    assert "echo" not in {one.what for one in found.cleared}


def test_experts_of_a_stack_are_blocks_of_rows(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    stack = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    for order, file in (([0, 1, 2, 3], "a"), ([2, 0, 1, 3], "b")):
        save_file(
            {name: stack[order].contiguous(), "model.norm.weight": torch.ones(16)}, tmp_path / f"{file}.safetensors"
        )
    both = [State(wb.open(str(tmp_path / f"{f}.safetensors"), cache=False), TrainingState()) for f in "ab"]
    found = check_echo(Evidence(both[0], echo=both[1]).pair("before", "echo"))
    assert [sign.evidence["tag"] for sign in found.signs] == ["expert"]
    told = wb.doctor(tmp_path / "a.safetensors", echo=tmp_path / "b.safetensors")
    assert [one.cause for one in told.causes] == ["E10"]


# ---- rows of a later checkpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, fault", in_turn([("dcp", 20), ("megatron", 1)], list(ROWS)))
def test_rows_of_a_later_checkpoint_tell_the_layout(fault, how):
    format, k = how
    case = lab.case(fault, SMALL, format, k=k)
    assert case.after is not None
    pair = Evidence(state(case.before), after=state(case.after)).pair("before", "after")
    found = check_rows(pair, list(pair.b.params))  # all of them: those that are right must not be blamed
    assert found.signs and set(map(told_by_rows, found.signs)) <= {ROWS[fault], *case.fault.also}
    assert all(sign.severity == ("warn" if sign.rule == "P18" else "error") for sign in found.signs)


def told_by_rows(sign: Sign) -> str:
    """The cause that fits the place of the rows best; without a place, the sign's own."""
    fits = TAGS.get(sign.evidence.get("tag", ""))
    return max(fits, key=lambda cause: fits[cause]) if fits else sign.causes[0]


@pytest.mark.parametrize("fault", ROWS)
def test_a_later_checkpoint_leads_to_the_layout(fault):
    case = lab.case(fault, SMALL, "megatron", k=1)
    assert wb.doctor(case.before, case.after).causes[0].cause in answers(case)


def test_moments_of_another_parameter_are_traced_by_laws():
    case = lab.case("f15_pg_perm_qo", SMALL, "dcp", k=1)
    assert case.after is not None
    pair = Evidence(state(case.before), after=state(case.after)).pair("before", "after")
    (sign,) = check_rows(pair, list(pair.b.params)).signs
    assert sign.causes == ("B5", "E13")
    gated = [f"model.layers.{layer}.mlp.{side}_proj.weight" for layer in range(2) for side in ("gate", "up")]
    queries = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    truth = {names[k]: names[k - 1] for names in (gated, queries) for k in range(len(names))}
    assert sign.evidence["from"] and all(truth[name] == source for name, source in sign.evidence["from"])


def test_rows_of_large_weights_are_sampled(tmp_path):
    """3,000 rows of 64 heads, of which two halves changed places, a little later."""
    made = torch.Generator().manual_seed(4)
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
    older = {name: torch.randn(3000, 64, generator=made) for name in names}
    newer = {name: w + 0.05 * torch.randn(w.shape, generator=made) for name, w in older.items()}
    newer[names[0]] = newer[names[0]].roll(1500, 0)
    for file, tensors in (("a", older), ("b", newer)):
        save_file(tensors, tmp_path / f"{file}.safetensors")
    both = [State(wb.open(str(tmp_path / f"{f}.safetensors"), cache=False), TrainingState()) for f in "ab"]
    (sign,) = check_rows(Evidence(both[0], after=both[1]).pair("before", "after"), list(names)).signs
    every = sign.evidence["form"]["sampled"]
    assert every == 3 and sign.tensors == (names[0],) and sign.severity == "error"
    first, second = sign.evidence["blocks"]
    assert abs(first[1] - 1500) <= every and first[3] == 1500 and second[1] == 3000 and abs(second[3]) <= every


@pytest.mark.parametrize("shape", [(7, 16), (7, 3), (3, 5, 16), (7, 3, 4), (7, 1, 4)])
def test_rows_far_apart_are_read_together(tmp_path, shape):
    """Rows are lines of the last axis; where that is short, they are those of the first."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    w[-1] = math.nan
    save_file({"w": w}, tmp_path / "m.safetensors")
    rows = torch.tensor([0, 2, 5, -1]) % (15 if shape == (3, 5, 16) else 7)
    truth = w.float().nan_to_num(0).reshape(-1, 16 if shape[-1] == 16 else math.prod(shape[1:]))[rows]
    found = some(wb.open(str(tmp_path / "m.safetensors"), cache=False)["w"], rows.numpy())
    assert found.dtype == np.float32 and np.array_equal(found, truth)


@pytest.mark.parametrize("control", list(lab.CONTROLS))
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_rows_of_a_healthy_run_stay(control, k):
    case = lab.case(control, SMALL, "dcp", k=k)
    assert case.after is not None
    pair = Evidence(state(case.before), after=state(case.after)).pair("before", "after")
    found = check_rows(pair, list(pair.b.params))
    assert not [sign for sign in found.signs if sign.severity == "error"], [sign.message for sign in found.signs]


# ---- the index -------------------------------------------------------------------------------------------------------


@st.composite
def permuted(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Sizes of sibling tensors, and blocks ``(tensor, first row, rows)`` in the order in which they come out."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    blocks = []
    for tensor, size in enumerate(sizes):
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        blocks += [(tensor, low, high - low) for low, high in pairwise([0, *cuts, size])]
    return sizes, draw(st.permutations(blocks))


@settings(max_examples=60, deadline=None)
@given(permuted(), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 3))
def test_blocks_moved_across_siblings_are_named_exactly(case, dtype, seed):
    sizes, blocks = case
    made = torch.Generator().manual_seed(seed)
    rows = [torch.randn(size, 24, generator=made).to(getattr(torch, dtype)) for size in sizes]
    flow = torch.cat([rows[tensor][first : first + count] for tensor, first, count in blocks])
    origin = [(tensor, first + k) for tensor, first, count in blocks for k in range(count)]
    edges = [0, *accumulate(sizes)]
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for name, parts in (("a", rows), ("b", flow.split(sizes))):
            file = Path(folder) / f"{name}.safetensors"
            save_file({f"w{k}": part.contiguous() for k, part in enumerate(parts)}, file)
            ckpt = wb.open(str(file), cache=False)
            sides.append([ckpt[f"w{k}"] for k in range(len(sizes))])
        index = RowIndex(sides[0])
        for number, tensor in enumerate(sides[1]):
            found = index.origins(number, *row_keys(tensor))
            here = origin[edges[number] : edges[number + 1]]
            assert found.found == found.looked
            named = [(b.source, b.first + k) for b in found.blocks for k in range(b.stop - b.start)]
            assert named == here
            joins = sum(b != (a[0], a[1] + 1) for a, b in pairwise(here))
            assert len(found.blocks) == joins + 1  # and no more blocks than there are


def test_rows_that_say_nothing_go_with_their_neighbours(tmp_path):
    table = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))
    table[5:] = 0
    for name, part in (("a", table), ("b", table.roll(1, 0))):
        save_file({"w": part.contiguous()}, tmp_path / f"{name}.safetensors")
    a, b = (wb.open(str(tmp_path / f"{name}.safetensors"), cache=False)["w"] for name in "ab")
    found = RowIndex([a]).origins(0, *row_keys(b))
    assert found.blocks[-1] == MovedRows(1, 8, 0, 0) and found.share == 1.0
    assert blocks_text(found.blocks[-1:], ["w"]) == "rows 1:8 are w 0:7"
    assert np.array_equal(found.place[1:], np.arange(7))
