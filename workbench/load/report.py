"""The report of a load, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.words import plural


@dataclass(frozen=True)
class LoadReport:
    """One rank's part of a load.

    Attributes:
        loaded: names of the tensors that were filled.
        missing: name → why the checkpoint has nothing for it; both tensors and other values.
        mismatched: name → how it differs from what is stored; these tensors are unchanged.
        unexpected: stored keys that no rank requested, among the roles that some rank requested.
        objects: name → value of non-tensor state. Plain values were also set in the state dict.
        read_nbytes: bytes that this rank read from the checkpoint's files, excluding metadata.
        received_nbytes: bytes of elements that other ranks read and sent to this rank.
        seconds: duration of the call.
    """

    loaded: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    mismatched: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    read_nbytes: int = 0
    received_nbytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; only the names of ``objects``, whose values may be anything."""
        return {
            "loaded": list(self.loaded),
            "missing": dict(self.missing),
            "mismatched": dict(self.mismatched),
            "unexpected": list(self.unexpected),
            "objects": list(self.objects),
            "read_nbytes": self.read_nbytes,
            "received_nbytes": self.received_nbytes,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        exchanged = f", {self.received_nbytes:,} received" if self.received_nbytes else ""
        summary = (
            f"loaded {plural(len(self.loaded), 'tensor')} in {self.seconds:.1f} s: "
            f"{plural(self.read_nbytes, 'byte')} read{exchanged}"
        )
        counts = {"missing": self.missing, "mismatched": self.mismatched, "unexpected": self.unexpected}
        return "; ".join([summary, *(f"{len(found):,} {what}" for what, found in counts.items() if found)])
