"""The resume doctor: evidence → signs → causes. Call it: ``workbench.doctor(before, after, echo=echo)``.

The package's name is the function's, and importing any of its modules puts the package in the function's place: so the
package can be called too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Doctor(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """As :func:`workbench.doctor.examine.doctor`, with a progress bar in IPython."""
        function = sys.modules["workbench"].__getattr__("doctor")  # and puts it back in the package's place
        return function(*args, **options)


sys.modules[__name__].__class__ = _Doctor
