"""The engine: many requests at once over paged memory, one step behind the device.

`pages.py` hands out KV memory, `request.py` is one caller's job, and `scheduler.py` decides what the next step runs;
these three are plain Python and know nothing of tensors. The other files turn a plan into work for the device.
"""
