"""Changes on purpose of the eighteenth half: a doctor may ask about them, and must not call them an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab import opened18_nets as nets
from tests.lab.live import variant
from tests.lab.opened18_nets import (
    after,
    bf16,
    grown,
    initial,
    larger,
    lost,
    noted,
    ordered,
    paced,
    placed,
    probed,
    regrouped,
    regularised,
    restarted,
    setting,
    still,
    weights,
)

__all__ = ["DELIBERATE18"]

FILES = ("torch_save", "lightning")
ONE = ("torch_save",)


def thawed(pattern: str) -> nets.Change:
    def change(self: Any) -> None:
        for w in weights(self, pattern).values():
            w.requires_grad_(True)

    return change


def new_optimizer(kind: Any, factor: float = 1.0, **more: Any) -> nets.Change:
    """Another optimizer, and its schedule."""

    def change(self: Any) -> None:
        groups = [{"params": group["params"]} for group in self.optimizers[0].param_groups]
        self.optimizers = [kind(groups, lr=factor * self.config.lr, **more)]
        self.schedules = [self.schedule(one) for one in self.optimizers]

    return change


def stage(self: Any) -> None:
    """A new stage: steps, schedule, data and optimizer begin anew."""
    self.step = 0
    lost()(self)
    restarted(self)
    placed(index=0, seed=5150)(self)
    self.extra["consumed_samples"] = 0


def headed(self: Any) -> None:
    """Another class head, drawn anew, with its state."""
    initial("^head")(self)
    lost("^head")(self)


def joined(self: Any) -> None:
    """Adapters are merged into the base and begin at zero, to be trained on."""
    for layer in self.module.values():
        layer.base_layer.weight += 2 * layer.lora_B.weight @ layer.lora_A.weight
        layer.lora_B.weight.zero_()
    lost("lora_")(self)


def plainly(self: Any) -> None:
    """The loss scale is lowered on purpose."""
    self.extra["scaler"] |= {"scale": 1024.0, "_growth_tracker": 0}


def decayed(rate: float) -> nets.Change:
    def change(self: Any) -> None:
        self.decay = rate
        self.extra["ema_decay"] = rate

    return change


def tracked(self: Any) -> None:
    """An average is begun."""
    self.extra["ema"] = {n: w.detach().clone() for n, w in weights(self).items()}


def soup(self: Any) -> None:
    """Goes on from the average on purpose, with a new optimizer."""
    for n, w in weights(self).items():
        w.copy_(self.extra["ema"][n])
    lost()(self)


def accumulated(self: Any) -> None:
    self.parts = 3
    self.extra["args"]["gradient_accumulation_steps"] = 3


def unclipped(self: Any) -> None:
    self.clip = 0.1
    self.extra["args"]["max_grad_norm"] = 0.1


def cooled(self: Any) -> None:
    """A linear fall to zero in forty updates."""
    self.schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.0, 40) for one in self.optimizers]


def deeper(self: Any) -> None:
    """A copy of the last layer is put on top, with a group of its own."""
    new = nets.Layer(32, 4, False)
    new.load_state_dict(self.module.layers[-1].state_dict())
    self.module.layers.append(new)
    added(self, new)


def added(self: Any, new: nn.Module) -> None:
    one = self.optimizers[0]
    group = {k: v for k, v in one.param_groups[0].items() if k != "params"}
    for w in new.parameters():
        w.requires_grad_(True)
    one.add_param_group(group | {"params": list(new.parameters())})
    for schedule in self.schedules:
        schedule.base_lrs.append(group.get("initial_lr", group["lr"]))
        schedule.lr_lambdas.append(schedule.lr_lambdas[0])
        schedule._last_lr = [g["lr"] for g in one.param_groups]


def shallower(self: Any) -> None:
    """The last layer is taken off, and out of its group."""
    gone = {id(w) for w in self.module.layers[-1].parameters()}
    del self.module.layers[-1]
    for group in self.optimizers[0].param_groups:
        for w in [w for w in group["params"] if id(w) in gone]:
            self.optimizers[0].state.pop(w, None)
        group["params"] = [w for w in group["params"] if id(w) not in gone]


def pruned(self: Any) -> None:
    """The smaller half of each matrix is set to zero."""
    for w in weights(self).values():
        if w.ndim == 2:
            w[w.abs() < w.abs().median()] = 0


def shrunk(self: Any) -> None:
    """Shrink and perturb, to learn on."""
    for n, w in enumerate(weights(self).values()):
        w.mul_(0.6).add_(0.01 * nets.normal(70 + n, *w.shape))
    lost()(self)


def tied(self: Any) -> None:
    """Head and table become one from here on."""
    gone = self.module.embed_out.weight
    self.module.embed_out.weight = self.module.embed_in.weight
    self.optimizers[0].state.pop(gone, None)
    for group in self.optimizers[0].param_groups:
        group["params"] = [w for w in group["params"] if w is not gone]


def calibrated(self: Any) -> None:
    """Running statistics are taken anew over ten batches, on purpose."""
    norms = [one for one in self.module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    for one in norms:
        one.reset_running_stats()
        one.momentum = None
    for n in range(10):
        self.score(nets.normal(31_000 + n, 64, self.wide))
    for one in norms:
        one.momentum = 0.1


def frozen_statistics(self: Any) -> None:
    for one in self.module.modules():
        if isinstance(one, nn.modules.batchnorm._BatchNorm):
            one.eval()


def hidden_rate(self: Any) -> None:
    """The backbone's rate alone is lowered."""
    group, schedule = self.optimizers[0].param_groups[0], self.schedules[0]
    for key in ("lr", "initial_lr"):
        group[key] /= 4
    schedule.base_lrs[0] /= 4
    schedule._last_lr[0] /= 4


def merged_groups(self: Any) -> None:
    """Two param groups become one."""
    a, b = self.optimizers[0].param_groups
    a["params"] = [*a["params"], *b["params"]]
    self.optimizers[0].param_groups[:] = [a]
    for schedule in self.schedules:
        schedule.base_lrs, schedule.lr_lambdas = schedule.base_lrs[:1], schedule.lr_lambdas[:1]
        schedule._last_lr = schedule._last_lr[:1]


def wider_positions(self: Any) -> None:
    grown("position", 8)(self)


class Chilled(nets.Writer):
    """Embeddings and the first layer frozen until they are thawed."""

    def net(self) -> nn.Module:
        found = super().net()
        for n, w in found.named_parameters():
            w.requires_grad_(not n.startswith(("embed_in", "position", "layers.0")))
        return found

    def groups(self) -> Any:
        return [{"params": list(self.module.parameters())}]


class Rich(nets.Denoiser):
    """Begins without an average."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = {k: v for k, v in self.extra.items() if not k.startswith("ema")}

    def update(self) -> None:
        nets.Desk.update(self)
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                if "ema" in self.extra:
                    self.extra["ema"][n].lerp_(w, 0.02)


def case(id: str, text: str, base: type[nets.Desk], true: str, *changes: nets.Change, **more: Any) -> Any:
    loaded = after(*changes)
    return variant(id, text, base=base, kind="deliberate", true=tuple(true.split()), loaded=loaded, **more)


DELIBERATE18 = [
    case("vc01_lower", "a fifth of the rate", nets.Photos, "H1 C2 B8", paced(0.2)),
    case("vc02_higher", "three times the rate", nets.Ring, "H1 C2 B8", paced(3)),
    case("vc03_batch", "four times the batch and twice the rate", nets.Writer, "C10 H1", larger(4), paced(2)),
    case("vc04_decay", "weight decay doubled", nets.Writer, "H1 B7 C5", regularised),
    case("vc05_betas", "another beta2", nets.Speech, "H1", setting(betas=(0.9, 0.97))),
    case("vc06_frozen", "the backbone is frozen", nets.Boxes, "H1 A2 B1 B3", still("backbone")),
    case("vc07_thawed", "all is trained that was frozen", Chilled, "H1 B1", thawed("."), layouts=FILES),
    case("vc08_probe", "a new head", nets.Writer, "A4 H1", probed, layouts=FILES),
    case("vc09_tokens", "eight more tokens", nets.Writer, "F7 H1", grown("embed_in|embed_out", 8), layouts=FILES),
    case(
        "vc10_positions",
        "a longer context, eight more positions",
        nets.Writer,
        "F7 H1 H2",
        wider_positions,
        layouts=FILES,
    ),
    case(
        "vc11_stage",
        "a new stage, all but the weights begins anew",
        nets.Writer,
        "B1 B2 B3 C1 C6 C7 C9 H1",
        stage,
        layouts=FILES,
    ),
    case("vc12_schedule", "the schedule begins anew", nets.Photos, "C1 C2 H1", restarted),
    case("vc13_cooldown", "a fall to zero replaces the schedule", nets.Ring, "C1 C2 C3 C4 H1", cooled, layouts=ONE),
    case("vc14_order", "the data in another order", nets.Market, "C7 C6", placed(seed=44, index=0), layouts=FILES),
    case("vc15_epochs", "another pass over the data is begun", nets.Desk, "C6 C7", placed(epoch=1, index=0)),
    case(
        "vc16_sgd",
        "SGD instead of AdamW",
        nets.Photos,
        "B1 B3 C1 C2 H1",
        new_optimizer(torch.optim.SGD, 10),
        layouts=FILES,
    ),
    case(
        "vc17_radam",
        "RAdam instead of AdamW",
        nets.Speech,
        "B1 B2 B3 C1 C2 H1",
        new_optimizer(torch.optim.RAdam, 0.5),
        layouts=FILES,
    ),
    case("vc18_head", "another class head, with state of its own", nets.Photos, "A2 B1 B3 H1", headed, layouts=FILES),
    case("vc19_relora", "adapters merged, and begun anew", nets.Tuned, "F5 B1 B3 A2 H1", joined, layouts=FILES),
    case("vc20_scale", "a lower loss scale", nets.Scaled, "D8 H1", plainly),
    case("vc21_average_rate", "another decay of the average", nets.Denoiser, "H1 A4", decayed(0.9)),
    case("vc22_average_begun", "an average is begun", Rich, "A4 H1", tracked),
    case("vc23_soup", "goes on from the average, optimizer anew", nets.Denoiser, "F4 B1 B3 H1", soup, layouts=FILES),
    case("vc24_accumulated", "three micro-batches an update", nets.Desk, "C10 H1", accumulated),
    case("vc25_clip", "a tenth of the gradient's bound", nets.Writer, "H1", unclipped),
    case("vc26_deeper", "a copy of the last layer on top", nets.Writer, "A4 E9 H1 H2", deeper, layouts=FILES),
    case("vc27_shallower", "one layer fewer", nets.Writer, "E9 A1 H1 H2", shallower, layouts=FILES),
    case("vc28_pruned", "half of the weights set to zero", nets.Desk, "G5 H1", pruned),
    case("vc29_shrunk", "shrunk and perturbed, optimizer anew", nets.Ring, "B1 B3 F6 G6 A2 H1", shrunk, layouts=FILES),
    case("vc30_tied", "head and table become one", nets.Writer, "F2 A2 H1", tied, layouts=FILES),
    case("vc31_statistics", "running statistics are taken anew", nets.Photos, "A5", calibrated),
    case("vc32_still_statistics", "batch norms are frozen", nets.Photos, "H1 A5", frozen_statistics),
    case("vc33_backbone_rate", "a lower rate of the backbone", nets.Boxes, "H1 C2 B8", hidden_rate),
    case("vc34_one_group", "two param groups become one", nets.Writer, "B7 H1 C5", merged_groups, layouts=FILES),
    case(
        "vc35_regrouped", "the table is decayed no more", nets.Writer, "B7 H1 C5", regrouped("embed_in"), layouts=FILES
    ),
    case(
        "vc36_export",
        "weights through bf16, optimizer anew",
        nets.Plain,
        "D7 D1 B1 B3 H1",
        ordered("", bf16, "weights"),
        lost(),
        layouts=FILES,
    ),
    case("vc37_eps", "a larger eps", nets.Ring, "H1 D10", setting(eps=1e-5)),
    case("vc38_momentum", "less momentum", nets.Boxes, "H1", setting(momentum=0.8)),
    case(
        "vc39_foreach",
        "the fused kernel and a note",
        nets.Plain,
        "H1",
        setting(foreach=True),
        noted("args", lambda old: old | {"note": "second node"}),
        layouts=ONE,
    ),
    case(
        "vc40_critics",
        "critics begin anew, actor kept",
        nets.Pilot,
        "A2 B1 B3 H1",
        initial("critic"),
        lost("^critic"),
        layouts=FILES,
    ),
]
assert len(DELIBERATE18) == 40
