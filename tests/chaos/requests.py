"""The requests of a run, their form in each frontend, and their undisturbed texts.

Keys and values that are computed again after a fault differ in their last bits, because they are
computed in other chunks and batches. A decision that is close to a tie can then change, without
any fault of the server. Requests with such a decision are not used, so that every difference that
a run finds is a defect. Requests with a structure are used without this check: log-probabilities
ignore the structure, so that the second best token that it allows may not be reported.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedray.v1 import pagedray_pb2 as pb
from workers.sampling.noise import generator_start, noise, noise_keys

_WORDS = (
    *("def", "class", "return", "import", "path", "file", "open", "read", "write", "config"),
    *("parse", "value", "name", "key", "index", "while", "for", "with", "self", "data"),
    *("line", "text", "result", "error", "list", "dict", "set", "queue", "lock", "thread"),
)
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 30},'
    ' "size": {"type": "integer", "minimum": 0, "maximum": 99999}}, "required": ["name", "size"]}'
)
_REGEX = "[a-z]{5,20}( [a-z]{3,12}){4}\\."
NUM_LOGPROBS = 20
LEAST_MARGIN = 2e-4
"""Log-probabilities of the same position in different batches differ by about 1e-5 in float32."""
TokenScores = tuple[tuple[int, float], ...]
"""The most likely tokens of a position with their log-probabilities, the most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A request that many calls repeat, over gRPC or HTTP."""

    name: str
    prompt: str
    is_chat: bool = False
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""

    @property
    def is_structured(self) -> bool:
        """Whether the output has a structure."""
        return bool(self.json_schema or self.regex)

    def to_message(
        self, request_id: str, *, num_logprobs: int | None = None
    ) -> pb.GenerateRequest | pb.ChatRequest:
        """Return the gRPC message."""
        sampling = pb.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
            n=self.n,
            stop=self.stop,
            # A structure ends with its last character.
            ignore_eos=not self.is_structured,
            logprobs=num_logprobs,
        )
        if self.json_schema:
            sampling.structure.json_schema = self.json_schema
        elif self.regex:
            sampling.structure.regex = self.regex
        if self.is_chat:
            message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=self.prompt)
            return pb.ChatRequest(request_id=request_id, messages=[message], sampling=sampling)
        return pb.GenerateRequest(request_id=request_id, text=self.prompt, sampling=sampling)

    def to_body(self, model: str) -> dict[str, Any]:  # Any: JSON
        """Return the JSON body of a stream over HTTP."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": self.seed,
            "n": self.n,
            "ignore_eos": not self.is_structured,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.json_schema:
            body["guided_json"] = self.json_schema
        elif self.regex:
            body["guided_regex"] = self.regex
        if self.is_chat:
            return body | {"messages": [{"role": "user", "content": self.prompt}]}
        return body | {"prompt": self.prompt}


def make_specs(number: int, *, max_tokens: int, seed: int) -> list[Spec]:
    """Return this number of different requests of all kinds."""
    generator = random.Random(seed)
    return [_spec(index, max_tokens, generator) for index in range(number)]


def _spec(index: int, max_tokens: int, generator: random.Random) -> Spec:
    kind = ("greedy", "seeded", "chat", "several", "stop", "seeded", "schema", "regex")[index % 8]
    # Some share the beginning of their prompts, hence blocks.
    shared = "import os\nimport re\nimport json\n\n\ndef read_config(path):\n" if index % 3 else ""
    words = " ".join(generator.choices(_WORDS, k=generator.randint(3, 60)))
    length = generator.randint(max_tokens // 2, max_tokens)
    drawn = {
        "temperature": round(generator.uniform(0.5, 1.1), 2),
        "top_k": generator.randint(4, 19),
        "seed": generator.randrange(2**31),
    }
    given: dict[str, Any] = {  # Any: fields of all types
        "name": f"{kind}-{index}",
        "prompt": f"{shared}# {words}\n",
        "max_tokens": length,
    }
    if kind == "seeded":
        given |= drawn
    elif kind == "chat":
        given |= {"is_chat": True} | (drawn if index % 16 < 8 else {})
    elif kind == "several":
        given |= drawn | {"n": generator.randint(2, 4), "max_tokens": length // 2}
    elif kind == "stop":
        given |= drawn | {"stop": ("\n\n", "return", "# ")}
    elif kind == "schema":
        given |= {"json_schema": _SCHEMA, "max_tokens": 200}
    elif kind == "regex":
        given |= {"regex": _REGEX, "max_tokens": 200}
    return Spec(**given)


def least_margin(
    spec: Spec,
    index: int,
    token_ids: Sequence[int],
    scores: Sequence[TokenScores],
    num_prompt_tokens: int,
) -> float:
    """Return by how much two log-probabilities must differ otherwise to change a token."""
    if spec.temperature == 0.0:
        return min((top[0][1] - top[1][1] for top in scores), default=math.inf)
    start = np.array([generator_start(spec.seed, index)], dtype=np.uint64)
    margin = math.inf
    for place, (token_id, top) in enumerate(zip(token_ids, scores, strict=True)):
        key = torch.from_numpy(noise_keys(start, np.array([num_prompt_tokens + place])))
        margin = min(margin, _drawn_margin(spec, token_id, top, key))
    return margin


def _drawn_margin(spec: Spec, token_id: int, top: TokenScores, key: torch.Tensor) -> float:
    assert 0 < spec.top_k < len(top), "The filter must keep less than what is reported."
    ids, scores = torch.tensor([one for one, _ in top]), np.array([score for _, score in top])
    # In units of log-probabilities.
    sums = scores + noise(key, ids)[0].double().numpy() * spec.temperature
    chosen = int(sums[: spec.top_k].argmax())
    assert top[chosen][0] == token_id, "This is not how the server draws tokens."
    others = np.delete(sums[: spec.top_k], chosen)
    # The chosen token may fall out, and a token with a higher sum may come in.
    dropped = scores[spec.top_k :]
    is_rival = (sums[spec.top_k :] >= sums[chosen]) | (dropped == scores[-1])
    return float(
        min(
            sums[chosen] - others.max(initial=-math.inf),
            scores[chosen] - scores[spec.top_k],
            scores[spec.top_k - 1] - dropped[is_rival].max(),
        )
    )
