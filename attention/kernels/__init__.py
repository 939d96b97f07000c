"""Our own kernels, for what libraries do not support or compute slowly."""
