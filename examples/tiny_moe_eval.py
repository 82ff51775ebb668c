"""Accuracy of a policy on the tasks. In: a Policy, its tokenizer. Out: accuracy by task, style and decoding. No KV cache: for a GPU."""

import torch
from tiny_moe_data import chat_prompt
from tokenizers import Tokenizer
from torch import Tensor

from rollout.demo.policy import Packed, Policy
from rollout.demo.tasks import KINDS, make_items, score_response

MAX_NEW_TOKENS = 150


@torch.no_grad()
def complete(policy: Policy, prompts: list[list[int]], eos: int, temperature: float, first_bias_V: Tensor) -> list[list[int]]:
    """One continuation a prompt; `first_bias_V` is added to the first token's logits."""
    device = first_bias_V.device
    sequences = [list(prompt) for prompt in prompts]
    live = list(range(len(sequences)))
    for step in range(MAX_NEW_TOKENS):
        batch = Packed.of([sequences[row] for row in live], device)
        last_M = torch.tensor([len(sequences[row]) for row in live], device=device).cumsum(0) - 1
        logits_MV = policy(batch, last_M)[0]
        if step == 0:
            logits_MV = logits_MV + first_bias_V
        greedy = temperature == 0
        ids = logits_MV.argmax(-1) if greedy else torch.multinomial((logits_MV / temperature).softmax(-1), 1).squeeze(-1)
        for row, token in zip(live, ids.tolist(), strict=True):
            sequences[row].append(token)
        live = [row for row in live if sequences[row][-1] != eos]
        if not live:
            break
    return [sequence[len(prompt) :] for prompt, sequence in zip(prompts, sequences, strict=True)]


def evaluate_policy(policy: Policy, tokenizer: Tokenizer, items_per_kind: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """Kind → sampled (temperature 1), greedy, direct and worked accuracy, and the share of samples that are worked out."""
    device = policy.model.embed_tokens.weight.device
    eos, mark = tokenizer.token_to_id("<|eos|>"), tokenizer.encode("####").ids[0]
    free_V = torch.zeros(policy.config.vocab_size, device=device)
    direct_V, worked_V = free_V.clone(), free_V.clone()
    direct_V[mark], worked_V[mark] = 1e4, -1e4
    table: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        items = make_items(items_per_kind, seed, (kind,))
        prompts = [tokenizer.encode(chat_prompt(item.question)).ids for item in items]
        runs = {"sampled": (1.0, free_V), "greedy": (0.0, free_V), "direct": (1.0, direct_V), "worked": (1.0, worked_V)}
        table[kind] = {}
        for name, (temperature, bias_V) in runs.items():
            repeat = 1 if temperature == 0 else samples
            outputs = complete(policy, prompts * repeat, eos, temperature, bias_V)
            scores = [score_response(item, tokenizer.decode(ids)) for item, ids in zip(items * repeat, outputs, strict=True)]
            table[kind][name] = sum(scores) / len(scores)
            if name == "sampled":
                table[kind]["share_worked"] = sum(ids[0] != mark for ids in outputs) / len(outputs)
    return table
