"""Pictures of a diagnosis, most informative first; title, axes and legend explain each.

::

    transition   sampled elements against two laws: valid ones are right of one line and below the other
    reach        layer × module: how far weights moved, relative to how far the optimizer can move them
    shards       file × tensor: which stored pieces equal those of before
    rows         which row of a tensor came from which row
    low bits     trailing zero bits of fp32 masters: a peak at 16 means that they were rebuilt from bf16
    timeline     learning rate against its schedule, norms, gradients
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import holoviews as hv
import numpy as np

from workbench.core.words import plural
from workbench.doctor.passes.pair import PairState
from workbench.doctor.pictured.samples import ENDS, Cloud, low_bits, sample_pair
from workbench.doctor.pictured.shards import STATES, Rows, ShardProfile, match_rows, shard_map
from workbench.doctor.reasoning.diagnosis import Diagnosis
from workbench.names.weights import parse
from workbench.views.names import safe, shorten, shorten_all
from workbench.views.picture import GREY, OKABE_ITO, boxes, curves, legend, ticks

if TYPE_CHECKING:
    import pandas as pd

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, _ = OKABE_ITO
WINDOW = (-8.0, 4.0), (-8.0, 4.0)  #: log10, beyond which elements are drawn on the edge
BINS = 120
POINTS = 3000  #: elements that are drawn one by one
STATE_COLOURS = dict(zip(STATES, (SKY, RED, YELLOW, GREY), strict=True))
WHICH = {"before": BLUE, "echo": ORANGE, "after": GREEN}
BAR: dict[str, Any] = {"colorbar": True, "colorbar_opts": {"width": 10}}
LAYOUTS = ("E", "F7", "B5", "A2")  #: beginnings of causes that exchange rows
MOMENTS = ("B5", "B6", "E13")  #: … of the optimizer's state


def doctor_pictures(d: Diagnosis) -> dict[str, Any]:
    """Draw every picture for which there is data, by name, most informative first.

    A few thousand elements of each tensor are read; data that cannot be read has no picture.
    """
    return {name: draw() for name, draw in doctor_drawers(d).items()}


def doctor_drawers(d: Diagnosis) -> dict[str, Callable[[], Any]]:
    """Read the data and return functions that draw: reading can run on any thread, HoloViews must draw on one."""
    evidence, values = d.pictured.get("evidence"), d.pictured.get("pair")
    found: dict[str, Callable[[], Any]] = {}
    if evidence is None:
        return found
    later = "after" if evidence.after is not None else None
    if values is not None and later is not None:
        cloud = sample_pair(evidence.pair("before", later), values.updates)
        if cloud is not None:
            found["transition"] = partial(transition_picture, cloud)
        if any(sums.reach.of for sums in values.states.values()):
            found["reach"] = partial(reach_picture, values.states)
    loaded = "echo" if evidence.echo is not None else later
    if loaded is not None:
        pair = evidence.pair("before", loaded)
        if loaded == "echo" and (shards := shard_map(pair)) is not None:
            found["shards"] = partial(shard_picture, shards)
        if (rows := _matched(d, pair)) is not None:
            found["rows"] = partial(row_picture, rows)
    bits = {which: counts for which in WHICH if (counts := _low(evidence, which)) is not None}
    if bits:
        found["low bits"] = partial(low_bit_picture, bits)
    if (frame := d.pictured.get("timeline")) is not None:
        found["timeline"] = partial(timeline_picture, frame, d.subjects[0].step if d.subjects else None)
    return found


def transition_picture(cloud: Cloud) -> hv.Overlay:
    """Draw the density of elements that obey the laws, a point for each that does not, and the two limits."""
    x = np.clip(cloud.ratio, *_limits(cloud.ratio, WINDOW[0], cloud.floor[0]))
    y = np.clip(cloud.excess, *_limits(cloud.excess, WINDOW[1], 0.0))
    left, right = min(x.min(), cloud.floor[0]) - 0.3, max(x.max(), 0.0) + 0.3
    low, high = min(y.min(), 0.0) - 0.3, max(y.max(), 0.0) + 0.6
    good = ~cloud.broken
    dims = ["ratio", "excess"]
    layers: list[Any] = []
    if good.any():
        counts, xs, ys = np.histogram2d(x[good], y[good], bins=BINS, range=((left, right), (low, high)))
        obey = hv.Dimension("obey", label="elements within both limits")
        centres = (xs[:-1] + xs[1:]) / 2, (ys[:-1] + ys[1:]) / 2, np.where(counts > 0, counts, np.nan).T
        layers.append(
            hv.Image(centres, dims, [obey]).opts(cmap="cividis", cnorm="log", clim=(1, max(counts.max(), 2)), **BAR)
        )
    broken = np.flatnonzero(cloud.broken)
    shown = broken[:: max(-(-len(broken) // POINTS), 1)]
    names = [safe(name) for name in cloud.fqns]
    rows = [(x[i], y[i], names[cloud.tensor[i]]) for i in shown.tolist()]
    words = f"beyond a limit: {len(broken):,} of {len(x):,} sampled elements"
    points = hv.Points(rows, dims, ["tensor"], label=words).opts(
        color=RED, size=5, alpha=0.6, marker="x", tools=["hover"], hover_tooltips=[("tensor", "@tensor")]
    )
    for at in dict.fromkeys(cloud.floor):
        floor = hv.Curve([(at, low), (at, high)], *dims, label="lower limit of v: healthy elements are right of it")
        layers.append(floor.opts(color=BLUE, line_dash="dashed"))
    most = hv.Curve([(left, 0), (right, 0)], *dims, label="largest possible change of m: healthy elements are below it")
    layers.append(most.opts(color=BLUE))
    k = f"{cloud.k[0]:,}" if cloud.k[0] == cloud.k[1] else f"{cloud.k[0]:,} to {cloud.k[1]:,}"
    return hv.Overlay([*layers, points]).opts(
        **legend(
            title=f"Did the moments evolve from the older ones? ({k} update{'' if k == '1' else 's'} between)",
            xlabel="log10 v after / v before",
            ylabel="log10 (Δm)² / (K·Δv); values outside the frame are drawn on its edge",
            xlim=(left, right),
            ylim=(low, high),
            height=460,
        )
    )


def reach_picture(states: Mapping[str, PairState]) -> hv.Overlay:
    """Draw one cell per parameter; parameters that moved beyond reach are crossed out."""
    cells: dict[tuple[str, str], list[tuple[str, PairState]]] = {}
    for fqn, sums in states.items():
        if sums.reach.of:
            cells.setdefault(_place(fqn), []).append((fqn, sums))
    modules = list(dict.fromkeys(module for module, _ in cells))
    layers = sorted(
        {layer for _, layer in cells}, key=lambda name: (name != NO_LAYER, int(name) if name.isdecimal() else 0)
    )
    named = dict(zip(modules, _short(modules), strict=True))
    rows, crossed = [], []
    for (module, layer), held in cells.items():
        fqn, worst = max(held, key=lambda one: one[1].reach.worst)
        at = modules.index(module), layers.index(layer)
        text = f"{safe(fqn)}: {worst.reach.worst:.3g}, {plural(sum(s.reach.broken for _, s in held), 'element')} beyond"
        rows.append((at[0], at[1], at[0] + 1, at[1] + 1, min(worst.reach.worst, 1.0), text))
        if any(sums.reach.broken for _, sums in held):
            crossed.append((at[0] + 0.5, at[1] + 0.5, text))
    share = hv.Dimension("share", label="share of the reach")
    tips = {"tools": ["hover"], "hover_tooltips": [("", "@parameter")]}
    grid = hv.Rectangles(rows, ["module", "layer", "right", "bottom"], [share, "parameter"])
    grid = grid.opts(color="share", cmap="cividis", clim=(0, 1), line_color=None, **BAR, **tips)
    words = f"beyond reach: {len(crossed):,} of {len(rows):,}"
    marks = hv.Points(crossed, ["module", "layer"], ["parameter"], label=words)
    marks = marks.opts(color=RED, marker="x", size=14, line_width=3, **tips)
    return hv.Overlay([grid, marks]).opts(
        **legend(
            title="How far did weights move? max |ΔW| / (√K·Σlr): 1 is the most the optimizer can do",
            xlabel="module",
            ylabel="layer",
            xticks=ticks([named[module] for module in modules]),
            yticks=ticks(layers, 40),
            xlim=(0, len(modules)),
            ylim=(0, len(layers)),
            xrotation=35,
            invert_yaxis=True,
            height=300 + 22 * min(len(layers), 30),
        )
    )


def shard_picture(shards: ShardProfile) -> hv.Overlay:
    """Draw one cell for the part of a tensor in a file."""
    states = list(dict.fromkeys(role for _, role in shards.tensors))
    names = list(dict.fromkeys(fqn for fqn, _ in shards.tensors))
    held = {(file, shards.tensors[column][1]) for file, column in np.argwhere(shards.state >= 0).tolist()}
    rows = [(file, role) for file in range(len(shards.files)) for role in states if (file, role) in held]
    cells: dict[str, list[tuple[Any, ...]]] = {words: [] for words in STATES}
    for file, column in np.argwhere(shards.state >= 0).tolist():
        (fqn, role), words = shards.tensors[column], STATES[shards.state[file, column]]
        text = f"{safe(fqn)} ({role}) in {safe(shards.files[file])}: {words}"
        cells[words].append((names.index(fqn), rows.index((file, role)), text))
    files = _short(shards.files, 30)
    labels = [f"{files[file]}  {role}" for file, role in rows]
    classes = {f"{words}: {len(found):,}": found for words, found in cells.items() if found}
    colours = {new: STATE_COLOURS[new.rpartition(": ")[0]] for new in classes}
    how = "every element was compared" if shards.whole else "samples of each piece were compared"
    left = f", {plural(shards.left_out, 'tensor')} left out" if shards.left_out else ""
    return boxes(classes, colours, ("tensor", "file"), "piece").opts(
        **legend(
            title=f"Which stored pieces survived the load? {how}{left}",
            xlabel="tensor",
            ylabel="file and state",
            xticks=ticks(_short(names), 48),
            yticks=ticks(labels, 32),
            xlim=(0, len(names)),
            ylim=(0, len(rows)),
            xrotation=60,
            invert_yaxis=True,
            height=330 + 18 * min(len(rows), 24),
        )
    )


def row_picture(rows: Rows) -> hv.Overlay:
    """Draw one point per row: unmoved rows are on the diagonal; swapped blocks and strides show as patterns."""
    count, index = len(rows.place), np.arange(len(rows.place))
    home = (rows.source == 0) & (rows.place == index)
    classes: dict[str, tuple[Any, str]] = {
        "same place": (home, BLUE),
        "another row of the tensor": ((rows.source == 0) & ~home, RED),
    }
    used = [number for number in np.unique(rows.source).tolist() if number > 0]
    for number, colour in zip(used[:3], (GREEN, PINK, SKY), strict=False):
        classes[f"a row of {_short([rows.sources[number]], 50)[0]}"] = (rows.source == number, colour)
    if len(used) > 3:
        classes[f"a row of {plural(len(used) - 3, 'other tensor')}"] = (np.isin(rows.source, used[3:]), YELLOW)
    layers = [hv.Curve([(0, 0), (count, count)], "before", "after").opts(color=GREY, line_dash="dotted", line_width=1)]
    size = max(2.0, min(8.0, 500 / max(count, 1)))
    for words, (picked, colour) in classes.items():
        if picked.any():
            data = (rows.place[picked], index[picked])
            made = hv.Scatter(data, "before", "after", label=f"{words}: {int(picked.sum()):,}")
            layers.append(made.opts(color=colour, size=size, marker="square", tools=["hover"]))
    lost = np.flatnonzero(rows.source < 0)
    if len(lost):
        beside = np.full(len(lost), -0.03 * count), lost
        made = hv.Scatter(beside, "before", "after", label=f"matches no row of before: {len(lost):,}")
        layers.append(made.opts(color=ORANGE, size=max(size, 6), marker="x"))
    how = "equal rows" if rows.exact else "rows matched by cosine (> 0.9)"
    role = "" if rows.role == "param" else f" ({rows.role})"
    return hv.Overlay(layers).opts(
        **legend(
            title=f"Where did each row come from? {shorten(_label(rows.fqn), 60)}{role}, {how}",
            xlabel="row of before (dotted: the same row)",
            ylabel="row after the load",
            invert_yaxis=True,
            xlim=(-0.05 * count, 1.02 * max(count, rows.place.max())),
            ylim=(-0.02 * count, 1.02 * count),
            height=520,
        )
    )


def low_bit_picture(found: Mapping[str, Any]) -> hv.Overlay:
    """Draw the share of sampled masters by number of trailing zero bits.

    Args:
        found: ``before``, ``echo``, ``after`` → counts.
    """
    lines = {which: (range(len(counts)), 100 * counts / counts.sum()) for which, counts in found.items()}
    plan = 100 * 0.5 ** np.arange(1.0, 25.0)
    law = hv.Curve((np.arange(24.0), plan), "bits", "share", label="expected after updates")
    layers = [law.opts(color=GREY, line_dash="dashed"), *curves(lines, ("bits", "share"), WHICH)]
    edge = hv.Curve([(16, 0), (16, 60)], "bits", "share", label="exactly representable in bfloat16 from here on")
    layers.append(edge.opts(color=GREY, line_dash="dotted"))
    return hv.Overlay(layers).opts(
        **legend(
            title="Do the fp32 masters have low bits? A peak from 16 on: rebuilt from bfloat16 weights",
            xlabel="trailing zero bits of a master",
            ylabel="sampled masters, %",
            height=340,
        )
    )


def timeline_picture(frame: pd.DataFrame, resumed: int | None = None) -> hv.Layout:
    """Draw three strips over the steps of a run: learning rate, norms of gradients and weights, and weight changes.

    Args:
        frame: step lr plan norm_param gradient change, from :func:`workbench.doctor.pictured.history.history`;
        missing columns are not drawn.
        resumed: step of the checkpoint before the resume, which is marked.
    """
    strips = (
        ("Does the learning rate follow its schedule?", "learning rate", {"lr": "stored", "plan": "scheduled"}, True),
        ("How large are gradients and weights?", "norm", {"gradient": "gradient, √Σv", "norm_param": "weights"}, True),
        ("How far do weights move?", "‖ΔW‖ / ‖W‖", {"change": "since the previous step"}, True),
    )
    made = []
    ends = (frame["step"].min() - 1, frame["step"].max() + 1)
    for title, label, columns, logarithmic in strips:
        lines = {}
        for column, words in columns.items():
            if column in frame and frame[column].notna().any():
                rows = frame[frame[column].notna() & ((frame[column] > 0) | (not logarithmic))]
                lines[words] = rows["step"].to_numpy(float), rows[column].to_numpy(float)
        if lines:
            colours = dict(zip(lines, (BLUE, RED), strict=False))
            layers = curves(lines, ("step", label), colours)
            if resumed is not None:
                held = np.concatenate([y for _, y in lines.values()])
                span = [(resumed, held.min()), (resumed, held.max())]
                layers.append(
                    hv.Curve(span, "step", label, label="before the resume").opts(color=GREY, line_dash="dotted")
                )
            options = legend(title=title, xlabel="step", ylabel=label, logy=logarithmic, height=240, xlim=ends)
            made.append(hv.Overlay(layers).opts(**options))
    return hv.Layout(made).cols(1).opts(shared_axes=False)


NO_LAYER = "no layer"


def _place(fqn: str) -> tuple[str, str]:
    """Return the module and layer of a parameter; the experts of a layer count as one module."""
    weight = parse(fqn)
    return weight.inside, NO_LAYER if weight.layer is None else str(weight.layer)


def _matched(d: Diagnosis, pair: Any) -> Rows | None:
    if not d.causes or not d.causes[0].cause.startswith(LAYOUTS):
        return None
    role = "exp_avg" if d.causes[0].cause in MOMENTS else "param"
    for fqn in d.causes[0].tensors:
        found = match_rows(pair, fqn, role)
        if found is not None:
            return found
    return None


def _low(evidence: Any, which: str) -> Any:
    return None if getattr(evidence, which) is None else low_bits(evidence.state(which))


def _limits(values: Any, window: tuple[float, float], line: float) -> tuple[float, float]:
    """Return the limits of an axis: the data within the window; values without a logarithm are put at the end."""
    finite = values[(values > ENDS[0]) & (values < ENDS[1])]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (line, line)
    return max(min(low, line) - 0.2, min(window[0], line - 1)), min(max(high, line) + 0.2, window[1])


def _short(names: Sequence[str], width: int = 30) -> list[str]:
    return shorten_all([_label(name).removesuffix(".weight") for name in names], [width] * len(names))


def _label(name: str) -> str:
    """Return a name that Bokeh does not mistake for TeX, for which it would fetch a script."""
    plain = safe(name).replace("$$", "$ $")
    return plain.replace("\\(", "\\ (").replace("\\[", "\\ [")
