"""Whether what a stored item says of itself agrees with what the metadata says of it.

::

    .metadata                      w: bf16 (4, 8) at (4, 0) ─► __1_0.distcp bytes 512 : 2,048
    the item there (~1 KB read)    torch.save archive: bf16 (4, 8), stride (8, 1), 64 bytes at 128   ✓

    model.safetensors.index.json   w ─► model-00002-of-00004.safetensors, total_size 510,976
    the files' headers             w, and a tensor that the index does not list                      ✗

An element type or a shape that differs means that the files are of two saves, or that files of two ranks were
swapped: a loader that checks neither reads one tensor's bytes as another's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from workbench.analysis.verify.log import Subject, names, plural
from workbench.core import catalog as cat
from workbench.core.pickles.standins import Opaque, StorageRef
from workbench.core.scan import Tick, cores
from workbench.core.ziparchive import single_tensor
from workbench.errors import UnsupportedFormatError, WorkbenchError
from workbench.formats import safetensors_header
from workbench.formats.weight_index import read_index

__all__ = ["check_headers", "check_index", "check_objects", "headers_nbytes"]

Array = np.ndarray[Any, Any]
BATCH = 512  #: items a thread takes at a time
MAX_OBJECTS = 20_000  #: objects decoded
_ZIPS = (cat.TORCH_ZIP, cat.TORCH_PART)
HEADER = 1 << 10  #: bytes that are read of an item, about
_PACKED = (cat.ZSTD_TORCH_ZIP, cat.ZSTD_TORCH_PART)
_UNREAD: tuple[str, str, dict[str, Any]] = ("", "", {})  #: the verdict on an item of a kind that is not read
_HINT = "the file is from another save, or files of two ranks were swapped: restore it"


def check_headers(subject: Subject, tick: Tick | None = None) -> None:
    """The directory and pickle of each archived item against the catalog; ~1 KB of each is read."""
    catalog, log = subject.catalog, subject.log
    rows = _one_an_item(catalog, np.flatnonzero(np.isin(catalog.codec, _ZIPS) & ~subject.lost))
    batches = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    done, bad, unread = 0, list[int](), list[int]()
    with subject.payloads.pool.keeping(), ThreadPoolExecutor(subject.threads or cores()) as pool:
        for found in pool.map(lambda batch: [(row, _judge(subject, row)) for row in batch.tolist()], batches):
            for row, verdict in found:
                if verdict is _UNREAD:
                    unread.append(row)
                elif verdict is not None:
                    rule, message, evidence = verdict
                    log.add(
                        rule,
                        "error",
                        subject.key(row),
                        message,
                        _HINT,
                        file=subject.file(row),
                        start=int(catalog.start[row]),
                        **evidence,
                    )
                    bad.append(row)
            done += len(found)
            if tick is not None:
                tick(done / len(rows))
    for row in unread:
        subject.unread(row)
    for file in np.unique(catalog.file[bad]).tolist():  # every chunk of a damaged item; once a file, not once an item
        starts = catalog.start[bad][catalog.file[bad] == file]
        subject.lost |= (catalog.file == file) & np.isin(catalog.start, starts)
    if len(rows):
        count = len(rows) - len(unread)
        log.checked["headers"] = f"the archive headers of {plural(count, 'item')} agree with the metadata"
    packed = int(np.isin(catalog.codec, _PACKED).sum())
    if packed:
        log.not_checked["headers"] = (
            f"{plural(packed, 'item')} compressed with zstd: what they say of themselves is inside; verify with --deep"
        )


def headers_nbytes(subject: Subject) -> int:
    """Bytes that :func:`check_headers` reads, about."""
    return HEADER * int(np.isin(subject.catalog.codec, _ZIPS).sum())


def check_index(subject: Subject) -> None:
    """A safetensors index against the headers of the files that it names."""
    catalog, log = subject.catalog, subject.log
    index = catalog.meta.get("index")
    if catalog.format != "safetensors" or not isinstance(index, str):
        return
    try:
        told = read_index(subject.place, index)
        weights = told.weights
        headers = {
            file: safetensors_header.parse(subject.place, file, cut=True) for file in sorted({*weights.values()})
        }
    except WorkbenchError as error:
        log.add("index.unreadable", "error", index, str(error), "restore the index")
        return
    extra = [entry.name for file, header in headers.items() for entry in header.entries if entry.name not in weights]
    if extra:
        log.add(
            "index.unlisted",
            "warn",
            index,
            f"does not list {plural(len(extra), 'tensor')} that its files hold: {names(extra)}",
            "a loader that follows the index leaves them out",
            tensors=extra[:100],
        )
    again = sorted(
        {e.name for file, header in headers.items() for e in header.entries if weights.get(e.name) not in (None, file)}
    )
    if again:
        log.add(
            "index.duplicate",
            "warn",
            index,
            f"{plural(len(again), 'tensor')} in a second file too: {names(again)}",
            "which one a loader takes depends on the loader: delete the other",
            tensors=again[:100],
        )
    total = sum(e.stop - e.start for file, h in headers.items() for e in h.entries if weights.get(e.name) == file)
    facts = told.facts.get("metadata")
    claimed = facts.get("total_size") if isinstance(facts, dict) else None
    if isinstance(claimed, (int, float)) and int(claimed) != total:
        log.add(
            "index.total_size",
            "warn",
            index,
            f"claims {int(claimed):,} bytes of tensors, its files hold {total:,}",
            "the index is of another save, or was edited",
            claimed=int(claimed),
            stored=total,
        )
    log.checked["index"] = f"{index!r} against the headers of {plural(len(headers), 'file')}"


def check_objects(subject: Subject) -> None:
    """The non-tensor state can be decoded."""
    log, objects = subject.log, subject.ckpt.objects
    wanted = list(objects)[:MAX_OBJECTS]
    opaque: list[str] = []
    table = {key: row for row, key in enumerate(subject.catalog.objects.keys)}
    for name in wanted:
        try:
            if _holds_storage(objects[name]):
                opaque.append(name)
        except (WorkbenchError, RecursionError) as error:
            row = table.get(name)
            file = None if row is None else subject.catalog.files[subject.catalog.objects.file[row]]
            if row is not None and subject.gone(file or "", int(subject.catalog.objects.stop[row])):
                continue  # told as the loss of its file
            log.add("objects.unreadable", "error", name, str(error), "the item is damaged: restore its file", file=file)
    if wanted:
        log.checked["objects"] = f"{plural(len(wanted), 'object')} (arguments, schedulers, generators …) decoded"
    if opaque := [*opaque, *subject.catalog.meta.get("left_out", ())]:
        log.not_checked["undecoded objects"] = (
            f"{names(opaque)}: the values that {'it holds' if len(opaque) == 1 else 'they hold'} are not decoded"
        )
    if len(objects) > len(wanted):
        log.not_checked["objects"] = f"{len(objects) - len(wanted):,} of {len(objects):,} objects: too many to decode"


def _judge(subject: Subject, row: int) -> tuple[str, str, dict[str, Any]] | None:
    catalog = subject.catalog
    what = subject.payloads.describe(row)
    try:
        # not remembered: a million items would be
        item = single_tensor(subject.payloads.stored(row), what=what)
    except UnsupportedFormatError:
        return _UNREAD
    except WorkbenchError as error:
        return "headers.damaged", str(error), {}
    tensor = int(catalog.tensor[row])
    dtype, sizes = catalog.dtype_of(tensor), tuple(subject.box(row)[1])
    if item.dtype != dtype.name:
        return (
            "headers.dtype",
            f"the item at byte {int(catalog.start[row]):,} of {subject.file(row)!r} holds {item.dtype}, the metadata "
            f"says {dtype}",
            {"stored": item.dtype, "metadata": dtype.name},
        )
    if catalog.codec[row] == cat.TORCH_ZIP and item.shape != sizes:
        return (
            "headers.shape",
            f"the item at byte {int(catalog.start[row]):,} of {subject.file(row)!r} holds a tensor of shape "
            f"{list(item.shape)}, the metadata says {list(sizes)}",
            {"stored": list(item.shape), "metadata": list(sizes)},
        )
    return None


def _holds_storage(value: object) -> bool:
    """Whether a storage lies in an object beside the tensors that are listed."""
    todo, seen = [value], set[int]()
    while todo:
        node = todo.pop()
        if isinstance(node, StorageRef) and node.numel:
            return True
        if id(node) in seen or not isinstance(node, (dict, list, tuple, Opaque)):
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            todo += node.values()
        elif isinstance(node, Opaque):
            todo += [node.args, node.kwargs, node.state, node.items, node.pairs]
        else:
            todo += node
    return False


def _one_an_item(catalog: cat.Catalog, rows: Array) -> Array:
    """One row for each stored item, in file order."""
    if not len(rows):
        return rows
    order = rows[np.lexsort((catalog.start[rows], catalog.file[rows]))]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(catalog.file[order]) != 0) | (np.diff(catalog.start[order]) != 0)
    # equal ranges of two whole tensors are judged one by one
    return order[new | (catalog.codec[order] == cat.TORCH_ZIP)]
