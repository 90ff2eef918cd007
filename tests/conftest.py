"""The Triton kernels run compiled where there is a GPU, else under the interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: their decorator reads it
