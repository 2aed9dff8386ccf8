"""A small trainer whose resumes go wrong in known ways, for the doctor's tests.

>>> from tests import lab
>>> case = lab.case("f01_drop_opt", lab.Config(betas=(0.9, 0.999)), "megatron", k=1)  # doctest: +SKIP
>>> case.before, case.echo, case.after, case.cause, case.expected, case.facts.rates  # doctest: +SKIP

``python -m tests.lab.accuracy`` counts how often the doctor is right, in the development half or a sealed one.

The first case of a configuration trains it (some seconds); another one costs a save, and
its k updates where the later checkpoint is asked for.
"""

from tests.lab.case import Case, Facts, case, restored
from tests.lab.catalogue import ALL, CONTROLS, EVERY, FAULTS, HALVES, WIDER
from tests.lab.config import Config, random_config
from tests.lab.fault import EVIDENCE, Fault
from tests.lab.formats import FORMATS, LAYOUTS
from tests.lab.healthy import random_pair
from tests.lab.run import Run, run
from tests.lab.series import series
from tests.lab.state import State
from tests.lab.train import train

__all__ = [
    "ALL",
    "CONTROLS",
    "EVERY",
    "EVIDENCE",
    "FAULTS",
    "FORMATS",
    "HALVES",
    "LAYOUTS",
    "WIDER",
    "Case",
    "Config",
    "Facts",
    "Fault",
    "Run",
    "State",
    "case",
    "random_config",
    "random_pair",
    "restored",
    "run",
    "series",
    "train",
]
