"""How datums become rows, micro-batches and shares of ranks."""

import numpy as np
import pytest
import torch

from plexrl_slurm.engines.batching import Example, Row, build, deal, make_rows

pytestmark = pytest.mark.engines


def make_example(tokens: list[int], width: int | None = None) -> Example:
    ids = np.asarray(tokens, dtype=np.int64)
    targets = ids + 1 if width is None else np.stack([ids + 1] * width, axis=1)
    weights = np.arange(targets.size, dtype=np.float32).reshape(targets.shape)
    return Example(tokens=ids, targets=targets, inputs={"weights": weights})


PROMPT = [10, 11, 12, 13, 14, 15]
GROUP = [make_example([*PROMPT, *tail]) for tail in ([1], [2, 3], [2, 4, 5])]


def test_completions_of_one_prompt_share_a_row() -> None:
    rows = make_rows(GROUP, share=True, longest=100)
    assert rows == [Row(members=(0, 1, 2), prefix=6, tails=(1, 2, 3))]
    assert rows[0].length == 12


def test_two_prompts_with_a_common_beginning_are_two_rows() -> None:
    other = [make_example([10, 11, 12, 13, 30, 31, 32, 33, 34, tail]) for tail in (1, 2)]
    rows = make_rows([*GROUP, *other], share=True, longest=100)
    assert sorted(row.members for row in rows) == [(0, 1, 2), (3, 4)]


def test_equal_datums_share_everything() -> None:
    rows = make_rows([GROUP[0], GROUP[0]], share=True, longest=100)
    assert rows == [Row(members=(0, 1), prefix=7, tails=(0, 0))]


def test_a_row_is_no_longer_than_allowed() -> None:
    rows = make_rows(GROUP, share=True, longest=11)
    assert [len(row.members) for row in rows] == [2, 1]
    assert max(row.length for row in rows) <= 11


def test_sharing_can_be_turned_off() -> None:
    rows = make_rows(GROUP, share=False, longest=100)
    assert [row.members for row in rows] == [(2,), (1,), (0,)]


def test_targets_of_different_width_never_mix() -> None:
    mixed = [GROUP[0], make_example([*PROMPT, 1], width=2)]
    rows = make_rows(mixed, share=True, longest=100)
    plan = deal(rows, mixed, world=1, max_tokens=100)
    assert [[row.members for row in batch] for batch in plan[0]] == [[(0,)], [(1,)]]


def test_micro_batches_are_bounded_with_their_padding() -> None:
    examples = [make_example(list(range(4, 4 + n))) for n in (3, 9, 9, 20, 50)]
    rows = make_rows(examples, share=False, longest=20)
    plan = deal(rows, examples, world=1, max_tokens=20)
    lengths = [[row.length for row in batch] for batch in plan[0]]
    assert lengths == [[50], [20], [9, 9], [3]]


def test_every_rank_gets_as_many_micro_batches() -> None:
    examples = [make_example(list(range(4, 4 + n))) for n in (5, 5, 5)]
    plan = deal(make_rows(examples, share=False, longest=5), examples, world=2, max_tokens=5)
    assert [[len(batch) for batch in rank] for rank in plan] == [[1, 1], [1, 0]]
    dealt = [i for rank in plan for batch in rank for row in batch for i in row.members]
    assert sorted(dealt) == [0, 1, 2]


def test_a_dummy_has_zero_weight() -> None:
    batch = build([], [], ["weights"])
    assert batch.members == ()
    assert float(batch.inputs["weights"].abs().sum()) == 0.0


def test_a_tree_row_repeats_nothing_and_points_at_everything() -> None:
    rows = make_rows(GROUP, share=True, longest=100)
    batch = build(rows, GROUP, ["weights"])
    assert batch.mask is not None and batch.positions is not None
    assert batch.ids.tolist() == [[*PROMPT, 1, 2, 3, 2, 4, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6, 7, 6, 7, 8]]
    # Each datum's own tokens and targets come back, in order.
    tokens = batch.ids.reshape(-1)[batch.places][batch.expand]
    assert tokens.tolist() == [t for example in GROUP for t in example.tokens.tolist()]
    targets = batch.targets[batch.expand]
    assert targets.tolist() == [t for example in GROUP for t in example.targets.tolist()]
    assert batch.segments.tolist() == [0] * 7 + [1] * 8 + [2] * 9
    # The prompt's logprobs are computed once.
    assert len(batch.places) == len(PROMPT) + 1 + 2 + 3


def test_the_mask_lets_a_token_see_its_prompt_and_its_branch_only() -> None:
    rows = make_rows(GROUP, share=True, longest=100)
    mask = build(rows, GROUP, ["weights"]).mask
    assert mask is not None
    sees = [torch.nonzero(row)[:, 0].tolist() for row in mask[0, 0]]
    assert sees[3] == [0, 1, 2, 3]
    assert sees[6] == [0, 1, 2, 3, 4, 5, 6]
    assert sees[8] == [0, 1, 2, 3, 4, 5, 7, 8]
    assert sees[11] == [0, 1, 2, 3, 4, 5, 9, 10, 11]


def test_a_short_prompt_of_long_completions_is_not_worth_a_square() -> None:
    rng = np.random.default_rng(0)
    data = [make_example([*PROMPT, *rng.integers(20, 60, 600).tolist()]) for _ in range(3)]
    assert len(make_rows(data, share=True, longest=8192)) == 3


def test_a_long_prompt_of_short_completions_is_shared_by_all() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(4, 60, 200).tolist()
    data = [make_example([*prompt, *rng.integers(4, 60, 8).tolist()]) for _ in range(16)]
    assert [len(row.members) for row in make_rows(data, share=True, longest=8192)] == [16]
