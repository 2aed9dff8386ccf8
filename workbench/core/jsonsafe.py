"""JSON that a stranger wrote: strict UTF-8, no duplicate keys, bounded depth and memory, one error.

Python's decoder keeps the last of two equal keys (safetensors 0.8 does too), so a file can show one tensor to one
reader and another tensor to the next; and 100,000 nested brackets end in a RecursionError. Both are refused here.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from workbench.errors import CorruptError, UnsafeError

__all__ = ["loads"]

VALUES = 8_000_000  #: a safetensors header of the greatest length holds as many; three bytes can become 64 of memory


def loads(data: bytes | memoryview, *, what: str) -> Any:
    """Decode one JSON document; ``what`` names it in messages.

    Raises:
        CorruptError: not UTF-8, not JSON, a duplicate key, or nested too deeply.
        UnsafeError: more than :data:`VALUES` values and keys.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not UTF-8 at byte {error.start:,} ({error.reason})") from None
    count = text.count(",") + text.count(":")
    if count > VALUES:
        raise UnsafeError(
            f"{what} holds about {count:,} values in {len(data):,} bytes, over the limit of {VALUES:,}: decoding it "
            "would take gigabytes of memory; refused"
        )
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of young objects and no garbage: collections would double the time
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise CorruptError(f"{what} is not JSON: {error.msg} at character {error.pos:,}") from None
    except RecursionError:
        raise CorruptError(f"{what} nests brackets too deeply to be metadata; refused") from None
    except ValueError as error:  # an integer of thousands of digits, or a constant
        raise CorruptError(f"{what} holds a number that is none: {str(error)[:120]}") from None
    finally:
        if collecting:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptError(f"{what} names the key {key!r} twice; which one is meant cannot be known")
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    # NaN and Infinity are not JSON, but trainers' logs (trainer_state.json) hold them
    return float(name)
