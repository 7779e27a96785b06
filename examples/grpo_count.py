#!/usr/bin/env python3
"""Teach a tiny random model to count: the prompt "3:" wants "aaa" and the end of the text.

    plexrl sbatch --model tiny --wrap "python examples/grpo_count.py"

Needs the ``tinker`` SDK only. The recipe (32 prompts x 16, learning rate 1e-3 held, then
lowered, and lowered further as the reward approaches 1) does not collapse.
"""

import random
from collections.abc import Sequence

import tinker
from grpo import Prompt, Recipe, Run, arguments

LEARNING_RATE, HOLD = 1e-3, 0.7


def learning_rate(steps: int, step: int, rewards: Sequence[float]) -> float:
    """Held for 70 % of the run, then linear to 0; less when the last 5 rewards are high."""
    decay = min(1.0, (1 - step / steps) / (1 - HOLD))
    recent = rewards[:-1][-5:]
    mean = sum(recent) / max(1, len(recent))
    return LEARNING_RATE * decay * min(1.0, 2.5 * (1 - mean)) ** 2


def main() -> None:
    """Train, and say how it ended."""
    parser = arguments(__doc__ or "", model="tiny", steps=150)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    asked = parser.parse_args()

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model=asked.model, rank=0, seed=asked.seed
    ).result()
    tokenizer = training.get_tokenizer()
    eos, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")

    def draw(rng: random.Random) -> Prompt:
        count = rng.randint(1, 4)
        return Prompt(tokenizer(f"{count}:")["input_ids"], count)

    def reward(prompt: Prompt, tokens: list[int]) -> float:
        ended = bool(tokens) and tokens[-1] == eos
        body = tokens[:-1] if ended else tokens
        right = sum(token == letter for token in body)
        wrong = len(body) - right
        near = max(0.0, 1 - abs(right - prompt.answer) / prompt.answer)
        near = max(0.0, near - 0.3 * wrong / max(1, len(body)))
        return 0.8 * near + 0.2 * (right == prompt.answer and wrong == 0 and ended)

    recipe = Recipe(
        steps=asked.steps,
        prompts=asked.prompts,
        group=asked.group,
        max_tokens=6,
        stop=[eos],
        learning_rate=lambda step, rewards: learning_rate(asked.steps, step, rewards),
    )
    run = Run(
        recipe,
        draw,
        reward,
        training,
        seed=asked.seed,
        tool_seconds=asked.tool_seconds,
        off_policy=asked.off_policy,
        out=asked.out,
    )
    rewards = run.run()
    path = training.save_weights_for_sampler("final").result().path
    last = sum(rewards[-10:]) / len(rewards[-10:])
    print(f"reward of the last 10 steps {last:.3f}; weights: {path}")


if __name__ == "__main__":
    main()
