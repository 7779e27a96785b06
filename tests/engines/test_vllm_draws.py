"""Generators of requests that go on: as far as the sampler would have moved them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plexrl_slurm.engines.vllm_draws import DRAWN, Draws

pytestmark = pytest.mark.engines
VOCABULARY = 1000


def by_integers(row: torch.Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
    """As vLLM's sampler on the CPU."""
    for generator in generators.values():
        torch.randint(0, 2**31, (1,), generator=generator)


def by_rows(row: torch.Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
    """As vLLM's sampler of other devices."""
    for generator in generators.values():
        torch.empty_like(row[0]).exponential_(generator=generator)


class Runner:
    """What there is of vLLM's model runner."""

    def __init__(self, sample: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.sampler = SimpleNamespace(topk_topp_sampler=sample)
        self.updated: list[Any] = []

    def _update_states(self, scheduled: Any) -> str:
        self.updated.append(scheduled)
        for new in scheduled.scheduled_new_reqs:
            generator = torch.Generator().manual_seed(7) if new.sampling_params.seed else None
            self.requests[new.req_id] = SimpleNamespace(generator=generator)
        return "what it gives"


def scheduled(drawn: int | None, *, seed: int = 7) -> Any:
    extra = None if drawn is None else {DRAWN: drawn}
    params = SimpleNamespace(seed=seed, extra_args=extra)
    return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="r", sampling_params=params)])


@pytest.mark.parametrize("sample", [by_integers, by_rows])
@pytest.mark.parametrize("drawn", [None, 0, 1, 2, 3, 41])
def test_a_generator_is_where_so_many_tokens_would_have_left_it(
    sample: Any, drawn: int | None
) -> None:
    runner, expected = Runner(sample), torch.Generator().manual_seed(7)
    Draws(runner)
    for _ in range(drawn or 0):
        sample(torch.zeros((1, VOCABULARY)), {0: expected})
    assert runner._update_states(scheduled(drawn)) == "what it gives"
    assert torch.equal(runner.requests["r"].generator.get_state(), expected.get_state())


def test_a_greedy_request_has_no_generator_to_move() -> None:
    runner = Runner(by_integers)
    Draws(runner)
    runner._update_states(scheduled(5, seed=0))
    assert runner.requests["r"].generator is None


def test_a_runner_without_generators_is_left_alone() -> None:
    runner = SimpleNamespace()
    Draws(runner)
    assert vars(runner) == {}
