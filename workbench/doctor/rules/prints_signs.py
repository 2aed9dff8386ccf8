"""Signs from an echo that holds fingerprints: the rules of the round trip, as far as fingerprints can show them.

::

    all zeros (moments)              R03    another tensor's values     R02
    all ones, all zeros (weights)    R09    anything else               R09
    missing or new                   R01    all equal                   cleared

Details of a difference (permuted rows, flipped bits, rounding) need an echo with its payload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.analysis.echo_file import Echo
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.ledger.sign import Cleared, Outcome, Sign
from workbench.doctor.rules import names as facts_names
from workbench.doctor.rules.load_signs import ECHO
from workbench.doctor.rules.prints import ComparedPrints, Differing, compare_prints

MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum"}
LISTED = 50
#: Causes that equality bit for bit excludes, by role.
_EXCLUDED = {
    "param": ("E1", "E2", "E3", "E4", "E5", "E6", "E9", "E10", "F2", "F4", "F7", "A2", "A3", "D3", "D7"),
    "master": ("D1", "D2"),
    "exp_avg": ("B1", "B4", "B5", "E13"),
    "exp_avg_sq": ("B3", "B4", "B5", "E13"),
}


@dataclass
class PrintValues(Outcome):
    """An outcome and the comparison it is based on."""

    compared: ComparedPrints | None = None


def check_prints(
    pair: Pair, echo: Echo, *, threads: int | None = None, progress: Progress | None = None
) -> PrintValues:
    """Check the round trip of ``pair.a`` and the echo behind ``pair.b`` by fingerprints.

    Args:
        pair: the result of :func:`workbench.doctor.rules.prints.paired`.
    """
    found = compare_prints(pair, echo, threads=threads, progress=progress)
    signs = [*_differing(found), *_alone(found, echo)]
    same, other = len(found.equal), len(found.differing)
    outcome = PrintValues(signs, {"R09": f"before → echo: fingerprints of {plural(same + other, 'tensor')}"})
    outcome.compared = found
    why = "fingerprints show that tensors differ, but not how; save the echo with payload=True"
    if other:
        outcome.not_checked = dict.fromkeys(("R04", "R05", "R06", "R07", "R08", "R13"), why)
    outcome.not_checked |= {f"tensor {key!r}": why for key, why in list(found.unread.items())[:20]}
    by_role: dict[str, list[str]] = defaultdict(list)
    for key in found.equal:
        by_role[found.role[key]].append(key)
    bad = {one.role for one in found.differing} | {found.role.get(key, "") for key in (*found.missing, *found.unlike)}
    for role, keys in by_role.items():
        if role not in bad and role in _EXCLUDED:
            words = f"{len(keys):,} of {len(keys):,} are equal bit for bit, by their fingerprints"
            outcome.cleared.append(Cleared(role, words, _EXCLUDED[role]))
    return outcome


def _differing(found: ComparedPrints) -> Iterable[Sign]:
    by_kind: dict[tuple[str, str], list[Differing]] = defaultdict(list)
    for one in found.differing:
        by_kind[one.role, one.holds].append(one)
    for (role, holds), some in by_kind.items():
        of = sum(found.role[key] == role for key in found.equal) + sum(one.role == role for one in found.differing)
        names = [one.fqn or one.key for one in some[:LISTED]]
        evidence = {"kind": "fingerprint", "role": role, "holds": holds}
        moment = role in MOMENTS
        causes: tuple[str, ...] = ()
        if holds == "zeros" and moment:
            rule, words, causes = "R03", "are all zeros", ("B1", "B4") if role == "exp_avg_sq" else ("B1",)
        elif holds == "other":
            rule, words = "R02", f"hold the stored values of another tensor ({some[0].key!r}: {some[0].other!r})"
            causes = ("B5",) if moment else ("E9", "E3", "E10")
        else:
            rule = "R09"
            words = "differ from the stored bits" if holds == "unknown" else f"are all {holds}, as at initialization"
            causes = causes if holds == "unknown" or moment else ("A3", "A2")
        message = f"{len(some):,} of {of:,} {role} tensors {words}"
        yield ECHO[rule].sign(message, evidence, names, hit=len(some), of=of, causes=causes)


def _alone(found: ComparedPrints, echo: Echo) -> Iterable[Sign]:
    for kind, keys in (("are gone", list(found.missing)), ("are new", list(found.extra))):
        by_role: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_role[found.role.get(key, "other")].append(key)
        for role, some in by_role.items():
            if role in MOMENTS | {"param", "master", "buffer", "scale"}:
                causes = ("B1",) if role in MOMENTS and kind == "are gone" else ()
                evidence = {"kind": kind, "roles": role, "with_state": echo.counts.get("with_state")}
                message = f"{len(some):,} {role} tensors {kind}"
                yield facts_names.R01.sign(message, evidence, some[:LISTED], hit=len(some), causes=causes)
