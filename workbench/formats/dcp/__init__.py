"""PyTorch distributed checkpoints (DCP): the reader, the metadata's pickle, and lanes for huge ones."""
