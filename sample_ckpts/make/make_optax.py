"""Write ``tests/fixtures/optax.zip``: two steps of optax's Adam, saved by Orbax, whose ``nu`` was lost by a resume
after the first; and the same state saved by torch. Needs jax, optax and orbax-checkpoint.

    python sample_ckpts/make/make_optax.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch

FIXTURE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "optax"
SHAPES = {"wi": (24, 16), "wo": (16, 8), "norm": (16,)}
LEFT_OUT = ("array_metadatas", "commit_success.txt", "_sharding")  #: names of the machine, and of its devices


def save(out: Path, name: str, params: dict, state: tuple, step: int) -> None:
    with tempfile.TemporaryDirectory() as scratch, ocp.StandardCheckpointer() as saver:
        saver.save(Path(scratch) / name, {"params": params, "opt_state": state, "step": step})
        saver.wait_until_finished()
        shutil.copytree(Path(scratch) / name, out / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    adam, keys = state[0], list(SHAPES)
    tensor = lambda value: torch.from_numpy(np.array(value))  # noqa: E731
    slots = {
        i: {"step": torch.tensor(float(adam.count)), "exp_avg": tensor(adam.mu[k]), "exp_avg_sq": tensor(adam.nu[k])}
        for i, k in enumerate(keys)
    }
    optimizer = {"state": slots, "param_groups": [{"params": list(slots), "param_names": keys}]}
    model = {k: tensor(params[k]) for k in keys}
    torch.save({"model": model, "optimizer": optimizer, "step": step}, out / f"{name}.pt")


def run(out: Path) -> None:
    draw = np.random.default_rng(0)
    params = {key: jnp.asarray(draw.standard_normal(shape), jnp.float32) for key, shape in SHAPES.items()}
    rule = optax.adam(1e-3)
    state = rule.init(params)

    def update(params: dict, state: tuple) -> tuple[dict, tuple]:
        gradients = {k: one + jnp.asarray(draw.standard_normal(one.shape), jnp.float32) for k, one in params.items()}
        change, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, change), state

    params, state = update(params, state)
    save(out, "step-1", params, state, 1)
    lost = (state[0]._replace(nu=jax.tree.map(jnp.zeros_like, state[0].nu)), *state[1:])
    save(out, "echo-1", params, lost, 1)
    params, state = update(params, lost)
    save(out, "step-2", params, state, 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run(Path(made))
        shutil.make_archive(str(FIXTURE), "zip", made)
