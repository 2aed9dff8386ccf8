"""Recognise the optimizer that wrote a state by the names in it, and list the laws of Adam that hold for it.

::

    param_groups[0]  betas eps weight_decay amsgrad decoupled_weight_decay …   state  exp_avg exp_avg_sq  ──▶  AdamW
    param_groups[0]  betas eps weight_decay kahan_sum weight_decouple          state  exp_avg exp_avg_sq  ──▶  unknown
    param_groups[0]  momentum nesterov ns_steps …                              state  momentum_buffer     ──▶  Muon
                                                                               state  state1 state2 …     ──▶  8-bit

Many optimizers other than Adam call their state ``exp_avg`` and ``exp_avg_sq``. The fields of their param groups
distinguish them: if there are fields that no known Adam has, no law is claimed.

Sources: torch 2.6 to 2.13 ``torch/optim``; apex and TransformerEngine ``fused_adam.py``; deepspeed 0.19.8
``ops/adam``; transformers 4.49 ``optimization.py`` (``AdamW``, ``Adafactor``); bitsandbytes 0.49; torchao 0.14;
schedulefree 1.4; github.com/KellerJordan/Muon; torch_optimizer 0.3 (``Lamb`` has the fields of a plain Adam).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.words import plural

#: ``moments``: m² ≤ K·v, v_B ≥ β2^k·v_A and the transition; ``reach``: the lr bounds |ΔW|; ``replay``: an update
#: follows from the moments after it; ``ruler``: elements without a gradient decay by one factor; ``counter``: each
#: update of a parameter is one count.
ALL_LAWS = frozenset({"moments", "reach", "replay", "ruler", "counter"})
UNKNOWN = "unknown"

LIKE = "Adam or like it"  #: one update, replayed, tells
_PLAIN = {"lr", "betas", "eps", "weight_decay"}
_TORCH = {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
#: Fields of schedules, of Megatron's group builder, or notes of users; they do not affect updates.
_NOTES = {
    "step", "params", "param_names", "initial_lr", "max_lr", "min_lr", "base_lr", "base_momentum", "max_momentum",
    "swa_lr", "wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "start_wd", "end_wd", "is_expert_parallel",
    "is_decoupled_lr", "default_config", "lr_scale", "wd_scale", "name", "names", "group_name", "group_names",
    "param_group_name", "layer", "layer_id", "tag", "kind", "use_muon",
}  # fmt: skip
_ADAM_STATE = {"exp_avg", "exp_avg_sq"}
#: State beside the moments that does not affect any law.
_BESIDE = {"step", "master", "master_param", "max_exp_avg_sq", "beta1_pow", "beta2_pow"}
_ADAMS = re.compile(r"(?:torch\.optim\.)?(?:fused|cpu|deepspeedcpu)?adamw?(?:_torch|_torch_fused|_apex_fused)?")

#: Names in the state → family, laws. The first match decides.
_BY_STATE: tuple[tuple[frozenset[str], str, frozenset[str]], ...] = tuple(
    (frozenset(words), family, frozenset(laws))
    for words, family, laws in (
        ({"state1", "state2", "qmap1"}, "8-bit Adam", {"counter"}),
        ({"state1", "state2"}, "bitsandbytes Adam", {"counter"}),
        ({"exp_avg.codes"}, "8-bit Adam", {"counter"}),
        ({"state1"}, "8-bit optimizer of one state", {"counter"}),
        ({"mu_product", "exp_avg_sq"}, "NAdam", {"moments", "ruler", "counter"}),
        ({"exp_inf"}, "Adamax", {"counter"}),
        ({"row_var"}, "Adafactor", {"counter"}),
        ({"exp_avg_sq_row"}, "Adafactor", {"counter"}),
        ({"exp_avg_slow"}, "AdEMAMix", ()),
        ({"exp_avg_diff"}, "Adan", ()),
        ({"exp_avg_var"}, "AdaBelief", ()),
        ({"hessian"}, "Sophia", ()),
        ({"trust_ratio", "exp_avg", "exp_avg_sq"}, "LAMB", {"moments", "counter"}),
        ({"acc_delta"}, "Adadelta", {"counter"}),
        ({"square_avg"}, "RMSprop", {"counter"}),
        ({"sum"}, "Adagrad", {"counter"}),
        ({"ax", "eta"}, "ASGD", {"counter"}),
        ({"prev", "step_size"}, "Rprop", {"counter"}),
    )
)
#: A field of the param groups → family. No law on the state is proved here for these.
_BY_FIELD = {
    "weight_lr_power": "schedule-free",
    "train_mode": "schedule-free",
    "d_coef": "Prodigy",
    "d0": "D-Adaptation",
    "ns_steps": "Muon",
    "ns_coefficients": "Muon",
    "momentum_decay": "NAdam",
    "lr_decay": "Adagrad",
    "rho": "Adadelta",
    "lambd": "ASGD",
    "step_sizes": "Rprop",
    "beta2_decay": "Adafactor",
    "decay_rate": "Adafactor",
    "nus": "QHAdam",
    "update_proj_gap": "GaLore",
    "shampoo_beta": "SOAP",
    "final_lr": "AdaBound",
    "grad_averaging": "LAMB",
}

#: Coefficients of torch's Muon, which bound the norm of what it makes of a momentum.
ORTHOGONAL = (3.4445, -4.775, 2.0315)

#: Family → laws on its steps, and the fields of its param groups in torch or, of Lion, by Google.
_STEPS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "SGD": (("replay",), frozenset({"momentum", "dampening", "nesterov"})),
    "RMSprop": (("reach", "replay"), frozenset({"momentum", "alpha", "eps", "centered"})),
    "Adagrad": (("reach",), frozenset({"lr_decay", "eps", "initial_accumulator_value"})),
    "Lion": (("reach", "replay"), frozenset({"betas"})),
    "Muon": (("reach",), frozenset({"momentum", "nesterov", "eps", "ns_steps", "ns_coefficients", "adjust_lr_fn"})),
}


@dataclass(frozen=True)
class Optimizer:
    """A recognised optimizer.

    Attributes:
        family: ``AdamW``, ``SGD`` …, or ``unknown``; several in one file are joined by ``" + "``.
        stored: whether any of its state or its param groups are in the files.
        why: one sentence with the reason.
        laws: those of :data:`ALL_LAWS` that hold for it.
    """

    family: str = UNKNOWN
    stored: bool = False
    why: str = "no optimizer state and no param groups are stored"
    laws: frozenset[str] = frozenset()


def recognise(fields: Mapping[str, Any], state: AbstractSet[str], name: str = "") -> Optimizer:
    """Return the optimizer of a param group.

    Args:
        fields: the group's fields as stored; empty without groups.
        state: the names of its parameters' state.
        name: the optimizer's name in the trainer's arguments, or empty.
    """
    if not fields and not state:
        return Optimizer()
    if fields.get("use_muon") is True:
        return _made("Muon", {"counter"} if "step" in state else (), "its param group carries 'use_muon'")
    for words, family, laws in _BY_STATE:
        if words <= state:
            return _made(family, laws | _known_steps(family, fields), f"its state holds {_quoted(words)}")
    for field, family in _BY_FIELD.items():
        if field in fields:
            return _made(family, _known_steps(family, fields), f"its param groups carry {field!r}")
    if state >= _ADAM_STATE or (not state - _BESIDE and "betas" in fields and "eps" in fields):
        return _adam(fields, state, name)
    if "dampening" in fields and "nesterov" in fields and not state - {"momentum", "momentum_buffer", *_BESIDE}:
        return _made("SGD", _known_steps("SGD", fields), "its param groups carry 'dampening' and 'nesterov'")
    if "alpha" in fields and "centered" in fields:
        return _made("RMSprop", {"counter"}, "its param groups carry 'alpha' and 'centered'")
    if "initial_accumulator_value" in fields:
        return _made("Adagrad", {"counter"}, "its param groups carry 'initial_accumulator_value'")
    if not state - {"exp_avg", *_BESIDE} and "betas" in fields and "eps" not in fields:
        return _made("Lion", _known_steps("Lion", fields), "its param groups carry 'betas' and lack 'eps'")
    held = f"its state holds {_quoted(state)}" if state else "it has no state"
    return _made(UNKNOWN, (), f"{held}, and its param groups do not identify it")


def _known_steps(family: str, fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the laws on the steps of an optimizer other than Adam: none if a field is not that of torch's or Google's.

    An update of SGD and of RMSprop moves weights along the stored momentum, one of Lion by the lr itself.
    """
    laws, own = _STEPS.get(family, ((), frozenset()))
    if (
        not fields
        or fields.keys() - own - _NOTES - {"lr", "weight_decay", *_TORCH}
        or "decoupled_weight_decay" in fields
    ):
        return frozenset()
    if family == "RMSprop" and fields.get("centered") is not False:
        return frozenset({"replay"})
    if family == "Muon":  # whatever the momentum is, its step is made orthogonal
        usual = "adjust_lr_fn" in fields and fields.get("ns_coefficients") in ([*ORTHOGONAL], ORTHOGONAL)
        return frozenset(laws if usual else ())
    return frozenset(() if fields.get("nesterov") is True else laws)


def together(found: Iterable[Optimizer]) -> Optimizer:
    """Combine the optimizers of several param groups, with only the laws that hold for all."""
    every = list(dict.fromkeys(found))
    if len(every) <= 1:
        return every[0] if every else Optimizer()
    families = list(dict.fromkeys(one.family for one in every))
    laws = frozenset.intersection(*(one.laws for one in every))
    why = every[0].why if len(families) == 1 else "; ".join(f"{one.family}: {one.why}" for one in every)
    return Optimizer(" + ".join(families), True, why, laws)


def claimed(found: Optimizer) -> Optimizer:
    """Return Adam for an optimizer that looks like it, because the user gave betas for it."""
    if found.family != LIKE:
        return found
    return replace(found, family="Adam", why=f"{found.why}; but betas were given for it", laws=ALL_LAWS)


def _adam(fields: Mapping[str, Any], state: AbstractSet[str], name: str) -> Optimizer:
    """Return the optimizer for Adam's two moments, or no state yet; only known fields make it an Adam."""
    if other := sorted(state - _ADAM_STATE - _BESIDE):
        return _made(UNKNOWN, (), f"its state holds {_quoted(other)}, which no known Adam has")
    own = {*_PLAIN, *_TORCH, *_NOTES, "bias_correction", "correct_bias", "beta1", "beta2"}
    if foreign := sorted(field for field in fields if field not in own and not isinstance(fields[field], str)):
        lack = " and lack 'amsgrad'" if "amsgrad" not in fields else ""
        return _made(UNKNOWN, (), f"its param groups carry {_quoted(foreign)}{lack}")
    betas = fields.get("betas")
    if isinstance(betas, tuple) and len(betas) != 2:
        return _made(UNKNOWN, (), f"its param groups state {plural(len(betas), 'beta')}, not two")
    decoupled = fields.get("decoupled_weight_decay")
    word = name.lower()
    family = "AdamW" if decoupled is True or "adamw" in word else "Adam"
    if "correct_bias" in fields:  # adds eps before it corrects, and decays after: close to Adam, but not bit for bit
        laws = {"moments", "ruler", "counter"} | ({"reach"} if fields["correct_bias"] is True else set())
        return _made("AdamW", laws, "its param groups carry 'correct_bias', as transformers' own AdamW has them")
    if "bias_correction" in fields:
        laws = set(ALL_LAWS) if fields["bias_correction"] in (True, 1) else {"moments", "ruler", "counter"}
        return _made(family, laws, "its param groups carry 'bias_correction', as the fused Adams have them")
    if fields.get("amsgrad") is True:
        return _made("AMSGrad", ALL_LAWS - {"replay"}, "its param groups set amsgrad")
    if "amsgrad" in fields:
        words = "and no field that torch's Adams lack"
        if isinstance(decoupled, bool):
            family, words = "AdamW" if decoupled else "Adam", f"and set decoupled_weight_decay {decoupled}"
        return _made(family, ALL_LAWS, f"its param groups carry 'amsgrad' {words}")
    if fields.get("use_muon") is False:  # stored beside Muon's groups; its step is AdamW's
        return _made("AdamW", ALL_LAWS, "its param groups carry 'use_muon' False, as Muon's auxiliary AdamW has them")
    if "decoupled_weight_decay" in fields:
        # torch's RAdam has this field without amsgrad; its first updates use m alone, beyond Adam's reach
        laws = {"moments", "ruler", "counter"}
        return _made("RAdam", laws, "its param groups carry 'decoupled_weight_decay' and lack 'amsgrad'")
    if _TORCH & fields.keys():
        words = f"carry {_quoted(sorted(_TORCH & fields.keys()))} and lack 'amsgrad'"
        family, laws = ("SparseAdam", {"counter"}) if "weight_decay" not in fields else (UNKNOWN, set())
        return _made(family, laws, f"its param groups {words}")
    if _ADAMS.fullmatch(word):
        return _made(family, ALL_LAWS, f"the arguments call it {name!r}, and nothing stored contradicts that")
    if word:
        return _made(UNKNOWN, (), f"the arguments call it {name!r}, and its param groups show no more")
    where = "its param groups have only Adam's fields" if fields else "its state has the names of Adam's"
    # LAMB's groups and state look the same; its moments are Adam's, its steps are not
    return _made(LIKE, {"moments", "counter"}, f"{where}, which LAMB has too")


def _made(family: str, laws: Iterable[str], why: str) -> Optimizer:
    return Optimizer(family, True, why, frozenset(laws))


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(repr(word[:40]) for word in sorted(words)[:4])
