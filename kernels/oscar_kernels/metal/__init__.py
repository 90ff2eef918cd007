"""Metal kernels of the SRFT codec; they run on Apple GPUs through :mod:`~oscar_kernels.metal.bridge`."""
