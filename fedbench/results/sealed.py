"""Checksums: each file of a run names the run, and ends with a hash of everything before.

    config.yaml, checkpoint.pt   # run krum-1a2b3c4d5e, check 0123456789abcdef
    summary.json, origin.json    "run": "krum-1a2b3c4d5e", "check": "0123456789abcdef"}
    rounds.jsonl                 "check": "0123456789abcdef"}     in each line

The check of a line also covers the line before, that of the first line covers the run id. So lines
that are missing, doubled, swapped or of another run are found. Checks find damage and edits by
hand. They are no signatures: anyone can compute them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedbench.errors import UserError
from fedbench.results.atomic_files import in_words

CHANGED = "is damaged, or was changed after fedbench wrote it"
UNSEALED = "has no checksum: it is damaged, or an older version wrote it"
COMMENT = "# run {}, check {}\n"
LONGEST_COMMENT = 1000  # bytes
COMMENT_AT_END = re.compile(rb"# run (.+), check ([0-9a-f]{16})\n\Z")
JSON_END = b',\n  "check": "%s"\n}\n'
LINE_END = b', "check": "%s"}'
CHECK = 16  # characters


class DamageError(ValueError):
    """A file is not as fedbench wrote it; the message continues the file's name."""


@contextmanager
def damage_told(path: Path, remedy: str) -> Iterator[None]:
    """Turn whatever is wrong with a file into a UserError of one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({in_words(error)})") from error
    except DamageError as error:
        raise UserError(f"{path} {error}; {remedy}") from error


def seal_json(content: dict[str, Any], run: str) -> bytes:
    """Return a JSON object that names the run, with its check."""
    text = json.dumps({**json_safe(content), "run": run}, indent=2, allow_nan=False)
    body = text.removesuffix("\n}").encode()
    return body + JSON_END % _check(body)


def unseal_json(sealed: bytes, run: str | None = None) -> dict[str, Any]:
    """Return what `seal_json` was given; DamageError if it is not intact or of another run."""
    size = len(JSON_END % (b" " * CHECK))
    body, end = sealed[:-size], sealed[-size:]
    if end != JSON_END % _check(body):
        raise DamageError(CHANGED if b'"check": ' in sealed else UNSEALED)
    content: dict[str, Any] = json.loads(sealed)
    del content["check"]
    _require_run(content.pop("run"), run)
    return content


def seal_line(record: dict[str, Any], previous: bytes) -> bytes:
    """Return a line of rounds.jsonl; `previous` is the check of the line before."""
    body = json.dumps(json_safe(record), allow_nan=False).removesuffix("}").encode()
    return body + LINE_END % _check(body, previous) + b"\n"


def intact_lines(content: bytes, run: str) -> list[bytes]:
    """Return the lines of rounds.jsonl, without one that a killed run left incomplete.

    DamageError for the first line that is not what was written after the one before.
    """
    *lines, _ = content.split(b"\n")
    check, size = first_check(run), len(LINE_END % (b" " * CHECK))
    for number, line in enumerate(lines, start=1):
        body = line[:-size]
        check = _check(body, check)
        if line[-size:] != LINE_END % check:
            if b'"check": ' not in line:
                raise DamageError(f"line {number} {UNSEALED}")
            place = f"follow line {number - 1}" if number > 1 else f"begin the run {run}"
            raise DamageError(f"line {number} is damaged, or does not {place}")
    return lines


def first_check(run: str) -> bytes:
    """Check that takes the place of a line before the first."""
    return _check(run.encode("utf-8", "surrogateescape"))


def last_check(lines: list[bytes], run: str) -> bytes:
    """Check of the last line, or what takes its place."""
    return lines[-1][-2 - CHECK : -2] if lines else first_check(run)


def seal_text(text: str, run: str) -> bytes:
    """Return a text with a last line, a comment, that has the run and the check."""
    body = text.encode()
    return body + _comment(run, hashlib.sha256(body))


def unseal_text(sealed: bytes) -> tuple[str, str]:
    """Return the text and its run; DamageError if it is not intact."""
    found = COMMENT_AT_END.search(sealed)
    if found is None:
        raise DamageError(UNSEALED)
    body = sealed[: found.start()]
    run = found[1].decode("utf-8", "replace")
    if _comment(run, hashlib.sha256(body)) != found[0]:
        raise DamageError(CHANGED)
    return body.decode(), run


class SealingWriter:
    """Passes on what is written to a file; `end` appends the comment with run and check."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        # Kept for `end`, as torch would replace it by an error about positions in the file.
        if self.error is None:
            try:
                self.file.write(content)
            except OSError as error:
                self.error = error
            self.hash.update(content)
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Called by torch; the file is flushed in the end."""

    def end(self, run: str) -> None:
        if self.error is not None:
            raise self.error
        self.file.write(_comment(run, self.hash))


def require_intact(path: Path, run: str | None = None) -> None:
    """Check a file written by SealingWriter; DamageError if it is not intact or of another run."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - LONGEST_COMMENT, 0))
        found = COMMENT_AT_END.search(file.read())
        if found is None:
            raise DamageError(UNSEALED)
        left = size - len(found[0])
        file.seek(0)
        hash_ = hashlib.sha256()
        while chunk := file.read(min(left, 2**20)):
            hash_.update(chunk)
            left -= len(chunk)
    name = found[1].decode("utf-8", "replace")
    if _comment(name, hash_) != found[0]:
        raise DamageError(CHANGED)
    _require_run(name, run)


def _require_run(found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise DamageError(f"is of another run, {found}")


def _check(body: bytes, previous: bytes = b"") -> bytes:
    hash_ = hashlib.sha256(previous)
    hash_.update(body)
    return hash_.hexdigest()[:CHECK].encode()


def _comment(run: str, hash_: Any) -> bytes:
    """The last line of a file; its check covers the run id, too."""
    name = run.encode("utf-8", "surrogateescape")
    hash_ = hash_.copy()
    hash_.update(name)
    return COMMENT.format(run, hash_.hexdigest()[:CHECK]).encode("utf-8", "surrogateescape")


def json_safe(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
