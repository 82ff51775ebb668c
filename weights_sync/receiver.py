"""The node's end of a weight update. In: messages from the service, slices of the engine thread's time. Out: messages to the service.

Lives in the thread that owns the engine and does no I/O. `handle` is quick; checking and copying happen in `work`, which stops after
the time it is given, so that running samples wait for at most that slice (plus one tensor) per step.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync.manifest import BucketPlan, Part, digest, find_faults, plan_buckets

SILENCE_S = 60.0
"""An open update that the service does not mention for this long is dropped."""
BACKLOG_BUCKETS = m.MAX_WINDOW
"""Buckets that may wait for `work`; the service's window is smaller."""


class Stage(Protocol):
    """New weights beside the old ones; `batchgen.weights.WeightStage` is the real one."""

    def put(self, name: str, tensor: torch.Tensor) -> None: ...
    def missing(self) -> list[str]: ...
    def discard(self) -> None: ...


class WeightTarget(Protocol):
    """What weight synchronisation sees of an engine's weights; `batchgen.weights.WeightStore` is the real one."""

    @property
    def specs(self) -> Mapping[str, Any]: ...
    @property
    def version(self) -> int: ...
    def open(self, version: int) -> Stage: ...


@dataclass(slots=True)
class _Update:
    begin: m.Begin
    entries: list[m.TensorEntry]
    plan: list[BucketPlan]
    stage: Stage
    heard_at: float
    backlog: deque[tuple[m.Bucket, Any]] = field(default_factory=deque)
    next_part: int = 0
    num_received: int = 0
    num_staged: int = 0
    stage_s: float = 0.0
    assembly: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Bytes of a tensor that spans buckets, until it is whole; as large as the largest so far."""
    committing: bool = False


class WeightReceiver:
    """Stages one update at a time into `target` and hands it to `commit`, which is `engine.commit_weights`."""

    def __init__(
        self,
        target: WeightTarget,
        commit: Callable[[Any, m.Policy], None],
        clock: Callable[[], float] = time.monotonic,
        bucket_bytes: int = m.MIN_BUCKET_BYTES,
    ):
        self._target = target
        self._commit = commit
        self._clock = clock
        self._bucket_bytes = bucket_bytes
        self._update: _Update | None = None

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to stage."""
        return self._update is not None and bool(self._update.backlog)

    @property
    def busy(self) -> bool:
        """Whether an update is open."""
        return self._update is not None

    def handle(self, message: m.ToNode, data: Any = None) -> list[m.FromNode | tuple[m.Table, bytes]]:
        """Take in one message; the answers to send. A pair is a message and its bulk frame."""
        if isinstance(message, m.Describe):
            table = m.encode_table(m.table_of(self._target.specs))
            return [(m.Table(version=self._target.version, bucket_bytes=self._bucket_bytes), table)]
        if isinstance(message, m.Begin):
            return self._begin(message, data)
        update = self._update
        if update is None or update.begin.update != message.update:
            return [] if isinstance(message, m.Abort | m.Bucket) else [self._failed(message.update, "this update is not open here")]
        update.heard_at = self._clock()
        if isinstance(message, m.Bucket):
            return self._take(update, message, data)
        if isinstance(message, m.Commit):
            return self._swap(update)
        if not update.committing:
            self._drop()
        return []

    def work(self, slice_s: float) -> list[m.FromNode]:
        """Check and stage waiting buckets for about `slice_s` seconds; the answers to send."""
        update, out = self._update, list[m.FromNode]()
        if update is None:
            return out
        started, num_threads = self._clock(), torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # a copy is bound by memory: threads gain little, and waiting for one another costs far more on a busy host
        try:
            while update.backlog and (self._clock() - started < slice_s):
                if self._stage_part(update):
                    out.append(m.Ack(update=update.begin.update, count=update.num_staged))
            update.stage_s += self._clock() - started
            if update.num_staged == len(update.plan) and out:
                if missing := update.stage.missing():
                    raise WeightUpdateError(f"{len(missing)} tensors did not arrive: {', '.join(missing[:8])}")
                out.append(m.Prepared(update=update.begin.update))
        except WeightUpdateError as error:
            return [*out, self._give_up(update, error.message)]
        finally:
            torch.set_num_threads(num_threads)
        return out

    def committed(self, version: int, paused_s: float) -> list[m.FromNode]:
        """The engine reports WeightsCommitted; the answer to send."""
        update = self._update
        if update is None or update.begin.version != version:
            return []
        self._update = None
        report = m.NodeReport(stage_s=update.stage_s, paused_s=paused_s)
        return [m.Committed(update=update.begin.update, version=version, nodes=(report,))]

    def expire(self) -> list[m.FromNode]:
        """Drop an update that the service seems to have forgotten. Call now and then."""
        update = self._update
        if update is None or update.committing or self._clock() < update.heard_at + SILENCE_S:
            return []
        return [self._give_up(update, f"the service was silent for {SILENCE_S:g} s in the middle of an update")]

    def reset(self) -> None:
        """The connection to the service was lost: drop an update that was not committed."""
        if self._update is not None and not self._update.committing:
            self._drop()

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def _begin(self, begin: m.Begin, table: Any) -> list[m.FromNode | tuple[m.Table, bytes]]:
        try:
            if self._update is not None:
                if self._update.committing:
                    raise WeightUpdateError(f"version {self._update.begin.version} is being committed", retryable=True)
                self._drop()  # the service has given it up, else it would not begin another
            entries = m.decode_table(table)
            if faults := find_faults(entries, self._target.specs):
                return [m.Failed(update=begin.update, version=self._target.version, reasons=m.short(faults))]
            plan = plan_buckets(entries, begin.bucket_bytes)
            self._update = _Update(begin, entries, plan, self._target.open(begin.version), self._clock())
        except WeightUpdateError as error:
            return [self._failed(begin.update, error.message)]
        return [m.Ready(update=begin.update, window=m.MAX_WINDOW)]

    def _take(self, update: _Update, bucket: m.Bucket, data: Any) -> list[m.FromNode | tuple[m.Table, bytes]]:
        due = update.num_received
        if bucket.index != due or due >= len(update.plan) or data is None or len(data) != update.plan[due].num_bytes:
            size = "no" if data is None else len(data)
            return [self._give_up(update, f"bucket {bucket.index} of {size} bytes is not what the table says comes next")]
        if len(update.backlog) >= BACKLOG_BUCKETS:
            return [self._give_up(update, f"more than {BACKLOG_BUCKETS} buckets came without waiting for an ack")]
        update.num_received += 1
        update.backlog.append((bucket, data))
        return []

    def _stage_part(self, update: _Update) -> bool:
        """Stage the next tensor or piece; True when its bucket is done."""
        bucket, data = update.backlog[0]
        frame, parts = memoryview(data), update.plan[update.num_staged].parts
        if update.next_part == 0 and (got := digest(frame)) != bucket.digest:
            raise WeightUpdateError(f"bucket {bucket.index} has digest {got:08x}, it was sent with {bucket.digest:08x}; push again")
        self._put(update, parts[update.next_part], frame)
        update.next_part += 1
        if update.next_part < len(parts):
            return False
        update.backlog.popleft()
        update.next_part = 0
        update.num_staged += 1
        return True

    def _put(self, update: _Update, part: Part, frame: memoryview) -> None:
        entry = update.entries[part.tensor]
        dtype = getattr(torch, entry.dtype)
        whole = entry.num_bytes
        if part.num_bytes == whole:
            flat = torch.frombuffer(frame, dtype=dtype, offset=part.start, count=whole // dtype.itemsize)
        else:
            if update.assembly.numel() < whole:
                update.assembly = torch.empty(whole, dtype=torch.uint8)
            piece = torch.frombuffer(frame, dtype=torch.uint8, offset=part.start, count=part.num_bytes)
            update.assembly[part.source : part.source + part.num_bytes] = piece
            if part.source + part.num_bytes < whole:
                return
            flat = update.assembly[:whole].view(dtype)
        update.stage.put(entry.name, flat.view(entry.shape))

    def _swap(self, update: _Update) -> list[m.FromNode | tuple[m.Table, bytes]]:
        if update.num_staged < len(update.plan):
            return [self._give_up(update, f"commit came after {update.num_staged} of {len(update.plan)} buckets")]
        try:
            self._commit(update.stage, update.begin.policy)
        except WeightUpdateError as error:
            return [self._give_up(update, error.message)]
        update.committing = True
        return []

    def _failed(self, update: str, reason: str) -> m.Failed:
        return m.Failed(update=update, version=self._target.version, reasons=m.short([reason]))

    def _give_up(self, update: _Update, reason: str) -> m.Failed:
        self._drop()
        return self._failed(update.begin.update, reason)

    def _drop(self) -> None:
        assert self._update is not None
        self._update.stage.discard()
        self._update = None
