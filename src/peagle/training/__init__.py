"""Train a drafter: target features, training loop, memory planner, multi-GPU, checkpoint and resume."""
