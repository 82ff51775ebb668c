"""A whole weight-sync world in one thread: fake targets that record order, nodes, coordinator, and the channel that publishers use.

Time stands still except for `World.advance`; every message passes through the real encoders.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync.coordinator import Coordinator, CoordinatorLimits
from weights_sync.events import (
    Drained,
    HoldDispatch,
    NodeJoined,
    NodeLeft,
    NodeSaid,
    PublisherLeft,
    PublisherSaid,
    ReleaseDispatch,
    SendNode,
    SendPublisher,
    SetServing,
    Tick,
    VersionChanged,
)
from weights_sync.publisher import WeightPublisher
from weights_sync.receiver import WeightReceiver

FROM_PUBLISHER, TO_NODE, FROM_NODE = m.Decoder(m.FromPublisher), m.Decoder(m.ToNode), m.Decoder(m.FromNode)
LIMITS = CoordinatorLimits(bucket_bytes=m.MIN_BUCKET_BYTES, window=2)


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: str = "float32"


SPECS = {
    "model.embed_tokens.weight": Spec((300, 128)),  # 150 KiB: spans three of the smallest buckets
    "model.norm.weight": Spec((128,)),
    "model.layers.0.mlp.experts.0.gate_proj.weight": Spec((32, 48), "bfloat16"),
    "model.layers.0.mlp.experts.0.up_proj.weight": Spec((32, 48), "bfloat16"),
    "model.layers.0.mlp.experts.0.down_proj.weight": Spec((48, 32), "bfloat16"),
    "model.layers.0.mlp.experts.1.gate_proj.weight": Spec((32, 48), "bfloat16"),
    "model.layers.0.mlp.experts.1.up_proj.weight": Spec((32, 48), "bfloat16"),
    "model.layers.0.mlp.experts.1.down_proj.weight": Spec((48, 32), "bfloat16"),
    "model.layers.0.mlp.gate.e_score_correction_bias": Spec((2,)),
}


def state(seed=0, specs=SPECS):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for name, spec in specs.items()}


class FakeTarget:
    """Holds tensors by name; `log` records what was done to it, in order."""

    def __init__(self, specs=SPECS, version=0):
        self.specs, self.version, self.log = specs, version, []
        self.tensors = {}
        self.stage = None
        self.refuse_name = None

    def open(self, version):
        if self.stage is not None or version <= self.version:
            raise WeightUpdateError(f"cannot open {version} at {self.version}")
        self.log.append(("open", version))
        self.stage = FakeStage(self, version)
        return self.stage


class FakeStage:
    def __init__(self, target, version):
        self.target, self.version, self.tensors = target, version, {}

    def put(self, name, tensor):
        if name == self.target.refuse_name or not torch.isfinite(tensor).all():
            raise WeightUpdateError(f"{name} has values that are not finite")
        self.target.log.append(("put", name))
        self.tensors[name] = tensor.to(getattr(torch, self.target.specs[name].dtype), copy=True)

    def missing(self):
        return [name for name in self.target.specs if name not in self.tensors]

    def discard(self):
        self.target.log.append(("discard", self.version))
        self.target.stage = None

    def commit(self):
        self.target.log.append(("commit", self.version))
        self.target.tensors, self.target.version, self.target.stage = self.tensors, self.version, None


class FakeNode:
    """A receiver over a fake target. `auto` commits at once; otherwise the test calls `swap`."""

    def __init__(self, world, name, target, auto=True):
        self.world, self.name, self.target, self.auto = world, name, target, auto
        self.pending = None
        self.hung = False
        self.inbox = deque()
        self.receiver = WeightReceiver(target, self._commit, clock=lambda: world.now)

    def _commit(self, stage, policy):
        self.target.log.append(("policy", policy))
        self.pending = stage

    def take(self, frames):
        self.inbox.append(frames)
        if not self.hung:
            self.work()

    def work(self):
        while self.inbox:
            header, data = self.inbox.popleft()
            self.say(self.receiver.handle(TO_NODE.decode(header), data))
        while self.receiver.has_work:
            self.say(self.receiver.work(1.0))
        if self.pending is not None and self.auto:
            self.swap()

    def swap(self):
        stage, self.pending = self.pending, None
        stage.commit()
        self.say(self.receiver.committed(stage.version, 0.001))

    def say(self, answers):
        for answer in answers:
            message, data = answer if isinstance(answer, tuple) else (answer, None)
            self.world.tell(NodeSaid(self.name, FROM_NODE.decode(m.encode(message)), data))


@dataclass
class World:
    """Service and nodes. `now` is the time everybody sees."""

    specs: list = field(default_factory=lambda: [SPECS])
    limits: CoordinatorLimits = LIMITS
    running: int = 0
    """Samples that policy finish has to wait for."""

    def __post_init__(self):
        self.now = 0.0
        self.coordinator = Coordinator(self.limits)
        self.nodes, self.serving, self.channels, self.gone = {}, {}, {}, set()
        self.version, self.held, self.history = None, False, []
        self.num_channels = 0
        self._queue, self._working = deque(), False
        for specs in self.specs:
            self.add_node(FakeTarget(specs))

    def add_node(self, target, name=None):
        node = FakeNode(self, name or f"n{len(self.nodes)}", target)
        self.nodes[node.name] = node
        self.tell(NodeJoined(node.name, target.version))
        return node

    def kill_node(self, name):
        del self.nodes[name]
        self.serving.pop(name, None)
        self.tell(NodeLeft(name, "its process died"))

    def finish_running(self):
        self.running = 0
        if self.held:
            self.tell(Drained())

    def advance(self, seconds, step=0.5):
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.tell(Tick())
            for node in list(self.nodes.values()):
                if not node.hung:
                    node.say(node.receiver.expire())

    def tell(self, event):
        self._queue.append(event)
        if self._working:
            return
        self._working = True
        while self._queue:
            for action in self.coordinator.handle(self._queue.popleft(), self.now):
                self._carry_out(action)
        self._working = False

    def _carry_out(self, action):
        self.history.append(action)
        match action:
            case SendNode(node, message, data):
                if node in self.nodes:
                    self.nodes[node].take((m.encode(message), data))
            case SendPublisher(peer, message, data):
                if peer in self.channels:
                    self.channels[peer].inbox.append([m.encode(message)] if data is None else [m.encode(message), data])
                elif peer not in self.gone:
                    self._queue.append(PublisherLeft(peer))
            case SetServing(node, serving, _):
                self.serving[node] = serving
            case VersionChanged(version):
                self.version = version
            case HoldDispatch():
                self.held = True
                if not self.running:
                    self._queue.append(Drained())
            case ReleaseDispatch():
                self.held = False

    def open_admin_channel(self):
        return FakeChannel(self)

    def tensors(self, name="n0"):
        return self.nodes[name].target.tensors


class FakeChannel:
    """What a publisher holds. `on_send(message, data)` may change or drop a message (None) on its way."""

    on_send = None
    on_wait = None
    """Called instead of waiting when nothing has come."""

    def __init__(self, world):
        self.world, self.inbox = world, deque()
        world.num_channels += 1
        self.peer = str(world.num_channels).encode()
        world.channels[self.peer] = self

    def send(self, frames, timeout_s):
        message, data = FROM_PUBLISHER.decode(frames[0]), bytearray(frames[1]) if len(frames) > 1 else None
        if self.on_send is not None:
            changed = type(self).on_send(message, data)
            if changed is None:
                return
            message, data = changed
        self.world.tell(PublisherSaid(self.peer, message, data))

    def recv(self, timeout_s):
        if not self.inbox and timeout_s and self.on_wait is not None:
            type(self).on_wait()
        return self.inbox.popleft() if self.inbox else None

    def close(self):
        self.world.gone.add(self.peer)
        self.world.tell(PublisherLeft(self.peer))
        del self.world.channels[self.peer]

    def kill(self):
        """The process is gone and nobody has noticed: what is sent to it comes back as undeliverable."""
        del self.world.channels[self.peer]


def push(world, weights=None, version=1, **options):
    return WeightPublisher(world).push(state() if weights is None else weights, version, **options)


def assert_holds(world, tensors, version=1):
    assert world.version == version
    for name, node in world.nodes.items():
        assert world.serving[name] and node.target.version == version and node.target.stage is None
        assert node.target.tensors.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(node.target.tensors[key], tensor.to(node.target.tensors[key].dtype)), key


def assert_untouched(world, version=0):
    """Every node serves the old version, holds no staging memory, and the next push works."""
    assert world.version == version and not world.coordinator.busy and not world.held
    for name, node in world.nodes.items():
        assert world.serving[name] and node.target.version == version and node.target.stage is None
    FakeChannel.on_send = FakeChannel.on_wait = None
    for node in world.nodes.values():
        node.target.refuse_name = None
    push(world, state(7), version + 1)
    assert_holds(world, state(7), version + 1)
