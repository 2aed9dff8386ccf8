"""Evidence about the difference of two checkpoints, without reading payloads.

::

    stored CRC-32      chunk by chunk, of torch.save records: equal CRC, length and type → equal; other CRC → changed
    manifest           tensor by tensor, of fingerprints that were taken when the manifest was written
    one file           the same bytes on disk: a hard link, or the checkpoint with itself

All but the last show what was *written*: a later bit flip on disk is not detected, and two contents share a
CRC-32 once in 4·10⁹. Each verdict records its source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.analysis.manifest import load
from workbench.analysis.manifest_entries import Manifest
from workbench.checkpoint import Checkpoint
from workbench.core import box, codecs
from workbench.core.arrays import Array, Ints
from workbench.core.catalog import Catalog
from workbench.core.checksums import StoredCrcs, stored_crcs
from workbench.core.words import plural
from workbench.errors import MissingFileError, WorkbenchError

CRC, MANIFEST, ONE_FILE = "stored CRC-32", "manifest", "one file"
EQUAL, CHANGED, UNKNOWN = "equal", "changed", "unknown"


@dataclass(frozen=True)
class Verdict:
    """The evidence on one pair of tensors, without reading them.

    Attributes:
        status: ``equal``, ``changed`` or ``unknown``.
        source: the evidence; empty if unknown.
        equal, changed, unknown: numbers of chunks of the second side.
        chunks: changed chunk rows of the second side.
    """

    status: str = UNKNOWN
    source: str = ""
    equal: int = 0
    changed: int = 0
    unknown: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class PairVerdicts:
    """Verdicts by pair, and their evidence.

    Attributes:
        verdicts: one per pair, in the same order.
        checked, not_checked: sentences by name, as in a report.
    """

    verdicts: list[Verdict]
    checked: Mapping[str, str] = field(default_factory=dict)
    not_checked: Mapping[str, str] = field(default_factory=dict)


def gather(
    a: Checkpoint, b: Checkpoint, tensors_a: Sequence[int], tensors_b: Sequence[int], replicas: tuple[int, int] = (0, 0)
) -> PairVerdicts:
    """Gather the evidence of directories, manifests and the file system on pairs of tensors of one dtype and shape."""
    left, right = np.asarray(tensors_a, np.int64), np.asarray(tensors_b, np.int64)
    checked: dict[str, str] = {}
    not_checked: dict[str, str] = {}
    verdicts = _by_chunks(a, b, left, right, replicas, checked, not_checked)
    manifests = _manifests(a, b) if replicas == (0, 0) else None
    if isinstance(manifests, str):
        not_checked["manifests"] = manifests
    elif manifests is not None:
        verdicts = _by_manifest(a, b, left, right, manifests, verdicts, checked)
    return PairVerdicts(verdicts, checked, not_checked)


# ---- chunks ----------------------------------------------------------------------------------------------------------


def _by_chunks(
    a: Checkpoint,
    b: Checkpoint,
    left: Ints,
    right: Ints,
    replicas: tuple[int, int],
    checked: dict[str, str],
    not_checked: dict[str, str],
) -> list[Verdict]:
    p, q = a.catalog, b.catalog
    pair, i, j = _same_boxes(p, q, left, right, replicas)
    crcs = stored_crcs(a.payloads), stored_crcs(b.payloads)
    same = _one_place(a, b, i, j)
    equal, changed = _by_crc(crcs, p, q, i, j)
    counts = np.zeros((3, len(left)), np.int64)
    np.add.at(counts[0], pair[same | equal], 1)
    np.add.at(counts[1], pair[changed & ~same], 1)
    chunks = np.bincount(q.tensor[q.replica == replicas[1]], minlength=len(q))[right]
    counts[2] = chunks - counts[0] - counts[1]
    by_place = np.bincount(pair[same], minlength=len(left))
    where: dict[int, list[int]] = {}
    for k, row in zip(pair[changed & ~same].tolist(), j[changed & ~same].tolist(), strict=True):
        where.setdefault(k, []).append(row)
    with_crc = int((equal | changed).sum())
    if with_crc:
        checked[CRC] = (
            f"of {plural(with_crc, 'chunk')} on both sides, {int(equal.sum()):,} equal: evidence of what was written, "
            "not of what is on disk now"
        )
    if int(counts[2].sum()):
        not_checked["chunks without evidence"] = (
            f"{plural(int(counts[2].sum()), 'chunk', 'lack')} a CRC on both sides, or are sharded differently; "
            "they were not read"
        )
    if same.any():
        checked[ONE_FILE] = f"{plural(int(same.sum()), 'chunk', 'are')} the same bytes of the same file on disk"
    found = []
    for k, (yes, no, rest) in enumerate(counts.T.tolist()):
        status = CHANGED if no else EQUAL if yes and not rest else UNKNOWN
        source = "" if status == UNKNOWN else ONE_FILE if status == EQUAL and by_place[k] == yes else CRC
        found.append(Verdict(status, source, yes, no, rest, tuple(where.get(k, ()))))
    return found


def _by_crc(crcs: tuple[StoredCrcs, StoredCrcs], p: Catalog, q: Catalog, i: Ints, j: Ints) -> tuple[Array, Array]:
    """Return pairs of chunk rows that are equal according to their CRCs, and those that changed."""
    one, two = crcs
    both = (one.crc[i] >= 0) & (two.crc[j] >= 0)
    exact = one.exact[i] & two.exact[j]
    alike = exact | (both & _same_view(p, q, i, j))
    match = (one.crc[i] == two.crc[j]) & (one.nbytes[i] == two.nbytes[j])
    return both & alike & match, both & exact & ~match


def _same_view(p: Catalog, q: Catalog, i: Ints, j: Ints) -> Array:
    """Return whether two chunks are the same part of their records."""
    inner = [np.zeros(len(rows), np.int64) if c.inner is None else c.inner[rows] for c, rows in ((p, i), (q, j))]
    same = inner[0] == inner[1]
    if p.strides is None and q.strides is None:
        return np.asarray(same)
    if p.strides is None or q.strides is None:
        return np.zeros(len(i), bool)
    dims = min(p.strides.shape[1], q.strides.shape[1])
    return np.asarray(same & (p.strides[i, :dims] == q.strides[j, :dims]).all(axis=1))


def _same_boxes(p: Catalog, q: Catalog, left: Ints, right: Ints, replicas: tuple[int, int]) -> tuple[Ints, Ints, Ints]:
    """Return chunks with the same box of a pair of tensors: the pair, and a row of the first and second side."""
    sides = []
    dims = max(p.offsets.shape[1], q.offsets.shape[1])
    for catalog, tensors, replica in ((p, left, replicas[0]), (q, right, replicas[1])):
        order = np.argsort(tensors, kind="stable")
        at = np.searchsorted(tensors[order], catalog.tensor)
        known = (at < len(tensors)) & (catalog.replica == replica)
        known[known] &= tensors[order][at[known]] == catalog.tensor[known]
        rows = np.flatnonzero(known)
        columns = [
            order[at[rows]],
            *box.padded(catalog.offsets[rows], dims, 0).T,
            *box.padded(catalog.sizes[rows], dims, 1).T,
        ]
        sides.append((rows, np.stack(columns, axis=1).astype(np.int64)))
    (rows_a, keys_a), (rows_b, keys_b) = sides
    both = np.concatenate([keys_a, keys_b])
    order = np.lexsort(both.T[::-1])
    same = (both[order][1:] == both[order][:-1]).all(axis=1) if len(order) else np.empty(0, bool)
    # a row of each side, in adjacent positions; boxes stored twice in one replica match the first
    first, second = order[:-1][same], order[1:][same]
    real = (first < len(rows_a)) & (second >= len(rows_a))
    first, second = first[real], second[real] - len(rows_a)
    return keys_a[first, 0], rows_a[first], rows_b[second]


def _one_place(a: Checkpoint, b: Checkpoint, i: Ints, j: Ints) -> Array:
    """Return whether two chunks are the same bytes of one file (the same inode)."""
    p, q = a.catalog, b.catalog
    nodes = []
    for ckpt in (a, b):
        used = box.distinct(ckpt.catalog.file.astype(np.int64))
        folder = ckpt.path if os.path.isdir(ckpt.path) else os.path.dirname(ckpt.path)
        table = np.full((len(ckpt.catalog.files), 2), -1, np.int64)
        for file in used.tolist():
            try:
                stat = os.stat(os.path.join(folder, ckpt.catalog.files[file]))
            except (OSError, ValueError):
                continue  # nothing is known about it
            table[file] = stat.st_dev, stat.st_ino & ((1 << 63) - 1)
        nodes.append(table)
    one, two = nodes[0][p.file[i]], nodes[1][q.file[j]]
    same = (one == two).all(axis=1) & (one[:, 0] >= 0)
    same &= (p.start[i] == q.start[j]) & (p.stop[i] == q.stop[j]) & (p.codec[i] == q.codec[j])
    same &= p.codec[i] != codecs.DECODED  # their scales may be in other files
    return np.asarray(same & _same_view(p, q, i, j))


# ---- manifests -------------------------------------------------------------------------------------------------------


def _manifests(a: Checkpoint, b: Checkpoint) -> tuple[Manifest, Manifest] | str | None:
    found: list[Manifest] = []
    for ckpt in (a, b):
        try:
            found.append(load(ckpt.place))
        except MissingFileError:
            continue
        except WorkbenchError as error:
            return str(error)
    return (found[0], found[1]) if len(found) == 2 else None


def _is_decoded(catalog: Catalog, tensor: int) -> bool:
    return bool((catalog.codec[catalog.rows_of(tensor)] == codecs.DECODED).any())


def _by_manifest(
    a: Checkpoint,
    b: Checkpoint,
    left: Ints,
    right: Ints,
    manifests: tuple[Manifest, Manifest],
    verdicts: list[Verdict],
    checked: dict[str, str],
) -> list[Verdict]:
    found, compared = [], 0
    for t, u, verdict in zip(left.tolist(), right.tolist(), verdicts, strict=True):
        one = manifests[0].tensors.get(a.catalog.keys[t])
        two = manifests[1].tensors.get(b.catalog.keys[u])
        if _is_decoded(a.catalog, t) or _is_decoded(b.catalog, u):  # fingerprints are those of the stored elements
            one = None
        if one is None or two is None or one.fingerprint is None or two.fingerprint is None:
            found.append(verdict)
            continue
        compared += 1
        status = EQUAL if one.fingerprint == two.fingerprint else CHANGED
        if verdict.status == UNKNOWN:
            verdict = Verdict(status, MANIFEST, verdict.equal, verdict.changed, verdict.unknown, verdict.chunks)
        elif verdict.status != status and verdict.source == CRC:
            verdict = Verdict(UNKNOWN, "", verdict.equal, verdict.changed, verdict.unknown, verdict.chunks)
        found.append(verdict)
    if compared:
        checked[MANIFEST] = (
            f"fingerprints of {plural(compared, 'tensor')}, as they were when the manifests were written "
            f"({manifests[0].made} and {manifests[1].made})"
        )
    return found
