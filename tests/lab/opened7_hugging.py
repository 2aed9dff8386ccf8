"""Trainer, peft and accelerate of the seventh sealed half: measured, then opened, and tuned on now."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import SIZE, trained
from tests.lab.opened2_hugging import Build, Process, accelerated, adapted, model, weights
from tests.lab.opened3_hugging import bert, bloom, called, each, other, t5

__all__ = ["OPENED7_HUGGING"]

Named = dict[str, torch.Tensor]
Live = Callable[[Path, random.Random, int], None]

ECHO = "echo next early"
LOUD = "alone echo next early"

mamba = other("Mamba", vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, use_mambapy=True)
bigcode = other("GPTBigCode", vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
distil = other("DistilBert", "ForMaskedLM", vocab_size=96, dim=32, hidden_dim=64, n_layers=2, n_heads=4,
               max_position_embeddings=64)  # fmt: skip


def run(build: Build, **more: Any) -> Live:
    """A run of the ``Trainer``; what transformers says of unusual arguments is left out."""

    def live(folder: Path, rng: random.Random, k: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(build, folder, rng, k, **more)

    return live


def in_turn(first: Build, second: Build) -> Build:
    """The first process makes its model by ``first``, the one that resumes by ``second``."""
    left = [first, second]
    return lambda seed: left.pop(0)(seed)


def with_eps(eps: float) -> Build:
    import transformers as hf

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=False, rms_norm_eps=eps))

    return build


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def without(*words: str) -> Callable[[Path], None]:
    return weights(lambda held: {n: t for n, t in held.items() if not any(word in n for word in words)})


def rotated(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of each head of eight from halves to pairs."""
    return tensor.view(-1, 2, 4).transpose(1, 2).reshape(tensor.shape)


def as_one_each(tensor: torch.Tensor) -> torch.Tensor:
    """Rows [q k v] of four heads read as all queries, all keys, all values."""
    return tensor.view(4, 3, 8, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def other_eps(folder: Path, rng: random.Random, k: int) -> None:
    run(in_turn(with_eps(1e-6), with_eps(1e-3)))(folder, rng, k)


def not_scaled(trainer: Any) -> None:
    """Defaults of another version: the step is no longer in proportion to the size of the weights."""
    for group in trainer.optimizer.param_groups:
        group["scale_parameter"] = not group["scale_parameter"]


def steps_anew(trainer: Any) -> None:
    """What the class initialises is initialised once more: the biases of the step sizes."""
    drawn = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, held in trainer.model.named_parameters():
            if name.endswith("dt_proj.bias"):
                held.copy_(torch.log(torch.expm1(0.001 + 0.099 * torch.rand(held.shape, generator=drawn))))


def halves_frozen(trainer: Any) -> None:
    """An adapter that was loaded for use is not trained: here the first layer's."""
    for name, held in trainer.model.named_parameters():
        if "lora_" in name and ".layers.0." in name:
            held.requires_grad_(False)


def sums_anew(process: Process) -> None:
    """The loop prepared its optimizer after the load."""
    for state in process.optimizer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"])
        state["sum"].zero_()


def anew_at_the_rate(process: Process) -> None:
    """The schedule's file was not read; the optimizer's learning rate is the loaded one."""
    inner = process.schedule.scheduler
    inner.last_epoch, inner._step_count = 0, 1
    inner._last_lr = list(inner.base_lrs)


# ---- the table -------------------------------------------------------------------------------------------------------


def _fault(id: str, cause: str, text: str, where: str, live: Live, also: tuple[str, ...] = (), why: str = "") -> Fault:
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


def _well(id: str, text: str, live: Live, true: tuple[str, ...] = (), kind: str = "healthy") -> Fault:
    def checked(folder: Path, rng: random.Random, k: int) -> None:
        live(folder, rng, k)
        files = list((folder / "before").rglob("*.safetensors"))
        assert files, id
        for file in files:
            one, two = load_file(file), load_file(folder / "echo" / file.relative_to(folder / "before"))
            assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one), f"{id}: {file}"

    return Fault(id, "healthy", text, frozenset(), live=checked, formats=("live",), kind=kind, also=true)


OPENED7_HUGGING = [
    _fault("svf01_no_positions", "A2", "Trainer, T5: the file has no biases of relative positions", ECHO,
           run(t5, spoil=without("relative_attention_bias"))),
    _fault("svf02_biases_added", "E12", "Trainer, GPT-2: row-parallel biases were added over two ranks", ECHO,
           run(model("gpt2"), spoil=each(called("c_proj.bias"), lambda tensor: 2 * tensor))),
    _fault("svf03_biases_rotated", "E5", "Trainer, Qwen2: biases of q and k in interleaved order, weights not", ECHO,
           run(model("Qwen2"), spoil=each(called("q_proj.bias", "k_proj.bias"), rotated)), also=("E1", "E6")),
    _fault("svf04_other_eps", "H2", "Trainer: another eps of the norms", ECHO, other_eps, also=("H1",)),
    _fault("svf05_not_scaled", "H1", "Trainer, Adafactor: groups with another default", ECHO,
           run(model("Llama"), loaded=not_scaled, optim="adafactor")),
    _fault("svf06_steps_anew", "A2", "Trainer, Mamba: biases of the step sizes are initialised after the load", ECHO,
           run(mamba, loaded=steps_anew)),
    _fault("svf07_fused_rows", "E4", "Trainer, BLOOM: rows by head read as [Q; K; V]", ECHO,
           run(bloom, spoil=each(called("query_key_value.weight", "query_key_value.bias"), as_one_each)),
           also=("E1", "E6")),
    _fault("svf08_halves_frozen", "H1", "peft: one layer's adapters are not trained any more", "next early",
           run(adapted, loaded=halves_frozen)),
    _fault("svf09_sums_anew", "B1", "accelerate: Adagrad's sums begin again", LOUD,
           partial(accelerated, kind=torch.optim.Adagrad, loaded=sums_anew)),
    _fault("svf10_anew_at_the_rate", "C1", "accelerate: the schedule begins again, at the rate that was loaded", LOUD,
           partial(accelerated, loaded=anew_at_the_rate), also=("B8",),
           why="the groups' rate is not the one of the schedule's position"),
    # healthy
    _well("svh50_mamba", "Trainer: Mamba", run(mamba)),
    _well("svh51_bigcode", "Trainer: GPT-BigCode, one key for all heads, linear",
          run(bigcode, lr_scheduler_type="linear")),
    _well("svh52_distil", "Trainer: DistilBERT, accumulated", run(distil, gradient_accumulation_steps=3)),
    _well("svh53_bert", "Trainer: BERT by SGD, constant", run(bert, optim="sgd", lr_scheduler_type="constant")),
    _well("svh54_olmo", "Trainer: OLMo 2, other betas, a floor", run(model("Olmo2"), adam_beta2=0.95,
          lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 2e-4})),
    _well("svh55_starcoder", "Trainer: Starcoder2 by Adagrad", run(model("Starcoder2"), optim="adagrad",
          learning_rate=1e-2)),
    _well("svh56_t5", "Trainer: T5, unclipped", run(t5, max_grad_norm=0.0)),
    _well("svh57_adapters", "peft: adapters by RMSprop", run(adapted, optim="rmsprop", learning_rate=5e-4)),
    _well("svh58_radam", "accelerate: RAdam, an average", partial(accelerated, kind=torch.optim.RAdam)),
    _well("svh59_adadelta", "accelerate: Adadelta", partial(accelerated, kind=torch.optim.Adadelta)),
    # on purpose
    _well("svd50_longer_linear", "Trainer: more updates on a line", run(model("Qwen2"), lr_scheduler_type="linear",
          other_args={"max_steps": 160}), ("C4", "C2", "H1"), "deliberate"),
    _well("svd51_parts", "Trainer: twice the parts of an update", run(model("Llama"),
          other_args={"gradient_accumulation_steps": 2}), ("C10", "H1", "C6", "C7"), "deliberate"),
    _well("svd52_held", "Trainer: the rate is constant from here on", run(bloom,
          other_args={"lr_scheduler_type": "constant"}), ("C4", "C2", "H1", "B8"), "deliberate"),
]  # fmt: skip
