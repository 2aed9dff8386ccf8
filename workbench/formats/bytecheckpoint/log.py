"""ByteCheckpoint's log lines: the time of each phase of a save on each rank. Nothing else records it.

::

    [2026-11-21 07:51:12][INFO][save_state_dict.py:144][save_state_dict][pid:9] - [Rank = 0] Finish planning.
    └ local time, 1 s ──┘      └ source ────────────┘                   └ process  └ rank, or none   Time cost: 0.02 s

    object "save_log"   {"files": […], "lines": 15,
                         "saves":     [{"rank": 0, "step": 3, "begin": …, "end": …, "seconds": 12.2, "path": …}],
                         "durations": [{"save": 0, "rank": 0, "phase": "planning", "part": "model", "seconds": 1, …}]}

A line without a rank belongs to the rank that its process names in another line. Model and optimizer write the same
lines, in this order. ``part`` is set if a save has the phase once for each of the two, and ``None`` otherwise.

Read from bytecheckpoint 0.0.2 (``utilities/logger.py``, ``workflow/``, ``engine/``) and logs of real saves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from workbench.core.place import Place
from workbench.errors import WorkbenchError

NAME = re.compile(r"log[^/]*", re.IGNORECASE)
LIMIT = 64 << 20  #: maximum bytes of logs to read
HEAD = 64 << 10  #: bytes at a file's beginning that must show such a log
LINE = re.compile(
    r"\[(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\]\[[A-Z]+\]\[[\w.]+:\d+\]\[[^\]]*\]\[pid:(?P<pid>\d+)\] - (?P<text>.*)"
)
RANK = re.compile(r"\[?\b[Rr]ank ?= ?(\d{1,9})\]?|\bRank (\d{1,9}) ")
SECONDS = re.compile(r"(?:time cost|cost time|total time): (?P<n>\d[\d.]*(?:e[-+]?\d+)?) ?s\b", re.IGNORECASE)
STEP = re.compile(r"\bglobal_step=(\d{1,18})\b|BarrierStep(\d{1,18})")
PATH = re.compile(r"to path (.+?)\. Total time")
#: Text of a line with a duration → phase.
PHASES: tuple[tuple[str, str], ...] = (
    ("Finish planning", "planning"),
    ("Finish local file writing and gather metadata", "write"),
    ("Finish storing extra states", "extra_state"),
    ("End waiting for D2H copy", "d2h_copy"),
    ("Finished waiting for local write futures", "wait_for_writes"),
    ("Server_lib finished gathering results", "barrier"),
    ("Finish rpc start", "rpc_start"),
    ("got model shard state dict", "model_state_dict"),
    ("got optimizer shard state dict", "optimizer_state_dict"),
    ("Successfully write checkpoint files", "commit"),
)
BEGIN, END = "Start save function call", "End save function call"
PARTS = {2: ("model", "optimizer"), 3: ("model", "optimizer", "extra_state")}
#: Phases that occur once per part → number of parts.
SHARED = {"planning": 2, "write": 2, "d2h_copy": 2, "wait_for_writes": 3}


def find(place: Place) -> list[str]:
    """Return the names of the log files directly in a folder."""
    return [name for name in place.files if NAME.fullmatch(name)]


def is_one(place: Place, name: str) -> bool:
    """Return whether a file begins like a ByteCheckpoint log."""
    return any(map(LINE.match, place.head(name, HEAD).decode("utf-8", "replace").splitlines()))


def read(places: Sequence[tuple[Place, Sequence[str]]]) -> dict[str, Any]:
    """Return the ``save_log`` object of log files, read in order, with unreadable files and bytes beyond `LIMIT`."""
    texts: list[tuple[str, str]] = []
    skipped: list[str] = []
    left = LIMIT
    for place, names in places:
        for name in names:
            try:
                size = place.stat(name).size
                texts.append((name, place.read(name, length=min(size, left)).decode("utf-8", "replace")))
            except WorkbenchError as error:
                skipped.append(str(error))
                continue
            if size > left:
                skipped.append(f"{name!r}: only its first {left:,} of {size:,} bytes were read")
            left -= min(size, left)
    return parse(texts) | ({"skipped": skipped} if skipped else {})


def parse(texts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the saves and durations in the texts of log files, given as ``(name, text)``."""
    saves: list[dict[str, Any]] = []
    durations: list[dict[str, Any]] = []
    lines = 0
    for name, text in texts:
        found = [match for match in map(LINE.match, text.splitlines()) if match is not None]
        lines += len(found)
        ranks: dict[str, int] = {}
        for match in found:
            if rank := RANK.search(match["text"]):
                ranks.setdefault(match["pid"], int(rank[1] or rank[2]))
        open_: dict[str, int] = {}  # process → its current save
        for match in found:
            _line(match, ranks.get(match["pid"]), name, open_, saves, durations)
    _label(durations)
    return {"files": [name for name, _ in texts], "lines": lines, "saves": saves, "durations": durations}


def _line(
    match: re.Match[str],
    process: int | None,
    file: str,
    open_: dict[str, int],
    saves: list[dict[str, Any]],
    durations: list[dict[str, Any]],
) -> None:
    text, pid, at = match["text"], match["pid"], match["at"]
    named = RANK.search(text)
    rank = int(named[1] or named[2]) if named else process
    if text.startswith(BEGIN):
        open_[pid] = len(saves)
        unknown = dict.fromkeys(("step", "end", "seconds", "path"))
        saves.append({"rank": rank, "begin": at, "file": file, **unknown})
        return
    save = open_.get(pid)
    if save is not None:
        if (step := STEP.search(text)) is not None:
            saves[save]["step"] = int(step[1] or step[2])
        if (path := PATH.search(text)) is not None:
            saves[save]["path"] = path[1]
    seconds = _seconds(text)
    if text.startswith(END):
        if save is not None:
            saves[save] |= {"end": at, "seconds": seconds}
            del open_[pid]
        return
    if seconds is not None:
        phase = next((phase for words, phase in PHASES if words in text), None)
        if phase is not None:
            durations.append({"save": save, "rank": rank, "phase": phase, "part": None, "seconds": seconds, "at": at})


def _seconds(text: str) -> float | None:
    found = SECONDS.search(text)
    try:
        return float(found["n"]) if found else None
    except ValueError:  # "1.2.3"
        return None


def _label(durations: list[dict[str, Any]]) -> None:
    """Set the part of a phase if a save has it as often as there are parts."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in durations:
        if row["phase"] in SHARED and row["save"] is not None:
            groups[row["save"], row["phase"]].append(row)
        elif row["phase"] in ("extra_state", "model_state_dict", "optimizer_state_dict"):
            row["part"] = row["phase"].removesuffix("_state_dict")
    for (_, phase), rows in groups.items():
        if len(rows) == SHARED[phase]:
            for row, part in zip(rows, PARTS[len(rows)], strict=True):
                row["part"] = part
