"""torch.save files: zip, legacy and tar archives, one or a folder of them."""
