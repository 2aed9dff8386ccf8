"""From signs to causes: the right cause first, healthy resumes not accused, two faults told apart, odd input."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil

import pytest
import torch

import workbench as wb
from tests import lab
from tests.lab import catalogue
from tests.lab.drawn import draw
from tests.properties import SLOW
from workbench.analysis.report import SEVERITIES
from workbench.doctor.causes.case import Case
from workbench.doctor.causes.damage import recovery, reset_extremes
from workbench.doctor.causes.table import CAUSES, CHAPTERS
from workbench.doctor.examine import FACTS
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.laws.bounds import bias_factor
from workbench.doctor.ledger.rows import Status
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome
from workbench.doctor.reasoning.diagnose import diagnose
from workbench.doctor.reasoning.diagnosis import CERTAINTIES, SCHEMA
from workbench.doctor.tables import all_rules
from workbench.errors import CorruptError, MissingFileError, NotACheckpointError, UnsafeError, UsageError
from workbench.names.weights import parse

SMALL = lab.Config(layers=2, batch=4, warmup=20, total=120, resume=60)
#: Fault → layouts; each with echo and early pair.
FIRST = {
    "f01_drop_opt": ("dcp", "deepspeed"),
    "f02_step_reset": ("megatron",),
    "f03_drop_v": ("torch_save",),
    "f05_master_from_bf16": ("dcp_sharded",),
    "f08_gate_up_swap": ("megatron",),
    "f12_rope_layout": ("dcp",),
    "f15_pg_perm_qo": ("torch_save",),
    "f17_missing_norm": ("deepspeed",),
    "f23_lr_rewarm": ("dcp",),
    "f26_wd_groups": ("dcp",),
    "c02_bitflip_low_exp_master": ("megatron",),
    "c07_stale_shard": ("megatron",),
    "c10_zero_page_v": ("dcp",),
    "w06_expert_bias": ("dcp",),
    "w18_late_step": ("dcp", "megatron"),
}
#: Of these, what may be meant: a whole optimizer or schedule that began anew, weight decay of other parameters.
ASKED = {"f01_drop_opt", "f23_lr_rewarm", "f26_wd_groups"}


def told(case, **options):
    return wb.doctor(case.before, case.after, echo=case.echo, **options)


@pytest.mark.parametrize("fault, format", [(fault, format) for fault, formats in FIRST.items() for format in formats])
def test_the_right_cause_is_first(fault, format):
    case = lab.case(fault, SMALL, format, k=20)
    found = told(case)
    first = found.causes[0]
    assert first.cause in {case.cause, *case.fault.also}, [one.cause for one in found.causes]
    assert found.exit_code == (1 if fault in ASKED else 2)
    assert first.title[:-1] in found.verdict and first.signs and first.remedy and first.damage
    assert first.certainty in CERTAINTIES and all(cause in CAUSES and why for cause, why in first.excludes.items())
    assert bool(first.question) == (fault in ASKED) and not (first.question and first.certainty == "certain")
    assert first.cause not in {cause for one in found.ruled_out for cause in one.causes}
    assert found.pictured["pair"].states and found.pictured["echo"] and set(found.pictured["one"]) >= {"echo"}


@pytest.mark.parametrize("control, format", [("h0_exact", "dcp"), ("h1_data_order", "megatron"), ("h11_warmup", "dcp")])
def test_a_healthy_resume_is_called_healthy(control, format):
    found = told(lab.case(control, SMALL, format, k=20))
    assert not [one for one in found if one.severity == "error"]
    assert found.exit_code == 0 and not found.causes and found.verdict.startswith("No fault found in what was compared")
    masters, moments = (
        len(found.ledger.change("load").clean(names)) for names in (("master",), ("exp_avg", "exp_avg_sq"))
    )
    assert 2 * masters == 2 * moments == found.ledger.count("load", ("exp_avg", "exp_avg_sq"), Status.EQUAL)[0]
    assert f"{2 * moments} of {2 * moments} moments" in found.coverage and found.coverage in found.verdict
    excluded = {cause for one in found.ruled_out for cause in one.causes}
    assert {"B1", "D1", "E2", "E5", "A2"} <= excluded


@pytest.mark.parametrize("control", ["h4_lower_lr", "h6_higher_lr", "h9_other_decay"])
def test_a_declared_change_is_asked_after_not_judged(control):
    found = told(lab.case(control, SMALL, "dcp", k=20))
    assert {one.cause for one in found.causes} == {"H1"} and found.exit_code < 2
    assert found.causes[0].certainty == "possible" and found.causes[0].severity != "error"
    assert "intended" in found.causes[0].question or "on purpose" in found.causes[0].question
    assert not found.verdict.startswith("No fault") and found.causes[0].title[:-1] in found.verdict


def test_no_verdict_above_a_cause_says_that_no_fault_was_found(monkeypatch):
    """Each rule, in each severity that it has, as the only sign of a pair and of a pair with an echo."""
    kept = []
    of_call = importlib.import_module("workbench.doctor.examine")
    monkeypatch.setattr(of_call, "diagnose", lambda case: kept.append(case) or ((), ""))
    made = lab.case("h0_exact", SMALL, "torch_save", k=1)
    wb.doctor(made.before, made.after)
    told(made)
    one = dict.fromkeys(("lr", "ratio", "times", "shrink", "k", "before", "after", "planned", "elements"), 1.0)
    evidence = {**one, "stated": [0.5, 0.7], "allowed": [0.1, 0.2], "roles": ["exp_avg"], "windows": []}
    looked = named = 0
    for at, case in enumerate(kept):
        healthy = diagnose(fresh(case))[1]
        assert healthy.startswith("No fault found in what was compared")
        for rule in RULES.values():
            for severity in SEVERITIES[SEVERITIES.index(rule.severity) :]:
                for kind in KINDS if SLOW else KINDS[at::2]:  # else each kind in one of the two
                    numbers = {**evidence, "kind": kind, "in": "before → after"}
                    sign = rule.sign("…", numbers, ["model.norm.weight"], severity=severity, hit=1, of=1)
                    causes, verdict = diagnose(fresh(case, sign))
                    looked += 1
                    named += bool(causes)
                    assert not (causes and verdict.startswith("No fault")), (rule.id, severity, kind, verdict)
                    assert causes or severity == "info", (rule.id, severity, kind)
    assert looked > named > looked / 2


#: Kinds of signs that patterns tell apart.
KINDS = ("moved", "jump", "lr", "declared", "unstored", "are new", "repeated", "still")


def fresh(case, *signs):
    """The same measurements with these signs only."""
    outcome = Outcome(list(signs), dict(case.outcome.checked), dict(case.outcome.not_checked), [])
    return Case(case.evidence, outcome, case.ledger, case.alone, case.pairs, case.traits)


def test_too_little_evidence_is_said():
    case = lab.case("h0_exact", SMALL, "dcp", k=20)
    assert "echo" in wb.doctor(case.before).verdict and wb.doctor(case.before).exit_code == 0
    late = lab.case("h0_exact", SMALL, "dcp", k=200)
    found = wb.doctor(late.before, late.after)
    assert found.exit_code == 0 and "With 200 updates in between, a load is no longer visible" in found.verdict


@pytest.mark.parametrize(
    "fault, after",
    [("f01_drop_opt", "megatron"), ("f08_gate_up_swap", "torch_save"), ("f17_missing_norm", "deepspeed")],
)
def test_a_mixed_pair_gives_the_same_verdict(fault, after):
    plain, mixed = (lab.case(fault, SMALL, "dcp", k=5, after_format=other) for other in (None, after))
    one, two = told(plain), told(mixed)
    assert one.causes[0].cause == two.causes[0].cause == plain.cause
    assert one.exit_code == two.exit_code == (1 if fault in ASKED else 2)


def test_two_faults_give_two_suspects(tmp_path):
    """Norms at 1 and gate and up exchanged: other parameters, other causes."""
    case = lab.case("h0_exact", SMALL, "torch_save", k=1)
    echo = _both(tmp_path, "f17_missing_norm", "f08_gate_up_swap")
    found = wb.doctor(case.before, echo=echo)
    assert {one.cause for one in found.causes if one.severity == "error"} == {"A3", "E3"}
    assert all("norm" in name for name in next(one for one in found.causes if one.cause == "A3").tensors)
    echo = _both(tmp_path / "more", "f01_drop_opt", "f17_missing_norm")
    found = wb.doctor(case.before, echo=echo)
    assert {one.cause: one.severity for one in found.causes} == {"B1": "warn", "A3": "error"}


def _both(folder, *faults):
    from tests.lab.case import opened

    state = lab.run(SMALL).resumed
    for name in faults:
        chance = lab.fault.Lab(lab.run(SMALL), __import__("random").Random(0))
        state = lab.FAULTS[name].restore(state, chance)
    folder.mkdir(exist_ok=True)
    lab.FORMATS["torch_save"].save(folder / "echo", state, None)
    return opened(folder / "echo")


# ---- what is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "cause"), [("f17_missing_norm", "A3"), ("s12_moments_through_fp16", "D4")])
def test_what_an_echo_proves_is_the_only_cause(fault, cause):
    """Numbered optimizer state, and 20 updates later: what follows from the fault is not told as another one."""
    made = draw(catalogue.EVERY[fault], 47, ["accelerate"], near=False)
    (found,) = wb.doctor(made.before, after=made.early, echo=made.echo).causes
    assert (found.cause, found.certainty) == (cause, "certain")


@pytest.mark.parametrize(
    ("fault", "layout", "cause"),
    [
        ("y22_stairs_forgotten", "live", "C2"),  # the lr is not what the stored StepLR makes of it
        ("x04_second_moment_gone", "deepspeed", "B4"),  # weights went far because second moments were lost
        ("k54_lr_to_zero", "live", None),  # weights stand still because the lr is 0
        ("k65_spectral", "live", None),  # vectors of a spectral norm are not trained
        ("y42_rows_per_head", "live", "E6"),  # a row or two fit another layer by chance
        ("q79_milestones", "live", "C2"),  # the lr is not what the stored MultiStepLR makes of it
        ("q83_one_rate", "live", "C2"),  # groups that had rates of their own have one
        ("q49_average_away", "folder", "F4"),  # averages in a file beside a Trainer's weights
    ],
)
def test_a_later_checkpoint_tells_what_moved_and_what_did_not(fault, layout, cause):
    made = draw(catalogue.EVERY[fault], 48, [layout], 20 if cause else None, near=False)
    causes = [one.cause for one in wb.doctor(made.before, after=made.early).causes]
    assert causes[:1] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("fault", "layout", "cause"),
    [
        ("q08_first_moment_bf16", "torch_save", "D4"),  # one gradient explains the update of rounded first moments
        ("q54_weights_repeated", "dcp_sharded", "D3"),  # the masters moved as they should, the weights not
        ("q53_optimizer_repeated", "torch_save", "G6"),  # weights moved by moments that did not
        ("q43_step_zero", "megatron", "C9"),  # the later checkpoint is not the older one
        ("z05_warmed_up_again", "live", "C1"),  # the lr fell to a 20th under a LambdaLR, whose formula is not stored
        ("z13_sampler_restarts_epoch", "live", "C6"),  # a position in an epoch went back, in a file of its own
        ("z14_epoch_not_set", "live", "C6"),  # its epoch fell
        ("z16_same_batch", "live", "C6"),  # it stays where it was
        ("z32_prodigy_estimate_lost", "live", "H1"),  # Prodigy's d fell
        ("z34_amsgrad_maxima_lost", "live", "B11"),  # a largest value fell
        ("z53_frequencies_in_bf16", "live", "A5"),  # rotary frequencies are constants
        ("z56_average_twice", "live", "F4"),  # 2 for each update
        ("z57_mean_counts_anew", "live", "F4"),  # a count of averaged weights fell
    ],
)
def test_one_update_tells_which_of_two_states_is_wrong(fault, layout, cause):
    made = draw(catalogue.EVERY[fault], 1, [layout], 1)
    assert wb.doctor(made.before, after=made.next).causes[0].cause == cause


@pytest.mark.parametrize(
    ("variant", "way"),
    [
        ("v17_muon", "echo"),  # matrices and vectors of two optimizers, with decays of their own
        ("eih27_layered", "next"),  # steady gradients move half of the weights by the learning rate itself
        ("v10_rmsprop", "early"),  # after ten updates, gradients have cancelled old momentum
        ("t01_adan", "next"),  # changes of the gradient cancel one another
        ("t09_adashift", "next"),  # a queue of gradients is not an average
        ("t07_sophia", "next"),  # an estimate that is renewed every tenth update
        ("eih28_epochs", "early"),  # a schedule that is stepped once an epoch
        ("k51_layers_left_out", "early"),  # counters of layers that are left out at random
        ("k08_tiny_lr", "next"),  # weights of 16 bits round to the same values
        ("z117_rotary_buffer", "early"),  # a cosine that restarts
        ("z119_mean", "early"),  # a count of averaged weights, of every fourth update
        ("z108_pruned", "early"),  # half of each matrix became zero, and the rest decays alike
    ],
)
def test_what_healthy_training_does_has_no_cause(variant, way):
    made = draw(catalogue.EVERY[variant], 2, k=1 if way == "next" else None, near=way == "next")
    found = wb.doctor(made.before, **{"echo" if way == "echo" else "after": getattr(made, way)})
    assert not [one for one in found.causes if one.severity != "info"], str(found)


@pytest.mark.parametrize("deliberate", ["z201_higher_rate", "z204_all_layers_trained", "z208_larger_batches"])
def test_what_was_changed_on_purpose_is_a_question_about_that(deliberate):
    """Every learning rate, in groups and schedule, multiplied by one factor; a group of parameters added."""
    made = draw(catalogue.EVERY[deliberate], 1, k=None, near=False)
    for found in (wb.doctor(made.before, echo=made.echo), wb.doctor(made.before, after=made.early)):
        assert not {"B8", "C4"} & {one.cause for one in found.causes} and found.exit_code < 2


@pytest.mark.parametrize("fault", ["q92_teacher_copied", "ei62_target_copied", "j23_teacher_anew"])
def test_a_network_that_follows_another_one_and_holds_its_weights_is_one_question(fault):
    made = draw(catalogue.EVERY[fault], 1, near=False)
    (found,) = wb.doctor(made.before, echo=made.echo).causes
    assert (found.cause, found.severity) == ("F4", "warn") and "on purpose" in found.question


def test_masters_of_one_rank_that_were_rounded_are_rounded_masters():
    """A rank's part ends inside a parameter, of which the rest is as it was."""
    made = draw(catalogue.EVERY["x06_masters_of_one_rank"], 48, ["deepspeed"], 1)
    found = wb.doctor(made.before, echo=made.echo)
    assert [(one.cause, one.certainty) for one in found.causes] == [("D1", "certain")]


def test_a_folder_with_two_checkpoints_is_enough(tmp_path):
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=5)
    shutil.copytree(case.before, tmp_path / "step-60")
    shutil.copytree(case.after, tmp_path / "step-65")
    found = wb.doctor(tmp_path)
    assert found.causes[0].cause == "B1" and [one.which for one in found.subjects] == ["before", "after"]


def test_names_without_steps_are_ordered_by_what_they_hold(tmp_path):
    case = lab.case("f03_drop_v", SMALL, "dcp", k=5)
    shutil.copytree(case.after, tmp_path / "a")
    shutil.copytree(case.before, tmp_path / "b")
    assert [one.step for one in wb.doctor(tmp_path, deep=False).subjects] == [60, 65]


def test_two_of_one_step_are_a_checkpoint_and_its_echo(tmp_path):
    case = lab.case("f12_rope_layout", SMALL, "dcp", k=5)
    found = wb.doctor(case.before, case.echo)
    assert [one.which for one in found.subjects] == ["before", "echo"] and found.causes[0].cause == "E5"
    shutil.copytree(case.before, tmp_path / "first")
    shutil.copytree(case.echo, tmp_path / "second")
    for number, name in enumerate(("first", "second")):
        for file in [tmp_path / name, *(tmp_path / name).rglob("*")]:
            os.utime(file, (1e9 + 9000 * number, 1e9 + 9000 * number))
    assert wb.doctor(tmp_path).causes[0].cause == "E5"


def test_the_wrong_order_is_put_right():
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=5)
    found = wb.doctor(case.after, case.before)
    assert [one.step for one in found.subjects] == [60, 65] and "older" in found.verdict
    assert found.causes[0].cause == "B1"


def test_a_run_is_looked_at_where_it_breaks():
    found = wb.doctor(lab.series("f01_drop_opt", SMALL, "dcp", every=10))
    assert [one.step for one in found.subjects] == [60, 70] and found.causes[0].cause == "B1"
    assert re.search(r"step 60\b.*step 70\b", found.verdict) and "'step-60'" in found.verdict
    healthy = wb.doctor(lab.series("h0_exact", SMALL, "dcp", every=10), deep=False)
    assert [one.step for one in healthy.subjects] == [80, 90] and healthy.exit_code == 0
    assert re.search(r"\b5 pairs\b", healthy.verdict)  # of six checkpoints


def test_an_echo_that_cannot_be_opened_is_told():
    case = lab.case("w17_truncated", SMALL, "torch_save", k=1)
    found = wb.doctor(case.before, echo=case.echo)
    assert found.exit_code == 2 and found.causes[0].cause == "G4"


#: A pickle whose key is a tuple nested a hundred thousand deep.
BOMB = b"\x80\x02" + b"}N" + b"\x85" * 100_000 + b"Ns."


@pytest.mark.parametrize("which", ["after", "echo"])
def test_a_later_checkpoint_that_is_refused_as_unsafe_is_a_finding(samples, tmp_path, which):
    (tmp_path / "bomb").mkdir()
    (tmp_path / "bomb" / ".metadata").write_bytes(BOMB)
    with pytest.raises(UnsafeError):
        wb.open(tmp_path / "bomb")
    found = wb.doctor(samples / "titan_run" / "step-2", **{which: tmp_path / "bomb"}, deep=False)
    assert found.exit_code == 2 and found.causes[0].cause == "G4" and found.causes[0].since is None
    assert [one.where for one in found if one.rule == "V01"] == [which] and which in found.not_checked
    with pytest.raises(UnsafeError):  # what was resumed from has to open
        wb.doctor(tmp_path / "bomb", samples / "titan_run" / "step-4")


@pytest.mark.parametrize("damage", ["unsafe", "short"])
def test_a_step_of_a_run_that_cannot_be_opened_is_a_finding(samples, tmp_path, damage):
    for step in (2, 4):
        shutil.copytree(samples / "titan_run" / f"step-{step}", tmp_path / f"step-{step}")
    metadata = tmp_path / "step-4" / ".metadata"
    metadata.write_bytes(BOMB if damage == "unsafe" else metadata.read_bytes()[:-1000])
    found = wb.doctor(tmp_path, deep=False)
    assert [one.step for one in found.subjects] == [2] and found.exit_code == 2
    assert [one.where for one in found if one.rule == "V01"] == ["step-4"] and "step-4" in found.not_checked
    assert "'step-4'" in found.causes[0].signs[0].message and found.causes[0].since is None
    shutil.rmtree(tmp_path / "step-2")
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-5")
    with pytest.raises((UnsafeError, CorruptError)):
        wb.doctor(tmp_path, deep=False)


def test_an_incomplete_step_of_a_run_is_noted(samples, tmp_path):
    for step in (2, 4):
        shutil.copytree(samples / "titan_run" / f"step-{step}", tmp_path / f"step-{step}")
    (tmp_path / "step-4" / ".metadata").unlink()
    found = wb.doctor(tmp_path, deep=False)
    assert [one.step for one in found.subjects] == [2]
    assert any("'step-4' is incomplete" in note for note in found.notes)


def test_what_cannot_be_looked_at_is_an_error(tmp_path):
    with pytest.raises((MissingFileError, NotACheckpointError)):
        wb.doctor(tmp_path / "absent")
    for name in "abc":
        case = lab.case("h0_exact", SMALL, "torch_save", k=1)
        _bare(case.before, tmp_path / f"{name}.pt")
    with pytest.raises(UsageError, match="order"):
        wb.doctor(tmp_path)


def _bare(source, to):
    import torch

    state = torch.load(source, weights_only=False)
    torch.save({"model": state["model"]}, to)


def test_what_is_said_of_the_optimizer_is_used(tmp_path):
    """Weights and moments alone, no facts: betas and lr come from the caller."""
    case = lab.case("f03_drop_v", SMALL, "torch_save", k=5)
    silent = wb.doctor(case.before, case.after, betas=(0.9, 0.95), lr=0.004, weight_decay=0.1)
    assert silent.facts["after"]["betas"] == ((0.9, 0.95), "given") and silent.exit_code == 2
    assert silent.causes[0].cause == "B4"


def test_shallow_reads_no_values():
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=5)
    found = told(case, deep=False)
    assert found.causes[0].cause == "B1" and "values" in found.not_checked and "pair" not in found.pictured


def test_what_is_not_there_is_told_apart_from_what_could_not_be_checked():
    absent, unknown = Inapplicable("no fp8 state is stored"), "no step is known"
    for first, second, held in ((absent, unknown, unknown), (unknown, absent, unknown), (absent, absent, absent)):
        outcome = Outcome(not_checked={"N15": first})
        outcome.add(Outcome(not_checked={"N15": second}))  # of another checkpoint
        assert outcome.not_checked == {"N15": held} and type(outcome.not_checked["N15"]) is type(held)
    outcome.add(Outcome(checked={"N15": "histories"}))
    assert outcome.not_checked == {}
    found = told(lab.case("h0_exact", SMALL, "dcp", k=5))
    assert found.not_applicable["N22"] == "no adapters are stored" and "P12" in found.not_checked


def test_progress_goes_from_nought_to_one():
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=5)
    seen = []
    told(case, progress=seen.append)
    assert seen == sorted(seen) and seen[0] >= 0 and seen[-1] == pytest.approx(1, abs=0.02)
    gathered = [share for share in seen if share <= FACTS]  # before any pass: it moves with every checkpoint
    assert gathered[0] == 0 and gathered[-1] == FACTS and len(set(gathered)) > 2


def test_a_stopped_pass_stops():
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=5)

    def stop(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told(case, progress=stop)


def test_json_is_plain_and_whole():
    found = told(lab.case("f03_drop_v", SMALL, "megatron", k=1))
    there = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert there["schema"] == SCHEMA and there["exit_code"] == 2 and there["causes"][0]["cause"] == "B4"
    assert {
        "verdict",
        "subjects",
        "causes",
        "ruled_out",
        "facts",
        "findings",
        "checked",
        "not_checked",
        "not_applicable",
    } <= set(there)
    assert "N22" in there["not_applicable"] and not there["not_applicable"].keys() & there["not_checked"].keys()
    assert there["facts"]["before"]["betas"]["value"] == [0.9, 0.95]
    assert len(there["findings"]) == len(found) == len(found.findings)
    assert {
        "cause",
        "title",
        "severity",
        "certainty",
        "signs",
        "excludes",
        "since",
        "tensors",
        "affected",
        "share",
        "damage",
        "remedy",
        "settle",
        "question",
        "runner_up",
    } == set(there["causes"][0])
    assert {"coverage", "ledger"} <= set(there) and there["coverage"] == found.coverage
    assert {"leg", "quantity", "status", "form", "count", "names", "elements", "why", "exact"} == set(
        there["ledger"][0]
    )


def test_the_package_can_be_called():
    import workbench.doctor

    case = lab.case("h0_exact", SMALL, "dcp", k=1)
    assert workbench.doctor(case.before, deep=False).exit_code == 0


# ---- tables --------------------------------------------------------------------------------------------------------


def test_tables_name_causes_and_rules_that_there_are():
    all_rules()
    assert {cause[0] for cause in CAUSES} == set(CHAPTERS)
    for cause in CAUSES.values():
        assert cause.remedy("dcp") and cause.title.endswith((".", "?")) and cause.mechanism and cause.symptom
    for rule in RULES.values():
        assert set(rule.causes) <= set(CAUSES), rule.id
    for cause in CAUSES.values():
        assert cause.explains | set(cause.expects) <= set(RULES), cause.id
    assert "P14" in CAUSES["B1"].explains and "S05" not in CAUSES["B2"].explains
    assert CAUSES["B1"].everywhere and not CAUSES["A3"].everywhere


def test_every_cause_that_is_seen_in_files_has_a_pattern():
    """What no file shows, or a rule names by itself, has none."""
    assert {cause.id for cause in CAUSES.values() if cause.pattern is None} <= {
        "B9",
        "B10",
        "C5",
        "D5",
        "D6",
        "D10",
        "F3",
        "F6",
        "G10",
        "H2",
        "H3",
        "H4",
    }


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.98), (0.9, 0.999), (0.8, 0.95)])
def test_damage_has_the_runs_numbers(betas):
    first, far, at, settled = reset_extremes(betas)
    assert first == pytest.approx(math.sqrt(1 - betas[1]) / (1 - betas[0]))
    factors = [bias_factor(betas, s) for s in range(1, settled + 2000)]
    assert far == factors[at - 1] and all(0.95 <= f <= 1.05 for f in factors[settled - 1 :])
    assert settled == 1 or not 0.95 <= factors[settled - 2] <= 1.05
    assert recovery(betas) == round(3 / (1 - betas[1]))
    said = CAUSES["B2"].expected(TrainingState().given(betas=betas))
    assert f" has {first:.2f} times its usual size" in said[0] and ("plateau" in said[0]) == (far < 1)
    assert not CAUSES["B2"].expected(TrainingState())[:-1]  # without betas, no numbers


@pytest.mark.parametrize(
    "name, layer, block, kinds",
    [
        ("model.layers.3.self_attn.q_proj.weight", 3, "attn", ("q",)),
        ("decoder.layers.3.self_attention.linear_qkv.weight", 3, "attn", ("q", "k", "v")),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", 3, "norm", ("norm",)),
        ("decoder.layers.3.self_attention.linear_proj.weight", 3, "attn", ("o",)),
        ("decoder.layers.3.mlp.linear_fc1.weight", 3, "mlp", ("gate", "up")),
        ("model.layers.0.mlp.gate.weight", 0, "mlp", ("router",)),
        ("model.layers.0.mlp.experts.11.down_proj.weight", 0, "mlp", ("down",)),
        ("transformer.h.3.mlp.c_proj.weight", 3, "mlp", ("down",)),
        ("layers.0.attention.wq.weight", 0, "attn", ("q",)),
        ("model.embed_tokens.weight", None, "embed", ("embed",)),
        ("lm_head.weight", None, "embed", ("head",)),
        ("model.norm.weight", None, "norm", ("norm",)),
        ("something.else", None, "other", ("other",)),
    ],
)
def test_places_of_parameters(name, layer, block, kinds):
    weight = parse(name)
    assert (weight.layer, weight.block, weight.parts) == (layer, block, kinds)
    assert weight.routed == ("experts" in name)


def test_two_checkpoints_of_nothing_are_not_called_faultless(tmp_path):
    for name in ("a", "b"):
        torch.save({"n": 1}, tmp_path / f"{name}.pt")
    found = wb.doctor(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.verdict.startswith("Nothing could be compared") and "No fault" not in found.verdict
