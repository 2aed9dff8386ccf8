"""Pure functions from checkpoints and tensors to frozen results; no screen, no format."""
