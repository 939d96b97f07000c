"""Plain-Python scheduling: which sequences run, on which blocks."""
