"""transformers' ``Trainer``, accelerate and peft of the fourth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import Rows, made, trained

__all__ = ["OPENED4_HUGGING"]

Parts = tuple[Any, Any, Any, Any]


# ---- models and trainers ---------------------------------------------------------------------------------------------


def adapted(seed: int) -> Any:
    """Adapters over one base; the seed is theirs."""
    from peft import LoraConfig, get_peft_model

    base = made("Llama", 11)
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def accelerated(
    folder: Path,
    rng: random.Random,
    k: int,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    loaded: Callable[[Parts, int], None] | None = None,
    older: str = "",
) -> None:
    """A loop around ``accelerator.prepare``, saved, loaded by another process's objects, and gone on with.

    Args:
        loaded: what happens after the load, given the parts and the step.
        older: the file of the save that is resumed from which is of five updates before.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    seed, start = rng.randrange(1 << 16), rng.randrange(12, 40)
    rows = Rows(seed).rows

    def process(seed: int) -> Parts:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        accelerator, model = Accelerator(cpu=True), made("Qwen2", seed)
        one = (optimizer or (lambda ws: torch.optim.AdamW(ws, lr=2e-3, betas=(0.9, 0.95))))(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one, 300)
        return accelerator, *accelerator.prepare(model, one, schedule)

    def run(parts: Parts, begin: int, end: int) -> None:
        accelerator, model, one, schedule = parts
        for step in range(begin, end):
            tokens = rows[4 * step % 252 :][:4]
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            one.step()
            schedule.step()
            one.zero_grad()

    name = f"checkpoint_{start}"
    parts = process(seed)
    run(parts, 0, start - 5)
    if older:
        parts[0].save_state(str(folder / "older"))
    run(parts, start - 5, start)
    parts[0].save_state(str(folder / "before" / name))
    resumed = folder / "before" / name
    if older:
        resumed = folder / "resumed"
        parts[0].save_state(str(resumed))
        (folder / "older" / older).replace(resumed / older)
    other = process(seed + 1)
    other[0].load_state(str(resumed))
    if loaded is not None:
        loaded(other, start)
    other[0].save_state(str(folder / "echo" / name))
    run(other, start, start + k)
    other[0].save_state(str(folder / "after" / f"checkpoint_{start + k}"))


# ---- what is spoilt --------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, torch.Tensor]], None], file: str = "model.safetensors") -> Any:
    """For ``spoil``: the tensors of a file changed in place."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        held = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(held, folder / file, metadata={"format": "pt"})

    return spoil


def key_first(tensors: dict[str, torch.Tensor]) -> None:
    """GPT-2's [q k v] as [k q v]."""
    for name in [name for name in tensors if "c_attn" in name]:
        q, k, v = tensors[name].chunk(3, -1)
        tensors[name] = torch.cat([k, q, v], -1)


def without_b(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name] = torch.zeros_like(tensors[name])


def no_schedule(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()


def earlier_step(folder: Path) -> None:
    """``trainer_state.json`` is that of three updates before."""
    path = folder / "trainer_state.json"
    told = json.loads(path.read_text())
    told["global_step"] -= 3
    path.write_text(json.dumps(told))


def neighbours(folder: Path) -> None:
    """Pairs of gate and up have each other's state."""
    path = folder / "optimizer.pt"
    content = torch.load(path, weights_only=True)
    held = content["state"]
    able = [number for number in held if tuple(held[number]["exp_avg"].shape) == (64, 32)]
    for one, two in zip(able[::2], able[1::2], strict=True):
        held[one], held[two] = held[two], held[one]
    torch.save(content, path)


def stepped_for_each(parts: Parts, start: int) -> None:
    """The schedule is moved on by the batches that were skipped, though it was loaded."""
    for _ in range(start):
        parts[3].scheduler.step()


# ---- the table -------------------------------------------------------------------------------------------------------


def _ill(id: str, cause: str, text: str, where: str, live: Any, also: tuple[str, ...] = (), why: str = "") -> Fault:
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def _well(id: str, text: str, live: Any) -> Fault:
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


def _meant(id: str, text: str, true: tuple[str, ...], live: Any) -> Fault:
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", also=true)


def hf(name: str, **more: Any) -> Any:
    return partial(trained, partial(made, name), **more)


OPENED4_HUGGING: list[Fault] = [
    _ill("q110_key_first", "E4", "Trainer, GPT-2: [q k v] converted as [k q v]", "echo next",
         hf("gpt2", spoil=rewritten(key_first)), ("E1",), "columns of a fused matrix in another order"),
    _ill("q111_no_schedule", "B1", "Trainer: scheduler.pt is missing, so that nothing of the optimizer is loaded",
         "alone echo next early", hf("Llama", spoil=no_schedule), ("C1",), "state and schedule are new"),
    _ill("q112_earlier_step", "C9", "Trainer: trainer_state.json is of an older save", "alone echo next early",
         hf("Qwen2", spoil=earlier_step), ("C6", "G6"), "one counter differs from the others"),
    _ill("q114_neighbours", "B5", "Trainer: gate and up have each other's state", "echo next early",
         hf("Llama", spoil=neighbours), ("E13", "E3"), "states of other parameters"),
    _ill("q115_adapter_half", "F5", "Trainer, peft: lora_B is zero", "alone echo next early",
         partial(trained, adapted, spoil=rewritten(without_b, "adapter_model.safetensors")), ("A2",),
         "adapters that do nothing"),
    _ill("q116_older_optimizer", "G6", "accelerate: optimizer.bin is of an older save", "alone echo next early",
         partial(accelerated, older="optimizer.bin"), ("C9",), "parts of two steps"),
    _ill("q117_skipped_batches", "C3", "accelerate: the schedule is moved on by the skipped batches",
         "alone echo next early", partial(accelerated, loaded=stepped_for_each), ("C2", "C9"),
         "a position that is too far"),
    _well("g50_accumulated", "Trainer, Llama: accumulated, linear schedule, other betas",
          hf("Llama", gradient_accumulation_steps=2, lr_scheduler_type="linear", adam_beta2=0.95)),
    _well("g51_adapters", "Trainer, peft: adapters", partial(trained, adapted)),
    _well("g52_rmsprop", "Trainer, GPT-2 by RMSprop, constant rate",
          hf("gpt2", optim="rmsprop", lr_scheduler_type="constant", learning_rate=3e-4)),
    _well("g53_accelerate_sgd", "accelerate: Qwen2 by SGD", partial(
        accelerated, optimizer=lambda ws: torch.optim.SGD(ws, lr=0.05, momentum=0.9, weight_decay=1e-3))),
    _meant("l16_longer", "Trainer: twice the steps from here on", ("C4", "C2", "H1"),
           hf("Qwen2", other_args={"max_steps": 200})),
    _meant("l17_larger_batch", "Trainer: twice the batch from here on", ("H1", "C10", "C7"),
           hf("Llama", other_args={"per_device_train_batch_size": 8})),
]  # fmt: skip
