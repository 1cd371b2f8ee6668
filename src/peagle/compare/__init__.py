"""Comparing drafted with plain decoding, and a drafter directory with its card: divergence, lossless, the gate."""
