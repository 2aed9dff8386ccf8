"""The twenty-third half: forty changes on purpose; a doctor may ask about them, and must not call them errors."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault
from tests.lab.hugging import SIZE, trained
from tests.lab.live import variant
from tests.lab.opened20_nets import (
    Tensor,
    acts,
    frozen,
    longer,
    memory,
    more_rows,
    moved,
    new_batch,
    new_clip,
    new_group,
    new_head,
    new_lr,
    new_stage,
    noise,
    told,
    weights,
)
from tests.lab.opened23_nets import (
    Amp,
    Clip,
    Dit,
    Dqn,
    Gat,
    Gru,
    HalfNet,
    LoraLayer,
    MasterAdamW,
    Mixtral,
    Nano,
    NanoBlock,
    Norm,
    Peft,
    Phi,
    Philox,
    Res,
    Soap,
    Style,
    Tiny,
    Vit,
    chain,
    columns,
    steps_down,
)

__all__ = ["DELIBERATE23"]

FILES = ("torch_save", "timm", "mm", "fairseq", "composer")
NUMBERED = (*FILES, "accelerate", "sharded")


def rebuilt(self: Any) -> None:
    """Make optimizer and schedule anew for what the model is now."""
    self.optimizers = self.made()
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def longer_context(self: Any) -> None:
    """Give the table of places half as many again, each between two old ones."""
    columns(self, "wpe", lambda x: torch.cat([x, 0.5 * (x[:20] + x[20:])]))


class Classes(Vit):
    """As many classes as the head has."""

    def error(self, x: Tensor) -> Tensor:
        found = self.module(x.view(-1, 3, 6, 6))
        return F.cross_entropy(found, (x @ noise(21, self.width, found.shape[1])).argmax(1))


def other_classes(self: Any) -> None:
    self.module.head = nn.Linear(24, 9)
    rebuilt(self)


class Plain(Peft):
    """Its layers without adapters, until these are added at the load."""

    def make(self) -> nn.Module:
        parts = {name: nn.Linear(24, 24, bias=False) for name in ("to_q", "to_k", "to_v", "to_out")}
        return nn.ModuleDict(
            {"unet": nn.ModuleDict({"proj_in": nn.Linear(20, 24), "proj_out": nn.Linear(24, 20)} | parts)}
        )


def adapters_added(self: Any) -> None:
    """Freeze everything and put adapters beside the projections."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        self.module.requires_grad_(False)
        for name, one in list(self.module["unet"].items()):
            if name.startswith("to_"):
                new = LoraLayer(24, 24)
                new.base_layer.weight.copy_(one.weight)
                self.module["unet"][name] = new
    rebuilt(self)


def second_adapters(self: Any) -> None:
    """Merge the adapters into the base, and begin with new ones."""
    for n, one in enumerate(self.module["unet"].values()):
        if hasattr(one, "lora_A"):
            a, b = one.lora_A["default"].weight, one.lora_B["default"].weight
            one.base_layer.weight += 2.0 * b @ a
            a.copy_(0.2 * noise(50 + n, *a.shape))
            b.zero_()
    rebuilt(self)


def by_other(kind: Any) -> Any:
    """Go on with another optimizer."""

    def act(self: Any) -> None:
        self.optimizers = [kind(self, self.groups())]
        self.schedules = [self.schedule(one) for one in self.optimizers]

    return act


def soap(self: Any, groups: Any) -> torch.optim.Optimizer:
    return Soap([{"params": g["params"]} for g in groups], lr=self.config.lr)


def rmsprop(self: Any, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([w for g in groups for w in g["params"]], lr=0.1 * self.config.lr, momentum=0.9)


def to_mixed(self: Any) -> None:
    """Go on in bf16 with fp32 copies, which are the old weights; moments are kept."""
    old = {n: (w.clone(), dict(memory(self, w))) for n, w in self.module.named_parameters()}
    self.module.to(torch.bfloat16)
    new = MasterAdamW(self.groups(), self.config.lr, self.config.betas)
    for group, other in zip(new.param_groups, self.optimizers[0].param_groups, strict=True):
        group |= {"lr": other["lr"], "initial_lr": other["initial_lr"]}
    for n, w in self.module.named_parameters():
        new.state[w] = {**old[n][1], "master_param": old[n][0]}
    self.schedules[0].optimizer = new
    self.optimizers = [new]


def to_full(self: Any) -> None:
    """Go on in fp32 from the copies, by AdamW with the same moments."""
    old = {n: dict(memory(self, w)) for n, w in self.module.named_parameters()}
    self.module.float()
    new = torch.optim.AdamW(self.groups(), lr=self.config.lr, betas=self.config.betas)
    for group, other in zip(new.param_groups, self.optimizers[0].param_groups, strict=True):
        group |= {"lr": other["lr"], "initial_lr": other["initial_lr"]}
    for n, w in self.module.named_parameters():
        w.copy_(old[n].pop("master_param"))
        new.state[w] = old[n]
    self.schedules[0].optimizer = new
    self.optimizers = [new]


def deeper(self: Any) -> None:
    """Put a copy of each block behind it; the optimizer begins anew."""
    found = []
    for one in self.module.transformer["h"]:
        twin = NanoBlock(self.deep)
        twin.load_state_dict(one.state_dict())
        found += [one, twin]
    self.module.transformer["h"] = nn.ModuleList(found)
    rebuilt(self)


def shallower(self: Any) -> None:
    """Leave out the middle block; the optimizer begins anew."""
    old = self.module.transformer["h"]
    self.module.transformer["h"] = nn.ModuleList([*old[:1], *old[2:]])
    rebuilt(self)


def from_average(self: Any) -> None:
    for n, w in self.module.named_parameters():
        w.copy_(self.extra["ema"][n])
    rebuilt(self)


def average_begun(self: Any) -> None:
    """Keep an average from here on."""
    self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


def averages(self: Any) -> None:
    """For `Loop.update`: the average follows, where there is one."""
    super(type(self), self).update()
    with torch.no_grad():
        for n, w in self.module.named_parameters():
            if n in self.extra.get("ema", {}):
                self.extra["ema"][n].lerp_(w, 0.02)


def skipped(self: Any) -> None:
    self.extra["dataloader"]["batches_yielded"] += 300
    self.extra["samples_seen"] += 300 * self.extra["args"]["batch_size"]


def constant(self: Any) -> None:
    """Go on at a constant rate, which the arguments say."""
    for group in self.optimizers[0].param_groups:
        group["lr"] = self.config.lr / 4
    self.schedules = []
    self.extra["args"] |= {"lr": self.config.lr / 4, "lr_scheduler": "constant"}


def other_schedule(self: Any) -> None:
    """Fall in steps from here on."""
    for group in self.optimizers[0].param_groups:
        group["lr"] = group.pop("initial_lr")
    self.schedules = [steps_down(self, self.optimizers[0])]


def fixed_scale(self: Any) -> None:
    """Train in bf16 from here on, without a loss scale."""
    del self.extra["amp"]
    self.apply = lambda: super(Amp, self).apply()


def six_experts(self: Any) -> None:
    """Add two experts that begin as copies, with rows of the gate; the optimizer begins anew."""
    for block in self.module.transformer["h"]:
        mlp = block.mlp["c_fc"]
        mlp.experts = nn.ModuleList([*mlp.experts, *(copy.deepcopy(one) for one in mlp.experts[:2])])
        mlp.gate.weight = nn.Parameter(
            torch.cat([mlp.gate.weight, mlp.gate.weight[:2] + 0.02 * noise(4, 2, self.deep)])
        )
    rebuilt(self)


def souped(self: Any) -> None:
    """Take the mean with a run of another order of data; the optimizer begins anew."""
    other = type(self)(self.config.but(seed=self.config.seed))
    other.extra["dataloader"]["seed"] = 77
    with torch.enable_grad():
        other.run(self.step)
    for a, b in zip(self.module.parameters(), other.module.parameters(), strict=True):
        a.lerp_(b, 0.5)
    rebuilt(self)


def synced(self: Any) -> None:
    self.module["q_net_target"].load_state_dict(self.module["q_net"].state_dict())


def other_world(self: Any) -> None:
    """Begin statistics of observations anew: the environment is another one."""
    self.extra["obs_normalizer"] = {"mean": torch.zeros(20), "var": torch.ones(20), "count": 1e-4}
    self.extra["args"]["env"] = "other"


class Wrapped(Gat):
    """Names get the prefix of DistributedDataParallel from the load on."""

    wrapped = False

    def loaded(self) -> None:
        self.wrapped = True

    def weights(self) -> dict[str, Any]:
        found = super().weights()
        return {f"module.{n}": w for n, w in found.items()} if self.wrapped else found


class Relaid(Phi):
    """From the load on it saves in another layout."""

    moved_to = ""

    def loaded(self) -> None:
        self.moved_to = "sharded"

    def save(self, folder: Path, layout: str) -> None:
        super().save(folder, self.moved_to or layout)


def two_heads(self: Any) -> None:
    """Copy the table to a head of its own, which is trained from here on."""
    self.module.lm_head.weight = nn.Parameter(self.module.transformer["wte"].weight.clone())
    one, first = self.optimizers[0], self.optimizers[0].param_groups[0]
    rest = {k: v for k, v in first.items() if k not in ("params", "initial_lr")}
    lr = first["initial_lr"]
    one.add_param_group({**rest, "params": [self.module.lm_head.weight], "initial_lr": lr})
    schedule = self.schedules[0]
    schedule.base_lrs.append(lr)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])
    schedule._last_lr = [g["lr"] for g in one.param_groups]


def wider(self: Any) -> None:
    """Widen the hidden layer by units that give nothing yet; the optimizer begins anew."""
    old, new = self.module.g, chain(10, 40, 20, act=nn.SiLU)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        new[0].weight[:28].copy_(old[0].weight)
        new[0].bias[:28].copy_(old[0].bias)
        new[2].weight.zero_()
        new[2].weight[:, :28].copy_(old[2].weight)
        new[2].bias.copy_(old[2].bias)
    self.module.g = new
    self.extra["g_ema"] = {n: w.detach().clone() for n, w in new.named_parameters()}
    rebuilt(self)


def normed(self: Any) -> None:
    """Norm queries and keys from here on: new norms of 1 in a group of their own."""
    one, first = self.optimizers[0], self.optimizers[0].param_groups[-1]
    rest = {k: v for k, v in first.items() if k not in ("params", "initial_lr")}
    lr, new = first["initial_lr"], []
    for block in self.module.model["layers"]:
        block.self_attn["q_norm"] = Norm(self.deep)
        new.append(block.self_attn["q_norm"].weight)
        old, norm = block.self_attn["q_proj"], block.self_attn["q_norm"]
        old.register_forward_hook(lambda m, args, out, norm=norm: norm(out))
    one.add_param_group({**rest, "params": new, "initial_lr": lr})
    schedule = self.schedules[0]
    schedule.base_lrs.append(lr)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])
    schedule._last_lr = [g["lr"] for g in one.param_groups]


def base_swapped(self: Any) -> None:
    """Put the adapters on a newer base, with an optimizer that begins anew."""
    for n, w in enumerate(weights(self, "base_layer|proj_in|proj_out").values()):
        w.add_(0.03 * noise(60 + n, *w.shape))
    rebuilt(self)


class Longer:
    """A Llama whose second process stretches the rotary embedding for a longer context."""

    def __init__(self) -> None:
        self.turn = itertools.count()

    def __call__(self, seed: int) -> Any:
        import transformers as hf

        torch.manual_seed(seed)
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        more: dict[str, Any] = {"tie_word_embeddings": False, "rope_parameters": rope}
        if next(self.turn) % 2:
            more |= {"rope_parameters": {**rope, "rope_type": "linear", "factor": 4.0}, "max_position_embeddings": 256}
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE | more))


def late(id: str, text: str, base: Any, act: Any, *true: str, **more: Any) -> Fault:
    return variant(id, text, base=base, kind="deliberate", loaded=acts(act), true=("H1", *true), why=text, **more)


def _hf(id: str, text: str, build: Any, *true: str, **more: Any) -> Fault:
    live = partial(trained, build, **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", why=text, also=true)


DELIBERATE23: list[Fault] = [
    late("vc01_lr_times_six", "the lr is six times what it was", Nano, new_lr(6.0)),
    late(
        "vc02_cool_down",
        "a tenth of the lr, no weight decay",
        Vit,
        acts(new_lr(0.1), new_group(weight_decay=0.0)),
        "C5",
    ),
    late("vc03_large_batch", "four times the batch at twice the lr", Res, acts(new_batch(4), new_lr(2.0)), "C10"),
    late("vc04_own_rate", "a layer gets a rate of its own", Gru, moved("out")),
    late(
        "vc05_more_tokens", "nine tokens are added", Phi, more_rows("embed_tokens|lm_head", 9), "F7", layouts=NUMBERED
    ),
    variant("vc06_relaid", "saves are in another layout", base=Relaid, kind="deliberate", true=("H1",), layouts=FILES),
    late("vc07_more_places", "the context is half as long again", Nano, longer_context, "F7", layouts=NUMBERED),
    late("vc08_new_head", "a head is added in a group of its own", Dit, new_head, "A4", layouts=FILES),
    late(
        "vc09_other_classes",
        "nine classes instead of six; optimizer anew",
        Classes,
        other_classes,
        "B1",
        "C1",
        "A2",
        layouts=NUMBERED,
    ),
    late("vc10_body_frozen", "all blocks but the last are frozen", Vit, frozen(r"blocks\.[01]|embed|cls")),
    late("vc11_fresh_optimizer", "optimizer and schedule begin anew by choice", Phi, rebuilt, "B1", "C1"),
    late(
        "vc12_adapters_beside",
        "adapters beside frozen layers; optimizer anew",
        Plain,
        adapters_added,
        "B1",
        "C1",
        "A4",
        "A1",
        layouts=NUMBERED,
    ),
    late(
        "vc13_second_adapters",
        "adapters are merged and new ones begun; optimizer anew",
        Peft,
        second_adapters,
        "B1",
        "C1",
        "F5",
        layouts=NUMBERED,
    ),
    late("vc14_soap", "AdamW gives way to SOAP", Clip, by_other(soap), "B1", "C1", layouts=NUMBERED),
    late("vc15_rmsprop", "AdamW gives way to RMSprop", Res, by_other(rmsprop), "B1", "C1", layouts=NUMBERED),
    late("vc16_mixed", "bf16 weights with fp32 copies from here on", Nano, to_mixed, "D7", layouts=FILES),
    late("vc17_full", "fp32 weights, which are the old copies", HalfNet, to_full, layouts=FILES),
    late(
        "vc18_deeper",
        "each block gets a copy behind it; optimizer anew",
        Nano,
        deeper,
        "B1",
        "C1",
        "E9",
        layouts=NUMBERED,
    ),
    late(
        "vc19_shallower",
        "the middle block is left out; optimizer anew",
        Nano,
        shallower,
        "B1",
        "C1",
        "E9",
        layers=3,
        layouts=NUMBERED,
    ),
    late(
        "vc20_from_average", "fine-tuning begins from the averages; optimizer anew", Dit, from_average, "B1", "C1", "F4"
    ),
    late("vc21_wider", "a layer is widened; optimizer anew", Style, wider, "B1", "C1", layouts=NUMBERED),
    late("vc22_average_kept", "an average is begun", Gat, average_begun, "A4", update=averages, layouts=FILES),
    late("vc23_betas", "β2 is lowered", Phi, new_group(betas=(0.9, 0.9))),
    late("vc24_query_norms", "norms of queries are added", Phi, normed, "A4", layouts=NUMBERED),
    late("vc25_no_clip", "clipping is switched off, dropout on", Gru, acts(new_clip(0.0), told("args", dropout=0.2))),
    late("vc26_bad_stretch", "three hundred batches are skipped", Nano, skipped, "C6", "C7"),
    late(
        "vc27_other_data",
        "another data set from its beginning",
        Nano,
        told("dataloader", seed=9001, batches_yielded=0),
        "C6",
        "C7",
    ),
    late("vc28_longer", "the schedule is twice as long", Res, longer(2.0), "C4", "C2"),
    late("vc29_second_stage", "the schedule begins anew with warm-up", Clip, new_stage, "C1"),
    late("vc30_constant", "a constant rate from here on", Phi, constant, "C2", "C1", "B8", layouts=NUMBERED),
    late("vc31_in_steps", "the cosine gives way to steps", Res, other_schedule, "C2", "C1", layouts=NUMBERED),
    late("vc32_other_dice", "dropout is seeded anew", Philox, told("rng_state", seed=78, offset=0), "C8"),
    late("vc33_no_scale", "bf16 needs no loss scale", Amp, fixed_scale, "D8", layouts=FILES),
    late(
        "vc34_six_experts",
        "two experts are added as copies; optimizer anew",
        Mixtral,
        six_experts,
        "B1",
        "C1",
        "E10",
        layouts=NUMBERED,
    ),
    late("vc35_newer_base", "a newer base under the adapters; optimizer anew", Peft, base_swapped, "B1", "C1", "F6"),
    late("vc36_soup", "weights are the mean of two runs; optimizer anew", Tiny, souped, "B1", "C1", "E12"),
    late("vc37_other_world", "statistics begin anew, targets are synced", Dqn, acts(other_world, synced), "A5", "A2"),
    variant(
        "vc38_wrapped",
        "names have the prefix module.",
        base=Wrapped,
        kind="deliberate",
        true=("H1", "A1"),
        layouts=FILES,
    ),
    late("vc39_two_heads", "the head is untied, beginning as a copy", Nano, two_heads, "F2", tied=True, layouts=FILES),
    _hf(
        "vc40_longer_context",
        "transformers' Trainer: rotary embedding stretched, lower lr",
        Longer(),
        "H1",
        "H2",
        other_args={"learning_rate": 5e-4},
    ),
]
