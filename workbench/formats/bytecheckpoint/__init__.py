"""ByteCheckpoint: parts with their own metadata, and flat parameters of FSDP1."""
