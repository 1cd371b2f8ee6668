"""What one training step computes: packed batches, slots, attention masks, labels and losses."""
