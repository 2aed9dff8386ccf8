"""Compare everything that is stored beside the tensors with its echo, whatever its name.

::

    scaler._growth_tracker        7 → 0                      the loss scale's          D8
    optimizer.state[3].beta1_w   .97 → 0                     an optimizer's counter    B2
    trainer.total_flos         1e18 → 0                      nobody's: a remark
    shuffle.bin                 differs from byte 96 on      a file that no reader opens

Values that other rules compare (counters, settings, schedules, data) and that these report are not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from workbench.analysis.diff import diff
from workbench.analysis.diff_objects import ObjectChange, object_changes
from workbench.analysis.echo_file import INSIDE
from workbench.core.source import Source
from workbench.core.words import plural
from workbench.doctor.facts.counted import counts, in_epochs
from workbench.doctor.facts.evidence import Pair
from workbench.doctor.facts.flat import SWITCHES
from workbench.doctor.ledger.sign import Rule, Sign, register
from workbench.errors import WorkbenchError
from workbench.tensor import LazyTensor

R17 = Rule(
    "R17", "a value beside the tensors changed in the load", ("D8", "C1", "C6", "B2", "F4"), "echo",
    "a save right after the load holds what was loaded", "exact; files that no reader opens: byte by byte",
    "round trip", "warn", "values that a launch sets itself: times, paths, versions",
    "restore what is named, if it was not intended"
)  # fmt: skip
P52 = Rule(
    "P52", "a setting beside the tensors changed", ("H1", "H2"), "pair",
    "arguments and configs that are stored with a checkpoint do not change by themselves", "exact",
    "PEFT adapter_config.json, transformers config.json and training_args.bin", "warn",
    "settings that were changed on purpose", "restore what is named, if it was not intended"
)  # fmt: skip
register(R17, P52)
LATER = {R17.id: "the echo", P52.id: "the later checkpoint"}  #: rule → words for the second checkpoint

#: Topic → words in a path, and the causes if a value of it changed; the first that fits.
TOPICS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = (
    ("groups", re.compile(r"param_groups"), ("H1",)),
    (
        "model",
        re.compile(
            r"(?:^|[._/])(?:rope_theta|rope_scaling|hidden_size|num_(?:attention_heads|key_value_heads|hidden_layers)|head_dim"
            r"|(?:rms|layer)_norm_eps\w*|layer_norm_epsilon|hidden_act|tie_word_embeddings)$"
        ),
        ("H2",),
    ),
    (
        "arguments",
        re.compile(r"(?:^|[._/])\w*(?:args|config)(?:$|[._/\[])|(?:^|[._/])num_(?:replicas|ranks)$"),
        ("H1",),
    ),
    ("generators", re.compile(r"rng|random|generator"), ("C8",)),  # in many programs they advance in every launch
    ("state", re.compile(r"optim.*\bstate\b|^state\b"), ("B2", "B11")),
    ("loss scale", re.compile(r"scaler|loss_scale|growth_tracker"), ("D8",)),
    ("schedule", re.compile(r"sched"), ("C1", "C3", "C4")),
    ("seed", re.compile(r"(?:loader|sampler|data).*seed"), ("C7",)),
    ("data", re.compile(r"loader|sampler|dataset|consumed|(?:^|[._/])workers?(?:$|[._/\[])"), ("C6",)),
    ("tensors", re.compile(r"^$"), ("A5", "A2")),
    ("moments", re.compile(r"^$"), ("B1", "B6")),
    ("average", re.compile(r"(?:^|[._])(?:ema|swa|averag\w*|shadow)(?:$|[._])"), ("F4",)),
)
UNCOMPARED = SWITCHES | {"params", "param_names"}  #: fields of param groups that do not change what an update does
REMARKS = ("other", "generators", "arguments")  #: topics whose change may mean nothing
#: Values that identify a launch or a save, or that are measured.
_PASSING = re.compile(
    r"(?:^|[._/])(?:\w*time\w*|\w*path|\w*dir|\w*file\w*|host\w*|\w*version|should_\w+)(?:$|[._/\[])"
    r"|(?:^|[./])(?:\w+_)?(?:clock|date|rank|device|verbose|uuid|pid|run_id|job_id|save_log)(?:$|[./\[])"
)
#: Paths that are not of this launch alone: what is trained on.
_INPUTS = re.compile(r"(?:data|corpus|blend|tokenizer|vocab)\w*(?:$|\[)")
#: Counts among arguments: Megatron's ``args.iteration`` and ``args.consumed_train_samples``.
_COUNTS = re.compile(
    r"(?:^|[._])(?:(?:cur\w*_)?iteration|(?:global_)?step|epoch|consumed\w*|skipped\w*|num_floating\w*)$"
)
_OTHERS = re.compile(r"manifest|echo|tfevents|\.(?:log|lock|tmp|md)$")  #: files that no trainer loads
SETTINGS = ("model", "arguments", "seed")  #: topics that no update changes
#: Values beside an average that no update changes.
_OF_AVERAGES = re.compile(r"(?:^|[._])(?:(?:min_|max_)?decay|inv_gamma|power|update_after_step|update_every)$")
OF_TENSORS = ("tensors", "moments")  #: topics of tensors in files that no reader opens
#: Kind of an R11 sign → topic. Other rules → topic: they compare the same values.
_FACTS = {
    "schedule": "schedule",
    "loss_scale": "loss scale",
    "loader": "data",
    "consumed_samples": "data",
    "generators": "generators",
    "drawn": "generators",
}
_RULES = {"R14": ("groups",), "R12": ("groups", "arguments"), "P37": ("schedule",), "N10": ("seed",), "R10": ("state",)}
CAME_OR_WENT = ("added", "removed")  #: kinds of change that other versions of a program leave too
SHOWN = 4  #: values in a message
BLOCK = 1 << 20  #: bytes of two files that are compared at a time


def values_kept(pair: Pair, signs: Iterable[Sign]) -> list[Sign] | str:
    """Compare all values beside tensors, and all files that no reader opens (R17).

    Args:
        signs: those of this pair so far; their topics are not reported again.
    """
    found = _changed(pair, signs, LATER[R17.id])
    return found if isinstance(found, str) else [_sign(R17, topic, off) for topic, off in found.items()]


def settings_stay(pair: Pair, signs: Iterable[Sign]) -> list[Sign] | str:
    """Compare the settings in objects and further files of two checkpoints (P52); arguments as :func:`values_kept`."""
    found = _changed(pair, signs, LATER[P52.id])
    if isinstance(found, str):
        return found
    signs = []
    averaged = {source: one for source, one in found.get("average", {}).items() if _OF_AVERAGES.search(source)}
    found["arguments"] = {**found.get("arguments", {}), **averaged}
    for topic in SETTINGS:
        off = {source: one for source, one in found.get(topic, {}).items() if not _COUNTS.search(source.lower())}
        ends = pair.a.facts, pair.b.facts
        off = {source: one for source, one in off.items() if not counts(source.lower(), one.before, one.after, *ends)}
        if off:
            sign = _sign(P52, topic, off)
            epochs = in_epochs(pair.a.counts, pair.b.counts).values()
            anew = topic == "seed" and (not epochs or any(then[0] != now[0] for then, now in epochs))
            signs.append(replace(sign, severity="info") if anew else sign)  # an epoch may have its own
    return signs


def _changed(pair: Pair, signs: Iterable[Sign], later: str) -> dict[str, dict[str, ObjectChange]] | str:
    """Return topic → path → change, or why nothing can be compared; ``later``: words for the second checkpoint."""
    a, b = pair.stored.ckpt, pair.b.ckpt
    if pair.mapped or a.format != b.format:
        return "the two checkpoints are stored in different formats"
    known = set(_known(signs))
    part = b.place.file is None and b.place.exists(INSIDE)  # `wb.echo` records a part of what a trainer saves
    found: dict[str, dict[str, ObjectChange]] = {}
    for file, change in chain((("", one) for one in object_changes(a.objects, b.objects)), _files(pair, later)):
        source = file + change.path
        topic = change.kind if change.kind in OF_TENSORS else topic_of(source.lower())
        name = re.sub(r"\[[^\]]*\]", "", change.path).rpartition(".")[2]
        if name == "_step_count":  # torch only warns by it
            topic = "other"
        passing = _PASSING.search(change.path.lower()) and not _INPUTS.search(change.path.lower())
        passing = passing or (topic == "groups" and name in UNCOMPARED)
        came = change.kind in CAME_OR_WENT
        same = came and (part or {} in (change.before, change.after))
        same |= not came and change.before is not None and change.before == change.after  # a list for a tuple
        if topic not in known and not passing and not same and change.kind not in ("unreadable", "unlooked", "entries"):
            found.setdefault(topic, {})[source] = change
    return found


def _files(pair: Pair, later: str) -> Iterator[tuple[str, ObjectChange]]:
    """Compare files that no reader opens: as checkpoints, as JSON, or else byte by byte; ``later``: words for B."""
    a, b = pair.stored, pair.b
    if a.loose is None or b.loose is None:
        return
    for name in sorted({*a.loose, *b.loose}):
        if _OTHERS.search(name):
            continue
        if name not in a.loose or name not in b.loose:
            yield name, ObjectChange("", "changed", f"is in {'before' if name in a.loose else later} only")
            continue
        if name not in a.opened or name not in b.opened:  # the verdict counts them
            if differing := _sizes(a.size(name), b.size(name)):
                yield name, ObjectChange("", "changed", differing)
            continue
        one, two = a.beside.get(name), b.beside.get(name)
        if one is not None and two is not None:
            yield from ((f"{name}/", change) for change in object_changes(one.objects, two.objects))
            compared = diff(one, two, patterns=False, evidence="none")
            for keys, kind, side in ((compared.removed, "removed", "before"), (compared.added, "added", later)):
                yield from ((f"{name}/{key}", ObjectChange("", kind, f"is in {side} only")) for key in keys)
            for row in compared.rows:
                if row.status in ("changed", "type", "shape"):
                    source = f"{name}/{row.key_b}"
                    topic = topic_of(source.lower(), row.dtype_b)
                    kind = {"other": "tensors", "state": "moments"}.get(topic, "changed")
                    yield source, _tensor_change(kind, one[row.key_a or row.key_b], two[row.key_b])
            continue
        try:
            if name.endswith(".json"):
                values = [{"": side.ckpt.place.read_json(name)} for side in (a, b)]
                yield from ((name, change) for change in object_changes(*values))
                continue
        except WorkbenchError:
            pass  # byte by byte
        try:
            where = _first_difference(*(side.ckpt.place.source(name) for side in (a, b)))
        except WorkbenchError as error:
            yield name, ObjectChange("", "unreadable", str(error))
        else:
            if where:
                yield name, ObjectChange("", "changed", where)


def _tensor_change(kind: str, one: LazyTensor, two: LazyTensor) -> ObjectChange:
    """Return the change of a tensor, with the values if it is a single number."""
    if one.numel() == two.numel() == 1:
        with suppress(WorkbenchError):  # of a type that numpy does not have
            old, new = (side.numpy().reshape(-1)[0].item() for side in (one, two))
            return ObjectChange("", kind, f"{old} → {new}", old, new)
    return ObjectChange("", kind, "is another tensor")


def _first_difference(a: Source, b: Source) -> str:
    """Return where two files differ, in words; empty if they are equal."""
    if differing := _sizes(a.size, b.size):
        return differing
    for start in range(0, a.size, BLOCK):
        stop = min(start + BLOCK, a.size)
        one, two = (side.read(start, stop) for side in (a, b))
        if not np.array_equal(one, two):
            return f"differs from byte {start + int(np.flatnonzero(one != two)[0]):,} on"
    return ""


def _sizes(before: int, after: int) -> str:
    return f"has {plural(before, 'byte')} → {plural(after, 'byte')}" if before != after else ""


def _known(signs: Iterable[Sign]) -> Iterator[str]:
    for sign in signs:
        if sign.rule == "R11":
            yield _FACTS.get(str(sign.evidence.get("kind")), "")
        yield from _RULES.get(sign.rule, ())


def topic_of(source: str, dtype: str = "") -> str:
    """Return what a value, or a tensor of that type, belongs to by the words of its path; ``other`` if unknown."""
    found = next((topic for topic, words, _ in TOPICS if words.search(source)), "other")
    return "other" if found == "generators" and "float" in dtype else found  # a network that generates


def causes_of_topic(topic: str) -> tuple[str, ...]:
    return next((causes for one, _, causes in TOPICS if one == topic), ("H1",))


def _sign(rule: Rule, topic: str, off: dict[str, ObjectChange]) -> Sign:
    causes = causes_of_topic(topic)
    if topic == "schedule":
        causes = (_of_schedule(off), *causes)
    if topic == "average" and all(isinstance(change.after, float) for change in off.values()):
        causes = ("H1", *causes)  # such as its decay; what an average counts are integers
    words_of = {source: _text(change, LATER[rule.id]) for source, change in off.items()}
    more = f" and {len(off) - SHOWN:,} more" if len(off) > SHOWN else ""
    listed = ", ".join(f"{source} {text}" for source, text in list(words_of.items())[:SHOWN]) + more
    words = f"{plural(len(off), 'stored value')} changed: {listed}"
    for side in ("before", LATER[rule.id]):
        if all(text.startswith(one := f"is in {side} only") for text in words_of.values()):
            words = f"{plural(len(off), 'stored value', 'are')} in {side} only: {listed.replace(f' {one}', '')}"
    evidence: dict[str, Any] = {"kind": topic, "changed": dict(list(words_of.items())[:100])}
    both = ((source, change.before, change.after) for source, change in off.items())
    evidence["fell"] = [path for path, old, new in both if isinstance(old, int) and isinstance(new, int) and new < old]
    remark = topic in REMARKS or all(map(_by_version, off.values()))
    severity = "info" if remark else "warn"
    return rule.sign(words, evidence, hit=len(off), severity=severity, causes=tuple(dict.fromkeys(causes)))


def _text(change: ObjectChange, later: str) -> str:
    for words, side in (("only in a", "before"), ("only in b", later)):
        if change.kind in CAME_OR_WENT and change.text.startswith(words):
            return f"is in {side} only{change.text.removeprefix(words)}"
    text = re.sub(r"\d+\.\d{7,}(?:e[-+]?\d+)?", lambda number: f"{float(number[0]):.6g}", change.text)
    old, arrow, new = text.partition(" → ")
    return change.text if arrow and old == new else text


def _by_version(change: ObjectChange) -> bool:
    """Return whether another version of the program may have added or left out a value, except a flag that is set."""
    return change.kind in CAME_OR_WENT and (change.before or change.after) is not True


def _of_schedule(off: Mapping[str, ObjectChange]) -> str:
    """Return the cause for values of a schedule: another curve, a position, another length."""
    if any("lr" in name.rpartition(".")[2] for name in off):
        return "C2"
    name, change = next(iter(off.items()))
    if isinstance(change.before, int) and isinstance(change.after, int) and re.search(r"count|epoch|step|cur", name):
        return "C1" if change.after < change.before else "C3"
    return "C4"
