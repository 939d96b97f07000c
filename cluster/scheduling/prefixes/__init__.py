"""The blocks of sequences in the prefix cache: look-ups, registration, and copies back."""
