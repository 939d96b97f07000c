"""Finds the endpoint of a path, or the endpoint that a client most likely means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.http.errors import OPENAI_ERRORS
from pagedray.text import nearest_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.http.endpoint import Endpoint
    from cluster.serving.http.errors import ErrorFormat

__all__ = ["ABSENT", "EndpointTable"]

_LONGEST_LIKE = 64
"""Characters of a path that is compared with all others, which takes time."""
_VERSION = "/v1"

ABSENT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("/invocations",),
        "use the endpoint for the body; a router in front can choose it by the fields of the body",
    ),
    (
        ("/sleep", "/wake_up", "/is_sleeping"),
        "weights stay on the device; stop the server, or let Ray Serve scale it to zero",
    ),
    (
        ("/generate", "/generate_stream", "/inference/v1/generate"),
        "use `/v1/completions`, which also accepts token ids and returns log-probabilities",
    ),
    (
        ("/get_model_info", "/get_server_info", "/health_generate", "/model_info"),
        "use `/v1/models`, `/server_info` and `/health`",
    ),
    (
        ("/reset_prefix_cache", "/flush_cache"),
        "`cache_salt` prevents calls from sharing prefixes; cached blocks are evicted when others "
        "need them",
    ),
    (
        ("/reset_mm_cache", "/reset_encoder_cache"),
        "the server only reads text, of which it caches no other input",
    ),
    (("/classify",), "use `/score` and `/rerank`; named classes are not supported"),
    (
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "LoRA adapters are not supported; merge the adapter into the weights",
    ),
    (
        ("/update_weights", "/pause", "/resume", "/is_paused"),
        "the weights do not change while the server runs; start another server",
    ),
    (
        ("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        "the number of ranks is fixed; Ray Serve adds and removes replicas",
    ),
    (("/collective_rpc",), "code of clients is never run"),
    (
        ("/start_profile", "/stop_profile"),
        "`/metrics` and the traces have the times of calls and steps",
    ),
    (("/tokenizer_info",), "use `/tokenize`, or the files of the model"),
    (
        ("/v1/chat/completions/render", "/v1/completions/render"),
        "use `/tokenize`, which renders a conversation, too",
    ),
    (
        ("/v1/responses/compact",),
        "send fewer items, or use `truncate_prompt_tokens` of `/v1/chat/completions`",
    ),
    (("/v1/moderations",), "the server has no moderation model"),
    (
        (
            *("/v1/audio/...", "/v1/images/...", "/v1/videos/...", "/v1/realtime/..."),
            *("/v1/files/...", "/v1/uploads/...", "/v1/batches/...", "/v1/messages/batches/..."),
            *("/v1/vector_stores/...", "/v1/fine_tuning/..."),
        ),
        "the server only reads and writes text, and does not store files; `pagedray "
        "run-batch` and `LLM.generate` run many prompts",
    ),
    (
        ("/v1/conversations/...", "/v1/assistants/...", "/v1/threads/..."),
        "conversations are not stored, except for responses; send all messages, or use "
        "`/v1/responses` with `previous_response_id`",
    ),
    (
        ("/v1/chat/completions/...",),
        "completions are not stored (`store` is ignored); `/v1/responses` are read by their ids",
    ),
    (
        ("/api/chat", "/api/generate", "/api/tags", "/api/embed"),
        "use `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/v1/embeddings`",
    ),
    (("/v1/complete",), "use `/v1/messages`"),
    (("/redoc",), "use `/docs`"),
)
"""Paths of other servers that do not exist here, each with an alternative or the reason.

A path that ends with dots stands for itself and for all paths below it. `docs/compatibility.md` is
made from this table.
"""

_ABSENT = {path: reason for paths, reason in ABSENT for path in paths}
_MOST_STEPS = 4
"""Parts of the longest path with dots; the first of them is empty."""


class EndpointTable:
    """Finds endpoints by the exact path of a request, without normalization.

    HEAD is answered where GET is, unless the path has a parameter: a stream would be resumed.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._open: dict[tuple[str, str], dict[str, Endpoint]] = {}
        """Parameterized endpoints, keyed by (prefix, suffix)."""
        for endpoint in endpoints:
            prefix, brace, rest = endpoint.path.partition("{")
            if brace:
                ends = prefix, rest.partition("}")[2]
                self._open.setdefault(ends, {})[endpoint.method] = endpoint
            else:
                methods = self._exact.setdefault(prefix, {})
                methods[endpoint.method] = endpoint
                if endpoint.method == "GET":
                    # The server leaves the body out.
                    methods["HEAD"] = endpoint
        self._errors_below = {
            f"{one.path}/": one.errors for one in endpoints if one.errors is not OPENAI_ERRORS
        }
        # A path with an end is more specific than a path that ends with its parameter.
        self._open = dict(sorted(self._open.items(), key=lambda one: -len(one[0][1])))

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], str]:
        """Return the endpoints of a path by method, and the value of its parameter."""
        found = self._exact.get(path)
        if found is not None:
            return found, ""
        if path in _ABSENT:
            # Although the parameter of another path matches it.
            return {}, ""
        for (prefix, suffix), by_method in self._open.items():
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                return by_method, path[len(prefix) : len(path) - len(suffix)]
        return {}, ""

    def errors_of(self, path: str) -> ErrorFormat:
        """Return the format of errors of the API that a path belongs to."""
        methods, _ = self.find(path)
        of_path = (one.errors for one in methods.values())
        below = (form for root, form in self._errors_below.items() if path.startswith(root))
        return next(of_path, None) or next(below, OPENAI_ERRORS)

    def absent(self, path: str) -> str | None:
        """Return why a path of another server does not exist here; None for any other path."""
        whole = path.rstrip("/")
        if whole in self._exact:
            return None
        steps = whole.split("/", _MOST_STEPS)[:_MOST_STEPS]
        above = ("/".join(steps[:number]) for number in range(len(steps), 1, -1))
        for one in (whole, *(f"{each}/..." for each in above)):
            if one in _ABSENT:
                known = one.removesuffix("/...")
                return f"{known} is not available: {_ABSENT[one].replace('`', '')}."
        return None

    def near(self, path: str) -> str | None:
        """Return the path of an endpoint that a client most likely means; None is none.

        The URL that a client is given may lack the version, or have it twice, or be misspelled.
        """
        bare = path.removeprefix(_VERSION).rstrip("/")
        for one in (_VERSION + bare, bare):
            if one in self._exact:
                return one
        return nearest_name(path, self._exact) if len(path) <= _LONGEST_LIKE else None
