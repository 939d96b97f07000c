from cluster.scheduling.costs import StepTimes, SwapCosts, TierPolicy

BLOCK_SIZE = 16


def make_policy(*, copy_s: float, num_blocks: int = 1000) -> TierPolicy:
    """Return one for steps of 10 ms and 30 us a token, in which a block takes 480 us."""
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    costs.note_swaps(1, copy_s)
    for num_tokens in (1, 500, 1000, 2000):
        step_times.note_step(num_tokens=num_tokens, num_pairs=0, seconds=10e-3 + num_tokens * 30e-6)
    return TierPolicy(costs, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def num_saved(policy: TierPolicy, digests: range) -> int:
    return sum(policy.is_saved(str(number).encode()) for number in digests)


def test_blocks_that_are_never_found_again_are_no_longer_copied() -> None:
    policy = make_policy(copy_s=45e-6)
    assert num_saved(policy, range(1000)) == 1000
    assert num_saved(policy, range(1000, 20_000)) < 8000
    # A few are, so that copies are measured.
    assert num_saved(policy, range(20_000, 26_400)) == 100


def test_blocks_are_copied_again_once_those_that_were_not_are_looked_for() -> None:
    policy = make_policy(copy_s=45e-6)
    num_saved(policy, range(20_000))
    assert not policy.is_open
    # A third of the last ones.
    for number in range(19_000, 20_000, 3):
        policy.note_lookup(str(number).encode())
    for number in range(20_000, 30_000):
        policy.is_saved(str(number).encode())
        if number % 3 == 0:
            policy.note_lookup(str(number - 500).encode())
    assert policy.is_open


def test_a_block_that_the_pool_would_have_lost_does_not_count_as_found() -> None:
    policy = make_policy(copy_s=45e-6, num_blocks=10)
    for number in range(11):
        policy.note_lost(str(number).encode())
    assert not policy.note_lookup(b"0")
    assert policy.note_lookup(b"1")
    assert not policy.note_lookup(b"1")


def test_nothing_is_copied_if_a_copy_takes_longer_than_computing() -> None:
    policy = make_policy(copy_s=600e-6)
    for number in range(2000):
        policy.is_saved(str(number).encode())
        policy.note_lookup(str(number).encode())
    assert not policy.is_open


def test_many_blocks_are_copied_back_and_few_are_computed() -> None:
    # Copies make a sequence wait for a step of 10 ms, in which 20 blocks are computed.
    policy = make_policy(copy_s=45e-6)
    assert not policy.is_restored(20, first=0)
    assert policy.is_restored(30, first=0)
    assert not make_policy(copy_s=600e-6).is_restored(1000, first=0)


def test_everything_is_copied_without_costs() -> None:
    policy = TierPolicy(None, num_blocks=10, block_size=BLOCK_SIZE)
    assert num_saved(policy, range(1000)) == 1000
    assert policy.is_restored(1, first=0)
