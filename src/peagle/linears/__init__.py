"""Linear layers for few rows: our GPU kernels, siblings joined into one product, weights in 4 and 8 bits."""
