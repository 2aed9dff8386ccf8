"""Trainers' folders, which hold several checkpoints of other formats."""
