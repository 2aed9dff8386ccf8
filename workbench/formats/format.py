"""The record that describes a format. Its reader module exports it as ``FORMAT``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from workbench.core.catalog import Catalog
from workbench.core.decoding.values import Recipe
from workbench.core.place import Place
from workbench.errors import NotACheckpointError


def _no_catalog(place: Place) -> Catalog:
    raise NotACheckpointError(f"{place.path!r} has a format without a reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Everything that the rest of the package asks about a format.

    Attributes:
        name: the name that users type, such as ``dcp``.
        title, marks, read_from: text for users: what it is, the files it is recognized by, the versions it was read
            from.

        detect: whether a place looks like this format, from names and a few bytes; must not raise for other formats.
        read_catalog: reads the catalog from metadata only, never a tensor byte.
        read_objects: returns the non-tensor state by name, decoded on access without executing anything.
        missing: describes what a finished save has and this place lacks, from names, sizes and a few bytes, or empty.
        stored_step: the training step as stored in a file next to the tensors.
        is_collection: whether a folder's files are separate checkpoints that do not form one together.

        recipes: how tensors that are quantised over several stored ones are decoded; ggml's block types need none.

        before: in records of other packages, built-in formats that also recognize its places; this one comes first.
        single_file: whether one file can be a checkpoint.
        suffixes: suffixes of its data files; empty if they are those of the formats that it contains.
        names: a regular expression that the names of single files without a suffix match.
        beside: those suffixes that mark a separate checkpoint even in a folder of another format.
        loose: whether a tracker file next to its files makes the folder a run, not a checkpoint.
        subfolders: patterns of the subfolders that belong to a checkpoint (``*``: all of them do).
        saved_together: a file, another that is never saved without it, and prefixes of names that replace it.
        own_bytes: whether the metadata gives every tensor its own bytes; elsewhere, tensors often share a storage.

        framework: the framework whose terms the doctor uses in its advice; by default, the format's name.
        numbered_saves: whether folder names count saves instead of steps.
        never_cuts: mesh axes that never divide a tensor's axes; their ranks store copies or ranges of flat buffers.
        flat_roles: roles whose tensors are parts of flat buffers by definition.
        stores_parts: whether the parts of one local tensor (gate and up) are separate items.
        experts_apart: whether experts have their own mesh (etp, ep, edp).
    """

    name: str
    title: str = ""
    marks: str = ""
    read_from: str = ""
    detect: Callable[[Place], bool] = lambda place: False
    read_catalog: Callable[[Place], Catalog] = _no_catalog
    read_objects: Callable[[Place, Catalog], Mapping[str, Any]] = lambda place, catalog: {}
    missing: Callable[[Place], str] = lambda place: ""
    stored_step: Callable[[Place], Any] = lambda place: None
    is_collection: Callable[[Place], bool] = lambda place: False
    recipes: Callable[[Place, Catalog], Sequence[Recipe]] = lambda place, catalog: ()
    before: tuple[str, ...] = ()
    single_file: bool = False
    suffixes: tuple[str, ...] = ()
    names: str = ""
    beside: tuple[str, ...] = ()
    loose: bool = False
    subfolders: tuple[str, ...] = ()
    saved_together: tuple[str, str, tuple[str, ...]] | None = None
    own_bytes: bool = False
    framework: str = ""
    numbered_saves: bool = False
    never_cuts: tuple[str, ...] = ()
    flat_roles: tuple[str, ...] = ()
    stores_parts: bool = False
    experts_apart: bool = False

    @property
    def closed(self) -> bool:
        """Whether every subfolder belongs to a checkpoint."""
        return "*" in self.subfolders

    def owns(self, folder: str) -> bool:
        """Return whether a subfolder of this name belongs to a checkpoint."""
        return any(fnmatchcase(folder, pattern) for pattern in self.subfolders)
