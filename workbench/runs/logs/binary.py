"""TensorBoard's event files and W&B's offline runs, read without tensorboard or wandb.

::

    events.out.tfevents.<unix s>.<host>.<pid>.<n>       records of protocol buffers (tensorboard 2.21)
      u64 length · u32 masked CRC32C of it · data · u32 masked CRC32C of data
      Event: 1 wall_time double · 2 step varint · 5 summary · 7 session_log (1 status: 1 START)
      Summary.Value: 1 tag · 2 simple_value float · 8 tensor (1 dtype, 4 content, 5 float_val, 6 double_val)

    run-<id>.wandb                                      LevelDB's log format (wandb 0.31, core/pkg/leveldb)
      ":W&B" · u16 0xBEE1 · u8 version 0 · blocks of 32 KiB
      u32 CRC · u16 length · u8 type (1 full, 2 first, 3 middle, 4 last) · data
      Record: 2 history {1 item: 1 key or 2 nested_key …, 16 value_json}

CRCs are not checked: Python would take longer for them than for everything else, and a log is evidence, not a backup.
Both files end in the middle of a record if a trainer dies; the records before are returned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator

from workbench.core.protobuf import BadMessage, fields, signed
from workbench.core.source import Source
from workbench.core.words import plural
from workbench.names.metrics import STEP_NAMES
from workbench.runs.logs.printed import numbers_of
from workbench.runs.logs.record import LogFull, MetricLog, StartMark

WANDB_MAGIC = b":W&B\xe1\xbe\x00"
RECORD = 64 << 20  #: bytes of the largest record that is read; images and histograms take megabytes
BLOCK = 32 << 10  #: of LevelDB's log
_READ = 1 << 20
_FLOAT, _DOUBLE = 1, 2  # TensorProto.dtype


class _ReadAhead:
    """Sequential bytes of a source, read in large pieces."""

    def __init__(self, source: Source, start: int = 0) -> None:
        self.source, self.at, self.buffer, self.start = source, start, b"", 0

    def take(self, count: int) -> bytes | None:
        """Return the next bytes, or ``None`` if the file ends before."""
        if self.at + count > self.source.size:
            return None
        if not self.start <= self.at <= self.at + count <= self.start + len(self.buffer):
            self.start = self.at
            self.buffer = self.source.read_bytes(self.at, min(self.at + max(count, _READ), self.source.size))
        begin = self.at - self.start
        self.at += count
        return self.buffer[begin : begin + count]


class EventsReading:
    """The scalars of one event file. A cut tail is normal and ends the file."""

    def __init__(self, path: str) -> None:
        self._log = MetricLog(path, "tensorboard", files=[path])
        self._log.start(StartMark(0, "new file"))
        self._ended = ""  # why the rest is not read

    def read(self, source: Source, start: int) -> int:
        """Take the complete records from a byte on; return where they end."""
        ahead, path = _ReadAhead(source, start), self._log.path
        while not self._ended and (head := ahead.take(12)) is not None:
            (size,) = struct.unpack_from("<Q", head)
            if size > RECORD:
                self._ended = f"{path!r} has a record of {plural(size, 'byte')} at byte {start:,}"
                break
            data = ahead.take(size)
            if data is None or ahead.take(4) is None:
                break
            try:
                _event(self._log, data)
            except BadMessage:
                self._ended = f"{path!r} is damaged at byte {start + 12:,}"
            except LogFull:
                self._ended = f"{path!r} has more than {self._log.limit:,} values"
            start = ahead.at
        return start

    def rest(self, source: Source, start: int) -> None:
        """Ignore the rest: an incomplete record has no scalar."""

    @property
    def kept(self) -> int:
        """Values so far."""
        return self._log.kept

    def done(self) -> list[MetricLog]:
        """Return the log."""
        if self._ended:
            self._log.notes.append(f"{self._ended}; the rest was not read")
        return [self._log]


def _event(log: MetricLog, data: bytes) -> None:
    step, time = 0, math.nan
    values: dict[str, float] = {}
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            (time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = signed(value)
        elif number == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes):
                    _scalar(item, values)
        elif number == 7 and isinstance(value, bytes) and (1, 1) in list(fields(value)) and step > 0:
            # purge_step: values written from this step on are invalid
            log.start(StartMark(log.rows, "start event", first=step))
    log.add(step, values, time)


def _scalar(data: bytes, values: dict[str, float]) -> None:
    tag, found = "", None
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            found = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            found = _tensor(value)
    if found is not None and tag:
        values[tag] = found


def _tensor(data: bytes) -> float | None:
    """Decode a TensorProto of one float; ``None`` for text, images and histograms."""
    dtype, content, shape = 0, b"", b""
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 2 and isinstance(value, bytes):
            shape = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
    if dtype == _FLOAT and len(content) == 4 and not shape:
        return float(struct.unpack("<f", content)[0])
    if dtype == _DOUBLE and len(content) == 8 and not shape:
        return float(struct.unpack("<d", content)[0])
    return None


# ---- W&B ----------------------------------------------------------------------------------------------------------


def read_wandb(log: MetricLog, source: Source, path: str) -> None:
    """Append the history of one offline run; each start of a run writes a new folder.

    ``_step`` begins at 0 again if the program never passes ``step=``: a name such as ``train/global_step`` is
    preferred.

    Raises:
        LogFull: there are more values than are kept.
    """
    log.start(StartMark(log.rows, "new file"))
    log.files.append(path)
    for data in _leveldb(source, log, path):
        try:
            for number, value in fields(data):
                if number == 2 and isinstance(value, bytes):
                    _history(log, value)
        except BadMessage:
            log.notes.append(f"{path!r} has a damaged record; it was skipped")


def _leveldb(source: Source, log: MetricLog, path: str) -> Iterator[bytes]:
    """Yield the records of a log in blocks; the first block includes the file's own header."""
    whole: list[bytes] = []
    kept = 0
    for start in range(0, source.size, BLOCK):
        block = source.read_bytes(start, min(start + BLOCK, source.size))
        at = len(WANDB_MAGIC) if start == 0 else 0
        while at + 7 <= len(block):
            size, kind = struct.unpack_from("<HB", block, at + 4)
            if kind == 0 and size == 0:
                break  # padding
            at += 7
            if kind not in (1, 2, 3, 4) or at + size > len(block):
                if start + len(block) < source.size:
                    log.notes.append(f"{path!r} is damaged at byte {start + at:,}; a block was skipped")
                whole = []
                break
            part, at = block[at : at + size], at + size
            if kind in (1, 2):
                whole, kept = [], 0
            kept += size
            if kept <= RECORD:
                whole.append(part)
            if kind in (1, 4):
                if kept <= RECORD:
                    yield b"".join(whole)
                whole = []


def _history(log: MetricLog, data: bytes) -> None:
    row: dict[str, float] = {}
    for number, item in fields(data):
        if number != 1 or not isinstance(item, bytes):
            continue
        names: list[str] = []
        text = b""
        for inner, value in fields(item):
            if inner in (1, 2) and isinstance(value, bytes):
                names.append(value.decode("utf-8", "replace"))
            elif inner == 16 and isinstance(value, bytes):
                text = value
        try:
            decoded = json.loads(text) if len(text) <= 64 else None  # numbers are short
        except (ValueError, RecursionError):
            continue
        row |= numbers_of({"/".join(names): decoded})
    step = next((row[name] for name in STEP_NAMES if name in row), None)
    time = row.get("_timestamp", math.nan)
    if step is None or not math.isfinite(step):
        return
    kept = {name: value for name, value in row.items() if not name.startswith("_") and name not in STEP_NAMES}
    log.add(int(step), kept, time, {"_runtime": row["_runtime"]} if "_runtime" in row else None)
