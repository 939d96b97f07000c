"""Blocks of the KV cache as numbers: free, owned or in transit, and found by their prefixes."""
