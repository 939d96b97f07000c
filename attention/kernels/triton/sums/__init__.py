"""Sums of rows over the ranks of a node."""
