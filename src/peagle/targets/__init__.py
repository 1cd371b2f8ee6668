"""Targets: finding, loading and running the model whose distribution is preserved.

Owns where weights come from, their precision and device, and which hidden states leave the model as `aux_hidden`.
Knows nothing of drafters or of how draft tokens are verified.
"""
