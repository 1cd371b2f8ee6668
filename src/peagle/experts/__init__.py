"""The experts of a mixture-of-experts layer, for the few rows of a decode step."""
