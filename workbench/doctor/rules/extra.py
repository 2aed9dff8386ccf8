"""Rules on one checkpoint beyond its matrices: scales, averages, adapters, groups, the sum of second moments.

::

    amax_history 0 0 0 …  scale 1.0     fp8 restarts (N15)             expert_bias 0 0 0 …   balance restarts (N26)
    average = weights, bit for bit      loaded as weights (N21)        lora_B = 0            adapters lost (N22)
    largest exp_avg_sq < exp_avg_sq     impossible (N8)                Σv > c²·(1−β2^t)      no clip at c (S19)
    decay on norms, none on matrices    groups swapped (N27)           √v below ε            updates vanish (N16)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from workbench.analysis.numbers import Decoder
from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.doctor.facts.evidence import State, is_numbered
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, register, some
from workbench.doctor.passes.one import OneState
from workbench.doctor.passes.updates import passed
from workbench.errors import WorkbenchError
from workbench.names.roles import adapter_of

LIST = 100
SMALL = 1 << 22  #: most elements to read from all buffers of a kind
SKIPPED, OFTEN = 8, 100  #: updates that a healthy run may skip, plus one in this many; torch.amp halves at each
AT_ONCE = 3  #: halvings to an initial value, without a skipped update that was counted
DOUBLED = 2.0  #: largest growth of a loss scale at one update
SHRUNK = 8.0  #: growth of a loss scale between two checkpoints that only a restart explains
DEFAULTS = (65536.0, 2.0**15, 2.0**32)  #: initial loss scales: torch GradScaler, apex, Megatron and DeepSpeed
STALE = 4.0  #: times below the type's largest number; with the right amax, weights fill the top octave
SLACK = 1e-2  #: tolerance of the clip's bound, for the rounding of many sums
MOST = 0.5  #: share of second moments below ε² from which updates vanish
FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0}

register(
    Rule("N8", "a largest second moment below the current one", ("B11",), "one", "max_exp_avg_sq ≥ exp_avg_sq", "exact",
         "torch 2.13 torch/optim/adam.py", "error", "optimizers that keep the largest bias-corrected value",
         "load both from one save"),
    Rule("N14", "the loss scale restarted", ("D8",), "one",
         "a dynamic scale doubles about every thousand steps and halves at each skipped update",
         f"{SHRUNK:g} times an earlier checkpoint's, and a common initial value; halved more than {SKIPPED} times; or "
         "its count of good updates began anew, and it did not change or began at a quarter or less",
         "transformers 34053", "warn", "a scale that really grew that much", "restore the gradient scaler's state"),
    Rule("N15", "fp8 scales that were never set", ("D9",), "one", "after a step, the largest magnitudes are known",
         f"all histories 0, or all scales 1; fp8 weights {STALE:g} times below the type's largest number",
         "TransformerEngine 982, Megatron-Bridge 1730", "warn", "fp8 that is switched off",
         "restore _extra_state; otherwise run a few steps without fp8"),
    Rule("N16", "updates limited by ε", ("D10",), "one", "Adam divides by √v + ε", f"√v < ε in {MOST:.0%} of all",
         "catalogue D10", "warn", "an ε that is large on purpose", "lower eps, or train with another loss scale"),
    Rule("N21", "weights that equal their own average", ("F4",), "one", "an average lags behind its weights",
         "all equal bit for bit at step > 0", "catalogue F4", "warn", "an average that has not started",
         "load the raw weights; restore the average's own state"),
    Rule("N22", "adapters that are still zero", ("F5",), "one", "B of an adapter changes at the first update",
         "every lora_B is 0 at step > 0", "peft 0.21: lora_B starts at 0", "error", "none if it has second moments",
         "load the adapters under the names of the wrapped model"),
    Rule("N26", "a router's balance that is zero", ("A5",), "one", "expert_bias changes with every update",
         "all 0 at step > 0", "FlagScale 411", "warn", "balancing that is switched off",
         "restore the router's buffers"),
    Rule("N27", "weight decay on vectors, none on matrices", ("B7",), "one", "norms and biases do not decay",
         "nine in ten of both kinds are the other way round", "catalogue B7", "warn", "no trainer does so on purpose",
         "build the param groups in the order in which they were saved"),
    Rule("S19", "second moments larger than the clip allows", ("H1", "G3"), "one",
         "Σv ≤ c²·(1−β2^t) under global-norm clipping",
         f"{SLACK:.0%}", "catalogue 3.1: v is a mean of squares of a gradient whose norm is at most c", "warn",
         "a clip that was changed recently, or does not cover all parameters",
         "check which steps were clipped at what"),
)  # fmt: skip


def check_extra(state: State, found: Mapping[str, OneState], earlier: State | None = None) -> Outcome:
    """Apply the rules of this module; ``earlier`` is a checkpoint of the same run, if there is one."""
    step = state.facts.step or state.facts.steps.usual or 0
    outcome = Outcome()
    for rule, result in (
        ("N8", _largest(state, found)),
        ("N14", _loss_scale(state, earlier)),
        ("N15", _fp8(state, found, step)),
        ("N16", _vanish(state, found)),
        ("N21", _average(found, step)),
        ("N22", _adapters(state, found, step, earlier)),
        ("N26", _balance(state, step, earlier)),
        ("N27", _groups(state)),
        ("S19", _clip(state, found, earlier)),
        ("S01", _finite(state, found)),
    ):
        if isinstance(result, str):
            outcome.not_checked[rule] = result
            continue
        outcome.checked[rule] = result[0]
        outcome.signs += result[1]
    return outcome


Said = tuple[str, list[Sign]] | str


def _largest(state: State, found: Mapping[str, OneState]) -> Said:
    held = [fqn for fqn, sums in found.items() if "max_exp_avg_sq" in sums.numbers and "exp_avg_sq" in sums.numbers]
    if not held:
        if "max_exp_avg_sq" in state.ckpt.roles:
            return "the largest second moments (AMSGrad) were not read"
        return Inapplicable("no largest second moments are stored (AMSGrad)")
    bad = [fqn for fqn in held if found[fqn].shrunk]
    signs = []
    if bad:
        count = sum(found[fqn].shrunk for fqn in bad)
        more = "exceeds its" if count == 1 else "exceed their"
        words = f"{plural(count, 'element')} of exp_avg_sq {more} largest value so far, in {some(bad)}"
        signs.append(RULES["N8"].sign(words, {"elements": count}, bad[:LIST], hit=len(bad), of=len(held)))
    return f"{plural(len(held), 'parameter')}", signs


def _loss_scale(state: State, earlier: State | None) -> Said:
    scale, before = state.loss_scale, earlier and earlier.loss_scale
    if not scale and (earlier is None or not before):
        return Inapplicable("no loss scale is stored")
    if not scale or not before:
        return "needs the loss scale of this checkpoint and of an earlier one"
    signs = []
    if scale >= SHRUNK * before and scale in DEFAULTS and not _grown(earlier, state):
        words = f"the loss scale is {scale:,.0f}, a common initial value; before, it was {before:,.0f}"
        signs.append(RULES["N14"].sign(words, {"scale": scale, "before": before}, hit=1, of=1))
    k = None if earlier is None else passed(earlier.facts, state.facts)
    interval = _growth_interval(state)
    if not signs and k and scale > before * DOUBLED ** min(k // interval + 1, 1000):
        words = f"the loss scale went from {before:,.0f} to {scale:,.0f} in {plural(k, 'update')}; "
        words += "each at most doubles it" if interval == 1 else f"it doubles once in {interval:,} updates"
        signs.append(RULES["N14"].sign(words, {"scale": scale, "before": before}, hit=1, of=1))
    halved = math.log2(before / scale) if 0 < scale < before < math.inf else 0.0
    skipped = earlier is None or _skipped(earlier, state)
    at, told = (0.0, False) if earlier is None or not k else _at_load(earlier, state, k)
    initial = at in DEFAULTS and at <= before / DOUBLED**AT_ONCE
    if not signs and (initial or (told and not skipped and 0 < at <= before / DOUBLED**2)):
        words = f"the loss scale went from {before:,.15g} to {scale:,.15g} in {plural(k or 0, 'update')}"
        words += f"{'' if skipped else ', none of them skipped'}; "
        words += f"its count of good updates fits a start at {at:,.15g}: was it reset?"
        signs.append(RULES["N14"].sign(words, {"scale": scale, "before": before}, hit=1, of=1))
    anew = scale in DEFAULTS and halved >= AT_ONCE and not skipped
    if not signs and k is not None and (halved > SKIPPED + k / OFTEN or anew):
        words = (
            f"the loss scale fell from {before:,.15g} to {scale:,.15g} in {plural(k, 'update')}: was it reset, or were "
        )
        words += f"{halved:.0f} more updates skipped? Each skipped update halves it"
        signs.append(RULES["N14"].sign(words, {"scale": scale, "before": before}, hit=1, of=1))
    if not signs and k and earlier is not None and scale == before:
        for path, (old, new) in _good_updates(earlier, state, k).items():
            words = (
                f"{path!r} went from {old:,} to {new:,} in {plural(k, 'update')}: it counts only those since the load"
            )
            signs.append(RULES["N14"].sign(words, {"before": old, "after": new, "k": k}, hit=1, of=1))
    return "loss scales", signs


def _grown(earlier: State | None, later: State) -> bool:
    """Return whether the scale can have doubled as often in between, once in each stored interval."""
    if earlier is None:
        return False
    interval, k = _growth_interval(later), passed(earlier.facts, later.facts)
    one, two = earlier.loss_scale, later.loss_scale
    if k is None or one is None or two is None:
        return False
    return interval > 1 and two <= one * DOUBLED ** min(k // interval + 1, 1000)


def _growth_interval(state: State) -> int:
    """Return the number of good updates after which the scale doubles, if one is stored; otherwise 1."""
    found = {value for path, value in state.counts.items() if path.rpartition(".")[2] == "growth_interval"}
    return max(found.pop(), 1) if len(found) == 1 else 1


def _good_updates(earlier: State, later: State, k: int) -> dict[str, tuple[int, int]]:
    """Return the counts of updates since the scale last changed that began anew, although the scale did not change.

    Such a count goes on until it reaches ``growth_interval``, or until an update is skipped; both change the scale.
    Source: torch 2.13 ``aten/src/ATen/native/cuda/AmpKernels.cu`` (``amp_update_scale_cuda_kernel``).
    """
    a, b = earlier.counts, later.counts
    found = {}
    for path in sorted(a.keys() & b.keys()):
        parent, _, name = path.rpartition(".")
        interval = b.get(f"{parent}.growth_interval", 0)
        if name == "_growth_tracker" and a[path] + k < interval and b[path] == k < a[path] + k:
            found[path] = a[path], b[path]
    return found


def _at_load(earlier: State, later: State, k: int) -> tuple[float, bool]:
    """Return the scale from which k good updates lead to the later scale and count, if both began anew; otherwise 0.

    Also return whether the count shows it: after k more updates, the earlier count would be another one.
    """
    scale = later.loss_scale
    held = [path for path in later.counts if path.rpartition(".")[2] == "_growth_tracker" and path in earlier.counts]
    interval = _growth_interval(later)
    if len(held) != 1 or interval < 2 or not scale:
        return 0.0, False
    old, new = earlier.counts[held[0]], later.counts[held[0]]
    at = scale / DOUBLED ** min(k // interval, 1000) if new == k % interval else 0.0
    return at, new != (old + k) % interval


def _skipped(earlier: State, later: State) -> bool:
    """Return whether the trainer counted more steps than the optimizer made updates, or may have."""
    first, second = (
        None if one.facts.step is None or one.facts.steps.usual is None else one.facts.step - one.facts.steps.usual
        for one in (earlier, later)
    )
    return first is None or first != second


# ---- buffers -------------------------------------------------------------------------------------------------------


def _finite(state: State, found: Mapping[str, OneState]) -> Said:
    """Check tensors that no pass over parameters read: buffers, and what a trainer keeps beside the weights."""
    roles, catalog = state.names.roles, state.ckpt.catalog
    read = {
        at for fqn, held in state.params.items() if fqn in found for r, at in held.items() if r in found[fqn].numbers
    }
    rows = [
        at
        for at in range(len(catalog.keys))
        if at not in read and roles[at] not in ("step", "rng") and catalog.numel[at]
    ]
    rows = [at for at in rows if catalog.dtype_of(at).name.startswith(("float", "bfloat"))]
    broken, count, looked = [], 0, 0
    for at in rows:
        for values in _read(state, [at], SMALL):
            looked += 1
            if lost := int(np.count_nonzero(np.isnan(values))):
                broken.append(at)
                count += lost
    if not looked:
        return Inapplicable("every tensor belongs to a parameter")
    names = [catalog.keys[at] for at in broken]
    text = f"{plural(count, 'element')} of {some(names)} {'is' if count == 1 else 'are'} NaN"
    evidence: dict[str, object] = {"count": count}
    if {roles[at] for at in broken} <= {"buffer"}:
        evidence["buffers"] = names[:LIST]
    signs = [RULES["S01"].sign(text, evidence, _fqns(state, broken), hit=len(broken), of=looked)] if broken else []
    return f"{plural(looked, 'tensor')} beside the parameters", signs


def _fp8(state: State, found: Mapping[str, OneState], step: float) -> Said:
    roles, keys = state.ckpt.roles, state.ckpt.catalog.keys
    histories = [at for at, key in enumerate(keys) if "amax_history" in key]
    scales = [at for at, role in enumerate(roles) if role == "scale" and state.ckpt.catalog.numel[at] == 1]
    extra = [at for at, key in enumerate(keys) if key.endswith("_extra_state")]
    coded = [f for f, one in state.params.items() if "param" in one and state.dtype(one["param"]) in FP8]
    if not (histories or len(scales) > 1 or extra or coded):
        return Inapplicable("no fp8 state is stored")
    if step <= 0:
        return "the step is unknown"
    signs = []
    for rows, words, value in ((histories, "amax histories hold only 0", 0.0), (scales, "scales are exactly 1", 1.0)):
        values = list(_read(state, rows))
        if len(values) > 1 and len(values) == len(rows) and all((one == value).all() for one in values):
            names = [keys[at] for at in rows[:LIST]]
            evidence = {"kind": "reset", "value": value, "step": step}
            text = f"all {len(rows):,} {words} at step {step:,.0f}: {some(names)}"
            signs.append(RULES["N15"].sign(text, evidence, _fqns(state, rows), hit=len(rows), of=len(rows)))
    empty = [at for at in extra if not state.ckpt.catalog.numel[at]]
    if empty and 2 * len(empty) < len(extra):
        text = f"{len(empty):,} of {len(extra):,} _extra_state entries are empty: {some([keys[at] for at in empty])}"
        evidence = {"kind": "empty", "step": step}
        signs.append(RULES["N15"].sign(text, evidence, _fqns(state, empty), hit=len(empty), of=len(extra)))
    full = {f: FP8[state.dtype(state.params[f]["param"])] for f in coded if f in found}
    low = [f for f, top in full.items() if 0 < found[f].numbers["param"].max < top / STALE]
    if low and 4 * len(low) <= len(full):
        text = (
            f"the largest code of {some(low)} is {STALE:g} times below its type's: the scale belongs to other weights"
        )
        signs.append(RULES["N15"].sign(text, {"kind": "stale"}, low[:LIST], hit=len(low), of=len(full)))
    return (
        f"{plural(len(histories), 'amax history')}, {plural(len(scales), 'scale')}, {len(coded):,} fp8 weights",
        signs,
    )


def _balance(state: State, step: float, earlier: State | None) -> Said:
    rows = [
        at
        for at, key in enumerate(state.ckpt.catalog.keys)
        if key.rpartition(".")[2] in ("expert_bias", "e_score_correction_bias")
    ]
    if not rows:
        return Inapplicable("no router's balance is stored")
    values = list(_read(state, rows))
    if not values or step <= 0:
        return "the step is unknown" if values else "the balance of the routers cannot be read"
    signs = []
    new = earlier is not None and not earlier.params.keys() & set(_fqns(state, rows))  # they begin at 0
    if not new and len(values) == len(rows) and not any(one.any() for one in values):
        words = f"the balance of {plural(len(rows), 'router')} is 0 at step {step:,.0f}"
        signs.append(RULES["N26"].sign(words, {"step": step}, _fqns(state, rows), hit=len(rows), of=len(rows)))
    return f"{plural(len(rows), 'router')}", signs


def _adapters(state: State, found: Mapping[str, OneState], step: float, earlier: State | None) -> Said:
    names = zip(state.names.fqns, state.names.roles, strict=True)
    rows = [at for at, (fqn, role) in enumerate(names) if role == "param" and adapter_of(fqn or "") == "lora_B"]
    if not rows:
        return Inapplicable("no adapters are stored")
    if earlier is not None and not earlier.has_adapters:
        return Inapplicable("the adapters begin here: before has none")
    if step <= 0:
        return "the step is unknown"
    read = 0
    for value in _read(state, rows, SMALL * 16):
        read += 1
        if value.any():
            return f"{read:,} of {plural(len(rows), 'adapter')}, up to the first that is not 0", []
    if read < len(rows):
        return "the adapters are too large or cannot be read"
    moved = [fqn for fqn, sums in found.items() if adapter_of(fqn) == "lora_B" and "exp_avg_sq" in sums.numbers]
    moved = [fqn for fqn in moved if found[fqn].numbers["exp_avg_sq"].zeros < found[fqn].numbers["exp_avg_sq"].count]
    words = f"lora_B of all {plural(len(rows), 'adapter')} is 0 at step {step:,.0f}"
    words += f", although gradients reached {len(moved):,} of them" if moved else ""
    grave = "error" if moved else "warn"
    evidence = {"step": step, "moved": len(moved)}
    sign = RULES["N22"].sign(words, evidence, _fqns(state, rows), severity=grave, hit=len(rows), of=len(rows))
    return f"{plural(len(rows), 'adapter')}", [sign]


def _read(state: State, rows: Sequence[int], most: int = SMALL) -> Iterator[Array]:
    """Yield the values of small tensors, as far as they can be read."""
    catalog = state.ckpt.catalog
    for at in rows:
        most -= int(catalog.numel[at])
        if most < 0 or catalog.dtype_of(at).packed:
            return
        try:
            tensor = state.tensor(at)
            yield np.array(Decoder(tensor.element).numbers(tensor.numpy().reshape(-1)))
        except WorkbenchError:  # check_files reports the reason
            return


# ---- sums ----------------------------------------------------------------------------------------------------------


def _vanish(state: State, found: Mapping[str, OneState]) -> Said:
    eps = state.facts.eps
    held = [sums.numbers["exp_avg_sq"] for sums in found.values() if "exp_avg_sq" in sums.numbers]
    if not eps or not eps > 0 or not held:
        return "ε is not stored, or no second moments are stored"
    octave = max(math.floor(2 * math.log2(eps)) + 127, 0)
    octaves = np.sum([numbers.octaves[:255] for numbers in held], axis=0)
    seen, low = int(octaves[1:].sum()), int(octaves[1:octave].sum())
    signs = []
    if seen and low > MOST * seen:
        words = f"√v is below ε = {eps:g} in {low / seen:.0%} of {seen:,} elements"
        signs.append(RULES["N16"].sign(words, {"share": low / seen, "eps": eps}, hit=low, of=seen))
    return f"{plural(seen, 'second moment')} compared with ε", signs


def _average(found: Mapping[str, OneState], step: float) -> Said:
    held = {fqn: sums.averaged for fqn, sums in found.items() if sums.averaged[1]}
    if not held or step <= 0:
        if step > 0 and found:
            return Inapplicable("no average of the weights is stored")
        return "the step is unknown" if found else "no values were read"
    signs = []
    if not any(differ for differ, _ in held.values()):
        of = sum(count for _, count in held.values())
        words = (
            f"all {plural(of, 'element')} of {plural(len(held), 'weight')} equal their average bit for bit "
            f"at step {step:,.0f}"
        )
        signs.append(RULES["N21"].sign(words, {"step": step}, list(held)[:LIST], hit=len(held), of=len(held)))
    return f"{plural(len(held), 'parameter')} compared with their averages", signs


def _clip(state: State, found: Mapping[str, OneState], earlier: State | None) -> Said:
    facts = state.facts
    clips = [one.facts.value("clip") for one in (state, earlier) if one is not None]
    clip = max((float(one) for one in clips if one), default=0.0)
    held = {fqn: sums.numbers["exp_avg_sq"].total for fqn, sums in found.items() if "exp_avg_sq" in sums.numbers}
    if not clip or not all(clips) or not held:
        return "no gradient clip is stored, or no second moments are stored"
    kinds = {state.dtype(roles["exp_avg_sq"]) for roles in state.params.values() if "exp_avg_sq" in roles}
    if kinds & {"bfloat16", "float16"}:
        return "16-bit second moments are rounded up where they should decay, so they have no such bound"
    if earlier is not None and earlier.facts.betas != facts.betas:
        return "β2 changed, so the second moments have no such bound"
    if facts.decoupled is not True or facts.betas is None:
        return "weight decay is added to the gradient after the clip (Adam with L2), or the betas are unknown"
    step = max(facts.steps.counts, default=0) or facts.step or 0  # of the parameter with most updates
    # gradients of parameters with fewer updates may have been clipped without one another
    total = sum(one for fqn, one in held.items() if facts.steps.by_name.get(fqn, step) == step)
    total = max(total, *held.values())
    bound = clip * clip * (1 - facts.betas[1] ** step) if step else clip * clip
    signs = []
    if math.isfinite(total) and total > bound * (1 + SLACK):
        words = f"second moments add up to {total:.4g}; a gradient clipped at {clip:g} leaves at most {bound:.4g}"
        signs.append(RULES["S19"].sign(words, {"sum": total, "bound": bound, "clip": clip}, hit=1, of=1))
    return f"Σv = {total:.3g}, bound {bound:.3g}", signs


def _groups(state: State) -> Said:
    decays: dict[str, dict[bool, list[float]]] = {}  # of each optimizer: matrices of one, vectors of another may differ
    grouped = {fqn: roles for fqn, roles in state.params.items() if state.facts.group_of(fqn) is not None}
    named = {fqn: roles for fqn, roles in grouped.items() if not is_numbered(fqn)}  # numbered state is of the same
    for fqn, roles in (named or grouped).items():
        group, position = state.facts.group_of(fqn), roles.get("param", roles.get("exp_avg"))
        if group is not None and group.weight_decay is not None and position is not None:
            both = decays.setdefault(group.optimizer.family, {True: [], False: []})
            both[len(state.shape(position)) > 1].append(group.weight_decay)
    both = max(decays.values(), key=lambda one: min(map(len, one.values())), default={True: [], False: []})
    matrices, vectors = both[True], both[False]
    if not matrices or not vectors:
        return "no optimizer has param groups with known matrices and vectors"
    signs = []
    bare, decayed = sum(not one for one in matrices), sum(one > 0 for one in vectors)
    if 10 * bare >= 9 * len(matrices) and 10 * decayed >= 9 * len(vectors):
        words = (
            f"{decayed:,} of {plural(len(vectors), 'vector')} decay, but {bare:,} of {len(matrices):,} matrices do not"
        )
        evidence = {"vectors": decayed, "matrices": bare}
        signs.append(RULES["N27"].sign(words, evidence, hit=bare + decayed, of=len(matrices) + len(vectors)))
    return f"weight decay of {plural(len(matrices) + len(vectors), 'parameter')}", signs


def _fqns(state: State, rows: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(state.ckpt.fqns[at] or state.ckpt.catalog.keys[at] for at in rows[:LIST]))
