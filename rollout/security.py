"""Who may connect and who may do what. In: key files, bind addresses. Out: CURVE keys, ZAP allow-lists by role, run folders.

Loopback and ipc sockets may run without keys: everybody who can reach them is this machine's own. Anything else needs CURVE keys, an
allow-list and an explicit flag. Checks raise; nothing here is an assert.
"""

import ipaddress
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import zmq

from rollout.errors import SecurityError

Role = Literal["submit", "node", "admin", "metrics"]
ROLES: tuple[Role, ...] = ("submit", "node", "admin", "metrics")
PUBLIC_DOMAIN = "public"
ADMIN_DOMAIN = "admin"
DOMAIN_ROLES: dict[str, frozenset[Role]] = {
    PUBLIC_DOMAIN: frozenset(("submit", "node")),
    ADMIN_DOMAIN: frozenset(("admin", "metrics")),
}
ALL_ROLES: frozenset[Role] = frozenset(ROLES)
MAX_KEY_FILE_BYTES = 1024 * 1024
SERVER_FILE = "server.json"
ALLOW_FILE = "allow.json"


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    public: str
    roles: list[Role]


class _ServerFile(msgspec.Struct, forbid_unknown_fields=True):
    public: str
    secret: str


class _ClientFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    server: str
    public: str
    secret: str


@dataclass(frozen=True, slots=True, repr=False)
class ClientKeys:
    """What a client or node needs: the server's public key and its own pair (Z85)."""

    server: bytes
    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | Path) -> "ClientKeys":
        """Read a file made by `rollout keys`. SecurityError when it is missing, malformed or readable by others."""
        file = _read(Path(path), _ClientFile)
        return cls(file.server.encode(), file.public.encode(), file.secret.encode())


@dataclass(frozen=True, slots=True, repr=False)
class ServerKeys:
    """The service's pair and who may come in with which roles."""

    public: bytes
    secret: bytes
    roles_of: dict[str, frozenset[Role]]
    """Z85 public key → roles."""

    @classmethod
    def load(cls, folder: str | Path) -> "ServerKeys":
        """Read server.json and allow.json from a folder made by `rollout keys`."""
        pair = _read(Path(folder) / SERVER_FILE, _ServerFile)
        allowed = _read(Path(folder) / ALLOW_FILE, list[_Allowed])
        return cls(pair.public.encode(), pair.secret.encode(), {entry.public: frozenset(entry.roles) for entry in allowed})


def make_keys(folder: Path, name: str, roles: Iterable[Role]) -> Path:
    """Make a client's key file in folder (and the server's on first use) and add it to the allow-list. Returns the client's file."""
    roles = list(roles)
    if not roles:
        raise SecurityError(f"key {name!r} has no role; give at least one of {', '.join(ROLES)}")
    if not name.isidentifier() and not name.replace("-", "_").isidentifier():
        raise SecurityError(f"a key's name consists of letters, digits, - and _, got {name!r}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    server_path, allow_path, client_path = folder / SERVER_FILE, folder / ALLOW_FILE, folder / f"{name}.json"
    if client_path.exists() or client_path in (server_path, allow_path):
        raise SecurityError(f"{client_path} exists already; choose another name or remove it first")
    if not server_path.exists():
        public, secret = zmq.curve_keypair()
        _write(server_path, _ServerFile(public.decode(), secret.decode()))
    server = _read(server_path, _ServerFile)
    allowed = _read(allow_path, list[_Allowed]) if allow_path.exists() else []
    public, secret = zmq.curve_keypair()
    _write(client_path, _ClientFile(name, server.public, public.decode(), secret.decode()))
    _write(allow_path, [*allowed, _Allowed(name, public.decode(), roles)])
    return client_path


class Gate:
    """The ZAP handler of one context: CURVE keys by domain and role. Without keys there is no handler and every peer has every role."""

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys | None):
        self._keys = keys
        self._authenticator: Any = None
        self.refused = 0
        """Handshakes with an unknown key or one without a role of that plane."""
        if keys is not None:
            from zmq.auth.asyncio import AsyncioAuthenticator  # slow to import, and clients read key files with this module

            self._authenticator = AsyncioAuthenticator(context)
            for domain, roles in DOMAIN_ROLES.items():
                self._authenticator.configure_curve_callback(domain, credentials_provider=_Provider(self, keys, roles))
            self._authenticator.start()

    def user(self, frame: zmq.Frame) -> str:
        """Public key of the sender (Z85); empty without keys."""
        if self._keys is None:
            return ""
        user = frame.get("User-Id")
        return user if isinstance(user, str) else ""

    def roles(self, user: str) -> frozenset[Role]:
        """Roles of a sender; none by default."""
        return ALL_ROLES if self._keys is None else self._keys.roles_of.get(user, frozenset())

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class _Provider:
    """Answers libzmq's question whether a key may come in."""

    def __init__(self, gate: Gate, keys: ServerKeys, roles: frozenset[Role]):
        self._gate, self._keys, self._roles = gate, keys, roles

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = bool(self._keys.roles_of.get(key.decode("ascii", "replace"), frozenset()) & self._roles)
        if not allowed:
            self._gate.refused += 1
        return allowed


def is_local(url: str) -> bool:
    """Whether an address can only be reached from this machine."""
    parts = urlsplit(url)
    if parts.scheme in ("ipc", "inproc"):
        return True
    try:
        return parts.scheme == "tcp" and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def check_bind(url: str, keys: ServerKeys | None, allow_remote: bool) -> None:
    """SecurityError unless url is local, or keys were given and remote peers were allowed explicitly."""
    if is_local(url):
        return
    if keys is None:
        raise SecurityError(f"{url} can be reached from other machines and needs CURVE keys: use `rollout keys`, or bind 127.0.0.1")
    if not allow_remote:
        raise SecurityError(f"{url} can be reached from other machines; say so with --allow-remote or bind 127.0.0.1")


@contextmanager
def run_folder() -> Iterator[Path]:
    """A private (0700) folder with an unpredictable name, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="rollout-") as name:
        yield Path(name)


def _read(path: Path, kind: Any) -> Any:
    try:
        info = path.stat()
        if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SecurityError(f"{path} can be read by others (mode {stat.S_IMODE(info.st_mode):o}); run chmod 600 on it")
        if info.st_uid != os.geteuid():
            raise SecurityError(f"{path} belongs to another user; use key files of your own")
        if info.st_size > MAX_KEY_FILE_BYTES:
            raise SecurityError(f"{path} has {info.st_size} bytes, a key file has at most {MAX_KEY_FILE_BYTES}")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise SecurityError(f"cannot read key file {path}: {error.strerror}; make keys with `rollout keys`") from None
    except msgspec.MsgspecError as error:
        raise SecurityError(f"{path} is not a key file: {error}") from None


def _write(path: Path, value: Any) -> None:
    """Write atomically; the file is never readable by others, not even for a moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
