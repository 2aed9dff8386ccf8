"""To a GPU, where this machine has one: whether the tensors fit, and how fast they get there.

Torch is imported only where a device's file is there or somebody has imported it already: it costs seconds and memory.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import panel as pn

from workbench.app import style
from workbench.app.exporting import CASTS, Choice
from workbench.app.jobs import Schedule, Tick
from workbench.app.state import WorkbenchState
from workbench.app.words import count, html, size
from workbench.app.work import Work
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.reshard.report import ExportReport

__all__ = ["OnDevice", "devices"]

FILES = ("/dev/nvidiactl", "/dev/kfd")


def devices() -> list[str]:
    """``cuda:0`` … of this machine; in a job, for torch may have to be imported."""
    if "torch" not in sys.modules and not any(map(os.path.exists, FILES)):
        return []
    import torch

    return [f"cuda:{at}" for at in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


class OnDevice(pn.viewable.Viewer):
    """The figures of a plan for one device, and a load that is timed and let go."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state, self.device = state, ""
        self._words, self._told = style.pane(""), style.pane("")
        self.work = Work("Load and time", self._load, self._done, verb="loading", schedule=schedule, long=True)
        self._body = pn.Column(self._words, self.work, self._told, sizing_mode="stretch_width")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop loading."""
        self.work.reset()

    def offer(self, plan: ExportReport, there: list[str]) -> None:
        """What the plan's tensors take of the first device."""
        self.work.reset()
        self.device, self._told.object = there[0], ""
        needs, free, total = _needs(plan), *_memory(self.device)
        fits = "fits" if needs < free else "does not fit"
        rank = f" (rank {self._rank()} of {html(plan.mesh)}; the fullest file is counted)" if plan.mesh else ""
        self._words.object = (
            f"<h3>To {html(self.device)}</h3><p>{size(needs)} of tensors{rank}; {size(free)} of {size(total)} "
            f'are free: it {fits}.</p><p class="muted">In Python: <span class="name">workbench.open(…).to_device('
            f"{html(repr(self.device))})</span>. Here the tensors are loaded, timed, and let go.</p>"
        )

    def _rank(self) -> int:
        return int(self._state.rank) if self._state.rank.isascii() and self._state.rank.isdecimal() else 0

    def _load(self, tick: Tick) -> tuple[int, int, float]:
        choice = Choice.of(self._state)
        if choice.rename or choice.cast.startswith("fp8"):
            raise UsageError("names and FP8 are made in files alone; choose names as stored and another type")
        if choice.cast not in CASTS:
            raise UsageError(f"there is no type {choice.cast!r}")
        lease = self._state.hold(choice.path)
        try:
            chosen, _ = choice.narrowed(lease.checkpoint, tick)
            began = time.perf_counter()
            tensors = chosen.to_device(
                self.device,
                role=choice.role or "model",
                mesh=choice.mesh or None,
                rank=self._rank() if choice.mesh else None,
                dtype=choice.cast or None,
                tick=tick,
            )
            for one in list(tensors.values())[-1:]:
                one.reshape(-1)[:1].cpu()  # what is queued on the device is done
            return len(tensors), sum(one.nbytes for one in tensors.values()), time.perf_counter() - began
        finally:
            lease.release()

    def _done(self, found: tuple[int, int, float]) -> None:
        tensors, nbytes, seconds = found
        self._told.object = style.message(
            f"{count(tensors)} tensors, {size(nbytes)}, were on {self.device} after {seconds:.2f} s: "
            f"{nbytes / seconds / 1e9:.2f} GB/s. They are let go again."
        )


def _needs(plan: ExportReport) -> int:
    """Bytes on one device: of all tensors, or of the fullest file where each is a rank's."""
    held: dict[str, int] = {}
    for one in plan.tensors:
        file = one.file if plan.mesh else ""
        held[file] = held.get(file, 0) + one.nbytes
    return max(held.values(), default=0)


def _memory(device: str) -> tuple[int, int]:
    """Free and all bytes."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)
