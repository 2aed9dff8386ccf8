"""Mutated checkpoints of every format, each looked at in every way, in worker processes with limits.

::

    seed ──► sample ──► copy ──► 1 to 4 mutations ──► open, read, verify, diff, doctor, export …  ──► Outcome
            samples     cases    mutate, edits        look, under the audit hook of watch
             └────────────────── worker: one process, many seeds ───────────────────┘
                                      ▲ a seed a line, an outcome a line
                                    pool: wall time, signals, a second try alone

A case follows from its number alone. ``python -m tests.fuzz SEED …`` runs cases again and tells what was done to them;
``--keep FOLDER`` leaves the mutated checkpoint there.
"""
