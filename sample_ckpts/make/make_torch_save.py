"""``torch_save/``: what people write with ``torch.save`` alone.

``ckpt.pt``         zip archive: model, optimizer (integer ids), scheduler, rng, epoch, argparse.Namespace
``ckpt_legacy.pt``  the same state in the pre-1.6 stream (pickles, then each storage's length and bytes)
``odd.pt``          views, shared storages, stored strides, 0-d, empty, fp8, complex, odd names, lists
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from common import TinyLlama, publish, train_step, truth_of, write_truth

VOCAB = 256


def training_state() -> dict:
    torch.manual_seed(0)
    random.seed(0)
    model = TinyLlama(VOCAB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(3):
        train_step(model, optimizer, VOCAB, seed=step)
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=3e-3, name="tiny"),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.RandomState(0).get_state(),
        },
    }


def odd_state() -> dict:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(8, 6, generator=generator)
    return {
        "base": base,
        "row_view": base[2:5],
        "column_view": base[:, 3],
        "every_second": base[::2, 1::2],
        "transposed": base.t(),
        "permuted": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1),
        "expanded": torch.tensor([1.0, 2.0, 3.0]).expand(4, 3),
        "channels_last": torch.randn(1, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.arange(-3, 4, dtype=torch.int8),
        "uint16": torch.tensor([0, 1, 65535], dtype=torch.uint16),
        "uint64": torch.tensor([2**63], dtype=torch.uint64),
        "half": torch.tensor([65504.0, -0.0, 6e-8], dtype=torch.float16),
        "bfloat16": torch.tensor([float("nan"), float("inf"), 1e38], dtype=torch.bfloat16),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "fp8_e4m3": torch.linspace(-448, 448, 17).to(torch.float8_e4m3fn),
        "fp8_e5m2": torch.linspace(-448, 448, 17).to(torch.float8_e5m2),
        "complex": torch.view_as_complex(torch.randn(3, 2, generator=generator)),
        "parameter": torch.nn.Parameter(torch.arange(4.0)),
        "a/b\\c": torch.arange(3),
        "вес.слоя 0": torch.arange(4),
        "tab\tand\x1b[31mescape": torch.arange(5),
        "": torch.arange(2),
        "nested": {"list": [torch.arange(2), (torch.arange(3), "text")], 7: torch.arange(4)},
    }


if __name__ == "__main__":
    with publish("torch_save"):
        folder = Path("torch_save")
        folder.mkdir()
        state, odd = training_state(), odd_state()
        torch.save(state, folder / "ckpt.pt")
        torch.save(state, folder / "ckpt_legacy.pt", _use_new_zipfile_serialization=False)
        torch.save(odd, folder / "odd.pt")
        for name, value in {"ckpt.pt": state, "ckpt_legacy.pt": state, "odd.pt": odd}.items():
            write_truth(f"torch_save/{name}", truth_of(value))
