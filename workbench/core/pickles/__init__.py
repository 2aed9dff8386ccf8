"""Pickles decoded without importing or running anything that they name.

::

    opcodes        how long each opcode is and what it takes, from pickletools
    guard          every opcode of a stream read before the first is executed       budget   what a pickle may cost
    unpickle       the only unpickler
    standins       what it makes of classes and functions                           arrays   of numpy's
    constructors   which globals are known, and what each of them makes
"""
