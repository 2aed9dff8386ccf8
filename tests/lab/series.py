"""A whole run on disk: its regular checkpoints before and after one resume.

::

    step-200/  step-220/  step-240/ │ step-260/  step-280/  step-300/
                          resumed from; damaged, if the fault damages files
"""

from __future__ import annotations

from pathlib import Path

from tests.lab.cache import made
from tests.lab.case import checked, restored, write_echo
from tests.lab.config import Config
from tests.lab.fault import Fault
from tests.lab.formats import FORMATS
from tests.lab.run import run
from tests.lab.state import State
from tests.lab.train import train

__all__ = ["series"]


def series(
    fault: str, config: Config | None = None, format: str = "dcp", *, every: int = 20, count: int = 3, seed: int = 0
) -> Path:
    """The run's folder, with ``count`` checkpoints up to the resume and as many after it, ``every`` updates apart.

    Raises:
        ValueError: as `case` does; or the files cannot be loaded, so that nothing follows; or the run is too short.
    """
    found, config = checked(fault, config, format)
    first = config.resume - every * (count - 1)
    if first < 1:
        raise ValueError(f"the first of {count} checkpoints would be at step {first}")
    name = "-".join(["series", config.digest, format, fault, str(every), str(count), str(seed)])
    return made(name, lambda to: _write(to, found, config, format, every, count, seed))


def _write(root: Path, found: Fault, config: Config, format: str, every: int, count: int, seed: int) -> None:
    for step in range(config.resume - every * (count - 1), config.resume, every):
        FORMATS[format].save(root / f"step-{step}", run(config).at(step), None)
    here = root / f"step-{config.resume}"
    if found.restore is not None:  # the files are right
        FORMATS[format].save(here, run(config).resumed, None)
        state: State | None = restored(found, config, format, seed)[0]
    else:
        state = write_echo(here, found, config, format, seed)
    if state is None:
        raise ValueError(f"{found.id}: nothing can be loaded, so that nothing follows")
    for number in range(1, count + 1):
        state, _, _ = train(state, every, micro=found.micro)
        FORMATS[format].save(root / f"step-{config.resume + number * every}", state, None)
