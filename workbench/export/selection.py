"""The selection of an export: tensors, their names and types, and their placement on a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.dtypes import ALL, DType
from workbench.core.mesh.mesh import Mesh
from workbench.errors import UsageError
from workbench.export import casts
from workbench.export.sharding.rules import Rules
from workbench.export.sharding.target import Target
from workbench.export.values.editing import edit
from workbench.export.values.edits import Edited
from workbench.export.values.fp8 import RECIPES
from workbench.names.roles import has_role

Rename = Mapping[str, str] | Callable[[str], str] | str


@dataclass(frozen=True, eq=False)
class ExportSelection:
    """``T`` tensors of a checkpoint, as the target will store them.

    Attributes:
        ckpt: the view of a checkpoint that they come from.
        tensors: ``(T,)`` positions in its catalog.
        names: their names in the target.
        codes: ``(T,) uint8`` element types as written, codes of :mod:`workbench.core.dtypes`.
        target: how they are placed on the mesh; ``None`` if they are written whole.
        objects: non-tensor state that goes with them, plain values by name.
        edited: changes of values, and tensors that the source lacks; ``ckpt`` is then its checkpoint, and
            ``tensors`` are all of its tensors.
        recipe: by which weights are quantised, one of :data:`workbench.export.values.fp8.RECIPES`.
        unselected: keys of the other tensors of the source.
    """

    ckpt: Checkpoint
    tensors: Ints
    names: list[str]
    codes: Array
    target: Target | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    edited: Edited | None = None
    recipe: str | None = None
    unselected: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def catalog(self) -> Catalog:
        """The catalog of the checkpoint; ``tensors`` are positions in it."""
        return self.ckpt.catalog

    @property
    def dims(self) -> int:
        """Padded number of axes of the catalog's boxes."""
        return self.catalog.shape.shape[1]

    @property
    def mesh(self) -> Mesh:
        """The ranks; one rank if tensors are written whole."""
        return Mesh() if self.target is None else self.target.mesh

    def shape_of(self, at: int) -> tuple[int, ...]:
        """Return the global shape of a tensor of the selection."""
        return self.catalog.shape_of(int(self.tensors[at]))

    def dtype_of(self, at: int) -> DType:
        """Return the element type of a tensor of the selection, as written."""
        return ALL[self.codes[at]]


def with_objects(selection: ExportSelection, objects: Mapping[str, Any]) -> ExportSelection:
    """Return the selection with non-tensor state; tensors in that state may have more axes than those of the
    checkpoint.
    """
    most, todo = 0, list(objects.values())
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
        else:
            most = max(most, len(getattr(value, "shape", ())))
    if most > selection.dims:
        selection = replace(selection, ckpt=selection.ckpt.derive(selection.catalog.widened(most)))
    return replace(selection, objects=objects)


def choose(
    ckpt: Checkpoint,
    *,
    select: str | Sequence[str] | None = None,
    role: str | None = "model",
    rename: Rename | None = None,
    dtype: object | None = None,
    adapters: Sequence[Checkpoint] = (),
    unscaled: bool = False,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    threads: int | None = None,
) -> ExportSelection:
    """Return the selected tensors with their new names, types and placements; the arguments are those of
    :func:`export`.

    Args:
        adapters: must stay open until the export is done.

    Raises:
        UsageError: nothing is selected, a cast is not supported, or names, rules or adapters do not fit.
        UnsupportedFormatError: an adapter cannot be merged.
        OpenError: a weight to be quantised cannot be read.
    """
    if rules is not None and mesh is None:
        raise UsageError("rules place tensors on the ranks of a mesh; pass one with mesh=")
    catalog = ckpt.catalog
    keep = has_role(catalog.keys, ckpt.fqns, ckpt.roles, role)
    if select is not None:
        patterns = [select] if isinstance(select, str) else list(select)
        try:
            hits = [catalog.match(pattern) for pattern in patterns]
        except re.error as error:
            raise UsageError(f"select={select!r} is not a valid regular expression: {error}") from None
        keep &= np.isin(np.arange(len(catalog)), np.concatenate([np.empty(0, np.int64), *hits]))
    positions = np.flatnonzero(keep)
    if not len(positions):
        roles = ", ".join(sorted(set(ckpt.roles))) or "none"
        raise UsageError(f"no tensor is selected by select={select!r}, role={role!r}; stored roles: {roles}")
    recipe = str(dtype) if str(dtype) in RECIPES else None
    edited, narrow = None, ckpt.take(positions)
    codes = narrow.catalog.dtype
    if dtype is not None or adapters:
        edited = edit(
            ckpt,
            positions.tolist(),
            dtype=None if dtype is None or recipe else casts.target(dtype),
            adapters=adapters,
            recipe=recipe,
            unscaled=unscaled,
            threads=threads,
        )
        narrow, codes = edited.ckpt, edited.codes
    names = [_name(key, fqn, rename) for key, fqn in zip(narrow.catalog.keys, narrow.fqns, strict=True)]
    if edited is not None:
        names = edited.named(names)
    target = None if mesh is None else Target.of(narrow, mesh, rules)  # rules see only the tensors that are written
    return ExportSelection(
        narrow,
        np.arange(len(names)),
        names,
        codes,
        target,
        edited=edited,
        recipe=recipe,
        unselected=tuple(catalog.keys[at] for at in np.flatnonzero(~keep).tolist()),
    )


def _name(key: str, fqn: str | None, rename: Rename | None) -> str:
    if rename is None:
        return key
    if isinstance(rename, str):
        if rename != "fqn":
            raise UsageError(f"rename={rename!r}: choose 'hf' or 'fqn', or pass a mapping or a function")
        return fqn or key
    new = rename.get(key, key) if isinstance(rename, Mapping) else rename(key)
    if not isinstance(new, str) or not new:
        raise UsageError(f"rename maps {key!r} to {new!r}, which is not a string")
    return new
