"""``workbench watch``: report each new step, spike, resume and finding of a run, and call a command or a webhook.

::

    Watcher ──► event ──► stdout            a line, or with --json a document
                    └───► if it is an alarm: --on-finding CMD   JSON on stdin, WORKBENCH_EVENT, … in its environment
                                             --webhook URL      POST
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.analysis.watch import Watcher, WatchEvent
from workbench.cli.common import note, paint, print_json, say, tell
from workbench.core.words import plural
from workbench.errors import UsageError
from workbench.views.names import safe

COMMAND = 60  #: seconds that a command may take
POST, RETRIES, PAUSE = 5, 2, 1.0  #: seconds of a request; further attempts; seconds before the first of them
GRACE = 0.7  #: seconds between a signal and the end of the process
STDERR = 2  #: stdout has the events
ALARMS = ("error", "warn")


def watch(options: argparse.Namespace) -> int:
    """Print events until interrupted; return the exit code: 0 nothing found, 1 warnings, 2 errors.

    Options: ``root check logs interval once from_now on_finding webhook until_steps duration threads`` and the common
    ones.
    """
    calls = _calls(options)
    until = None if options.duration is None else time.monotonic() + options.duration
    watcher = Watcher(
        options.root,
        checks=options.check or ("verify",),
        logs=options.logs,
        interval=options.interval,
        from_now=options.from_now,
        threads=options.threads,
        sleep=lambda seconds: enough() or _sleep(seconds, until),
    )

    def enough() -> bool:
        return options.until_steps is not None and watcher.steps >= options.until_steps and not watcher.waiting

    counts: dict[str, int] = {}
    once = threading.Lock()

    def end() -> int:
        if once.acquire(blocking=False):
            tell(_summary(counts, watcher))
        return watcher.exit_code

    with _interrupted(end):
        try:
            for event in watcher.once() if options.once else watcher.events():
                counts[event.kind] = counts.get(event.kind, 0) + 1
                _show(event, watcher, options)
                if event.severity in ALARMS:
                    for call in calls:
                        call(event)
                if until is not None and time.monotonic() >= until:
                    break
        except KeyboardInterrupt:
            pass
        return end()


def _sleep(seconds: float, until: float | None) -> bool:
    """Wait, but not beyond a time; return whether it has come."""
    if until is not None:
        seconds = min(seconds, until - time.monotonic())
    time.sleep(max(seconds, 0))
    return until is not None and time.monotonic() >= until


@contextmanager
def _interrupted(end: Callable[[], int]) -> Iterator[None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, and end the process if that takes long: threads of a check finish
    the block that they are reading, and nothing is being written."""

    def stop(number: int, frame: object) -> None:
        timer = threading.Timer(GRACE, lambda: os._exit(end()))
        timer.daemon = True
        timer.start()
        timers.append(timer)
        raise KeyboardInterrupt

    timers: list[threading.Timer] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()


# ---- what is printed ------------------------------------------------------------------------------------------------


def _show(event: WatchEvent, watcher: Watcher, options: argparse.Namespace) -> None:
    if options.json:
        print_json(event.to_dict())
    elif event.kind == "note":
        note(event.words)
    else:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        path = event.path[len(watcher.path) :].lstrip("/") or os.path.basename(watcher.path.rstrip("/"))
        check = f"{event.check}: " if event.check else ""
        head = f"{event.severity.upper() if event.severity else '':<5}  {event.kind:<10}"
        line = f"{clock}  {head}  {safe(path)}  {check}{safe(event.words)}"
        say(paint(line, "bad") if event.severity in ALARMS else line)
    sys.stdout.flush()


def _summary(counts: dict[str, int], watcher: Watcher) -> str:
    names = {"step": "step", "rewritten": "step rewritten", "finding": "finding", "spike": "spike", "resume": "resume"}
    parts = [plural(counts[kind], word) for kind, word in names.items() if counts.get(kind)]
    if counts.get("incomplete"):
        parts.append(f"{counts['incomplete']:,} incomplete")
    return f"watched {safe(watcher.path)}: {', '.join(parts) or 'nothing new'}"


# ---- who is called --------------------------------------------------------------------------------------------------


def _calls(options: argparse.Namespace) -> list[Any]:
    """Return the functions to call with each alarm.

    Raises:
        UsageError: the command does not exist, or the URL is not one that can be posted to.
    """
    calls: list[Any] = []
    if options.on_finding is not None:
        try:
            words = shlex.split(options.on_finding)
        except ValueError as error:
            raise UsageError(f"--on-finding {options.on_finding!r}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"--on-finding {options.on_finding!r}: no such command (it is not run by a shell)")
        calls.append(lambda event: _command(words, event))
    if options.webhook is not None:
        try:
            parts = urllib.parse.urlsplit(options.webhook)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or any(c <= " " for c in options.webhook):
            raise UsageError("--webhook is not a URL that begins with http:// or https:// and names a host")
        calls.append(lambda event: _post(options.webhook, host, event))
    return calls


def _command(words: list[str], event: WatchEvent) -> None:
    """Run a command with the event on stdin and in its environment, never on its command line."""
    found = {
        "event": event.kind,
        "path": event.path,
        "step": event.step,
        "severity": event.severity,
        "words": event.words,
        "check": event.check,
    }
    texts = {f"WORKBENCH_{name.upper()}": "" if value is None else str(value) for name, value in found.items()}
    env = {**os.environ, **{name: text.replace("\0", " ") for name, text in texts.items()}}
    name = os.path.basename(words[0])
    try:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=STDERR, env=env, start_new_session=True) as process:
            try:
                process.communicate(_json(event), COMMAND)
            except BaseException as error:  # too slow, or interrupted: its child processes end with it
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                note(f"--on-finding: {name!r} was ended after {COMMAND} s")
                return
        if process.returncode:
            note(f"--on-finding: {name!r} ended with exit code {process.returncode}")
    except OSError as error:
        note(f"--on-finding: {name!r} cannot be run: {error.strerror}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Refuse: the event is for the server that was named."""


def _post(url: str, host: str, event: WatchEvent) -> None:
    """Send an event, with Basic authentication if the URL has a user.

    A failure is a note that names the host, for the rest of the URL may be a secret.
    """
    opener = urllib.request.build_opener(_NoRedirect)
    parts, headers = urllib.parse.urlsplit(url), {"Content-Type": "application/json"}
    user, at, where = parts.netloc.rpartition("@")
    if at:  # urllib takes all of it for the name of the host
        url = parts._replace(netloc=where).geturl()
        headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()}"
    request = urllib.request.Request(url, _json(event), headers, method="POST")
    why = ""
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(PAUSE * attempt)
        try:
            with opener.open(request, timeout=POST):
                return
        except urllib.error.HTTPError as error:
            error.close()
            why = f"HTTP status {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or type(reason).__name__
        except Exception as error:  # http.client's: the answer is not HTTP
            why = type(error).__name__
    note(f"--webhook: {host!r} did not accept the event: {why}")


def _json(event: WatchEvent) -> bytes:
    return json.dumps(event.to_dict(), allow_nan=False).encode() + b"\n"
