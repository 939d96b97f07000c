"""`pagedray generate` and `pagedray chat`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from cluster.llm.llm import LLM
from pagedray.errors import EngineError, InvalidRequestError, StartupError
from pagedray.sampling_params import SamplingParams
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import TextIO

    from cluster.engine.engine_options import EngineOptions
    from cluster.engine.executor import ReportProgress
    from cluster.llm.generation import Collector
    from pagedray.config import EngineConfig

__all__ = ["LocalModel", "TextLLM", "chat", "generate"]

_QUOTES = '"""'
_INTRODUCTION = "Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands."
_HELP = """\
/clear        start a new conversation
/system TEXT  start a new conversation with a system message
/retry        answer the last message again
/exit         leave, as Ctrl-D does
\"""           begin and end a message of several lines"""


class TextModel(Protocol):
    """A model that generates text, in this process or on a server."""

    num_tokens: int
    """Number of tokens that the last stream has generated."""
    is_cut: bool
    """Whether `max_tokens` ended the last stream."""

    @property
    def has_chat_template(self) -> bool: ...

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of a completion or an answer, and whether each is reasoning.

        Closing the generator aborts the request. Raises InvalidRequestError and EngineError.
        """

    # Any: JSON values.
    def complete(self, text: str) -> dict[str, Any]:
        """Return the completion of a text as the object that `--json` prints, without times."""


def generate(model: TextModel, text: str, *, is_json: bool) -> int:
    """Print the completion of `text`, as it is generated or as one JSON object."""
    if is_json:
        started_s = time.perf_counter()
        report = model.complete(text)
        print(json.dumps(report | {"seconds": round(time.perf_counter() - started_s, 6)}))
        return 0
    clock = _Clock()
    # The first piece comes after the prompt was validated.
    before = text
    for piece, _ in model.stream(text):
        clock.start()
        print(before + piece, end="", flush=True)
        before = ""
    print(before)
    clock.report(model)
    return 0


def chat(model: TextModel, *, system_prompt: str | None = None, quick: str | None = None) -> int:
    """Chat until end-of-file; in a terminal, Ctrl-C stops an answer, and a second one leaves.

    With `quick`, only answer that message.
    """
    if not model.has_chat_template:
        raise InvalidRequestError(
            "The model has no chat template; use `pagedray generate`, or --chat-template."
        )
    conversation = _Conversation(model, system_prompt)
    if quick is not None:
        conversation.ask(quick)
        return 0
    if not _is_terminal(sys.stdin):
        # Messages of a program are lines.
        while line := _next_line():
            try:
                conversation.ask(line)
            except InvalidRequestError as error:
                conversation.begin_again(error)
        return 0
    if _is_terminal(sys.stdout):
        # Importing it gives `input` line editing and a history; pasted lines are one message.
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    _note(_INTRODUCTION)
    was_interrupted = False
    while True:
        try:
            message = _read_message()
            if message is None or message in ("/exit", "/quit", "/bye"):
                return 0
            was_interrupted = conversation.handle(message)
        except KeyboardInterrupt:
            print()
            if was_interrupted:
                return 0
            was_interrupted = True
            _note("Press Ctrl-C again or Ctrl-D to leave.")


class _Conversation:
    """The messages of a chat."""

    def __init__(self, model: TextModel, system_prompt: str | None) -> None:
        self._model = model
        self._messages: list[dict[str, str]] = []
        self._begin(system_prompt)

    def handle(self, line: str) -> bool:
        """Answer a message or run a command; return whether the user stopped the answer."""
        command, _, rest = line.partition(" ")
        if command == "/clear":
            self._begin(self._system_prompt)
        elif command == "/system" and rest.strip():
            self._begin(rest.strip())
        elif command == "/retry":
            while self._messages and self._messages[-1]["role"] == "assistant":
                self._messages.pop()
            if not self._messages or self._messages[-1]["role"] != "user":
                _note("There is no message to answer again.")
                return False
            return self._try(self._messages.pop()["content"])
        # A message may begin with the path of a file.
        elif line.startswith("/") and line[1:].isalpha():
            _note(_HELP if line == "/help" else f"{line} is not a command.\n{_HELP}")
        else:
            return self._try(line)
        return False

    def ask(self, message: str) -> None:
        """Print the answer to a message.

        Raises KeyboardInterrupt, EngineError, and InvalidRequestError for a message that cannot be
        answered.
        """
        question = {"role": "user", "content": message}
        answer, clock = "", _Clock()
        is_reasoning = False
        try:
            with closing(self._model.stream([*self._messages, question])) as pieces:
                for piece, is_reasoning in pieces:
                    clock.start()
                    if not is_reasoning:
                        print(piece, end="", flush=True)
                        answer += piece
                    elif _is_terminal(sys.stdout):
                        print(_dimmed(piece, sys.stdout), end="", flush=True)
        except KeyboardInterrupt:
            self._keep(question, answer)
            raise
        print()
        self._keep(question, answer)
        clock.report(self._model)

    def begin_again(self, error: InvalidRequestError) -> None:
        """Forget the messages, which may be too long, and say why."""
        print(f"{error} Starting a new conversation.", file=sys.stderr)
        self._begin(self._system_prompt)

    def _try(self, message: str) -> bool:
        """Print the answer to a message, or why there is none; return whether it was stopped."""
        try:
            self.ask(message)
        except KeyboardInterrupt:
            print()
            _note(f"Stopped after {pluralize(self._model.num_tokens, 'token')}.")
            return True
        except InvalidRequestError as error:
            self.begin_again(error)
        except EngineError as error:
            print(f"\n{error} /retry sends the message again.", file=sys.stderr)
            self._messages.append({"role": "user", "content": message})
        return False

    def _begin(self, system_prompt: str | None) -> None:
        self._system_prompt = system_prompt
        self._messages = []
        if system_prompt is not None:
            self._messages.append({"role": "system", "content": system_prompt})

    def _keep(self, question: dict[str, str], answer: str) -> None:
        self._messages += [question, {"role": "assistant", "content": answer}]


class _Clock:
    """Time to the first token and tokens per second of one answer."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None

    def start(self) -> None:
        """Record the arrival of a piece."""
        if self._first_s is None:
            self._first_s = time.perf_counter()

    def report(self, model: TextModel) -> None:
        """Print number of tokens, rate and latency on standard error."""
        total_s = time.perf_counter() - self._started_s
        line = f"{pluralize(model.num_tokens, 'token')}, {model.num_tokens / total_s:.1f} tokens/s"
        if self._first_s is not None:
            line += f", first after {1000 * (self._first_s - self._started_s):.0f} ms"
        _note(f"[{line}{', cut at --max-tokens' if model.is_cut else ''}]")


def _is_terminal(stream: TextIO | None) -> bool:
    # A closed stream is None.
    return stream is not None and stream.isatty()


def _note(text: str) -> None:
    if sys.stderr is not None:
        print(_dimmed(text, sys.stderr), file=sys.stderr, flush=True)


def _dimmed(text: str, stream: TextIO) -> str:
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() else text


def _read_message() -> str | None:
    """Return the user's input, which is not empty; None at the end of the input."""
    while (line := _read_line("> ")) is not None:
        if not line.strip():
            continue
        if not line.lstrip().startswith(_QUOTES):
            return line.strip()
        lines = [line.lstrip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            if (line := _read_line("... ")) is None:
                return None
            lines.append(line)
        text = "\n".join(lines).rstrip().removesuffix(_QUOTES).strip()
        if text:
            return text
    return None


def _read_line(prompt: str) -> str | None:
    try:
        if _is_terminal(sys.stdout):
            return input(prompt)
        # Output that is read by a program has only the answers.
        if sys.stderr is not None:
            print(prompt, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline() or None
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequestError("The message is not UTF-8.") from error


def _next_line() -> str:
    """Return the next line that is not empty; an empty text at the end of the input."""
    try:
        while sys.stdin is not None and (line := sys.stdin.readline()):
            if line.strip():
                return line.strip()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("The message is not UTF-8.") from error
    return ""


class TextLLM(LLM):
    """An `LLM` with a model that generates text, which is checked before the model is loaded."""

    def _open(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        task = config.model.task
        if task != "generate":
            raise StartupError(
                f"The task of {config.model.name} is {task}, but this command generates text; use "
                f"`pagedray serve`, or the method {task} of the class LLM."
            )
        super()._open(config, report_progress)

    def collect_stream(
        self, prompt: str | Sequence[Mapping[str, str]], params: SamplingParams
    ) -> tuple[Collector, Generator[str, None, None]]:
        """Return the collector of a request, and the pieces of its text."""
        collector = self._stream_collector(prompt, params)
        return collector, self._runner.stream(collector)


class LocalModel:
    """A model in this process, for `pagedray generate` and `pagedray chat`."""

    # Any: fields of sampling parameters, of all types.
    def __init__(self, model: str, options: EngineOptions, given: Mapping[str, Any]) -> None:
        """Load a model; `given` are the sampling parameters that the user sets."""
        self._llm = TextLLM(model, **asdict(options))
        # Parameters of the user, of the model's file, or greedy parameters, in this order.
        recommended = self._llm.recommended_sampling
        self._sampling = SamplingParams(**{"temperature": 0.0, **recommended, **given})
        self.num_tokens = 0
        """Number of tokens that the last stream has generated."""
        self.is_cut = False
        """Whether `max_tokens` ended the last stream."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat."""
        return self._llm.get_tokenizer().has_chat_template

    def stream(
        self, prompt: str | Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, bool], None, None]:
        """Yield the parts of a completion or an answer; none is marked as reasoning."""
        self.num_tokens, self.is_cut = 0, False
        collector, pieces = self._llm.collect_stream(prompt, self._sampling)
        try:
            for piece in pieces:
                yield piece, False
        finally:
            pieces.close()
            (completion,) = collector.generation().outputs
            self.num_tokens = len(completion.token_ids)
            self.is_cut = completion.finish_reason == "length"

    def complete(self, text: str) -> dict[str, Any]:  # Any: JSON values
        """Return the completion of a text as the object that `--json` prints, without times."""
        (generation,) = self._llm.generate(text, self._sampling, use_tqdm=False)
        (completion,) = generation.outputs
        return {
            "prompt": text,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(generation.prompt_token_ids),
            "num_generated_tokens": len(completion.token_ids),
        }

    def close(self) -> None:
        """Unload the model."""
        self._llm.close()
