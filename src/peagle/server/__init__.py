"""The HTTP server: OpenAI's and SageMaker's routes over the asynchronous engine.

Importing the package costs nothing; its modules need the extra `serve`, all but `settings` and `sagemaker`.
"""
