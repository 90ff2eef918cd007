"""CUDA C++ kernels, compiled on first use by NVRTC (part of every CUDA build of PyTorch) and cached on disk."""
