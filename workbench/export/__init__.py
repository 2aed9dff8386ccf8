"""Export a checkpoint from any layout to any other: meshes and placements to boxes, boxes to one plan of copies."""
