"""The frontends over a fake engine that tests of serving use."""

from tests.serving.conftest import folder, module_server, server, tokenizer

__all__ = ["folder", "module_server", "server", "tokenizer"]
