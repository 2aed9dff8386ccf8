"""Trainer, peft and accelerate of the eighth sealed half: measured, then opened, and tuned on now."""

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
from tests.lab.hugging import SIZE, Rows, made, trained
from tests.lab.opened2_hugging import Build, model, weights
from tests.lab.opened3_hugging import called, each, other

__all__ = ["OPENED8_HUGGING"]

Live = Callable[[Path, random.Random, int], None]

ECHO = "echo next early"
LOUD = "alone echo next early"

neo = other("GPTNeo", vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
            attention_types=[[["global", "local"], 1]], window_size=8)  # fmt: skip
albert = other("Albert", "ForMaskedLM", vocab_size=96, embedding_size=16, hidden_size=32, intermediate_size=64,
               num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)  # fmt: skip
bart = other("Bart", "ForConditionalGeneration", vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=2,
             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
             max_position_embeddings=64, dropout=0.1, decoder_start_token_id=2)  # fmt: skip
electra = other("Electra", "ForMaskedLM", vocab_size=96, embedding_size=16, hidden_size=32, intermediate_size=64,
                num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)  # fmt: skip


def tuned(*modules: str, kind: str = "LoraConfig", name: str = "Llama", **more: Any) -> Build:
    """With peft's adapters of some kind on these modules."""

    def build(seed: int) -> Any:
        import peft

        found = made(name, seed)
        torch.manual_seed(seed)
        return peft.get_peft_model(found, getattr(peft, kind)(target_modules=list(modules), **more))

    return build


def gpt2(activation: str) -> Build:
    import transformers as hf

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(bos_token_id=1, eos_token_id=2, activation_function=activation, **sizes)
        )

    return build


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


def in_accelerator(
    folder: Path,
    rng: random.Random,
    k: int,
    *,
    kind: Any = torch.optim.AdamW,
    scheduled: bool = True,
    late: bool = False,
) -> None:
    """A loop with accelerate.

    Args:
        scheduled: the schedule is prepared too, and therefore stored.
        late: the process that resumes prepares its optimizer and schedule after the load.
    """
    import transformers as hf
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    seed, start = rng.randrange(1 << 16), rng.randrange(8, 40)
    rows = Rows(seed).rows

    def process(number: int, load: Path | None) -> tuple[Any, ...]:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        accelerator = Accelerator(cpu=True)
        inner = made("Qwen3", number)
        optimizer = kind(inner.parameters(), lr=2e-3)
        schedule = hf.get_cosine_schedule_with_warmup(optimizer, 6, 120)
        rest = (optimizer, schedule) if scheduled else (optimizer,)
        inner = accelerator.prepare(inner)
        if not late or load is None:
            accelerator.prepare(*rest)
        if load is not None:
            accelerator.load_state(str(load))
        if late and load is not None:
            accelerator.prepare(*rest)
        return accelerator, inner, accelerator._optimizers[0], (*accelerator._schedulers, schedule)[0]

    def go(parts: tuple[Any, ...], begin: int, end: int) -> None:
        accelerator, held, optimizer, schedule = parts
        for step in range(begin, end):
            tokens = rows[4 * step % 252 :][:4]
            accelerator.backward(held(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(held.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    one = process(seed, None)
    go(one, 0, start)
    before = folder / "before" / f"checkpoint_{start}"
    one[0].save_state(str(before))
    two = process(seed + 1, before)
    two[0].save_state(str(folder / "echo" / f"checkpoint_{start}"))
    go(two, start, start + k)
    two[0].save_state(str(folder / "after" / f"checkpoint_{start + k}"))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def without(*words: str) -> Callable[[Path], None]:
    return weights(lambda held: {n: t for n, t in held.items() if not any(word in n for word in words)})


def layer_twice(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Both files of a pipeline's stages were written from the first one's layer."""
    return {n: held[n.replace(".layers.1.", ".layers.0.")].clone() for n in held}


def by_key_group(tensor: torch.Tensor) -> torch.Tensor:
    """[Q; K; V] of four query and two key heads of eight, taken for rows [q q k v] of each of two groups."""
    parts = tensor.view(2, 4, 8, *tensor.shape[1:])
    return torch.cat([parts[:, :2].flatten(0, 2), parts[:, 2].flatten(0, 1), parts[:, 3].flatten(0, 1)])


def adapters_renamed(folder: Path) -> None:
    """Written while the model was wrapped once more: names that peft does not know are left out."""
    file = folder / "adapter_model.safetensors"
    held = {name.replace("base_model.model.", "base_model.model.module."): t for name, t in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


def schedule_of_the_begin(folder: Path) -> None:
    """The schedule's file is the one that was written before the first update."""
    content = torch.load(folder / "scheduler.pt", weights_only=False)  # the lab's own
    content |= {"last_epoch": 0, "_step_count": 1, "_last_lr": [0.0 for _ in content["_last_lr"]]}
    torch.save(content, folder / "scheduler.pt")


def optimizer_made_again(trainer: Any) -> None:
    """A callback makes the optimizer again, at the learning rate of the arguments; the schedule goes on with it."""
    inner = trainer.optimizer.optimizer
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in inner.param_groups]
    trainer.optimizer.optimizer = torch.optim.AdamW(groups, lr=trainer.args.learning_rate)


# ---- on purpose ------------------------------------------------------------------------------------------------------


def more_decay(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.2


def a_is_kept(trainer: Any) -> None:
    for name, held in trainer.model.named_parameters():
        if "lora_A" in name:
            held.requires_grad_(False)


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


def _turned(first: Build, second: Build) -> Live:
    """As `run` of both `in_turn`, which can be made more than once."""
    return lambda folder, rng, k: run(in_turn(first, second))(folder, rng, k)


OPENED8_HUGGING = [
    _fault("ei90_head_norms", "A3", "Trainer, Qwen3: norms of queries and keys have no names in the file", "echo next",
           run(model("Qwen3"), spoil=without("q_norm", "k_norm")), also=("A2",)),
    _fault("ei91_made_again", "B1", "Trainer: the optimizer is made again after the load", LOUD,
           run(model("Llama"), loaded=optimizer_made_again), also=("B8",), why="state and learning rate are new"),
    _fault("ei92_schedule_of_the_begin", "C1", "Trainer, Phi: the schedule's file is of the begin", LOUD,
           run(other("Phi", **SIZE), spoil=schedule_of_the_begin), also=("B8", "C2", "G6")),
    _fault("ei93_fewer_epochs", "C4", "Trainer, Qwen2: fewer epochs, on a line", ECHO,
           run(model("Qwen2"), lr_scheduler_type="linear", max_steps=-1, num_train_epochs=3,
               other_args={"num_train_epochs": 1}), also=("C2", "H1", "B8")),
    _fault("ei94_adapters_renamed", "F5", "peft: names of the adapters are other ones, so that they are new", ECHO,
           run(tuned("q_proj", "k_proj", "down_proj", r=4, lora_alpha=16), spoil=adapters_renamed),
           also=("A1", "A2")),
    _fault("ei95_by_key_group", "E4", "Trainer, Phi-3: fused rows taken for another layout", ECHO,
           run(model("Phi3"), spoil=each(called("qkv_proj.weight"), by_key_group)), also=("E1", "E6")),
    _fault("ei96_layer_twice", "E9", "Trainer, Granite: the first layer in the place of the second one", ECHO,
           run(model("Granite"), spoil=weights(layer_twice)), also=("G6",)),
    _fault("ei97_other_activation", "H2", "Trainer, GPT-2: another activation", ECHO,
           _turned(gpt2("gelu_new"), gpt2("relu")), also=("H1",)),
    _fault("ei98_twice_the_batch", "C10", "Trainer, GPT-Neo: twice the batch", ECHO,
           run(neo, other_args={"per_device_train_batch_size": 8}), also=("H1", "C6", "C7")),
    _fault("ei99_schedule_unknown", "C1", "accelerate: a schedule that was not prepared, and is not stored",
           "next early", partial(in_accelerator, scheduled=False), also=("B8", "C2", "H1")),
    _fault("ei9a_prepared_late", "B1", "accelerate: the optimizer is prepared after the load", LOUD,
           partial(in_accelerator, late=True), also=("C1",), why="both happened"),
    # healthy
    _well("eih60_phi", "Trainer: Phi, cosine with restarts", run(other("Phi", **SIZE),
          lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3})),
    _well("eih61_neo", "Trainer: GPT-Neo by RMSprop, linear", run(neo, optim="rmsprop", learning_rate=3e-4,
          lr_scheduler_type="linear")),
    _well("eih62_albert", "Trainer: ALBERT, one layer three times", run(albert)),
    _well("eih63_bart", "Trainer: BART, dropout, accumulated", run(bart, gradient_accumulation_steps=2)),
    _well("eih64_cohere", "Trainer: Cohere by Adafactor", run(model("Cohere"), optim="adafactor")),
    _well("eih65_nemotron", "Trainer: Nemotron, polynomial", run(model("Nemotron"), lr_scheduler_type="polynomial")),
    _well("eih66_smollm", "Trainer: SmolLM3, warm-up, stable, decay", run(model("SmolLM3"),
          lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 30})),
    _well("eih67_electra", "Trainer: ELECTRA, unclipped, other betas", run(electra, max_grad_norm=0.0,
          adam_beta1=0.8, adam_beta2=0.99)),
    _well("eih68_ia3", "peft: IA3", run(tuned("k_proj", "v_proj", "down_proj", kind="IA3Config",
          feedforward_modules=["down_proj"]))),
    _well("eih69_dora", "peft: DoRA on GPT-2", run(tuned("c_attn", "c_proj", name="gpt2", r=4, use_dora=True,
          fan_in_fan_out=True))),
    _well("eih70_accelerate", "accelerate: NAdam under a cosine", partial(in_accelerator, kind=torch.optim.NAdam)),
    # on purpose
    _well("eid40_shorter", "Trainer: the cosine ends sooner", run(model("Granite"), other_args={"max_steps": 95}),
          ("C4", "C2", "H1", "B8"), "deliberate"),
    _well("eid41_more_decay", "Trainer: four times the decay", run(model("Qwen3"), loaded=more_decay),
          ("H1", "B7", "C5"), "deliberate"),
    _well("eid42_a_is_kept", "peft: B alone is trained from here on", run(tuned("q_proj", "v_proj", r=4),
          loaded=a_is_kept), ("H1",), "deliberate"),
]  # fmt: skip
