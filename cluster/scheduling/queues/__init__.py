"""The order in which tenants and their requests wait, and how many may wait."""
