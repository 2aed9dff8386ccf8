"""Cut training logs down to the steps around a resume and a spike: ``python make_logs.py SOURCE``.

SOURCE holds one folder per format, as the issue on logs describes: 120 steps, a checkpoint at 60, death at 72, steps 61
to 72 again, a spike of 1.7 nats at 93. Printed logs and JSON lines keep the steps from 59 to 99; databases keep these
steps of the table of metrics; everything else is copied. ``truth.json`` is cut to the same steps.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import sys
from pathlib import Path

FIRST, LAST = 59, 99
HERE = Path(__file__).resolve().parents[1] / "logs"
STEP = {
    "composer": r"\[batch=(\d+)/", "deepspeed": r"\b(?:steps: |step=|global_step=)(\d+)", "fairseq2": r"\(step (\d+)\)",
    "levanter": r'"step": (\d+)', "maxtext": r"completed step: (\d+)", "megatron": r"iteration +(\d+)/",
    "nanogpt": r"iter (\d+):", "nemo": r"iteration (\d+)/", "openrlhf": r" (\d+)/120 \[",
    "paddlenlp": r"global_step: (\d+)", "torchtitan": r"step: +(\d+) ", "verl": r"\) step:(\d+) ",
    "vescale": r"iter (\d+) ",
    "llamafactory": r'"current_steps": (\d+)', "fairseq2_jsonl": r'"Step": (\d+)', "verl_jsonl": r'"step": (\d+)',
    "torchtune": r"Step (\d+) ",
}  # fmt: skip


def cut(kind: str, text: str) -> str:
    keep, out = True, []
    for line in text.splitlines(keepends=True):
        found = re.search(STEP[kind], re.sub(r"\x1b\[[0-9;]*m", "", line))
        if found:
            keep = FIRST <= int(found[1]) <= LAST
        elif kind != "composer" or not line.startswith("\t"):
            keep = True
        if keep:
            out.append(line)
    return "".join(out)


def cut_trainer(name: str, text: str) -> str:
    if name.endswith(".json"):
        state = json.loads(text)
        state["log_history"] = [row for row in state["log_history"] if FIRST <= row["step"] <= LAST]
        return json.dumps(state) + "\n"
    out, keep = [], False
    for part in re.split(r"(?=\n\{'loss)", text):  # a row, then the bar that shows its step
        bar = re.search(r"(\d+)/120 \[", part)
        keep = FIRST <= int(bar[1]) <= LAST if bar and part.startswith("\n{") else keep
        out.append(part if keep else "")
    return "".join(out)


def main(source: Path) -> None:
    for kind in sorted(path.name for path in source.iterdir()):
        truth = json.loads((source / kind / "spiky" / "truth.json").read_text())
        target = HERE / kind
        shutil.rmtree(target, ignore_errors=True)
        for name in truth["files"]:
            if (
                name.endswith((".lock", "requirements.txt", ".runName", ".user"))
                or "checkpoint-100" in name
                or "checkpoint-80" in name
            ):
                continue
            old, new = source / kind / "spiky" / name, target / name
            new.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(("trainer_state.json", "train.log")) and kind == "hf_trainer":
                new.write_text(cut_trainer(name, old.read_text("utf-8")), "utf-8")
            elif kind in STEP:
                new.write_bytes(cut(kind, old.read_text("utf-8")).encode())
            elif name.endswith(".db"):
                shutil.copyfile(old, new)
                with sqlite3.connect(new) as database:
                    database.execute("pragma journal_mode = delete")
                    names = [row[0] for row in database.execute("select name from sqlite_master where type = 'table'")]
                    for table in names:
                        if table not in ("metrics", "sqlite_sequence"):
                            database.execute(f'drop table "{table}"')
                database.execute("delete from metrics where step not between ? and ?", (FIRST, LAST))
                database.commit()
                database.execute("pragma page_size = 512")
                database.execute("vacuum")
                database.close()
            else:
                shutil.copyfile(old, new)
            new.chmod(0o644)
        if kind in STEP or kind in ("mlflow_sqlite", "trackio", "hf_trainer"):
            truth["attempts"] = [
                [max(a, FIRST), min(b, LAST)] for a, b in truth.get("visible_attempts", truth["attempts"])
            ]
            truth["first_step"], truth["last_step"] = truth["attempts"][0][0], LAST
            truth["logged_points"] = sum(b - a + 1 for a, b in truth["attempts"])
        kept = ("kind", "made_by", "source", "step_unit", "first_step", "last_step", "attempts", "logged_points")
        truth = {name: truth[name] for name in (*kept, "resumes", "spikes")}
        (target / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
