"""Decoding: sampling, verifying draft tokens, and the plain decoder that every fast path is compared with.

Owns the mathematics of accepted, recovered and bonus tokens. Works on whatever target and drafter it is handed and
does not know how either was loaded or trained.
"""
