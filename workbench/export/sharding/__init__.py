"""How tensors are placed on a mesh: rules by name, and placements to boxes."""
