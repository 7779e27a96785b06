"""GRPO with the tinker SDK: what the two example scripts share. Nothing of PlexRL is imported.

One step: publish the weights, sample a group of completions for every prompt, wait for the
tools (``--tool-seconds`` imitates them), reward, and take one optimizer step on the
group-relative advantages. With ``--async`` the next rollouts are drawn from the previous
weights while this step trains (one step off-policy).
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types


@dataclass
class Prompt:
    """A question: its tokens, and what its verifier needs."""

    tokens: list[int]
    answer: Any


@dataclass
class Recipe:
    """What the two examples do differently."""

    steps: int
    prompts: int
    group: int
    max_tokens: int
    stop: list[int]
    #: Learning rate of a step, given the rewards so far.
    learning_rate: Callable[[int, Sequence[float]], float]
    #: Smallest standard deviation that advantages are divided by; 0 adds 1e-4 instead.
    std_floor: float = 0.0
    beta2: float = 0.95
    grad_clip_norm: float = 1.0


@dataclass
class Rollout:
    """A batch of groups that was sampled and rewarded."""

    prompts: list[Prompt]
    groups: list[list[types.SampledSequence]]
    rewards: np.ndarray
    seconds: float


@dataclass
class Run:
    """One training run; writes a JSON line for every step."""

    recipe: Recipe
    draw: Callable[[random.Random], Prompt]
    reward: Callable[[Prompt, list[int]], float]
    training: tinker.TrainingClient
    seed: int = 0
    tool_seconds: float = 0.0
    off_policy: bool = False
    out: Path | None = None
    rewards: list[float] = field(default_factory=list)

    def begin_rollout(self, rng: random.Random) -> tuple[list[Prompt], list[Any], float]:
        """Send the sample calls of one step; they run while the caller does other things."""
        started = time.monotonic()
        sampler = self.training.save_weights_and_get_sampling_client().result()
        prompts = [self.draw(rng) for _ in range(self.recipe.prompts)]
        params = types.SamplingParams(
            max_tokens=self.recipe.max_tokens, temperature=1.0, stop=self.recipe.stop
        )
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt.tokens),
                num_samples=self.recipe.group,
                sampling_params=params,
            )
            for prompt in prompts
        ]
        return prompts, futures, started

    def end_rollout(self, prompts: list[Prompt], futures: list[Any], started: float) -> Rollout:
        """Collect the samples, run the tools, reward."""
        groups = [list(future.result().sequences) for future in futures]
        if self.tool_seconds:
            time.sleep(self.tool_seconds)
        rewards = np.array(
            [
                [self.reward(prompt, list(sequence.tokens)) for sequence in group]
                for prompt, group in zip(prompts, groups, strict=True)
            ]
        )
        return Rollout(prompts, groups, rewards, time.monotonic() - started)

    def data(self, rollout: Rollout) -> list[types.Datum]:
        """One datum for every completion of a group in which not all rewards are equal."""
        rewards = rollout.rewards
        spread = rewards.std(axis=1, ddof=1, keepdims=True)
        floor = self.recipe.std_floor
        spread = np.maximum(spread, floor) if floor else spread + 1e-4
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
        live = [i for i in range(len(rewards)) if rewards[i].max() > rewards[i].min()]
        tokens = sum(len(s.tokens) for i in live for s in rollout.groups[i])
        data = []
        for i in live:
            prompt = rollout.prompts[i].tokens
            for sequence, advantage in zip(rollout.groups[i], advantages[i], strict=True):
                completion = list(sequence.tokens)
                whole = prompt + completion
                pad = len(prompt) - 1
                # Losses are sums over tokens; dividing here makes the step a mean.
                weight = float(advantage) / tokens
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(whole[:-1]),
                        loss_fn_inputs={
                            "target_tokens": np.array(whole[1:], dtype=np.int64),
                            "logprobs": np.array(
                                [0.0] * pad + list(sequence.logprobs), dtype=np.float32
                            ),
                            "advantages": np.array(
                                [0.0] * pad + [weight] * len(completion), dtype=np.float32
                            ),
                        },
                    )
                )
        return data

    def run(self) -> list[float]:
        """All steps; mean rewards by step."""
        rng = random.Random(self.seed)
        began = time.monotonic()
        ahead = self.begin_rollout(rng)
        for step in range(self.recipe.steps):
            last = step + 1 == self.recipe.steps
            rollout = self.end_rollout(*ahead)
            self.rewards.append(float(rollout.rewards.mean()))
            if self.off_policy and not last:
                ahead = self.begin_rollout(rng)
            started = time.monotonic()
            training = self.begin_training(step, rollout)
            if not self.off_policy and not last:
                # Queued behind the optimizer step, so no time is lost between the two.
                ahead = self.begin_rollout(rng)
            loss = self.end_training(training)
            now = time.monotonic()
            self.write(step, rollout, loss, now - started, now - began)
        return self.rewards

    def begin_training(self, step: int, rollout: Rollout) -> list[Any]:
        """Send one optimizer step; no call if no group has anything to teach."""
        data = self.data(rollout)
        if not data:
            return []
        forward_backward = self.training.forward_backward(data, "importance_sampling")
        optim_step = self.training.optim_step(
            types.AdamParams(
                learning_rate=self.recipe.learning_rate(step, self.rewards),
                beta1=0.9,
                beta2=self.recipe.beta2,
                eps=1e-8,
                grad_clip_norm=self.recipe.grad_clip_norm,
            )
        )
        return [forward_backward, optim_step]

    def end_training(self, futures: list[Any]) -> float:
        """Wait for the step; its loss."""
        if not futures:
            return 0.0
        futures[1].result()
        return float(futures[0].result().metrics["loss:sum"])

    def write(
        self, step: int, rollout: Rollout, loss: float, trained: float, elapsed: float
    ) -> None:
        """One line on the terminal, one in the file."""
        digest = hashlib.sha256()
        for group in rollout.groups:
            for sequence in group:
                digest.update(np.array(sequence.tokens, dtype=np.int64).tobytes())
                digest.update(np.array(sequence.logprobs, dtype=np.float32).tobytes())
        reward = self.rewards[step]
        print(
            f"step {step + 1}/{self.recipe.steps} reward {reward:.3f} loss {loss:+.4f} "
            f"rollout {rollout.seconds:.2f} s train {trained:.2f} s elapsed {elapsed:.0f} s",
            flush=True,
        )
        if self.out is not None:
            line = {
                "step": step,
                "reward": reward,
                "loss": loss.hex(),
                "samples": digest.hexdigest(),
                "rollout_seconds": rollout.seconds,
                "train_seconds": trained,
                "elapsed_seconds": elapsed,
            }
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def arguments(description: str, *, model: str, steps: int) -> argparse.ArgumentParser:
    """The options that both examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=model, help="name in the partition's catalogue")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tool-seconds", type=float, default=0.0, help="imitate tool calls of this length"
    )
    parser.add_argument(
        "--async", dest="off_policy", action="store_true", help="one step off-policy"
    )
    parser.add_argument("--out", type=Path, help="append a JSON line for every step")
    return parser
