"""SageMaker endpoints: what one consists of (plan), and making, changing, calling and removing it (run, invoke)."""
