"""What a build measures of a small target on two cores."""

from peagle.building.plan import Measured

CPU = Measured(
    target="smol",
    num_parameters=135_000_000,
    dtype="float32",
    device="cpu",
    accelerator=None,
    recipe=None,
    options={"max_length": 192},
    full_tokens=30_000_000,
    full_steps=400_000,
    tokens_per_step=960,
    max_length=192,
    num_draft_tokens=4,
    num_layers=1,
    num_drafter_parameters=5_000_000,
    feature_bytes=9_216,
    load_seconds=4.0,
    start_seconds=5.0,
    tokens_per_second=70.0,
    tokens_per_second_alone=14.0,
    batch=16,
    seconds_per_step=1.5,
    memory_needed=2**31,
    memory_free=2**34,
    has_chat_template=True,
)
