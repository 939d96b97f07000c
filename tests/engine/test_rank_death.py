"""What Ray says of a death, in one sentence."""

import pytest
from ray.exceptions import RayError

from cluster.engine.ray_ranks import cause_of


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor died unexpectedly.\nWorker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. More.",
            "Worker unexpectedly exits with a connection error code 2.",
        ),
        ("The actor died.\n  Its node has failed.  \n\n", "Its node has failed."),
        ("", "RayError."),
    ],
)
def test_cause_is_the_detail_or_the_last_line(text: str, cause: str) -> None:
    assert cause_of(RayError(text)) == cause
