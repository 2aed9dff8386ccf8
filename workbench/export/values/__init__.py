"""Changes of element values in an export: casts, FP8 with scales, adapters."""
