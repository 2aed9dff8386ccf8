"""Check that all parts of a checkpoint are from one step.

::

    folder             step-48000
    trainer's state    global_step 48000        one per rank, if every rank saves its own
    optimizer          step 48000               one scalar per parameter, in the shard of some rank
                       step 47000               ← a shard from an older save

The scalars are tensors of one element and are read at every depth (a few bytes each).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.analysis.verify.log import Examined, advice
from workbench.core.words import plural, some_of
from workbench.errors import WorkbenchError
from workbench.names.steps import parse_name

MAX_SCALARS = 200_000  #: maximum number of step scalars read
_STEPS = ("global_step", "global_steps", "iteration", "step")
_HINT = "the parts are from different saves, or a shard is left over from an older one: restore those that differ"


def check_steps(subject: Examined) -> None:
    """Compare the steps of the folder, the trainer's state, each rank and the optimizer."""
    stored = _objects(subject)
    scalars = _scalars(subject)
    log = subject.log
    counted = plural(len(stored), "stored step") + f", {plural(sum(map(len, scalars.values())), 'optimizer step')}"
    log.checked["steps"] = f"{counted} (scalars: their bytes were read), and the folder's name"
    _parts(subject, stored)
    usual = _optimizer(subject, scalars)
    step = subject.ckpt.step
    if step is None or not stored:  # an unreadable object is reported by check_objects
        return
    _folder(subject, step)
    if usual is not None:
        if abs(sum(_by_optimizer(subject, scalars).values()) - step) <= 1:
            return  # several optimizers: Lightning's global step is the sum of their steps
        files = sorted({subject.file(row) for row in scalars[usual]})
        _both(subject, step, usual, files[0] if len(files) == 1 else "optimizer", "steps")
    elif (powers := _powers(subject)) is not None:
        _both(subject, step, powers, "beta_pow", "steps, according to the powers of its betas")


def _parts(subject: Examined, stored: Mapping[str, int]) -> None:
    """Compare the same fact as stored by several ranks."""
    same: dict[str, dict[str, int]] = defaultdict(dict)
    for name, value in stored.items():
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
                        f"stores step {value:,}, but {plural(len(found) - 1, 'other')} mostly {usual:,}",
                        _HINT,
                        step=value,
                        usual=usual,
                    )


def _optimizer(subject: Examined, scalars: Mapping[float, list[int]]) -> float | None:
    """Return the optimizer's step, and report parameters that differ from it."""
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
        words = f"; all of {some_of(whole)}" if whole and len(here) < len(everywhere) else ""
        subject.log.add(
            "steps.optimizer",
            "warn",
            keys[0] if len(keys) == 1 else ", ".join(whole or files[:3]),
            f"{plural(len(keys), 'parameter')} at optimizer step {value:,g}, the others at {usual:,g}: "
            f"{some_of(keys)}{words}",
            _HINT + "; parameters that were temporarily frozen are expected to differ",
            step=value,
            usual=usual,
            files=files,
            tensors=keys[:100],
        )
    return usual


def _by_optimizer(subject: Examined, scalars: Mapping[float, list[int]]) -> dict[str, float]:
    """Return the usual step of each optimizer, by the prefix before ``.state.`` in its keys."""
    counts: dict[str, Counter[float]] = defaultdict(Counter)
    for value, rows in scalars.items():
        for row in rows:
            counts[subject.key(row).partition(".state.")[0]][value] += 1
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def _folder(subject: Examined, step: int) -> None:
    name = subject.place.name
    named = parse_name(name)
    if named and named.unit in ("step", "save") and abs(named.number - step) > 1:
        subject.log.add(
            "steps.folder",
            "warn",
            name,
            f"is named after step {named.number:,} but stores step {step:,}",
            "the folder was copied or renamed, or contains files from another save",
            named=named.number,
            stored=step,
        )


def _both(subject: Examined, step: int, usual: float, where: str, words: str) -> None:
    """Compare the optimizer with the trainer; a gradient scaler skips steps, so fewer optimizer steps are valid."""
    if abs(usual - step) <= 1:
        return
    scaled = any("scaler" in name or "loss_scale" in name for name in subject.ckpt.objects)
    severity = "info" if scaled and usual < step else "warn"
    subject.log.add(
        "steps.trainer",
        severity,
        where,
        f"the optimizer made {usual:,g} {words}; the trainer's state stores {step:,}",
        "model, optimizer or state is from another save; an optimizer reset on purpose is expected to differ",
        optimizer=usual,
        trainer=step,
    )


def _powers(subject: Examined) -> int | None:
    """Return the step according to Paddle's powers of beta, if they agree."""
    try:
        powers = subject.ckpt.objects.get("beta_pow")
    except (WorkbenchError, RecursionError):  # reported by check_objects
        return None
    step = powers.get("step") if isinstance(powers, Mapping) else None
    return step if isinstance(step, int) else None


def _objects(subject: Examined) -> dict[str, int]:
    """Return object name → step, for objects that store one."""
    found: dict[str, int] = {}
    for name in subject.ckpt.objects:
        leaf = re.split(r"[./]", name)[-1]
        if "scheduler" in name or leaf in ("beta_pow", "args") or not _may_tell(leaf):
            continue
        try:
            value = subject.ckpt.objects[name]
        except (WorkbenchError, RecursionError):  # reported by check_objects
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


def _scalars(subject: Examined) -> dict[float, list[int]]:
    """Return optimizer step → chunk rows with it; from the powers of Adam's betas if only those are stored."""
    catalog = subject.catalog
    is_step = np.array([role == "step" for role in subject.ckpt.roles], bool) & (catalog.numel == 1)
    rows = np.flatnonzero(is_step[catalog.tensor] & ~subject.lost) if catalog.chunks else np.empty(0, np.int64)
    if len(rows) > MAX_SCALARS:
        subject.log.not_checked["steps"] = f"{len(rows) - MAX_SCALARS:,} of {len(rows):,} optimizer steps: too many"
    found: dict[float, list[int]] = defaultdict(list)
    for row in subject.payloads.fetching(rows[:MAX_SCALARS]):
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
