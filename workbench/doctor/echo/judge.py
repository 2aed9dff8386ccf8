"""Changes that leave every element at its place, turned into signs: lost, flipped, zeroed, rounded, scaled, other.

::

    who differs together          all of them               some, or a rank's part
    weights (and masters)         A1 (other) F4 (near)      A2 · G6 (a whole file's part) · F5 (low rank)
    weights, masters equal        D3
    masters alone                 D2
    moments alone                 B6
    all three                     G7                        G6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workbench.doctor.echo.atoms import AVERAGES, BUFFERS, MASTERS, MOMENTS, WEIGHTS, Atoms, kind_of
from workbench.doctor.echo.look import Look
from workbench.doctor.echo.merge import adapters, averaged, low_rank
from workbench.doctor.echo.rules import ECHO
from workbench.doctor.echo.where import Where, where
from workbench.doctor.sign import Sign

__all__ = ["judge_places"]

LIST = 100
VALUES = ("near", "other", "part")  #: kinds without a form
ALL = 0.9  #: share of the weights' elements from which all of them are meant


def judge_places(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    """Signs of looks of every kind but ``moved``, ``columns``, ``flat`` and ``unread``."""
    buffers = [one for one in looks if one.atom.role in BUFFERS]
    rest = [one for one in looks if one.atom.role not in BUFFERS]
    if {"param", "exp_avg"} <= {one.atom.role for one in rest if one.kind in VALUES}:  # another state's, all of it
        rest += [one for one in buffers if one.kind in VALUES]
        buffers = [one for one in buffers if one.kind not in VALUES]
    yield from _flips(atoms, [one for one in looks if one.kind == "flip"])
    yield from _buffers(atoms, [one for one in buffers if one.kind not in ("flip", "moved", "columns")])
    yield from _lost(atoms, rest)
    yield from _zeros(atoms, [one for one in rest if one.kind == "zeros"])
    yield from _rounded(atoms, [one for one in rest if one.kind == "rounded"])
    yield from _scaled(atoms, [one for one in rest if one.kind == "ratio"])
    yield from _values(atoms, [one for one in rest if one.kind in (*VALUES, "fill")])


# ---- forms -----------------------------------------------------------------------------------------------------------


def _flips(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    """Moments and weights apart: they harm in other ways."""
    for moments in (False, True):
        some = [one for one in looks if (one.atom.role in MOMENTS) == moments]
        if not some:
            continue
        flips = [flip for one in some for flip in one.form["flips"]]
        bits = {one.row.dtype_b for one in some}
        tops = {"float32": 30, "bfloat16": 14, "float16": 14, "float64": 62}
        top = any(flip["bit"] == tops.get(name) for flip in flips for name in bits)
        causes = ("G3", "G2") if moments else ("G1", "G2") if top else ("G2", "G1")
        text = f"{some[0].atom.role} {some[0].atom.fqn!r}: {some[0].text}"
        yield _sign("R06", atoms, some, text, causes, flips=flips[:8])


def _buffers(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    for roles, causes in ((("amax_history", "scale", "scale_inv", "extra_state"), ("D9",)), (("buffer",), ("A5",))):
        some = [one for one in looks if one.atom.role in roles]
        if some:
            zero = sum(one.kind == "zero" for one in some)
            at = f", {zero:,} of them all zero" if zero else ""
            text = f"{_count(some)} ({_roles(some)}) changed in the load{at}: {some[0].atom.fqn!r}"
            yield _sign("R03", atoms, some, text, causes, zero=zero)


def _lost(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    nan = [one for one in looks if one.kind == "nan"]
    if nan:
        text = f"{nan[0].atom.role} {nan[0].atom.fqn!r}: {nan[0].text}"
        yield _sign("R03", atoms, nan, text, ("G1", "G9"))
    zero = [one for one in looks if one.kind == "zero"]
    moments = [one for one in zero if one.atom.role in MOMENTS]
    if moments:
        roles = {one.atom.role for one in moments}
        causes: tuple[str, ...]
        a, b = atoms.pair.a.facts.steps.usual, atoms.pair.b.facts.steps.usual
        counted = b is not None and a is not None
        if roles == {"exp_avg_sq"}:
            causes, tail = ("B4",), "exp_avg is kept"
        elif roles == {"exp_avg"}:
            causes, tail = ("B3", "B1"), "exp_avg_sq is kept"
        elif counted and b == a:
            causes, tail = ("B3", "B1"), f"the counters still say {b:,.0f}"
        else:
            told = "no counters are stored" if not counted else f"the counters went from {a:,.0f} to {b:,.0f}"
            causes, tail = ("B1", "B3"), told
        text = f"{_roles(moments)} of {_count(moments)} became zero; {tail}"
        yield _sign("R03", atoms, moments, text, causes)
    gone = [one for one in zero if one.atom.role not in MOMENTS]
    if gone:
        text = f"{_roles(gone)} of {_count(gone)} became zero: {gone[0].atom.fqn!r}"
        yield _sign("R03", atoms, gone, text, ("A2", "G5"))


def _zeros(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    if looks:
        one = looks[0]
        text = f"{one.atom.role} {one.atom.fqn!r}: {one.text or 'a run of elements became zero'}"
        place = {name: one.form[name] for name in ("file", "byte_start", "byte_stop", "aligned") if name in one.form}
        yield _sign("R08", atoms, looks, text, ("G5", "G4"), **place)


def _rounded(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    for roles, causes in ((MASTERS, ("D1",)), (MOMENTS, ("D4",)), ((*WEIGHTS, *AVERAGES), ("D7", "D1"))):
        some = [one for one in looks if one.atom.role in roles]
        if not some:
            continue
        through = some[0].form.get("through", some[0].row.dtype_b)
        text = f"{_roles(some)} of {_count(some)} are the old ones rounded through {through}"
        same = roles == MASTERS and _are_weights(atoms, some)
        text += ", which are the weights" if same else ""
        grave = "warn" if roles == MOMENTS else None
        yield _sign("R07", atoms, some, text, causes, grave, through=str(through), weights=same)


def _are_weights(atoms: Atoms, looks: Sequence[Look]) -> bool:
    """Whether the type that they went through is that of the weights."""
    types = {
        atoms.before(atom).element.name for atom in atoms.rows
        if atom.role == "param" and atom.fqn in {one.atom.fqn for one in looks}
    }  # fmt: skip
    return types == {str(looks[0].form.get("through"))}


def _scaled(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    if looks:
        factors = sorted({float(one.form["ratio"]) for one in looks})
        told = ", ".join(f"{factor:.6g}" for factor in factors[:4])
        text = f"{_roles(looks)} of {_count(looks)} are {told} times the old ones"
        yield _sign("R09", atoms, looks, text, ("E12", "F4"), ratios=factors[:16])


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(atoms: Atoms, looks: Sequence[Look]) -> Iterator[Sign]:
    """Values that differ without a form, told by who differs together."""
    parts = {
        name: [one for one in looks if one.atom.role in roles]
        for name, roles in (("weights", WEIGHTS), ("masters", MASTERS), ("moments", MOMENTS))
    }
    averages = [one for one in looks if one.atom.role in AVERAGES]
    if averages:
        yield _sign("R09", atoms, averages, f"averaged weights of {_count(averages)} differ", ("F4", "G6"))
    weights, masters, moments = parts["weights"], parts["masters"], parts["moments"]
    kept = {role for atom in atoms.rows if (role := atom.role) in MASTERS}
    some = [*weights, *masters, *moments]
    if not some:
        return
    place = where(atoms, some)
    if moments and (weights or masters):
        yield _together(atoms, weights, [*some, *(one for one in looks if one.atom.role in BUFFERS)], place)
    elif moments:
        yield _moments(atoms, moments, place)
    elif not weights:
        yield _masters(atoms, masters, place)
    else:
        yield from _weights(atoms, weights, masters, bool(kept), place)


def _together(atoms: Atoms, weights: Sequence[Look], some: Sequence[Look], place: Where) -> Sign:
    share = _share(atoms, weights)
    what = f"{_roles(some)} of {_count(some)} differ together"
    if not weights:
        text = f"{what}, and the weights do not: the optimizer's part is of another save{place.words}"
        return _sign("R09", atoms, some, text, ("G6", "D2"), **place.evidence)
    if share >= ALL and not place.confined:
        text = f"{what}: another save's state under this step's name{_cosines(weights)}"
        return _sign("R09", atoms, some, text, ("G7", "G6"), **place.evidence)
    text = f"{what}, the others are equal: two saves are mixed{place.words}{_cosines(weights)}"
    return _sign("R09", atoms, some, text, ("G6",), share=share, **place.evidence)


def _moments(atoms: Atoms, moments: Sequence[Look], place: Where) -> Sign:
    causes = ("G6", "B6") if place.confined else ("B6", "G6")
    text = f"{_roles(moments)} of {_count(moments)} differ, the weights do not{place.words}{_cosines(moments)}"
    return _sign("R09", atoms, moments, text, causes, **place.evidence)


def _masters(atoms: Atoms, masters: Sequence[Look], place: Where) -> Sign:
    causes = ("G6", "D2") if place.confined else ("D2", "G6")
    near = all(one.kind == "near" for one in masters)
    told = "an older step's, as it seems" if near else "none of this run's, as it seems"
    text = f"masters of {_count(masters)} differ, the weights do not: {told}{place.words}{_cosines(masters)}"
    return _sign("R09", atoms, masters, text, causes, **place.evidence)


def _weights(
    atoms: Atoms, weights: Sequence[Look], masters: Sequence[Look], kept: bool, place: Where
) -> Iterator[Sign]:  # fmt: skip
    looks = [*weights, *masters]
    share = _share(atoms, weights)
    what = f"{_roles(looks)} of {_count(looks)} differ"
    names = averaged(atoms, weights, masters)
    if names:
        text = f"{what}: {names:,} are the stored averages"
        yield _sign("R09", atoms, looks, text, ("F4",), averages=names)
        return
    rank = low_rank(atoms, weights)
    if rank is not None:
        text = f"{what} by a change of rank {rank}: an adapter was merged{adapters(atoms)}"
        yield _sign("R09", atoms, looks, text, ("F5",), rank=rank)
        return
    filled = [one for one in looks if one.kind == "fill"]
    causes: tuple[str, ...]
    norms = [one for one in filled if kind_of(one.atom.fqn) == "norm"]
    if filled and len(filled) == len(looks):
        causes = ("A3", "A2") if norms else ("A2", "A3")
        text = f"{_roles(filled)} of {_count(filled)} are {filled[0].form['value']} everywhere, as when they are made"
        yield _sign("R09", atoms, filled, text, causes, value=filled[0].form["value"])
        return
    near = [one for one in weights if one.kind in ("near", "part")]
    if place.confined:
        causes = ("G6", "D3") if kept and not masters else ("G6", "F4")
        yield _sign("R09", atoms, looks, f"{what}{place.words}{_cosines(weights)}", causes, **place.evidence)
    elif kept and not masters:
        text = f"{what}, their masters do not{_cosines(weights)}"
        yield _sign("R09", atoms, looks, text, ("D3", "G6"), **place.evidence)
    elif 2 * len(near) > len(weights):
        causes = ("F4", "G7") if share >= ALL else ("G6", "F4")
        text = f"{what}, their moments do not: averaged, or of another step{_cosines(weights)}"
        yield _sign("R09", atoms, looks, text, causes, share=share, **place.evidence)
    else:
        causes = ("A1", "A2") if share >= ALL else ("A2", "A1")
        text = f"{what} and have no likeness to the old ones, their moments are equal{_cosines(weights)}"
        yield _sign("R09", atoms, looks, text, causes, share=share, **place.evidence)


# ---- words -----------------------------------------------------------------------------------------------------------


def _share(atoms: Atoms, weights: Sequence[Look]) -> float:
    """Part of the weights' elements that are in tensors that differ."""
    total = sum(int(atoms.b.catalog.numel[atom.tensor]) for atom in atoms.rows if atom.role == "param")
    return sum(one.row.numel for one in weights) / total if total else 0.0


def _cosines(looks: Sequence[Look]) -> str:
    found = [one.cosine for one in looks if one.cosine is not None]
    return f" (cosine with before {min(found):.3g} to {max(found):.3g})" if found else ""


def _count(looks: Sequence[Look]) -> str:
    count = len({one.atom.fqn for one in looks})
    return f"{count:,} tensors" if count > 1 else f"{looks[0].atom.fqn!r}"


def _roles(looks: Sequence[Look]) -> str:
    return ", ".join(sorted({one.atom.role for one in looks}))


def _sign(
    rule: str, atoms: Atoms, looks: Sequence[Look], text: str, causes: tuple[str, ...], severity: str | None = None,
    **evidence: object,
) -> Sign:  # fmt: skip
    owners = list(dict.fromkeys(name for one in looks for name in one.atom.owners))
    roles = {one.atom.role for one in looks}
    of = len({owner for atom in atoms.rows if atom.role in roles for owner in atom.owners})
    found = {"in": "before → echo", "roles": sorted(roles), **evidence}
    return ECHO[rule].sign(text, found, owners[:LIST], severity=severity, hit=len(owners), of=of, causes=causes)
