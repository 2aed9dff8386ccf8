"""Changes on purpose of the twenty-second half: nothing went wrong, and the files show that something was changed."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.lab import opened22_nets as nets
from tests.lab import optimizers as other
from tests.lab.fault import Fault
from tests.lab.hugging import made, trained
from tests.lab.live import variant
from tests.lab.opened22_nets import (
    acts,
    all_groups,
    aux_head,
    field,
    hit,
    kept_of,
    more_rows,
    new_batch,
    new_clip,
    new_field,
    new_head,
    new_length,
    new_lr,
    own_group,
    rebegun,
    stateless,
)

__all__ = ["DELIBERATE22"]

Tensor = torch.Tensor


def meant(id: str, text: str, true: str, why: str, **more: Any) -> Fault:
    """A change on purpose; ``true``: causes that say what happened, as a question at most."""
    return variant(id, text, kind="deliberate", true=tuple(true.split()), why=why, **more)


def other_optimizer(kind: Any, times: float = 1.0, **more: Any) -> Any:
    """The run goes on with another optimizer."""

    def act(self: Any) -> None:
        groups = [{"params": g["params"]} for g in all_groups(self)]
        self.optimizers = [kind(groups, lr=self.config.lr * times, **more)]
        self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]

    return act


def merged_for_good(self: Any) -> None:
    """Adapters go into the base and are removed; the base is trained."""
    for m in self.module.values():
        m.base_layer.weight += 2.0 * m.lora_B["default"].weight @ m.lora_A["default"].weight
        w = m.base_layer.weight.requires_grad_(True)
        m.lora_A, m.lora_B = nn.ModuleDict(), nn.ModuleDict()
        m.forward = partial(nn.functional.linear, weight=w)
    self.optimizers = self.made()
    self.schedules = [one for one in map(self.schedule, self.optimizers) if one is not None]


def adapters_new(self: Any) -> None:
    """A second task: the adapters begin anew on the merged base."""
    for n, m in enumerate(self.module.values()):
        a, b = m.lora_A["default"].weight, m.lora_B["default"].weight
        m.base_layer.weight += 2.0 * b @ a
        a.copy_(0.2 * nets.noise(n, *a.shape))
        b.zero_()
    stateless("lora")(self)


def deeper(self: Any) -> None:
    """A layer is put on top: a copy of the last one, without state."""
    layers = self.module.gpt_neox["layers"]
    layers.append(copy.deepcopy(layers[-1]))
    ws = [w.requires_grad_(True) for w in layers[-1].parameters()]
    nets._joined(self, ws, self.optimizers[0].param_groups[0], 1.0)


def shallower(self: Any) -> None:
    """The last layer is taken off."""
    layers = self.module.gpt_neox["layers"]
    gone = {id(w) for w in layers[-1].parameters()}
    del layers[-1]
    one = self.optimizers[0]
    for group in one.param_groups:
        group["params"] = [w for w in group["params"] if id(w) not in gone]
    for w in [w for w in one.state if id(w) in gone]:
        del one.state[w]


def thawed(self: Any) -> None:
    for w in self.module.parameters():
        w.requires_grad_(True)
    known = {id(w) for g in all_groups(self) for w in g["params"]}
    new = [w for w in self.module.parameters() if id(w) not in known]
    nets._joined(self, new, self.optimizers[0].param_groups[0], 0.1)


class Backbone(nets.Convs):
    """Stem and first block are frozen, and the optimizer does not know them."""

    def net(self) -> nn.Module:
        found = super().net()
        for n, w in found.named_parameters():
            w.requires_grad_(not n.startswith(("stem", "blocks.0.")))
        return found


def average_from_now(self: Any) -> None:
    self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.state_dict().items()}
    self.extra["ema_config"] = {"decay": 0.99, "num_updates": 0}


def average_dropped(self: Any) -> None:
    del self.extra["ema"], self.extra["ema_config"]


class NoLonger(nets.UNet):
    """The average is kept while there is one."""

    def update(self) -> None:
        if "ema" in self.extra:
            super().update()
        else:
            nets.Rig.update(self)


def shorter(self: Any) -> None:
    """The last rows of the table, which no token uses, are cut off."""
    for w in hit(self, "embed_").values():
        kept = kept_of(self, w)
        for key, one in list(kept.items()):
            if torch.is_tensor(one) and one.shape == w.shape:
                kept[key] = one[: self.config.vocab].clone()
        w.data = w.data[: self.config.vocab].clone()


def longer_positions(self: Any) -> None:
    """The table of positions is stretched to twice its length by interpolation; its state begins anew."""
    w = self.module.bert["embeddings"]["position_embeddings"].weight
    w.data = nn.functional.interpolate(w.data.T[None], scale_factor=2, mode="linear")[0].T.contiguous()
    stateless("position_embeddings")(self)


def one_group(self: Any) -> None:
    """Groups are joined into one."""
    first, *rest = self.optimizers[0].param_groups
    for group in rest:
        first["params"] = [*first["params"], *group["params"]]
    del self.optimizers[0].param_groups[1:]
    for one in self.schedules:
        one.base_lrs, one._last_lr, one.lr_lambdas = one.base_lrs[:1], one._last_lr[:1], one.lr_lambdas[:1]


def longer_queue(self: Any) -> None:
    """The queue of keys gets twice the places; the new ones are random."""
    m = self.module
    m.queue = torch.cat([m.queue, nn.functional.normalize(nets.noise(2, *m.queue.shape), dim=0)], 1)


def slower_matrices(self: Any) -> None:
    """Muon's rate is halved, AdamW's stays."""
    for group in self.optimizers[0].param_groups:
        group["lr"], group["initial_lr"] = group["lr"] / 2, group["initial_lr"] / 2
    self.schedules[0].base_lrs = [lr / 2 for lr in self.schedules[0].base_lrs]
    self.schedules[0]._last_lr = [lr / 2 for lr in self.schedules[0]._last_lr]


class LongMoco(nets.Moco):
    """The pointer goes round at the queue's end, whatever its length."""

    def fit(self, x: Tensor) -> Tensor:
        m, count = self.module, self.module.queue.shape[1]
        q = nn.functional.normalize(m["encoder_q"](x + 0.3 * x.roll(1, 1)), dim=1)
        with torch.no_grad():
            for a, b in zip(m["encoder_k"].parameters(), m["encoder_q"].parameters(), strict=True):
                a.lerp_(b, 0.03)
            k = nn.functional.normalize(m["encoder_k"](x), dim=1)
        found = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone()], 1) / 0.3
        with torch.no_grad():
            m.queue[:, (int(m.queue_ptr) + torch.arange(len(k))) % count] = k.T
            m.queue_ptr.copy_((m.queue_ptr + len(k)) % count)
        return nn.functional.cross_entropy(found, torch.zeros(len(x), dtype=torch.long))


def seeded(self: Any) -> None:
    """A new seed of everything, in the arguments too."""
    self.extra["args"]["seed"] = self.extra["dataloader"]["shuffle_seed"] = 4242


def skipped(count: int) -> Any:
    """Bad samples are skipped."""

    def act(self: Any) -> None:
        self.extra["dataloader"]["samples_yielded"] += count
        self.extra["consumed_samples"] += count

    return act


def hugging(id: str, text: str, name: str, true: str, why: str, **more: Any) -> Fault:
    live = partial(trained, partial(made, name), **more)
    also = tuple(true.split())
    return Fault(id, "healthy", text, frozenset(), live=live, formats=("live",), kind="deliberate", also=also, why=why)


FLAT = ("torch_save", "lightning")

DELIBERATE22: tuple[Fault, ...] = (
    meant("zc01_lower_rate", "a tenth of the rate", "H1", "lr", base=nets.Qwen, loaded=acts(new_lr(0.1))),
    meant(
        "zc02_larger_batch_and_rate",
        "four times the batch, twice the rate",
        "H1 C10",
        "lr, batch",
        base=nets.Bert,
        loaded=acts(new_lr(2.0), new_batch(4)),
    ),
    meant(
        "zc03_more_tokens",
        "twelve tokens are added",
        "F7 H1",
        "rows",
        base=nets.Neo,
        loaded=acts(more_rows("embed_", 12)),
    ),
    meant(
        "zc04_classifier_exchanged",
        "another classifier, without state",
        "A2 B1 H1 B3",
        "head.* are new",
        base=nets.Convs,
        loaded=acts(new_head("head")),
    ),
    meant("zc05_head_added", "a head is added", "A4 H1", "aux_head", base=nets.Gat, loaded=acts(aux_head)),
    meant(
        "zc06_new_stage",
        "a new stage: other data, a schedule from its start",
        "C1 C2 C6 C7 H1",
        "schedule, data",
        base=nets.Qwen,
        loaded=acts(nets.new_stage, rebegun),
    ),
    meant(
        "zc07_optimizer_anew",
        "the optimizer is begun anew with its schedule",
        "B1 C1 C2 H1",
        "no state",
        base=nets.Conformer,
        fresh=("optimizer", "scheduler"),
    ),
    meant(
        "zc08_adam_to_sgd",
        "fine-tuning goes on with SGD",
        "B1 C1 C2 H1 B7",
        "optimizer",
        base=nets.Convs,
        loaded=acts(other_optimizer(torch.optim.SGD, 20.0, momentum=0.9)),
    ),
    meant(
        "zc09_adam_to_lion",
        "goes on with Lion",
        "B1 C1 C2 H1 B7",
        "optimizer",
        base=nets.Gat,
        loaded=acts(other_optimizer(other.Lion, 0.2)),
    ),
    meant(
        "zc10_more_decay",
        "three times the weight decay",
        "H1 B7 C5",
        "weight_decay",
        base=nets.Detr,
        loaded=acts(new_field(weight_decay=lambda x: 3 * x)),
    ),
    meant(
        "zc11_other_betas",
        "a longer second average",
        "H1",
        "betas",
        base=nets.Conformer,
        loaded=acts(new_field(betas=(0.9, 0.9995))),
    ),
    meant(
        "zc12_longer",
        "twice as long, on the same curve's formula",
        "C4 H1 C2",
        "max_steps",
        base=nets.Neo,
        loaded=acts(new_length(2.0)),
    ),
    meant(
        "zc13_cosine_longer",
        "T_max is raised",
        "C4 H1 C2",
        "T_max",
        base=nets.T5,
        schedule=nets.cosine,
        loaded=acts(lambda self: [setattr(one, "T_max", one.T_max + 100) for one in self.schedules]),
    ),
    meant(
        "zc14_frozen_tables", "tables are frozen", "H1", "embed_*", base=nets.Neo, loaded=acts(nets.frozen("embed_"))
    ),
    meant(
        "zc15_backbone_thawed",
        "frozen layers are trained from now on, in a group",
        "H1 B7 A4",
        "new group",
        base=Backbone,
        loaded=acts(thawed),
    ),
    meant(
        "zc16_adapters_merged",
        "adapters are merged and the base is trained",
        "F5 B1 H1 C1 C2 B7 F6",
        "base, state",
        base=nets.Lora,
        layouts=FLAT,
        loaded=acts(merged_for_good),
    ),
    meant(
        "zc17_second_task",
        "new adapters on the merged base",
        "F5 F6 B1 H1 A2",
        "base, adapters",
        base=nets.Lora,
        loaded=acts(adapters_new),
    ),
    meant(
        "zc18_deeper",
        "a copy of the last layer is put on top",
        "E9 A4 H1",
        "layers.2",
        base=nets.Neo,
        loaded=acts(deeper),
    ),
    meant(
        "zc19_shallower",
        "the last layer is taken off",
        "E9 H1 A2",
        "layers.2 is gone",
        base=nets.Neo,
        depth=3,
        loaded=acts(shallower),
    ),
    meant(
        "zc20_average_from_now",
        "an average is kept from now on",
        "A4 H1",
        "ema",
        base=nets.Convs,
        loaded=acts(average_from_now),
    ),
    meant(
        "zc21_average_dropped",
        "the average is dropped",
        "H1 A5",
        "ema is gone",
        base=NoLonger,
        loaded=acts(average_dropped),
    ),
    meant(
        "zc22_rows_cut", "padding of the vocabulary is cut off", "F7 H1", "rows", base=nets.Neo, loaded=acts(shorter)
    ),
    meant(
        "zc23_longer_positions",
        "positions are interpolated to twice as many",
        "H1 F7 B1 A2 B3",
        "positions",
        base=nets.Bert,
        loaded=acts(longer_positions),
    ),
    meant(
        "zc24_groups_joined",
        "two groups become one",
        "B7 H1",
        "groups",
        base=nets.Qwen,
        layouts=("torch_save", "dcp"),
        loaded=acts(one_group),
    ),
    meant(
        "zc25_slow_tables",
        "the table gets a group with a tenth of the rate",
        "B7 H1 B8",
        "groups",
        base=nets.Nerf,
        loaded=acts(own_group("encoding", 0.1)),
    ),
    meant("zc26_other_seed", "another seed everywhere", "C7 H1", "seeds", base=nets.Dlrm, loaded=acts(seeded)),
    meant(
        "zc27_data_skipped",
        "400 bad samples are skipped",
        "H1 C6 C7 H3",
        "samples_yielded",
        base=nets.Mixer,
        loaded=acts(skipped(400)),
    ),
    meant(
        "zc28_other_clip",
        "another bound of the gradient, and eps",
        "H1 D10",
        "grad_clip, eps",
        base=nets.Scaled,
        loaded=acts(new_clip(0.25), new_field(eps=1e-6)),
    ),
    meant(
        "zc29_scale_lowered",
        "the loss scale is lowered by hand, and grows more slowly",
        "D8 H1",
        "scaler",
        base=nets.Scaled,
        loaded=acts(field("scaler", scale=256.0, growth_interval=2000)),
    ),
    meant(
        "zc30_constant_now",
        "the schedule is taken away; the rate stays",
        "C2 C3 H1 C1",
        "no scheduler",
        base=nets.Clip,
        loaded=acts(lambda self: self.schedules.clear()),
    ),
    meant(
        "zc31_slower_matrices",
        "Muon's rate is halved, AdamW's is not",
        "H1",
        "lr of the first optimizer",
        base=nets.Qwen,
        made=nets.muon,
        layouts=FLAT,
        loaded=acts(slower_matrices),
    ),
    meant(
        "zc32_momentum",
        "more momentum",
        "H1",
        "momentum",
        base=nets.Convs,
        optimizer=lambda self, groups: torch.optim.SGD(groups, lr=8 * self.config.lr, momentum=0.9),
        loaded=acts(new_field(momentum=0.95)),
    ),
    meant(
        "zc33_amsgrad_on",
        "amsgrad is switched on, with what there is as its maximum",
        "H1 A4",
        "max_exp_avg_sq",
        base=nets.Gat,
        loaded=acts(
            lambda self: [g.update(amsgrad=True) for g in all_groups(self)],
            lambda self: [s.update(max_exp_avg_sq=s["exp_avg_sq"].clone()) for s in self.optimizers[0].state.values()],
        ),
    ),
    meant(
        "zc34_head_and_rate",
        "another classifier, a frozen backbone, a third of the rate",
        "A2 B1 H1 B3 B7",
        "head",
        base=nets.Mixer,
        loaded=acts(new_head("head"), nets.frozen("mixer_blocks"), new_lr(0.3)),
    ),
    meant(
        "zc35_tokens_and_stage",
        "new tokens, a new schedule, another batch",
        "F7 C1 C2 H1 C10",
        "rows, schedule",
        base=nets.Lstm,
        loaded=acts(more_rows("encoder|decoder", 7), rebegun, new_batch(2)),
    ),
    meant(
        "zc36_averaged_decay",
        "the average follows more slowly from now on",
        "H1",
        "decay",
        base=nets.UNet,
        loaded=acts(field("ema_config", decay=0.995)),
    ),
    meant(
        "zc37_targets_made_equal",
        "the targets are set to the critics at a new task, and its rate is lower",
        "H1 F4 G6",
        "qf*_target",
        base=nets.Sac,
        loaded=acts(
            lambda self: [
                self.module[f"{n}_target"].load_state_dict(self.module[n].state_dict()) for n in ("qf1", "qf2")
            ],
            new_lr(0.5),
        ),
        layouts=FLAT,
    ),
    hugging(
        "zc38_trainer_decay",
        "Trainer: another batch and weight decay",
        "Llama",
        "H1 C10 B7 C7 C6",
        "arguments",
        other_args={"per_device_train_batch_size": 2, "weight_decay": 0.2},
    ),
    hugging(
        "zc39_trainer_longer", "Trainer: more steps", "Qwen2", "H1 C4 C2", "max_steps", other_args={"max_steps": 200}
    ),
    meant(
        "zc40_longer_queue",
        "the queue of keys gets twice the places, and the rate is lower",
        "A4 H1 F7",
        "queue",
        base=LongMoco,
        loaded=acts(longer_queue, new_lr(0.5)),
    ),
)
