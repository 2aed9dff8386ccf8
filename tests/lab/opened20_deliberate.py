"""The twentieth half: forty changes on purpose; a doctor may ask about them, and must not call them errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened20_nets import (
    T5,
    Adapter,
    Convnext,
    Dense,
    Detr,
    Dropped,
    Forge,
    Gin,
    Lora,
    Lstm,
    Narrow,
    NeoxLayer,
    Sac,
    Scaled,
    Seek,
    SeekMlp,
    Talk,
    Tensor,
    Unet,
    acts,
    frozen,
    longer,
    lost,
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
    stack,
    told,
    unread,
    weights,
    widened,
)
from tests.lab.optimizers import Lion

__all__ = ["DELIBERATE20"]

PLAIN = ("torch_save", "lightning")
BITS = ("torch_save", "folder", "lightning")


def rebuilt(self: Any) -> None:
    """Make optimizer and schedule anew for what the model is now."""
    self.optimizers = self.made()
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def in_parts(self: Any) -> None:
    """Split each batch in four, as a smaller GPU needs."""
    self.parts = 4
    self.extra["args"]["gradient_accumulation_steps"] = 4


def fewer_rows(self: Any) -> None:
    """Drop the rows of the vocabulary that no token uses."""
    count = self.config.vocab
    for w in weights(self, "embed_(in|out)").values():
        held = memory(self, w)
        for key, one in list(held.items()):
            if torch.is_tensor(one) and one.shape == w.shape:
                held[key] = one[:count].clone()
        w.data = w.data[:count].clone()


class Classes(Convnext):
    """As many classes as the head has."""

    def error(self, x: Tensor) -> Tensor:
        found = self.module(x.view(-1, 3, 6, 6) + 0.4)
        return F.cross_entropy(found, (x @ noise(2, self.width, found.shape[1])).argmax(1))


def other_classes(self: Any) -> None:
    """Give the head four classes instead of seven, by an optimizer that begins anew."""
    self.module.head = nn.Linear(16, 4)
    rebuilt(self)


class Thawing(Gin):
    """The first layer is frozen until the load."""

    def net(self) -> nn.Module:
        found = super().net()
        found["layers"][0].requires_grad_(False)
        return found

    def loaded(self) -> None:
        one, held = self.optimizers[0], list(self.module["layers"][0].parameters())
        for w in held:
            w.requires_grad_(True)
        lr = one.param_groups[0]["initial_lr"]
        rest = {k: v for k, v in one.param_groups[0].items() if k not in ("params", "initial_lr")}
        one.add_param_group({**rest, "params": held, "initial_lr": lr})
        schedule = self.schedules[0]
        schedule.base_lrs.append(lr)
        schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        schedule._last_lr = [g["lr"] for g in one.param_groups]


class Linears(Lora):
    """The layers without adapters, until these are added at the load."""

    def make(self) -> nn.Module:
        sizes = {"q_proj": (20, 30), "v_proj": (30, 30), "o_proj": (30, 20)}
        return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})


def adapters_added(self: Any) -> None:
    """Freeze the layers and put adapters beside them."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        for name, one in list(self.module.items()):
            new = Adapter(one.in_features, one.out_features)
            new.base_layer.load_state_dict(one.state_dict())
            self.module[name] = new
    rebuilt(self)


def adapters_merged(self: Any) -> None:
    """Add the adapters to their layers, and train all of these."""
    for name, one in list(self.module.items()):
        new = nn.Linear(one.base_layer.in_features, one.base_layer.out_features)
        product = one.lora_B["default"].weight @ one.lora_A["default"].weight
        new.weight.copy_(one.base_layer.weight + 1.5 * product)
        new.bias.copy_(one.base_layer.bias)
        self.module[name] = new
    for w in self.module.parameters():
        w.requires_grad_(True)
    rebuilt(self)


def higher_rank(self: Any) -> None:
    """Double the rank: A gets random rows, B columns of zeros."""
    for n, one in enumerate(self.module.values()):
        a, b = one.lora_A["default"], one.lora_B["default"]
        a.weight.data = torch.cat([a.weight.data, 0.1 * noise(60 + n, *a.weight.shape)])
        b.weight.data = torch.cat([b.weight.data, torch.zeros_like(b.weight.data)], 1)
    rebuilt(self)


def by_other(kind: Any) -> Any:
    """Go on with another optimizer."""

    def act(self: Any) -> None:
        self.optimizers = [kind(self, self.groups())]
        self.schedules = [self.schedule(one) for one in self.optimizers]

    return act


def to_half(self: Any) -> None:
    """Go on in bf16, by an optimizer that begins anew."""
    self.module.to(torch.bfloat16)
    rebuilt(self)


def deeper(self: Any) -> None:
    """Repeat every layer once, by an optimizer that begins anew."""
    old = list(self.module.layers)
    found = []
    for one in old:
        twin = NeoxLayer(self.deep, 4)
        twin.load_state_dict(one.state_dict())
        found += [one, twin]
    self.module.layers = nn.ModuleList(found)
    rebuilt(self)


def shallower(self: Any) -> None:
    """Leave out the last layer; the others go on as they were."""
    gone = {id(w) for w in self.module.layers[-1].parameters()}
    self.module.layers = self.module.layers[:-1]
    for group in self.optimizers[0].param_groups:
        group["params"] = [w for w in group["params"] if id(w) not in gone]
    for w in [w for w in self.optimizers[0].state if id(w) in gone]:
        del self.optimizers[0].state[w]


def from_average(self: Any) -> None:
    """Fine-tune from the averages, by an optimizer that begins anew."""
    for n, w in self.module.named_parameters():
        w.copy_(self.extra["ema"]["shadow_params"][n])
    rebuilt(self)


def no_average(self: Any) -> None:
    """Keep no averages any more."""
    self.extra["ema"]["shadow_params"] = {}


def next_epoch(self: Any) -> None:
    self.extra["dataloader"] |= {"epoch": self.extra["dataloader"]["epoch"] + 1, "batches_yielded": 0}


def other_dice(self: Any) -> None:
    """Seed dropout anew on every rank, each by a seed of its own."""
    for n, name in enumerate(self.extra["rng_states"]):
        self.extra["rng_states"][name] = torch.Generator().manual_seed(7000 + n).get_state()


def no_scaler(self: Any) -> None:
    """Train in bf16 from here on: the loss is not scaled."""
    del self.extra["scaler"]
    self.apply = lambda: Forge.apply(self)


def one_expert_less(self: Any) -> None:
    """Leave out the last expert, its row of the router and its bias; the optimizer begins anew."""
    for layer in self.module.model["layers"]:
        mlp: SeekMlp = layer.mlp
        mlp.experts = mlp.experts[:-1]
        mlp.gate.weight = nn.Parameter(mlp.gate.weight[:-1].clone())
        mlp.gate.e_score_correction_bias = mlp.gate.e_score_correction_bias[:-1].clone()
    rebuilt(self)


def half_pruned(self: Any) -> None:
    """Set the smaller half of each matrix to 0, and train on."""
    for w in weights(self, "mlp").values():
        if w.ndim == 2:
            w.mul_(w.abs() > w.abs().flatten().median())


def souped(self: Any) -> None:
    """Take the mean with another run of the same length, by an optimizer that begins anew."""
    other = type(self)(self.config.but(seed=self.config.seed))
    other.extra["dataloader"]["seed"] = 999
    with torch.enable_grad():
        other.run(self.step)
    for a, b in zip(self.module.parameters(), other.module.parameters(), strict=True):
        a.lerp_(b, 0.5)
    rebuilt(self)


def hard_sync(self: Any) -> None:
    """Copy the critics to their targets once."""
    for name in ("qf1", "qf2"):
        self.module[f"{name}_target"].load_state_dict(self.module[name].state_dict())


class Compiled(Gin):
    """Names get torch.compile's prefix from the load on."""

    prefixed = False

    def loaded(self) -> None:
        self.prefixed = True

    def weights(self) -> dict[str, Any]:
        found = super().weights()
        return {f"_orig_mod.{n}": w for n, w in found.items()} if self.prefixed else found


def two_heads(self: Any) -> None:
    """Copy the embedding to a head of its own, which is trained from here on."""
    self.module.lm_head.weight = nn.Parameter(self.module.shared.weight.clone())
    one, first = self.optimizers[0], self.optimizers[0].param_groups[0]
    lr = first["initial_lr"]
    rest = {k: v for k, v in first.items() if k not in ("params", "initial_lr")}
    one.add_param_group({**rest, "params": [self.module.lm_head.weight], "initial_lr": lr})
    schedule = self.schedules[0]
    schedule.base_lrs.append(lr)
    schedule.lr_lambdas.append(schedule.lr_lambdas[0])
    schedule._last_lr = [g["lr"] for g in one.param_groups]


def sgd(self: Any, groups: Any) -> torch.optim.Optimizer:
    held = [w for g in groups for w in g["params"]]
    return torch.optim.SGD(held, lr=10 * self.config.lr, momentum=0.9, nesterov=True)


def lion(self: Any, groups: Any) -> torch.optim.Optimizer:
    return Lion([{"params": g["params"]} for g in groups], lr=0.2 * self.config.lr)


class Wide(Forge):
    """A network whose inner layer is widened at the load, function preserved."""

    def loaded(self) -> None:
        with torch.no_grad():
            first, second = self.module[0], self.module[2]
            wide = stack(self.width, 48, 36, self.width)
            twin = torch.arange(12)
            wide[0].weight.copy_(torch.cat([first.weight, first.weight[twin]]))
            wide[0].bias.copy_(torch.cat([first.bias, first.bias[twin]]))
            inner = second.weight.clone()
            inner[:, twin] /= 2
            wide[2].weight.copy_(torch.cat([inner, inner[:, twin]], 1))
            wide[2].bias.copy_(second.bias)
            wide[4].load_state_dict(self.module[4].state_dict())
            self.module = wide
        rebuilt(self)


def late(id: str, text: str, base: Any, act: Any, *true: str, why: str = "", **more: Any) -> Fault:
    return variant(id, text, base=base, kind="deliberate", loaded=acts(act), true=true, why=why or text, **more)


def _hf(id: str, text: str, name: str, *true: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", why=text, also=true)


DELIBERATE20: list[Fault] = [
    late("xc01_lr_times_eight", "the lr is eight times what it was", Talk, new_lr(8.0), "H1"),
    late("xc02_layerwise_rates", "one layer moves to a group with a third of the lr", Talk, moved(r"layers\.0"), "H1"),
    late(
        "xc03_batch_and_lr",
        "four times the batch at twice the lr",
        Convnext,
        acts(new_batch(4), new_lr(2.0)),
        "H1",
        "C10",
    ),
    late("xc04_accumulated", "batches are split in four", Detr, in_parts, "H1", "C10"),
    late(
        "xc05_more_tokens",
        "twelve tokens are added, with moments of 0",
        Talk,
        more_rows("embed_(in|out)", 12),
        "H1",
        "F7",
        layouts=BITS,
    ),
    late("xc06_fewer_tokens", "rows that no token uses are dropped", Talk, fewer_rows, "H1", "F7", layouts=BITS),
    late("xc07_new_head", "a head is added in a group of its own", Lstm, new_head, "H1", "A4", layouts=BITS),
    late(
        "xc08_other_classes",
        "the head has four classes instead of seven; optimizer anew",
        Classes,
        other_classes,
        "H1",
        "B1",
        "C1",
        "A2",
        layouts=BITS,
    ),
    late("xc09_backbone_frozen", "the backbone is frozen", Detr, frozen("backbone"), "H1"),
    variant(
        "xc10_thawed",
        "a layer that was frozen is trained, in a group of its own",
        base=Thawing,
        kind="deliberate",
        true=("H1",),
        layouts=BITS,
    ),
    late(
        "xc11_adapters_added",
        "adapters are put beside frozen layers; optimizer anew",
        Linears,
        adapters_added,
        "H1",
        "B1",
        "C1",
        "A4",
        "A1",
        layouts=BITS,
    ),
    late(
        "xc12_adapters_merged",
        "adapters are merged and all is trained; optimizer anew",
        Lora,
        adapters_merged,
        "H1",
        "B1",
        "C1",
        layouts=BITS,
    ),
    late(
        "xc13_higher_rank",
        "adapters get twice the rank; optimizer anew",
        Lora,
        higher_rank,
        "H1",
        "B1",
        "C1",
        layouts=BITS,
    ),
    late("xc14_lion", "AdamW gives way to Lion", Dense, by_other(lion), "H1", "B1", "C1", layouts=BITS),
    late("xc15_sgd", "AdamW gives way to SGD", Gin, by_other(sgd), "H1", "B1", "C1", layouts=BITS),
    late(
        "xc16_bf16",
        "the second stage trains in bf16; optimizer anew",
        Talk,
        to_half,
        "H1",
        "B1",
        "C1",
        "D7",
        "D6",
        "D5",
        layouts=BITS,
    ),
    late("xc17_fp32", "bf16 weights are widened to fp32", Narrow, widened, "H1", "D5", "D6", layouts=BITS),
    late("xc18_deeper", "every layer is repeated; optimizer anew", Talk, deeper, "H1", "B1", "C1", "E9", layouts=BITS),
    late("xc19_shallower", "the last of three layers is left out", Talk, shallower, "H1", layers=3, layouts=BITS),
    late(
        "xc20_from_average",
        "fine-tuning begins from the averages; optimizer anew",
        Unet,
        from_average,
        "H1",
        "B1",
        "C1",
        "F4",
    ),
    late("xc21_slower_average", "the averages' decay is raised", Unet, told("ema", decay=0.999), "H1"),
    late("xc22_betas", "β2 is raised", Dense, new_group(betas=(0.9, 0.9995)), "H1"),
    late("xc23_eps", "ε is raised", Sac, new_group(eps=1e-4), "H1", "D10"),
    late(
        "xc24_decay",
        "weight decay is four times as strong",
        Convnext,
        new_group(weight_decay=lambda old: 4 * old),
        "H1",
        "C5",
    ),
    late("xc25_no_clip", "clipping is switched off", Lstm, new_clip(0.0), "H1"),
    late(
        "xc26_other_data",
        "another data set, from its beginning",
        Talk,
        told("dataloader", seed=31337, batches_yielded=0),
        "H1",
        "C6",
        "C7",
    ),
    late("xc27_next_epoch", "the next epoch is begun early", Convnext, next_epoch, "H1", "C6", "C7"),
    late("xc28_longer", "the schedule is half as long again", Dense, longer(1.5), "H1", "C4", "C2"),
    late("xc29_second_stage", "the schedule begins anew with warm-up", Talk, new_stage, "H1", "C1"),
    late(
        "xc30_dice",
        "dropout is stronger, and seeded anew",
        Dropped,
        acts(other_dice, told("args", dropout=0.3)),
        "H1",
        "C8",
    ),
    late("xc31_no_scaler", "bf16 needs no loss scale", Scaled, no_scaler, "H1", "D8"),
    late(
        "xc32_one_expert_less",
        "an expert is left out; optimizer anew",
        Seek,
        one_expert_less,
        "H1",
        "B1",
        "C1",
        layouts=BITS,
    ),
    late("xc33_half_pruned", "half of the MLPs' weights are set to 0 once", Talk, half_pruned, "H1", "G5"),
    late("xc34_soup", "weights are the mean of two runs; optimizer anew", Gin, souped, "H1", "B1", "C1", "E12"),
    late(
        "xc35_last_layers_reset",
        "last layers of critics begin anew, with their state",
        Sac,
        acts(unread(r"qf\d\.2"), lost(r"qf\d\.2\.")),
        "H1",
        "A2",
        "B1",
    ),
    late("xc36_targets_synced", "targets are set to the critics once", Sac, hard_sync, "H1", "A2"),
    variant(
        "xc37_compiled",
        "names have torch.compile's prefix",
        base=Compiled,
        kind="deliberate",
        true=("H1", "A1"),
        layouts=BITS,
    ),
    late("xc38_two_heads", "the head is untied, beginning as a copy", T5, two_heads, "H1", "F2", layouts=PLAIN),
    variant(
        "xc39_wider",
        "a layer is widened, its function kept; optimizer anew",
        base=Wide,
        kind="deliberate",
        true=("H1", "B1", "C1"),
        layouts=BITS,
    ),
    _hf(
        "xc40_trainer_arguments",
        "transformers' Trainer: other batch, clipping and length",
        "Llama",
        "H1",
        "C4",
        "C10",
        other_args={"per_device_train_batch_size": 8, "max_grad_norm": 0.3, "max_steps": 140},
    ),
]
