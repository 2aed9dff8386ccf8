"""What rows and columns of one checkpoint's matrices tell of its layout: which tensor a state belongs to, which rows.

::

    column profile of exp_avg_sq    gate ▂▅▁▇▃  =  up ▂▅▁▇▃     both see the same input, so that they are alike (N5)
    row profile of exp_avg_sq       q q q q k k v v             levels of q, k, v: rows in another order mix them (N17)
    rows without a gradient         vocabulary │ padding        all of them belong into the padding (N20)
    the weights themselves          alike in every row          just drawn, while other layers' are not (N29)

Statistics but for the padding: they warn. What rows and columns do not tell: whether gate and up, or the halves of a
rotary embedding, are exchanged, and which of two layers is which (measured in the lab, catalogue 3.6).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workbench.doctor.facts.evidence import State
from workbench.doctor.facts.state import TrainingState
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, many, register
from workbench.doctor.passes.one import OneState
from workbench.doctor.passes.profiles import Profile

__all__ = ["check_layout"]

Array = np.ndarray[Any, Any]
DRAWN, TRAINED = 4.0, 12.0  #: standard deviations from independent numbers: what was just drawn, what was not
OTHER, MARGIN = 0.9, 0.2  #: correlation of a profile with another layer's, and how much that is above its own
EXPLAINED, BETTER = 0.3, 0.2  #: share of variance that a wrong order of rows explains, and above the right one's
ALONE, SPREADS = 6.0, 10.0  #: octaves above the second largest, and standard deviations above the mean
LIST = 100
LIKE = 3  #: trained matrices beside which one that was just drawn stands out
LAYERS = 400  #: matrices whose profiles are compared with each other

register(
    Rule("N29", "a matrix that was never trained", ("A2", "F2"), "one", "updates leave traces in rows and columns",
         f"independent numbers to {DRAWN:g} standard deviations, {LIKE} others beyond {TRAINED:g}",
         "catalogue A2; χ² of row and column mean squares, kurtosis", "warn", "frozen matrices",
         "list the keys that the load did not find"),
    Rule("N5", "second moments of another layer", ("B5", "E13"), "one", "gate and up see one input",
         f"column profile like another layer's (r > {OTHER:g}), {MARGIN:g} above its own partner's",
         "catalogue 3.6: 0.99 within a layer, up to 0.69 across", "warn", "L2 in the gradient hides it; never fired so",
         "save optimizer states by name; compare with the checkpoint before"),
    Rule("N17", "rows of q, k and v in another order", ("E4", "E1", "E6"), "one", "q, k and v differ in gradient scale",
         f"another order explains {EXPLAINED:.0%} of log exp_avg_sq by rows, {BETTER:.0%} more than the stated one",
         "catalogue 3.6 and E4", "warn", "models in which q, k and v have equal scales: those do not fire",
         "convert between grouped and contiguous rows when q, k, v are split or fused"),
    Rule("N20", "trained rows in the padding of the vocabulary", ("E11", "F7", "E1"), "one",
         "rows beyond the vocabulary see no gradient where others see none either",
         "as many rows below the vocabulary without a gradient", "exact where the logits of the padding are masked",
         "error", "tokens added behind the stated vocabulary (warn)",
         "pad the whole vocabulary at its end, not each rank's part"),
    Rule("N28", "a second moment that stands alone", ("G3",), "one", "v is nearly a product of its row and its column",
         f"{ALONE:g} octaves above the second largest, {SPREADS:g} standard deviations", "measured in the lab: up to 2",
         "warn", "a gradient that only ever hit one element",
         "compare with an older checkpoint: a flipped exponent bit freezes that weight"),
)  # fmt: skip

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = ("lm_head.weight", "output_layer.weight", "output.weight")
_SPLIT = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"), ("query", "key", "value"), ("q", "k", "v"))
_GROUPED = ("linear_qkv", "query_key_value")  #: fused by group of queries: Megatron, GPT-NeoX, BLOOM
_GATES = (("gate_proj", "up_proj"), ("w1", "w3"))
Said = tuple[str, list[Sign]] | str  #: what was looked at, and its signs; or why nothing was


def check_layout(state: State, found: Mapping[str, OneState]) -> Outcome:
    """The rules on profiles; none is checked where there are no second moments."""
    outcome = Outcome()
    profiles = {fqn: sums.profile for fqn, sums in found.items() if sums.profile is not None}
    step = state.facts.step or state.facts.steps.usual or 0
    every: dict[str, Said] = {
        "N29": _drawn(profiles, found, step), "N5": _gates(profiles), "N17": _queries(profiles, state.facts),
        "N20": _padding(profiles, state.facts), "N28": _alone(profiles),
    }  # fmt: skip
    for rule, said in every.items():
        if isinstance(said, str):
            outcome.not_checked[rule] = said
            continue
        outcome.checked[rule], signs = said[0], said[1]
        outcome.signs += signs
    return outcome


def _drawn(profiles: Mapping[str, Profile], found: Mapping[str, OneState], step: float) -> Said:
    families: dict[tuple[str, tuple[int, int]], list[str]] = defaultdict(list)
    for fqn, profile in profiles.items():
        moments = found[fqn].numbers.get("exp_avg_sq")
        if profile.drawn is not None and (moments is None or moments.zeros < moments.count):
            families[_NUMBER.sub("#", fqn), profile.shape].append(fqn)
    families = {name: fqns for name, fqns in families.items() if len(fqns) > LIKE}
    if not families:
        return Inapplicable(f"no {LIKE + 1} layers of matrices are stored")
    if step <= 0:
        return "no step is known"
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
        words = f"{_some(hits)}: numbers as they are drawn{law} at step {step:,.0f}, unlike the same of other layers"
        evidence = {"step": step, "deviations": {fqn: _worst(profiles[fqn]) for fqn in hits[:LIST]}}
        signs.append(RULES["N29"].sign(words, evidence, hits[:LIST], hit=len(hits), of=len(profiles)))
    return f"{sum(map(len, families.values())):,} matrices against their like in other layers", signs


def _worst(profile: Profile) -> float:
    return 0.0 if profile.drawn is None else profile.drawn.worst


def _uneven(profile: Profile) -> float:
    """By rows or columns: tails alone may be one damaged element."""
    return 0.0 if profile.drawn is None else max(profile.drawn.rows, profile.drawn.columns)


def _gates(profiles: Mapping[str, Profile]) -> Said:
    """Each gate against each up, and where both are fused each half against each."""
    names: list[tuple[str, str]] = []
    columns: list[Array] = []
    for fqn, profile in profiles.items():
        for gate, up in _GATES:
            other = re.sub(rf"(?<![^.]){gate}(?=\.)", up, fqn)
            if profile.columns is not None and other != fqn and other in profiles:
                partner = profiles[other].columns
                if partner is not None and partner.shape == profile.columns.shape:
                    names.append((fqn, other))
                    columns += [profile.columns.sum(axis=0), partner.sum(axis=0)]
        if profile.columns is not None and re.search(r"(?<![^.])(?:linear_fc1|gate_up_proj|dense_h_to_4h)\.", fqn):
            names.append((fqn, fqn))
            columns += list(profile.columns)
    lengths = {len(column) for column in columns}
    if len(names) < 2 or len(lengths) > 1 or len(names) > LAYERS:
        return "no two layers whose gate and up (or halves of one) have second moments"
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
            f"columns of exp_avg_sq of {_some([pair[0] for pair in hits])} are like another layer's (r {worst[1]:.2f}) "
            f"and not like their own partner's (r {worst[0]:.2f}): states of other parameters"
        )
        tensors = list(dict.fromkeys(name for pair in hits for name in pair))
        evidence = {"own": worst[0], "other": worst[1], "layers": len(hits)}
        signs.append(RULES["N5"].sign(words, evidence, tensors[:LIST], hit=len(hits), of=len(names)))
    return f"{many(len(names), 'layer')}' gate and up against each other", signs


def _queries(profiles: Mapping[str, Profile], facts: TrainingState) -> Said:
    """The order of rows that the names say against other orders, as one-way analyses of variance."""
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
    layers = max(len(names) // (3 if names and not _fused(names[0]) else 1), 1)
    if not names:
        return "no attention whose q, k and v have second moments, or whose heads fit its rows"
    signs = []
    base = float(right[0] / right[1]) if right[1] else 0.0
    for name, share in wrong.items():
        best = float(share[0] / share[1]) if share[1] else 0.0
        if best > EXPLAINED and best > base + BETTER and 3 * wins[name] >= 2 * layers:
            words = (
                f"q, k and v are told apart by rows read as {name} ({best:.0%} of the variance of log exp_avg_sq), "
                f"not as they are stored ({base:.0%}): rows were split or fused in another layout"
            )
            evidence = {"right": base, "other": best, "layout": name, "layers": layers}
            signs.append(RULES["N17"].sign(words, evidence, names[:LIST], hit=wins[name], of=layers, causes=("E4",)))
    return f"rows of q, k and v in {layers:,} layers", signs


def _stacks(profiles: Mapping[str, Profile]) -> list[tuple[list[str], Array, bool]]:
    """``(fqns, rows of q, k, v one after the other, whether they are fused by groups)``."""
    found = []
    for fqn, profile in profiles.items():
        if profile.rows is None:
            continue
        if _fused(fqn):
            found.append(([fqn], profile.rows, True))
        for query, key, value in _SPLIT:
            if re.search(rf"(?<![^.]){query}\.weight$", fqn):
                trio = [fqn, *(re.sub(rf"(?<![^.]){query}(?=\.weight$)", name, fqn) for name in (key, value))]
                rows = [profiles[name].rows for name in trio if name in profiles]
                if len(rows) == 3 and all(one is not None for one in rows):
                    found.append((trio, np.concatenate([one for one in rows if one is not None]), False))
    return found


def _fused(fqn: str) -> bool:
    return any(re.search(rf"(?<![^.]){name}\.", fqn) for name in _GROUPED)


def _heads(
    rows: int, heads: int, facts: TrainingState, profiles: Mapping[str, Profile], fqns: Sequence[str]
) -> tuple[int, int, int] | None:
    """Heads, groups and width of a head, if they make up the rows."""
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
    """Which of q, k, v (0, 1, 2) a row is: all of q first; or by group."""
    each = heads // groups
    contiguous = np.repeat([0, 1, 2], [heads * width, groups * width, groups * width])
    return contiguous, np.tile(np.repeat([0, 1, 2], [each * width, width, width]), groups)


def _explained(rows: Array, labels: Array) -> Array:
    """Sum of squares between the labels' means, and in all."""
    total = float(np.square(rows - rows.mean()).sum())
    within = sum(float(np.square(rows[labels == k] - rows[labels == k].mean()).sum()) for k in range(3))
    return np.array([total - within, total])


def _padding(profiles: Mapping[str, Profile], facts: TrainingState) -> Said:
    vocab = facts.value("vocab_size")
    tables = {f: p for f, p in profiles.items() if f.endswith((*_EMBEDDING, *_HEAD)) and vocab and p.shape[0] > vocab}
    if not vocab:
        return "no vocabulary is stated"
    if not tables:
        return Inapplicable("no table has more rows than the vocabulary that is stated")
    signs = []
    for fqn, profile in tables.items():
        rows, pad = profile.shape[0], profile.shape[0] - int(vocab)
        idle = np.zeros(rows, bool)
        for start, stop in profile.idle:
            idle[start:stop] = True
        below, trained = int(idle[: int(vocab)].sum()), int((~idle[int(vocab) :]).sum())
        if not trained or not below or idle.all():
            continue  # logits of the padding that are not masked train all of it, and leave no row idle
        causes, proved = _where(profile, int(vocab), pad, trained)
        first = int(np.flatnonzero(~idle[int(vocab) :])[0]) + int(vocab)
        words = (
            f"{trained:,} of the {pad:,} rows beyond the vocabulary ({int(vocab):,}) of {fqn!r} were trained, row "
            f"{first:,} first, and {below:,} rows below it were not (rows {_spans(profile.idle)})"
        )
        evidence = {"vocabulary": int(vocab), "rows": rows, "trained": trained, "idle": below,
                    "runs": [list(run) for run in profile.idle[:LIST]]}  # fmt: skip
        grave = "error" if proved and below >= trained else "warn"
        signs.append(RULES["N20"].sign(words, evidence, (fqn,), hit=trained, of=pad, severity=grave, causes=causes))
    return f"{len(tables):,} tables of {max(p.shape[0] for p in tables.values()):,} rows", signs


def _where(profile: Profile, vocab: int, pad: int, trained: int) -> tuple[tuple[str, ...], bool]:
    """What the places of the idle rows say, and whether added tokens could not leave them so."""
    rows = profile.shape[0]
    first, last = profile.idle[0], profile.idle[-1]
    if first == (0, trained) and (trained == pad or last == (vocab + trained, rows)):
        return ("F7", "E11"), True  # all rows moved up
    if len(profile.idle) == 1 and first[1] - first[0] == pad == trained:
        return ("E1", "E11"), True  # the padding in one piece, elsewhere: parts of the table in another order
    return ("E11", "F7"), _again(profile)


def _again(profile: Profile) -> bool:
    """Whether the idle rows are pieces of about one length at the ends of equal parts, as padding by rank is."""
    rows, runs = profile.shape[0], profile.idle
    parts = len(runs)
    if parts < 2 or rows % parts:
        return False
    return all(stop == (number + 1) * (rows // parts) for number, (_, stop) in enumerate(runs))


def _alone(profiles: Mapping[str, Profile]) -> Said:
    looked = {fqn: profile for fqn, profile in profiles.items() if profile.at >= 0}
    if not looked:
        return "no matrix has second moments in all its rows"
    hits = [f for f, p in looked.items() if p.above > p.next + ALONE and p.above > SPREADS * max(p.spread, 0.1)]
    signs = []
    if hits:
        most = max(looked[fqn].above for fqn in hits)
        where = {fqn: list(np.unravel_index(looked[fqn].at, looked[fqn].shape)) for fqn in hits[:LIST]}
        places = {fqn: [int(one) for one in place] for fqn, place in where.items()}
        words = f"an exp_avg_sq of {_some(hits)} is 2^{most:.1f} times what its row and column let expect, alone"
        evidence = {"octaves": most, "at": places}
        signs.append(RULES["N28"].sign(words, evidence, hits[:LIST], hit=len(hits), of=len(looked)))
    return f"{many(len(looked), 'matrice')}", signs


def _number(facts: TrainingState, *names: str) -> int | None:
    for name in names:
        told = facts.args.get(name) or facts.model.get(name)
        if told is not None and isinstance(told.value, int) and told.value > 0:
            return int(told.value)
    return None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more


def _spans(runs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{a:,} to {b - 1:,}" for a, b in runs[:4]) + (" …" if len(runs) > 4 else "")
