"""Optimizers of other packages, written again with their own names of states and of what param groups hold.

Each follows the update of its package as of 2025; what is left out (sparse gradients, foreach forms, options that are
off by default) changes no number that is stored.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

__all__ = [
    "ADOPT",
    "AdaBelief",
    "AdamW8bit",
    "FusedOnCuda",
    "Lamb",
    "Lion",
    "Optimizer",
    "Prodigy",
    "QHAdam",
    "ScheduleFreeAdamW",
    "StableAdamW",
    "Yogi",
]

Tensor = torch.Tensor


class Optimizer(torch.optim.Optimizer):
    """Walks over parameters with gradients; ``begin`` makes the state of one, ``update`` changes it and the weight."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def before(self, group: dict[str, Any]) -> None:
        """Once a group and update."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the types of the save, as packages with codes or fp32 states do; torch casts to the weight's."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            if number in state_dict["state"]:
                self.state[weight] = copy.deepcopy(state_dict["state"][number])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            self.before(group)
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(self.begin(weight, group))
                self.update(weight, weight.grad, state, group)


class StableAdamW(Optimizer):
    """pytorch_optimizer 3: betas debiased by the step, which the group counts; the update clipped by its size."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(
            params, lr=lr, betas=betas, kahan_sum=False, weight_decay=1e-2, weight_decouple=True, eps=1e-8, step=0
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def before(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = ((b ** group["step"] - b) / (b ** group["step"] - 1) for b in group["betas"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rms = gradient.pow(2).div_(state["exp_avg_sq"].clamp(min=group["eps"] ** 2)).mean().sqrt_().clamp_(min=1.0)
        lr = group["lr"] / rms.item()
        weight.mul_(1 - group["weight_decay"] * lr)
        weight.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr)


class ADOPT(Optimizer):
    """iShohei220/adopt: the second moment of the steps before divides the gradient, not the average."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.9999)) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=1e-6,
            weight_decay=0.0,
            decouple=True,
            maximize=False,
            foreach=None,
            capturable=False,
            differentiable=False,
            fused=None,
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return super().begin(weight, group) | {"step": torch.tensor(0.0)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if state["step"] == 0:
            state["exp_avg_sq"].addcmul_(gradient, gradient)
            state["step"] += 1
            return
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        bound = float(state["step"]) ** 0.25
        normed = gradient.div(state["exp_avg_sq"].sqrt().clamp_(min=group["eps"])).clamp_(-bound, bound)
        state["exp_avg"].lerp_(normed, 1 - first)
        weight.add_(state["exp_avg"], alpha=-group["lr"])
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        state["step"] += 1


class QHAdam(Optimizer):
    """facebookresearch/qhoptim: averages with weights of their own, and no counter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params, lr=lr, betas=(0.995, 0.999), nus=(0.7, 1.0), weight_decay=0.0, decouple_weight_decay=False, eps=1e-8
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        return {"beta1_weight": 0.0, "beta2_weight": 0.0, **zeros}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        gradient = gradient.add(weight, alpha=group["weight_decay"])
        square, parts = gradient * gradient, []
        for number, (name, value) in enumerate((("exp_avg", gradient), ("exp_avg_sq", square)), 1):
            beta, nu = group["betas"][number - 1], group["nus"][number - 1]
            state[f"beta{number}_weight"] = 1 + beta * state[f"beta{number}_weight"]
            kept = 1 - 1 / state[f"beta{number}_weight"]
            state[name].mul_(kept).add_(value, alpha=1 - kept)
            parts.append(state[name].mul(nu).add_(value, alpha=1 - nu))
        weight.addcdiv_(parts[0], parts[1].sqrt_().add_(group["eps"]), value=-group["lr"])


class Yogi(Optimizer):
    """torch_optimizer: additive second moments, which begin above 0."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-3, initial_accumulator=1e-6, weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": 0,
            "exp_avg": torch.full_like(weight, group["initial_accumulator"]),
            "exp_avg_sq": torch.full_like(weight, group["initial_accumulator"]),
        }

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        gradient = gradient.add(weight, alpha=group["weight_decay"])
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        square = gradient * gradient
        state["exp_avg_sq"].addcmul_((state["exp_avg_sq"] - square).sign_(), square, value=-(1 - second))
        under = (state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**t)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - first**t))


class Lion(Optimizer):
    """google/automl's lion_pytorch: the sign of an average, and one moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["exp_avg"].mul(first).add_(gradient, alpha=1 - first).sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(second).add_(gradient, alpha=1 - second)


class Lamb(Optimizer):
    """cybertronai/pytorch-lamb: Adam without debiasing, each tensor's step in proportion to its norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = state["exp_avg"] / state["exp_avg_sq"].sqrt().add(group["eps"])
        step.add_(weight, alpha=group["weight_decay"])
        norm, adam = weight.norm().clamp(0, 10), step.norm()
        state["weight_norm"], state["adam_norm"] = norm.clone(), adam
        state["trust_ratio"] = norm.new_ones(()) if norm == 0 or adam == 0 else norm / adam  # DCP: one type
        weight.add_(step, alpha=-group["lr"] * float(state["trust_ratio"]))


class AdaBelief(Optimizer):
    """adabelief_pytorch: variance about the average, under a name of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0, amsgrad=False, buffer=None)
        for group in self.param_groups:
            group["buffer"] = [[None, None, None] for _ in range(10)]

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_var": torch.zeros_like(weight)}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        state["step"] += 1
        t = state["step"]
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        rest = gradient - state["exp_avg"]
        state["exp_avg_var"].mul_(second).addcmul_(rest, rest, value=1 - second).add_(group["eps"])
        under = (state["exp_avg_var"].sqrt() / math.sqrt(1 - second**t)).add_(group["eps"])
        weight.addcdiv_(state["exp_avg"], under, value=-group["lr"] / (1 - first**t))


class ScheduleFreeAdamW(Optimizer):
    """facebookresearch/schedule_free: weights are an interpolation of z and its average; no first moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            r=0.0,
            k=0,
            warmup_steps=10,
            train_mode=True,
            weight_sum=0.0,
            lr_max=-1.0,
            scheduled_lr=0.0,
            weight_lr_power=2.0,
            weight_decay=0.0,
            foreach=False,
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"z": weight.clone(), "exp_avg_sq": torch.zeros_like(weight)}

    def before(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        k = group["k"]
        group["scheduled_lr"] = group["lr"] * min(1.0, k / group["warmup_steps"])
        group["lr_max"] = max(group["scheduled_lr"], group["lr_max"])
        share = group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += share
        self.share = share / group["weight_sum"] if group["weight_sum"] else 0.0

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        lr = group["scheduled_lr"]
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        under = (state["exp_avg_sq"] / (1 - second ** group["k"])).sqrt_().add_(group["eps"])
        step = gradient / under + weight * group["weight_decay"]
        weight.lerp_(state["z"], self.share)
        weight.add_(step, alpha=lr * (first * (1 - self.share) - 1))
        state["z"].sub_(step, alpha=lr)


class Prodigy(Optimizer):
    """konstmish/prodigy: Adam whose step size is estimated; one estimate for all, kept in the groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=(0.9, 0.999),
            beta3=None,
            eps=1e-8,
            weight_decay=0.0,
            d=1e-4,
            d0=1e-4,
            d_max=1e-4,
            d_numerator=0.0,
            d_coef=1.0,
            k=0,
            growth_rate=math.inf,
            use_bias_correction=False,
            decouple=True,
            safeguard_warmup=False,
            fsdp_in_use=False,
            slice_p=1,
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        flat = weight.detach().flatten()[:: group["slice_p"]]
        return {
            "step": 0,
            "s": torch.zeros_like(flat),
            "p0": flat.clone(),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first, second = self.param_groups[0]["betas"]
        lead = self.param_groups[0]
        third, d, lr = math.sqrt(second), lead["d"], lead["lr"]
        numerator, below = lead["d_numerator"] * third, 0.0
        for group in self.param_groups:
            for weight in [w for w in group["params"] if w.grad is not None]:
                state = self.state[weight]
                if not state:
                    state.update(self.begin(weight, group))
                gradient, part = weight.grad, group["slice_p"]
                flat = gradient.flatten()[::part]
                numerator += (d / lead["d0"]) * d * lr * float(flat @ (state["p0"] - weight.flatten()[::part]))
                state["exp_avg"].mul_(first).add_(gradient, alpha=d * (1 - first))
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=d * d * (1 - second))
                state["s"].mul_(third).add_(flat, alpha=(d / lead["d0"]) * d * lr)
                below += float(state["s"].abs().sum())
        if below == 0:
            return
        found = lead["d_coef"] * numerator / below
        grown = max(d, found) if d == lead["d0"] else d
        best = max(lead["d_max"], found)
        grown = min(best, grown * lead["growth_rate"])
        for group in self.param_groups:
            group |= {"d_numerator": numerator, "d": grown, "d_max": best}
            for weight in [w for w in group["params"] if w.grad is not None]:
                state = self.state[weight]
                state["step"] += 1
                weight.mul_(1 - group["weight_decay"] * grown * lr)
                weight.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(grown * group["eps"]), value=-d * lr)
            group["k"] += 1


BLOCK = 256


def _qmap(signed: bool) -> Tensor:
    """256 values, dense near 0, as bitsandbytes' dynamic map is."""
    count = 127 if signed else 255
    upper = torch.logspace(-6, 0, count)
    found = torch.cat([-upper, torch.zeros(1), upper, torch.ones(1)]) if signed else torch.cat([torch.zeros(1), upper])
    return found.sort().values


class AdamW8bit(Optimizer):
    """bitsandbytes: moments as codes of blocks of 256 with a largest magnitude each; small tensors in fp32."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(
            params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, alpha=0.0, t_alpha=None, t_beta3=None
        )

    def begin(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if weight.numel() < 4 * BLOCK:
            return {"step": 0, "state1": torch.zeros_like(weight), "state2": torch.zeros_like(weight)}
        blocks = -(-weight.numel() // BLOCK)
        found: dict[str, Any] = {"step": 0}
        for number, signed in ((1, True), (2, False)):
            table = _qmap(signed)
            code = int((table == 0).nonzero()[0])
            found |= {
                f"state{number}": torch.full(weight.shape, code, dtype=torch.uint8),
                f"qmap{number}": table,
                f"absmax{number}": torch.zeros(blocks),
            }
        return found

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        state["step"] += 1
        t = state["step"]
        m, v = self._read(state, 1, weight), self._read(state, 2, weight)
        m = m.mul(first).add_(gradient, alpha=1 - first)
        v = v.mul(second).addcmul_(gradient, gradient, value=1 - second)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        right = math.sqrt(1 - second**t)
        weight.addcdiv_(m, v.sqrt().add_(group["eps"] * right), value=-group["lr"] * right / (1 - first**t))
        self._write(state, 1, m)
        self._write(state, 2, v)

    def _read(self, state: dict[str, Any], number: int, weight: Tensor) -> Tensor:
        held = state[f"state{number}"]
        if f"qmap{number}" not in state:
            return held
        large = state[f"absmax{number}"].repeat_interleave(BLOCK)[: held.numel()]
        return (state[f"qmap{number}"][held.flatten().long()] * large).view(weight.shape)

    def _write(self, state: dict[str, Any], number: int, moment: Tensor) -> None:
        if f"qmap{number}" not in state:
            state[f"state{number}"] = moment
            return
        flat = moment.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        large = padded.abs().amax(1)
        table = state[f"qmap{number}"]
        scaled = (padded / large.clamp(min=1e-38)[:, None]).flatten()[: len(flat)]
        middle = (table[1:] + table[:-1]) / 2
        state[f"state{number}"] = torch.bucketize(scaled, middle).to(torch.uint8).view(moment.shape)
        state[f"absmax{number}"] = large


class FusedOnCuda(torch.optim.AdamW):
    """torch's AdamW as the kernel of ``fused=True`` computes it on CUDA: everything in float32, the betas too.

    A product and a sum are rounded once (``fma``), which float64 does here. Source: torch 2.13
    ``native/cuda/fused_adam_utils.cuh``; tests/fixtures/fused_cuda.zip is of the kernel itself.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            lr, decay, eps = (_float32(group[name]) for name in ("lr", "weight_decay", "eps"))
            beta1, beta2 = map(_float32, group["betas"])
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    zeros = torch.zeros_like(weight)
                    state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
                state["step"] += 1
                g, m, v = (one.double() for one in (weight.grad, state["exp_avg"], state["exp_avg_sq"]))
                square = _rounded(g * g)
                state["exp_avg"].copy_(beta1 * m + _rounded(g - beta1 * g))
                state["exp_avg_sq"].copy_(beta2 * v + _rounded(square - beta2 * square))
                step = float(state["step"])
                first, second = (1 - beta**step for beta in group["betas"])
                weight.mul_(1 - lr * decay)
                root = state["exp_avg_sq"].sqrt() / _float32(math.sqrt(second)) + eps
                weight.sub_(_float32(lr / first) * state["exp_avg"] / root)


def _float32(number: Any) -> float:
    return float(torch.tensor(float(number), dtype=torch.float32))


def _rounded(values: Tensor) -> Tensor:
    return values.float().double()
