"""Runs of a made-up trainer that dies and is started again, logged in ten ways, and how well its resumes are found.

::

    python -m tests.lab.restarts [SEED …]

A run has up to three restarts from one of its checkpoints, a row every 1 to 20 steps, and a way of logging: which
counters a row has, whether restarts append, truncate or begin a file, and whether the program prints a line about them.
Half of the restarts happen right after a save: no step is logged twice. A restart counts as traced if something in the
files shows it; a run without restarts pauses, evaluates and passes epochs all the same.

A resume is a hit if its step is that of the first row after the restart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

KINDS = (
    "hf",
    "hf_bars",
    "hf_state",
    "jsonl",
    "factory",
    "csv",
    "megatron",
    "titan",
    "nanogpt",
    "deepspeed",
    "fairseq2",
    "lightning",
)
#: What a program prints when it goes on; ``None``: nothing.
LINES = {
    "hf": (
        "  Continuing training from global step {at}",
        "Resuming training from checkpoint with epoch 0 and global step {at}",
    ),
    "megatron": (
        "  successfully loaded checkpoint from out [ t 1/1, p 1/1 ] at iteration {at}",
        " loading distributed checkpoint from out at iteration {at}",
    ),
    "titan": ("[titan] x - root - INFO - Loading the checkpoint from outputs/checkpoint/step-{at}.",),
    "nanogpt": (
        "Resuming training from out",
        "=> loaded checkpoint 'out/ckpt-{at}.pt' (epoch 2)",
        "Resumed from step {at}",
    ),
    "deepspeed": ("[Torch] Loading checkpoint from out/global_step{at}/mp_rank_00_model_states.pt...",),
    "fairseq2": ("[Rank 0] T INFO fairseq2 - Training restored. Resuming from step {at}.",),
}
BEFORE = ("Loading checkpoint shards: 100%|####| 4/4 [00:01<00:00, 3.9it/s]", "loading dataset from /data/step 4", "")


@dataclass
class Made:
    """A run's files, and the first steps logged after each restart; those that leave a trace."""

    kind: str
    restarts: list[int] = field(default_factory=list)
    traced: list[int] = field(default_factory=list)


@dataclass
class Attempt:
    first: int
    last: int
    rows: list[dict[str, Any]] = field(default_factory=list)


def attempts(r: np.random.Generator, interval: int) -> tuple[list[Attempt], int]:
    """Starts of one run, and how many steps an epoch has."""
    save = interval * int(r.integers(4, 12))
    last = save * int(r.integers(6, 12))
    epoch = int(r.integers(last // 4, last))
    out, at = [Attempt(1, last)], 0
    for _ in range(int(r.choice([0, 1, 1, 2, 3]))):
        low = at + save
        if low >= last - save:
            break
        newest = int(r.integers(low // save, last // save)) * save
        dies = newest + (0 if r.random() < 0.5 else int(r.integers(interval, save)))
        out[-1].last = dies
        at = newest if r.random() < 0.8 or newest - save <= at else newest - save
        out.append(Attempt(at + 1, last))
    return out, epoch


def make(folder: Path, seed: int) -> Made:
    """Write one run."""
    r = np.random.default_rng((77, seed))
    kind = KINDS[seed % len(KINDS)]
    interval = int(r.choice([1, 5, 10, 20]))
    starts, per_epoch = attempts(r, interval)
    noise, clock = r.normal(0, 0.02, starts[-1].last + 1), 1.7e9
    jitter = float(r.choice([0, 1e-3]))
    for start in starts:
        began = clock + float(r.uniform(30, 900))  # dead, then starting
        clock = began + float(r.uniform(5, 40))
        for step in range(-(-start.first // interval) * interval, start.last + 1, interval):
            clock += interval * 0.9 + (r.uniform(60, 300) if r.random() < 0.02 else 0)
            loss = 2 + 3 * np.exp(-step / 100) + noise[step] + jitter * r.normal()
            start.rows.append(
                {
                    "step": step,
                    "loss": float(loss),
                    "lr": 1e-3 * (1 - step / (starts[-1].last + 1)),
                    "epoch": step / per_epoch,
                    "elapsed": clock - began,
                    "tokens": step * 4096,
                    "time": clock,
                }
            )
    starts = [one for one in starts if one.rows]
    made = Made(kind, [one.rows[0]["step"] for one in starts[1:]])
    traced = write(folder, kind, starts, interval, r)
    for before, after in pairwise(starts):
        first, last = after.rows[0], before.rows[-1]
        again = first["step"] < last["step"] or (
            first["step"] == last["step"] and jitter > 0
        )  # or else it is one point
        timed = first["elapsed"] + 1 < last["elapsed"]
        if again or (timed if traced == "timer" else traced):
            made.traced.append(first["step"])
    if traced == "last":
        made.restarts = made.traced = made.restarts[-1:]
    return made


def write(folder: Path, kind: str, starts: list[Attempt], interval: int, r: np.random.Generator) -> str:
    """Write the files; returns what shows every restart, or ``last``: only the last start is left."""
    if kind == "hf_state":
        rows = [{"step": x["step"], "loss": x["loss"], "epoch": x["epoch"]} for one in starts for x in one.rows]
        rows = [x for n, x in enumerate(rows) if all(x["step"] < y["step"] for y in rows[n + 1 :])]
        path = folder / "checkpoint-1" / "trainer_state.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"log_history": rows}))
    if kind in ("hf_state", "hf_bars"):
        total = starts[-1].last
        text = ""
        for start in starts:
            for x in start.rows:
                hours, rest = divmod(int(x["elapsed"]), 3600)
                shown = f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"
                text += f"{{'loss': {x['loss']:.4f}, 'learning_rate': {x['lr']:.4e}, 'epoch': {x['epoch']:.2f}}}\n"
                text += f"  1%|#         | {x['step']}/{total} [{shown}<10:00, 1.1it/s]\r"
        (folder / "train.log").write_text(text)
        return "timer"
    if kind in ("jsonl", "factory"):
        name = "elapsed_time" if r.random() < 0.6 or kind == "factory" else ""
        many = kind == "jsonl" and r.random() < 0.4
        names = {"step": "current_steps", "lr": "lr"} if kind == "factory" else {"step": "step", "lr": "learning_rate"}
        for n, start in enumerate(starts):
            with (folder / (f"metrics-{n}.jsonl" if many else "trainer_log.jsonl")).open("a") as handle:
                for x in start.rows:
                    row = {names["step"]: x["step"], "loss": x["loss"], names["lr"]: x["lr"], "epoch": x["epoch"]}
                    if name:
                        t = int(x["elapsed"])
                        text = f"{t // 3600}:{t // 60 % 60:02}:{t % 60:02}"
                        row[name] = text if kind == "factory" else x["elapsed"]
                    handle.write(json.dumps(row) + "\n")
                    if x["step"] % (interval * 7) == 0:
                        handle.write(json.dumps({names["step"]: x["step"], "eval_loss": 2.5, "epoch": int(x["epoch"])}))
                        handle.write("\n")
        return "file" if many else "timer" if name else ""
    if kind in ("csv", "lightning"):
        header = kind == "csv" and r.random() < 0.3
        for n, start in enumerate(starts):
            path = folder / (f"lightning_logs/version_{n}/metrics.csv" if kind == "lightning" else "log.csv")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as handle:
                if n == 0 or header or kind == "lightning":
                    handle.write("epoch,step,train_loss,lr,consumed_tokens\n")
                for x in start.rows:
                    handle.write(f"{x['epoch']},{x['step']},{x['loss']},{x['lr']},{x['tokens']}\n")
        return "file" if kind == "lightning" or header else ""
    said = LINES.get(kind, ())
    line = said[int(r.integers(0, len(said)))] if said and r.random() < 0.7 else ""
    erased = bool(line) and "{at}" in line and r.random() < 0.25
    text = ""
    for n, start in enumerate(starts):
        text = "" if erased else text
        text += BEFORE[int(r.integers(0, 3))] + "\n"
        if n and line:
            text += line.format(at=start.first - 1) + "\n"
        for x in start.rows:
            text += printed(kind, x, starts[-1].last) + "\n"
            if r.random() < 0.03:
                text += "saved checkpoint to out/checkpoint-5; validation loss 2.5\n"
        if kind == "hf" and n == len(starts) - 1:
            text += "{'train_runtime': 12.5, 'train_loss': 2.5, 'epoch': 3.0}\n"
    (folder / "train.log").write_text(text)
    return "last" if erased else line


def printed(kind: str, x: dict[str, Any], total: int) -> str:
    """One row as a program prints it."""
    step, loss, lr = x["step"], x["loss"], x["lr"]
    if kind == "hf":
        return f"{{'loss': '{loss:.4f}', 'learning_rate': '{lr:.4e}', 'epoch': '{x['epoch']:.4g}'}}"
    if kind == "megatron":
        fields = f"consumed samples: {x['tokens']:12d} | learning rate: {lr:.6E} | lm loss: {loss:.6E} |"
        return f" iteration {step:8d}/ {total:7d} | {fields}"
    if kind == "titan":
        fields = f"loss: {loss:8.5f}  grad_norm:  0.7432  memory: 1.00GiB(1.00%)  tps: 6,512"
        return f"[titan] T - root - INFO - step: {step:2}  {fields}"
    if kind == "nanogpt":
        return f"iter {step}: loss {loss:.4f}, time 12.50ms, mfu 31.20%"
    if kind == "deepspeed":
        return f"steps: {step} loss: {loss:.4f} iter time (s): 0.900 samples/sec: 35.5"
    return f"[Rank 0] T INFO fairseq2 - Train Metrics (step {step}) - NLL Loss: {loss:.4f} | Gradient Norm: 0.7"


def measured(seed: int, count: int = 120) -> dict[str, list[int]]:
    """Return, by kind: hits, false ones, restarts, and those that left a trace."""
    import workbench as wb

    table: dict[str, list[int]] = {}
    for number in range(count):
        with tempfile.TemporaryDirectory() as name:
            made = make(Path(name), 1000 * seed + number)
            run = wb.run(name)
            found = [int(step) for step in run.resumes["step"]]
            if made.kind == "hf":  # its steps are the numbers of its rows
                hits = min(len(found), len(made.traced))
                false = len(found) - hits
            else:
                hits, false = len(set(found) & set(made.traced)), len(set(found) - set(made.restarts))
            row = table.setdefault(made.kind, [0, 0, 0, 0])
            for n, value in enumerate((hits, false, len(made.restarts), len(made.traced))):
                row[n] += value
            if "-v" in sys.argv and (false or hits < len(made.traced)):
                print(1000 * seed + number, made, found)
    return table


if __name__ == "__main__":
    for seed in [int(word) for word in sys.argv[1:] if word.isdigit()] or [1]:
        table = measured(seed)
        hits, false, restarts, traced = (sum(row[n] for row in table.values()) for n in range(4))
        precision, recall = hits / max(1, hits + false), hits / max(1, traced)
        print(f"seed {seed}: precision {precision:.3f}, recall {recall:.3f} of {traced} traced of {restarts} restarts")
        print(" ", dict(sorted(table.items())))
