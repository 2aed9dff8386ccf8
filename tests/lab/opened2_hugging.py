"""transformers' ``Trainer``, accelerate and peft of the second sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import SIZE, Rows, made, trained

__all__ = ["OPENED2_HUGGING"]

Build = Callable[[int], Any]


# ---- models ----------------------------------------------------------------------------------------------------------


def adapted(seed: int) -> Any:
    """Llama with peft's adapters."""
    import peft

    found = made("Llama", seed)
    torch.manual_seed(seed)
    return peft.get_peft_model(found, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def opt(seed: int) -> Any:
    """OPT: biases, learned positions, tied tables, dropout."""
    import transformers as hf

    torch.manual_seed(seed)
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=96,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def neox(seed: int) -> Any:
    """GPT-NeoX: rows of q, k, v head by head."""
    import transformers as hf

    torch.manual_seed(seed)
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{n: v for n, v in SIZE.items() if n != "num_key_value_heads"}))


def in_bf16(seed: int) -> Any:
    return made("Llama", seed).to(torch.bfloat16)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def removed(*names: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """Other tensors, or other names, in the file that is resumed from."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return spoil


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}


def without_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}


def queries_turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Heads of q in another order, as a conversion for another kind of rope leaves them."""
    turned = {n: w.view(4, 2, 4, -1).transpose(1, 2).reshape(w.shape) for n, w in tensors.items() if "q_proj" in n}
    return {name: tensor.contiguous() for name, tensor in (tensors | turned).items()}


def states_turned(trainer: Any) -> None:
    """State of parameters of one shape handed on to the next."""
    optimizer, shapes = trainer.optimizer, {}
    for weight in [weight for group in optimizer.param_groups for weight in group["params"]]:
        shapes.setdefault(weight.shape, []).append(weight)
    for same in shapes.values():
        states = [optimizer.state[weight] for weight in same]
        for weight, state in zip(same, [*states[1:], states[0]], strict=True):
            optimizer.state[weight] = state


def adapters_anew(trainer: Any) -> None:
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()


def counters_anew(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])


def halved(trainer: Any) -> None:
    trainer.model.to(torch.bfloat16)
    for state in trainer.optimizer.state.values():
        state |= {name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}


def variances_lost(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg_sq"].zero_()


# ---- accelerate ------------------------------------------------------------------------------------------------------


class Average:
    """A moving average that ``register_for_checkpointing`` takes."""

    def __init__(self, model: Any) -> None:
        self.held, self.count = {n: w.detach().clone() for n, w in model.named_parameters()}, 0

    def update(self, model: Any) -> None:
        self.count += 1
        for name, weight in model.named_parameters():
            self.held[name].lerp_(weight.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.held, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held, self.count = state["average"], state["count"]


class Process:
    """An accelerated loop with an average, a schedule, two accumulated micro-batches."""

    def __init__(self, seed: int, kind: Any) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = made("Qwen2", seed)
        optimizer = kind(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=200)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.average = Average(self.model)
        self.accelerator.register_for_checkpointing(self.average)

    def run(self, begin: int, end: int, rows: torch.Tensor) -> None:
        for micro in range(2 * begin, 2 * end):
            tokens = rows[2 * micro % 254 :][:2]
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(input_ids=tokens, labels=tokens).loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.average.update(self.model)


def accelerated(
    folder: Path,
    rng: random.Random,
    k: int,
    kind: Any = torch.optim.AdamW,
    loaded: Callable[[Process], None] | None = None,
) -> None:
    seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
    rows = Rows(seed).rows
    one = Process(seed, kind)
    one.run(0, start, rows)
    before = folder / "before" / f"checkpoint_{start}"
    one.accelerator.save_state(str(before))
    two = Process(seed + 1, kind)
    new = Average(two.model)
    two.accelerator.load_state(str(before))
    if loaded is not None:
        two.lost = new
        loaded(two)
    two.accelerator.save_state(str(folder / "echo" / f"checkpoint_{start}"))
    two.run(start, start + k, rows)
    two.accelerator.save_state(str(folder / "after" / f"checkpoint_{start + k}"))


def average_anew(process: Any) -> None:
    process.average.load_state_dict(process.lost.state_dict())


def stepped_by_all(process: Process) -> None:
    """As many steps again as eight processes make."""
    for _ in range(8):
        process.schedule.scheduler.step()


def momentum_of_others(process: Process) -> None:
    """State by the number of a parameter, after one was put in front."""
    inner = process.optimizer.optimizer
    weights = inner.param_groups[0]["params"]
    old = {weight: dict(inner.state[weight]) for weight in weights}
    for before, weight in itertools.pairwise(weights):
        fits = old[before]["exp_avg"].shape == weight.shape
        inner.state[weight] = {n: t.clone() for n, t in old[before].items()} if fits else old[weight]


# ---- the table -------------------------------------------------------------------------------------------------------


def well(id: str, text: str, build: Build, also: tuple[str, ...] = (), **more: Any) -> Fault:
    return Fault(
        id,
        "healthy",
        text,
        frozenset(),
        live=partial(trained, build, **more),
        formats=("live",),
        kind="healthy",
        also=also,
    )


def meant(id: str, text: str, build: Build, true: tuple[str, ...], **more: Any) -> Fault:
    return Fault(
        id,
        "healthy",
        text,
        frozenset(),
        live=partial(trained, build, **more),
        formats=("live",),
        kind="deliberate",
        also=true,
    )


def ill(
    id: str,
    cause: str,
    text: str,
    where: str,
    build: Build,
    also: tuple[str, ...] = (),
    why: str = "",
    visible: bool = True,
    **more: Any,
) -> Fault:
    return Fault(
        id,
        cause,
        text,
        seen(where),
        live=partial(trained, build, **more),
        formats=("live",),
        also=also,
        why=why,
        visible=visible,
    )


def model(name: str) -> Build:
    return partial(made, name)


ECHO = "echo next early"
LOUD = "alone echo next early"

OPENED2_HUGGING = [
    well("k80_trainer_qwen3_linear", "Qwen3, a linear schedule, other betas", model("Qwen3"),
         lr_scheduler_type="linear", adam_beta2=0.95),
    well("k81_trainer_phi_constant", "Phi-3, fused rows, a constant lr after warm-up", model("Phi3"),
         lr_scheduler_type="constant_with_warmup"),
    well("k90_trainer_neox", "GPT-NeoX, saved twice without a resume", neox, resumes=False),
    well("k82_trainer_gemma_rmsprop", "Gemma by RMSprop", model("Gemma"), optim="rmsprop", learning_rate=3e-4),
    well("k83_trainer_opt", "OPT with dropout, accumulated", opt, gradient_accumulation_steps=3),
    well("k84_trainer_mistral_adagrad", "Mistral by Adagrad, one over the root", model("Mistral"), optim="adagrad",
         lr_scheduler_type="inverse_sqrt"),
    well("k85_trainer_peft", "adapters of peft", adapted),
    well("k86_trainer_bf16", "Llama, weights and moments in bf16", in_bf16, also=("D5", "D6")),
    well("k87_trainer_olmo_restarts", "Olmo2, cosine with restarts, no decay", model("Olmo2"),
         lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 6}, weight_decay=0.0),
    Fault("k88_accelerate_average", "healthy", "accelerate with accumulated gradients and an average", frozenset(),
          live=accelerated, formats=("live",), kind="healthy"),
    Fault("k89_accelerate_adamax", "healthy", "accelerate with Adamax", frozenset(),
          live=partial(accelerated, kind=torch.optim.Adamax), formats=("live",), kind="healthy"),
    meant("o20_trainer_larger_batch", "twice the batch from here on", model("Llama"), ("H1", "C10"),
          other_args={"gradient_accumulation_steps": 2}),
    meant("o21_trainer_linear", "a linear schedule from here on", model("Qwen2"), ("H1", "C2", "C4"),
          other_args={"lr_scheduler_type": "linear"}),
    # ---- faults
    ill("y70_schedule_file_gone", "B1", "one of two files is gone, so neither optimizer nor schedule is loaded", LOUD,
        model("Llama"), also=("C1", "B2"), why="the optimizer's state is new; so are its counter and the lr",
        spoil=removed("scheduler.pt")),
    ill("y71_optimizer_file_gone", "B1", "the optimizer's file is gone: optimizer and schedule are new", LOUD,
        model("Qwen3"), also=("C1", "B2"), why="the optimizer's state is new; so are its counter and the lr",
        spoil=removed("optimizer.pt")),
    ill("y72_compiled_names", "A1", "names with the compiler's prefix: no weight is loaded", ECHO, model("Qwen2"),
        also=("A2",), why="tensors that were not loaded", spoil=weights(renamed)),
    ill("y73_layer_gone", "A2", "a layer is not in the file", ECHO, model("Llama"), spoil=weights(without_layer)),
    ill("y74_queries_turned", "E5", "rows of q in the order of another rope", ECHO, model("Mistral"), also=("E6",),
        why="rows moved within heads", spoil=weights(queries_turned)),
    ill("y75_states_turned", "B5", "state bound to the next parameter of its shape", ECHO, model("Qwen3"),
        also=("E13", "E9"), why="state of other parameters", loaded=states_turned),
    ill("y76_other_length", "C4", "another number of steps: the cosine is another", ECHO, model("Llama"),
        also=("C2", "H1"), why="another curve, by an argument", other_args={"max_steps": 400}),
    ill("y77_half_precision", "D7", "the model is loaded in bf16", ECHO, model("Llama"),
        also=("D4", "D5", "D6", "D1", "H1"), why="everything is in 16 bits now",
        loaded=halved),
    ill("y78_random_gone", "C8", "the random state's file is gone", "echo", opt, also=("C7",),
        why="random states that were not restored", spoil=removed("rng_state.pth")),
    ill("y79_data_from_start", "C6", "the data begins again: the trainer was told to skip nothing", ECHO,
        model("Qwen2"), also=("C7", "C8", "H1"), why="an argument says so, and the random state is another",
        other_args={"ignore_data_skip": True}),
    ill("y80_adapters_anew", "F5", "adapters begin at 0", LOUD, adapted, also=("A2",),
        why="tensors that were not loaded", loaded=adapters_anew),
    ill("y81_counters_anew", "B2", "counters begin at 0", LOUD, model("Gemma"), also=("C9",),
        why="the counters are what is wrong", loaded=counters_anew),
    ill("y82_variances_lost", "B4", "second moments are zero", LOUD, opt, also=("B1", "B3"), why="a state was lost",
        loaded=variances_lost),
    ill("y86_trainer_neox", "A2", "transformers 5.23 resumes GPT-NeoX with a head as initialised", ECHO, neox,
        also=("A1", "F2", "F7"), why="the head's name differs between file and model"),
    Fault("y83_average_anew", "F4", "the average that accelerate keeps is new", seen(LOUD), formats=("live",),
          live=partial(accelerated, loaded=average_anew), also=("A5", "A2"), why="tensors that were not loaded"),
    Fault("y84_stepped_by_all", "C3", "the schedule made eight steps more", seen(LOUD), formats=("live",),
          live=partial(accelerated, loaded=stepped_by_all), also=("C2", "C9"), why="a position ahead of the step's"),
    Fault("y85_one_on", "B5", "state bound one parameter further, where it fits", seen(ECHO), formats=("live",),
          live=partial(accelerated, loaded=momentum_of_others), also=("E13",), why="state of other parameters"),
]  # fmt: skip
