"""Copy tensors to a device through a ring of host buffers."""
