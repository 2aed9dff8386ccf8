"""An export as it is chosen on the page: what it calls, and the same as a command line; no Panel in here.

::

    state ──► Choice ──► run(tick)         in a job: dry, or for good
                 └─────► command line      for a shell in ROOT

A pattern is searched by :class:`workbench.app.search.Search`, which ends; the export gets the tensors that it found.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.app.outlet import Outlet, command
from workbench.app.search import LIMIT, Search
from workbench.checkpoint import Checkpoint
from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.app.state import WorkbenchState
    from workbench.reshard.report import ExportReport

__all__ = ["CASTS", "NAMES", "ROLES", "TARGETS", "Choice", "default_name"]

#: What the page offers: the URL's word → what it is called. The first one is the default, and empty in the URL.
TARGETS = {
    "safetensors": "safetensors (Hugging Face)",
    "torch": "torch.save",
    "dcp": "DCP (torch.distributed.checkpoint)",
    "bytecheckpoint": "ByteCheckpoint",
    "torch_dist": "torch_dist (Megatron-core)",
}
CASTS = {
    "": "as stored", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
    "fp8": "FP8, a scale for each 128 × 128", "fp8-tensor": "FP8, a scale for each weight",
}  # fmt: skip
NAMES = {"": "as stored", "fqn": "the parameters' own (fqn)", "hf": "transformers' (hf)"}
ROLES = {"": "what a model loads", "all": "every tensor, and plain objects"}
MOST_RANKS = 4096  #: ranks of a mesh that the page plans for


@dataclass(frozen=True)
class Choice:
    """Everything that decides what is written.

    Attributes:
        path: of the checkpoint, relative to ROOT; ``into``: of the target, relative to the outlet's folder.
        to, role, pattern, mesh, cast, rename: as in the URL.
        overwrite, verify: as :func:`workbench.reshard.export.export` has them.
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
    def of(cls, state: WorkbenchState, *, overwrite: bool = False, verify: bool = True) -> Choice:
        """What the state says; the target has a name even where none was typed."""
        to, into = state.target or next(iter(TARGETS)), state.into.strip()
        into = into or default_name(state.path, to, bool(state.mesh.strip()))
        return cls(
            state.path, into, to, state.role, state.pattern, state.mesh.strip(), state.cast, state.rename, overwrite,
            verify,
        )  # fmt: skip

    def run(
        self, ckpt: Checkpoint, outlet: Outlet, tick: Callable[[float], None], *, dry_run: bool = False
    ) -> ExportReport:
        """Plan, or write.

        Raises:
            UsageError: nothing may be written here, a choice that is none, or as ``export`` raises.
            UnsafeError, WriteError: as :meth:`Outlet.resolve`.
        """
        from workbench.reshard.export import export
        from workbench.reshard.mesh import Mesh

        if not dry_run and not outlet.open:
            raise UsageError("this server writes nothing; whoever started it did so without --allow-export")
        for word, known, what in (
            (self.to, TARGETS, "format"), (self.cast, CASTS, "type"), (self.rename, NAMES, "naming"),
        ):  # fmt: skip
            if word not in known:
                raise UsageError(f"there is no {what} {word!r}; choose one of {', '.join(filter(None, known))}")
        mesh = Mesh.parse(self.mesh) if self.mesh else None
        if mesh is not None and mesh.world_size > MOST_RANKS:
            raise UsageError(f"{mesh.world_size:,} ranks are more than the page plans ({MOST_RANKS:,}); use a shell")
        target = outlet.resolve(self.into, overwrite=self.overwrite)
        chosen, select = self.narrowed(ckpt, tick)
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
            tick=tick,
            dry_run=dry_run,
        )

    def command(self, outlet: Outlet) -> str:
        """The same for a shell in ROOT."""
        under = os.path.relpath(outlet.folder, outlet.jail.root)
        words = ["workbench", "export", _plain(self.path), _plain(os.path.normpath(os.path.join(under, self.into)))]
        words += ["--to", self.to]
        for option, value in (
            ("--select", self.pattern), ("--role", self.role), ("--rename", self.rename), ("--dtype", self.cast),
            ("--mesh", self.mesh),
        ):  # fmt: skip
            words += [f"{option}={value}"] if value else []
        return command([*words, *["--overwrite"] * self.overwrite, *["--verify"] * self.verify])

    def narrowed(self, ckpt: Checkpoint, tick: Callable[[float], None]) -> tuple[Checkpoint, str | None]:
        """The checkpoint, narrowed; with other names, what is to be narrowed by them."""
        if not self.pattern:
            return ckpt, None
        if self.rename != "hf":
            return ckpt.take(_found(ckpt, self.pattern, tick)), None
        from workbench.reshard.hf.convert import as_hf

        named = as_hf(ckpt, None).ckpt
        keys = [named.catalog.keys[at] for at in _found(named, self.pattern, tick).tolist()]
        return ckpt, r"\A(?:" + "|".join(map(re.escape, keys)) + r")\Z"


def default_name(path: str, to: str, cut: bool) -> str:
    """A target's name after its source: ``run-step-4-dcp``."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.removesuffix(".safetensors")).strip(".-_")[-100:].lstrip(".-_")
    return f"{stem or 'export'}{'.pt' if to == 'torch' and not cut else f'-{to}'}"


def _found(ckpt: Checkpoint, pattern: str, tick: Callable[[float], None]) -> np.ndarray[Any, np.dtype[np.int64]]:
    search = Search(ckpt.catalog.keys, pattern)
    until = time.monotonic() + LIMIT
    while not search.run(0.2):
        tick(0.0)
        if time.monotonic() > until:
            raise search.too_long()
    if not search.hits:
        raise UsageError(f"no tensor's name matches {pattern!r}; empty the filter to export all")
    return search.positions()


def _plain(path: str) -> str:
    """A path that no option parser takes for an option."""
    return f"./{path}" if path.startswith("-") else path
