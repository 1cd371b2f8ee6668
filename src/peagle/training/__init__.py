"""Training: conversations, COD slot sampling, losses, the loop, and going on where it was interrupted.

Owns everything between a target and a drafter checkpoint. Text that the target writes is produced by a function
passed in, so training does not know the engine.
"""
