"""DeepSpeed checkpoints: ZeRO 0 to 3, pipeline and experts, and universal ones."""
