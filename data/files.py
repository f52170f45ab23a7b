"""Files and folders that are there whole or not at all, whoever else is at work or gets killed."""

import fcntl
import hashlib
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """The user's cache folder: $OUTRIDER_CACHE, or ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_CACHE") or "~/.cache/outrider").expanduser()


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the lock file `path`; another process waits. The system drops it when a holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Keep a folder to this process. Raises ValueError where another process has it."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is at work in {folder}; wait for it or stop it, or give another "
                "output"
            ) from None
        yield


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settle(path: Path) -> None:
    """Wait until a file's bytes are on the disk, so that renaming it is safe in a power cut too."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def temporary_for(path: Path) -> Path:
    """Where this process writes what will be moved to `path`: no other one has this name."""
    return path.with_name(f"{path.name}{_host()}{os.getpid()}.tmp")


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left half written in a folder."""
    for left in folder.glob("*.tmp"):
        _, found, number = left.name.removesuffix(".tmp").rpartition(_host())
        if found and number.isdecimal() and not _is_alive(int(number)):
            left.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one step: readers, and a kill, see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    temporary.write_text(text, encoding="utf-8")
    settle(temporary)
    temporary.replace(path)


def _host() -> str:
    """This machine in a file name: others that share the disk have processes of these numbers."""
    return f".{socket.gethostname().replace('.', '-')}-"


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
