"""Every cause of the catalogue by its id.

::

    A names that did not match      E layouts of sharded tensors        G corruption, mixed saves
    B the optimizer's state         F copies, averages, adapters        H deliberate changes
    C schedules, counters, data     D precision and masters
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from workbench.doctor.causes.cause import Cause
from workbench.doctor.causes.files import CHANGES, CORRUPTION
from workbench.doctor.causes.layout import COPIES, LAYOUTS
from workbench.doctor.causes.run import PRECISION, SCHEDULES
from workbench.doctor.causes.state import NAMES, OPTIMIZER

#: First letter of an id → the topic of those causes.
CHAPTERS = {
    "A": "names that did not match",
    "B": "the optimizer's state",
    "C": "schedules, counters, data",
    "D": "precision and masters",
    "E": "layouts of sharded tensors",
    "F": "copies, averages, adapters, vocabulary",
    "G": "corruption and mixed saves",
    "H": "deliberate changes, and the model itself",
}

CAUSES: Mapping[str, Cause] = MappingProxyType(
    {
        cause.id: cause
        for cause in (*NAMES, *OPTIMIZER, *SCHEDULES, *PRECISION, *LAYOUTS, *COPIES, *CORRUPTION, *CHANGES)
    }
)
