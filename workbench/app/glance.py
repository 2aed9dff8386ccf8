"""The Overview's data of a checkpoint: computed once, on opening, for all sessions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.app.words import count, html, size
from workbench.checkpoint import Checkpoint
from workbench.views import facts as shared

DEPTH = 3  #: components of a module name, unless a layer number comes earlier
Bytes = list[tuple[str, int]]


@dataclass(frozen=True)
class Glance:
    """Pairs of label and HTML, sentences, and bytes by name, largest first."""

    facts: list[tuple[str, str]]
    oddities: list[str]
    roles: Bytes
    dtypes: Bytes
    modules: Bytes
    ranks: Bytes


def glance(ckpt: Checkpoint) -> Glance:
    """Summarise the catalog's columns; no file is read except the one with the step."""
    return Glance(
        facts(ckpt),
        shared.oddities(ckpt),
        [(share.label, share.nbytes) for share in shared.by_role(ckpt)],
        [(share.label, share.nbytes) for share in shared.by_dtype(ckpt)],
        bytes_by_module(ckpt),
        [(share.label, share.nbytes) for share in shared.by_rank(ckpt)],
    )


def facts(ckpt: Checkpoint) -> list[tuple[str, str]]:
    """Return a description of the checkpoint as pairs of label and HTML, in the words of its text repr."""
    heading = [(name, html(value)) for name, value in shared.heading(ckpt) if name not in ("files", "objects")]
    used = np.flatnonzero(np.bincount(ckpt.catalog.file, minlength=len(ckpt.catalog.files))).tolist()
    sizes = [max(ckpt.catalog.file_stats[file].size, 0) for file in used]
    return [
        ("format", html(ckpt.format)),
        *heading,
        ("tensor files", f"{count(len(sizes))} ({size(sum(sizes))})"),
        ("other objects", count(len(ckpt.objects))),
    ]


def bytes_by_module(ckpt: Checkpoint) -> Bytes:
    """Return the bytes by module, optimizer state counted with its parameter, largest first."""
    total: dict[str, int] = {}
    sizes = ckpt.catalog.tensor_nbytes.tolist()
    for fqn, key, n in zip(ckpt.fqns, ckpt.catalog.keys, sizes, strict=True):
        name = module_of(fqn or key)
        total[name] = total.get(name, 0) + n
    return sorted(total.items(), key=lambda item: (-item[1], item[0]))


def module_of(name: str) -> str:
    """Return the module that a chart counts a tensor under: up to the first number, or the first few components."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1][:DEPTH]) or name
