"""Properties of processes and threads that are read from the operating system, or set there."""
