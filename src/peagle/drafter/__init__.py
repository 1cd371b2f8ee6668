"""The drafter: configuration, slots, network, draft vocabulary and drafting for one request.

`slots.py` defines positions, inputs and attention of slots. Knows nothing of sampling or acceptance.
"""
