"""Random draws of a request that goes on after a pause, inside vLLM's worker.

vLLM gives a seeded request a generator of its own, which each token moves on. A request that goes
on says how many tokens its seed has given (:data:`DRAWN`), and its generator is moved on by as
many draws before the first. vLLM's second model runner draws by seed and position, so that there
is nothing to do; it has no such generators.
"""

from typing import Any, Final

#: Key of vLLM's ``extra_args``: tokens that the seed of a request has given before.
DRAWN: Final = "plexrl_drawn"


class Draws:
    """Moves generators on in one model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._update: Any = getattr(runner, "_update_states", None)
        if self._update is not None:
            runner._update_states = self._updated

    def _updated(self, scheduled: Any) -> Any:
        """vLLM's method makes the generators of new requests; theirs are moved on after it."""
        result = self._update(scheduled)
        for new in scheduled.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            state = self._runner.requests.get(new.req_id)
            generator = getattr(state, "generator", None)
            if generator is not None and extra.get(DRAWN):
                self.skip(generator, int(extra[DRAWN]))
        return result

    def skip(self, generator: Any, tokens: int) -> None:
        """Draw from ``generator`` what the sampler draws for so many tokens, and forget it.

        The sampler itself does it; where two of its draws are found to be two integers (on the
        CPU), the others are taken at once.
        """
        import torch

        like = torch.Generator(device=generator.device)
        like.set_state(generator.get_state())
        first = min(tokens, 2)
        self._sample(generator, first)
        torch.randint(0, 2**31, (first,), generator=like, device=generator.device)
        if bool(torch.equal(generator.get_state(), like.get_state())):
            torch.randint(0, 2**31, (tokens - first,), generator=generator, device=like.device)
        else:
            self._sample(generator, tokens - first)

    def _sample(self, generator: Any, tokens: int) -> None:
        import torch

        shape = (1, self._runner.model_config.get_vocab_size())
        for _ in range(tokens):
            row = torch.zeros(shape, device=generator.device)
            self._runner.sampler.topk_topp_sampler(row, {0: generator}, None, None)
