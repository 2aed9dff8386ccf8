"""transformers' ``Trainer``, accelerate and peft of the third sealed half: opened, and tuned on now."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.fault import Fault, seen
from tests.lab.hugging import SIZE
from tests.lab.opened2_hugging import Build, Process, accelerated, adapted, ill, meant, model, weights, well

__all__ = ["OPENED3_HUGGING"]

Named = dict[str, torch.Tensor]


# ---- models ----------------------------------------------------------------------------------------------------------


def other(name: str, kind: str = "ForCausalLM", **more: Any) -> Build:
    """A small model of a family that has words of its own for its sizes."""

    def build(seed: int) -> Any:
        import transformers as hf

        torch.manual_seed(seed)
        config = getattr(hf, f"{name}Config")(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | more)
        return getattr(hf, f"{name}{kind}")(config)

    return build


falcon = other("Falcon", vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bias=True,
               new_decoder_architecture=True, num_kv_heads=2, alibi=False)  # fmt: skip
bloom = other("Bloom", vocab_size=96, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.1)
bert = other("Bert", "ForMaskedLM", **{n: v for n, v in SIZE.items() if n != "num_key_value_heads"})
t5 = other("T5", "ForConditionalGeneration", vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
           decoder_start_token_id=0)  # fmt: skip
gptj = other("GPTJ", vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def each(pick: Callable[[str], bool], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """These tensors of the file that is resumed from become something else."""
    return weights(lambda held: {n: change(t).contiguous() if pick(n) else t for n, t in held.items()})


def called(*words: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(words)


def adapters_exchanged(folder: Path) -> None:
    """Adapters of two layers in each other's place."""
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    turned = {n.replace(".layers.0.", "\0").replace(".layers.1.", ".layers.0.").replace("\0", ".layers.1."): t
              for n, t in held.items()}  # fmt: skip
    save_file(turned, file, metadata={"format": "pt"})


def earlier(folder: Path) -> None:
    """The trainer's file is of a few updates before."""
    file = folder / "trainer_state.json"
    state = json.loads(file.read_text())
    state["global_step"] -= 5
    file.write_text(json.dumps(state))


def numbers_reversed(folder: Path) -> None:
    """The last param group lists its parameters in the other order."""
    content = torch.load(folder / "optimizer.pt", weights_only=False)  # the lab's own
    group = content["param_groups"][-1]
    group["params"] = group["params"][::-1]
    torch.save(content, folder / "optimizer.pt")


def other_random(folder: Path) -> None:
    content = torch.load(folder / "rng_state.pth", weights_only=False)  # the lab's own
    content["cpu"] = torch.Generator().manual_seed(77).get_state()
    torch.save(content, folder / "rng_state.pth")


def rows_lost(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        if "exp_avg_sq_row" in state:
            state["exp_avg_sq_row"].zero_()


def momentum_halved(trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].mul_(0.5)


def group_forgotten(trainer: Any) -> None:
    """The groups were made anew without the rule of what does not decay."""
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.05


def per_key_value(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of queries, key and value of each of two groups, read as all queries, all keys, all values."""
    parts = tensor.view(2, 4, 8, *tensor.shape[1:])
    return torch.cat([parts[:, :2].flatten(0, 2), parts[:, 2].flatten(0, 1), parts[:, 3].flatten(0, 1)])


def halves_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def from_average(process: Process) -> None:
    with torch.no_grad():
        for name, weight in process.model.named_parameters():
            weight.copy_(process.average.held[name])


def schedule_anew(process: Process) -> None:
    """The schedule, and the lr with it, as they are before the first update."""
    inner = process.schedule.scheduler
    inner.last_epoch, inner._step_count = 0, 1
    inner._last_lr = list(inner.base_lrs)
    for group in process.optimizer.param_groups:
        group["lr"] = group["initial_lr"]


def accelerate(id: str, cause: str, text: str, where: str, *also: str, why: str = "", **more: Any) -> Fault:
    live = partial(accelerated, **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also, why=why)


ECHO = "echo next early"
LOUD = "alone echo next early"
BRIEF = "echo next"

OPENED3_HUGGING: list[Fault] = [
    well("m80_trainer_falcon", "Falcon: fused rows by group, biases", falcon, lr_scheduler_type="polynomial"),
    well("m81_trainer_bloom", "BLOOM with dropout, unclipped", bloom, max_grad_norm=0.0),
    well("m82_trainer_bert", "BERT, masked or not, a warm-up that goes on", bert, warmup_steps=70),
    well("m83_trainer_t5", "T5 by Adafactor, constant", t5, optim="adafactor", lr_scheduler_type="constant"),
    well("m84_trainer_gptj", "GPT-J by SGD", gptj, optim="sgd", learning_rate=0.05),
    well("m85_trainer_stablelm", "StableLM, a floor under the cosine", model("StableLm"),
         lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4}),
    well("m86_trainer_starcoder", "Starcoder2, labels smoothed, four parts", model("Starcoder2"),
         label_smoothing_factor=0.1, gradient_accumulation_steps=4),
    well("m87_trainer_gemma2", "Gemma 2, warm-up, stable, decay", model("Gemma2"),
         lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 30}),
    Fault("m88_accelerate_sgd", "healthy", "accelerate with SGD and momentum", frozenset(), formats=("live",),
          live=partial(accelerated, kind=partial(torch.optim.SGD, momentum=0.9)), kind="healthy"),
    meant("p30_trainer_other_betas", "another clipping norm and another seed of the data", model("Llama"),
          ("H1", "C7", "C8"), other_args={"max_grad_norm": 0.1, "data_seed": 5}),
    meant("p31_trainer_longer", "three times as many steps", model("Qwen3"), ("H1", "C2", "C4"),
          other_args={"max_steps": 300}),
    # ---- faults
    ill("n01_conv_for_linear", "E1", "square matrices of GPT-2's attention transposed", ECHO, model("gpt2"),
        also=("E4", "A2"), why="another axis", spoil=each(called("attn.c_proj.weight"), lambda t: t.T)),
    ill("n02_halves_exchanged", "E3", "gate and up of Phi-3's fused rows exchanged", ECHO, model("Phi3"),
        also=("E1", "E2"), why="halves of a fused tensor", spoil=each(called("gate_up_proj.weight"), halves_exchanged)),
    ill("n03_longer_warm_up", "C4", "a longer warm-up", ECHO, model("Llama"), also=("C1", "C2", "H1"),
        why="another curve, by an argument", other_args={"warmup_steps": 60}),
    ill("n04_adapters_exchanged", "F5", "adapters of two layers exchanged", ECHO, adapted,
        also=("E9", "A2"), why="whole adapters elsewhere", spoil=adapters_exchanged),
    ill("n05_earlier_trainer", "C9", "the trainer counts five updates less than the optimizer", LOUD, model("Qwen2"),
        also=("B2", "C6", "G6"), why="counters disagree", spoil=earlier),
    ill("n06_numbers_reversed", "B5", "a group's state in the other order of its parameters", ECHO, model("Llama"),
        also=("E13", "E9"), why="state of other parameters", spoil=numbers_reversed),
    ill("n07_rows_lost", "B11", "Adafactor's rows begin at 0", LOUD, model("Mistral"),
        also=("B1", "B3", "B4"), why="a factor of a second moment was lost", loaded=rows_lost, optim="adafactor"),
    ill("n08_rows_by_group", "E4", "Falcon's rows by group read as [Q; K; V]", ECHO, falcon, also=("E1", "E6"),
        why="fused rows in another layout", spoil=each(called("query_key_value.weight"), per_key_value)),
    ill("n09_other_random", "C8", "the random state is another run's", "echo", bloom, also=("C7",),
        why="a random state that was not restored", spoil=other_random),
    ill("n10_exported", "D7", "weights that went through bf16 were resumed from", BRIEF, model("Gemma"),
        also=("D1",), why="weights are their own masters",
        spoil=each(lambda name: True, lambda t: t.bfloat16().float())),
    ill("n11_group_forgotten", "B7", "norms decay as matrices do", ECHO, model("Qwen3"), also=("H1",),
        why="the groups tell the new value", loaded=group_forgotten),
    ill("n12_momentum_averaged", "E12", "SGD's momentum was averaged with nothing", BRIEF, model("Llama"),
        also=("B6", "E13"), why="one factor for all states", loaded=momentum_halved, optim="sgd",
        learning_rate=0.02, optim_args="momentum=0.9"),
    accelerate("n13_average_for_weights", "F4", "the average is trained on", BRIEF, "A2", "G6",
               why="an average in the weights' place", loaded=from_average),
    accelerate("n14_schedule_anew", "C1", "schedule and lr begin anew", LOUD, "B8", "C2",
               why="a position behind the step's", loaded=schedule_anew),
]  # fmt: skip
