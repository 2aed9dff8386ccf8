"""Compare what all ranks request with what is stored, before any tensor is modified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.core.arrays import Ints
from workbench.core.ranks import Ranks
from workbench.core.words import some_of
from workbench.errors import TensorNotFoundError, UsageError
from workbench.load.names import NamedTensors

SHOWN = 8  #: names of each kind in a message


@dataclass(frozen=True)
class RankSummary:
    """The summary that a rank sends to the others; small, whatever the size of the model.

    Attributes:
        title, digest: those of the checkpoint.
        asked: one bit per tensor.
        missing, mismatched: name → reason for the first few, and their number.
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
        stored: NamedTensors,
        requested: Ints,
        missing: Mapping[str, str],
        mismatched: Mapping[str, str],
        *,
        strict: bool,
        broadcast: bool,
    ) -> RankSummary:
        bits = np.zeros(stored.total, bool)
        bits[requested] = True
        few = list(missing.items())[:SHOWN]
        hints = {name: why + stored.near(name) for name, why in few} if strict else dict(few)
        return cls(
            stored.title,
            stored.digest,
            np.packbits(bits).tobytes(),
            hints,
            dict(list(mismatched.items())[:SHOWN]),
            (len(missing), len(mismatched)),
            strict,
            broadcast,
        )


def agree(ranks: Ranks, summary: RankSummary, stored: NamedTensors) -> list[str]:
    """Compare the summaries of all ranks; the outcome is the same on every rank.

    Returns:
        keys that are stored but that no rank requested.

    Raises:
        UsageError: ranks opened different checkpoints.
        TensorNotFoundError, UsageError: a rank is strict, and something is missing, mismatched or unexpected.
    """
    every = ranks.gather(summary)
    for rank, one in enumerate(every):
        if one.digest != every[0].digest:
            raise UsageError(
                f"rank {rank} opened {one.title} and rank 0 {every[0].title}, which is a different save; name the "
                "step, or use a separate process group for the ranks that load each save"
            )
        if one.broadcast != every[0].broadcast:
            difference = f"rank {rank} has broadcast={one.broadcast} and rank 0 broadcast={every[0].broadcast}"
            raise UsageError(f"{difference}; pass the same value on every rank")
    bits = np.bitwise_or.reduce([np.frombuffer(one.asked, np.uint8) for one in every])
    unexpected = stored.unused(np.flatnonzero(np.unpackbits(bits, count=stored.total)))
    if not any(one.strict for one in every):
        return unexpected
    kinds = [
        _listed(every, "missing", 0),
        _listed(every, "mismatched", 1),
        f"{len(unexpected):,} unexpected: {some_of(unexpected, SHOWN)}" if unexpected else "",
    ]
    if any(kinds):
        error = TensorNotFoundError if not any(kinds[1:]) else UsageError
        found = "; ".join(filter(None, kinds))
        raise error(f"nothing was loaded: {found}; pass a name_map, or load the rest with strict=False")
    return unexpected


def _listed(every: list[RankSummary], kind: str, number: int) -> str:
    """Return the first names of a kind, each with the ranks that reported it."""
    who: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(every):
        for found in getattr(one, kind).items():
            who.setdefault(found, []).append(rank)
    if not who:
        return ""
    total = max(one.counts[number] for one in every)
    parts = [
        f"{name!r} {why}" + ("" if len(on_ranks) == len(every) else f" on rank{_ranks_text(on_ranks)}")
        for (name, why), on_ranks in list(who.items())[:SHOWN]
    ]
    more = " …" if max(total, len(who)) > len(parts) else ""
    return f"{max(total, len(who)):,} {kind}: {', '.join(parts)}{more}"


def _ranks_text(ranks: list[int]) -> str:
    return f" {ranks[0]}" if len(ranks) == 1 else f"s {', '.join(map(str, ranks[:4]))}{' …' if len(ranks) > 4 else ''}"
