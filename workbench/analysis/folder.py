"""Which files belong to a checkpoint: those its catalog reads, and those that lie beside them.

::

    step-4000/  .metadata  __0_0.distcp      the catalog's
                train.log                     beside them: another file
                eval/results.json             in a folder of its own: only where the layout owns its folders
"""

from __future__ import annotations

import os
import stat as stat_module

from workbench import runs
from workbench.checkpoint import Checkpoint
from workbench.core.place import Place
from workbench.core.source import cannot_open
from workbench.errors import WorkbenchError

__all__ = ["files_of", "walk"]

MAX_DEPTH = 16  #: folders in folders; layouts use three


def files_of(ckpt: Checkpoint) -> tuple[list[str], dict[str, str]]:
    """Names of all files of a checkpoint, relative to its folder and sorted, and what was left out, with the reason.

    Folders inside are followed where they hold files of the catalog or the format owns its subfolders; others may be
    checkpoints of their own and are left out. Links to folders are not followed.
    """
    place = Place(ckpt.path)
    known = {*ckpt.catalog.files, *ckpt.catalog.metadata_files}
    if place.file is not None:
        return sorted(known | {place.file}), {}
    folders = {name.split("/", 1)[0] for name in known if "/" in name}
    owned = ckpt.format in runs.CLOSED
    found: set[str] = set()
    skipped: dict[str, str] = {}
    for name in place.files:
        _take(place, name, found, skipped)
    for folder in place.folders:
        if owned or folder in folders or os.path.islink(os.path.join(place.root, folder)):
            names, left = walk(place, folder)
            found |= names
            skipped |= left
        else:
            skipped[folder] = f"a folder that is no part of a {ckpt.format} checkpoint"
    present = {name for name in known if place.exists(name)}
    return sorted(found | present), skipped


def walk(place: Place, folder: str, depth: int = MAX_DEPTH) -> tuple[set[str], dict[str, str]]:
    """Files in a folder of a place and in the folders below it, and what was left out."""
    found: set[str] = set()
    skipped: dict[str, str] = {}
    path = os.path.join(place.root, folder)
    if os.path.islink(path):
        return found, {folder: "a link to a folder is not followed"}
    try:
        with os.scandir(path) as entries:
            names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        return found, {folder: str(cannot_open("the folder", error, "listed"))}
    for name, is_folder in names:
        inner = f"{folder}/{name}"
        if not is_folder:
            _take(place, inner, found, skipped)
        elif depth <= 1:
            skipped[inner] = "folders nest too deeply"
        else:
            more, left = walk(place, inner, depth - 1)
            found |= more
            skipped |= left
    return found, skipped


def _take(place: Place, name: str, found: set[str], skipped: dict[str, str]) -> None:
    path = os.path.join(place.root, name)
    try:
        if stat_module.S_ISDIR(os.stat(path).st_mode):
            skipped[name] = "a link to a folder is not followed"
            return
        place.resolve(name)
        found.add(name)
    except OSError as error:
        skipped[name] = f"it cannot be looked at: {error.strerror}"
    except WorkbenchError as error:
        skipped[name] = str(error)
