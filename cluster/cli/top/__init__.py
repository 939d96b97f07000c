"""The command `pagedray top`."""
