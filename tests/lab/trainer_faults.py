"""Faults of schedules, param groups and data: every tensor is right, and the run goes on differently."""

from __future__ import annotations

from tests.lab.fault import Fault, Lab, seen
from tests.lab.state import State

__all__ = ["TRAINER_FAULTS"]


def rewarm(state: State, lab: Lab) -> State:
    return state.told(scheduler=0)


def constant_peak(state: State, lab: Lab) -> State:
    peak = 5 * state.config.lr
    return state.declared(lr=peak, min_lr=peak, warmup=0)


def double_steps(state: State, lab: Lab) -> State:
    return state.told(scheduler=2 * state.trainer.scheduler)


def exchange_groups(state: State, lab: Lab) -> State:
    return state.told(swapped=True)


def other_beta2(state: State, lab: Lab) -> State:
    first, second = state.config.betas
    return state.declared(betas=(first, 0.999 if second < 0.99 else 0.95))


def replay_data(state: State, lab: Lab) -> State:
    return state.told(data_index=0, loader=0, samples=0)


TRAINER_FAULTS = [
    Fault(
        "f23_lr_rewarm", "C1", "the schedule starts again: warm-up repeated", seen("alone echo next early late"), rewarm
    ),
    Fault(
        "f24_lr_peak",
        "C2",
        "the schedule is lost: constant at five times the peak",
        seen("alone next early"),
        constant_peak,
        also=("H1",),
        why="arguments of the new launch say the other lr",
    ),
    Fault(
        "f25_lr_double_step",
        "C3",
        "the schedule is at twice the step",
        seen("alone echo next early late"),
        double_steps,
    ),
    Fault(
        "f26_wd_groups",
        "B7",
        "param groups exchanged: norms decay, matrices do not",
        seen("next early"),
        exchange_groups,
    ),
    Fault("f27_beta2", "H1", "another beta2, from a new default", seen("next early"), other_beta2),
    Fault(
        "f28_data_replay",
        "C6",
        "the data loader starts again at batch 0",
        seen("alone echo late"),
        replay_data,
        formats=("torch_save", "dcp", "dcp_sharded", "deepspeed", "megatron"),
    ),
]
