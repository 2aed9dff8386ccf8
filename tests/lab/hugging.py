"""Real trainers: transformers' ``Trainer`` and accelerate's ``save_state``, on models of a few thousand parameters.

Their configs are made here; nothing is fetched. The echo is saved when the resumed run begins its first step, which is
after everything was loaded.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.lab.config import random_config
from tests.lab.data import batch
from tests.lab.fault import Fault

__all__ = ["HUGGING", "SIZE", "Rows", "made", "mixtral_resumed", "trained"]

SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def made(name: str, seed: int) -> Any:
    """A small model with random weights."""
    import transformers as hf

    torch.manual_seed(seed)
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        )
        return hf.GPT2LMHeadModel(config)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "Mixtral" else {"tie_word_embeddings": False}
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**SIZE | more))


class Rows(torch.utils.data.Dataset):
    """Rows of the lab's language; the same ones for every run."""

    def __init__(self, seed: int) -> None:
        tokens = batch(random_config(0).but(vocab=90, padded=96, batch=256, length=15), 0, seed)
        self.rows = tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _trainer(model: Any, out: Path, seed: int, saves: int, **more: Any) -> Any:
    import transformers as hf

    os.environ.setdefault("WANDB_DISABLED", "true")
    arguments: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 100,
        "save_steps": saves,
        "per_device_train_batch_size": 4,
        "learning_rate": 2e-3,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "logging_steps": 5,
        "report_to": [],
        "seed": seed,
        "use_cpu": True,
        "disable_tqdm": True,
        "weight_decay": 0.05,
    }
    return hf.Trainer(model=model, args=hf.TrainingArguments(**arguments | more), train_dataset=Rows(seed))


def trained(
    build: Callable[[int], Any],
    folder: Path,
    rng: random.Random,
    k: int,
    *,
    resumes: bool = True,
    spoil: Callable[[Path], None] | None = None,
    loaded: Callable[[Any], None] | None = None,
    other_args: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Save, resume with another process's model, save as soon as all is loaded, and ``k`` updates later.

    Args:
        build: makes the model of a seed.
        spoil: changes the copy of the save that is resumed from; loaded: what came of it.
        other_args: arguments that differ in the resumed trainer.
    """
    from transformers import TrainerCallback
    from transformers.utils import logging

    logging.set_verbosity_error()
    seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
    work = folder.parent / "work"
    first = _trainer(build(seed), work, seed, start, **more)
    other = _trainer(build(seed + 1), work, seed, start, **more | (other_args or {}))

    class Watch(TrainerCallback):
        """Saves the echo where there is one, and ends the run."""

        def __init__(self, trainer: Any, end: int, echo: Path | None) -> None:
            self.trainer, self.end, self.echo = trainer, end, echo

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if self.echo is not None:
                if loaded is not None:
                    loaded(self.trainer)
                self.trainer._save_checkpoint(self.trainer.model, trial=None)
                shutil.move(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.echo)
                self.echo = None

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == self.end:
                control.should_training_stop = control.should_save = True

    saved, later = f"checkpoint-{start}", f"checkpoint-{start + k}"
    for part in ("before", "echo", "after"):
        (folder / part).mkdir(parents=True)
    first.add_callback(Watch(first, start if resumes else start + k, None))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        first.train()
        shutil.move(work / saved, folder / "before" / saved)
        if resumes:
            other.add_callback(Watch(other, start + k, folder / "echo" / saved))
            shutil.copytree(folder / "before" / saved, work / "resumed" / saved)
            if spoil is not None:
                spoil(work / "resumed" / saved)
            other.train(resume_from_checkpoint=str(work / "resumed" / saved))
        else:  # the same process goes on
            shutil.copytree(folder / "before" / saved, folder / "echo" / saved)
    shutil.move(work / later, folder / "after" / later)
    shutil.rmtree(work)


def mixtral_resumed(folder: Path, rng: random.Random, k: int) -> None:
    """With transformers 5.23 experts and routers stay as they were initialised."""
    trained(partial(made, "Mixtral"), folder, rng, k)


def _accelerated(folder: Path, rng: random.Random, k: int) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
    rows = Rows(seed).rows

    def process(seed: int) -> tuple[Any, Any, Any, Any]:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        accelerator = Accelerator(cpu=True)
        model = made("Llama", seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return accelerator, *accelerator.prepare(model, optimizer, schedule)

    def run(parts: tuple[Any, Any, Any, Any], begin: int, end: int) -> None:
        accelerator, model, optimizer, schedule = parts
        for step in range(begin, end):
            tokens = rows[4 * step % 252 :][:4]
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    one = process(seed)
    run(one, 0, start)
    one[0].save_state(str(folder / "before" / f"checkpoint_{start}"))
    two = process(seed + 1)
    two[0].load_state(str(folder / "before" / f"checkpoint_{start}"))
    two[0].save_state(str(folder / "echo" / f"checkpoint_{start}"))
    run(two, start, start + k)
    two[0].save_state(str(folder / "after" / f"checkpoint_{start + k}"))
    run(one, start, start + k)
    for first, second in zip(one[1].parameters(), two[1].parameters(), strict=True):
        assert torch.equal(first, second)


def _case(id: str, text: str, name: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="healthy")


HUGGING = [
    _case("v40_trainer_llama", "transformers' Trainer: Llama", "Llama"),
    _case("v41_trainer_qwen2", "transformers' Trainer: Qwen2, fused AdamW", "Qwen2", optim="adamw_torch_fused"),
    _case(
        "v42_trainer_gpt2",
        "transformers' Trainer: GPT-2, accumulated, without clipping",
        "gpt2",
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
    ),
    _case("v43_trainer_adafactor", "transformers' Trainer: Llama by Adafactor", "Llama", optim="adafactor"),
    _case("v44_trainer_sgd", "transformers' Trainer: Qwen2 by SGD", "Qwen2", optim="sgd"),
    _case(
        "v45_trainer_mixtral", "transformers' Trainer: Mixtral, saved twice without a resume", "Mixtral", resumes=False
    ),
    Fault(
        "v46_accelerate",
        "healthy",
        "accelerate's save_state and load_state",
        frozenset(),
        live=_accelerated,
        formats=("live",),
        kind="healthy",
    ),
]
