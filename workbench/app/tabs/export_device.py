"""Loading to a GPU, if this machine has one: whether the tensors fit, and how fast they load.

PyTorch is imported only if a device file exists or it is imported already: the import costs seconds and memory.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import panel as pn

from workbench.app import style
from workbench.app.exporting import CASTS, ExportChoice
from workbench.app.jobs import Progress, Schedule
from workbench.app.state import WorkbenchState
from workbench.app.words import count, html, size
from workbench.app.work import JobButton
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.export.report import ExportReport

FILES = ("/dev/nvidiactl", "/dev/kfd")


def devices() -> list[str]:
    """Return ``cuda:0`` … of this machine; call it in a job, since it may import PyTorch."""
    if "torch" not in sys.modules and not any(map(os.path.exists, FILES)):
        return []
    import torch

    return [f"cuda:{at}" for at in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


class OnDevice(pn.viewable.Viewer):
    """The figures of a plan for one device, and a timed load whose tensors are then released."""

    def __init__(self, state: WorkbenchState, schedule: Schedule | None = None, **params: Any) -> None:
        super().__init__(**params)
        self._state, self.device = state, ""
        self._words, self._result = style.pane(""), style.pane("")
        self.work = JobButton("Load and time", self._load, self._done, verb="loading", schedule=schedule, long=True)
        self._body = pn.Column(self._words, self.work, self._result, sizing_mode="stretch_width")

    def __panel__(self) -> pn.viewable.Viewable:
        return self._body

    def close(self) -> None:
        """Stop loading."""
        self.work.reset()

    def offer(self, plan: ExportReport, devices: list[str]) -> None:
        """Show how much memory of the first device the plan's tensors need."""
        self.work.reset()
        self.device, self._result.object = devices[0], ""
        needs, free, total = _needs(plan), *_memory(self.device)
        fits = "fits" if needs < free else "does not fit"
        rank = f" (rank {self._rank()} of {html(plan.mesh)}; the largest file counts)" if plan.mesh else ""
        self._words.object = (
            f"<h3>To {html(self.device)}</h3><p>{size(needs)} of tensors{rank}; {size(free)} of {size(total)} "
            f'are free: it {fits}.</p><p class="muted">In Python: <span class="name">workbench.open(…).to_device('
            f"{html(repr(self.device))})</span>. Here, the tensors are loaded, timed, and released.</p>"
        )

    def _rank(self) -> int:
        return int(self._state.rank) if self._state.rank.isascii() and self._state.rank.isdecimal() else 0

    def _load(self, progress: Progress) -> tuple[int, int, float]:
        choice = ExportChoice.of(self._state)
        if choice.rename or choice.cast.startswith("fp8"):
            raise UsageError("renaming and FP8 are available only for files; choose names as stored and another dtype")
        if choice.cast not in CASTS:
            raise UsageError(f"there is no dtype {choice.cast!r}")
        lease = self._state.hold(choice.path)
        try:
            chosen, _ = choice.narrowed(lease.checkpoint, progress)
            began = time.perf_counter()
            tensors = chosen.to_device(
                self.device,
                role=choice.role or "model",
                mesh=choice.mesh or None,
                rank=self._rank() if choice.mesh else None,
                dtype=choice.cast or None,
                progress=progress,
            )
            for one in list(tensors.values())[-1:]:
                one.reshape(-1)[:1].cpu()  # wait for work queued on the device
            return len(tensors), sum(one.nbytes for one in tensors.values()), time.perf_counter() - began
        finally:
            lease.release()

    def _done(self, found: tuple[int, int, float]) -> None:
        tensors, nbytes, seconds = found
        self._result.object = style.message(
            f"{count(tensors)} tensors, {size(nbytes)}, loaded to {self.device} in {seconds:.2f} s: "
            f"{nbytes / seconds / 1e9:.2f} GB/s. They have been released."
        )


def _needs(plan: ExportReport) -> int:
    """Return the bytes on one device: of all tensors, or of the largest file if each belongs to a rank."""
    held: dict[str, int] = {}
    for one in plan.tensors:
        file = one.file if plan.mesh else ""
        held[file] = held.get(file, 0) + one.nbytes
    return max(held.values(), default=0)


def _memory(device: str) -> tuple[int, int]:
    """Return free and total bytes."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)
