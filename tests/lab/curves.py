"""Hard synthetic loss curves with known spikes, and how well they are found.

::

    python -m tests.lab.curves [SEED …] [--even]

Nine bases (exponential, power law, cyclic learning rate, drops at epochs, curriculum, warm-up plateau, a drop of the
sequence length, fine-tuning, reinforcement learning) with six kinds of noise (Gaussian, Student's t with 3 degrees of
freedom, Laplace, AR(1) of 0.7, skewed, of varying amplitude); 150 to 1500 points, sigma 0.01 to 0.25 nats. In about a
third of the curves there are one or two spikes of 0.3 to 3 nats and at least 12 sigma, which decay with a constant of
1.5 to 15 points, not before 30 % of the run.

An alarm within -2 … +3 points of an onset is a hit; one in the tail of a spike (four decay constants) counts neither
way; a level shift is not an alarm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
Random = np.random.Generator


@dataclass(frozen=True)
class Curve:
    """A loss by point, and its spikes as ``(onset, decay constant)``."""

    base: str
    noise: str
    values: Array
    spikes: tuple[tuple[int, float], ...]


def _exponential(t: Array, r: Random) -> Array:
    return np.log(r.uniform(1.8, 3) + r.uniform(5, 8) * np.exp(-t / r.uniform(0.05, 0.2)))


def _power(t: Array, r: Random) -> Array:
    return np.log(r.uniform(1.5, 2.5) + r.uniform(1, 2) * (t + 0.01) ** -r.uniform(0.25, 0.45))


def _cyclic(t: Array, r: Random) -> Array:
    cycles = r.integers(3, 8)
    return _exponential(t, r) + r.uniform(0.03, 0.12) * 0.5 * (1 + np.cos(2 * np.pi * cycles * t))


def _epochs(t: Array, r: Random) -> Array:
    return _exponential(t, r) - r.uniform(0.05, 0.2) * np.floor(t * r.integers(3, 6))


def _curriculum(t: Array, r: Random) -> Array:
    y = _exponential(t, r)
    for begin in np.sort(r.uniform(0.3, 0.9, r.integers(1, 3))):
        y = y + np.where(t >= begin, 0.35 * np.exp(-(t - begin) / 0.15), 0)
    return y


def _warmup(t: Array, r: Random) -> Array:
    plateau = r.uniform(0.1, 0.35)
    late = np.maximum(0, t - plateau)
    return np.log(2.2 + 8 * np.exp(-late / r.uniform(0.05, 0.15)))


def _sequence(t: Array, r: Random) -> Array:
    return _exponential(t, r) - r.uniform(0.1, 0.4) * (t > r.uniform(0.35, 0.8))


def _finetune(t: Array, r: Random) -> Array:
    return np.log(r.uniform(0.8, 1.4) + r.uniform(0.3, 0.8) * np.exp(-t / 0.05) - 0.2 * t)


def _reward(t: Array, r: Random) -> Array:
    return r.uniform(0.02, 0.1) * np.exp(-t / 0.4) + 0.02 * np.sin(2 * np.pi * 3 * t)


BASES: dict[str, Callable[[Array, Random], Array]] = {
    "exponential": _exponential,
    "power law": _power,
    "cyclic lr": _cyclic,
    "epochs": _epochs,
    "curriculum": _curriculum,
    "warm-up": _warmup,
    "sequence length": _sequence,
    "fine-tuning": _finetune,
    "reinforcement": _reward,
}


def _ar(n: int, r: Random) -> Array:
    x, out = 0.0, np.empty(n)
    for k, one in enumerate(r.normal(0, np.sqrt(1 - 0.49), n)):
        x = 0.7 * x + one
        out[k] = x
    return out


NOISES: dict[str, Callable[[int, Random], Array]] = {
    "Gaussian": lambda n, r: r.normal(0, 1, n),
    "t3": lambda n, r: r.standard_t(3, n) / np.sqrt(3),
    "Laplace": lambda n, r: r.laplace(0, np.sqrt(0.5), n),
    "AR(1)": _ar,
    "skewed": lambda n, r: (r.gamma(2, 1, n) - 2) / np.sqrt(2),
    "varying": lambda n, r: r.normal(0, 1, n) * (1 + np.sin(2 * np.pi * np.arange(n) / r.uniform(40, 300))),
}


def curves(seed: int, each: int = 6, even: bool = False) -> Iterator[Curve]:
    """Yield ``each`` curves of every base and noise; ``even``: sigma is drawn evenly, which gives more noise."""
    for b, (base, shape) in enumerate(BASES.items()):
        for k, (noise, draw) in enumerate(NOISES.items()):
            for number in range(each):
                r = np.random.default_rng((seed, b, k, number))
                n = int(r.integers(150, 1501))
                sigma = float(r.uniform(0.01, 0.25) if even else np.exp(r.uniform(np.log(0.01), np.log(0.25))))
                y = shape(np.arange(n) / n, r) + sigma * draw(n, r)
                spikes = []
                if r.random() < 0.31:
                    for begin in np.sort(r.integers(int(0.3 * n), n - 5, r.integers(1, 3))):
                        if spikes and begin - spikes[-1][0] < 60:
                            continue
                        decay = float(r.uniform(1.5, 15))
                        height = max(float(np.exp(r.uniform(np.log(0.3), np.log(3)))), 12 * sigma)
                        after = np.arange(n) - begin
                        y = y + np.where(after >= 0, height * np.exp(-np.maximum(after, 0) / decay), 0)
                        spikes.append((int(begin), decay))
                yield Curve(base, noise, y if base == "reinforcement" else np.exp(y), tuple(spikes))


@dataclass
class Score:
    """Alarms of curves, counted."""

    hits: int = 0
    false: int = 0
    missed: int = 0
    healthy: int = 0
    alarmed: int = 0
    curves: int = 0
    missed_by: dict[str, int] = field(default_factory=dict)
    false_by: dict[str, int] = field(default_factory=dict)

    def add(self, curve: Curve, onsets: list[int]) -> None:
        """Count the alarms of one curve."""
        self.curves += 1
        left = list(curve.spikes)
        wrong = 0
        for onset in onsets:
            hit = next((one for one in left if -2 <= onset - one[0] <= 3), None)
            if hit is not None:
                left.remove(hit)
                self.hits += 1
            elif not any(begin < onset <= begin + 4 * decay + 3 for begin, decay in curve.spikes):
                wrong += 1
        self.false += wrong
        self.missed += len(left)
        for table, count in ((self.missed_by, len(left)), (self.false_by, wrong)):
            for name in (curve.base, curve.noise):
                if count:
                    table[name] = table.get(name, 0) + count
        if not curve.spikes:
            self.healthy += 1
            self.alarmed += wrong > 0

    @property
    def precision(self) -> float:
        return self.hits / max(1, self.hits + self.false)

    @property
    def recall(self) -> float:
        return self.hits / max(1, self.hits + self.missed)


def measured(seed: int, each: int = 6, even: bool = False) -> Score:
    """Return the score of the package's detector on the curves of a seed."""
    from workbench.analysis.spikes import find_spikes

    score = Score()
    for curve in curves(seed, each, even):
        score.add(curve, [one.onset for one in find_spikes(curve.values.tolist()) if one.alarm])
    return score


def plain_events(values: list[float]) -> list[tuple[int, str]]:
    """Onset and kind by the definition that the detector started from: no correction of the prediction, a scale of 48
    residuals, one point over 14 sigma is enough, and a level shift is what keeps half of its height for 24 points."""
    from workbench.analysis import spikes as rules

    class Plain(rules.SpikeWalk):
        def _predict(self, corrected: bool = True) -> float:
            return super()._predict(corrected=False)

        def _counts(self, onset: int, level: float, sigma: float, height: float, over: int) -> bool:
            return (height > rules.PEAK and over >= 2) or height > rules.SINGLE

        def _noise(self) -> list[float]:
            return list(self.residuals)

        def _again(self, at: int, onset: int, height: float, sigma: float) -> bool:
            return False

        def _kind(self, peak: int, level: float, height: float, end: int | None, stop: int) -> str:
            after = self.curve[peak + 1 : peak + 1 + rules.WATCHED]
            if any(one - level < height / 2 for one in after):
                return "spike"
            return "unresolved" if len(after) < rules.WATCHED else "level shift"

    recent, rules.RECENT = rules.RECENT, 48
    try:
        curve, logarithm = rules.scale(values)
        found = Plain(curve, logarithm, rules.SHORT if len(curve) < rules.FEW else rules.BASE, set()).run()
    finally:
        rules.RECENT = recent
    return [(one.onset, one.kind) for one in found]


def plainly(seed: int, each: int = 6, even: bool = False) -> Score:
    """Return the score of :func:`plain_events` on the same curves."""
    score = Score()
    for curve in curves(seed, each, even):
        score.add(curve, [at for at, kind in plain_events(curve.values.tolist()) if kind != "level shift"])
    return score


def main(seeds: list[int], even: bool) -> None:
    for seed in seeds:
        for name, s in (("detector", measured(seed, even=even)), ("plain", plainly(seed, even=even))):
            found = s.hits + s.missed
            print(
                f"seed {seed}, {name}: {s.curves} curves, {found} spikes; precision {s.precision:.3f}, recall", end=" "
            )
            print(f"{s.recall:.3f}; {s.alarmed} of {s.healthy} healthy curves alarmed ({s.alarmed / s.healthy:.1%})")
            print("  false", dict(sorted(s.false_by.items(), key=lambda item: -item[1])))
            print("  missed", dict(sorted(s.missed_by.items(), key=lambda item: -item[1])))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:] if word.isdigit()] or [2], "--even" in sys.argv)
