"""Masks behind drafts are those of the same tokens without drafts, and do a sequence no harm."""

from __future__ import annotations

import gc
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import numpy as np
import pytest

from cluster.structured.mask_client import MaskClient
from cluster.structured.messages import GrammarText, MaskQuery, MatcherStart
from cluster.structured.sequence_matcher import SequenceMatcher
from cluster.structured.token_matchers import TokenIndex
from pagedray.request import AskedMasks, FinishReason, Reasoning, Request
from pagedray.sampling_params import SamplingParams, Structure
from tests.structured.conftest import EOS, VOCAB_SIZE
from tests.structured.fake_masks import FakeMasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler
    from cluster.structured.mask_client import MatcherHandle

MASK_BYTES = -(-VOCAB_SIZE // 32) * 4
THINK = Reasoning(begin="<think>", end="</think>", is_open=True)
# Any: fields of any type
REQUESTS: dict[str, dict[str, Any]] = {
    "schema": {
        "structure": Structure(
            kind="json_schema", text='{"properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}'
        )
    },
    "regex": {"structure": Structure(kind="regex", text="(ab|[c-f]{2}){1,9}"), "min_tokens": 3},
    "reasoning": {
        "structure": Structure(kind="regex", text="[a-f]{1,30}"),
        "reasoning": THINK,
        "thinking_token_budget": 6,
    },
    "budget": {"reasoning": THINK, "thinking_token_budget": 4},
    "mark": {
        "structure": Structure(kind="grammar", text='root ::= "<|user|>" [a-z]+', mark="<|user|>")
    },
}


# Any: fields of any type
async def request_of(compiler: StructureCompiler, **fields: Any) -> Request:
    """Return a request with a compiled grammar."""
    reasoning = fields.pop("reasoning", None)
    sampling = SamplingParams(**fields)
    grammar = await compiler.compile(sampling.structure)
    return Request(
        id="r",
        prompt_token_ids=(7,),
        sampling=sampling,
        seed=0,
        eos_token_ids=(EOS,),
        reasoning=reasoning,
        grammar=grammar,
    )


def masks_of(asked: AskedMasks) -> list[bytes] | FinishReason:
    """Return the masks of a sequence, however long they take."""
    (found,) = asked.matcher.grammar.masks([asked], num_awaited=1, wait_s=math.inf)
    if not isinstance(found, bytes):
        return FinishReason(found)
    return [found[place : place + MASK_BYTES] for place in range(0, len(found), MASK_BYTES)]


def allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=VOCAB_SIZE, bitorder="little")
    return np.flatnonzero(bits).tolist()


def drawn(rng: random.Random, mask: bytes) -> int:
    """Return an allowed token, more often an end than others."""
    ids = allowed(mask)
    return EOS if EOS in ids and rng.random() < 0.05 else rng.choice(ids)


@pytest.mark.parametrize("name", REQUESTS)
async def test_masks_behind_drafts_are_those_without_drafts(
    compiler: StructureCompiler, name: str
) -> None:
    rng = random.Random(name)
    request = await request_of(compiler, **REQUESTS[name])
    assert request.grammar is not None
    num_checked = num_refused = 0
    for _ in range(12):
        plain, drafted = request.grammar.matcher(request), request.grammar.matcher(request)
        expected: dict[int, bytes] = {}
        token_ids = [7]
        while len(token_ids) < 25:
            found = masks_of(AskedMasks(plain, token_ids))
            if isinstance(found, FinishReason):
                break
            expected[len(token_ids)] = found[0]
            token_ids.append(drawn(rng, found[0]))
            if token_ids[-1] == EOS:
                break
        place = 1
        while place < len(token_ids):
            drafts = token_ids[place : place + rng.randrange(5)]
            if drafts and rng.random() < 0.3:
                drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB_SIZE)
            made = masks_of(AskedMasks(drafted, token_ids[:place], drafts, 3))
            assert isinstance(made, list)
            num_right = 0
            for number, mask in enumerate(made):
                is_right = drafts[:number] == token_ids[place : place + number]
                if not is_right or place + number not in expected:
                    break
                assert mask == expected[place + number]
                num_right, num_checked = number, num_checked + 1
            if num_right + 1 < len(drafts) and len(made) == num_right + 1:
                # The next draft is not allowed, or the last token.
                assert drafts[num_right] == EOS or drafts[num_right] not in allowed(made[-1])
                num_refused += 1
            place += rng.randint(1, num_right + 1)
        assert not drafted.error
    assert num_checked > 60
    assert num_refused > 0 or name == "budget"


async def test_tokens_of_the_only_text_are_forced(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    request = await request_of(
        compiler, structure=Structure(kind="regex", text='x("name": "(b|cd)e{4}")')
    )
    assert request.grammar is not None
    matcher = request.grammar.matcher(request)

    def forced(text: str, draft: str = "", number: int = 9) -> str:
        token_ids = [7, *tokenizer.encode(text, add_special_tokens=False)]
        drafts = tokenizer.encode(draft, add_special_tokens=False)
        masks_of(AskedMasks(matcher, token_ids, drafts, number))
        assert len(matcher.forced_ids) <= number
        return tokenizer.decode(matcher.forced_ids)

    assert forced("") == 'x"name": "'
    assert forced("x", number=0) == ""
    assert forced('x"name": "') == ""
    # They follow the drafts, unless one is not allowed.
    assert forced('x"name": "c', "de") == 'eee"'
    matcher = request.grammar.matcher(request)
    assert forced('x"name": "c', "b") == ""


def test_the_longest_prefix_is_found_as_by_a_search_of_all_tokens() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tokens = {bytes(rng.choices(b"abc", k=rng.randint(1, 6))) for _ in range(30)}
        index = TokenIndex([b"", *tokens], {})
        for _ in range(20):
            text = bytes(rng.choices(b"abcd", k=rng.randint(1, 9)))
            longest = max((one for one in tokens if text.startswith(one)), key=len, default=b"")
            found = index.longest_prefix(text)
            assert (index.tokens[found] if found is not None else b"") == longest


class Client:
    """A client of fake masks, with one sequence at a time."""

    def __init__(self) -> None:
        self.fake = FakeMasks(keeps_priority=True)
        self._client = MaskClient(self.fake.connect, num_mask_bytes=4, max_tenant_bytes=2**30)

    def matcher(self, text: str) -> MatcherHandle:
        grammar, _ = self._client.load_grammar(GrammarText(text.encode()))
        request = Request(id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0)
        return grammar.matcher(request)

    def masks(
        self,
        matcher: MatcherHandle,
        token_ids: Sequence[int],
        *drafts: int,
        wait_s: float = 60.0,
        num_forced: int = 0,
    ) -> list[int] | FinishReason | None:
        """Return which token is the first that may follow the tokens, and each draft."""
        asked = AskedMasks(matcher, (7, *token_ids), drafts, num_forced)
        (found,) = self._client.masks([asked], num_awaited=1, wait_s=wait_s)
        if not isinstance(found, bytes):
            return found
        return [(int(one) & -int(one)).bit_length() - 1 for one in np.frombuffer(found, np.uint32)]

    def close(self) -> None:
        self._client.close()
        for process in self.fake.processes:
            process.wait(60.0)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def test_a_slow_draft_makes_no_mask_late(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    matcher = client.matcher(f"waits for: {gate}")
    assert client.masks(matcher, [1]) == [2]
    # The drafts before the slow one have masks.
    while (found := client.masks(matcher, [1, 1], 1, 3, 1, wait_s=0.3)) is None:
        pass
    assert found == [2, 2]
    # The next mask of the sequence does not wait for the masks behind the draft.
    while (found := client.masks(matcher, [1, 1, 1], 1, wait_s=0.3)) is None:
        pass
    assert found == [2]
    gate.touch()
    token_ids = [1, 1, 1]
    while client.masks(matcher, token_ids, 3) != [2, 4]:
        token_ids.append(1)
    assert len(client.fake.processes) == 1


@pytest.mark.parametrize("kind", ["spins", "eats"])
def test_a_draft_that_ends_the_process_ends_no_sequence(client: Client, kind: str) -> None:
    matcher = client.matcher(kind)
    assert client.masks(matcher, [1]) == [2]
    token_ids = [1, 1]
    assert client.masks(matcher, token_ids, 3) == [2]
    assert not matcher.error
    # No other draft is tried.
    for number in range(4):
        token_ids.append(1)
        assert client.masks(matcher, token_ids, 3) == [2], number
    assert len(client.fake.processes) == 2
    assert client.masks(matcher, [*token_ids, 3]) is FinishReason.ERROR


def test_masks_of_other_drafts_are_not_used(client: Client, tmp_path: Path) -> None:
    matcher = client.matcher("plain")
    assert client.masks(matcher, [1], 1, 1) == [2, 2, 2]
    # The plan did not get the masks in time, and the next has other drafts.
    assert client.masks(matcher, [1], 2, 2) == [2]
    assert client.masks(matcher, [1]) == [2]


def test_forced_tokens_follow_all_drafts(client: Client) -> None:
    matcher = client.matcher("forces")
    for token_ids, drafts, forced in (
        ([1], (), []),
        ([1, 5], (), [6, 7]),
        ([1, 5, 1], (4,), [5, 6]),
        ([1, 5, 1, 4], (1,), []),
    ):
        assert client.masks(matcher, token_ids, *drafts, num_forced=2) is not None
        assert list(matcher.forced_ids) == forced


class CountedMatcher:
    """Allows every token, and knows how many copies of it there are."""

    is_complete = False
    is_free = False
    copies: ClassVar[WeakSet[CountedMatcher]] = WeakSet()

    def copy(self) -> CountedMatcher:
        copied = CountedMatcher()
        self.copies.add(copied)
        return copied

    def accept_token(self, token_id: int) -> bool:
        return True

    def forced_token(self, index: TokenIndex) -> int | None:
        return None

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = -1


def test_copies_of_matchers_are_not_kept() -> None:
    counted: Any = CountedMatcher()  # Any: a fake
    matcher = SequenceMatcher(counted, MatcherStart(0, 0, False, (), ()), 32)
    masks = np.full((1, 1), -1, np.int32)
    for number in range(50):
        drafts = matcher.draft_masks(MaskQuery(1, [], None, [1, 2]), masks[0], TokenIndex([], {}))
        assert drafts is not None
        # Some are never made, since the first mask was late.
        if number % 3:
            drafts.make()
            assert len(drafts.masks) == 2
    del drafts
    gc.collect()
    assert len(CountedMatcher.copies) == 0
