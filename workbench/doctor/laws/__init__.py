"""What Adam and AdamW cannot do, and what they must: pure functions on flat arrays."""

__all__: list[str] = []
