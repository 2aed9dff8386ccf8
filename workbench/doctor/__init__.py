"""The resume doctor: evidence → signs → causes. Call it: ``workbench.doctor(before, after, echo=echo)``."""
