"""The Ray cluster that this process starts or joins: its start, its health and its end."""
