"""What patterns of causes query: quantities beyond their law, the affected parameters, and measured equalities.

::

    Case ── change("load") ──► Change      forms by quantity: exp_avg {"zero": 52 parameters}
         ── counters(leg)  ──► Counters    kept, reset, ahead of the load, behind
         ── fired("S17")   ──► signs
    pattern(case)          ──► Match(names, strength, exact, reasons against other causes)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.core.words import plural
from workbench.doctor.facts.evidence import Evidence, State, is_numbered
from workbench.doctor.ledger.roles import FIRST, MASTERS, MOMENTS, SECOND, WEIGHTS
from workbench.doctor.ledger.rows import Ledger, LedgerLeg
from workbench.doctor.ledger.sign import SAVED, Outcome, Sign
from workbench.doctor.origins.tags import followers
from workbench.doctor.passes.updates import passed
from workbench.names.weights import Weight, kinds, parse

ALONE = ("before", "echo", "after")
#: A sign's ``evidence["in"]`` → leg of the ledger.
LEG_OF = {
    "before → echo": "load",
    "before → after": "train",
    "echo → after": "train",
    **{which: which for which in ALONE},
}
HALF = 0.5  #: share of the weights
MOST = 0.6  #: share of the elements; of moments that belong to others, as many rise as fall
NEARLY_ALL = 0.7  #: share of the parameters; small parameters rarely break laws
GROWN = 2.0  #: growth of a weight's norm that shows steps divided by far too small second moments
SUNK = 30.0  #: factor by which second moments fell below what updates leave; those of an older save do not
STEEP = 1.5  #: factor between the learning rates of two files up to which they agree
SAME = 1e-4  #: relative difference up to which two factors of a learning rate are one
UNLIKE = ("other", "fill", "zero")  #: forms of weights that keep nothing of the old ones
GONE = ("zero", "absent")  #: forms of a lost state
RELATED = 0.5  #: cosine similarity from which a weight counts as related to the old one
FLIPS, FLIPPED = 8, 2  #: most elements and most tensors that an accident damages
OF_MOMENTS = frozenset({"S04", "P03", "P04", "P05", "P06", "P08", "P11"})  #: rules that moments of one run obey
UNRULY = "the moments broke Adam's law before the resume too: does the trainer change them outside of updates?"
OUTSIDE = "does the trainer change weights outside the optimizer's update?"
ELSE = "compare with what else moves weights: noise, masks, an outer optimizer, a step size of each parameter"


OUTER = {"embed", "head"}  #: kinds with one row per token
OF_OPTIMIZER = frozenset({"B1", "B2", "B3", "B4", "B5", "B11"})
OF_WEIGHTS = frozenset({"A2", "D7", "E12", "F2", "F4", "F5", "F6", "F7", "G6"})  # not those of elements at other places
RESHAPED = "was the state of these tensors begun anew on purpose, with their new shapes?"
SET_ANEW = "was it set to a new value on purpose?"
REFILLED = "were these buffers begun anew on purpose, with the new shapes?"
RESTARTED = "were these tensors started anew on purpose, with new optimizer state?"
REBUILT = "was the optimizer begun anew on purpose, for the changed model?"
UNTIED = "was the head untied on purpose? The optimizer holds it, too."
ELSEWHERE = "no optimizer holds these tensors: were they replaced on purpose?"
REGROUPED = "were parameters moved between param groups on purpose?"
RESET = "were the moments reset on purpose, together with the schedule?"
SCALED_TOO = "were the moments scaled on purpose, together with the schedule?"
WITH_THEM = "were these buffers begun anew on purpose, together with the optimizer?"
EXCHANGED = "was the optimizer exchanged on purpose?"
ANEW = "was a new run started from other weights on purpose, with a fresh optimizer?"
#: Fields of param groups that some kinds of optimizers have and others lack.
FIELDS = frozenset({
    "betas", "eps", "momentum", "nesterov", "dampening", "rho", "alpha", "ns_steps", "beta2_decay", "lr_decay",
    "initial_accumulator_value", "max_iter",
})  # fmt: skip


@dataclass(frozen=True)
class Match:
    """A place in the ledger that shows the traces of a cause.

    Attributes:
        leg: the leg on which it was seen.
        strength: 0 to 1; 1 if no other known cause leaves the same trace.
        names: affected parameters; empty if the run as a whole is affected.
        exact: whether it is based on equality or an exact law that no deliberate change breaks.
        question: asks whether the change was intended; if set, the cause is at most a warning.
        reasons: cause → a measured sentence that speaks against it.
        signs: the signs that it is based on, if these are not rows of the ledger.
        title: replaces the cause's title.
        remedy: replaces the cause's remedy; of what the cause does to the run, only ``losses`` is then stated.
        losses: replaces what the cause does to the losses.
    """

    leg: str
    strength: float
    names: frozenset[str] = frozenset()
    exact: bool = False
    question: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    signs: tuple[Sign, ...] = ()
    title: str = ""
    remedy: str = ""
    losses: str = ""


@dataclass(frozen=True)
class Counters:
    """The optimizer's counters on a leg, as sets of parameter names.

    Attributes:
        kept: advanced by as many updates as the trainer (in a load: unchanged).
        reset: restarted from zero.
        ahead: advanced by more updates than the trainer.
        behind: advanced by fewer updates, or fell without restarting.
        by: the most common difference of counters that are ahead or behind, in updates.
        known: the union of all four.
    """

    kept: frozenset[str] = frozenset()
    reset: frozenset[str] = frozenset()
    ahead: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()
    by: float = 0.0

    @property
    def known(self) -> frozenset[str]:
        return self.kept | self.reset | self.ahead | self.behind


class Case:
    """Everything that was measured, as patterns query it.

    Attributes:
        evidence, outcome, ledger: the checkpoints, the signs, the rows.
        alone: which → fqn → sums of one state. pairs: ``before → after`` … → fqn → sums of a pair.
        traits: findings about the load as a whole: ``place averaged rank adapted``.
    """

    def __init__(
        self,
        evidence: Evidence,
        outcome: Outcome,
        ledger: Ledger,
        alone: Mapping[str, Mapping[str, Any]],
        pairs: Mapping[str, Mapping[str, Any]],
        traits: Mapping[str, Any] | None = None,
    ) -> None:
        self.evidence, self.outcome, self.ledger = evidence, outcome, ledger
        self.alone, self.pairs, self.traits = alone, pairs, dict(traits or {})
        self.begun: frozenset[str] = frozenset()  # legs on which the whole optimizer began anew
        self.restarted = False  # the schedule
        self._changes: dict[str, LedgerLeg] = {}

    # ---- legs --------------------------------------------------------------------------------------------------------

    def change(self, leg: str) -> LedgerLeg:
        if leg not in self._changes:
            self._changes[leg] = self.ledger.change(leg)
        return self._changes[leg]

    @cached_property
    def changes(self) -> list[LedgerLeg]:
        """The legs on which the resume may have gone wrong: load and updates, or else the resumed state."""
        legs = [leg for leg in ("load", "train") if self.change(leg).rows]
        return [self.change(leg) for leg in legs or [self.resumed]]

    @property
    def leg(self) -> str:
        """The first leg that was compared: ``load`` with an echo."""
        return "load" if self.change("load").rows else "train"

    @property
    def resumed(self) -> str:
        """The first checkpoint that the load can have damaged."""
        return "echo" if self.evidence.echo is not None else "after" if self.evidence.after is not None else "before"

    @cached_property
    def rescaled(self) -> bool:
        """Whether the load multiplied every learning rate by one factor, those of the schedule and those of the groups.

        Those with which the groups began, which only a new schedule reads, may have stayed as they were. Groups that
        were added have rates of their own.
        """
        a, b = self.evidence.before.facts, self.later.facts
        if self.evidence.echo is None or a.schedule is None or b.schedule is None:
            return False
        groups = a.beside(b)
        bases = a.schedule.base_lrs, b.schedule.base_lrs
        if len(bases[0]) - len(bases[1]) not in (0, len(a.groups) - len(b.groups)) or not bases[0]:
            return False
        rates = [(one.lr, two.lr) for one, two in groups] + list(zip(*bases, strict=False))
        begun = [(one.initial_lr, two.initial_lr) for one, two in groups]
        rates += begun if any(one != two for one, two in begun) else []
        factors = [new / old for old, new in rates if old and new is not None]
        one = len(factors) == len(rates) and max(factors) - min(factors) <= SAME * factors[0]
        return one and abs(factors[0] - 1) > SAME

    @property
    def start(self) -> str:
        """Where the updates on the leg ``train`` begin."""
        return "echo" if "echo → after" in self.pairs else "before"

    def state(self, where: str) -> State:
        """Return the later checkpoint of a place: ``after`` for ``before → after``."""
        return self.evidence.state(where.rpartition(" → ")[2] or self.resumed)

    @property
    def later(self) -> State:
        return self.evidence.state(self.resumed)

    @property
    def refilled(self) -> list[Sign]:
        """Signs of the model's own buffers that restarted, and not of averages or of fp8."""
        return [one for one in self.fired("P24") if one.causes[:1] not in (("F4",), ("D9",))]

    @cached_property
    def counted(self) -> list[Sign]:
        """Signs of counters of batches that are behind and yet counted more than since the load: of an older save."""
        k = passed(self.evidence.before.facts, self.later.facts)
        found = [one for one in self.refilled if "after" in one.evidence]
        return [one for one in found if k is not None and k + 1 < one.evidence["after"] != one.evidence["before"]]

    def restarted_with(self, names: Collection[str]) -> frozenset[str]:
        """Return the buffers that restarted in the modules of these weights."""
        buffers = named_in(one for one in self.refilled if one not in self.counted)
        modules = {_parent(name) for name in names}
        return frozenset(b for b in buffers if any(f".{_parent(b)}".endswith(f".{one}") for one in modules))

    def numel(self, name: str) -> int:
        """Return the number of elements of a parameter in the resumed state; 0 if it is not stored."""
        at = self.later.params.get(name, {}).get("param")
        return 0 if at is None else int(self.later.ckpt.catalog.numel[at])

    def cosine(self, change: LedgerLeg, names: Iterable[str]) -> float:
        """Return the mean cosine similarity of weights to the old ones, by their elements; 0 if none was measured."""
        found = [(c, self.numel(n)) for n in names if (c := change.detail(change.weights, n).get("cosine")) is not None]
        return sum(float(c) * count for c, count in found) / max(sum(count for _, count in found), 1)

    def both(self, names: Iterable[str]) -> Iterator[tuple[int, int]]:
        """Yield where each weight is stored in the checkpoint before and in the later one, if it is in both."""
        before, later = self.evidence.before.params, self.later.params
        for name in names:
            if "param" in before.get(name, {}) and "param" in later.get(name, {}):
                yield before[name]["param"], later[name]["param"]

    # ---- signs -------------------------------------------------------------------------------------------------------

    @property
    def signs(self) -> list[Sign]:
        return self.outcome.signs

    @cached_property
    def _by_rule(self) -> dict[str, list[Sign]]:
        found: dict[str, list[Sign]] = {}
        for sign in self.signs:
            found.setdefault(sign.rule, []).append(sign)
        return found

    def fired(self, *rules: str, where: str | None = None, info: bool = False) -> list[Sign]:
        """Return the signs of those rules that are more than a remark."""
        signs = [sign for rule in rules for sign in self._by_rule.get(rule, ())]
        return [one for one in signs if (info or one.severity != "info") and (where is None or where_of(one) == where)]

    def odd(self, *rules: str, where: str | None = None) -> list[Sign]:
        """Return the signs of odd values, except where the load is known to have changed more than a few elements."""
        load = self.change("load")
        forms = {form for form in load.forms(load.quantities) if form not in ("flip", "nan")}
        changed = load.hit(load.quantities, *forms) if forms else set()
        return [
            one
            for one in self.fired(*rules, where=where)
            if leg_of(one) != "echo" or not one.tensors or not set(one.tensors) <= changed
        ]

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def counters(self, leg: str) -> Counters:
        """Return what the counters did on a leg; those of parameters that were added since before are young."""
        rows = [row for row in self.change(leg).rows if row.quantity == "step"]
        sets: dict[str, set[str]] = {}
        for row in rows:
            sets.setdefault(row.form or str(row.status), set()).update(row.names)
        old = self.evidence.before.params.keys()
        if "reset" in sets and any(names & old for names in sets.values()):
            sets["reset"] &= old
        seen = self.change(leg).seen(*MOMENTS)
        sets = {form: seen if names == {""} and seen else names for form, names in sets.items()}
        kept = sets.get("equal", set()) | sets.get("within", set())
        by = next((float(row.detail["by"]) for row in rows if row.form in ("ahead", "behind")), 0.0)
        reset, ahead, behind = (frozenset(sets.get(one, ())) for one in ("reset", "ahead", "behind"))
        return Counters(frozenset(kept), reset, ahead, behind, by)

    @cached_property
    def grouped(self) -> bool:
        """Whether the param groups count the updates of another optimizer than Adam.

        That does not show what was loaded for a parameter.
        """
        facts = self.later.facts
        held = facts.steps.source in {f"{group.source}.step" for group in facts.groups}
        return held and "moments" not in facts.optimizer.laws

    @cached_property
    def untrained(self) -> frozenset[str]:
        """The weights that no optimizer updates.

        Empty if the state is stored in another form than the weights, as in flat buffers.
        """
        state = self.later
        moments = {state.shape(roles[role]) for roles in state.params.values() for role in MOMENTS if role in roles}
        weights = {name: state.shape(roles["param"]) for name, roles in state.params.items() if "param" in roles}
        return state.unheld & weights.keys() if moments and moments <= set(weights.values()) else frozenset()

    # ---- what was measured, in words ---------------------------------------------------------------------------------

    def equal(self, change: LedgerLeg, quantities: Iterable[str], what: str, names: Iterable[str] | None = None) -> str:
        """Return ``the moments of 52 of 52 parameters are equal bit for bit``, or "" if not all requested ones are."""
        quantities = tuple(quantities)
        seen = change.seen(*quantities)
        asked = set(names) if names is not None else seen
        asked = seen if any(map(is_numbered, asked - seen)) else asked  # the owners are unknown
        good = change.clean(quantities, asked)
        if not good or good != asked & seen:
            return ""
        law = "are equal bit for bit" if change.exact else "moved as the optimizer's law allows"
        return f"the {what} of {len(good):,} of {plural(len(asked), 'parameter')} {law}"

    def against(self, *pairs: tuple[str, str]) -> dict[str, str]:
        """Return ``(causes, sentence)`` as a mapping; an empty sentence was not measured and excludes nothing."""
        return {cause: words for causes, words in pairs if words for cause in causes.split()}

    @cached_property
    def replaced(self) -> frozenset[str]:
        """The weights in which elements were replaced by zeros."""
        return frozenset(name for change in self.changes for name in change.hit(change.weights, "zeros"))

    @cached_property
    def rewritten(self) -> frozenset[str]:
        """The weights that a load changed: no update makes such values of the old ones."""
        train = self.change("train")
        return frozenset(train.hit(train.weights, "moved.", "fill", "zero", "zeros", "other"))

    @cached_property
    def far(self) -> float:
        """Share of the elements of weights that moved farther than the optimizer can move them."""
        found = self.fired("P05")
        return sum(one.evidence["elements"] for one in found) / max(sum(one.evidence["looked_at"] for one in found), 1)

    @property
    def stale_rows(self) -> list[Sign]:
        """Rows that no gradient reached and that are not the decayed old ones, so they are from another step."""
        return [
            one
            for one in self.fired("P11")
            if not one.evidence.get("even")
            or (float(one.evidence.get("shrink", 0)) < one.evidence["allowed"][0] and not one.evidence.get("slow"))
        ]

    @cached_property
    def sank(self) -> bool:
        """Whether most elements of the second moments fell below what updates leave of their old values."""
        found = [one.evidence for one in self.fired("P03") if "looked_at" in one.evidence]
        looked = max((one["looked_at"] for one in found), default=0)
        return sum(one["elements"] for one in found) > MOST * looked > 0

    @cached_property
    def too_small(self) -> bool:
        """Whether exp_avg is larger than any gradients make it beside these second moments: both did not begin at 0."""
        return any(one.evidence["elements"] > FLIPS and one.hit > FLIPPED for one in self.fired("S04", where="after"))

    @cached_property
    def adam(self) -> bool:
        """Whether any file holds Adam's moments."""
        return any({"exp_avg", "exp_avg_sq"} <= self.roles(which) for which in ALONE)

    @cached_property
    def by_adam(self) -> frozenset[str]:
        """The parameters that any file holds both of Adam's moments of, also as 8-bit codes."""
        states = [state for which in ALONE if (state := getattr(self.evidence, which)) is not None]
        both = [{"exp_avg", "exp_avg_sq"}, {"state1", "state2"}]
        return frozenset(
            name for state in states for name, roles in state.params.items() if any(two <= roles.keys() for two in both)
        )

    @cached_property
    def unruly(self) -> bool:
        """Whether moments broke Adam's law in the checkpoint that was resumed from, and do so in the later one."""
        sides = [self.fired("S04", where=which, info=True) for which in ("before", "after")]
        return all(any(one.evidence["elements"] > FLIPS and one.hit > FLIPPED for one in side) for side in sides)

    @cached_property
    def deeper(self) -> int:
        """How many layers more the later model has, negative if fewer; 0 if it differs outside of its layers, too."""
        return self._more(lambda one: None if one.layer is None else (one.stack, one.layer))

    @cached_property
    def wider(self) -> int:
        """How many experts more all layers of the later model have together, as :attr:`deeper`."""
        return self._more(lambda one: None if one.expert is None else (one.stack, one.layer, one.expert))

    def _more(self, part: Callable[[Weight], object]) -> int:
        sides = [
            {fqn: part(parse(fqn)) for fqn, roles in state.params.items() if "param" in roles}
            for state in (self.evidence.before, self.later)
        ]
        outer = [{fqn for fqn, of in names.items() if of is None} for names in sides]
        counts = [len({of for of in names.values() if of is not None}) for names in sides]
        return counts[1] - counts[0] if outer[0] == outer[1] and all(counts) else 0

    @cached_property
    def upcycled(self) -> bool:
        """Whether the later model has experts and the one before had none."""
        sides = [any(parse(fqn).routed for fqn in state.params) for state in (self.evidence.before, self.later)]
        return sides == [False, True]

    @cached_property
    def adapted(self) -> bool:
        """Whether the later model has adapters and the one before had none."""
        return self.later.has_adapters and not self.evidence.before.has_adapters

    @cached_property
    def regrouped(self) -> bool:
        """Whether the param groups hold another number of parameters."""
        return any(one.evidence.get("kind") == "sizes" for one in self.fired("R12"))

    @property
    def trains_more(self) -> bool:
        """Whether the param groups hold more parameters than before."""
        counts = [[group.count or 0 for group in one.facts.groups] for one in (self.evidence.before, self.later)]
        return 0 < sum(counts[0]) < sum(counts[1])

    @cached_property
    def shaped(self) -> list[Sign]:
        """Signs of tensors that have another shape."""
        return [one for one in self.fired("R01", "P02") if one.evidence.get("kind") == "have another shape"]

    @cached_property
    def reshaped(self) -> frozenset[str]:
        """The parameters that have another shape."""
        return named_in(self.shaped)

    @cached_property
    def tables(self) -> list[Sign]:
        """Signs of tables with another number of rows, as of tokens: of one kind, or several that changed alike."""
        return [
            one
            for one in self.shaped
            if kinds(name for name in one.tensors if not is_numbered(name)) <= OUTER or self._resized(one.tensors)
        ]

    def _resized(self, names: Iterable[str]) -> bool:
        """Return whether several weights outside of layers changed from one size of their first axis to another."""
        before, later = self.evidence.before, self.later
        if any(parse(name).layer is not None for name in names):
            return False
        shapes = [(before.shape(one), later.shape(two)) for one, two in self.both(names)]
        alike = len({(a[:1], b[:1]) for a, b in shapes}) == 1 and all(a[1:] == b[1:] for a, b in shapes)
        return len(shapes) > 1 and alike

    @cached_property
    def exchanged(self) -> bool:
        """Whether the param groups of the later checkpoint have the fields of another kind of optimizer."""
        before, later = (
            {name for group in state.facts.groups for name in group.settings}
            for state in (self.evidence.before, self.later)
        )
        return bool(before and later and (before ^ later) & FIELDS)

    @cached_property
    def saved(self) -> bool:
        """Whether what was loaded is known to be what the trainer held when it was saved."""
        return any(one.what == f"{SAVED} (before)" for one in self.outcome.cleared)

    @cached_property
    def mastered(self) -> bool:
        """Whether any file holds masters."""
        return any("master" in self.roles(which) for which in ALONE)

    def roles(self, which: str) -> set[str]:
        state = getattr(self.evidence, which)
        return set() if state is None else {role for roles in state.params.values() for role in roles}

    @cached_property
    def declared(self) -> frozenset[str]:
        """Arguments that both launches state with different values."""
        found = [sign for sign in self.signs if sign.rule == "R12" and sign.evidence.get("kind") == "declared"]
        return frozenset(name for sign in found for name in sign.evidence.get("changed", {}))

    def lost(self, change: LedgerLeg) -> tuple[set[str], set[str]]:
        """Return the parameters that lost their first, and their second, moments (absent, zero or constant).

        Those with only one kind, as SGD's and Adagrad's, lose both if they lose all of it.
        """
        first, second = change.hit(FIRST, *GONE), change.hit(SECOND, *GONE, "fill")
        part = change.partly(*GONE)
        return first | (second - change.seen(*FIRST) - part), second | (first - change.seen(*SECOND) - part)

    def anew(self, change: LedgerLeg) -> frozenset[str]:
        """Return the weights that are unlike the old ones and whose optimizer state is new as well, with that state, if
        the rest continues.

        A new head, or a layer that is trained from scratch, leaves the same files as a load that skipped it altogether.
        Networks that follow such weights are new with them, and have no state of their own.
        """
        first, second = self.lost(change)
        counters = self.counters(change.leg)
        names, beyond = change.hit(change.weights, *UNLIKE), change.hit(change.weights)
        lost = first | second
        if change.hit(MOMENTS) & counters.reset:
            lost |= counters.reset
        elif counters.kept:  # after some updates, new moments may satisfy the laws of the old ones
            lost |= counters.reset & names
        followed = followers(beyond) - change.seen(*MOMENTS)
        own = names - followed
        if any(map(is_numbered, lost)):  # the owners are unknown, but not their sizes
            room = Counter(self.sizes(lost, *MOMENTS))
            if Counter(self.sizes(own, "param")) - room:
                return frozenset()
            room -= Counter(self.sizes(own, "param"))
            if room and not (change.leg == "train" and counters.kept):
                return frozenset()
            for name in sorted(beyond - names - followed):
                size = self.sizes([name], "param")[0]
                if room[size]:  # too small to be unlike the old one
                    room[size] -= 1
                    own.add(name)
            most = sum(self.sizes(lost, *MOMENTS))
        else:
            own &= lost
            most = sum(map(self.numel, lost))
        if not own or sum(map(self.numel, own)) < NEARLY_ALL * most:
            return frozenset()  # the state of others was lost too
        own |= followed & followers(own | followed)
        rest = change.seen(*change.weights) - own
        return frozenset(own | lost) if 2 * len(change.clean(change.weights, rest)) > len(rest) else frozenset()

    def sizes(self, names: Iterable[str], *roles: str) -> list[int]:
        """Return the numbers of elements before, ascending: each of the first of these roles that is stored."""
        before = self.evidence.before
        held = (before.params.get(name, {}) for name in names)
        at = [next((one[role] for role in roles if role in one), None) for one in held]
        return sorted(0 if one is None else int(before.ckpt.catalog.numel[one]) for one in at)

    def displaced(self, change: LedgerLeg) -> set[str]:
        """Return weights and masters beyond their law, except where wrong moments explain the first updates.

        Wrong moments make steps a little too large; such a step fits when replayed with the moments it used.
        """
        held = (*change.weights, *MASTERS)
        slight = change.hit(held, "slight") if change.leg == "train" else set()
        return change.hit(held) - (slight - {name for sign in self.fired("P12") for name in sign.tensors})

    def of_layer(self, change: LedgerLeg, names: Iterable[str]) -> bool:
        """Return whether the parameters whose moments broke their law are most of one layer, and all of them in it."""
        off = change.hit(MOMENTS) & set(names)
        places = {(one.stack, one.layer) for one in map(parse, change.hit(MOMENTS))}
        every = [(one.stack, one.layer) for one in map(parse, change.seen(*MOMENTS))]
        alone = len(places) == 1 and None not in {layer for _, layer in places} and len({*every}) > 2
        return alone and 2 * len(off) > every.count(next(iter(places))) > 2

    def grown(self, change: LedgerLeg) -> bool:
        """Return whether the median norm of the replaced weights grew more than the weights of any other run do."""
        other = change.hit(change.weights, "other")
        sizes = sorted(float(change.detail(change.weights, name).get("size", 1.0)) for name in other)
        return bool(sizes) and sizes[len(sizes) // 2] > GROWN

    def sunk(self, change: LedgerLeg) -> frozenset[str]:
        """Return the parameters whose second moments fell so far that their weights moved far.

        The fall is the cause here; the moments of another save do not fall as far.
        """
        if change.leg != "train" or change.hit((*change.weights, *MASTERS, *MOMENTS), "moved."):
            return frozenset()  # elements of other places are larger or smaller
        # a single update that the stored moments do not explain was not made by them
        odd = {name for sign in self.fired("P12") if "old" not in sign.evidence for name in sign.tensors}
        fell = change.hit(SECOND, "other", "part", "fallen") - odd
        return frozenset(name for name in fell if SUNK < float(change.detail(SECOND, name).get("depth", 0)) < math.inf)

    def masters_alone(self, change: LedgerLeg, *forms: str) -> set[str]:
        """Return the masters of those forms whose weights are clean; of numbered ones, if all weights are."""
        clean, whole = change.clean(WEIGHTS), bool(change.seen(*WEIGHTS)) and not change.hit(WEIGHTS)
        return {name for name in change.hit(MASTERS, *forms) if name in clean or (whole and is_numbered(name))}

    def first_stayed(self, change: LedgerLeg) -> bool:
        """Return whether first moments beside second ones that fell are, in every element, those that were stored."""
        found = [change.detail(SECOND, name) for name in change.hit(SECOND, "fallen", "other")]
        began, kept = (sum(int(one.get(law, 0)) for one in found) for law in ("not_from_zero", "not_from_old"))
        proved = began > FLIPPED or change.hit(SECOND, "ratio") - change.hit(FIRST)
        return bool(proved) and not kept and not change.hit(MOMENTS, "moved.", "moved")

    def first_other(self, change: LedgerLeg) -> set[str]:
        """Return the parameters whose first moments are others while the second ones continued."""
        return change.hit(("exp_avg",), "other") & change.clean(("exp_avg_sq",))

    def still(self, change: LedgerLeg, names: Iterable[str]) -> bool:
        """Return whether the weights and masters of ``names`` were compared and satisfy their bound."""
        names, seen = set(names), change.seen(*WEIGHTS, *MASTERS)
        if not any(map(is_numbered, names)):  # otherwise the owners are unknown, so it must hold for all
            seen &= names
        return bool(seen) and not seen & change.hit((*WEIGHTS, *MASTERS))


def below_stated(sign: Sign) -> bool:
    """Return whether an update used a lower learning rate than both files state, which agree: no schedule restarted."""
    if sign.rule != "P13":
        return False
    low, high = sign.evidence["stated"]
    return bool(sign.evidence["lr"] < low and high <= STEEP * low)


def named_in(signs: Iterable[Sign]) -> frozenset[str]:
    """Return the tensors that signs name."""
    return frozenset(name for one in signs for name in one.tensors)


def where_of(sign: Sign) -> str:
    """Return the checkpoint or pair that a sign is about."""
    return str(sign.evidence.get("in", ""))


def leg_of(sign: Sign) -> str:
    """Return the leg of the ledger that a sign is about."""
    return LEG_OF.get(where_of(sign), "")


def matches(case: Case, causes: Mapping[str, Any]) -> list[tuple[str, Match]]:
    """Return what the pattern of each cause finds, as a question where other changes suggest that it was intended."""
    found = [(one.id, match) for one in causes.values() if one.pattern is not None for match in one.pattern(case)]
    case.begun = frozenset(match.leg for cause, match in found if cause == "B1" and match.question)
    case.restarted = any(cause == "C1" and not match.title for cause, match in found)  # not if only the rate fell
    return [(cause, match if match.question else _with(match, asked(case, cause, match))) for cause, match in found]


def _with(match: Match, question: str) -> Match:
    return replace(match, exact=False, question=question) if question else match


def asked(case: Case, cause: str, match: Match) -> str:
    """Return the match's question, or one that other changes of the same load suggest; "" if there is none."""
    if match.question:
        return match.question
    if case.unruly and _of_moments(case, match):
        return UNRULY
    if cause in OF_OPTIMIZER and case.exchanged:
        return EXCHANGED
    names = match.names or named_in(match.signs)
    if cause in ("B1", "B2", "B3") and names and _of_reshaped(case, names):
        return RESHAPED
    if cause == "A5" and match.names and {_parent(n) for n in match.names} <= {_parent(n) for n in case.reshaped}:
        return REFILLED
    change = case.change(match.leg)
    if (cause in OF_OPTIMIZER or cause == "A2") and names and names <= case.anew(change):
        return RESTARTED
    if cause == "B1" and (case.deeper or case.wider or case.upcycled or case.adapted):
        return REBUILT
    if cause == "F2" and case.regrouped:
        return UNTIED
    if cause == "A2" and _apart(case, change, match.names):
        return ELSEWHERE
    if cause == "B1" and any(one.evidence.get("kind") in ("sizes", "groups") for one in case.fired("R12")):
        return REGROUPED
    if cause == "A5" and match.leg in case.begun:
        return WITH_THEM
    if cause in ("B3", "B6") and case.restarted:
        return RESET
    if cause in ("B10", "E12") and case.restarted and names and not names & change.hit((*change.weights, *MASTERS)):
        return SCALED_TOO
    named = [name for name in match.names if not is_numbered(name)]
    table = bool(named) and kinds(named) <= OUTER  # another tokenizer's
    layered = any(parse(name).layer is not None for name in named)  # heads are outside of the layers
    if cause == "A2" and change.exact and layered and not change.whole(change.weights, named, HALF):
        return ""  # most weights are equal to the old ones
    return ANEW if match.leg in case.begun and (cause in OF_WEIGHTS or (cause[0] == "E" and table)) else ""


def _of_reshaped(case: Case, names: frozenset[str]) -> bool:
    """Return whether this state is that of the parameters with another shape; by their sizes if it is numbered."""
    weights = {name for name in case.reshaped if not is_numbered(name)}
    sizes = case.sizes(weights, "param") if all(map(is_numbered, names)) else []
    return names <= case.reshaped or (bool(sizes) and sizes == case.sizes(names, *MOMENTS))


def _apart(case: Case, change: LedgerLeg, names: frozenset[str]) -> bool:
    """Return whether these weights are whole models beside the one that the optimizer updates, such as a teacher."""
    held, every = change.seen(*MOMENTS), change.seen(*change.weights)
    models = {name.partition(".")[0] for name in names}
    apart = {name for name in every if name.partition(".")[0] in models}
    if any(map(is_numbered, held)):  # the owners are unknown, but not their sizes
        sizes = case.sizes(held, *MOMENTS)
        return sizes == case.sizes(every - apart, "param") != case.sizes(apart, "param")
    return bool(held - apart) and not held & apart


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _of_moments(case: Case, match: Match) -> bool:
    """Return whether a match is based on laws of moments, or on how far these can move weights."""
    train = case.change("train")
    if match.signs:
        return all(one.rule in OF_MOMENTS for one in match.signs)
    return match.leg == "train" and bool(match.names & train.hit((*train.weights, *MOMENTS)))
