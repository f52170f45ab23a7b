"""Files of one JSON object a line: whole ones written at once, partial ones that survive a kill."""

import fcntl
import gzip
import json
import lzma
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Self

from outrider.data.files import settle, temporary_for


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows in the form the suffix names; the file appears whole or not at all.

    Raises ValueError, and leaves nothing behind, where the disk has no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        with _open(temporary, path.suffix, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        settle(temporary)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(
            f"{path} cannot be written: {error}; the answered rows are kept beside it: free some "
            "space and run the same command again"
        ) from error
    temporary.replace(path)


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Which settings differ, as `name: known, not wanted`; None in `wanted` means any value."""
    return [
        f"{name}: {known.get(name)!r}, not {wanted.get(name)!r}"
        for name in sorted(known.keys() | wanted.keys())
        if known.get(name) != wanted.get(name) and not (name in wanted and wanted[name] is None)
    ]


class PartialRows:
    """Rows finished so far, in a file whose first line holds the settings behind them.

    Every row is on its way to the disk when `append` returns, in whatever order rows come. A last
    line that a kill cut short is dropped. So are lines that a power cut left torn or full of NUL
    bytes, wherever they are: a warning counts them, and their rows are missing from `rows`. Raises
    ValueError when the file was made with other settings, when the line that says so is damaged
    and whole rows follow it, or while another run writes it; with `fresh` it begins anew then.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._size = 0
        self.rows: dict[str, dict[str, Any]] = {}
        """Id to row."""
        self.notes: list[dict[str, Any]] = []
        """What the runs so far noted of themselves, each different note once."""
        try:
            self._recover(settings, fresh=fresh)
        except BaseException:
            self._file.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row; a kill of this process no longer loses it."""
        assert row["id"] not in self.rows, f"row {row['id']!r} was answered twice"
        self._write(row)
        self.rows[row["id"]] = row

    def note(self, facts: dict[str, Any]) -> None:
        """Keep facts about this run, unless an earlier one noted the same."""
        if facts not in self.notes:
            self._write({"run": facts})
            self.notes.append(facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _recover(self, settings: dict[str, Any], *, fresh: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self._path} is being written by another run; wait for it, or name another output"
            ) from error
        self._file.seek(0)
        first, lines, self._size = self._read(self._file.readall())
        unlike = differences(first, settings) if first is not None else []
        if fresh and unlike:
            first = None
        elif unlike:
            raise ValueError(
                f"{self._path} was begun with other settings ({'; '.join(unlike)}); go on with "
                "those, start again with overwrite, or name another output"
            )
        elif first is None and lines and not fresh:
            raise ValueError(
                f"{self._path}: its first line, which says what it was begun with, is damaged, so "
                f"nobody can say whether the {len(lines)} whole lines after it belong to this run; "
                "start again with overwrite, or name another output"
            )
        if first is None:
            self._size = 0
        self._file.truncate(self._size)
        if first is None:
            self._write(settings)
            return
        self.notes = [line["run"] for line in lines if not _is_row(line)]
        self.rows = {line["id"]: line for line in lines if _is_row(line)}

    def _read(self, raw: bytes) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
        """The line of settings, the other whole lines, and the bytes up to the last whole one.

        Damaged lines before that one stay in the file: to take them out would put the rows after
        them at risk.
        """
        *ended, torn = raw.split(b"\n")
        found = [_parsed(line) for line in ended]
        first = found[0] if found and not _is_known(found[0]) else None
        lines = [line for line in found if line is not None and _is_known(line)]
        whole = [number for number, line in enumerate(found) if _is_known(line)] or [0]
        end = sum(len(line) + 1 for line in ended[: whole[-1] + 1])
        damaged = len(found) - len(lines) - (first is not None) + bool(torn)
        if damaged and first is not None:
            warnings.warn(
                f"{self._path}: {damaged} damaged line{'s' * (damaged > 1)} left out (cut short, "
                f"or not on the disk when the power failed); {len(lines)} whole ones are kept, and "
                "rows that are missing are made again",
                stacklevel=2,
            )
        return first, lines, end

    def _write(self, row: dict[str, Any]) -> None:
        """Append one whole line, or none. Raises ValueError where the disk has no room for it."""
        line = memoryview((json.dumps(row) + "\n").encode())
        done = 0
        try:
            while done < len(line):
                done += self._file.write(line[done:]) or 0
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise ValueError(
                f"{self._path} cannot be written: {error}; its {len(self.rows)} rows are whole and "
                "stay: free some space and run the same command again, and it continues from there"
            ) from error
        self._size += len(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where it holds none."""
    try:
        found = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_row(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("id"), str)


def _is_known(line: Mapping[str, Any] | None) -> bool:
    """Whether a line is a row, or a note of a run: else it is the settings or damaged."""
    return line is not None and (_is_row(line) or isinstance(line.get("run"), dict))


def _open(path: Path, suffix: str, mode: str) -> IO[Any]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(suffix, open)
    return opener(path, mode, encoding="utf-8")
