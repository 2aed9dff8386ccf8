"""Load a checkpoint into the tensors of a running job: what each rank needs, and which rank reads and sends it."""
