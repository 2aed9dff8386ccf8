"""Small files that ask for much: each opens, or is refused as `UnsafeError`, within 2 s of CPU and 512 MB of memory.

Each file is opened in a process of its own: one that crashes it, or takes all memory, fails one test. On a machine
whose Python is slow at that moment, the seconds are those of a machine that takes 60 ms for a million turns of a loop.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

SECONDS, MEMORY = 2.0, 512 << 20
PRIME = (1 << 61) - 1  # the hash of a number is the number modulo this
MEGABYTE = 1_000_000
Body = Callable[[], bytes]

CHILD = """
import json, os, pathlib, resource, sys, time
import workbench as wb
from workbench.core.jsonable import jsonable
from workbench.errors import UnsafeError, WorkbenchError

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def look(path, verify):
    ckpt = wb.open(path, cache=False)
    repr(ckpt), ckpt.step
    for key in ckpt.objects:
        json.dumps(jsonable(ckpt.objects[key]))
    if verify:
        wb.verify(path)

def measured(path, verify):
    base, start = peak(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    room = 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1])
    resource.setrlimit(resource.RLIMIT_AS, (room + (3 << 30),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(start) + 20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        look(path, verify)
        said = "opened"
    except WorkbenchError as error:
        said = f"{type(error).__name__}: {error}"
    seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - start
    if seconds > float(sys.argv[2]):
        seconds /= max(pace() / 0.06, 1)
    return said, seconds, peak() - base

def pace():
    start, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number * number % 7
    return time.process_time() - start

look(sys.argv[1], True)  # what opening imports is not the bomb's
for line in sys.stdin:
    path, verify = json.loads(line)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, json.dumps(measured(path, verify)).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as answer:
        said = answer.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)
"""


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def number(value: int) -> bytes:
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw


def binary(size: int) -> bytes:
    return b"B" + struct.pack("<I", size) + b"x" * size


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(("
    + text("storage")
    + b"ctorch\nFloatStorage\n"
    + text("0")
    + text("cpu")
    + b"K\x10tQK\x00(K\x04K\x04t(K\x04K\x01t\x89}tR"
)
PAD = text("pad") + binary(3 * MEGABYTE) + b"s"  # beyond any size up to which a reader looks closer


def state(value: bytes, before: bytes = b"") -> bytes:
    return b"\x80\x03}" + text("w") + TENSOR + b"s" + before + text("d") + value + b"s."


def copies(function: str, argument: bytes, times: int) -> bytes:
    module, name = function.split()
    return b"c%s\n%s\nq\x010%s\x85q\x020](" % (module.encode(), name.encode(), argument) + b"h\x01h\x02R" * times + b"e"


def keys(each: list[bytes], batch: int = 1000) -> bytes:
    return b"}" + b"".join(
        b"(" + b"".join(key + b"N" for key in each[at : at + batch]) + b"u" for at in range(0, len(each), batch)
    )


def collide(count: int) -> list[bytes]:
    return [number(k * PRIME) for k in range(1, count + 1)]


def equal_hashes(count: int) -> list[bytes]:
    """Pairs of small numbers whose hashes are all the same: CPython's tuple hash, solved for its second number."""
    one, two, five, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    turn = lambda x: ((x << 31) | (x >> 33)) & mask  # noqa: E731
    back = lambda x: ((x >> 31) | (x << 33)) & mask  # noqa: E731
    inverse, lane, out, first = pow(two, -1, 1 << 64), back(12345 * pow(one, -1, 1 << 64) & mask), [], 0
    while len(out) < count:
        first += 1
        acc = turn((five + first * two) & mask) * one & mask
        second = (lane - acc) * inverse & mask
        if second < PRIME:
            out.append(number(first) + number(second) + b"\x86")
    return out


@cache
def walk_of_slots(bits: int) -> list[bytes]:
    """Numbers of 31 bits: most fill the slots that a dict probes one after the other, the rest run into them."""
    size, rng = 1 << bits, random.Random(1)
    path, slot = [], 0
    for _ in range(size // 2):
        path.append(slot)
        slot = (5 * slot + 1) % size
    full, tail = set(path), []
    first = set(path[: len(path) // 4])
    while len(tail) < size // 8:
        value, slot = rng.randrange(size, 1 << 31), 0
        shifted, slot = value, value % size
        while shifted and slot in full:
            shifted >>= 5
            slot = (5 * slot + shifted + 1) % size
        if not shifted and slot in first:
            tail.append(value)
    return [b"J" + struct.pack("<i", n) for n in path + tail]


def shared(levels: int) -> bytes:
    made = b"N\x85q\x010" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(1, levels))
    return made + b"h%c" % levels


LIST, SET = b"](" + b"N" * 200_000 + b"e", b"](" + b"".join(number(i) for i in range(100_000)) + b"e"
DICT = b"}(" + b"".join(number(i) + b"N" for i in range(100_000)) + b"u"
BIG = b"\x8b" + struct.pack("<i", MEGABYTE) + b"\x7f" * MEGABYTE
WORDS = text("a" * MEGABYTE)
ARGUMENTS = b"cfoo\nbar\nq\x010(" + b"N" * 200_000 + b"tq\x020]("
ARRAY = (
    b"cnumpy._core.multiarray\n_reconstruct\nq\x010cnumpy\nndarray\nK\x00\x85C\x01b\x87q\x020"
    + b"cnumpy\ndtype\n"
    + text("f8")
    + b"\x89\x88\x87R(K\x03"
    + text(">")
    + b"NNNJ\xff\xff\xff\xff"
    + b"J\xff\xff\xff\xffK\x00tbq\x030"
    + b"(K\x01"
    + number(125_000)
    + b"\x85h\x03\x89"
    + binary(MEGABYTE)
    + b"tq\x040]("
    + b"h\x01h\x02Rh\x04b" * 5000
    + b"e"
)
PARAMETER = (
    TENSOR
    + b"q\x010"
    + DICT
    + b"q\x020ctorch._utils\n_rebuild_parameter_with_state\nq\x030]("
    + b"h\x03(h\x01\x88}h\x02tR" * 5000
    + b"e"
)

BOMBS: dict[str, Body] = {
    "int keys of one hash, 20,000": lambda: keys(collide(20_000)),
    "int keys of one hash, 150,000": lambda: keys(collide(150_000)),
    "int keys of one hash, one batch": lambda: keys(collide(150_000), 1 << 30),
    "int keys of one hash, one by one": lambda: b"}" + b"".join(key + b"Ns" for key in collide(100_000)),
    "int keys of one hash, DICT": lambda: b"(" + b"".join(key + b"N" for key in collide(100_000)) + b"d",
    "a set of ints of one hash": lambda: b"\x8f(" + b"".join(collide(100_000)) + b"\x90",
    "a frozenset of ints of one hash": lambda: b"(" + b"".join(collide(100_000)) + b"\x91",
    "set(ints of one hash)": lambda: b"cbuiltins\nset\n](" + b"".join(collide(100_000)) + b"e\x85R",
    "dict(ints of one hash)": lambda: (
        b"ccollections\nOrderedDict\n](" + b"".join(key + b"N\x86" for key in collide(100_000)) + b"e\x85R"
    ),
    "int('…') keys of one hash": lambda: (
        b"cbuiltins\nint\nq\x010" + keys([b"h\x01" + text(str(k * PRIME)) + b"\x85R" for k in range(1, 100_001)])
    ),
    "tuple keys of one hash": lambda: keys(equal_hashes(60_000)),
    "tuple keys of one hash, one batch": lambda: keys(equal_hashes(60_000), 1 << 30),
    "small int keys in one row of slots": lambda: keys(walk_of_slots(16)),
    "small int keys in one row of slots, one batch": lambda: keys(walk_of_slots(16), 1 << 30),
    "an int of 5,000 bytes as a key": lambda: b"}" + number(1 << 40_000) + TENSOR + b"s",
    "an int of 900 bytes as a key": lambda: b"}" + number(1 << 7200) + TENSOR + b"s",
    "a 1 MB int as a key, often": lambda: b"}" + BIG + b"q\x010" + b"h\x01Ns" * 150_000,
    "copies of bytearray": lambda: copies("builtins bytearray", binary(MEGABYTE), 5000),
    "copies of bytes": lambda: copies("builtins bytes", b"cbuiltins\nbytearray\n" + binary(MEGABYTE) + b"\x85R", 5000),
    "copies of list": lambda: copies("builtins list", LIST, 5000),
    "copies of tuple": lambda: copies("builtins tuple", LIST, 5000),
    "copies of set": lambda: copies("builtins set", SET, 5000),
    "copies of frozenset": lambda: copies("builtins frozenset", SET, 5000),
    "copies of dict": lambda: copies("builtins dict", DICT, 5000),
    "copies of OrderedDict": lambda: copies("collections OrderedDict", DICT, 5000),
    "copies of Counter": lambda: copies("collections Counter", DICT, 5000),
    "copies of torch.Size": lambda: copies("torch Size", b"](" + b"K\x01" * 200_000 + b"e", 5000),
    "copies by encode": lambda: copies("_codecs encode", WORDS, 5000),
    "copies of a path": lambda: copies("pathlib PosixPath", WORDS, 5000),
    "copies of arguments": lambda: ARGUMENTS + b"h\x01h\x02R" * 5000 + b"e",
    "copies of arguments, NEWOBJ": lambda: ARGUMENTS + b"h\x01h\x02\x81" * 5000 + b"e",
    "copies of keyword arguments": lambda: (
        b"cfoo\nbar\nq\x010}("
        + b"".join(text(f"k{i}") + b"N" for i in range(50_000))
        + b"uq\x020]("
        + b"h\x01)h\x02\x92" * 5000
        + b"e"
    ),
    "copies of swapped arrays": lambda: ARRAY,
    "copies of attributes": lambda: PARAMETER,
    "ints of 4,300 digits": lambda: copies("builtins int", text("9" * 4300), 200_000),
    "a key of 2**40 leaves": lambda: b"}" + shared(40) + b"Ns",
    "a key 9,900 deep": lambda: b"}N" + b"\x85" * 9900 + b"Ns",
    "two equal keys 9,000 deep": lambda: b"}N" + b"\x85" * 9000 + b"NsN" + b"\x85" * 9000 + b"Ns",
    "a key 1,500,000 deep": lambda: b"}N" + b"\x85" * 1_500_000 + b"Ns",
    "a set of one 1,500,000 deep": lambda: b"\x8f(N" + b"\x85" * 1_500_000 + b"\x90",
    "tuples 1,500,000 deep": lambda: b"N" + b"\x85" * 1_500_000,
    "dicts 200,000 deep": lambda: b"}K\x01" * 200_000 + b"N" + b"s" * 200_000,
    "calls 200,000 deep": lambda: b"cfoo\nbar\nq\x010" + b"h\x01" * 200_000 + b"N" + b"\x85R" * 200_000,
    "2,300,000 empty sets": lambda: b"](" + b"\x8f" * 2_300_000 + b"e",
    "20,000,000 empty sets": lambda: b"](" + b"\x8f" * 20_000_000 + b"e",
    "20,000,000 empty dicts": lambda: b"](" + b"}" * 20_000_000 + b"e",
    "1,000,000 instances": lambda: b"cfoo\nbar\nq\x010](" + b"h\x01)R" * 1_000_000 + b"e",
    "250,000 classes": lambda: b"](" + b"".join(b"c%x\na\n" % i for i in range(250_000)) + b"e",
    "classes of one call": lambda: copies("torch._utils _rebuild_parameter", b"N", 500_000),
    "lists of 2**80 paths": lambda: (
        b"]q\x010" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(1, 80)) + b"h\x50"
    ),
    "tensors of 2**40 paths": lambda: (
        b"}q\x01"
        + text("t")
        + TENSOR
        + b"s0"
        + b"".join(b"}q%c" % (i + 1) + text("a") + b"h%cs" % i + text("b") + b"h%cs0" % i for i in range(1, 40))
        + b"h\x28"
    ),
    "100 tensors below 190 keys of 20,000 characters": lambda: (
        (b"}" + text("k" * 20_000)) * 190
        + b"}("
        + b"".join(text(f"w{i}") + TENSOR for i in range(100))
        + b"u"
        + b"s" * 190
    ),
    "a step of 1 MB": lambda: BIG + b"s" + text("step") + BIG + b"s" + text("global_step") + BIG,
    "an int of 500,000 digits": lambda: b"L" + b"9" * 500_000 + b"L\n",
}
#: Refused for what they are rather than for what they cost.
NO_BOMBS = {"tuples 1,500,000 deep", "dicts 200,000 deep", "calls 200,000 deep", "an int of 500,000 digits"}


def archive(path: Path, pickled: bytes) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/0", b"\0" * 64)
    return str(path)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens a file in a process of its own, forked from one that has opened a healthy file."""
    healthy = archive(tmp_path_factory.mktemp("healthy") / "healthy.pt", state(b"N"))
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, healthy, str(SECONDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def look(path: str, verify: bool = False) -> str:
        parent.stdin.write(json.dumps([path, verify]) + "\n")
        parent.stdin.flush()
        code, answer = json.loads(parent.stdout.readline())
        assert code == 0, f"ended with {code}"
        said, seconds, memory = json.loads(answer)
        assert said == "opened" or said.startswith(("UnsafeError: ", "CorruptError: ")), said
        assert seconds <= SECONDS, f"{seconds:.1f} s of CPU: {said}"
        assert memory <= MEMORY, f"{memory >> 20:,} MB: {said}"
        assert len(said) < 700 and said.isprintable()
        return said

    yield look
    parent.communicate()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "padded", [pytest.param(False, id="short"), pytest.param(True, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_opens_or_is_refused(opened, name: str, padded: bool, tmp_path: Path) -> None:
    said = opened(archive(tmp_path / "bomb.pt", state(BOMBS[name](), PAD if padded else b"")))
    if said.startswith("CorruptError"):
        assert name in NO_BOMBS, said


@pytest.mark.parametrize("name", ["copies of list", "a key of 2**40 leaves", "int keys of one hash, 150,000"])
def test_a_bomb_in_metadata_is_refused(opened, name: str, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"\0" * 100)
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + BOMBS[name]() + b".")
    assert opened(str(tmp_path)).startswith("UnsafeError")


def test_verify_takes_no_more_than_opening(opened, tmp_path: Path) -> None:
    classes = b"](" + b"".join(b"c%x\na\n" % i for i in range(9000)) + b"e"
    assert opened(archive(tmp_path / "bomb.pt", state(classes)), verify=True) == "opened"
