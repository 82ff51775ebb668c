"""Who gets in: keys, roles, addresses, files."""

import asyncio
import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
from fake_engine import FakeEngine
from rollout_kit import RawPeer, in_loop, node, service, until

from batchgen.sampling_params import SamplingParams
from rollout import sockets
from rollout.client import AsyncRolloutClient
from rollout.errors import AdminError, ConnectError, SecurityError, ServiceLostError
from rollout.security import ALLOW_FILE, SERVER_FILE, ClientKeys, ServerKeys, check_bind, is_local, make_keys, run_folder
from rollout.service import ServiceConfig


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A key folder with one file per role."""
    folder = tmp_path / "keys"
    for role in ("submit", "node", "admin", "metrics"):
        make_keys(folder, role, [role])
    make_keys(folder, "trainer", ["submit", "admin"])
    return folder


def secured(folder: Path):
    return service(keys=ServerKeys.load(folder))


def load(folder: Path, name: str) -> ClientKeys:
    return ClientKeys.load(folder / f"{name}.json")


@in_loop
async def test_with_the_right_keys_everything_works(keys):
    async with (
        secured(keys) as one,
        node(one, keys=load(keys, "node")),
        AsyncRolloutClient(one.url, keys=keys / "trainer.json") as client,
    ):
        (group,) = await client.generate([[1]], SamplingParams(max_tokens=2))
        assert group.samples[0].finish_reason == "length"
        await client.pause()
        await client.resume()


async def silent(url: str, setup=None) -> bool:
    """Whether a hello of a peer set up like this gets no answer at all."""
    with RawPeer(url, setup=setup) as raw:
        raw.hello()
        raw.send(msgspec.msgpack.encode({"type": "get_health", "call": 1}))
        return await raw.frames(0.5) is None


@pytest.mark.parametrize("plane", ["url", "admin_url"])
@in_loop
async def test_a_peer_without_keys_gets_nowhere(keys, plane):
    async with secured(keys) as one:
        assert await silent(getattr(one, plane))
        assert one.stats().clients == 0


def curve(server: bytes, public: bytes, secret: bytes):
    def setup(socket: zmq.Socket) -> None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret

    return setup


@pytest.mark.parametrize("plane", ["url", "admin_url"])
@in_loop
async def test_an_unknown_key_gets_nowhere_and_is_counted(keys, plane):
    async with secured(keys) as one:
        public, secret = zmq.curve_keypair()
        assert await silent(getattr(one, plane), curve(load(keys, "submit").server, public, secret))
        assert one.stats().counters["handshakes_refused"] > 0 and one.stats().clients == 0


@pytest.mark.parametrize(("plane", "name"), [("url", "admin"), ("url", "metrics"), ("admin_url", "submit"), ("admin_url", "node")])
@in_loop
async def test_a_key_of_the_other_plane_gets_nowhere(keys, plane, name):
    async with secured(keys) as one:
        wrong = load(keys, name)
        assert await silent(getattr(one, plane), curve(wrong.server, wrong.public, wrong.secret))
        assert one.stats().clients == 0


@in_loop
async def test_a_node_key_cannot_submit_and_a_submit_key_cannot_be_a_node(keys):
    async with secured(keys) as one:
        with pytest.raises(ConnectError) as caught:
            async with AsyncRolloutClient(one.url, keys=load(keys, "node"), connect_timeout_s=3):
                pass
        assert caught.value.code == "forbidden"
        with pytest.raises(ConnectError) as caught:
            async with node(one, FakeEngine, keys=load(keys, "submit")):
                pass
        assert caught.value.code == "forbidden" and one.stats().counters["refused_roles"] == 2


@in_loop
async def test_a_metrics_key_may_read_and_nothing_else(keys):
    async with secured(keys) as one:
        metrics = load(keys, "metrics")
        with RawPeer(one.admin_url, setup=curve(metrics.server, metrics.public, metrics.secret)) as raw:
            raw.send(msgspec.msgpack.encode({"type": "get_stats", "call": 1}))
            assert (await raw.expect("admin_answer"))["call"] == 1
            for call, kind in enumerate(("pause", "resume", "abort_all", "shutdown")):
                raw.send(msgspec.msgpack.encode({"type": kind, "call": call}))
                failure = await raw.expect("failure")
                assert failure["call"] == call and failure["error"]["code"] == "forbidden"
            raw.send(msgspec.msgpack.encode({"type": "describe"}))
            assert "role" in (await raw.expect("failed"))["reasons"][0]
        assert one.health().paused_s is None


@in_loop
async def test_a_client_without_the_admin_role_gets_a_typed_error_in_time(keys, monkeypatch):
    monkeypatch.setattr("rollout.client.ADMIN_TIMEOUT_S", 0.5)
    async with secured(keys) as one, AsyncRolloutClient(one.url, keys=load(keys, "submit")) as client:
        with pytest.raises((ServiceLostError, AdminError)):
            await client.pause()


@in_loop
async def test_a_session_cannot_be_taken_over_with_another_key(keys):
    make_keys(keys, "thief", ["submit"])
    async with secured(keys) as one:
        owner, thief = load(keys, "submit"), load(keys, "thief")
        with (
            RawPeer(one.url, setup=curve(owner.server, owner.public, owner.secret)) as first,
            RawPeer(one.url, setup=curve(thief.server, thief.public, thief.secret)) as second,
        ):
            first.hello("a" * 32)
            await first.expect("welcome")
            second.hello("a" * 32)
            assert (await second.expect("bye"))["error"]["code"] == "forbidden"
            first.hello("a" * 32)
            assert (await first.expect("welcome"))["resumed"] is True


# ---- addresses ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "tcp://localhost:1", "ipc:///tmp/x", "tcp://[::1]:1"])
def test_local_addresses_need_no_keys(url):
    assert is_local(url)
    check_bind(url, None, allow_remote=False)


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://eth0:1", "tcp://[::]:1", "tcp://example.org:1", "ws://127.0.0.1:1"]
)
def test_other_addresses_need_keys_and_a_flag(url, keys):
    assert not is_local(url)
    server = ServerKeys.load(keys)
    with pytest.raises(SecurityError, match="keys"):
        check_bind(url, None, allow_remote=True)
    with pytest.raises(SecurityError, match="--allow-remote"):
        check_bind(url, server, allow_remote=False)
    check_bind(url, server, allow_remote=True)


@pytest.mark.parametrize("field", ["url", "admin_url", "node_url"])
def test_a_service_cannot_be_configured_to_listen_to_others_without_keys(field):
    with pytest.raises(SecurityError):
        ServiceConfig(**{field: "tcp://0.0.0.0:0"})


@in_loop
async def test_an_address_in_use_is_a_clear_error_and_leaves_nothing_open():
    async with service() as one:
        for options in ({"url": one.url}, {"admin_url": one.url}):
            with pytest.raises(sockets.AddressInUseError, match="already taken"):
                async with service(**options):
                    pass
    async with service(url=one.url):
        pass


@pytest.mark.parametrize("url", ["nonsense", "tcp://127.0.0.1:99999999", "http://127.0.0.1:1", "ipc://"])
@in_loop
async def test_an_address_that_is_none_is_a_typed_error(url):
    with pytest.raises(sockets.BadAddressError):
        async with AsyncRolloutClient(url, connect_timeout_s=0.2):
            pass


# ---- files --------------------------------------------------------------------------------------------------------------------


def test_key_files_are_readable_by_their_owner_only(keys):
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for file in keys.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_others_can_read_is_refused(keys, mode):
    (keys / "submit.json").chmod(mode)
    with pytest.raises(SecurityError, match="chmod 600"):
        load(keys, "submit")
    (keys / ALLOW_FILE).chmod(mode)
    with pytest.raises(SecurityError, match="chmod 600"):
        ServerKeys.load(keys)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"public": 1, "secret": 2}', b'{"public": "a", "secret": "b", "more": 1}', b"\xff"])
def test_a_malformed_key_file_is_a_typed_error(keys, content):
    (keys / SERVER_FILE).write_bytes(content)
    with pytest.raises(SecurityError, match="not a key file"):
        ServerKeys.load(keys)


def test_a_missing_key_file_says_how_to_make_one(tmp_path):
    with pytest.raises(SecurityError, match="rollout keys"):
        ClientKeys.load(tmp_path / "none.json")


def test_making_a_key_never_overwrites_one(keys):
    before = (keys / "submit.json").read_bytes()
    for name in ("submit", "server", "allow"):
        with pytest.raises(SecurityError):
            make_keys(keys, name, ["submit"])
    assert (keys / "submit.json").read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_a_keys_name_cannot_leave_its_folder(keys, name):
    with pytest.raises(SecurityError, match="name"):
        make_keys(keys, name, ["submit"])


def test_keys_do_not_show_in_reprs(keys):
    secret = load(keys, "submit").secret.decode()
    assert secret not in repr(load(keys, "submit")) and secret not in str(load(keys, "submit"))
    server = ServerKeys.load(keys)
    assert server.secret.decode() not in repr(ServiceConfig(keys=server))


def test_run_folders_are_private_unpredictable_and_removed():
    with run_folder() as one, run_folder() as other:
        assert one != other and stat.S_IMODE(one.stat().st_mode) == 0o700
        (one / "file").write_text("x")
    assert not one.exists() and not os.path.exists(other)


@in_loop
async def test_a_socket_used_from_another_thread_is_refused():
    async with service() as one:
        with pytest.raises(RuntimeError, match="thread"):
            await asyncio.to_thread(one.send_frames, b"x", [b"y"])


@in_loop
async def test_an_error_in_a_handler_is_reported_and_the_messages_behind_it_are_read():
    reported, seen = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def on_message(_peer, frames):
        seen.append(frames[0].bytes)
        if len(seen) == 1:
            raise ValueError("bug")

    context = zmq.Context()
    socket = sockets.router(context, "tcp://127.0.0.1:0", keys=None, zap_domain="x")
    channel = sockets.Channel(socket, outbox_bytes=1000, on_message=on_message, on_trouble=lambda *_: None)
    with RawPeer(socket.getsockopt_string(zmq.LAST_ENDPOINT)) as raw:
        for number in b"abc":
            raw.send(bytes([number]))
        await until(lambda: len(seen) == 3)
    channel.close()
    context.term()
    assert seen == [b"a", b"b", b"c"] and [type(error) for error in reported] == [ValueError]


def test_no_module_can_decode_code():
    """R1: no pickle-like decoder anywhere in the packages."""
    import ast

    import rollout

    forbidden = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "eval", "exec", "recv_pyobj", "send_pyobj"}
    for package in ("rollout", "weights_sync"):
        for file in (Path(rollout.__path__[0]).parent / package).rglob("*.py"):
            for part in ast.walk(ast.parse(file.read_text())):
                names = {part.id} if isinstance(part, ast.Name) else {part.attr} if isinstance(part, ast.Attribute) else set()
                if isinstance(part, ast.Import | ast.ImportFrom):
                    names = {alias.name.partition(".")[0] for alias in part.names} | {
                        (getattr(part, "module", None) or "").partition(".")[0]
                    }
                assert not names & forbidden, f"{file}:{part.lineno} uses {names & forbidden}"


def test_sockets_are_made_in_one_place():
    """Only sockets.py makes ZeroMQ sockets for the service, nodes and clients."""
    import rollout

    folder = Path(rollout.__path__[0])
    makers = [file.name for file in folder.glob("*.py") if ".socket(" in file.read_text()]
    assert makers == ["sockets.py"]
