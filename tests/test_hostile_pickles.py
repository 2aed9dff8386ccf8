"""Pickles made to hurt. Nothing in them runs, nothing blows up, and what comes out is one of our errors or
inert leaves.
"""

from __future__ import annotations

import collections
import copyreg
import json
import os
import pickle
import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from workbench.core.jsonable import jsonable
from workbench.core.pickles import arrays, standins, unpickle
from workbench.core.pickles.constructors import torch_storage
from workbench.core.pickles.standins import Call, DTypeRef, Opaque, PickledDict
from workbench.core.pickles.unpickle import TABLE, loads, loads_with_globals
from workbench.core.ziparchive import read_directory
from workbench.errors import CorruptError, UnsafeError, WorkbenchError

CASES = 5000 if os.environ.get("WORKBENCH_SLOW") == "1" else 300
MEMORY = 64 << 20  # bytes that any of these small files may take at its peak
SECONDS = 30.0  # of this thread's CPU, with tracemalloc: a hang, not a slow or busy machine


def text(word: str) -> bytes:
    raw = word.encode()
    return b"X" + struct.pack("<L", len(raw)) + raw


def glob(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def outcome(data: bytes, **options: object) -> object:
    """What comes out, within the bounds of memory and time: the value, or the WorkbenchError."""
    tracemalloc.start()
    start = time.thread_time()
    try:
        result: object = loads(data, what="'bad'", persistent_load=torch_storage, **options)
        json.dumps(jsonable(result), allow_nan=False)
        assert len(repr(result) if isinstance(result, Opaque) else "") < 200
    except WorkbenchError as error:
        result = error
        assert str(error).isprintable() and len(str(error)) < 700
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY, f"{peak:,} bytes"
    assert time.thread_time() - start < SECONDS
    return result


def refused(data: bytes, kind: type[WorkbenchError] = WorkbenchError) -> str:
    result = outcome(data)
    assert isinstance(result, kind), result
    return str(result)


def attacks(command: str) -> dict[str, bytes]:
    call = text(command) + b"\x85R"
    pair = b"(" + text(command) + b"t"
    return {
        "reduce os.system": b"\x80\x02" + glob("os", "system") + call + b".",
        "reduce posix.system": b"\x80\x02" + glob("posix", "system") + call + b".",
        "reduce builtins.eval": b"\x80\x02" + glob("builtins", "eval") + call + b".",
        "reduce __builtin__.exec": glob("__builtin__", "exec") + call + b".",
        "inst": b"(" + text(command) + b"ios\nsystem\n.",
        "obj": b"(" + glob("os", "system") + text(command) + b"o.",
        "newobj": b"\x80\x02" + glob("subprocess", "Popen") + pair + b"\x81.",
        "newobj_ex": b"\x80\x04" + glob("subprocess", "Popen") + pair + b"}\x92.",
        "stack_global": b"\x80\x04" + text("os") + text("system") + b"\x93" + call + b".",
        "dotted": b"\x80\x04" + text("workbench.core.pickles.unpickle") + text("gc.__class__.__base__") + b"\x93)R.",
        "nested getattr": glob("builtins", "getattr")
        + b"("
        + glob("builtins", "__import__")
        + text("os")
        + b"\x85R"
        + text("system")
        + b"tR"
        + call
        + b".",
        "own functions": b"\x80\x04"
        + text("workbench.core.pickles.unpickle")
        + text("os.system")
        + b"\x93"
        + call
        + b".",
        "functools.partial": glob("functools", "partial") + b"(" + glob("os", "system") + text(command) + b"tR)R.",
        "map": glob("builtins", "map") + b"(" + glob("os", "system") + b"(" + text(command) + b"ltR.",
        "set of a generator": glob("builtins", "set")
        + glob("builtins", "map")
        + b"("
        + glob("os", "system")
        + b"("
        + text(command)
        + b"ltR\x85R.",
        "rebuild_from_type": glob("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + glob("os", "system")
        + b"N("
        + text(command)
        + b"tNtR.",
        "defaultdict factory": glob("collections", "defaultdict")
        + glob("os", "getcwd")
        + b"\x85R"
        + text("k")
        + b"Ns.",
        "build setstate": glob("os", "system")
        + b")R"
        + b"}"
        + text("__setstate__")
        + glob("os", "system")
        + b"sb"
        + text(command)
        + b"b.",
        "build on class": glob("a", "b") + b"N}" + text("__reduce__") + glob("os", "system") + b"s\x86b.",
        "sleep": glob("time", "sleep") + b"J\xff\xff\xff\x7f\x85R.",
        "load_from_bytes": glob("torch.storage", "_load_from_bytes") + b"C\x04N.N.\x85R.",
        "numpy load": glob("numpy", "load") + call + b".",
        "bdb, runpy": glob("runpy", "run_path") + call + b".",
        "pickle in pickle": glob("pickle", "loads") + b"C\x12cos\nsystem\nX\x01\0\0\0x.\x85R.",
        "copyreg newobj": glob("copyreg", "__newobj__") + b"(" + glob("os", "system") + text(command) + b"tR.",
        "reconstructor": glob("copyreg", "_reconstructor")
        + b"("
        + glob("os", "system")
        + glob("builtins", "object")
        + b"NtR.",
    }


@pytest.mark.parametrize("name", attacks("x"))
def test_nothing_runs(name: str, canary: Path) -> None:
    command = f"touch {canary}"
    data = attacks(command)[name]
    result = outcome(data)
    assert (
        isinstance(result, (Opaque, PickledDict, WorkbenchError))
        or result is None
        or isinstance(result, type(standins.Inert))
    ), result
    assert not canary.exists()
    with pytest.raises(WorkbenchError):
        loads(data, what="'.metadata'", strict=True)
    assert not canary.exists()


def test_the_canary_would_sing(canary: Path) -> None:
    """The same bytes do run under ``pickle.loads``: the test above can fail."""
    pickle.loads(attacks(f"touch {canary}")["reduce os.system"])
    assert canary.exists()


def test_foreign_globals_are_listed_even_when_only_named() -> None:
    found = loads_with_globals(b"(" + glob("os", "system") + glob("evil\x1b[2J", "x") + b"l.", what="x")
    assert found.globals == {"os.system", "evil\x1b[2J.x"}
    assert all(repr(item).isprintable() for item in found.value)


STATES = [
    b"}" + text("x") + b"K\x01s",
    b"N}" + text("x") + b"K\x01s\x86",
    b"N}" + text("__defaults__") + b"(K\x01ts\x86",
    b"}" + text("__class__") + b"Ns",
    b"K\x05",
    b"N}" + text("function") + b"Ns\x86",
    b"N}" + text("__init__") + b"Ns\x86",
    b"N}" + text("__setstate__") + b"Ns\x86",
]


def test_build_changes_no_class_and_no_function_of_ours() -> None:
    def snapshot() -> list[object]:
        parts: list[object] = []
        for value in TABLE.values():
            parts.append(repr(value))
            if isinstance(value, Call):
                function = value.function
                parts += [
                    function,
                    getattr(function, "__defaults__", 0),
                    dict(getattr(function, "__dict__", {})),
                ]
        classes = [
            value
            for module in (arrays, standins, unpickle)
            for value in vars(module).values()
            if isinstance(value, type)
        ]
        return parts + [sorted(vars(value)) for value in classes]

    before = snapshot()
    for module, name in TABLE:
        for state in STATES:
            result = outcome(glob(module, name) + state + b"b.")
            # a numpy dtype's class is the one type in the table; its __setstate__ lacks an argument then
            assert isinstance(result, CorruptError), (module, name, state, result)
            outcome(glob(module, name) + b")R" + state + b"b.")
    assert snapshot() == before


def test_everything_in_the_table_survives_any_call_and_item() -> None:
    rng = random.Random(3)
    values = [
        b"N",
        b"K\x05",
        b"J\xff\xff\xff\xff",
        text("9" * 300),
        b"]",
        b"}",
        b")",
        b"\x8f",
        b"G\x7f\xf8\0\0\0\0\0\0",
        b"C\x03abc",
        b"\x8a\x0a" + b"\xff" * 9 + b"\x7f",
        text("latin1"),
        text("f8"),
        glob("torch", "float32"),
        glob("torch", "FloatStorage"),
        glob("numpy", "dtype"),
        glob("builtins", "range") + b"J\xff\xff\xff\x7f\x85R",
        glob("os", "system"),
        glob("os", "system") + b")R",
        b"(K\x01K\x02t",
        b"(" + text("storage") + glob("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x05tQ",
    ]
    tails = [
        b"",
        b"K\x01a",
        b"(K\x01K\x02e",
        b"K\x01K\x02s",
        b"(K\x01K\x02u",
        b"(K\x01\x90",
        b"}b",
        b"N}\x86b",
        b"(K\x01)NNtb",
        b")R",
        b")\x81",
    ]
    for module, name in TABLE:
        for _ in range(CASES // 15):
            args = b"(" + b"".join(rng.choice(values) for _ in range(rng.randrange(9))) + b"t"
            data = (
                b"\x80\x04"
                + glob(module, name)
                + args
                + rng.choice((b"R", b"R", b"R", b"\x81"))
                + rng.choice(tails)
                + b"."
            )
            try:
                json.dumps(jsonable(loads(data, what="x", persistent_load=torch_storage)), allow_nan=False)
            except WorkbenchError as error:
                assert str(error).isprintable()


def put(index: int) -> bytes:
    return b"r" + struct.pack("<L", index)


BOMBS: dict[str, bytes] = {
    "memo, LONG_BINPUT": b"\x80\x02N" + put(0x7FFFFFFF) + b".",
    "memo, LONG_BINPUT of a GB": b"\x80\x02N" + put(0x04000000) + b".",
    "memo, PUT": b"Np4294967295\n.",
    "memo, PUT of nonsense": b"Np99999999999999999999999999\n.",
    "extension 1": b"\x80\x02\x82\x01.",
    "extension 4": b"\x80\x02\x84\x01\0\0\0.",
    "binbytes8": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "binbytes8, 2**63": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 63) + b".",
    "binunicode8": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "binbytes": b"\x80\x03B\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "long4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "bytearray(10**12)": glob("builtins", "bytearray") + b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R.",
    "bytes(10**12)": glob("__builtin__", "bytes") + b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R.",
    "tuple(range)": glob("builtins", "tuple")
    + glob("builtins", "range")
    + b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R\x85R.",
    "int of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "out of band": b"\x80\x05\x97.",
    "protocol 9": b"\x80\x09N.",
    "many marks": b"(" * 100_000 + b".",
    "stack underflow": b"\x80\x02R.",
    "empty stop": b".",
    "pop the mark of another": b"\x80\x02(0t.",
    "get of nothing": b"h\x05.",
    "key nested 100,000 deep": b"})" + b"\x85" * 100_000 + b"Ns.",
    "key of 2**60 elements": b"})" + b"2\x86" * 60 + b"Ns.",
    "set of 2**60 elements": b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.",
    "frozenset of 2**60": b"\x80\x04()" + b"2\x86" * 60 + b"\x91.",
    "set() of 2**60": glob("builtins", "set") + b"()" + b"2\x86" * 60 + b"l\x85R.",
    "key through tuple()": b"})" + (b"q\x000" + glob("builtins", "tuple") + b"(h\0h\0l\x85R") * 60 + b"Ns.",
    "one dear key, often": b"})" + b"\x85" * 9000 + b"\x94" + b"0" + b"h\0Ns" * 100_000 + b".",
    "numpy of a lying shape": b"",
    "torch.Size of words": glob("torch", "Size") + b"(" + text("a") + b"t\x85R.",
    "negative shape": glob("torch._utils", "_rebuild_tensor") + b"(NK\x00(J\xff\xff\xff\xfft(K\x01ttR.",
    "a million sets": b"\x80\x04" + b"\x8f" * 1_000_000 + b".",
    "no opcode": b"\x80\x04\xee.",
}
BOMBS["numpy of a lying shape"] = pickle.dumps(np.zeros(3), 2).replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85")


LONG = [
    "memo, LONG_BINPUT",
    "memo, PUT",
    "memo, PUT of nonsense",
    "extension 1",
    "extension 4",
    "binbytes8",
    "binbytes8, 2**63",
    "binunicode8",
    "bytearray8",
    "binbytes",
    "long4",
    "out of band",
    "protocol 9",
    "no opcode",
]


#: One of each kind: a memo, the registry, a length, an opcode. The others are as far into the stream.
FEW = ("memo, LONG_BINPUT", "extension 4", "binbytes8", "no opcode")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in FEW else pytest.mark.slow) for one in LONG])
def test_length_hides_no_bomb(name: str) -> None:
    """Streams too long for the exact walk."""
    with pytest.raises(WorkbenchError) as caught:
        loads(b"\x80\x04" + b"N0" * (2 << 20) + BOMBS[name], what="x")
    assert "4,194,3" in str(caught.value), caught.value  # refused by place, before anything was decoded


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_cost_anything(name: str) -> None:
    if name == "numpy of a lying shape":
        assert b"J\xff\xff\xff\x7f" in BOMBS[name]
    refused(BOMBS[name])


def test_a_bomb_is_called_unsafe_and_its_byte_is_named() -> None:
    assert "byte 3: memo index 2,147,483,647 after 3 opcodes" in refused(BOMBS["memo, LONG_BINPUT"], UnsafeError)
    assert "extension registry" in refused(BOMBS["extension 1"], UnsafeError)
    assert "byte 2" in refused(BOMBS["binbytes8"])
    assert "more than a trillion nested elements" in refused(BOMBS["key of 2**60 elements"], UnsafeError)


def test_an_extension_of_this_process_is_not_handed_out() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        pickle.loads(b"\x80\x02\x82\xf0.")  # now it is in copyreg's cache, which asks no find_class
        refused(b"\x80\x02\x82\xf0.", UnsafeError)
        with pytest.raises(UnsafeError, match="extension registry"):  # longer than the walk usually goes
            loads(b"\x80\x02(" + b"N" * (5 << 20) + b"l\x82\xf0\x86.", what="x")
    finally:
        copyreg.remove_extension("os", "system", 240)


def nodes(shown: object) -> int:
    """How many JSON values there are in one, itself counted."""
    parts = shown.values() if isinstance(shown, dict) else shown if isinstance(shown, list) else ()
    return 1 + sum(nodes(part) for part in parts)


def test_deep_lists_and_laughing_dags_are_decoded_and_shown_within_bounds() -> None:
    deep = loads(b"]" * 50_000 + b"a" * 49_999 + b".", what="x")
    shown = jsonable(deep)
    assert "nested deeper than 64" in json.dumps(shown, ensure_ascii=False)
    assert nodes(shown) == 64 + 1  # the lists, and the words
    laughs = loads(b"]" + b"q\0(h\0h\0l" * 60 + b".", what="x")  # 2**60 paths
    assert isinstance(laughs, list) and len(laughs) == 2
    for limit in (1000, 20_000):  # each list that was open when the nodes ran out adds a word or two
        assert limit // 2 < nodes(jsonable(laughs, max_nodes=limit)) < limit + 200
    called = loads(glob("a", "b") + b"]" + b"q\x000(h\0h\0l" * 60 + b"\x85R.", what="x")
    assert called.args[0][0] is called.args[0][1] and len(repr(called)) < 200
    chain = outcome(glob("a", "b") + b")R" + b"q\1}" + text("me") + b"h\1sb.")
    assert isinstance(chain, Opaque) and chain.state["me"] is chain
    json.dumps(jsonable(chain))
    hostile = outcome(b"(" + glob("a" * 100_000, "b") + b")R" + b"l.")
    assert len(repr(hostile[0])) < 200


def test_numpy_arrays_of_objects_stay_closed() -> None:
    found = outcome(pickle.dumps(np.array([{}, None])))
    assert isinstance(found.refused, Opaque) and found.size == 0
    item = outcome(pickle.dumps(np.array([1, 2])).replace(b"b.", b"bK\x00K\x07s."))
    assert isinstance(item, CorruptError)


def test_values_take_no_state_from_a_pickle() -> None:
    storage = b"(" + text("storage") + glob("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x05tQ"
    tensor = glob("torch._utils", "_rebuild_tensor") + b"(" + storage + b"K\x00(K\x05t(K\x01ttR"
    assert outcome(tensor + b".").shape == (5,)
    for value in (tensor, storage, glob("torch", "float32"), glob("torch", "LongStorage")):
        for state in STATES:
            refused(value + state + b"b.", CorruptError)
    assert TABLE["torch", "float32"] == DTypeRef("float32")


def mutate(rng: random.Random, data: bytes) -> bytes:
    bad = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        choice, at = rng.random(), rng.randrange(len(bad))
        if choice < 0.4:
            bad[at] = rng.randrange(256)
        elif choice < 0.6:
            bad[at] ^= 1 << rng.randrange(8)
        elif choice < 0.75:
            del bad[at : at + rng.randrange(1, 5)]
        elif choice < 0.9:
            end = rng.randrange(at, len(bad) + 1)
            bad[at:at] = bad[at : min(end, at + 40)]
        else:
            del bad[max(1, at) :]
        if not bad:
            return b"."
    return bytes(bad)


@pytest.mark.parametrize("protocol", range(6))
def test_damaged_pickles_raise_our_errors_only(protocol: int) -> None:
    rng = random.Random(protocol)
    value = {
        "a": [1, 2.5, None, "text", b"bytes", (1, (2, 3))],
        "n": np.arange(5),
        "s": {1, 2},
        "o": collections.OrderedDict(x=1),
        "f": frozenset([3]),
        "d": np.float32(1),
        "c": collections.Counter("ab"),
        "p": Path("a"),
    }
    data = pickle.dumps(value, protocol)
    refusals = 0
    tracemalloc.start()
    for _ in range(CASES):
        bad = mutate(rng, data)
        try:
            json.dumps(jsonable(loads(bad, what="x", persistent_load=torch_storage)), allow_nan=False)
        except WorkbenchError as error:
            refusals += 1
            assert str(error).isprintable()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals > CASES // 10 and peak < MEMORY


@pytest.mark.parametrize("seed", range(3))
def test_random_opcodes_raise_our_errors_only(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [b"N", b"K\x01", b"]", b"}", b")", b"(", b"t", b"l", b"d", b"0", b"1", b"2", b"a", b"e", b"s",
              b"u", b"R", b"b", b"\x81", b"\x85", b"\x86",
              b"\x87", b"\x8f", b"\x90", b"\x91", b"\x94", b"q\x00", b"h\x00", b"h\x01", text("a"),
              text("os"), b"\x93", b"Q", b"o", b"\x92",
              glob("os", "system"), glob("builtins", "tuple"), glob("builtins", "set"), glob("collections",
              "OrderedDict"),
              glob("torch._utils", "_rebuild_tensor_v2"), glob("numpy", "dtype"),
              glob("numpy._core.multiarray", "_reconstruct")]  # fmt: skip
    decoded = 0
    for _ in range(CASES * 10):
        data = b"\x80\x04" + b"".join(rng.choice(pieces) for _ in range(rng.randrange(1, 30))) + b"."
        try:
            jsonable(loads(data, what="x"))
            decoded += 1
        except WorkbenchError:
            continue
    assert decoded > CASES // 20


def corpus() -> list[Path]:
    folder = os.environ.get("WORKBENCH_HOSTILE_CORPUS")
    return sorted(path for path in Path(folder).rglob("*") if path.is_file()) if folder else []


@pytest.mark.skipif(
    not os.environ.get("WORKBENCH_HOSTILE_CORPUS"),
    reason="WORKBENCH_HOSTILE_CORPUS names no folder of hostile files",
)
def test_a_corpus_of_hostile_files_that_others_made(monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus()
    assert files, "the folder is empty"
    ran: list[str] = []
    for name in ("system", "popen"):
        monkeypatch.setattr(os, name, lambda *args: ran.append(str(args)))
    readers: list[Callable[[bytes], object]] = [outcome, lambda data: _archive(data)]
    for path in files:
        for reader in readers:
            reader(path.read_bytes())
    assert not ran


def _archive(data: bytes) -> None:
    try:
        archive = read_directory(data, what="x")
    except WorkbenchError as error:
        assert str(error).isprintable()
        return
    for record in archive.records.values():
        try:
            outcome(archive.read(record))
        except WorkbenchError as error:
            assert str(error).isprintable()


def test_the_bytes_that_a_message_names_hold_the_fault() -> None:
    for before in (0, 50_000):
        stream = b"\x80\x02" + b"K\x010" * (before // 3) + glob("builtins", "bytearray") + b"]\x85R."
        fault = stream.index(b"]\x85R") + 2
        with pytest.raises(CorruptError) as told:
            loads(stream, what="x")
        numbers = re.findall(r"[\d,]+(?= to |:)", str(told.value).partition("in bytes")[2])
        low, high = (int(number.replace(",", "")) for number in numbers[:2])
        assert low <= fault < high <= len(stream) and high - low <= 4096
    stream = b"\x80\x02I" + b"9" * 30_000 + b"\n."
    with pytest.raises(CorruptError, match="in bytes 0 to 30,00"):
        loads(stream, what="x")
