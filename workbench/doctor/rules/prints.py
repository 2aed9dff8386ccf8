"""Compare a checkpoint with an echo of fingerprints: find live tensors that differ from the stored ones.

::

    stored  model.layers.0.wq  ──fingerprint (manifest, or read)──┐
    live    layers.0.wq                           fingerprint  ───┴─ equal, or
                                                  all zeros · all ones · another tensor's values · something else

Tensors are matched by parameter and role, as in every comparison here; if another framework named them, through its
conventions. If a live weight is fp32 and the stored one bf16, it is compared with the stored master.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
import xxhash

from workbench.analysis import manifest
from workbench.analysis.echo_file import Echo, open_echo
from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Ints
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.fingerprint import BLOCK, combine, tensor_fingerprints
from workbench.core.ranks import Ranks
from workbench.core.scan import Progress
from workbench.doctor.facts.evidence import Pair, State, align
from workbench.doctor.facts.gather import gather
from workbench.errors import WorkbenchError
from workbench.names.roles import listed_alone

_NUMBER = re.compile(r"(?:^|\.)state\.(\d{1,9})\.\w+$")


class Differing(NamedTuple):
    """A live tensor that differs from the stored one.

    Attributes:
        key: its key in the echo. stored: its key in the checkpoint.
        holds: ``zeros``, ``ones``, ``other`` (the stored values of another tensor) or ``unknown``.
        other: key of that other stored tensor.
    """

    key: str
    stored: str
    fqn: str | None
    role: str
    holds: str
    other: str = ""


@dataclass(frozen=True, eq=False)
class ComparedPrints:
    """The result of comparing fingerprints.

    Attributes:
        equal: keys of the echo whose tensors are equal bit for bit.
        differing: the tensors of the echo that are not.
        missing: stored keys that the trainer does not hold, with a reason if there is one.
        extra: live keys that are not stored.
        unlike: live key → the difference in type or shape that prevents a comparison.
        unread: live key → why it, or the stored tensor, has no fingerprint.
        role: the role of every key above, live or stored.
        nbytes: bytes of the checkpoint that were read; 0 if a manifest has the fingerprints.
        fqn: key → the parameter that it belongs to, if known.
    """

    equal: tuple[str, ...]
    differing: tuple[Differing, ...]
    missing: Mapping[str, str]
    extra: tuple[str, ...]
    unlike: Mapping[str, str]
    unread: Mapping[str, str]
    role: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    fqn: Mapping[str, str | None] = field(default_factory=dict)


def echo_state(echo: Echo) -> State:
    """Return an echo of fingerprints as a state for rules on facts: names, shapes, counters, groups, schedules."""
    ckpt = open_echo(echo)
    return State(ckpt, gather(ckpt))


def compare_prints(
    pair: Pair,
    echo: Echo,
    *,
    known: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ComparedPrints:
    """Compare the stored tensors of ``pair.a`` with the echo behind ``pair.b`` (:func:`echo_state`).

    Args:
        known: stored key → fingerprint, if ``pair.a`` is an echo too; then nothing is read.
        ranks: the ranks of a job, which share the reading; each of them must make the call.
        threads, progress: as in :func:`workbench.core.fingerprint.tensor_fingerprints`.
    """
    partners, unlike, extra = _partners(pair, echo)
    live = {key: _own(echo, key) for key in partners}
    wanted = sorted({at for key, at in partners.items() if live[key] is not None})
    prints, wrong, nbytes = _stored(pair, wanted, known, ranks, threads, progress)
    keys = pair.a.ckpt.catalog.keys
    by_print: dict[str, int] = {}
    for at, found in prints.items():
        by_print.setdefault(found, at)
    equal, differing, unread = [], [], {}
    for key, at in partners.items():
        one, mine = echo.tensors[key], live[key]
        if mine is None:
            unread[key] = one.why or "has no fingerprint"
        elif at not in prints:
            unread[key] = wrong.get(at, "the stored tensor has no fingerprint")
        elif mine == prints[at]:
            equal.append(key)
        else:
            holds, other = _holds(one.dtype, one.shape, mine, by_print, keys)
            differing.append(Differing(key, keys[at], one.fqn, one.role, holds, other))
    met = set(partners.values())
    missing = {key: "" for at, key in enumerate(keys) if at not in met and _expected(pair, at, echo)}
    missing |= {key: why for key, why in pair.only_a.items() if pair.mapped and why}
    role = {key: one.role for key, one in echo.tensors.items()}
    role |= {key: pair.a.ckpt.roles[pair.a.ckpt.catalog.index[key]] for key in missing if key in pair.a.ckpt}
    fqn = {key: one.fqn for key, one in echo.tensors.items()}
    fqn |= {key: pair.a.ckpt.fqns[pair.a.ckpt.catalog.index[key]] for key in missing if key in pair.a.ckpt}
    return ComparedPrints(tuple(equal), tuple(differing), missing, tuple(extra), unlike, unread, role, nbytes, fqn)


# ---- matching tensors ------------------------------------------------------------------------------------------------


def _partners(pair: Pair, echo: Echo) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Return live key → position of the stored tensor, live keys of another type or shape, and unstored ones."""
    a = pair.a
    numbered = _numbered(a, echo)
    partners: dict[str, int] = {}
    unlike: dict[str, str] = {}
    extra: list[str] = []
    for key, one in echo.tensors.items():
        if one.fqn is None:
            at = a.ckpt.catalog.index.get(key)
        else:
            fqn, role = listed_alone(one.fqn, one.role)
            at = a.params.get(fqn, {}).get(role, numbered.get((one.fqn, one.role)))
        if at is None:
            if not (one.tied and _is_stored(echo, one.tied, a)):
                extra.append(key)
            continue
        if one.fqn is not None and role == "param" and a.dtype(at) != one.dtype:
            master = a.params[fqn].get("master")
            if master is not None and a.dtype(master) == one.dtype:
                at = master
        if (a.dtype(at), a.shape(at)) != (one.dtype, one.shape):
            unlike[key] = f"is {one.dtype} {one.shape} in the echo and {a.dtype(at)} {a.shape(at)} in the checkpoint"
        else:
            partners[key] = at
    return partners, unlike, extra


def _numbered(a: State, echo: Echo) -> dict[tuple[str, str], int]:
    """Return parameter and role → position of state that is stored under the parameter's number in the optimizer.

    The live groups assign the numbers to parameters, because the state was loaded by them. Nothing shows whether the
    number belonged to the same parameter at the save.
    """
    optimizer = echo.objects.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    names = [
        str(name)
        for group in (groups if isinstance(groups, list) else ())
        for name in (group.get("params") or () if isinstance(group, Mapping) else ())
    ]
    found: dict[tuple[str, str], int] = {}
    for at, (key, fqn, role) in enumerate(zip(a.ckpt.catalog.keys, a.ckpt.fqns, a.ckpt.roles, strict=True)):
        match = _NUMBER.search(key) if fqn is None else None
        if match and int(match[1]) < len(names):
            found.setdefault((names[int(match[1])], role), at)
    return found


def _is_stored(echo: Echo, key: str, a: State) -> bool:
    one = echo.tensors.get(key)
    if one is None or one.fqn is None:
        return False
    fqn, role = listed_alone(one.fqn, one.role)
    return role in a.params.get(fqn, {})


def _own(echo: Echo, key: str) -> str | None:
    return echo.tensors[key].fingerprint


def _expected(pair: Pair, at: int, echo: Echo) -> bool:
    """Return whether the echo should hold a stored tensor that has no partner."""
    a = pair.a
    fqn, role = a.names.fqns[at], a.names.roles[at]
    live = {listed_alone(one.fqn or "", one.role)[1] for one in echo.tensors.values()}
    if fqn is None or role in ("other", "ema") or role not in live | _STATE:
        return False
    there = pair.b.params.get(fqn, {})
    if role in there:  # another type or shape, or its master was compared
        return False
    return not (role == "master" and "param" in there) and not (role in _STATE and not echo.counts)


_STATE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "step"}

# ---- fingerprints of stored tensors ----------------------------------------------------------------------------------


def _stored(
    pair: Pair,
    wanted: Sequence[int],
    known: Mapping[str, str] | None,
    ranks: Ranks | None,
    threads: int | None,
    progress: Progress | None,
) -> tuple[dict[int, str], dict[int, str], int]:
    """Return position → fingerprint, position → why there is none, and the number of bytes read."""
    ckpt = pair.a.ckpt
    listed: Mapping[str, str] = {}
    if not pair.mapped:
        listed = _from_manifest(ckpt) if known is None else known
    prints = {at: listed[ckpt.catalog.keys[at]] for at in wanted if ckpt.catalog.keys[at] in listed}
    if known is not None:
        return prints, {}, 0
    rest = np.array([at for at in wanted if at not in prints], np.int64)
    nbytes = ckpt.catalog.tensor_nbytes[rest]
    mine = _share(nbytes, ranks.size)[ranks.rank] if ranks is not None else np.arange(len(rest))
    wrong: dict[int, str] = {}

    def note(tensor: int, error: WorkbenchError) -> None:
        wrong.setdefault(tensor, str(error))

    found = tensor_fingerprints(ckpt.payloads, tensors=rest[mine], threads=threads, progress=progress, on_error=note)
    read = {tensor: one.hex for tensor, one in found}
    for some, errors in ranks.gather((read, wrong)) if ranks is not None else [(read, wrong)]:
        prints |= some
        wrong |= errors
    return prints, wrong, int(nbytes.sum())


def _share(nbytes: Ints, size: int) -> list[Ints]:
    """Return the positions for each rank, with about equal numbers of bytes."""
    rank = (np.cumsum(nbytes) - nbytes) * size // max(int(nbytes.sum()), 1)
    return [np.flatnonzero(rank == each) for each in range(size)]


def _from_manifest(ckpt: Checkpoint) -> dict[str, str]:
    """Return the fingerprints of the manifest if it matches these files: same sizes, no later writes."""
    try:
        name = manifest.find(ckpt.path)
        known = manifest.load(name)
        made, place = os.stat(name).st_mtime_ns, ckpt.place.again()
        stats = {file: place.stat(file) for file in known.files}
    except (WorkbenchError, OSError):
        return {}
    if any(stats[file].size != one.size or stats[file].mtime_ns > made for file, one in known.files.items()):
        return {}
    return {key: one.fingerprint for key, one in known.tensors.items() if one.fingerprint is not None}


# ---- contents of differing tensors -----------------------------------------------------------------------------------


def _holds(
    dtype: str, shape: tuple[int, ...], found: str, stored: Mapping[str, int], keys: Sequence[str]
) -> tuple[str, str]:
    for word, one in (("zeros", 0), ("ones", 1)):
        if found == _filled(by_name(dtype), shape, one):
            return word, ""
    return ("other", keys[stored[found]]) if found in stored else ("unknown", "")


def _filled(dtype: DType, shape: tuple[int, ...], value: int) -> str | None:
    """Return the fingerprint of a tensor that holds the same number everywhere."""
    import torch

    torch_dtype = getattr(torch, dtype.torch_name or "", None)
    if torch_dtype is None or dtype.packed:
        return None
    one = torch.tensor([float(value)]).to(torch_dtype).view(torch.uint8).numpy().tobytes()
    left, digests = nbytes_of(dtype, prod(shape)), []
    full = xxhash.xxh3_128_digest(one * (BLOCK // len(one))) if left >= BLOCK else b""
    while left > 0:
        digests.append(full if left >= BLOCK else xxhash.xxh3_128_digest(one * (left // len(one))))
        left -= BLOCK
    return combine(dtype, shape, digests).hex


def paired(before: State, echo: Echo) -> Pair:
    """Return the pair for :func:`compare_prints`."""
    return align(before, echo_state(echo))
