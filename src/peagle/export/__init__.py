"""Export: handing a drafter to other engines in the layout that they read, and checking that they can.

Writes and reads checkpoints only; it starts no engine and does not train.
"""
