"""Our own kernels, for features that libraries do not support or compute slowly."""
