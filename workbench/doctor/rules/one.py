"""Rules on the values of one checkpoint: the S rules of the catalogue that need its numbers.

``rules.files`` has zero pages (S11), replicas (S12) and coverage, ``rules.layout`` has rows and columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from workbench.core.words import plural
from workbench.doctor.facts.evidence import State
from workbench.doctor.ledger.sign import RULES, Inapplicable, Outcome, Rule, Sign, register
from workbench.doctor.passes.blocks import SlotBlock, TensorSlot, stream
from workbench.doctor.passes.one import Numbers, OneState
from workbench.errors import WorkbenchError, WorkerError
from workbench.names.weights import tied_pairs

OUTLIER = 300.0  #: times the median magnitude (catalogue, S02)
IMPOSSIBLE = 2.0**32  #: times the median that no training makes one element of a tensor
GAP = 4  #: empty octaves below it: trained outliers form a tail, a flipped exponent bit is isolated
LOW_SHARE = 0.01  #: share of numbers whose low bits are zero; by chance 2⁻¹⁶ (catalogue, D1)
HALF = 0.5  #: the same for moments
LOW_LEAST = 5  #: fewest such numbers; 5 of 500 by chance (2⁻¹³ each, for fp16) happens once in 10⁸ tensors
OTHER_BETAS = 8.0  #: |m| over √(K·v) that a change of betas alone leaves
SAMPLE = 64  #: elements from which a tensor is checked for outliers and copies
LIST = 100
LAWS = "workbench.doctor.laws"
#: State that optimizers keep for a parameter that they train.
STATES = frozenset({"exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "momentum", "square_avg", "sum"})


def _count(one: OneState) -> int:
    return one.count


def _second(one: OneState) -> int:
    return int(one.numbers["exp_avg_sq"].count) if "exp_avg_sq" in one.numbers else 0


def _seen(one: OneState) -> int:
    """Return the number of elements of a parameter that gradients reached."""
    v = one.numbers.get("exp_avg_sq")
    return int(v.count - v.zeros) if v is not None else 0


register(
    Rule("S01", "not a number", ("G1", "G9"), "one", "every stored number is finite", "exact", "IEEE 754",
         "error", "none in weights, masters and moments", "go back to a checkpoint without them", looked=_count),
    Rule("S02", "an outlier", ("G1",), "one", "a flipped exponent bit scales a number by a power of 2 up to 2^128",
         f"largest over median > {OUTLIER:g} (a warning; an error above 2^32), with {GAP} empty octaves below it",
         "catalogue, G1", "error",
         "trained models have outlier weights of 100 to 1000 times the median: compare with an older checkpoint",
         "compare the tensor with an older checkpoint", looked=_count),
    Rule("S03", "a negative second moment", ("G3",), "one", "v is a mean of squares", "exact", LAWS, "error", "none",
         "restore the file: a bit was flipped, or the bytes belong to another tensor", looked=_second),
    Rule("S04", "moments that do not belong together", ("B6", "B4", "G3", "G5"), "one", "m² ≤ K·v elementwise",
         "exact, with rounding", LAWS, "error", "beta1 or beta2 was different and no file stores it",
         "load both moments from one save", looked=lambda one: one.bound.of),
    Rule("S05", "second moments are zero", ("B3", "B4"), "one", "v = 0 only where there never was a gradient",
         "all of a parameter, at step > 0", LAWS, "error", "parameters that never got a gradient; they prove nothing",
         "load the optimizer's state", looked=_second),
    Rule("S08", "weights that differ from their masters", ("D2", "D3", "G6"), "one", "weight = round(master)",
         "bit for bit; a difference of up to 1 ulp is a warning", "catalogue, 3.4", "error",
         "stochastic rounding and split masters differ by at most 1 ulp",
         "rebuild the weights from the masters", looked=lambda one: one.compared),
    Rule("S09", "masters with 16-bit values", ("D1",), "one", "an update sets low bits",
         f"share > {LOW_SHARE:.0%} and {LOW_LEAST} or more; 2^-16 by chance",
         "catalogue, 3.4", "error", "no update yet since a start from 16-bit weights",
         "load the masters; do not rebuild them from the weights", looked=lambda one: one.low.get("master", (0, 0))[1]),
    Rule("P31", "weights that lost their low bits", ("D7", "D1"), "pair",
         "an update sets low bits of float32 weights, and does not depend on those that they had",
         f"share without them > {LOW_SHARE:.0%} and {LOW_LEAST} or more; at most half of that before; or the change "
         "correlates with what rounding takes away, by 8 standard errors",
         "catalogue, 3.4", "error", "a cast on purpose",
         "save the weights in the type that they are trained in"),
    Rule("S10", "moments with 16-bit values", ("D4",), "one", "an update sets low bits",
         f"share > {LOW_SHARE:.0%} and {LOW_LEAST} or more; 2^-16 by chance",
         "catalogue, D4", "warn", "an optimizer that keeps its moments in 16 bits on purpose",
         "save moments in float32", looked=lambda one: one.low.get("exp_avg_sq", (0, 0))[1]),
    Rule("S13", "a tied head stored separately", ("F2",), "one", "tied tensors are one tensor",
         "both are stored, with optimizer state",
         "catalogue, F2", "error", "models whose config declares them tied although they are not",
         "tie the weights before creating the optimizer"),
    Rule("S14", "a layer twice", ("E9",), "one", "no two trained matrices are equal", "bit for bit", "catalogue, E9",
         "error", "layers shared on purpose and stored under each name with moments; without moments, a warning",
         "check the mapping of pipeline stages to layers", looked=_count),
    Rule("S15", "norms that were never trained", ("A3", "A2"), "one", "a weight that got a gradient changed",
         "all of a vector exactly 1", "catalogue, A3", "error", "16-bit weights whose updates are rounded away",
         "load the norms; the unread keys show which", looked=_seen),
)  # fmt: skip


def judge_one(
    state: State, slots: Sequence[TensorSlot], found: Mapping[str, OneState], earlier: State | None = None
) -> Iterator[Sign]:
    """Yield the signs of a state's sums, except outliers that an ``earlier`` checkpoint already had."""
    shapes = {slot.fqn: slot.shape for slot in slots}
    types = {
        slot.fqn: ""
        if _was_narrow(earlier, slot.fqn, "param")
        else slot.dtype((0, "master")) or slot.dtype((0, "param"))
        for slot in slots
    }
    step = state.facts.step or state.facts.steps.usual or 0
    yield from _numbers(state, found, earlier)
    yield from _moments(found, step)
    yield from _masters(found, step, earlier)
    yield from _copies(state, found, shapes)
    yield from _ones(found, shapes, types, step)


def _numbers(state: State, found: Mapping[str, OneState], earlier: State | None) -> Iterator[Sign]:
    broken, large, negative = [], [], []
    squares = _squares(found)
    for fqn, sums in found.items():
        for role, numbers in sums.numbers.items():
            # an attention mask is -inf at masked positions; no optimizer changes it
            mask = "exp_avg" not in sums.numbers and not numbers.nan and numbers.max in (0.0, 1.0)
            if numbers.nan + numbers.inf and not mask:
                broken.append((fqn, role, numbers.nan + numbers.inf))
            alone = numbers.gap >= GAP and numbers.max > OUTLIER * numbers.median > 0
            if role in ("param", "master") and numbers.count >= SAMPLE and alone:
                if earlier is not None and _was_large(earlier, fqn, role, numbers.max):
                    continue
                large.append((fqn, role, numbers.max / numbers.median))
            if role == "exp_avg_sq" and numbers.negative and squares:
                negative.append((fqn, role, numbers.negative))
    if broken:
        count = sum(one[2] for one in broken)
        words = f"{plural(count, 'element')} of {_names(broken)} {'is' if count == 1 else 'are'} NaN or infinite"
        sign, names = _sign("S01", broken, words, count=count), {one[0] for one in broken}
        if names <= state.unheld and all(one[1] == "param" for one in broken):
            sign = replace(sign, evidence={**sign.evidence, "buffers": sorted(names)[:LIST]})
        yield sign
    if large:
        most = max(one[2] for one in large)
        times = f"{most:,.0f}" if most < 1e9 else f"{most:.3g}"
        yield _sign(
            "S02",
            large,
            f"the largest element, isolated, is {times} times the median magnitude, in {_names(large)}",
            severity="error" if most > IMPOSSIBLE else "warn",
            most=most,
        )
    if negative:
        count = sum(one[2] for one in negative)
        text = f"{plural(count, 'second moment')} {'is' if count == 1 else 'are'} negative in {_names(negative)}"
        yield _sign("S03", negative, text, count=count)


def _squares(found: Mapping[str, OneState]) -> bool:
    """Return whether exp_avg_sq holds squares: not if a quarter or more of each of them is negative."""
    held = [sums.numbers["exp_avg_sq"] for sums in found.values() if "exp_avg_sq" in sums.numbers]
    large = [numbers for numbers in held if numbers.count >= SAMPLE]
    return not large or any(4 * numbers.negative <= numbers.count for numbers in large)


def _was_narrow(earlier: State | None, fqn: str, role: str) -> bool:
    """Return whether it had 16 bits before, in which case low bits of zero do not mean that precision was lost."""
    position = None if earlier is None else earlier.params.get(fqn, {}).get(role)
    if earlier is None or position is None or "master" in earlier.params[fqn]:
        return False
    return earlier.dtype(position) in ("bfloat16", "float16")


def _was_large(earlier: State, fqn: str, role: str, most: float) -> bool:
    """Return whether the earlier tensor already had a number of half that size or more."""
    position = earlier.params.get(fqn, {}).get(role)
    if position is None:
        return False
    tensor = earlier.tensor(position)
    try:
        largest = max((sums.max for _, sums in stream([TensorSlot(fqn, {(0, role): tensor})], _Largest())), default=0.0)
    except WorkerError:
        raise
    except WorkbenchError:
        return False
    return 2 * largest >= most


class _Largest:
    """A fold that collects the numbers of one tensor."""

    def begin(self, slot: TensorSlot) -> Numbers:
        return Numbers()

    def fold(self, state: Numbers, slot: TensorSlot, block: SlotBlock) -> None:
        for values in block.values.values():
            state.take(values)

    def merge(self, state: Numbers, later: Numbers) -> None:
        state.add(later)


def _moments(found: Mapping[str, OneState], step: float) -> Iterator[Sign]:
    broken = [(fqn, "", sums.bound.broken) for fqn, sums in found.items() if sums.bound.broken]
    broken = broken if _squares(found) else []
    if broken:
        count, of = sum(one[2] for one in broken), sum(sums.bound.of for sums in found.values())
        where = {fqn: found[fqn].bound.at for fqn, *_ in broken[:8]}
        text = (
            f"m² > K·v in {count:,} of {of:,} elements: exp_avg and exp_avg_sq of {_names(broken)} do not "
            "belong together"
        )
        # moments from other betas exceed the bound by at most the ratio of their K
        gross = max(found[fqn].bound.worst for fqn, *_ in broken) > OTHER_BETAS
        yield _sign("S04", broken, text, "error" if gross else "warn", elements=count, looked_at=of, first=where)
    held = {fqn: sums for fqn, sums in found.items() if "exp_avg_sq" in sums.numbers}
    zero = [fqn for fqn, sums in held.items() if sums.numbers["exp_avg_sq"].zeros == sums.numbers["exp_avg_sq"].count]
    moving = [
        (fqn, "", 1)
        for fqn in zero
        if "exp_avg" in held[fqn].numbers and held[fqn].numbers["exp_avg"].zeros < held[fqn].numbers["exp_avg"].count
    ]
    if step > 0 and held and (len(zero) == len(held) or moving):
        hit = moving if len(zero) < len(held) else [(fqn, "", 1) for fqn in zero]
        text = f"every second moment is 0 in {len(hit):,} of {plural(len(held), 'parameter')} at step {step:,.0f}"
        yield _sign("S05", hit, text, of=len(held), step=step)


def _masters(found: Mapping[str, OneState], step: float, earlier: State | None) -> Iterator[Sign]:
    odd = [(fqn, "", sums.unrounded) for fqn, sums in found.items() if sums.unrounded]
    if odd:
        count, of = sum(one[2] for one in odd), sum(sums.compared for sums in found.values())
        ulps = max(found[fqn].ulps for fqn, *_ in odd)
        text = (
            f"{count:,} of {of:,} elements of weights differ from their rounded master, by up to "
            f"{plural(ulps, 'unit')} in the last place: {_names(odd)}"
        )
        severity = "error" if ulps > 1 else "warn"
        yield _sign("S08", odd, text, severity, elements=count, looked_at=of, ulps=ulps)
    share_of = {"S09": LOW_SHARE, "S10": HALF}  # early moments use few bits
    for rule, roles in (("S09", ("master",)), ("S10", ("exp_avg", "exp_avg_sq"))):
        low = [
            (fqn, role, sums.low[role][0])
            for fqn, sums in found.items()
            for role in roles
            if not _was_narrow(earlier, fqn, role)
            and sums.low.get(role, (0, 0))[0] >= LOW_LEAST
            and sums.low[role][0] > share_of[rule] * sums.low[role][1] + _added(earlier, fqn, role, sums)
        ]
        if low and step > 0:
            of = sum(found[fqn].low[role][1] for fqn, role, _ in low)
            share = sum(one[2] for one in low) / of
            what = " and ".join(sorted({role for _, role, _ in low}))
            what = "the masters" if what == "master" else what
            text = f"{share:.1%} of the numbers in {what} of {_names(low)} fit into 16 bits; by chance, 0.002% would"
            yield _sign(rule, low, text, share=share)


def _added(earlier: State | None, fqn: str, role: str, sums: OneState) -> int:
    """Return how many elements a parameter got since: new rows may be made in 16 bits."""
    at = None if earlier is None else earlier.params.get(fqn, {}).get(role)
    held = 0 if earlier is None or at is None else int(earlier.ckpt.catalog.numel[at])
    return max(sums.count - held, 0) if held else 0


def narrowed(before: Mapping[str, OneState], after: Mapping[str, OneState]) -> Outcome:
    """Compare how many float32 weights fit into 16 bits in two checkpoints.

    Args:
        before, after: fqn → sums.
    """
    held = [
        fqn for fqn in after if fqn in before and "param" in after[fqn].low and before[fqn].low.get("param", (0, 0))[1]
    ]
    if not held:
        return Outcome(not_checked={"P31": Inapplicable("no float32 weights without masters are stored on both sides")})
    lost = []
    for fqn in held:
        (old, of), (now, full) = before[fqn].low["param"], after[fqn].low["param"]
        if now >= LOW_LEAST and now > LOW_SHARE * full and 2 * old * full < now * of:
            lost.append((fqn, "", now))
    signs = []
    if lost:
        share = sum(one[2] for one in lost) / sum(after[fqn].low["param"][1] for fqn, *_ in lost)
        text = f"{share:.1%} of the numbers in {_names(lost)} fit into 16 bits, which they did not before"
        signs.append(_sign("P31", lost, text, share=share))
    return Outcome(signs, {"P31": plural(len(held), "weight")})


def _copies(state: State, found: Mapping[str, OneState], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Sign]:
    apart = state.facts.args.get("untie_embeddings_and_output_weights")  # Megatron's name for it
    tied = state.facts.value("tied") if apart is None else not apart.value
    pairs = tied_pairs(found)
    for a, b in pairs:
        if not tied or a == b or shapes[a] != shapes[b] or "exp_avg" not in found[b].numbers:
            continue
        if found[a].digest == found[b].digest:
            text = (
                f"{b!r} is stored as a copy of {a!r} with its own optimizer state, although the model ties them: "
                "it will drift"
            )
            yield RULES["S13"].sign(text, {"equal": True}, (a, b), severity="warn", hit=1, of=1)
        else:
            text = f"{a!r} and {b!r} differ, although the model ties them"
            yield RULES["S13"].sign(text, {"equal": False}, (a, b), hit=1, of=1)
    heads = {frozenset(pair) for pair in pairs}
    held = _trained(state)
    alike: dict[tuple[int, tuple[int, ...]], dict[object, str]] = defaultdict(dict)
    for fqn, sums in found.items():
        main = sums.numbers.get("master") or sums.numbers.get("param")
        if main is None or len(shapes[fqn]) < 2 or main.count < SAMPLE or (held and fqn not in held):
            continue  # a name without its own optimizer state is another name of a shared weight
        if int((main.octaves > 0).sum()) > 1:  # not one constant
            alike[sums.digest, shapes[fqn]].setdefault(_bytes(state, fqn), fqn)
    groups = [list(names.values()) for names in alike.values()]
    twice = [group for group in groups if len(group) > 1 and frozenset(group) not in heads]
    if twice:
        text = f"{twice[0][0]!r} and {twice[0][1]!r} are equal bit for bit"
        text += f"; there are {len(twice):,} such groups" if len(twice) > 1 else ""
        names = [fqn for group in twice for fqn in group][:LIST]
        severity = None if held else "warn"  # it is unknown whether they are trained separately
        moments = [
            {found[fqn].numbers["exp_avg"].max for fqn in group if "exp_avg" in found[fqn].numbers} for group in twice
        ]
        evidence = {"groups": twice[:LIST], "apart": all(len(values) > 1 for values in moments)}
        yield RULES["S14"].sign(text, evidence, names, severity=severity, hit=len(twice), of=len(found))


def _trained(state: State) -> set[str]:
    """Return the parameters with optimizer state; shared weights have it under one name."""
    return {fqn for fqn, roles in state.params.items() if any(role in STATES for role in roles)}


def _bytes(state: State, fqn: str) -> object:
    """Return where the weight (or master) and moments are stored; names of the same bytes are one tensor."""
    catalog, roles = state.ckpt.catalog, state.params[fqn]
    main = "master" if "master" in roles else "param"
    wanted = [roles[role] for role in sorted(roles) if role == main or role in STATES]
    columns = (catalog.file, catalog.start, catalog.stop)
    return tuple(tuple(one[catalog.rows_of(position)].tolist()) for position in wanted for one in columns)


def _ones(
    found: Mapping[str, OneState], shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str | None], step: float
) -> Iterator[Sign]:
    still = []
    for fqn, sums in found.items():
        main, v = sums.numbers.get("master") or sums.numbers.get("param"), sums.numbers.get("exp_avg_sq")
        if main is None or v is None or len(shapes[fqn]) != 1 or v.zeros == v.count:
            continue
        if main.count >= 8 and main.ones == main.count:
            still.append((fqn, types[fqn] or "", 1))
    if still and step > 0:
        sharp = all(kind == "float32" for _, kind, _ in still)
        text = f"{plural(len(still), 'vector')} of ones at step {step:,.0f} although gradients reached them: "
        text += _names(still)
        yield _sign("S15", still, text, "error" if sharp else "info", step=step)


def _sign(rule: str, hits: Sequence[tuple[str, str, float]], text: str, severity: str = "", **evidence: object) -> Sign:
    of = int(str(evidence.get("of", len(hits))))
    names = list(dict.fromkeys(fqn for fqn, *_ in hits))
    return RULES[rule].sign(text, evidence, names[:LIST], severity=severity or None, hit=len(names), of=of)


def _names(hits: Sequence[tuple[str, str, float]]) -> str:
    names = list(dict.fromkeys(fqn for fqn, *_ in hits))
    more = f" and {len(names) - 2:,} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more
