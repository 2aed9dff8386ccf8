"""Public reports of resumes that went wrong, as cases: how each one's files looked."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch

from tests.lab.changes import told, with_
from tests.lab.config import Config
from tests.lab.fault import Fault, Lab, seen
from tests.lab.loader_faults import drop_optimizer, every
from tests.lab.state import State

__all__ = ["REPORTS"]

WORLD = 4


def uneven_shard(state: State, lab: Lab) -> State:
    """The last rank's rows of the vocabulary read where they would lie if all ranks had as many."""
    rows = state.config.padded
    first = (WORLD - 1) * -(-rows // WORLD)  # torch cuts by the larger size
    wrong = (WORLD - 1) * (rows // WORLD)  # and the reader by the smaller
    for found in every(state):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in found:
                table = found[name]
                found[name] = torch.cat([table[:first], table[wrong : wrong + rows - first]])
    return state


def first_bytes(resumed: State, later: State) -> State:
    """The first save's tensors and counters of the optimizer, under the new step."""
    return replace(resumed.clone(), trainer=later.trainer)


def _uneven(config: Config) -> Config:
    return config.but(padded=config.vocab // WORLD * WORLD + 2, vocab=config.vocab // WORLD * WORLD + 2)


def _mixtral(folder: Path, rng: random.Random, k: int) -> None:
    from tests.lab.hugging import mixtral_resumed

    mixtral_resumed(folder, rng, k)


REPORTS = [
    Fault("report_torchtitan_pr275", "C1", "the schedule is not checkpointed: the lr restarts",
          seen("echo next early"), told(lambda s: {"scheduler": 0}), also=("C2",),
          needs=with_(unstored=("scheduler", "args")), formats=("dcp", "dcp_sharded"),
          why="without a stored curve, a lost schedule looks the same"),
    Fault("report_torchtitan_pr4598", "B8", "the schedule is right, the groups' lr is that of the start",
          seen("alone echo next early"), told(lambda s: {"held_lr": s.config.lr}), also=("C2",),
          formats=("dcp", "dcp_sharded", "torch_save", "folder"), why="the lr in use is back at its peak"),
    Fault("report_torchtitan_1136", "E8", "the vocabulary does not divide by four ranks: the last shard read wrongly",
          seen("echo next early"), uneven_shard, also=("E7",), needs=_uneven, formats=("dcp", "torch_save", "folder"),
          why="an offset that is off by the missing rows"),
    Fault("report_onevision_pr65", "B1", "the optimizer is never saved: every resume begins with a new one",
          seen("alone echo next early"), drop_optimizer, needs=with_(unstored=("optimizer",)),
          formats=("torch_save", "dcp", "folder", "lightning", "accelerate")),
    Fault("report_nemo_rl_3312", "G7", "every save after the first writes the first one's bytes",
          seen("next early"), lambda state, lab: state, saver=first_bytes, formats=("torch_save", "folder", "dcp")),
    Fault("u34_transformers_mixtral", "A2", "transformers 5.23 resumes Mixtral with experts and routers as initialised",
          seen("echo next early"), live=_mixtral, also=("A1",), formats=("live",),
          why="the names of all experts differ between file and model"),
]  # fmt: skip
