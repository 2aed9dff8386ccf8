"""One resume as three checkpoints on disk, with what is true about it.

::

    before   the checkpoint that was resumed from, undamaged
    echo     saved again right after the load, before any update; of damaged files: they themselves
    after    k updates later, made when first asked for: most cases are judged by their echo
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch

from tests.lab.cache import made
from tests.lab.catalogue import EVERY
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab
from tests.lab.formats import LAYOUTS
from tests.lab.run import run
from tests.lab.split import merged
from tests.lab.state import STATES, State
from tests.lab.train import train

__all__ = ["Case", "Facts", "case", "checked", "differs", "opened", "restored", "write_echo"]

LOADED = "loaded.pt"  #: beside an echo: the state that a run goes on from, if the files can be loaded
ELSEWHERE = {
    "torch_save": "dcp",
    "dcp": "dcp_sharded",
    "dcp_sharded": "torch_save",
    "megatron": "deepspeed",
    "deepspeed": "megatron",
}


@dataclass(frozen=True)
class Facts:
    """What is true of a resume, whatever the files say.

    Attributes:
        step: of ``before``; k: updates to ``after``.
        rates, losses: of the updates between ``echo`` and ``after``, in order.
        betas, weight_decay: that they were made with.
    """

    step: int
    k: int
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    betas: tuple[float, float]
    weight_decay: float


@dataclass(frozen=True)
class Case:
    """Paths to open, and the answer.

    Attributes:
        config: of the run, with what the fault needs.
        after_format: layout in which the resumed run saves.
        k: updates between ``echo`` and ``after``.
    """

    fault: Fault
    config: Config
    format: str
    after_format: str
    k: int
    seed: int
    before: Path

    @cached_property
    def _echo(self) -> Path:
        """Folder of the echo, and the state that the run goes on from."""
        return made(f"echo-{self._name(self.seed)}", self._write_echo)

    @cached_property
    def _after(self) -> Path:
        """Folder of what follows, and what is true of it."""
        return made(f"after-{self._name(self.after_format, self.k, self.seed)}", self._write_after)

    @property
    def echo(self) -> Path:
        return opened(self._echo / "echo")

    @property
    def after(self) -> Path | None:
        """``None`` where the damaged files cannot be loaded at all."""
        return opened(self._after / "after") if (self._echo / LOADED).exists() else None

    @property
    def facts(self) -> Facts:
        facts = json.loads((self._after / "facts.json").read_text())
        for key in ("rates", "losses", "betas"):
            facts[key] = tuple(facts[key])
        return Facts(**facts)

    @property
    def cause(self) -> str:
        """Id of the catalogue's cause, or ``healthy``; `Fault.also` has others that are as right."""
        return self.fault.cause

    @property
    def expected(self) -> frozenset[str]:
        """Kinds of evidence that can show it: keys of `fault.EVIDENCE`."""
        return self.fault.expected(self.config, self.format)

    def _name(self, *more: object) -> str:
        return "-".join(map(str, (self.config.digest, self.format, self.fault.id, *more)))

    def _write_echo(self, folder: Path) -> None:
        found, config = self.fault, self.config
        loaded = write_echo(folder / "echo", found, config, self.format, self.seed)
        if loaded is None:
            return
        same = found.saver is None and found.formats != ("megatron",) and not differs(loaded, run(config).resumed)
        assert found.kind != "fault" or not same, f"{found.id} changes nothing in a run like {config}"
        torch.save(loaded, folder / LOADED)

    def _write_after(self, folder: Path) -> None:
        found, config, loaded = self.fault, self.config, self._echo / LOADED
        facts = Facts(config.resume, self.k, (), (), config.betas, config.weight_decay)
        if loaded.exists():
            state = torch.load(loaded, weights_only=False)  # the lab's own file
            after, losses, rates = train(state, self.k, micro=found.micro)
            if found.saver is not None:
                after = found.saver(state, after)
            LAYOUTS[self.after_format].save(folder / "after", after, None)
            betas, decay = after.config.betas, after.config.weight_decay
            facts = Facts(config.resume, self.k, tuple(rates), tuple(losses), betas, decay)
        (folder / "facts.json").write_text(json.dumps(asdict(facts)))


def case(
    fault: str,
    config: Config | None = None,
    format: str = "dcp",
    *,
    k: int = 20,
    after_format: str | None = None,
    seed: int = 0,
) -> Case:
    """A resume with that fault or control; its files are made on first use.

    Args:
        fault: an id of the catalogue.
        format: a layout of `LAYOUTS`; ``after_format``: the one in which the resumed run saves, if another.
        k: updates between the load and ``after``.
        seed: of what the fault picks, such as the element whose bit flips.

    Raises:
        ValueError: the fault cannot happen in that layout, or the run is never stored in it.
    """
    found, config = checked(fault, config, format)
    if after_format is not None and (reason := LAYOUTS[after_format].refuses(config)):
        raise ValueError(f"{fault} in {after_format}: {reason}")
    if found.elsewhere and after_format is None:
        after_format = _elsewhere(format, config)
    shared = made(f"before-{config.digest}-{format}", lambda to: _write_before(to, config, format))
    return Case(found, config, format, after_format or format, k, seed, opened(shared / "before"))


def checked(fault: str, config: Config | None, format: str) -> tuple[Fault, Config]:
    """The fault, and the run with what it needs; raises as `case` does."""
    found = EVERY[fault]
    config = found.needs(config or Config())
    reason = LAYOUTS[format].refuses(config)
    if found.formats is not None and format not in found.formats:
        reason = f"the fault is one of {', '.join(found.formats)}"
    if reason:
        raise ValueError(f"{fault} in {format}: {reason}")
    return found, config


def restored(found: Fault, config: Config, format: str, seed: int = 0) -> tuple[State, State | None]:
    """The state that a load brings back, and what rank 1 wrote where that is another; bytes not yet damaged."""
    lab, layout = _lab(found, config, seed), LAYOUTS[format]
    state = lab.run.resumed
    if found.restore is not None:
        return found.restore(state, lab), None
    if found.second is None:
        return state, None
    second = found.second(state, lab)
    if layout.ranks == 1 or (layout.shared_weights and found.weights):
        return merged(state, second), None
    return state, second


def write_echo(folder: Path, found: Fault, config: Config, format: str, seed: int) -> State | None:
    """Save what a load brings back; returns the state that the run goes on from, if the files can be loaded."""
    state, second = restored(found, config, format, seed)
    path = LAYOUTS[format].save(folder, state, second)
    if found.damage is not None:
        return found.damage(path, state, _lab(found, config, seed))
    return state if second is None else LAYOUTS[format].merged(state, second)


def _lab(found: Fault, config: Config, seed: int) -> Lab:
    return Lab(run(config), random.Random(f"{found.id} {config.digest} {seed}"))


def _elsewhere(format: str, config: Config) -> str:
    other = ELSEWHERE.get(format, "torch_save")
    return other if LAYOUTS[other].refuses(config) is None else "torch_save" if format != "torch_save" else "dcp"


def _write_before(folder: Path, config: Config, format: str) -> None:
    LAYOUTS[format].save(folder / "before", run(config).resumed, None)


def differs(state: State, other: State) -> bool:
    """Whether anything that the lab holds is another one."""
    if (state.config, state.trainer, state.step) != (other.config, other.trainer, other.step):
        return True
    for where in (*STATES.values(), "buffers"):
        mine, theirs = getattr(state, where), getattr(other, where)
        if mine.keys() != theirs.keys() or any(not torch.equal(mine[name], theirs[name]) for name in mine):
            return True
    return False


def opened(folder: Path) -> Path:
    """The path to open in a folder that a saver filled: its one file or step, or itself."""
    inner = list(folder.iterdir())
    return inner[0] if len(inner) == 1 else folder
