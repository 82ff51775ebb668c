"""`rollout bench`: the floor is what bytes and operations say, and the command measures real batches."""

import json

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

from batchgen.models.registry import load_model
from rollout.bench.floor import Cost, Rates, measure
from rollout.bench.workloads import GROUP_SIZE, NAMES, workload
from rollout.cli import app

MODEL = "batchgen/assets/tiny-moe"


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_the_same_every_time_and_scales_by_sequences(name):
    prompts, lengths = workload(name, 5000, scale=0.1)
    assert (prompts, lengths) == workload(name, 5000, scale=0.1)
    whole, whole_lengths = workload(name, 5000)
    assert len(prompts) == len(lengths) and abs(len(prompts) - len(whole) / 10) <= GROUP_SIZE
    assert max(map(len, prompts)) == max(map(len, whole)) and max(lengths) <= max(whole_lengths)
    assert all(0 <= token < 5000 for prompt in prompts for token in prompt)


def test_a_floor_counts_each_byte_and_operation_once(tmp_path):
    loaded = load_model(str(tiny_model("qwen3_moe", tmp_path)), "float32", "cpu", deterministic=False)
    cost = Cost.of(loaded.model, torch.float32)
    hidden, width, layers, vocab, experts, k = 48, 32, 3, 260, 8, 3
    attention = hidden * (4 + 2 * 2) * 16 + 4 * 16 * hidden
    assert cost.experts == [(4 * experts * 3 * hidden * width, k / experts)] * layers
    assert cost.dense_bytes == 4 * (layers * (attention + experts * hidden) + vocab * hidden)
    assert cost.flop_per_token == 2 * layers * (attention + experts * hidden + k * 3 * hidden * width)
    assert cost.head_flop == 2 * vocab * hidden and cost.attention_flop == layers * 4 * 4 * 16
    assert cost.bytes_per_kv_token == 4 * layers * 2 * 2 * 16
    only_bytes = Rates(bytes_per_s=1.0, flop_per_s=float("inf"))
    touched = layers * cost.experts[0][0] * (1 - (1 - k / experts) ** 2)
    group = [[1, 2, 3]] * 2
    assert cost.floor_s(group, [2, 2], only_bytes) == pytest.approx(cost.dense_bytes + touched + (3 + 2) * cost.bytes_per_kv_token)
    assert cost.floor_s(group, [1, 1], only_bytes) == 0
    only_flop = Rates(bytes_per_s=float("inf"), flop_per_s=1.0)
    prefill = 3 * cost.flop_per_token + 4 * cost.attention_flop + cost.head_flop
    assert cost.floor_s(group, [2, 2], only_flop) == prefill + 2 * (cost.flop_per_token + cost.head_flop)


def test_states_are_read_and_written_at_each_step(tmp_path):
    cost = Cost.of(load_model(str(tiny_model("qwen3_next", tmp_path)), "float32", "cpu", deterministic=False).model, torch.float32)
    only_bytes = Rates(bytes_per_s=1.0, flop_per_s=float("inf"))
    seconds = cost.floor_s([[1]], [2], only_bytes)
    touched = sum(size * part for size, part in cost.experts)
    assert seconds == pytest.approx(cost.dense_bytes + touched + 2 * cost.bytes_per_kv_token + 2 * cost.bytes_per_state)


def test_rates_are_those_of_a_real_machine():
    rates = measure(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.bytes_per_s < 1e13 and 1e8 < rates.flop_per_s < 1e16


def test_the_command_times_real_batches(tmp_path):
    out = tmp_path / "figures.json"
    arguments = [
        "bench",
        "--model",
        MODEL,
        "--workloads",
        "short,prefill",
        "--scale",
        "0.04",
        "--json",
        str(out),
        "--num-threads",
        "1",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    figures = json.loads(out.read_text())
    assert figures["workloads"]["short"]["output_tokens"] == 64 and figures["workloads"]["short"]["seconds"] > 0
    assert figures["workloads"]["short"]["floor_s"] > 0
    assert "| short | 1 |" in done.output and "prefill | 5 | needs a context of 2049, there is one of 2048" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "sprint"], "no workload 'sprint'"),
        (["--scale", "0"], "scale is positive"),
        (["--model", "nowhere"], "does not exist"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message):
    done = CliRunner().invoke(app, ["bench", "--model", MODEL, *arguments])
    assert done.exit_code == 3 and message in done.output and "Traceback" not in done.output
