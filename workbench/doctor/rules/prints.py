"""A checkpoint against an echo of fingerprints: which live tensors hold other bits than stored, and what they hold.

::

    stored  model.layers.0.wq  ──fingerprint (manifest, or read)──┐
    live    layers.0.wq                           fingerprint  ───┴─ equal, or
                                                  all zeros · all ones · what another tensor holds · something else

Tensors meet by parameter and role, as in every comparison here; where another framework named them, through its
conventions. A live weight of fp32 over stored bf16 is compared with the stored master.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from workbench.analysis import manifest
from workbench.analysis.echo_file import Echo, open_echo
from workbench.checkpoint import Checkpoint
from workbench.core.dtypes import DType, by_name, nbytes_of
from workbench.core.fingerprint import BLOCK, combine, tensor_fingerprints
from workbench.core.place import Place
from workbench.core.scan import Tick
from workbench.doctor.facts.evidence import Pair, State, align
from workbench.doctor.facts.gather import gather
from workbench.errors import WorkbenchError
from workbench.reshard.loading.ranks import Ranks

__all__ = ["ComparedPrints", "Differing", "compare_prints", "echo_state", "paired"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
_NUMBER = re.compile(r"(?:^|\.)state\.(\d{1,9})\.\w+$")


class Differing(NamedTuple):
    """A live tensor that holds other bits than the stored one.

    Attributes:
        key: in the echo; stored: in the checkpoint.
        holds: ``zeros``, ``ones``, ``other`` (what is stored for another tensor) or ``unknown``.
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
    """The outcome.

    Attributes:
        equal: keys of the echo whose tensors are equal bit for bit.
        differing: … and are not.
        missing: stored keys that the trainer does not hold, with a reason where there is one.
        extra: live keys that are not stored.
        unlike: live key → how type or shape differ, so that bits cannot be compared.
        unread: live key → why it, or the stored tensor, has no fingerprint.
        role: of every key above, live or stored.
        nbytes: bytes of the checkpoint that were read for it; 0: a manifest told.
        fqn: key → the parameter that it belongs to, where that is known.
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
    """An echo of fingerprints as a state for the rules on facts: names, shapes, counters, groups, schedules."""
    ckpt = open_echo(echo)
    return State(ckpt, gather(ckpt))


def compare_prints(
    pair: Pair,
    echo: Echo,
    *,
    known: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    threads: int | None = None,
    tick: Tick | None = None,
) -> ComparedPrints:
    """Compare the stored tensors of ``pair.a`` with the echo that ``pair.b`` was made of (:func:`echo_state`).

    Args:
        known: stored key → fingerprint, where it is an echo itself; nothing is read then.
        ranks: a job's, which then share the reading; every one of them calls it.
        threads, tick: as in :func:`workbench.core.fingerprint.tensor_fingerprints`.
    """
    partners, unlike, extra = _partners(pair, echo)
    live = {key: _own(echo, key) for key in partners}
    wanted = sorted({at for key, at in partners.items() if live[key] is not None})
    prints, wrong, nbytes = _stored(pair, wanted, known, ranks, threads, tick)
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


# ---- which with which ------------------------------------------------------------------------------------------------


def _partners(pair: Pair, echo: Echo) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Live key → position of the stored tensor; live keys of another type or shape; those that are not stored."""
    a = pair.a
    numbered = _numbered(a, echo)
    partners: dict[str, int] = {}
    unlike: dict[str, str] = {}
    extra: list[str] = []
    for key, one in echo.tensors.items():
        if one.fqn is None:
            at = a.ckpt.catalog.index.get(key)
        else:
            at = a.params.get(one.fqn, {}).get(one.role, numbered.get((one.fqn, one.role)))
        if at is None:
            if not (one.tied and _is_stored(echo, one.tied, a)):
                extra.append(key)
            continue
        if one.role == "param" and one.fqn is not None and a.dtype(at) != one.dtype:
            master = a.params[one.fqn].get("master")
            if master is not None and a.dtype(master) == one.dtype:
                at = master
        if (a.dtype(at), a.shape(at)) != (one.dtype, one.shape):
            unlike[key] = f"is {one.dtype} {one.shape} here, and stored as {a.dtype(at)} {a.shape(at)}"
        else:
            partners[key] = at
    return partners, unlike, extra


def _numbered(a: State, echo: Echo) -> dict[tuple[str, str], int]:
    """Parameter and role → position of a state that is stored under the parameter's number in the optimizer.

    The live groups tell whose number it is, for by it the state was loaded; that it was the same parameter's when it
    was saved, nothing tells.
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
    return one is not None and one.fqn is not None and one.role in a.params.get(one.fqn, {})


def _own(echo: Echo, key: str) -> str | None:
    return echo.tensors[key].fingerprint


def _expected(pair: Pair, at: int, echo: Echo) -> bool:
    """Whether a stored tensor without a partner is one that such an echo should hold."""
    a = pair.a
    fqn, role = a.ckpt.fqns[at], a.ckpt.roles[at]
    if fqn is None or role in ("other", "ema") or role not in {one.role for one in echo.tensors.values()} | _STATE:
        return False
    there = pair.b.params.get(fqn, {})
    if role in there:  # of another type or shape, or its master was taken
        return False
    return not (role == "master" and "param" in there) and not (role in _STATE and not echo.counts)


_STATE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "step"}

# ---- fingerprints of what is stored ----------------------------------------------------------------------------------


def _stored(
    pair: Pair,
    wanted: Sequence[int],
    known: Mapping[str, str] | None,
    ranks: Ranks | None,
    threads: int | None,
    tick: Tick | None,
) -> tuple[dict[int, str], dict[int, str], int]:
    """Position → fingerprint, or why there is none; and how many bytes were read for it."""
    ckpt = pair.a.ckpt
    told: Mapping[str, str] = {}
    if not pair.mapped:
        told = _from_manifest(ckpt) if known is None else known
    prints = {at: told[ckpt.catalog.keys[at]] for at in wanted if ckpt.catalog.keys[at] in told}
    if known is not None:
        return prints, {}, 0
    rest = np.array([at for at in wanted if at not in prints], np.int64)
    nbytes = ckpt.catalog.tensor_nbytes[rest]
    mine = _share(nbytes, ranks.size)[ranks.rank] if ranks is not None else np.arange(len(rest))
    wrong: dict[int, str] = {}

    def note(tensor: int, error: WorkbenchError) -> None:
        wrong.setdefault(tensor, str(error))

    found = tensor_fingerprints(
        ckpt.payloads, tensors=rest[mine], threads=threads, tick=tick, on_error=note
    )  # fmt: skip
    read = {tensor: one.hex for tensor, one in found}
    for some, errors in ranks.gather((read, wrong)) if ranks is not None else [(read, wrong)]:
        prints |= some
        wrong |= errors
    return prints, wrong, int(nbytes.sum())


def _share(nbytes: Ints, size: int) -> list[Ints]:
    """Positions for each rank, about as many bytes each."""
    rank = (np.cumsum(nbytes) - nbytes) * size // max(int(nbytes.sum()), 1)
    return [np.flatnonzero(rank == each) for each in range(size)]


def _from_manifest(ckpt: Checkpoint) -> dict[str, str]:
    """Fingerprints of a manifest that was made of these files: as long as they are, and none written since."""
    try:
        name = manifest.find(ckpt.path)
        known = manifest.load(name)
        made, place = os.stat(name).st_mtime_ns, Place(ckpt.path)
        stats = {file: place.stat(file) for file in known.files}
    except (WorkbenchError, OSError):
        return {}
    if any(stats[file].size != one.size or stats[file].mtime_ns > made for file, one in known.files.items()):
        return {}
    return {key: one.fingerprint for key, one in known.tensors.items() if one.fingerprint is not None}


# ---- what a differing one holds --------------------------------------------------------------------------------------


def _holds(
    dtype: str, shape: tuple[int, ...], found: str, stored: Mapping[str, int], keys: Sequence[str]
) -> tuple[str, str]:  # fmt: skip
    for word, one in (("zeros", 0), ("ones", 1)):
        if found == _filled(by_name(dtype), shape, one):
            return word, ""
    return ("other", keys[stored[found]]) if found in stored else ("unknown", "")


def _filled(dtype: DType, shape: tuple[int, ...], value: int) -> str | None:
    """The fingerprint of a tensor that holds one number everywhere."""
    import torch

    torch_dtype = getattr(torch, dtype.torch_name or "", None)
    if torch_dtype is None or dtype.packed:
        return None
    one = torch.tensor([float(value)]).to(torch_dtype).view(torch.uint8).numpy().tobytes()
    numel = 1
    for n in shape:
        numel *= n
    left, digests = nbytes_of(dtype, numel), []
    full = xxhash.xxh3_128_digest(one * (BLOCK // len(one))) if left >= BLOCK else b""
    while left > 0:
        digests.append(full if left >= BLOCK else xxhash.xxh3_128_digest(one * (left // len(one))))
        left -= BLOCK
    return combine(dtype, shape, digests).hex


def paired(before: State, echo: Echo) -> Pair:
    """The pair for :func:`compare_prints`."""
    return align(before, echo_state(echo))
