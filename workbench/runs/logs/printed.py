r"""Logs that trainers print, line by line.

::

    program      line                                                   read at
    megatron     iteration  61/ 120 | … | lm loss: 4.3E+00 | …          NVIDIA/Megatron-LM d98e8a64
    torchtitan   step: 61  loss:  4.33129  grad_norm:  0.7432  …        pytorch/torchtitan b5bcd76c
    deepspeed    step=10, skipped=0, lr=[..] · steps: 10 loss: 2.1 …    deepspeedai/DeepSpeed edaa7221
    composer     [batch=61/120]:  \n  Train loss/train/total: 4.33      mosaicml/composer 64051888
    nemo         Training epoch 0, iteration 60/119 | lr: …             NVIDIA/NeMo 01f7dbc5
    fairseq2     Train Metrics (step 61) - NLL Loss: 4.33 | …           facebookresearch/fairseq2 027bdebc
    maxtext      completed step: 60, seconds: 1.2, …, loss: 4.331       AI-Hypercomputer/maxtext e591f30c
    levanter     {"tracker": "json_logger", "event": "log", "step": 60  stanford-crfm/levanter 9263f81e
    paddlenlp    - loss: 4.33, learning_rate: …, global_step: 61, …     PaddlePaddle/PaddleNLP 01f74360
    vescale      iter 60 loss 4.331 |g| 0.74 lr 0.0002 …                volcengine/veScale 20cf5c71
    nanogpt      iter 60: loss 4.3313, time 1263ms, mfu 31.20%          karpathy/nanoGPT
    verl         step:61 - actor/pg_loss:0.1 - …                        volcengine/verl b178a3cd
    openrlhf     Train step of epoch 0: … | 61/120 [.., loss=4.3, …]    OpenRLHF/OpenRLHF 3c3be623
    torchtune    Step 61 | loss:4.33 lr:0.0002 …                        pytorch/torchtune bd2a0fc7
    hf_trainer   {'loss': '4.34', …} and the progress bar after it      transformers 5.23
    examples     Train Epoch: 1 [640/60000 (1%)]  Loss: 4.33             pytorch/examples mnist
    printed      step 61/120 | loss 4.33 | …                            `plain`: if no program's line has a loss

One line gives one row, or nothing: text between such lines is ignored. Lines about validation never match. A file that
several ranks write to gives one log per rank; the caller keeps the lowest that has a loss.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any

from workbench.core.words import plural
from workbench.names.metrics import meaning
from workbench.names.steps import parse_name
from workbench.runs.logs.opening import OpeningLines
from workbench.runs.logs.plain import DIGITS, OF_EPOCH, PrintedRow, number, plain_row
from workbench.runs.logs.record import PROCESS, LogFull, MetricLog, StartMark, seconds_of

NUM = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"


#: A line → its row, or ``None`` if it is not one.
LineReader = Callable[[str], PrintedRow | None]


def pairs(found: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return names and numbers, without values that are not numbers."""
    out = {}
    for name, text in found:
        value = number(text)
        if value is not None:
            out[name.strip()] = value
    return out


def fields(text: str) -> dict[str, float]:
    """Return names and numbers of ``name: number | name: number |``."""
    out = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        found = value.strip()
        if colon and _NUMBER.fullmatch(found):
            out[name.rpartition(":")[2].strip()] = float(found.replace(",", ""))
    return out


_COLON = re.compile(rf"\s*([^:|,]+?)\s*:\s*({NUM})(?![\w.])", re.IGNORECASE)
_NUMBER = re.compile(NUM, re.IGNORECASE)
_EQUAL = re.compile(rf"([\w/.-]+)=({NUM})(?=[,\]\s])", re.IGNORECASE)
_TIGHT = re.compile(rf"([\w/.()%-]+):({NUM})(?=\s|$)", re.IGNORECASE)
_DICT = re.compile(rf"'([\w/.@ -]+)':\s*'?({NUM})'?\s*(?=[,}}])", re.IGNORECASE)

_MEGATRON = re.compile(rf"(?<!, )\biteration\s+(\d{{1,{DIGITS}}})/\s*\d+\s*\|(.*)")
_NEMO = re.compile(rf"\bTraining epoch \d+, iteration (\d{{1,{DIGITS}}})/\d+\s*\|(.*)")
_TITAN = re.compile(rf"(?<!validate )\bstep:\s*(\d{{1,{DIGITS}}})\s+(loss:.*)")
_TITAN_FIELD = re.compile(rf"([\w()%]+):\s*({NUM})(?=\s|%|$|[A-Za-z])", re.IGNORECASE)
_DS_STEP = re.compile(rf"\bstep=(\d{{1,{DIGITS}}}), skipped=(\d+), lr=\[({NUM})")
_DS_PIPE = re.compile(rf"\bsteps: (\d{{1,{DIGITS}}}) loss: ({NUM}) iter time \(s\): ({NUM}) samples/sec: ({NUM})", re.I)
_DS_TIMER = re.compile(rf"\bglobal_step=(\d{{1,{DIGITS}}}), RunningAvgSamplesPerSec=({NUM})")
_COMPOSER_HEAD = re.compile(rf"\[batch=(\d{{1,{DIGITS}}})/\d+\]:?\s*$")
_COMPOSER_FIELD = re.compile(rf"^(?:\[stdout\]: ?)?\s*Train (\S.*?): ({NUM})\s*$", re.IGNORECASE)
_FAIRSEQ2 = re.compile(rf"\bTrain Metrics \(step (\d{{1,{DIGITS}}})\) - (.*)")
_MAXTEXT = re.compile(rf"\bcompleted step: (\d{{1,{DIGITS}}}), (.*)")
_PADDLE = re.compile(r"- (loss: .*)")
_PADDLE_STEP = re.compile(rf"\bglobal_step: (\d{{1,{DIGITS}}})\b")
_VESCALE = re.compile(rf"\biter (\d{{1,{DIGITS}}}) loss ({NUM}) \|g\| ({NUM}) lr ({NUM})", re.IGNORECASE)
_NANOGPT = re.compile(rf"\biter (\d{{1,{DIGITS}}}): loss ({NUM}), time ({NUM})ms(?:, mfu ({NUM})%)?", re.IGNORECASE)
_VERL = re.compile(rf"\bstep:(\d{{1,{DIGITS}}}) - (.*)")
_VERL_FIELD = re.compile(rf"([\w/.@-]+):({NUM})(?=\s|$)", re.IGNORECASE)
_EXAMPLES = re.compile(rf"\bTrain Epoch: (\d{{1,9}}) \[(\d{{1,{DIGITS}}})/(\d{{1,{DIGITS}}}) \(\d{{1,3}}%\)\](.*)")
_TORCHTUNE = re.compile(rf"^\s*Step (\d{{1,{DIGITS}}}) \| (.*)")
OF_SAMPLES = "pytorch_examples"  #: the program whose lines count the samples of an epoch instead of steps
_BAR_COUNT = re.compile(rf"(?:^|[|\s])(\d{{1,{DIGITS}}})/(\d{{1,{DIGITS}}}) \[")
_BAR_HEAD = re.compile(r"\s*\d{1,3}%\|")  #: that of the training has no name before it, as "Map: 10%|" has
_BAR_TIME = re.compile(r"(?:(\d{1,6}):)?(\d{1,2}):(\d{2})<")
_BAR_EPOCH = re.compile(r"epoch (\d{1,9})", re.IGNORECASE)


def _megatron(line: str) -> PrintedRow | None:
    found = _MEGATRON.search(line)
    if found is None:
        return None
    values = fields(found[2])
    # a loss that is NaN has no field: only the count of such iterations shows it (training_log in training.py)
    if values.get("number of nan iterations", 0) > 0 and not any(name.endswith("loss") for name in values):
        values["lm loss"] = math.nan
    return PrintedRow(int(found[1]), values)


def _nemo(line: str) -> PrintedRow | None:
    found = _NEMO.search(line)
    if found is None:
        return None
    values = fields(found[2])
    step = values.pop("global_step", None)
    return PrintedRow(int(found[1]) if step is None or not math.isfinite(step) else int(step), values)


def _by_fields(line: re.Pattern[str], field: re.Pattern[str]) -> LineReader:
    """Return the reader of lines of a step and of fields that are names and numbers."""

    def read(text: str) -> PrintedRow | None:
        found = line.search(text)
        return None if found is None else PrintedRow(int(found[1]), pairs(field.findall(found[2])))

    return read


def _deepspeed(line: str) -> PrintedRow | None:
    if found := _DS_PIPE.search(line):
        names = ("loss", "iter time (s)", "samples/sec")
        return PrintedRow(int(found[1]), pairs(zip(names, found.groups()[1:], strict=True)))
    if found := _DS_STEP.search(line):
        return PrintedRow(int(found[1]), pairs([("skipped", found[2]), ("lr", found[3])]))
    if found := _DS_TIMER.search(line):
        return PrintedRow(int(found[1]), pairs([("RunningAvgSamplesPerSec", found[2])]))
    return None


def _levanter(line: str) -> PrintedRow | None:
    try:
        document = json.loads(line[line.index("{") :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("event") != "log":
        return None
    step, metrics = document.get("step"), document.get("metrics")
    if type(step) is not int or not isinstance(metrics, dict):
        return None
    return PrintedRow(step, numbers_of(metrics))


def _paddle(line: str) -> PrintedRow | None:
    found, step = _PADDLE.search(line), _PADDLE_STEP.search(line)
    if found is None or step is None:
        return None
    values = pairs(_COLON.findall(found[1]))
    values.pop("global_step", None)
    return PrintedRow(int(step[1]), values)


def _vescale(line: str) -> PrintedRow | None:
    found = _VESCALE.search(line)
    names = ("loss", "|g|", "lr")
    return found and PrintedRow(int(found[1]), pairs(zip(names, found.groups()[1:], strict=True)))


def _nanogpt(line: str) -> PrintedRow | None:
    found = _NANOGPT.search(line)
    names = ("loss", "time", "mfu")
    return found and PrintedRow(
        int(found[1]), pairs((n, v) for n, v in zip(names, found.groups()[1:], strict=True) if v)
    )


def _openrlhf(line: str) -> PrintedRow | None:
    count = _BAR_COUNT.search(line)
    if count is None:
        return None
    values = pairs(_EQUAL.findall(line[count.end() :]))
    epoch = _BAR_EPOCH.search(line[: count.start()])
    if epoch is not None:  # the bar begins at 0 in every epoch and shows its length
        return PrintedRow(int(count[1]) + int(epoch[1]) * int(count[2]), values)
    time = _BAR_TIME.match(line, count.end())
    return PrintedRow(int(count[1]), values, {} if time is None else {BAR_TIMER: _seconds(time)})


def _examples(line: str) -> PrintedRow | None:
    found = _EXAMPLES.search(line)
    if found is None:
        return None
    epoch, samples, of = map(int, found.groups()[:3])
    return PrintedRow(samples, {**pairs(_COLON.findall(found[4])), "epoch": float(epoch)}, {OF_EPOCH: float(of)})


#: Program, a substring for a quick check of the line, its reader; whether the first update is number 0.
PROGRAMS: tuple[tuple[str, str, LineReader, bool], ...] = (
    ("nemo", "Training epoch", _nemo, True),
    (OF_SAMPLES, "Train Epoch: ", _examples, False),
    ("megatron", "iteration ", _megatron, False),
    ("verl", " - ", _by_fields(_VERL, _VERL_FIELD), False),
    ("torchtitan", "loss:", _by_fields(_TITAN, _TITAN_FIELD), False),
    ("fairseq2", "Train Metrics (step", _by_fields(_FAIRSEQ2, _COLON), False),
    ("maxtext", "completed step:", _by_fields(_MAXTEXT, _COLON), True),
    ("levanter", '"json_logger"', _levanter, True),
    ("paddlenlp", "- loss: ", _paddle, False),
    ("vescale", "|g|", _vescale, True),
    ("nanogpt", "loss ", _nanogpt, True),
    ("torchtune", "Step ", _by_fields(_TORCHTUNE, _TIGHT), False),
    ("openrlhf", "loss=", _openrlhf, False),
    ("deepspeed", "step", _deepspeed, False),
)
#: Every line that is read contains one of these; checked first, because most lines are something else.
PARTS = (
    "oss",
    "step",
    "iteration ",
    "batch=",
    "heckpoint",
    " [",
    "Step ",
    "esum",
    "estor",
    "estart",
    "Training",
    "scratch",
    "ckpt",
)
_VALIDATION = re.compile(r"\b(?:val|valid|validate|validation|eval|evaluation)\b")


def about_validation(line: str) -> bool:
    """Return whether a line is about validation."""
    plain = line.lower()
    return "val" in plain and _VALIDATION.search(plain) is not None


#: Lines about a start: the number is the step of the checkpoint that was loaded (``loaded``), or of the next row.
STARTS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "checkpoint from",
        re.compile(r"load(?:ing|ed)(?: distributed)? checkpoint from \S.* at iteration (\d{1,18})"),
        "loaded",
    ),
    ("Training starts at step", re.compile(r"Training starts at step (\d{1,18})"), "next"),
    ("oading the checkpoint from", re.compile(r"[Ll]oading the checkpoint from (\S+)"), "path"),
    ("oading checkpoint from", re.compile(r"[Ll]oading checkpoint from (\S+)"), "path"),
    ("Autoresuming training", re.compile(r"Autoresuming training from checkpoint"), "line"),
    ("Restored all states", re.compile(r"Restored all states from the checkpoint at (\S+)"), "path"),
    ("Restoring states", re.compile(r"Restoring states from the checkpoint path at (\S+)"), "path"),
    ("Resuming from step", re.compile(r"Resuming from step (\d{1,18})"), "loaded"),
    ("restoring from this run", re.compile(r"restoring from this run's directory step (\d{1,18})"), "loaded"),
    ("Resuming training from step", re.compile(r"Resuming training from step (\d{1,18})"), "first"),
    (
        "and global step",
        re.compile(r"Resuming training from checkpoint with epoch \d+ and global step (\d{1,18})"),
        "loaded",
    ),
    ("Continuing training from global step", re.compile(r"Continuing training from global step (\d{1,18})"), "loaded"),
    ("Setting global step to", re.compile(r"Setting global step to (\d{1,18})"), "loaded"),
    ("Resuming from", re.compile(r"Resuming from (\S+)"), "path"),
    ("Resuming training from", re.compile(r"Resuming training from (\S+)"), "path"),
    ("Loaded the checkpoint:", re.compile(r"Loaded the checkpoint: (\S+), consumed_samples: \d+"), "path"),
    ("could not find the metadata file", re.compile(r"could not find the metadata file"), "fresh"),
    ("No existing checkpoints found", re.compile(r"No existing checkpoints found"), "fresh"),
    ("Training from scratch", re.compile(r"Training from scratch"), "fresh"),
    ("a new model from scratch", re.compile(r"Initializing a new model from scratch"), "fresh"),
)
#: Lines that other programs print when they resume from a checkpoint; and similar lines about something else.
_AGAIN = re.compile(
    r"\b(?:resum(?:ed|ing)|continu(?:ed|ing)(?=.*\b(?:from|at)\b)|restor(?:ed|ing)|restart(?:ed|ing)|(?:re-?)?load(?:ed|ing))\b"
    r".*?\b(?:checkpoints?|ckpt|training|run|state|step|iteration)(?![a-z])",
    re.IGNORECASE,
)
_ELSE = re.compile(
    r"\b(?:no|not|never|without|cannot|fail\w*|error|skip\w*|shards?|data\w*|tokenizer|vocab\w*|config\w*|pre-?train\w*"
    r"|base|initial\w*|teacher|reference|ref|reward|critic|ema|best|eval\w*|valid\w*|test\w*|metadata|weights|if|when"
    r"|will|every|each)\b",
    re.IGNORECASE,
)
_PATH = re.compile(r"\S*/\S*")
_AT_STEP = re.compile(r"(?<!next )\b(?:global[ _]?step|step|iteration|iter)[ :=#]{1,3}(\d{1,18})\b", re.IGNORECASE)
_NEXT = re.compile(r"\b(?:resum|continu|restart)(?:ed|ing)\s+(?:\w+\s+)?(?:at|with)\b", re.IGNORECASE)
_FROM = re.compile(r"(?:\bfrom|checkpoint|ckpt)\b[ :='\"`]*((?=\S*\d)[^\s'\"`,;()]+)", re.IGNORECASE)
#: Prefixes that name the writer of a line: torchrun's, Ray's, fairseq2's, and Composer's file logger's.
_WHO = re.compile(r"^\s*(?:\[(?:rank|Rank )(\d+)\]:?|\((?:[\w.]+) pid=(\d+)[^)]*\)|\[stdout\]:|\[stderr\]:)\s?")
#: The process of a line, in the prefixes of absl and of journald.
_PROCESS = re.compile(
    r"\s*(?:[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+\s+(\d{1,9}) [^\s\]]+:\d+\]"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s\[\]]+\[(\d{1,9})\]: )"
)
#: A date and a time: ISO 8601, and absl's, which has no year.
_CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[ T]|[IWEF](\d\d)(\d\d) )(\d\d):(\d\d):(\d\d(?:[.,]\d{1,6})?)")
_SAVED = re.compile(
    r"\bsav(?:ed|ing)\b.*?\bcheckpoint(?:-|\b.*?\b(?:global[ _]?step|step|iteration|iter)[ :=#_-]{1,8})(\d{1,18})\b",
    re.I,
)
BAR_TIMER = "the progress bar's time"
EXAMPLE = 80  #: characters of a line that is shown
PREFIX = 80  #: characters of a line in which its time is
NESTED = 2  #: objects in objects whose numbers are read
FEW = 2  #: rows of a plain log: a single one may be a sentence
COUNTED = "hf_trainer, by the row"
PLAIN = "printed"  #: the kind of a log whose lines have no program's form
BARRED = 0.8  #: share of the Trainer's rows that must be followed by a bar, if the bars show the steps
_HF_KEYS = ("'loss'", "'eval_loss'")


class PrintedLogs:
    """Logs by program and rank of one text file, filled line by line."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.limit = path, limit
        self.logs: dict[tuple[str, int], MetricLog] = {}
        self.marks: list[StartMark] = []  # since the last row: they belong to the next
        self.epochs, self.rates = array("d"), array("d")  # of the Trainer's rows, if they are counted
        self.batch: int | None = None  # Composer's step: the lines that follow are its values
        self.held: dict[str, float] | None = None  # the Trainer's row: the bar that follows shows the step
        self.total = 0  # total of the training's bar; those of evaluations are shorter
        self.lines = 0
        self.last: tuple[str, int, int] | None = None
        self.opening = OpeningLines()
        self.spans: dict[tuple[str, int], tuple[int, int]] = {}  # first and last row of each log, in written order
        self.processes: set[int] = set()  # writers that are named by their process, not by their rank
        self.written, self.timer = 0, 0.0
        self.named = False  # whether a program's line has a loss; the plain lines then are about something else
        self.seen = 0  # of the marks, those that the plain log has: another program's row may still come
        self.fed, self.first = 0, ""
        self.saved: list[int] = []  # steps of checkpoints, as lines say

    def feed(self, line: str) -> None:
        """Take one line."""
        self.fed += 1
        self.first = self.first or line.strip()[:EXAMPLE]
        if self.batch is None and not any(part in line for part in PARTS):
            self.opening.line(line)
            return  # most lines of a large log match no program
        who, whole = 0, line
        while (prefix := _WHO.match(line)) is not None:
            who = int((prefix[1] or prefix[2] or "0")[:DIGITS])
            if prefix[2]:
                self.processes.add(who)
            line = line[prefix.end() :]
        if self._hugging(line, who) or self._composer(line, who):
            return
        for program, marker, reader, zero in PROGRAMS:
            if marker in line:
                row = reader(line)
                if row is not None and row.values:
                    if program not in ("megatron", "verl", "levanter") and about_validation(line):
                        return  # these three log both in one line, under their own names
                    self._row(program, who, row, zero, line)
                    return
        if (found := _SAVED.search(line)) is not None:
            self.saved.append(int(found[1]))
            return
        plain = None if self.named or _AGAIN.search(line) else plain_row(line, about_validation(line))
        if plain is not None:
            self._row(PLAIN, who, plain, False, line)
            return
        self.opening.line(whole)
        self._start(line)

    def _row(self, program: str, who: int, row: PrintedRow, zero: bool = False, line: str = "") -> None:
        opening = self.opening.row()
        if opening and len(self.marks) == (self.seen if program == PLAIN else 0):
            self.marks.append(StartMark(0, "opening", text=opening))
        self.written += 1
        self.spans[program, who] = (self.spans.get((program, who), (self.written, 0))[0], self.written)
        log = self.logs.get((program, who))
        if log is None:
            log = self.logs[program, who] = MetricLog(self.path, program, files=[self.path], limit=self.limit)
            log.zero_based = zero
            self.named = self.named or (program != PLAIN and any(_is_loss(name) for name in row.values))
        marks = self.marks[self.seen :] if program == PLAIN else self.marks
        for mark in marks:
            for other in self.logs.values():
                other.start(StartMark(other.rows, mark.why, mark.loaded, mark.first, mark.fresh, mark.text))
        timer = row.counters.get(BAR_TIMER, 0.0)
        again = not marks and self.last == (program, who, row.step) and timer >= self.timer
        self.timer = timer
        if program == PLAIN:
            self.seen = len(self.marks)
        else:
            self.marks, self.seen = [], 0
        if program == "openrlhf" and again:
            return  # a bar is printed repeatedly; its first print of a step is kept
        self.last = (program, who, row.step)
        counters = row.counters
        process = _PROCESS.match(line) if line[:1] in " IWEFJMASOND" else None
        if process is not None:
            counters = {**counters, PROCESS: float(process[1] or process[2])}
        log.add(row.step, row.values, _printed_time(line), counters)

    def _start(self, line: str) -> None:
        for marker, pattern, kind in STARTS:
            if marker not in line:
                continue
            found = pattern.search(line)
            if found is None:
                continue
            mark = StartMark(0, "restart line", text=line.strip()[:200])
            if kind == "loaded":
                mark = StartMark(0, mark.why, loaded=int(found[1]), text=mark.text)
            elif kind == "first":
                mark = StartMark(0, mark.why, first=int(found[1]), text=mark.text)
            elif kind == "next":
                step = int(found[1])
                mark = StartMark(0, mark.why, step - 1 if step > 1 else None, step, step <= 1, mark.text)
            elif kind == "path":
                mark = StartMark(0, mark.why, loaded=_loaded_in(line, found[1]), text=mark.text)
            elif kind == "fresh":
                mark = StartMark(0, mark.why, fresh=True, text=mark.text)
            self._mark(mark)
            return
        if _AGAIN.search(line) and not _ELSE.search(_PATH.sub("", line)):
            self._mark(StartMark(0, "restart line", _loaded_in(line), text=line.strip()[:200]))

    def _mark(self, mark: StartMark, held: bool = False) -> None:
        self.marks.append(mark)
        if not held:
            self.held = None  # its bar never came

    def _composer(self, line: str, who: int) -> bool:
        if "[batch=" in line and (head := _COMPOSER_HEAD.search(line)):
            self.batch = int(head[1])
            return True
        if self.batch is None:
            return False
        found = _COMPOSER_FIELD.match(line)
        if found is None:
            if not line.startswith(("\t", " ")):
                self.batch = None
            return False
        value = number(found[2])
        if value is not None:
            self._row("composer", who, PrintedRow(self.batch, {found[1]: value}))
        return True

    def _hugging(self, line: str, who: int) -> bool:
        """Read a dict that the Trainer prints without a step, and the step from the progress bar right after it."""
        count = _BAR_COUNT.search(line) if "/" in line and "<" in line and _BAR_HEAD.match(line) else None
        if count is not None and "=" not in line[count.end() :]:
            done, total = int(count[1]), int(count[2])
            self.total = max(self.total, total)
            if done == 0 and total == self.total and self.lines:
                self._mark(StartMark(0, "restart line", text="the progress bar begins again"))
            if self.held is not None and total == self.total:
                time = _BAR_TIME.match(line, count.end())
                shown = {} if time is None else {BAR_TIMER: _seconds(time)}
                self._row("hf_trainer", who, PrintedRow(done, self.held, shown))
                self.held = None
            return True
        text = line.strip()
        if not text.startswith("{"):
            return False
        if "'train_runtime'" in text:  # the row about a whole training: the following rows belong to another start
            words = "the training before it had ended ('train_runtime' was logged)"
            self._mark(StartMark(0, "restart line", text=words))
            return True
        if not any(key in text for key in _HF_KEYS) or "'step'" in text:
            return False
        self.held = pairs(_DICT.findall(text))
        self._count(self.held, who)
        return True

    def _count(self, row: dict[str, float], who: int) -> None:
        """Keep a row under its number, in case no bars are printed; if the epoch decreases, the number does too."""
        epoch, rate = row.get("epoch", math.nan), row.get("learning_rate", math.nan)
        if self.epochs and epoch < self.epochs[-1]:
            self.lines = bisect_left(self.epochs, epoch)
            same = range(self.lines, bisect_right(self.epochs, epoch))  # an epoch has few digits: several rows show it
            self.lines = next((at for at in same if self.rates[at] == rate), self.lines)
            text = f"the epoch falls from {self.epochs[-1]:g} to {epoch:g}"
            self._mark(StartMark(0, "counter", text=text), held=True)
            del self.epochs[self.lines :], self.rates[self.lines :]
        self.lines += 1
        if math.isfinite(epoch) and len(self.epochs) == self.lines - 1:
            self.epochs.append(epoch)
            self.rates.append(rate)
        self._row(COUNTED, who, PrintedRow(self.lines, row))

    def _one_after_another(self) -> None:
        """Join the logs of processes that did not write at the same time: a later one is a restart."""
        before: dict[str, tuple[str, int]] = {}
        for key in sorted(self.logs, key=lambda key: self.spans.get(key, (0, 0))):
            if key[1] not in self.processes:
                continue
            old = before.get(key[0])
            if old is None or self.spans[old][1] > self.spans[key][0]:
                before.setdefault(key[0], key)
                continue
            try:
                self.logs[old].extend(self.logs[key], f"process {key[1]} continues after process {old[1]}")
            except LogFull:
                continue
            self.spans[old] = (self.spans[old][0], self.spans[key][1])
            del self.logs[key]

    @property
    def kept(self) -> int:
        """Values so far."""
        return sum(log.kept for log in self.logs.values())

    def done(self) -> list[MetricLog]:
        """Return the logs. Of the Trainer's, the one with steps, unless its bars are missing for many rows."""
        for (program, who), log in list(self.logs.items()):
            if program == COUNTED:
                log.kind, log.unit = "hf_trainer", "lines"
                barred = self.logs.get(("hf_trainer", who))
                if barred is None or barred.rows < BARRED * log.rows:
                    self.logs["hf_trainer", who] = log
                del self.logs[program, who]
            elif program == PLAIN and (self.named or log.rows < FEW):
                del self.logs[program, who]
            elif program in (PLAIN, OF_SAMPLES):
                log.unit = "samples" if program == OF_SAMPLES else log.unit
                _over_epochs(log)
        self._one_after_another()
        lowest: dict[str, MetricLog] = {}
        for (program, _), log in sorted(self.logs.items()):
            if program not in lowest or (not _has_loss(lowest[program]) and _has_loss(log)):
                lowest[program] = log
        if not lowest and any(
            mark.loaded is not None or mark.first is not None for mark in self.marks
        ):  # a console beside a log of rows
            console = MetricLog(self.path, "text", files=[self.path])
            console.starts = list(self.marks)
            return [console]
        if not lowest and self.fed:
            unknown = MetricLog(self.path, "text", files=[self.path])
            unknown.unknown = f"{plural(self.fed, 'line')} in no known form, the first {self.first!r}"
            return [unknown]
        for log in lowest.values():
            announced = bool(log.starts) and log.starts[0].row == 0
            log.saved, log.opened = list(self.saved), announced or self.opening.known
        return list(lowest.values())


def numbers_of(document: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a decoded JSON object, names of nested ones joined by ``/``; text such as ``"NaN"`` too."""
    out: dict[str, float] = {}
    for name, value in document.items():
        kind = type(value)
        if kind is float:
            out[prefix + name] = value
        elif kind is int:
            try:
                out[prefix + name] = float(value)
            except OverflowError:
                continue
        elif kind is str and len(value) <= 9 and value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
            out[prefix + name] = float(value)
        elif kind is dict and prefix.count("/") < NESTED:
            out |= numbers_of(value, f"{prefix}{name}/")
    return out


def _step_in(path: str) -> int | None:
    """Return the step that a path is named after; an epoch is not a step."""
    for at, part in enumerate(reversed(path.rstrip("./…\"',;").replace("\\", "/").split("/"))):
        named = parse_name(part)
        if named is not None and named.unit != "epoch" and (named.unit != "number" or at == 0):
            return named.number
    return None


def _loaded_in(line: str, path: str = "") -> int | None:
    """Return the step of the checkpoint that a line names; ``None`` if it names none, or the next step."""
    if path and (step := _step_in(path)) is not None:
        return step
    for found in _FROM.finditer(line):
        step = _step_in(found[1])
        if step is not None:
            return step
    match = _AT_STEP.search(line)
    return None if match is None or _NEXT.search(line[: match.start()]) else int(match[1])


def _printed_time(line: str) -> float | None:
    """Return the time in a line's prefix, in seconds; absl's has no year."""
    found = _CLOCK.search(line, 0, PREFIX)
    if found is None:
        return None
    date, month, day, hours, minutes, seconds = found.groups()
    midnight = _midnight(date or f"2000-{month}-{day}")
    return (
        None
        if midnight is None
        else midnight + 3600 * int(hours) + 60 * int(minutes) + float(seconds.replace(",", "."))
    )


@lru_cache(64)
def _midnight(date: str) -> float | None:
    return seconds_of(date)


def _seconds(found: re.Match[str]) -> float:
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float((hours * 60 + minutes) * 60 + seconds)


def _over_epochs(log: MetricLog) -> None:
    """Count the steps of a log over the whole run, if each row states its epoch and how many steps the epoch has, and
    the step begins again in an epoch.
    """
    epochs, lengths = log.columns.get("epoch"), log.counters.pop(OF_EPOCH, None)
    if epochs is None or lengths is None or len(epochs.rows) != log.rows or len(lengths.rows) != log.rows:
        return
    if not all(epoch.is_integer() for epoch in epochs.values) or len(set(lengths.values)) != 1:
        return
    length = int(lengths.values[0])
    rows = list(zip(epochs.steps, epochs.values, strict=True))
    again = any(b[1] > a[1] and b[0] <= a[0] for a, b in pairwise(rows))
    if not again or max(epochs.steps) > length:
        return
    least = min(1.0, *epochs.values)
    before = array("q", (int(epoch - least) * length for epoch in epochs.values))
    for column in log.columns.values():
        column.steps = array("q", (step + before[row] for step, row in zip(column.steps, column.rows, strict=True)))


def _has_loss(log: MetricLog) -> bool:
    return any(map(_is_loss, log.columns))


def _is_loss(name: str) -> bool:
    return (known := meaning(name)) is not None and known[0] == "loss"
