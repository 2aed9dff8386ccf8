"""Which causes a sign of facts speaks for, seen beside all the others: counters, schedules, data, arguments, names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workbench.doctor.diagnose.places import kinds
from workbench.doctor.diagnose.scene import Scene, where_of
from workbench.doctor.sign import Sign

__all__ = ["OF_FACTS", "counters"]

Causes = tuple[str, ...]
EARLY, LATE = 0.6, 1.5  #: of where a schedule should be: it began anew; it was stepped twice
LEAST = 2  #: updates to which a counter can come by itself between a load and a save at once


def counters(sign: Sign, scene: Scene) -> Causes:
    """Counters of none, some or all parameters are new, or of another step."""
    found, where = sign.evidence, where_of(sign)
    if found.get("kind") == "absent":
        return ("B1",)
    if found.get("kind") in ("stated", "folder"):
        return ("C9",)
    if found.get("files"):
        return ("G6",)
    state, since = scene.state(where), _since(scene, where)
    counts = state.facts.steps.counts
    young = all(count == state.facts.steps.usual or count <= since + LEAST for count in counts) and len(counts) > 1
    if _new_parameters(scene, sign.tensors, young):
        return ("F2", "A4", "A2")
    if sign.rule == "S12" or (sign.of and sign.hit < sign.of):
        return ("G6", "B2", "C9")
    usual = state.facts.steps.usual
    if usual is None or usual <= since + LEAST:
        return ("B1", "B2") if scene.moments in ("absent", "zero", "fresh", "unknown") else ("B2", "B1")
    return ("C9", "G7", "G6")


def _since(scene: Scene, where: str) -> int:
    """Updates after the load in the checkpoint that a place is about."""
    a, b = scene.evidence.before.facts.step, scene.state(where).facts.step
    return 0 if a is None or b is None else max(b - a, 0)


def _new_parameters(scene: Scene, names: tuple[str, ...], young: bool) -> bool:
    """Whether these counters are of parameters that there were not before; by their values where they have no names."""
    new = {name for sign in scene.fired("R01", "P02") for name in sign.tensors if _appeared(sign)}
    known = [name for name in names if name in scene.evidence.before.params]
    return bool(new) and not known and (young or (bool(names) and set(names) <= new))


def _appeared(sign: Sign) -> bool:
    return sign.evidence.get("kind") in ("are new", "appeared")


def _structure(sign: Sign, scene: Scene) -> Causes:
    """Tensors came or went."""
    words, found = str(sign.evidence.get("kind", "")), kinds(sign.tensors)
    roles = str(sign.evidence.get("roles", "param"))
    if words in ("are gone", "vanished"):
        if "param" not in roles:
            return ("D1", "D2") if "exp_avg" not in roles and "master" in roles else ("B1",)
        return ("F2", "A2") if found == {"head"} else ("A5", "A2") if "buffer" in roles else ("A2", "A1")
    if words == "have another shape":
        return ("F7", "E11") if found <= {"embed", "head"} else ("E1", "A2")
    if found and found <= {"head"}:
        return ("F2",)
    return ("A4", "F5") if "lora" in found else ("A4", "F2")


def _sizes(sign: Sign, scene: Scene) -> Causes:
    sizes = sign.evidence.get("bytes", {})
    if any(role.startswith("exp_avg") and not two[1] for role, two in sizes.items()):
        return ("B1",)
    if scene.fired("R01", "P02") or sign.evidence.get("late"):
        return ("F2", "A4")
    if rounded := sign.evidence.get("rounded"):
        return ("D4", "D7", "A4") if any(role.startswith("exp_avg") for role in rounded) else ("D7", "A4")
    if any(role.startswith("exp_avg") for role in sign.evidence.get("gone", ())):
        return ("B1", "A4")
    return ("A4", "F2")


def _position(sign: Sign, scene: Scene) -> Causes:
    """Where the schedule is, over where it should be."""
    found = sign.evidence
    declared: Causes = ("C4", "H1") if found.get("declared") or scene.declared else ()
    ratio = found.get("ratio")
    if "before" in found:
        now = found.get("echo", found.get("after"))
        due = found["before"] + found.get("k", 0) * _unit(scene)
        ratio = now / due if due else None
    if ratio is None or ratio < EARLY:
        return ("C1", *declared)
    return ("C3", *declared) if ratio >= LATE else ("C3", "C1", *declared)


def _unit(scene: Scene) -> float:
    """What the schedule counts for an update."""
    facts = scene.evidence.before.facts
    count = facts.schedule.count if facts.schedule else None
    return count / facts.step if count and facts.step else 1.0


def _rate(sign: Sign, scene: Scene) -> Causes:
    """The learning rate is off its plan."""
    if sign.rule == "P15" and sign.evidence.get("kind") == "jump":
        return _position(sign, scene)
    ratio = sign.evidence.get("ratio")
    if sign.evidence.get("declared") or (sign.rule == "S16" and scene.declared):
        return ("H1", "C4", "C2") if ratio is None or ratio <= 1 else ("H1", "C2", "C4")
    moved = scene.fired("S17", "R11", "N6")
    if any(one.rule == "N6" for one in moved):
        return ("B8", "C1")
    return ("C2", "C1") if ratio is not None and ratio > 1 else ("C1", "C3", "C2")


def _trainer(sign: Sign, scene: Scene) -> Causes:
    """The trainer's own numbers changed in the load."""
    kind = sign.evidence.get("kind")
    if kind == "schedule":
        return _position(sign, scene)
    if kind == "step":
        return ("C9",)
    if kind == "loss_scale":
        return ("D8",)
    if kind == "generators":
        return ("C8",)
    return _data(sign, scene)


def _data(sign: Sign, scene: Scene) -> Causes:
    """The data's position: behind is a restart, ahead may be meant."""
    found = sign.evidence
    if found.get("kind") == "loader" and "before" not in found:
        return ("C6",)
    now = found.get("echo", found.get("consumed", found.get("loader")))
    due = found.get("before", found.get("step", 0) * found.get("batch", 1))
    return ("H1", "C6") if now is not None and now > due else ("C6",)


def _arguments(sign: Sign, scene: Scene) -> Causes:
    if sign.evidence.get("kind") == "groups":
        return ("B7",)
    return ("H1",)


#: Rule → its narrowing.
OF_FACTS: Mapping[str, Callable[[Sign, Scene], Causes]] = {
    "S06": counters, "S07": counters, "R10": counters, "P01": counters,
    "R01": _structure, "P02": _structure, "N3": _sizes,
    "S17": _position, "S16": _rate, "P15": _rate, "R11": _trainer, "S18": _data, "R12": _arguments,
}  # fmt: skip
