"""Causes G and H: corruption and mixed saves; deliberate changes and the model itself."""

from __future__ import annotations

from workbench.doctor.causes.cause import made

__all__ = ["CHANGES", "CORRUPTION"]

HASHES = "content hashes of the save (workbench manifest), or an echo"
RESTORE = "restore the file from a copy, or go back to the checkpoint before"

CORRUPTION = (
    made("G1", "A number is damaged: a flipped exponent bit, NaN or infinity.", "memory, network or storage",
         "NaN, or an explosion", RESTORE, HASHES, "catalogue G1"),
    made("G2", "A bit is flipped.", "memory, network or storage", "mostly none", RESTORE + "; or set the element right",
         HASHES, "catalogue G2"),
    made("G3", "A bit of a second moment is flipped.", "memory, network or storage",
         "negative: NaN; smaller: a huge step; larger: a frozen weight", RESTORE, HASHES, "catalogue G3"),
    made("G4", "A file is truncated or unreadable.", "an interrupted or failed write", "the load fails, or zeros",
         RESTORE, "the file's size at the save", "catalogue G4"),
    made("G5", "Pages of a file are zeros.", "a crash before the write, sparse holes, a map of an overwritten file",
         "a small jump", RESTORE + "; fsync before the save is called done", HASHES, "SimpleTuner 2714"),
    made("G6", "Parts are from different saves.",
         "one rank's file is older, or an asynchronous save was not consistent",
         "often invisible", "take all files from one save; copy tensors before an asynchronous save returns",
         "the checkpoint before: which files equal it?", "pytorch 144657, Lightning 20953",
         dcp="dcp.async_save must stage CPU tensors too; compare .metadata's time with the files'",
         deepspeed="all *_optim_states.pt must be of one save: compare their times",
         megatron="all mp_rank_* must be of one save: compare their times and iterations"),
    made("G7", "A whole save repeats an older one.", "cached structures were written again", "the resume goes back",
         "check what the saver writes: hash two consecutive saves", "the older checkpoints", "NeMo-RL 3312"),
    made("G8", "The pointer to the latest checkpoint leads to an incomplete one.", "written before the save was done",
         "an old or partial resume", "write the pointer last; resume from the last complete save",
         "the files on disk", "speculators 739"),
    made("G9", "The computation itself made wrong numbers.", "a defective device", "bursts, or steady drift",
         "run the step again on another device; test the device", "the same step from another run", "catalogue G9"),
    made("G10", "What was read is not what is stored.", "a damaged read was broadcast", "as for flipped bits",
         "read again; compare with hashes made before the upload", HASHES, "catalogue G10"),
)  # fmt: skip

CHANGES = (
    made("H1", "Settings changed: on purpose?", "arguments of the new launch, or new defaults", "as the setting goes",
         "compare the arguments with what was meant; if they were not, resume again with those of before",
         "the arguments of both launches", "catalogue H1"),
    made("H2", "The model's config changed where no tensor shows it.", "rope base, attention scale, ε of norms",
         "a jump from the first loss on", "compare the model's config files", "config.json of both", "catalogue H2"),
    made("H3", "A pocket of bad data.", "few tokens with large gradients", "a spike that a resume does not cause",
         "look at the batches of those steps", "the data's position and log", "catalogue H3"),
    made("H4", "The model itself becomes unstable.", "attention or output logits grow", "spikes that come back",
         "q/k norms, z-loss, a lower lr", "older checkpoints", "catalogue H4"),
)  # fmt: skip
