"""Which server a load test drives, and how its requests are made."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pagedray.errors import StartupError

__all__ = ["Backend", "Target"]

Backend = Literal["openai", "openai-chat", "grpc", "grpc-chat"]
"""`grpc` calls Generate and `grpc-chat` calls Chat of a PagedRay server."""

_PATHS: Mapping[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "grpc": "",
    "grpc-chat": "",
}
_SCHEMES = {False: ("http", "https"), True: ("grpc", "grpcs")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the fields that all requests have in common."""

    backend: Backend
    base_url: str
    """Without the path of the endpoint; `/v1` at its end is optional."""
    endpoint: str | None = None
    """The path; None is that of the backend."""
    key: str | None = None
    ca_file: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        """Validate the fields. Raises StartupError."""
        schemes = _SCHEMES[self.is_grpc]
        shown = repr(self.base_url)
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError as error:
            raise StartupError(f"--base-url {shown:.200} is not a URL: {error}.") from error
        if parts.scheme not in schemes or not parts.hostname or port == 0:
            raise StartupError(
                f"--base-url must look like {schemes[0]}://HOST:PORT for --backend {self.backend}, "
                f"not {shown:.200}."
            )
        if self.is_grpc and (port is None or parts.path.strip("/") or parts.query):
            raise StartupError(
                f"--base-url must be {parts.scheme}://HOST:PORT for --backend {self.backend}, not "
                f"{shown:.200}."
            )
        if self.is_grpc and (self.headers or self.extra_body or self.endpoint):
            raise StartupError("--endpoint, --header and --extra-body require HTTP, not gRPC.")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise StartupError(f"--endpoint must begin with a slash, not {self.endpoint!r:.200}.")
        if self.ca_file is not None and not self.is_encrypted:
            raise StartupError(f"--tls-ca requires {schemes[1]}://, not {shown:.200}.")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise StartupError("The API key must be a single line of printable ASCII.")

    @property
    def is_grpc(self) -> bool:
        """Whether requests are sent over gRPC."""
        return self.backend.startswith("grpc")

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.backend.endswith("-chat")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return urlsplit(self.base_url).scheme in ("https", "grpcs")

    @property
    def address(self) -> str:
        """The host and the port of a gRPC server."""
        return urlsplit(self.base_url).netloc

    @property
    def root(self) -> str:
        """The URL below which `/v1` is."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """The URL to which requests are sent."""
        return self.root + (self.endpoint or _PATHS[self.backend])

    def tls(self) -> ssl.SSLContext:
        """Return the context that checks the server's certificate.

        Raises StartupError.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise StartupError(f"Cannot read --tls-ca {self.ca_file}: {error}.") from error
