"""The main entry point: a checkpoint as a read-only mapping from stored names to lazy tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench import formats, runs
from workbench.core import cache as catalog_cache
from workbench.core.archives import fetch_headers
from workbench.core.catalog import Catalog
from workbench.core.decoding.values import Decoding, Recipe
from workbench.core.lazymap import LazyMap
from workbench.core.near import did_you_mean, no_such
from workbench.core.payload import Payloads
from workbench.core.place import Place, stat_or_absent
from workbench.core.scan import workers
from workbench.core.shown import Shown, above
from workbench.core.source import needs_descriptors
from workbench.core.storage import SourcePool
from workbench.core.words import plural
from workbench.errors import ChangedError, IncompleteError, TensorNotFoundError, UsageError, bounded
from workbench.names.roles import has_role, resolve
from workbench.names.steps import find_step, find_world_size, is_step
from workbench.tensor import LazyTensor, read_whole

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from panel.viewable import Viewer
    from torch.distributed.device_mesh import DeviceMesh

    from workbench.core.mesh.mesh import Mesh

__all__ = ["Checkpoint", "as_checkpoint", "discover", "open", "open_place"]

PINNED = 2048  #: files up to which the identity of each is sent to workers; the digest of the catalog covers all


@needs_descriptors()
def open(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    cache: bool = True,
    io: str = "mmap",
    partial: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint; only metadata is read.

    If the folder holds several steps of a run, the step named by its tracker file is opened, or else the newest
    complete one; the checkpoint's ``notes`` say which and why.

    Args:
        path: a checkpoint's folder or file, or a run's folder; a path, or a URL (``s3://``, ``gs://``, ``az://``,
            ``https://``, ``hf://``, or any scheme that fsspec knows).
        format: name of the reader to use instead of detecting the format (see ``workbench formats``).
        cache: keep the catalog of large checkpoints in the user's cache folder, keyed by the metadata files' stat.
        io: with ``mmap``, views of the files are available on request (``t.torch(copy=False)``); with ``pread``, files
            are never mapped. In both modes all other reads are copies made with ``pread``.
        partial: open the checkpoint even if files are absent or truncated; reading missing data still raises.
        storage_options: passed to the library that reads the URL: credentials, endpoint, region …

    Raises:
        OpenError: the checkpoint cannot be opened. The message is one line: what is wrong, in which file, at which
            byte, and what to do.
    """
    return open_place(Place(path, storage_options), format=format, cache=cache, io=io, partial=partial)


def as_checkpoint(given: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint as it is, or open the one at a path or URL."""
    return given if isinstance(given, Checkpoint) else open(given)


def open_place(
    given: Place, *, format: str | None = None, cache: bool = True, io: str = "mmap", partial: bool = False
) -> Checkpoint:
    """Open the checkpoint of a place, as :func:`open` does."""
    given.ahead()
    place, name, note = runs.locate(given, format)
    if name is None:
        raise formats.not_recognised(place)
    if not partial and (why := formats.unfinished(place)):
        raise IncompleteError(why)
    place.ahead()
    fetch_headers(place)
    reader = formats.reader(name)
    catalog = catalog_cache.load(place, name) if cache else None
    if catalog is None:
        catalog = reader.read_catalog(place) if format is None else formats.read_forced(place, name)
        catalog.check()
        if cache and catalog.chunks >= catalog_cache.MIN_CHUNKS:
            catalog_cache.save(place, catalog)
    if not partial:
        catalog.check_files()
    notes = [one for one in (note, catalog.lost() if partial else "") if one]
    pool = SourcePool(place, catalog.files, catalog.file_stats, io)
    ckpt = Checkpoint(place, catalog, pool, _Objects(place, catalog, name).by_name(), notes)
    ckpt.payloads.decoding = Decoding(ckpt.payloads, _Recipes(place, catalog, name))
    return ckpt._referred(_Reference(place, catalog, format, io, partial))


class _Reference:
    """A checkpoint as sent to workers (:mod:`workbench.core.executors`): its place, and its identity when opened."""

    def __init__(
        self,
        place: Place,
        catalog: Catalog,
        format: str | None,
        io: str,
        partial: bool,
        takes: tuple[np.ndarray[Any, Any], ...] = (),
    ) -> None:
        self._place, self._catalog, self._how, self._takes = place, catalog, (format, io, partial), takes

    def taken(self, catalog: Catalog, positions: np.ndarray[Any, Any]) -> _Reference:
        """Return the reference of some tensors of this checkpoint."""
        return _Reference(self._place, catalog, *self._how, takes=(*self._takes, positions))

    @cached_property
    def key(self) -> str:
        return f"{self._place.root} {self._place.file} {self._how} {self._catalog.digest()}"

    @cached_property
    def _pinned(self) -> Place:
        """The place with the identities of its files; of very many files, only of those that opening reads."""
        catalog = self._catalog
        known = {name: stat for name, stat in zip(catalog.files, catalog.file_stats, strict=True) if stat.size >= 0}
        if len(known) > PINNED:
            known = {name: stat for name, stat in known.items() if name in catalog.metadata_files}
        known |= {name: stat_or_absent(self._place, name) for name in catalog.metadata_files}
        return self._place.pinned(known)

    def __getstate__(self) -> dict[str, Any]:
        return {"_pinned": self._pinned, "_how": self._how, "_takes": self._takes, "key": self.key}

    def opened(self) -> Checkpoint:
        format, io, partial = self._how
        ckpt = open_place(self._pinned, format=format, io=io, partial=partial)
        for positions in self._takes:
            ckpt = ckpt.take(positions)
        assert ckpt._reference is not None
        if ckpt._reference[0].key != self.key:
            raise ChangedError(
                f"{self._pinned.path!r} was replaced after it was opened, or a worker sees another checkpoint "
                "at this path"
            )
        return ckpt


class _Recipes:
    """The recipes of a checkpoint's format. Pickling stores only where they are found."""

    def __init__(self, place: Place, catalog: Catalog, format: str) -> None:
        self._place, self._catalog, self._format = place, catalog, format

    def __call__(self) -> Sequence[Recipe]:
        return formats.record(self._format).recipes(self._place, self._catalog)


class _Objects:
    """A checkpoint's objects. Pickling stores only their location; they are read again on access."""

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
def discover(
    root: str | os.PathLike[str], *, depth: int = runs.DEPTH, storage_options: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """List the checkpoints under a folder or URL, one row each: path format step nbytes mtime complete why.

    Only file names and commit markers are inspected; symlinks that leave ``root`` are not followed. ``why`` says what
    an incomplete checkpoint lacks; ``mtime`` is that of its newest file.
    """
    import pandas as pd

    found = [asdict(one) for one in runs.discover(root, depth=depth, storage_options=storage_options)]
    frame = pd.DataFrame(found, columns=["path", "format", "step", "nbytes", "mtime", "complete", "why"])
    frame["step"] = frame["step"].astype("Int64")
    frame["mtime"] = pd.to_datetime(frame["mtime"], unit="s")
    return frame


class Checkpoint(Shown, Mapping[str, LazyTensor]):
    """A checkpoint: a mapping from stored name to :class:`LazyTensor`, with tables of tensors and chunks.

    Two checkpoints are equal if they are the same object: ``==`` reads nothing; :func:`workbench.diff` compares values.

    Attributes:
        place: its folder or file, on disk or in a store.
        notes: sentences about anything unusual, or about choices made on opening; usually empty. Those about a
            normal choice are :class:`~workbench.core.words.Ordinary`.
        objects: non-tensor state by stored name, decoded on access without executing anything.
    """

    _by_reference = True  #: to workers
    __eq__ = object.__eq__  # Mapping would compare the items, and each access makes new ones
    __hash__ = object.__hash__

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
        payloads: Payloads | None = None,
    ) -> None:
        self.place, self.catalog, self._pool = place, catalog, pool
        # An attribute, not a property: IPython does not evaluate properties, so it could not complete `ckpt.objects["`.
        self.objects: Mapping[str, Any] = LazyMap.of(objects)
        self._payloads = payloads or Payloads(catalog, pool)
        if parent is not None and self._payloads.decoding is None:
            self._payloads.decoding = parent._payloads.decoding
        self._parent = parent
        found = [*(notes or []), *([] if parent else catalog.meta.get("notes", []))]
        self.notes: list[str] = [type(note)(bounded(note)) for note in found]
        if names is not None:
            self._names = names
        self._reference: tuple[_Reference, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": None}

    def _referred(self, reference: _Reference) -> Checkpoint:
        self._reference, self._payloads._reference = (reference, ""), (reference, "payloads")
        return self

    # ---- what it is ----------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """Name of the reader: ``dcp``, ``safetensors`` …"""
        return self.catalog.format

    @property
    def io(self) -> dict[str, int] | None:
        """Requests to the store since the checkpoint was opened, and the bytes received, needed and cached.

        ``None`` for a checkpoint on disk.
        """
        return self.place.traffic

    @property
    def path(self) -> str:
        """Path of the checkpoint (of the opened step, if a run's folder was given)."""
        return self.place.path

    @cached_property
    def step(self) -> int | None:
        """Training step, as stored in the state or else in the trainer's folder name.

        ``None`` if neither states it, or if the state that should state it cannot be read.
        """
        if self._parent is not None:
            return self._parent.step
        stored = self.catalog.meta.get("step")
        return stored if is_step(stored) else find_step(self.objects, self.place.name)

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks of the job, if a file states it; the ranks that wrote files do not prove it."""
        stored = self.catalog.meta.get("world_size")
        return stored if isinstance(stored, int) else find_world_size(self.objects)

    @property
    def mesh(self) -> Mapping[str, Any]:
        """The facts that the files state or prove about the device mesh; empty if nothing is known.

        Keys: ``axes`` (name → size), ``ranks`` (file or rank → coordinates), ``unknown`` (axes of unknown size),
        ``source``.
        """
        found = self.catalog.meta.get("mesh")
        return found if isinstance(found, Mapping) else {}

    @property
    def payloads(self) -> Payloads:
        """Access to the bytes of the catalog's chunks, for analyses that scan them."""
        return self._payloads

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """One row per tensor: key fqn role dtype shape numel nbytes chunks files replicas."""
        from workbench.core.frames import tensor_frame

        return tensor_frame(self.catalog, *self._names)

    @cached_property
    def chunks(self) -> pd.DataFrame:
        """One row per chunk: key offsets sizes dtype file start stop rank replica codec."""
        from workbench.core.frames import chunk_frame

        return chunk_frame(self.catalog)

    @cached_property
    def fqns(self) -> list[str | None]:
        """Parameter that each tensor belongs to, by position; ``None`` if the files do not say."""
        return self._names[0]

    @cached_property
    def roles(self) -> list[str]:
        """Role of each tensor, by position: ``param``, ``exp_avg`` …"""
        return self._names[1]

    # ---- tensors -------------------------------------------------------------------------------------------------

    @cached_property
    def views(self) -> Mapping[str, LazyTensor]:
        """Additional views of the listed tensors' bytes, by key: q of a fused qkv, a whole stack of layers.

        ``ckpt[key]`` and ``ckpt.param`` find them as well, but they are not listed, counted or scanned.
        """
        narrow = self.catalog.views
        return LazyMap({}, "view") if narrow is None else Checkpoint(self.place, narrow, self._pool, {}, parent=self)

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
        """Return ``self[key]``, or ``default`` if there is no such key; similar names are not searched."""
        return self[key] if key in self else default  # noqa: SIM401

    def _ipython_key_completions_(self) -> list[str]:
        return [*self.catalog.keys, *self.views]

    def param(self, fqn: str, role: str = "param") -> LazyTensor:
        """Return a parameter's tensor by its fqn and role: ``ckpt.param("layers.0.wq.weight", role="exp_avg")``.

        Raises:
            TensorNotFoundError: no tensor matches, or several do and cannot be distinguished.
        """
        found = self._by_meaning.get((fqn, role), [])
        if len(found) == 1:
            return self._tensor(found[0])
        if found:
            keys = [self.catalog.keys[position] for position in found[:4]]
            raise TensorNotFoundError(
                f"parameter {fqn!r} has {plural(len(found), 'tensor')} of role {role!r}: {keys}; use a key"
            )
        if isinstance(self.views, Checkpoint) and (fqn, role) in self.views._by_meaning:
            return self.views.param(fqn, role)
        roles = sorted({r for f, r in self._by_meaning if f == fqn})
        if roles:
            stored = f"its stored roles are {', '.join(roles)}{did_you_mean(role, roles)}"
            raise TensorNotFoundError(f"parameter {fqn!r} has no tensor of role {role!r}; {stored}")
        known = [f for f in dict.fromkeys(self.fqns) if f is not None]
        raise TensorNotFoundError(no_such(fqn, known, "parameter"))

    def select(self, pattern: str | None = None, role: str | None = None) -> Checkpoint:
        """Return the checkpoint narrowed to some of its tensors; nothing is read.

        Args:
            pattern: regular expression, searched for anywhere in the key.
            role: a role (``param``, ``exp_avg`` …) or a group: ``model`` (what a model loads), ``optimizer``, ``all``.

        Raises:
            UsageError: the expression is not valid, or no tensor has that role; the message lists the roles present.
        """
        keep = np.ones(len(self), bool)
        if pattern is not None:
            try:
                hits = self.catalog.match(pattern)
            except re.error as error:
                raise UsageError(f"pattern {pattern!r} is not a valid regular expression: {error}") from None
            keep &= np.isin(np.arange(len(self)), hits)
        keep &= has_role(self.catalog.keys, self.fqns, self.roles, role)
        return self.take(np.flatnonzero(keep))

    @property
    def model(self) -> Checkpoint:
        """The tensors that a model loads: parameters, buffers, scales, adapters. Same as ``select(role="model")``."""
        return self.select(role="model")

    @property
    def optimizer(self) -> Checkpoint:
        """The optimizer's tensors: moments, steps, master weights. Same as ``select(role="optimizer")``."""
        return self.select(role="optimizer")

    def take(self, positions: np.ndarray[Any, np.dtype[np.int64]]) -> Checkpoint:
        """Return a checkpoint with only the tensors at these catalog positions, in the given order."""
        names = ([self.fqns[p] for p in positions.tolist()], [self.roles[p] for p in positions.tolist()])
        narrow = self.catalog.take(positions)
        payloads = self._payloads.over(narrow)
        made = Checkpoint(
            self.place, narrow, self._pool, self.objects, self.notes, names=names, parent=self, payloads=payloads
        )
        return made if self._reference is None else made._referred(self._reference[0].taken(narrow, positions))

    def derive(self, catalog: Catalog) -> Checkpoint:
        """Return a checkpoint of other tensors in the same files (such as a renaming), with the same objects."""
        payloads = self._payloads.over(catalog)
        return Checkpoint(self.place, catalog, self._pool, self.objects, self.notes, parent=self, payloads=payloads)

    def decoded(self, name: str) -> LazyTensor:
        """Return a quantised tensor as the numbers that it represents: ``ckpt.decoded("layers.0.wq.weight")[2:9]``.

        Args:
            name: a key of the decoded checkpoint (:meth:`decode`), the key of a stored part, or an fqn. A tensor that
                is not quantised is returned as it is stored.

        Raises:
            TensorNotFoundError: no tensor or parameter has this name.
            CorruptError: the tensors that belong together contradict each other.
        """
        values = self.decode()
        found = self._decoding.names.get(name, name)
        return values[found] if found in values else values.param(name)

    def decode(self) -> Checkpoint:
        """Return the checkpoint with its quantised tensors as numbers; ``stats``, ``diff`` and ``export`` take it.

        Each has the name of its parameter; scales, zero points and the like are not listed. Values are
        decoded when they are read, nothing is kept. See :meth:`LazyTensor.decoded`.

        Raises:
            CorruptError: the tensors that belong together contradict each other.
        """
        return self._decoded

    @cached_property
    def _decoding(self) -> Decoding:
        return self._payloads.decoding or Decoding(self._payloads)

    @cached_property
    def _decoded(self) -> Checkpoint:
        decoding = self._decoding
        if not decoding.recipes:
            return self
        found, catalog = decoding.payloads, decoding.payloads.catalog
        here = set(self.catalog.keys)
        keep = [t for t, key in enumerate(catalog.keys) if not here.isdisjoint(decoding.parts.get(key, (key,)))]
        if len(keep) < len(catalog):
            catalog = catalog.take(np.array(keep, np.int64))
            found = found.over(catalog)
        return Checkpoint(self.place, catalog, self._pool, self.objects, self.notes, parent=self, payloads=found)

    def state_dict(
        self, *, threads: int | None = None, progress: Callable[[float], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """Read every tensor into newly allocated memory: key → ``torch.Tensor``.

        Args:
            threads: number of tensors read in parallel; by default the number of cores, up to 8.
            progress: called with the fraction of bytes done; raise an exception to cancel.
        """
        read = above(self, "followed")(read_whole, "state_dict")
        whole = read(self._payloads, threads=workers(self._pool, threads), progress=progress)
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
        rules: object | None = None,
        device_mesh: DeviceMesh | None = None,
        dtype: object | None = None,
        threads: int | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read tensors onto a device: either whole, or the shards that one rank of a mesh holds.

        Arguments and errors are those of :func:`workbench.load.device.to_device`.
        """
        read = above(self, "followed")(above(self, "to_device"), "to_device")
        loaded: dict[str, torch.Tensor] = read(
            self,
            device,
            select=select,
            role=role,
            mesh=mesh,
            mesh_coord=mesh_coord,
            rank=rank,
            rules=rules,
            device_mesh=device_mesh,
            dtype=dtype,
            threads=threads,
            progress=progress,
        )
        return loaded

    # ---- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files; reading again reopens them.

        Tensors already read stay valid even if the files change. Only views requested with ``copy=False`` refer to the
        file itself (:meth:`LazyTensor.torch`).
        """
        self._pool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def view(self, tab: str = "overview") -> Viewer:
        """Show the dashboard's tabs for this checkpoint in a notebook cell; a tab reads data only when it is opened.

        Args:
            tab: the tab shown first: ``overview``, ``tensors`` …

        Raises:
            UsageError: there is no such tab.
        """
        return cast("Viewer", above(self, "view")(self, tab))

    # ---- inside --------------------------------------------------------------------------------------------------

    @cached_property
    def _names(self) -> tuple[list[str | None], list[str]]:
        if self.catalog.fqns is not None and self.catalog.roles is not None:
            return self.catalog.fqns, self.catalog.roles
        return resolve(self.catalog.keys)

    @cached_property
    def _by_meaning(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for position, (fqn, role) in enumerate(zip(*self._names, strict=True)):
            if fqn is not None:
                found.setdefault((fqn, role), []).append(position)
        return found

    def _tensor(self, position: int) -> LazyTensor:
        return LazyTensor(self._payloads, position, self._names[0][position], self._names[1][position])
