"""How tensors lie on a mesh: rules by name, and placements to boxes."""
