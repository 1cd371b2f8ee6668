"""Targets: find, load and run the model whose output distribution is preserved.

Owns the source of the weights, their dtype and device, and the hidden states that drafters read. Knows nothing of
drafters or of verification.
"""
