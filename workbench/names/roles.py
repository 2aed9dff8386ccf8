"""The meaning of a stored name: key → (fqn, role).

::

    key                                               fqn                           role
    model.layers.0.attn.wq.weight                     layers.0.attn.wq.weight       param       get_state_dict
    optim.state.layers.0.attn.wq.weight.exp_avg       layers.0.attn.wq.weight       exp_avg
    optimizer.state.0.exp_avg                         —                             exp_avg     integer ids
    _orig_mod.module.fc.weight                        fc.weight                     param       wrappers
    base_model.model.fc.lora_A.weight                 fc.weight                     lora_A      PEFT
    fc.weight_scale_inv                               fc.weight                     scale

``model.`` is the hard case: it is the container of ``get_state_dict`` and accelerate, and it is how the fqns of most
Hugging Face models begin (``model.embed_tokens.weight``). It is decided by, in this order:

1. the path: DCP's planner and a pickled tree say where a dict ended. ``('model', 'model.norm.weight')`` has the
   container and the fqn; ``('model.norm.weight',)`` is an fqn. This is certain.
2. the optimizer: its fqns carry no container. The reading under which more parameters have a moment wins.
3. the whole set: if every key begins with ``model.`` and some continue with ``model.``, the first one is a container
   (``model.model.norm.weight`` beside ``model.lm_head.weight``); otherwise nothing is removed.

``module.`` (DataParallel) is removed if all keys of a container begin with it; ``_orig_mod`` and the like,
which no user writes, anywhere. Optimizers that number their parameters: optimizer.py.

Sources: torch 2.13 ``distributed/checkpoint/state_dict.py``, ``torch/optim``; transformers 5.23; peft 0.21;
compressed-tensors 0.20; torchtitan 0.3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.core.near import did_you_mean
from workbench.errors import UsageError

#: Groups that ``role=`` accepts besides the roles: the tensors that a model loads, an optimizer's state, every tensor.
ROLE_GROUPS = ("model", "optimizer", "all")

#: Roles of tensors that a model loads. Optimizers invent names for their state, so unlisted roles are not the model's.
MODEL_ROLES: frozenset[str] = frozenset(
    {"param", "buffer", "scale", "zero_point", "amax_history", "lora_A", "lora_B", "lora_magnitude_vector", "ia3_l"}
)

#: Roles of tensors trained beside a weight, whose parts the weight's name does not distinguish.
ADAPTERS = frozenset({"lora_A", "lora_B", "lora_magnitude_vector", "ia3_l"})

#: Optimizers' names of their tensors → roles.
STATES: dict[str, str] = {
    **{
        name: name
        for name in (
            "exp_avg",
            "exp_avg_sq",
            "step",
            "max_exp_avg_sq",
            "square_avg",
            "grad_avg",
            "acc_delta",
            "sum",
            "exp_inf",
            "exp_avg_slow",
            "exp_avg_diff",
            "exp_avg_sq_row",
            "exp_avg_sq_col",
            "mu_product",
            "eta",
            "mu",
            "ax",
            "prev",
        )
    },
    "momentum_buffer": "momentum",
    "momentum": "momentum",
    **dict.fromkeys(("master_param", "master_params", "master_weight", "master_weights", "fp32_param"), "master"),
}
#: Names that are unambiguous anywhere.
UNMISTAKABLE = {"exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "exp_avg_slow"}

MODEL = {"state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "params", "weights"}
EMA = {"ema", "ema_model", "model_ema", "ema_state_dict", "ema_params", "ema_net", "ema_weights"}
#: Containers that no module is named after.
CONTAINERS = {"state_dict": "model!", "model_state_dict": "model!", **dict.fromkeys(EMA, "ema")}
OUTER = {"app", "app_state", "checkpoint", "trainer"}  #: dicts around the whole
COMPOSER = {"model", "optimizers"}  #: in Composer's ``state``
REST = {
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "schedulers",
    "train_state",
    "trainer_state",
    "dataloader",
    "dataloaders",
    "scaler",
    "grad_scaler",
    "amp",
    "loops",
    "callbacks",
    "client_state",
    "hyper_parameters",
    "args",
    "optim",
    "optimizer",
    "optimizers",
    "optimizer_states",
    "step",
    "global_step",
    "epoch",
    "iteration",
    "iter",
    "loss",
    "losses",
}
BUFFERS = {
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "original_inv_freq",
    "position_ids",
    "token_type_ids",
    "freqs_cis",
    "cos_cached",
    "sin_cached",
    "cos_sin_cache",
    "masked_bias",
    "expert_bias",
    "tokens_per_expert",
    "relative_position_index",
    "e_score_correction_bias",
    # of codebooks and queues (vector-quantize-pytorch, MoCo)
    "cluster_size",
    "embed_avg",
    "embed_sum",
    "queue_ptr",
}

_OPTIMIZER = re.compile(r"(?:(?:app|app_state|checkpoint|trainer)\.)?(?:\w*optim\w*|opt)(?:\.\d+)?\.(.+)", re.S)
_WRAPPER = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\.")
_RNG = re.compile(r"(?:^|[._])rng(?:[._]|$)|(?:^|\.)(?:random_states?|generator_state)(?:\.|$)")
_LORA = re.compile(
    r"(.*)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|ia3_l)(?:\.\w+)*?(?:\.(weight|bias))?",
    re.S,
)
_SAVED = re.compile(r"(.*)\.(?:modules_to_save(?:\.(?!weight$|bias$)\w+)?|original_module|base_layer)\.(.*)", re.S)
_SCALE = re.compile(
    r"(.*(?:weight|_proj|_blocks))_(?:scale_inv|scale|scale_2|global_scale|scales)"  # weight_scale, down_proj_scales
    r"|(.*\.)(?:input_scale|input_global_scale|activation_scale|scales|weight_scaling_factor|SCB)"  # beside a weight
    r"|(.*)\.(?:absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.bitsandbytes__\w+)"  # bitsandbytes
    r"|(.*\.weight)\._?scale",  # torchao, quanto: parts of a tensor of a special class
    re.S,
)
#: Last parts of running statistics, as of observations and returns in reinforcement learning.
_STATISTICS = re.compile(r"(?:moving|return|reward|obs|ret)_(?:mean|var|std|count)")
#: The singular vectors that ``torch.nn.utils.parametrizations.spectral_norm`` keeps as buffers.
_SPECTRAL = re.compile(r"(?:.*\.)?parametrizations\.\w+\.\d+\._[uv]", re.S)
_QUANTISED = re.compile(r"(.*\.)(?:qweight|weight_packed)|(.*_proj)_blocks", re.S)
#: In the model, of role ``other``.
_OF_MODEL = re.compile(r"(?:.*\.)?(?:_extra_state|weight_shape|weight_format|weight_g_idx|g_idx)", re.S)
_ODD_LEAF = re.compile(
    r"scale|bitsandbytes__|SCB|absmax|quant|qweight|packed|_blocks|zero|qzeros|g_idx|amax|_extra_state|int_repr|_shift"
    r"|weight_shape|weight_format"
)
_QTENSOR = {"int_repr": "param", "q_per_channel_scales": "scale", "q_per_channel_zero_points": "zero_point"}  #: torch


def resolve(keys: Sequence[str], hints: Mapping[str, Any] | None = None) -> tuple[list[str | None], list[str]]:
    """Resolve the parameter that each tensor belongs to, and its role.

    Args:
        keys: all stored names of a checkpoint: the meaning of one can depend on the others.
        hints: ``paths`` maps keys to tuples of the dict keys and list positions that lead to them.

    Returns:
        ``(fqns, roles)`` in the order of the keys; an fqn is ``None`` if the name is not stored (integer ids) or
        the tensor belongs to no parameter (generator states).
    """
    paths = (hints or {}).get("paths") or {}
    names = [_place(key, paths.get(key)) for key in keys]
    groups: dict[str, list[str]] = defaultdict(list)
    rest: set[str] = set()  # trainer's state outside of every container
    for (container, name, _), key in zip(names, keys, strict=True):
        if container in ("", "flat") and _is_rest(key):
            rest.add(key)
        else:
            groups[container].append(name)
    cut = {container: _wrapper(groups[container]) for container in ("", "flat", "model!", "state", "ema", "rest")}
    states = {name[cut["state"] :] for name in groups["state"] if not name.isdigit()}
    certain = bool(groups["model!"])
    if not certain and _is_container([name[cut[""] :] for name in groups[""]], states):
        # from here on as if paths were stored: keys outside `model.` belong to no parameter
        certain, cut["model!"] = True, cut[""] + len("model.")
        names = [
            ("model!", name, state)
            if container == "" and name.startswith("model.", cut[""])
            else (container, name, state)
            for container, name, state in names
        ]
    mine = ("model!",) if certain else ("", "flat")
    known = {name[cut[container] :] for container, name, _ in names if container in mine}

    fqns: list[str | None] = []
    roles: list[str] = []
    for (container, name, state), key in zip(names, keys, strict=True):
        own = name[cut[container] :]
        fqn: str | None
        if container == "state":
            fqn, role = _owner(own, state, known), STATES.get(state, "other")
        elif container == "rest" or (container in ("", "flat") and (certain or key in rest) and own not in states):
            fqn, role = None, "other"
        elif container == "ema":
            fqn, role = _ema(own, known), "ema"
        else:
            fqn, role = _tensor(own)
        fqns.append(fqn)
        roles.append(role)
    return fqns, roles


def of_model(key: str, fqn: str | None, role: str) -> bool:
    """Return whether a model loads this tensor; optimizer state, averages and trainer state are not loaded."""
    return role in MODEL_ROLES or (role == "other" and fqn is not None and _OF_MODEL.fullmatch(key) is not None)


def has_role(
    keys: Sequence[str], fqns: Sequence[str | None], roles: Sequence[str], role: str | None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Select tensors by role.

    Args:
        role: a role, one of :data:`ROLE_GROUPS`, or ``None`` for every tensor.

    Returns:
        ``(T,) bool``, by position. A group may be empty.

    Raises:
        UsageError: no tensor has that role; the message lists the roles present.
    """
    if role is None or role == "all":
        return np.ones(len(keys), bool)
    if role in ROLE_GROUPS:
        model = np.array([of_model(*one) for one in zip(keys, fqns, roles, strict=True)], bool)
        return model if role == "model" else ~model & np.array([one not in ("other", "ema") for one in roles], bool)
    present = sorted(set(roles))
    if role not in present:
        groups = ", ".join(ROLE_GROUPS)
        hint = did_you_mean(role, [*present, *ROLE_GROUPS])
        raise UsageError(
            f"no tensor has the role {role!r}; roles present: {', '.join(present) or 'none'}; groups: {groups}{hint}"
        )
    return np.array([one == role for one in roles], bool)


# ---- one key -------------------------------------------------------------------------------------------------------


def _place(key: str, path: Sequence[Any] | None) -> tuple[str, str, str]:
    """Return ``(container, name, state)``; the container is one of ``model!`` and ``flat`` (both certain), ``ema``,
    ``state``, ``rest``, or empty if the whole set of names must decide.
    """
    if path and len(path) > 1 and (path[0] in OUTER or _is_composers(path)):
        path = path[1:]
    if path and len(path) > 1:
        head = str(path[0])
        if head == "optimizers" and len(path) > 4 and path[2] == "state":  # by the class of the optimizer
            path = (head, *path[2:])
        if head in MODEL:
            return "model!", _plain(".".join(map(str, path[1:]))), ""
        if head in EMA:
            return "ema", _plain(".".join(map(str, path[1:]))), ""
        if len(path) > 3 and path[1] == "state" and "opt" in head:
            return "state", _plain(str(path[2])), str(path[-1])
    head, _, inner = key.partition(".")
    if "opt" in key[:40]:
        match = _OPTIMIZER.fullmatch(key)
        if match and (match[1].startswith(("state.", "param_groups")) or match[1].rpartition(".")[2] in STATES):
            return _state(match[1].removeprefix("state."))
    if head == "state":
        container, name, state = _state(inner)
        if state in STATES:
            return container, name, state
    if key[key.rfind(".") + 1 :] in UNMISTAKABLE and inner:
        return _state(key)
    if head in CONTAINERS and inner and not path:
        return CONTAINERS[head], _plain(inner), ""
    return "flat" if path and len(path) == 1 else "", _plain(key), ""


def _is_composers(path: Sequence[Any]) -> bool:
    """Return whether a path begins with Composer's ``state``; an optimizer's has parameters, which may be ``model``."""
    return path[0] == "state" and path[1] in COMPOSER and (len(path) > 3 or path[-1] not in STATES)


def _state(rest: str) -> tuple[str, str, str]:
    name, _, state = rest.rpartition(".")
    if not name or name.startswith("param_groups"):
        return "rest", rest, ""
    return "state", _plain(name), state


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name) if "_mod" in name else name


def _is_rest(key: str) -> bool:
    """Return whether the name of a key outside of every container marks it as trainer state."""
    if ("rng" in key or "random_state" in key or "generator_state" in key) and _RNG.search(key):
        return True
    return key.partition(".")[0] in REST


def _owner(name: str, state: str, known: set[str]) -> str | None:
    """Return the parameter of an optimizer's tensor; ``None`` for a number, or nested state of an unknown parameter."""
    if name.isdigit():
        return None
    if state in STATES or name in known:
        return name
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def _ema(name: str, known: set[str]) -> str | None:
    for prefix in ("", "module.", "model.", "shadow."):
        if name.startswith(prefix) and name[len(prefix) :] in known:
            return name[len(prefix) :]
    return None if name.rpartition(".")[2].isdigit() else name


@lru_cache(4096)
def _is_plain(leaf: str) -> bool:
    """Return whether the last part of a name is one of a parameter as trained, whatever is before it."""
    if leaf in ("weight", "bias"):
        return True
    return not (leaf in BUFFERS or leaf in ("_u", "_v") or _STATISTICS.fullmatch(leaf) or _ODD_LEAF.search(leaf))


def _tensor(name: str) -> tuple[str | None, str]:
    """Return the fqn and role of a name in the model's own namespace."""
    if "lora_" in name or "ia3_l" in name or name.startswith("base_model.model."):
        return _adapter(name.removeprefix("base_model.model."))
    leaf = name[name.rfind(".") + 1 :]
    if _is_plain(leaf):
        return name, "param"
    if leaf in BUFFERS or _STATISTICS.fullmatch(leaf) or (leaf in ("_u", "_v") and _SPECTRAL.fullmatch(name)):
        return name, "buffer"
    if leaf in _QTENSOR and leaf != name:
        return name[: -len(leaf) - 1], _QTENSOR[leaf]
    if match := _SCALE.fullmatch(name):
        if match[2] is not None:
            return match[2] + "weight", "scale"
        return (match[1] or match[3] or match[4] or "").removesuffix("_blocks"), "scale"
    if match := _QUANTISED.fullmatch(name):
        return (match[1] + "weight" if match[1] else match[2]), "param"
    if name.endswith((".weight.zero_point", ".weight._shift")):
        return name.rpartition(".")[0], "zero_point"
    if leaf in ("qzeros", "weight_zero_point", "input_zero_point"):
        return name[: -len(leaf)] + "weight", "zero_point"
    if leaf in ("weight_shape", "weight_format", "weight_g_idx", "g_idx"):
        return name[: -len(leaf)] + "weight", "other"
    if "amax_history" in leaf:
        return name, "amax_history"
    return name, "other" if leaf == "_extra_state" else "param"


def listed_alone(fqn: str, role: str) -> tuple[str, str]:
    """Return the name and role under which optimizers know a tensor: an adapter is a separate parameter.

    ``fc.weight, lora_A`` and PEFT's ``base_model.model.fc.lora_A.default.weight, exp_avg`` become ``fc.lora_A.weight``.
    """
    if role in ADAPTERS:
        module, _, leaf = fqn.rpartition(".")
        return f"{module}.{role}.{leaf}", "param"
    base, part = _adapter(fqn.removeprefix("base_model.model."))
    return (fqn, role) if base is None or part not in ADAPTERS else (listed_alone(base, part)[0], role)


def adapter_of(name: str) -> str:
    """Return the part of an adapter that a name belongs to: ``lora_A``; "" for other names."""
    found = _LORA.fullmatch(name) if "lora_" in name or "ia3_l" in name else None
    return found[2].replace("embedding_", "") if found else ""


def _adapter(name: str) -> tuple[str | None, str]:
    if match := _LORA.fullmatch(name):
        role = match[2].replace("embedding_", "") if match[2].startswith("lora_emb") else match[2]
        return f"{match[1]}.{match[3] if match[3] == 'bias' else 'weight'}", role
    if match := _SAVED.fullmatch(name):
        return f"{match[1]}.{match[2]}", "param"
    return name, "param"


# ---- the whole set -------------------------------------------------------------------------------------------------


def _wrapper(names: Sequence[str]) -> int:
    """Return how many characters of ``module.`` prefixes all names share."""
    cut = 0
    while names and all(name.startswith("module.", cut) for name in names):
        cut += len("module.")
    return cut


def _is_container(names: Sequence[str], states: set[str]) -> bool:
    """Return whether ``model.`` is a container in a flat set of names; see rules 2 and 3 of the module's docstring."""
    within = [name for name in names if name.startswith("model.")]
    if states:
        kept = sum(name in states for name in names)
        return sum(name[6:] in states for name in within) > kept
    inner = any(name.startswith("model.", 6) for name in within)
    return inner and len(within) == len(names)
