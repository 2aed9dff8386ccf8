"""Check that the header of each stored item agrees with the metadata.

::

    .metadata                      w: bf16 (4, 8) at (4, 0) ─► __1_0.distcp bytes 512 : 2,048
    the item there (~1 KB read)    torch.save archive: bf16 (4, 8), stride (8, 1), 64 bytes at 128   ✓

    model.safetensors.index.json   w ─► model-00002-of-00004.safetensors, total_size 510,976
    the files' headers             w, and a tensor missing from the index                            ✗

A different dtype or shape means that the files are from two saves, or that files of two ranks were swapped. A loader
that does not check them reads one tensor's bytes as another's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from workbench.analysis.verify.log import Examined, advice
from workbench.core import catalog as cat
from workbench.core import codecs
from workbench.core.arrays import Array, Ints
from workbench.core.executors import in_order
from workbench.core.pickles.standins import Opaque, StorageRef
from workbench.core.scan import Progress, workers
from workbench.core.words import plural, some_of
from workbench.core.ziparchive import single_tensor
from workbench.errors import ChangedError, MissingFileError, UnsupportedFormatError, WorkbenchError
from workbench.formats.safetensors import header as safetensors_header
from workbench.formats.safetensors.weight_index import read_index

BATCH = 512  #: items that a thread processes at a time
FETCHED = 64  #: the same for items in a store: their first and last bytes are fetched together
MAX_OBJECTS = 20_000  #: maximum number of objects decoded
HEADER = 1 << 10  #: approximate number of bytes read per item
_Verdict: TypeAlias = tuple[str, str, str, dict[str, Any]]  #: rule, message, hint, evidence
_UNREAD: _Verdict = ("", "", "", {})  #: the verdict on an item of an unsupported kind
_HINT = "the file is from another save, or the files of two ranks were swapped: restore it"


def check_headers(subject: Examined, progress: Progress | None = None) -> None:
    """Compare the directory and pickle of each archived item with the catalog; reads about 1 KB per item."""
    catalog, log = subject.catalog, subject.log
    rows = _one_an_item(catalog, np.flatnonzero((codecs.ZIP & codecs.IN_FILE)[catalog.codec] & ~subject.lost))
    batch = BATCH if subject.payloads.pool.at_once == 1 else FETCHED
    batches = [rows[at : at + batch] for at in range(0, len(rows), batch)]
    done, bad, unread, failed = 0, list[int](), list[int](), set[str]()
    with subject.payloads.pool.keeping(), ThreadPoolExecutor(workers(subject.payloads.pool, subject.threads)) as pool:
        for found in in_order(pool, partial(_judged, subject), batches):
            for row, verdict in found:
                if verdict is _UNREAD:
                    unread.append(row)
                elif verdict is not None:
                    rule, message, hint, evidence = verdict
                    bad.append(row)
                    if rule == "read.failed":
                        if message in failed:  # of another item of that file
                            continue
                        failed.add(message)
                    log.add(
                        rule,
                        "error",
                        subject.key(row),
                        message,
                        hint,
                        file=subject.file(row),
                        start=int(catalog.start[row]),
                        **evidence,
                    )
            done += len(found)
            if progress is not None:
                progress(done / len(rows))
    for row in unread:
        subject.unread(row)
    for file in np.unique(catalog.file[bad]).tolist():  # every chunk of a damaged item; once per file, not per item
        starts = catalog.start[bad][catalog.file[bad] == file]
        subject.lost |= (catalog.file == file) & np.isin(catalog.start, starts)
    if len(rows):
        count = len(rows) - len(unread)
        log.checked["headers"] = f"the archive headers of {plural(count, 'item')} against the metadata"
    packed = int((codecs.COMPRESSED & codecs.ZIP)[catalog.codec].sum())
    if packed:
        log.not_checked["headers"] = (
            f"{plural(packed, 'item')} compressed with zstd: their headers are compressed, too; verify with --deep"
        )


def headers_nbytes(subject: Examined) -> int:
    """Return about how many bytes :func:`check_headers` reads."""
    return HEADER * int((codecs.ZIP & codecs.IN_FILE)[subject.catalog.codec].sum())


def check_index(subject: Examined) -> None:
    """Compare a safetensors index with the headers of its files."""
    catalog, log = subject.catalog, subject.log
    index = catalog.meta.get("index")
    if not isinstance(index, str) or not index.endswith(".safetensors.index.json"):
        return
    try:
        parsed = read_index(subject.place, index)
        weights = parsed.weights
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
            f"does not list {plural(len(extra), 'tensor')} that its files contain: {some_of(extra)}",
            "a loader that follows the index skips them",
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
            f"{plural(len(again), 'tensor')} also in a second file: {some_of(again)}",
            "which copy is used depends on the loader: delete the other",
            tensors=again[:100],
        )
    total = sum(e.stop - e.start for file, h in headers.items() for e in h.entries if weights.get(e.name) == file)
    if claimed := parsed.other_size(total):
        log.add(
            "index.total_size",
            "warn",
            index,
            f"claims {claimed} bytes of tensors, but its files contain {total:,}",
            "the index is from another save, or was edited",
            claimed=parsed.facts["metadata"]["total_size"],
            stored=total,
        )
    log.checked["index"] = f"{index!r} against the headers of {plural(len(headers), 'file')}"


def check_objects(subject: Examined) -> None:
    """Check that the non-tensor state can be decoded."""
    log, objects = subject.log, subject.ckpt.objects
    names = list(objects)[:MAX_OBJECTS]
    opaque: list[str] = []
    table = {key: row for row, key in enumerate(subject.catalog.objects.keys)}
    for name in names:
        try:
            if _holds_storage(objects[name]):
                opaque.append(name)
        except (WorkbenchError, RecursionError) as error:
            row = table.get(name)
            file = None if row is None else subject.catalog.files[subject.catalog.objects.file[row]]
            if row is not None and subject.gone(file or "", int(subject.catalog.objects.stop[row])):
                continue  # reported as the loss of its file
            log.add("objects.unreadable", "error", name, str(error), "the item is damaged: restore its file", file=file)
    if names:
        log.checked["objects"] = f"{plural(len(names), 'object')} (arguments, schedulers, generators …) decoded"
    if opaque := [*opaque, *subject.catalog.meta.get("left_out", ())]:
        log.not_checked["undecoded objects"] = (
            f"{some_of(opaque)}: {'its' if len(opaque) == 1 else 'their'} values are not decoded"
        )
    if len(objects) > len(names):
        log.not_checked["objects"] = f"{len(objects) - len(names):,} of {len(objects):,} objects: too many to decode"


def _judged(subject: Examined, rows: Ints) -> list[tuple[int, _Verdict | None]]:
    with suppress(WorkbenchError):  # the read itself meets it
        subject.payloads.fetch_ends(rows)
    return [(row, _judge(subject, row)) for row in rows.tolist()]


def _judge(subject: Examined, row: int) -> _Verdict | None:
    catalog = subject.catalog
    what = subject.payloads.describe(row)
    try:
        # not kept: there may be a million items
        item = single_tensor(subject.payloads.stored(row), what=what)
    except UnsupportedFormatError:
        return _UNREAD
    except (ChangedError, MissingFileError) as error:
        return "read.failed", str(error), advice(error), {}
    except WorkbenchError as error:
        return "headers.damaged", str(error), _HINT, {}
    tensor = int(catalog.tensor[row])
    dtype, sizes = catalog.dtype_of(tensor), tuple(subject.box(row)[1])
    if item.dtype != dtype.name:
        return (
            "headers.dtype",
            f"the item at byte {int(catalog.start[row]):,} of {subject.file(row)!r} is {item.dtype}, but {dtype} in "
            "the metadata",
            _HINT,
            {"stored": item.dtype, "metadata": dtype.name},
        )
    if catalog.codec[row] == codecs.TORCH_ZIP and item.shape != sizes:
        return (
            "headers.shape",
            f"the item at byte {int(catalog.start[row]):,} of {subject.file(row)!r} has shape "
            f"{list(item.shape)}, but {list(sizes)} in the metadata",
            _HINT,
            {"stored": list(item.shape), "metadata": list(sizes)},
        )
    return None


def _holds_storage(value: object) -> bool:
    """Return whether an object contains a storage besides the listed tensors."""
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
    """Return one row per stored item, in file order."""
    if not len(rows):
        return rows
    order = rows[np.lexsort((catalog.start[rows], catalog.file[rows]))]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(catalog.file[order]) != 0) | (np.diff(catalog.start[order]) != 0)
    # equal ranges of two whole tensors are checked separately
    return order[new | (catalog.codec[order] == codecs.TORCH_ZIP)]
