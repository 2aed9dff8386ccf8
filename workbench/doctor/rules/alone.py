"""Check one checkpoint by itself: its values, its files and its structure, in one call.

::

    state ──► check_one     laws within a parameter                  every weight and moment, once
          ├─► check_layout  rows and columns, layer against layer    from the same sums
          ├─► check_extra   scales, averages, adapters, clip         from the same sums, and small buffers
          └─► check_files   files, checksums, coverage, replicas     the checks of verify
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.scan import Progress, part_of
from workbench.core.words import plural
from workbench.doctor.facts.evidence import State
from workbench.doctor.ledger.sign import Cleared, Outcome
from workbench.doctor.passes.one import OneState
from workbench.doctor.rules.extra import check_extra
from workbench.doctor.rules.files import check_files
from workbench.doctor.rules.layout import check_layout
from workbench.doctor.rules.values import PassValues, check_one


@dataclass
class Alone(Outcome):
    """An outcome and the sums that it was computed from.

    Attributes:
        states: fqn → sums of its elements, for pictures.
    """

    states: Mapping[str, OneState] = field(default_factory=dict)


def check_alone(
    state: State,
    earlier: State | None = None,
    *,
    files: bool = True,
    manifest: Any = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Alone:
    """Apply every rule on the bytes of one checkpoint; `check_facts` has the rules on its facts.

    Args:
        earlier: a checkpoint of the same run, if there is one; what was healthy there is healthy here.
        files: also check files, stored checksums and replicas, which reads the bytes once more.
        manifest: a manifest, or its path, to check every byte against; by default, one in or beside the checkpoint.
        progress: called with the fraction done; stops by raising.
    """
    share = 0.5 if files else 1.0
    values = check_one(state, earlier, threads=threads, progress=part_of(progress, 0.0, share))
    found = Alone(list(values.signs), dict(values.checked), dict(values.not_checked), [], values.states)
    found.cleared += _healthy(values)
    found.add(check_layout(state, values.states))
    found.add(check_extra(state, values.states, earlier))
    if files:
        found.add(check_files(state, manifest=manifest, threads=threads, progress=part_of(progress, share, 1 - share)))
    return found


def _healthy(values: PassValues) -> Iterator[Cleared]:
    """Yield what the numbers showed to be right; nothing if a parameter could not be read."""
    fired, sums = {sign.rule for sign in values.signs}, list(values.states.values())
    if not sums or "values" in values.not_checked:
        return
    if "S01" not in fired:
        count = sum(one.count for state in sums for one in state.numbers.values())
        yield Cleared("numbers", f"all {count:,} are finite")
    compared = sum(one.compared for one in sums)
    if compared and "S08" not in fired:
        yield Cleared("masters", f"all {plural(compared, 'weight', 'equal')} their rounded masters", ("D2", "D3"))
    low = sum(one.low.get("master", (0, 0))[1] for one in sums)
    if low and "S09" not in fired:
        yield Cleared("precision of the masters", f"the low bits of {plural(low, 'master')} are in use", ("D1",))
    bound = sum(one.bound.of for one in sums)
    if bound and not {"S03", "S04", "S05"} & fired:
        yield Cleared("moments", f"m² ≤ K·v in all {plural(bound, 'element')}", ("B4",))
