"""Build a :class:`TrainingState` from the objects of a checkpoint of any format.

::

    objects ──leaves──▶ (scheduler, last_epoch) 240 ──the tables below──▶  step, lr, betas, schedule, args …
    step tensors ─────────────────────────────────────────────────────▶  the optimizer's counters
    the folder's name, the tracker beside it ─────────────────────────▶  steps in names

A table lists the names under which trainers store a fact; a fact that no table finds stays unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench import formats
from workbench.checkpoint import Checkpoint
from workbench.core.source import no_descriptor
from workbench.doctor.facts.flat import ObjectLeaf, leaves
from workbench.doctor.facts.generators import generators
from workbench.doctor.facts.groups import Names, read_groups
from workbench.doctor.facts.numbers import betas_of, flag, number, step_of, whole
from workbench.doctor.facts.optimizer import Optimizer, recognise, together
from workbench.doctor.facts.schedule import read_schedule
from workbench.doctor.facts.state import NAME, PARTS, Group, Statement, TrainingState
from workbench.doctor.facts.steps import read_steps
from workbench.errors import WorkbenchError
from workbench.names.steps import parse_name
from workbench.runs import TRACKER_LIMIT, TRACKERS

#: Fact → its meaning.
FACTS = {
    "step": "updates done, as the trainer's state counts",
    "folder_step": "the step in the folder's or file's name",
    "tracker_step": "the step that the run's tracker names",
    "lr": "learning rate of the decaying group, as the optimizer stores it",
    "betas": "β1 and β2 of all groups",
    "eps": "ε of all groups",
    "weight_decay": "weight decay of the groups that have any",
    "decoupled": "AdamW (true) or Adam with L2 (false)",
    "amsgrad": "whether the largest second moment is kept",
    "clip": "bound of the global gradient norm",
    "consumed_samples": "samples that the run has seen",
    "global_batch": "samples per update",
    "loader": "position of the data loader, in its own units",
    "epoch": "epoch of the data",
    "data_seed": "seed of the data's order",
    "loss_scale": "scale of an fp16 gradient scaler",
    "skipped_steps": "updates that the scaler skipped",
    "world_size": "ranks of the job",
    "accumulation": "micro-batches per update",
    "tied": "whether embedding and head are one tensor",
    "vocab_size": "tokens of the vocabulary",
    "ds_schedule": "DeepSpeed's scheduler, as its config states it",
    "reset": "an argument that requests not to load the optimizer's state",
}
_STEP = ("step", "global_step", "global_steps", "iteration", "iter_num")
#: Scalars among the tensors: torchtitan's train_state, and tensors at the top level of ``dcp.save``.
_STEP_TENSORS = ("train_state.step", "step", "global_step", "trainer.step", "app.train_state.step")
_EPOCH = ("epoch", "current_epoch")
_ARGS = re.compile(r"args|config|hyper_parameters|hparams|\w{1,40}_(?:args|config)")
_MODEL = {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rope_theta"}
_NO_STATE = ("sched", "optim", "args", "config", "callback", "loader", "sampler", "history", "beta_pow", "dataset")
#: Names of a data loader's position: torchdata's StatefulDataLoader, plain counters.
_POSITION = (
    "batches", "num_batches", "_num_yielded", "_num_batches_fetched", "samples_yielded", "batches_yielded",
    "samples_seen", "batches_seen", "sample_idx", "_snapshot_step", "batch_idx", "position",
)  # fmt: skip
#: Fact → names of arguments.
_FROM_ARGS = {
    "global_batch": ("global_batch_size", "train_batch_size"),
    "clip": ("clip_grad", "grad_clip", "max_grad_norm", "gradient_clipping"),
    "accumulation": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accumulation_steps",
        "grad_accum_steps", "accumulation_steps", "accum_steps", "accum_iter",
    ),
    "world_size": ("world_size",),
    "data_seed": ("data_seed",),
    "tied": ("tie_word_embeddings",),
    "vocab_size": ("vocab_size",),
    "reset": ("no_load_optim", "reset_optimizer", "reset_optimizer_states", "finetune"),
}  # fmt: skip
#: Fact → parser of its argument; all others are flags.
_READ: Mapping[str, Callable[[Any], Any]] = {
    "global_batch": step_of,
    "accumulation": step_of,
    "world_size": step_of,
    "data_seed": whole,
    "vocab_size": step_of,
    "clip": number,
}
COUNTED = 10_000  #: most integers that are compared


def gather(
    ckpt: Checkpoint,
    *,
    betas: Sequence[float] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
) -> TrainingState:
    """Collect the facts of a checkpoint; arguments override them. Only counters and generators are read as payloads."""
    found, _ = leaves(ckpt.objects)
    names, args = Names(ckpt, found), _arguments(found)
    called = _called(args)
    groups = read_groups(found, names, called)
    statements: dict[str, list[Statement]] = {}
    _steps(statements, found, ckpt)
    _optimizer(statements, groups, args)
    _data(statements, found)
    for fact, words in _FROM_ARGS.items():
        for name in words:
            value = _READ.get(fact, flag)(args[name].value) if name in args else None
            if value is not None:
                _say(statements, fact, value, args[name].source)
    batch = step_of(args["batch_size"].value) if "batch_size" in args else None
    if "global_batch" not in statements and batch is not None and "accumulation" not in statements:
        _say(statements, "global_batch", batch, args["batch_size"].source)
    if ckpt.world_size is not None:
        _say(statements, "world_size", ckpt.world_size, "the files", first=True)
    _deepspeed(statements, found, args)
    for scale in scales_of(found):
        _say(statements, "loss_scale", scale.value, scale.source)
    state = TrainingState(
        {fact: tuple(held) for fact, held in statements.items()},
        groups,
        read_schedule(found),
        read_steps(ckpt, groups, names, found),
        args,
        {n: args[n] for n in args if n in _MODEL},
        generators(ckpt),
        _wrote(groups, names, called),
        {name: frozenset(words) for name, words in names.state.items()},
        counts_of(found),
        _parts(found, names),
    )
    return state.given(betas=betas, lr=lr, weight_decay=weight_decay)


def counts_of(found: Iterable[ObjectLeaf]) -> dict[str, int]:
    """Return path → integer, of everything but arguments and the optimizer's counters of updates."""
    counts: dict[str, int] = {}
    for leaf in found:
        if (
            _of_arguments(leaf)
            or ("state" in leaf.path[1:-1] and leaf.name == "step")
            or not _whole(leaf.value)
            or len(counts) >= COUNTED
        ):
            continue
        counts.setdefault(".".join(leaf.path), int(leaf.value))
    return counts


def _parts(found: Iterable[ObjectLeaf], names: Names) -> frozenset[str]:
    held = (leaf for leaf in found if leaf.value != () and not _of_arguments(leaf))  # an empty list holds no schedule
    words = {part.lower() for leaf in held for part in leaf.path}
    stored = {part for part, some in PARTS.items() if any(one in word for one in some for word in words)}
    return frozenset(stored | ({"average"} if "ema" in names.roles else set()))


def _say(statements: dict[str, list[Statement]], fact: str, value: Any, source: str, *, first: bool = False) -> None:
    statements.setdefault(fact, []).insert(0 if first else len(statements.get(fact, ())), Statement(value, source))


def _arguments(found: Iterable[ObjectLeaf]) -> dict[str, Statement]:
    """Return the trainer's arguments under their own names; nested ones also under their path."""
    args: dict[str, Statement] = {}
    for leaf in found:
        if (depth := _of_arguments(leaf)) and len(leaf.path) > depth:
            args.setdefault(".".join(leaf.path[depth:]), Statement(leaf.value, leaf.source))
    return args


def _of_arguments(leaf: ObjectLeaf) -> int:
    """Return how many parts of a path lead to the arguments that hold the value; 0 if none do.

    They are at the top level, or the state of a callback.
    """
    held = 2 if leaf.path[0] == "callbacks" and len(leaf.path) > 2 else 1
    return held if _ARGS.fullmatch(leaf.path[held - 1]) else 0


def _called(args: Mapping[str, Statement]) -> str:
    """Return the optimizer's name in the arguments."""
    stated = (args[name].value for name in ("optimizer", "optim", "optimizer.type", "optimizer_type") if name in args)
    return next((value[:40] for value in stated if isinstance(value, str)), "")


def _wrote(groups: Sequence[Group], names: Names, called: str) -> Optimizer:
    filled = [group.optimizer for group in groups if group.count != 0]
    if filled:
        return together(filled)
    fields = groups[0].settings if groups else {}
    return recognise(fields, {word for words in names.state.values() for word in words}, called)


def _steps(statements: dict[str, list[Statement]], found: Iterable[ObjectLeaf], ckpt: Checkpoint) -> None:
    for leaf in found:
        if leaf.name not in _STEP or len(leaf.path) > 2 or not _whole(leaf.value):
            continue
        if not any(word in part.lower() for part in leaf.path[:-1] for word in _NO_STATE):
            _say(statements, "step", leaf.value, leaf.source)
    for key in _STEP_TENSORS:
        if key in ckpt.catalog.index and ckpt[key].numel() == 1 and ckpt[key].element.kind in "iu":
            try:
                _say(statements, "step", int(ckpt[key].numpy().reshape(-1)[0]), key)
            except WorkbenchError:  # verify reports the reason
                continue
    name = os.path.basename(os.path.abspath(ckpt.path))
    numbered = formats.record(ckpt.format).numbered_saves
    named = None if numbered else parse_name(name)
    if named and named.unit in ("step", "save"):
        if named.unit == "save" and named.number in _epochs(found) and "step" not in statements:
            return _trackers(statements, ckpt)  # it is numbered by epochs
        _say(statements, "folder_step", named.number, f"the name {name!r}")
    if "step" not in statements and step_of(ckpt.step) is not None and not numbered:
        by_name = named is not None and named.number == ckpt.step
        if not (named and by_name and named.unit == "epoch"):
            _say(statements, "step", ckpt.step, NAME if by_name else "the reader")
    _trackers(statements, ckpt)


def _epochs(found: Iterable[ObjectLeaf]) -> set[int]:
    stated = (step_of(leaf.value) for leaf in found if leaf.name in _EPOCH and len(leaf.path) <= 3)
    return {epoch for epoch in stated if epoch is not None}


def _trackers(statements: dict[str, list[Statement]], ckpt: Checkpoint) -> None:
    parent = os.path.dirname(os.path.abspath(ckpt.path))
    for tracker in TRACKERS:
        value = _tracker(os.path.join(parent, tracker))
        if value is not None:
            _say(statements, "tracker_step", value, f"{tracker!r} beside it")


def _tracker(path: str) -> int | None:
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(TRACKER_LIMIT).decode("utf-8", "replace").strip()
    except OSError as error:  # no permission: the tracker stays unknown
        no_descriptor(error)
        return None
    named = parse_name(text)
    return int(text) if text.isdecimal() and len(text) < 19 else named.number if named else None


def _optimizer(statements: dict[str, list[Statement]], groups: Sequence[Group], args: Mapping[str, Statement]) -> None:
    decaying = tuple(group for group in groups if group.weight_decay)
    for fact, chosen in (("lr", decaying or groups), ("betas", groups), ("eps", groups), ("weight_decay", decaying)):
        values = {getattr(group, fact): group.source for group in chosen[::-1] if getattr(group, fact) is not None}
        if len(values) == 1:
            ((value, source),) = values.items()
            _say(statements, fact, value, f"{source}.{fact}")
    for fact in ("decoupled", "amsgrad"):
        flags = {getattr(group, fact): group.source for group in groups[::-1] if getattr(group, fact) is not None}
        if len(flags) == 1:
            ((value, source),) = flags.items()
            _say(statements, fact, value, source)
    pairs = (("adam_beta1", "adam_beta2"), ("beta1", "beta2"))
    for one, two in pairs:
        both = betas_of(tuple(args[name].value if name in args else None for name in (one, two)))
        if both is not None:
            _say(statements, "betas", both, args[one].source)
    for fact, names in (("eps", ("adam_eps", "adam_epsilon")), ("weight_decay", ("weight_decay",))):
        for name in names:
            value = number(args[name].value) if name in args else None
            if value is not None and value >= 0:
                _say(statements, fact, value, args[name].source)
    if "decoupled_weight_decay" in args and isinstance(args["decoupled_weight_decay"].value, bool):
        _say(statements, "decoupled", args["decoupled_weight_decay"].value, args["decoupled_weight_decay"].source)
    for name in ("optimizer", "optim", "optimizer.type"):
        word = str(args[name].value).lower() if name in args else ""
        if "adamw" in word:
            _say(statements, "decoupled", True, args[name].source)
        elif word == "adam" and name == "optimizer" and "weight_decay" in args and "decoupled" not in statements:
            # Megatron calls AdamW "adam" and states `decoupled_weight_decay`; DeepSpeed's Adam is AdamW by default
            _say(statements, "decoupled", False, args[name].source)


def _data(statements: dict[str, list[Statement]], found: Iterable[ObjectLeaf]) -> None:
    for leaf in found:
        inside = any("loader" in part.lower() or "sampler" in part.lower() for part in leaf.path[:-1])
        if leaf.name in ("consumed_samples", "consumed_train_samples", "global_samples") and _whole(leaf.value):
            _say(statements, "consumed_samples", leaf.value, leaf.source)
        elif inside and leaf.name in _POSITION and _whole(leaf.value):
            _say(statements, "loader", leaf.value, leaf.source)
        elif inside and leaf.name in ("seed", "data_seed") and _whole(leaf.value):
            _say(statements, "data_seed", leaf.value, leaf.source, first=True)
        elif leaf.name in _EPOCH and number(leaf.value) is not None and len(leaf.path) <= 3:
            _say(statements, "epoch", leaf.value, leaf.source)


def _deepspeed(
    statements: dict[str, list[Statement]], found: Iterable[ObjectLeaf], args: Mapping[str, Statement]
) -> None:
    for leaf in found:
        if leaf.path == ("skipped_steps",) and _whole(leaf.value):
            _say(statements, "skipped_steps", leaf.value, leaf.source)
    kind = args.get("scheduler.type")
    if kind is not None:
        head = "scheduler.params."
        params = {name[len(head) :]: one.value for name, one in args.items() if name.startswith(head)}
        lr = args.get("optimizer.params.lr")
        stated = {"type": kind.value, "params": params, "lr": None if lr is None else lr.value}
        _say(statements, "ds_schedule", stated, "ds_config.scheduler")
    for name, fact in (("lr", ""), ("betas", "betas"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        one = args.get(f"optimizer.params.{name}")
        value = None if one is None or not fact else betas_of(one.value) if fact == "betas" else number(one.value)
        if one is not None and value is not None:
            _say(statements, fact, value, one.source)


def scales_of(found: Sequence[ObjectLeaf]) -> Iterator[Statement]:
    """Yield the scales of fp16 gradient scalers."""
    # torch's GradScaler has both, under whatever name: in Lightning, that of its plug-in
    scalers = {leaf.path[:-1] for leaf in found if leaf.name == "growth_factor"}
    for leaf in found:
        words = ".".join(leaf.path).lower()
        named = "scaler" in words or "loss_scale" in words or leaf.path[:-1] in scalers
        if named and leaf.name in ("scale", "_scale", "cur_scale", "loss_scale"):
            value = leaf.value[0] if isinstance(leaf.value, tuple) and len(leaf.value) == 1 else leaf.value
            if (scale := number(value)) is not None:
                yield Statement(scale, leaf.source)


def _whole(value: Any) -> bool:
    return step_of(value) is not None
