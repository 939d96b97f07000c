"""Attention of prompts, with and without cached context."""
