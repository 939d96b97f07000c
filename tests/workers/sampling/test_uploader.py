"""Arrays that are uploaded, compared with themselves."""

import numpy as np
import pytest
import torch

from tests.workers.devices import DEVICES
from workers.sampling.device_choice import Uploader


@pytest.mark.parametrize("device", DEVICES)
def test_many_uploads_keep_type_shape_and_values(device: str) -> None:
    uploader, rng = Uploader(torch.device(device)), np.random.default_rng(0)
    pairs = []
    for index in range(200):
        shape = tuple(rng.integers(0, 9, index % 3 + 1))
        whole = rng.integers(-(2**62), 2**62, shape)
        array = whole if index % 2 else rng.standard_normal(shape).T
        if device == "cuda":
            torch.cuda._sleep(100_000)
        pairs.append((array, uploader.upload(array)))
    for array, uploaded in pairs:
        assert uploaded.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
        assert uploaded.device.type == device
        assert np.array_equal(uploaded.cpu().numpy(), array)
