"""Megatron-LM and Megatron-core checkpoints: ``torch_dist`` and ``mp_rank`` folders."""
