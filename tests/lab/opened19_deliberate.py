"""Changes on purpose of the nineteenth half: the files show them, and nothing went wrong."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.lab import opened19_nets as nets
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened19_nets import Bench, does, forgot, group_set, iced, named, put, rate, rows, stage, words
from tests.lab.optimizers import AdamW8bit

__all__ = ["DELIBERATE19"]


def renewed(self: Any) -> None:
    """A new optimizer and a new schedule for what has a gradient now."""
    self.optimizers = type(self).made(self)
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def by(kind: Any, factor: float = 1.0, **more: Any) -> Any:
    """The optimizer becomes another one; the schedule goes on anew."""

    def change(self: Any) -> None:
        self.optimizers = [
            kind([w for w in named(self).values() if w.requires_grad], lr=factor * self.config.lr, **more)
        ]
        self.schedules = [self.schedule(self.optimizers[0])]

    return change


def constant(self: Any) -> None:
    self.schedules = []


def uneven(self: Any) -> None:
    """Each group gets a factor of its own."""
    for n, group in enumerate(self.optimizers[0].param_groups):
        for key in ("lr", "initial_lr"):
            group[key] *= (0.3, 1.5)[n % 2]
    self.schedules[0].base_lrs = [g["initial_lr"] for g in self.optimizers[0].param_groups]
    self.schedules[0]._last_lr = [g["lr"] for g in self.optimizers[0].param_groups]


def clipped(self: Any) -> None:
    self.clip = 0.05
    self.extra["hparams"]["gradient_clip_val"] = 0.05


def left_out(pattern: str) -> nets.Step:
    """Frozen, and out of the optimizer."""

    def change(self: Any) -> None:
        hit = {id(w) for w in named(self, pattern).values()}
        iced(pattern)(self)
        forgot(pattern)(self)
        for group in self.optimizers[0].param_groups:
            group["params"] = [w for w in group["params"] if id(w) not in hit]

    return change


def base_thawed(self: Any) -> None:
    new = list(named(self, "base_layer").values())
    for w in new:
        w.requires_grad_(True)
    first = self.optimizers[0].param_groups[0]
    rest = {k: v for k, v in first.items() if k != "params"}
    self.optimizers[0].param_groups.append({**rest, "params": new})
    one = self.schedules[0]
    one.base_lrs.append(one.base_lrs[0])
    one.lr_lambdas.append(one.lr_lambdas[0])
    one._last_lr.append(one._last_lr[0])


def sized(pattern: str, how: Any) -> nets.Step:
    """Tables of another size, with their moments."""

    def change(self: Any) -> None:
        for w in named(self, pattern).values():
            found = nets.state_of(self, w)
            for key, one in list(found.items()):
                if torch.is_tensor(one) and one.shape == w.shape:
                    found[key] = how(one)
            w.data = how(w.data)

    return change


class Classes(nets.Vit):
    """With a head for six classes, then for nine."""

    def score(self, x: torch.Tensor) -> torch.Tensor:
        found = self.module(x.view(-1, 3, 6, 6))
        return nn.functional.cross_entropy(found, (x @ nets.dice(3, self.width, 9))[:, : found.shape[1]].argmax(1))


def nine(self: Any) -> None:
    old = self.module.head
    self.module.head = nn.Linear(32, 9)
    swap = {id(a): b for a, b in zip(old.parameters(), self.module.head.parameters(), strict=True)}
    for group in self.optimizers[0].param_groups:
        group["params"] = [swap.get(id(w), w) for w in group["params"]]
    for w in old.parameters():
        self.optimizers[0].state.pop(w, None)


class Short(Bench):
    """Goes on in bf16."""

    short = False

    def score(self, x: torch.Tensor) -> torch.Tensor:
        want = self.target(x)
        found = self.module(x.bfloat16() if self.short else x)
        return nn.functional.mse_loss(found.float(), want)


def to_bf16(self: Any) -> None:
    self.short = True
    self.module.to(torch.bfloat16)
    renewed(self)


class Later(Bench):
    """Averages the weights from a moment on."""

    averages = False

    def update(self) -> None:
        super().update()
        for n, w in self.module.named_parameters() if self.averages else ():
            self.extra["ema"][n].lerp_(w.detach(), 0.02)


def averaging(self: Any) -> None:
    self.averages = True
    self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}


class NoMore(nets.Diffuse):
    """Stops averaging."""

    def update(self) -> None:
        super().update() if "ema" in self.extra else Bench.update(self)


def unaveraged(self: Any) -> None:
    del self.extra["ema"]


def average_chosen(self: Any) -> None:
    for n, w in named(self).items():
        w.copy_(self.extra["ema"]["shadow"][n])
    self.extra["ema"]["optimization_step"] = 0
    renewed(self)


def adapted(self: Any) -> None:
    """Two linear layers get adapters, and those alone are trained."""
    for n in (0, 2):
        old = self.module[n]
        new = nets.Low(old.in_features, old.out_features)
        new.base_layer.load_state_dict(old.state_dict())
        self.module[n] = new
    for name, w in self.module.named_parameters():
        w.requires_grad_("lora_" in name)
    renewed(self)


def merged(self: Any) -> None:
    """Adapters become part of the base, and the whole is trained."""
    for name in ("up_proj", "mid_proj", "down_proj"):
        one = self.module[name]
        one.base_layer.weight += 2 * one.lora_B["default"].weight @ one.lora_A["default"].weight
        self.module[name] = one.base_layer
    for w in self.module.parameters():
        w.requires_grad_(True)
    renewed(self)


def deeper(self: Any) -> None:
    self.module.h.append(copy.deepcopy(self.module.h[-1]))
    new = list(self.module.h[-1].parameters())
    for w in new:
        w.requires_grad_(True)
    self.optimizers[0].param_groups[0]["params"].extend(w for w in new if w.ndim > 1)
    self.optimizers[0].param_groups[1]["params"].extend(w for w in new if w.ndim < 2)


def untied(self: Any) -> None:
    self.module.lm_head.weight = nn.Parameter(self.module.wte.weight.detach().clone())
    self.optimizers[0].param_groups[0]["params"].append(self.module.lm_head.weight)


def second_run(self: Any) -> None:
    self.step = 0
    self.extra["sampler"] = {"epoch": 0, "index": 0, "seed": 900}
    self.extra["consumed_samples"] = 0
    renewed(self)


def shrunk(self: Any) -> None:
    for n, w in enumerate(named(self).values()):
        w.mul_(0.6).add_(0.02 * nets.dice(40 + n, *w.shape))
    renewed(self)


class Masked(Bench):
    """Holds the smallest weights at 0 from a moment on."""

    def update(self) -> None:
        super().update()
        if "pruning_mask" in self.extra:
            with torch.no_grad():
                self.module[2].weight *= self.extra["pruning_mask"]


def pruned(self: Any) -> None:
    w = self.module[2].weight
    self.extra["pruning_mask"] = (w.abs() > w.abs().median()).float()
    w *= self.extra["pruning_mask"]


def zero_head(self: Any) -> None:
    self.module.head.weight.zero_()
    self.module.head.bias.zero_()
    forgot("^head")(self)


class Calibrated(nets.Speaker):
    """Batch norms that stand still after a calibration."""


def calibrated(self: Any) -> None:
    one = self.module["frontend"][1]
    one.running_mean.zero_().add_(0.1)
    one.running_var.fill_(1.3)
    one.eval()


def synced(self: Any) -> None:
    self.module["target"].load_state_dict(self.module["online"].state_dict())


def drawn(self: Any) -> None:
    self.extra["rng_states"] = [torch.Generator().manual_seed(900 + n).get_state() for n in range(3)]


def one_group(self: Any) -> None:
    groups = self.optimizers[0].param_groups
    groups[0]["params"] += groups[1]["params"]
    del groups[1]
    for key in ("base_lrs", "lr_lambdas", "_last_lr"):
        setattr(self.schedules[0], key, getattr(self.schedules[0], key)[:1])


def amsgrad(self: Any) -> None:
    group_set(amsgrad=True)(self)
    for w in named(self).values():
        nets.state_of(self, w)["max_exp_avg_sq"] = nets.state_of(self, w)["exp_avg_sq"].clone()


def six_experts(self: Any) -> None:
    sized(r"experts\.|router", lambda x: torch.cat([x, x[:2]]))(self)


def half_states(self: Any) -> None:
    """Goes on by an optimizer that keeps its first moments in bf16."""
    old = self.optimizers[0]
    self.optimizers = [SmallAdam(old.param_groups[0]["params"] + old.param_groups[1]["params"], lr=self.config.lr)]
    for w, state in old.state.items():
        self.optimizers[0].state[w] = {
            "step": int(state["step"]),
            "exp_avg": state["exp_avg"].bfloat16(),
            "exp_avg_sq": state["exp_avg_sq"].clone(),
        }
    self.schedules = [self.schedule(self.optimizers[0])]


class SmallAdam(nets.Optimizer):
    """Adam with a bf16 first moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), eps=1e-8)

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        state["step"] += 1
        one, two = group["betas"]
        state["exp_avg"].copy_(state["exp_avg"].float() * one + gradient * (1 - one))
        state["exp_avg_sq"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        under = (state["exp_avg_sq"] / (1 - two ** state["step"])).sqrt() + group["eps"]
        weight.sub_(group["lr"] / (1 - one ** state["step"]) * state["exp_avg"].float() / under)


def hugged(folder: Path, rng: random.Random, k: int) -> None:
    trained(partial(made, "Qwen2"), folder, rng, k, other_args={"per_device_train_batch_size": 8, "weight_decay": 0.2})


def change(id: str, text: str, base: Any, *steps: Any, true: str = "", **more: Any) -> Fault:
    return variant(
        id, text, base=base, kind="deliberate", loaded=does(*steps), true=tuple(f"H1 {true}".split()), **more
    )


def grown(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.zeros(12, *x.shape[1:])])


def trimmed(x: torch.Tensor) -> torch.Tensor:
    return x[:-3].clone()


DELIBERATE19 = [
    change("wc01_rate_up", "three times the rate", nets.Clip, rate(3.0)),
    change("wc02_rates_apart", "each group gets a rate of its own", nets.Chat, uneven, true="C2"),
    change(
        "wc03_batch_and_rate", "four times the batch at twice the rate", nets.Graphs, rows(4), rate(2.0), true="C10"
    ),
    change("wc04_constant", "the schedule is dropped, the rate stays", nets.Vit, constant, true="C2"),
    change("wc05_betas", "beta1 of 0.8 and beta2 of 0.98", nets.Chat, group_set(betas=(0.8, 0.98))),
    change("wc06_eps", "an eps of 1e-5", nets.Vit, group_set(eps=1e-5), true="D10"),
    change("wc07_no_decay", "no weight decay any more", nets.Clip, group_set(weight_decay=0.0)),
    change("wc08_clip", "a much smaller clipping bound", nets.Chat, clipped),
    change(
        "wc09_left_out", "two layers are frozen and leave the optimizer", nets.Chat, left_out(r"^h\.[01]\."), true="B1"
    ),
    change("wc10_base_thawed", "the base under the adapters is trained too", nets.Peft, base_thawed),
    change(
        "wc11_more_words", "sixteen words are added, with moments of 0", nets.Chat, words("wte|lm_head", 16), true="F7"
    ),
    change(
        "wc12_fewer_words",
        "the last three rows of a padded vocabulary are cut off",
        nets.Chat,
        sized("wte|lm_head", trimmed),
        true="F7",
        needs={"padded": 128},
    ),
    change("wc13_nine_classes", "a new head for nine classes", Classes, nine, true="A2 A4 B1"),
    change("wc14_to_sgd", "SGD instead of AdamW", nets.Graphs, by(torch.optim.SGD, 5.0, momentum=0.9), true="B1 C1"),
    change("wc15_all_anew", "optimizer and schedule are made anew", nets.Llama, renewed, true="B1 C1"),
    change("wc16_to_8bit", "AdamW of 8 bits instead of 32", nets.Chat, by(AdamW8bit), true="B1 C1"),
    change(
        "wc17_to_bf16",
        "goes on in bf16, with a new optimizer",
        Short,
        to_bf16,
        true="B1 C1 D7",
        layouts=("torch_save", "lightning"),
    ),
    change("wc18_averages_begin", "weights are averaged from here on", Later, averaging, true="A4"),
    change("wc19_averages_end", "weights are averaged no more", NoMore, unaveraged, true="A5"),
    change(
        "wc20_average_chosen", "the average is the start of a new stage", nets.Diffuse, average_chosen, true="F4 B1 C1"
    ),
    change("wc21_adapters_begin", "adapters are added, and trained alone", Bench, adapted, true="A1 A4 B1 C1 F5"),
    change("wc22_adapters_merged", "adapters are merged, and all is trained", nets.Peft, merged, true="A1 B1 C1 F5"),
    change("wc23_deeper", "the last block is stacked once more", nets.Chat, deeper, true="A4 E9 B1"),
    change("wc24_longer", "twelve more positions, zeros at first", nets.Chat, sized("wpe", grown), true="F7 A4"),
    change(
        "wc25_untied",
        "the head is untied on purpose",
        nets.Chat,
        untied,
        tied=True,
        true="F2 B1",
        layouts=("torch_save",),
    ),
    change(
        "wc26_second_run",
        "fine-tuning: step, data, schedule and optimizer begin anew",
        nets.Llama,
        second_run,
        true="B1 C1 C6 C7 C9",
    ),
    change("wc27_shrunk", "weights are shrunk and perturbed, the optimizer is new", Bench, shrunk, true="B1 C1 A2 F6"),
    change("wc28_pruned", "half of a matrix is set to 0 and stays so", Masked, pruned, true="G5"),
    change("wc29_zero_head", "the head begins at 0 again", nets.Vit, zero_head, true="A2 B1 G5"),
    change("wc30_calibrated", "batch norms are calibrated and stand still", Calibrated, calibrated, true="A5"),
    change("wc31_synced", "the target network is synchronised by hand", nets.Dqn, synced, true="F1"),
    change(
        "wc32_other_data",
        "continued on other data, from its beginning",
        nets.Chat,
        put("sampler", index=0, seed=512, epoch=0),
        stage,
        true="C1 C6 C7",
    ),
    change("wc33_other_noise", "all ranks draw with new seeds", nets.Ranks, drawn, true="C8"),
    change("wc34_small_states", "first moments in bf16, by another optimizer", nets.Clip, half_states, true="D4 C1"),
    change(
        "wc35_scale_lower",
        "a lower loss scale that grows less often",
        nets.Fp16,
        put("scaler", scale=512.0, growth_interval=40, _growth_tracker=0),
        true="D8",
    ),
    change("wc36_one_group", "two groups become one, and all decays", nets.Chat, one_group, true="B7"),
    change("wc37_amsgrad", "AMSGrad is switched on", nets.Clip, amsgrad),
    change(
        "wc38_six_experts",
        "two experts are copied, with their rows of the router",
        nets.Crowd,
        six_experts,
        true="E10 A4",
    ),
    change(
        "wc39_rmsprop_adam",
        "Adam instead of RMSprop, at another rate",
        nets.Vae,
        by(torch.optim.Adam, 0.3),
        true="B1 C1",
    ),
    Fault(
        "wc40_trainer_batch",
        "healthy",
        "transformers' Trainer: twice the batch, more decay",
        frozenset(),
        live=hugged,
        formats=("live",),
        kind="deliberate",
        also=("H1", "C10"),
    ),
]
