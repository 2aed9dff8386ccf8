"""Checkpoints in object stores and on servers: a place's files by URL.

::

    s3://bucket/run/step-100        url      scheme, host, key; what may be shown of it
              │
              ▼
    objects  head, get a range, list        obstore, fsspec or the Hugging Face hub
              │
              ▼
    bucket   one listing → a tree of names  the calls of a Place: files, folders, stat, source
    ranged   a Source of one object         few large requests at a time, each of the pinned content
"""
