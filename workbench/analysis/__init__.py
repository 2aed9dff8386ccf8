"""Pure functions from checkpoints and tensors to frozen results, independent of formats and of the display."""
