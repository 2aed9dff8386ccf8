"""Batches by number: any of them can be had again, so that a resumed run goes on where it was, or visibly does not.

A row is a walk over a table of eight likely followers a token, then the same walk once more: the first half teaches
embeddings and MLPs, the second can only be told by attention.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from tests.lab.config import Config

__all__ = ["batch"]

FOLLOWERS = 8


def batch(config: Config, index: int, seed: int) -> torch.Tensor:
    """Tokens ``(batch, length + 1)`` of batch number ``index`` in the order that ``seed`` stands for."""
    rng = np.random.default_rng([seed, index])
    half = config.length // 2 + 1
    table, chance = _language(config.vocab)
    picks = rng.choice(FOLLOWERS, size=(half, config.batch), p=chance)
    walk = np.empty((config.batch, half), np.int64)
    token = rng.integers(config.vocab, size=config.batch)
    for place in range(half):
        walk[:, place] = token
        token = table[token, picks[place]]
    return torch.from_numpy(np.concatenate([walk, walk], 1)[:, : config.length + 1])


@cache
def _language(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.random.default_rng(7).integers(vocab, size=(vocab, FOLLOWERS))
    weight = 1 / np.arange(1, FOLLOWERS + 1)
    return table, weight / weight.sum()
