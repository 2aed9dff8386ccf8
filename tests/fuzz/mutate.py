"""What is done to a copy of a checkpoint: to its bytes here, to what its files mean in :mod:`tests.fuzz.edits`."""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz.edits import edit_json, edit_pickle, edit_text, edit_zip

SIZES = (1, 2, 16, 512, 4096, 70_000)
NUMBERS = (
    0,
    1,
    2,
    7,
    255,
    1 << 15,
    (1 << 16) - 1,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
ODD_NAMES = (
    "a\nb.pt",
    "\x1b[31mred.bin",
    "x\u202etxt.safetensors",
    os.fsdecode(b"\xff\xfe.pt"),
    " ",
    "-rf",
    "a" * 200,
    "model.safetensors",
    "model-00001-of-00009.safetensors",
    ".metadata",
    "__9_9.distcp",
    "<img src=x>.pdparams",
    "mp_rank_09_model_states.pt",
    "trainer_state.json",
    "latest",
)
LOSSES = ("cut", "empty", "gone")


@dataclass
class Target:
    """The folder whose files are changed.

    Attributes:
        root: the copy's folder.
        opened: what of it is opened.
        outside: a folder beside it that nothing may be read from.
        done: what was done, in words.
        lost: name of the file that a mutation took bytes from, relative to ``root``, if there was one mutation.
    """

    root: Path
    opened: Path
    outside: Path
    done: list[str] = field(default_factory=list)
    lost: tuple[str, Path] | None = None

    def files(self) -> list[Path]:
        """Regular files, without links; sorted, so that a seed draws the same one everywhere."""
        return sorted(path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())

    def name(self, path: Path) -> str:
        return ascii(os.fspath(path.relative_to(self.root)))


Mutation = Callable[[Target, Path, Random], str]


def mutate(target: Target, chance: Random) -> None:
    """Between one and four mutations, drawn by ``chance``."""
    for _ in range(chance.choices((1, 2, 3, 4), (12, 3, 1, 1))[0]):
        files = target.files()
        if not files:
            return
        weights = [path.stat().st_size for path in files]
        by_size = chance.random() < 0.4 and any(weights)
        path = chance.choices(files, weights)[0] if by_size else chance.choice(files)
        kind = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        before = target.lost
        said = KINDS[kind][1](target, path, chance)
        target.done.append(f"{kind} {target.name(path)}: {said}")
        target.lost = (kind, path) if kind in LOSSES and len(target.done) == 1 else before
    if len(target.done) > 1:
        target.lost = None


def _bytes(change: Callable[[bytearray, Random], str]) -> Mutation:
    """A mutation of a file's bytes; an empty file gets some first."""

    def apply(target: Target, path: Path, chance: Random) -> str:
        data = bytearray(path.read_bytes()) or bytearray(chance.randbytes(8))
        said = change(data, chance)
        path.write_bytes(data)
        return said

    return apply


def _place(data: bytearray, chance: Random) -> tuple[int, int]:
    """Start and length of a block; headers and directories, at the ends, as often as all the rest."""
    ends = chance.random()
    at = chance.randrange(len(data))
    if ends < 0.35:
        at = chance.randrange(min(len(data), 4096))
    elif ends < 0.5:
        at = len(data) - 1 - chance.randrange(min(len(data), 4096))
    return at, min(chance.choice(SIZES), len(data) - at)


def _flip(data: bytearray, chance: Random) -> str:
    places = [(_place(data, chance)[0], chance.randrange(8)) for _ in range(chance.choice((1, 1, 1, 2, 8)))]
    for at, bit in places:
        data[at] ^= 1 << bit
    return f"bits {places}"


def _run(data: bytearray, chance: Random) -> str:
    at, count = _place(data, chance)
    how = chance.choice(("zero", "ones", "junk", "text"))
    made = {"zero": bytes(count), "ones": b"\xff" * count, "junk": chance.randbytes(count), "text": b"9" * count}
    data[at : at + count] = made[how]
    return f"{how}, {count} bytes at {at}"


def _number(data: bytearray, chance: Random) -> str:
    at, value = _place(data, chance)[0], chance.choice(NUMBERS)
    size, order = chance.choice((1, 2, 4, 8)), chance.choice(("little", "little", "big"))
    raw = (value & ((1 << 8 * size) - 1)).to_bytes(size, order)
    at -= at % chance.choice((1, size))
    data[at : at + size] = raw
    return f"{raw.hex()} at {at}"


def _real(data: bytearray, chance: Random) -> str:
    at = _place(data, chance)[0] & ~7
    raw = struct.pack(chance.choice(("<f", "<d", ">d")), chance.choice((float("nan"), float("inf"), -0.0, 3e38)))
    data[at : at + len(raw)] = raw
    return f"{raw.hex()} at {at}"


def _cut(data: bytearray, chance: Random) -> str:
    at = chance.choice((chance.randrange(len(data)), max(len(data) - 1 - chance.randrange(64), 0)))
    del data[at:]
    return f"at {at}"


def _grow(data: bytearray, chance: Random) -> str:
    size = chance.choice((1, 8, 100, 5000))
    more = chance.choice((bytes(size), chance.randbytes(size), bytes(data[:size]), bytes(data[-size:])))
    data += more
    return f"by {len(more)}"


def _again(data: bytearray, chance: Random) -> str:
    at, count = _place(data, chance)
    data[at:at] = data[at : at + count]
    return f"{count} bytes at {at} twice"


def _hole(data: bytearray, chance: Random) -> str:
    at, count = _place(data, chance)
    del data[at : at + count]
    return f"{count} bytes at {at} taken out"


def _exchange(data: bytearray, chance: Random) -> str:
    (a, size_a), (b, size_b) = sorted((_place(data, chance), _place(data, chance)))
    size = min(size_a, size_b, b - a)
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return f"{size} bytes at {a} and {b}"


def _empty(data: bytearray, chance: Random) -> str:
    data.clear()
    return "no byte left"


def _gone(target: Target, path: Path, chance: Random) -> str:
    path.unlink()
    return "deleted"


def _other(target: Target, path: Path, chance: Random) -> Path:
    """Another file, one of the same family if there is one: what another rank wrote."""
    files = [file for file in target.files() if file != path] or [path]
    family = [file for file in files if _family(file) == _family(path)]
    return chance.choice(family if family and chance.random() < 0.7 else files)


def _family(path: Path) -> str:
    return re.sub(r"\d+", "#", path.name)


def _swap(target: Target, path: Path, chance: Random) -> str:
    other = _other(target, path, chance)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return f"with {target.name(other)}"


def _replace(target: Target, path: Path, chance: Random) -> str:
    other = _other(target, path, chance)
    path.write_bytes(other.read_bytes())
    return f"by {target.name(other)}"


def _rename(target: Target, path: Path, chance: Random, keep: bool = False) -> str:
    numbers = re.sub(
        r"\d+", lambda found: str(int(found[0]) + chance.choice((1, 10, 10**6))).zfill(len(found[0])), path.name
    )
    name = chance.choice((numbers, path.name.upper(), "copy of " + path.name, *ODD_NAMES))[:200]
    new = chance.choice((path.parent, path.parent, target.root)) / name
    if new.exists():
        return "not done"
    if new.is_symlink():
        new.unlink()
    (shutil.copyfile if keep else os.rename)(path, new)
    return f"as {target.name(new)}"


def _twice(target: Target, path: Path, chance: Random) -> str:
    return _rename(target, path, chance, keep=True)


def _folder(target: Target, path: Path, chance: Random) -> str:
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    if chance.random() < 0.5:
        (path / path.name).write_bytes(data)
    return "a folder"


def _fifo(target: Target, path: Path, chance: Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a FIFO"


def _link(target: Target, path: Path, chance: Random) -> str:
    """A link out of the checkpoint, to the file's own bytes: followed, nothing would be missing. What is opened itself
    may be a link; a file that is the whole checkpoint gets one beside it.
    """
    if path == target.opened:
        path = path.with_name("beside " + path.name)
        path.unlink(missing_ok=True)  # a link by now, perhaps: nothing is written through it
        shutil.copyfile(target.opened, path)
    outside = target.outside / path.name
    how = chance.choice(("file", "file", "relative", "folder", "secret", "nowhere", "itself", "device"))
    if how == "folder" and not target.opened.is_relative_to(path.parent):
        outside = target.outside / path.parent.name
        if outside.exists():
            shutil.rmtree(outside) if outside.is_dir() else outside.unlink()
        shutil.move(path.parent, outside)
        path.parent.symlink_to(outside)
        return "its folder is a link"
    if outside.exists() and outside.samefile(path):  # its folder is a link by now
        return "not done"
    shutil.copyfile(path, outside)
    path.unlink()
    to = {
        "relative": os.path.relpath(outside, path.parent),
        "secret": _secret(target),
        "nowhere": "/nonexistent/x",
        "itself": path.name,
        "device": "/dev/zero",
    }.get(how, os.fspath(outside))
    path.symlink_to(to)
    return f"a link, {how}"


def _secret(target: Target) -> str:
    """A file that is no checkpoint's; one of the tests' own, should a mutation ever write where it may not."""
    path = target.outside / "secret"
    path.write_text("root:x:0:0:root:/root:/bin/sh\n" * 40)
    return os.fspath(path)


def _stray(target: Target, path: Path, chance: Random) -> str:
    """A file that does not belong there, under a name that means something."""
    new = chance.choice((path.parent, target.root)) / chance.choice(ODD_NAMES)
    if new.exists() or new.is_symlink():
        return "not done"
    new.write_bytes(chance.choice((b"", b"{}", b"\x80\x02}.", chance.randbytes(100), path.read_bytes()[:1000])))
    return f"{target.name(new)} beside it"


def _edit(change: Callable[[bytes, Random], tuple[bytes, str] | None], fit: Callable[[bytes], bool]) -> Mutation:
    """A mutation of what a file means; of another file, if this one is of another kind."""

    def apply(target: Target, path: Path, chance: Random) -> str:
        there = [file for file in target.files() if fit(_head(file))]
        if path not in there and there:
            path = chance.choice(there)
        data = path.read_bytes()
        made = change(data, chance)
        if made is None:
            data = bytearray(data) or bytearray(b"\0")
            made = data, _number(data, chance)
        path.write_bytes(made[0])
        return f"in {target.name(path)}, {made[1]}"

    return apply


def _head(path: Path) -> bytes:
    with open(path, "rb") as handle:
        return handle.read(64)


def _is_json(head: bytes) -> bool:
    return head[:1] in (b"{", b"[") or head[8:9] == b"{"


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" or head[:2] == b"PK"


KINDS: dict[str, tuple[float, Mutation]] = {
    "flip": (6, _bytes(_flip)),
    "run": (6, _bytes(_run)),
    "number": (8, _bytes(_number)),
    "real": (3, _bytes(_real)),
    "cut": (5, _bytes(_cut)),
    "empty": (1, _bytes(_empty)),
    "grow": (2, _bytes(_grow)),
    "again": (3, _bytes(_again)),
    "hole": (3, _bytes(_hole)),
    "exchange": (3, _bytes(_exchange)),
    "gone": (3, _gone),
    "swap": (3, _swap),
    "replace": (2, _replace),
    "rename": (2, _rename),
    "twice": (2, _twice),
    "folder": (1, _folder),
    "fifo": (2, _fifo),
    "link": (4, _link),
    "stray": (2, _stray),
    "text": (2, _edit(edit_text, lambda head: len(head) < 64)),
    "json": (12, _edit(edit_json, _is_json)),
    "pickle": (18, _edit(edit_pickle, _is_pickle)),
    "zip": (12, _edit(edit_zip, lambda head: head[:4] == b"PK\x03\x04")),
}
