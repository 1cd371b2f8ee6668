"""The drafter: its configuration, slot layout, network, vocabulary mapping and checkpoint.

`slots.py` is the only place that knows positions, inputs and visibility of slots; training and decoding both ask it.
Knows nothing of sampling or acceptance, and sees a target only as embeddings, a head and `aux_hidden`.
"""
