"""The phases of a save: the slowest rank, the pictures against the record, and records that nobody wrote."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import holoviews as hv
import panel as pn
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_tab_layout import shown

import workbench as wb
from tests.pages import link, tap
from tests.serving import serving
from workbench.analysis import manifest
from workbench.analysis.manifest_file import save as save_manifest
from workbench.analysis.phases import PARTS, phases, phases_of
from workbench.app.tabs.layout import LayoutView
from workbench.cli import main
from workbench.errors import CorruptError, MissingFileError, UsageError
from workbench.views.phases import phases_text, sentences
from workbench.views.phases_pictures import gantt_picture, heat_picture

RANKS, SLOW = 8, 5


def rows(ranks: int = RANKS, slow: int = SLOW) -> list[dict[str, Any]]:
    """A save in which one rank spends 2 s more on its sync."""
    chance, made = random.Random(3), []
    for rank in range(ranks):
        parts = {name: (1 + 0.02 * chance.random()) * at for name, at in zip(PARTS, (0.1, 1, 2, 0.5), strict=True)}
        parts["sync"] += 2 * (rank == slow)
        data = parts["serialise"] + parts["write"] + parts["sync"]
        made += [{"rank": rank, "name": "plan", "start": 100.0, "seconds": 0.25, "nbytes": 0}]
        made += [{"rank": rank, "name": n, "start": 100.25, "seconds": s, "nbytes": 1 << 30} for n, s in parts.items()]
        made += [{"rank": rank, "name": "data", "start": 100.25, "seconds": data, "nbytes": 1 << 30}]
    made += [{"rank": 0, "name": "gather", "start": 102.9, "seconds": 2.1, "nbytes": 0}]
    return [*made, {"rank": 0, "name": "metadata", "start": 105.0, "seconds": 0.5, "nbytes": 0}]


def recorded(path: Path, phases: Any) -> Path:
    """A checkpoint whose manifest has these phases."""
    dcp.save({"w": torch.ones(40)}, storage_writer=wb.dcp.Writer(path), planner=wb.dcp.Planner())
    made = manifest.load(path)
    save_manifest(replace(made, save=dict(made.save) | {"phases": phases}), str(made.path))
    return path


def test_the_slowest_rank_and_its_reason():
    found = phases_of({"phases": rows()}, "a")
    slow = found.slowest
    assert slow is not None and (slow.rank, slow.part, slow.even, found.ranks) == (SLOW, "sync", False, RANKS)
    data = sorted(row["seconds"] for row in rows() if row["name"] == "data")
    assert slow.seconds == data[-1] and slow.typical == pytest.approx((data[3] + data[4]) / 2)
    assert found.total == pytest.approx(5.5) and found.nbytes == RANKS << 30
    first, second = sentences(found)
    assert first.startswith("Rank 5 was the slowest: its data took 4.6") and "its sync 2.5" in first
    assert second == "The save took 5.50 s for 8 GiB, 1.5 GiB/s."
    assert "equally long" in sentences(phases_of({"phases": rows(slow=-1)}, "a"))[0]
    assert sentences(phases_of({"phases": rows(1)}, "a"))[0].startswith("One rank saved")


def test_the_text_has_every_rank_or_the_slowest():
    text = phases_text(phases_of({"phases": rows()}, "a")).split("\n")
    assert [line.split()[0] for line in text[-RANKS:]] == [str(rank) for rank in range(RANKS)]
    assert text[-RANKS].split()[-2:] == ["500", "ms"] and text[-1].endswith("–")
    some = phases_text(phases_of({"phases": rows(40, 33)}, "a"), 4).split("\n")
    assert some[-5].split()[0] == "33" and some[-1] == "  … 36 faster ranks"


def test_the_pictures_are_the_record():
    found = phases_of({"phases": rows()}, "a")
    cells = heat_picture(found).Rectangles.I.data
    wanted = {(row["rank"], row["name"]): row["seconds"] for row in rows()}
    assert len(cells) == len(wanted)
    for _, cell in cells.iterrows():
        rank, name = int(cell["left"]), found.names[int(cell["upper"])]
        assert cell["seconds"] == wanted.pop((rank, name)) and cell["who"] == f"rank {rank}" and cell["phase"] == name
    bars = gantt_picture(found).Rectangles.I.data
    assert len(bars) == 2 * RANKS + 2 and not set(bars["phase"]) & set(PARTS)
    for _, bar in bars.iterrows():
        (row,) = (one for one in rows() if (f"rank {one['rank']}", one["name"]) == (bar["who"], bar["phase"]))
        assert bar["left"] == row["start"] - 100 and bar["right"] - bar["left"] == pytest.approx(row["seconds"])
        assert int(bar["upper"]) == row["rank"]


def test_of_many_ranks_a_column_is_the_slowest_of_its_ranks():
    found = phases_of({"phases": rows(1500, 1333)}, "a")
    cells = heat_picture(found).Rectangles.I.data
    data = cells[cells["phase"] == "data"].reset_index()
    assert len(data) == 500 and data["who"][data["seconds"].idxmax()] == "rank 1333"
    bars = gantt_picture(found).Rectangles.I.data
    assert bars["who"][0] == "rank 1333" or "rank 1333" in set(bars["who"])
    assert hv.renderer("bokeh").get_plot(gantt_picture(found)).state.yaxis[0].major_label_overrides[0.5] == (
        "slowest: 1333"
    )


@pytest.mark.parametrize(
    "stored",
    [
        7,
        "ab",
        [7],
        [{}],
        [{"rank": -1, "name": "data", "start": 0, "seconds": 1}],
        [{"rank": 0, "name": "data", "start": "x", "seconds": 1}],
        [{"rank": 1 << 40, "name": "d", "start": 0, "seconds": 1}],
        [{"rank": 0, "name": "data", "start": 0, "seconds": -1}],
        [{"rank": 0, "name": 4, "start": 0, "seconds": 1}],
        [{"rank": True, "name": "data", "start": 0, "seconds": 1}],
        [{"rank": 0, "name": f"p{n}", "start": 0, "seconds": 1} for n in range(40)],
    ],
)
def test_a_record_that_is_none(stored):
    with pytest.raises(CorruptError, match="'a' has invalid phases"):
        phases_of({"phases": stored}, "a")


def test_partial_and_hostile_records_are_shown(tmp_path):
    strange = [{"rank": 3, "name": "<b>\x1b[31m", "start": 1e18, "seconds": 1e17}]
    found = phases_of({"phases": strange, "notes": ["<img src=x>"]}, "a")
    assert found.slowest is None and "\x1b" not in phases_text(found)
    ckpt = wb.open(recorded(tmp_path / "a", strange))
    view = LayoutView(wb.layout(ckpt), source=ckpt, view="save")
    assert view.looked_at == "save"
    assert "\x1b" not in shown(view.part) and "<img" not in shown(view.part)
    assert pn.panel(view).get_root() is not None
    phases_text(phases_of({"phases": [{"rank": 0, "name": "write", "start": 0, "seconds": 0}]}, "a"))


def test_without_a_record(tmp_path, samples):
    with pytest.raises(MissingFileError, match="no manifest"):
        phases(samples / "dcp_fsdp2")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a")
    wb.seal(tmp_path / "a")
    with pytest.raises(UsageError, match=r"records no phases of the save; only wb\.dcp\.Writer records them"):
        phases(tmp_path / "a")
    ckpt = wb.open(tmp_path / "a")
    view = LayoutView(wb.layout(ckpt), source=ckpt, view="save")
    assert view.looked_at == "all" and "save" not in view.views


def test_the_command(tmp_path, capsys):
    path = recorded(tmp_path / "a", rows())
    assert main(["layout", "--phases", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Rank 5 was the slowest")
    assert main(["layout", "--phases", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["slowest"]["rank"] == SLOW and len(told["phases"]) == len(rows())
    assert list(phases(path).frame().columns) == ["rank", "name", "start", "seconds", "nbytes"]
    assert "Rank 5" in repr(phases(path)) and "<pre>" in phases(path)._repr_html_()


@pytest.mark.browser
def test_the_tab(quiet, tmp_path):
    root = tmp_path / "ckpts"
    os.mkdir(root)
    recorded(root / "a", rows())
    page = quiet
    with serving(root) as url:
        page.set_viewport_size({"width": 400, "height": 900})
        page.goto(f"{url}?ckpt=a&tab=layout")
        page.get_by_role("button", name="Save", exact=True).click()
        page.locator("h2.slowest", has_text="Rank 5 was the slowest").wait_for()
        page.locator(".bk-Figure").nth(1).wait_for()
        page.wait_for_timeout(1000)
        tap(page, 5.5, 5.5)
        page.locator(".tapped", has_text="rank 5").wait_for()
        link(page, view="save", rank="5")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
