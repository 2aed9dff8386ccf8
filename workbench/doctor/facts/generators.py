"""States of random generators: a digest of each, and how many numbers those of torch have drawn since their seed.

::

    CPU   5,056 bytes   seed u64 │ left i32 │ seeded i32 │ next u64 │ 624 words of 32 bits, each in u64 │ normals
    CUDA     16 bytes   seed u64 │ offset u64

Source: torch 2.13, ``aten/src/ATen/CPUGeneratorImpl.cpp``, ``core/MT19937RNGEngine.h``, ``cuda/CUDAGeneratorImpl.cpp``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.checkpoint import Checkpoint
from workbench.core.arrays import Array
from workbench.errors import WorkbenchError

LARGEST = 1 << 16  #: most bytes of one generator's state
MANY = 4096  #: most generators
CPU, CUDA = 5056, 16  #: bytes of a state of torch's
WORDS = 624  #: of the Mersenne Twister, made at once
BLOCKS = 1 << 14  #: of so many words that are searched for a state: ten million numbers
AT_ONCE = 1 << 9  #: blocks that are made together
DEPTH = 8  #: of containers around a state


@dataclass(frozen=True)
class Generator:
    """A generator's stored state.

    Attributes:
        digest: hash of the state and of what is stored with it.
        engines: path within it → state of a generator of torch's, as stored.
    """

    digest: str
    engines: Mapping[str, bytes]


def generators(ckpt: Checkpoint, *, every: bool = False) -> dict[str, Generator]:
    """Return the stored generators by the names of their tensors or objects.

    Args:
        every: whether all tensors and objects are states of generators, as in a file with nothing else.
    """
    found: dict[str, Generator] = {}
    for position, key in enumerate(ckpt.catalog.keys):
        small = int(ckpt.catalog.numel[position]) <= LARGEST
        named = every or "rng" in key
        sized = ckpt.catalog.shape_of(position) == (CPU,) and ckpt[key].element.numpy_name == "uint8"
        if (every or ckpt.roles[position] == "other") and (named or sized) and small and len(found) < MANY:
            try:
                state = ckpt[key].numpy().tobytes()
            except WorkbenchError:  # verify reports the reason
                continue
            if not named and not _is_twister(state):
                continue
            found[key] = Generator(hashlib.sha256(state).hexdigest(), dict(_engines(state)))
    for name in ckpt.objects:
        if not (every or re.search(r"rng_state|random_states|extra_state_rank", name)) or len(found) >= MANY:
            continue
        try:
            value = ckpt.objects[name]
        except (WorkbenchError, RecursionError):
            continue
        if isinstance(value, Mapping) and "extra_state" in name:
            value = {key: one for key, one in value.items() if "rng" in str(key)} or None
        plain = _plain(value)
        if plain not in (None, []):
            found[name] = Generator(hashlib.sha256(repr(plain).encode()).hexdigest(), dict(_engines(plain)))
    return found


def seed(state: bytes) -> int:
    """Return the seed of a state of torch's."""
    return int.from_bytes(state[:8], "little")


def is_fresh(state: bytes) -> bool:
    """Return whether a generator has drawn nothing since its seed, by its own counts."""
    if len(state) == CUDA:
        return not any(state[8:])
    return int.from_bytes(state[8:12], "little") == 1 and not any(state[16:24])


def _is_twister(state: bytes) -> bool:
    """Return whether bytes are a state of torch's generator on the CPU, whatever its name."""
    left, seeded = (int.from_bytes(state[at : at + 4], "little") for at in (8, 12))
    words = np.frombuffer(state, "<u8", WORDS, 24)
    position = int.from_bytes(state[16:24], "little")
    return 1 <= left <= WORDS and seeded == 1 and position <= WORDS and bool((words < 1 << 32).all())


def drawn(state: bytes) -> int | None:
    """Return how many numbers of 32 bits a generator has drawn since its seed; ``None`` if more than are searched.

    A CUDA generator counts in its own unit.
    """
    if len(state) == CUDA:
        return int.from_bytes(state[8:], "little")
    words = np.frombuffer(state, "<u8", WORDS, 24)
    engine = np.random.MT19937()
    held = engine.state
    held["state"] = {"key": _seeded(seed(state)), "pos": WORDS}
    engine.state = held
    if is_fresh(state):
        return 0 if np.array_equal(words, held["state"]["key"]) else None
    first = _tempered(words[:2].astype(np.uint32))
    for at in range(0, BLOCKS, AT_ONCE):
        blocks = engine.random_raw(WORDS * AT_ONCE).reshape(AT_ONCE, WORDS)
        here = np.flatnonzero((blocks[:, :2] == first).all(axis=1))
        if len(here):
            return (at + int(here[0])) * WORDS + int.from_bytes(state[16:24], "little")
    return None


def _seeded(number: int) -> Array:
    """Return the words of a Mersenne Twister right after it was seeded."""
    words = np.empty(WORDS, np.uint32)
    word = number & 0xFFFFFFFF
    for at in range(WORDS):
        if at:
            word = (1812433253 * (word ^ (word >> 30)) + at) & 0xFFFFFFFF
        words[at] = word
    return words


def _tempered(words: Array) -> Array:
    """Return the numbers that a Mersenne Twister returns for words of its state."""
    y = words.copy()
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    y ^= y >> np.uint32(18)
    return y


def _engines(value: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the states of torch's generators in plain values, by path."""
    if isinstance(value, bytes) and len(value) in (CPU, CUDA):
        yield path, value
    elif isinstance(value, list):
        for at, one in enumerate(value):
            name, inner = one if isinstance(one, tuple) else (at, one)
            yield from _engines(inner, f"{path}.{name}" if path else str(name))


def _plain(value: Any, depth: int = DEPTH) -> Any:
    """Return nested states as plain values; a mapping as a list of pairs."""
    if hasattr(value, "numpy"):
        return value.numpy().tobytes()
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, Mapping) and depth:
        return [(str(key), _plain(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, (list, tuple)) and depth:
        return [_plain(one, depth - 1) for one in value]
    return value if isinstance(value, (int, float, str, bytes, bool)) else None
