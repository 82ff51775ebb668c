"""The work that engines are timed on. In: a name. Out: prompts (token ids) and output lengths. Never imports torch.

Definitions follow the project's shared benchmark notes, so that figures can be compared: EOS ignored, lengths forced, temperature 1, the
logprob of every sampled token returned.
"""

import random

SHAPES = {
    "cpu": (64, 64, 128),
    "short": (32, 64, 64),
    "service": (1024, 64, 32),
    "uniform": (1024, 256, 512),
    "prefill": (128, 2048, 1),
}
"""Workload → sequences, prompt tokens, output tokens; `longtail` and `group` are made in `workload`."""
NAMES = (*SHAPES, "longtail", "group")
GROUP_SIZE = 16
"""Samples of each prompt of `group`."""


def workload(name: str, vocab_size: int, seed: int = 0, scale: float = 1.0) -> tuple[list[list[int]], list[int]]:
    """Prompts and the exact number of tokens to generate for each; ids keep clear of both ends of the vocabulary. `scale`: part of the
    sequences (of the prompts in `group`), at least one. ValueError for an unknown name or a scale that is not positive."""
    if not scale > 0:
        raise ValueError(f"scale is positive, got {scale}")
    rng = random.Random(seed)
    margin = min(1000, vocab_size // 8)

    def prompts(number: int, length: int) -> list[list[int]]:
        return [[rng.randrange(margin, vocab_size - margin) for _ in range(length)] for _ in range(max(1, round(number * scale)))]

    if name == "longtail":
        made = prompts(1024, 256)
        return made, [min(3500, max(16, int(rng.lognormvariate(5.3, 0.9)))) for _ in made]
    if name == "group":
        grouped = [prompt for prompt in prompts(64, 512) for _ in range(GROUP_SIZE)]
        return grouped, [256] * len(grouped)
    if name not in SHAPES:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    num_sequences, num_prompt, num_output = SHAPES[name]
    made = prompts(num_sequences, num_prompt)
    return made, [num_output] * len(made)
