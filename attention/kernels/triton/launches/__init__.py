"""How kernels are launched: overlapping, and cheaply for the host; and their keys on disk."""
