"""The frontends over a fake engine that tests of serving use."""

from tests.serving.conftest import folder, running_server, server, tokenizer

__all__ = ["folder", "running_server", "server", "tokenizer"]
