"""What a trainer holds right after its load: its names, its fingerprints, and where they differ from the checkpoint."""
