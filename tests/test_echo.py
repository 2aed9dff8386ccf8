"""``wb.echo``: what a trainer holds right after its load; in one process and on gloo ranks (echo_worker.py)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import workbench as wb
from tests import echo_worker
from tests.echo_worker import truth
from tests.properties import examples
from tests.rank_jobs import cases_of, told_by
from workbench import errors
from workbench.analysis import manifest
from workbench.analysis.echo_file import open_echo, read_echo
from workbench.doctor.facts.evidence import Evidence, State
from workbench.doctor.facts.gather import gather
from workbench.doctor.rules.facts import check_facts
from workbench.doctor.rules.prints import paired
from workbench.doctor.rules.prints_signs import check_prints
from workbench.echo.echo import compare_echo

CASES = cases_of(echo_worker)
RANKS = [pytest.param(2, marks=pytest.mark.slow), 4]


# ---- a small trainer -------------------------------------------------------------------------------------------------


class Trainer:
    """A tied model, AdamW with two groups, a schedule."""

    def __init__(self, seed: int = 0, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        torch.manual_seed(seed)
        body = nn.ModuleDict(
            {
                "embed": nn.Embedding(60, 16),
                "up": nn.Linear(16, 24),
                "norm": nn.LayerNorm(24),
                "down": nn.Linear(24, 16),
                "head": nn.Linear(16, 60, bias=False),
            }
        )
        body["head"].weight = body["embed"].weight
        body.forward = lambda ids: body["head"](  # type: ignore[method-assign]
            body["down"](body["norm"](body["up"](body["embed"](ids))))
        )
        self.model = wrap(body)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.step = 0

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 60, (4, 8))
            loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item().hex())
        return losses

    def save(self, folder: Path) -> Path:
        weights, moments = get_state_dict(self.model, self.optimizer)
        content = {"model": weights, "optimizer": moments, "scheduler": self.scheduler.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(content | {"train_state": {"step": self.step}}, checkpoint_id=folder, no_dist=True)
        return folder

    def load(self, other: Trainer, optimizer: bool = True) -> Trainer:
        weights, moments = copy.deepcopy(get_state_dict(other.model, other.optimizer))  # else both share one memory
        if optimizer:
            set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        else:
            self.model.load_state_dict(weights)
        self.scheduler.load_state_dict(other.scheduler.state_dict())
        self.step = other.step
        return self

    def echo(self, path: Path | None = None, **options: Any) -> wb.EchoReport:
        return wb.echo(self.model, self.optimizer, path, scheduler=self.scheduler, step=self.step, **options)


@pytest.fixture(scope="module")
def trained() -> Trainer:
    trainer = Trainer()
    trainer.train(4)
    return trainer


@pytest.fixture(scope="module")
def saved(trained: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.save(tmp_path_factory.mktemp("run") / "step-4")


def grave(report: wb.EchoReport) -> dict[str, str]:
    return {one.rule: one.message for one in report if one.severity != "info"}


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """Of a number of ranks: case → what each rank returned of it, or its error."""
    run = told_by("tests.echo_worker", tmp_path_factory)
    return lambda ranks: [{case: one.get("result", one) for case, one in told.items()} for told in run(ranks)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_fails_and_all_are_told_the_same(told, ranks, case):
    every = [one[case] for one in told(ranks)]
    for rank, one in enumerate(every):
        assert "error" not in one, f"rank {rank}: {one['error']}"
    if case != "case_untouched":  # losses are each rank's own
        assert all(one == every[0] for one in every)


@pytest.mark.parametrize("ranks", RANKS)
def test_fingerprints_of_dtensors_are_those_of_the_gathered_tensors(told, ranks):
    one = told(ranks)[0]["case_every_placement"]
    assert one["found"] == one["want"]
    assert len(one["want"]) > (60 if ranks == 4 else 15)


@pytest.mark.parametrize("ranks", RANKS)
def test_fsdp2_is_compared_with_its_dcp_checkpoint(told, ranks):
    one = told(ranks)[0]["case_fsdp"]
    assert one["healthy"] == [] and one["again"] == [] and one["equal"].startswith("28 of 28 tensors are equal")
    assert one["lost"] == ["optimizer has no state: 0 of 7 parameters have any"]
    assert one["prints"] == one["want"]
    assert one["payload"] and one["steps"] == [3.0]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_go_on_as_if_there_had_been_no_echo(told, ranks):
    for one in told(ranks):
        assert one["case_untouched"]["with"] == one["case_untouched"]["without"]


@pytest.mark.parametrize("ranks", RANKS)
def test_what_ranks_hold_otherwise_or_alone_is_told(told, ranks):
    one = told(ranks)[0]
    assert one["case_replicas_that_differ"]["found"] == [["echo.copies", ["model.2.weight"]]]
    assert one["case_stages"]["tensors"] == 4 * ranks and one["case_stages"]["params"] == [2 * ranks]
    assert one["case_stages"]["counts"] == {"trained": 2 * ranks, "with_state": 2 * ranks, "strangers": 0}
    assert "rank 0" in one["case_an_error_is_raised_on_all"]["error_text"]


# ---- healthy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [True, False])
def test_a_right_load_has_no_finding(trained, saved, tmp_path, payload):
    report = Trainer(1).load(trained).echo(tmp_path / "echo", payload=payload, against=saved)
    assert grave(report) == {} and report.exit_code == 0 and report.raise_for_errors() is report
    assert "29 of 29 tensors are equal bit for bit" in report.checked["values"]
    assert report.checked["echo"].endswith(" tensors of 1 rank")
    assert report.checked["R10"] == "whether loading makes no update"
    assert compare_echo(saved, tmp_path / "echo").exit_code == 0


@pytest.mark.parametrize("payload", [True, False])
def test_progress_goes_from_nought_to_one(trained, saved, tmp_path, payload):
    """Hashing, writing and reading, by bytes: each tensor that is held advances it."""
    seen: list[float] = []
    trained.echo(tmp_path / "echo", payload=payload, against=saved, progress=seen.append)
    assert seen == sorted(seen) and 0 < seen[0] < 0.5 and seen[-1] == 1
    parts = 3 if payload else 2
    hashed = [share for share in seen if share <= 1 / parts + 0.05]
    assert len(hashed) >= 25 and hashed[-1] == pytest.approx(1 / parts, abs=0.05)


def test_training_goes_on_as_if_there_had_been_no_echo(tmp_path, saved):
    runs = []
    for echoed in (False, True):
        trainer = Trainer(5)
        losses = trainer.train(2)
        for param in trainer.model.parameters():
            param.grad = torch.full_like(param, 1e-3)  # an accumulation that is under way
        trainer.model["norm"].weight.requires_grad_(False)
        if echoed:
            trainer.echo(tmp_path / "echo", against=saved)
            trainer.echo(tmp_path / "echo.json", payload=False)
        grads = [param.grad.clone() for param in trainer.model.parameters()]
        flags = [param.requires_grad for param in trainer.model.parameters()]
        losses += trainer.train(3)
        state = [*trainer.model.state_dict().values()]
        state += [held[name] for held in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        runs.append((losses, flags, [truth(one) for one in [*state, *grads, torch.get_rng_state()]], np.random.rand()))
        np.random.seed(0)
    assert runs[0][:3] == runs[1][:3]


def test_state_that_is_not_there_is_not_made(trained, saved):
    fresh = Trainer(1).load(trained, optimizer=False)
    fresh.echo(None, against=saved)
    assert len(fresh.optimizer.state) == 0 and all(param.grad is None for param in fresh.model.parameters())


def test_an_echo_with_payload_is_a_checkpoint_with_the_trainers_facts(trained, saved, tmp_path):
    Trainer(1).load(trained).echo(tmp_path / "echo")
    ckpt = wb.open(tmp_path / "echo")
    assert ckpt.format == "dcp" and ckpt.step == 4
    assert torch.equal(ckpt["model.up.weight"].torch(), trained.model["up"].weight)
    facts = gather(ckpt)
    assert facts.lr == trained.optimizer.param_groups[0]["lr"] and facts.steps.usual == 4
    assert facts.group_of("norm.weight").weight_decay == 0.0 and facts.group_of("up.weight").weight_decay == 0.1
    assert facts.schedule.count == 4
    evidence = Evidence(State(wb.open(saved), gather(wb.open(saved))), None, State(ckpt, facts))
    assert [one for one in check_facts(evidence).signs if one.severity != "info"] == []
    assert wb.diff(saved, tmp_path / "echo").count("changed") == 0


def test_an_echo_of_fingerprints_states_the_same_facts(trained, tmp_path):
    trained.echo(tmp_path / "echo")
    trained.echo(tmp_path / "echo.json", payload=False)
    full, prints = wb.open(tmp_path / "echo"), open_echo(tmp_path / "echo.json")
    assert sorted(prints) == sorted(full)
    one, two = gather(full), gather(prints)
    for fact in ("step", "lr", "betas", "weight_decay", "eps", "decoupled"):
        assert one.value(fact) == two.value(fact) is not None, fact
    assert one.steps.by_name == two.steps.by_name and one.schedule.lrs == two.schedule.lrs
    with pytest.raises(errors.HoleError):
        prints["model.up.weight"].torch()
    assert (tmp_path / "echo.json").stat().st_size < 20_000


def test_fingerprints_are_those_of_the_manifest_which_saves_the_reading(trained, saved, tmp_path):
    made = manifest.write(wb.open(saved), tmp_path / "m.json")
    report = trained.echo(tmp_path / "echo.json", payload=False)
    own = read_echo(tmp_path / "echo.json")
    for key, entry in made.tensors.items():
        assert own.tensors[key].fingerprint == entry.fingerprint, key
    manifest.write(wb.open(saved))
    report = trained.echo(against=saved)
    Path(manifest.beside(str(saved))).unlink()
    assert "no bytes of the checkpoint were read" in report.checked["values"] and report.exit_code == 0


def test_an_echo_made_at_the_save_needs_no_checkpoint(trained, tmp_path):
    trained.echo(tmp_path / "at-save.json", payload=False)
    assert grave(Trainer(1).load(trained).echo(against=tmp_path / "at-save.json")) == {}
    other = grave(Trainer(1).load(trained, optimizer=False).echo(against=tmp_path / "at-save.json"))
    assert "echo.state" in other


@pytest.mark.parametrize(
    "wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel], ids=["compile", "DataParallel"]
)
def test_wrappers_are_no_part_of_names(trained, saved, wrap):
    wrapped = Trainer(1, wrap)
    inner = wrapped.model._orig_mod if hasattr(wrapped.model, "_orig_mod") else wrapped.model.module
    inner.load_state_dict(trained.model.state_dict())
    report = wrapped.echo(against=saved)
    assert not any(one.rule in ("echo.missing", "echo.extra", "echo.values") for one in report)
    assert report.echo.counts["strangers"] == 0


def test_tied_weights_are_hashed_once_and_may_be_stored_once(trained, saved, tmp_path):
    save_file(
        {name: one.clone() for name, one in trained.model.state_dict().items() if name != "head.weight"},
        tmp_path / "model.safetensors",
    )
    report = wb.echo(trained.model, None, tmp_path / "echo.json", payload=False, against=tmp_path / "model.safetensors")
    assert grave(report) == {}
    assert report.echo.tensors["model.head.weight"].tied == "model.embed.weight"


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_was_not_loaded_is_found(trained, saved, tmp_path):
    report = Trainer(1).load(trained, optimizer=False).echo(tmp_path / "echo", against=saved)
    found = grave(report)
    assert found["echo.state"] == "optimizer has no state: 0 of 7 parameters have any"
    assert "echo.values" not in found
    assert f"workbench doctor {saved} --echo {tmp_path / 'echo'}" in report[0].hint
    with pytest.raises(errors.EchoError, match="optimizer has no state"):
        report.raise_for_errors()
    evidence = Evidence(
        State(wb.open(saved), gather(wb.open(saved))),
        None,
        State(wb.open(tmp_path / "echo"), gather(wb.open(tmp_path / "echo"))),
    )
    assert "S06" in {one.rule for one in check_facts(evidence).signs if one.severity == "error"}


def test_moments_made_by_a_dummy_step_are_all_zeros(trained, saved):
    fresh = Trainer(1).load(trained, optimizer=False)
    lr = [group["lr"] for group in fresh.optimizer.param_groups]
    for group in fresh.optimizer.param_groups:
        group["lr"] = 0.0
    for param in fresh.model.parameters():
        param.grad = torch.zeros_like(param)
    fresh.optimizer.step()
    for group, one in zip(fresh.optimizer.param_groups, lr, strict=True):
        group["lr"] = one
    report = fresh.echo(against=saved)
    zeros = [one for one in report if one.rule == "echo.values" and one.evidence["holds"] == "zeros"]
    assert {one.evidence["role"] for one in zeros} == {"exp_avg", "exp_avg_sq"}
    assert "R10" in grave(report)


def test_state_that_went_to_another_parameter_is_named(trained, saved):
    wrong = Trainer(1).load(trained)
    up, down = wrong.model["up"].weight, wrong.model["down"].weight
    with torch.no_grad():
        wrong.optimizer.state[down]["exp_avg"] = wrong.optimizer.state[up]["exp_avg"].clone().reshape(down.shape)
    norm, bias = wrong.model["norm"].weight, wrong.model["norm"].bias
    wrong.optimizer.state[norm], wrong.optimizer.state[bias] = wrong.optimizer.state[bias], wrong.optimizer.state[norm]
    found = {
        (one.evidence["role"], one.evidence["holds"]): one
        for one in wrong.echo(against=saved)
        if one.rule == "echo.values"
    }
    crossed = found["exp_avg", "other"].evidence
    assert set(crossed["others"]) == {"optimizer.state.norm.bias.exp_avg", "optimizer.state.norm.weight.exp_avg"}
    assert found["exp_avg", "unknown"].evidence["tensors"] == ["optimizer.state.down.weight.exp_avg"]


def test_the_doctors_rules_fire_on_fingerprints(trained, saved, tmp_path):
    def outcome(trainer: Trainer) -> Any:
        trainer.echo(tmp_path / "echo.json", payload=False)
        echo = read_echo(tmp_path / "echo.json")
        return check_prints(paired(State(wb.open(saved), gather(wb.open(saved))), echo), echo)

    right = outcome(Trainer(1).load(trained))
    assert right.signs == [] and {one.what for one in right.cleared} == {"param", "exp_avg", "exp_avg_sq"}
    lost = outcome(Trainer(1).load(trained, optimizer=False))
    assert {(one.rule, one.causes) for one in lost.signs} == {("R01", ("B1",))}
    wrong = Trainer(1).load(trained)
    norm, bias = wrong.model["norm"].weight, wrong.model["norm"].bias
    wrong.optimizer.state[norm], wrong.optimizer.state[bias] = wrong.optimizer.state[bias], wrong.optimizer.state[norm]
    with torch.no_grad():
        norm.fill_(1.0)
    for name in ("embed", "up"):
        wrong.optimizer.state[wrong.model[name].weight]["exp_avg_sq"].zero_()
    found = {(one.rule, one.evidence["role"]): one for one in outcome(wrong).signs}
    assert found["R02", "exp_avg"].causes == ("B5",) and found["R02", "exp_avg"].hit == 2
    assert found["R03", "exp_avg_sq"].hit == 2 and found["R09", "param"].causes == ("A3", "A2")


def test_one_flipped_bit_and_a_norm_left_at_one_are_found(trained, saved):
    wrong = Trainer(1).load(trained)
    with torch.no_grad():
        wrong.model["up"].weight.view(torch.int32)[3, 5] ^= 1
        wrong.model["norm"].weight.fill_(1.0)
    found = {
        one.evidence["holds"]: one.evidence["tensors"] for one in wrong.echo(against=saved) if one.rule == "echo.values"
    }
    assert found == {"unknown": ["model.up.weight"], "ones": ["model.norm.weight"]}


def test_lr_groups_steps_and_schedules_that_changed_are_told(trained, saved):
    wrong = Trainer(1).load(trained)
    for group in wrong.optimizer.param_groups:
        group["lr"] *= 3
        group["weight_decay"] = 0.1 - group["weight_decay"]
    wrong.scheduler.last_epoch = 8
    wrong.step = 5
    rules = grave(wrong.echo(against=saved))
    assert {"echo.lr", "echo.decay", "R11"} <= rules.keys()


def test_missing_extra_and_recast_tensors_are_told(trained, saved):
    state = trained.model.state_dict()
    state["up.weight"] = state["up.weight"].bfloat16()
    state["new.weight"] = torch.zeros(3)
    del state["down.bias"]
    found = grave(wb.echo(state, None, against=saved))
    assert "'model.down.bias'" in found["echo.missing"] and "'model.new.weight'" in found["echo.extra"]
    assert "bfloat16" in found["echo.type"]


def test_an_optimizer_over_other_tensors_is_told(trained, tmp_path):
    before = Trainer(1)
    after = Trainer(2)
    report = wb.echo(after.model, before.optimizer, tmp_path / "echo.json", payload=False)
    assert report.echo.counts["strangers"] == 7
    assert "echo.strangers" in grave(report)


def test_what_cannot_be_looked_at_is_said_and_nothing_crashes(trained, saved, tmp_path):
    state = trained.model.state_dict()
    state["up.weight"] = torch.empty(24, 16, device="meta")
    report = wb.echo(state, None, tmp_path / "echo.json", payload=False, against=saved)
    assert "meta device" in report.not_checked["tensor 'model.up.weight'"]
    assert grave(report) == {}


# ---- places and files ------------------------------------------------------------------------------------------------


def test_only_an_older_echo_is_replaced(trained, saved, tmp_path):
    trained.echo(tmp_path / "echo")
    trained.echo(tmp_path / "echo")
    (tmp_path / "echo" / "mine.txt").write_text("keep")
    with pytest.raises(errors.UsageError, match="is not an echo"):
        trained.echo(tmp_path / "echo")
    assert (tmp_path / "echo" / "mine.txt").exists()
    with pytest.raises(errors.UsageError, match="is not an echo"):
        trained.echo(saved)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("echo")) == ["echo"]
    with pytest.raises(errors.UsageError, match="nothing to do"):
        trained.echo()


def test_a_damaged_echo_is_refused(trained, tmp_path):
    path = tmp_path / "echo.json"
    trained.echo(path, payload=False)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"with_state": 7', b'"with_state": 5'))
    with pytest.raises(errors.CorruptError, match="digest"):
        read_echo(path)
    path.write_bytes(b"{}")
    with pytest.raises(errors.NotACheckpointError):
        read_echo(path)
    with pytest.raises(errors.MissingFileError):
        read_echo(tmp_path / "none.json")


@examples(30)
@given(st.data())
def test_any_flipped_byte_of_an_echo_is_noticed(data):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "echo.json")
        wb.echo({"w": torch.arange(6.0)}, None, path, payload=False)
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 2))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        with pytest.raises(errors.OpenError):
            read_echo(path)


def test_memory_is_bounded(tmp_path):
    import tracemalloc

    state = {f"w{at}": torch.zeros(4 << 20) for at in range(8)} | {"t": torch.zeros(2048, 4096).t()}
    wb.echo({"w": torch.zeros(3)}, None, tmp_path / "first.json", payload=False)  # imports
    tracemalloc.start()
    wb.echo(state, None, tmp_path / "echo.json", payload=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20  # of 160 MB; numpy's buffers are traced


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def test_a_trainer_callback_compares_what_the_trainer_resumed(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    warnings.simplefilter("ignore")  # transformers' and accelerate's own
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    rows = [{"input_ids": torch.arange(8) % 64, "labels": torch.arange(8) % 64} for _ in range(16)]
    reports = []

    class Echo(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
            if state.global_step:
                against = f"{args.output_dir}/checkpoint-{state.global_step}"
                reports.append(
                    wb.echo(
                        model,
                        optimizer,
                        f"{args.output_dir}/echo.json",
                        scheduler=lr_scheduler,
                        step=state.global_step,
                        payload=False,
                        against=against,
                    )
                )

    def trainer(steps: int) -> Any:
        torch.manual_seed(0)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            save_steps=3,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            learning_rate=1e-3,
            logging_strategy="no",
        )
        model = transformers.LlamaForCausalLM(config)
        return transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[Echo()])

    trainer(3).train()
    trainer(4).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    (healthy,) = reports
    assert grave(healthy) == {} and "48 of 48 tensors are equal" in healthy.checked["values"], healthy
    (tmp_path / "checkpoint-3" / "optimizer.pt").rename(tmp_path / "checkpoint-3" / "lost.bin")
    trainer(4).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    (tmp_path / "checkpoint-3" / "lost.bin").rename(tmp_path / "checkpoint-3" / "optimizer.pt")
    again = compare_echo(tmp_path / "checkpoint-3", tmp_path / "echo.json")
    assert "optimizer has no state" in grave(again)["echo.state"]


def test_state_by_number_is_not_taken_for_state_that_is_gone(trained: Trainer, tmp_path: Path) -> None:
    """DCP of ``optimizer.state_dict()`` as it is: numbers without owners, and an echo by names."""
    kept = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict(), "step": 4}
    dcp.save(kept, checkpoint_id=tmp_path / "step-4")
    trained.echo(tmp_path / "echo")
    found = wb.doctor(tmp_path / "step-4", echo=tmp_path / "echo")
    assert not found.causes and found.verdict.startswith("Too little was compared")
    assert "0 of" in found.coverage and "moments" in found.coverage
