"""A run as text: its checkpoints, its log, resumes and spikes, one line each.

::

    RUN  runs/pretrain
      checkpoints  12 of dcp, steps 2,000 to 24,000; 1 incomplete
      log          train.log (torchtitan), 24,120 points, steps 1 to 24,000
      resume       at step 20,001 from step 20,000: 120 steps are logged again
      SPIKE        at step 20,004: +0.41, 18 sigma, recovered at 20,190; compare 'step-20000' with 'step-22000'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.analysis.run import NEAR, NO_LOG, Run, RunComparison, spike_rank
from workbench.core.words import plural
from workbench.views.lines import room, wrap
from workbench.views.names import pad, safe, shorten

HEAD = 15  #: columns of a row's name
SHOWN = 6  #: resumes and spikes that are listed; the tables have all


def run_text(run: Run) -> str:
    """Return the contents of the run, and where its loss jumped."""
    width = room()
    return "\n".join([f"RUN  {shorten(safe(run.path), width and width - 5)}", *run_lines(run)])


def comparison_text(comparison: RunComparison) -> str:
    """Return one line per run: its last step and loss, and what happened to it."""
    width = max(len(safe(name)) for name in comparison.names)
    lines = [plural(len(comparison.runs), "run")]
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        loss = run.metrics["loss"].dropna() if "loss" in run.metrics else None
        last = (
            "no loss logged" if loss is None or not len(loss) else f"step {loss.index[-1]:,}, loss {loss.iloc[-1]:.4g}"
        )
        lines.append(f"  {pad(safe(name), width)}  {last}. {run_sentence(run)}")
    return "\n".join(lines)


def run_lines(run: Run) -> list[str]:
    """Return the same without the first line."""
    return list(_lines(run))


def event_lines(run: Run) -> list[str]:
    """Return the highest spike and the resume before it, or the last resume, and the log: the head of a diagnosis."""
    lines: list[str] = []
    row, spikes, resumes = worst_spike(run), run.spikes, run.resumes.to_dict("records")
    if row is not None:
        name = "LEVEL SHIFT" if row["kind"] == "level shift" else "SPIKE"
        more = f"; {len(spikes) - 1:,} more in wb.run(…).spikes" if len(spikes) > 1 else ""
        lines += _headed(name, f"of the loss {spike_sentence(row)}; {safe(row['advice'])}{more}")
        resumes = [one for one in resumes if one["step"] <= row["step"]]
    for one in resumes[-1:]:
        lines += _headed(
            "RESUMED", f"before step {int(one['step']):,}{_at(' from step', one['from_step'])}: {safe(one['why'])}"
        )
    for row in run.sources.to_dict("records")[:1]:
        points = f"{plural(row['points'], 'point')}, steps {row['first']:,} to {row['last']:,}"
        none = "" if len(spikes) else "; no spike" if "loss" in run.metrics else "; no loss"
        lines += _headed("LOG", f"{safe(row['path'])} ({safe(row['kind'])}): {points}{none}")
    for note in [note for note in run.notes if note != NO_LOG][:2]:  # the doctor does not need a log
        lines += _headed("NOTE", safe(note))
    return lines


def worst_spike(run: Run) -> dict[str, Any] | None:
    """Return the row of ``run.spikes`` that a diagnosis explains by default; ``None`` if there is none."""
    return min(run.spikes.to_dict("records"), key=spike_rank, default=None)


def run_sentence(run: Run) -> str:
    """Return in one sentence whether the loss jumped, and after which resume."""
    row = worst_spike(run)
    resumes = run.resumes.to_dict("records")
    if row is None:
        if not len(run.sources):
            return "No log with a loss was found beside or above the checkpoints."
        if "loss" not in run.metrics:
            return "The log contains no loss, so it was not searched for spikes."
        points = plural(int(run.sources["points"].iloc[0]), "point")
        after = f", {plural(len(resumes), 'resume')}" if resumes else ""
        return f"No jump of the loss was found in {points} of the log{after}."
    verb = {"nan": "is NaN or infinite at", "level shift": "rises and stays up at"}.get(row["kind"], "jumps at")
    by = "" if row["kind"] == "nan" else f" by {row['height']:.2f}"
    before = [one for one in resumes if 0 <= row["step"] - one["step"] <= NEAR]
    since = f", {_since(row, before[-1])}" if before else ""
    others = len(run.spikes) - 1
    more = f" {plural(others, 'more event')} below." if others else ""
    doubt = " (suspected)" if row["suspected"] else ""
    return f"The loss {verb} step {int(row['step']):,}{by}{since}{doubt}.{more}"


def _since(spike: dict[str, Any], resume: dict[str, Any]) -> str:
    steps = int(spike["step"] - resume["step"])
    source = _at(" from step", resume["from_step"])
    return f"{plural(steps, 'step')} after a resume{source}" if steps else f"right after a resume{source}"


def _headed(name: str, words: str) -> list[str]:
    return wrap(f"{name:<{HEAD}}", words)


def spike_sentence(row: dict[str, Any]) -> str:
    """Return ``at step 93: +1.70, 120 sigma, recovered at 110``."""
    step = f"at step {int(row['step']):,}"
    if row["kind"] == "nan":
        return f"{step}: the loss is NaN or infinite at {plural(int(row['points']), 'point')}"
    end = _at(", recovered at", row["end_step"])
    kind = {"unresolved": ", not over when the log ends", "level shift": ", the loss stays up (level shift)"}
    words = f"{step}: +{row['height']:.2f}, {row['sigma']:.0f} sigma{kind.get(row['kind'], '') or end}"
    return words + (" (suspected)" if row["suspected"] else "")


def _lines(run: Run) -> Iterator[str]:
    steps = run.steps
    if len(steps):
        formats = ", ".join(sorted(set(steps["format"])))
        first, last = int(steps["step"].min()), int(steps["step"].max())
        range_ = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        broken = int((~steps["complete"]).sum())
        yield from _row(
            "checkpoints",
            f"{len(steps):,} of {safe(formats)}, {range_}" + (f"; {broken:,} incomplete" if broken else ""),
        )
    sources = run.sources
    for number, row in enumerate(sources.to_dict("records")[:2]):
        words = f"{safe(row['path'])} ({safe(row['kind'])}), {plural(row['points'], 'point')}, steps "
        yield from _row("" if number else "log", f"{words}{row['first']:,} to {row['last']:,}")
    if len(sources) > 2:
        yield from _row("", f"… {len(sources) - 2:,} more")
    resumes = run.resumes.to_dict("records")
    for row in resumes[-SHOWN:]:
        source = _at(" from step", row["from_step"])
        yield from _row("resume", f"at step {int(row['step']):,}{source}: {safe(row['why'])}")
    if len(resumes) > SHOWN:
        yield from _row("", f"… {plural(len(resumes) - SHOWN, 'earlier one')}")
    spikes = run.spikes.to_dict("records")
    high = sorted(spikes, key=spike_rank)[:SHOWN]
    for row in sorted(high, key=lambda row: row["step"]):
        name = "level shift" if row["kind"] == "level shift" else "SPIKE"
        yield from _row(name, f"{spike_sentence(row)}; {safe(row['advice'])}")
    if len(spikes) > SHOWN:
        yield from _row("", f"… {plural(len(spikes) - SHOWN, 'lower one')}")
    if len(sources) and not spikes:
        yield from _row("spikes", "none" if "loss" in run.metrics else "not searched: the log contains no loss")
    for note in run.notes[:3]:
        yield from _row("note", _advised(note))


def _advised(note: str) -> str:
    return safe(f"{note}; name it with logs= or --logs" if note == NO_LOG else note)


def page_notes(run: Run) -> list[str]:
    """Return the notes of a run as a page shows them: there, no option can be typed."""
    advice = f"{NO_LOG}: copy it into the folder of the run, or beside it"
    return [advice if note == NO_LOG else note for note in run.notes]


def _at(words: str, step: Any) -> str:
    """Return the words and a step; empty if it is missing (NaN, or pandas' NA)."""
    try:
        return f"{words} {int(step):,}"
    except (TypeError, ValueError):
        return ""


def _row(name: str, words: str) -> list[str]:
    return wrap(f"  {name:<{HEAD - 2}}", words)
