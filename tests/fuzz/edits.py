"""Changes of what files mean: values and keys of JSON, opcodes of pickles, fields of zip archives, words of trackers.

Each takes a file's bytes and returns other bytes and what was changed, or ``None`` for a file of another kind.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from copy import deepcopy
from random import Random
from typing import Any

Edited = tuple[bytes, str]

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    255,
    -(1 << 31),
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    (1 << 62) + 1,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 64) - 1,
    1 << 200,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
)
WORDS = (
    "",
    "\ud800",
    "\udcff.safetensors",
    "a\0b",
    "\x1b[31m",
    "\u202e",
    "a\nb",
    "../../outside",
    "/etc/passwd",
    "..",
    ".",
    "~",
    "C:\\x",
    "a" * 70_000,
    "<script>window.pwned=1</script>",
    "layers.99999999999999999999.weight",
    "layers.-1.weight",
    "F32",
    "BOOL",
    "F4",
    "float32",
    "nan",
    "1e999",
    "9" * 5000,
    "model",
    "optimizer",
    "[",
    "%s{}",
    "canary_module",
    "os",
    "system",
)
ODD: tuple[Any, ...] = (None, True, False, [], {}, "", [[]], {"a": {}}, [None], [-1], [0, 0])
GLOBALS = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ccanary_module\nboom\n",
    b"csubprocess\nPopen\n",
    b"cbuiltins\ngetattr\n",
    b"ctorch\nFloatStorage\n",
    b"ccollections\nOrderedDict\n",
    b"cnumpy\nndarray\n",
    b"ctorch\nSize\n",
    b"cbuiltins\nint\n",
    b"ctransformers.nothing\nx\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
)
LONGEST = 1 << 20  #: bytes of a list that is made long: memory in proportion to what is stored is no fault
TWICE = "\x7ftwice"  #: stands for a key that an object has a second time


# ---- JSON ------------------------------------------------------------------------------------------------------------


def edit_json(data: bytes, chance: Random) -> Edited | None:
    """A JSON file, or the header of a safetensors file."""
    if data[8:9] == b"{" and len(data) >= 8:
        size = int.from_bytes(data[:8], "little")
        made = _json(data[8 : 8 + size], chance)
        if made is None:
            return None
        text = made[0] + b" " * (-len(made[0]) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + size :], made[1]
    return _json(data, chance)


def _json(text: bytes, chance: Random) -> Edited | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    said = []
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        nodes = [node for node in _nodes(document) if node[0]]
        if not nodes:
            return None
        node, key = chance.choice(nodes)
        said.append(_change(node, key, chance))
        if said[-1].startswith("long"):
            break  # its items are one object: a change of one would be one of all
    made = json.dumps(document)
    return _doubled(made).encode(), "; ".join(said)


def _nodes(document: Any) -> list[tuple[Any, Any]]:
    """Every container of a document, with a place in it."""
    found, left = [], [document]
    while left and len(found) < 20_000:
        node = left.pop()
        places = (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
        )
        found += [(node, key) for key, _ in places]
        left += [value for _, value in places]
    return found


def _change(node: Any, key: Any, chance: Random) -> str:
    value, how = node[key], chance.choice(("value", "value", "value", "gone", "key", "twice", "deep", "long", "other"))
    where = repr(key)[:60]
    if how == "gone":
        del node[key]
    elif how == "key" and isinstance(node, dict):
        name = chance.choice((*WORDS, key.upper(), key + "x", *node))
        node[name] = node.pop(key)
        return f"key {where} is {name[:40]!a}"
    elif how == "twice" and isinstance(node, dict):
        node[TWICE + key] = deepcopy(chance.choice((value, *NUMBERS, *ODD)))
    elif how == "deep":
        depth, value = chance.choice((30, 150)), [value]
        for _ in range(depth):
            value = [value] if isinstance(node, list) else {"a": value}
        node[key] = value
    elif how == "long":
        node[key] = [value] * min(chance.choice((33, 1000, 30_000)), LONGEST // len(json.dumps(value)))
    elif how == "other":
        node[key] = deepcopy(chance.choice(ODD))
    else:
        node[key] = _unlike(value, chance)
    return f"{how} at {where}" + (f": {node[key]!a}"[:60] if how in ("value", "other") else "")


def _unlike(value: Any, chance: Random) -> Any:
    if isinstance(value, (int, float)) and chance.random() < 0.8:
        return chance.choice((*NUMBERS, value + 1, -value, value * 2))
    if isinstance(value, str) and chance.random() < 0.8:
        return chance.choice(WORDS)
    if isinstance(value, list) and chance.random() < 0.7:
        mixed = list(value)
        chance.shuffle(mixed)
        return chance.choice((value + value, value[:-1], mixed, value[::-1], [chance.choice(NUMBERS) for _ in value]))
    return deepcopy(chance.choice((*NUMBERS, *WORDS, *ODD)))  # it becomes part of a document, which changes


def _doubled(text: str) -> str:
    return text.replace(json.dumps(TWICE)[1:-1], "")


# ---- pickles ---------------------------------------------------------------------------------------------------------


def edit_pickle(data: bytes, chance: Random) -> Edited | None:
    """A pickle, one of several in a row, or one in a zip archive whose checksums are made to fit."""
    if data[:2] == b"PK":
        return _zipped(data, chance)
    ops = _opcodes(data)
    if not ops:
        return None
    made, said = data, []
    for name, _, start, stop in sorted(chance.sample(ops, min(len(ops), chance.choice((1, 1, 1, 2, 4)))), key=_start)[
        ::-1
    ]:
        new = _opcode(name, data[start:stop], data, ops, chance)
        made = made[:start] + new + made[stop:]
        said.append(f"{name} at {start} is {new[:40]!r}")
    for _, _, start, stop in sorted((op for op in ops if op[0] == "FRAME"), key=_start)[::-1]:
        if made[start:stop] == data[start:stop]:
            made = made[:start] + made[stop:]  # a frame's length would not fit any more
    return made, "; ".join(said)


Op = tuple[str, Any, int, int]


def _start(op: Op) -> int:
    return op[2]


def _opcodes(data: bytes) -> list[Op]:
    """Opcodes of the pickles at the front of a file: name, argument, start, stop."""
    found: list[Op] = []
    at = 0
    while data[at : at + 1] == b"\x80" and at < 1 << 17:
        stream, last = io.BytesIO(data[at : at + (1 << 18)]), None
        try:
            for op, argument, place in pickletools.genops(stream):
                if last is not None:
                    found.append((*last, at + place))
                last = (op.name, argument, at + place)
        except Exception:  # spoilt by an earlier mutation: pickletools raises what it likes
            break
        at += stream.tell()
    return found


def _opcode(name: str, raw: bytes, data: bytes, ops: list[Op], chance: Random) -> bytes:
    how = chance.random()
    if how < 0.1:
        return b""
    if how < 0.2:
        return raw + raw
    if how < 0.3:
        start, stop = chance.choice(ops)[2:]
        return data[start:stop]
    if name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE"):
        return _pickled(chance.choice((*NUMBERS, *WORDS[:6], None, True)))
    if "UNICODE" in name or "STRING" in name:
        words = [argument for op, argument, _, _ in ops if op == name]
        return _pickled(chance.choice((chance.choice(WORDS), chance.choice(words), chance.choice(NUMBERS), None)))
    if name in ("GLOBAL", "STACK_GLOBAL", "INST"):
        return (b"00" if name == "STACK_GLOBAL" else b"") + chance.choice(GLOBALS)
    if name in ("BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"):
        return chance.choice((b"h", b"q")) + bytes([chance.randrange(256)])
    if "BYTES" in name or "BYTEARRAY" in name:
        size = chance.choice((0, 1, 7, 1000))
        return b"B" + struct.pack("<I", size) + chance.randbytes(size)
    return bytes([chance.choice(b"Rb\x81\x92t\x85\x86\x87eus02()}]NQ\x93.\x90\x91\x8f")])


def _pickled(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _unzipped(data: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
    """Records of an archive; none of one that an earlier mutation spoilt, for which zipfile raises what it likes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info, archive.read(info)) for info in archive.infolist()]
    except Exception:
        return []


def _zipped(data: bytes, chance: Random) -> Edited | None:
    records = _unzipped(data)
    pickles = [number for number, (info, _) in enumerate(records) if info.filename.endswith(".pkl")]
    if not pickles:
        return None
    which = chance.choice(pickles)
    made = edit_pickle(records[which][1], chance)
    if made is None or records[which][1][:2] == b"PK":
        return None
    records[which] = records[which][0], made[0]
    return _written(records), made[1]


# ---- zip archives ----------------------------------------------------------------------------------------------------

#: Signature → name, and offset and size of each field.
FIELDS: dict[bytes, tuple[str, tuple[tuple[int, int], ...]]] = {
    b"PK\x01\x02": (
        "entry",
        (
            (4, 2),
            (8, 2),
            (10, 2),
            (16, 4),
            (20, 4),
            (24, 4),
            (28, 2),
            (30, 2),
            (32, 2),
            (34, 2),
            (42, 4),
            (46, 1),
            (50, 4),
        ),
    ),
    b"PK\x03\x04": ("record", ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2), (30, 1), (34, 4))),
    b"PK\x05\x06": ("end", ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))),
    b"PK\x06\x06": ("end64", ((4, 8), (24, 8), (32, 8), (40, 8), (48, 8))),
    b"PK\x06\x07": ("locator", ((4, 4), (8, 8), (16, 4))),
    b"PK\x07\x08": ("descriptor", ((4, 4), (8, 4), (12, 4), (16, 4))),
}
VALUES = (0, 1, 8, 9, 99, 0x8000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def edit_zip(data: bytes, chance: Random) -> Edited | None:
    """A field of an archive, which then disagrees with its twin, or another set of records with valid fields."""
    if chance.random() < 0.3 and (made := _records(data, chance)) is not None:
        return made
    places = [(mark, at) for mark in FIELDS for at in _all(data, mark)]
    if not places:
        return None
    made, said = bytearray(data), []
    for _ in range(chance.choice((1, 1, 2))):
        mark, at = chance.choice(places)
        name, fields = FIELDS[mark]
        offset, size = chance.choice(fields)
        old = int.from_bytes(made[at + offset : at + offset + size], "little")
        value = chance.choice((*VALUES, old + 1, old - 1, old ^ 0x20, len(data))) & ((1 << 8 * size) - 1)
        made[at + offset : at + offset + size] = value.to_bytes(size, "little")
        said.append(f"{name} at {at}, field {offset} is {value}")
    return bytes(made[: max(len(data), 1)]), "; ".join(said)


def _all(data: bytes, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0 and len(found) < 500:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


def _records(data: bytes, chance: Random) -> Edited | None:
    records = _unzipped(data)
    if not records:
        return None
    at = chance.randrange(len(records))
    info, content = records[at]
    how = chance.choice(("gone", "twice", "packed", "named", "empty", "short", "order"))
    if how == "gone":
        del records[at]
    elif how == "twice":
        records.append((info, chance.choice((content, b"", chance.randbytes(len(content))))))
    elif how == "packed":
        info.compress_type = zipfile.ZIP_DEFLATED
    elif how == "named":
        info.filename = chance.choice(
            ("../x", "/x", "", "a" * 3000, "archive/data/-1", info.filename + "/x", "\x1b[31m")
        )
    elif how == "order":
        chance.shuffle(records)
    else:
        records[at] = info, content[: 0 if how == "empty" else len(content) // 2]
    return _written(records), f"record {info.filename[:60]!a} is {how}"


def _written(records: list[tuple[zipfile.ZipInfo, bytes]]) -> bytes:
    import warnings

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice is what was asked for
        for info, content in records:
            fresh = zipfile.ZipInfo(info.filename)
            fresh.compress_type = info.compress_type
            archive.writestr(fresh, content)
    return out.getvalue()


# ---- words -----------------------------------------------------------------------------------------------------------


def edit_text(data: bytes, chance: Random) -> Edited | None:
    """A short file, as trackers are: another word, or number."""
    word = str(chance.choice((*WORDS, *NUMBERS[:18], "global_step4", "../global_step4")))
    return word.encode("utf-8", "surrogatepass"), f"says {word[:40]!a}"
