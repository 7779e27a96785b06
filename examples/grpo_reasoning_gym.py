#!/usr/bin/env python3
"""SmolLM2-135M-Instruct learns reasoning-gym's ``chain_sum`` (one-digit sums) by GRPO.

    plexrl sbatch --model smollm2 --wrap "python examples/grpo_reasoning_gym.py"

A real pretrained model, real tasks and their own verifier. Needs ``tinker`` and
``reasoning-gym``. About 7 minutes on two CPU cores take held-out accuracy from .45 to .85.
"""

import json
import random
from collections.abc import Sequence

import reasoning_gym
import tinker
from grpo import Prompt, Recipe, Run, arguments
from tinker import types

LEARNING_RATE, WARM_UP = 3e-5, 3


def learning_rate(steps: int, step: int, _rewards: Sequence[float]) -> float:
    """Three steps of warm-up, then linear to a tenth."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * max(0.1, 1 - 0.9 * step / steps)


def main() -> None:
    """Train; held-out accuracy before and after."""
    parser = arguments(__doc__ or "", model="smollm2", steps=55)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    asked = parser.parse_args()

    tasks = reasoning_gym.create_dataset(
        "chain_sum", seed=12345, size=1500, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    questions = {entry["question"]: entry for entry in reversed(list(tasks))}
    names = sorted(questions)
    random.Random(7).shuffle(names)
    held_out = [questions[name] for name in names[:40]]
    train = [questions[name] for name in names[40:]]

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(
        base_model=asked.model, rank=0, seed=asked.seed
    ).result()
    tokenizer = training.get_tokenizer()
    words = ("\u010a", "\u010a\u010a", ".", ",", "<|im_end|>")
    stop = sorted({tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(w) for w in words)})

    def prompt_of(entry: dict) -> Prompt:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        tokens = tokenizer.encode(text + "The answer is", add_special_tokens=False)
        return Prompt(tokens, entry)

    def draw(rng: random.Random) -> Prompt:
        return prompt_of(rng.choice(train))

    def reward(prompt: Prompt, tokens: list[int]) -> float:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return float(tasks.score_answer(text.strip().strip(".,").strip(), prompt.answer))

    def accuracy() -> float:
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=stop)
        prompts = [prompt_of(entry) for entry in held_out]
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt.tokens),
                num_samples=1,
                sampling_params=params,
            )
            for prompt in prompts
        ]
        right = [
            reward(prompt, list(future.result().sequences[0].tokens)) > 0.999
            for prompt, future in zip(prompts, futures, strict=True)
        ]
        return sum(right) / len(right)

    recipe = Recipe(
        steps=asked.steps,
        prompts=asked.prompts,
        group=asked.group,
        max_tokens=6,
        stop=stop,
        learning_rate=lambda step, rewards: learning_rate(asked.steps, step, rewards),
        std_floor=0.1,
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
    before = accuracy()
    print(f"held-out accuracy before: {before:.3f}", flush=True)
    rewards = run.run()
    after = accuracy()
    path = training.save_weights_for_sampler("final").result().path
    print(f"held-out accuracy after: {after:.3f}; weights: {path}")
    if asked.out is not None:
        with asked.out.open("a", encoding="utf-8") as file:
            summary = {"before": before, "after": after, "last": rewards[-10:]}
            file.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
