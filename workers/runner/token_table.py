"""The tokens of every row on the device, read and written by steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from attention.gpu.batch import PinnedRing, copy_from_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["TokenTable"]

_ALIGNMENT = 2
"""In words: kernels are compiled for addresses that are multiples of 16 bytes."""
_NUM_OUTPUTS = 4
"""More than the number of steps with tokens that a rank has not sent yet."""
_Ints: TypeAlias = "NDArray[np.int64]"
_Chains: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"


class TokenTable:
    """The tokens of every row, on the device.

    Sampled tokens are written here, and the next step reads them without waiting for the host. On
    a GPU, kernels exchange all numbers with pinned host memory, since copy engines may be busy with
    blocks.
    """

    def __init__(
        self, *, max_num_rows: int, max_model_len: int, max_num_tokens: int, device: torch.device
    ) -> None:
        """`max_num_tokens` is the limit of a step."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        # The extra column takes the last token of a full sequence, which no step reads.
        self.all_tokens = torch.zeros(
            (max_num_rows, max_model_len + 1), dtype=torch.int64, device=device
        )
        """`[max_num_rows, max_model_len + 1]`."""
        num_kept = max_num_tokens if self._is_cuda else 0
        self.token_ids = torch.zeros(num_kept, dtype=torch.int64, device=device)
        """`[max_num_tokens]`, which begins with the tokens of the latest step; empty on a CPU."""
        self.positions = torch.zeros_like(self.token_ids)
        """The positions of `token_ids`, `[max_num_tokens]`; empty on a CPU."""
        self.num_refused = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        """How many drafts of each row were refused by the latest step that has counted them."""
        self.has_refused = False
        """Whether that is the latest step."""
        self._prompts = PinnedRing(device)
        self._steps = PinnedRing(device)
        self._outputs = [
            torch.empty(max_num_rows, dtype=torch.int64, pin_memory=True)
            for _ in range(_NUM_OUTPUTS if self._is_cuda else 0)
        ]
        self._turn = 0

    def tokens(self, row: int, first: int, end: int) -> torch.Tensor:
        """Return tokens of a row, from position `first` to before `end`, as `[end - first]`."""
        return self.all_tokens[row, first:end]

    def start_rows(
        self, rows: Sequence[int], prompts: Sequence[bytes], donor_rows: Sequence[int]
    ) -> None:
        """Write the first tokens of rows, packed as in `SequenceStart`.

        A row with a donor copies them from the donor's row; the others have -1 as donor row.
        """
        donated = [donor_row >= 0 for donor_row in donor_rows]
        own = [
            b"" if is_donated else prompt
            for prompt, is_donated in zip(prompts, donated, strict=True)
        ]
        token_ids = np.frombuffer(b"".join(own), np.int32)
        sizes = [len(prompt) // token_ids.itemsize for prompt in own]
        uploaded = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        if len(uploaded):
            with self._prompts.next_buffer(len(uploaded)) as words:
                words.numpy()[:] = token_ids
                copy_from_host(uploaded, words)
        parts = uploaded.split(sizes)
        # In order, since a later start may take the row of a donor.
        for row, donor_row, prompt, part in zip(rows, donor_rows, prompts, parts, strict=True):
            if donor_row >= 0:
                num_tokens = len(prompt) // token_ids.itemsize
                self.all_tokens[row, :num_tokens] = self.all_tokens[donor_row, :num_tokens]
            else:
                self.all_tokens[row, : len(part)] = part

    def begin_step(
        self,
        rows: _Ints,
        positions: _Ints,
        *others: _Ints,
        draft_ids: _Ints | None = None,
        is_overlapped: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the tokens of a step, their positions and other numbers, all on the device.

        `rows` and `positions` are `[num_tokens]` int64, the others of one dimension. `draft_ids`
        are written to the places of tokens that are drafts, and -1 for others. With
        `is_overlapped`, positions are less by `num_refused` of their rows. On a GPU, the first two
        results begin where `token_ids` and `positions` do.
        """
        if not self._is_cuda:
            device_rows, device_positions, *parts = map(
                torch.from_numpy, (rows, positions, *others)
            )
            if draft_ids is not None:
                is_draft = draft_ids >= 0
                self.all_tokens[rows[is_draft], positions[is_draft]] = torch.from_numpy(
                    draft_ids[is_draft]
                )
            if is_overlapped:
                device_positions = device_positions - self.num_refused[device_rows]
            return self.all_tokens[device_rows, device_positions], device_positions, parts
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.pinned_copy import place_tokens, row_words

        row_of_token = rows if draft_ids is None else row_words(rows, draft_ids)
        sizes = [-(-len(other) // _ALIGNMENT) * _ALIGNMENT for other in others]
        rest = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        num_tokens = len(rows)
        token_ids, device_positions = self.token_ids[:num_tokens], self.positions[:num_tokens]
        with self._steps.next_buffer(2 * num_tokens + sum(sizes)) as words:
            host = words.numpy()
            ends = np.cumsum([0, num_tokens, num_tokens, *sizes])
            for first, part in zip(ends, (row_of_token, positions, *others), strict=False):
                host[first : first + len(part)] = part
            place_tokens(
                token_ids,
                device_positions,
                rest,
                words,
                self.all_tokens,
                self.num_refused,
                is_overlapped=is_overlapped,
            )
        parts = [part[: len(other)] for part, other in zip(rest.split(sizes), others, strict=True)]
        return token_ids, device_positions, parts

    def count_refused(self, chains: _Chains, step: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count the refused drafts of chains, as `attention.kernels.triton.draft_rows` does."""
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.draft_rows import count_refused

        count_refused(self.num_refused, chains, step, self.all_tokens)
        self.has_refused = True

    def append(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Write sampled tokens to their places; return them on the host.

        All are `[num_tokens]` int64. The result is written when the device has run this, and valid
        until three more steps have sampled.
        """
        if not self._is_cuda:
            # A row with logits that were not finite has -1; 0 keeps its extra step in range.
            self.all_tokens[rows, positions] = token_ids.clamp(min=0)
            return token_ids
        from attention.kernels.triton.pinned_copy import append_tokens

        output = self._outputs[self._turn][: len(token_ids)]
        self._turn = (self._turn + 1) % _NUM_OUTPUTS
        append_tokens(self.all_tokens, rows, positions, token_ids, output)
        return output
