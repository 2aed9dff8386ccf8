"""``wb.plan_memory``: every figure against the same tensors cut element by element."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import workbench as wb
from workbench.cli import main
from workbench.errors import UsageError
from workbench.memory import plan
from workbench.memory.precision import itemsize

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"
SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A small Llama of odd sizes: nothing divides."""
    hidden, inner, vocab, layers = 30, 46, 51, 3
    weights = {"model.embed_tokens.weight": torch.empty(vocab, hidden), "lm_head.weight": torch.empty(vocab, hidden)}
    for n in range(layers):
        at = f"model.layers.{n}"
        for name, shape in {
            "self_attn.q_proj": (30, hidden),
            "self_attn.k_proj": (10, hidden),
            "self_attn.v_proj": (10, hidden),
            "self_attn.o_proj": (hidden, 30),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            weights[f"{at}.{name}.weight"] = torch.empty(shape)
        weights[f"{at}.input_layernorm.weight"] = torch.empty(hidden)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.empty(hidden)
    weights["model.norm.weight"] = torch.empty(hidden)
    weights = {name: tensor.zero_().bfloat16() for name, tensor in weights.items()}
    folder = tmp_path_factory.mktemp("llama")
    save_file(weights, folder / "model.safetensors")
    return folder, weights


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two layers of four experts each, beside attention."""
    weights = {"model.embed_tokens.weight": torch.zeros(21, 12), "lm_head.weight": torch.zeros(21, 12)}
    for n, expert in itertools.product(range(2), range(4)):
        weights[f"model.layers.{n}.mlp.experts.{expert}.up_proj.weight"] = torch.zeros(10, 12)
        weights[f"model.layers.{n}.mlp.experts.{expert}.down_proj.weight"] = torch.zeros(12, 10)
    for n in range(2):
        weights[f"model.layers.{n}.self_attn.q_proj.weight"] = torch.zeros(12, 12)
        weights[f"model.layers.{n}.self_attn.o_proj.weight"] = torch.zeros(12, 12)
        weights[f"model.layers.{n}.input_layernorm.weight"] = torch.zeros(12)
    folder = tmp_path_factory.mktemp("moe")
    save_file(weights, folder / "model.safetensors")
    return folder, weights


# ---- the same, by cutting real tensors ------------------------------------------------------------------------------


def piece(tensor: torch.Tensor, dim: int, count: int, at: int) -> torch.Tensor:
    """Piece ``at`` of ``torch.chunk``, empty where it gives fewer."""
    parts = tensor.chunk(count, dim)
    return parts[at] if at < len(parts) else tensor.narrow(dim, 0, 0)


def stage_of(name: str, pp: int, layers: int) -> int:
    """Layers in order, the first stages with one more; embedding first, norm and output last."""
    if ".layers." not in name:
        return 0 if "embed" in name else pp - 1
    sizes = [layers // pp + (s < layers % pp) for s in range(pp)]
    number = int(name.split(".layers.")[1].split(".")[0])
    return next(s for s in range(pp) if number < sum(sizes[: s + 1]))


def brute(
    weights: dict[str, torch.Tensor],
    tp: int,
    pp: int,
    dp: int,
    ep: int,
    stage: int,
    layers: int,
    widths: dict[str, int],
) -> dict[tuple[int, int, int], dict[str, int]]:
    """Bytes by (pp, dp, tp) coordinate, of tensors that are really cut."""
    found = {}
    for p, d, t in itertools.product(range(pp), range(dp), range(tp)):
        held = dict.fromkeys(("weights", "grads", "master", "moments"), 0)
        for name, tensor in weights.items():
            if stage_of(name, pp, layers) != p:
                continue
            ranks, at = dp, d
            if ".experts." in name:
                expert = int(name.split(".experts.")[1].split(".")[0])
                if expert // -(-4 // ep) != d % ep:
                    continue
                ranks, at = dp // ep, d // ep
            if any(part in name for part in ("o_proj", "down_proj")):
                mine = piece(tensor, 1, tp, t)
            elif "norm" in name:
                mine = tensor
            else:
                mine = piece(tensor, 0, tp, t)
            shard = piece(mine, 0, ranks, at)
            for part, least in (("weights", 3), ("grads", 2), ("master", 1), ("moments", 1)):
                kept = shard if stage >= least else mine
                held[part] += kept.numel() * widths.get(part, 0)
        found[p, d, t] = held
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 3), (4, 2, 2), (1, 3, 4), (3, 2, 5)])
def test_figures_are_those_of_tensors_that_are_cut(llama: Any, tp: int, pp: int, dp: int, stage: int) -> None:
    folder, weights = llama
    found = wb.plan_memory(wb.open(folder), tp * pp * dp, 1, tp=tp, pp=pp, dp=dp, stage=stage)
    want = brute(weights, tp, pp, dp, 1, stage, 3, {"weights": 2, "grads": 2, "master": 4, "moments": 8})
    assert len(found.ranks) == len(want) and len(found.choices) == 1
    for row in found.ranks.to_dict("records"):
        held = want[row["pp"], row["dp"], row["tp"]]
        assert {part: row[part] for part in held} == held, row
        assert row["nbytes"] == sum(held.values())
    assert found.chosen.largest == max(sum(held.values()) for held in want.values())
    assert found.parameters == sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("tp", "pp", "dp", "ep"), [(1, 1, 4, 2), (2, 2, 4, 4), (1, 2, 4, 1), (2, 1, 6, 2)])
def test_experts_are_spread_over_a_part_of_dp(moe: Any, tp: int, pp: int, dp: int, ep: int, stage: int) -> None:
    folder, weights = moe
    found = wb.plan_memory(wb.open(folder), tp * pp * dp, 1, tp=tp, pp=pp, dp=dp, ep=ep, stage=stage)
    want = brute(weights, tp, pp, dp, ep, stage, 2, {"weights": 4, "grads": 4, "moments": 8})
    for row in found.ranks.to_dict("records"):
        held = want[row["pp"], row["dp"], row["tp"]]
        assert {part: row[part] for part in held} == held, row
        assert row["ep"] == row["dp"] % ep


def test_ranks_are_numbered_as_megatron_numbers_them(moe: Any) -> None:
    found = wb.plan_memory(wb.open(moe[0]), 16, 1, tp=2, pp=2, dp=4, ep=2, stage=0).ranks
    assert found["rank"].tolist() == (found["pp"] * 8 + found["dp"] * 2 + found["tp"]).tolist() == list(range(16))


# ---- precision -------------------------------------------------------------------------------------------------------


def test_precision_of_each_part(llama: Any) -> None:
    folder, weights = llama
    numel = sum(tensor.numel() for tensor in weights.values())
    precision = wb.Precision("bf16", "fp32", "fp32", "bf16")
    chosen = wb.plan_memory(wb.open(folder), 1, 1, precision=precision).chosen
    assert chosen.parts == (2 * numel, 4 * numel, 4 * numel, 4 * numel)
    chosen = wb.plan_memory(wb.open(folder), 1, 1, precision=wb.Precision.inference()).chosen
    assert chosen.parts == (2 * numel, 0, 0, 0)
    chosen = wb.plan_memory(wb.open(folder), 1, 1, precision=wb.Precision("fp32")).chosen
    assert chosen.parts == (4 * numel, 4 * numel, 0, 8 * numel)  # no masters beside fp32 weights
    with pytest.raises(UsageError, match="'fp7' is not a precision"):
        wb.Precision("fp7")
    assert itemsize("fp8") == 1


def test_fp8_weights_have_scales_and_the_others_stay_wide(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (300, 200),
        "model.layers.0.self_attn.q_proj.weight": (300, 200),
        "model.layers.0.mlp.down_proj.weight": (200, 150),
        "model.norm.weight": (200,),
        "lm_head.weight": (300, 200),
    }
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, tmp_path / "m.safetensors"
    )
    linear = ("q_proj", "down_proj")
    for dp, stage in ((1, 0), (3, 3)):
        precision = wb.Precision("fp8", "none", "none", "none")
        found = wb.plan_memory(wb.open(tmp_path), dp, 1, tp=1, pp=1, dp=dp, stage=stage, precision=precision).ranks
        for rank, held in enumerate(found["weights"].tolist()):
            want = 0
            for name, shape in shapes.items():
                mine = piece(torch.empty(shape), 0, dp, rank)
                if any(part in name for part in linear):
                    want += mine.numel() + 4 * -(-mine.shape[0] // 128) * -(-mine.shape[1] // 128)
                else:
                    want += 2 * mine.numel()
            assert held == want


# ---- the search ------------------------------------------------------------------------------------------------------


def test_the_smallest_layout_that_fits_is_chosen(llama: Any) -> None:
    folder, weights = llama
    ckpt = wb.open(folder)
    whole = wb.plan_memory(ckpt, 1, 1).chosen.largest
    for share in (1.01, 0.99, 0.6, 0.3, 0.15):
        room = whole * share
        found = wb.plan_memory(ckpt, 8, room / 1e9)
        assert found.fits and found.chosen.largest <= room
        every = []
        for tp, pp, dp in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8)):
            if 8 % (tp * pp * dp):
                continue
            for stage in (0, 1, 2, 3) if dp > 1 else (0,):
                held = brute(weights, tp, pp, dp, 1, stage, 3, {"weights": 2, "grads": 2, "master": 4, "moments": 8})
                if max(sum(one.values()) for one in held.values()) <= room:
                    every.append((tp * pp * dp, tp * pp, stage))
        assert (found.chosen.gpus, found.chosen.tp * found.chosen.pp, found.chosen.stage) == min(every)
    assert [c.fits for c in found.choices] == sorted((c.fits for c in found.choices), reverse=True)


def test_where_nothing_fits_the_nearest_is_named(llama: Any) -> None:
    found = wb.plan_memory(wb.open(llama[0]), 2, 1e-6)
    assert not found.fits and found.chosen.largest == min(c.largest for c in found.choices)
    assert "fits no layout that was tried" in repr(found)


def test_embeddings_make_the_ends_of_a_pipeline_heavy(llama: Any) -> None:
    ranks = wb.plan_memory(wb.open(llama[0]), 3, 1, tp=1, pp=3, dp=1).ranks
    layer = ranks["weights"][1]
    assert ranks["weights"][0] == layer + 2 * 51 * 30 and ranks["weights"][2] == layer + 2 * (51 * 30 + 30)


def test_tied_embeddings_are_on_both_ends() -> None:
    ckpt = wb.open(SAMPLES / "hf_llama_tied_fp32")
    one = wb.plan_memory(ckpt, 1, 1, tp=1, pp=1, dp=1).ranks["weights"].sum()
    two = wb.plan_memory(ckpt, 2, 1, tp=1, pp=2, dp=1)
    assert two.ranks["weights"].sum() == one + ckpt["model.embed_tokens.weight"].nbytes
    assert any("first and the last stage" in note for note in two.notes)


def test_samples_of_any_format_have_a_budget() -> None:
    for name in ("dcp_fsdp2", "megatron_dp_reshardable", "deepspeed_zero1", "bytecheckpoint_fsdp1_flat", "paddle_save"):
        ckpt = wb.open(SAMPLES / name)
        found = wb.plan_memory(ckpt, 1, 1, precision=wb.Precision.inference())
        stored = sum(
            n for n, role in zip(ckpt.tensors["nbytes"], ckpt.roles, strict=True) if role in ("param", "buffer")
        )
        assert found.chosen.parts == (stored, 0, 0, 0), name
        again = wb.plan_memory(wb.layout(ckpt), 1, 1, precision=wb.Precision.inference())
        assert again.chosen == found.chosen


def test_frozen_parameters_have_no_states() -> None:
    ckpt = wb.open(SAMPLES / "dcp_fsdp2")
    some = ckpt.select(r"^model\.|layers\.0\..*exp_avg$")
    found = wb.plan_memory(some, 1, 1)
    trained = sum(n for n, role in zip(some.catalog.numel.tolist(), some.roles, strict=True) if role == "exp_avg")
    assert found.chosen.parts[3] == 8 * trained and any("counted as frozen" in note for note in found.notes)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpus": 0}, "not a number of GPUs"),
        ({"memory_gb": 0}, "^0 GB for each GPU, 0 GB of it reserved: the memory must be more than the reserve"),
        ({"memory_gb": float("inf")}, "^inf GB for each GPU.* 1,000,000 GB or less"),
        ({"memory_gb": float("nan")}, "^nan GB for each GPU"),
        ({"reserve_gb": 2}, "^1 GB for each GPU, 2 GB of it reserved"),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({"tp": 0}, "^tp must be 1 or more, not 0$"),
        ({"ep": -1}, "^ep must be 1 or more, not -1$"),
        ({"tp": 3}, "tp=3 does not give a layout for 4 GPUs or fewer"),
        ({"dp": 3, "gpus": 8}, "does not give a layout"),
    ],
)
def test_what_makes_no_layout_is_refused(llama: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wb.plan_memory(wb.open(llama[0]), **{"gpus": 4, "memory_gb": 1, **asked})


def test_command_line(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(llama[0])
    assert main(["layout", folder, "--fit", "8", "0.0005"]) == 0
    out = capsys.readouterr().out
    assert "fits" in out and "not counted" in " ".join(out.split()) and max(map(len, out.splitlines())) <= 120
    assert main(["layout", folder, "--fit", "4", "80", "--tp", "2", "--json", "--weights", "fp8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"]["tp"] == 2 and len(document["ranks"]) == document["chosen"]["gpus"]
    assert main(["layout", folder, "--fit", "2", "0.000001"]) == 1
    assert main(["layout", folder, "--fit", "many", "80"]) == 64
    budget = wb.plan_memory(wb.open(folder), 4, 80)
    assert budget._repr_html_().startswith("<div>") and len(budget.frame()) == len(budget.choices)
    assert np.isfinite(budget.chosen.mean)


def test_where_there_are_too_many_layouts_every_number_of_gpus_is_looked_at(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {one.gpus for one in wb.plan_memory(wb.open(llama[0]), 24, 1).choices}
    monkeypatch.setattr(plan, "TRIED", 8)
    found = wb.plan_memory(wb.open(llama[0]), 24, 1)
    assert {one.gpus for one in found.choices} == every == {1, 2, 3, 4, 6, 8, 12, 24}
    assert any("layouts were tried" in note for note in found.notes)


@pytest.mark.parametrize("words", [("--fit", "8", "inf"), ("--fit", "9" * 5000, "80"), ("--rank", "9" * 5000)])
def test_numbers_beyond_reason_are_one_line(
    llama: Any, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", str(llama[0]), *words]) == 64
    assert len(capsys.readouterr().err.splitlines()) == 1
