"""The files that belong to a checkpoint: those in its catalog, and those next to them.

::

    step-4000/  .metadata  __0_0.distcp      the catalog's
                train.log                     next to them: another file
                eval/results.json             in a subfolder: only if the format owns its subfolders
"""

from __future__ import annotations

import os
import stat as stat_module

from workbench import formats
from workbench.checkpoint import Checkpoint
from workbench.core.place import Place
from workbench.core.source import cannot_open
from workbench.errors import WorkbenchError

MAX_DEPTH = 16  #: nested folders; layouts use three


def files_of(ckpt: Checkpoint) -> tuple[list[str], dict[str, str]]:
    """Return the sorted names of a checkpoint's files, relative to its folder, and omitted entries with reasons.

    Subfolders are followed if they hold files of the catalog or the format owns its subfolders; others may be separate
    checkpoints and are left out. Links to folders are not followed.
    """
    place = ckpt.place.again()
    known = {*ckpt.catalog.files, *ckpt.catalog.metadata_files}
    if place.file is not None:
        return sorted(known | {place.file}), {}
    folders = {name.split("/", 1)[0] for name in known if "/" in name}
    owned = formats.record(ckpt.format).closed
    found: set[str] = set()
    skipped: dict[str, str] = {}
    for name in place.files:
        _take(place, name, found, skipped)
    for folder in place.folders:
        if owned or folder in folders or place.is_link(folder):
            names, left = walk(place, folder)
            found |= names
            skipped |= left
        else:
            skipped[folder] = f"a folder that is not part of a {ckpt.format} checkpoint"
    present = {name for name in known if place.exists(name)}
    return sorted(found | present), skipped


def walk(place: Place, folder: str, depth: int = MAX_DEPTH) -> tuple[set[str], dict[str, str]]:
    """Return the files in a folder of a place and its subfolders, and omitted entries with reasons."""
    found: set[str] = set()
    skipped: dict[str, str] = {}
    if place.is_link(folder):
        return found, {folder: "a link to a folder is not followed"}
    try:
        names = _names(place, folder)
    except OSError as error:
        return found, {folder: str(cannot_open("the folder", error, "listed"))}
    for name, is_folder in names:
        inner = f"{folder}/{name}"
        if not is_folder:
            _take(place, inner, found, skipped)
        elif depth <= 1:
            skipped[inner] = "folders are nested too deeply"
        else:
            more, left = walk(place, inner, depth - 1)
            found |= more
            skipped |= left
    return found, skipped


def _names(place: Place, folder: str) -> list[tuple[str, bool]]:
    """Return the names in a folder, each with whether it is a folder."""
    if not place.local:
        inside = place.sub(folder)
        return sorted([*((name, False) for name in inside.files), *((name, True) for name in inside.folders)])
    with os.scandir(os.path.join(place.root, folder)) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)


def _take(place: Place, name: str, found: set[str], skipped: dict[str, str]) -> None:
    try:
        if place.local and stat_module.S_ISDIR(os.stat(os.path.join(place.root, name)).st_mode):
            skipped[name] = "a link to a folder is not followed"
            return
        place.stat(name)
        found.add(name)
    except OSError as error:
        skipped[name] = f"it cannot be accessed: {error.strerror}"
    except WorkbenchError as error:
        skipped[name] = str(error)
