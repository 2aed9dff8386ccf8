"""Every error the workbench raises on purpose.

::

    WorkbenchError
    ├── OpenError                     cannot open or read; the command line exits with 3
    │   ├── NotACheckpointError       nothing we recognise lies there
    │   ├── UnsupportedFormatError    recognised, but this format or version cannot be read
    │   ├── MissingExtraError         readable once an optional package is installed
    │   ├── MissingFileError          a file that the metadata names is absent or unreadable
    │   ├── CorruptError              the bytes contradict themselves or the metadata
    │   │   └── TruncatedError        … by being shorter than they say
    │   ├── UnsafeError               refused on principle: path escape, bomb, foreign global
    │   ├── IncompleteError           an interrupted save: the commit marker is missing
    │   └── ChangedError              a file changed under an open checkpoint
    ├── HoleError                     some elements of a tensor are stored nowhere
    ├── TensorNotFoundError           no such key (also a KeyError)
    ├── ObjectNotFoundError           no object of that name (also a KeyError)
    ├── SelectionError                an index that does not fit the shape (also an IndexError)
    ├── WriteError                    a target exists, has no room, or cannot be written
    ├── EchoError                     a trainer does not hold what its checkpoint stores
    ├── DeviceMemoryError             a device has no room for the tensors (also a MemoryError)
    └── UsageError                    an argument that makes no sense; the command line exits with 64

A message says what, which file or tensor, which byte, by how much, and what to do, in one line.
"""

from __future__ import annotations

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
    "WriteError",
]


class WorkbenchError(Exception):
    """Base of every error of ours."""

    def __str__(self) -> str:  # KeyError's own str() would quote the whole message
        return str(self.args[0]) if self.args else type(self).__name__


class OpenError(WorkbenchError):
    """The checkpoint, or a part of it, cannot be opened or read."""


class NotACheckpointError(OpenError):
    """Nothing recognisable as a checkpoint lies at the path."""


class UnsupportedFormatError(OpenError):
    """The format or its version is known by name but cannot be read; the message says why."""


class MissingExtraError(OpenError):
    """An optional package is needed; the message holds the exact ``pip install``."""


class MissingFileError(OpenError):
    """A file named by the metadata is absent, is no regular file, or may not be read."""


class CorruptError(OpenError):
    """Bytes that contradict themselves, each other, or the metadata."""


class TruncatedError(CorruptError):
    """A file ends before the bytes that the metadata promises."""


class UnsafeError(OpenError):
    """Refused on principle: a path that leaves the checkpoint, a bomb, a foreign global."""


class IncompleteError(OpenError):
    """The save was interrupted: data without its commit marker."""


class ChangedError(OpenError):
    """A file was replaced, shortened or rewritten while the checkpoint was open."""


class HoleError(WorkbenchError):
    """Wanted elements are stored in no chunk; the message names the first missing box."""


class TensorNotFoundError(WorkbenchError, KeyError):
    """No tensor of that key, or none of that fqn and role."""


class ObjectNotFoundError(WorkbenchError, KeyError):
    """A checkpoint has no object of that name."""


class SelectionError(WorkbenchError, IndexError):
    """An index that does not fit the tensor's shape."""


class WriteError(WorkbenchError):
    """What should be written cannot be: the target exists, the disk is full or failed; nothing of it is visible."""


class EchoError(WorkbenchError):
    """A trainer does not hold what the checkpoint that it loaded stores."""


class DeviceMemoryError(WorkbenchError, MemoryError):
    """A device has less memory free than the tensors need; nothing was allocated."""


class UsageError(WorkbenchError, ValueError):
    """An argument that makes no sense."""
