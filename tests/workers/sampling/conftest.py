"""Samplers with each choice that runs on a CPU."""

import pytest

from tests.workers.sampling.sampler_rig import make_sampler
from workers.sampler import Sampler
from workers.sampling.choice import Choice
from workers.sampling.device_choice import TorchChoice
from workers.sampling.numpy_choice import NumpyChoice


@pytest.fixture(params=[NumpyChoice, TorchChoice])
def choice(request: pytest.FixtureRequest) -> Choice:
    made: Choice = request.param()
    return made


@pytest.fixture
def sampler(choice: Choice) -> Sampler:
    return make_sampler(choice)
