"""The command `pagedray simulate`."""
