"""What goes with what: which signs a cause brings about, which must show it, how strong a kind of sign is."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.doctor.sign import RULES, Sign

__all__ = ["EVERYWHERE", "EXPECTS", "EXPLAINS", "SPEAKS", "equality", "explains", "strength"]

_PAIR = "P03 P04 P05 P06 P08 P11 P12 P13 P17 P18"
_STATE = "P03 P04 P05 P06 P08 P12 P13"
_WEIGHTS = "P05 P06 P08 P11 P12 P13 P17 P18"
_LAYOUT = f"{_PAIR} R02 R04 R05 R09 R13 N5 N17"

_EXPLAINS = {
    "A1": f"{_WEIGHTS} N1 N29 R01 R09 P02 S13 S15 S08 A5 N4", "A2": f"{_WEIGHTS} N29 R01 R03 R09 P02 N3",
    "A3": f"{_WEIGHTS} S15 R09 N29 R08", "A4": "R01 P02 N3 S14 S06 R10 P01", "A5": "N4 R01 R09 R03",
    "B1": f"{_STATE} S05 S06 S07 S17 P01 P14 R01 R03 R10 N3 N7 N13 S19 N16",
    "B2": "S06 S07 P01 P05 P12 P13 P14 R10 R09 S19",
    "B3": f"{_STATE} S05 R03 P14 N7 S19 S04 N16", "B4": f"{_STATE} S02 S04 S05 S19 P09 R03 N7 N16",
    "B5": f"{_LAYOUT} S04 N7 N28", "B6": "S04 S19 N5 N7 P03 P04 P05 P12 R09 R02",
    "B7": "P05 P11 P12 P13 R12", "B8": "N6 S16 P13 P15 P11 P12", "B11": "N8 S04",
    "C1": "S16 S17 N6 N9 R11 P11 P13 P15 P05 P10", "C2": "S16 S17 N6 R11 R12 P05 P06 P08 P11 P13 P15",
    "C3": "S16 S17 N6 N9 R11 P11 P13 P15", "C4": "S16 S17 R11 R12 P11 P13 P15", "C5": "P11 P12",
    "C6": "S18 R11 N10", "C7": "N10 R11", "C8": "N11 R11", "C9": "S06 S07 S16 S17 S18 R10 R11 P01 P15 P05 P12",
    "C10": "N12 R12 S18 R11 S17",
    "D1": f"{_WEIGHTS} S09 R07 R09", "D2": f"{_WEIGHTS} S08 S15 S13 N29 R02 R04 R05 R09 R13",
    "D3": "S08 S12 R06 R08 R09",
    "D4": "S10 R07 P03 P04 N3", "D5": "N13 S10", "D6": "P10", "D7": f"{_WEIGHTS} S09 R07 N3", "D8": "N14 R11 P01",
    "D9": "N15 R03 R07 R09 N4 R01",
    **dict.fromkeys(("E1", "E2", "E3", "E4", "E5", "E6", "E8", "E10"), _LAYOUT),
    "E7": f"{_LAYOUT} S19 N28 N20 S01 S02 S03 S04 S05 S08 S14 S15 R03 R08 N29",
    "E9": f"{_LAYOUT} S14 N19 S08 S19 N29 N28",
    "E11": f"{_LAYOUT} N20", "E12": f"{_WEIGHTS} R09 S15", "E13": f"{_LAYOUT} N28 S19 S04 S05 S08 S14 S15 R03 N29",
    "F1": "S08 S12", "F2": "R01 S19 V05 R12 P01 P02 P05 P12 R10 S06 S07 S13 S14 N29 N3", "F3": "S13",
    "F4": f"{_WEIGHTS} N21 R09 R02", "F5": f"{_WEIGHTS} N22 R01 R09 P02", "F7": f"{_LAYOUT} N20 N23",
    "G1": f"S01 S02 S08 S12 R03 R06 R07 R09 P03 P04 P09 S04 {_WEIGHTS}", "G2": f"S02 S08 S12 R06 R09 {_WEIGHTS}",
    "G3": f"S01 S02 S03 S04 R03 R06 R09 P03 P04 P09 N16 S19 {_WEIGHTS}",
    "G4": f"{_LAYOUT} S11 R01 R03 R08 P02 V01 V02 V03 N18",
    "G5": f"{_LAYOUT} S19 N28 V02 V03 S04 S05 S08 S11 S12 S15 S03 R03 R08 N29 P09 N8",
    "G6": f"{_LAYOUT} S19 V04 N28 S04 S06 S07 S08 S12 N24 R10 P01 P07",
    "G7": f"{_LAYOUT} S19 N24 N25 R10 R11 P01 S06 S07 S16 S17 S18",
    "G8": f"{_LAYOUT} S07 R01 P02 V01 V04 N18",
    "G10": f"R06 R08 R09 V02 V03 S08 {_PAIR}", "D10": "N16",
    "G9": f"{_PAIR} S01 P09 S12",
    "H1": "R11 R12 P03 P04 P05 P08 P11 P12 P13 P15 P16 N10 N12 S16 S17 S18 N6 P07 N14",
}  # fmt: skip

#: Cause → rules whose signs may be its consequences, on the parameters that it is about.
EXPLAINS: Mapping[str, frozenset[str]] = {cause: frozenset(rules.split()) for cause, rules in _EXPLAINS.items()}

#: Causes of a run as a whole: they are about every parameter.
EVERYWHERE = frozenset({"A1", "B1", "B2", "B3", "B4", "B8", "G7", "H1"} | {f"C{n}" for n in range(1, 11)})

#: Cause → rules one of which fires if it is the cause and they were looked at.
EXPECTS: Mapping[str, tuple[str, ...]] = {
    "B1": ("S05", "S06", "R10", "P01"), "B2": ("S07", "S06", "R10", "P01"), "B4": ("S04", "S05"), "A3": ("S15",),
    "D1": ("S09", "R07"), "D2": ("S08",), "D3": ("S08",), "D4": ("S10", "R07"), "F2": ("R01", "P02", "S13"),
    "C1": ("S17", "R11", "P15", "N6"), "C3": ("S17", "R11", "P15"), "B7": ("R12", "P11", "P12"),
    "B5": ("P17", "R02", "N5"), "E13": ("P17", "R02", "R04", "R09", "R13"),
    **dict.fromkeys(("E1", "E2", "E3", "E4", "E5", "E6", "E10"), ("P17", "R02", "R04", "R05", "R13", "N17", "N20")),
    "G5": ("S11", "R08"), "F1": ("S12",), "G7": ("S07", "N25", "R09"), "C9": ("S07",),
}  # fmt: skip

#: ``(this cause, another)`` → why what proves the one speaks against the other.
SPEAKS: Mapping[tuple[str, str], str] = {
    ("B1", "B2"): "the moments are gone too", ("B1", "B3"): "the counters started again too",
    ("B2", "B1"): "the moments are as they were", ("B3", "B1"): "the counters went on",
    ("B3", "B4"): "exp_avg is gone as well", ("B4", "B3"): "exp_avg is there", ("B4", "B6"): "exp_avg_sq is all zero",
    ("D2", "D3"): "the masters, not the weights, are unlike before", ("D3", "D2"): "the masters are as before",
    ("B5", "E1"): "the weights are in their places", ("E13", "E1"): "the weights are in their places",
    ("G1", "G2"): "the number is far out of any range", ("G2", "G1"): "the number is still of a usual size",
    ("G5", "A2"): "whole pages are zeros", ("E3", "E2"): "whole matrices trade places",
    ("C1", "C3"): "the schedule is behind", ("C3", "C1"): "the schedule is ahead",
    ("A3", "E12"): "they are exactly 1", ("D1", "D2"): "they are the 16-bit weights exactly",
}  # fmt: skip

_GRAVE = {"error": 1.0, "warn": 0.3, "info": 0.02}


def explains(cause: str, rule: str) -> bool:
    """Whether a sign of that rule may follow from that cause."""
    known = RULES.get(rule)
    return rule in EXPLAINS.get(cause, ()) or (known is not None and cause in known.causes)


def equality(sign: Sign) -> bool:
    """Whether a sign rests on what must be equal bit for bit."""
    rule = RULES.get(sign.rule)
    return rule is not None and rule.needs == "echo" and rule.severity == "error"


def strength(sign: Sign) -> float:
    """Equality of an echo > an exact law > facts that agree > a statistic; an error > a warning > a remark."""
    rule = RULES.get(sign.rule)
    if rule is None:
        return _GRAVE[sign.severity]
    if rule.severity != "error":
        return 1.0 if sign.severity == "warn" else _GRAVE["info"]
    return (8.0 if rule.needs == "echo" else 4.0) * _GRAVE[sign.severity]
