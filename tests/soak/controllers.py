"""What each job of the soak does, round for round, and what is remembered of it."""

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinker import types

from tests.scenarios.controller import datum
from tests.scenarios.partition import Job


@dataclass(slots=True)
class Seen:
    """Everything that a job saw: of each round what it computed, and the weights at its end."""

    number: int
    #: A digest of each round: losses, logprobs, gradient norm, samples with their logprobs.
    rounds: list[str] = field(default_factory=list)
    #: Digest of the weights that it published last; "": it did not come so far.
    weights: str = ""
    #: Why it ended early; "" if it did not.
    failure: str = ""
    #: When it finished a round last, by the monotonic clock.
    moved_at: float = field(default_factory=time.monotonic)


def differences(disturbed: list[Seen], undisturbed: list[Seen]) -> list[str]:
    """What is not the same, a sentence for each job that it is about."""
    found = []
    for one, other in zip(disturbed, undisturbed, strict=True):
        name = f"job {one.number}"
        for seen, which in ((one, "disturbed"), (other, "undisturbed")):
            if seen.failure:
                found.append(f"{name}, {which}, failed in round {len(seen.rounds)}: {seen.failure}")
        if one.failure or other.failure:
            continue
        unlike = [
            n for n, (a, b) in enumerate(zip(one.rounds, other.rounds, strict=False)) if a != b
        ]
        if len(one.rounds) != len(other.rounds):
            found.append(f"{name} did {len(one.rounds)} rounds, undisturbed {len(other.rounds)}")
        elif unlike:
            found.append(f"{name} computed something else in round {unlike[0]}")
        if one.weights != other.weights:
            found.append(f"{name} ended with other weights")
    return found


class Controller:
    """A job whose rounds have a length, and pauses, that only its number and the seed decide."""

    def __init__(self, job: Job, number: int, *, seed: int, pause_s: float) -> None:
        self._job, self._seed, self._pause_s = job, seed, pause_s
        self.seen = Seen(number)
        self.thread = threading.Thread(target=self._run, name=f"job {number}", daemon=True)
        self._goes_on: Callable[[int], bool] = lambda done: False

    def start(self, goes_on: Callable[[int], bool]) -> None:
        """Do rounds for as long as ``goes_on(rounds done)`` says so."""
        self._goes_on = goes_on
        self.thread.start()

    def _run(self) -> None:
        try:
            self._train()
        except Exception as problem:
            self.seen.failure = f"{type(problem).__name__}: {problem}"

    def _train(self) -> None:
        training = (
            self._job.service()
            .create_lora_training_client(base_model="tiny", rank=0, seed=3)
            .result()
        )
        while self._goes_on(len(self.seen.rounds)):
            number = len(self.seen.rounds)
            rng = random.Random(f"{self._seed} {self.seen.number} {number}")
            self.seen.rounds.append(_digest(_round(training, rng)))
            self.seen.moved_at = time.monotonic()
            time.sleep(rng.uniform(0, 2 * self._pause_s))
        training.save_weights_for_sampler("end").result()
        self.seen.weights = _weights(self._job)


def _round(training: Any, rng: random.Random) -> list[Any]:
    """Up to three backward passes, a step, and samples of what it has become."""
    passes = [
        training.forward_backward(
            [datum(*_tokens(rng)) for _ in range(rng.randint(1, 2))], "cross_entropy"
        )
        for _ in range(rng.randint(1, 3))
    ]
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    seen: list[Any] = []
    for each in passes:
        result = each.result()
        seen.append(result.metrics["loss:sum"])
        seen += [output["logprobs"].tolist() for output in result.loss_fn_outputs]
    metrics = step.result().metrics
    seen += [metrics[name] for name in sorted(metrics)]
    sampler = training.save_weights_and_get_sampling_client().result()
    samples = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(_tokens(rng)),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=4),
        )
        for _ in range(2)
    ]
    for sample in samples:
        seen += [[each.tokens, each.logprobs] for each in sample.result().sequences]
    return seen


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randint(4, 50) for _ in range(rng.randint(3, 8))]


def _digest(seen: list[Any]) -> str:
    # Floats are written so that they are read back bit for bit.
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


def _weights(job: Job) -> str:
    pattern = f"job{job.slurm_id}-*/sampler_weights/end"
    (path,) = (job.partition.folder / "state" / "checkpoints").glob(pattern)
    file = path / "model.safetensors" if path.is_dir() else path
    return hashlib.sha256(file.read_bytes()).hexdigest()
