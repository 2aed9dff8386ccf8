"""transformers' ``Trainer``, peft and accelerate of the fifth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import Rows, made, trained

__all__ = ["OPENED5_HUGGING"]


def adapted(seed: int) -> Any:
    """Adapters of that seed on the one base that all processes load."""
    from peft import LoraConfig, get_peft_model

    base = made("Llama", 5)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """For ``spoil``: other weights in the file that is resumed from."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return spoil


def without_optimizer(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def narrowed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def one_tensor_missing(folder: Path, rng: random.Random, k: int) -> None:
    layer, side = rng.randrange(2), rng.choice(["self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"])

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del weights[f"model.layers.{layer}.{side}.weight"]
        return weights

    trained(partial(made, "Llama"), folder, rng, k, spoil=rewritten(change))


def other_order(folder: Path) -> None:
    """Parameters of one shape come in reverse order."""
    content = torch.load(folder / "optimizer.pt", weights_only=True)
    by_shape: dict[Any, list[int]] = {}
    for number, state in content["state"].items():
        by_shape.setdefault(tuple(state["exp_avg"].shape), []).append(number)
    old = dict(content["state"])
    for numbers in by_shape.values():
        content["state"] |= {number: old[one] for number, one in zip(numbers, reversed(numbers), strict=True)}
    torch.save(content, folder / "optimizer.pt")


def wrapped_again(trainer: Any) -> None:
    """A new adapter takes the loaded one's place."""
    made = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_A" in name:
                weight.copy_(torch.randn(weight.shape, generator=made) * 0.1)
            elif "lora_B" in name:
                weight.zero_()


# ---- accelerate ------------------------------------------------------------------------------------------------------


def accelerated(
    folder: Path,
    rng: random.Random,
    k: int,
    *,
    name: str = "Llama",
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 1,
) -> None:
    """``steps``: how often an update of the resumed run steps the schedule."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
    rows = Rows(seed).rows

    def process(seed: int) -> tuple[Any, Any, Any, Any]:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        accelerator = Accelerator(cpu=True)
        model = made(name, seed)
        own = optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda done: min(1.0, (done + 1) / 6) * 0.99**done)
        return accelerator, *accelerator.prepare(model, own, schedule)

    def run(parts: tuple[Any, Any, Any, Any], begin: int, end: int, steps: int = 1) -> None:
        accelerator, model, own, schedule = parts
        for step in range(begin, end):
            tokens = rows[4 * step % 252 :][:4]
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
            for _ in range(steps):
                schedule.step()
            own.zero_grad()

    one = process(seed)
    run(one, 0, start)
    one[0].save_state(str(folder / "before" / f"checkpoint_{start}"))
    two = process(seed + 1)
    two[0].load_state(str(folder / "before" / f"checkpoint_{start}"))
    two[0].save_state(str(folder / "echo" / f"checkpoint_{start}"))
    random_state = torch.get_rng_state()
    run(two, start, start + k, steps)
    two[0].save_state(str(folder / "after" / f"checkpoint_{start + k}"))
    if steps == 1:
        torch.set_rng_state(random_state)  # of dropout
        run(one, start, start + k)
        for first, second in zip(one[1].parameters(), two[1].parameters(), strict=True):
            assert torch.equal(first, second)


def per_process(folder: Path, rng: random.Random, k: int) -> None:
    accelerated(folder, rng, k, steps=rng.choice([2, 4, 8]))


Live = Callable[[Path, random.Random, int], None]


def _quiet(live: Live) -> Live:
    """Ignore the libraries' warnings, which pytest would turn into errors."""

    def write(folder: Path, rng: random.Random, k: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            live(folder, rng, k)

    return write


def _fault(id: str, cause: str, text: str, where: str, also: str, live: Live, **more: Any) -> Fault:
    return Fault(id, cause, text, seen(where), live=_quiet(live), also=tuple(also.split()), formats=("live",), **more)


def _well(id: str, text: str, live: Live, kind: str = "healthy", true: str = "") -> Fault:
    also = tuple(true.split())
    return Fault(id, "healthy", text, frozenset(), live=_quiet(live), formats=("live",), kind=kind, also=also)


OPENED5_HUGGING = [
    _fault("ik01_no_optimizer_file", "B1", "Trainer: without optimizer.pt optimizer and schedule are new, unsaid",
           "alone echo next early", "C1 C2", partial(trained, partial(made, "Llama"), spoil=without_optimizer)),
    _fault("ik02_tensor_missing", "A2", "Trainer: a tensor is not in the file", "echo next early", "",
           one_tensor_missing),
    _fault("ik03_narrow_file", "D7", "Trainer: the weights' file was cast to bf16", "alone echo next", "D1",
           partial(trained, partial(made, "Qwen2"), spoil=rewritten(narrowed))),
    _fault("ik04_other_order", "B5", "Trainer: parameters of one shape come in another order", "echo next early",
           "E13", partial(trained, partial(made, "gpt2"), spoil=other_order)),
    _fault("ik05_more_steps", "C4", "Trainer: max_steps is doubled, and the cosine with it", "echo next early",
           "C2 H1", partial(trained, partial(made, "Llama"), other_args={"max_steps": 200})),
    _fault("ik06_data_not_skipped", "C6", "Trainer: the epoch begins anew after the resume", "next early", "C7 C9",
           partial(trained, partial(made, "Llama"), other_args={"ignore_data_skip": True}),
           why="the epoch that is stored is behind the one of the step"),
    _fault("ik07_adapter_new", "F5", "Trainer and peft: a new adapter takes the loaded one's place",
           "alone echo next early", "A2", partial(trained, adapted, loaded=wrapped_again, learning_rate=2e-2)),
    _fault("ik08_steps_per_process", "C3", "accelerate: the schedule steps once for every process", "next early",
           "C9", per_process),
    _well("ik10_qwen3", "Trainer: Qwen3, linear schedule",
          partial(trained, partial(made, "Qwen3"), lr_scheduler_type="linear")),
    _well("ik11_constant", "Trainer: Qwen2, constant after the warm-up",
          partial(trained, partial(made, "Qwen2"), lr_scheduler_type="constant_with_warmup", adam_beta2=0.95)),
    _well("ik12_adapter", "Trainer and peft", partial(trained, adapted, learning_rate=1e-2)),
    _well("ik13_arguments_ignored", "Trainer: another learning rate is asked for, and the stored one is kept",
          partial(trained, partial(made, "Llama"), other_args={"learning_rate": 1e-4}), true="H1"),
    _well("ik14_adagrad", "Trainer: Adagrad", partial(trained, partial(made, "gpt2"), optim="adagrad")),
    _well("ik15_accelerate_gpt2", "accelerate: GPT-2, NAdam",
          partial(accelerated, name="gpt2", optimizer=partial(torch.optim.NAdam, lr=1e-3))),
    _well("ik16_accelerate_sgd", "accelerate: Qwen2, SGD",
          partial(accelerated, name="Qwen2", optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))),
    _well("ik20_other_schedule", "Trainer: a linear schedule goes on as a constant one",
          partial(trained, partial(made, "Llama"), lr_scheduler_type="linear",
                  other_args={"lr_scheduler_type": "constant"}), "deliberate", "H1 C2 C4"),
    _well("ik21_larger_batch", "Trainer: twice the rows in an update", partial(
        trained, partial(made, "Qwen2"), other_args={"gradient_accumulation_steps": 2}), "deliberate", "H1 C10 C7"),
]  # fmt: skip
