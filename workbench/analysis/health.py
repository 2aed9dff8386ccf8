"""The health of a saved step in one word and one sentence, from a verification of it.

::

    incomplete   the commit marker or a listed file is missing
    unseen       not verified yet
    sound        the checks found nothing; ``values`` states whether they included the values
    finding      an error or a warning; the sentence is the first one's

There is no "healthy": the sentence includes what was not checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.analysis.report import Report
from workbench.analysis.verify import verify
from workbench.core.scan import Progress
from workbench.core.words import plural
from workbench.errors import WorkbenchError
from workbench.runs import Found


@dataclass(frozen=True)
class StepHealth:
    """The known health of a saved step.

    Attributes:
        state: ``incomplete``, ``unseen``, ``sound`` or ``finding``.
        severity: severity of the worst finding: ``error`` or ``warn``; empty without findings.
        words: a sentence.
        values: whether the values were read, as by ``wb.verify(deep=True)``.
        spoilt: tensors with NaN or infinities; ``None`` if the values were not read.
        report: the verification; ``None`` if there was none.
    """

    state: str
    severity: str
    words: str
    values: bool = False
    spoilt: int | None = None
    report: Report | None = None


def unseen(found: Found) -> StepHealth:
    """Return the health of a step as its listing shows it."""
    if found.complete:
        return StepHealth("unseen", "", "complete; not checked yet")
    return StepHealth("incomplete", "error", f"incomplete: {found.why or 'a part is missing'}")


def check_step(
    found: Found, place: str, *, values: bool = False, threads: int | None = None, progress: Progress | None = None
) -> StepHealth:
    """Verify a complete step; one that is incomplete is returned as :func:`unseen` describes it.

    Args:
        place: its path or URL.
        values: also read every byte.
        threads, progress: as for ``wb.verify``.
    """
    if not found.complete:
        return unseen(found)
    try:
        report = verify(place, deep=values, threads=threads, progress=progress)
    except WorkbenchError as error:  # deleted or without permission
        return StepHealth("finding", "error", str(error), values)
    spoilt = len({one.where for one in report if one.rule in ("values.nan", "values.inf")}) if values else None
    left_out = "" if values else "; values not checked"
    bad = [one for one in report if one.severity in ("error", "warn")]
    if bad:
        more = f" ({len(bad) - 1:,} more)" if len(bad) > 1 else ""
        where = f"{bad[0].where}: " if bad[0].where else ""
        words = f"{where}{bad[0].message}{more}{left_out}"
        return StepHealth("finding", bad[0].severity, words, values, spoilt, report)
    words = f"{plural(len(report.checked), 'kind')} of checks found nothing{left_out}"
    return StepHealth("sound", "", words, values, spoilt, report)
