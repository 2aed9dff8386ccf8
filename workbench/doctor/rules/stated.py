"""Rules on the facts of one checkpoint: contradictory or fresh counters, schedules and data positions.

A check returns its signs, or a sentence with the reason why it could not run. The docs list the rules by id.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from workbench.core.words import plural
from workbench.doctor.facts.counted import accumulated, stated, whole_ratio
from workbench.doctor.facts.evidence import State
from workbench.doctor.facts.numbers import number
from workbench.doctor.facts.schedule import plan_of
from workbench.doctor.facts.state import NAME, Schedule, TrainingState
from workbench.doctor.ledger.sign import Inapplicable, Rule, Sign, register

#: What a counter behind the trainer may mean.
OFTEN = ": either micro-batches are counted, or the counters were reset"
NAMED = 10_000  #: tensors that a sign lists
ROUNDED = 1e-6  #: relative, between two floats that one program wrote

S06 = Rule(
    "S06", "the optimizer's state is absent or new", ("B1", "B2"), "one",
    "after n updates every trained parameter has moments and a counter of n",
    "no moments; counters of 0 or 1 past step 2",
    "torch 2.13 Optimizer.state is created at the first step; issues of KempnerForge 115, Megatron-Bridge 5680",
    "error",
    "a reset on purpose (info if an argument states it); parameters that were frozen or never routed to (warn)",
    "load the optimizer too (DCP: create it before dcp.load); if it is lost, warm up the lr over 1/(1−β2) steps"
)  # fmt: skip
S07 = Rule(
    "S07", "steps disagree", ("B2", "B1", "G6", "C9"), "one",
    "the counters of all parameters, the trainer's step and the folder's name agree", "more than 1 apart",
    "exact; ±1 is a convention of when the step is counted", "error",
    "parameters unfrozen late, fp16 steps skipped by the scaler, steps that are micro-batches (info), intended resets",
    "restore step and optimizer from one save; replace any shard of another save"
)  # fmt: skip
S16 = Rule(
    "S16", "the learning rate is off its schedule", ("C1", "C2", "C3", "C4", "H1"), "one",
    "the optimizer's lr is the one that the stored arguments give for the trainer's step",
    "outside the schedule's range from one update before to two after, 0.1 %",
    "formulas of torch, Megatron, DeepSpeed, nanoGPT", "warn",
    "an lr set by hand; arguments that the schedule does not use", "restore the scheduler with the optimizer"
)  # fmt: skip
S17 = Rule(
    "S17", "the schedule's position does not match the trainer's step", ("C1", "C3"), "one",
    "a schedule counts updates (Megatron: samples)", "more than 1 update apart, and no known multiple",
    "exact; verl 7953, slime 1547, Megatron OptimizerParamScheduler", "warn",
    "frameworks that step it once per rank or micro-batch (see N9); a warm-up repeated on purpose",
    "load the scheduler's state; step it once per update"
)  # fmt: skip
S18 = Rule(
    "S18", "samples or data position do not match the steps", ("C6",), "one",
    "consumed samples = steps × global batch; a data loader past step 0 is past position 0", "any difference; 0",
    "exact for a constant batch", "warn",
    "data skipped on purpose, a changed batch size, the first batch of an epoch",
    "restore the data loader's state, or skip the samples already seen"
)  # fmt: skip
N6 = Rule(
    "N6", "the optimizer's learning rate differs from its schedule's", ("B8", "C1"), "one",
    "after a scheduler's step the groups hold its last lr", "1e-6, or off the plan at the schedule's own position",
    "torch 2.13 LRScheduler.step; rat-sql 45, apex LARC 766", "warn", "an lr set by hand after the schedule's step",
    "create both, load the optimizer and then the scheduler, and keep no param groups from before the load"
)  # fmt: skip
N9 = Rule(
    "N9", "the schedule counts a multiple of the updates", ("C3",), "one",
    "accelerate steps a schedule once per process, other trainers once per micro-batch",
    "a multiple by world or accumulation", "accelerate AcceleratedScheduler.step", "info",
    "usual in those frameworks", "none if it was the same before the resume"
)  # fmt: skip
N11 = Rule(
    "N11", "every rank has the same random state", ("C8",), "one", "data-parallel ranks draw different numbers",
    "all generators of two ranks or more are equal", "catalogue C8", "warn",
    "tensor-parallel ranks share theirs by design (info)", "restore one generator state per rank"
)  # fmt: skip
register(S06, S07, S16, S17, S18, N6, N9, N11)


def scaled(facts: TrainingState) -> bool:
    """Return whether an fp16 scaler may have skipped updates."""
    return (facts.value("loss_scale") or 1.0) != 1.0 or bool(facts.value("skipped_steps"))


def reset_meant(facts: TrainingState) -> str:
    """Return the argument that requests not to load the optimizer; empty if none."""
    return next((statement.source for statement in facts.statements.get("reset", ()) if statement.value is True), "")


# ---- optimizer -----------------------------------------------------------------------------------------------------

#: Objects that name an optimizer but do not hold one.
ARGUMENTS = frozenset({"args", "arguments", "training_args", "config", "hparams", "hyper_parameters"})


def fresh_state(state: State) -> list[Sign] | str:
    facts, step = state.facts, state.facts.step
    if step is None:
        return "no trainer's step is stored"
    roles = {role for roles in state.params.values() for role in roles}
    held = roles - {"param", "master", "buffer", "ema", "step", "scale", "other"}
    if not held:
        if step <= 0:
            return []
        params = sum("param" in one for one in state.params.values())
        if not facts.groups and "master" not in roles:
            words_of = (*state.ckpt.catalog.keys, *state.ckpt.objects)
            named = (word.lower() for word in words_of if word.partition(".")[0].lower() not in ARGUMENTS)
            if any("optim" in word or "momentum" in word for word in named):
                return "optimizer state is stored in an unknown form"
            place = state.ckpt.place
            beside = next((name for name in place.files if not place.file and "optim" in name.lower()), None)
            if beside is not None:  # of a trainer's own: weights that no format claims together with it
                return f"{beside!r}, beside the weights, was not read: it may hold the optimizer's state"
            words = f"no optimizer is stored at step {step:,}: a resume from here starts a fresh one"
            found = {"kind": "never", "step": step}
            return [S06.sign(words, found, hit=params, of=params, severity="info")]
        if not any(group.betas is not None for group in facts.groups):
            return Inapplicable("the optimizer is not Adam")
        what = "param groups" if facts.groups else "masters"
        words = f"{what} are stored at step {step:,}, but no moments"
        return [S06.sign(words, {"kind": "absent", "step": step}, hit=params, of=params, severity=_grave(facts))]
    if "exp_avg" not in roles:
        return Inapplicable("the optimizer is not Adam")
    if step <= 2:
        return []
    if not facts.steps.counts:
        return facts.steps.unread or "the optimizer stores no step counters"
    new = sum(count for value, count in facts.steps.counts.items() if value <= 1)
    if not new:
        return []
    of = sum(facts.steps.counts.values())
    names = [name for name, value in facts.steps.by_name.items() if value <= 1]
    words = f"{new:,} of {of:,} optimizer counters {'is' if new == 1 else 'are'} at 0 or 1, "
    words += f"but the trainer is at step {step:,}"
    found = {"kind": "fresh", "step": step, "counters": _counts(facts)}
    severity = _grave(facts) if new == of else "warn"
    return [S06.sign(words, found, names[:NAMED], hit=new, of=of, severity=severity)]


def steps_agree(state: State) -> list[Sign] | str:
    facts = state.facts
    if facts.step is None and not facts.steps.counts:
        return "no step is stored"
    return [*_among(facts), *_against(facts), *_stated(facts), *_folder(state)]


def _among(facts: TrainingState) -> list[Sign]:
    counts, usual = facts.steps.counts, facts.steps.usual
    if usual is None or len(counts) < 2:
        return []
    due = usual if facts.step is None or facts.step not in counts else float(facts.step)  # most may have begun anew
    of = sum(counts.values())
    names = [name for name, value in facts.steps.by_name.items() if value != due]
    whole = [file for file, counts_of in facts.steps.by_file.items() if usual not in counts_of]
    others = ", ".join(f"{counts[value]:,} at {value:,.0f}" for value in sorted(counts) if value != usual)
    words = f"the optimizer's counters disagree: {counts[usual]:,} are at {usual:,.0f}, {others}"
    words += f"; these are all counters in {whole[0]!r}" if whole else ""
    words += f"; replicas of {len(facts.steps.split):,} disagree" if facts.steps.split else ""
    off = of - counts[due]
    proved = bool(whole or facts.steps.split) and off < of
    found = {
        "kind": "among",
        "usual": usual,
        "counters": _counts(facts),
        "files": whole,
        "split": len(facts.steps.split),
    }
    return [S07.sign(words, found, names[:NAMED], hit=off, of=of, severity="error" if proved else "warn")]


def _against(facts: TrainingState) -> list[Sign]:
    usual, step = facts.steps.usual, facts.step
    if usual is None or step is None or any(abs(count - step) <= 1 for count in facts.steps.counts):
        return []  # the others do not advance: frozen, or reset (see _among)
    skipped = facts.value("skipped_steps") or 0
    if skipped and abs(usual + skipped - step) <= 1:
        return []
    optimizers = len({group.source.partition(".param_groups")[0] for group in facts.groups})
    if optimizers > 1 and usual * optimizers == step:  # Lightning counts the updates of all optimizers
        return []
    skips = scaled(facts) and usual >= 0.5 * step  # a scaler skips many, a guard against NaN few
    severity = "info" if 1 < usual < step and (skips or usual >= 0.9 * step) else _grave(facts)
    words = f"the optimizer counted {plural(usual, 'update')}, the trainer {step:,} (from {facts.source('step')})"
    found = {"kind": "trainer", "optimizer": usual, "trainer": step, "source": facts.source("step")}
    if times := stated(facts):
        severity = "info"
        words += f": {facts.source('accumulation')} states {times:,} micro-batches per update"
    elif severity == "error" and usual < step and not accumulated(facts):
        severity = "warn"  # an optimizer may be created anew on purpose
    elif severity == "error" and accumulated(facts):
        severity = "warn"
        words += f", {whole_ratio(facts):,} times as many{OFTEN}"
    hit = facts.steps.counts[usual]
    return [S07.sign(words, found, hit=hit, of=sum(facts.steps.counts.values()), severity=severity)]


def _stated(facts: TrainingState) -> list[Sign]:
    stored = facts.statements.get("step", ())
    if not stored or max(one.value for one in stored) - min(one.value for one in stored) <= 1:
        return []
    values = {one.source: one.value for one in stored}
    ranks = len({source.split("/")[-1].split(".")[-1] for source in values}) == 1
    words = "the trainer's state has several steps: " + ", ".join(f"{v:,} ({s})" for s, v in list(values.items())[:4])
    return [S07.sign(words, {"kind": "stated", "steps": values}, severity="error" if ranks else "warn")]


def _folder(state: State) -> list[Sign]:
    facts = state.facts
    named, step = facts.value("folder_step"), facts.step
    if named is None or step is None or abs(named - step) <= 1:
        return []
    words = f"{facts.source('folder_step')} gives step {named:,}, but the state is at step {step:,}"
    return [S07.sign(words, {"kind": "folder", "folder": named, "trainer": step}, severity="warn")]


# ---- schedule ------------------------------------------------------------------------------------------------------


def lr_on_plan(state: State) -> list[Sign] | str:
    facts = state.facts
    plan = plan_of(facts.schedule, facts.args, facts.statements)
    if plan is None:
        return "no complete schedule is stored (peak, floor, warm-up, total, style)"
    if facts.lr is None or facts.step is None:
        return "the optimizer stores no lr, or no step is stored"
    counted = (facts.steps.usual,)  # steps may be micro-batches, or updates that were skipped
    if any(plan.allows(facts.lr, step) for step in (facts.step, *counted) if step is not None):
        return []
    due = plan.lr_at(facts.step)
    ratio = facts.lr / due if due else None
    words = f"lr {facts.lr:.4g} ({facts.source('lr')}) at step {facts.step:,}, but {plan.source} gives {due:.4g}"
    return [S16.sign(words, {"lr": facts.lr, "planned": due, "ratio": ratio, "step": facts.step, "plan": plan.source})]


def schedule_position(rule: str, state: State) -> list[Sign] | str:
    found = _position(state.facts)
    return found if isinstance(found, str) else [sign for sign in found if sign.rule == rule]


def _in_cycle(schedule: Schedule) -> list[Sign]:
    """Compare the position of warm restarts in their cycle with the updates that they count.

    Source: torch 2.13 ``CosineAnnealingWarmRestarts.step``.
    """
    count = schedule.count
    first, times, cycle, at = (number(schedule.settings.get(name)) for name in ("T_0", "T_mult", "T_i", "T_cur"))
    if count is None or first is None or times is None or cycle is None or at is None:
        return []
    if first != int(first) or times != int(times) or first < 1 or times < 1 or count < 0:
        return []
    length, left = int(first), count
    if times == 1:
        left %= length
    while left >= length:
        left, length = left - length, length * int(times)
    if (length, left) == (cycle, int(at)):
        return []
    words = f"the schedule ({schedule.source}) is at {at:,g} of a cycle of {cycle:,g}; its count, {count:,}, is at "
    return [S17.sign(f"{words}{left:,} of a cycle of {length:,}", {"kind": "cycle", "count": count})]


def _position(facts: TrainingState) -> list[Sign] | str:
    schedule, step = facts.schedule, facts.step
    if schedule is not None and (found := _in_cycle(schedule)):
        return found
    if schedule is None or schedule.count is None or step is None:
        return "no schedule's position is stored" if step is not None else "no step is stored"
    if schedule.by_metric:
        return "the schedule counts evaluations, not updates"
    count, unit = schedule.count, 1
    if schedule.kind == "megatron":
        batch = facts.value("global_batch")
        if not batch:
            return "the schedule counts samples, and no batch size is stored"
        consumed, unit = facts.value("consumed_samples"), int(batch)
        if consumed is not None and abs(count - consumed) <= unit:
            return []
    if any(abs(count - due * unit) <= unit for due in (step, facts.steps.usual, facts.scheduled) if due is not None):
        return []  # at the trainer's step, or at the optimizer's counters
    if (stated(facts) or accumulated(facts)) and abs(count - (facts.steps.usual or 0) * unit) <= unit:
        return []  # it counts as the optimizer does; S07 reports how the trainer does
    if scaled(facts) and facts.steps.usual != step and 0.9 * step <= count < step:
        return []
    evidence = {"count": count, "step": step, "unit": unit, "ratio": count / (step * unit) if step else None}
    # Megatron's and DeepSpeed's own schedules are stepped once per update; wrappers step torch's more often
    for fact in ("world_size", "accumulation") if schedule.kind == "torch" else ():
        times = facts.value(fact)
        if times and times > 1 and abs(count - step * unit * times) <= unit * times:
            words = f"the schedule is at {count:,}: it counts {times} per update, equal to the {fact.replace('_', ' ')}"
            return [N9.sign(words, evidence)]
    ratio = f"; after {plural(step, 'step')}, it should be at {step * unit:,}" if step else ""
    words = f"the schedule ({schedule.source}) is at {count:,}{' samples' if unit > 1 else ''}{ratio}"
    return [S17.sign(words, evidence)]


def lr_is_schedules(state: State) -> list[Sign] | str:
    facts, schedule = state.facts, state.facts.schedule
    lrs = [group.lr for group in facts.groups if group.lr is not None]
    if schedule is None or not lrs:
        return "no schedule, or no lr in the optimizer, is stored"
    if schedule.lrs:
        if len(lrs) != len(schedule.lrs):
            return f"{plural(len(lrs), 'param group')}, and a schedule of {plural(len(schedule.lrs), 'learning rate')}"
        pairs = list(zip(lrs, schedule.lrs, strict=True))
        off = [(lr, last) for lr, last in pairs if abs(lr - last) > ROUNDED * max(abs(lr), abs(last))]
        if not off:
            return []
        lr, last = off[0]
        words = f"the optimizer's lr is {lr:.4g}, but its schedule ({schedule.source}) has {last:.4g}"
        return [N6.sign(words, {"lr": lr, "schedule": last}, hit=len(off), of=len(pairs))]
    plan = plan_of(schedule, facts.args, facts.statements)
    if plan is None or schedule.count is None or facts.lr is None:
        return "the schedule stores no lr, and not all of its parameters"
    own = schedule.count / plan.per_update
    if plan.allows(facts.lr, own):
        return []
    due = plan.lr_at(own)
    words = (
        f"the optimizer's lr is {facts.lr:.4g}; its schedule ({schedule.source}) at {schedule.count:,} gives {due:.4g}"
    )
    return [N6.sign(words, {"lr": facts.lr, "schedule": due}, hit=1, of=1)]


# ---- data ----------------------------------------------------------------------------------------------------------


def data_follows(state: State) -> list[Sign] | str:
    facts, step = state.facts, state.facts.step
    consumed, batch, loader = (facts.value(fact) for fact in ("consumed_samples", "global_batch", "loader"))
    if step is None or (consumed is None and loader is None):
        return "neither consumed samples nor a data loader's position is stored"
    found = []
    if step > 0 and loader == 0:
        words = f"the data loader ({facts.source('loader')}) is at 0, but the trainer is at step {step:,}"
        found.append(S18.sign(words, {"kind": "loader", "loader": 0, "step": step}))
    ramp = facts.args.get("rampup_batch_size")
    if consumed is None or (ramp is not None and ramp.value):
        return found
    if consumed == 0 < step:
        words = f"no sample was consumed ({facts.source('consumed_samples')}) in {plural(step, 'step')}"
        found.append(S18.sign(words, {"kind": "samples", "consumed": 0, "step": step}))
    elif batch and step > 0 and abs(consumed - step * batch) > batch:
        if (stated(facts) or accumulated(facts)) and abs(consumed - (facts.steps.usual or 0) * batch) <= batch:
            return found
        times = consumed / (step * batch)
        micro = facts.source("global_batch").rpartition(".")[2] == "batch_size"
        if not (micro and times >= 2 and times == int(times)):  # a batch per rank, or a micro-batch
            words = (
                f"{plural(consumed, 'sample', 'were')} consumed, but {plural(step, 'step')} of {batch:,} "
                f"make {step * batch:,}"
            )
            found.append(S18.sign(words, {"kind": "samples", "consumed": consumed, "step": step, "batch": batch}))
    return found


def generators_differ(state: State) -> list[Sign] | str:
    digests = state.generators
    if len(digests) < 2:
        return "fewer than two ranks' generators are stored"
    if len({one.digest for one in digests.values()}) > 1:
        return []
    axes = state.ckpt.mesh.get("axes", {})
    data = axes.get("dp", axes.get("dp_shard")) if axes else None
    severity = "info" if data in (None, 1) and axes else "warn"
    words = f"the generators of all {plural(len(digests), 'rank')} are in the same state"
    return [N11.sign(words, {"ranks": len(digests)}, hit=len(digests), of=len(digests), severity=severity)]


def _grave(facts: TrainingState) -> str:
    """Return the severity: below error if a reset was requested, or if only a name gives the step."""
    return "info" if reset_meant(facts) else "warn" if facts.source("step") == NAME else "error"


def _counts(facts: TrainingState) -> dict[str, int]:
    return {f"{value:g}": count for value, count in sorted(facts.steps.counts.items())[:20]}


CHECKS: dict[str, Callable[[State], list[Sign] | str]] = {
    "S06": fresh_state,
    "S07": steps_agree,
    "S16": lr_on_plan,
    "S17": partial(schedule_position, "S17"),
    "S18": data_follows,
    "N6": lr_is_schedules,
    "N9": partial(schedule_position, "N9"),
    "N11": generators_differ,
}
