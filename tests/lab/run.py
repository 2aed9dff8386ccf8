"""A run up to the step that is resumed from, with the states that faults draw on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from tests.lab.cache import made
from tests.lab.config import Config
from tests.lab.state import State, fresh
from tests.lab.train import train

__all__ = ["EARLIER", "Run", "run"]

EARLIER = 20  #: steps between two regular checkpoints


class Run:
    """States of one configuration; each call gives a copy of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._bare = config.but(unstored=())  # what is stored changes nothing in the run
        self._folder = made(f"run-{self._bare.digest}", self._build)
        self._states: dict[int, State] = {}

    @property
    def resumed(self) -> State:
        """At the step whose checkpoint is resumed from."""
        return self.at(self.config.resume)

    @property
    def previous(self) -> State:
        """One update earlier."""
        return self.at(self.config.resume - 1)

    @property
    def recent(self) -> State:
        """At the checkpoint before."""
        return self.at(self.config.resume - EARLIER)

    @property
    def stale(self) -> State:
        """At a much older checkpoint."""
        return self.at(self.config.stale)

    def fresh(self) -> State:
        """What another process begins with: no step done, other random weights."""
        return fresh(self.config.but(seed=self.config.seed + 1))

    def at(self, step: int) -> State:
        """After that many updates; steps that are not kept are trained from the nearest one that is."""
        if step in self._kept and step not in self._states:
            # the lab's own file, from _build
            self._states[step] = torch.load(self._folder / f"{step}.pt", weights_only=False)
        if step in self._states:
            return replace(self._states[step].clone(), config=self.config)
        start = max((kept for kept in self._kept if kept < step), default=0)
        state = self.at(start) if start else fresh(self.config)
        return train(state, step - start)[0]

    @property
    def _kept(self) -> list[int]:
        resume = self.config.resume
        return sorted({self.config.stale, resume - EARLIER, resume - 1, resume})

    def _build(self, folder: Path) -> None:
        state = fresh(self._bare)
        for step in self._kept:
            state, _, _ = train(state, step - state.trainer.step)
            torch.save(state, folder / f"{step}.pt")


@lru_cache(maxsize=4)
def run(config: Config) -> Run:
    return Run(config)
