"""Rules on the names, shapes and sizes of two checkpoints: an echo or a later one must hold the same tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from workbench.core.arrays import Array, Ints
from workbench.core.words import plural, some_of
from workbench.doctor.facts.evidence import Pair, State, stripped
from workbench.doctor.ledger.roles import AVERAGES, FIRST, MASTERS, MOMENTS, SECOND, STATE, quantity
from workbench.doctor.ledger.sign import Inapplicable, Rule, Sign, agreeing, register
from workbench.doctor.rules.stated import NAMED
from workbench.names.weights import kinds
from workbench.tensor import LazyTensor

SAME_NAMES, RENAMED = 0.5, 0.95  #: shares of common names: below as stored, above without prefixes (catalogue A1)

R01 = Rule(
    "R01", "tensors appeared or vanished between load and save", ("A1", "A2", "A4", "F2", "B1"), "echo",
    "a save right after the load holds the same tensors", "exact", "round trip", "error",
    "another wrapper or format around the same weights", "list the keys that were not read; load with strict=True"
)  # fmt: skip
P02 = Rule(
    "P02", "parameters appeared or vanished", ("F2", "A4", "A2"), "pair", "a resumed run trains the same parameters",
    "exact", "structure", "error", "layers or adapters added on purpose (info if the tying is declared)",
    "compare the models' definitions"
)  # fmt: skip
N1 = Rule(
    "N1", "weights were renamed, not lost", ("A1",), "pair", "two saves of one run use the same names",
    "under 50 % of names are shared as stored, over 95 % without prefixes", "catalogue A1", "warn",
    "a wrapper (compile, DDP) that was switched on or off and is handled by the loader",
    "map the prefix, and load with strict=True"
)  # fmt: skip
N3 = Rule(
    "N3", "the checkpoint grew or shrank", ("A4", "D7", "D4"), "pair",
    "two saves of one run have equal bytes by role", "any difference", "diffusers 6366", "warn",
    "tensors added on purpose; moments created after the first save", "find the new tensors or types"
)  # fmt: skip
N30 = Rule(
    "N30", "another model", ("H2",), "pair", "a resumed run trains the same model",
    "a tenth of the parameters in common", "names and shapes", "warn", "names that no known convention maps",
    "pass two checkpoints of one run"
)  # fmt: skip
N4 = Rule(
    "N4", "buffers are gone", ("A5",), "pair", "buffers that are saved once are saved again", "exact",
    "FlagScale 411", "warn", "persistent=False on purpose", "register the buffer as persistent, and restore it"
)  # fmt: skip
R18 = Rule(
    "R18", "rows of a resized table are at other places", ("F7", "E1"), "echo",
    "loading into a table with more or fewer rows keeps each row at its place", "exact, of up to 64 rows", "round trip",
    "error", "another tokenizer, which gives the tokens other numbers", "copy the rows to the numbers of their tokens"
)  # fmt: skip
register(R01, R18, P02, N1, N3, N4, N30)
LOOKED_AT, SEARCHED = 64, 8  #: rows of a table that are compared at their place; of these, looked for at other places
FARTHEST = 4096  #: rows by which they may have moved


def same_tensors(pair: Pair) -> list[Sign] | str:
    if pair.mapped or pair.a.ckpt.format != pair.b.ckpt.format:
        return "the two use different names or shardings, so the expected set of tensors is not exact"
    a, b = ({key: shape for key, shape in _meant(s).items() if pair.comparable(key[0])} for s in (pair.a, pair.b))
    gone = [key for key in a if key not in b]
    new = [key for key in b if key not in a and (key[1] in _STEPPED or key[1] in AVERAGES)]
    stateless = {fqn for fqn, role in gone if quantity(role) in (*MOMENTS, STATE)}
    if len(stateless) <= pair.left_out:  # the optimizer does not hold them (R12)
        gone = [key for key in gone if key[0] not in stateless or key[1] in ("param", "master", "buffer")]
    if pair.crossed or pair.cut_anew:  # whose the numbered state is, is unknown
        gone, new = ([key for key in keys if quantity(key[1]) not in (*MOMENTS, STATE)] for keys in (gone, new))
    shaped = [key for key in a if key in b and a[key] != b[key]]
    found = []
    for words, keys in (("are gone", gone), ("are new", new), ("have another shape", shaped)):
        if keys:
            roles = _roles(keys)
            many = plural(len(keys), "tensor")
            what = many if words == "are new" else f"{len(keys):,} of {plural(len(a), 'tensor')}"
            message = f"{what} {agreeing(len(keys), words)}: {roles}"
            names = list(dict.fromkeys(fqn for fqn, _ in keys))[:NAMED]
            causes = causes_of(role for _, role in keys) if words != "are new" else ()
            if words == "are gone" and len(keys) < len(a) / 2 and {role for _, role in keys} <= {"param", "master"}:
                causes = ("A2",)
            if words == "have another shape" and "param" in {role for _, role in keys}:
                causes = ("H2",)  # of a vocabulary: F7
            evidence = {"kind": words, "roles": roles}
            # an average may be left out on purpose, and an optimizer may make some of its tensors anew
            held = {quantity(role) for _, role in keys}
            grave = "warn" if held <= {*AVERAGES, STATE} else None
            if words == "have another shape" and held == {"buffer"}:
                grave = "warn"  # such as a queue that was made longer
            if words == "are new" and held <= set(AVERAGES):  # begun now, or in a file that was not copied before
                grave = "info"
            found.append(R01.sign(message, evidence, names, severity=grave, hit=len(keys), of=len(a), causes=causes))
    return found


def rows_kept(pair: Pair) -> list[Sign] | str:
    if pair.mapped:
        return "the two use different names or shardings"
    moved: dict[int, list[tuple[str, str]]] = {}
    looked = 0
    for fqn, mine in pair.a.params.items():
        theirs = pair.b.params.get(fqn, {}) if pair.comparable(fqn) else {}
        for role in mine.keys() & theirs.keys():
            one, two = pair.a.shape(mine[role]), pair.b.shape(theirs[role])
            if len(one) > 1 and one[0] != two[0] and one[1:] == two[1:]:
                looked += 1
                if by := _moved_by(pair.a.tensor(mine[role]), pair.b.tensor(theirs[role])):
                    moved.setdefault(by, []).append((fqn, role))
    if not looked:
        return Inapplicable("no table has another number of rows")
    found = []
    for by, keys in moved.items():
        roles = {role for _, role in keys}
        fqns = list(dict.fromkeys(fqn for fqn, _ in keys))
        what = "weights" if roles <= {"param"} else _roles(keys)
        message = f"the old rows of {len(keys):,} of {plural(looked, 'resized matrix')} are {plural(abs(by), 'row')} "
        message += f"{'further down' if by > 0 else 'further up'}: {what} of {some_of(fqns)}"
        found.append(R18.sign(message, {"by": by, "roles": sorted(roles)}, fqns, hit=len(keys), of=looked))
    return found


def _moved_by(a: LazyTensor, b: LazyTensor) -> int:
    """Return by how many rows the rows of ``a`` are further down in ``b``; 0 if they are at their place, or unknown."""
    length, longer = sorted((a.shape[0], b.shape[0]))
    if a.dtype != b.dtype or not length:
        return 0
    rows = np.unique(np.linspace(0, length - 1, LOOKED_AT).astype(int))
    old = _rows(a, rows)
    off = np.flatnonzero((old != _rows(b, rows)).any(axis=1))
    if 2 * len(off) < len(rows):
        return 0
    places: list[int] = []
    span = min(longer - length, FARTHEST)
    wanted = off[:: max(len(off) // SEARCHED, 1)].tolist()
    for at in wanted:
        row = int(rows[at])
        near = np.arange(max(row - span, 0), min(row + span + 1, b.shape[0]))
        found = near[(_rows(b, near) == old[at]).all(axis=1)]
        if len(found) == 1:  # not as rows of zeros
            places.append(int(found[0]) - row)
    return places[0] if len(set(places)) == 1 and 2 * len(places) > len(wanted) else 0


def _rows(tensor: LazyTensor, rows: Ints) -> Array:
    """Return ``(R, nbytes)`` bytes of some rows."""
    import torch

    held = tensor.lazy[rows.tolist()].torch().contiguous()
    return np.asarray(held.reshape(len(rows), -1).view(torch.uint8).numpy())


def same_parameters(pair: Pair) -> list[Sign] | str:
    if pair.a.ckpt.format == pair.b.ckpt.format and _renamed(pair) and not pair.origin:
        return "the weights' names changed"
    a, b = _params(pair.stored if pair.mapped else pair.a), _params(pair.b)
    if pair.mapped:
        keys = (pair.stored.ckpt.catalog.keys, pair.b.ckpt.catalog.keys)
        gone = [fqn for fqn in a if keys[0][pair.stored.params[fqn]["param"]] in pair.only_a]
        new = [fqn for fqn in b if keys[1][pair.b.params[fqn]["param"]] in pair.only_b]
    else:
        gone, new = _without(a, b), _without(b, a)
    tied = pair.a.facts.value("tied"), pair.b.facts.value("tied")
    found = []
    shaped = [] if pair.mapped else _of_another_shape(pair, "param")
    if shaped:
        one, two = (side.shape(side.params[shaped[0]]["param"]) for side in (pair.a, pair.b))
        message = f"{plural(len(shaped), 'parameter')} changed shape: {shaped[0]!r} from {list(one)} to {list(two)}"
        kind = {"kind": "have another shape"}
        found.append(P02.sign(message, kind, shaped[:NAMED], hit=len(shaped), of=len(a), severity="warn"))
    if buffers := [] if pair.mapped else _of_another_shape(pair, "buffer"):
        one, two = (side.shape(side.params[buffers[0]]["buffer"]) for side in (pair.a, pair.b))
        message = f"{plural(len(buffers), 'buffer')} changed shape: {buffers[0]!r} from {list(one)} to {list(two)}"
        found.append(P02.sign(message, {"kind": "buffers"}, buffers[:NAMED], severity="warn", causes=("A5",)))
    for words, names in (("vanished", gone), ("appeared", new)):
        if names:
            severity = "info" if None not in tied and tied[0] != tied[1] else "warn" if pair.mapped else "error"
            more = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
            message = f"{plural(len(names), 'parameter')} {words}: {', '.join(map(repr, names[:4]))}{more}"
            causes = ("H2", "A2") if words == "vanished" and not kinds(names) <= {"embed", "head"} else P02.causes
            sign = P02.sign(
                message, {"kind": words}, names[:NAMED], hit=len(names), of=len(a), severity=severity, causes=causes
            )
            found.append(sign)
    return found


def _of_another_shape(pair: Pair, role: str) -> list[str]:
    both = [(fqn, roles, pair.b.params.get(fqn, {})) for fqn, roles in pair.a.params.items()]
    both = [(fqn, mine, theirs) for fqn, mine, theirs in both if role in mine and role in theirs]
    return [fqn for fqn, mine, theirs in both if pair.a.shape(mine[role]) != pair.b.shape(theirs[role])]


def renamed(pair: Pair) -> list[Sign] | str:
    if pair.a.ckpt.format != pair.b.ckpt.format:
        return "the formats differ, and so do the names"
    shares = _renamed(pair)
    if shares is None:
        return []
    plain, bare = shares
    message = f"the names of {1 - plain:.0%} of the weights changed by a prefix, as of a wrapper"
    one, two = map(_weights, (pair.stored, pair.b))
    if like := next((key for key in two if stripped(key) == stripped(one[0])), None):
        message += f": {one[0]!r} → {like!r}"
    return [N1.sign(message, {"shared": plain, "without_prefixes": bare}, severity="info")]


def same_size(pair: Pair) -> list[Sign] | str:
    if pair.mapped or pair.a.ckpt.format != pair.b.ckpt.format:
        return "the formats differ, and so does what is stored"
    a, b = (_stored(side, together=pair.renumbered) for side in (pair.a, pair.b))
    off = {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key, _NONE)[0] != b.get(key, _NONE)[0]}
    if not off:
        return []
    roles: dict[str, list[int]] = {}
    for role in dict.fromkeys(role for _, role in off):
        roles[role] = [sum(size for (_, one), (size, *_) in side.items() if one == role) for side in (a, b)]
    words = ", ".join(f"{role} {one:,} → {two:,}" for role, (one, two) in sorted(roles.items()) if one != two)
    words = words or f"{plural(len(off), 'tensor')} under other names"
    both = [(one, two) for one, two in off.values() if one and two]
    smaller = [key for key, (one, two) in off.items() if one and two and one[1] == two[1] and two[2] < one[2]]
    rounded = sorted({role for _, role in smaller})
    # not if it is stored under other names
    gone = sorted({role for name, role in off if (name, role) not in b and roles[role][1] < roles[role][0]})
    # state that a parameter of before gets later: before was saved before the first update, or it was frozen
    numbered = {pair.b.ckpt.catalog.keys[at] for fqn in pair.b.numbered for at in pair.b.params[fqn].values()}
    late = all(
        one is None and role != "param" and (name in pair.a.params or name in numbered)
        for (name, role), (one, _) in off.items()
    )
    words += f"; {plural(len(smaller), 'tensor')} with as many elements now have a smaller type" if rounded else ""
    words += "; all of it is new state of parameters that had none" if late else ""
    wider = all(one and two and one[1] == two[1] and two[2] > one[2] for one, two in off.values())
    words += "; all of it is in a wider type" if wider else ""
    evidence = {"bytes": roles, "held": len(both), "rounded": rounded, "gone": gone, "late": late, "wider": wider}
    changed = [role for role, (one, two) in roles.items() if one != two] or list(roles)
    if set(changed) <= _BUFFERS and not any(role in changed and key in a for key in off for role in key[1:]):
        evidence["kind"] = "appeared"
    known = pair.a.params.keys() | pair.b.params.keys()  # and no keys of state that is only numbered
    told = both or "kind" in evidence
    names = list(dict.fromkeys(name for name, role in off if name in known and role in changed))[:NAMED] if told else []
    severity, causes = "info" if late or wider else "warn", ("H1",) if wider else causes_of(changed)
    return [N3.sign(f"the stored size changed, in bytes: {words}", evidence, names, severity=severity, causes=causes)]


def wider_types(pair: Pair) -> list[Sign] | str:
    """Report tensors that are stored in a wider type since the load."""
    found = same_size(pair)
    return found if isinstance(found, str) else [one for one in found if one.evidence["wider"]]


def same_buffers(pair: Pair) -> list[Sign] | str:
    if pair.mapped or pair.a.ckpt.format != pair.b.ckpt.format:
        return "the formats differ, and so does what is stored"
    a, b = ([fqn for fqn, roles in s.params.items() if roles.keys() & _BUFFERS] for s in (pair.a, pair.b))
    gone = _without(a, b)
    if not gone:
        return []
    return [
        N4.sign(f"{len(gone):,} of {plural(len(a), 'buffer')} are gone", {}, gone[:NAMED], hit=len(gone), of=len(a))
    ]


#: Quantities → the cause if tensors of only these are gone or have another shape.
_CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (MASTERS, "D1"),
    (FIRST, "B3"),
    (SECOND, "B4"),
    (MOMENTS, "B1"),
    ((STATE,), "B11"),
    ((*MOMENTS, STATE), "B1"),
    (AVERAGES, "F4"),
    (("buffer",), "A5"),
    (("amax_history", "scale"), "D9"),
)


def causes_of(roles: Iterable[str]) -> tuple[str, ...]:
    """Return the cause if tensors of only one kind are gone or have another shape."""
    found = {quantity(role) for role in roles}
    return next(((cause,) for kind, cause in _CAUSES if found and found <= set(kind)), ())


_BUFFERS = {"buffer", "scale", "amax_history"}
_STEPPED = {"param", "master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum"} | _BUFFERS


def _meant(state: State) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (fqn, role): state.shape(at)
        for fqn, roles in state.params.items()
        for role, at in roles.items()
        if quantity(role) is not None
    }


def _params(state: State) -> list[str]:
    return [fqn for fqn, roles in state.params.items() if "param" in roles]


def _without(names: list[str], others: list[str]) -> list[str]:
    there = set(others)
    return [name for name in names if name not in there]


def _roles(keys: list[tuple[str, str]]) -> str:
    counts = Counter(_NUMBER.sub("", role) for _, role in keys)  # a list, as of L-BFGS
    return ", ".join(f"{count} {role}" for role, count in counts.items())


_NUMBER = re.compile(r"\.\d+$")
_NONE = (0, 0, 0)


def _stored(state: State, *, together: bool) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return (fqn or key, role) → bytes, elements, bits per element; copies and parts are added up.

    Args:
        together: add up the optimizer's state, because its numbers mean other parameters on the other side.
    """
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    catalog = state.ckpt.catalog
    for position, (key, fqn, role) in enumerate(zip(catalog.keys, state.ckpt.fqns, state.ckpt.roles, strict=True)):
        role = "buffer" if state.names.roles[position] == "buffer" else role
        if role in _STEPPED or role in AVERAGES:
            each, numel = catalog.dtype_of(position).bits, int(catalog.numel[position])
            name = "" if together and role in MOMENTS else fqn or key
            size, many, _ = found.get((name, role), _NONE)
            found[name, role] = size + (each * numel + 7) // 8, many + numel, each
    return found


def _weights(state: State) -> list[str]:
    """Return the keys of the weights, as stored."""
    return [key for key, role in zip(state.ckpt.catalog.keys, state.ckpt.roles, strict=True) if role == "param"]


def _renamed(pair: Pair) -> tuple[float, float] | None:
    """Return the shares of common names, as stored and without prefixes; ``None`` if they were not renamed."""
    sides = [_weights(state) for state in (pair.stored, pair.b)]
    many = max(1, min(map(len, sides)))
    plain = len(set(sides[0]) & set(sides[1])) / many
    bare = len({stripped(key) for key in sides[0]} & {stripped(key) for key in sides[1]}) / many
    return (plain, bare) if plain < SAME_NAMES and bare > RENAMED else None
