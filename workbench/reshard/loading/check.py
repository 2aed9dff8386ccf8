"""What all ranks ask for together, compared with what is stored: before any tensor is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import TensorNotFoundError, UsageError
from workbench.reshard.loading.names import Stored
from workbench.reshard.loading.ranks import Ranks

__all__ = ["Told", "agree"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
SHOWN = 8  #: names of each kind in a message


@dataclass(frozen=True)
class Told:
    """What a rank tells the others; small, whatever the size of the model.

    Attributes:
        title, digest: of the checkpoint.
        asked: one bit a tensor.
        missing, mismatched: name → why, the first few; and how many they are.
    """

    title: str
    digest: bytes
    asked: bytes
    missing: dict[str, str]
    mismatched: dict[str, str]
    counts: tuple[int, int]
    strict: bool
    broadcast: bool

    @classmethod
    def of(
        cls,
        stored: Stored,
        positions: Ints,
        missing: Mapping[str, str],
        mismatched: Mapping[str, str],
        *,
        strict: bool,
        broadcast: bool,
    ) -> Told:
        bits = np.zeros(stored.total, bool)
        bits[positions] = True
        few = list(missing.items())[:SHOWN]
        near = {name: why + stored.near(name) for name, why in few} if strict else dict(few)
        return cls(
            stored.title, stored.digest, np.packbits(bits).tobytes(), near, dict(list(mismatched.items())[:SHOWN]),
            (len(missing), len(mismatched)), strict, broadcast,
        )  # fmt: skip


def agree(ranks: Ranks, told: Told, stored: Stored) -> list[str]:
    """Compare notes; the same outcome on every rank.

    Returns:
        keys that are stored and nobody asked for.

    Raises:
        UsageError: ranks that opened other checkpoints.
        TensorNotFoundError, UsageError: where one of them is strict, what is missing, mismatched or unexpected.
    """
    every = ranks.gather(told)
    for rank, one in enumerate(every):
        if one.digest != every[0].digest:
            raise UsageError(
                f"rank {rank} opened {one.title} and rank 0 {every[0].title}, which is another save; name the step, "
                "or give ranks that load different ones process groups of their own"
            )
        if one.broadcast != every[0].broadcast:
            said = f"rank {rank} has broadcast={one.broadcast} and rank 0 broadcast={every[0].broadcast}"
            raise UsageError(f"{said}; say the same on every rank")
    bits = np.bitwise_or.reduce([np.frombuffer(one.asked, np.uint8) for one in every])
    unexpected = stored.unused(np.flatnonzero(np.unpackbits(bits, count=stored.total)))
    if not any(one.strict for one in every):
        return unexpected
    kinds = [
        _listed(every, "missing", 0),
        _listed(every, "mismatched", 1),
        f"{len(unexpected):,} unexpected: {_names(unexpected)}" if unexpected else "",
    ]
    if any(kinds):
        error = TensorNotFoundError if not any(kinds[1:]) else UsageError
        found = "; ".join(filter(None, kinds))
        raise error(f"nothing was loaded: {found}; give a name_map, or load the rest with strict=False")
    return unexpected


def _listed(every: list[Told], kind: str, number: int) -> str:
    """The first names of a kind, each with the ranks that told it."""
    who: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(every):
        for found in getattr(one, kind).items():
            who.setdefault(found, []).append(rank)
    if not who:
        return ""
    total = max(one.counts[number] for one in every)
    parts = [
        f"{name!r} {why}" + ("" if len(told) == len(every) else f" on rank{_several(told)}")
        for (name, why), told in list(who.items())[:SHOWN]
    ]
    more = " …" if max(total, len(who)) > len(parts) else ""
    return f"{max(total, len(who)):,} {kind}: {', '.join(parts)}{more}"


def _several(ranks: list[int]) -> str:
    return f" {ranks[0]}" if len(ranks) == 1 else f"s {', '.join(map(str, ranks[:4]))}{' …' if len(ranks) > 4 else ''}"


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (" …" if len(names) > SHOWN else "")
