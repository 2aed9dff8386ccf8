"""Pickles decoded without importing or running anything that they name.

::

    opcodes        the length of each opcode and its operands, from pickletools
    guard          every opcode of a stream read before the first is executed       budget   limits of memory and work
    unpickle       the only unpickler
    standins       its replacements for classes and functions                        arrays   numpy's
    constructors   the known globals, and the result of each
"""
