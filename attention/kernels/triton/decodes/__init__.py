"""Attention of decodes over the paged cache."""
