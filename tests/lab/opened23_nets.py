"""What the twenty-third half trains: small networks and optimizers of its own, in the file layouts of many trainers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.lab.config import Config
from tests.lab.data import batch
from tests.lab.live import Loop, _single
from tests.lab.opened20_nets import Forge, memory, noise, weights
from tests.lab.optimizers import Optimizer

Tensor = torch.Tensor


def chain(*widths: int, act: type[nn.Module] = nn.Tanh, bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between them."""
    found: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        found += [nn.Linear(a, b, bias=bias), act()]
    return nn.Sequential(*found[:-1])


class Rig(Forge):
    """A trainer that saves in the words of timm, mmengine, fairseq, composer, accelerate or a folder of shards."""

    layouts = ("torch_save", "timm", "mm", "fairseq", "composer", "accelerate", "sharded")

    def save(self, folder: Path, layout: str) -> None:
        writer = getattr(self, f"_as_{layout}", None)
        if writer is None:
            super().save(folder, layout)
            return
        content = dict(self.content())
        states = content.pop("optimizers", None) or [content.pop("optimizer")]
        told = content.pop("schedulers", None) or ([content.pop("scheduler")] if "scheduler" in content else [])
        folder.mkdir(parents=True)
        writer(folder, content.pop("model"), states, told, content.pop("step"), content)

    def _as_timm(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        whole = {
            "epoch": rest["dataloader"]["epoch"],
            "arch": type(self.module).__name__,
            "state_dict": model,
            "optimizer": states[0] if len(states) == 1 else states,
            "version": 2,
            "num_updates": step,
            "lr_scheduler": told[0] if len(told) == 1 else told,
            **rest,
        }
        torch.save(whole, folder / f"checkpoint-{step}.pth.tar")

    def _as_mm(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        rest = dict(rest)
        loader = rest.pop("dataloader")
        meta = {"iter": step, "epoch": loader["epoch"], "seed": loader["seed"], "experiment_name": "run", "cfg": "{}"}
        whole = {
            "meta": meta,
            "state_dict": model,
            "message_hub": {"runtime_info": {"loop_stage": "train"}, "dataloader": loader, "args": rest.pop("args")},
            "optimizer": states[0] if len(states) == 1 else dict(zip("abcd", states, strict=False)),
            "param_schedulers": told,
            **rest,
        }
        torch.save(whole, folder / f"iter_{step}.pth")

    def _as_fairseq(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        rest = dict(rest)
        loader = rest.pop("dataloader")
        history = {
            "criterion_name": "CrossEntropyCriterion",
            "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": told[0] if len(told) == 1 else {"each": told},
            "num_updates": step,
        }
        iterator = {
            "epoch": loader["epoch"] + 1,
            "iterations_in_epoch": loader["batches_yielded"],
            "seed": loader["seed"],
        }
        whole = {
            "args": None,
            "cfg": {"optimization": rest.pop("args")},
            "model": model,
            "optimizer_history": [history],
            "last_optimizer_state": states[0] if len(states) == 1 else {"each": states},
            "extra_state": {"train_iterator": iterator, "val_loss": None, **rest},
        }
        torch.save(whole, folder / f"checkpoint_1_{step}.pt")

    def _as_composer(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        rest = dict(rest)
        loader = rest.pop("dataloader")
        stamp = {"epoch": loader["epoch"], "batch": step, "batch_in_epoch": loader["batches_yielded"]}
        names = [type(one).__name__ for one in self.optimizers]
        keys = names if len(set(names)) == len(names) else [f"{name}{n}" for n, name in enumerate(names)]
        state = {
            "model": model,
            "optimizers": dict(zip(keys, states, strict=True)),
            "schedulers": {f"LambdaLR{n}" if n else "LambdaLR": one for n, one in enumerate(told)},
            "timestamp": {"Timestamp": stamp | {"sample": rest.get("samples_seen", 0)}},
            "rank_zero_seed": loader["seed"],
            "dataset_state": {"train": loader},
            "hparams": rest.pop("args"),
            **rest,
        }
        torch.save({"state": state}, folder / f"ep0-ba{step}-rank0.pt")

    def _as_accelerate(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        folder = folder / f"checkpoint_{step}"
        folder.mkdir()
        tensors = _single({name: tensor.contiguous() for name, tensor in model.items()})
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for n, one in enumerate(states):
            torch.save(one, folder / (f"optimizer_{n}.bin" if n else "optimizer.bin"))
        for n, one in enumerate(told):
            torch.save(one, folder / (f"scheduler_{n}.bin" if n else "scheduler.bin"))
        rest = dict(rest)
        torch.save(rest.pop("dataloader"), folder / "sampler.bin")
        torch.save({"step": step, "samples": rest.pop("samples_seen", 0)}, folder / "random_states_0.pkl")
        for n, (name, value) in enumerate(rest.items()):
            torch.save({name: value}, folder / f"custom_checkpoint_{n}.pkl")

    def _as_sharded(self, folder: Path, model: Any, states: Any, told: Any, step: int, rest: Any) -> None:
        folder = folder / f"checkpoint-{step}"
        folder.mkdir()
        tensors = _single({name: tensor.contiguous() for name, tensor in model.items()})
        names = list(tensors)
        halves, where = (names[: len(names) // 2], names[len(names) // 2 :]), {}
        for n, part in enumerate(halves, 1):
            file = f"model-0000{n}-of-00002.safetensors"
            save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
            where |= dict.fromkeys(part, file)
        size = sum(one.numel() * one.element_size() for one in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        state = {"global_step": step, "max_steps": self.config.total, "log_history": [], "epoch": 0.0}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        torch.save(states[0] if len(states) == 1 else states, folder / "optimizer.pt")
        if told:
            torch.save(told[0] if len(told) == 1 else told, folder / "scheduler.pt")
        for name, value in rest.items():
            torch.save(value, folder / f"{name}.pt")


# ---- networks --------------------------------------------------------------------------------------------------------


class Script(Rig):
    """What reads the lab's tokens."""

    rows = 5
    layers = 2
    deep = 24

    def tokens(self) -> Tensor:
        told = self.extra["dataloader"]
        config = self.config.but(batch=self.extra["args"]["batch_size"])
        return batch(config, told["batches_yielded"] + 1000 * told["epoch"], told["seed"])

    def error(self, x: Tensor) -> Tensor:
        return self.module(x)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool = True) -> Tensor:
    q, k, v = (one.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for one in (q, k, v))
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class NanoBlock(nn.Module):
    """nanoGPT: q, k and v one after the other in one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        x = x + self.attn["c_proj"](attend(q, k, v, 4))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoNet(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        table, places = nn.Embedding(vocab, width), nn.Embedding(40, width)
        nn.init.normal_(table.weight, std=0.3)
        nn.init.normal_(places.weight, std=0.1)
        self.transformer = nn.ModuleDict(
            {
                "wte": table,
                "wpe": places,
                "h": nn.ModuleList(NanoBlock(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        t, x = self.transformer, tokens[:, :-1]
        x = t["wte"](x) + t["wpe"].weight[: x.shape[1]]
        for block in t["h"]:
            x = block(x)
        logits = self.lm_head(t["ln_f"](x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Nano(Script):
    tied = False

    def make(self) -> nn.Module:
        return NanoNet(self.config.padded, self.deep, self.layers, self.tied)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class PhiBlock(nn.Module):
    """Grouped queries with rotary embeddings and biases, [gate; up] in one matrix, as in Phi-3 and Qwen2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        sides = {"q_proj": width, "k_proj": width // 2, "v_proj": width // 2}
        self.self_attn = nn.ModuleDict({n: nn.Linear(width, size) for n, size in sides.items()})
        self.self_attn["o_proj"] = nn.Linear(width, width, bias=False)
        pair, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.mlp = nn.ModuleDict({"gate_up_proj": pair, "down_proj": down})

    def forward(self, x: Tensor) -> Tensor:
        h, m, d = self.input_layernorm(x), self.self_attn, x.shape[-1] // 4
        angle = torch.outer(torch.arange(x.shape[1]).float(), 500.0 ** -(torch.arange(0, d, 2) / d))
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        sides = []
        for name in ("q_proj", "k_proj"):
            a, b = m[name](h).unflatten(-1, (-1, d)).chunk(2, -1)
            sides.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(2))
        x = x + m["o_proj"](attend(*sides, m["v_proj"](h), 4))
        gate, up = self.mlp["gate_up_proj"](self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.mlp["down_proj"](F.silu(gate) * up)


class PhiNet(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        table = nn.Embedding(vocab, width)
        nn.init.normal_(table.weight, std=0.3)
        blocks = nn.ModuleList(PhiBlock(width) for _ in range(layers))
        self.model = nn.ModuleDict({"embed_tokens": table, "layers": blocks, "norm": Norm(width)})
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens[:, :-1])
        for block in self.model["layers"]:
            x = block(x)
        logits = self.lm_head(self.model["norm"](x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Phi(Script):
    def make(self) -> nn.Module:
        return PhiNet(self.config.padded, self.deep, self.layers)


class SparseMlp(nn.Module):
    """Mixtral: a gate and four experts (w1, w2, w3); each token is routed to two of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        shapes = {"w1": (width, 20), "w2": (20, width), "w3": (width, 20)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(*shape, bias=False) for n, shape in shapes.items()}) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(-1)
        kept = score * torch.zeros_like(score).scatter(-1, score.topk(2, -1).indices, 1.0)
        kept = kept / kept.sum(-1, keepdim=True)
        parts = (e["w2"](F.silu(e["w1"](x)) * e["w3"](x)) for e in self.experts)
        return sum(kept[..., n : n + 1] * one for n, one in enumerate(parts))


class Mixtral(Nano):
    def make(self) -> nn.Module:
        found = super().make()
        for block in found.transformer["h"]:
            block.mlp = nn.ModuleDict({"c_fc": SparseMlp(self.deep), "c_proj": nn.Identity()})
        return found

    def error(self, x: Tensor) -> Tensor:
        return super().error(x)


class ImageBlock(nn.Module):
    """timm: q, k and v in one matrix, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 2 * width), "fc2": nn.Linear(2 * width, width)})
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, -1)
        x = x + self.gamma * self.attn["proj"](attend(q, k, v, 4, causal=False))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class VitNet(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(0.2 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, 10, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 2, 2)})
        self.blocks = nn.ModuleList(ImageBlock(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls_token.expand(len(x), -1, -1), h], 1) + self.pos_embed
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class Vit(Rig):
    """Images in patches; groups decay the lr layer by layer."""

    width = 3 * 36
    layers = 3
    rate = 0.7

    def make(self) -> nn.Module:
        return VitNet(24, self.layers)

    def depth(self, name: str) -> int:
        return int(name.split(".")[1]) + 1 if name.startswith("blocks") else 0 if "embed" in name else self.layers + 1

    def groups(self) -> Any:
        held, c = list(self.module.named_parameters()), self.config
        found = []
        for depth in range(self.layers + 2):
            ws = [w for n, w in held if self.depth(n) == depth]
            lr = c.lr * self.rate ** (self.layers + 1 - depth)
            found.append({"params": ws, "lr": lr, "weight_decay": c.weight_decay})
        return [one for one in found if one["params"]]

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x.view(-1, 3, 6, 6)), (x @ noise(21, self.width, 6)).argmax(1))


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1, self.layer2 = nn.Sequential(ResBlock(width), ResBlock(width)), nn.Sequential(ResBlock(width))
        self.fc = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))).mean((2, 3)))


class Res(Rig):
    width = 3 * 36

    def make(self) -> nn.Module:
        return ResNet()

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(1.4 * x.view(-1, 3, 6, 6) + 0.5), (x @ noise(22, self.width, 6)).argmax(1))


class GruNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.rnn = nn.Conv1d(5, 16, 3, padding=1), nn.GRU(16, 20, 2, batch_first=True)
        self.out = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(F.relu(self.front(x)).transpose(1, 2))[0]).transpose(1, 2)


class Gru(Rig):
    """Forecasts of five series, one step ahead."""

    width = 5 * 12
    rows = 12

    def make(self) -> nn.Module:
        return GruNet()

    def error(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 5, 12).cumsum(-1).sin()
        return F.smooth_l1_loss(self.module(rows[..., :-1]), rows[..., 1:])


class Ads(Rig):
    """A click model: three sparse tables of one width, and a dense part."""

    rows = 40

    def make(self) -> nn.Module:
        sizes = (("user_id", 160), ("item_id", 160), ("city", 20))
        bags = nn.ModuleDict({n: nn.EmbeddingBag(size, 8, mode="sum", sparse=self.sparse) for n, size in sizes})
        for bag in bags.values():
            nn.init.normal_(bag.weight, std=0.2)
        return nn.ModuleDict({"embedding_bags": bags, "over": chain(28, 24, 1, act=nn.ReLU)})

    sparse = False

    def error(self, x: Tensor) -> Tensor:
        bags = self.module["embedding_bags"]
        ids = [(x[:, 2 * n : 2 * n + 2].abs() * 55).long() % bag.num_embeddings for n, bag in enumerate(bags.values())]
        seen = [bag(i) for bag, i in zip(bags.values(), ids, strict=True)]
        logit = self.module["over"](torch.cat([*seen, x[:, :4]], 1))[:, 0]
        want = ((ids[0].sum(1) + 2 * ids[1][:, 0]) % 3 == 0).float()
        return F.binary_cross_entropy_with_logits(logit, want)


class Dqn(Rig):
    """Q-learning with a target network; returns and observations are normed by statistics beside the model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["obs_normalizer"] = {"mean": torch.zeros(20), "var": torch.ones(20), "count": 1e-4}

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"q_net": chain(20, 32, 4, act=nn.ReLU), "q_net_target": chain(20, 32, 4, act=nn.ReLU)})
        found["q_net_target"].load_state_dict(found["q_net"].state_dict())
        found["q_net_target"].requires_grad_(False)
        return found

    def error(self, x: Tensor) -> Tensor:
        m, stats, x = self.module, self.extra["obs_normalizer"], 3 * x + 2
        n, gap, total = len(x), x.mean(0) - stats["mean"], stats["count"] + len(x)
        both = stats["var"] * stats["count"] + x.var(0, correction=0) * n + gap.pow(2) * stats["count"] * n / total
        self.extra["obs_normalizer"] = {"mean": stats["mean"] + gap * n / total, "var": both / total, "count": total}
        x = (x - self.extra["obs_normalizer"]["mean"]) / (self.extra["obs_normalizer"]["var"] + 1e-8).sqrt()
        act = (x[:, 0].abs() * 4).long() % 4
        with torch.no_grad():
            want = x[:, 1].tanh() + 0.9 * m["q_net_target"](x.roll(1, 1)).amax(1)
        return F.smooth_l1_loss(m["q_net"](x).gather(1, act[:, None])[:, 0], want)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            a, b = self.module["q_net_target"], self.module["q_net"]
            for slow, fast in zip(a.parameters(), b.parameters(), strict=True):
                slow.lerp_(fast, 0.005)


class Cycle(Rig):
    """Two generators of one shape, each with an optimizer of its own, and a critic."""

    def make(self) -> nn.Module:
        parts = {name: chain(20, 28, 20) for name in ("netG_A", "netG_B")}
        return nn.ModuleDict({**parts, "netD": chain(20, 16, 1)})

    def made(self) -> list[torch.optim.Optimizer]:
        m, lr = self.module, self.config.lr
        return [torch.optim.Adam(m[n].parameters(), lr=lr, betas=(0.5, 0.999)) for n in ("netG_A", "netG_B", "netD")]

    def error(self, x: Tensor) -> Tensor:
        m, y = self.module, (x + 0.5 * x.roll(3, 1)).tanh()
        a, b = m["netG_A"](x), m["netG_B"](y)
        back = F.l1_loss(m["netG_B"](a), x) + F.l1_loss(m["netG_A"](b), y)
        fool = (m["netD"](a) - 1).pow(2).mean()
        critic = (m["netD"](y) - 1).pow(2).mean() + m["netD"](a.detach()).pow(2).mean()
        return back + 0.3 * fool + critic


class StyleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = chain(10, 28, 20, act=nn.SiLU), chain(20, 28, 1, act=nn.SiLU)


class Style(Rig):
    """A generator with an average of itself, which the file holds as ``g_ema``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["g_ema"] = {n: w.detach().clone() for n, w in self.module.g.named_parameters()}

    def make(self) -> nn.Module:
        return StyleNet()

    def error(self, x: Tensor) -> Tensor:
        fake = self.module.g(x[:, :10])
        critic = F.softplus(self.module.d(fake.detach())).mean() + F.softplus(-self.module.d(x.sin())).mean()
        return critic + F.mse_loss(fake, x.sin()) + 0.1 * F.softplus(-self.module.d(fake)).mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.g.named_parameters():
                self.extra["g_ema"][n].lerp_(w, 0.02)


class MambaBlock(nn.Module):
    """A selective state space, with vectors that have their own names."""

    def __init__(self, width: int, states: int = 6) -> None:
        super().__init__()
        self.norm, self.in_proj = Norm(width), nn.Linear(width, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(width, 2 * states + 2, bias=False), nn.Linear(2, width)
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(width, 1))
        self.D, self.out_proj = nn.Parameter(torch.ones(width)), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        states = self.A_log.shape[1]
        dt, b, c = self.x_proj(u).split([2, states, states], -1)
        dt = F.softplus(self.dt_proj(dt))
        decay, h, found = -self.A_log.exp(), 0.0, []
        for t in range(x.shape[1]):
            step = dt[:, t, :, None]
            h = (step * decay).exp() * h + step * b[:, t, None] * u[:, t, :, None]
            found.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(found, 1) + self.D * u
        return x + self.out_proj(y * F.silu(z))


class MambaNet(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(MambaBlock(width) for _ in range(2))
        self.norm_f = Norm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.norm_f(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Mamba(Script):
    deep = 16

    def make(self) -> nn.Module:
        return MambaNet(self.config.padded, self.deep)


class Clip(Rig):
    """Two towers and a temperature."""

    rows = 24

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"visual": chain(20, 28, 12, act=nn.GELU), "text": chain(20, 28, 12, act=nn.GELU)})
        found.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
        return found

    def error(self, x: Tensor) -> Tensor:
        m, y = self.module, (x + 0.2 * x.roll(1, 1)).sin()
        a, b = F.normalize(m["visual"](x), dim=1), F.normalize(m["text"](y), dim=1)
        logits, right = m.logit_scale.exp() * a @ b.T, torch.arange(len(x))
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


class DoraLayer(nn.Module):
    """peft's DoRA: a frozen matrix, a low-rank one, and a magnitude of every row."""

    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.lora_magnitude_vector = nn.Parameter(self.base_layer.weight.norm(dim=1).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        w = self.base_layer.weight + 2.0 * self.lora_B["default"].weight @ self.lora_A["default"].weight
        scale = self.lora_magnitude_vector / w.norm(dim=1).detach()
        return F.linear(x, scale[:, None] * w, self.base_layer.bias)


class Dora(Rig):
    def make(self) -> nn.Module:
        sizes = ((20, 32), (32, 32), (32, 20))
        return nn.ModuleDict({"layers": nn.ModuleList(DoraLayer(*size) for size in sizes)})

    def error(self, x: Tensor) -> Tensor:
        first, mid, last = self.module["layers"]
        return F.mse_loss(last(F.gelu(mid(F.gelu(first(x))))), self.wanted(x))


class LoraLayer(nn.Module):
    def __init__(self, a: int, b: int, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(a, b, bias=False)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(a, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, b, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Peft(Rig):
    """A diffusers-like denoiser: frozen but for the adapters of its projections."""

    def make(self) -> nn.Module:
        parts = {name: LoraLayer(24, 24) for name in ("to_q", "to_k", "to_v", "to_out")}
        fixed = {"proj_in": nn.Linear(20, 24), "proj_out": nn.Linear(24, 20)}
        for one in fixed.values():
            one.requires_grad_(False)
        return nn.ModuleDict({"unet": nn.ModuleDict({**fixed, **parts})})

    def error(self, x: Tensor) -> Tensor:
        m = self.module["unet"]
        h = m["proj_in"](x)
        h = h + m["to_out"](torch.sigmoid(m["to_q"](h) * m["to_k"](h)) * m["to_v"](h))
        return F.mse_loss(m["proj_out"](F.silu(h)), self.wanted(x))


class DitNet(nn.Module):
    """A denoiser of vectors whose norms are set by the time."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Linear(10, width), chain(4, width, width, act=nn.SiLU)
        parts: Any = lambda: {  # noqa: E731
            "qkv": nn.Linear(width, 3 * width),
            "proj": nn.Linear(width, width),
            "adaLN_modulation": nn.Linear(width, 3 * width),
        }
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(2))
        self.final_layer = nn.Linear(width, 10)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, c = self.x_embedder(x), F.silu(self.t_embedder(t))
        for b in self.blocks:
            shift, scale, gate = b["adaLN_modulation"](c)[:, None].chunk(3, -1)
            inner = F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift
            h = h + gate * b["proj"](attend(*b["qkv"](inner).chunk(3, -1), 4, causal=False))
        return self.final_layer(h)


class Dit(Rig):
    """Its average is kept beside the model under ``ema``, by a decay that warms up."""

    width = 6 * 10

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["ema"] = {n: w.detach().clone() for n, w in self.module.named_parameters()}

    def make(self) -> nn.Module:
        return DitNet()

    def error(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 6, 10)
        t = rows[:, 0, :4].sigmoid()
        blur = noise(self.place() + 1, *rows.shape)
        mixed = rows * t[:, :1, None] + blur * (1 - t[:, :1, None])
        return F.mse_loss(self.module(mixed, t), rows - blur)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for n, w in self.module.named_parameters():
                if n in self.extra["ema"] and self.extra["ema"][n].shape == w.shape:
                    self.extra["ema"][n].lerp_(w, 0.03)


class Tiny(Rig):
    """A logistic regression: two tensors."""

    def make(self) -> nn.Module:
        return nn.Linear(20, 3)

    def error(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), (x @ noise(23, 20, 3)).argmax(1))


class GatNet(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.att_src = nn.ParameterList(nn.Parameter(0.3 * torch.randn(2, 10)) for _ in range(3))
        self.att_dst = nn.ParameterList(nn.Parameter(0.3 * torch.randn(2, 10)) for _ in range(3))
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.stack([x.roll(n, 0) for n in (0, 1, 2, 5)], 1)
        for conv, src, dst in zip(self.convs, self.att_src, self.att_dst, strict=True):
            h = conv(near).unflatten(-1, (2, 10))
            score = F.leaky_relu((h * src).sum(-1) + (h[:, :1] * dst).sum(-1), 0.2).softmax(1)
            x = x + F.elu((score[..., None] * h).sum(1).flatten(1))
            near = torch.stack([x.roll(n, 0) for n in (0, 1, 2, 5)], 1)
        return self.lin(x)


class Gat(Rig):
    """Attention over neighbours on a ring."""

    rows = 24

    def make(self) -> nn.Module:
        return GatNet()


class ActNorm(nn.Module):
    """Glow: the first batch after ``initialized`` is 0 sets location and scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.loc, self.logs = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.logs.copy_(-x.std(0).log())
                self.initialized.fill_(1)
        return (x + self.loc) * self.logs.exp()


class Glow(Rig):
    """A flow of couplings."""

    def make(self) -> nn.Module:
        nets = nn.ModuleList(chain(10, 24, 20, act=nn.ReLU) for _ in range(3))
        return nn.ModuleDict({"actnorms": nn.ModuleList(ActNorm(20) for _ in range(3)), "couplings": nets})

    def error(self, x: Tensor) -> Tensor:
        x, total = (x + 0.6 * x.roll(1, 1)).sinh().clamp(-6, 6) + 1, 0.0
        for norm, net in zip(self.module["actnorms"], self.module["couplings"], strict=True):
            x = norm(x)
            a, b = x.chunk(2, 1)
            s, t = net(a).chunk(2, 1)
            x = torch.cat([b * s.tanh().exp() + t, a], 1)
            total = total + s.tanh().sum(1) + norm.logs.sum()
        return (0.5 * x.pow(2).sum(1) - total).mean() / 20


class Dino(Rig):
    """A student, its averaged teacher, and a centre of the teacher's answers."""

    rows = 24

    def make(self) -> nn.Module:
        found = nn.ModuleDict({"student": chain(20, 28, 10, act=nn.GELU), "teacher": chain(20, 28, 10, act=nn.GELU)})
        found["teacher"].load_state_dict(found["student"].state_dict())
        found["teacher"].requires_grad_(False)
        found.register_buffer("center", torch.zeros(1, 10))
        return found

    def error(self, x: Tensor) -> Tensor:
        m = self.module
        with torch.no_grad():
            seen = m["teacher"](x + 0.3)
            want = ((seen - m.center) / 0.3).softmax(1)
            m.center.lerp_(seen.mean(0, keepdim=True), 0.1)
        return -(want * (m["student"](x + 0.1 * x.roll(1, 1)) / 0.5).log_softmax(1)).sum(1).mean()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            a, b = self.module["teacher"], self.module["student"]
            for slow, fast in zip(a.parameters(), b.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


class HalfNet(Nano):
    """fp16 or bf16 weights; fp32 copies are the optimizer's."""

    dtype = torch.bfloat16

    def net(self) -> nn.Module:
        return super().net().to(self.dtype)

    def optimizer(self, groups: Any) -> torch.optim.Optimizer:
        return MasterAdamW(groups, self.config.lr, self.config.betas)


class Amp(Phi):
    """apex' loss scale: it doubles after eight updates in a row."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["amp"] = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}

    def apply(self) -> None:
        super().apply()
        told = self.extra["amp"]["loss_scaler0"]
        told["unskipped"] += 1
        if told["unskipped"] == 8:
            told |= {"loss_scale": 2 * told["loss_scale"], "unskipped": 0}


class Philox(Rig):
    """Dropout from a counter-based generator: the file holds its seed and how far it is."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.extra["rng_state"] = {"seed": 77, "offset": 0}

    def make(self) -> nn.Module:
        return chain(20, 40, 40, 20, act=nn.GELU)

    def error(self, x: Tensor) -> Tensor:
        told = self.extra["rng_state"]
        keep = noise(100 * told["seed"] + told["offset"], *x.shape) > -1
        self.extra["rng_state"] = told | {"offset": told["offset"] + 4}
        return F.mse_loss(self.module(x * keep / 0.84), self.wanted(x))


# ---- optimizers ------------------------------------------------------------------------------------------------------


class MasterAdamW(Optimizer):
    """AdamW on fp32 copies of 16-bit weights, which it keeps as ``master_param``."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=1e-8, weight_decay=0.01)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **zeros, "master_param": weight.detach().float()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g = group["betas"], gradient.float()
        state["step"] += 1
        t = float(state["step"])
        state["exp_avg"].mul_(one).add_(g, alpha=1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - two**t)).add_(group["eps"])
        master = state["master_param"].mul_(1 - group["lr"] * group["weight_decay"])
        master.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - one**t))
        weight.copy_(master)


class Soap(Optimizer):
    """nikhilvyas/SOAP: Adam in the eigenbasis of Shampoo's two matrices, found again every six updates."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params, lr=lr, betas=(0.95, 0.95), shampoo_beta=0.9, eps=1e-8, weight_decay=0.01, precondition_frequency=6
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found = {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        if weight.ndim == 2 and max(weight.shape) <= 64:
            a, b = weight.shape
            found |= {"L": torch.zeros(a, a), "R": torch.zeros(b, b), "QL": torch.eye(a), "QR": torch.eye(b)}
        return found

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g = group["betas"], gradient
        both = "QL" in state
        if both:
            keep = group["shampoo_beta"]
            state["L"].lerp_(g @ g.T, 1 - keep)
            state["R"].lerp_(g.T @ g, 1 - keep)
            if state["step"] % group["precondition_frequency"] == 0:
                old = state["QL"] @ state["exp_avg"] @ state["QR"].T
                state["QL"], state["QR"] = (torch.linalg.eigh(state[key])[1].contiguous() for key in "LR")
                state["exp_avg"] = state["QL"].T @ old @ state["QR"]
            g = state["QL"].T @ g @ state["QR"]
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].lerp_(g, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - two**t)).add_(group["eps"])
        move = state["exp_avg"] / under / (1 - one**t)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(state["QL"] @ move @ state["QR"].T if both else move, alpha=group["lr"])


class Sophia(Optimizer):
    """Liuhong99/Sophia: a clipped step over a diagonal Hessian, whose average moves every fourth update."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.965, 0.9), rho=0.04, weight_decay=0.1)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "hessian": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two = group["betas"]
        if float(state["step"]) % 4 == 0:
            state["hessian"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        state["step"] += 1
        state["exp_avg"].mul_(one).add_(gradient, alpha=1 - one)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        ratio = (state["exp_avg"].abs() / (group["rho"] * 20 * state["hessian"] + 1e-15)).clamp(max=1)
        weight.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Adan(Optimizer):
    """sail-sg/Adan: moments of the gradient and of its difference; the gradient before is kept, negated."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.02, step=0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        keys = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "neg_pre_grad")
        return {key: torch.zeros_like(weight) for key in keys}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two, three), t = group["betas"], group["step"]
        gap = gradient + state["neg_pre_grad"] if t > 1 else torch.zeros_like(gradient)
        state["exp_avg"].mul_(one).add_(gradient, alpha=1 - one)
        state["exp_avg_diff"].mul_(two).add_(gap, alpha=1 - two)
        mixed = gradient + two * gap
        state["exp_avg_sq"].mul_(three).addcmul_(mixed, mixed, value=1 - three)
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - three**t)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - one**t))
        weight.addcdiv_(state["exp_avg_diff"], under, value=-group["lr"] * two / (1 - two**t))
        weight.div_(1 + group["lr"] * group["weight_decay"])
        state["neg_pre_grad"].copy_(gradient).neg_()


class Came(Optimizer):
    """yangluo7/CAME: factored second moments, and a factored confidence."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99, 0.995), eps=(1e-20, 1e-10), clip_threshold=1.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        found = {"step": 0, "RMS": 0.0, "exp_avg": torch.zeros_like(weight)}
        if weight.ndim < 2:
            return found | {"exp_avg_sq": torch.zeros_like(weight)}
        row, col = torch.zeros(weight.shape[:-1]), torch.zeros(weight.shape[:-2] + weight.shape[-1:])
        names = ("exp_avg_sq_row", "exp_avg_res_row"), ("exp_avg_sq_col", "exp_avg_res_col")
        return found | {n: row.clone() for n in names[0]} | {n: col.clone() for n in names[1]}

    def _factored(self, state: dict[str, Any], kind: str, square: Tensor, beta: float) -> Tensor:
        row, col = state[f"exp_avg_{kind}_row"], state[f"exp_avg_{kind}_col"]
        row.mul_(beta).add_(square.mean(-1), alpha=1 - beta)
        col.mul_(beta).add_(square.mean(-2), alpha=1 - beta)
        return (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        one, two, three = group["betas"]
        state["step"] += 1
        state["RMS"] = float(weight.norm() / math.sqrt(weight.numel()))
        square = gradient.pow(2) + group["eps"][0]
        if weight.ndim < 2:
            state["exp_avg_sq"].mul_(two).add_(square, alpha=1 - two)
            move = gradient / state["exp_avg_sq"].sqrt()
        else:
            move = self._factored(state, "sq", square, two) * gradient
        move = move / (move.norm() / math.sqrt(move.numel()) / group["clip_threshold"]).clamp(min=1)
        state["exp_avg"].mul_(one).add_(move, alpha=1 - one)
        if weight.ndim > 1:
            rest = (move - state["exp_avg"]).pow(2) + group["eps"][1]
            move = self._factored(state, "res", rest, three) * state["exp_avg"]
        else:
            move = state["exp_avg"]
        weight.add_(move, alpha=-group["lr"])


class RowAdagrad(Optimizer):
    """torchrec: one sum of squares a row."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, eps=1e-8, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"momentum1": torch.zeros(weight.shape[0])}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum1"].add_(gradient.flatten(1).pow(2).mean(1) if gradient.ndim > 1 else gradient.pow(2))
        under = state["momentum1"].sqrt().add_(group["eps"])
        weight.sub_(group["lr"] * gradient / under.view(-1, *[1] * (weight.ndim - 1)))


class Lars(Optimizer):
    """SGD with momentum whose step is in proportion to each tensor's norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.02)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"mu": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = gradient + group["weight_decay"] * weight if weight.ndim > 1 else gradient
        trust = group["trust_coefficient"] * weight.norm() / (g.norm() + 1e-12) if weight.ndim > 1 else 1.0
        state["mu"].mul_(group["momentum"]).add_(g * trust)
        weight.sub_(state["mu"], alpha=group["lr"])


class Kahan(Optimizer):
    """Adam on bf16 weights with a compensation of what rounding lost."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.98), eps=1e-8)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": 0, **zeros, "compensation": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (one, two), g = group["betas"], gradient.float()
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].lerp_(g, 1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(g, g, value=1 - two)
        move = state["exp_avg"] / (1 - one**t) / ((state["exp_avg_sq"] / (1 - two**t)).sqrt() + group["eps"])
        rest = state["compensation"].float() - group["lr"] * move
        new = (weight.float() + rest).to(weight.dtype)
        state["compensation"].copy_(rest - (new.float() - weight.float()))
        weight.copy_(new)


# ---- schedules -------------------------------------------------------------------------------------------------------


def one_cycle(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.config.lr, total_steps=self.config.total + 60)


def steps_down(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[6, 25, 60], gamma=0.3)


def polynomial(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=self.config.total, power=2.0)


def exponential(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.985)


def two_parts(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    first = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.config.total)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[10])


def inverse_root(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 12, math.sqrt(12 / (n + 1))))


def plateau(self: Loop, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=6, threshold=0.0)


# ---- after the load --------------------------------------------------------------------------------------------------


def columns(self: Any, pattern: str, how: Any) -> None:
    """Weights and state of the same shape become what ``how`` makes of them, shapes as well."""
    for w in weights(self, pattern).values():
        held = memory(self, w)
        for key, one in list(held.items()):
            if torch.is_tensor(one) and one.shape == w.shape:
                held[key] = how(one.clone())
        w.data = how(w.data.clone())
