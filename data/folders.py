"""The folder of a store, on this machine or in a cloud: files that are there whole or not at all.

A cloud folder is any URL that fsspec opens (s3://, gs://, memory://, ...; the matching package must
be installed). Its files are written here first and uploaded in one step, and read from a local copy
that is fetched when first needed.
"""

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec
from safetensors.torch import save as serialise
from torch import Tensor

from outrider.data.files import cache_root, settle, temporary_for

Content = Mapping[str, Tensor] | bytes


class Folder(Protocol):
    """Files by name."""

    name: str
    """What messages call the folder."""
    local: Path
    """Where files are written and mapped from."""

    def has(self, name: str, shapes: Mapping[str, list[int]]) -> bool:
        """Whether a file of tensors is there in full, with these shapes."""
        ...

    def read(self, name: str) -> bytes | None:
        """A small file's bytes; None where there is no such file."""
        ...

    def write(self, name: str, content: Content) -> None:
        """Put a whole file there in one step. Raises ValueError where it does not fit."""
        ...

    def path(self, name: str) -> Path:
        """A local file with the content."""
        ...

    def claim(self, number: int, *, wait: bool) -> Any:  # noqa: ANN401 - a context of a bool
        """Hold one number against other processes; false where another holds it."""
        ...


def folder_at(root: str | Path, name: str) -> Folder:
    """The folder `name` in `root`: a local path or a URL."""
    if "://" in str(root):
        return CloudFolder(f"{str(root).rstrip('/')}/{name}")
    return LocalFolder(Path(root) / name)


class LocalFolder(Folder):
    """A folder on this machine (or mounted here); processes share the work by range locks."""

    def __init__(self, path: Path) -> None:
        self.local = path
        self.name = str(path)

    def has(self, name: str, shapes: Mapping[str, list[int]]) -> bool:
        path = self.local / name
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return fits(file, path.stat().st_size, shapes)

    def read(self, name: str) -> bytes | None:
        path = self.local / name
        return path.read_bytes() if path.is_file() else None

    def write(self, name: str, content: Content) -> None:
        write_whole(self.local / name, content)

    def path(self, name: str) -> Path:
        return self.local / name

    @contextmanager
    def claim(self, number: int, *, wait: bool) -> Generator[bool]:
        """One byte of the lock file stands for one number; the system drops a dead holder's.

        The file stays open: to close it would give up every number that this process holds.
        """
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, number)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, number)

    @cached_property
    def _lock(self) -> int:
        number = os.open(self.local.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, number)
        return number


class CloudFolder(Folder):
    """A folder behind fsspec, with a local copy of what was used.

    There are no locks: two processes may compute the same shard, and either upload is right.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"store {url!r} cannot be opened: {error}; install the fsspec package for this "
                "kind of address, or name a local folder"
            ) from error
        self.local = cache_root() / "stores" / hashlib.sha256(url.encode()).hexdigest()[:16]

    def has(self, name: str, shapes: Mapping[str, list[int]]) -> bool:
        place = f"{self._root}/{name}"
        if not self._files.exists(place):
            return False
        with self._files.open(place, "rb") as file:
            return fits(file, int(self._files.info(place)["size"]), shapes)

    def read(self, name: str) -> bytes | None:
        place = f"{self._root}/{name}"
        return self._files.cat_file(place) if self._files.exists(place) else None

    def write(self, name: str, content: Content) -> None:
        path = self.local / name
        write_whole(path, content)
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(f"{self._root}/{name}", path.read_bytes())
        except OSError as error:
            raise ValueError(
                f"{self.name}/{name} cannot be written: {error}; what is whole there stays: make "
                "room or mend the connection and run the same command again, and it continues"
            ) from error

    def path(self, name: str) -> Path:
        path = self.local / name
        if not path.is_file():
            content = self.read(name)
            if content is None:
                raise ValueError(f"{self.name} has no {name}; build the store again")
            write_whole(path, content)
        return path

    @contextmanager
    def claim(self, number: int, *, wait: bool) -> Generator[bool]:  # noqa: ARG002
        yield True


def fits(file: BinaryIO, size: int, shapes: Mapping[str, list[int]]) -> bool:
    """Whether a safetensors file of `size` bytes is there in full and holds just these shapes."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header: dict[str, Any] = json.loads(file.read(length)) if length < size else {}
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        found = {name: entry["shape"] for name, entry in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError):  # damaged
        return False
    return found == shapes and size == 8 + length + end


def write_whole(path: Path, content: Content) -> None:
    """Write beside the place, wait for the disk, then move there in one step.

    Raises ValueError, and leaves nothing behind, where the disk has no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else serialise(dict(content)))
        settle(temporary)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"{path} cannot be written: {error}; what is there already is whole and stays: free "
            "some space and run the same command again, and it continues from there"
        ) from error
    temporary.replace(path)
