"""zarr arrays, of versions 2 and 3: Orbax's checkpoints (in OCDBT or in folders), and Megatron's former backend."""
