"""All changes of one export together, and two adapters one after the other, against torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.test_export_engine import job_of
from workbench import errors
from workbench.core.dtypes import by_name
from workbench.export.moving.pieces import whole_pieces
from workbench.export.selection import ExportSelection
from workbench.export.values.editing import edit
from workbench.export.values.edits import Edited
from workbench.export.writers.safetensors import shards
from workbench.export.writers.torch import torch_file

NAME = "a.q_proj.weight"


def adapter(folder, seed):
    folder.mkdir()
    torch.manual_seed(seed)
    up, down = torch.randint(-8, 9, (128, 2)).float(), torch.randint(-8, 9, (2, 256)).float()
    save_file(
        {f"base_model.model.a.q_proj.lora_{k}.weight": v for k, v in (("A", down), ("B", up))},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return wb.open(folder), up @ down


def base(folder):
    folder.mkdir()
    torch.manual_seed(0)
    weight = torch.randint(-400, 401, (128, 256)).float().to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0]])
    save_file({NAME: weight, NAME + "_scale_inv": scale, "norm.weight": torch.ones(3)}, folder / "model.safetensors")
    return wb.open(folder), weight.float() * scale.repeat_interleave(128, 1)


def written(edited: Edited, folder, format) -> dict[str, torch.Tensor]:
    """Through the writers, small shards."""
    names = edited.named(edited.ckpt.catalog.keys)
    selection = ExportSelection(edited.ckpt, np.arange(len(edited.ckpt)), names, edited.codes, edited=edited)
    pieces = whole_pieces(selection)
    maps = [torch_file(pieces, "out.pt")] if format == "torch" else shards(pieces, max_shard_size=10_000)
    folder.mkdir()
    job = job_of(edited.ckpt.path, edited.ckpt.catalog, maps)
    job.run([str(folder / one.name) for one in maps])
    if format == "torch":
        return torch.load(folder / "out.pt")
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return found


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_everything_together(tmp_path, format):
    ckpt, values = base(tmp_path / "base")
    (one, first), (two, second) = (adapter(tmp_path / f"adapter{seed}", seed) for seed in (1, 2))
    values = values + first + second
    edited = edit(ckpt, range(3), dtype=by_name("bfloat16"), adapters=[one, two])
    found = written(edited, tmp_path / "values", format)
    assert found.keys() == {NAME, "norm.weight"} and torch.equal(found[NAME], values.bfloat16())
    assert torch.equal(found["norm.weight"], torch.ones(3).bfloat16())
    assert len(edited.notes) == 3
    edited = edit(ckpt, range(3), dtype=by_name("bfloat16"), adapters=[one, two], recipe="fp8-tensor")
    found = written(edited, tmp_path / "codes", format)
    forward = 448 / values.abs().max()
    assert torch.equal(found[NAME + "_scale"], (1 / forward).reshape(1))
    codes = (values * forward).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found[NAME].view(torch.uint8), codes.view(torch.uint8))
    assert found.keys() == {NAME, NAME + "_scale", "norm.weight"}


def test_without_a_type_eight_bits_stay(tmp_path):
    ckpt, _ = base(tmp_path / "base")
    truth = load_file(tmp_path / "base" / "model.safetensors")
    edited = edit(ckpt, range(3))
    assert not edited.changes and not edited.known and not edited.notes
    found = written(edited, tmp_path / "out", "safetensors")
    assert all(torch.equal(found[key].view(torch.uint8), truth[key].view(torch.uint8)) for key in truth)
    with pytest.raises(errors.UnsupportedFormatError, match=r"'a.q_proj.weight' has type float8_e4m3fn; cast it"):
        edit(ckpt, range(3), adapters=[adapter(tmp_path / "adapter", 1)[0]])
    with pytest.raises(errors.UsageError, match="no selected tensor has the name of a linear layer's weight"):
        edit(ckpt, range(3), recipe="fp8")


def test_a_plan_tells_one_change_from_another(tmp_path):
    """What a resumed export compares: other scales, another adapter or another type is another plan."""
    ckpt, _ = base(tmp_path / "base")
    one, two = adapter(tmp_path / "one", 1)[0], adapter(tmp_path / "two", 2)[0]
    bf16, fp16 = by_name("bfloat16"), by_name("float16")
    asked = [
        {"dtype": bf16},
        {"dtype": fp16},
        {"dtype": bf16, "adapters": [one]},
        {"dtype": bf16, "adapters": [two]},
        {"dtype": bf16, "adapters": [one], "recipe": "fp8"},
        {"dtype": bf16, "adapters": [two], "recipe": "fp8"},
        {"dtype": bf16, "recipe": "fp8-tensor"},
    ]

    def identity(options):
        edited = edit(ckpt, range(3), **options)
        names = edited.ckpt.catalog.keys
        pieces = whole_pieces(ExportSelection(edited.ckpt, np.arange(len(names)), names, edited.codes, edited=edited))
        return pieces.change[names.index(NAME)].identity

    found = [identity(options) for options in asked]
    assert len(set(found)) == len(asked) and found == [identity(options) for options in asked]
