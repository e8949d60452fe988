"""rounds.jsonl: a line per round, each with a check that covers the line before."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from fedbench.results.atomic_files import write_atomically, writing
from fedbench.results.sealed import (
    DamageError,
    first_check,
    intact_lines,
    last_check,
    seal_line,
)

ROUNDS_FILE = "rounds.jsonl"
LAST_CHECK = "last_check"  # key of a finished run's summary.json: the check of the last line


class RoundsFile:
    """The rounds.jsonl of a run."""

    def __init__(self, folder: Path, run: str) -> None:
        self.path = folder / ROUNDS_FILE
        self.run = run

    def read(self, last: str | None = None) -> list[dict[str, Any]]:
        """Return the records; DamageError or OSError if the file is not as it was written.

        `last` is the check that the last line has to have.
        """
        return _parsed(self.lines(last))

    def lines(self, last: str | None = None) -> list[bytes]:
        """Check the file as `read` does, but return the lines unparsed."""
        lines = intact_lines(self._content(), self.run)
        if last is not None and last_check(lines, self.run) != last.encode():
            raise DamageError(f"has {len(lines)} rounds, but not those in summary.json")
        return lines

    def end(self) -> str:
        """Check of the last line, which stands for the whole file."""
        return last_check(self.lines(), self.run).decode()

    def append(self, record: dict[str, Any]) -> None:
        """Write a line; the caller reads the file before its first line is appended."""
        with writing(self.path), self.path.open("ab+") as file:
            file.seek(max(file.tell() - 19, 0))
            tail = file.read()  # as of `last_check`, and the end of the line
            previous = last_check([tail.rstrip(b"\n")] if tail else [], self.run)
            file.write(seal_line(record, previous))
            file.flush()
            os.fsync(file.fileno())

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Write all lines anew."""
        previous, lines = first_check(self.run), []
        for record in records:
            lines.append(seal_line(record, previous))
            previous = last_check([lines[-1].rstrip(b"\n")], self.run)
        write_atomically(self.path, lambda file: file.writelines(lines))

    def keep(self, n_rounds: int) -> None:
        """Drop all lines after the first `n_rounds`; DamageError if there are fewer."""
        *lines, _ = self._content().split(b"\n")
        kept = b"".join(line + b"\n" for line in lines[:n_rounds])
        if (n := len(_parsed(intact_lines(kept, self.run)))) < n_rounds:
            raise DamageError(f"has {n} rounds, the checkpoint {n_rounds}")
        write_atomically(self.path, lambda file: file.write(kept))

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    records = []
    for index, line in enumerate(lines):
        try:
            record = orjson.loads(line)  # four times as fast as json
            del record["check"]
            number = record["round"]
        except (ValueError, LookupError, TypeError) as error:
            raise DamageError(f"line {index + 1} is not the record of a round") from error
        if number != index:
            raise DamageError(f"line {index + 1} is round {number}, expected {index}")
        records.append(record)
    return records
