"""Learning-rate schedules: their stored state in every framework's names, and the lr that a plan gives an update.

::

    lr      peak   ___
                 /     \\__               torch: last_epoch, _last_lr      Megatron: num_steps (in samples), max_lr …
           init _/         \\___ floor     DeepSpeed: last_batch_iteration  Paddle: last_epoch, last_lr
               0  warmup      total

Formulas: torch 2.13 ``lr_scheduler.py``; megatron-core 0.16.1 ``optimizer_param_scheduler.py``; deepspeed 0.19.8
``lr_schedules.py``; transformers 5.23 ``optimization.py``; nanoGPT ``train.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.doctor.facts.flat import ObjectLeaf
from workbench.doctor.facts.numbers import number, whole
from workbench.doctor.facts.state import Schedule, Statement

_NESTED = "_schedulers"  #: key of torch's SequentialLR and ChainedScheduler
#: Keys in the state of every schedule of torch.
_OF_ALL = {"base_lrs", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr", "verbose"}
_STYLES = {"cosine", "linear", "constant"}
SLACK = 1e-3  #: relative; neighbouring updates cover conventions of counting
#: Arguments by trainer: (peak, floor, warm-up, total), in updates. nanoGPT; Megatron.
_ARGUMENTS = (
    ("learning_rate", "min_lr", "warmup_iters", "lr_decay_iters"),
    ("lr", "min_lr", "lr_warmup_iters", "lr_decay_iters"),
)
#: Names of settings from which learning rates are computed, as several trainers and torch have them.
_RATES = re.compile(
    r"(?:^|[._])(?:\w*lrs?|lr_\w+|\w*learning_rate|\w*schedul\w*|warm\w*|\w*anneal\w*|cos_min_ratio|style|t_max|gamma"
    r"|milestones|num_cycles|decay_(?:style|steps|iters)|(?:train|max|total)_(?:num_)?(?:iters|steps|samples|epochs)"
    r"|num_(?:train_|training_)?(?:steps|epochs|iters)|\w*batch_size|\w*accumulation\w*)$"
    r"|(?:^|\.)(?:total|steps|epochs|iters)$"
)


def sets_rates(name: str) -> bool:
    """Return whether learning rates are computed from a setting of that name."""
    return _RATES.search(name.lower()) is not None


@dataclass(frozen=True)
class Plan:
    """A warm-up, then a decay.

    Attributes:
        warmup, total: lengths in the schedule's units. per_update: units per update.
        log_warmup: the warm-up is not linear (DeepSpeed's default), so only its bounds are known.
        source: what states it.
    """

    peak: float
    floor: float
    warmup: float
    total: float
    style: str
    source: str
    init: float = 0.0
    per_update: float = 1.0
    log_warmup: bool = False

    def lr_at(self, update: float) -> float:
        """Return the learning rate at an update, counted as the framework counts."""
        count = update * self.per_update
        if self.warmup > 0 and count <= self.warmup:
            return self.init + (self.peak - self.init) * max(count, 0.0) / self.warmup
        if self.style == "constant":
            return self.peak
        done = min(1.0, (count - self.warmup) / max(self.total - self.warmup, 1e-9))
        share = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.floor + share * (self.peak - self.floor)

    def allows(self, lr: float, update: float) -> bool:
        """Return whether a stored lr fits the plan near that update; trainers store it before or after the step."""
        if self.log_warmup and (update - 1) * self.per_update <= self.warmup:
            return lr <= self.peak * (1 + SLACK)
        near = [self.lr_at(update + shift) for shift in (-1, 0, 1, 2)]
        return min(near) * (1 - SLACK) <= lr <= max(near) * (1 + SLACK)


def read_schedule(found: Iterable[ObjectLeaf]) -> Schedule | None:
    """Return the state of the schedule of the lr, the first if several ranks or optimizers have one each."""
    by_parent: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for leaf in found:
        if any("sched" in word.lower() for word in leaf.path[:-1]):
            by_parent.setdefault((leaf.rank, leaf.path[:-1]), {})[leaf.name] = leaf.value
    for (rank, path), fields in sorted(by_parent.items(), key=lambda one: _NESTED in one[0][1]):  # else as stored
        made = _schedule(fields, ".".join(path) if not rank else f"{rank}/{'.'.join(path)}")
        if made is not None:
            outer = by_parent.get((rank, path[: path.index(_NESTED)]), {}) if _NESTED in path else {}
            # torch's ChainedScheduler counts only in its children; its lr is their combined result
            lrs = _numbers(outer["_last_lr"]) if "_last_lr" in outer else made.lrs
            falls = by_parent.get((rank, (*path, "milestones")))  # of MultiStepLR: step → how often
            return replace(made, lrs=lrs, settings={**fields, "milestones": falls} if falls else dict(fields))
    return None


def rates_at(schedule: Schedule, count: float) -> tuple[float, ...] | None:
    """Return the learning rates, by group, of a schedule of torch after ``count`` of its steps.

    Its class is inferred from the arguments in its state. ``None`` if they do not identify it, as for ``LambdaLR``.
    Source: the closed forms in torch 2.13 ``lr_scheduler.py`` (``_get_closed_form_lr``).
    """
    given = schedule.settings
    if schedule.kind != "torch" or not schedule.base_lrs or _NESTED in schedule.source.split("."):
        return None
    try:
        found = _closed_form(given, schedule.base_lrs, count)
    except (ArithmeticError, ValueError):  # arguments that no schedule of torch accepts
        return None
    return found if found is not None and all(isinstance(lr, float) and math.isfinite(lr) for lr in found) else None


def _closed_form(given: Mapping[str, Any], base_lrs: tuple[float, ...], count: float) -> tuple[float, ...] | None:
    def value(name: str) -> float:
        found = number(given.get(name))
        return math.nan if found is None else float(found)

    if "gamma" in given and "step_size" in given:
        factor = value("gamma") ** (count // max(value("step_size"), 1))
    elif "gamma" in given and "milestones" in given:
        passed = {at: number(times) for at, times in given["milestones"].items() if float(at) <= count}
        factor = value("gamma") ** sum(math.nan if times is None else times for times in passed.values())
    elif "gamma" in given and set(given) <= _OF_ALL | {"gamma"}:
        factor = value("gamma") ** count
    elif "start_factor" in given and "total_iters" in given:
        share = min(count / max(value("total_iters"), 1), 1.0)
        factor = value("start_factor") + (value("end_factor") - value("start_factor")) * share
    elif "power" in given and "total_iters" in given:
        factor = (1 - min(count / max(value("total_iters"), 1), 1.0)) ** value("power")
    elif "T_max" in given and "eta_min" in given:
        wave = (1 + math.cos(math.pi * count / max(value("T_max"), 1))) / 2
        return tuple(value("eta_min") + (base - value("eta_min")) * wave for base in base_lrs)
    else:
        return None
    return tuple(base * factor for base in base_lrs)


def plan_of(
    schedule: Schedule | None, args: Mapping[str, Statement], statements: Mapping[str, tuple[Statement, ...]]
) -> Plan | None:
    """Return the plan if it is stored in full: Megatron's own, DeepSpeed's config, a trainer's arguments."""
    if schedule is not None and schedule.kind == "megatron":
        batch = statements.get("global_batch")
        per = 1.0 if schedule.in_samples is False else number(batch[0].value) if batch else None
        style = (schedule.style or "").lower()
        whole = (schedule.max_lr, schedule.min_lr, schedule.warmup, schedule.total)
        if per is None or style not in _STYLES or any(one is None for one in whole):
            return None
        peak, floor, warmup, total = (float(one or 0) for one in whole)
        return Plan(peak, floor, warmup, total, style, schedule.source, per_update=per)
    config = statements.get("ds_schedule")
    if config is not None:
        return _deepspeed(config[0].value, args, config[0].source)
    if "decay_lr" in args and args["decay_lr"].value is False:
        return None
    for names in _ARGUMENTS:
        stated = [number(args[name].value) if name in args else None for name in names]
        if all(one is not None for one in stated):
            peak, floor, warmup, total = (float(one or 0) for one in stated)
            style = str(args["lr_decay_style"].value) if "lr_decay_style" in args else "cosine"
            return Plan(peak, floor, warmup, total, style, args[names[0]].source) if style in _STYLES else None
    return None


def _schedule(fields: Mapping[str, Any], source: str) -> Schedule | None:
    if whole(fields.get("num_steps")) is not None and "max_lr" in fields:
        style = fields.get("lr_decay_style")
        decays = number(fields.get("start_wd")), number(fields.get("end_wd"))
        return Schedule(
            "megatron",
            whole(fields["num_steps"]),
            None,
            (),
            (),
            number(fields["max_lr"]),
            number(fields.get("min_lr")),
            whole(fields.get("lr_warmup_steps")),
            whole(fields.get("lr_decay_steps")),
            style if isinstance(style, str) else None,
            None if None in decays else (decays[0] or 0.0, decays[1] or 0.0),
            source,
        )
    if whole(fields.get("last_batch_iteration")) is not None:
        # counts from 0: after the first update it is 0 (deepspeed 0.19.8, `step`)
        return Schedule("deepspeed", fields["last_batch_iteration"] + 1, False, source=source)
    if whole(fields.get("last_epoch")) is not None:
        if "_last_lr" in fields or "base_lrs" in fields:
            lrs, base = _numbers(fields.get("_last_lr")), _numbers(fields.get("base_lrs"))
            return Schedule("torch", fields["last_epoch"], False, lrs, base, source=source)
        if "last_lr" in fields:
            return Schedule("paddle", fields["last_epoch"], False, _numbers(fields["last_lr"]), source=source)
    return None


def _deepspeed(config: Mapping[str, Any], args: Mapping[str, Statement], source: str) -> Plan | None:
    kind, params = config.get("type"), config.get("params", {})
    if kind == "WarmupCosineLR":
        peak, ratio = number(config.get("lr")), number(params.get("cos_min_ratio", 0.0001))
        total, warmup = number(params.get("total_num_steps")), number(params.get("warmup_num_steps", 1000))
        if peak is None or ratio is None or total is None or warmup is None:
            return None
        log = params.get("warmup_type", "log") != "linear"
        return Plan(peak, peak * ratio, warmup, total, "cosine", source, log_warmup=log)
    return None


def _numbers(value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(found for found in map(number, values) if found is not None)
