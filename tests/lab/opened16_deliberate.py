"""Changes on purpose of the sixteenth sealed half: none of them is a fault, and most can be asked about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab import opened16_healthy as well
from tests.lab import optimizers as packaged
from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.fault import Fault, Lab
from tests.lab.hugging import made, trained
from tests.lab.live import Loop, variant
from tests.lab.live_healthy import muon
from tests.lab.opened16_nets import (
    Free,
    Lora,
    Rebuilt,
    adapted,
    again,
    draws,
    folded,
    layers,
    mlp,
    untied,
    upcycled,
    vocabulary,
    widened,
)
from tests.lab.state import State

__all__ = [
    "DELIBERATE16",
    "AdaptersOnly",
    "Regrown",
    "Renamed",
    "Told",
    "Tower",
    "both",
    "frozen",
    "larger",
    "other_data",
]

T = torch.optim
NEW = ("B1", "C1", "H1", "A4")


class Regrown(Rebuilt, Free):
    """`Rebuilt` for other networks: ``regrow`` makes the new one, ``fill`` puts the old weights in."""

    def regrow(self) -> nn.Module:
        return self.net()

    def fill(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights)

    def remodel(self, weights: dict[str, Any]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed + 11)
            self.module = self.regrow()
        self.fill(weights)


def shared(self: Any, weights: dict[str, Any]) -> None:
    """What fits by name and shape is loaded, the rest is new."""
    own = self.module.state_dict()
    self.module.load_state_dict(
        {n: w for n, w in weights.items() if n in own and own[n].shape == w.shape}, strict=False
    )


class Tower(Regrown):
    """A body and a head; by default the head is exchanged for one of another size."""

    size, name = 16, "head"

    def build(self) -> nn.Module:
        return nn.ModuleDict({"body": mlp(16, 48, 48), "head": nn.Linear(48, 16)})

    def regrow(self) -> nn.Module:
        return nn.ModuleDict({"body": mlp(16, 48, 48), self.name: nn.Linear(48, self.size)})

    fill = shared

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        head = self.module[self.name if self.name in self.module else "head"]
        out = head(self.module["body"](x))
        return F.mse_loss(out, self.target(x)[:, : out.shape[1]])


def settings(**changes: Any) -> Callable[[Any], None]:
    """Fields of every param group; a function is of the old value."""

    def loaded(self: Any) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, value in changes.items():
                    group[name] = value(group[name]) if callable(value) else value
        if "lr" in changes:
            for schedule in self.schedules:
                if hasattr(schedule, "base_lrs") and callable(changes["lr"]):
                    schedule.base_lrs = [changes["lr"](one) for one in schedule.base_lrs]

    return loaded


def replaced(factory: Any, schedule: bool = True) -> Callable[[Any], None]:
    """Another optimizer after the load."""

    def loaded(self: Any) -> None:
        found = factory(self)
        self.optimizers = found if isinstance(found, list) else [found]
        if schedule:
            self.schedules = [self.schedule(one) for one in self.optimizers]

    return loaded


def frozen(*parts: str) -> Callable[[Any], None]:
    """These parameters leave the optimizer; the state of the others stays."""

    def loaded(self: Any) -> None:
        for name, w in self.module.named_parameters():
            if any(part in name for part in parts):
                w.requires_grad_(False)
        old, groups = self.optimizers[0], []
        for group in old.param_groups:
            kept = [w for w in group["params"] if w.requires_grad]
            if kept:
                groups.append({k: v for k, v in group.items() if k != "params"} | {"params": kept})
        new = type(old)(groups, lr=self.config.lr)
        for w in [w for group in groups for w in group["params"]]:
            if w in old.state:
                new.state[w] = old.state[w]
        schedule = self.schedule(new) if self.schedules else None
        if schedule is not None:
            told = self.schedules[0].state_dict()
            told["base_lrs"], told["_last_lr"] = told["base_lrs"][: len(groups)], told["_last_lr"][: len(groups)]
            if "lr_lambdas" in told:
                told["lr_lambdas"] = told["lr_lambdas"][: len(groups)]
            schedule.load_state_dict(told)
            for group, lr in zip(new.param_groups, told["_last_lr"], strict=True):
                group["lr"] = lr  # a new schedule began it at its first rate
            self.schedules = [schedule]
        self.optimizers = [new]

    return loaded


def new_schedule(make: Any) -> Callable[[Any], None]:
    def loaded(self: Any) -> None:
        for group in self.optimizers[0].param_groups:
            group.pop("initial_lr", None)
            group["lr"] = self.config.lr
        self.schedules = [make(self.optimizers[0])]

    return loaded


def both(*many: Callable[[Any], None]) -> Callable[[Any], None]:
    def loaded(self: Any) -> None:
        for one in many:
            one(self)

    return loaded


def soup(self: Any) -> None:
    """The weights become the mean with those of the earlier checkpoint and of another run."""
    past = type(self).past["model"]
    with torch.no_grad():
        for name, w in self.module.named_parameters():
            w.copy_((2 * w + past[name]) / 3)


def begun(self: Any) -> None:
    self.optimizers = self.made()
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def shrunk(self: Any) -> None:
    with torch.no_grad():
        for n, w in enumerate(self.module.parameters()):
            if w.ndim > 1:
                w.mul_(0.6).add_(draws(n, *w.shape), alpha=0.01)


def tasked(self: Any) -> None:
    """A task vector is added."""
    with torch.no_grad():
        for n, w in enumerate(self.module.parameters()):
            if w.ndim > 1:
                w.add_(draws(40 + n, w.shape[0], 1) @ draws(60 + n, 1, w.shape[1]), alpha=0.01)


def from_average(self: Any) -> None:
    with torch.no_grad():
        for name, w in self.module.named_parameters():
            w.copy_(self.extra["ema"]["shadow_params"][name])
    begun(self)


def decay(self: Any) -> None:
    self.extra["ema"]["decay"] = 0.99


def average_again(self: Any) -> None:
    self.extra["ema"] = {
        "decay": 0.9999,
        "num_updates": 0,
        "shadow_params": {n: w.detach().clone() for n, w in self.module.named_parameters()},
    }


def teacher(self: Any) -> None:
    with torch.no_grad():
        for n, w in enumerate(self.module.teacher.parameters()):
            w.copy_(draws(70 + n, *w.shape) * w.std() if w.ndim > 1 else w)


def reference(self: Any) -> None:
    self.module.reference.load_state_dict(self.module.policy.state_dict())


def momentum(self: Any) -> None:
    for state in self.optimizers[0].state.values():
        state["exp_avg"].zero_()


def milder(self: Any) -> None:
    for state in self.optimizers[0].state.values():
        state["exp_avg"].mul_(0.1)
        state["exp_avg_sq"].mul_(0.1)


def counters(self: Any) -> None:
    for state in self.optimizers[0].state.values():
        state["step"] = torch.zeros_like(state["step"])


def halved(self: Any) -> None:
    self.module.to(torch.bfloat16)
    begun(self)


def integers(self: Any) -> None:
    """Rounded to eight bits a row, as bitsandbytes' linear maps hold them, and trained on."""
    with torch.no_grad():
        for w in self.module.parameters():
            if w.ndim == 2:
                scale = w.abs().amax(1, keepdim=True) / 127
                w.copy_((w / scale).round() * scale)
    begun(self)


def critic(self: Any) -> None:
    """The critic begins anew with its optimizer; the generator goes on."""
    with torch.no_grad():
        for n, w in enumerate(self.module["critic"].parameters()):
            w.copy_(draws(80 + n, *w.shape) * 0.1)
    self.optimizers[1].state.clear()


def valued(self: Any) -> None:
    with torch.no_grad():
        self.module.value.weight.copy_(draws(2, 1, 48) * 0.1)
        self.module.value.bias.zero_()
    begun(self)


def masked(self: Any) -> None:
    """A one-shot pruning: the smallest half of each matrix is zero, and the optimizer is new."""
    with torch.no_grad():
        for w in self.module.parameters():
            if w.ndim == 2:
                w.mul_((w.abs() >= w.abs().median()).float())
    begun(self)


def last_anew(self: Any) -> None:
    """The head is drawn anew and its moments are cleared; all else goes on."""
    with torch.no_grad():
        self.module["head"].weight.copy_(draws(4, 16, 48) / 7)
        self.module["head"].bias.zero_()
    for w in self.module["head"].parameters():
        self.optimizers[0].state.pop(w, None)


class Broader(well.Vq):
    """The codebook doubles: copies with noise."""

    layouts = ("torch_save", "folder")

    def take(self, weights: dict[str, Any]) -> None:
        with torch.random.fork_rng():
            fresh = well.Codes(64)
        for name in ("codebook", "cluster_size", "embed_avg"):
            weights[name] = torch.cat([weights[name], weights[name] + 0.01])
        fresh.load_state_dict(weights)
        self.module = fresh
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class LongerQueue(well.Moco):
    layouts = ("torch_save", "folder")

    def take(self, weights: dict[str, Any]) -> None:
        with torch.random.fork_rng():
            fresh = well.Contrast(256)
        more = F.normalize(draws(9, 8, 128), dim=0)
        weights["queue"], weights["queue_ptr"] = torch.cat([weights["queue"], more], 1), torch.tensor([128])
        fresh.load_state_dict(weights)
        self.module = fresh
        self.optimizers = self.made()
        self.schedules = [self.schedule(one) for one in self.optimizers]


class Places(Regrown):
    """Learned positions and their moments, interpolated to twice as many."""

    count, pad = 8, True

    def build(self) -> nn.Module:
        found = nn.Module()
        found.position_embedding = nn.Parameter(torch.randn(self.count, 16) * 0.1)
        found.body = mlp(16, 48, 16)
        return found

    def regrow(self) -> nn.Module:
        self.count = 16
        return self.build()

    def fill(self, weights: dict[str, Any]) -> None:
        old = weights["position_embedding"]
        weights["position_embedding"] = F.interpolate(old.T[None], size=16, mode="linear")[0].T.contiguous()
        self.module.load_state_dict(weights)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        at = self.module.position_embedding
        return F.mse_loss(self.module.body(x + at.repeat(len(x) // len(at), 1)), self.target(x))


class Rms(Regrown):
    """Layer norms without their biases from now on."""

    def regrow(self) -> nn.Module:
        found = mlp(16, 48, 48, 16)
        for one in found:
            if isinstance(one, nn.LayerNorm):
                one.bias = None
        return found

    fill = shared


class Biased(Regrown):
    """Linear maps get biases, which begin at zero."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 48, bias=False), nn.GELU(), nn.Linear(48, 16, bias=False))

    def regrow(self) -> nn.Module:
        found = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
        nn.init.zeros_(found[0].bias)
        nn.init.zeros_(found[2].bias)
        return found

    fill = shared


class Deeper(Regrown):
    """A block that begins as the identity in front of the last layer, whose name moves on by one place."""

    def regrow(self) -> nn.Module:
        found = mlp(16, 48, 48, 48, 16)
        return found

    def fill(self, weights: dict[str, Any]) -> None:
        moved = {("9" + n[1:] if n.startswith("6.") else n): w for n, w in weights.items()}
        own = self.module.state_dict()
        self.module.load_state_dict(own | moved)
        with torch.no_grad():
            self.module[6].weight.copy_(torch.eye(48))
            self.module[6].bias.zero_()

    def source(self, name: str) -> str:
        return "6" + name[1:] if name.startswith("9.") else "" if name.startswith(("6.", "8.")) else name


class Probe(Tower):
    """A new head alone is trained."""

    size = 4

    def trainable(self, name: str) -> bool:
        return name.startswith("head")


class Renamed(Tower):
    """The head has another name, and all it held."""

    name = "score"

    def fill(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict({n.replace("head.", "score."): w for n, w in weights.items()})

    def source(self, name: str) -> str:
        return name.replace("score.", "head.")


class Rank(Rebuilt):
    """Adapters of rank 4 become such of rank 8: the new rows are drawn, the new columns zero, the moments padded."""

    pad = True

    def net(self) -> nn.Module:
        return Lora.net(self)

    rank = 4

    def trainable(self, name: str) -> bool:
        return "lora_" in name

    def change(self, weights: Any, config: Config) -> Any:
        for name in [n for n in weights if "lora_" in n]:
            w = weights[name]
            if "lora_A" in name:
                weights[name] = torch.cat([w, draws(6, *w.shape) / 5])
            else:
                weights[name] = torch.cat([w, torch.zeros_like(w)], 1)
        return weights, config.but(lora=8)


class AdaptersOnly(Rebuilt):
    keep, scheduled = False, False
    change = adapted

    def trainable(self, name: str) -> bool:
        return "lora_" in name


class AdaptersAgain(AdaptersOnly):
    change = again

    def net(self) -> nn.Module:
        return Lora.net(self)

    rank = 4


class Halfway(AdaptersAgain):
    """Adapters are merged at half their strength; the whole model is trained on."""

    def change(self, weights: Any, config: Config) -> Any:
        return folded(weights, 1.0), config.but(lora=0)

    def trainable(self, name: str) -> bool:
        return True


class Fewer(Rebuilt):
    """The last rows of the vocabulary are cut off, moments too."""

    def change(self, weights: Any, config: Config) -> Any:
        for name in [n for n in weights if "embed" in n or "lm_head" in n]:
            weights[name] = weights[name][: config.vocab].clone()
        assert config.padded > config.vocab
        return weights, config.but(padded=config.vocab)


def other_data(self: Any) -> torch.Tensor:
    return batch(self.config, self.step, 1234 if self.step < getattr(self, "turn", 1 << 30) else 4321)


def turned(self: Any) -> None:
    self.turn = self.step


def batches(self: Any) -> torch.Tensor:
    rows = getattr(self, "now", 4)
    self.extra["args"] = {"global_batch_size": rows, "micro_batch_size": 2, "dropout": getattr(self, "dropout", 0.0)}
    return batch(self.config.but(batch=rows), self.step, 1234)


class Told(Loop):
    """With arguments in the file."""

    layouts = ("torch_save", "lightning")
    tokens = batches
    now = 4

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra["args"] = {"global_batch_size": 4, "micro_batch_size": 2, "dropout": 0.0}


def larger(self: Any) -> None:
    self.now = 8
    self.extra["args"] = {"global_batch_size": 8, "micro_batch_size": 2, "dropout": 0.0}
    settings(lr=lambda lr: lr * 1.414)(self)


def dropout(self: Any) -> None:
    self.dropout = 0.1
    self.extra["args"] = self.extra["args"] | {"dropout": 0.1}


def longer_rope(self: Any) -> None:
    self.config = self.module.config = self.config.but(rope_theta=5e5, length=32)


def anew(self: Any, content: dict[str, Any]) -> None:
    """Weights alone, from step 0."""
    self.take(content["model"])


def stage(**changes: Any) -> Callable[[State, Lab], State]:
    return lambda state, lab: state.declared(**changes)


def on_purpose(id: str, text: str, restore: Any, true: str, **more: Any) -> Fault:
    return Fault(id, "healthy", text, frozenset(), restore=restore, also=tuple(true.split()), kind="deliberate", **more)


def trimmed(state: State, lab: Lab) -> State:
    """A new stage of Megatron or DeepSpeed: optimizer and counters begin anew, the weights stay."""
    state = state.clone()
    for name in state.exp_avg:
        state.exp_avg[name].zero_()
        state.exp_avg_sq[name].zero_()
        state.step[name] = 0.0
    if state.masters:
        state.masters = {n: state.params[n].float() for n in state.masters}
    return state.told(step=0, scheduler=0, data_index=0, samples=0, loader=0, data_seed=77)


def other_set(state: State, lab: Lab) -> State:
    return state.told(data_seed=4242, data_index=0, loader=0).declared(
        lr=state.config.lr / 2, min_lr=state.config.lr / 20
    )


def ema_reset(state: State, lab: Lab) -> State:
    state = state.clone()
    state.ema = {n: w.float().clone() for n, w in state.params.items()}
    return state


def hugging(id: str, text: str, true: str, name: str = "Llama", **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(
        id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", also=tuple(true.split())
    )


D = partial(variant, kind="deliberate")
OLD = ("torch_save", "folder", "lightning")
DELIBERATE16: tuple[Fault, ...] = (
    D(
        "tc01_tokens_padded",
        "twelve tokens more, the moments padded with zeros",
        base=Rebuilt,
        change=vocabulary(12),
        pad=True,
        true=("F7", "H1", "A4"),
    ),
    D("tc02_tokens_cut", "unused tokens cut off, the optimizer anew", base=Fewer, keep=False, true=("F7", *NEW)),
    D(
        "tc03_head_other_size",
        "a head of four classes, all else goes on",
        base=Tower,
        size=4,
        true=("A2", "F7", "H1", "B1"),
    ),
    D(
        "tc04_head_drawn_anew",
        "the head and its moments begin anew",
        base=Tower,
        load=Free.load,
        loaded=last_anew,
        true=("A2", "B1", "H1"),
    ),
    D("tc05_head_renamed", "the head has another name, its state moves with it", base=Renamed, true=("A1", "A4", "H1")),
    D("tc06_layer_appended", "the last layer is doubled", base=Rebuilt, change=layers([0, 1, 1]), true=("E9", *NEW)),
    D(
        "tc07_layer_dropped",
        "a layer of three is dropped, the state goes on by name",
        base=Rebuilt,
        needs={"layers": 3},
        change=layers([0, 2]),
        source=lambda self, n: n.replace("layers.1.", "layers.2."),
        true=("E9", "H1", "A2"),
    ),
    D(
        "tc08_stack_doubled",
        "depth up-scaling: the stack is doubled, the optimizer anew",
        base=Rebuilt,
        change=layers([0, 1, 0, 1]),
        keep=False,
        scheduled=False,
        true=("E9", *NEW),
    ),
    D(
        "tc09_quiet_layers",
        "LLaMA Pro: layers that do nothing at first, alone trained",
        base=Rebuilt,
        change=layers([0, 0, 1, 1], (1, 3)),
        keep=False,
        trainable=lambda self, n: ".layers.1." in n or ".layers.3." in n,
        true=("E9", *NEW),
    ),
    D(
        "tc10_to_lion",
        "AdamW becomes Lion",
        layouts=OLD,
        loaded=replaced(lambda self: packaged.Lion(self.groups(), lr=self.config.lr / 5)),
        true=NEW,
    ),
    D(
        "tc11_to_sgd",
        "AdamW becomes SGD with momentum",
        layouts=OLD,
        loaded=replaced(lambda self: T.SGD(self.groups(), lr=self.config.lr * 10, momentum=0.9)),
        true=NEW,
    ),
    D(
        "tc12_to_muon",
        "AdamW becomes Muon beside AdamW",
        layouts=("torch_save", "lightning"),
        loaded=replaced(muon),
        true=NEW,
    ),
    D(
        "tc13_to_adafactor",
        "AdamW becomes Adafactor, new schedule",
        layouts=OLD,
        loaded=replaced(lambda self: T.Adafactor(self.groups(), lr=self.config.lr)),
        true=NEW,
    ),
    D(
        "tc14_higher_lr",
        "three times the learning rate",
        loaded=settings(lr=lambda lr: 3 * lr),
        true=("H1", "B8", "C2"),
    ),
    D(
        "tc15_to_constant",
        "the cosine ends, a constant rate follows",
        layouts=OLD,
        loaded=new_schedule(lambda o: T.lr_scheduler.ConstantLR(o, 0.5, 10**6)),
        true=("C1", "C2", "H1", "C4"),
    ),
    D(
        "tc16_annealing",
        "a linear annealing to zero begins",
        layouts=OLD,
        loaded=new_schedule(lambda o: T.lr_scheduler.LinearLR(o, 0.4, 0.0, 30)),
        true=("C1", "C2", "C4", "H1"),
    ),
    D(
        "tc17_to_bf16",
        "the weights become bf16, the optimizer begins anew",
        loaded=halved,
        layouts=OLD,
        true=("D7", *NEW, "D5", "D6"),
    ),
    D(
        "tc18_to_eight_bits",
        "the weights pass through eight bits, the optimizer begins anew",
        loaded=integers,
        layouts=OLD,
        true=("D7", *NEW),
    ),
    D("tc19_adapters_again", "adapters merged, new ones put on", base=AdaptersAgain, true=("F5", *NEW)),
    D("tc20_adapters_put_on", "a full model is frozen, adapters are trained", base=AdaptersOnly, true=NEW),
    D(
        "tc21_adapters_halfway",
        "adapters merged at half their strength, the whole model trained",
        base=Halfway,
        true=("F5", *NEW),
    ),
    D("tc22_rank_doubled", "adapters of rank 8 from those of rank 4", base=Rank, true=("F5", "H1")),
    D("tc23_larger_batch", "twice the batch, the rate by the root", base=Told, loaded=larger, true=("C10", "H1")),
    D("tc24_dropout", "dropout is turned on in the arguments", base=Told, loaded=dropout, true=("H1",)),
    D(
        "tc25_weights_alone",
        "continued pretraining: weights alone, step 0, other data",
        load=anew,
        tokens=other_data,
        loaded=turned,
        true=(*NEW, "C6", "C7", "C9"),
    ),
    D(
        "tc26_embedding_frozen",
        "the embedding leaves the optimizer",
        layouts=OLD,
        loaded=frozen("embed"),
        true=("B7", "H1", "B1"),
    ),
    D("tc27_new_head_alone", "a new head alone is trained", base=Probe, keep=False, true=("A2", "F7", *NEW)),
    D("tc28_upcycled", "every feed-forward becomes four experts", base=Rebuilt, change=upcycled, keep=False, true=NEW),
    D("tc29_upcycled_kept", "the same, and the rest of the optimizer goes on", base=Rebuilt, change=upcycled, true=NEW),
    D("tc30_widened", "Net2Net: the feed-forward doubles", base=Rebuilt, change=widened, keep=False, true=NEW),
    D(
        "tc31_soup_kept",
        "weights averaged with earlier ones, the optimizer goes on",
        base=Rebuilt,
        load=Loop.load,
        loaded=soup,
        true=("F4", "H1"),
    ),
    D(
        "tc32_soup_anew",
        "weights averaged with earlier ones, the optimizer anew",
        base=Rebuilt,
        load=Loop.load,
        loaded=both(soup, begun),
        true=("F4", *NEW),
    ),
    D(
        "tc33_from_average",
        "a new stage begins from the average",
        base=well.Ema,
        loaded=from_average,
        layouts=OLD,
        true=("F4", *NEW),
    ),
    D("tc34_average_decay", "the average's decay is lowered", base=well.Ema, loaded=decay, true=("H1",)),
    D(
        "tc35_average_again",
        "the average begins anew at the weights",
        base=well.Ema,
        loaded=average_again,
        true=("H1", "F4", "A5"),
    ),
    D("tc36_teacher", "another teacher", base=well.Taught, loaded=teacher, true=("H1", "A2", "F6")),
    D(
        "tc37_reference",
        "the reference becomes the policy of now",
        base=well.Referred,
        loaded=reference,
        true=("H1", "F6"),
    ),
    D("tc38_weight_decay", "no weight decay from now on", loaded=settings(weight_decay=0.0), true=("H1", "B7")),
    D(
        "tc39_betas_eps",
        "beta2 .999 and another epsilon, the rate halved",
        loaded=settings(betas=(0.9, 0.999), eps=1e-6, lr=lambda lr: lr / 2),
        true=("H1", "B8", "C2"),
    ),
    D("tc40_longer_context", "a larger rope base and longer rows", base=Told, loaded=longer_rope, true=("H1", "H2")),
    D(
        "tc41_shrink_and_perturb",
        "shrink and perturb at the start of a task, the optimizer anew",
        loaded=both(shrunk, begun),
        layouts=OLD,
        true=NEW,
    ),
    D(
        "tc42_task_vector",
        "a task vector is added, the optimizer anew",
        loaded=both(tasked, begun),
        layouts=OLD,
        true=NEW,
    ),
    D("tc43_codebook_doubled", "the codebook doubles, the optimizer goes on", base=Broader, true=("F7", "H1", "A5")),
    D("tc44_queue_doubled", "the queue doubles, the optimizer goes on", base=LongerQueue, true=("F7", "H1", "A5")),
    D("tc45_positions", "positions interpolated to twice as many", base=Places, true=("F7", "H1", "B1")),
    D(
        "tc46_untied",
        "the head is untied, a copy with a state of its own",
        base=Rebuilt,
        needs={"tied": True},
        change=untied,
        true=("F2", "A4", "H1", "B1"),
    ),
    D(
        "tc47_critic_again",
        "the critic begins anew, the generator goes on",
        base=well.Gan,
        loaded=critic,
        true=("B1", "A2", "H1"),
    ),
    D(
        "tc48_value_again",
        "another stage of RL: a new value head, a new optimizer",
        base=well.Ppo,
        loaded=valued,
        layouts=OLD,
        true=("A2", *NEW),
    ),
    D("tc49_pruned", "half of the weights become zero, the optimizer anew", loaded=masked, layouts=OLD, true=NEW),
    D("tc50_biases", "biases are added", base=Biased, true=("A4", "H1", "B1")),
    D("tc51_rms", "layer norms lose their biases", base=Rms, true=("A2", "A3", "H1", "B1")),
    D(
        "tc52_identity_block",
        "a block that begins as the identity is put in",
        base=Deeper,
        true=("A4", "A1", "E9", "H1", "B1"),
    ),
    D(
        "tc53_momentum_cleared",
        "momentum cleared for a new task, second moments kept",
        loaded=momentum,
        layouts=OLD,
        true=("B3", "H1", "B1", "B6"),
    ),
    D("tc54_moments_damped", "the moments are damped to a tenth", loaded=milder, layouts=OLD, true=("H1", "B1", "B6")),
    D(
        "tc55_counters",
        "counters at zero, so that bias correction warms up again",
        loaded=counters,
        layouts=OLD,
        true=("B2", "H1"),
    ),
    on_purpose(
        "tc56_stage_of_ranks",
        "a new stage: weights alone, in the layouts of several ranks",
        trimmed,
        "B1 B2 B3 C1 C6 C7 C9 H1 D1",
    ),
    on_purpose("tc57_other_corpus", "another corpus and half the rate", other_set, "H1 C6 C7 C2 C4 C1 B8"),
    on_purpose(
        "tc58_elsewhere_longer", "another layout, longer schedule", stage(total=900), "C4 H1 C2", elsewhere=True
    ),
    on_purpose(
        "tc59_elsewhere_batch",
        "another layout, twice the batch, higher rate",
        stage(batch=16, lr=6e-3),
        "C10 H1 C2 B8 C4",
        elsewhere=True,
    ),
    hugging(
        "tc60_trainer_other_rate",
        "Trainer: other rate and decay given at the resume",
        "H1 C2 B8 B7",
        other_args={"learning_rate": 1e-3, "weight_decay": 0.0},
    ),
    hugging(
        "tc61_trainer_longer",
        "Trainer: twice the steps, larger batches",
        "H1 C4 C10 C6 C7 C2",
        "Qwen2",
        other_args={"max_steps": 300, "per_device_train_batch_size": 8},
    ),
)
