"""Laws of Adam and AdamW, bounds and equalities, as pure functions on flat arrays."""
