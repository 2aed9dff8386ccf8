"""Folders of zarr 2 arrays: Orbax without OCDBT, and Megatron's former backend."""
