"""File names of a DeepSpeed checkpoint folder, and the rank that each belongs to.

::

    global_step4/
      mp_rank_00_model_states.pt                          stages 0 to 2: one per model-parallel rank
      zero_pp_rank_1_mp_rank_00_model_states.pt           stage 3: one per rank; "pp_rank" is the DATA-parallel rank
      bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt      stages 1 to 3; bf16_, fp16_ or no prefix
      layer_03-model_01-model_states.pt                   pipelines: one per layer (and tensor-parallel rank)
      layer_0_expert_5_mp_rank_00_model_states.pt         mixture of experts: one per expert, global number
      expp_rank_0_mp_rank_00_optim_states.pt              its optimizer, without ZeRO
    zero/h.0.fc1.weight/{fp32,exp_avg,exp_avg_sq,step}.pt  universal (universal.py)

With pipelines, ``mp_rank`` counts stages × tensor-parallel ranks, the latter fastest. Read from deepspeed 0.19.8
(``runtime/engine.py``, ``runtime/pipe/module.py``, ``checkpoint/deepspeed_checkpoint.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import CorruptError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,9})(?:-model_(\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d{1,9})_)?expert_(\d{1,9})_mp_rank_(\d{1,9})_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
_LOCAL_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)", re.S)


@dataclass(frozen=True)
class Folder:
    """The files of one checkpoint, by rank.

    Attributes:
        models: model_states by ``(mp, dp)``; dp is ``None`` for stages 0 to 2.
        optims: optim_states of ZeRO by ``(mp, dp)``.
        layers: ``(layer, tp or None)`` to file.
        experts: ``(moe layer, expert, mp)`` to file; layer -1 in old checkpoints.
        expert_optims: ``(ep, mp)`` to file.
    """

    models: dict[tuple[int, int | None], str] = field(default_factory=dict)
    optims: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, int | None], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optims: dict[tuple[int, int], str] = field(default_factory=dict)

    def mp_ranks(self) -> list[int]:
        """Return the model-parallel ranks in the names of files."""
        return sorted({mp for mp, _ in self.models} | {mp for mp, _ in self.optims})

    def model_files(self, mp: int, stage3: bool) -> list[tuple[int | None, str]]:
        """Return ``(dp, file)`` of one model-parallel rank; if both kinds exist, those that the stage writes."""
        found = [(dp, file) for (m, dp), file in self.models.items() if m == mp]
        kind = [item for item in found if (item[0] is not None) == stage3]
        return sorted(kind or found, key=lambda item: -1 if item[0] is None else item[0])


def is_deepspeed(names: Iterable[str]) -> bool:
    """Return whether any of a folder's names is specific to DeepSpeed."""
    patterns = (_MODEL, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM)
    return any(name.endswith("_states.pt") and any(p.fullmatch(name) for p in patterns) for name in names)


def sort_files(names: Iterable[str]) -> Folder:
    """Sort the files of a folder by rank.

    Raises:
        CorruptError: two files belong to the same rank, for example with prefixes of different precisions.
    """
    folder = Folder()
    for name in names:
        if match := _EXPERT.fullmatch(name):
            _put(folder.experts, (int(match[1] or -1), int(match[2]), int(match[3])), name)
        elif match := _MODEL.fullmatch(name):
            _put(folder.models, (int(match[2]), None if match[1] is None else int(match[1])), name)
        elif match := _OPTIM.fullmatch(name):
            _put(folder.optims, (int(match[2]), int(match[1])), name)
        elif match := _LAYER.fullmatch(name):
            _put(folder.layers, (int(match[1]), None if match[2] is None else int(match[2])), name)
        elif match := _EXPERT_OPTIM.fullmatch(name):
            _put(folder.expert_optims, (int(match[1]), int(match[2])), name)
    return folder


def ranks_of_expert_group(dp: int, count: int, group: int, data_first: bool) -> list[int]:
    """Return the data-parallel ranks that hold the same experts, in the order of their partitions.

    ``dp`` ranks form ``dp // count`` groups; the ``count`` ranks of a group share experts. DeepSpeed assigns ranks to
    groups in turn, or in blocks with ``use_data_before_expert_parallelism`` (``utils/groups.py``).
    """
    groups = dp // count
    return list(range(group * count, (group + 1) * count)) if data_first else list(range(group, dp, groups))


def global_expert(name: str, group: int, local: dict[str, int]) -> str | None:
    """Return a parameter's name with its expert's global number; ``local`` counts experts per rank by name prefix.

    ``None`` for a name without a number. Files of experts have global numbers, ``param_shapes`` local ones.
    """
    match = _LOCAL_EXPERT.fullmatch(name)
    return None if match is None else f"{match[1]}{group * local[match[1]] + int(match[2])}{match[3]}"


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of experts per rank, by the prefix of their parameters' names."""
    found: dict[str, int] = {}
    for name in names:
        if match := _LOCAL_EXPERT.fullmatch(name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _put(table: dict[Any, str], rank: object, name: str) -> None:
    if rank in table:
        raise CorruptError(
            f"{table[rank]!r} and {name!r} belong to the same rank, so the folder holds two saves; "
            "move the files of the older one away"
        )
    table[rank] = name
