"""Which code a pass runs: compiled by numba, or numpy's, which is slower and knows every type.

numba is imported when a pass is large enough to be worth it, and never by ``import workbench``. A machine on which it
cannot be imported gets the same results from numpy.
"""

from __future__ import annotations

import importlib
import sys

from workbench.errors import MissingExtraError

WORTH_NUMBA = 256 << 20  #: bytes of a pass from which importing numba and its compiled code (half a second) pays


def engine(nbytes: int, fast: bool | None = None) -> str:
    """Return which code a pass over ``nbytes`` bytes runs: ``numba`` or ``numpy``; results name it.

    Args:
        fast: the caller's choice; by default numba is used if it can be imported and the pass is not small.

    Raises:
        MissingExtraError: numba is requested and cannot be imported.
    """
    if fast is False or (fast is None and nbytes < WORTH_NUMBA):
        return "numpy"
    try:
        importlib.import_module("numba")
    except ImportError as error:  # not installed, or not for this Python or numpy
        if fast:
            raise MissingExtraError(f"compiled passes need numba, which cannot be imported: {error}") from error
        return "numpy"
    return "numba"


def compiled_in_use() -> bool:
    """Return whether a pass has imported compiled code; functions that it calls may then use compiled code, too."""
    return "workbench.core.kernels" in sys.modules
