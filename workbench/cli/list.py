"""``workbench formats`` and ``workbench ls``."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from workbench.checkpoint import Checkpoint
from workbench.cli.common import as_typed, narrow, note, open_as, paint, print_json, say
from workbench.core.place import Place
from workbench.core.remote.url import shown
from workbench.core.words import plural
from workbench.errors import OpenError, WorkbenchError
from workbench.formats import FORMATS, detect, not_recognised
from workbench.views import facts, units
from workbench.views.names import columns, pad, safe
from workbench.views.rows import tensor_rows
from workbench.views.text import tree_lines

if TYPE_CHECKING:
    from workbench.runs import Found


def formats(options: argparse.Namespace) -> None:
    """Print the table of formats."""
    rows = list(FORMATS.values())
    if options.json:
        print_json([{"name": r.name, "title": r.title, "marks": r.marks, "read_from": r.read_from} for r in rows])
        return
    _table(("name", "what", "recognised by", "read from"), [(r.name, r.title, r.marks, r.read_from) for r in rows])


def ls(options: argparse.Namespace) -> None:
    """Print a checkpoint's modules, or the checkpoints under a folder that is not a checkpoint itself."""
    plain = options.format is None and not (options.pattern or options.flat or options.role)
    place = Place(options.path)
    if plain and _listed(options, place):
        return
    try:
        ckpt = narrow(open_as(options, place), options)
    except OpenError as error:  # one planted or damaged file must not hide the checkpoints next to it
        if not plain or not _list_beside(options, place):
            raise
        note(str(error))
        return
    if options.json:
        head = {"path": ckpt.path, "format": ckpt.format, "step": ckpt.step, "world_size": ckpt.world_size}
        print_json(head | {"notes": ckpt.notes, "tensors": tensor_rows(ckpt)})
    elif options.flat:
        _flat(ckpt)
    else:
        _tree(ckpt, options.depth)


def _listed(options: argparse.Namespace, place: Place) -> bool:
    """Print the checkpoints under a folder; return false if the folder is a checkpoint itself."""
    from workbench.runs import discover

    try:
        if detect(place) is not None:
            return False
    except WorkbenchError:  # opening it reports the error
        return False
    found = discover(place)
    if not found:
        raise not_recognised(place)
    _print_found(options, found)
    return True


def _list_beside(options: argparse.Namespace, place: Place) -> bool:
    """Print the checkpoints under a folder that cannot be opened itself; return false if none is complete."""
    from workbench.runs import discover

    found = discover(place)
    if not any(item.complete and item.path != "." for item in found):
        return False
    _print_found(options, found)
    return True


def _print_found(options: argparse.Namespace, found: Sequence[Found]) -> None:
    if options.json:
        print_json({"root": shown(options.path), "checkpoints": [asdict(item) for item in found]})
        return
    now = time.time()
    _table(
        ("path", "format", "step", "size", "age", "complete"),
        [
            (
                safe(item.path),
                item.format,
                "–" if item.step is None else str(item.step),
                units.nbytes(item.nbytes),
                units.age(now - item.mtime) if item.mtime else "–",
                "yes" if item.complete else paint(f"no: {safe(as_typed(item.why))}", "bad"),
            )
            for item in found
        ],
    )


def _tree(ckpt: Checkpoint, depth: int | None) -> None:
    size = units.nbytes(int(ckpt.catalog.tensor_nbytes.sum()))
    step = "" if ckpt.step is None else f", step {ckpt.step:,}"
    head = f"{ckpt.format} {safe(ckpt.path)}{step}: {plural(len(ckpt), 'tensor')}, {size}"
    say(paint(head, "head"))
    for line in tree_lines(facts.nodes(ckpt.catalog), depth=depth):
        say(line)


def _flat(ckpt: Checkpoint) -> None:
    rows = tensor_rows(ckpt)
    width = min(max((columns(safe(row["key"])) for row in rows), default=0), 100)
    for row in rows:
        shape = f"{units.shape(row['shape'])} {units.dtype(row['dtype'])}"
        say(f"{pad(safe(row['key']), width)}  {row['role']:<10}  {units.nbytes(row['nbytes']):>10}  {shape}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max([columns(head), *(columns(row[at]) for row in rows)]) for at, head in enumerate(heads[:-1])]
    for row in ([paint(head, "head") for head in heads], *rows):
        cells = [
            pad(cell, width + len(cell) - len(_without_colour(cell))) for cell, width in zip(row, widths, strict=False)
        ]
        say("  ".join([*cells, row[-1]]))


def _without_colour(cell: str) -> str:
    return re.sub("\x1b\\[\\d+m", "", cell)
