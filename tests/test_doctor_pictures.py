"""Pictures of a diagnosis: what they show is what the files hold, and they can be drawn, whatever the names."""

from __future__ import annotations

from dataclasses import replace

import holoviews as hv
import numpy as np
import pandas as pd
import pytest
import torch
from bokeh.document import Document
from bokeh.io.doc import curdoc, patch_curdoc
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests import lab
from tests.test_lab import SMALL
from tests.test_views import _Strict
from tests.test_views_doctor import EVIL, diagnosis, state, suspect
from workbench.doctor.facts.evidence import Evidence
from workbench.doctor.laws.bounds import Hits
from workbench.doctor.ledger.sign import Sign
from workbench.doctor.passes.pair import PairState
from workbench.doctor.pictured.history import history
from workbench.doctor.pictured.samples import RUNS, Cloud, boxes_of, low_bits, sample_pair
from workbench.doctor.pictured.shards import EQUAL, ZEROS, match_rows, shard_map
from workbench.doctor.rules.values import check_pair
from workbench.views.doctor_html import diagnosis_page
from workbench.views.doctor_pictures import (
    doctor_pictures,
    low_bit_picture,
    reach_picture,
    row_picture,
    shard_picture,
    timeline_picture,
    transition_picture,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:bokeh"),
]
RENDERER = hv.renderer("bokeh")


def evidence(fault: str, format: str = "dcp", k: int = 1) -> Evidence:
    case = lab.case(fault, SMALL, format, k=k)
    return Evidence(state(case.before), state(case.after), state(case.echo))


def elements(picture: hv.Overlay, kind: type) -> list[hv.Element]:
    return list(picture.traverse(lambda one: one, [kind]))


def draw(picture: object) -> object:
    return RENDERER.get_plot(picture).state


# ---- transition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault, k", [("h0_exact", 1), ("h0_exact", 20), ("f01_drop_opt", 1), ("f15_pg_perm_qo", 1)])
def test_the_transition_shows_the_elements_of_the_files(fault, k):
    given = evidence(fault, k=k)
    pair = given.pair("before", "after")
    values = check_pair(pair)
    cloud = sample_pair(pair, values.updates)
    assert cloud is not None and len(cloud.tensor) == len(cloud.ratio) == len(cloud.excess)
    for number in (0, 3, len(cloud.fqns) - 1):
        fqn = cloud.fqns[number]
        old, new = (side.ckpt.param(fqn, role="exp_avg_sq").torch().double() for side in (pair.a, pair.b))
        truth = torch.log10(new / old)[old > 0].numpy().ravel()
        mine = cloud.ratio[(cloud.tensor == number) & (np.abs(cloud.ratio) < 90)]
        gaps = np.abs(np.sort(truth)[np.searchsorted(np.sort(truth), mine - 1e-9).clip(0, len(truth) - 1)] - mine)
        assert len(mine) and gaps.max() < 1e-8
    broken = sum(sums.floor.broken + sums.transition.broken for sums in values.states.values())
    assert bool(cloud.broken.any()) == bool(broken) == (fault != "h0_exact")
    assert cloud.floor == pytest.approx((k * np.log10(0.95),) * 2) and cloud.k == (k, k)
    picture = transition_picture(cloud)
    shown = sum(np.nansum(image.dimension_values(2)) for image in elements(picture, hv.Image))
    assert shown == len(cloud.ratio) - cloud.broken.sum()
    assert f"{int(cloud.broken.sum()):,} of {len(cloud.ratio):,}" in str(
        [one.label for one in elements(picture, hv.Points)]
    )
    assert draw(picture).title.text.startswith("Did the moments evolve")


def test_what_has_no_logarithm_stands_on_the_edge():
    cloud = Cloud(
        ("w",),
        np.zeros(4, int),
        np.array([-99.0, 0, 1, 99]),
        np.array([-99.0, -1, 99, 2]),
        np.array([True, False, True, True]),
        (-0.4, -0.4),
        (20, 20),
    )
    points = elements(transition_picture(cloud), hv.Points)[0]
    assert np.isfinite(points.array([0, 1]).astype(float)).all() and len(points) == 3
    assert draw(transition_picture(replace(cloud, broken=np.ones(4, bool)))) is not None  # nothing obeys


@given(st.lists(st.integers(1, 40), max_size=4), st.integers(RUNS, 5000))
def test_boxes_lie_inside_and_are_bounded(shape, limit):
    offsets, sizes = boxes_of(tuple(shape), limit)
    assert offsets.shape == sizes.shape and (offsets >= 0).all()
    assert (offsets + sizes <= np.array(shape, int)).all() and (sizes > 0).all()
    assert len(offsets) <= RUNS and sizes.prod(axis=1).sum() <= max(limit, len(offsets))


# ---- reach ---------------------------------------------------------------------------------------------------------


def test_the_reach_strip_has_a_cell_a_parameter_and_crosses_what_is_beyond():
    values = check_pair(evidence("f08_gate_up_swap", k=20).pair("before", "after"))
    picture = reach_picture(values.states)
    grid, crossed = elements(picture, hv.Rectangles)[0], elements(picture, hv.Points)[0]
    assert len(grid) == sum(bool(sums.reach.of) for sums in values.states.values())
    assert sorted(grid.dimension_values("share")) == pytest.approx(
        sorted(min(sums.reach.worst, 1.0) for sums in values.states.values())
    )
    beyond = {fqn for fqn, sums in values.states.items() if sums.reach.broken}
    assert {text.split(":")[0] for text in crossed.dimension_values("parameter")} == beyond
    assert {fqn.rsplit(".", 2)[1] for fqn in beyond} == {"gate_proj", "up_proj"}
    draw(picture)


def test_experts_of_a_layer_are_one_cell():
    sums = [PairState(reach=Hits(broken, 10, worst, 0)) for broken, worst in ((0, 0.2), (3, 7.0))]
    names = [f"model.layers.4.mlp.experts.{n}.w1.weight" for n in range(2)]
    picture = reach_picture(dict(zip(names, sums, strict=True)))
    grid = elements(picture, hv.Rectangles)[0]
    assert (
        len(grid) == 1
        and "experts.1" in grid.dimension_values("parameter")[0]
        and "3 elements" in grid.data.iloc[0, -1]
    )


# ---- shards and rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, format",
    [("c07_stale_shard", "deepspeed"), ("f08_gate_up_swap", "dcp_sharded"), ("c09_zero_page_master", "dcp")],
)
def test_the_shard_map_tells_the_pieces_apart(fault, format):
    pair = evidence(fault, format).pair("before", "echo")
    shards = shard_map(pair)
    assert shards is not None and shards.whole and not shards.left_out
    for column, (fqn, role) in enumerate(shards.tensors):
        a, b = (side.ckpt.param(fqn, role=role).torch() for side in (pair.a, pair.b))
        held = shards.state[:, column]
        assert bool((held[held >= 0] == EQUAL).all()) == torch.equal(a, b), (fqn, role)
    odd = {(shards.files[f], *shards.tensors[c]): shards.state[f, c] for f, c in np.argwhere(shards.state > 0).tolist()}
    if fault == "c07_stale_shard":
        assert {file for file, *_ in odd} == {next(name for name in shards.files if "zero_pp_rank_1" in name)}
    if fault == "c09_zero_page_master":
        assert set(odd.values()) == {ZEROS} and {role for *_, role in odd} == {"master"}
    picture = shard_picture(shards)
    assert sum(map(len, elements(picture, hv.Rectangles))) == (shards.state >= 0).sum()
    draw(picture)


def test_rows_of_exchanged_ranks_are_two_blocks():
    pair = evidence("f11_tp_order", "dcp_sharded").pair("before", "echo")
    rows = match_rows(pair, "model.embed_tokens.weight")
    assert rows is not None and rows.exact and (rows.source == 0).all()
    count = len(rows.place)
    assert (rows.place == (np.arange(count) + count // 2) % count).all()
    picture = row_picture(rows)
    assert [one.label for one in elements(picture, hv.Scatter)] == [f"another row of the tensor: {count:,}"]
    draw(picture)


@pytest.mark.parametrize("later", ["echo", "after"])
def test_rows_are_found_in_another_tensor_also_after_updates(later):
    rows = match_rows(evidence("f08_gate_up_swap").pair("before", later), "model.layers.0.mlp.gate_proj.weight")
    assert rows is not None and rows.exact is (later == "echo")
    assert {rows.sources[number] for number in rows.source.tolist()} == {"model.layers.0.mlp.up_proj.weight"}
    assert (rows.place == np.arange(len(rows.place))).all()


def test_rows_that_are_nowhere_are_no_picture():
    pair = evidence("f16_missing_layer").pair("before", "echo")
    assert match_rows(pair, "model.layers.1.mlp.down_proj.weight") is None
    assert match_rows(pair, "model.norm.weight") is None and match_rows(pair, "not there") is None


# ---- low bits, timeline --------------------------------------------------------------------------------------------


def test_masters_from_bf16_are_a_heap_at_sixteen():
    given = evidence("f05_master_from_bf16")
    before, echo = low_bits(given.before), low_bits(given.echo)
    assert echo[:16].sum() == 0 and echo[16] > 0.4 * echo.sum()
    assert before[0] == pytest.approx(before.sum() / 2, rel=0.1) and before[16:].sum() < 0.01 * before.sum()
    assert low_bits(state(lab.case("h0_exact", SMALL.but(precision="bf16"), k=1).before)) is None
    draw(low_bit_picture({"before": before, "echo": echo}))


def test_a_history_has_what_the_run_had():
    run = lab.series("f24_lr_peak", SMALL, "dcp", every=10, count=3)
    frame = history(run)
    assert frame["step"].tolist() == [40, 50, 60, 70, 80, 90]
    for row in frame.itertuples():
        ckpt = wb.open(run / f"step-{row.step}", cache=False)
        total = sum(
            ckpt[key].torch().double().sum() for key, role in zip(ckpt, ckpt.roles, strict=True) if role == "exp_avg_sq"
        )
        assert row.gradient == pytest.approx(float(total) ** 0.5, rel=1e-6)
        assert row.plan == pytest.approx(SMALL.lr_at(row.step), rel=1e-6)
    assert (frame["lr"] / frame["plan"] > 3).tolist() == [False] * 3 + [True] * 3
    picture = timeline_picture(frame, 60)
    lines = {one.label: one for one in picture.traverse(lambda one: one, [hv.Curve])}
    assert lines["stored"].dimension_values(1).tolist() == frame["lr"].tolist() and len(picture) == 3
    draw(picture)
    light = history(run, values=False)
    assert light["norm_param"].isna().all() and light["lr"].tolist() == frame["lr"].tolist()


def test_a_timeline_without_anything_is_empty():
    empty = pd.DataFrame(
        {name: pd.Series([1.0] if name == "step" else [float("nan")]) for name in ("step", "lr", "change")}
    )
    assert len(timeline_picture(empty)) == 0


# ---- all of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["dcp", "megatron", "deepspeed", "torch_save"])
def test_a_diagnosis_has_its_pictures_in_every_format(format):
    case = lab.case("f01_drop_opt", SMALL, format, k=1)
    found = wb.doctor(case.before, case.after, echo=case.echo)
    pictures = doctor_pictures(found)
    assert list(pictures) == ["transition", "reach", "shards", "low bits"]
    for picture in pictures.values():
        assert draw(picture).title.text


def test_pages_do_not_ask_for_the_current_document(tmp_path):
    """In a server it is that of some session, which may have ended: Bokeh then raises."""
    case = lab.case("f01_drop_opt", SMALL, "dcp", k=1)
    found = wb.doctor(case.before, case.after)
    pictures, ended = doctor_pictures(found), Document()
    with patch_curdoc(ended):
        del ended
        with pytest.raises(RuntimeError, match="destroyed"):
            curdoc()
        assert "transition" in diagnosis_page(found, pictures)
        assert wb.run("sample_ckpts/loss_spike").to_html(tmp_path / "run.html", diagnose=False)


def test_a_diagnosis_of_nothing_has_no_pictures():
    assert doctor_pictures(diagnosis([])) == {}
    assert doctor_pictures(wb.doctor(lab.case("h0_exact", SMALL, "dcp", k=1).before, deep=False)).keys() <= {"low bits"}


def test_names_in_pictures_are_text_and_the_page_reaches_for_nothing():
    evil = EVIL + "</script><img src=y onerror=alert(2)>"
    sums = PairState(reach=Hits(1, 10, 2.0, 0))
    cloud = Cloud((evil,), np.zeros(2, int), np.zeros(2), np.ones(2), np.array([True, False]), (-1.0, -1.0), (1, 1))
    pictures = {"reach": reach_picture({evil: sums}), "transition": transition_picture(cloud)}
    page = diagnosis_page(diagnosis([suspect("B1", (Sign("S01", "error", evil),))]), pictures)
    parser = _Page()
    parser.feed(page)
    assert "img" not in parser.tags and "figure" in parser.tags and "\x1b" not in page
    assert not parser.reached and page.lower().count("panel/bundled") == 0


def test_a_name_that_looks_like_mathematics_stays_a_name():
    """Bokeh would fetch MathJax for a label in ``$$``."""
    picture = reach_picture({name: PairState(reach=Hits(1, 10, 2.0, 0)) for name in ("$$x$$", r"\(y\)", r"\[z\]")})
    labels = str(draw(picture).xaxis[0].major_label_overrides)
    assert all(mark not in labels for mark in ("$$", "\\(", "\\["))


class _Page(_Strict):
    VOID = frozenset({"path", "meta"})

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        self.reached += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]


@pytest.mark.browser
def test_the_page_draws_without_a_network(page, tmp_path):
    found = wb.doctor(*(getattr(lab.case("f01_drop_opt", SMALL, "dcp", k=1), name) for name in ("before", "after")))
    pictures = doctor_pictures(found)
    (tmp_path / "page.html").write_text(diagnosis_page(found, pictures), "utf-8")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function(
        f"document.querySelectorAll('figure .bk-Figure, figure [class*=bk]').length >= {len(pictures)}"
    )
    page.wait_for_timeout(300)
    assert len(asked) == 1 and not page.console_errors
