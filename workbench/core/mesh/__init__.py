"""The device mesh, placements and shards: one arithmetic for layout, export, load, save and echo."""
