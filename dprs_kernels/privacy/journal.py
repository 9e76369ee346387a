"""Journal: an append-only file of hash-chained JSON lines that survives kill -9 and shows what was done to it.

    path         header line {"format", "version", "id"}, then lines {"n", "previous", ...}
                 previous = SHA-256 of the line before, in hex; head = SHA-256 of the last line
    path.tail    the last line once more, in two slots of 2048 bytes that take turns

An append writes its line to a slot of path.tail, syncs, writes it to path, syncs, and only then returns. So whatever
moment the process dies at, path.tail holds the newest line whole: where path lacks it, or ends in a torn piece of it,
opening writes it (an append that was begun counts as done). A torn slot leaves the other one, of the line before.

Noticed on opening: a line edited, removed, added in between or out of order; lines cut off the end (more than the one
that path.tail can restore); a damaged or missing path.tail. The chain is no signature: whoever rewrites both files to
an earlier state, or makes a whole new chain, is noticed only by a head kept elsewhere, such as a checkpoint's: head=.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dprs_kernels.files import sync_directory

try:
    import fcntl
except ImportError:   # Windows
    fcntl = None   # type: ignore[assignment]

FORMAT, VERSION = "dprs_kernels ledger", 1
SLOT = 2048
LONGEST = SLOT - 66   # a slot is a digest, a blank, the line, blanks, a newline
_open: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    """path: a file, made if missing; None keeps the lines in memory. write=False only reads, also while another
    process writes. head: the digest of a line that must be there."""

    def __init__(self, path: str | os.PathLike[str] | None, *, write: bool = True, head: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._write = write
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._broken = ""
        self._trusted = head
        self._file: IO[bytes] | None = None
        self._tail: IO[bytes] | None = None
        if self.path is None:
            self._lines = [_header()]
        else:
            self._open_files(self.path, head)
            _open.add(self)
        self.count, self.head = len(self._lines) - 1, digest_of(self._lines[-1])
        if head is not None:
            self.lines_since(head)
        if self.path is not None:
            self._lines = []   # a million steps are 500 MB; they are read again when asked for

    def append(self, content: dict[str, Any]) -> None:
        """One line, on the disk when this returns. An error leaves the journal closed: open it again, and a line that
        was begun is there."""
        with self._guard:
            self._check_writable()
            line = _encoded({"n": self.count + 1, "previous": self.head, **content})
            if len(line) > LONGEST:
                raise ValueError(f"content: got a line of {len(line)} bytes; expected at most {LONGEST}")
            head = digest_of(line)
            self._broken = "an earlier append failed or was interrupted"
            if self._file is None:
                self._lines.append(line)
            else:
                self._put(self.count + 1, line)
            self.count, self.head = self.count + 1, head
            self._broken = ""   # last: after a Ctrl-C in between the next line would not follow from the one on disk

    def contents(self) -> Iterator[dict[str, Any]]:
        """The lines after the header, verified again, oldest first."""
        yield from (json.loads(line) for line in self._all()[1 : self.count + 1])

    def lines_since(self, head: str) -> int:
        """How many lines follow the one whose digest is `head`. ValueError where there is none such."""
        digests = [digest_of(line) for line in self._all()]
        if head not in digests:
            raise ValueError(_no_such_head(self.path, head))
        return len(digests) - 1 - digests.index(head)

    def close(self) -> None:
        """Lets another writer in. Appending afterwards raises."""
        for file in (self._file, self._tail):
            if file is not None:
                file.close()
        self._broken = self._broken or "it was closed"

    def _open_files(self, path: Path, head: str | None) -> None:
        tail = path.with_name(path.name + ".tail")
        if fcntl is None:
            raise ImportError("a ledger in a file needs fcntl (Linux, macOS); Ledger() without a path works anywhere")
        begun = path.exists() and path.stat().st_size > 0
        if not self._write and not begun:
            raise ValueError(f"path: {path} does not exist or is empty; expected a ledger, made by Ledger(path)")
        if begun and not tail.exists() and head is None:
            raise ValueError(
                f"path: {tail} is missing, without it nobody can tell whether lines were cut off the end of {path}; "
                "restore it, or pass head=, the digest that a checkpoint kept"
            )
        if self._write:
            self._tail = open(tail, "r+b" if tail.exists() else "x+b", buffering=0)   # noqa: SIM115
            try:
                fcntl.flock(self._tail, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"path: {path} is open for writing elsewhere; one run, one ledger file") from error
            self._file = open(path, "r+b" if path.exists() else "x+b", buffering=0)   # noqa: SIM115
            self._recover(path, tail)
        else:
            self._file = open(path, "rb", buffering=0)   # noqa: SIM115
            self._tail = open(tail, "rb", buffering=0) if tail.exists() else None   # noqa: SIM115
            self._lines = self._all()

    def _recover(self, path: Path, tail: Path) -> None:
        """Finishes what a dead process began, and starts a new file."""
        assert self._file is not None
        assert self._tail is not None
        if not _slots(self._tail):
            data = _whole(self._file)
            if data and self._trusted is None:
                raise ValueError(f"path: {tail} is damaged; restore it, or pass head=, the digest a checkpoint kept")
            lines = _chained(data, path) if data else [_header()]
            if data and self._trusted not in [digest_of(line) for line in lines]:   # before anything is written
                raise ValueError(_no_such_head(path, self._trusted))
            self._tail.truncate(2 * SLOT)
            _write_slot(self._tail, len(lines) - 1, lines[-1])
            sync_directory(path.parent)
        self._lines = self._all()
        data = _whole(self._file)
        good = b"".join(line + b"\n" for line in self._lines)
        if data != good:   # the last line is missing or torn
            at = len(good) - len(self._lines[-1]) - 1
            self._file.truncate(at)
            self._file.seek(at)
            _write_all(self._file, self._lines[-1] + b"\n")
            os.fsync(self._file.fileno())
            sync_directory(path.parent)

    def _put(self, n: int, line: bytes) -> None:
        assert self._file is not None
        assert self._tail is not None
        fcntl.flock(self._file, fcntl.LOCK_EX)   # readers take their turn
        try:
            _write_slot(self._tail, n, line)
            self._file.seek(0, os.SEEK_END)
            _write_all(self._file, line + b"\n")
            os.fsync(self._file.fileno())
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _all(self) -> list[bytes]:
        """Every line, header first, verified; with the one that only path.tail holds."""
        if self.path is None or self._file is None:
            return self._lines
        if self._file.closed:
            raise ValueError(f"{self.path}: the ledger was closed; use Ledger.read")
        with self._guard:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            try:
                data, slots = _whole(self._file), _slots(self._tail) if self._tail else []
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        body, _, torn = data.rpartition(b"\n")
        lines = _chained(body, self.path) if body else []
        if not slots:
            if self._trusted is None or torn:
                raise ValueError(f"path: {self.path}.tail is damaged; restore it, or pass head= from a checkpoint")
            return lines
        n, line = max(slots)
        if n == len(lines) and (not lines or json.loads(line).get("previous") == digest_of(lines[-1])):
            return [*lines, line]
        if n > len(lines):
            raise ValueError(
                f"path: {self.path} holds {max(len(lines) - 1, 0)} whole lines, {self.path}.tail knows of {n}: lines "
                "were cut off the end; restore the file, an epsilon from what is left would be too small"
            )
        if torn or n == len(lines) or lines[n] != line:
            raise ValueError(
                f"path: {self.path} and {self.path}.tail disagree about line {n}: one of them was edited or belongs "
                "to another run; restore both"
            )
        return lines

    def _check_writable(self) -> None:
        where = self.path or "the ledger"
        if not self._write:
            raise ValueError(f"{where}: opened for reading; use Ledger(path) to append")
        if os.getpid() != self._pid:
            raise ValueError(f"{where}: opened before a fork; let the parent append, or give the child its own file")
        if self._broken:
            raise ValueError(f"{where}: nothing can be appended, {self._broken}; open it again with Ledger(path)")


def digest_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _no_such_head(path: Path | None, head: str | None) -> str:
    return (
        f"head: no line of {path or 'the ledger'} has the digest {head!r}: it was cut, changed, or belongs to another "
        "run; restore the file that was written with this checkpoint"
    )


def _header() -> bytes:
    return _encoded({"format": FORMAT, "version": VERSION, "id": os.urandom(16).hex()})


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _chained(data: bytes, path: Path) -> list[bytes]:
    """The lines, each checked against the one before it."""
    lines = data.removesuffix(b"\n").split(b"\n")
    previous = None
    for n, line in enumerate(lines):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"path: line {n} of {path} is no JSON ({error}); restore the file") from error
        if n == 0:
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f"path: {path} is no ledger: its first line does not say {FORMAT!r}")
            if content.get("version") != VERSION:
                raise ValueError(f"path: {path} has format version {content.get('version')!r}; this is for {VERSION}")
        elif not isinstance(content, dict) or content.get("n") != n or content.get("previous") != previous:
            raise ValueError(
                f"path: line {n} of {path} does not follow from the line before: lines were edited, removed or added; "
                "restore the file"
            )
        previous = digest_of(line)
    return lines


def _slots(tail: IO[bytes]) -> list[tuple[int, bytes]]:
    """The whole ones, (n, line); a torn one does not match its digest."""
    data, found = _whole(tail), []
    for slot in (data[:SLOT], data[SLOT : 2 * SLOT]):
        digest, _, line = slot.rstrip(b" \n").partition(b" ")
        if line and digest.decode("ascii", "replace") == digest_of(line):
            found.append((json.loads(line).get("n", 0), line))
    return found


def _write_slot(tail: IO[bytes], n: int, line: bytes) -> None:
    tail.seek(n % 2 * SLOT)
    _write_all(tail, (digest_of(line).encode() + b" " + line).ljust(SLOT - 1) + b"\n")
    os.fsync(tail.fileno())


def _whole(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _write_all(file: IO[bytes], data: bytes) -> None:
    while data:   # an unbuffered write may be short
        data = data[file.write(data) :]


def _after_fork() -> None:
    """A child, a data worker for one, must not hold the lock on after its parent was killed."""
    for journal in _open:
        journal.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
