"""Healthy resumes, plain and unusual: nothing may be called an error here."""

from __future__ import annotations

import random

from tests.lab.config import Config, random_config
from tests.lab.fault import Fault, Lab, masters
from tests.lab.state import State

__all__ = ["HEALTHY", "random_pair"]

NONE: frozenset[str] = frozenset()


def exact(state: State, lab: Lab) -> State:
    return state


def other_order(state: State, lab: Lab) -> State:
    return state.told(data_seed=99)


def lower_lr(state: State, lab: Lab) -> State:
    return state.declared(lr=state.config.lr / 10, min_lr=state.config.min_lr / 10)


def higher_lr(state: State, lab: Lab) -> State:
    return state.declared(lr=state.config.lr * 2)


def skip_batches(state: State, lab: Lab) -> State:
    told = state.trainer
    skipped = 200
    return state.told(
        data_index=told.data_index + skipped,
        loader=told.loader + skipped,
        samples=told.samples + skipped * state.config.batch,
    )


def longer(state: State, lab: Lab) -> State:
    return state.declared(total=state.config.total * 2)


def larger_batch(state: State, lab: Lab) -> State:
    return state.declared(batch=state.config.batch * 2)


def other_decay(state: State, lab: Lab) -> State:
    return state.declared(weight_decay=state.config.weight_decay / 2)


def other_clip(state: State, lab: Lab) -> State:
    return state.declared(clip=state.config.clip / 2 or 1.0)


def _warming(config: Config) -> Config:
    return config.but(warmup=config.resume + 60, total=2 * config.total)


def _bare(config: Config) -> Config:
    return config.but(precision="bf16")


def _dense_fp32(config: Config) -> Config:
    return config.but(precision="fp32", clip=0.0)


HEALTHY = [
    Fault("h0_exact", "healthy", "resumed bit by bit", NONE, exact, kind="healthy"),
    Fault("h1_data_order", "healthy", "another order of the data", NONE, other_order, kind="healthy"),
    Fault("h2_reshard", "healthy", "goes on in another layout", NONE, exact, elsewhere=True, kind="healthy"),
    Fault("h3_reduction_order", "healthy", "gradients summed in another order", NONE, exact, micro=2, kind="healthy"),
    Fault("h4_lower_lr", "healthy", "the operator divides the learning rate by ten", NONE, lower_lr, kind="deliberate",
          also=("H1",)),
    Fault("h5_skip_data", "healthy", "the operator skips 200 batches", NONE, skip_batches, kind="deliberate",
          also=("H1", "C6", "C7")),
    Fault("h6_higher_lr", "healthy", "the operator doubles the peak learning rate", NONE, higher_lr, kind="deliberate",
          also=("H1",)),
    Fault("h7_longer", "healthy", "the operator doubles the steps: another cosine", NONE, longer, kind="deliberate",
          also=("H1", "C4")),
    Fault("h8_larger_batch", "healthy", "the operator doubles the batch", NONE, larger_batch, kind="deliberate",
          also=("H1", "C10")),
    Fault("h9_other_decay", "healthy", "the operator halves the weight decay", NONE, other_decay, kind="deliberate",
          also=("H1", "B7", "C5")),
    Fault("h10_other_clip", "healthy", "the operator halves the clipping norm, or clips", NONE, other_clip,
          kind="deliberate",
          also=("H1",)),
    Fault("h11_warmup", "healthy", "resumed during warm-up", NONE, exact, needs=_warming, kind="healthy"),
    Fault("h12_pure_bf16", "healthy", "bf16 weights and moments without masters", NONE, exact, needs=_bare,
          formats=("torch_save", "dcp", "dcp_sharded"), kind="healthy", also=("D5", "D6")),
    Fault("h13_fp32_unclipped", "healthy", "fp32 without clipping", NONE, exact, needs=_dense_fp32, kind="healthy"),
    Fault("h14_small_parts", "healthy", "mixed precision, the batch in four parts", NONE, exact, micro=4,
          needs=masters, kind="healthy"),
]  # fmt: skip


def random_pair(seed: int) -> tuple[Fault, Config, int]:
    """A control, a run and a number of steps (1 to 500) that nobody chose."""
    rng = random.Random(f"pair {seed}")
    return rng.choice(HEALTHY), random_config(rng.randrange(1 << 30)), rng.choice([1, 2, 5, 20, 50, 100, 200, 500])
