"""Quantized checkpoints: what their formats mean, and how to load them kept or dequantized.

`formats` reads config.json, `headers` finds and checks the tensors, `unpack` computes the weights, `load` loads models,
and `keep` keeps their weights as stored.
"""
