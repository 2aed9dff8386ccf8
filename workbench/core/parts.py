"""Parts of a call: each process of an array of jobs runs some of the tasks, and a last one merges their results.

::

    job 1 of 3   ▓▓──────▓▓──────▓▓     alternating stretches of the tasks; the states go to a file, one line each
    job 2 of 3   ──▓▓──────▓▓──────
    job 3 of 3   ────▓▓──────▓▓────
    merge        ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓     the same call again, with the states from the files instead of reading

States are merged in task order, so the result is that of one process. A task is identified by what it reads; if
a later pass depends on what an earlier one found (chunks that cannot be read are not compared), its tasks differ in the
merge and are run there.

A file is JSON, line by line: a header, the states by task, and a digest of all this. Nothing in it is code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

import numpy as np

from workbench import errors
from workbench.core import executors
from workbench.core.dtypes import DType, by_name
from workbench.core.executors import Ordering, TaskRunner, in_order
from workbench.errors import CorruptError, MissingFileError, UsageError, WorkbenchError, WriteError

_NAMED = re.compile(r".+\.[a-z]+\.\d+-of-\d+\.part")

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound=type)

FORMAT = 1
_KNOWN: dict[str, Any] = {}  #: classes of states, by name


def storable(cls: C) -> C:
    """Mark a dataclass whose values are stored in files of parts."""
    assert cls.__name__ not in _KNOWN
    _KNOWN[cls.__name__] = cls
    return cls


class _Local(Ordering):
    """An ordered executor that runs tasks in this process."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise UsageError("a part of a call runs in this process")


class PartialRun(_Local):
    """Runs one part of every pass, and keeps the states; the passes themselves get none.

    Attributes:
        found: encoded states by task.
    """

    def __init__(self, number: int, count: int) -> None:
        """Create a run of one of ``count`` parts.

        Args:
            number: from 1 to ``count``.
        """
        self.number, self.count = number, count
        self.found: dict[str, Any] = {}

    def ordered(self, run: TaskRunner[T, R], tasks: Iterable[T], threads: int, name: str) -> Iterator[tuple[T, R]]:
        with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
            for key, result in in_order(pool, lambda task: (_key(run, task), run(task)), self._mine(run, tasks)):
                self.found[key] = _encoded(result)
        return iter(())

    def _mine(self, run: TaskRunner[T, R], tasks: Iterable[T]) -> Iterator[T]:
        before = 0
        for task in tasks:
            if before // executors.BATCH % self.count == self.number - 1:
                yield task
            before += run.nbytes(task)


class MergedParts(_Local):
    """Uses the states of all parts instead of running tasks.

    Attributes:
        again: number of tasks that were missing from all parts and were run.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found, self.again = found, 0

    def ordered(self, run: TaskRunner[T, R], tasks: Iterable[T], threads: int, name: str) -> Iterator[tuple[T, R]]:
        with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
            yield from in_order(pool, lambda task: (task, self._result(run, task)), tasks)

    def _result(self, run: TaskRunner[T, R], task: T) -> R:
        held = self._found.get(_key(run, task))
        if held is None:
            self.again += 1
            return run(task)
        try:
            result: R = _decoded(held)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"a part holds a state that cannot be decoded: {error!r}; run the part again") from None
        return result


def _key(run: TaskRunner[T, R], task: T) -> str:
    return hashlib.blake2b(run.key(task), digest_size=16).hexdigest()


def part_name(name: str, command: str, number: int, count: int) -> str:
    """Return the default name of a part's file: ``NAME.COMMAND.I-of-N.part``."""
    return f"{name}.{command}.{number}-of-{count}.part"


def is_part(name: str) -> bool:
    """Return whether a file is named like a part by default."""
    return _NAMED.fullmatch(name) is not None


# ---- files -----------------------------------------------------------------------------------------------------------


def write_part(path: str, part: PartialRun, header: Mapping[str, Any]) -> None:
    """Write the states of a part to a file, which appears under its name only when it is complete.

    Args:
        header: the call that the part belongs to; equal for all parts of one call.

    Raises:
        WriteError: the file cannot be written.
    """
    temporary, digest = f"{path}.{os.getpid()}.tmp", hashlib.blake2b(digest_size=16)
    head = {"workbench part": FORMAT, "part": part.number, "parts": part.count, "of": dict(header)}
    try:
        with open(temporary, "wb") as out:
            for line in (head, *part.found.items(), None):
                if line is None:
                    out.write(json.dumps({"digest": digest.hexdigest()}).encode() + b"\n")
                    break
                data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
                digest.update(data)
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise WriteError(f"{path!r} cannot be written: {error.strerror}") from None


def read_parts(paths: Sequence[str]) -> tuple[dict[str, Any], MergedParts]:
    """Read the files of all parts of one call.

    Returns:
        the header that they share, and a replacement for the executor.

    Raises:
        MissingFileError: a file does not exist.
        CorruptError: a file is not a part, or is damaged.
        UsageError: parts are missing, doubled, or of different calls or contents.
    """
    found: dict[str, Any] = {}
    of: dict[int, str] = {}
    first: dict[str, Any] = {}
    for path in paths:
        head = _read(path, found)
        number = head["part"]
        if not first:
            first = head
        if (head["of"], head["parts"]) != (first["of"], first["parts"]):
            raise UsageError(f"{path!r} and {paths[0]!r} are {_different(head, first)}")
        if number in of:
            raise UsageError(f"{path!r} and {of[number]!r} are both part {number} of {head['parts']}")
        of[number] = path
    missing = [str(number) for number in range(1, first["parts"] + 1) if number not in of]
    if missing:
        noun = "part" if len(missing) == 1 else "parts"
        raise UsageError(f"{noun} {', '.join(missing[:20])} of {first['parts']:,} {_are(len(missing))} missing")
    return dict(first["of"]), MergedParts(found)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if one["parts"] != other["parts"]:
        return f"one of {one['parts']} parts and one of {other['parts']}"
    differ = [name for name in one["of"] if one["of"][name] != other["of"].get(name)]
    if differ == ["pins"]:
        return "parts of different contents: the checkpoint changed in between; run all parts again"
    return f"parts of different calls: {', '.join(differ) or 'their options'} differ"


def _read(path: str, found: dict[str, Any]) -> dict[str, Any]:
    def refuse(why: str) -> NoReturn:
        raise CorruptError(f"{path!r} {why}")

    digest, head, end = hashlib.blake2b(digest_size=16), None, None
    try:
        with open(path, "rb") as file:
            for line in file:
                if end is not None:
                    refuse("continues after its end; run the part again")
                value = json.loads(line)
                if isinstance(value, list) and head is not None:
                    key, state = value
                    found[key] = state
                elif head is None and isinstance(value, dict) and value.get("workbench part") == FORMAT:
                    head = value
                elif head is not None and isinstance(value, dict) and "digest" in value:
                    end = value["digest"]
                    continue
                else:
                    refuse("is not a part that `--part` wrote with this version")
                digest.update(line)
    except FileNotFoundError:
        raise MissingFileError(f"{path!r} does not exist: run that part") from None
    except OSError as error:
        refuse(f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        refuse("is not a part that `--part` wrote, or is damaged; run the part again")
    if head is None or end != digest.hexdigest():
        refuse("is damaged or incomplete; run the part again")
    numbers = head.get("part"), head.get("parts")
    if not all(isinstance(number, int) for number in numbers) or not isinstance(head.get("of"), dict):
        refuse("is not a part that `--part` wrote with this version")
    return head


# ---- values ----------------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    """Encode a state as JSON; values that JSON lacks become lists that begin with a word."""
    if isinstance(value, (np.ndarray, np.generic)):
        raw = np.ascontiguousarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return [kind, raw.dtype.str, list(np.shape(value)), base64.b64encode(raw.tobytes()).decode()]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, DType):
        return ["dtype", value.name]
    if isinstance(value, WorkbenchError):
        return ["error", type(value).__name__, str(value)]
    if type(value).__name__ in _KNOWN:
        return ["state", type(value).__name__, *(_encoded(getattr(value, one.name)) for one in fields(value))]
    if type(value) is list or type(value) is tuple:
        return [type(value).__name__, *map(_encoded, value)]
    if type(value) is dict:
        return ["dict", *([_encoded(name), _encoded(inner)] for name, inner in value.items())]
    raise TypeError(f"a state of type {type(value).__name__} is not stored")


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind in ("array", "scalar"):
        dtype, shape, data = rest
        flat = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
        return flat.copy() if kind == "array" else flat[()]
    if kind == "state":
        cls = _KNOWN[rest[0]]
        made = object.__new__(cls)
        for one, inner in zip(fields(cls), rest[1:], strict=True):
            object.__setattr__(made, one.name, _decoded(inner))
        return made
    if kind == "error":
        cls = getattr(errors, rest[0])
        if not issubclass(cls, WorkbenchError):
            raise ValueError(f"{rest[0]} is not an error")
        return cls(rest[1])
    if kind == "dict":
        return {_decoded(name): _decoded(inner) for name, inner in rest}
    simple: dict[str, Any] = {"float": float, "dtype": by_name, "bytes": base64.b64decode}
    if kind in simple:
        return simple[kind](rest[0])
    many: dict[str, Any] = {"list": list, "tuple": tuple}
    return many[kind](map(_decoded, rest))
