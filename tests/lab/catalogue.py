"""Every fault and control by id: the 42 of the first lab, the wider ones, the healthy."""

from __future__ import annotations

from tests.lab.corruption import CORRUPTIONS
from tests.lab.fault import Fault
from tests.lab.healthy import HEALTHY
from tests.lab.loader_faults import LOADER_FAULTS
from tests.lab.trainer_faults import TRAINER_FAULTS
from tests.lab.wider import WIDER_FAULTS

__all__ = ["ALL", "CONTROLS", "FAULTS", "WIDER"]

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*LOADER_FAULTS, *TRAINER_FAULTS, *CORRUPTIONS)}
WIDER: dict[str, Fault] = {fault.id: fault for fault in WIDER_FAULTS}
CONTROLS: dict[str, Fault] = {fault.id: fault for fault in HEALTHY}
ALL: dict[str, Fault] = FAULTS | WIDER | CONTROLS
