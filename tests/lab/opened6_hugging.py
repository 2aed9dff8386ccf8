"""transformers' ``Trainer``, peft and accelerate of the sixth sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import SIZE, Rows, made, trained

__all__ = ["OPENED6_HUGGING"]

Weights = dict[str, torch.Tensor]
Live = Callable[[Path, random.Random, int], None]


def model(kind: str, seed: int, **more: Any) -> Any:
    """A small model of another family."""
    import transformers as hf

    torch.manual_seed(seed)
    sizes = SIZE | {"tie_word_embeddings": False} | more
    if kind == "OPT":
        sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    if kind in ("Gemma", "Qwen3"):
        sizes |= {"head_dim": 8}
    return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**sizes))


def adapted(seed: int, *, alpha: int = 8, head: bool = False) -> Any:
    """Adapters of that seed on one base; with ``head``, the head is trained as a whole."""
    from peft import LoraConfig, get_peft_model

    base = made("Llama", 11)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4,
        lora_alpha=alpha,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"] if head else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def in_turn(first: Callable[[int], Any], second: Callable[[int], Any]) -> Callable[[int], Any]:
    """The first process makes its model by ``first``, the one that resumes by ``second``."""
    left = [first, second]
    return lambda seed: left.pop(0)(seed)


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    """For ``spoil``: other weights in the file that is resumed from."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return spoil


def no_biases(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if not name.endswith("proj.bias")}


def square_as_linear(weights: Weights) -> Weights:
    """GPT-2 stores its matrices transposed; a converter did not do so with the square ones."""
    return weights | {n: w.T.contiguous() for n, w in weights.items() if n.endswith("attn.c_proj.weight")}


def one_token_more(weights: Weights) -> Weights:
    return weights | {n: w.roll(1, 0) for n, w in weights.items() if "embed_tokens" in n or "lm_head" in n}


def no_schedule_file(folder: Path) -> None:
    """The Trainer loads optimizer and schedule only where it finds both."""
    (folder / "scheduler.pt").unlink()


def zero_page(folder: Path) -> None:
    """A page of the file that lies in a projection was never written."""
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    begin, end = (8 + length + at for at in header["model.layers.1.mlp.up_proj.weight"]["data_offsets"])
    page = -(-begin // 4096) * 4096
    assert page + 4096 <= end
    raw[page : page + 4096] = bytes(4096)
    file.write_bytes(raw)


def schedule_begins(trainer: Any) -> None:
    trainer.lr_scheduler.last_epoch, trainer.lr_scheduler._step_count = 0, 1


def counters_begin(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["step"] = 0


def norms_made_anew(trainer: Any) -> None:
    """What is not marked as loaded is initialised once more."""
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "layernorm" in name or name.endswith("norm.weight"):
                weight.fill_(1.0)


def head_of_the_base(trainer: Any) -> None:
    with torch.no_grad():
        for module in trainer.model.modules():
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                module.modules_to_save["default"].weight.copy_(module.original_module.weight)


def rotated(theta: float) -> Callable[[int], Any]:
    rope = {"rope_type": "default", "rope_theta": theta}
    return lambda seed: model("Llama", seed, rope_parameters=rope)


def other_rope(folder: Path, rng: random.Random, k: int) -> None:
    trained(in_turn(rotated(1e4), rotated(1e6)), folder, rng, k)


def other_alpha(folder: Path, rng: random.Random, k: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(in_turn(partial(adapted, alpha=8), partial(adapted, alpha=32)), folder, rng, k)


def run(build: Callable[[int], Any], **more: Any) -> Live:
    def live(folder: Path, rng: random.Random, k: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(build, folder, rng, k, **more)

    return live


# ---- accelerate ------------------------------------------------------------------------------------------------------


class Mean:
    """An average that ``register_for_checkpointing`` stores."""

    def __init__(self, model: Any) -> None:
        self.of = model
        self.held = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def follow(self) -> None:
        for name, weight in self.of.named_parameters():
            self.held[name].lerp_(weight.detach(), 0.05)

    def state_dict(self) -> Weights:
        return self.held

    def load_state_dict(self, state: Weights) -> None:
        self.held = {name: tensor.clone() for name, tensor in state.items()}


def accelerated(
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    average: bool = False,
    loaded: Callable[[Any, Any], None] | None = None,
    times: int = 1,
) -> Live:
    """``save_state`` and ``load_state``; ``times``: how often the resumed process steps its schedule."""

    def live(folder: Path, rng: random.Random, k: int) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState

        seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
        rows = Rows(seed).rows

        def process(number: int) -> tuple[Any, ...]:
            AcceleratorState._reset_state(True)
            PartialState._reset_state()
            accelerator, net = Accelerator(cpu=True), made("Qwen2", number)
            inner = optimizer(net.parameters())
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 150)
            parts = accelerator.prepare(net, inner, schedule)
            mean = Mean(parts[0]) if average else None
            if mean is not None:
                accelerator.register_for_checkpointing(mean)
            return accelerator, *parts, mean

        def go(parts: tuple[Any, ...], begin: int, end: int, times: int) -> None:
            accelerator, net, inner, schedule, mean = parts
            for step in range(begin, end):
                tokens = rows[4 * step % 252 :][:4]
                accelerator.backward(net(input_ids=tokens, labels=tokens).loss)
                inner.step()
                for _ in range(times):
                    schedule.step()
                inner.zero_grad()
                if mean is not None:
                    mean.follow()

        one = process(seed)
        go(one, 0, start, 1)
        one[0].save_state(str(folder / "before" / f"checkpoint_{start}"))
        two = process(seed + 1)
        two[0].load_state(str(folder / "before" / f"checkpoint_{start}"))
        if loaded is not None:
            loaded(two[1], two[2])
        two[0].save_state(str(folder / "echo" / f"checkpoint_{start}"))
        go(two, start, start + k, times)
        two[0].save_state(str(folder / "after" / f"checkpoint_{start + k}"))
        if loaded is None and times == 1:
            go(one, start, start + k, 1)
            assert all(torch.equal(a, b) for a, b in zip(one[1].parameters(), two[1].parameters(), strict=True))

    return live


def through_bf16(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight.bfloat16())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.97))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.8)


def _fault(id: str, cause: str, text: str, where: str, live: Live, also: tuple[str, ...] = (), why: str = "") -> Fault:
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def _well(id: str, text: str, live: Live, true: tuple[str, ...] = (), kind: str = "healthy") -> Fault:
    def checked(folder: Path, rng: random.Random, k: int) -> None:
        live(folder, rng, k)
        for file in (folder / "before").rglob("*.safetensors"):
            one, two = load_file(file), load_file(folder / "echo" / file.relative_to(folder / "before"))
            assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), f"{id}: {file}"

    return Fault(id, "healthy", text, frozenset(), live=checked, formats=("live",), kind=kind, also=true)


LLAMA, QWEN, GPT2 = (partial(made, name) for name in ("Llama", "Qwen2", "gpt2"))

OPENED6_HUGGING = [
    _fault("sf01_no_biases", "A2", "Trainer, Qwen2: the file has no biases of the attention", "echo next",
           run(QWEN, spoil=rewritten(no_biases))),
    _fault("sf02_no_schedule_file", "B1", "Trainer: without the schedule's file the optimizer is not loaded either",
           "alone echo next early", run(LLAMA, spoil=no_schedule_file), also=("C1",)),
    _fault("sf03_schedule_begins", "C1", "Trainer: the schedule is made after the load", "alone echo next early",
           run(QWEN, loaded=schedule_begins)),
    _fault("sf04_head_of_the_base", "A2", "peft: the head that was trained as a whole is the base's again",
           "echo next", run(partial(adapted, head=True), loaded=head_of_the_base), also=("F5", "G6")),
    _fault("sf05_other_alpha", "H2", "peft: the resumed run's script has four times the alpha", "echo next early",
           other_alpha, also=("H1", "F5")),
    _fault("sf06_square_as_linear", "E1", "Trainer, GPT-2: square matrices were not transposed", "echo next early",
           run(GPT2, spoil=rewritten(square_as_linear))),
    _fault("sf07_one_token_more", "F7", "Trainer: the tokenizer has a new first token", "echo next early",
           run(LLAMA, spoil=rewritten(one_token_more)), also=("E1", "E8")),
    _fault("sf08_zero_page", "G5", "Trainer: a page of the weights is zeros", "alone echo next",
           run(LLAMA, spoil=zero_page)),
    _fault("sf09_counters_begin", "B2", "Trainer, Adafactor: the counters begin again", "alone echo next early",
           run(LLAMA, loaded=counters_begin, optim="adafactor")),
    _fault("sf10_norms_made_anew", "A3", "Trainer: norms are initialised after the load", "alone echo next",
           run(QWEN, loaded=norms_made_anew)),
    _fault("sf11_other_rope", "H2", "Trainer: another rotary base", "echo next early", other_rope, also=("H1",)),
    _fault("sf12_times_processes", "C3", "accelerate: the schedule is stepped for each of four processes",
           "next early", accelerated(adamw, times=4)),
    _fault("sf13_through_bf16", "D7", "accelerate: the weights passed through bf16", "alone echo next",
           accelerated(adamw, loaded=through_bf16)),
    _fault("sf14_untied_neox", "A2", "Trainer, GPT-NeoX: transformers 5.23 does not load an untied head on a resume",
           "echo next early", run(partial(model, "GPTNeoX"))),
    # healthy
    _well("sfh01_gemma", "Trainer: Gemma, constant after a warm-up",
          run(partial(model, "Gemma"), lr_scheduler_type="constant_with_warmup")),
    _well("sfh02_opt", "Trainer: OPT, inverse square root", run(partial(model, "OPT"),
          lr_scheduler_type="inverse_sqrt")),
    _well("sfh03_qwen3", "Trainer: Qwen3, polynomial", run(partial(model, "Qwen3"), lr_scheduler_type="polynomial")),
    _well("sfh04_rmsprop", "Trainer: Llama by RMSprop", run(LLAMA, optim="rmsprop", learning_rate=5e-4)),
    _well("sfh05_adagrad", "Trainer: Qwen2 by Adagrad, without clipping",
          run(QWEN, optim="adagrad", max_grad_norm=0.0, learning_rate=1e-2)),
    _well("sfh06_adapted", "peft: adapters and a whole head", run(partial(adapted, head=True))),
    _well("sfh07_momentum", "accelerate: SGD with momentum", accelerated(momentum)),
    _well("sfh08_average", "accelerate: an average that was registered", accelerated(adamw, average=True)),
    # on purpose
    _well("sfd01_longer", "Trainer: twice the updates", run(LLAMA, other_args={"max_steps": 200}),
          ("C4", "C2", "H1"), "deliberate"),
    _well("sfd02_linear", "Trainer: a linear schedule for the rest", run(QWEN,
          other_args={"lr_scheduler_type": "linear"}), ("C4", "C2", "H1"), "deliberate"),
    _well("sfd03_batch", "Trainer: twice the batch", run(GPT2, other_args={"per_device_train_batch_size": 8}),
          ("C10", "H1", "C6", "C7"), "deliberate"),
]  # fmt: skip
