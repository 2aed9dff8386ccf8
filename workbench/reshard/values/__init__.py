"""What an export changes of the elements: casts, FP8 with scales, adapters."""
