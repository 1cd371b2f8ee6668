"""Decoding: verify draft tokens, end answers, follow grammars, and the reference decoder.

Owns the rules for accepted, recovered and bonus tokens. Does not know how target and drafter were loaded or trained.
"""
