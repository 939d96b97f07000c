"""What the prefix cache has of sequences: look-ups, registered blocks, and those copied back."""
