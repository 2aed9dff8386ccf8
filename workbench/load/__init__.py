"""Load a checkpoint into the tensors of a running job: what each rank needs, which rank reads it, which sends it."""
