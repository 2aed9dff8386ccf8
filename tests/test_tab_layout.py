"""The Layout tab without a browser: pictures against torch and brute force, links, what it escapes, what it costs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from types import SimpleNamespace

import holoviews as hv
import numpy as np
import panel as pn
import panel_material_ui as pmui
import pytest
import torch
from bokeh.models import ColorBar
from safetensors.torch import load_file, save_file
from test_app_state import Page
from test_layout import saved

import workbench as wb
from workbench.app.jail import Jail
from workbench.app.registry import Registry
from workbench.app.state import WorkbenchState, query_of
from workbench.app.tabs.layout import VIEWS, LayoutTab, LayoutView
from workbench.app.tabs.layout_fit import asked, request_of
from workbench.errors import UsageError
from workbench.views import layout_canvas
from workbench.views.layout_bytes import Bytes
from workbench.views.layout_canvas import PaintBoxes, PaintWindow, raster
from workbench.views.layout_groups import ROWS, groups, shares
from workbench.views.layout_pictures import FEW, HOLE, OVERLAP, bytes_picture, shards_picture, shares_picture
from workbench.views.layout_shards import SEVERAL, axes_of, shards
from workbench.views.layout_words import wrong

EVIL = '<img src=x onerror="window.pwned=1">.layers.0.w'
EMBEDDINGS = "model.tok_embeddings.weight"


@pytest.fixture
def root(tmp_path, samples):
    root = tmp_path / "ckpts"
    for name in ("dcp_tp2_fsdp2_vocab515", "dcp_fsdp2"):
        shutil.copytree(samples / name, root / name)
    (root / "evil").mkdir()
    save_file({EVIL: torch.ones(4, 3), "\x1b[31mred": torch.ones(2)}, root / "evil" / "model.safetensors")
    return root


def looked_at(root, page, path="dcp_tp2_fsdp2_vocab515", **selection):
    """State and tab, opened as by a link, with its layout found."""
    state = WorkbenchState(Jail(root), Registry(), page.schedule)
    state.restore({"path": path, "tab": "layout", **selection})
    page.until(lambda: state.status != "opening")
    assert state.status == "open", state.error
    tab = LayoutTab(state, page.schedule)
    page.until(lambda: tab.view is not None)
    return state, tab


def shown(tab):
    """The words of everything in the tab."""
    return "\n".join(str(pane.object) for pane in tab.body.select(pn.pane.HTML))


def found_of(samples, name):
    return wb.layout(wb.open(samples / name))


# ---- painting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_a_time", "pixels"), [(65_536, 4_000_000), (7, 50), (300, 1)])
def test_pixels_are_those_whose_centres_lie_in_a_box(monkeypatch, at_a_time, pixels):
    monkeypatch.setattr(layout_canvas, "BOXES", at_a_time)
    monkeypatch.setattr(layout_canvas, "PIXELS", pixels)
    rng = np.random.default_rng(5)
    left, top = rng.integers(0, 90, (2, 300))
    boxes = PaintBoxes(left, left + rng.integers(0, 30, 300), top, top + rng.integers(0, 20, 300), np.arange(300))
    window = PaintWindow(10, 83, 5, 71, 37, 29)
    image = raster(boxes, window)
    for row in range(29):
        for column in range(37):
            x, y = 10 + (column + 0.5) * 73 / 37, 5 + (row + 0.5) * 66 / 29
            hits = boxes.at(x, y)
            assert image[row, column] == (hits[-1] if len(hits) else -1)


def test_what_is_wrong_is_never_thinner_than_a_pixel():
    hair = PaintBoxes(np.array([123_456]), np.array([123_457]), np.array([7]), np.array([8]), np.array([1]))
    window = PaintWindow(0, 1_000_000, 0, 1000, 300, 200)
    assert (raster(hair, window) >= 0).sum() == 0
    image = raster(hair, window, 1)
    assert np.argwhere(image == 1).tolist() == [[7 * 200 // 1000, 123_456 * 300 // 1_000_000]]
    edge = PaintBoxes(np.array([999_999]), np.array([1_000_000]), np.array([999]), np.array([1000]), np.array([1]))
    assert np.argwhere(raster(edge, window, 2) == 1).tolist() == [[r, c] for r in (198, 199) for c in (298, 299)]
    beside = PaintBoxes(np.array([10]), np.array([11]), np.array([2000]), np.array([2001]), np.array([1]))
    assert (raster(beside, window, 1) >= 0).sum() == 0


# ---- one tensor ----------------------------------------------------------------------------------------------------


def test_the_shard_map_of_a_strided_shard_is_what_torch_cuts(samples):
    found = found_of(samples, "dcp_tp2_fsdp2_vocab515")
    one = shards(found, EMBEDDINGS)
    pieces = torch.arange(515).chunk(2)  # over tp, then each over dp; ranks go dp, tp
    truth = {f"rank {2 * dp + tp}": piece.chunk(2)[dp] for tp, piece in enumerate(pieces) for dp in range(2)}
    rows = {
        one.names[code]: (top, bottom)
        for top, bottom, code in zip(one.boxes.top, one.boxes.bottom, one.boxes.code, strict=True)
    }
    assert rows == {name: (int(rows[0]), int(rows[-1]) + 1) for name, rows in truth.items()}
    assert (one.down, one.across, one.extent) == (0, 1, (32, 515))
    frame = next(iter(shards_picture(one))).dframe()
    assert frame["who"].tolist() == [one.names[code] for code in one.boxes.code]
    assert shards(found, EMBEDDINGS, by="file").names == [f"__{rank}_0.distcp" for rank in range(4)]


def cube():
    """(8, 3, 10), axis 0 over two and axis 2 over two: four ranks."""
    boxes = [((a, 0, b), (4, 3, 5)) for a in (0, 4) for b in (0, 5)]
    return wb.layout(saved([(8, 3, 10)], [(0, rank, box) for rank, box in enumerate(boxes)]))


def test_of_many_axes_the_two_that_are_cut_most_are_shown():
    found = cube()
    one = shards(found, "w0")
    assert (one.down, one.across) == (0, 2) and len(one.boxes) == 4 and SEVERAL not in one.names
    flat = shards(found, "w0", (1, 2))
    assert len(flat.boxes) == 2 and flat.chunks.tolist() == [2, 2]
    assert [flat.names[code] for code in flat.boxes.code] == [SEVERAL, SEVERAL]
    assert axes_of("1,2", 3) == (1, 2) and axes_of("", 3) is None and axes_of("0,0", 1) is None
    for bad in ("0,0", "0,3", "a", "1", "0,1,2", "-1,0"):
        with pytest.raises(UsageError, match="axes"):
            axes_of(bad, 3)


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (1, 1, 1, 5)])
def test_every_shape_has_a_picture(tmp_path, shape):
    save_file({"w": torch.zeros(shape)}, tmp_path / "m.safetensors")
    found = wb.layout(wb.open(tmp_path / "m.safetensors"))
    hv.renderer("bokeh").get_plot(shards_picture(shards(found, "w")))


def broken():
    """w0 lacks one element of a million, w1 has one twice."""
    big = (1000, 1000)
    chunks = [
        (0, 0, ((0, 0), (999, 1000))),
        (0, 1, ((999, 0), (1, 999))),
        (1, 0, ((0, 0), (500, 1000))),
        (1, 1, ((500, 0), (500, 1000))),
        (1, 1, ((499, 999), (1, 1))),
    ]
    return wb.layout(saved([big, big, (4, 4)], [*chunks, (2, 0, ((0, 0), (4, 4)))]))


def test_holes_and_overlaps_are_drawn_last_and_said():
    found = broken()
    one = shards(found, "w0")
    assert (one.holes.left[0], one.holes.top[0], len(one.holes), len(one.overlaps)) == (999, 999, 1, 0)
    last = list(shards_picture(one))[-1]
    assert last.dframe()["words"].tolist() == ["hole 999:1,000, 999:1,000"]
    assert hv.Store.lookup_options("bokeh", last, "style").kwargs["line_color"] == HOLE
    assert hv.Store.lookup_options("bokeh", last, "style").kwargs["line_width"] >= 1
    twice = shards(found, "w1")
    assert (twice.overlaps.left[0], twice.overlaps.top[0]) == (999, 499)
    assert "1 hole and 1 overlap" in wrong(found) and "w0" in wrong(found) and "w1" in wrong(found)
    assert wrong(cube()) == ""
    share = shares(found, groups(found.catalog.keys, found.catalog.tensor_nbytes, np.arange(3)))
    assert share.wrong.tolist() == [1, 1, 0]
    marked = list(bytes_picture(found, Bytes(found)))[-1]
    assert hv.Store.lookup_options("bokeh", marked, "style").kwargs["line_color"] == OVERLAP and len(marked) == 2


def test_a_hole_survives_in_a_painted_tensor():
    """More boxes than are drawn one by one, and one of them is not there."""
    side = 110
    places = [(a, b) for a in range(side) for b in range(side) if (a, b) != (50, 60)]
    found = wb.layout(saved([(side, side)], [(0, (a + b) % 3, ((a, b), (1, 1))) for a, b in places]))
    one = shards(found, "w0")
    assert len(one.boxes) == side * side - 1 > FEW
    plot = hv.renderer("bokeh").get_plot(shards_picture(one))
    image = plot.handles["source"].data["image"][0]
    rgb = np.ascontiguousarray(image).view(np.uint8).reshape(*image.shape, 4)[..., :3]
    assert (rgb == [int(HOLE[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=-1).sum() >= 4


# ---- all tensors ---------------------------------------------------------------------------------------------------


def test_shares_are_the_rows_that_torch_gives_each_rank(samples):
    found = found_of(samples, "dcp_fsdp2")
    truth = load_file(samples.parent / "tests/truth" / "dcp_fsdp2.safetensors")
    keys = found.catalog.keys
    chosen = np.array([n for n, key in enumerate(keys) if key.startswith("model.")])
    share = shares(found, groups(keys, found.catalog.tensor_nbytes, chosen, most=1000))
    assert len(share.groups) == len(chosen)
    for n, group in enumerate(share.groups):
        key = keys[int(group.tensors[0])]
        tensor = truth[key] if key in truth else truth[key.removeprefix("model.")]
        bytes_ = [piece.numel() * piece.element_size() for piece in tensor.chunk(4)]
        assert share.nbytes[n].tolist() == [*bytes_, *[0] * (4 - len(bytes_))]
        assert share.whole[n] == tensor.numel() * tensor.element_size()
    picture = shares_picture(share, found.holders.label)
    assert len(list(picture)) == 1
    figure = hv.render(picture)  # on a phone, a scale beside the cells would leave them no room
    assert figure.select_one(ColorBar) in figure.above


def test_groups_are_few_and_every_tensor_is_in_one():
    names = [f"model.layers.{n}.{m}.weight" for n in range(97) for m in ("q", "k", "v", "o", "up", "down", "gate")]
    names += ["embed", "a", "a.b", "a.b", "x" * 300] + [f"optim.{name}.exp_avg" for name in names]
    rng = np.random.default_rng(1)
    for most in (1, 2, 3, ROWS, 400, 5000):
        found = groups(names, rng.integers(0, 1 << 40, len(names)), np.arange(len(names)), most)
        assert 0 < len(found) <= max(most, 1)
        assert sorted(t for group in found for t in group.tensors.tolist()) == list(range(len(names)))
    few = groups(["m.layers.2.w", "m.layers.10.w", "m.head"], np.array([8, 8, 8]), np.arange(3))
    assert [group.name for group in few] == ["m.head", "m.layers.2.w", "m.layers.10.w"]
    assert groups(names, np.zeros(len(names)), np.zeros(0, np.int64)) == []


# ---- bytes ---------------------------------------------------------------------------------------------------------


def test_every_byte_is_the_chunks_that_has_it(samples):
    found = found_of(samples, "megatron_dp_reshardable")
    index, catalog = Bytes(found), found.catalog
    for row in range(0, catalog.chunks, 7):
        file, start, stop = int(catalog.file[row]), int(catalog.start[row]), int(catalog.stop[row])
        for byte in (start, (start + stop) // 2, stop - 1):
            hit = index.at(byte, file + 0.5)
            assert catalog.file[hit] == file and catalog.start[hit] <= byte < catalog.stop[hit]
    assert index.at(0, -1) is None and index.at(1 << 60, 0.5) is None and index.at(0, len(index.files) + 1) is None


def crowd(tensors, files=16, seed=0):
    """A catalog's byte columns, chunks of four roles in random order without gaps."""
    rng = np.random.default_rng(seed)
    per = tensors // files
    sizes = rng.integers(1, 9000, (files, per))
    stop = np.cumsum(sizes, axis=1)
    catalog = SimpleNamespace(
        files=[f"f{n}" for n in range(files)],
        file=np.repeat(np.arange(files), per),
        start=(stop - sizes).ravel(),
        stop=stop.ravel(),
        tensor=np.arange(files * per),
        tensor_nbytes=sizes.ravel(),
        file_stats=[SimpleNamespace(size=-1)] * files,
    )
    roles = np.array(["param", "exp_avg", "exp_avg_sq", "step"])[rng.integers(0, 4, files * per)]
    return SimpleNamespace(catalog=catalog, roles=roles.tolist()), roles


def test_zoomed_out_a_block_has_each_role_in_proportion():
    found, roles = crowd(40_000)
    index = Bytes(found)
    end = int(index.size.max())
    window = PaintWindow(0, end, 0, 16, 640, 320)
    assert index.crowded(window)
    image = index.paint(window)
    for file in (0, 9):
        line = image[file * 20 + 10]
        seen = np.bincount(line[line >= 0], minlength=4)[:4]
        mine = found.catalog.file == file
        held = [found.catalog.tensor_nbytes[mine & (roles == role)].sum() for role in index.roles]
        assert np.allclose(seen / 640, np.array(held) / end, atol=0.03)
        assert (np.diff(line[:16]) >= 0).all()  # in one order inside a block: no noise
    close = PaintWindow(0, end / 1000, 0, 16, 640, 320)
    assert not index.crowded(close)
    line = index.paint(close)[10]
    for column in range(0, 640, 11):
        row = index.at((column + 0.5) * end / 1000 / 640, 0.5)
        assert index.roles[line[column] % 5] == roles[row]


# ---- the tab -------------------------------------------------------------------------------------------------------


def test_a_link_restores_the_picture_the_tensor_and_the_rank(root):
    page = Page()
    state, tab = looked_at(root, page, view="tensor", tensor=EMBEDDINGS, rank="2", axes="1,0", by="file")
    assert tab.view.looked_at == "tensor" and tab.view.holder == 2
    part = tab.view.part
    assert (part._shown.down, part._shown.across) == (1, 0) and part._by.value == "file"
    assert "_StridedShard(dim=0, sf=2)" in shown(tab) and "proven" in shown(tab)
    query = query_of(state)
    for words in ("view=tensor", f"tensor={EMBEDDINGS}", "rank=2", "axes=1%2C0", "by=file", "tab=layout"):
        assert words in query
    assert tab.body.get_root() is not None


def test_a_link_to_a_picture_that_there_is_not_says_so(root):
    page = Page()
    state, tab = looked_at(root, page, "dcp_fsdp2", view="everything")
    assert "the picture 'everything'" in state.notice and state.view == "" and tab.view.looked_at == "all"
    state.restore({"path": "dcp_fsdp2", "tab": "layout", "view": "save"})  # its phases are not stored
    assert "the picture 'save'" in state.notice and state.view == ""
    known, _ = looked_at(root, page, "dcp_fsdp2", view="mesh")
    assert known.notice == "" and known.view == "mesh"


def test_a_tap_names_tensor_rank_file_and_bytes(root, samples):
    page = Page()
    state, tab = looked_at(root, page, view="tensor", tensor=EMBEDDINGS)
    tab.view.part.tapped(5.0, 200.0)
    truth = wb.layout(wb.open(samples / "dcp_tp2_fsdp2_vocab515")).pieces(EMBEDDINGS).set_index("holder").loc["rank 2"]
    assert state.rank == "2" and truth["file"] in shown(tab)
    assert f"{truth['start']:,}–{truth['stop']:,}" in shown(tab) and "[129:258, 0:32]" in shown(tab)
    state.view = "files"
    catalog = tab.view.layout.catalog
    row = int(np.flatnonzero(catalog.file == 3)[5])
    tab.view.part.tapped((catalog.start[row] + catalog.stop[row]) / 2, 3.5)
    assert state.tensor == catalog.keys[catalog.tensor[row]] and state.rank == "3"
    tab.view.part.tapped(1.0, 3.5)  # what no tensor has
    assert "These bytes belong to no tensor" in shown(tab)


def test_looking_inside_a_group_narrows_the_filter_until_it_is_one_tensor(root):
    page = Page()
    state, tab = looked_at(root, page, "dcp_fsdp2")
    part = tab.view.part
    for _ in range(6):
        row = next((n for n, g in enumerate(part.share.groups) if len(g.tensors) > 1), None)
        if row is None:
            break
        before = {t for group in part.share.groups for t in group.tensors.tolist()}
        part.tapped(1.5, row + 0.5)
        assert state.rank == "1" and "of the" in shown(tab)
        inside = set(part.share.groups[row].tensors.tolist())
        part._look_inside()
        assert {t for group in part.share.groups for t in group.tensors.tolist()} == inside < before
    part.tapped(0.5, 0.5)
    assert state.tensor in tab.view.layout.catalog.index
    state.pattern = "layers.("
    assert 'role="alert"' in shown(tab)
    state.pattern = "no such tensor"
    assert "No tensor matches this name" in shown(tab)


def test_the_mesh_shows_coordinates_and_peers(root):
    page = Page()
    state, tab = looked_at(root, page, view="mesh")
    at = tab.view.part._at
    tab.view.part.tapped(at.x[2] + 0.5, at.y[2] + 0.5)
    assert state.rank == "2"
    words = shown(tab)
    assert "axis0=1, axis1=0" in words and "Along <b>axis0</b>: rank 0, rank 2" in words
    assert "Along <b>axis1</b>: rank 2, rank 3" in words
    state.rank = "77"
    assert "stored nothing here" in shown(tab)


def test_the_budget_is_plan_memorys(root, samples):
    page = Page()
    state, tab = looked_at(root, page, "dcp_fsdp2", view="fit", fit="gpus=8,gb=0.001,tp=2,pp=2,dp=2,stage=0")
    part = tab.view.part
    page.until(lambda: part.budget is not None)
    truth = wb.plan_memory(wb.open(samples / "dcp_fsdp2"), 8, 0.001, tp=2, pp=2, dp=2, stage=0)
    assert part.budget.chosen == truth.chosen and not part.budget.fits and "fits no layout" in shown(tab)
    part._of["stage"].value = "3"
    part.work.start()
    page.until(lambda: part.work.job.status == "done")
    assert part.budget.chosen.stage == 3 and "stage=3" in state.fit
    assert request_of(asked(state.fit)) == state.fit
    for name, bad in (("gpus", "many"), ("gb", "nan"), ("gb", "x"), ("tp", "3.5")):
        good = part._of[name].value
        part._of[name].value = bad
        part.work.start()
        page.until(lambda: part.work.job.status == "failed")
        assert repr(bad) in part.work.job.error
        part._of[name].value = good


def test_every_picture_is_made_for_every_sample(samples):
    for path in (
        "deepspeed_zero1/global_step4",
        "hf_deepseek_fp8_block",
        "megatron_dp_reshardable",
        "paddlenlp_legacy",
    ):
        view = wb.layout(wb.open(samples / path)).view()
        assert isinstance(view, LayoutView)
        for name in VIEWS:
            view.view = name
        assert pn.panel(view).get_root() is not None


def test_hostile_names_are_shown_and_not_obeyed(root):
    page = Page()
    _, tab = looked_at(root, page, "evil", tensor=EVIL, view="tensor")
    for name in VIEWS:
        tab.view.view = name
        assert "<img" not in shown(tab) and "\x1b" not in shown(tab)
    tab.view.view = "tensor"
    assert "&lt;img src=x" in shown(tab) and "\x1b" not in "".join(tab.view.part._pick.options)


def test_downloads_hold_every_rank_file_and_tensor(root):
    page = Page()
    _, tab = looked_at(root, page)
    saves = {button.label: button for button in tab.body.select(pmui.FileDownload)}
    for noun, column, many in (("ranks", "label", 4), ("files", "file", 4), ("tensors", "key", 84)):
        rows = list(csv.DictReader(io.StringIO(saves[f"Download CSV of {noun}"].callback().read().decode())))
        assert len({row[column] for row in rows}) == many
    document = json.loads(saves["Download JSON"].callback().read())
    assert document["mesh"] == {"axis0": 2, "axis1": 2} and len(document["tensors"]) == 84


def test_two_sessions_find_one_layout_and_another_checkpoint_drops_it(root):
    registry, pages, tabs = Registry(), [Page(), Page()], []
    for page in pages:
        state = WorkbenchState(Jail(root), registry, page.schedule)
        state.restore({"path": "dcp_fsdp2", "tab": "layout"})
        page.until(lambda state=state: state.status == "open")
        tab = LayoutTab(state, page.schedule)
        page.until(lambda tab=tab: tab.view is not None)
        tabs.append(tab)
    assert tabs[0].view.layout is tabs[1].view.layout
    state = tabs[0].state
    state.show("evil")
    assert tabs[0].view is None
    pages[0].until(lambda: tabs[0].view is not None)
    assert re.search("2 (placed|proven|unknown|partly)", shown(tabs[0])) and len(tabs[0].view.layout.catalog) == 2
    tabs[0].close()
