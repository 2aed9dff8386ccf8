"""The fault matrix: real checkpoints, damaged in every way, and which depth of ``verify`` says so.

A fault counts as found only where an error or a warning names the file or a tensor that was hit. The table in
docs/faults.md is what this module measured: ``python -m tests.test_fault_matrix`` writes it, the test compares.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import workbench as wb
from tests.faults import BYTES, SAMPLES, Case, DoesNotApply, Injected, Sample
from tests.faults_metadata import METADATA
from workbench.analysis import manifest
from workbench.analysis.report import Report
from workbench.analysis.verify import verify

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
FAULTS = {**BYTES, **METADATA}
DEPTHS = ("structure", "content", "manifest")

HEAD = """# What verify finds, and what it cannot

Each cell is one damaged copy of a real checkpoint of `sample_ckpts/`, and the first depth of
[`workbench verify`](verify.md) at which an error or a warning names the file or a tensor that was hit: **structure**
(no payload read), **content** (`--deep`), or only with a **manifest** that was written before. Rules are named as
in the report. *n/a*: the format has no such thing; the reasons are below.

The table is measured: `python -m tests.test_fault_matrix` writes it, a test compares it. Checksums inside the files
were made to fit where the fault could have happened before they were written (NaN, another step), and times of files
were made equal, but for stale metadata.

"""


@dataclass(frozen=True)
class Outcome:
    """What one fault came to."""

    how: str
    depth: str | None  #: None: it does not apply
    rules: tuple[str, ...] = ()

    @property
    def cell(self) -> str:
        if self.depth is None:
            return "*n/a*"
        return f"**{self.depth}**" + (f" {', '.join(f'`{rule}`' for rule in self.rules)}" if self.rules else "")


def named(report: Report, done: Injected) -> tuple[str, ...]:
    """Rules of the errors and warnings that name what was hit; the manifest's own are the caller's to ask for."""
    rules = set()
    for one in report.found:
        text = " ".join((one.where, one.message, json.dumps(one.evidence)))
        if one.severity != "info" and any(name in text for name in done.names):
            rules.add(one.rule)
    return tuple(sorted(rules))


def outcome(sample: Sample, fault: str, folder: Path) -> Outcome:
    """Damage a copy, and verify it ever deeper until it is found."""
    case = Case(sample, folder / "case")
    known = manifest.write(case.ckpt, folder / "known.json", threads=1)
    try:
        done = case.inject(FAULTS[fault])
    except DoesNotApply as why:
        return Outcome(str(why), None)
    for depth in ("structure", "content"):
        report = verify(case.path, deep=depth == "content", threads=1)
        if rules := named(report, done):
            return Outcome(done.how, depth, rules)
    report = verify(case.path, manifest=known, threads=1)
    assert named(report, done), f"{sample.title}, {fault}: not even with a manifest: {report!r}"
    return Outcome(done.how, "manifest")


def measured(samples: tuple[Sample, ...] = SAMPLES) -> dict[tuple[str, str], Outcome]:
    found = {}
    for sample in samples:
        for fault in FAULTS:
            with tempfile.TemporaryDirectory() as folder:
                found[sample.title, fault] = outcome(sample, fault, Path(folder))
    return found


def table(found: dict[tuple[str, str], Outcome]) -> str:
    """The page."""
    titles = [sample.title for sample in SAMPLES]
    lines = [HEAD.rstrip(), "", f"| fault | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for fault in FAULTS:
        cells = [found[title, fault].depth or "*n/a*" for title in titles]
        lines.append(f"| [{fault}](#{fault.lower().replace(' ', '-')}) | {' | '.join(cells)} |")
    lines.append("")
    for fault in FAULTS:
        lines += [f"## {fault[0].upper()}{fault[1:]}", "", "| format | found by | what was done |", "|---|---|---|"]
        for sample in SAMPLES:
            one = found[sample.title, fault]
            lines.append(f"| {sample.title} | {one.cell} | {one.how} |")
        lines.append("")
    counts = {depth: sum(one.depth == depth for one in found.values()) for depth in DEPTHS}
    applies = sum(counts.values())
    lines += [
        "## In all",
        "",
        f"Of {applies} faults, {counts['structure']} are found by the structure alone, {counts['content']} more by the",
        f"content, and {counts['manifest']} cannot be seen without a manifest: plausible numbers of which the files",
        "hold no checksum.",
        "",
    ]
    return "\n".join(lines)


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_every_fault_is_found_where_the_page_says(sample):
    page = PAGE.read_text()
    for fault, one in ((fault, o) for (_, fault), o in measured((sample,)).items()):
        section = page.split(f"## {fault[0].upper()}{fault[1:]}\n", 1)[1].split("\n## ", 1)[0]
        assert f"| {sample.title} | {one.cell} | {one.how} |" in section, (fault, one)


def test_what_must_never_pass_does_not():
    """The page itself: losses show in the structure, NaN in the content, whatever the format."""
    page = PAGE.read_text()
    cells = {}
    for text in page.split("\n## ")[1:]:
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
        cells[text.split("\n", 1)[0]] = [row[2].strip() for row in rows]
    for name in ("Truncation", "Lost chunk", "Overlapping chunk", "Wrong dtype"):
        assert all(cell.startswith(("**structure**", "*n/a*")) for cell in cells[name]), name
    for name in ("NaN", "Zeroed page", "Zeroed tail"):
        assert all(cell.startswith(("**structure**", "**content**")) for cell in cells[name]), name
    assert sum(cell.startswith("**manifest**") for row in cells.values() for cell in row) < 20


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_a_healthy_copy_is_clean_at_every_depth(sample, tmp_path):
    case = Case(sample, tmp_path / "case")
    known = manifest.write(wb.open(case.path, cache=False), tmp_path / "known.json", threads=1)
    for report in (verify(case.path), verify(case.path, deep=True), verify(case.path, deep=True, manifest=known)):
        assert report.exit_code == 0, report


if __name__ == "__main__":
    PAGE.write_text(table(measured()))
    print(PAGE.read_text().rpartition("## In all")[2].strip())
