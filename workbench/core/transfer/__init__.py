"""Moving elements from chunks to wherever they are wanted: one table of regions, and a module for each kind of sink.

::

    boxes of tensors ──regions──► boxes of chunks, each with its place ──arrays───► memory of the caller
                                                                       ──streams──► digests, files
"""
