"""Training data: prompt files, conversations and shards, and generating them with the target."""
