"""A dashboard's server in a thread of this process, for tests with a browser: what it holds can be looked at.

::

    test ──► serving(ROOT) ──► thread: event loop, server ──► http://127.0.0.1:PORT/
                          ◄─── ready, or the error that it did not start for
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

from workbench.app.serve import start
from workbench.errors import UsageError

START = 60  #: s until the server must answer; panel and torch are imported in them
#: Prefix → ports of servers that ended. What a browser has cached, and Panel, belongs to a port.
_free: dict[str, list[int]] = {}
THREAD = "tests.serving"  #: its name
STOP = 20  #: s until its thread must have ended
#: Options: sessions of closed pages are dropped after some seconds, so that a test can wait for it.
SHORT_LIVED = {"unused_session_lifetime_milliseconds": 2000, "check_unused_sessions_milliseconds": 500}


@contextmanager
def serving(root: str | os.PathLike[str], **options: Any) -> Iterator[str]:
    """URL, with a slash at its end, of a server on ``root``; ``options`` as :func:`workbench.app.serve.start` has them.

    Raises:
        TimeoutError: it was not ready, or did not end, in time. What :func:`~workbench.app.serve.start` raises is
            raised as it is.
    """
    ready: Future[Any] = Future()
    thread = threading.Thread(target=_run, args=(ready, root, options), daemon=True, name=THREAD)
    thread.start()
    if not wait([ready], START).done:
        raise TimeoutError(f"the server on {str(root)!r} was not ready after {START} s")
    server = ready.result()
    try:
        yield f"http://127.0.0.1:{server.port}{server.prefix}/"
    finally:
        server.io_loop.add_callback(server.io_loop.stop)
        thread.join(STOP)
        if thread.is_alive():
            raise TimeoutError(f"the server on {str(root)!r} had not ended after {STOP} s")
        _free.setdefault(server.prefix, []).append(server.port)


def _run(ready: Future[Any], root: str | os.PathLike[str], options: dict[str, Any]) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        server = _start(root, options)
        server.start()
    except BaseException as error:  # told by the test, which waits for it
        loop.close()
        ready.set_exception(error)
        return
    ready.set_result(server)
    server.io_loop.start()
    server.stop()
    # A browser would ask the next server of this port through a connection to this one.
    server.io_loop.run_sync(server._http.close_all_connections, STOP)
    server.io_loop.close()


def _start(root: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    """Listen at a port that a server with this prefix had, if nobody took it; or at any."""
    ports = _free.get(options.get("prefix", ""), [])
    while ports:
        with suppress(UsageError):
            return start(root, ports.pop(), **options)
    return start(root, 0, **options)
