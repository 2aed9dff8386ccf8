"""An export as chosen on the page: the call, and the equivalent command line; Panel is not used here.

::

    state ──► Choice ──► run(progress)     in a job: dry run or export
                 └─────► command line      for a shell in ROOT

Patterns are matched by :class:`workbench.app.search.Search`, which is sure to end; the export gets the tensors found.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.app.jail import BucketJail
from workbench.app.outlet import Outlet, command
from workbench.app.search import LIMIT, Search
from workbench.checkpoint import Checkpoint
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.writers.registry import WRITERS

if TYPE_CHECKING:
    from workbench.app.state import WorkbenchState
    from workbench.export.report import ExportReport

#: Choices on the page: word in the URL → label. The first is the default, and empty in the URL.
TARGETS = {name: writer.title for name, writer in WRITERS.items()}
CASTS = {
    "": "as stored",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "FP8, one scale per 128 × 128 block",
    "fp8-tensor": "FP8, one scale per weight",
}
NAMES = {"": "as stored", "fqn": "parameter names (fqn)", "hf": "transformers names (hf)"}
ROLES = {"": "what a model loads", "all": "all tensors and plain objects"}
MOST_RANKS = 4096  #: largest mesh that the page plans for


@dataclass(frozen=True)
class ExportChoice:
    """Everything that determines the export.

    Attributes:
        path: of the checkpoint, relative to ROOT; ``into``: of the target, relative to the outlet's folder.
        to, role, pattern, mesh, cast, rename: as in the URL.
        overwrite, verify: as in :func:`workbench.export.export.export`.
    """

    path: str
    into: str
    to: str
    role: str = ""
    pattern: str = ""
    mesh: str = ""
    cast: str = ""
    rename: str = ""
    overwrite: bool = False
    verify: bool = True

    @classmethod
    def of(cls, state: WorkbenchState, *, overwrite: bool = False, verify: bool = True) -> ExportChoice:
        """Build from the state; the target gets a default name if none was typed."""
        to, into = state.target or next(iter(TARGETS)), state.into.strip()
        into = into or default_name(state.path, to, bool(state.mesh.strip()))
        return cls(
            state.path,
            into,
            to,
            state.role,
            state.pattern,
            state.mesh.strip(),
            state.cast,
            state.rename,
            overwrite,
            verify,
        )

    def run(
        self, ckpt: Checkpoint, outlet: Outlet, progress: Callable[[float], None], *, dry_run: bool = False
    ) -> ExportReport:
        """Plan or write the export.

        Raises:
            UsageError: writing is not allowed here, a choice does not exist, or as ``export`` raises.
            UnsafeError, WriteError: as in :meth:`Outlet.resolve`.
        """
        from workbench.core.mesh.mesh import Mesh
        from workbench.export.export import export

        if not dry_run and not outlet.open:
            raise UsageError("this server does not write: it was started without --allow-export")
        for word, known, what in (
            (self.to, TARGETS, "format"),
            (self.cast, CASTS, "type"),
            (self.rename, NAMES, "naming"),
        ):
            if word not in known:
                raise UsageError(f"there is no {what} {word!r}; choose one of {', '.join(filter(None, known))}")
        mesh = Mesh.parse(self.mesh) if self.mesh else None
        if mesh is not None and mesh.world_size > MOST_RANKS:
            raise UsageError(
                f"{plural(mesh.world_size, 'rank', 'are')} more than the page plans ({MOST_RANKS:,}); use a shell"
            )
        target = outlet.resolve(self.into, overwrite=self.overwrite)
        chosen, select = self.narrowed(ckpt, progress)
        return export(
            chosen,
            target,
            self.to,
            select=select,
            role=self.role or "model",
            rename=self.rename or None,
            dtype=self.cast or None,
            mesh=mesh,
            overwrite=self.overwrite,
            verify=self.verify,
            progress=progress,
            dry_run=dry_run,
        )

    def command(self, outlet: Outlet) -> str:
        """Return the equivalent command line for a shell in ROOT; of a ROOT in a store, with its URL."""
        path, under = self.path, "."
        if isinstance(outlet.jail, BucketJail):
            path = outlet.jail.resolve(path)
        else:
            under = os.path.relpath(outlet.folder, outlet.jail.folder)
        words = ["workbench", "export", _plain(path), _plain(os.path.normpath(os.path.join(under, self.into)))]
        words += ["--to", self.to]
        for option, value in (
            ("--select", self.pattern),
            ("--role", self.role),
            ("--rename", self.rename),
            ("--dtype", self.cast),
            ("--mesh", self.mesh),
        ):
            words += [f"{option}={value}"] if value else []
        return command([*words, *["--overwrite"] * self.overwrite, *["--verify"] * self.verify])

    def narrowed(self, ckpt: Checkpoint, progress: Callable[[float], None]) -> tuple[Checkpoint, str | None]:
        """Return the narrowed checkpoint; with renaming, all tensors that the export narrows by the new names."""
        if not self.pattern:
            return ckpt, None
        if self.rename != "hf":
            return ckpt.take(_found(ckpt, self.pattern, progress)), None
        from workbench.export.hf.convert import as_hf

        named = as_hf(ckpt, None).ckpt
        keys = [named.catalog.keys[at] for at in _found(named, self.pattern, progress).tolist()]
        return ckpt, r"\A(?:" + "|".join(map(re.escape, keys)) + r")\Z"


def default_name(path: str, to: str, cut: bool) -> str:
    """Return a target name derived from the source: ``run-step-4-dcp``."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.removesuffix(".safetensors")).strip(".-_")[-100:].lstrip(".-_")
    return f"{stem or 'export'}{'.pt' if to == 'torch' and not cut else f'-{to}'}"


def _found(ckpt: Checkpoint, pattern: str, progress: Callable[[float], None]) -> np.ndarray[Any, np.dtype[np.int64]]:
    search = Search(ckpt.catalog.keys, pattern)
    until = time.monotonic() + LIMIT
    while not search.run(0.2):
        progress(0.0)
        if time.monotonic() > until:
            raise search.too_long()
    if not search.hits:
        raise UsageError(f"no tensor name matches {pattern!r}; clear the filter to export all")
    return search.positions()


def _plain(path: str) -> str:
    """Return a path that no option parser mistakes for an option."""
    return f"./{path}" if path.startswith("-") else path
