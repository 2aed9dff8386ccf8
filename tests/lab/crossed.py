"""Faults of a load beside an innocent change, drawn at random: network × optimizer × fault × change × layout.

::

    network     Text Llama Phi Mixtral Oss Mamba Bart Image ResNet Dit Retina Dino Td3 Norms Sage Tower Ctc Flow …
    optimizer   AdamW Adam NAdam RMSprop Adagrad SGD Lion Adan Muon …
    fault       a state of zeros, of another layer, of an older save; weights not read; an older schedule …
    change      none, another rate, batch, clip, decay, length, frozen layers, a new head, more rows, a moved group

Answers follow from what the fault does. ``python -m tests.lab.crossed --first N --count M`` draws the cases of these
seeds and prints those that are not named right; a fresh range of seeds measures.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.lab import opened21_nets as nets
from tests.lab import optimizers as other
from tests.lab.accuracy import Trial, tried
from tests.lab.fault import Fault
from tests.lab.live import fault, variant

__all__ = ["CHANGES", "FAULTS", "NETWORKS", "OPTIMIZERS", "drawn", "main"]

Act = nets.Act
Tensor = torch.Tensor
ALL, NEAR, LATE = "echo next early", "echo next", "next early"


def a_matrix(self: Any, rng: random.Random, at_least: int = 256) -> str:
    """The pattern of one matrix of the network."""
    names = [n for n, w in nets.found(self).items() if w.ndim > 1 and w.numel() >= at_least and w.requires_grad]
    assert names
    return f"^{re.escape(rng.choice(names))}$"


def a_layer(self: Any, rng: random.Random) -> str:
    """The pattern of one of several like layers: a prefix that ends in a number, with over one parameter."""
    heads = Counter(hit[1] for n in nets.found(self) if (hit := re.match(r"(.*?\.\d+\.|\d+\.)", n)))
    names = [head for head, count in heads.items() if count > 1]
    assert len(names) > 1
    return f"^{re.escape(rng.choice(names))}"


def felt(act: Act) -> Act:
    """Refuse a case in which the fault changes nothing: a twin without state, a table that is empty."""

    def checked(self: Any) -> None:
        before, rest = stored(self), self.apply
        act(self)
        # bound methods are equal, but made anew at each access
        assert self.apply != rest or stored(self) != before, "the fault changes nothing"

    return checked


def stored(self: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(self.content(), stream)
    return stream.getvalue()


def of(place: Callable[[Any, random.Random], str], act: Callable[[str], Act]) -> Callable[[random.Random], Act]:
    """An act on a place that is chosen when the network is there."""

    def made(rng: random.Random) -> Act:
        seed = rng.randrange(1 << 30)
        return lambda self: act(place(self, random.Random(seed)))(self)

    return made


def just(act: Act) -> Callable[[random.Random], Act]:
    return lambda rng: act


def noisy(x: Tensor) -> Tensor:
    return nets.randn(x.numel() % 977, *x.shape).to(x.dtype) * x.float().std().to(x.dtype)


def halves(x: Tensor) -> Tensor:
    """The halves of the rows change places."""
    return torch.cat([*x.chunk(2)[::-1]]).contiguous()


def interleaved(x: Tensor) -> Tensor:
    """Even rows first."""
    return torch.cat([x[::2], x[1::2]]).contiguous()


def crosswise(x: Tensor) -> Tensor:
    """Transposed and read again in the old shape."""
    return x.transpose(0, 1).reshape(x.shape).contiguous()


def stale_rows(x: Tensor) -> Tensor:
    """The last quarter of the rows are those before it."""
    n = len(x) // 4
    assert n
    return torch.cat([x[:-n], x[-2 * n : -n]]).contiguous()


def page(x: Tensor) -> Tensor:
    x = x.clone()
    flat = x.view(-1)
    flat[len(flat) // 3 : len(flat) // 3 + 64] = 0
    return x


def bit(number: int) -> Callable[[Tensor], Tensor]:
    def act(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1).view(torch.int32)[x.numel() // 3] ^= 1 << number
        return x

    return act


def weights(pattern: str, how: Callable[[Tensor], Tensor]) -> Act:
    return nets.rearranged(pattern, how, moments=False)


def twins_exchanged(self: Any, rng: random.Random, **what: bool) -> None:
    """Two layers of one kind change places."""
    heads = list(dict.fromkeys(hit[0] for n in nets.found(self) if (hit := re.match(r"(.*?\.\d+\.|\d+\.)", n))))
    kinds: dict[str, list[str]] = {}
    for head in heads:
        kinds.setdefault(re.sub(r"\d+", "#", head), []).append(head)
    able = [some for some in kinds.values() if len(some) > 1]
    assert able
    one, two = rng.sample(rng.choice(able), 2)
    nets.exchanged(one, two, **what)(self)


def exchange(**what: bool) -> Callable[[random.Random], Act]:
    def made(rng: random.Random) -> Act:
        seed = rng.randrange(1 << 30)
        return lambda self: twins_exchanged(self, random.Random(seed), **what)

    return made


def buffers_anew(self: Any) -> None:
    names = [n for n, b in self.module.named_buffers() if b.is_floating_point() and b.numel() > 1]
    assert names
    nets.not_read("^(" + "|".join(map(re.escape, names)) + ")$")(self)


def norms_anew(self: Any) -> None:
    names = [n for n, w in nets.found(self, "norm|ln_|bn").items() if w.ndim == 1]
    assert names
    nets.not_read("^(" + "|".join(map(re.escape, names)) + ")$")(self)


def second_by(how: Callable[[Tensor], Tensor], pattern: str = "") -> Act:
    return nets.in_state("exp_avg_sq square_avg", how, pattern)


def first_by(how: Callable[[Tensor], Tensor], pattern: str = "") -> Act:
    return nets.in_state("exp_avg momentum_buffer", how, pattern)


def moments_by(how: Callable[[Tensor], Tensor], pattern: str = "") -> Act:
    return nets.in_state("exp_avg exp_avg_sq square_avg sum momentum_buffer", how, pattern)


def counters(by: Callable[[Tensor], Any]) -> Act:
    return nets.in_state("step", by)


def twice(self: Any) -> None:
    """The resumed loop steps its schedule at two places."""
    assert self.schedules
    held = self.apply

    def apply() -> None:
        held()
        for one in self.schedules:
            one.step()

    self.apply = apply


def stopped(self: Any) -> None:
    """No schedule any more: the rate stays at its peak."""
    assert self.schedules
    self.schedules = []
    for group in (g for one in self.optimizers for g in one.param_groups):
        group["lr"] = group["initial_lr"]


def restarted(self: Any) -> None:
    assert self.schedules
    nets.reset_schedule(self)


def behind(by: int) -> Act:
    """The schedule is that many updates behind the step."""

    def act(self: Any) -> None:
        assert self.schedules
        for one in self.schedules:
            one.last_epoch -= by
            one._step_count -= by
            rates = [base * f(one.last_epoch) for base, f in zip(one.base_lrs, one.lr_lambdas, strict=True)]
            one._last_lr = rates
            for group, rate in zip(one.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    return act


def optimizer_rate(times: float) -> Act:
    """The optimizer's rate alone is another; its schedule goes on with it at the next step only by its base."""

    def act(self: Any) -> None:
        for group in (g for one in self.optimizers for g in one.param_groups):
            group["lr"] = group["lr"] * times

    return act


def step_off(by: int) -> Act:
    def act(self: Any) -> None:
        self.step += by

    return act


def older_part(updates: int) -> Callable[[random.Random], Act]:
    return of(a_layer, lambda pattern: nets.from_older(updates, pattern))


def decays_crossed(self: Any) -> None:
    groups = self.optimizers[0].param_groups
    assert len(groups) > 1 and groups[0]["weight_decay"] != groups[1]["weight_decay"]
    nets.crossed_decay(self)


def reordered_state(self: Any) -> None:
    """State is given out by the order of names, where it was saved by the order of the model."""
    one = self.optimizers[0]
    names = [n for n, w in nets.found(self).items() if w in one.state]
    by_shape: dict[Any, list[str]] = {}
    held = nets.found(self)
    for n in names:
        by_shape.setdefault(tuple(held[n].shape), []).append(n)
    assert any(sorted(some) != some or len(some) > 1 for some in by_shape.values())
    for some in by_shape.values():
        new = [one.state[held[n]] for n in some[::-1]]
        for n, state in zip(some, new, strict=True):
            one.state[held[n]] = state


@dataclass(frozen=True)
class Ill:
    """A fault: its answers, the best first; where it shows; what it does; which networks and optimizers have it.

    Attributes:
        keeps: whether it reads an older save.
        last: whether it comes after the change, which would set again what it sets.
    """

    name: str
    causes: str
    where: str
    make: Callable[[random.Random], Act]
    networks: str = ""
    optimizers: str = ""
    keeps: bool = False
    last: bool = False


ADAMS = "adamw adam nadam amsgrad"
#: Faults of the weights alone. Where the optimizer holds fp32 copies, its first update writes the weights anew.
OF_WEIGHTS = (
    "layer_not_read matrix_not_read nothing_read norms_not_read weights_rounded weights_transposed "
    "layers_exchanged_alone weights_older zeros_in_weights bit_of_a_weight"
)
#: Rows of experts are these themselves, and those of queries and keys whole heads (E10, E6). After twenty updates, no
#: running statistic holds what it began with, and weights of six updates before are where these may have led.
FAULTS = (
    Ill("state_lost", "B1", ALL, just(nets.no_state())),
    Ill("state_lost_of_a_layer", "B1 B3", ALL, of(a_layer, nets.no_state)),
    Ill("moments_zero", "B3", ALL, just(moments_by(torch.zeros_like)), optimizers=ADAMS + " rmsprop adagrad"),
    Ill("first_zero", "B6 B3", NEAR, just(first_by(torch.zeros_like)), optimizers=ADAMS),
    Ill("second_zero", "B4", ALL, just(second_by(torch.zeros_like)), optimizers=ADAMS),  # all that others have
    Ill("counters_zero", "B2", ALL, just(counters(torch.zeros_like)), optimizers=ADAMS),
    Ill("state_of_next", "B5", ALL, just(nets.shuffled())),
    Ill("state_reversed", "B5", ALL, just(reordered_state)),
    Ill("first_of_next", "B5 B6", ALL, just(nets.shuffled("", "exp_avg")), optimizers=ADAMS),
    Ill("second_of_next", "B5 B6", ALL, just(nets.shuffled("", "exp_avg_sq")), optimizers=ADAMS),
    Ill("state_of_layers_exchanged", "B5 E9", ALL, exchange(weight=False)),
    Ill("moments_scaled", "B10 D8 B6 E12", ALL, just(moments_by(lambda x: 8 * x)), optimizers=ADAMS),
    Ill("second_scaled", "B4 B10 B6 D8 E12", ALL, just(second_by(lambda x: x / 64)), optimizers=ADAMS),
    Ill("moments_rounded", "D4", NEAR, just(moments_by(nets.bf16)), optimizers=ADAMS),
    Ill("decay_crossed", "B7", ALL, just(decays_crossed), optimizers="adamw"),
    Ill("schedule_restarted", "C1", ALL, just(restarted)),
    Ill("schedule_gone", "C2 B8 C1", ALL, just(stopped)),
    Ill("schedule_twice", "C3", LATE, just(twice)),
    Ill("schedule_behind", "C1 C3 C9 G6 C4 B8", ALL, just(behind(7))),
    Ill("rate_alone", "B8", "echo", just(optimizer_rate(0.1)), last=True),
    Ill("sampler_restarted", "C6", ALL, just(nets.extra("sampler", epoch=0, next_index=0))),
    Ill("sampler_seed", "C7", ALL, just(nets.extra("sampler", seed=78))),
    Ill("sampler_behind", "C6 C9 G6", ALL, just(nets.extra("sampler", next_index=lambda n: n // 2))),
    Ill("step_doubled", "C9", ALL, just(lambda self: step_off(self.step)(self))),
    Ill("step_zero", "C9", ALL, just(lambda self: step_off(-self.step)(self))),
    Ill("layer_not_read", "A2", ALL, of(a_layer, nets.not_read)),
    Ill("matrix_not_read", "A2", ALL, of(a_matrix, nets.not_read)),
    Ill("nothing_read", "A1 A2", ALL, just(nets.not_read(""))),
    Ill("norms_not_read", "A2 A3", ALL, just(norms_anew), networks="Text Llama Phi Mixtral Mamba Image Bart ResNet"),
    Ill("buffers_not_read", "A5", NEAR, just(buffers_anew), networks="ResNet Retina Sage Norms Dino"),
    Ill("weights_rounded", "D7 D1", NEAR, just(weights("", nets.bf16))),
    Ill("matrix_transposed", "E1", ALL, of(a_matrix, lambda p: nets.rearranged(p, crosswise))),
    Ill("matrix_halves", "E1 E4 E2 E3 E6 E8 E10 F7", ALL, of(a_matrix, lambda p: nets.rearranged(p, halves))),
    Ill("matrix_interleaved", "E1 E2 E3 E4 E5 E6 E10 F7", ALL, of(a_matrix, lambda p: nets.rearranged(p, interleaved))),
    Ill("weights_transposed", "E1", ALL, of(a_matrix, lambda p: weights(p, crosswise))),
    Ill("state_transposed", "E13 B5 E1", ALL, of(a_matrix, lambda p: nets.rearranged(p, crosswise, weight=False))),
    Ill("rows_repeated", "E1 E8 E7 E6 E10 F7 G5", ALL, of(a_matrix, lambda p: nets.rearranged(p, stale_rows))),
    Ill("layers_exchanged", "E9", ALL, exchange()),
    Ill("layers_exchanged_alone", "E9", ALL, exchange(moments=False)),
    Ill("layer_older", "G6", ALL, older_part(6), keeps=True),
    Ill("state_older", "G6 C9", ALL, just(nets.from_older(6, "", weight=False)), keeps=True),
    Ill("weights_older", "G6 F4", NEAR, just(nets.from_older(6, "", keys=None)), keeps=True),
    Ill("zeros_in_weights", "G5", ALL, of(a_matrix, lambda p: weights(p, page))),
    Ill("zeros_in_second", "G5 B4", ALL, of(a_matrix, lambda p: second_by(page, p)), optimizers=ADAMS + " rmsprop"),
    Ill("bit_of_a_weight", "G1 G2", ALL, of(a_matrix, lambda p: weights(p, bit(29)))),
    Ill("bit_of_a_square", "G1 G2 G3", ALL, of(a_matrix, lambda p: second_by(bit(29), p)), optimizers=ADAMS),
    Ill("sign_of_a_square", "G3", NEAR, of(a_matrix, lambda p: second_by(bit(31), p)), optimizers=ADAMS),
    Ill("average_loaded", "F4", NEAR, just(nets.averaged), networks="Dit"),
    Ill("average_anew", "F4", NEAR, just(lambda self: average_is_weights(self)), networks="Dit"),
    Ill("average_not_read", "A2 A5 F4", NEAR, just(lambda self: average_not_read(self)), networks="Dit"),
    Ill("masters_from_bf16", "D1", NEAR, just(nets.in_state("master_param", nets.bf16)), networks="Half"),
    Ill("scaler_lost", "D8", ALL, just(nets.extra("grad_scaler", scale=65536.0, _growth_tracker=0)), networks="Amp"),
    Ill("generators_alike", "C8", ALL, just(lambda self: one_generator(self)), networks="Noisy"),
    Ill("adapter_not_read", "A2 F5", ALL, just(nets.not_read("lora_")), networks="Peft"),
    Ill("merged_and_kept", "F5", ALL, just(nets.merged), networks="Peft"),
    Ill("base_of_another", "F6 A2", ALL, just(nets.rearranged("base_layer", lambda x: x + 0.03 * noisy(x))), "Peft"),
)


def average_is_weights(self: Any) -> None:
    self.extra["ema_model"] = {n: w.detach().clone() for n, w in self.module.state_dict().items()}


def average_not_read(self: Any) -> None:
    config, self.config = self.config, self.config.but(seed=self.config.seed + 9)
    self.extra["ema_model"] = {n: w.detach().clone() for n, w in self.net().state_dict().items()}
    self.config = config


def one_generator(self: Any) -> None:
    self.extra["rng_state"] = [self.extra["rng_state"][0].clone() for _ in self.extra["rng_state"]]


def a_frozen_layer(self: Any, rng: random.Random) -> str:
    names = list(dict.fromkeys(n.rsplit(".", 1)[0] for n, w in nets.found(self).items() if w.requires_grad))
    return f"^{re.escape(rng.choice(names))}\\."


def tables(self: Any) -> None:
    """An embedding and its head get six rows."""
    names = [n for n in nets.found(self) if re.search("embed_tokens|wte|lm_head|shared|^embedding", n)]
    assert names
    nets.new_rows("|".join(map(re.escape, names)), 6)(self)


CHANGES: dict[str, Callable[[random.Random], Act] | None] = {
    "nothing": None,
    "lr": lambda rng: nets.lr_times(rng.choice([0.3, 0.5, 2.0])),
    "batch": lambda rng: nets.rows_times(rng.choice([0.5, 2.0])),
    "clip": lambda rng: nets.clip_at(rng.choice([0.4, 0.5, 2.0])),
    "decay": lambda rng: nets.groups(weight_decay=lambda d: d / 2),
    "length": lambda rng: nets.stretched(2.0),
    "frozen": of(a_frozen_layer, nets.freeze),
    "head": just(nets.probe),
    "rows": just(tables),
    "group": of(a_frozen_layer, nets.apart),
}
NETWORKS = (
    nets.Text, nets.Llama, nets.Phi, nets.Mixtral, nets.Oss, nets.Mamba, nets.Bart, nets.Image, nets.ResNet, nets.Dit,
    nets.Retina, nets.Dino, nets.Norms, nets.Sage, nets.Tower, nets.Ctc, nets.Flow, nets.Peft, nets.Half, nets.Amp,
    nets.Noisy,
)  # fmt: skip


def adam(kind: Any, **more: Any) -> Any:
    def optimizer(self: Any, groups: Any) -> torch.optim.Optimizer:
        c = self.config
        return kind([{"params": g["params"]} for g in groups], lr=c.lr, betas=c.betas, **more)

    return optimizer


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"optimizer": adam(torch.optim.Adam)},
    "nadam": {"optimizer": adam(torch.optim.NAdam)},
    "amsgrad": {"optimizer": adam(torch.optim.Adam, amsgrad=True)},
    "rmsprop": {"optimizer": nets.with_(torch.optim.RMSprop, 0.3)},
    "adagrad": {"optimizer": nets.with_(torch.optim.Adagrad, 6.0)},
    "sgd": {"optimizer": nets.with_(torch.optim.SGD, 5.0, momentum=0.9)},
    "lion": {"optimizer": nets.with_(other.Lion, 0.2)},
    "muon": {"made": nets.muon},
}
#: Faults of the optimizer's state alone.
OF_STATE = frozenset(one.name for one in FAULTS if one.name.startswith("state_") and one.name != "state_older")
#: How often each is drawn: as often as people train with it.
OFTEN = {"adamw": 8, "adam": 3, "sgd": 2}


def drawn(seed: int, control: bool = False) -> Fault:
    """The case of a seed, which may be one that cannot be made (`Trial.failed`); of a control, the change alone."""
    rng = random.Random(f"crossed {seed}")
    ill = rng.choice(FAULTS)
    network = rng.choice([n for n in NETWORKS if not ill.networks or n.__name__ in ill.networks.split()])
    kinds = [*ill.optimizers.split()] or list(OPTIMIZERS)
    kind = "adamw" if network is nets.Half else rng.choices(kinds, [OFTEN.get(one, 1) for one in kinds])[0]
    change = rng.choice(list(CHANGES))
    fails, changes = [felt(ill.make(rng))], [found(rng)] if (found := CHANGES[change]) is not None else []
    more: dict[str, Any] = {} if network is nets.Half else dict(OPTIMIZERS[kind])
    more["needs"] = nets.beta(0.9, rng.choice([0.95, 0.98, 0.99, 0.999]))
    if kind != "adamw" or change == "group":
        more["layouts"] = ("torch_save", "torch_save", "lightning")
    if control:
        name, loaded = f"{seed}_{network.__name__}_{kind}_{change}", nets.then(*changes)
        what = "deliberate" if changes else "healthy"
        return variant(name, change, base=network, kind=what, exact=not changes, loaded=loaded, **more)
    name = f"{seed}_{ill.name}_{network.__name__}_{kind}_{change}"
    best, *rest = ill.causes.split()
    if network is nets.Half and ill.name in OF_STATE and "B5" in ill.causes:
        rest.append("E9")  # masters are state, and an update makes the weights from them
    where = ill.where
    if kind == "sgd" and ill.name in OF_STATE:
        where = NEAR  # of a momentum of 0.9, 20 updates leave 12 %
    if kind == "sgd" and ill.name == "state_older":
        where = "echo"  # an older momentum is as like the next one, and SGD counts nothing
    more |= {"keeps": True} if ill.keeps else {}
    loaded = nets.then(*changes, *fails) if ill.last else nets.then(*fails, *changes)
    if network is nets.Half and ill.name in OF_WEIGHTS.split():
        where = "echo"  # the fp32 copies write the weights anew in the first update
    return fault(name, best, ill.name, where, base=network, also=tuple(rest), loaded=loaded, **more)


def _tried(seed: int, ways: tuple[str, ...], control: bool) -> Trial:
    torch.set_num_threads(1)
    return tried(drawn(seed, control), seed, (), ways, 20)


def report(trials: list[Trial], way: str) -> Iterator[str]:
    """Write what is not right: faults not named first; controls with an error or a certain cause."""
    told = [(one, one.outcome(way)) for one in trials if not one.failed]
    ill = [(one, how) for one, how in told if one.kind == "fault" and one.shows(way)]
    well = [one for one, _ in told if one.kind != "fault"]
    bad = [one for one in well if one.told[way].error or one.told[way].sure or one.told[way].crash]
    right = sum(how == "right" for _, how in ill)
    yield f"## {way}: {right} of {len(ill)} right first; {len(bad)} of {len(well)} controls bad"
    for one, how in [pair for pair in ill if pair[1] != "right"] + [(one, "false") for one in bad]:
        said = one.told[way]
        words = said.crash or said.verdict
        yield f"{how:7} {one.fault:64} {'/'.join(one.answers):18} {said.words():18} {words[:110]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", default="", help="cases whose name this pattern is found in")
    parser.add_argument("--control", action="store_true", help="the changes without the faults")
    parser.add_argument("--ways", nargs="*", default=["echo", "pair1", "pair20"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", default="", help="where to write every case as it was told")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    seeds = [seed for seed in seeds if re.search(options.only, drawn(seed, options.control).id)]
    job = partial(_tried, ways=tuple(options.ways), control=options.control)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        trials = list(pool.map(job, seeds, chunksize=4))
    for way in options.ways:
        print("\n".join(report(trials, way)))
    failed = Counter(one.failed.strip().splitlines()[-1] for one in trials if one.failed)
    print(f"{sum(failed.values())} could not be made:", dict(failed.most_common(12)))
    if options.json:
        Path(options.json).write_text(json.dumps({"trials": [asdict(one) for one in trials]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
