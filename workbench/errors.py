"""The exceptions that the workbench raises deliberately.

::

    WorkbenchError
    ├── OpenError                     cannot open or read; the command line exits with 3
    │   ├── NotACheckpointError       no known checkpoint format at this path
    │   ├── UnsupportedFormatError    recognised, but this format or version cannot be read
    │   ├── MissingExtraError         readable once an optional package is installed
    │   ├── MissingFileError          a file that the metadata names is absent or unreadable
    │   ├── CorruptError              the bytes are inconsistent with themselves or the metadata
    │   │   └── TruncatedError        … because a file is shorter than its metadata says
    │   ├── UnsafeError               refused as unsafe: path escape, bomb, foreign global
    │   ├── IncompleteError           an interrupted save: the commit marker is missing
    │   └── ChangedError              a file changed under an open checkpoint
    ├── HoleError                     some elements of a tensor are stored nowhere
    ├── TensorNotFoundError           no such key (also a KeyError)
    ├── ObjectNotFoundError           no object of that name (also a KeyError)
    ├── SelectionError                an index that does not fit the shape (also an IndexError)
    ├── WriteError                    the target exists, has no space left, or cannot be written
    ├── EchoError                     a trainer does not hold what its checkpoint stores
    ├── DeviceMemoryError             a device has no room for the tensors (also a MemoryError)
    ├── WorkerError                   an executor lost its workers or its scheduler
    └── UsageError                    an invalid argument; the command line exits with 64

A message is one line: what is wrong, which file or tensor, which byte, by how much, and what to do. However long the
names in a checkpoint are, it has at most 2,000 characters, and usually fewer than 500.
"""

from __future__ import annotations

import re

__all__ = [
    "ChangedError",
    "CorruptError",
    "DeviceMemoryError",
    "EchoError",
    "HoleError",
    "IncompleteError",
    "MissingExtraError",
    "MissingFileError",
    "NotACheckpointError",
    "ObjectNotFoundError",
    "OpenError",
    "SelectionError",
    "TensorNotFoundError",
    "TruncatedError",
    "UnsafeError",
    "UnsupportedFormatError",
    "UsageError",
    "WorkbenchError",
    "WorkerError",
    "WriteError",
    "bounded",
    "quoted",
]

NAME = 160  #: maximum characters of a name in a message
WORD = 256  #: maximum characters between two spaces of a message; a file name has up to 255
MESSAGE = 2000  #: maximum characters of a message
_LONG = re.compile(rf"\S{{{WORD + 1},}}")


def quoted(name: str | bytes) -> str:
    """Return the repr of a name from a file, for a message; a long one without its middle."""
    if len(name) > 2 * NAME:
        name = name[:NAME] + name[-NAME:]  # type: ignore[operator]  # the repr of the whole could be very large
    return _cut(repr(name), NAME)


def bounded(message: str) -> str:
    """Return a message without the middle of each word over 256 characters, or its own over 2,000 characters."""
    if len(message) <= WORD:
        return message
    return _cut(_LONG.sub(lambda word: _cut(word[0], NAME), message), MESSAGE)


def _cut(text: str, most: int) -> str:
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


class WorkbenchError(Exception):
    """Base class of all workbench errors."""

    def __str__(self) -> str:  # KeyError's own str() would quote the whole message
        return bounded(str(self.args[0])) if self.args else type(self).__name__


class OpenError(WorkbenchError):
    """The checkpoint, or a part of it, cannot be opened or read."""


class NotACheckpointError(OpenError):
    """The path does not contain a checkpoint in a known format."""


class UnsupportedFormatError(OpenError):
    """The format or its version is recognised but cannot be read; the message says why."""


class MissingExtraError(OpenError):
    """An optional package is needed; the message contains the exact ``pip install`` command."""


class MissingFileError(OpenError):
    """A file named by the metadata is absent, is not a regular file, or is not readable."""


class CorruptError(OpenError):
    """The bytes are inconsistent with themselves, each other, or the metadata."""


class TruncatedError(CorruptError):
    """A file ends before bytes that the metadata refers to."""


class UnsafeError(OpenError):
    """Refused as unsafe: a path that leaves the checkpoint, a decompression bomb, a foreign global in a pickle."""


class IncompleteError(OpenError):
    """The save was interrupted: there is data but no commit marker."""


class ChangedError(OpenError):
    """A file was replaced, shortened or rewritten while the checkpoint was open."""


class HoleError(WorkbenchError):
    """Requested elements are not stored in any chunk; the message names the first missing box."""


class TensorNotFoundError(WorkbenchError, KeyError):
    """There is no tensor with that key, or with that fqn and role."""


class ObjectNotFoundError(WorkbenchError, KeyError):
    """The checkpoint has no object with that name."""


class SelectionError(WorkbenchError, IndexError):
    """An index does not fit the tensor's shape."""


class WriteError(WorkbenchError):
    """The target cannot be written: it exists, or the disk is full or failed. No partial output is left visible."""


class EchoError(WorkbenchError):
    """A trainer's state differs from the checkpoint that it loaded."""


class DeviceMemoryError(WorkbenchError, MemoryError):
    """A device has less free memory than the tensors need; nothing was allocated."""


class WorkerError(WorkbenchError):
    """An executor lost its worker processes or its scheduler, or its workers run other versions."""


class UsageError(WorkbenchError, ValueError):
    """An invalid argument."""
