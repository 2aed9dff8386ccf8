"""Check that parameters and optimizer state match, and that every rank and layer is present.

::

    fqn                  param   master   exp_avg   exp_avg_sq
    layers.0.wq            ✓       ✓         ✓          ✓
    layers.1.wq            ✓       ✓         ✓          ·      ← half of its state: lost
    layers.2.wq            ✓       ·         ·          ·      frozen, tied or never stepped: may be intended

Only names and shapes are compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise, product
from typing import Any

from workbench.analysis.verify.log import Examined
from workbench.analysis.verify.siblings import listed
from workbench.core.dtypes import ALL
from workbench.core.words import plural, some_of
from workbench.names.weights import parse

STATES = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum",
    "master",
    "step",
    "beta1_pow",
    "beta2_pow",
    "square_avg",
    "exp_inf",
    "sum",
    "grad_avg",
    "exp_avg_slow",
}
SHAPED = ("exp_avg", "exp_avg_sq", "master", "momentum")
MOST_HAVE = 0.75  #: share of the parameters with state above which a kind of state is expected for all
NAMED = 4  #: ranks or layers listed in one sentence
MAX_FOLDERS = 1000  #: maximum number of folders searched for files of ranks
FAMILY = 3  #: minimum number of similar tensors to detect an exception
FULL = {"float32", "float64"}
#: Files that every rank writes, by number.
_NUMBERED = re.compile(
    r"(.*/)?(rng_state|extra_state_rank|random_states|saved_signal|scaler_rank|dataloader_rank)(_)(\d+)(\.\w+)?"
)
BESIDE = {"buffer", "scale", "zero_point", "amax_history", "other"}  #: roles that some layers may lack


def check_state(subject: Examined) -> None:
    """Check the optimizer state of parameters, its shapes, and gaps in stacks of layers."""
    ckpt, catalog, log = subject.ckpt, subject.catalog, subject.log
    of: dict[str, dict[str, int]] = defaultdict(dict)
    for tensor, (fqn, role) in enumerate(zip(ckpt.fqns, ckpt.roles, strict=True)):
        if fqn is not None:
            of[fqn].setdefault(role, tensor)
    # DeepSpeed's universal folders also have fp32 copies of buffers and frozen parameters: not optimizer state
    moments, frozen = STATES - {"master"}, set(catalog.meta.get("frozen", ()))
    stateful = {
        fqn: roles
        for fqn, roles in of.items()
        if moments & roles.keys() or ({"master", "param"} <= roles.keys() and fqn not in frozen)
    }
    views = catalog.views
    viewed = set(zip(views.fqns or (), views.roles or (), strict=True)) if views is not None else set()
    params = [fqn for fqn, roles in of.items() if "param" in roles]
    _layers(subject, of)
    _types(subject, of)
    if not stateful:
        if not any(role in STATES for role in ckpt.roles):
            log.checked["optimizer"] = "no optimizer state is stored"
        return
    for role in sorted(STATES):
        lack = [fqn for fqn, roles in stateful.items() if role not in roles]
        if role == "master":
            lack = [f for f in lack if "param" not in of[f] or catalog.dtype_of(of[f]["param"]).name not in FULL]
        have = sum(role in roles for roles in stateful.values())
        if lack and have >= MOST_HAVE * (have + len(lack)):
            for fqn in lack:
                log.add(
                    "state.partner",
                    "warn",
                    fqn,
                    f"has {_words(stateful[fqn])} but no {role}, which {plural(have, 'other parameter', 'have')}",
                    "a part of the optimizer state was lost: a resume would start it from zero",
                    role=role,
                )
    orphans = [fqn for fqn in stateful if "param" not in of[fqn] and (fqn, "param") not in viewed]
    if orphans and len(orphans) <= (1 - MOST_HAVE) * len(stateful):
        for fqn in orphans:
            log.add(
                "state.orphan",
                "warn",
                fqn,
                f"has {_words(stateful[fqn])} but no stored weight",
                "a weight was lost, or it was renamed",
            )
    bare = [  # a tensor that cannot have a gradient is a buffer, whatever its name
        fqn
        for fqn in params
        if fqn not in stateful
        and catalog.dtype_of(of[fqn]["param"]).kind in "fc"
        and not any((fqn, role) in viewed for role in moments)
    ]
    numbered = any(f is None and r in SHAPED for f, r in zip(ckpt.fqns, ckpt.roles, strict=True))
    if bare and not numbered:  # numbered state may belong to them
        log.add(
            "state.none",
            "info",
            "",
            f"{len(bare):,} of {plural(len(params), 'tensor')} of the model have no optimizer state: {some_of(bare)}",
            "expected for buffers (which few formats mark) and for frozen, tied and unused parameters",
            parameters=bare[:100],
        )
    _shapes(subject, of)
    log.checked["optimizer"] = f"the state of {plural(len(stateful), 'parameter')} against its weight: kinds and shapes"


def check_ranks(subject: Examined) -> None:
    """Check files that every rank writes, and the grid of ranks in file names."""
    families: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    all_files = {*subject.catalog.files, *subject.place.files}
    for folder in subject.place.folders[:MAX_FOLDERS]:
        all_files |= {f"{folder}/{name}" for name, _ in listed(subject.place, folder)}
    for name in sorted(all_files):
        if match := _NUMBERED.fullmatch(name):
            families[match[1] or "", match[2] + match[3], match[5] or ""].add(int(match[4]))
    world = subject.ckpt.world_size
    for (folder, stem, suffix), present in families.items():
        # a file named after the number of ranks (PaddleNLP's rng_state_8.pth) contains all of them
        if present == {world} or (len(present) == 1 and 0 not in present):
            continue
        count = max(present) + 1 - len(present)
        if count:
            lost = list(islice((number for number in range(max(present)) if number not in present), 1000))
            more = f" and {count - NAMED:,} more" if count > NAMED else ""
            subject.log.add(
                "ranks.gap",
                "error",
                f"{folder}{stem}{lost[0]}{suffix}",
                f"is absent: ranks 0 to {max(present)} wrote such a file, except rank "
                f"{', '.join(map(str, lost[:NAMED]))}{more}",
                "restore them, or those ranks cannot resume as they were",
                lost=lost,
            )
    _grid(subject)


def _grid(subject: Examined) -> None:
    """Check that every combination of the coordinates in file names exists."""
    ranks = subject.ckpt.mesh.get("folders") or subject.ckpt.mesh.get("ranks") or {}
    kinds: dict[tuple[Any, ...], list[tuple[str, tuple[Any, ...]]]] = defaultdict(list)
    for name, place in ranks.items():
        if isinstance(place, Mapping) and not str(name).isdigit():
            axes = tuple(sorted(place))
            stem = re.sub(r"\d+", "#", str(name))
            kinds[stem, axes].append((str(name), tuple(place[axis] for axis in axes)))
    count = 0
    for (stem, axes), found in kinds.items():
        present = {place for _, place in found}
        seen = [sorted({place[k] for place in present}) for k in range(len(axes))]
        whole = math.prod(map(len, seen))
        count += len(found)
        if len(present) < whole:  # possibly by far, if names mislead: only the first missing ones are searched for
            absent = (place for place in product(*seen) if place not in present)
            lost = [dict(zip(axes, place, strict=True)) for place in islice(absent, 100)]
            subject.log.add(
                "ranks.grid",
                "error",
                stem,
                f"{whole - len(present)} of {whole} ranks have no such file, the first is {lost[0]}",
                "restore the files of those ranks",
                lost=lost,
            )
    if count:
        subject.log.checked["ranks"] = f"{plural(count, 'file')} named after ranks form a complete grid"


def _layers(subject: Examined, of: Mapping[str, Mapping[str, int]]) -> None:
    """Report stacks of similar layers in which a layer is absent or lacks tensors."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for fqn, roles in of.items():
        weight = parse(fqn)
        if weight.layer is not None and not roles.keys() <= BESIDE:
            stacks[f"{weight.stack}."][weight.layer].add(fqn.removeprefix(f"{weight.stack}.{weight.layer}."))
    for prefix, layers in stacks.items():
        [(common, times)] = Counter(frozenset(part) for part in layers.values()).most_common(1)
        # names without a dot are plain modules in a row, such as a Sequential whose activations store nothing
        substantial = len(common) >= 4 or sum("." in name for name in common) >= 2
        if substantial and times * 3 >= 2 * len(layers):
            _absent_layers(subject, prefix, sorted(layers))
            _thin_layers(subject, prefix, layers, common)


def _absent_layers(subject: Examined, prefix: str, present: list[int]) -> None:
    # pipeline stages that are separate checkpoints begin anywhere: only gaps inside count
    lost = present[-1] - present[0] + 1 - len(present)
    if not lost or _interleaved(present):
        return
    absent = list(islice((number for at, after in pairwise(present) for number in range(at + 1, after)), 1000))
    few = lost * 2 <= len(present)
    subject.log.add(
        "names.layer_gap",
        "warn" if few else "info",  # if most are absent, the others may have been selected on purpose
        f"{prefix}{absent[0]}",
        f"is absent: the stack has layers {present[0]} to {present[-1]} except {absent[:NAMED]}"
        + ("" if few else f"{' …' if lost > NAMED else ''}: {lost:,} of {lost + len(present):,} are absent"),
        "a file or a pipeline stage is missing, unless the model was pruned or its layers were selected on purpose",
        absent=absent,
    )


def _interleaved(layers: list[int]) -> bool:
    """Return whether these can be the layers of one rank of an interleaved pipeline: for example, 0–3 and 8–11."""
    cuts = [at for at in range(1, len(layers)) if layers[at] != layers[at - 1] + 1]
    runs = {stop - start for start, stop in pairwise([0, *cuts, len(layers)])}
    gaps = {layers[at] - layers[at - 1] - 1 for at in cuts}
    return len(runs) == len(gaps) == 1 and min(gaps) % min(runs) == 0


def _thin_layers(subject: Examined, prefix: str, layers: Mapping[int, set[str]], common: frozenset[str]) -> None:
    """Report layers that lack some tensors of the others and have no extra ones, as layers of another kind would."""
    thin = {n: sorted(common - own) for n, own in sorted(layers.items()) if own < common}
    full = layers.keys() - thin.keys()
    if len(thin) > max(1, len(layers) // 8) or len(full) < FAMILY:
        return  # many: this is the model's design
    unlisted = {key for one in subject.log.found if one.rule == "index.unlisted" for key in one.evidence["tensors"]}
    for number, lost in thin.items():
        # the first and the last may lack something: a norm before, or the link to the next layer
        if not min(full) < number < max(full) and 2 * len(lost) <= len(common):
            continue
        if unlisted.issuperset(f"{prefix}{number}.{name}" for name in lost):
            continue
        subject.log.add(
            "names.layer_part",
            "warn",
            f"{prefix}{number}",
            f"lacks {len(lost):,} of the {plural(len(common), 'tensor')} that the other layers have: {some_of(lost)}",
            "tensors were lost, unless the model was pruned on purpose",
            absent=lost[:1000],
        )


def _types(subject: Examined, of: Mapping[str, Mapping[str, int]]) -> None:
    """Report integer state, and tensors whose dtype differs from their counterparts in every other layer."""
    catalog, roles = subject.catalog, subject.ckpt.roles
    families: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor, key in enumerate(catalog.keys):
        families[re.sub(r"(?<![^._])\d+(?![^._])", "#", key), roles[tensor]].append(tensor)
        dtype = catalog.dtype_of(tensor)
        # 8-bit integers are quantised state
        if dtype.kind in "iu" and dtype.bits > 8 and roles[tensor] in SHAPED:
            subject.log.add(
                "state.dtype",
                "warn",
                key,
                f"is {roles[tensor]} but has dtype {dtype}",
                "the metadata has the wrong dtype, or the name means something else",
                dtype=dtype.name,
            )
        elif (
            dtype.kind in "iu"
            and dtype.bits > 8
            and roles[tensor] == "param"
            and key.endswith((".weight", ".bias"))
            and key.removesuffix(".weight") + ".scales" not in catalog.index  # MLX packs its weights in words
        ):
            subject.log.add(
                "names.dtype",
                "warn",
                key,
                f"is a weight but has dtype {dtype}",
                "a wrong dtype in a header turns the same bytes into other numbers",
                dtype=dtype.name,
            )
    for members in families.values():
        types = Counter(int(catalog.dtype[tensor]) for tensor in members)
        usual, count = types.most_common(1)[0]
        if len(types) == 1 or count < FAMILY or len(members) - count > len(members) / 4:
            continue
        for tensor in members:
            mine, theirs = catalog.dtype_of(tensor), ALL[usual]
            # with another size, it may have been excluded from quantisation on purpose
            if mine.code != usual and mine.bits == theirs.bits:
                subject.log.add(
                    "names.dtype",
                    "warn",
                    catalog.keys[tensor],
                    f"is {mine}, but its {plural(count, 'counterpart', 'are')} {theirs}",
                    "a wrong dtype in a header turns the same bytes into other numbers",
                    dtype=mine.name,
                    usual=theirs.name,
                )


def _shapes(subject: Examined, of: Mapping[str, Mapping[str, int]]) -> None:
    catalog = subject.catalog
    odd, equal = [], 0
    for fqn, roles in of.items():
        for role in SHAPED:
            if "param" in roles and role in roles:
                a, b = catalog.shape_of(roles["param"]), catalog.shape_of(roles[role])
                if a == b:
                    equal += 1
                elif catalog.numel[roles["param"]] != catalog.numel[roles[role]]:
                    odd.append((fqn, role, a, b))
    if len(odd) <= (1 - MOST_HAVE) * (equal + len(odd)):
        for fqn, role, a, b in odd:
            subject.log.add(
                "state.shape",
                "warn",
                fqn,
                f"has shape {list(a)}, but its {role} has {list(b)}",
                "one of the two is from another model",
                role=role,
                param=list(a),
                state=list(b),
            )


def _words(roles: Iterable[str]) -> str:
    return ", ".join(sorted(STATES & set(roles)))
