"""The state of a live trainer under the names of ``torch.distributed.checkpoint``, without changing any of it.

::

    model                                  model.<fqn>                            wrappers' prefixes removed
    optimizer.state[param]["exp_avg"]      optimizer.state.<fqn>.exp_avg          named by the model's parameters
    optimizer.param_groups                 optimizer.param_groups, params as fqns
    scheduler, dataloader, step, extra     scheduler, dataloader, train_state.step, …

torch's own ``get_optimizer_state_dict`` creates missing state by a step with zero gradients; here missing state stays
missing, because the echo is to detect it.

Source: torch 2.13 ``distributed/checkpoint/state_dict.py`` (``_get_fqns``, ``_init_optim_state``).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.core.jsonable import jsonable
from workbench.errors import UsageError

if TYPE_CHECKING:
    import torch

Path = tuple[str, ...]
#: Prefixes that ``torch.compile``, FSDP and activation checkpointing insert into names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
PLAIN = (bool, int, float, str, type(None))
DEPTH = 24


@dataclass(frozen=True, eq=False)
class Live:
    """The state of a trainer, as one nested state dict that ``dcp.save`` accepts.

    Attributes:
        state: mappings down to tensors and plain values.
        trained: parameters that the optimizer updates; ``None`` without a live optimizer.
        with_state: … for which it has state.
        strangers: … that do not belong to the model, under numbers.
    """

    state: dict[str, Any]
    trained: list[str] | None = None
    with_state: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)


def collect(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    dataloader: Any = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Live:
    """Gather the state; arguments as those of :func:`workbench.echo`.

    Raises:
        UsageError: a kind of model or optimizer whose names are unknown.
    """
    import torch

    state: dict[str, Any] = {}
    live = Live(state)
    with torch.no_grad():
        names: dict[int, str] = {}
        if isinstance(model, Mapping):
            state["model"] = _tame(model)
        elif model is not None:
            state["model"] = {}
            for part in _several(model):
                weights, own = _model(part)
                state["model"] |= weights
                names |= own
        if isinstance(optimizer, Mapping):
            state["optimizer"] = _tame(optimizer)
        elif optimizer is not None:
            state["optimizer"], live = _optimizers(optimizer, names, state)
        for name, one in (("scheduler", scheduler), ("dataloader", dataloader)):
            if one is not None:
                state[name] = _tame(_state_of(one, name))
        if step is not None:
            state["train_state"] = {"step": int(step)}
        for name, value in (extra or {}).items():
            if name in state:
                raise UsageError(f"extra contains {name!r}, which the echo itself uses; choose another name")
            state[name] = _tame(value)
    return live


def leaves(state: Mapping[str, Any]) -> tuple[dict[Path, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a state by their paths, and everything else as in JSON."""
    import torch

    tensors: dict[Path, torch.Tensor] = {}

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value
            return None
        if isinstance(value, Mapping):
            found = {str(key): walk(one, (*path, str(key))) for key, one in value.items()}
            return {key: one for key, one in found.items() if one is not None} or None
        if isinstance(value, list | tuple) and _holds_tensors(value):
            return [walk(one, (*path, str(at))) for at, one in enumerate(value)]
        return jsonable(value)

    objects = {name: walk(value, (name,)) for name, value in state.items()}
    return tensors, {name: value for name, value in objects.items() if value is not None}


# ---- model -----------------------------------------------------------------------------------------------------------


def _several(one: Any) -> list[Any]:
    """Return a list of a model or the parts of a pipeline, or of one or several optimizers."""
    import torch

    if isinstance(one, list | tuple):
        return [inner for part in one for inner in _several(part)]
    if isinstance(one, torch.nn.Module):
        return [one]
    inner = getattr(one, "optimizers", None)  # torchtitan's container, whose own state is empty
    if isinstance(inner, list | tuple) and inner:
        return _several(inner)
    while not isinstance(one, torch.optim.Optimizer) and hasattr(one, "optimizer"):
        one = one.optimizer
    return [one]


def _model(model: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the model's state dict, and the name of each parameter by identity."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; pass a module, a list of modules, or a state dict")
    modules = dict(model.named_modules(remove_duplicate=False))
    if any(isinstance(one, FullyShardedDataParallel) for one in modules.values()):
        raise UsageError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), which hides the names of its parameters; "
            "pass torch's state dicts of both instead: echo(*get_state_dict(model, optimizer), …)"
        )
    outer = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    hidden = {f"{path}.module".lstrip(".") for path, one in modules.items() if isinstance(one, outer)}

    def named(key: str) -> str:
        words = key.split(".")
        kept = [w for at, w in enumerate(words) if w not in WRAPPERS and ".".join(words[: at + 1]) not in hidden]
        return ".".join(kept)

    weights = {named(key): _tame(value) for key, value in model.state_dict().items()}
    names: dict[int, str] = {}
    for key, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), named(key))
    return weights, names


# ---- optimizer -------------------------------------------------------------------------------------------------------


def _optimizers(optimizer: Any, names: Mapping[int, str], state: dict[str, Any]) -> tuple[dict[str, Any], Live]:
    """Return the state and groups of one or several optimizers under the parameters' names, and a summary of them."""
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    trained: list[str] = []
    live = Live(state, trained)
    for one in _several(optimizer):
        if not isinstance(getattr(one, "param_groups", None), list) or not hasattr(one, "state"):
            raise UsageError(
                f"optimizer is a {type(one).__name__} without state and param_groups; pass a torch optimizer"
            )
        for group in one.param_groups:
            own = []
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    name = f"stranger_{len(live.strangers)}"
                    live.strangers.append(name)
                own.append(name)
                held = one.state.get(param)  # a defaultdict creates an entry on []
                if param.requires_grad:
                    trained.append(name)
                if held:
                    live.with_state.append(name)
                    states[name] = _tame(held)
            settings = {key: _number(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": own})
    return {"state": states, "param_groups": groups}, live


# ---- the rest --------------------------------------------------------------------------------------------------------


def _state_of(one: Any, what: str) -> Any:
    """Return the state of a scheduler or a data loader, as it is now."""
    if isinstance(one, Mapping):
        return one
    if isinstance(one, list | tuple):
        return [_state_of(each, what) for each in one]
    if getattr(one, "_iterator", one) is None and hasattr(one, "next_iter_state"):
        # torchdata's StatefulDataLoader before its first batch: state_dict() would start workers and draw a seed
        return one.next_iter_state or {}
    if not callable(getattr(one, "state_dict", None)):
        raise UsageError(f"{what} is a {type(one).__name__} without state_dict(); pass its state as a mapping")
    return one.state_dict()


def _number(value: Any) -> Any:
    import torch

    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else _tame(value)


def _tame(value: Any, depth: int = DEPTH) -> Any:
    """Keep tensors and plain values, enter containers, and describe anything else in words: nothing needs importing."""
    import torch

    if isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if depth and isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): _tame(one, depth - 1) for key, one in value.items()}
    if depth and isinstance(value, list | tuple):
        return [_tame(one, depth - 1) for one in value]
    return jsonable(value)


def _holds_tensors(values: Iterable[Any]) -> bool:
    import torch

    return any(
        isinstance(one, torch.Tensor | Mapping) or (isinstance(one, list | tuple) and _holds_tensors(one))
        for one in values
    )
