"""A client written from rollout/PROTOCOL.md alone, with nothing but pyzmq and msgpack: what another language would do.

rollout serve --model batchgen/assets/tiny-moe &
python examples/foreign_client.py tcp://127.0.0.1:5757 "3 + 4 ="
"""

import array
import secrets
import sys
import time
from typing import Any

import msgpack
import zmq

PROTOCOL_VERSION = 1
DEADLINE_S = 120.0


class ForeignClient:
    """One session on one DEALER socket; blocking."""

    def __init__(self, url: str):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.connect(url)
        self.send({"type": "hello", "version": PROTOCOL_VERSION, "session": secrets.token_hex(16), "name": "foreign"})
        self.welcome, _ = self.receive("welcome")

    def close(self) -> None:
        error = {"code": "client_left", "message": "done", "retryable": False}
        self.send({"type": "bye", "error": error})
        self.socket.close()
        self.context.term()

    def send(self, header: dict[str, Any], *frames: bytes) -> None:
        self.socket.send_multipart([msgpack.packb(header), *frames])

    def receive(self, kind: str) -> tuple[dict[str, Any], list[bytes]]:
        """The next message of this type; pings are answered, a bye or reject ends the program."""
        ends = time.monotonic() + DEADLINE_S
        while (left := ends - time.monotonic()) > 0:
            if not self.socket.poll(left * 1000):
                break
            first, *frames = self.socket.recv_multipart()
            header = msgpack.unpackb(first)
            if header["type"] == kind:
                return header, frames
            if header["type"] == "ping":
                self.send({"type": "pong", "sent": header["sent"]})
            if header["type"] in ("bye", "reject"):
                raise SystemExit(f"the service says {header['type']}: {header['error']['message']}")
        raise SystemExit(f"no {kind} within {DEADLINE_S:g} s")

    def generate(self, prompts: list[str | list[int]], params: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Samples by prompt, each with its index, finish_reason, token ids, logprobs and text."""
        heads, ids, text = [], array.array("i"), b""
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                encoded = prompt.encode()
                text += encoded
                heads.append([number, "text", len(encoded), 0, secrets.randbits(63)])
            else:
                ids.extend(prompt)
                heads.append([number, "ids", len(prompt), 0, secrets.randbits(63)])
        self.send({"type": "submit", "requests": heads}, msgpack.packb([params]), ids.tobytes(), text)
        self.receive("accept")
        groups: list[list[dict[str, Any]]] = [[] for _ in prompts]
        missing = len(prompts) * params.get("n", 1)
        while missing:
            results, bodies = self.receive("results")
            self.send({"type": "ack", "seq": results["seq"]})
            for item, body in zip(results["items"], bodies, strict=True):
                if item["item"] == "sample":
                    groups[item["request"]].append(read_sample(item, body))
                    missing -= 1
        return [sorted(group, key=lambda sample: sample["index"]) for group in groups]


def read_sample(item: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Token ids, logprobs and text lie one after the other; without logprobs and routed experts asked for, nothing lies between them."""
    t, size = item["num_tokens"], item["text_bytes"]
    return {
        "index": item["index"],
        "finish_reason": item["finish_reason"],
        "token_ids": list(array.array("i", body[: 4 * t])),
        "logprobs": list(array.array("f", body[4 * t : 8 * t])),
        "text": body[len(body) - size :].decode(),
        "weights_versions": item["spans"],
        "error": item.get("error"),
    }


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5757"
    prompts: list[str | list[int]] = list(sys.argv[2:]) or [[1, 2, 3]]
    client = ForeignClient(url)
    for prompt, group in zip(prompts, client.generate(prompts, {"n": 2, "max_tokens": 24}), strict=True):
        for sample in group:
            print(f"{prompt!r} [{sample['index']}] {sample['finish_reason']}: {sample['text']!r} ({len(sample['token_ids'])} tokens)")
    client.close()


if __name__ == "__main__":
    main()
