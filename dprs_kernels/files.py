"""Files that are written whole or not at all, whatever moment the process dies at; text whose errors name the file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def written_whole(target: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A temporary file beside `target`; at the end of the block it is synced, takes the name, and the folder is synced.
    Killed at any moment, `target` is the old file or the new one; at worst a file .name.*.tmp is left over. mode: of
    the file, under the umask."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def read_text(path: Path) -> str:
    """UTF-8, with an error that names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no text ({error}); it is damaged, or another kind of file") from error


def sync_directory(path: Path) -> None:
    """Names that were made or changed in it are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
