"""What speculation is worth while few sequences are live. In: a model folder with a chat template. Out: a table and one line of JSON.

Two kinds of work: copying (the answer repeats the prompt) and writing (it does not), greedy, 1, 4 and 16 chats at once, with and without
`num_speculative_tokens`, in turn, the shortest of several rounds; the tokens are compared.

    python benchmarks/speculation.py runs/smollm2/dense
"""

import argparse
import json
import time
from typing import Any

from batchgen import LLM, SamplingParams

TEXT = (
    "The lighthouse stood at the end of the pier. Every evening its keeper climbed the stairs, lit the lamp and wrote the names of the "
    "passing ships in a book: the Albatross, the Mary Ann, the Northern Star, the Albatross again."
)
WORK = {
    "copy": [f"Repeat this text word for word, number {i}:\n\n{TEXT}" for i in range(16)],
    "write": [f"Write a short story about a {animal} who finds a key." for animal in ("fox", "crow", "hare", "newt") * 4],
}


def run(llm: LLM, prompts: list[str], num_tokens: int) -> tuple[float, list[list[int]], int, int]:
    """Seconds, tokens, drafted and accepted."""
    stats = llm.engine.stats()
    before = stats.drafted_tokens, stats.accepted_tokens
    llm.engine.pool.drop_cache()
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    start = time.perf_counter()
    groups = llm.generate(chats, SamplingParams(temperature=0, max_tokens=num_tokens))
    seconds = time.perf_counter() - start
    stats = llm.engine.stats()
    return seconds, [g.samples[0].token_ids for g in groups], stats.drafted_tokens - before[0], stats.accepted_tokens - before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=7, help="num_speculative_tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    engines = {n: LLM(options.model, device=options.device, dtype=options.dtype, num_speculative_tokens=n) for n in (0, options.tokens)}
    print("| work | chats at once | plain, s | speculative, s | ratio | drafted | accepted |\n|---|---|---|---|---|---|---|")
    rows = []
    for work, prompts in WORK.items():
        for live in (1, 4, 16):
            rounds = [{n: run(llm, prompts[:live], options.max_tokens) for n, llm in engines.items()} for _ in range(options.rounds)]
            assert all(each[0][1] == each[options.tokens][1] for each in rounds), "speculation changed the tokens"
            plain, guessed = (min(each[n][0] for each in rounds) for n in engines)
            _, _, drafted, accepted = rounds[-1][options.tokens]
            print(f"| {work} | {live} | {plain:.2f} | {guessed:.2f} | {plain / guessed:.2f} | {drafted} | {accepted} |", flush=True)
            rows.append({"work": work, "live": live, "plain_s": plain, "speculative_s": guessed, "drafted": drafted, "accepted": accepted})
    print(json.dumps({"benchmark": "speculation", "model": options.model, "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
