"""Shared code of layouts that store model, optimizer and state in separate files and folders.

The reader of each part's format is found through the registry; the catalogs are merged into one::

    checkpoint-6/model.safetensors   ──safetensors──▶  model.norm.weight             ┐
    checkpoint-6/optimizer.pt        ──torch_save───▶  optimizer.state.0.exp_avg     ┴──▶ one catalog, named once
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench import formats
from workbench.core import objects
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.pickles import unpickle
from workbench.core.place import Place
from workbench.names.optimizer import MOMENTS, is_uncertain, name_numbered
from workbench.names.roles import EMA, resolve

STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint.

    Attributes:
        prefix: prefix of the part's keys.
        folder: the folder of its files, relative to the checkpoint.
        catalog: the catalog from its reader.
        optimizer: whether it is optimizer state.
        groups: the optimizer's ``param_groups``, if its parameters are numbered.
    """

    prefix: str
    folder: str
    catalog: Catalog
    optimizer: bool
    groups: list[Mapping[str, Any]] | None = None


def folder(place: Place, format: str, name: str, optimizer: bool) -> Part:
    """Read the part in a subfolder (or in the checkpoint's folder, for an empty name)."""
    return Part("", name, formats.reader(format).read_catalog(place.sub(name) if name else place), optimizer)


def file(place: Place, name: str, prefix: str, *, model: bool = False) -> Part:
    """Read the part in one file of the checkpoint's folder."""
    inner = place.sub(name)
    reader = formats.reader("safetensors" if name.endswith(".safetensors") else "torch_save")
    catalog = reader.read_catalog(inner)
    stored: Mapping[str, Any] = {} if model else reader.read_objects(inner, catalog)
    groups = stored.get("param_groups")
    return Part(prefix, "", catalog, not model, groups if isinstance(groups, list) else None)


def averages(place: Place) -> list[Part]:
    """Read averaged weights that a training loop stores beside the model, as ``ema.pt``."""
    return [file(place, name, f"{stem}.", model=True) for stem, name in _average_files(place).items()]


def average_objects(place: Place) -> dict[str, Callable[[], Any]]:
    """Return functions that decode what such files store beside the weights, by stem: decays, numbers of updates."""
    files = {stem: name for stem, name in _average_files(place).items() if not name.endswith(".safetensors")}
    return {stem: partial(rest, place, name) for stem, name in files.items() if rest(place, name)}


def _average_files(place: Place) -> dict[str, str]:
    names = [name for name in place.files if name.endswith((".pt", ".pth", ".bin", ".safetensors"))]
    stems = {name.rpartition(".")[0]: name for name in names}
    return {stem: name for stem, name in stems.items() if stem in EMA}


def combine(
    format: str,
    place: Place,
    found: Sequence[Part],
    notes: Sequence[str],
    meta: Mapping[str, Any],
    *,
    order: Sequence[str] | None = None,
) -> Catalog:
    """Return one catalog of all parts, every tensor with its fqn and role.

    Args:
        order: keys of the weights in the order in which the model registered them, if a file states it.
    """
    merged = merge(format, [(part.prefix, part.folder, part.catalog) for part in found], meta)
    paths = {key: (key,) for part in found if _is_flat(part) for key in part.catalog.keys}
    fqns, roles = resolve(merged.keys, {"paths": paths})
    more: list[str] = []
    at = 0
    for part in found:
        if part.groups is not None:
            more += _join(part, found, merged, fqns, roles, at, order)
        at += len(part.catalog)
    part_notes = [note for part in found for note in part.catalog.meta.get("notes", []) if not is_uncertain(note)]
    return replace(merged, fqns=fqns, roles=roles, meta={**merged.meta, "notes": [*notes, *part_notes, *more]})


def missing(place: Place) -> str:
    """Describe what the DCP folder of each part, or of each of its pipeline stages, lacks."""
    for part in ("model", "optimizer"):
        inner = place.sub(part) if part in place.folders else None
        stages = [name for name in inner.folders if re.fullmatch(r"pp_\d+", name)] if inner else []
        for name in [f"{part}/{stage}" for stage in stages] or ([part] if inner and inner.files else []):
            if why := missing_dcp(place, name):
                return why
    return ""


def missing_dcp(place: Place, folder: str) -> str:
    """Describe what the DCP checkpoint in a folder lacks."""
    why = formats.missing(place.sub(folder), "dcp")
    return f"{folder}: {why}" if why else ""


def trainer_step(place: Place) -> Any:
    """Return the step stored by Hugging Face's or PaddleNLP's trainer."""
    state = place.read_json(STATE) if STATE in place.files else None
    return state.get("global_step") if isinstance(state, dict) else None


def whole(place: Place, name: str) -> Any:
    """Decode a state file including its tensors; nothing in it is executed."""
    what = repr(name)
    data = place.read(name)
    if data[:4] == b"PK\x03\x04":
        return objects.decode_archive(np.frombuffer(data, np.uint8), what=what)
    inner = place.sub(name)
    reader = formats.reader("torch_save")
    if reader.detect(inner):
        return rest(place, name)
    return unpickle.loads(data, what=what)


def rest(place: Place, name: str) -> Any:
    """Decode a state file without its tensors (they are keys of the checkpoint)."""
    inner = place.sub(name)
    reader = formats.reader("torch_save")
    found = reader.read_objects(inner, reader.read_catalog(inner))
    return found["value"] if list(found) == ["value"] else dict(found)


def _is_flat(part: Part) -> bool:
    """Return whether the keys are the model's own names: every format except DCP, which has containers."""
    return not part.optimizer and not part.prefix and part.catalog.format != "dcp"


def _join(
    part: Part,
    found: Sequence[Part],
    merged: Catalog,
    fqns: list[str | None],
    roles: Sequence[str],
    at: int,
    order: Sequence[str] | None,
) -> list[str]:
    """Name an optimizer's numbered parameters if that is certain. Return notes about the others."""
    models = [other for other in found if not other.optimizer]
    params: dict[str, tuple[int, ...]] = {}
    known = range(len(fqns)) if order is None else [merged.index[key] for key in order if key in merged.index]
    for position in known:
        fqn, role = fqns[position], roles[position]
        if role == "param" and fqn is not None:
            params[fqn] = merged.shape_of(position)
    tied = {key for group in models[0].catalog.meta.get("aliases", []) for key in group[1:]} if models else set()
    params = {name: shape for name, shape in params.items() if name not in tied}
    shapes: dict[int, tuple[int, ...]] = {}
    numbers: dict[int, int] = {}
    for row, key in enumerate(part.catalog.keys):
        pieces = key.split(".")
        if len(pieces) == 3 and pieces[0] == "state" and pieces[1].isdigit():
            numbers[at + row] = int(pieces[1])
            if pieces[2] in MOMENTS:
                shapes[int(pieces[1])] = part.catalog.shape_of(row)
    # torch stores a state_dict in the model's order; safetensors sorts it
    ordered = order is not None or (len(models) == 1 and models[0].catalog.format == "torch_save")
    called = part.prefix.rstrip(".")
    return name_numbered(fqns, numbers, shapes, part.groups or [], params, ordered=ordered, optimizer=called)
