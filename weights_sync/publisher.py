"""The trainer's end of a weight update. In: named tensors and a version. Out: a report once every node serves them, or a typed error."""

import ctypes
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync.channel import Channel, HasAdminChannel
from weights_sync.manifest import BucketPlan, digest, plan_buckets
from weights_sync.mapping import Pick, resolve
from weights_sync.sources import Source, Weights, open_source

SILENCE_S = 10.0
"""The service sends a sign of life every 2 s; after this long without one it is taken for dead."""
SWAP_S = 60.0
"""Longest wait beyond `timeout_s`: the service's own deadline for nodes to swap is shorter."""

_decoder = m.Decoder(m.ToPublisher | m.Refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a successful push did. Times in seconds."""

    version: int
    num_tensors: int
    num_bytes: int
    """As sent, after conversion to the engine's dtypes."""
    total_s: float
    check_s: float
    """Until every node had agreed to the names and shapes."""
    transfer_s: float
    """Until every bucket was staged on every node."""
    commit_s: float
    """Waiting for running samples (policy finish) and for the swap."""
    nodes: tuple[m.NodeReport, ...]
    lost: tuple[str, ...]
    """Nodes that failed after the decision and serve nothing until the next update."""

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / self.total_s


class WeightPublisher:
    """Pushes weights through a client's admin channel; one push at a time.

    `client` is anything with `open_admin_channel()`, as `RolloutClient` has.
    """

    def __init__(self, client: HasAdminChannel):
        self._client = client

    def push(self, weights: Weights, version: int, policy: m.Policy = "finish", *, timeout_s: float = 300.0) -> PushReport:
        """Make every node serve `weights` as `version`, or change nothing.

        `weights`: a module (its state_dict), a {name: tensor} dict, (name, tensor) pairs, or a safetensors file or folder; names as in the
        Hugging Face checkpoint or with a trainer's prefixes. `version` must be greater than the one that serves. `timeout_s` covers all,
        waiting for running samples (policy `finish`) included. The tensors must not change until push returns.

        While generation is paused, `finish` is refused at once if samples are running (code `paused`): they are held and cannot end.
        Push between pause and resume with `continue` (they go on under the new weights) or `abort`, or with `finish` when nothing runs.

        Raises WeightUpdateError; the old version then serves, and its message lists what was wrong.
        """
        source = open_source(weights)
        channel = self._client.open_admin_channel()
        try:
            return _Push(channel, source, version, policy, timeout_s).run()
        finally:
            channel.close()


class _Push:
    def __init__(self, channel: Channel, source: Source, version: int, policy: m.Policy, timeout_s: float):
        if not 0 < timeout_s <= m.MAX_TIMEOUT_S:
            raise WeightUpdateError(f"timeout_s is in (0, {m.MAX_TIMEOUT_S:g}], got {timeout_s}")
        if policy not in ("finish", "abort", "continue"):
            raise WeightUpdateError(f"policy is finish, abort or continue, got {policy!r}")
        if not 0 <= version < 1 << 62:
            raise WeightUpdateError(f"version is a whole number from 0 up, got {version}")
        self._channel = channel
        self._source = source
        self._version = version
        self._policy = policy
        self._timeout_s = timeout_s
        self._update = m.new_update_id()
        self._over = False
        """Whether the service has ended the update."""
        self._acked = 0
        self._acked_at = 0.0
        self._ends_at = time.monotonic() + timeout_s + SWAP_S

    def run(self) -> PushReport:
        started = time.monotonic()
        self._send(m.Describe())
        table, specs_frame = self._wait(m.Table)
        if (version := self._version) <= table.version:
            raise WeightUpdateError(f"version {version} is not greater than {table.version}, which serves now; number the pushes upwards")
        picks, entries = self._match({entry.name: entry for entry in m.decode_table(specs_frame)})
        bucket_bytes = _bucket_bytes(sum(entry.num_bytes for entry in entries), table.bucket_bytes)
        plan = plan_buckets(entries, bucket_bytes)
        begin = m.Begin(
            update=self._update, version=self._version, policy=self._policy, timeout_s=self._timeout_s, bucket_bytes=bucket_bytes
        )
        try:
            self._send(begin, m.encode_table(entries))
            ready, _ = self._wait(m.Ready)
            checked = time.monotonic()
            self._send_buckets(picks, entries, plan, ready.window)
            self._send(m.Commit(update=self._update))
        except BaseException as error:
            self._abort(error)
            raise
        done, _ = self._wait(m.Committed)
        ended = time.monotonic()
        return PushReport(
            version=self._version,
            num_tensors=len(entries),
            num_bytes=sum(entry.num_bytes for entry in entries),
            total_s=ended - started,
            check_s=checked - started,
            transfer_s=self._acked_at - checked,
            commit_s=ended - self._acked_at,
            nodes=done.nodes,
            lost=done.lost,
        )

    def _match(self, specs: Mapping[str, m.TensorEntry]) -> tuple[list[Pick], list[m.TensorEntry]]:
        """What to send, in which dtype: the engine's, unless the trainer's is smaller."""
        result = resolve(self._source.shapes, specs)
        if result.faults:
            count = "1 fault" if len(result.faults) == 1 else f"{len(result.faults)} faults"
            raise WeightUpdateError(f"{count}: " + "; ".join(m.short(result.faults)))
        for second, first in result.must_equal:
            a, b = self._source.get(first), self._source.get(second)
            if a.data_ptr() != b.data_ptr() and not torch.equal(a, b.to(a)):
                raise WeightUpdateError(f"{first} and {second} are tied in this model but differ; push equal ones or leave {second} out")
        entries = []
        for pick in result.picks:
            spec, own = specs[pick.name], self._source.dtypes[pick.source]
            smaller = own.itemsize < m.DTYPE_BYTES[spec.dtype]
            dtype = cast(m.WireDtype, str(own).removeprefix("torch.")) if smaller else spec.dtype
            entries.append(m.TensorEntry(pick.name, spec.shape, dtype))
        return result.picks, entries

    def _send_buckets(self, picks: Sequence[Pick], entries: Sequence[m.TensorEntry], plan: Sequence[BucketPlan], window: int) -> None:
        packer = _Packer(self._source, picks, entries, max((bucket.num_bytes for bucket in plan), default=0))
        for index, bucket in enumerate(plan):
            while index - self._acked >= window:
                self._wait(m.Ack)
            packer.release(self._acked)
            frame = packer.pack(bucket)
            self._send(m.Bucket(update=self._update, index=index, digest=digest(frame)), frame)
            while self._poll(m.Ack, 0.0):
                pass

    # ---- conversation ---------------------------------------------------------------------------------------------------

    def _send(self, message: m.FromPublisher, data: Any = None) -> None:
        self._channel.send([m.encode(message)] if data is None else [m.encode(message), data], SILENCE_S)

    def _abort(self, error: BaseException) -> None:
        """Tell the service, if it still listens, so that nodes free their staging memory at once."""
        if self._over:
            return
        with suppress(WeightUpdateError):
            reason = m.short([f"{type(error).__name__}: {error}"])[0]
            self._channel.send([m.encode(m.Abort(update=self._update, reason=reason))], 0.0)

    def _wait(self, kind: type[Any]) -> tuple[Any, Any]:
        """The next message of this kind; signs of life are skipped, bad news is raised."""
        deadline = time.monotonic() + SILENCE_S
        while (left := deadline - time.monotonic()) > 0:
            if found := self._poll(kind, left):
                if isinstance(found[0], kind):
                    return found
                deadline = min(time.monotonic() + SILENCE_S, self._ends_at)
        raise WeightUpdateError(
            f"the service was silent for {SILENCE_S:g} s; version {self._version} may or may not be live: ask client.health()",
            code="service_lost",
            retryable=True,
        )

    def _poll(self, kind: type[Any], timeout_s: float) -> tuple[Any, Any] | None:
        frames = self._channel.recv(timeout_s)
        if frames is None:
            return None
        message = _decoder.decode(frames[0])
        if isinstance(message, m.Failed):
            self._over = True
            raise WeightUpdateError("; ".join(message.reasons), code=message.code, retryable=message.retryable)
        if isinstance(message, m.Refused):
            raise WeightUpdateError(message.error.message, code=message.error.code, retryable=message.error.retryable)
        if isinstance(message, m.Ack):
            self._acked, self._acked_at = message.count, time.monotonic()
        elif not isinstance(message, kind | m.Progress):
            raise WeightUpdateError(f"the service said {type(message).__name__} where {kind.__name__} was due", code="protocol_error")
        return message, frames[1] if len(frames) > 1 else None


def _bucket_bytes(total: int, most: int) -> int:
    """Small models go in about eight buckets, so that packing, transfer and staging overlap; large ones in the service's size."""
    return min(most, -(-total // (8 * m.MIN_BUCKET_BYTES)) * m.MIN_BUCKET_BYTES)


class _Packer:
    """Copies tensors into bucket memory, converting and gathering on the way. Memory of acknowledged buckets is used again, the latest
    first: what is in the cache is fast, and fresh memory costs page faults."""

    def __init__(self, source: Source, picks: Sequence[Pick], entries: Sequence[m.TensorEntry], bucket_bytes: int):
        self._source = source
        self._picks = picks
        self._entries = entries
        self._bucket_bytes = bucket_bytes
        self._used = deque[torch.Tensor | None]()
        """None: the frame is the trainer's own memory."""
        self._free = list[torch.Tensor]()
        self._num_released = 0
        self._held: tuple[str, torch.Tensor] | None = None

    def release(self, num_acked: int) -> None:
        """The first `num_acked` buckets have arrived: their memory may be overwritten."""
        while self._num_released < num_acked:
            self._num_released += 1
            if (memory := self._used.popleft()) is not None:
                self._free.append(memory)

    def pack(self, bucket: BucketPlan) -> memoryview:
        """The bucket's frame; valid until it is released."""
        if (lying := self._in_place(bucket)) is not None:
            self._used.append(None)
            return lying
        memory = self._free.pop() if self._free else torch.empty(self._bucket_bytes, dtype=torch.uint8, pin_memory=self._source.on_gpu)
        self._used.append(memory)
        devices, start = set(), memory.data_ptr()
        for part in bucket.parts:
            entry, pick = self._entries[part.tensor], self._picks[part.tensor]
            whole = self._get(pick.source)
            tensor = whole[pick.index] if pick.index else whole
            dtype: torch.dtype = getattr(torch, entry.dtype)
            if tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_cuda:
                # Torch would split it over threads, which wait for each other for longer than it takes, and needs six views a tensor.
                ctypes.memmove(start + part.start, tensor.data_ptr() + part.source, part.num_bytes)
                continue
            target = memory[part.start : part.start + part.num_bytes]
            if part.num_bytes == entry.num_bytes:
                target.view(dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            else:
                first = part.source // dtype.itemsize
                target.view(dtype).copy_(self._flat(pick)[first : first + part.num_bytes // dtype.itemsize], non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return memoryview(cast(Any, memory.numpy()))[: bucket.num_bytes]

    def _in_place(self, bucket: BucketPlan) -> memoryview | None:
        """The bucket where it lies in the trainer's memory, if it does: a piece of a large tensor, or neighbours such as a stack of
        experts. Saves the copy; the frame keeps the tensors alive."""
        last = bucket.parts[-1]
        if not self._source.in_memory or last.start + last.num_bytes != bucket.num_bytes:
            return None
        tensors, first, used = list[torch.Tensor](), 0, 0
        for part in bucket.parts:
            pick = self._picks[part.tensor]
            whole = self._source.get(pick.source)
            tensor = whole[pick.index] if pick.index else whole
            at = tensor.data_ptr() + part.source
            first = first or at
            if at != first + part.start or part.start != used or tensor.is_cuda or not tensor.is_contiguous():
                return None
            if tensor.dtype != getattr(torch, self._entries[part.tensor].dtype):
                return None
            tensors.append(tensor)
            used += part.num_bytes
        block: Any = (ctypes.c_ubyte * used).from_address(first)
        block.tensors = tensors
        return memoryview(block)

    def _get(self, name: str) -> torch.Tensor:
        """The trainer's tensor; the last one is kept, so that a stacked tensor of a folder is read once."""
        if self._held is None or self._held[0] != name:
            self._held = (name, self._source.get(name))
        return self._held[1]

    def _flat(self, pick: Pick) -> torch.Tensor:
        """A tensor that spans buckets in one dimension; made contiguous once."""
        tensor = self._get(pick.source)[pick.index]
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            if not pick.index:
                self._held = (pick.source, tensor)
        return tensor.view(-1)
