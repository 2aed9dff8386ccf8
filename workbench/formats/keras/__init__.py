"""Keras' checkpoints: ``.keras`` archives, weights and whole models in HDF5."""
