"""How large a request may be follows from the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.serving.intake import IntakeLimits, request_size
from tests.serving.conftest import engine_config


@pytest.mark.parametrize(
    ("context", "num_bytes"), [(256, 2**20 + 2**18), (1024, 2**21), (2**17, 2**22)]
)
def test_a_full_batch_of_prompts_fits(context: int, num_bytes: int) -> None:
    size = request_size(engine_config(context), IntakeLimits())
    assert size.num_bytes == num_bytes
    assert size.num_list_values >= context
    assert size.num_values >= min(128 * context, 2**20)


def test_an_encoder_takes_many_texts_whatever_its_context() -> None:
    config = engine_config(512)
    size = request_size(replace(config, model=replace(config.model, task="embed")), IntakeLimits())
    assert (size.num_bytes, size.num_values) == (2**22, 2**20)


def test_an_operator_sets_the_size() -> None:
    assert request_size(engine_config(), IntakeLimits(request_bytes=2**16)).num_bytes == 2**16
