"""The dashboard's server as a process of its own, which tells what it holds: ``python -m tests.soak_server ROOT``.

Besides the pages there are ``/soak/state``, and ``/soak/verify``, which starts the verification of every open page that
shows the Integrity tab and does not verify already, as a press on its button does. Texts are as the page shows them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from typing import Any

from tornado.web import RequestHandler

from workbench.app.page import Workbench
from workbench.app.registry import shared
from workbench.app.serve import start
from workbench.app.words import safe

opened: weakref.WeakSet[Workbench] = weakref.WeakSet()


class Soak(RequestHandler):
    def get(self, what: str) -> None:
        here = [one for one in list(opened) if not one.state._closed]
        if what == "verify":
            for one in here:
                if "integrity" in one.made and _job(one)["status"] != "running":
                    one._schedule(one.made["integrity"].work.start)  # type: ignore[misc]
        if what == "collect":
            gc.collect()
            _trim()
        self.finish(
            {
                "rss": _rss(),
                "threads": threading.active_count(),
                "files": len(os.listdir("/proc/self/fd")),
                "pages": len(here),
                "kept": len(opened),
                "shared": len(shared),
                "status": [one.state.status for one in here],
                "error": [safe(one.state.error) for one in here],
                "notice": [one.state.notice for one in here],
                "jobs": [_job(one) for one in here],
            }
        )


def _job(workbench: Workbench) -> dict[str, Any]:
    if "integrity" not in workbench.made:
        return {}
    job = workbench.made["integrity"].work.job
    return {"status": job.status, "progress": job.progress, "error": safe(job.error)}


def _trim() -> None:
    """Give what is free back to the system: what stays is in use, not fragments that glibc keeps."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    init = Workbench.__init__

    def noted(self: Workbench, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        opened.add(self)

    Workbench.__init__ = noted  # type: ignore[method-assign]
    server = start(sys.argv[1], 0, extra_patterns=[(r"/soak/(\w+)", Soak)])
    print(f"ready http://127.0.0.1:{server.port}/", flush=True)
    server.start()
    server.io_loop.start()


if __name__ == "__main__":
    main()
