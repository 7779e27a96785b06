"""What a controller does, in a few lines: train a little, sample a little, publish."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tinker import types

from tests.scenarios.partition import Job


def datum(*tokens: int) -> types.Datum:
    targets = np.array([*tokens[1:], 2], dtype=np.int64)
    inputs: Any = {
        "target_tokens": targets,
        "weights": np.ones(len(targets), dtype=np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs=inputs,
    )


def train(
    job: Job,
    *,
    steps: int = 4,
    between: Callable[[int], None] = lambda step: None,
    name: str = "end",
    pause_s: float = 0.0,
) -> list[Any]:
    """A run of ``steps``; everything that it saw: losses, logprobs, samples.

    ``between`` is called right after a step's calls were sent, while they run.
    """
    seen: list[Any] = []
    service = job.service()
    training = service.create_lora_training_client(base_model="tiny", rank=0, seed=3).result()
    for step in range(steps):
        futures = [
            training.forward_backward([datum(4, 5 + step, 6)], "cross_entropy"),
            training.forward_backward([datum(7, 8, 9 + step)], "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=1e-3)),
        ]
        between(step)
        for future in futures[:2]:
            result = future.result()
            seen.append(result.metrics["loss:sum"])
            seen.append(result.loss_fn_outputs[0]["logprobs"].tolist())
        futures[2].result()
        sampler = training.save_weights_and_get_sampling_client().result()
        samples = [
            sampler.sample(
                prompt=types.ModelInput.from_ints([4, 5, prompt]),
                num_samples=2,
                sampling_params=types.SamplingParams(max_tokens=4),
            )
            for prompt in (6, 7)
        ]
        between(100 + step)
        for sample in samples:
            seen += [tuple(sequence.tokens) for sequence in sample.result().sequences]
        time.sleep(pause_s)
    path = training.save_weights_for_sampler(name).result().path
    seen.append(path.rsplit("/", 1)[1])
    return seen
