"""Pushes that end in the real engine: in process through receiver and coordinator, and through real processes and sockets."""

import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from fake_weight_sync import World
from quantised_models import checkpoints
from safetensors.torch import load_file
from tiny_models import tiny_moe

from batchgen import LLM, Engine, EngineConfig, SamplingParams
from batchgen.errors import WeightUpdateError
from batchgen.events import SampleFinished, WeightsCommitted
from batchgen.quant.packed import Packed
from batchgen.request import Request
from weights_sync import WeightPublisher

OPTIONS = {"dtype": "float32", "kv_gb": 0.01, "max_model_len": 256, "num_threads": 1}
PROMPT = list(range(1, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tiny_moe(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]


class EngineWorld(World):
    """One node whose receiver feeds a real engine; samples finish and weights swap in `run`."""

    def __init__(self, folder):
        super().__init__(specs=[])
        self.engine = Engine(EngineConfig(model=str(folder), decision_interval=4, **OPTIONS))
        self.node = self.add_node(self.engine.weights)
        self.node.auto = False
        self.node.receiver._commit = self.engine.commit_weights
        self.samples = {}
        self.cached = {}

    def submit(self, request_id, prompt=PROMPT):
        self.engine.submit(Request(request_id=request_id, prompt_token_ids=prompt, params=GREEDY, sample_indices=[0], seed_base=1))

    def run(self, steps=1000):
        while self.engine.has_work and steps:
            steps -= 1
            for event in self.engine.step():
                if isinstance(event, SampleFinished):
                    self.samples[event.request_id] = event.sample
                    self.cached[event.request_id] = event.num_cached_tokens
                elif isinstance(event, WeightsCommitted):
                    self.node.say(self.node.receiver.committed(event.version, event.paused_s))

    def open_admin_channel(self):
        channel = super().open_admin_channel()
        channel.on_wait = None
        receive = channel.recv

        def recv(timeout_s):
            if not channel.inbox:
                self.run(1)
            return receive(timeout_s)

        channel.recv = recv
        return channel


def fresh(folder, prompt=PROMPT):
    return LLM(str(folder), **OPTIONS).generate([prompt], GREEDY)[0].samples[0]


def test_after_a_push_the_engine_answers_like_a_fresh_one_and_uses_no_old_kv(folders):
    world = EngineWorld(folders[0])
    world.submit("before")
    world.run()
    WeightPublisher(world).push(folders[1], 1)
    world.submit("after")
    world.run()
    want = fresh(folders[1])
    assert world.cached["after"] == 0
    assert world.samples["after"].token_ids == want.token_ids and world.samples["after"].logprobs == want.logprobs
    assert world.samples["after"].weights_versions == [(1, 0, 64)] and world.samples["before"].weights_versions == [(0, 0, 64)]


def test_pushing_a_transformers_model_equals_pushing_its_checkpoint(folders):
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    for weights in (model, model.named_parameters(), model.state_dict()):
        world = EngineWorld(folders[0])
        WeightPublisher(world).push(weights, 1)
        world.submit("after")
        world.run()
        assert world.samples["after"].token_ids == fresh(folders[1]).token_ids


@pytest.mark.parametrize("kind", ["deepseek_fp8", "gpt_oss_mxfp4", "kimi_int4"])
def test_a_push_to_packed_weights_travels_in_bfloat16_and_is_encoded_by_the_engine(tmp_path, kind):
    packed, _, _ = checkpoints(kind, tmp_path / "old")
    _, _, source = checkpoints(kind, tmp_path / "new", seed=1)
    world, want = EngineWorld(packed), EngineWorld(packed).engine.weights
    report = WeightPublisher(world).push(source, 1)
    world.run()
    stage, num_bytes = want.open(1), 0
    for name, tensor in load_file(source / "model.safetensors").items():
        sent = tensor.bfloat16() if isinstance(want.table.slots[name].view, Packed) else tensor
        num_bytes += sent.nbytes
        stage.put(name, sent)
    stage.commit()
    assert report.num_bytes == num_bytes
    for got, expected in zip(world.engine.weights.table.storages(), want.table.storages(), strict=True):
        assert torch.equal(got, expected)


def test_the_same_weights_pushed_twice_give_bit_identical_outputs(folders):
    world = EngineWorld(folders[0])
    for version in (1, 2):
        WeightPublisher(world).push(folders[1], version)
        world.submit(str(version))
        world.run()
    assert world.samples["1"].logprobs == world.samples["2"].logprobs


def test_an_update_in_the_middle_of_a_sample_is_covered_exactly_by_its_spans(folders):
    world = EngineWorld(folders[0])
    world.submit("x")
    world.run(4)
    WeightPublisher(world).push(folders[1], 7, "continue")
    world.run()
    sample = world.samples["x"]
    (first, start, middle), (second, again, end) = sample.weights_versions
    assert (first, second, start, again, end) == (0, 7, 0, middle, 64) and 0 < middle < 64
    assert sample.token_ids[:middle] == fresh(folders[0]).token_ids[:middle]
    rest = fresh(folders[1], PROMPT + sample.token_ids[:middle])
    assert sample.token_ids[middle:] == rest.token_ids[: 64 - middle]


def test_staging_between_steps_does_not_change_what_running_samples_say(folders):
    world = EngineWorld(folders[0])
    world.submit("x")
    world.run(2)
    with pytest.raises(WeightUpdateError, match="not finite"):
        broken = load_file(folders[1] / "model.safetensors")
        broken[max(broken)] = torch.full_like(broken[max(broken)], float("inf"))
        WeightPublisher(world).push(broken, 1)
    world.run()
    assert world.samples["x"].token_ids == fresh(folders[0]).token_ids and world.engine.weights_version == 0
    assert world.engine.weights.stage is None
    WeightPublisher(world).push(folders[1], 1)
    assert world.engine.weights_version == 1


# ---- real processes -----------------------------------------------------------------------------------------------------

HALF_A_PUSH = """
import sys, time
from rollout import RolloutClient
from weights_sync import WeightPublisher, publisher
def stop(*_):
    print("midway", flush=True)
    time.sleep(600)
publisher._Packer.pack = stop
with RolloutClient(sys.argv[1], admin_url=sys.argv[2]) as client:
    WeightPublisher(client).push(sys.argv[3], 1)
"""


@pytest.fixture
def serving(folders):
    command = [sys.executable, "-m", "rollout.cli", "serve", "--model", str(folders[0]), "--port", "0", "--admin-port", "0"]
    command += ["--dtype", "float32", "--kv-gb", "0.01", "--num-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        urls = []
        for line in process.stdout:
            urls += re.findall(r"listening on (\S+)", line)
            if line.startswith("ready"):
                break
        yield urls
        process.send_signal(signal.SIGINT)
        process.stdout.read()


@pytest.mark.e2e
@pytest.mark.fault
def test_trainer_killed_in_the_middle_of_a_push_leaves_the_old_weights_and_the_next_push_works(serving, folders):
    from rollout import RolloutClient

    with subprocess.Popen([sys.executable, "-c", HALF_A_PUSH, *serving, str(folders[1])], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "midway\n"
        trainer.kill()
    with RolloutClient(serving[0], admin_url=serving[1]) as client:
        (old,) = client.generate([PROMPT], GREEDY)
        assert old.samples[0].token_ids == fresh(folders[0]).token_ids and old.samples[0].weights_versions == [(0, 0, 64)]
        started = time.monotonic()
        client.update_weights(folders[1], version=1)
        assert time.monotonic() - started < 5, "the push waited for a dead publisher's deadline"
        (new,) = client.generate([PROMPT], GREEDY)
        assert new.samples[0].token_ids == fresh(folders[1]).token_ids and new.samples[0].weights_versions == [(1, 0, 64)]
