"""Faults of the sixteenth sealed half, about half of them beside a change that is innocent.

``WORDS`` has for each fault what a right first answer says: a row a meaning, any word of the row will do. They are
looked for, without regard to case, in everything that is said of the first cause: title, proof, expectation, remedy.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import opened16_healthy as well
from tests.lab import opened16_nets as nets
from tests.lab import optimizers as packaged
from tests.lab.fault import Fault, Lab, masters, seen
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, fault
from tests.lab.live_healthy import Tied, optim, plain
from tests.lab.opened16_deliberate import (
    AdaptersOnly,
    Regrown,
    Renamed,
    Told,
    both,
    frozen,
    larger,
    replaced,
    settings,
    shared,
    soup,
    turned,
)
from tests.lab.opened16_deliberate import other_data as elsewhere
from tests.lab.opened16_deliberate import valued as value_anew
from tests.lab.opened16_nets import Free, Lora, Rebuilt, Remember, adapted, draws, layers, mlp, vocabulary
from tests.lab.state import State

__all__ = ["FAULTS16", "WORDS"]

T = torch.optim
ALL = "echo next early"
OLD = ("torch_save", "folder", "lightning")
slower = settings(lr=lambda lr: lr / 3)


def without(*parts: str) -> Any:
    """A load that is not strict and leaves these out."""

    def take(self: Any, weights: dict[str, Any]) -> None:
        self.module.load_state_dict({n: w for n, w in weights.items() if not any(p in n for p in parts)}, strict=False)

    return take


def states(self: Any) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
    return [(n, w, o.state[w]) for o in self.optimizers for n, w in self.module.named_parameters() if w in o.state]


def moved_states(self: Any) -> None:
    """Each parameter's state goes to the next one of the same shape."""
    byshape: dict[Any, list[torch.Tensor]] = {}
    for _, w, _ in states(self):
        byshape.setdefault(tuple(w.shape), []).append(w)
    state = self.optimizers[0].state
    for ws in byshape.values():
        old = [state[w] for w in ws]
        for w, one in zip(ws, old[1:] + old[:1], strict=True):
            state[w] = one


class Twins(Free):
    """Two critics of one shape, each with its optimizer."""

    layouts = ("torch_save", "lightning")

    def build(self) -> nn.Module:
        return nn.ModuleDict({"q1": mlp(16, 48, 1), "q2": mlp(16, 48, 1)})

    def made(self) -> list[T.Optimizer]:
        return [T.Adam(self.module[name].parameters(), lr=2e-3) for name in ("q1", "q2")]

    def schedule(self, optimizer: Any) -> Any:
        return None

    def gradients(self) -> None:
        pass

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        aim = self.target(x).mean(-1)
        return F.mse_loss(self.module["q1"](x)[:, 0], aim) + F.mse_loss(self.module["q2"](x)[:, 0], aim**2)


def exchanged(self: Any) -> None:
    one, two = (o.state_dict() for o in self.optimizers)
    self.optimizers[0].load_state_dict(two)
    self.optimizers[1].load_state_dict(one)


def averaged(self: Any) -> None:
    with torch.no_grad():
        for name, w in self.module.named_parameters():
            w.copy_(self.extra["ema"]["shadow_params"][name])


class Normed(Regrown):
    """Batch norms under a head that is exchanged; the running statistics are not loaded."""

    size = 16

    def build(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "body": nn.Sequential(
                    nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()
                ),
                "head": nn.Linear(48, self.size),
            }
        )

    def regrow(self) -> nn.Module:
        self.size = 6
        return self.build()

    def fill(self, weights: dict[str, Any]) -> None:
        shared(self, {n: w for n, w in weights.items() if "running" not in n and "num_batches" not in n})

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out = self.module["head"](self.module["body"](x + 0.5))
        return F.mse_loss(out, self.target(x)[:, : out.shape[1]])


class Attention(Free):
    """One fused map for q, k and v."""

    def build(self) -> nn.Module:
        found = nn.Module()
        found.c_attn, found.c_proj, found.out = nn.Linear(16, 48), nn.Linear(16, 16), mlp(16, 48, 16)
        return found

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        q, k, v = (one.view(4, 8, 4, 4).transpose(1, 2) for one in m.c_attn(x.view(4, 8, 16)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16)
        return F.mse_loss(m.out(x + m.c_proj(h)), self.target(x))

    def take(self, weights: dict[str, Any]) -> None:
        for name in ("c_attn.weight", "c_attn.bias"):
            w = weights[name]
            weights[name] = w.view(3, 4, 4, *w.shape[1:]).transpose(0, 1).reshape(w.shape)
        super().take(weights)


def gate_up(self: Any, weights: dict[str, Any]) -> None:
    for name in [n for n in weights if "gate_proj" in n]:
        other = name.replace("gate_proj", "up_proj")
        weights[name], weights[other] = weights[other], weights[name]
    Loop.take(self, weights)


def swapped_and_more(self: Any, weights: Any, config: Any) -> Any:
    weights, config = layers([1, 0])(self, weights, config)
    return vocabulary(8)(self, weights, config)


def cast_and_more(self: Any, weights: Any, config: Any) -> Any:
    weights = {n: w.bfloat16().float() for n, w in weights.items()}
    return vocabulary(8)(self, weights, config)


def norms_and_more(self: Any, weights: Any, config: Any) -> Any:
    weights = {n: torch.ones_like(w) if n.endswith("norm.weight") else w for n, w in weights.items()}
    return vocabulary(8)(self, weights, config)


def turned_and_more(self: Any, weights: Any, config: Any) -> Any:
    weights = {n: w.T.contiguous() if "o_proj" in n else w for n, w in weights.items()}
    return vocabulary(8)(self, weights, config)


def adapters_and_less(self: Any, weights: Any, config: Any) -> Any:
    weights["model.layers.1.mlp.down_proj.weight"] = draws(3, *weights["model.layers.1.mlp.down_proj.weight"].shape) / 9
    return adapted(self, weights, config)


def experts(self: Any, weights: dict[str, Any]) -> None:
    found = dict(weights)
    for name, w in weights.items():
        if ".layers.0.mlp.experts." in name:
            head, _, rest = name.partition(".experts.")
            number, _, leaf = rest.partition(".")
            found[f"{head}.experts.{(int(number) + 1) % 4}.{leaf}"] = w
    Loop.take(self, found)


def half_old(self: Any) -> None:
    """The second half of the rows, weights and moments, is of the earlier save."""
    past = type(self).past
    order = [w for group in self.optimizers[0].param_groups for w in group["params"]]
    numbers = {id(w): n for n, w in enumerate(order)}
    with torch.no_grad():
        for name, w, state in states(self):
            if w.ndim < 2:
                continue
            half = len(w) // 2
            w[half:] = past["model"][name][half:]
            old = past["optimizer"]["state"][numbers[id(w)]]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part][half:] = old[part][half:]


def old_optimizer(self: Any) -> None:
    kept = [dict(group) for group in self.optimizers[0].param_groups]
    self.optimizers[0].load_state_dict(copy.deepcopy(type(self).past["optimizer"]))
    for group, was in zip(self.optimizers[0].param_groups, kept, strict=True):
        group |= {n: v for n, v in was.items() if n != "params"}


def each(change: Any, *parts: str) -> Any:
    """``change`` of every state, or of those with these names."""

    def loaded(self: Any) -> None:
        for name, _, state in states(self):
            if not parts or any(p in name for p in parts):
                change(state)

    return loaded


def no_squares(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].zero_()


def no_moments(state: dict[str, Any]) -> None:
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


def no_count(state: dict[str, Any]) -> None:
    state["step"] = torch.zeros_like(state["step"])


def rounded(state: dict[str, Any]) -> None:
    for part in ("exp_avg", "exp_avg_sq"):
        state[part] = state[part].bfloat16().float()


def halves_exchanged(state: dict[str, Any]) -> None:
    for part in ("exp_avg", "exp_avg_sq"):
        if state[part].ndim == 2 and len(state[part]) % 2 == 0:
            state[part] = state[part].roll(len(state[part]) // 2, 0)


def shifted(self: Any) -> None:
    """All moments as one flat line, eight places further on."""
    for part in ("exp_avg", "exp_avg_sq"):
        line = torch.cat([state[part].flatten() for *_, state in states(self)]).roll(8)
        for _, w, state in states(self):
            state[part], line = line[: w.numel()].view(w.shape).clone(), line[w.numel() :]


def merged_twice(self: Any, weights: dict[str, Any]) -> None:
    for name in [n for n in weights if "lora_A" in n]:
        b = weights[name.replace("lora_A", "lora_B")]
        stem = name.replace("lora_A.", "")
        weights[stem] = weights[stem] + 2.0 * b @ weights[name]
    Loop.take(self, weights)


def other_base(self: Any, weights: dict[str, Any]) -> None:
    for n, (name, w) in enumerate(weights.items()):
        if "lora_" not in name and w.ndim == 2:
            weights[name] = w + 0.02 * draws(n, *w.shape)
    Loop.take(self, weights)


def ahead(self: Any) -> None:
    for _ in range(3):
        self.optimizers[0].step()  # nothing has a gradient
        self.schedules[0].step()


def peak(self: Any) -> None:
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr


def scale(self: Any) -> None:
    self.extra["scaler"] |= {"scale": 65536.0, "_growth_tracker": 0}


def apart(self: Any) -> None:
    """The head becomes a parameter of its own, in no group."""
    self.module.put(
        "lm_head.weight",
        nn.Parameter(dict(self.module.named_parameters())["model.embed_tokens.weight"].detach().clone()),
    )


def page(self: Any) -> None:
    with torch.no_grad():
        dict(self.module.named_parameters())["model.layers.0.mlp.gate_proj.weight"].view(-1)[1024:2048] = 0


def flipped(self: Any) -> None:
    state = next(s for n, _, s in states(self) if n == "body.2.weight")
    state["exp_avg_sq"].view(torch.int32).view(-1)[100] ^= 1 << 29


def not_a_number(self: Any) -> None:
    told = self.extra["ema"]
    told["decay"] = 0.99
    told["shadow_params"]["0.weight"].view(-1)[17] = float("nan")


def targets(self: Any) -> None:
    for name in ("actor", "critic"):
        self.module[f"{name}_target"].load_state_dict(self.module[name].state_dict())


def statistics(self: Any) -> None:
    m = self.module
    m.obs_mean.zero_()
    m.obs_var.fill_(1.0)
    m.obs_count.fill_(1e-4)


def uncounted(self: Any) -> None:
    self.extra["swa_state_dict"]["n_averaged"] = torch.tensor(0)


def slow_lost(state: dict[str, Any]) -> None:
    state.pop("slow_buffer")


def slow_again(self: Any) -> None:
    """The slow weights begin anew at the fast ones."""
    for _, w, state in states(self):
        state["slow_buffer"] = w.detach().clone()


def absmax(self: Any) -> None:
    for _, _, state in states(self):
        for name in list(state):
            if "absmax" in name and torch.is_tensor(state[name]):
                state[name] = torch.ones_like(state[name])


def unmasked(self: Any) -> None:
    for one in self.module:
        if hasattr(one, "weight_mask"):
            one.weight_mask.fill_(1.0)


def decays_swapped(self: Any) -> None:
    a, b = self.optimizers[0].param_groups
    a["weight_decay"], b["weight_decay"] = b["weight_decay"], a["weight_decay"]


def critic_lost(self: Any) -> None:
    self.optimizers[1].state.clear()
    for group in self.optimizers[0].param_groups:
        group["lr"] /= 2


def unbiased(self: Any) -> None:
    for buffer in self.module.buffers():
        buffer.zero_()


def layer_lost(self: Any) -> None:
    for name, w in self.module.named_parameters():
        if ".layers.1." in name:
            self.optimizers[0].state.pop(w, None)


def cosine(self: Any, optimizer: Any) -> Any:
    return T.lr_scheduler.CosineAnnealingLR(optimizer, self.config.total, eta_min=1e-5)


class Positions(well.Curriculum):
    """Begins at its positions of the start."""


# ---- states of the lab's runs, in the layouts of several ranks -------------------------------------------------------


def rebuilt_masters(state: State, lab: Lab) -> State:
    state = state.clone()
    state.masters = {n: state.params[n].float() for n in state.masters}
    return state.declared(total=state.config.total + 200)


def old_masters(state: State, lab: Lab) -> State:
    state = state.clone()
    state.masters = lab.run.stale.masters
    return state.declared(batch=2 * state.config.batch)


def no_amax(state: State, lab: Lab) -> State:
    state = state.clone()
    for name, b in state.buffers.items():
        state.buffers[name] = torch.zeros_like(b) if "amax" in name else torch.ones_like(b)
    return state.declared(lr=state.config.lr * 0.7, min_lr=state.config.min_lr * 0.7)


def other_order(state: State, lab: Lab) -> State:
    return state.told(data_seed=4321).declared(weight_decay=0.02)


def staged(id: str, cause: str, text: str, where: str, restore: Any, *also: str, **more: Any) -> Fault:
    return Fault(id, cause, text, seen(where), restore=restore, also=also, **more)


# ---- the Trainer -----------------------------------------------------------------------------------------------------


def removed(*names: str) -> Any:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def no_norms(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    kept = load_file(folder / "model.safetensors")
    save_file(
        {n: w for n, w in kept.items() if "norm" not in n}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def counted_on(folder: Path) -> None:
    told = torch.load(folder / "scheduler.pt", weights_only=False)
    told["last_epoch"] += 9
    told["_step_count"] += 9
    torch.save(told, folder / "scheduler.pt")


def hugging(
    id: str, cause: str, text: str, where: str, also: tuple[str, ...] = (), name: str = "Llama", **more: Any
) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, cause, text, seen(where), live=live, formats=("live",), also=also)


BIG = {"heads": 4, "groups": 2, "hidden": 48, "ffn": 144}
WORDS: dict[str, tuple[tuple[str, ...], ...]] = {}


def told(one: Fault, *meanings: str) -> Fault:
    WORDS[one.id] = tuple(tuple(words.split("|")) for words in meanings)
    return one


FAULTS16: tuple[Fault, ...] = (
    told(
        fault(
            "ta01_attention_left_out",
            "A2",
            "attention of a layer is not loaded; the rate is lowered on purpose",
            ALL,
            take=without("layers.1.self_attn"),
            loaded=slower,
        ),
        "not loaded|initial",
        "layers.1",
    ),
    told(
        fault(
            "ta02_state_of_the_next",
            "B5",
            "states go to the next parameter of that shape; another weight decay",
            ALL,
            loaded=both(moved_states, settings(weight_decay=0.03)),
            layouts=OLD,
        ),
        "wrong parameter|another parameter|other parameter",
    ),
    told(
        fault(
            "ta03_tokens_in_front",
            "F7",
            "new tokens are put at row 4 and shift all others; the optimizer is new",
            ALL,
            base=Rebuilt,
            change=vocabulary(8, 4),
            keep=False,
        ),
        "row",
        "shift|moved|other row|vocabulary",
    ),
    told(
        fault(
            "ta04_twins",
            "B5",
            "the optimizers of two critics are exchanged; the rates are lowered",
            ALL,
            base=Twins,
            loaded=both(exchanged, slower),
        ),
        "wrong parameter|another parameter|other parameter|exchanged|swapped",
    ),
    told(
        fault(
            "ta05_average_loaded",
            "F4",
            "the average is taken for the weights; the schedule begins anew on purpose",
            ALL,
            base=well.Ema,
            loaded=averaged,
            fresh=("scheduler",),
            layouts=OLD,
        ),
        "average",
    ),
    told(
        fault("ta06_running_lost", "A5", "running statistics are not loaded beneath a new head", ALL, base=Normed),
        "buffer|running",
    ),
    told(
        fault(
            "ta07_queue_lost",
            "A5",
            "the queue of keys is not loaded; the rate is lowered",
            ALL,
            base=well.Moco,
            take=without("queue"),
            loaded=slower,
        ),
        "buffer|queue",
    ),
    told(
        fault(
            "ta08_clusters_lost",
            "A5",
            "sizes and sums of the clusters are not loaded",
            ALL,
            base=well.Vq,
            take=without("cluster_size", "embed_avg"),
        ),
        "buffer|cluster_size|embed_avg",
    ),
    told(
        fault(
            "ta09_targets_lost",
            "A2",
            "the targets take the weights of the networks they follow",
            ALL,
            base=well.Ddpg,
            loaded=targets,
            also=("A5", "F4", "G6"),
        ),
        "target",
    ),
    told(
        staged(
            "ta10_masters_rounded",
            "D1",
            "masters rebuilt from the weights, a longer schedule",
            "echo next",
            rebuilt_masters,
            needs=masters,
        ),
        "master",
        "rebuilt|rounded",
    ),
    told(
        staged(
            "ta11_masters_old",
            "D2",
            "masters of an old save, a batch twice as large",
            "echo next",
            old_masters,
            "G6",
            needs=masters,
        ),
        "master",
        "match|differ|old|stale",
    ),
    told(
        fault("ta12_scale_lost", "D8", "the loss scale begins anew", ALL, base=well.Masters, loaded=scale),
        "loss scale|scaler",
    ),
    told(
        fault(
            "ta13_schedule_ahead",
            "C3",
            "the schedule is three steps ahead; the embedding is frozen on purpose",
            ALL,
            loaded=both(frozen("embed"), ahead),
            layouts=OLD,
        ),
        "schedule",
        "step|ahead|more often",
    ),
    told(
        fault(
            "ta14_rate_overwritten",
            "B8",
            "the optimizer's rate is set to its peak after the load; other data",
            ALL,
            schedule=cosine,
            loaded=both(peak, turned),
            tokens=elsewhere,
            also=("C2",),
        ),
        "learning rate",
    ),
    told(
        fault(
            "ta15_moments_rounded",
            "D4",
            "moments pass through bf16; other betas",
            "echo",
            loaded=both(each(rounded), settings(betas=(0.9, 0.97))),
        ),
        "moment",
        "bf16|16 bits|bfloat16",
    ),
    told(
        fault(
            "ta16_weights_rounded",
            "D7",
            "weights pass through bf16; more tokens",
            "echo",
            base=Rebuilt,
            change=cast_and_more,
            pad=True,
        ),
        "weight",
        "bf16|16 bits|narrower|bfloat16",
    ),
    told(
        fault(
            "ta17_untied",
            "F2",
            "the head is a copy that no optimizer trains; the rate is lowered",
            "next early",
            base=Tied,
            needs={"tied": True},
            loaded=both(slower, apart),
            layouts=("torch_save", "lightning"),
        ),
        "head|lm_head",
        "one tensor|tied|no longer",
    ),
    told(
        fault(
            "ta18_fused",
            "E4",
            "q, k and v are read by heads; Lion in place of AdamW",
            ALL,
            base=Attention,
            loaded=replaced(lambda self: packaged.Lion(self.groups(), lr=self.config.lr / 5)),
            layouts=OLD,
            also=("E1",),
        ),
        "qkv|rows|c_attn",
        "layout|order",
    ),
    told(
        fault(
            "ta19_gate_up",
            "E3",
            "gate and up are exchanged in the weights; the rate is lowered",
            ALL,
            take=gate_up,
            loaded=slower,
        ),
        "gate",
        "swapped|exchanged",
    ),
    told(
        fault(
            "ta20_layers_exchanged",
            "E9",
            "the layers are exchanged; more tokens",
            ALL,
            base=Rebuilt,
            needs={"layers": 2},
            change=swapped_and_more,
            pad=True,
        ),
        "layer",
        "swapped|exchanged|duplicated",
    ),
    told(
        fault(
            "ta21_experts_turned",
            "E10",
            "experts move on by one, the router does not; another decay",
            ALL,
            needs={"experts": 4},
            take=experts,
            loaded=settings(weight_decay=0.0),
        ),
        "expert",
        "permuted|order|router",
    ),
    told(
        fault(
            "ta22_half_old",
            "G6",
            "a rank's half is of an older save; the rate is lowered",
            ALL,
            base=Remember,
            loaded=both(half_old, slower),
            layouts=OLD,
        ),
        "different saves|older|earlier",
    ),
    told(
        fault(
            "ta23_optimizer_old",
            "G6",
            "the optimizer is of an older save; other data",
            ALL,
            base=Remember,
            loaded=both(old_optimizer, turned),
            tokens=elsewhere,
            layouts=OLD,
        ),
        "different saves|older|earlier",
    ),
    told(
        fault(
            "ta24_squares_lost",
            "B4",
            "second moments are zero; other betas",
            ALL,
            loaded=both(each(no_squares), settings(betas=(0.9, 0.97))),
        ),
        "exp_avg_sq|second moment",
        "lost|zero",
    ),
    told(
        fault(
            "ta25_counters_lost",
            "B2",
            "counters at zero; a higher rate",
            ALL,
            loaded=both(each(no_count), settings(lr=lambda lr: 1.5 * lr)),
        ),
        "counter|step",
        "reset|zero",
    ),
    told(
        fault(
            "ta26_merged_twice",
            "F5",
            "adapters are merged and still active; more decay",
            ALL,
            base=Lora,
            take=merged_twice,
            loaded=settings(weight_decay=0.2),
        ),
        "adapter",
        "merged|twice",
    ),
    told(
        fault(
            "ta27_adapters_lost",
            "F5",
            "adapters are not loaded; the schedule begins anew on purpose",
            ALL,
            base=Lora,
            take=without("lora_"),
            fresh=("scheduler",),
            also=("A2",),
            layouts=OLD,
        ),
        "adapter",
        "not loaded|initial",
    ),
    told(
        fault("ta28_other_base", "F6", "the base is another revision", ALL, base=Lora, take=other_base),
        "base",
        "revision|differ|another",
    ),
    told(
        fault(
            "ta29_norms_lost", "A3", "norms stay at 1; more tokens", ALL, base=Rebuilt, change=norms_and_more, pad=True
        ),
        "norm",
        "not loaded|initial",
    ),
    told(
        fault(
            "ta30_positions_lost",
            "C6",
            "positions in the data begin anew; the rate is lowered",
            ALL,
            base=Positions,
            fresh=("dataset_state",),
            loaded=slower,
            also=("C7",),
        ),
        "data",
        "beginning|restart|position",
    ),
    told(
        fault(
            "ta31_generator_lost",
            "C8",
            "the generator begins anew; more decay",
            "echo",
            base=well.Dropped,
            fresh=("generator",),
            loaded=settings(weight_decay=0.2),
        ),
        "random|generator",
    ),
    told(
        fault(
            "ta32_statistics_lost",
            "A5",
            "running statistics begin anew, beside a new value head and optimizer",
            ALL,
            base=well.Ppo,
            loaded=both(value_anew, statistics),
            layouts=OLD,
        ),
        "buffer|obs_",
    ),
    told(
        staged(
            "ta33_amax_lost",
            "D9",
            "amaxes are lost, a lower rate",
            "echo next",
            no_amax,
            "A5",
            needs=lambda c: c.but(fp8=True),
            formats=("torch_save", "dcp"),
        ),
        "fp8|amax",
    ),
    told(
        fault(
            "ta34_page_of_zeros",
            "G5",
            "a page of a weight is zero; the rate is lowered",
            ALL,
            needs=BIG,
            loaded=both(page, slower),
        ),
        "zero",
    ),
    told(
        fault(
            "ta35_bit_of_a_square",
            "G3",
            "a bit of a second moment; the head is renamed",
            ALL,
            base=Renamed,
            also=("G1", "G2"),
            loaded=flipped,
        ),
        "bit|damaged",
        "body.2.weight|second moment|exp_avg_sq",
    ),
    told(
        fault(
            "ta36_no_number",
            "G1",
            "a NaN in the average; its decay is lowered",
            ALL,
            base=well.Ema,
            loaded=not_a_number,
        ),
        "nan|not finite|damaged",
    ),
    told(
        fault(
            "ta37_outer_lost",
            "A2",
            "the outer optimizer begins at other weights",
            ALL,
            base=well.DiLoCo,
            fresh=("outer",),
            also=("A5", "B1", "F4", "A1"),
        ),
        "outer",
    ),
    told(
        fault(
            "ta38_plateau_lost",
            "C1",
            "the plateau's best and counts are lost; less decay",
            ALL,
            base=well.Plateau,
            fresh=("scheduler",),
            loaded=settings(weight_decay=0.0),
            layouts=well.NO_DCP,
        ),
        "schedule",
        "restart|lost",
    ),
    told(
        fault("ta39_history_lost", "B1", "the history of L-BFGS is lost", ALL, base=well.Bfgs, fresh=("optimizer",)),
        "optimizer",
        "not restored|lost",
    ),
    told(
        fault(
            "ta40_average_uncounted",
            "A5",
            "how many were averaged is lost",
            ALL,
            base=well.Swa,
            loaded=uncounted,
            also=("B2", "F4", "C9"),
        ),
        "n_averaged|average",
    ),
    told(
        fault(
            "ta41_weights_not_loaded",
            "A1",
            "no weight is loaded, the optimizer is; other betas",
            ALL,
            fresh=("model",),
            also=("A2",),
            layouts=OLD,
            loaded=settings(betas=(0.9, 0.97)),
        ),
        "weights",
        "none|not loaded|initial",
    ),
    told(
        fault(
            "ta42_slow_weights_lost",
            "B11",
            "the slow weights begin anew",
            "echo",
            optimizer=optim(nets.Lookahead),
            loaded=slow_again,
            layouts=OLD,
            also=("B1", "A5", "A2", "F4", "B6"),
        ),
        "slow_buffer",
    ),
    told(
        fault(
            "ta43_absmax_lost",
            "B11",
            "scales of 8-bit states are 1",
            "echo next",
            optimizer=plain(packaged.AdamW8bit),
            loaded=absmax,
            layouts=OLD,
        ),
        "8-bit|compressed|absmax|scale",
    ),
    told(
        hugging(
            "ta44_trainer_no_optimizer",
            "B1",
            "Trainer: optimizer.pt is gone; another rate on purpose",
            ALL,
            ("C1",),
            spoil=removed("optimizer.pt"),
            other_args={"learning_rate": 1e-3},
        ),
        "optimizer",
        "not restored",
    ),
    told(
        hugging(
            "ta45_trainer_no_norms",
            "A3",
            "Trainer: norms are not in the file; another decay on purpose",
            ALL,
            spoil=no_norms,
            other_args={"weight_decay": 0.0},
        ),
        "norm",
        "not loaded|initial",
    ),
    told(
        hugging(
            "ta46_trainer_no_generator",
            "C8",
            "Trainer: the generators' file is gone",
            "echo",
            name="gpt2",
            spoil=removed("rng_state.pth"),
        ),
        "random|generator",
    ),
    told(
        hugging(
            "ta47_trainer_schedule_ahead",
            "C3",
            "Trainer: the schedule is nine steps ahead; more decay",
            ALL,
            name="Qwen2",
            spoil=counted_on,
            other_args={"weight_decay": 0.2},
        ),
        "schedule",
        "step|ahead|more often",
    ),
    told(
        fault(
            "ta48_masks_lost",
            "A5",
            "masks are not loaded; the rate is lowered",
            "echo next",
            base=well.Pruned,
            loaded=both(unmasked, slower),
        ),
        "buffer|mask",
    ),
    told(
        fault(
            "ta49_decays_exchanged",
            "B7",
            "weight decay goes to the vectors; the rate is lowered",
            ALL,
            loaded=both(decays_swapped, slower),
        ),
        "weight decay",
        "group|wrong|moved|exchanged",
    ),
    told(
        fault(
            "ta50_critic_lost",
            "B1",
            "the critic's optimizer is lost; the generator's rate is halved",
            ALL,
            base=well.Gan,
            loaded=critic_lost,
        ),
        "optimizer",
        "not restored|lost",
    ),
    told(
        fault(
            "ta51_biases_lost",
            "A5",
            "biases of the router are zero; the rate is lowered",
            ALL,
            base=well.Balanced,
            needs={"experts": 4},
            loaded=both(unbiased, slower),
        ),
        "buffer|bias",
    ),
    told(
        fault(
            "ta52_turned",
            "E1",
            "output maps are transposed; more tokens",
            ALL,
            base=Rebuilt,
            change=turned_and_more,
            pad=True,
        ),
        "o_proj",
        "axis|transposed|order",
    ),
    told(
        fault(
            "ta53_soup_and_lost",
            "B1",
            "a deliberate mean with earlier weights; a layer's state is lost",
            ALL,
            base=Remember,
            loaded=both(soup, layer_lost),
            layouts=OLD,
            also=("B3",),
        ),
        "optimizer|state",
        "not restored|lost",
    ),
    told(
        fault(
            "ta54_adapters_on_less",
            "A2",
            "adapters are put on; one weight of the base was not loaded",
            ALL,
            base=AdaptersOnly,
            change=adapters_and_less,
            also=("F6",),
        ),
        "down_proj",
        "not loaded|initial|base",
    ),
    told(
        fault(
            "ta55_moments_lost",
            "B3",
            "moments are zero, counters are not; the schedule begins anew on purpose",
            ALL,
            loaded=each(no_moments),
            fresh=("scheduler",),
            layouts=OLD,
        ),
        "moment",
        "lost|zero",
    ),
    told(
        fault(
            "ta56_line_shifted",
            "E7",
            "all moments are eight places on; twice the batch on purpose",
            ALL,
            base=Told,
            loaded=both(shifted, larger),
            also=("E13", "B5"),
        ),
        "moment|state|flat|partition",
        "shift|map|position",
    ),
    told(
        fault(
            "ta57_halves_exchanged",
            "E13",
            "halves of the moments are exchanged; the rate is lowered",
            ALL,
            loaded=both(each(halves_exchanged), slower),
            also=("E1", "B5"),
        ),
        "moment|state",
        "map|order|rows|reshard",
    ),
    told(
        staged("ta58_other_order", "C7", "another order of the data, less decay on purpose", ALL, other_order),
        "data",
        "order|seed",
    ),
)
