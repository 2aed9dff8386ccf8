"""What users hold: a checkpoint as a read-only mapping from stored names to lazy tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from workbench import formats, naming, runs
from workbench.core import cache as catalog_cache
from workbench.core.catalog import Catalog
from workbench.core.lazymap import LazyMap
from workbench.core.near import did_you_mean, no_such
from workbench.core.payload import Payloads
from workbench.core.place import Place
from workbench.core.scan import cores
from workbench.core.source import needs_descriptors
from workbench.core.storage import SourcePool
from workbench.errors import TensorNotFoundError, UsageError
from workbench.step import find_step, is_step
from workbench.tensor import LazyTensor, read_whole

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from workbench.app.cell import Cell
    from workbench.reshard.mesh import Mesh
    from workbench.reshard.rules import Rules

__all__ = ["Checkpoint", "discover", "open"]

T = TypeVar("T")


@needs_descriptors()
def open(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    cache: bool = True,
    io: str = "mmap",
    partial: bool = False,
) -> Checkpoint:
    """Open a checkpoint; only metadata is read.

    A folder that holds several steps of a run opens the one its tracker names, or the newest that is complete; the
    checkpoint's ``notes`` say which and why.

    Args:
        path: a checkpoint's folder or file, or a run's folder.
        format: a reader's name, when detection should be skipped (see ``workbench formats``).
        cache: keep the catalog of large checkpoints in the user's cache folder, keyed by the metadata files' stat.
        io: ``mmap`` allows views of the files to a caller who asks for them (``t.torch(copy=False)``); ``pread`` never
            maps a file. All other reads are copies by ``pread``, with either.
        partial: open although files are absent or truncated; reading what is lost still raises.

    Raises:
        OpenError: one line that says what, which file, which byte, and what to do.
    """
    place, note = runs.locate(Place(path), format)
    name = format or formats.detect_or_raise(place)
    reader = formats.reader(name)
    catalog = catalog_cache.load(place, name) if cache else None
    if catalog is None:
        catalog = reader.read_catalog(place) if format is None else formats.read_forced(place, name)
        catalog.check()
        if cache and catalog.chunks >= catalog_cache.MIN_CHUNKS:
            catalog_cache.save(place, catalog)
    if not partial:
        catalog.check_files()
    pool = SourcePool(place, catalog.files, catalog.file_stats, io)
    return Checkpoint(place, catalog, pool, _Objects(place, catalog, name).by_name(), [note] if note else [])


class _Objects:
    """A checkpoint's objects. A pickle of it holds where they are stored: they are read again when asked for."""

    def __init__(self, place: Place, catalog: Catalog, format: str) -> None:
        self._place, self._catalog, self._format = place, catalog, format

    @cached_property
    def stored(self) -> Mapping[str, Any]:
        return formats.reader(self._format).read_objects(self._place, self._catalog)

    def by_name(self) -> LazyMap:
        return LazyMap({name: partial(self._one, name) for name in self.stored})

    def _one(self, name: str) -> Any:
        return self.stored[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "stored"}


@needs_descriptors()
def discover(root: str | os.PathLike[str], *, depth: int = 3) -> pd.DataFrame:
    """The checkpoints under a folder, one row each: path format step nbytes mtime complete why.

    Only names and the metadata's commit markers are looked at; links out of ``root`` are not followed. ``why`` says
    what an incomplete one lacks; ``mtime`` is the newest file's.
    """
    import pandas as pd

    found = [asdict(one) for one in runs.discover(root, depth=depth)]
    frame = pd.DataFrame(found, columns=["path", "format", "step", "nbytes", "mtime", "complete", "why"])
    frame["step"] = frame["step"].astype("Int64")
    frame["mtime"] = pd.to_datetime(frame["mtime"], unit="s")
    return frame


def _followed(function: Callable[..., T], title: str) -> Callable[..., T]:
    """The function, showing how far it is when it is called in IPython."""
    from workbench.views.progress import followed

    return followed(function, title)


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint: stored name → :class:`LazyTensor`, with tables of tensors and chunks beside it.

    Attributes:
        notes: sentences on what is odd or was decided on opening; empty for an ordinary checkpoint.
        objects: non-tensor state by stored name, decoded on access without executing anything.
    """

    def __init__(
        self,
        place: Place,
        catalog: Catalog,
        pool: SourcePool,
        objects: Mapping[str, Any],
        notes: list[str] | None = None,
        *,
        names: tuple[list[str | None], list[str]] | None = None,
        parent: Checkpoint | None = None,
    ) -> None:
        self._place, self.catalog, self._pool = place, catalog, pool
        # An attribute and no property: IPython evaluates no property, so that it could not complete `ckpt.objects["`.
        self.objects: Mapping[str, Any] = LazyMap.of(objects)
        self._payloads = Payloads(catalog, pool)
        self._parent = parent
        self.notes: list[str] = [*(notes or []), *([] if parent else catalog.meta.get("notes", []))]
        if names is not None:
            self._names = names

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """Name of the reader: ``dcp``, ``safetensors`` …"""
        return self.catalog.format

    @property
    def path(self) -> str:
        """The checkpoint's path (of the step that was opened, when a run's folder was given)."""
        return self._place.path

    @cached_property
    def step(self) -> int | None:
        """Training step, as stored in the state or, failing that, in the trainer's folder name.

        ``None`` where neither tells, or where what should tell cannot be read.
        """
        if self._parent is not None:
            return self._parent.step
        told = self.catalog.meta.get("step")
        return told if is_step(told) else find_step(self.objects, self._place.name)

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks of the job, where a file says so; the writers' ranks alone do not prove it."""
        told = self.catalog.meta.get("world_size")
        return told if isinstance(told, int) else None

    @property
    def mesh(self) -> Mapping[str, Any]:
        """What the files store or prove of the device mesh: ``axes`` (name → size), ``ranks`` (file or rank →
        coordinates), ``unknown`` (axes that nothing tells), ``source``. Empty where nothing is known.
        """
        found = self.catalog.meta.get("mesh")
        return found if isinstance(found, Mapping) else {}

    @property
    def payloads(self) -> Payloads:
        """The bytes behind the catalog's chunk rows, for analyses that scan them."""
        return self._payloads

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """One row a tensor: key fqn role dtype shape numel nbytes chunks files replicas."""
        from workbench.core.frames import tensor_frame

        return tensor_frame(self.catalog, *self._names)

    @cached_property
    def chunks(self) -> pd.DataFrame:
        """One row a chunk: key offsets sizes dtype file start stop rank replica codec."""
        from workbench.core.frames import chunk_frame

        return chunk_frame(self.catalog)

    @cached_property
    def fqns(self) -> list[str | None]:
        """Parameter each tensor belongs to, by position; ``None`` where the files do not say."""
        return self._names[0]

    @cached_property
    def roles(self) -> list[str]:
        """Role of each tensor, by position: ``param``, ``exp_avg`` …"""
        return self._names[1]

    # ---- tensors -------------------------------------------------------------------------------------------------

    @cached_property
    def views(self) -> Mapping[str, LazyTensor]:
        """Tensors that show bytes which listed tensors hold (q of a fused qkv, a whole stack of layers), by key.

        ``ckpt[key]`` and ``ckpt.param`` find them too; they are not listed, counted or scanned.
        """
        narrow = self.catalog.views
        return LazyMap({}, "view") if narrow is None else Checkpoint(self._place, narrow, self._pool, {}, parent=self)

    def __getitem__(self, key: str) -> LazyTensor:
        position = self.catalog.index.get(key)
        if position is None and key in self.views:
            return self.views[key]
        if position is None:
            raise TensorNotFoundError(no_such(key, self.catalog.keys))
        return self._tensor(position)

    def __iter__(self) -> Iterator[str]:
        return iter(self.catalog.keys)

    def __len__(self) -> int:
        return len(self.catalog)

    def __contains__(self, key: object) -> bool:
        return key in self.catalog.index or key in self.views

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping; what is not there is not searched for names like it."""
        return self[key] if key in self else default  # noqa: SIM401

    def _ipython_key_completions_(self) -> list[str]:
        return [*self.catalog.keys, *self.views]

    def param(self, fqn: str, role: str = "param") -> LazyTensor:
        """The tensor of a parameter by meaning: ``ckpt.param("layers.0.wq.weight", role="exp_avg")``.

        Raises:
            TensorNotFoundError: none, or several that cannot be told apart.
        """
        found = self._by_meaning.get((fqn, role), [])
        if len(found) == 1:
            return self._tensor(found[0])
        if found:
            keys = [self.catalog.keys[position] for position in found[:4]]
            raise TensorNotFoundError(f"parameter {fqn!r} has {len(found)} tensors of role {role!r}: {keys}; use a key")
        if isinstance(self.views, Checkpoint) and (fqn, role) in self.views._by_meaning:
            return self.views.param(fqn, role)
        roles = sorted({r for f, r in self._by_meaning if f == fqn})
        if roles:
            stored = f"stored are {', '.join(roles)}{did_you_mean(role, roles)}"
            raise TensorNotFoundError(f"parameter {fqn!r} has no tensor of role {role!r}; {stored}")
        known = [f for f in dict.fromkeys(self.fqns) if f is not None]
        raise TensorNotFoundError(no_such(fqn, known, "parameter"))

    def select(self, pattern: str | None = None, role: str | None = None) -> Checkpoint:
        """A narrower view: tensors whose key matches a regular expression somewhere, and whose role is ``role``.

        Raises:
            UsageError: no valid regular expression, or no tensor of the checkpoint has that role.
        """
        keep = np.ones(len(self), bool)
        if pattern is not None:
            try:
                hits = self.catalog.match(pattern)
            except re.error as error:
                raise UsageError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
            keep &= np.isin(np.arange(len(self)), hits)
        if role is not None:
            there = sorted(set(self.roles))
            if role not in there:
                stored = ", ".join(there) or "none"
                raise UsageError(f"no tensor of role {role!r}; stored are {stored}{did_you_mean(role, there)}")
            keep &= np.array([r == role for r in self.roles], bool)
        return self.take(np.flatnonzero(keep))

    def take(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> Checkpoint:
        """A view of the tensors at these positions of the catalog, in the order given."""
        names = ([self.fqns[p] for p in positions.tolist()], [self.roles[p] for p in positions.tolist()])
        narrow = self.catalog.take(positions)
        return Checkpoint(self._place, narrow, self._pool, self.objects, self.notes, names=names, parent=self)

    def derive(self, catalog: Catalog) -> Checkpoint:
        """A checkpoint of other tensors in the same files (a name map's result, say); objects stay."""
        return Checkpoint(self._place, catalog, self._pool, self.objects, self.notes, parent=self)

    def state_dict(
        self, *, threads: int | None = None, tick: Callable[[float], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """Every tensor, read into memory of its own: key → ``torch.Tensor``.

        Args:
            threads: how many tensors are read side by side; by default as many as there are cores, at most 8.
            tick: told the share of bytes that is done; raising there ends it.
        """
        whole = _followed(read_whole, "state_dict")(self._payloads, threads=threads or cores(), tick=tick)
        return dict(zip(self.catalog.keys, whole, strict=True))

    def to_device(
        self,
        device: str | torch.device,
        *,
        select: str | Sequence[str] | None = None,
        role: str | None = "model",
        mesh: Mesh | Mapping[str, int] | str | None = None,
        mesh_coord: Mapping[str, int] | None = None,
        rank: int | None = None,
        rules: Rules | None = None,
        device_mesh: DeviceMesh | None = None,
        dtype: object | None = None,
        threads: int | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Tensors on a device, whole or as a rank of a mesh holds them: :func:`workbench.reshard.device.to_device`."""
        from workbench.reshard.device import to_device

        return _followed(to_device, "to_device")(
            self, device, select=select, role=role, mesh=mesh, mesh_coord=mesh_coord, rank=rank, rules=rules,
            device_mesh=device_mesh, dtype=dtype, threads=threads, tick=tick,
        )  # fmt: skip

    # ---- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the files back; reading again opens them anew.

        Tensors already read stay valid, whatever becomes of the files. Only views asked for with ``copy=False`` show
        the file itself (:meth:`LazyTensor.torch`).
        """
        self._pool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from workbench.views.text import checkpoint_text

        return checkpoint_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.html import checkpoint_html

        return checkpoint_html(self)

    def view(self, tab: str = "overview") -> Cell:
        """The dashboard's tabs for this checkpoint in a notebook's cell; nothing is read before it is looked at.

        Args:
            tab: the one that is shown first: ``overview``, ``tensors`` …

        Raises:
            UsageError: no such tab.
        """
        from workbench.app.cell import view

        return view(self, tab)

    # ---- inside --------------------------------------------------------------------------------------------------

    @cached_property
    def _names(self) -> tuple[list[str | None], list[str]]:
        if self.catalog.fqns is not None and self.catalog.roles is not None:
            return self.catalog.fqns, self.catalog.roles
        return naming.resolve(self.catalog.keys)

    @cached_property
    def _by_meaning(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for position, (fqn, role) in enumerate(zip(*self._names, strict=True)):
            if fqn is not None:
                found.setdefault((fqn, role), []).append(position)
        return found

    def _tensor(self, position: int) -> LazyTensor:
        return LazyTensor(self._payloads, position, self._names[0][position], self._names[1][position])
