"""Real frontends on loopback ports, over a fake engine, in their own thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc
import httpx
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from cluster.serving.auth import Authenticator, digest_of
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.inputs import CallOptions
from cluster.serving.intake import ReaderLimits
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.config import EngineConfig
from pagedray.model_config import ModelConfig
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cluster.serving.http.request_checks import AllowedOrigins
    from cluster.serving.responses.stored_responses import StoreLimits
    from cluster.serving.tls import CertificateStore
    from pagedray.request import Request

__all__ = ["TEXT", "wait_until", "write_tokenizer"]

TEXT = "The quick brown fox says h\u00e9llo \u4f60\u597d \U0001f642 to everyone. "
SPECIAL_TOKENS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system speaks first.') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 300,
    special_tokens: Sequence[str] = (),
    template: str | None = None,
) -> None:
    """Write a byte-level tokenizer with few merges, whose characters span tokens.

    `special_tokens` follow those of every test; `template` is that of its own file.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["The quick brown fox says to everyone. "] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


CONTEXT = 256
VOCAB_SIZE = 320


def engine_config(context: int = CONTEXT) -> EngineConfig:
    model = ModelConfig(
        name="tiny",
        folder=Path(),
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=8,
        max_positions=context,
        eos_token_ids=(1,),
    )
    return EngineConfig(model=model)


def encoder_config() -> EngineConfig:
    """Return the configuration of a model that embeds."""
    config = engine_config()
    return replace(config, model=replace(config.model, task="embed"))


class Server:
    """Frontends on an event loop in a thread. A context manager."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int = CONTEXT,
        key_file: Path | None = None,
        reader_limits: ReaderLimits | None = None,
        certificates: CertificateStore | None = None,
        allowed_hosts: tuple[str, ...] = (),
        strict_parameters: bool = False,
        allowed_origins: AllowedOrigins | None = None,
        store_limits: StoreLimits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.loop = asyncio.new_event_loop()
        self.client = EngineClient(self.loop)
        self.attach()
        self.frontends = Frontends(
            self.client,
            tokenizer,
            self.config(context),
            FrontendOptions(
                host="127.0.0.1",
                grpc_port=0,
                http_port=0,
                calls=CallOptions(
                    reader_limits=reader_limits or ReaderLimits(),
                    strict_parameters=strict_parameters,
                ),
                allowed_hosts=allowed_hosts,
                allowed_origins=allowed_origins,
                store_limits=store_limits,
            ),
            authenticator=None if key_file is None else Authenticator(key_file),
            certificates=certificates,
        )
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def config(self, context: int) -> EngineConfig:
        """Return what the frontends serve."""
        return engine_config(context)

    def attach(self) -> None:
        """Start the fake engine and have the frontends use it."""
        self.engine = FakeEngine(self.client, self.script)
        self.client.attach_engine(self.engine)

    def script(self, request: Request, index: int) -> list[int]:
        """Return the tokens of the test's text, rotated by words for other sequences."""
        words = TEXT.split(" ")
        return self.tokenizer.encode(
            " ".join(words[index:] + words[:index]), add_special_tokens=False
        )

    def say(self, text: str) -> int:
        """Let the model write a text and end; return the number of its tokens."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.engine.script = lambda request, index: [*token_ids, 1]
        return len(token_ids)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self.frontends.start_servers())
        self._run(self.frontends.set_ready())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self.frontends.stop_servers(0.5))
        self.engine.stop()
        self._run(self.loop.shutdown_asyncgens())
        self._run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self, work) -> None:  # type: ignore[no-untyped-def]  # any coroutine
        asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.frontends.grpc_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.frontends.http_port}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint without weights."""
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def template_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """Makes tokenizers with a chat template, and with further special tokens."""

    def make(template: str, *, special_tokens: Sequence[str] = ()) -> Tokenizer:
        path = tmp_path_factory.mktemp("model")
        write_tokenizer(path, template=template, special_tokens=special_tokens)
        return Tokenizer.from_folder(path)

    return make


@pytest.fixture(scope="session")
def running_server(tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(tokenizer) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """Running frontends whose engine knows nothing of other tests."""
    running_server.engine.reset()
    yield running_server
    # A client may receive its last byte before the server has ended the call.
    deadline_s = time.monotonic() + 60
    while running_server.frontends.servicer.num_open_calls and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert running_server.frontends.servicer.num_open_calls == 0


@pytest.fixture
def engine(server: Server) -> FakeEngine:
    return server.engine


@pytest.fixture
def stub(server: Server) -> Iterator[pagedray_pb2_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield pagedray_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture
def openai_client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Return once the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "It did not happen in time."
        await asyncio.sleep(0.002)


def limited_tenants(tmp_path: Path) -> Authenticator:
    """Return the keys of ann, who has limits, ben, who has a weight, and root, an admin."""

    def entry(name: str, more: str = "") -> str:
        return f'[tenants.{name}]\nkeys = ["sha256:{digest_of(name).hex()}"]\n{more}\n'

    path = tmp_path / "keys.toml"
    limits = "max_requests = 2\nmax_tokens = 100"
    path.write_text(
        entry("ann", limits) + entry("ben", "weight = 3") + entry("root", "is_admin = true")
    )
    path.chmod(0o600)
    return Authenticator(path)
