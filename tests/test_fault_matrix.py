"""The fault matrix: real checkpoints, damaged in every way, and which depth of ``verify`` says so.

A fault counts as found only where an error or a warning names the file or a tensor that was hit. Single-bit flips are
counted by where they fall as well. The tables in docs/faults.md are what this module measured:
``python -m tests.test_fault_matrix`` writes them, the tests compare.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.faults import BYTES, SAMPLES, Case, DoesNotApply, Injected, Sample, checked_records
from tests.faults_metadata import METADATA
from workbench.analysis import manifest
from workbench.analysis.manifest_entries import Manifest
from workbench.analysis.report import Report
from workbench.analysis.verify import verify
from workbench.core import codecs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
FAULTS = {**BYTES, **METADATA}
DEPTHS = ("structure", "content", "manifest")

HEAD = """# What verify finds, and what it cannot

Each cell stands for one damaged copy of a real checkpoint of `sample_ckpts/` (the tests write the NVRx files, in the
way Megatron-core pickles them). It shows the first depth of [`workbench verify`](verify.md) at which an error or a
warning names the damaged file or tensor: **structure** (no payload is read), **content** (`--deep`), or only with a
**manifest** that was written earlier. Rules are named as in the report. *n/a* means that the fault cannot occur in this
format; the reasons are given below.

The table is measured: `python -m tests.test_fault_matrix` writes it, and a test compares it. If a fault can happen
before checksums are written (NaN, another step), the checksums inside the files were adjusted to match. The times of
all files were made equal, except for stale metadata.

"""

BARE = (codecs.RAW, codecs.RAW_BE, codecs.LATIN1_TEXT)  #: codecs of chunks that are not an archive of their own
FLIPS = 16  #: of each sample in each kind of bytes
WHERE = ("records with a CRC", "tensors without a CRC", "the rest")
FLIPS_HEAD = f"""## Single-bit flips, by where they fall

`torch.save` stores a CRC-32 with each record of an archive. Many formats consist of such archives, in part or as a
whole: `--deep` always finds a flip in one of their records, in tensors and in non-tensor state (random states,
schedulers, arguments). For other bytes, most formats store no checksum.

In each kind of bytes, up to {FLIPS} bits of each checkpoint were flipped, one at a time. The numbers count
the depths at which an error or a warning appeared first.

- *{WHERE[0]}*: each bit is in another record, and the files take turns.
- *{WHERE[1]}*: any byte of a tensor outside such records.
- *{WHERE[2]}*: headers, directories of archives, padding, metadata, JSON.
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
    for one in report:
        text = " ".join((one.where, one.message, json.dumps(one.evidence)))
        if one.severity != "info" and any(name in text for name in done.names):
            rules.add(one.rule)
    return tuple(sorted(rules))


def outcome(healthy: Case, known: Manifest, fault: str, folder: Path) -> Outcome:
    """Damage a copy, and verify it ever deeper until it is found."""
    sample = healthy.sample
    case = Case(sample, folder / "case", healthy)
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
        with tempfile.TemporaryDirectory() as base:
            healthy = Case(sample, Path(base) / "healthy")
            known = manifest.write(healthy.ckpt, Path(base) / "known.json", threads=1)
            for fault in FAULTS:
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    found[sample.title, fault] = outcome(healthy, known, fault, Path(folder))
    return found


def places(case: Case) -> dict[str, list[tuple[Path, int]]]:
    """Where bits are flipped: files and bytes, by kind of bytes."""
    chance = random.Random(case.sample.title)
    paths = sorted(path for path in case.folder.rglob("*") if path.is_file()) if case.path.is_dir() else [case.path]
    records: list[list[tuple[Path, int, int]]] = []
    bare: list[tuple[Path, int, int]] = []
    rest: list[tuple[Path, int, int]] = []
    c = case.catalog
    for path in paths:
        data = path.read_bytes()
        kind = np.full(len(data), 2, np.uint8)
        name = path.relative_to(case.folder).as_posix()
        for row in range(c.chunks):
            if c.files[c.file[row]] == name and c.codec[row] in BARE:
                kind[int(c.start[row]) : int(c.stop[row])] = 1
        ranges = checked_records(data)
        for _, start, stop in ranges:
            kind[start:stop] = 0
        edges = np.flatnonzero(np.diff(kind)) + 1
        spans = zip([0, *edges.tolist()], [*edges.tolist(), len(data)], strict=True)
        for start, stop in spans if len(data) else ():
            if kind[start]:
                (bare if kind[start] == 1 else rest).append((path, start, stop))
        records.append([(path, start, stop) for _, start, stop in ranges])
    for of_file in records:
        chance.shuffle(of_file)
    turns = [one for turn in itertools.zip_longest(*records) for one in turn if one is not None]
    hit = [(path, chance.randrange(start, stop)) for path, start, stop in turns[:FLIPS]]
    return {
        WHERE[0]: hit,
        **{name: anywhere(spans, chance) for name, spans in zip(WHERE[1:], (bare, rest), strict=True)},
    }


def anywhere(spans: list[tuple[Path, int, int]], chance: random.Random) -> list[tuple[Path, int]]:
    """Bytes of the spans, each as likely as any other."""
    if not spans:
        return []
    chosen = chance.choices(spans, [stop - start for _, start, stop in spans], k=FLIPS)
    return [(path, chance.randrange(start, stop)) for path, start, stop in chosen]


def flips(sample: Sample, folder: Path, kinds: tuple[str, ...] = WHERE) -> dict[str, str]:
    """Cells of a sample's row: how many flips each depth found, by kind of bytes."""
    case = Case(sample, folder / "case")
    known = manifest.write(case.ckpt, folder / "known.json", threads=1)
    ways = {"structure": {}, "content": {"deep": True}, "manifest": {"manifest": known}}
    chance, cells = random.Random(sample.title), {}
    for kind, hit in places(case).items():
        counts = dict.fromkeys(ways, 0)
        bits = [1 << chance.randrange(8) for _ in hit]  # also of kinds that are left out: the others hit the same bits
        for (path, at), bit in zip(hit, bits, strict=True) if kind in kinds else ():
            whole = path.read_bytes()
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            case.settle()
            counts[next(depth for depth, how in ways.items() if verify(case.path, threads=1, **how).exit_code)] += 1
            path.write_bytes(whole)
            case.settle()
        if kind in kinds:
            cells[kind] = ", ".join(f"{depth} {count}" for depth, count in counts.items() if count) or "*none*"
    return cells


def flips_row(sample: Sample) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return f"| {sample.title} | {' | '.join(flips(sample, Path(folder)).values())} |"


def flips_table() -> list[str]:
    """The section on flips."""
    head = [FLIPS_HEAD, f"| format | {' | '.join(WHERE)} |", "|---" * (len(WHERE) + 1) + "|"]
    return [*head, *map(flips_row, SAMPLES), ""]


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
    lines += flips_table()
    counts = {depth: sum(one.depth == depth for one in found.values()) for depth in DEPTHS}
    applies = sum(counts.values())
    lines += [
        "## Total",
        "",
        f"Of {applies} faults, {counts['structure']} are found by checking the structure alone, and",
        f"{counts['content']} more by reading the content. The other {counts['manifest']} can only be found with a",
        "manifest: the damaged numbers are plausible, and the files store no checksum of them.",
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


#: Their files are DCP's with other names; the flips of DCP itself prove the same in a quick run.
AS_DCP = ("ByteCheckpoint", "Megatron torch_dist")
#: Of these, a quick run flips headers and metadata, which each format reads by itself; their archives are DCP's or
#: torch.save's, and bytes without a checksum are the manifest's in any format.
LARGE = ("DeepSpeed", "HF Trainer", "torch.save, legacy", "paddle.save", "PaddleNLP", "torch_checkpointing")


def cells() -> dict[str, dict[str, str]]:
    """The page's rows of flips: sample → kind of bytes → cell."""
    section = PAGE.read_text().split("## Single-bit flips", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[0] == ["format", *WHERE]
    return {title: dict(zip(WHERE, row, strict=True)) for title, *row in rows[1:]}


def flipped() -> list[Any]:
    """Samples and kinds of bytes, with those that are left to the slow tests."""
    found = []
    for sample in SAMPLES:
        for kind in WHERE:
            slow = sample.title in AS_DCP or (sample.title in LARGE and kind != WHERE[2])
            marks = [pytest.mark.slow] * slow
            found.append(pytest.param(sample, kind, marks=marks, id=f"{sample.title}, {kind}"))
    return found


@pytest.mark.parametrize(("sample", "kind"), flipped())
def test_flips_are_found_where_the_page_says(sample, kind, tmp_path):
    assert flips(sample, tmp_path, (kind,)) == {kind: cells()[sample.title][kind]}


def test_a_flip_in_a_record_with_a_crc_needs_no_manifest():
    assert list(cells()) == [sample.title for sample in SAMPLES]
    checked = [row[WHERE[0]] for row in cells().values() if row[WHERE[0]] != "*none*"]
    assert len(checked) > 5 and not any("manifest" in cell for cell in checked)


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
    print(PAGE.read_text().rpartition("## Total")[2].strip())
