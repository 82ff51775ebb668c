"""Trains the bundled model. In: minutes and a device. Out: a checkpoint folder (weights, configs, tokenizer) and its accuracy table.

The text is procedural (reasoning-gym questions, our worked solutions). The mixture of worked and direct responses follows a schedule:
mostly worked while the model learns the steps, mostly direct at the end, so that the finished model usually blurts out an answer although
it could work it out. That gap is what reinforcement learning and voting have to gain.

    python examples/train_tiny_moe.py --out DIR --minutes 8 --device cuda      # as the bundled checkpoint was made
    python examples/train_tiny_moe.py --out /tmp/t --minutes 1 --hidden 64 --eval-items 1   # a trial on a CPU, minutes of evaluation
"""

import argparse
import json
import multiprocessing
import shutil
import time
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_moe_data import TextBatch, encode_batch, examples, train_tokenizer
from tiny_moe_eval import evaluate_policy
from tokenizers import Tokenizer

from rollout.demo.policy import Packed, Policy, PolicyConfig


def worked_share(progress: float, final: float) -> float:
    """Share of worked responses: 0.9 for most of the run, then down to `final` for the last quarter."""
    return final + (0.9 - final) * min(1.0, max(0.0, (0.75 - progress) / 0.1))


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm-up over 200 steps, constant, linear to zero over the last half."""
    return peak * min(1.0, step / 200) * min(1.0, 2 * (1 - progress))


def feed(queue: Queue, progress: Synchronized, tokenizer_file: str, seed: int, examples_per_step: int, final_worked: float) -> None:
    """Worker process: fills the queue with steps for as long as it lives."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    for round_index in range(1 << 30):
        stream = examples(seed + (round_index << 20), worked_share(progress.value, final_worked))
        for _ in range(8):
            queue.put(encode_batch(tokenizer, [next(stream) for _ in range(examples_per_step)]))


def to_packed(batch: TextBatch, device: str) -> Packed:
    lengths_B = torch.from_numpy(batch.lengths_B)
    starts_B = lengths_B.cumsum(0) - lengths_B
    ids_T = torch.from_numpy(batch.ids_T)
    rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    positions_T = torch.arange(len(ids_T)) - starts_B[rows_T]
    row_length = int(lengths_B.max())
    slots_T = rows_T * row_length + positions_T
    return Packed(*(tensor.to(device, non_blocking=True) for tensor in (ids_T, positions_T, slots_T)), len(lengths_B), row_length)


def losses_of(policy: Policy, batch: TextBatch, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the response tokens, and the load-balancing term (1.0 when every expert gets its share)."""
    predict_M, targets_M = (torch.from_numpy(array).to(device, non_blocking=True) for array in (batch.predict_M, batch.targets_M))
    logits_MV, scores = policy(to_packed(batch, device), predict_M)
    top_k, num_experts = policy.config.num_experts_per_tok, policy.config.num_experts
    balance = torch.zeros((), device=device)
    for scores_TE in scores:
        chosen_E = F.one_hot(scores_TE.topk(top_k, -1).indices, num_experts).sum(1).float().mean(0)
        balance = balance + num_experts * (chosen_E * scores_TE.mean(0)).sum() / top_k
    return F.cross_entropy(logits_MV, targets_M), balance / len(scores)


def train(args: argparse.Namespace) -> Policy:
    torch.manual_seed(args.seed)
    torch.set_num_threads(2)
    config = PolicyConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 96 or 1,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=args.inner,
    )
    policy = Policy.from_folder(args.init) if args.init else Policy(config)
    policy.compute_dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    policy.to(args.device)
    print(f"{sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters", flush=True)
    decayed = [parameter for parameter in policy.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in policy.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")

    context = multiprocessing.get_context("spawn")
    queue: Queue = context.Queue(maxsize=2 * args.workers)
    progress = context.Value("d", 0.0)
    tokenizer_file = str(args.out / "tokenizer.json")
    workers = [
        context.Process(target=feed, args=(queue, progress, tokenizer_file, args.seed + 1 + i, args.examples, args.worked), daemon=True)
        for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    step, tokens, losses, waited = 0, 0, [], 0.0
    batch = queue.get()
    start = last = time.monotonic()
    while (done := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        progress.value = done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, step, args.lr)
        loss, balance = losses_of(policy, batch, args.device)
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        tokens += len(batch.ids_T)
        step += 1
        before = time.monotonic()
        batch = queue.get()
        waited += time.monotonic() - before
        if time.monotonic() - last > 15:
            last = time.monotonic()
            mean = torch.stack(losses[-100:]).mean().item()
            speed = tokens / (last - start)
            print(f"step {step} {done:.0%} loss {mean:.4f} {speed:,.0f} tok/s, {waited:.0f} s waiting for data", flush=True)
    for worker in workers:
        worker.kill()
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="checkpoint folder to go on from, with its tokenizer; without it both start fresh")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--examples", type=int, default=1024, help="examples an optimiser step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--worked", type=float, default=0.2, help="share of worked responses at the end")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--inner", type=int, default=96, help="hidden size of an expert")
    parser.add_argument("--eval-items", type=int, default=100, help="items a kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.init:
        args.out.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.init / name, args.out / name)
    else:
        train_tokenizer(args.out, args.vocab, 20_000, args.seed)
    policy = train(args)
    policy.save(args.out)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    ids = {f"{name}_token_id": tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "eos", "pad")}
    (args.out / "generation_config.json").write_text(json.dumps({**ids, "do_sample": True, "temperature": 1.0}, indent=2) + "\n")
    config = json.loads((args.out / "config.json").read_text())
    (args.out / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n")
    saved = Policy.from_folder(args.out).to(args.device)
    saved.compute_dtype = policy.compute_dtype
    table = evaluate_policy(saved, tokenizer, args.eval_items, 4, seed=10_000 + args.seed)
    (args.out / "accuracy.json").write_text(json.dumps(table, indent=2) + "\n")
    for kind, row in table.items():
        print(f"{kind:24}" + "  ".join(f"{name} {value:.2f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
