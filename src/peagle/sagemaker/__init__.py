"""SageMaker endpoints: planning, creating, updating, scaling and invoking them."""
