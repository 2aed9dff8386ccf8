"""Whether all parts of a checkpoint are of one step.

::

    folder             step-48000
    trainer's state    global_step 48000        one a rank, where every rank saves its own
    optimizer          step 48000               one scalar a parameter, in the shard of some rank
                       step 47000               ← a shard of an older save

The scalars are tensors of one element: they are read at every depth (some bytes each).
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.analysis.verify.log import Subject, advice, names, plural
from workbench.errors import WorkbenchError

__all__ = ["check_steps"]

MAX_SCALARS = 200_000  #: step scalars read
_STEPS = ("global_step", "global_steps", "iteration", "step")
_FOLDER = re.compile(
    r"(?:.*[-_.])?(?:global_?step|step|checkpoint|ckpt|iteration|iter)[-_=]?(\d{1,18})(?:\.\w+)?", re.I
)
_HINT = "the parts are of different saves, or a shard was left from an older one: restore what differs"


def check_steps(subject: Subject) -> None:
    """The steps that the folder, the trainer's state, each rank and the optimizer tell."""
    told = _objects(subject)
    scalars = _scalars(subject)
    log = subject.log
    counted = plural(len(told), "stored step") + f", {plural(sum(map(len, scalars.values())), 'optimizer step')}"
    log.checked["steps"] = f"{counted} (scalars: their bytes were read), and the folder's name"
    _parts(subject, told)
    usual = _optimizer(subject, scalars)
    step = subject.ckpt.step
    if step is None or not told:  # an object that cannot be read is told by check_objects
        return
    _folder(subject, step)
    if usual is not None:
        if abs(sum(_by_optimizer(subject, scalars).values()) - step) <= 1:
            return  # several optimizers: Lightning's global step counts the steps of all
        files = sorted({subject.file(row) for row in scalars[usual]})
        _both(subject, step, usual, files[0] if len(files) == 1 else "optimizer", "steps")
    elif (powers := _powers(subject)) is not None:
        _both(subject, step, powers, "beta_pow", "steps, as the powers of its betas tell")


def _parts(subject: Subject, told: Mapping[str, int]) -> None:
    """The same fact as several ranks state it."""
    same: dict[str, dict[str, int]] = defaultdict(dict)
    for name, value in told.items():
        same[re.sub(r"\d+", "#", name).rpartition("/")[2]][name] = value
    for found in same.values():
        if len(set(found.values())) > 1:
            usual = Counter(found.values()).most_common(1)[0][0]
            for name, value in found.items():
                if value != usual:
                    subject.log.add(
                        "steps.parts",
                        "error",
                        name,
                        f"says step {value:,}, {plural(len(found) - 1, 'other')} mostly {usual:,}",
                        _HINT,
                        step=value,
                        usual=usual,
                    )


def _optimizer(subject: Subject, scalars: Mapping[float, list[int]]) -> float | None:
    """The optimizer's step, and who differs from it."""
    if not scalars:
        return None
    usual = max(scalars, key=lambda value: len(scalars[value]))
    catalog = subject.catalog
    everywhere = Counter(catalog.file[row] for rows in scalars.values() for row in rows)
    for value, rows in scalars.items():
        if value == usual:
            continue
        keys = list(dict.fromkeys(subject.key(row) for row in rows))
        files = sorted({subject.file(row) for row in rows})
        here = Counter(catalog.file[row] for row in rows)
        whole = [catalog.files[file] for file, count in here.items() if count == everywhere[file]]
        words = f"; all of {names(whole)}" if whole and len(here) < len(everywhere) else ""
        subject.log.add(
            "steps.optimizer",
            "warn",
            keys[0] if len(keys) == 1 else ", ".join(whole or files[:3]),
            f"{plural(len(keys), 'parameter')} at optimizer step {value:,g}, the others at {usual:,g}: "
            f"{names(keys)}{words}",
            _HINT + "; parameters that were frozen for a while differ rightly",
            step=value,
            usual=usual,
            files=files,
            tensors=keys[:100],
        )
    return usual


def _by_optimizer(subject: Subject, scalars: Mapping[float, list[int]]) -> dict[str, float]:
    """The usual step of each optimizer, by what comes before ``.state.`` in its keys."""
    counts: dict[str, Counter[float]] = defaultdict(Counter)
    for value, rows in scalars.items():
        for row in rows:
            counts[subject.key(row).partition(".state.")[0]][value] += 1
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def _folder(subject: Subject, step: int) -> None:
    name = os.path.basename(os.path.abspath(subject.ckpt.path))
    if (match := _FOLDER.fullmatch(name)) and abs(int(match[1]) - step) > 1:
        subject.log.add(
            "steps.folder",
            "warn",
            name,
            f"is named after step {int(match[1]):,} but stores step {step:,}",
            "a folder that was copied or renamed, or files of another save in it",
            named=int(match[1]),
            stored=step,
        )


def _both(subject: Subject, step: int, usual: float, where: str, words: str) -> None:
    """The optimizer against the trainer; a gradient scaler skips steps, so that fewer are right where there is one."""
    if abs(usual - step) <= 1:
        return
    scaled = any("scaler" in name or "loss_scale" in name for name in subject.ckpt.objects)
    severity = "info" if scaled and usual < step else "warn"
    subject.log.add(
        "steps.trainer",
        severity,
        where,
        f"the optimizer made {usual:,g} {words}; the trainer's state says {step:,}",
        "model, optimizer or state are of another save; an optimizer that was reset on purpose differs rightly",
        optimizer=usual,
        trainer=step,
    )


def _powers(subject: Subject) -> int | None:
    """The step that Paddle's powers of beta tell, where they agree on one."""
    try:
        told = subject.ckpt.objects.get("beta_pow")
    except (WorkbenchError, RecursionError):  # told by check_objects
        return None
    step = told.get("step") if isinstance(told, Mapping) else None
    return step if isinstance(step, int) else None


def _objects(subject: Subject) -> dict[str, int]:
    """Object name → step, for those that state one."""
    found: dict[str, int] = {}
    for name in subject.ckpt.objects:
        leaf = re.split(r"[./]", name)[-1]
        if "scheduler" in name or leaf in ("beta_pow", "args") or not _may_tell(leaf):
            continue
        try:
            value = subject.ckpt.objects[name]
        except (WorkbenchError, RecursionError):  # told by check_objects
            continue
        if isinstance(value, Mapping):
            value = next((value[key] for key in _STEPS if key in value), None)
        if hasattr(value, "numel") and value.numel() == 1:
            value = value.item()
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
    return found


def _may_tell(leaf: str) -> bool:
    return leaf in _STEPS or "state" in leaf or leaf == "trainer"


def _scalars(subject: Subject) -> dict[float, list[int]]:
    """Optimizer step → the chunk rows that hold it; from the powers of Adam's betas where only those are stored."""
    catalog = subject.catalog
    wanted = np.array([role == "step" for role in subject.ckpt.roles], bool) & (catalog.numel == 1)
    rows = np.flatnonzero(wanted[catalog.tensor] & ~subject.lost) if catalog.chunks else np.empty(0, np.int64)
    if len(rows) > MAX_SCALARS:
        subject.log.not_checked["steps"] = f"{len(rows) - MAX_SCALARS:,} of {len(rows):,} optimizer steps: too many"
    found: dict[float, list[int]] = defaultdict(list)
    for row in rows[:MAX_SCALARS].tolist():
        try:
            bits = subject.payloads.array(row).reshape(-1)
        except WorkbenchError as error:
            subject.log.add("read.failed", "error", subject.key(row), str(error), advice(error), file=subject.file(row))
            continue
        dtype = catalog.dtype_of(int(catalog.tensor[row]))
        if not dtype.packed and dtype.kind in "fiu":
            number = Decoder(dtype).numbers(bits if dtype.numpy_name is None else bits.view(dtype.numpy))
            found[float(number[0])].append(row)
    return found
