"""Rules on the layout of one checkpoint, from row and column profiles of its matrices.

::

    column profile of exp_avg_sq    gate ▂▅▁▇▃  =  up ▂▅▁▇▃     alike, because both have the same input (N5)
    row profile of exp_avg_sq       q q q q k k v v             levels of q, k, v: rows in another order mix them (N17)
    rows without a gradient         vocabulary │ padding        all of them belong to the padding (N20)
    the weights themselves          alike in every row          freshly initialized, unlike other layers (N29)

All except the padding are statistics, so they only warn. Rows and columns do not show whether gate and up, or the
halves of a rotary embedding, are swapped, or which of two layers is which (measured in the lab, catalogue 3.6).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from workbench.core.arrays import Array
from workbench.core.words import plural
from workbench.doctor.facts.evidence import State
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, many, register, some
from workbench.doctor.passes.one import OneState
from workbench.doctor.passes.profiles import MatrixProfile
from workbench.names.weights import parse

DRAWN, TRAINED = 4.0, 12.0  #: standard deviations from independent numbers: below, fresh; above, trained
OTHER, MARGIN = 0.9, 0.2  #: correlation of a profile with another layer's, and its excess over its own
EXPLAINED, BETTER = 0.3, 0.2  #: share of variance that a wrong order of rows explains, and above the right one's
ALONE, SPREADS = 6.0, 10.0  #: octaves above the second largest, and standard deviations above the mean
LIST = 100
LIKE = 3  #: trained matrices that are needed to recognise a fresh one
LAYERS = 400  #: matrices whose profiles are compared with each other

register(
    Rule("N29", "a matrix that was never trained", ("A2", "F2"), "one", "updates leave traces in rows and columns",
         f"independent numbers to {DRAWN:g} standard deviations, {LIKE} others beyond {TRAINED:g}",
         "catalogue A2; χ² of row and column mean squares, kurtosis", "warn", "frozen matrices",
         "list the keys that the load did not find"),
    Rule("N5", "second moments of another layer", ("B5", "E13"), "one", "gate and up have the same input",
         f"column profile like another layer's (r > {OTHER:g}), {MARGIN:g} above its own partner's",
         "catalogue 3.6: 0.99 within a layer, up to 0.69 across", "warn",
         "none seen; L2 in the gradient hides the likeness",
         "save the optimizer state by name; compare with the previous checkpoint"),
    Rule("N17", "rows of q, k and v in another order", ("E4", "E1", "E6"), "one", "q, k and v differ in gradient scale",
         f"another order explains {EXPLAINED:.0%} of log exp_avg_sq by rows, {BETTER:.0%} more than the stated one",
         "catalogue 3.6 and E4", "warn", "none seen; models with equal scales of q, k and v do not fire",
         "convert between grouped and contiguous rows when q, k, v are split or fused"),
    Rule("N20", "trained rows in the padding of the vocabulary", ("E11", "F7", "E1"), "one",
         "rows beyond the vocabulary get no gradient if other rows get none either",
         "as many rows below the vocabulary without a gradient", "exact if the logits of the padding are masked",
         "error", "tokens added beyond the stated vocabulary (warn)",
         "pad the whole vocabulary at its end, not each rank's part"),
    Rule("N28", "an isolated second moment", ("G3",), "one", "v is nearly a product of its row and its column",
         f"{ALONE:g} octaves above the second largest, {SPREADS:g} standard deviations", "measured in the lab: up to 2",
         "warn", "a gradient that only ever hit one element",
         "compare with an older checkpoint: a flipped exponent bit freezes that weight"),
)  # fmt: skip

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
Said = tuple[str, list[Sign]] | str  #: what was examined, and its signs; or why nothing was


def check_layout(state: State, found: Mapping[str, OneState]) -> Outcome:
    """Apply the rules on profiles; without second moments, none is checked."""
    outcome = Outcome()
    profiles = {fqn: sums.profile for fqn, sums in found.items() if sums.profile is not None}
    step = state.facts.step or state.facts.steps.usual or 0
    every: dict[str, Said] = {
        "N29": _drawn(profiles, found, step),
        "N5": _gates(profiles),
        "N17": _queries(profiles, state.facts),
        "N20": _padding(profiles, state.facts),
        "N28": _alone(profiles),
    }
    for rule, result in every.items():
        if isinstance(result, str):
            outcome.not_checked[rule] = result
            continue
        outcome.checked[rule], signs = result
        outcome.signs += signs
    return outcome


def _drawn(profiles: Mapping[str, MatrixProfile], found: Mapping[str, OneState], step: float) -> Said:
    families: dict[tuple[str, tuple[int, int]], list[str]] = defaultdict(list)
    for fqn, profile in profiles.items():
        moments = found[fqn].numbers.get("exp_avg_sq")
        if profile.drawn is not None and (moments is None or moments.zeros < moments.count):
            families[_NUMBER.sub("#", fqn), profile.shape].append(fqn)
    families = {name: fqns for name, fqns in families.items() if len(fqns) > LIKE}
    if not families:
        return Inapplicable(f"fewer than {LIKE + 1} layers of matrices are stored")
    if step <= 0:
        return "the step is unknown"
    hits = []
    for fqns in families.values():
        new = [fqn for fqn in fqns if _worst(profiles[fqn]) < DRAWN]
        rest = [fqn for fqn in fqns if fqn not in new]
        if len(rest) >= max(LIKE, len(new)) and all(_uneven(profiles[fqn]) > TRAINED for fqn in rest):
            hits += new
    signs = []
    if hits:
        drawn = profiles[hits[0]].drawn
        law = "" if drawn is None else f" ({drawn.law})"
        words = f"{some(hits)}: values as at initialization{law} at step {step:,.0f}, unlike other layers' matrices"
        evidence = {"step": step, "deviations": {fqn: _worst(profiles[fqn]) for fqn in hits[:LIST]}}
        signs.append(RULES["N29"].sign(words, evidence, hits[:LIST], hit=len(hits), of=len(profiles)))
    return f"{sum(map(len, families.values())):,} matrices compared with the same in other layers", signs


def _worst(profile: MatrixProfile) -> float:
    return 0.0 if profile.drawn is None else profile.drawn.worst


def _uneven(profile: MatrixProfile) -> float:
    """Return the larger deviation of rows or columns; tails may be a single damaged element."""
    return 0.0 if profile.drawn is None else max(profile.drawn.rows, profile.drawn.columns)


def _gates(profiles: Mapping[str, MatrixProfile]) -> Said:
    """Compare each gate with each up, and each half with each if they are fused."""
    names: list[tuple[str, str]] = []
    columns: list[Array] = []
    beside = _by_owner(profiles)
    for fqn, profile in profiles.items():
        weight = parse(fqn)
        if profile.columns is None:
            continue
        if len(weight.parts) > 1:
            names.append((fqn, fqn))
            columns += list(profile.columns)
        other = beside.get((weight.owner, "up", weight.leaf)) if weight.kind == "gate" else None
        partner = None if other is None else profiles[other].columns
        if other is not None and partner is not None and partner.shape == profile.columns.shape:
            names.append((fqn, other))
            columns += [profile.columns.sum(axis=0), partner.sum(axis=0)]
    lengths = {len(column) for column in columns}
    if len(names) < 2 or len(lengths) > 1 or len(names) > LAYERS:
        return "fewer than two layers have second moments of gate and up (separate or fused)"
    table = np.stack(columns).astype(np.float64)
    table -= table.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    if not (norms > 0).all():
        return "second moments of gate and up are all alike"
    alike = (table / norms) @ (table / norms).T
    hits, worst = [], (1.0, 1.0)
    for number, pair in enumerate(names):
        own = alike[2 * number, 2 * number + 1]
        rest = np.delete(alike[2 * number : 2 * number + 2], [2 * number, 2 * number + 1], axis=1)
        best = float(rest.max(axis=1).max())
        if best > OTHER and best > own + MARGIN:
            hits.append(pair)
            worst = min(worst, (float(own), best))
    signs = []
    if hits:
        words = (
            f"columns of exp_avg_sq of {some([pair[0] for pair in hits])} match another layer's (r {worst[1]:.2f}) "
            f"and not their own partner's (r {worst[0]:.2f}): the state belongs to other parameters"
        )
        tensors = list(dict.fromkeys(name for pair in hits for name in pair))
        evidence = {"own": worst[0], "other": worst[1], "layers": len(hits)}
        signs.append(RULES["N5"].sign(words, evidence, tensors[:LIST], hit=len(hits), of=len(names)))
    return f"{many(len(names), 'layer')}' gate and up compared with each other", signs


def _queries(profiles: Mapping[str, MatrixProfile], facts: TrainingState) -> Said:
    """Compare the row order that the names state with other orders, by one-way analyses of variance."""
    heads = _number(facts, "num_attention_heads", "n_head", "num_heads")
    if not heads:
        return "the number of heads is not stored"
    right = np.zeros(2)
    wrong: dict[str, Array] = defaultdict(lambda: np.zeros(2))
    wins: dict[str, int] = defaultdict(int)
    names: list[str] = []
    for fqns, rows, fused in _stacks(profiles):
        shape = _heads(len(rows), heads, facts, profiles, fqns)
        if shape is None:
            continue
        contiguous, grouped = _labels(*shape)
        if (contiguous == grouped).all():
            continue
        order = np.argsort(grouped, kind="stable")
        stated = rows[order] if fused else rows
        mine = _explained(stated, contiguous)
        right += mine
        names += fqns
        others = {"grouped": _explained(stated, grouped)}
        if fused:
            others["contiguous"] = _explained(rows, contiguous)
        for name, share in others.items():
            wrong[name] += share
            wins[name] += bool(share[0] * mine[1] > mine[0] * share[1])
    layers = max(len(names) // (3 if names and not parse(names[0]).grouped else 1), 1)
    if not names:
        return "no attention layer has second moments of q, k and v and heads that fit its rows"
    signs = []
    base = float(right[0] / right[1]) if right[1] else 0.0
    for name, share in wrong.items():
        best = float(share[0] / share[1]) if share[1] else 0.0
        if best > EXPLAINED and best > base + BETTER and 3 * wins[name] >= 2 * layers:
            words = (
                f"rows read as {name} separate q, k and v ({best:.0%} of the variance of log exp_avg_sq), "
                f"rows as stored do not ({base:.0%}): rows were split or fused in another layout"
            )
            evidence = {"right": base, "other": best, "layout": name, "layers": layers}
            signs.append(RULES["N17"].sign(words, evidence, names[:LIST], hit=wins[name], of=layers, causes=("E4",)))
    return f"rows of q, k and v in {plural(layers, 'layer')}", signs


def _stacks(profiles: Mapping[str, MatrixProfile]) -> list[tuple[list[str], Array, bool]]:
    """Return ``(fqns, rows of q, k, v one after the other, whether they are fused by groups)``."""
    found: list[tuple[list[str], Array, bool]] = []
    beside = _by_owner(profiles)
    for fqn, profile in profiles.items():
        weight = parse(fqn)
        if profile.rows is not None and weight.grouped:
            found.append(([fqn], profile.rows, True))
        elif weight.kind == "q" and weight.leaf == "weight":
            trio = [name for kind in "qkv" if (name := beside.get((weight.owner, kind, "weight")))]
            rows = [rows for name in trio if (rows := profiles[name].rows) is not None]
            if len(rows) == 3:
                found.append((trio, np.concatenate(rows), False))
    return found


def _by_owner(fqns: Iterable[str]) -> dict[tuple[object, str, str], str]:
    """Return the names by owner, kind and leaf."""
    return {(weight.owner, weight.kind, weight.leaf): fqn for fqn in fqns for weight in (parse(fqn),)}


def _heads(
    rows: int, heads: int, facts: TrainingState, profiles: Mapping[str, MatrixProfile], fqns: Sequence[str]
) -> tuple[int, int, int] | None:
    """Return the number of heads and groups and the width of a head, if they match the rows."""
    if len(fqns) == 3:
        width, left = divmod(profiles[fqns[0]].shape[0], heads)
        groups, odd = divmod(profiles[fqns[1]].shape[0], width) if width else (0, 1)
    else:
        hidden = _number(facts, "hidden_size") or profiles[fqns[0]].shape[1]
        width, left = _number(facts, "kv_channels", "head_dim") or hidden // heads, 0
        twice, odd = divmod(rows - heads * width, width) if width else (0, 1)
        groups, odd = twice // 2, odd + twice % 2
    fits = not left and not odd and groups > 0 and heads % groups == 0 and (heads + 2 * groups) * width == rows
    return (heads, groups, width) if fits else None


def _labels(heads: int, groups: int, width: int) -> tuple[Array, Array]:
    """Return q, k or v (0, 1, 2) of each row, for contiguous rows and for rows grouped by head."""
    each = heads // groups
    contiguous = np.repeat([0, 1, 2], [heads * width, groups * width, groups * width])
    return contiguous, np.tile(np.repeat([0, 1, 2], [each * width, width, width]), groups)


def _explained(rows: Array, labels: Array) -> Array:
    """Return the sum of squares between the labels' means, and the total."""
    total = float(np.square(rows - rows.mean()).sum())
    within = sum(float(np.square(rows[labels == k] - rows[labels == k].mean()).sum()) for k in range(3))
    return np.array([total - within, total])


def _padding(profiles: Mapping[str, MatrixProfile], facts: TrainingState) -> Said:
    vocab = facts.value("vocab_size")
    tables = {
        fqn: profile
        for fqn, profile in profiles.items()
        if vocab and profile.shape[0] > vocab and (w := parse(fqn)).kind in ("embed", "head") and w.leaf == "weight"
    }
    if not vocab:
        return "the vocabulary size is not stored"
    if not tables:
        return Inapplicable("no table has more rows than the stated vocabulary")
    signs = []
    for fqn, profile in tables.items():
        rows, pad = profile.shape[0], profile.shape[0] - int(vocab)
        idle = np.zeros(rows, bool)
        for start, stop in profile.idle:
            idle[start:stop] = True
        below, trained = int(idle[: int(vocab)].sum()), int((~idle[int(vocab) :]).sum())
        if not trained or not below or idle.all():
            continue  # unmasked logits of the padding train all of it and leave no row idle
        causes, proved = _where(profile, int(vocab), pad, trained)
        first = int(np.flatnonzero(~idle[int(vocab) :])[0]) + int(vocab)
        words = (
            f"{many(trained, 'row')} of {fqn!r} beyond the vocabulary of {int(vocab):,} {_were(trained)} trained (the "
            f"first is row {first:,}), and {many(below, 'row')} within it {_were(below)} not (rows not trained: "
            f"{_spans(profile.idle)})"
        )
        evidence = {
            "vocabulary": int(vocab),
            "rows": rows,
            "trained": trained,
            "idle": below,
            "runs": [list(run) for run in profile.idle[:LIST]],
        }
        grave = "error" if proved and below >= trained else "warn"
        signs.append(RULES["N20"].sign(words, evidence, (fqn,), hit=trained, of=pad, severity=grave, causes=causes))
    return f"{plural(len(tables), 'table')} of {plural(max(p.shape[0] for p in tables.values()), 'row')}", signs


def _where(profile: MatrixProfile, vocab: int, pad: int, trained: int) -> tuple[tuple[str, ...], bool]:
    """Return the causes that the places of the idle rows suggest, and whether they exclude added tokens."""
    rows = profile.shape[0]
    first, last = profile.idle[0], profile.idle[-1]
    if first == (0, trained) and (trained == pad or last == (vocab + trained, rows)):
        return ("F7", "E11"), True  # all rows moved up
    if len(profile.idle) == 1 and first[1] - first[0] == pad == trained:
        return ("E1", "E11"), True  # the padding is in one piece elsewhere: parts of the table are in another order
    return ("E11", "F7"), _again(profile)


def _again(profile: MatrixProfile) -> bool:
    """Return whether the idle rows are at the ends of equal parts, as with padding by rank."""
    rows, runs = profile.shape[0], profile.idle
    parts = len(runs)
    if parts < 2 or rows % parts:
        return False
    return all(stop == (number + 1) * (rows // parts) for number, (_, stop) in enumerate(runs))


def _alone(profiles: Mapping[str, MatrixProfile]) -> Said:
    looked = {fqn: profile for fqn, profile in profiles.items() if profile.at >= 0}
    if not looked:
        return "no matrix has second moments in all its rows"
    hits = [f for f, p in looked.items() if p.above > p.next + ALONE and p.above > SPREADS * max(p.spread, 0.1)]
    signs = []
    if hits:
        most = max(looked[fqn].above for fqn in hits)
        where = {fqn: list(np.unravel_index(looked[fqn].at, looked[fqn].shape)) for fqn in hits[:LIST]}
        places = {fqn: [int(one) for one in place] for fqn, place in where.items()}
        words = f"an isolated exp_avg_sq of {some(hits)} is 2^{most:.1f} times the value its row and column suggest"
        evidence = {"octaves": most, "at": places}
        signs.append(RULES["N28"].sign(words, evidence, hits[:LIST], hit=len(hits), of=len(looked)))
    return f"{many(len(looked), 'matrice')}", signs


def _number(facts: TrainingState, *names: str) -> int | None:
    for name in names:
        stated = facts.args.get(name) or facts.model.get(name)
        if stated is not None and isinstance(stated.value, int) and stated.value > 0:
            return int(stated.value)
    return None


def _spans(runs: Sequence[tuple[int, int]]) -> str:
    spans = ", ".join(f"{a:,} to {b - 1:,}" if b - a > 1 else f"{a:,}" for a, b in runs[:4])
    return spans + (" …" if len(runs) > 4 else "")


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
