"""Memory of a service with a long queue. In: options. Out: a table and, last, one JSON line.

Sessions that speak the wire protocol directly (a Python client object per request would weigh more than the queue) submit short
requests to a paused service until all are accepted; then the service's resident memory is read, and again after the clients have left.

    python benchmarks/queued_memory.py               # a million requests; the target is under 2 GB in the service
"""

import argparse
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import psutil
import zmq
from serving import BUNDLED_MODEL, serving

from batchgen import SamplingParams
from rollout import RolloutClient, limits, sockets, wire
from rollout.batches import Batch, encode_ids, encode_params, prompt_length

PING_S = 5.0


class Session:
    """One client connection that remembers nothing but counts."""

    def __init__(self, context: "zmq.Context[Any]", url: str):
        self._socket = sockets.dealer(context, url, keys=None)
        self._decoder = wire.HeaderDecoder(wire.ToClient)
        self._pinged_at = time.monotonic()
        self.credits = self.submitted = self.accepted = 0
        self._send([wire.encode(wire.Hello(version=limits.PROTOCOL_VERSION, session=secrets.token_hex(16), name="queued_memory"))])
        while not self.credits:
            self.receive(1000)

    def submit(self, count: int, prompt: bytes, params: bytes) -> None:
        batch, heads = Batch(), []
        for _ in range(count):
            index = batch.add("ids", prompt, params)
            if index is None:
                self._send([wire.encode(wire.Submit(requests=heads)), *batch.frames()])
                batch, heads = Batch(), []
                index = batch.add("ids", prompt, params)
            assert index is not None
            length = prompt_length("ids", prompt)
            heads.append(wire.RequestHead(id=self.submitted, kind="ids", length=length, params=index, seed_base=self.submitted))
            self.submitted += 1
        self._send([wire.encode(wire.Submit(requests=heads)), *batch.frames()])

    def receive(self, wait_ms: int) -> None:
        """Take what has come; raise when the service refuses anything."""
        if time.monotonic() - self._pinged_at > PING_S:
            self._pinged_at = time.monotonic()
            self._send([wire.encode(wire.Ping(sent=self._pinged_at))])
        while self._socket.poll(wait_ms):
            wait_ms = 0
            message = self._decoder.decode(self._socket.recv_multipart()[0])
            if isinstance(message, wire.Welcome):
                self.credits = message.credits
            elif isinstance(message, wire.Accept):
                self.accepted += len(message.requests)
            elif isinstance(message, wire.Reject | wire.Bye):
                raise SystemExit(f"the service refused: {message.error.message}")

    def close(self) -> None:
        self._send([wire.encode(wire.Bye(error=wire.ErrorInfo(code="client_left", message="measured")))])
        self._socket.close(linger=1000)

    def _send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    options = parser.parse_args()
    prompt = encode_ids([7] * options.prompt_tokens)
    params = encode_params(SamplingParams(max_tokens=16))
    context: zmq.Context[Any] = zmq.Context()
    with serving(options.model, "--kv-gb", "0.05", "--num-threads", "1") as served, RolloutClient(served.url) as client:
        process = psutil.Process(served.pid)
        client.pause()
        before = process.memory_info().rss
        start = time.monotonic()
        sessions: list[Session] = []
        left = options.requests
        while left:
            session = Session(context, served.url)
            sessions.append(session)
            session.submit(min(left, session.credits), prompt, params)
            left -= session.submitted
            while session.accepted < session.submitted:
                session.receive(100)
            for other in sessions:
                other.receive(0)
        submit_s = time.monotonic() - start
        full, stats = process.memory_info().rss, client.stats()
        for session in sessions:
            session.close()
        deadline = time.monotonic() + 60
        while client.stats().open_requests and time.monotonic() < deadline:
            time.sleep(0.5)
        after, empty = process.memory_info().rss, client.stats()
    context.term()
    print(f"{options.requests} requests of {options.prompt_tokens} tokens from {len(sessions)} sessions, accepted in {submit_s:.1f} s")
    print(f"{'':24}{'RSS MB':>10}{'open requests':>16}")
    for name, rss, requests in [("before", before, 0), ("queued", full, stats.open_requests), ("clients gone", after, empty.open_requests)]:
        print(f"{name:24}{rss / 1e6:10.0f}{requests:16}")
    result = {
        "benchmark": "queued_memory",
        "requests": options.requests,
        "prompt_tokens": options.prompt_tokens,
        "open_requests": stats.open_requests,
        "rss_before_bytes": before,
        "rss_bytes": full,
        "bytes_per_request": (full - before) / options.requests,
        "rss_after_bytes": after,
        "submit_s": submit_s,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
