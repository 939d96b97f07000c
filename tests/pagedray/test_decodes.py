from pagedray.batch import Decodes, SequencePlan, StepPlan


def test_decodes_are_sequences_of_one_token_behind_the_chunks() -> None:
    chunk = SequencePlan(2, 0, 5, False)
    plan = StepPlan(0, [chunk], decodes=Decodes.pack([4, 1], [9, 16], [1], [30]))
    assert plan.sequences == [
        chunk,
        SequencePlan(4, 9, 1, True),
        SequencePlan(1, 16, 1, True, (30,)),
    ]
    assert (plan.num_tokens, plan.num_sampled) == (7, 2)


def test_each_token_attends_to_itself_and_to_those_before_it() -> None:
    plan = StepPlan(0, [SequencePlan(2, 3, 4, True)], decodes=Decodes.pack([0, 1], [0, 9]))
    assert plan.chunks[0].num_pairs == sum(position + 1 for position in (3, 4, 5, 6))
    assert plan.decodes.num_pairs == sum(position + 1 for position in (0, 9))
    assert sum(one.num_pairs for one in plan.sequences) == 22 + 11
