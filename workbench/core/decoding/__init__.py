"""Quantised tensors as the numbers that they represent: a recipe for each, and byte sources that apply it.

::

    stored     blk.0.attn_q.weight   Q4_K, 144 bytes for 256 elements                  ckpt[key]
    recipe     which stored tensors, in which units, and the function that undoes one
    decoded    the same key, float32, as if it were stored row by row                  ckpt.decoded(key)

A decoded tensor has a row in a catalog like any other. Its bytes are those of a :class:`~values.ValueSource`, which
reads and decodes the units that a request touches, so slices, plans and scans need not know that they are computed.
"""
