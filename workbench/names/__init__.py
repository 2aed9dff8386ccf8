"""The meaning of stored names; every question about a name is answered here, in one place.

::

    roles       a stored key                  → the parameter it belongs to, and its role: exp_avg, scale …
    weights     a parameter's name            → stack, layer, expert, kind of weight, fused parts
    optimizer   an optimizer's integer ids    → the parameters that they number, if that is certain
    steps       a folder's or file's name     → training step
    frameworks  a framework's names and fused weights → boxes of Hugging Face's

Nothing is read here: the modules work on strings, shapes and decoded objects. The treatment of a kind of weight (how
tensor parallelism shards it, what the doctor compares it with) is up to the caller, keyed by the kind.
"""
