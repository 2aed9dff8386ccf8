"""Record the phases of torch's saves and loads without a change of the code that calls them.

torch logs the beginning and the end of each step of ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` to its own
logger, which has no handler by default.

Source: torch 2.13 ``torch/distributed/checkpoint/logger.py`` (``_dcp_method_logger``), ``logging_handlers.py``.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.logger import _dcp_logger

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class MonitoredPhase:
    """A step of a save or a load.

    Attributes:
        name: torch's name of the function: ``save``, ``local_step``, ``global_step``, ``write_data``,
            ``finish_checkpoint``, ``async_save``, ``stage_state_dict``, ``load``, ``read_data``, …
        rank: rank in the default process group; 0 without one.
        start: seconds since the epoch.
        checkpoint: the checkpoint id, if torch logs one for this step.
        error: the message of the exception that ended it; empty if it succeeded.
    """

    name: str
    rank: int
    start: float
    seconds: float
    checkpoint: str | None = None
    error: str = ""


class Monitor(logging.Handler):
    """Record the phases of every ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` of this process.

    ::

        with wb.dcp.Monitor() as monitor:
            trainer.fit(model)
        monitor.frame()

    It listens to torch's logger, so it works with any writer. The steps of an asynchronous save in another process
    (``AsyncCheckpointerType.PROCESS``) are logged there and not recorded here.

    Attributes:
        phases: the phases that have ended, in that order.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.phases: list[MonitoredPhase] = []
        self._begun: dict[Any, int] = {}
        self._own = threading.Lock()
        _dcp_logger.addHandler(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; the phases stay."""
        _dcp_logger.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one event of torch's logger."""
        event = record.msg
        if not isinstance(event, dict) or "event" not in event:
            return
        now, key = int(event.get("time", 0)), event.get("uuid")
        with self._own:
            if event["event"] == "start":
                self._begun[key] = now
                return
            begin = self._begun.pop(key, now)
            found = MonitoredPhase(
                str(event.get("func_name", "")),
                dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
                begin / 1e9,
                (now - begin) / 1e9,
                event.get("checkpoint_id"),
                str(event.get("error", "")) if event["event"] == "exception" else "",
            )
            self.phases.append(found)

    def frame(self) -> pd.DataFrame:
        """Return the phases as a table: name rank start seconds checkpoint error."""
        import pandas as pd

        columns = list(MonitoredPhase.__dataclass_fields__)
        return pd.DataFrame([asdict(one) for one in self.phases], columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the phases in JSON types."""
        return {"phases": [asdict(one) for one in self.phases]}
