"""Facts that files state about the training, in every format; and the rules on facts, on faults and healthy runs."""

from __future__ import annotations

import pytest

import workbench as wb
from tests import lab
from workbench.doctor.facts import GIVEN
from workbench.doctor.facts_gather import FACTS, gather
from workbench.doctor.schedule import plan_of

SMALL = lab.Config(layers=2, batch=4, warmup=20, total=120, resume=60)
FORMATS = ("torch_save", "dcp", "dcp_sharded", "megatron", "deepspeed")


# ---- facts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_facts_of_the_lab(format, optimizer):
    config = SMALL.but(optimizer=optimizer, betas=(0.8, 0.98), weight_decay=0.05)
    facts = gather(wb.open(lab.case("h0_exact", config, format, k=1).before))
    assert facts.told.keys() <= FACTS.keys()
    assert facts.step == 60 and facts.steps.usual == 60 and len(facts.steps.counts) == 1
    assert facts.betas == (0.8, 0.98) and facts.eps == config.eps and facts.weight_decay() == 0.05
    assert facts.lr == config.lr_at(61) and facts.decoupled is (optimizer == "adamw")
    assert facts.value("consumed_samples") == 240 and facts.value("global_batch") == 4 and facts.value("clip") == 1.0
    assert facts.schedule.count == (240 if format == "megatron" else 60)
    plan = plan_of(facts.schedule, facts.args, facts.told)
    for update in (1, 20, 21, 60, 119, 120):
        assert plan.lr_at(update) == pytest.approx(config.lr_at(update), rel=1e-12)
    assert facts.unreadable == {} and bool(facts.generators) == (format != "dcp_sharded")
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
    assert all(told.source for statements in facts.told.values() for told in statements)


def test_what_is_given_is_trusted_most():
    ckpt = wb.open(lab.case("h0_exact", SMALL, "dcp", k=1).before)
    facts = gather(ckpt, betas=(0.9, 0.99), lr=1e-5, weight_decay=0.3)
    assert facts.betas == (0.9, 0.99) and facts.lr == 1e-5 and facts.source("betas") == GIVEN
    assert facts.weight_decay("model.embed_tokens.weight") == 0.3 and facts.weight_decay("model.norm.weight") == 0.0
    assert facts.disagreeing("betas")


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
