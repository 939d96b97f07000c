"""The question that Qwen3-Reranker answers with yes or no, as its model card writes it."""

from __future__ import annotations

__all__ = ["DEFAULT_INSTRUCTION", "rerank_prompt"]

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction for the model unless the client sends another."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank_prompt(query: str, document: str, instruction: str) -> str:
    """Return the prompt; the next token is the answer."""
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return f"{_BEFORE}{pair}{_BEHIND}"
