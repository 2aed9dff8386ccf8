"""Spikes of a loss curve: points far above the prediction of the points before them.

::

    log loss  ─────╮    ╭╮ peak      onset: the first point over 5 sigma and 0.10 nats
                   ╰────╯╰──╮___     end: three points in a row under 2.5 sigma
              baseline  onset

    prediction  median of the last 24 quiet points along their slope, which never rises, corrected by the median of the
                last residuals; from the onset on it is frozen
    sigma       robust scale of the last 72 residuals, not below 0.85 of that of the last 192, and 0.0015; residuals in
                steep falls, where the prediction lags, are left out
    rise        six points in a row above the quiet points of 60 points ago, as from a learning rate that is too high
    kinds       spike         most of the height is gone soon after the peak
                unresolved    the log ends before that can be seen
                level shift   the loss stays up: curriculum, data, learning rate, divergence; shown, not an alarm
                nan           NaN or infinite

One causal pass over the logged points: an event is detected from the points before it, and described by its own
course. Figures for synthetic curves: ``tests/lab/curves.py``, in docs/run.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

BASE, SHORT = 24, 12  #: quiet points of the baseline: the last 24, once there are 12
RECENT, LONG = 72, 192  #: residuals that give the scale
FLOOR = 0.0015  #: of sigma, in nats
ONSET, NATS = 5.0, 0.10  #: sigma and nats of the first point
PEAK, SINGLE = 8.0, 14.0  #: sigma of the peak with two points over ONSET; of one point alone
FURTHER = 1.2  #: multiple of the largest of the last LONG residuals, on either side, that the peak has to reach
LOW, APART, FOLLOW = (
    6.5,
    1.7,
    0.5,
)  #: sigma, and times that residual, of a peak that a second point of this share follows
#: Nats, and times that residual, of one point that counts without others: a batch of bad data.
LONE, LONE_FAR = 0.7, 4.0
LONE_LESS, LONE_PEAK, LONE_FARTHER = 0.3, 10.0, 6.0  #: the same for a smaller one: nats, sigma, times that residual
SUPPORT = 2.5  #: sigma that the mean of the two points after a single one has to reach
RISE_PAST, RISE_GAP, RISE_POINTS = 24, 60, 6  #: quiet points of long ago, how long, and points that are above them
RISE_NATS, RISE_SIGMA = 0.15, 4.0  #: of the median of these points: a rise that no single point shows
AGAIN = 6  #: points of an event, from whose median another jump within it is measured
NEAR, NEAR_ONSET, NEAR_NATS = 6, 4.0, 0.05  #: points after a resume; sigma and nats of one of them
QUIET, QUIET_POINTS = 2.5, 3  #: the end
WATCHED = 24  #: points after the peak in which a spike has to lose half of its height
SLOW = 0.5  #: of the height that remains on average over the WATCHED points from which it is a level shift
STEEP = 6.3  #: median distances of two points that the curve falls over the baseline, from which the fall is steep
SCORE = 0.3  #: smallest share of the median that a loss can reach if its logarithm is to be used


@dataclass(frozen=True)
class Spike:
    """One event.

    Attributes:
        onset, peak, end: positions of points; ``end`` is the first quiet one, ``None`` if the log ends first.
        height: of the peak over the prediction, in units of the loss: nats for a cross-entropy; infinite for NaN.
        sigma: the height of the log loss in units of the noise before it.
        over: points over the onset's threshold.
        kind: ``spike``, ``unresolved``, ``level shift`` or ``nan``.
        recovered: whether the loss returned to the prediction of the points before.
        suspected: only one point is over, or the noise has heavy tails and the height is below 14 sigma.
    """

    onset: int
    peak: int
    end: int | None
    height: float
    sigma: float
    over: int
    kind: str
    recovered: bool
    suspected: bool = False

    @property
    def alarm(self) -> bool:
        """Whether it is an alarm: anything but a level shift."""
        return self.kind != "level shift"


def find_spikes(values: Sequence[float], resumes: Iterable[int] = ()) -> list[Spike]:
    """Return the events of a curve without overlaps, in order.

    Args:
        values: of the loss, one per logged point.
        resumes: positions of the first points after a resume. In the :data:`NEAR` points from there on, lower
            thresholds hold: few places are looked at, so chance has few occasions; such an event is suspected.
    """
    curve, logarithm = scale(values)
    near_resume = {at + k for at in resumes for k in range(NEAR)}
    return SpikeWalk(curve, logarithm, near_resume).run()


def scale(values: Sequence[float]) -> tuple[list[float], bool]:
    """Return the logarithm of a loss and True; or the loss itself and False, if it comes near 0 or below, as in
    reinforcement learning."""
    finite = sorted(value for value in values if math.isfinite(value))
    plain = [float(value) for value in values]
    if not finite or finite[0] <= SCORE * finite[len(finite) // 2]:
        return plain, False
    return [math.log(value) if math.isfinite(value) else value for value in plain], True


class SpikeWalk:
    """One causal pass over a curve: the quiet points so far, their scale, and the events found."""

    def __init__(self, curve: list[float], logarithm: bool, near_resume: set[int]) -> None:
        self.curve, self.logarithm, self.near_resume = curve, logarithm, near_resume
        self.quiet: deque[float] = deque(maxlen=BASE)
        self.residuals: deque[float] = deque(maxlen=LONG)
        self.level: deque[float] = deque(maxlen=LONG)  #: residuals where the curve was not falling steeply
        self.tails = False
        self.found: list[Spike] = []
        self.past: deque[float] = deque(maxlen=RISE_PAST + RISE_GAP)  # quiet points, further back than the baseline

    def run(self) -> list[Spike]:
        at = 0
        while at < len(self.curve):
            value = self.curve[at]
            if not math.isfinite(value):
                at = self._nan(at)
                continue
            if len(self.quiet) < SHORT:
                self._learn(value)
                at += 1
                continue
            level = self._predict()
            residual, near = value - level, at in self.near_resume
            if residual > (NEAR_NATS if near else NATS):  # the scale takes most of the time, and few points need it
                sigma = self._sigma()
                if residual > (NEAR_ONSET if near else ONSET) * sigma:
                    stop = self._event(at, level, sigma)
                    if stop is not None:
                        at = stop
                        continue
            self._learn(value)
            at += 1
            if at % RISE_POINTS == 0 and (onset := self._slow_rise(at)) is not None:
                at = onset
        return self.found

    def _slow_rise(self, at: int) -> int | None:
        """Look for a rise that no single point shows; record it, and return where the walk continues."""
        if len(self.past) < self.past.maxlen or at < len(self.past):  # type: ignore[operator]
            return None
        before = list(self.past)[:RISE_PAST]
        level = _median(before)
        now = list(self.past)[-RISE_POINTS:]
        rise = _median(now) - level
        if rise <= RISE_NATS:
            return None
        sigma = max(self._sigma(), 1.4826 * _median([abs(one - level) for one in before]))
        if rise <= RISE_SIGMA * sigma or min(now) - level < ONSET * sigma / 2:
            return None
        onset = at - 1
        while onset > at - RISE_GAP and self.curve[onset - 1] - level > QUIET * sigma:
            onset -= 1
        last = self.found[-1] if self.found else None
        if last is not None and (last.end is None or last.end > onset - RISE_GAP):
            return None
        stop = self._event(onset, level, sigma, slow=True)
        return None if stop is None else max(stop, at)

    def _learn(self, value: float) -> None:
        if len(self.quiet) >= SHORT // 2:
            residual, points = value - self._predict(corrected=False), list(self.quiet)
            slope = self._slope()
            step = _median([abs(b - a - slope) for a, b in pairwise(points)])
            self.residuals.append(residual)
            if -slope * BASE <= STEEP * step:
                self.level.append(residual)
        self.quiet.append(value)
        self.past.append(value)

    def _slope(self) -> float:
        half = len(self.quiet) // 2
        points = list(self.quiet)
        return min(0.0, (_median(points[-half:]) - _median(points[:half])) / half)

    def _predict(self, corrected: bool = True) -> float:
        slope = self._slope()
        found = _median(list(self.quiet)) + slope * (len(self.quiet) + 1) / 2
        if corrected and len(self.residuals) >= SHORT:
            found += min(0.0, _median(list(self.residuals)[-SHORT:]))  # in a steep fall the median is late
        return found

    def _noise(self) -> list[float]:
        """Return the residuals that show the noise: in a steep fall, they show how much the prediction lags."""
        return list(self.level if len(self.level) >= SHORT else self.residuals)

    def _sigma(self) -> float:
        every = self._noise()
        if not every:
            return math.inf
        recent = every[-RECENT:]
        middle = _median(recent)
        deviations = sorted(abs(one - middle) for one in recent)
        spread = 1.4826 * _median(deviations)
        tail = deviations[min(len(deviations) - 1, int(0.95 * len(deviations)))] / 1.96
        self.tails = tail > 1.3 * spread
        centre = _median(every)
        long = 0.85 * 1.4826 * _median([abs(one - centre) for one in every])
        return max(spread, tail, long, FLOOR)

    def _event(self, onset: int, level: float, sigma: float, slow: bool = False) -> int | None:
        """Follow an excursion; record it if it counts; return where the walk continues, or ``None`` if it does not."""
        curve = self.curve
        peak, height, over, calm, end, again = onset, -math.inf, 0, 0, None, False
        at = onset
        while at < len(curve):
            value = curve[at]
            if not math.isfinite(value):
                break
            residual = value - level
            again = at - onset >= AGAIN and self._again(at, onset, height, sigma)
            if again:
                break
            if residual > height:
                peak, height = at, residual
            over += residual > ONSET * sigma
            calm = calm + 1 if residual < QUIET * sigma else 0
            if calm == QUIET_POINTS:
                end = at - QUIET_POINTS + 1
                break
            if at - peak >= WATCHED and end is None:
                break
            at += 1
        counts = slow or self._counts(onset, level, sigma, height / sigma, over)
        if not counts and onset not in self.near_resume:
            return None
        kind = self._kind(peak, level, height, end, at)
        suspected = over <= 1 or not counts or (self.tails and height < SINGLE * sigma)
        rise = math.exp(level + height) - math.exp(level) if self.logarithm else height
        self.found.append(Spike(onset, peak, end, rise, height / sigma, over, kind, end is not None, suspected))
        if end is not None:
            return end
        if again or kind == "level shift":
            self.quiet.clear()
            self.past.clear()
        if again:  # the next event is measured from where this one had come to
            points = [one for one in curve[onset:at] if math.isfinite(one)][-AGAIN:]
            self.quiet.extend((points * BASE)[:BASE])
        return max(at, onset + 1)

    def _counts(self, onset: int, level: float, sigma: float, height: float, over: int) -> bool:
        largest_noise = max(map(abs, self._noise())) / sigma
        if height < FURTHER * largest_noise:
            return False
        if self.logarithm and height * sigma > LONE and height > max(PEAK, LONE_FAR * largest_noise):
            return True
        if self.logarithm and height * sigma > LONE_LESS and height > max(LONE_PEAK, LONE_FARTHER * largest_noise):
            return True
        if height > PEAK and over >= 2:
            return True
        after = [value - level for value in self.curve[onset + 1 : onset + 3] if math.isfinite(value)]
        if height > SINGLE:
            return not after or sum(after) / len(after) > SUPPORT * sigma
        return height > max(LOW, APART * largest_noise) and bool(after) and max(after) > FOLLOW * height * sigma

    def _again(self, at: int, onset: int, height: float, sigma: float) -> bool:
        """Return whether the loss jumps again within an event, measured from its present level."""
        jump = self.curve[at] - _median([one for one in self.curve[onset:at] if math.isfinite(one)][-AGAIN:])
        return jump > max(PEAK * sigma, SLOW * height, NATS)

    def _kind(self, peak: int, level: float, height: float, end: int | None, stop: int) -> str:
        after = [value - level for value in self.curve[peak + 1 : peak + 1 + WATCHED] if math.isfinite(value)]
        if end is None and stop < min(peak + 1 + WATCHED, len(self.curve)):  # another jump follows
            after = after[: stop - peak - 1]
            if len(after) < AGAIN:
                return "unresolved"
        elif end is None and len(after) < WATCHED:
            return "unresolved"
        if not after:
            return "spike"
        left = sum(max(0.0, min(one, height)) for one in after) / (len(after) * height)
        return "level shift" if left > SLOW else "spike"

    def _nan(self, onset: int) -> int:
        at = onset
        while at < len(self.curve) and not math.isfinite(self.curve[at]):
            at += 1
        ends = at < len(self.curve)
        last = self.found[-1] if self.found else None
        if last is None or last.kind != "nan" or last.end is None or onset - last.end > QUIET_POINTS:
            self.found.append(Spike(onset, onset, at if ends else None, math.inf, math.inf, at - onset, "nan", ends))
        return at


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
