"""Carry out an export's edits: whole tensors of a checkpoint into one safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from workbench.export.atomic.journal import Written
from workbench.export.filemap import Pieces
from workbench.export.moving.engine import prepare
from workbench.export.values.edits import Edits
from workbench.export.writers.safetensors import one_file


def write_edited(edits: Edits, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Written]]:
    """What the file holds, and what became of each tensor, by the names of the source."""
    edited = edits.done()
    ckpt = edited.ckpt
    pieces = edited.applied(Pieces.whole(ckpt.catalog, np.arange(len(ckpt)), dtype=edited.codes))
    one = one_file(pieces, path.name)
    written = prepare(ckpt.payloads, [one]).run([str(path)])[0]
    return load_file(path), dict(zip(one.pieces.names, written, strict=True))
