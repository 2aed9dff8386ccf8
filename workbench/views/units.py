"""Numbers as people read them."""

from __future__ import annotations

import math
import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = (("", 1), (" K", 10**3), (" M", 10**6), (" B", 10**9), (" T", 10**12), (" Q", 10**15))
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_SIZED = re.compile(r"(float|bfloat|int|uint|complex)(\d.*)")
_AGES = (
    (60, 1, "s"),
    (3600, 60, "min"),
    (86_400, 3600, "h"),
    (30 * 86_400, 86_400, "d"),
    (730 * 86_400, 30.44 * 86_400, "months"),
    (math.inf, 365.25 * 86_400, "years"),
)


def nbytes(value: int) -> str:
    """Format as ``1.2 GiB``: binary units, one digit after the point.

    >>> nbytes(512), nbytes(8192), nbytes(1_300_000_000_000)
    ('512 B', '8 KiB', '1.2 TiB')
    """
    size, unit = float(value), 0
    while size >= 1023.95 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    text = f"{size:,.1f}".removesuffix(".0")
    return f"{text} {_BINARY[unit]}"


def count(value: int) -> str:
    """Format as ``1.24 B``: thousands, millions, billions (10⁹), trillions; exact below 10,000.

    >>> count(4096), count(1_236_000_123)
    ('4,096', '1.24 B')
    """
    if value < 10_000:
        return f"{value:,}"
    name, unit = next(row for row in reversed(_DECIMAL) if value >= row[1] * 0.9995)
    size = value / unit
    return f"{size:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}{name}"


def number(value: float | int | None) -> str:
    """Format with three significant digits; integers exactly, with commas.

    >>> number(-3.90625), number(0.0), number(-1234567)
    ('-3.91', '0', '-1,234,567')
    """
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """Format as ``81 %``; ``<1 %`` for small shares above zero."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    return "<1 %" if 0 < share < 1 else f"{share:.0f} %"


def age(seconds: float) -> str:
    """Format as ``5 min``, ``3 h``, ``12 d``; a time in the future (clocks differ) counts as now."""
    seconds = max(seconds, 0)
    _, unit, name = next(row for row in _AGES if seconds < row[0])
    return f"{int(seconds // unit)} {name}"


def seconds(value: float) -> str:
    """Format a duration with three digits: ``123 s``, ``4.20 s``, ``42.1 ms``."""
    scaled, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:#.3g} {unit}"


def dtype(name: str) -> str:
    """Return ``bf16`` for ``bfloat16``, ``f8_e4m3fn`` for ``float8_e4m3fn``; names without a size are unchanged."""
    found = _SIZED.fullmatch(name)
    return _SHORT[found[1]] + found[2] if found else name


def shape(sizes: tuple[int, ...]) -> str:
    """Format as ``[64, 64]``, or ``[]`` for a scalar; no thousands separators, so the result can be pasted."""
    return f"[{', '.join(map(str, sizes))}]"


def ranges(values: list[int], most: int = 4) -> str:
    """Format sorted integers as ranges, with a step if they have one; long lists end in ``…``.

    >>> ranges([0, 1, 2, 3, 7]), ranges([0, 2, 4, 6])
    ('0-3,7', '0-6:2')
    """
    parts: list[str] = []
    at = 0
    while at < len(values):
        end = at + 1
        step = values[end] - values[at] if end < len(values) else 1
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        if step > 1 and end - at < 3:
            end = at + 1
        first, last = values[at], values[end - 1]
        parts.append(str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        at = end
    return ",".join(parts) if len(parts) <= most else ",".join(parts[: most - 1]) + f",…{parts[-1].split('-')[-1]}"
