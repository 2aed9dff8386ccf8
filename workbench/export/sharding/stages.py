"""Pipeline stages: which stages hold a parameter.

::

    stage 0   embedding   layers 0 1 2       10 layers on 4 stages: 3 3 2 2, or as given
    stage 1               layers 3 4 5
    stage 2               layers 6 7
    stage 3               layers 8 9         final norm, output layer
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate

import numpy as np

from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.export.sharding import kinds
from workbench.names.weights import parse


class Stages:
    """The stages of one model."""

    def __init__(
        self, fqns: Collection[str], count: int, layers: tuple[int, ...] | None, note: Callable[[str, str], None]
    ) -> None:
        """Number the layers.

        Args:
            fqns: all parameters.
            count: number of stages.
            layers: number of layers of each stage; even by default, the first stages with one more.
            note: called with a doubt and the parameter that it concerns.

        Raises:
            UsageError: ``layers`` do not match the model, or no parameter is in a numbered layer.
        """
        self.last, self.note = count - 1, note
        found: dict[str, int] = {}
        for fqn in fqns:
            if (weight := parse(fqn)).layer is not None:
                found[weight.stack] = max(found.get(weight.stack, 0), weight.layer)
        if not found:
            raise UsageError(f"no parameter name contains a layer number; pp={count} needs a Rule for 'pp'")
        self.stack = max(found, key=lambda stack: found[stack])  # beside it: encoders, multi-token prediction
        total = found[self.stack] + 1
        sizes = layers or tuple(total // count + (stage < total % count) for stage in range(count))
        if len(sizes) != count or sum(sizes) != total or min(sizes) < 0:
            raise UsageError(
                f"layers={sizes} do not divide the {plural(total, 'layer')} of {self.stack!r} into "
                f"{plural(count, 'stage')}"
            )
        if layers is None and total < count:
            empty = f"stage {self.last} has" if total == self.last else f"stages {total} to {self.last} have"
            note(f"{plural(total, 'layer')} on pp={count}: {empty} no layers", self.stack)
        self.ends = np.array(list(accumulate(sizes)))
        outputs = [fqn for fqn in fqns if _is_vocab(fqn) and kinds.end_of(fqn) == "last"]
        self.tied = not outputs

    def of(self, fqn: str) -> tuple[int, ...] | None:
        """Return the stages that hold a parameter, ``None`` for all."""
        weight = parse(fqn)
        if weight.layer is not None:
            if weight.stack == self.stack:
                return (int(np.searchsorted(self.ends, weight.layer, side="right")),)
            stage = self.last if "mtp" in weight.stack else 0
            self.note(f"in layers outside {self.stack!r}; placed on stage {stage}", fqn)
            return (stage,)
        end = kinds.end_of(fqn)
        if end is None:
            self.note("in no layer and at neither end of the model; placed on every stage", fqn)
            return None
        if end == "first" and self.tied and _is_vocab(fqn):
            self.note("no output layer is stored; the embedding is placed on the first and the last stage", fqn)
            return (0, self.last)
        return (0,) if end == "first" else (self.last,)


def _is_vocab(fqn: str) -> bool:
    return parse(fqn).kind in ("embed", "head")
