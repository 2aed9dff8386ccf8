"""Lines that a training loop prints in no program's form: a step and a loss with their names.

::

    2026-03-29 01:00:01,123 INFO step 1/100 | loss 5.92 | lr 1.0e-03
    [step 1] loss=5.92, lr=0.001
    Epoch [2/2], Step [1/100], Loss: 5.92          epoch 2, which has 100 steps
    Epoch: [1][ 10/5005]  Loss 6.98 (7.01)

A line is a row only if it has both, and is not about validation, a save or a restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from workbench.names.metrics import is_validation, meaning

DIGITS = 18  #: maximum digits of a step; more do not fit 64 bits
LONGEST = 2000  #: characters of a line
OF_EPOCH = "the steps of an epoch"  #: the name of the counter that holds their number

_NUM = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
_COUNT = rf"\[?\s*(\d{{1,3}}(?:,\d{{3}})+|\d{{1,{DIGITS}}})(?:\s*/\s*(\d{{1,{DIGITS}}}))?(?!\w|\.\d|[,:-]\d)"
_NO_LIMIT = "".join(f"(?<!{word}[ _])" for word in ("max", "total", "num", "every", "per", "warmup", "eval"))


def _named(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){_NO_LIMIT}(?:{names})['\"]?\s*[:=#]?\s*{_COUNT}", re.IGNORECASE)


#: Best first: a loop may print the batch of an epoch, and the step.
_STEPS = (
    _named(r"(?:global|train|training|optimizer)?[ _]?steps?"),
    _named(r"iterations?|iters?|it|updates?"),
    re.compile(
        rf"\bepoch:?\s*\[?\d{{1,9}}\]?\s*\[\s*(\d{{1,{DIGITS}}})\s*/\s*(\d{{1,{DIGITS}}})\](?!\s*\()", re.IGNORECASE
    ),
    _named("batch"),
)
_EPOCH = re.compile(r"\bepoch['\"]?\s*[:=#]?\s*\[?\s*(\d{1,9}(?:\.\d+)?)", re.IGNORECASE)
_FIELD = re.compile(
    r"(?<![\w.])((?:(?:train|training|val|valid|validation|eval|test|avg|average|mean|running|total|best|lowest|final|"
    rf"grad|learning) )*[a-z][\w/.%()-]*)['\"]?(\s*[:=]\s*|\s+)['\"]?\[?({_NUM})(?!\w|\.\w|[:/]\d|,\d|-\d)",
    re.IGNORECASE,
)
_ELSE = re.compile(r"\b(?:sav(?:ed|ing)|resum\w+|restor\w+|(?:re)?loaded|restarted|restarting)\b", re.IGNORECASE)
_EXTREME = re.compile(r"\b(?:best|lowest|min|minimum|final)[ _/]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PrintedRow:
    """A line's step and values."""

    step: int
    values: dict[str, float]
    counters: dict[str, float] = field(default_factory=dict)


def number(text: str) -> float | None:
    """Return ``1,234.5``, ``4.3E+00``, ``nan`` or ``-inf`` as a float; ``None`` for anything else."""
    try:
        return float(text.replace(",", "") if "," in text else text)
    except ValueError:
        return None


def plain_row(line: str, validation: bool) -> PrintedRow | None:
    """Return the row of a line; ``None`` if it has no step or no loss of training.

    Args:
        line: without the prefix of its rank.
        validation: whether it has words about validation: a loss then has to be called that of training.
    """
    if len(line) > LONGEST or "oss" not in line or _ELSE.search(line):
        return None
    step = next((found for pattern in _STEPS if (found := pattern.search(line)) is not None), None)
    if step is None:
        return None
    values: dict[str, float] = {}
    for name, between, text in _FIELD.findall(line):
        if between.isspace() and meaning(name) is None:
            continue  # two words of a sentence
        value = number(text)
        if value is not None:
            values.setdefault(name, value)
    named = [name for name in values if _is_loss(name)]
    if not named or (validation and not any("train" in name.lower() for name in named)):
        return None
    values = {name: value for name, value in values.items() if not is_validation(name.lower())}
    counters = {}
    if (epoch := _EPOCH.search(line)) is not None:
        values["epoch"] = float(epoch[1])
        if step[2]:
            counters[OF_EPOCH] = float(step[2])
    number_of_step = int(step[1].replace(",", ""))
    for name in [name for name, value in values.items() if value == number_of_step and _STEP_NAME.fullmatch(name)]:
        del values[name]
    return PrintedRow(number_of_step, values, counters)


_STEP_NAME = re.compile(r"(?:(?:global|train|training|optimizer)[ _]?)?(?:step|iteration|iter|it|update|batch)s?", re.I)


def _is_loss(name: str) -> bool:
    known = meaning(name)
    return known is not None and known[0] == "loss" and not _EXTREME.match(name)
