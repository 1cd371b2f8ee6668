"""Where there is no GPU, Triton's kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated, its own library's among them, so before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"
