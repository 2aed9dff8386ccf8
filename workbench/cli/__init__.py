"""The command line: ``workbench COMMAND PATH …``.

::

    stdout   results: text for people, or one JSON document with --json
    stderr   one line per error; ``note: …`` for choices made along the way
    exit     0 done, nothing found · 1 warnings, differences · 2 errors found · 3 cannot open, read or print
             64 wrong usage · 130 interrupted · 141 the reading end of a pipe was closed

Nothing heavy is imported here: a command's module is imported when the command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from workbench.cli.common import fail, places, storage
from workbench.cli.parser import USAGE, parser
from workbench.core.source import needs_descriptors
from workbench.errors import ObjectNotFoundError, SelectionError, TensorNotFoundError, UsageError, WorkbenchError
from workbench.views.lines import printing_to

__all__ = ["main", "parser"]

CANNOT_READ, INTERRUPTED, PIPE = 3, 130, 141
_WRONG_USAGE = (UsageError, SelectionError, TensorNotFoundError, ObjectNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Errors caused by the input print one line, never a traceback."""
    if sys.stdout is None:  # closed by the caller (`>&-`): nobody reads the results, but the exit code is still set
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal with another encoding still shows every name
    options = None
    try:
        try:
            options = parser().parse_args(argv)
            module, name = options.run
            with needs_descriptors(), storage(options, places(options)), printing_to(sys.stdout):
                code = int(getattr(import_module(module), name)(options) or 0)
        except SystemExit as done:  # argparse: --help, --version, wrong usage
            code = done.code if isinstance(done.code, int) else USAGE
        sys.stdout.flush()
        return code
    except WorkbenchError as error:
        return fail(options, str(error), USAGE if isinstance(error, _WRONG_USAGE) else CANNOT_READ)
    except RecursionError:
        return fail(options, "the checkpoint is nested too deeply to be shown", CANNOT_READ)
    except MemoryError:
        return fail(options, "not enough memory for this request; request a slice instead", CANNOT_READ)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit needs somewhere to flush to
        return PIPE
    except OSError as error:
        where = f"{os.fsdecode(error.filename)!r}" if error.filename is not None else "cannot read or write"
        return fail(options, f"{where}: {error.strerror or error}", CANNOT_READ)
    except KeyboardInterrupt as error:
        for words in getattr(error, "__notes__", ()):  # what an interrupted export left behind, and how to resume it
            fail(options, words, INTERRUPTED)
        return INTERRUPTED
