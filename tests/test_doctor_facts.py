"""Facts that files state about the training, in every format; and the rules on facts, on faults and healthy runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from tests import lab
from tests.properties import in_turn
from workbench.doctor.facts.counted import of_epochs
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.flat import leaves
from workbench.doctor.facts.gather import FACTS, gather
from workbench.doctor.facts.schedule import Plan, plan_of, rates_at, read_schedule
from workbench.doctor.facts.state import GIVEN
from workbench.doctor.ledger.sign import RULES, register
from workbench.doctor.rules.facts import check_facts

SMALL = lab.Config(layers=2, batch=4, warmup=20, total=120, resume=60)
FORMATS = ("torch_save", "dcp", "dcp_sharded", "megatron", "deepspeed")
FOUR = [format for format in FORMATS if format != "dcp_sharded"]


# ---- facts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_facts_of_the_lab(format, optimizer):
    config = SMALL.but(optimizer=optimizer, betas=(0.8, 0.98), weight_decay=0.05)
    facts = gather(wb.open(lab.case("h0_exact", config, format, k=1).before))
    assert facts.statements.keys() <= FACTS.keys()
    assert facts.step == 60 and facts.steps.usual == 60 and len(facts.steps.counts) == 1
    assert facts.betas == (0.8, 0.98) and facts.eps == config.eps and facts.weight_decay() == 0.05
    assert facts.lr == config.lr_at(61) and facts.decoupled is (optimizer == "adamw")
    assert facts.value("consumed_samples") == 240 and facts.value("global_batch") == 4 and facts.value("clip") == 1.0
    assert facts.schedule.count == (240 if format == "megatron" else 60)
    plan = plan_of(facts.schedule, facts.args, facts.statements)
    for update in (1, 20, 21, 60, 119, 120):
        assert plan.lr_at(update) == pytest.approx(config.lr_at(update), rel=1e-12)
    assert bool(facts.generators) == (format != "dcp_sharded")
    if format != "megatron":
        assert facts.value("loader") == 60 and facts.value("data_seed") == 1234
    if format != "deepspeed":  # its flat groups name no parameter
        decays = {facts.weight_decay(fqn) for fqn in facts.steps.by_name}
        norms = {facts.weight_decay(fqn) for fqn in facts.steps.by_name if "norm" in fqn}
        assert decays == {0.05, 0.0} and norms == {0.0}


def test_every_statement_says_where_it_stands():
    facts = gather(wb.open(lab.case("h0_exact", SMALL, "megatron", k=1).before))
    assert facts.source("step") == "iteration" and facts.source("consumed_samples") == "args.consumed_train_samples"
    assert facts.source("lr") == "optimizer.optimizer.param_groups[0].lr"
    assert all(told.source for statements in facts.statements.values() for told in statements)


def test_what_is_given_is_trusted_most():
    ckpt = wb.open(lab.case("h0_exact", SMALL, "dcp", k=1).before)
    facts = gather(ckpt, betas=(0.9, 0.99), lr=1e-5, weight_decay=0.3)
    assert facts.betas == (0.9, 0.99) and facts.lr == 1e-5 and facts.source("betas") == GIVEN
    assert facts.weight_decay("model.embed_tokens.weight") == 0.3 and facts.weight_decay("model.norm.weight") == 0.0
    assert len(facts.statements["betas"]) > 1


SAMPLES = {
    "trainer_run": {"step": 6, "lr": 0.0, "betas": (0.9, 0.999), "decoupled": True},
    "titan_run": {"step": 4, "lr": 0.003, "betas": (0.9, 0.999), "weight_decay": 0.1},
    "megatron_dp_reshardable": {"step": 10, "global_batch": 8, "consumed_samples": 80, "betas": (0.9, 0.95)},
    "bytecheckpoint_fsdp1_flat": {"step": 3, "tracker_step": 3, "weight_decay": 0.1},
    "deepspeed_zero1": {"step": 4, "tracker_step": 4, "consumed_samples": 16, "betas": (0.9, 0.95), "lr": 1e-3},
    "paddlenlp_legacy": {"step": 30, "consumed_samples": 960, "loss_scale": 32768.0},
    "paddle_save": {"step": 3, "betas": None, "lr": None},
    "hf_peft_lora": {"step": None, "betas": None, "lr": None, "consumed_samples": None},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_facts_of_the_samples(sample):
    facts = gather(wb.open(f"sample_ckpts/{sample}"))
    assert {fact: facts.value(fact) for fact in SAMPLES[sample]} == SAMPLES[sample]
    if facts.steps.counts:
        assert list(facts.steps.counts) == [facts.step]
    if facts.schedule is not None:
        assert facts.schedule.count == (80 if facts.schedule.kind == "megatron" else facts.step)


def test_flattened_groups_are_joined_and_named():
    """DCP flattens torchtitan's groups into one a parameter."""
    facts = gather(wb.open("sample_ckpts/titan_run/step-4"))
    assert len(facts.groups) == 1 and len(facts.groups[0].params) == 21 == facts.groups[0].count
    numbered = gather(wb.open("sample_ckpts/bytecheckpoint_fsdp1_flat"))
    assert [len(group.params) for group in numbered.groups] == [30, 9]  # matrices and vectors, by their counts


def test_a_plan_is_what_the_frameworks_compute():
    """Against transformers' own cosine schedule."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=40)
    plan = Plan(0.01, 0.0, 5, 40, "cosine", "test")
    for update in range(40):
        assert plan.lr_at(update) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        assert plan.allows(theirs.get_last_lr()[0], update)
        optimizer.step()
        theirs.step()
    assert not plan.allows(0.011, 20) and not plan.allows(plan.lr_at(30), 20)


# ---- rules on the lab ----------------------------------------------------------------------------------------------

#: What must fire, as ``where rule severity``.
FIRES = {
    "f01_drop_opt": "echo S06 error; echo S07 warn; before → echo R10 error; before → after P01 error",
    "f02_step_reset": "echo S06 error; echo S07 warn; before → echo R10 error; before → after P01 error",
    "f18_untied_init": "echo S06 info; before → echo R01 error; before → after P02 error; before → after N3 warn",
    "f19_untied_copy": "before → echo R01 error; before → after P02 error",
    "f23_lr_rewarm": "echo S16 warn; echo S17 warn; after S17 warn; before → echo R11 warn; before → after P15 error",
    "f24_lr_peak": "before → echo R12 info; before → after P15 warn",
    "f25_lr_double_step": "echo S16 warn; echo S17 warn; before → echo R11 warn; before → after P15 error",
    "f26_wd_groups": "before → echo R12 warn; before → after R12 warn",
    "f27_beta2": "before → echo R14 info; before → after P16 warn; before → after R12 info",
    "f28_data_replay": "echo S18 warn; after S18 warn; before → echo R11 warn",
    "c14_step_mixed": "echo S07 warn; after S07 warn; before → echo R10 error; before → after P01 error",
    "w11_opt_absent": "echo S06 error; after S07 warn; before → echo R01 error; before → after P01 error",
    "w12_dummy_step": "echo S06 error; after S07 warn; before → echo R10 error; before → after P01 error",
    "w13_stale_checkpoint": "echo S07 warn; after S07 warn; before → echo R10 error; before → after P01 error",
    "w18_late_step": "echo S07 info; after S07 warn; before → echo R11 error; before → after P01 info",
    "w19_orphan_groups": "after N6 warn",
}


def outcome(case):
    states = [path and State(ckpt := wb.open(path), gather(ckpt)) for path in (case.before, case.after, case.echo)]
    return check_facts(Evidence(*states))


def said(found):
    return {f"{sign.evidence['in']} {sign.rule} {sign.severity}" for sign in found.signs}


@pytest.mark.parametrize("format, fault", in_turn(FOUR, list(FIRES), 2))
def test_faults_that_facts_tell(fault, format):
    k = 5 if fault == "w19_orphan_groups" else 1
    case = lab.case(fault, SMALL, format, k=k)
    found = outcome(case)
    wanted = set(FIRES[fault].split("; "))
    if fault == "f18_untied_init" and format == "deepspeed":  # it names the head that the embedding shares
        wanted = wanted - {"echo S06 info"} | {"echo S06 warn"}
    assert wanted <= said(found)
    for sign in found.signs:
        json.dumps(sign.evidence)
        assert sign.hit <= sign.of or not sign.of
    accused = {cause for sign in found.signs if sign.severity != "info" for cause in RULES[sign.rule].causes}
    assert accused & {case.cause, *case.fault.also}


def test_a_shard_of_another_save_is_named():
    """One rank's whole optimizer file lags: proved, an error."""
    for format in ("megatron", "deepspeed"):
        found = outcome(lab.case("c07_stale_shard", SMALL, format, k=1))
        (sign,) = [sign for sign in found.signs if sign.rule == "S07" and sign.evidence["in"] == "echo"]
        assert sign.severity == "error" and len(sign.evidence["files"]) == 1 and "1" in sign.evidence["files"][0]


#: Warnings that are true of healthy resumes: what the operator changed.
TRUE = {"h4_lower_lr": {"P15"}, "h5_skip_data": {"S18", "R11", "P20"}, "h6_higher_lr": {"P15"}}


#: Changes that are declared among the arguments of Megatron, and are looked up there.
DECLARED = ("h8_larger_batch", "h9_other_decay")
HEALTHY = [
    *in_turn(FOUR, [control for control in lab.CONTROLS if control not in DECLARED]),
    *(pair for control in DECLARED for pair in in_turn(["megatron", "torch_save", "dcp", "deepspeed"], [control])),
]


@pytest.mark.parametrize("format, control", HEALTHY)
def test_healthy_resumes_are_not_accused(control, format):
    try:
        case = lab.case(control, SMALL, format, k=3)
    except ValueError as error:
        pytest.skip(str(error))
    found = outcome(case)
    grave = {sign.rule for sign in found.signs if sign.severity != "info"}
    assert not [sign for sign in found.signs if sign.severity == "error"]
    assert grave == TRUE.get(control, set())
    assert {"S06", "S07", "S17", "P01"} <= found.checked.keys()


def test_another_format_after_the_resume_says_the_same():
    for fault in ("f01_drop_opt", "f23_lr_rewarm", "f27_beta2", "h4_lower_lr"):
        case = lab.case(fault, SMALL, "dcp", k=1, after_format="torch_save")
        other = lab.case(fault, SMALL, "dcp", k=1, after_format="deepspeed")
        same = outcome(case), outcome(other)
        rules = [{s.rule for s in one.signs if s.severity != "info" and "after" in s.evidence["in"]} for one in same]
        assert rules[0] - {"P15"} <= rules[1] and "R12" not in rules[1]


@pytest.mark.parametrize("formats", [("dcp", "megatron"), ("deepspeed", "dcp"), ("megatron", "torch_save")])
def test_an_untied_head_shows_in_another_format(formats):
    before, after = formats
    found = outcome(lab.case("f19_untied_copy", SMALL, before, k=1, after_format=after))
    (sign,) = [sign for sign in found.signs if sign.rule == "P02"]
    assert sign.severity in ("warn", "error") and sign.evidence["kind"] == "appeared" and sign.hit == 1
    healthy = outcome(lab.case("h0_exact", SMALL, before, k=1, after_format=after))
    assert {sign.severity for sign in healthy.signs} <= {"info"}


# ---- rules on files made here --------------------------------------------------------------------------------------


def save(path, names=("fc.weight", "fc.bias"), *, step=50, count=None, **more):
    """A plain torch.save with AdamW's state."""
    shapes = [(4, 3) if name.endswith("weight") else (4,) for name in names]
    count = step if count is None else count
    held = {
        n: {"step": torch.tensor(float(count)), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
        for n, shape in enumerate(shapes)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(names)))}
    weights = {name: torch.ones(shape) for name, shape in zip(names, shapes, strict=True)}
    content = {"model": weights | more.pop("buffers", {}), "optimizer": {"state": held, "param_groups": [group]}}
    torch.save(content | {"step": step} | more, path)
    return path


def signs(*paths, echo=False):
    states = [State(ckpt := wb.open(path), gather(ckpt)) for path in paths]
    before, later = states[0], states[1] if len(states) > 1 else None
    found = check_facts(Evidence(before, None if echo else later, later if echo else None))
    return {(s.evidence["in"], s.rule): s for s in found.signs}, found


def test_a_plain_save_has_no_sign(tmp_path):
    found, whole = signs(save(tmp_path / "a.pt"), save(tmp_path / "b.pt", step=60))
    assert not found
    assert "no complete schedule" in whole.not_checked["S16"] and "data loader" in whole.not_checked["S18"]


def test_steps_that_a_scaler_skipped_are_a_remark(tmp_path):
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}
    a, b = (save(tmp_path / f"{n}.pt", step=n, count=c, scaler=scaler) for n, c in ((50, 30), (60, 38)))
    found, _ = signs(a, b)
    assert {sign.severity for sign in found.values()} == {"info"} and ("before", "S07") in found
    without, _ = signs(save(tmp_path / "c.pt", step=50, count=30))
    assert without["before", "S07"].severity == "warn"  # or an optimizer that was made anew on purpose
    few, _ = signs(save(tmp_path / "d.pt", step=50, count=47))  # as a guard against NaN skips
    assert few["before", "S07"].severity == "info"


def test_a_reset_that_an_argument_declares_is_a_remark(tmp_path):
    a = save(tmp_path / "a.pt", step=50)
    found, _ = signs(a, save(tmp_path / "b.pt", step=60, count=10, args={"no_load_optim": True}))
    assert found["before → after", "P01"].severity == "info" == found["after", "S07"].severity
    found, _ = signs(a, save(tmp_path / "c.pt", step=60, count=10, args={"no_load_optim": False}))
    assert found["before → after", "P01"].severity == "error"


def test_renamed_weights_are_told_from_lost_ones(tmp_path):
    names = [f"layers.{n}.fc.weight" for n in range(8)]
    a = save(tmp_path / "a.pt", names)
    other, _ = signs(a, save(tmp_path / "b.pt", [f"base_model.{name}" for name in names], step=51))
    assert other["before → after", "N1"].evidence == {"in": "before → after", "shared": 0.0, "without_prefixes": 1.0}
    lost, whole = signs(a, save(tmp_path / "c.pt", [f"blocks.{n}.w.weight" for n in range(8)], step=51))
    assert ("before → after", "N1") not in lost
    vanished = [sign for sign in whole.signs if sign.rule == "P02"]
    assert sorted((sign.hit, sign.severity) for sign in vanished) == [(8, "warn")] * 2


def test_lost_buffers_and_grown_files(tmp_path):
    a = save(tmp_path / "a.pt", buffers={"gate.expert_bias": torch.ones(4), "bn.running_mean": torch.zeros(4)})
    b = save(tmp_path / "b.pt", step=51, names=("fc.weight", "fc.bias", "adapter.weight"))
    found, _ = signs(a, b)
    assert found["before → after", "N4"].of == found["before → after", "N4"].hit >= 1
    assert found["before → after", "N3"].severity == "warn" and found["before → after", "P02"].severity == "error"


def test_a_schedule_that_counts_ranks_is_a_remark(tmp_path):
    def scheduler(count):
        return {"last_epoch": count, "_step_count": count + 1, "base_lrs": [1e-3], "_last_lr": [1e-3]}

    a = save(tmp_path / "a.pt", step=50, scheduler=scheduler(200), args={"world_size": 4})
    b = save(tmp_path / "b.pt", step=60, scheduler=scheduler(240), args={"world_size": 4})
    found, _ = signs(a, b)
    assert set(found) == {("before", "N9"), ("after", "N9")}
    jumped = save(tmp_path / "c.pt", step=60, scheduler=scheduler(440), args={"world_size": 4})
    assert signs(a, jumped)[0]["before → after", "P15"].severity == "error"


def test_weights_alone_are_not_accused(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(2, 2)}, "step": 100}, tmp_path / "a.pt")
    found, _ = signs(tmp_path / "a.pt")
    assert list(found) == [("before", "S06")]  # that a resume from here begins anew is a remark
    assert found["before", "S06"].severity == "info" and found["before", "S06"].evidence["kind"] == "never"
    assert wb.doctor(tmp_path / "a.pt").exit_code == 0


def test_weights_are_not_said_to_lack_an_optimizer_that_lies_beside_them(tmp_path):
    (tmp_path / "step-100").mkdir()
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "step-100" / "model.safetensors")
    assert list(signs(tmp_path / "step-100")[0]) == [("before", "S06")]
    torch.save({}, tmp_path / "step-100" / "optimizer.pt")  # no format claims the two together
    assert not signs(tmp_path / "step-100")[0]


def test_a_step_that_only_a_name_tells_proves_less(tmp_path):
    content = torch.load(save(tmp_path / "a.pt", step=50), weights_only=False)
    del content["step"]
    torch.save(content, tmp_path / "step-80.pt")
    found, _ = signs(tmp_path / "step-80.pt")
    assert found["before", "S07"].severity == "warn"


def test_accelerate_counts_saves(tmp_path):
    """Its ``checkpoint_1`` is the second save, of whatever step."""
    accelerate = pytest.importorskip("accelerate")
    runner = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 3)
    model, optimizer = runner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    runner.save_state(str(tmp_path / "checkpoint_1"))
    found, whole = signs(tmp_path / "checkpoint_1")
    assert not found and whole.not_checked["S06"] == "no trainer's step is stored"


def test_two_optimizers_of_lightning_share_a_step(tmp_path):
    shape = (3, 4)
    one = {"step": torch.tensor(25.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    content = {
        "epoch": 1,
        "global_step": 50,
        "pytorch-lightning_version": "2.5",
        "callbacks": {},
        "lr_schedulers": [],
        "state_dict": {"a.weight": torch.ones(shape), "b.weight": torch.ones(shape)},
        "optimizer_states": [{"state": {0: one}, "param_groups": [group | {"lr": lr}]} for lr in (1e-3, 1e-4)],
    }
    torch.save(content, tmp_path / "gan.ckpt")
    found, whole = signs(tmp_path / "gan.ckpt")
    assert not found and "S07" in whole.checked


def test_a_step_among_the_tensors():
    """torchtitan's train_state holds tensors."""
    facts = gather(wb.open("sample_ckpts/titan_run/step-4"))
    assert [(told.value, told.source) for told in facts.statements["step"]] == [(4, "train_state.step")]


def test_a_folder_named_after_another_step(tmp_path):
    found, _ = signs(save(tmp_path / "step-70.pt", step=50))
    assert found["before", "S07"].evidence["kind"] == "folder"


def test_the_samples_have_no_sign():
    for sample in SAMPLES:
        found, _ = signs(f"sample_ckpts/{sample}")
        assert {s.rule for s in found.values() if s.severity != "info"} <= {"N11"}, sample


def test_the_table_is_whole():
    for rule in RULES.values():
        texts = (rule.title, rule.law, rule.threshold, rule.source, rule.risk, rule.remedy)
        assert all(texts) and all(re.fullmatch(r"[A-H]\d{1,2}", cause) for cause in rule.causes) and rule.causes
    with pytest.raises(ValueError, match="twice"):
        register(replace(RULES["S07"], title="another"))
    with pytest.raises(ValueError, match="at most"):
        RULES["S17"].sign("…", severity="error")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.6),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 12),
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 40, 2.0),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50, 1e-5),
    ],
    ids=["step", "exponential", "linear", "polynomial", "cosine"],
)
def test_rates_of_a_stored_schedule_are_those_that_torch_makes(make):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (1e-3, 4e-4)]
    optimizer = torch.optim.SGD(groups)
    schedule = make(optimizer)
    for count in range(31):
        found = read_schedule(leaves({"scheduler": schedule.state_dict()})[0])
        assert found is not None and found.count == count
        assert rates_at(found, count) == pytest.approx(schedule.get_last_lr(), rel=1e-6)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", ["lambda", "one cycle", "sequential"])
def test_rates_of_a_schedule_that_does_not_say_them_are_not_known(kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    made = {
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5),
        "one cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20),
        "sequential": lambda: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)],
            [5],
        ),
    }[kind]()
    found = read_schedule(leaves({"scheduler": made.state_dict()})[0])
    assert found is None or rates_at(found, 1) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 1e300},
        {"gamma": -0.5, "step_size": 1e-9},
        {"power": -1.0, "total_iters": 3},
        {"T_max": float("nan"), "eta_min": 0.0},
        {"T_max": 5, "eta_min": float("inf")},
        {"gamma": "x"},
        {"start_factor": 1e308, "end_factor": -1e308, "total_iters": 9},
    ],
)
def test_a_schedule_of_absurd_arguments_has_finite_rates_or_none(settings):
    for count in (3, 10**6):
        state = {"last_epoch": count, "base_lrs": [0.1], "_last_lr": [0.1], **settings}
        found = read_schedule(leaves({"scheduler": state})[0])
        rates = rates_at(found, count) if found is not None else None
        assert rates is None or all(isinstance(lr, float) and math.isfinite(lr) for lr in rates)


@pytest.mark.parametrize("length", [2, 3, 8, 50])
def test_a_schedule_of_epochs_is_one_whatever_the_two_steps_are(length):
    def at(step, count):
        return SimpleNamespace(step=step, schedule=SimpleNamespace(count=count))

    for first in range(2 * length, 5 * length):
        for last in range(first + 1, first + 3 * length):
            one, two = first // length, last // length
            assert of_epochs(at(first, one), at(last, two))
            assert not of_epochs(at(first, first), at(last, last))  # one of updates
            assert not of_epochs(at(first, first), at(last, first + two - one))  # from the load on
            assert not of_epochs(at(first, one), at(last, one + last - first + 1))
            assert not of_epochs(at(first, one), at(last, 0))  # it restarted


def test_the_state_of_a_grad_scaler_is_known_by_its_fields(tmp_path):
    """Lightning stores it under the name of its plug-in, ``MixedPrecision``."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weights = {"weight": torch.ones(4, 4)}
    for number, scale in ((1, 2.0**10), (2, 2.0**16)):
        state = scaler.state_dict() | {"scale": scale}
        torch.save({"state_dict": weights, "global_step": number, "MixedPrecision": state,
                    "pytorch-lightning_version": "2.6.0"}, tmp_path / f"{number}.ckpt")  # fmt: skip
        assert gather(wb.open(tmp_path / f"{number}.ckpt")).value("loss_scale") == scale
    found = wb.doctor(tmp_path / "1.ckpt", tmp_path / "2.ckpt")
    assert "D8" in [one.cause for one in found.causes]
