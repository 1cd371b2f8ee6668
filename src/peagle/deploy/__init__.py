"""Beyond one machine: vLLM as the engine, and Amazon SageMaker as the place to run."""
