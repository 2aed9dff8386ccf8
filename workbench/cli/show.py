"""``workbench show`` and ``workbench objects``, and ``KEY[SLICE]``, which is parsed but never evaluated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from workbench.analysis.summary import profile
from workbench.checkpoint import Checkpoint
from workbench.cli.common import open_as, paint, print_json, say
from workbench.core.jsonable import jsonable
from workbench.core.near import did_you_mean
from workbench.core.slices import Part, parse_slice
from workbench.core.words import plural
from workbench.errors import ObjectNotFoundError, UsageError, WorkbenchError
from workbench.tensor import LazyTensor
from workbench.views import units
from workbench.views.names import safe, shorten
from workbench.views.rows import chunk_rows
from workbench.views.text import BINS, anomalies, distribution, tensor_heading
from workbench.views.values import json_values, values_text

QUICK = 1 << 26  #: most elements that statistics read without --exact (about half a second)
CHUNKS = 20  #: most chunks printed
LINES = 2000  #: most lines printed of an object


def show(options: argparse.Namespace) -> None:
    """Print one tensor, or a slice of it."""
    ckpt = open_as(options, options.path)
    tensor, key = locate(ckpt, options.key)
    part = tensor if key is None else tensor.lazy[key]
    if options.json:
        print_json(_show_json(part, options))
        return
    found = profile(part, BINS, limit=None if options.exact else QUICK)
    words = [paint(word, "bad") for word in anomalies(found.summary)]
    say(" ".join([tensor_heading(part), distribution(found), *words]))
    every = chunk_rows(part._payloads.catalog, part._tensor)
    rows = [row for row in every if _meets(row, part)]
    for row in rows[:CHUNKS]:
        say(f"  {_chunk_line(row)}")
    if len(rows) > CHUNKS:
        say(f"  … {plural(len(rows) - CHUNKS, 'more chunk')}")
    if len(rows) < len(every):
        say(f"  {plural(len(every) - len(rows), 'other chunk')} of the tensor")
    say(values_text(part))


def objects(options: argparse.Namespace) -> None:
    """Print the names of all objects with a preview of each; or one object, or all below one name, in full."""
    ckpt = open_as(options, options.path)
    wanted = _wanted(ckpt.objects, options.name)
    if options.json:
        print_json({"path": ckpt.path, "objects": {name: _decoded(ckpt, name, options) for name in wanted}})
        return
    for name in wanted:
        value = _decoded(ckpt, name, options)
        if options.name is None:
            preview = json.dumps(value, ensure_ascii=False)
            say(shorten(f"{safe(name)}: {safe(preview)}", 160))
            continue
        for count, line in enumerate(_lines(value, f"{safe(name)}: ", 0)):
            if count == LINES:
                say("… more; use --json to print everything")
                break
            say(line)


def locate(ckpt: Checkpoint, text: str) -> tuple[LazyTensor, tuple[Part, ...] | None]:
    """Return the tensor named by ``KEY[SLICE]``, and the slice.

    A key may itself contain brackets, so the whole text is tried as a key first. A key may also be given in its printed
    form, with control characters as visible escapes.

    Raises:
        TensorNotFoundError: there is no tensor with that name.
        UsageError: the part in brackets is not a valid slice.
    """
    exact = _key(ckpt, text)
    if exact is not None:
        return ckpt[exact], None
    if text.endswith("]"):
        for at in [at for at in range(len(text) - 1, -1, -1) if text[at] == "["]:
            exact = _key(ckpt, text[:at])
            if exact is not None:
                return ckpt[exact], parse_slice(text[at + 1 : -1])
    name, bracket, rest = text.partition("[")
    if bracket and _key(ckpt, name) is not None:
        raise UsageError(f"'[{rest}' is not a slice: brackets do not match; write it as in {name + '[2:9, 0]'!r}")
    return ckpt[name or text], None  # not found: the mapping's own error suggests names


def _key(ckpt: Checkpoint, text: str) -> str | None:
    if text in ckpt:
        return text
    if "\\" in text:
        matches = [key for key in ckpt if safe(key) == text]
        if len(matches) == 1:
            return matches[0]
    return None


def _show_json(part: LazyTensor, options: argparse.Namespace) -> dict[str, Any]:
    summary = profile(part, BINS, limit=None if options.exact else QUICK).summary
    small = part.numel() <= options.limit and summary.kind != "raw bytes"
    return {
        "key": part.key,
        "fqn": part.fqn,
        "role": part.role,
        "dtype": part.element.name,
        "shape": list(part.shape),
        "numel": part.numel(),
        "nbytes": part.nbytes,
        "stats": {name: _finite(value) for name, value in asdict(summary).items()},
        "chunks": chunk_rows(part._payloads.catalog, part._tensor),
        "values": json_values(part) if small else None,
    }


def _meets(row: Mapping[str, Any], part: LazyTensor) -> bool:
    """Return whether a chunk holds elements of the box of a slice."""
    low, sizes = part._selection.box()
    box = zip(row["offsets"], row["sizes"], low, sizes, strict=True)
    return all(first < start + size and start < first + count for first, count, start, size in box)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not abs(value) <= 1.8e308 else value


def _chunk_line(row: Mapping[str, Any]) -> str:
    rank = "" if row["rank"] is None else f"  rank {row['rank']}"
    copy = "" if not row["replica"] else f"  copy {row['replica']}"
    codec = "" if row["codec"] == "raw" else f"  {row['codec']}"
    where = f"{safe(row['file'])} bytes {row['start']:,}–{row['stop']:,}"
    return f"{units.shape(row['offsets'])} + {units.shape(row['sizes'])}  {where}{rank}{copy}{codec}"


def _wanted(objects: Mapping[str, Any], name: str | None) -> list[str]:
    if name is None:
        return list(objects)
    found = [key for key in objects if key == name or key.startswith(f"{name}.") or safe(key) == name]
    if not found:
        listed = f"no object {name!r} among {len(objects):,}; workbench objects PATH lists them"
        raise ObjectNotFoundError(f"{listed}{did_you_mean(name, objects)}")
    return found


def _decoded(ckpt: Checkpoint, name: str, options: argparse.Namespace) -> Any:
    """Return the object as plain JSON types; when all are listed, an unreadable one is replaced by its error."""
    try:
        return jsonable(ckpt.objects[name])
    except WorkbenchError as error:
        if options.name == name:
            raise
        return {"type": "unreadable", "why": str(error)}


def _long(values: list[Any]) -> bool:
    return sum(len(item) if isinstance(item, str) else 8 for item in values) > 100


def _lines(value: Any, label: str, depth: int) -> Iterator[str]:
    """Yield a JSON value as an indented tree."""
    space = "  " * depth
    if isinstance(value, dict) and value:
        yield f"{space}{label}".rstrip()
        for key, inner in value.items():
            yield from _lines(inner, f"{safe(key)}: ", depth + 1)
    elif isinstance(value, list) and (any(isinstance(item, (dict, list)) for item in value) or _long(value)):
        yield f"{space}{label}".rstrip()
        for item in value:
            yield from _lines(item, "- ", depth + 1)
    else:
        yield shorten(f"{space}{label}{safe(json.dumps(value, ensure_ascii=False))}", 400)
