"""The meaning of a logged metric's name: the loss, the learning rate, the gradient's norm, or the throughput.

::

    lm loss   train/loss   NLL Loss   loss_metrics/global_avg_loss    loss
    lr   learning rate   optim/learning_rate   lr-AdamW               lr
    grad norm   grad/norm/total   l2_norm/grad/global   |g|           grad_norm
    tps   tokens_per_second   throughput/tokens_per_sec               throughput

Names are those that Megatron-LM, torchtitan, DeepSpeed, Composer, NeMo, fairseq2, MaxText, Levanter, PaddleNLP,
veScale, verl, OpenRLHF, LLaMA-Factory, torchtune, Lightning and the Hugging Face Trainer write. A validation metric has
no meaning here: it belongs to another curve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

MEANINGS = ("loss", "lr", "grad_norm", "throughput")
#: Names of the step in rows of JSON or CSV, best first. A row's own number (``_step``) can begin again at 0.
STEP_NAMES = (
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "current_steps",
    "step",
    "iteration",
    "iter",
    "steps",
    "_step",
    "num_steps",
    "update",
    "num_updates",
    "batch",
    "samples",
    "consumed_samples",
    "num_tokens",
    "tokens",
)

_VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|validate|eval|evaluation|test|dev)(?:[^a-z]|$)")
#: Meaning → exact names, normalised, best first; then a pattern for the names that users invent.
_EXACT = {
    "loss": (
        "loss", "train/loss", "train_loss", "lm_loss", "train/lm_loss", "loss/train/total", "loss/train", "nll_loss",
        "reduced_train_loss", "loss_metrics/global_avg_loss", "global_avg_loss", "train/samples/train_loss",
        "train_samples_train_loss", "learning/loss", "training_loss", "train/total_loss", "total_loss",
        "train/ce_loss", "ce_loss", "cross_entropy", "loss_mean", "train/loss_mean", "policy_loss",
        "train/policy_loss", "actor/policy_loss", "actor/pg_loss", "pg_loss",
    ),
    "lr": (
        "lr", "learning_rate", "train/learning_rate", "train/lr", "train_lr", "optim/learning_rate", "learning/lr",
        "learning/current_learning_rate", "actor/lr", "train/samples/lr", "train_samples_lr",
    ),
    "grad_norm": (
        "grad_norm", "train/grad_norm", "gradient_norm", "global_grad_norm", "train/global_grad_norm", "gnorm",
        "l2_norm/grad/global", "grad/norm/total", "|g|", "actor/grad_norm", "learning/grad_norm", "grad_norm/total",
    ),
    "throughput": (
        "tps", "throughput(tps)", "tokens_per_second", "tokens_per_sec", "throughput/tokens_per_sec",
        "throughput/tokens_per_second", "tokens_per_second_per_gpu", "tokens/s/device", "throughput",
        "perf/throughput", "throughput_per_gpu_(tflop/s/gpu)", "samples_per_second", "interval_samples_per_second",
        "runningavgsamplespersec", "samples/sec",
    ),
}  # fmt: skip
_LOOSE = {
    "loss": re.compile(r"(?:^|[/_.])loss(?:$|[/_.](?!scale|weight))(?!.*scale)"),
    "lr": re.compile(r"^(?:.*/)?(?:lr|learning_rate)(?:$|[-_/])"),
    "grad_norm": re.compile(r"grad(?:ient)?s?[_/.]*(?:l2_?)?norm"),
    "throughput": re.compile(r"(?:tokens|samples)_?(?:per|/)_?s(?:ec|econd)?"),
}
#: Losses that are a part of the sum, or of another model than the one that is trained.
_PART = re.compile(r"aux|load_?balanc|z_?loss|mtp|critic|value|kl|router|indexer|max_loss|scale")


#: Counters that rise as long as a program runs, or over all its data; a restart resets them.
_COUNTERS = {
    "epoch": re.compile(r"(?:^|[/_.])epoch$"),
    "elapsed": re.compile(
        r"(?:^|.*[/_.])(?:elapsed(?:_time)?|time_elapsed|run_?time|total_time|wall_?(?:clock|time)?|uptime"
        r"|(?:time_)?since_start)(?:_?\(?(?:ms|s|secs?|seconds|m|mins?|minutes|h|hrs?|hours)\)?)?$|^time$"
    ),
    "amount": re.compile(
        r"(?:^|[/_.])(?:(?:consumed|seen|processed|cumulative|total|num)_(?:train_|training_|input_)*)?"
        r"(?:samples|tokens|examples|sequences)(?:_(?:seen|consumed|processed|total))?$|total_flos$"
    ),
}


def counter(name: str) -> str | None:
    """Return what a number counts while a program runs: ``epoch``, ``elapsed`` (time) or ``amount`` (of data)."""
    plain = normalised(name)
    return next((what for what, pattern in _COUNTERS.items() if pattern.search(plain)), None)


_TIME_OF_STEP = re.compile(
    r"(?:^|[/_.])(?:step|iter|iteration|batch|update)_?(?:time|secs?|seconds|duration)(?:_?\(?(?:ms|s|secs?|seconds)\)?)?$"
    r"|(?:time|secs?|seconds|ms)_?(?:per|/)_?(?:step|iter|iteration|batch|update)|^(?:timing_s/step|interval_runtime|seconds)$"
    r"|^iter_time_\(s\)$|^time_\(ms\)$"
)


def takes_time(name: str) -> bool:
    """Return whether a metric is the time that a step took.

    >>> takes_time("elapsed time per iteration (ms)"), takes_time("step_time"), takes_time("elapsed")
    (True, True, False)
    """
    return _TIME_OF_STEP.search(normalised(name)) is not None


@lru_cache(4096)
def normalised(name: str) -> str:
    """Return a name in lower case, with ``_`` for spaces and dashes, without the run's name of an exported table."""
    name = name.rsplit(" - ", 1)[-1]  # W&B's export: "run - train/loss"
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def is_validation(name: str) -> bool:
    """Return whether a metric was measured on data that the model is not trained on."""
    return _VALIDATION.search(name.lower().replace("_", " ")) is not None


def meaning(name: str) -> tuple[str, int] | None:
    """Return a metric's meaning, and its rank among names of that meaning (0 is best); ``None`` for other metrics.

    >>> meaning("lm loss"), meaning("eval_loss"), meaning("loss scale")
    (('loss', 3), None, None)
    """
    if is_validation(name):
        return None
    plain = normalised(name)
    for what, names in _EXACT.items():
        if plain in names:
            return what, names.index(plain)
    for what, pattern in _LOOSE.items():
        if pattern.search(plain) and not (what == "loss" and _PART.search(plain)):
            return what, len(_EXACT[what])
    return None


def pick_metric(what: str, names: Iterable[tuple[str, int]]) -> str | None:
    """Return the best name for ``what`` among ``(name, number of points)``; ``None`` if no name has that meaning.

    Ties go to the name with most points, then to the first in the alphabet: the choice does not depend on the order of
    files.
    """
    found = []
    for name, points in names:
        known = meaning(name)
        if known is not None and known[0] == what:
            found.append((known[1], -points, name))
    return min(found)[2] if found else None
