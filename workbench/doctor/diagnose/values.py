"""Which causes a sign of values speaks for, seen beside all the others.

What decides is what is affected together::

    weights and moments alike     a layout         which kinds:  gate, up → E3 E2    q, k → E5    whole layers → E9
    weights alone                 masters, copies  one element → G1 G2    a vector of ones → A3    one tensor → A2
    moments alone                 the optimizer    all of them → B1 B3    some, half of their elements → B5 E13
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from workbench.doctor.diagnose.facts import counters
from workbench.doctor.diagnose.places import expert, kinds, layer_of
from workbench.doctor.diagnose.scene import PAIRED, TRAINED, Claim, Scene, Touched, where_of
from workbench.doctor.sign import RULES, Sign

__all__ = ["OF_PAIRS", "OF_VALUES", "adapted", "split"]

Causes = tuple[str, ...]
FLIPPED = 4  #: elements at most that are spoken of as flipped bits
HUGE = 1e3  #: times what an update can do: an exponent's top bits
BARELY = 1.1  #: times what an update can do: rounding to 16 bits
LIKE = 0.5  #: cosine of a tensor of which a part is damaged
ALL = 0.8  #: of the parameters: more are all
SOME = 0.3  #: of the elements: fewer are what an average or an older step leaves
SCALED = 1.25  #: times: a norm's gain is another one by a factor
FEW = 0.02  #: of the elements: what rounding bends
LOST = 0.05  #: of the elements below the floor when little of the old v is left: v was lost, not of an older step
NARROW = 1.006  #: times the floor: what rounding to 16 bits can do to v

#: Rules on pairs whose signs are split by what else is wrong with their parameters.
OF_PAIRS = ("P03", "P04", "P05", "P06", "P08", "P12")


# ---- one checkpoint ------------------------------------------------------------------------------------------------


def _masters(sign: Sign, scene: Scene) -> Causes:
    """Weights and masters disagree: which of them, and how many elements."""
    elements, names = int(sign.evidence.get("elements", 0)), set(sign.tensors)
    if _zeroed(scene, names):
        return ("G5", "D3", "D2")
    if any(names & set(one.tensors) for one in scene.fired("S12")):
        return ("G6", "F1")
    if elements <= FLIPPED:
        large = any(names & set(one.tensors) for one in scene.fired("S02"))
        return ("G1", "G2", "D3", "D2") if large else ("G2", "G1", "D3", "D2")
    touched = scene.touched(PAIRED)
    if touched.every:
        return ("D2", "G6", "D3") if names & touched.weights else ("D3", "G6", "D2")
    return ("D2", "D3", "G6")


def _bound(sign: Sign, scene: Scene) -> Causes:
    """Moments that do not belong together."""
    elements, names = int(sign.evidence.get("elements", 0)), set(sign.tensors)
    if any(names & set(one.tensors) for one in scene.fired("S03")) or elements <= FLIPPED:
        return ("G3", "B6")
    if _zeroed(scene, names):
        return ("G5", "B4")
    if scene.moments == "no v" or any(names & set(one.tensors) for one in scene.fired("S05")):
        return ("B4", "B6")
    touched = scene.touched(PAIRED)
    thrown = len(touched.weights) >= ALL * max(1, len(touched.every))  # such steps no v of a right size makes
    return ("B4", "B6") if _wiped(scene, PAIRED) or (touched.every and thrown) else ("B6", "E7", "E13", "B4", "G6")


def _zero_moments(sign: Sign, scene: Scene) -> Causes:
    if scene.moments == "no v":
        return ("B4",)
    reset = [one for one in scene.fired("S06", "R10", "P01", "S07") if one.of and one.hit == one.of]
    return ("B1", "B3") if reset or scene.moments == "absent" else ("B3", "B1", "B4")


def _rulers(sign: Sign, scene: Scene) -> Causes:
    """Rows that no gradient reached: decay takes one factor from all of them, and never lets them grow."""
    if not sign.evidence.get("even", True):
        return ("D1", "D2", "G5", "A1")
    shrink, allowed = float(sign.evidence.get("shrink", 0)), sign.evidence.get("allowed", (0, 0))
    if shrink < 0:
        return ("D2", "F4", "G6", "G7")
    if shrink > allowed[1]:
        return ("C2", "B7", "H1", "C3", "C5", "D2", "F4")
    groups = [one for one in scene.fired("R12") if one.evidence.get("kind") == "groups"]
    return ("B7", "C1", "H1", "C5") if groups else ("F4", "D2", "B7", "C1", "H1", "C5")


def _sick(sign: Sign, scene: Scene) -> Causes:
    """NaN: from a second moment whose sign was flipped, or a bit of its own."""
    return ("G3", "G1", "G9") if scene.fired("S03") else ("G1", "G9")


def _twice(sign: Sign, scene: Scene) -> Causes:
    return ("F2", "E9") if kinds(sign.tensors) <= {"embed", "head"} else ("E9",)


def _copies(sign: Sign, scene: Scene) -> Causes:
    """Copies differ alone, or with more of the same rank; of counters as counters do."""
    if all(name.endswith("step") for name in sign.tensors):
        return counters(sign, scene)
    if sign.causes and sign.causes[0] != "F1":
        return sign.causes
    more = {name for one in scene.fired("S08") for name in one.tensors} - set(sign.tensors)
    files = [one for one in scene.fired("S07") if one.evidence.get("files")]
    return ("G6", "F1") if more or files or scene.fired("N24") else ("F1", "G6")


def adapted(sign: Sign, scene: Scene) -> bool:
    """Whether just the weights that have adapters are affected, and nothing of the optimizer."""
    stems = {fqn.partition(".lora_A")[0] for fqn in scene.evidence.before.params if ".lora_A" in fqn}
    bases = {fqn.removesuffix(".weight").removesuffix(".base_layer") for fqn in sign.tensors}
    roles = set(sign.evidence.get("roles", ()))
    return bool(bases) and bases <= stems and roles <= {"param", "master"}


def _zeroed(scene: Scene, names: set[str]) -> bool:
    return any(not one.tensors or names & set(one.tensors) for one in scene.fired("S11", "R08"))


#: Rule → its narrowing.
OF_VALUES: Mapping[str, Callable[[Sign, Scene], Causes]] = {
    "S08": _masters, "S04": _bound, "S05": _zero_moments, "S01": _sick, "P09": _sick, "S14": _twice,
    "S12": _copies, "P11": _rulers,
}  # fmt: skip

# ---- two checkpoints -----------------------------------------------------------------------------------------------


def split(sign: Sign, scene: Scene) -> Iterator[Claim]:
    """A sign of a pair by what else is wrong with its parameters."""
    where = where_of(sign)
    names = _all_of(sign, scene, where)
    if where == TRAINED:
        later = {"P12": ("B7", "C5", "G9"), "P05": ("C2", "G9", "H1"), "P03": ("H1", "G9"), "P04": ("H1", "G9")}
        yield Claim(sign, names, later.get(sign.rule, RULES[sign.rule].causes))
        return
    touched = scene.touched(where)
    if _whole_layers(touched):
        yield Claim(sign, names, ("E9", "G6"))
        return
    both = _kinds_of(touched.weights) & _kinds_of(touched.moments)
    parts = {
        "both": {fqn for fqn in names if kinds([fqn]) & both},
        "weights": {fqn for fqn in names if not kinds([fqn]) & both and fqn in touched.weights},
    }
    parts["moments"] = set(names) - parts["both"] - parts["weights"]
    for part, fqns in parts.items():
        if fqns:
            yield Claim(sign, frozenset(fqns), _without_masters(_PARTS[part](sign, scene, where, both), scene))


def _all_of(sign: Sign, scene: Scene, where: str) -> frozenset[str]:
    """The sign's parameters, also those that it has no room to name."""
    law = {"P03": "floor", "P04": "transition", "P05": "reach"}.get(sign.rule)
    broken = {fqn for fqn, sums in scene.pairs.get(where, {}).items() if law and getattr(sums, law).broken}
    return frozenset(broken or sign.tensors)


def _without_masters(causes: Causes, scene: Scene) -> Causes:
    """Where no file holds masters, those of another step or type come last: the weights themselves are wrong."""
    if scene.mastered or "D2" not in causes:
        return causes
    others = tuple(cause for cause in causes if cause != "D2")
    loads = () if {"A1", "A2"} & set(others) or causes[0] != "D2" else ("A1", "A2")
    return (*others, *loads, "D2")


def _kinds_of(fqns: frozenset[str]) -> frozenset[str]:
    return kinds(fqns)


def _whole_layers(touched: Touched) -> bool:
    """Whether all of some layers is affected, weights and moments, and nothing outside of layers."""
    hit = touched.weights | touched.moments
    inside = {"q", "k", "v", "o", "gate", "up", "down"} & kinds(touched.every)
    outer = {fqn for fqn in hit if layer_of(fqn) is None}
    found = kinds(touched.weights) & inside
    return not outer and len(found) >= 4 and len(found) >= len(inside) - 1 and bool(touched.moments)


def _layout(sign: Sign, scene: Scene, where: str, both: frozenset[str]) -> Causes:
    """Weights and moments alike."""
    touched = scene.touched(where)
    hit = frozenset(fqn for fqn in touched.weights | touched.moments if kinds([fqn]) & both)
    few = _few(scene, hit, where)
    if few:
        return few
    if scene.moments == "no v":
        return ("B4", "B6")
    if _wiped(scene, where) or any(len(one.tensors) > 2 for one in scene.fired("S04", where="after")):
        return ("B4", "B6", "G6")
    found = both - {"norm"}
    if "norm" in both and len(found & {"q", "k", "v", "o", "gate", "up", "down"}) >= 5:
        return ("G6", "G7", "B4", "E7")
    if "down" in found and all(expert(fqn) or "router" in kinds([fqn]) for fqn in hit):
        return ("E10", "E9")
    for members, causes in _LAYOUTS:
        if found and found <= members:
            return causes
    return ("E1", "G6", "E7")


#: Kinds that are affected → layouts that do it.
_LAYOUTS: tuple[tuple[set[str], Causes], ...] = (
    ({"q"}, ("E6", "E5", "E4")),
    ({"q", "k"}, ("E5", "E6", "E4")),
    ({"q", "k", "v"}, ("E4", "E1")),
    ({"gate", "up"}, ("E3", "E2")),
    ({"embed", "head"}, ("F7", "E11", "F2")),
    ({"lora"}, ("F5",)),
)


def _weights(sign: Sign, scene: Scene, where: str, both: frozenset[str]) -> Causes:
    """Weights alone."""
    touched = scene.touched(where)
    fqns = frozenset(fqn for fqn in touched.weights if not kinds([fqn]) & both)
    few = _few(scene, fqns, where)
    if few:
        return few
    found = kinds(fqns)
    if found == {"norm"}:
        norms = [scene.pairs[where][fqn] for fqn in fqns]
        ratios = sorted(one.ab / one.aa for one in norms if one.aa > 0)
        scaled = bool(ratios) and abs(math.log(max(ratios[len(ratios) // 2], 1e-9))) > math.log(SCALED)
        return ("E12", "A3", "F1") if scaled else ("A3", "E12", "F1")
    if scene.fired("S08") or scene.fired("S09"):
        return ("D1", "D2") if scene.fired("S09") else ("D2", "D1")
    if any("lora" in kinds([fqn]) for fqn in scene.evidence.before.params) and "norm" not in found:
        return ("F5", "A2")
    part = scene.broken("reach", fqns, where) < SOME * scene.looked("reach", fqns, where)
    if len(fqns) == 1:
        return ("A2", "G5", "D2") if not part else ("D2", "F4", "A2", "G5")
    states = scene.pairs.get(where, {})
    least = min((c for fqn in fqns if (c := states[fqn].cosine) is not None), default=1.0)
    if len(fqns) < ALL * len(touched.every):
        return ("D2", "F4", "G6", "C2") if part else ("A2", "G6", "D2", "F4")
    if least < 0.5:
        return ("D2", "A1", "A2")
    small = scene.worst("reach", fqns, where) < 2
    return ("D1", "F4", "D2") if small else ("D2", "F4", "G6")


def _few(scene: Scene, fqns: frozenset[str], where: str) -> Causes:
    """A flipped bit or a page: some elements of one tensor."""
    if len(fqns) > 1:
        return ()
    laws = ("reach", "floor", "transition")
    counts = {law: scene.broken(law, fqns, where) for law in laws}
    most, of = max(counts.values()), max(scene.looked(law, fqns, where) for law in laws)
    if counts["reach"] and not (counts["floor"] or counts["transition"]):
        if scene.worst("reach", fqns, where) < BARELY:
            return ("D1", "D2", "F4", "G2")
        if most > FLIPPED and any((scene.pairs[where][fqn].cosine or 0.0) < LIKE for fqn in fqns):
            return ()
    if 0 < most <= FLIPPED:
        if counts["reach"]:
            return ("G1", "G2") if scene.worst("reach", fqns, where) > HUGE else ("G2", "G1")
        return ("G3", "G2")
    return ("G5", "A2", "E8") if most and of > 4096 // 2 and most < 0.5 * of else ()


def _moments(sign: Sign, scene: Scene, where: str, both: frozenset[str]) -> Causes:
    """Moments alone."""
    touched = scene.touched(where)
    few = _few(scene, touched.moments, where)
    if few:
        return few
    reset = [one for one in scene.fired("S06", "R10", "P01") if one.of and one.hit == one.of]
    wide = len(touched.moments) >= ALL * max(1, len(touched.every))
    floor, of = scene.broken("floor", touched.moments, where), max(1, scene.looked("floor", touched.moments, where))
    if reset:
        return ("B1", "B2")
    if scene.worst("floor", touched.moments, where) <= NARROW:
        bent, seen = (count("transition", touched.moments, where) for count in (scene.broken, scene.looked))
        return ("D4", "B6") if floor or wide or bent < FEW * seen else ("B6", "D4")
    if scene.moments in ("zero", "absent"):
        return ("B3", "B1")
    if wide and floor > max(LOST, _kept(scene, where) - SOME) * of:
        return ("B3", "B1", "E13")
    return ("B6", "E13", "B3", "G6") if wide else ("B5", "E13", "B6", "G6")


def _kept(scene: Scene, where: str) -> float:
    """β2^k: what is left of the old v."""
    a, b = scene.evidence.before.facts, scene.state(where).facts
    betas, known = b.betas or a.betas, None not in (a.step, b.step)
    return betas[1] ** max((b.step or 0) - (a.step or 0), 0) if betas is not None and known else 0.5


def _wiped(scene: Scene, where: str) -> bool:
    """Whether v fell nearly everywhere, as only a loss makes it."""
    touched = scene.touched(where)
    wide = len(touched.moments) >= ALL * max(1, len(touched.every))
    return wide and scene.broken("floor", None, where) > ALL * scene.looked("floor", None, where)


_PARTS: Mapping[str, Callable[[Sign, Scene, str, frozenset[str]], Causes]] = {
    "both": _layout, "weights": _weights, "moments": _moments,
}  # fmt: skip
