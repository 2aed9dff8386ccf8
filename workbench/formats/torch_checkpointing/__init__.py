"""Meta's torch_checkpointing."""
