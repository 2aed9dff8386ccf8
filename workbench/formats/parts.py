"""What the layouts share that put model, optimizer and state into files and folders of their own.

Each part is read by the reader of its format, found through the registry; the catalogs are joined into one::

    checkpoint-6/model.safetensors   ──safetensors──▶  model.norm.weight             ┐
    checkpoint-6/optimizer.pt        ──torch_save───▶  optimizer.state.0.exp_avg     ┴──▶ one catalog, named once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench import formats, naming
from workbench.core import objects
from workbench.core.build import merge
from workbench.core.catalog import Catalog
from workbench.core.pickles import unpickle
from workbench.core.place import Place

__all__ = ["Part", "combine", "file", "folder", "rest", "whole"]

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "master_param")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint.

    Attributes:
        prefix: put before the part's keys.
        folder: where its files are, relative to the checkpoint.
        catalog: as its reader made it.
        optimizer: whether it is optimizer state.
        groups: the optimizer's ``param_groups``, where its parameters are numbered.
    """

    prefix: str
    folder: str
    catalog: Catalog
    optimizer: bool
    groups: list[Mapping[str, Any]] | None = None


def folder(place: Place, format: str, name: str, optimizer: bool) -> Part:
    """The part in a folder (or in the checkpoint's own, for an empty name)."""
    return Part("", name, formats.reader(format).read_catalog(place.sub(name) if name else place), optimizer)


def file(place: Place, name: str, prefix: str, *, model: bool = False) -> Part:
    """The part in one file of the checkpoint's folder."""
    inner = place.sub(name)
    reader = formats.reader("safetensors" if name.endswith(".safetensors") else "torch_save")
    catalog = reader.read_catalog(inner)
    stored: Mapping[str, Any] = {} if model else reader.read_objects(inner, catalog)
    groups = stored.get("param_groups")
    return Part(prefix, "", catalog, not model, groups if isinstance(groups, list) else None)


def combine(format: str, place: Place, found: Sequence[Part], notes: Sequence[str], meta: Mapping[str, Any]) -> Catalog:
    """One catalog of all parts, every tensor with its fqn and role."""
    merged = merge(format, [(part.prefix, part.folder, part.catalog) for part in found], meta)
    paths = {key: (key,) for part in found if _is_flat(part) for key in part.catalog.keys}
    fqns, roles = naming.resolve(merged.keys, {"paths": paths})
    more: list[str] = []
    at = 0
    for part in found:
        if part.groups is not None:
            more += _join(part, found, merged, fqns, roles, at)
        at += len(part.catalog)
    told = [note for part in found for note in part.catalog.meta.get("notes", []) if not naming.is_uncertain(note)]
    return replace(merged, fqns=fqns, roles=roles, meta={**merged.meta, "notes": [*notes, *told, *more]})


def whole(place: Place, name: str) -> Any:
    """A state file decoded whole, tensors included; nothing in it is run."""
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
    """A state file without its tensors (they are keys of the checkpoint)."""
    inner = place.sub(name)
    reader = formats.reader("torch_save")
    found = reader.read_objects(inner, reader.read_catalog(inner))
    return found["value"] if list(found) == ["value"] else dict(found)


def _is_flat(part: Part) -> bool:
    """Weights whose keys are the model's own names: everything but DCP, which has containers."""
    return not part.optimizer and not part.prefix and part.catalog.format != "dcp"


def _join(
    part: Part, found: Sequence[Part], merged: Catalog, fqns: list[str | None], roles: Sequence[str], at: int
) -> list[str]:
    """Names for an optimizer's numbers where they are certain; returns a note on those that are not."""
    models = [other for other in found if not other.optimizer]
    params: dict[str, tuple[int, ...]] = {}
    for position, (fqn, role) in enumerate(zip(fqns, roles, strict=True)):
        if role == "param" and fqn is not None:
            params[fqn] = merged.shape_of(position)
    tied = {key for group in models[0].catalog.meta.get("aliases", []) for key in group[1:]} if models else set()
    names = [name for name in params if name not in tied]
    shapes: dict[int, tuple[int, ...]] = {}
    numbers: dict[int, int] = {}
    for row, key in enumerate(part.catalog.keys):
        pieces = key.split(".")
        if len(pieces) == 3 and pieces[0] == "state" and pieces[1].isdigit():
            numbers[at + row] = int(pieces[1])
            if pieces[2] in MOMENTS:
                shapes[int(pieces[1])] = part.catalog.shape_of(row)
    # torch stores a state_dict in the model's own order; safetensors sorts it
    ordered = len(models) == 1 and models[0].catalog.format == "torch_save"
    joined = naming.join_param_groups(part.groups or [], shapes, names, params, ordered=ordered) or {}
    for position, number in numbers.items():
        fqns[position] = joined.get(number)
    lost = len(set(numbers.values()) - set(joined))
    if not lost:
        return []
    return [naming.uncertain(part.prefix.rstrip("."), lost)]
