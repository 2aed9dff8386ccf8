"""Every fault and control by id: the 42 of the first lab, the wider ones, the healthy; and the halves.

Rules may be tuned on the development half. A sealed half only measures: its results are printed as counts, and nobody
reads its cases while tuning. Those before (``opened*.py``) are development now. ``gpu`` are the loops that a
GPU can run, those of development included.
"""

from __future__ import annotations

from tests.lab.corruption import CORRUPTIONS
from tests.lab.fault import Fault
from tests.lab.healthy import HEALTHY
from tests.lab.hugging import HUGGING
from tests.lab.live_healthy import LIVE_HEALTHY
from tests.lab.loader_faults import LOADER_FAULTS
from tests.lab.on_gpu import ON_GPU
from tests.lab.opened2_faults import OPENED2_FAULTS
from tests.lab.opened2_hugging import OPENED2_HUGGING
from tests.lab.opened2_live import OPENED2_LIVE
from tests.lab.opened3_faults import OPENED3_FAULTS
from tests.lab.opened3_hugging import OPENED3_HUGGING
from tests.lab.opened3_live import OPENED3_LIVE
from tests.lab.opened4_faults import OPENED4_FAULTS
from tests.lab.opened4_hugging import OPENED4_HUGGING
from tests.lab.opened4_live import OPENED4_LIVE
from tests.lab.opened5_faults import OPENED5_FAULTS
from tests.lab.opened5_hugging import OPENED5_HUGGING
from tests.lab.opened5_live import OPENED5_LIVE
from tests.lab.opened6_faults import OPENED6_FAULTS
from tests.lab.opened6_hugging import OPENED6_HUGGING
from tests.lab.opened6_live import OPENED6_LIVE
from tests.lab.opened7_faults import OPENED7_FAULTS
from tests.lab.opened7_hugging import OPENED7_HUGGING
from tests.lab.opened7_live import OPENED7_LIVE
from tests.lab.opened8_faults import OPENED8_FAULTS
from tests.lab.opened8_hugging import OPENED8_HUGGING
from tests.lab.opened8_live import OPENED8_LIVE
from tests.lab.opened9_live import OPENED9_LIVE
from tests.lab.opened10_live import OPENED10_LIVE
from tests.lab.opened11_live import OPENED11_LIVE
from tests.lab.opened12_live import OPENED12
from tests.lab.opened13_live import OPENED13
from tests.lab.opened14_healthy import HEALTHY14
from tests.lab.opened14_live import FAULTS14
from tests.lab.opened14_state import STATE14
from tests.lab.opened15_healthy import HEALTHY15
from tests.lab.opened15_live import FAULTS15
from tests.lab.opened16_deliberate import DELIBERATE16
from tests.lab.opened16_faults import FAULTS16
from tests.lab.opened16_healthy import HEALTHY16
from tests.lab.opened17_deliberate import DELIBERATE17
from tests.lab.opened17_faults import FAULTS17
from tests.lab.opened17_healthy import HEALTHY17
from tests.lab.opened18_deliberate import DELIBERATE18
from tests.lab.opened18_faults import FAULTS18
from tests.lab.opened18_healthy import HEALTHY18
from tests.lab.opened19_deliberate import DELIBERATE19
from tests.lab.opened19_faults import FAULTS19
from tests.lab.opened19_healthy import HEALTHY19
from tests.lab.opened20_deliberate import DELIBERATE20
from tests.lab.opened20_faults import FAULTS20
from tests.lab.opened20_healthy import HEALTHY20
from tests.lab.opened21_deliberate import DELIBERATE21
from tests.lab.opened21_faults import FAULTS21
from tests.lab.opened21_healthy import HEALTHY21
from tests.lab.opened22_deliberate import DELIBERATE22
from tests.lab.opened22_faults import FAULTS22
from tests.lab.opened22_healthy import HEALTHY22
from tests.lab.opened23_deliberate import DELIBERATE23
from tests.lab.opened23_faults import FAULTS23
from tests.lab.opened23_healthy import HEALTHY23
from tests.lab.opened_faults import OPENED_FAULTS
from tests.lab.opened_live import OPENED_LIVE
from tests.lab.reports import REPORTS
from tests.lab.trainer_faults import TRAINER_FAULTS
from tests.lab.trials import TRIALS
from tests.lab.wider import WIDER_FAULTS

__all__ = ["ALL", "CONTROLS", "EVERY", "FAULTS", "HALVES", "SEALED", "WIDER"]

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*LOADER_FAULTS, *TRAINER_FAULTS, *CORRUPTIONS)}
WIDER: dict[str, Fault] = {fault.id: fault for fault in WIDER_FAULTS}
CONTROLS: dict[str, Fault] = {fault.id: fault for fault in HEALTHY}
ALL: dict[str, Fault] = FAULTS | WIDER | CONTROLS

#: Faults that were sealed once.
_OPENED = (
    *(*OPENED_FAULTS, *OPENED_LIVE),
    *(*OPENED2_FAULTS, *OPENED2_LIVE, *OPENED2_HUGGING),
    *(*OPENED3_FAULTS, *OPENED3_LIVE, *OPENED3_HUGGING),
    *(*OPENED4_FAULTS, *OPENED4_LIVE, *OPENED4_HUGGING),
    *(*OPENED5_FAULTS, *OPENED5_LIVE, *OPENED5_HUGGING),
    *(*OPENED6_FAULTS, *OPENED6_LIVE, *OPENED6_HUGGING),
    *(*OPENED7_FAULTS, *OPENED7_LIVE, *OPENED7_HUGGING),
    *(*OPENED8_FAULTS, *OPENED8_LIVE, *OPENED8_HUGGING),
    *OPENED9_LIVE,
    *OPENED10_LIVE,
    *OPENED11_LIVE,
    *OPENED12,
    *OPENED13,
    *(*FAULTS14, *STATE14, *HEALTHY14),
    *(*FAULTS15, *HEALTHY15),
    *(*FAULTS16, *HEALTHY16, *DELIBERATE16),
    *(*FAULTS17, *HEALTHY17, *DELIBERATE17),
    *(*FAULTS18, *HEALTHY18, *DELIBERATE18),
    *(*FAULTS19, *HEALTHY19, *DELIBERATE19),
    *(*FAULTS20, *HEALTHY20, *DELIBERATE20),
    *(*FAULTS21, *HEALTHY21, *DELIBERATE21),
    *(*FAULTS22, *HEALTHY22, *DELIBERATE22),
    *(*FAULTS23, *HEALTHY23, *DELIBERATE23),
)
#: Faults whose results are printed only as counts.
SEALED: tuple[Fault, ...] = ()
HALVES: dict[str, dict[str, Fault]] = {
    "dev": ALL | {fault.id: fault for fault in (*TRIALS, *REPORTS, *LIVE_HEALTHY, *HUGGING, *_OPENED)},
    "sealed": {fault.id: fault for fault in SEALED},
}
HALVES["gpu"] = {fault.id: fault for fault in (*ON_GPU, *(one for one in HALVES["dev"].values() if one.live))}
EVERY: dict[str, Fault] = {id: fault for half in HALVES.values() for id, fault in half.items()}
