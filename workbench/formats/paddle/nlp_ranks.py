"""Pieces of a model and its optimizer, one file per rank: PaddleNLP's legacy layout and fleet's rank folders.

::

    model_state.tp00_pp01.pdparams              weights of one (tp, pp); only axes of degree > 1 are named
    optimizer.tp00_pp01_shard01.pdopt           static names, which restart in every process
    model_meta.json                             parallel_config, sharding_metas: tables of names, what was divided

    mp_00_sharding_01_pp_00/model.pdparams      fleet: one folder per rank; sharding ranks store equal weights
                           /model_state.pdopt
                           /meta_state.pdopt    {"epoch", "step", …}

How pieces of one parameter are merged, without guessing:

* pipeline, data and sharding ranks with equal shapes hold copies, which become replicas;
* tensor-parallel ranks hold copies if ``is_distributed`` is false. If it is true, they divide the axis that the
  configuration proves (nlp_axes.py). Otherwise each rank's piece is a separate tensor, ``name@tp00``;
* sharding stage 1 v2 stores flat slices of a rank's piece, in the order of sharding ranks, the last one padded;
* expert ranks (``moe00``) stay separate.

Keys are those of PaddleNLP's unified layout: ``name``, ``name/moment1_0``, ``master_weights/name``.
Source: PaddleNLP 3.0.0b4 ``trainer/trainer.py``, ``trainer/utils/sharding_io.py``, paddle 3.3.1 ``hapi``, ``fleet``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from workbench.core import box
from workbench.core.build import CatalogBuilder
from workbench.core.dtypes import DType
from workbench.core.place import Place, lacking
from workbench.core.words import plural, some_of
from workbench.errors import CorruptError, IncompleteError, UnsupportedFormatError
from workbench.formats.paddle import names as paddle_names
from workbench.formats.paddle import nlp_axes as paddlenlp_axes
from workbench.formats.paddle import tree as paddle_tree
from workbench.formats.paddle.nlp_axes import REPLICATED
from workbench.formats.paddle.pickle import load
from workbench.formats.paddle.tree import Stored

MASTERS = "master_weights/"
MAX_NAMED = 4
POWERS = ("beta1_pow", "beta2_pow")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file and the coordinates of the rank that wrote it: ``{"tp": 0, "pp": 1}``; axes of degree 1 may be absent."""

    name: str
    coords: Mapping[str, int]
    model: bool

    def at(self, axis: str) -> int:
        return self.coords.get(axis, 0)


@dataclass
class Facts:
    """Facts from other files.

    Attributes:
        degrees: axis → size.
        config: the model's configuration.
        distributed: (tp, pp) → structured name → whether it was divided.
        tables: (tp, pp) → static name → structured name.
        notes: a list to add sentences to.
        unmerged: parameters whose pieces were not merged.
        by_config: parameters whose axis the configuration proved.
    """

    degrees: dict[str, int]
    config: Mapping[str, Any]
    distributed: dict[tuple[int, int], dict[str, bool]] = field(default_factory=dict)
    tables: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unmerged: dict[str, None] = field(default_factory=dict)
    by_config: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Piece:
    file: RankFile
    stored: Stored

    @property
    def label(self) -> str:
        return "_".join(f"{axis}{number:02d}" for axis, number in self.file.coords.items())


@dataclass(frozen=True, slots=True)
class _Layout:
    """Global shape, and the start of each tp rank's piece of shape ``local``."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    origin: Mapping[int, tuple[int, ...]]


def check_grid(files: Sequence[RankFile], degrees: Mapping[str, int], what: str) -> None:
    """Check that every coordinate has a file.

    Raises:
        IncompleteError: files are missing; the message names their coordinates.
        CorruptError: a file has a rank outside the degrees: the folder holds files of two runs.
    """
    present = {tuple(sorted(file.coords.items())): file for file in files}
    axes = sorted({axis for file in files for axis in file.coords})
    for file in files:
        beyond = [axis for axis in file.coords if file.coords[axis] >= degrees.get(axis, 1 << 20)]
        if beyond:
            raise CorruptError(
                f"{file.name!r} is from {beyond[0]} rank {file.coords[beyond[0]]}, but the degree of {beyond[0]} is "
                f"{degrees[beyond[0]]}: the folder holds files of jobs of different sizes; remove the other job's"
            )
    sizes = {axis: degrees.get(axis) or 1 + max(file.at(axis) for file in files) for axis in axes}
    if math.prod(sizes.values()) > 1 << 22:
        raise CorruptError(f"{what} files have more ranks than any job: {sizes}")
    expected = [
        tuple(zip(axes, coordinates, strict=True)) for coordinates in product(*(range(sizes[axis]) for axis in axes))
    ]
    lost = [dict(coordinates) for coordinates in expected if coordinates not in present] if axes else []
    if lost:
        raise IncompleteError(
            f"{lacking(len(lost), len(expected), f'{what} files')}, first of {_coordinates_text(lost[0])}"
            + (f", then {', '.join(map(_coordinates_text, lost[1:MAX_NAMED]))}" if len(lost) > 1 else "")
            + ": the save was interrupted or they were not copied; their contents are unknown"
        )


def read(builder: CatalogBuilder, place: Place, files: Sequence[RankFile], facts: Facts) -> None:
    """Declare every tensor of the files.

    Raises:
        OpenError: a file cannot be decoded, or pieces contradict each other.
    """
    weights: dict[str, list[_Piece]] = {}
    states: dict[tuple[str, str, str], list[_Piece]] = {}  # (parameter, role, key)
    for file in sorted(files, key=lambda one: not one.model):  # tables first
        loaded = load(place, file.name)
        builder.file(file.name, metadata=True)
        if loaded.globals:
            facts.notes.append(
                f"{file.name!r} names foreign globals {sorted(loaded.globals)[:3]}; nothing was executed"
            )
        tp_pp = file.at("tp"), file.at("pp")
        if file.model:
            own = paddle_names.static_table(paddle_tree.names_of(loaded).items())
            facts.tables[tp_pp] = {**own, **facts.tables.get(tp_pp, {})}
        for stored in paddle_tree.tensors(loaded, repr(file.name)):
            piece = _Piece(file, stored)
            if file.model:
                weights.setdefault(stored.key, []).append(piece)
            else:
                states.setdefault(_state_of(piece, facts.tables.get(tp_pp, {})), []).append(piece)
    layouts: dict[str, _Layout | None] = {}
    for name, pieces in weights.items():
        layouts[name] = layout = _layout(name, pieces, facts)
        _declare(builder, name, name, _role(name, pieces[0]), pieces, layout, facts)
    for (name, role, key), pieces in states.items():
        _declare(builder, key, name or None, role, pieces, _state_layout(name, role, pieces, layouts), facts)
    _add_notes(facts)


# ---- names ---------------------------------------------------------------------------------------------------------


def _state_of(piece: _Piece, table: Mapping[str, str]) -> tuple[str, str, str]:
    """Return parameter (empty if the same process's table lacks it), role and global key."""
    path, key = piece.stored.path, piece.stored.key
    if len(path) > 1 and str(path[-2]) in paddle_names.MASTERS:
        name = table.get(str(path[-1]))
        if name:
            return name, "master", MASTERS + name
    elif found := paddle_names.split_state(str(path[-1]) if path else key):
        name = table.get(found[0])
        if name:
            return name, found[1], f"{name}/{found[2]}"
        return "", found[1], f"optimizer/{piece.label or 'rank'}/{key}"
    return "", "other", f"optimizer/{piece.label or 'rank'}/{key}"


def _role(name: str, piece: _Piece) -> str:
    _, roles = paddle_names.resolve([name], {name: (name,)}, {name: piece.stored.static}, {})
    return roles[0]


# ---- layout of pieces ----------------------------------------------------------------------------------------------


def _layout(name: str, pieces: Sequence[_Piece], facts: Facts) -> _Layout | None:
    """Return the layout of a parameter's pieces; ``None`` to keep them separate."""
    shapes = {piece.stored.shape for piece in pieces}
    ranks = sorted({piece.file.at("tp") for piece in pieces})
    tp = facts.degrees.get("tp", 1)
    local = pieces[0].stored.shape
    if len(shapes) > 1 or len({piece.file.at("moe") for piece in pieces}) > 1:
        return None
    if tp == 1:
        return _Layout(local, local, {0: (0,) * len(local)})
    distributed = {facts.distributed.get((p.file.at("tp"), p.file.at("pp")), {}).get(name) for p in pieces}
    axis = paddlenlp_axes.proven_axis(name, local, tp, facts.config, cut=distributed == {True})
    if distributed == {False}:
        axis = REPLICATED
    elif (axis == REPLICATED and True in distributed) or len(ranks) < tp:
        return None
    elif axis is not None:
        facts.by_config[name] = None
    if axis is None:
        return None
    if axis == REPLICATED:
        return _Layout(local, local, {rank: (0,) * len(local) for rank in ranks})
    shape = tuple(size * tp if at == axis else size for at, size in enumerate(local))
    origin = {rank: tuple(rank * local[axis] if at == axis else 0 for at in range(len(local))) for rank in ranks}
    return _Layout(shape, local, origin)


def _state_layout(
    name: str, role: str, pieces: Sequence[_Piece], layouts: Mapping[str, _Layout | None]
) -> _Layout | None:
    """Return a state's layout, that of its parameter; a power of beta is one number, copied on every rank."""
    shapes = {piece.stored.shape for piece in pieces}
    shape, layout = pieces[0].stored.shape, layouts.get(name)
    if len(shapes) == 1 and ((role in POWERS and math.prod(shape) == 1) or (len(pieces) == 1 and not name)):
        return _Layout(shape, shape, {piece.file.at("tp"): (0,) * len(shape) for piece in pieces})
    if layout is None or not layout.origin.keys() >= {piece.file.at("tp") for piece in pieces}:
        return None  # also if a rank has the state of a weight that it does not hold
    return layout if shapes == {layout.local} or all(len(one) == 1 for one in shapes) else None


# ---- rows ----------------------------------------------------------------------------------------------------------


def _declare(
    builder: CatalogBuilder,
    key: str,
    fqn: str | None,
    role: str,
    pieces: Sequence[_Piece],
    layout: _Layout | None,
    facts: Facts,
) -> None:
    try:
        dtype = pieces[0].stored.pieces[0].element()
    except UnsupportedFormatError as error:
        facts.notes.append(f"{key!r} of {pieces[0].file.name!r} is left out: {error}")
        return
    if layout is None:
        facts.unmerged[fqn or key] = None
        many = len({piece.label for piece in pieces}) > 1
        for label, own in _by_label(pieces).items():
            for piece in own:
                full_key = f"{key}@{label}" if many else key
                paddle_tree.declare(builder, piece.file.name, full_key, piece.stored, facts.notes, fqn=fqn, role=role)
        return
    builder.tensor(key, dtype, layout.shape, fqn=fqn, role=role)
    by_tp: dict[int, list[_Piece]] = {}
    for piece in pieces:
        by_tp.setdefault(piece.file.at("tp"), []).append(piece)
    for rank, own in by_tp.items():
        origin = layout.origin[rank]
        if all(piece.stored.shape == layout.local for piece in own):
            for piece in own:
                _whole(builder, key, layout.shape, origin, piece)
        else:
            _slices(builder, builder.tensor(key, dtype, layout.shape), key, dtype, layout.local, origin, own)


def _by_label(pieces: Sequence[_Piece]) -> dict[str, list[_Piece]]:
    """Group pieces by the shortest distinct label: only the tp rank, if all other differences are copies."""
    short: dict[str, list[_Piece]] = {}
    for piece in pieces:
        moe = f"_moe{piece.file.at('moe'):02d}" if "moe" in piece.file.coords else ""
        short.setdefault(f"tp{piece.file.at('tp'):02d}{moe}", []).append(piece)
    if all(len({piece.stored.shape for piece in own}) == 1 for own in short.values()):
        return short
    return {piece.label: [piece] for piece in pieces}


def _whole(builder: CatalogBuilder, key: str, shape: tuple[int, ...], origin: tuple[int, ...], piece: _Piece) -> None:
    if len(piece.stored.pieces) > 1:
        raise UnsupportedFormatError(
            f"{piece.file.name!r}: {piece.stored.key!r} is split into slices (pickle protocol 2)"
        )
    ref = piece.stored.pieces[0]
    builder.tensor(key, ref.element(), shape)  # raises if ranks disagree on the element type
    builder.chunk(
        key,
        origin,
        piece.stored.shape,
        piece.file.name,
        ref.span.start,
        ref.span.stop,
        codec=ref.codec(),
        strides=ref.strides(),
    )


def _slices(
    builder: CatalogBuilder,
    tensor: int,
    key: str,
    dtype: DType,
    local: tuple[int, ...],
    origin: tuple[int, ...],
    own: Sequence[_Piece],
) -> None:
    """Add flat slices of one tp rank's piece, in the order of sharding ranks; elements beyond the piece are padding."""
    numel, at = math.prod(local), 0
    for piece in sorted(own, key=lambda one: one.file.at("sharding")):
        ref = piece.stored.pieces[0]
        size = math.prod(piece.stored.shape)
        stop = min(at + size, numel)
        if stop > at:
            _, offsets, sizes, flat = box.flat_ranges(np.array([local]), np.array([at]), np.array([stop]))
            builder.block(
                np.full(len(flat), tensor),
                offsets + np.array(origin),
                sizes,
                builder.file(piece.file.name),
                ref.span.start,
                ref.span.stop,
                codec=ref.codec(),
                inner=(flat - at) * dtype.itemsize,
            )
        at += size
    if at < numel:
        raise CorruptError(
            f"{key!r}: the slices of {plural(len(own), 'sharding rank')} hold {plural(at, 'element')}; the piece of "
            f"shape {list(local)} has {numel:,}: a rank's file is from another save"
        )


def _add_notes(facts: Facts) -> None:
    if facts.by_config:
        facts.notes.append(
            f"tensor parallelism divided {plural(len(facts.by_config), 'parameter')} along an axis that no file "
            f"stores; it follows from config.json: {some_of(facts.by_config, MAX_NAMED)}"
        )
    if facts.unmerged:
        facts.notes.append(
            f"{plural(len(facts.unmerged), 'parameter', 'are')} kept separate by rank (name@tp00 …): how to join their "
            f"pieces is not stored, and no config.json next to them proves it: {some_of(facts.unmerged, MAX_NAMED)}"
        )


def _coordinates_text(coords: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {number}" for axis, number in coords.items())
