"""A trainer's state right after its load: names, fingerprints, and differences from the checkpoint."""
