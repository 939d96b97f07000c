"""lm-eval's `local-completions`: loglikelihood and generation.

Its log-likelihoods must be those of the tokens that the server itself scores one by one.
"""

import sys

import requests
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [("def first(items):", " return items[0]"), ("class Empty:", " pass"), ("import", " os")]


def main(url: str, folder: str) -> None:
    model = LocalCompletionsAPI(
        model="tiny-llama",
        base_url=f"{url}/v1/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        max_length=512,
    )
    requested = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    for pair, (found, is_greedy) in zip(PAIRS, model.loglikelihood(requested), strict=True):
        expected = one_by_one(url, model, *pair)
        assert abs(found - expected) < 1e-3, (pair, found, expected)
        assert not is_greedy or found > -1, (pair, found)
    until = {"until": ["\n\n"], "max_gen_toks": 8}
    (text,) = model.generate_until([Instance("generate_until", {}, ("def f(x):", until), 0)])
    assert text, "nothing was generated"


def one_by_one(url: str, model: LocalCompletionsAPI, context: str, rest: str) -> float:
    """Return the log-likelihood of a text, each of whose tokens is forced by a bias."""
    before = model.tok_encode(context)
    total = 0.0
    for token_id in model.tok_encode(context + rest)[len(before) :]:
        given = {
            "model": "tiny-llama",
            "prompt": before,
            "max_tokens": 1,
            "logprobs": 0,
            "temperature": 0,
            "logit_bias": {str(token_id): 100},
            "return_token_ids": True,
        }
        answer = requests.post(f"{url}/v1/completions", json=given, timeout=60).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [token_id], choice
        total += choice["logprobs"]["token_logprobs"][0]
        before = [*before, token_id]
    return total


if __name__ == "__main__":
    main(*sys.argv[1:])
