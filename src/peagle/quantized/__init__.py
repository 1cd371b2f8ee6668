"""Weights stored in few bits: what their formats mean, and their numbers as plain weights.

`formats` reads config.json, `headers` finds and checks the tensors, `unpack` computes the numbers, `load` loads models,
and `keep` leaves their weights as they are.
"""
