"""Tables that are stored under two names and were equal stay equal: an embedding and a head on two pipeline stages."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from workbench.analysis.patterns.read import bits, runs_of
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.sign import Inapplicable, Outcome, Rule, register
from workbench.doctor.origins.tags import is_follower
from workbench.errors import WorkbenchError
from workbench.names.weights import kinds
from workbench.tensor import LazyTensor

P50 = Rule(
    "P50", "tables that were equal differ", ("F3", "F2"), "pair",
    "two names of one table hold the same values in every save", "exact", "tied embeddings on two pipeline stages",
    "error", "a head that was untied on purpose", "reduce the gradients of both, and save the table once"
)  # fmt: skip
register(P50)
TABLES = {"embed", "head"}
MOST = 8  #: tables that are compared with each other


def check_twins(pair: Pair) -> Outcome:
    """Compare embeddings and heads of one shape with each other, in both checkpoints.

    A network that follows another one (a target, a teacher) is left out: it is made equal now and then.
    """
    found = Outcome()
    held = [
        (fqn, roles["param"])
        for fqn, roles in pair.shared()
        if "param" in roles
        and kinds([fqn]) <= TABLES
        and len(pair.b.shape(roles["param"][1])) > 1
        and not is_follower(fqn)
    ][:MOST]
    seen = 0
    for (one, (a1, b1)), (two, (a2, b2)) in combinations(held, 2):
        try:
            if not _equal(pair.a.tensor(a1), pair.a.tensor(a2)):
                continue
            seen += 1
            if _equal(pair.b.tensor(b1), pair.b.tensor(b2)):
                continue
        except WorkbenchError as error:
            found.not_checked["P50"] = str(error)
            continue
        words = f"{one!r} and {two!r} were equal bit for bit, and are not any more"
        found.signs.append(P50.sign(words, {}, (one, two), hit=1, of=1))
    if seen:
        found.checked["P50"] = f"{seen:,} of equal tables"
    else:
        found.not_checked.setdefault("P50", Inapplicable("no two tables are equal"))
    return found


def _equal(one: LazyTensor, two: LazyTensor) -> bool:
    """Return whether two tensors have the same bits, and not all the same."""
    if one.element != two.element or one.shape != two.shape:
        return False
    least = most = None
    for run in runs_of(one.shape, one.element.itemsize).ends_first():
        mine = bits(one, run.key)
        if not np.array_equal(mine, bits(two, run.key)):
            return False
        low, high = mine.min(), mine.max()
        least = low if least is None else min(least, low)
        most = high if most is None else max(most, high)
    return bool(least != most)
