"""``loss_spike/`` and ``loss_spike.csv``: a resume whose fp32 masters are those of an older step, and its losses.

::

    loss   ── step 201 … 240 ──┬── as it went: weights of step 240 over masters of step 180     step-240-echo, step-245
                     step-240  └── as it goes with the masters of step 240                      loss_repaired

The run, the fault (``f06_stale_master``) and the files are the fault lab's, ``tests/lab``; it takes half a minute.
"""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import torch
from common import SAMPLES, publish, truth_of, write_truth

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests import lab

FAULT, LAYOUT = "f06_stale_master", "torch_save"
RUN = lab.Config(
    layers=2, hidden=16, ffn=32, vocab=30, padded=32, precision="mixed", batch=64, lr=8e-3, min_lr=8e-4, resume=240
)  # fmt: skip
UPDATES = 5  #: that the resumed run made before it saved again
SHOWN = 40  #: steps of the curve before and after the resume
CURVE = "loss_spike.csv"  #: beside the run


def main() -> None:
    case = lab.case(FAULT, RUN, LAYOUT, k=UPDATES)
    Path("loss_spike").mkdir()
    step = RUN.resume
    files = {f"step-{step}": case.before, f"step-{step}-echo": case.echo, f"step-{step + UPDATES}": case.after}
    for name, path in files.items():
        shutil.copy(path, f"loss_spike/{name}.pt")
        # the lab's own file
        write_truth(f"loss_spike/{name}.pt", truth_of(torch.load(path, weights_only=False)))
    run = lab.run(RUN)
    loaded, _ = lab.restored(case.fault, RUN, LAYOUT)
    earlier = lab.train(run.at(RUN.resume - SHOWN), SHOWN)[1]
    went = lab.train(loaded, SHOWN)[1]
    goes = lab.train(run.resumed, SHOWN)[1]
    with open(CURVE, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["step", "loss", "loss_repaired"])
        for at, loss in enumerate(earlier, step - SHOWN + 1):
            lines.writerow([at, f"{loss:.4f}", ""])
        for at, losses in enumerate(zip(went, goes, strict=True), step + 1):
            lines.writerow([at, *(f"{loss:.4f}" for loss in losses)])


if __name__ == "__main__":
    with publish("loss_spike"):
        main()
        shutil.copy(CURVE, SAMPLES)
