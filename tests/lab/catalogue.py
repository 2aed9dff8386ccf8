"""Every fault and control by id: the 42 of the first lab, the wider ones, the healthy; and the two halves.

Rules may be tuned on the development half. The sealed half only measures: its results are printed as counts, and nobody
reads its cases while tuning.
"""

from __future__ import annotations

from tests.lab.corruption import CORRUPTIONS
from tests.lab.fault import Fault
from tests.lab.healthy import HEALTHY
from tests.lab.hugging import HUGGING
from tests.lab.live_healthy import LIVE_HEALTHY
from tests.lab.loader_faults import LOADER_FAULTS
from tests.lab.opened_faults import OPENED_FAULTS
from tests.lab.opened_live import OPENED_LIVE
from tests.lab.reports import REPORTS
from tests.lab.sealed_faults import SEALED_FAULTS
from tests.lab.sealed_hugging import SEALED_HUGGING
from tests.lab.sealed_live import SEALED_LIVE
from tests.lab.trainer_faults import TRAINER_FAULTS
from tests.lab.trials import TRIALS
from tests.lab.wider import WIDER_FAULTS

__all__ = ["ALL", "CONTROLS", "EVERY", "FAULTS", "HALVES", "WIDER"]

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*LOADER_FAULTS, *TRAINER_FAULTS, *CORRUPTIONS)}
WIDER: dict[str, Fault] = {fault.id: fault for fault in WIDER_FAULTS}
CONTROLS: dict[str, Fault] = {fault.id: fault for fault in HEALTHY}
ALL: dict[str, Fault] = FAULTS | WIDER | CONTROLS

HALVES: dict[str, dict[str, Fault]] = {
    "dev": ALL
    | {fault.id: fault for fault in (*TRIALS, *REPORTS, *LIVE_HEALTHY, *HUGGING, *OPENED_FAULTS, *OPENED_LIVE)},
    "sealed": {fault.id: fault for fault in (*SEALED_FAULTS, *SEALED_LIVE, *SEALED_HUGGING)},
}
EVERY: dict[str, Fault] = HALVES["dev"] | HALVES["sealed"]
