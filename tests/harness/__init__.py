"""What the tests share: tiny models, local servers, stand-ins for vLLM, the Hub and AWS, and runs of a few steps."""
