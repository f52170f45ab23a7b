"""Files of one JSON object a line: whole ones written at once, partial ones that survive a kill."""

import fcntl
import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Self

from outrider.data.files import settle, temporary_for


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows in the form the suffix names; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    with _open(temporary, path.suffix, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    settle(temporary)
    temporary.replace(path)


class PartialRows:
    """Rows finished so far, in a file whose first line holds the settings behind them.

    A last line that a kill cut short is dropped. Raises ValueError when the file was made with
    other settings, or while another run writes it.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self.rows: dict[str, dict[str, Any]] = self._recover(path, settings)
            """Id to row."""
        except ValueError:
            self._file.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row; a kill of this process no longer loses it."""
        self.rows[row["id"]] = row
        self._write(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _recover(self, path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is being written by another run; wait for it, or name another output"
            ) from error
        self._file.seek(0)
        raw = self._file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines and lines[0] != settings:
            raise ValueError(
                f"{path} was made with {lines[0]}, this run has {settings}; use the same settings, "
                "delete it to start again, or name another output"
            )
        self._file.truncate(len(whole))
        if not lines:
            self._write(settings)
        return {row["id"]: row for row in lines[1:]}

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write((json.dumps(row) + "\n").encode())
        self._file.flush()


def _open(path: Path, suffix: str, mode: str) -> IO[Any]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(suffix, open)
    return opener(path, mode, encoding="utf-8")
