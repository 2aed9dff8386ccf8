"""Carry out what a writer planned, without the transaction around it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.core.mesh.mesh import Mesh
from workbench.export.filemap import FileMap
from workbench.export.moving.engine import prepare
from workbench.export.selection import ExportSelection, choose
from workbench.export.sharding.rules import Rules
from workbench.export.writers.plain import plain_objects


def everything(
    ckpt: wb.Checkpoint, mesh: Mesh | None = None, *, rules: Rules | None = None, **options: Any
) -> ExportSelection:
    """All tensors, unless told otherwise, and all objects that are plain values."""
    selection = choose(ckpt, **({"role": None} | options), mesh=mesh, rules=rules)
    return replace(selection, objects=plain_objects(ckpt.objects, list(ckpt.objects), tensors=True)[0])


def write(selection: ExportSelection, maps: Sequence[FileMap], folder: Path) -> Path:
    """Fill the files in a new folder."""
    payloads = selection.ckpt.payloads
    paths = [folder / one.name for one in maps]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    prepare(payloads, maps).run([os.fspath(path) for path in paths], threads=1)
    return folder
