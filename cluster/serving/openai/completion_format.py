"""The format of responses of /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.openai.choice_format import ChoiceFormat
from cluster.serving.openai.prompt_reports import finite
from cluster.serving.openai.text_offsets import TextOffsets
from cluster.serving.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json
    from cluster.serving.openai.response_choice import (
        CompleteChoice,
        ResponseChoice,
        StreamedChoice,
    )
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.batch import TokenLogprobs

__all__ = ["CompletionFormat"]


class CompletionFormat(ChoiceFormat):
    """The format of /v1/completions."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"
    bare_begin = b',"text":'
    bare_end = b""
    has_prompt_in_choice = True

    def content(self, choice: CompleteChoice) -> Json:
        return {"text": "".join(choice.texts)}

    def delta(self, sequence: SequenceOutput, choice: StreamedChoice) -> Json:
        return {"text": sequence.text} if sequence.text else {}

    def wrapped(self, delta: Json) -> Json:
        return delta or {"text": ""}

    def token_logprobs(
        self, tokens: list[tuple[int, TokenLogprobs]], choice: ResponseChoice
    ) -> Json:
        token_ids = [token_id for token_id, _ in tokens]
        texts = [self.token_text(token_id) for token_id in token_ids]
        if choice.offsets is None:
            choice.offsets = self._offsets(choice.index // self.options.num_per_prompt)
        return {
            "tokens": texts,
            "token_logprobs": [finite(logprobs.chosen) for _, logprobs in tokens],
            "top_logprobs": [
                self._top(text, logprobs) for text, (_, logprobs) in zip(texts, tokens, strict=True)
            ],
            "text_offset": choice.offsets.of_tokens(token_ids),
        }

    def _offsets(self, prompt_index: int) -> TextOffsets:
        """Return the offsets of what is generated for a prompt."""
        detokenizer = IncrementalDetokenizer.after(
            self.generation.prompts[prompt_index],
            self.token_bytes,
            skips_special_tokens=self.options.skips_special_tokens,
        )
        echoed = self.options.echoed_texts
        text = echoed[prompt_index] if echoed else ""
        return TextOffsets(self.token_bytes, detokenizer, text=text)

    def _top(self, text: str, logprobs: TokenLogprobs) -> Json:
        top: Json = {
            self.token_text(token_id): finite(value)
            for token_id, value in zip(logprobs.token_ids, logprobs.logprobs, strict=True)
        }
        # The sampled token is included even if it is not among the top ones.
        top.setdefault(text, finite(logprobs.chosen))
        return top
