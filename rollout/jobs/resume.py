"""Whether a job may start, go on, or must refuse. In: its configuration and files. Out: a lock and a manifest. Never reads rows."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout.jobs.errors import JobRefused
from rollout.jobs.journal import replace_file

ResumeMode = Literal["never", "auto", "must"]


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the rows of an output file have in common. Flat values only, so that a difference names a field."""

    format: int = 1
    input_digest: str
    num_rows: int
    engine_version: str
    seed: int
    dedupe: str
    sampling: dict[str, Any]
    """Command-line sampling fields in canonical form."""
    model: str | None = None
    model_fingerprint: str | None = None
    dtype: str | None = None
    deterministic: bool | None = None


def sibling(output: Path, ending: str) -> Path:
    """`out.jsonl` and `manifest.json` → `out.manifest.json` beside it."""
    return output.with_name(f"{output.stem}.{ending}")


def check_paths(input_path: Path, output_path: Path) -> None:
    """JobRefused unless the output is a file, or may become one, that is not the input."""
    if output_path.exists() and not output_path.is_file():
        raise JobRefused(f"output {output_path} is not a regular file; name a file")
    if not output_path.parent.is_dir():
        raise JobRefused(f"folder {output_path.parent} of the output does not exist; create it")
    ours = [output_path, *(sibling(output_path, ending) for ending in ("manifest.json", "lock", "failed.jsonl"))]
    for path in ours:
        if path.resolve() == input_path.resolve() or (path.exists() and path.samefile(input_path)):
            raise JobRefused(f"{path} would be overwritten but is the input; choose another output")


@contextmanager
def locked(output_path: Path) -> Iterator[None]:
    """Hold the output for this process. JobRefused names the process that has it. A killed owner's lock is free at once."""
    path = sibling(output_path, "lock")
    fd = _acquire(path)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _acquire(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise JobRefused(f"process {owner} is writing this output ({path}); wait for it or stop it") from None
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # the owner before us removed the file between our open and our lock


def read_manifest(output_path: Path, mode: ResumeMode) -> Manifest | None:
    """The manifest of an earlier run to go on with, or None to start. JobRefused where `mode` and the files disagree."""
    path = sibling(output_path, "manifest.json")
    has_rows = output_path.exists() and output_path.stat().st_size > 0
    if not path.exists():
        if has_rows:
            raise JobRefused(f"output {output_path} exists and has no manifest {path.name}: it is not a job's file; choose another output")
        if mode == "must":
            raise JobRefused(f"--resume must: there is no {path} to resume from")
        return None
    if mode == "never":
        raise JobRefused(f"--resume never: {path} shows an earlier run; remove it and {output_path}, or choose another output")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise JobRefused(f"manifest {path} cannot be read ({error}); remove it and {output_path} to start again") from None


def write_manifest(output_path: Path, manifest: Manifest) -> None:
    replace_file(sibling(output_path, "manifest.json"), [msgspec.json.format(msgspec.json.encode(manifest), indent=2), b"\n"])


def check_same(earlier: Manifest, now: Manifest, output_path: Path) -> None:
    """JobRefused with a field-by-field difference unless both describe the same rows. Fields not known yet (None) are skipped."""
    old, new = _flat(earlier), _flat(now)
    unknown_yet = {name for name, value in new.items() if value is None}
    names = [name for name in {**old, **new} if name not in unknown_yet and old.get(name) != new.get(name)]
    if names:
        lines = [f"  {name}: was {_show(old, name)}, now {_show(new, name)}" for name in names]
        raise JobRefused(
            f"{output_path} belongs to a run with another configuration:\n"
            + "\n".join(lines)
            + "\nrun with the earlier values, or choose another output"
        )


def _flat(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    sampling = fields.pop("sampling")
    return fields | {f"sampling.{name}": value for name, value in sampling.items()}


def _show(values: dict[str, Any], name: str) -> str:
    return msgspec.json.encode(values[name]).decode() if name in values else "not given"
