"""Journal: the chain, what survives a crash at any byte, what is noticed, one writer."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dprs_kernels.privacy import journal as journal_module
from dprs_kernels.privacy.journal import SLOT, Journal, digest_of


def tail_of(path: Path) -> Path:
    return path.with_name(path.name + ".tail")


def written(path: Path, count: int) -> list[str]:
    """A journal of `count` lines; the head after each, from that of the header on."""
    journal = Journal(path)
    heads = [journal.head]
    for value in range(count):
        journal.append({"value": value})
        heads.append(journal.head)
    journal.close()
    return heads


def values(journal: Journal) -> list[int]:
    return [content["value"] for content in journal.contents()]


def test_lines_are_chained_json(tmp_path: Path) -> None:
    heads = written(tmp_path / "j", 3)
    lines = (tmp_path / "j").read_bytes().splitlines()
    assert json.loads(lines[0]).keys() == {"format", "version", "id"}
    assert [digest_of(line) for line in lines] == heads
    for n in (1, 2, 3):
        assert json.loads(lines[n]) == {"n": n, "previous": heads[n - 1], "value": n - 1}


def test_two_journals_have_ids_of_their_own(tmp_path: Path) -> None:
    assert written(tmp_path / "a", 1) != written(tmp_path / "b", 1)


@pytest.mark.parametrize("in_file", [True, False])
def test_append_and_count(tmp_path: Path, in_file: bool) -> None:
    journal = Journal(tmp_path / "j" if in_file else None)
    assert (journal.count, values(journal)) == (0, [])
    start = journal.head
    journal.append({"value": 7})
    journal.append({"value": 8})
    assert (journal.count, values(journal)) == (2, [7, 8])
    assert (journal.lines_since(start), journal.lines_since(journal.head)) == (2, 0)


def test_continues_where_it_was(tmp_path: Path) -> None:
    heads = written(tmp_path / "j", 2)
    journal = Journal(tmp_path / "j")
    assert (journal.count, journal.head) == (2, heads[-1])
    journal.append({"value": 2})
    assert values(journal) == [0, 1, 2]


def crashes(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes, bytes]]:
    """The two files at every moment of an append that the process, or the machine, may die at: after each sync, and
    in the middle of each write."""
    tail = tail_of(path)
    moments: list[tuple[str, bytes, bytes]] = []
    write = journal_module._write_all

    def watched(file, data):
        at = file.tell()
        before, tail_before = path.read_bytes(), tail.read_bytes()
        full = len(data.rstrip())   # a slot that lacks blanks only is whole
        for cut in (0, 1, full // 2, full - 1):
            part = data[:cut]
            if file.name == str(tail):
                torn = tail_before[:at] + part + tail_before[at + cut :]
                moments.append((f"slot torn at {cut}", before, torn))
            else:
                moments.append((f"line torn at {cut}", before + part, tail_before))
        write(file, data)
        moments.append(("written", path.read_bytes(), tail.read_bytes()))

    journal = Journal(path)
    monkeypatch.setattr(journal_module, "_write_all", watched)
    journal.append({"value": 99})
    monkeypatch.undo()
    journal.close()
    return moments


@pytest.mark.parametrize("lines", [0, 1, 2, 5])
def test_a_crash_at_any_moment_of_an_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    """Before the slot is whole the line was not begun; from then on it counts, torn or not, and is written."""
    path = tmp_path / "j"
    written(path, lines)
    moments = crashes(path, monkeypatch)
    assert len(moments) == 10
    seen = set()
    for name, data, tail in moments:
        path.write_bytes(data)
        tail_of(path).write_bytes(tail)
        begun = not name.startswith("slot")
        seen.add(begun)
        expected = [*range(lines), *([99] if begun else [])]
        assert values(Journal(path, write=False)) == expected, name
        assert path.read_bytes() == data, "reading writes nothing"
        journal = Journal(path)
        assert values(journal) == expected, name
        journal.append({"value": 100})
        journal.close()
        assert values(Journal(path)) == [*expected, 100], name
    assert seen == {True, False}


@pytest.mark.parametrize("left", [b"", b'{"format'])
def test_a_crash_while_the_file_is_made(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "j"
    written(path, 0)
    header = path.read_bytes()
    path.write_bytes(left)
    assert Journal(path).count == 0
    assert path.read_bytes() == header


def test_garbage_after_power_loss_is_replaced_by_the_line(tmp_path: Path) -> None:
    """A file system may have lengthened the file and not written the data."""
    path = tmp_path / "j"
    heads = written(path, 3)
    whole = path.read_bytes()
    cut = whole.rindex(b"\n", 0, -1) + 1
    path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
    assert Journal(path).head == heads[-1]
    assert path.read_bytes() == whole


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("write", [True, False])
def test_the_last_line_comes_back_and_more_are_missed(tmp_path: Path, write: bool) -> None:
    path = tmp_path / "j"
    written(path, 4)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(ValueError, match=r"holds 2 whole lines, .*tail knows of 4: lines were cut off the end"):
        Journal(path, write=write)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    with pytest.raises(ValueError, match=r"holds 2 whole lines, .* knows of 4"):
        Journal(path, write=write)
    path.write_bytes(b"".join(lines[:-1]))
    assert values(Journal(path, write=write)) == [0, 1, 2, 3]
    for empty in (b"", lines[0]):
        path.write_bytes(empty)
        with pytest.raises(ValueError, match=r"^path: "):
            Journal(path, write=write)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_edited_line_is_noticed(tmp_path: Path, n: int) -> None:
    path = tmp_path / "j"
    written(path, 3)
    lines = lines_of(path)
    lines[n] = lines[n].replace(b'"value":', b'"value":1')
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"lines were edited|disagree about line 3: one of them was edited"):
        Journal(path)


@pytest.mark.parametrize("order", [[0, 2, 3], [0, 1, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2], [1, 2, 3]])
def test_removed_added_or_moved_lines_are_noticed(tmp_path: Path, order: list[int]) -> None:
    path = tmp_path / "j"
    written(path, 3)
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[n] for n in order))
    with pytest.raises(ValueError, match=r"does not follow from the line before|is no ledger"):
        Journal(path)


def test_an_incomplete_line_that_nobody_knows_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path, 2)
    path.write_bytes(path.read_bytes() + b'{"n":3')
    with pytest.raises(ValueError, match=r"disagree about line 2"):
        Journal(path)


def test_the_tail_of_another_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for lines in (2, 3):   # a tail of as many lines, and one that would come next
        written(path, 2)
        written(tmp_path / "other", lines)
        tail_of(path).write_bytes(tail_of(tmp_path / "other").read_bytes())
        with pytest.raises(ValueError, match=rf"disagree about line {lines}"):
            Journal(path)
        for file in tmp_path.iterdir():
            file.unlink()


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_the_tail_a_kept_head_is_asked_for(tmp_path: Path, damage: str, write: bool) -> None:
    path = tmp_path / "j"
    heads = written(path, 3)
    if damage == "missing":
        tail_of(path).unlink()
    else:
        tail_of(path).write_bytes(bytes(2 * SLOT))
    with pytest.raises(ValueError, match=rf"tail is {damage}.*restore it, or pass head="):
        Journal(path, write=write)
    with pytest.raises(ValueError, match=r"^head: no line of .* has the digest 'abc'"):
        Journal(path, write=write, head="abc")
    assert values(Journal(path, write=write, head=heads[2])) == [0, 1, 2]
    if write:
        assert values(Journal(path)) == [0, 1, 2]   # the tail was made again


def test_a_head_kept_elsewhere_sees_both_files_set_back(tmp_path: Path) -> None:
    path = tmp_path / "j"
    heads = written(path, 2)
    old = path.read_bytes(), tail_of(path).read_bytes()
    journal = Journal(path)
    journal.append({"value": 2})
    journal.append({"value": 3})
    head = journal.head
    journal.close()
    assert Journal(path, write=False, head=heads[1]).lines_since(heads[1]) == 3
    path.write_bytes(old[0])
    tail_of(path).write_bytes(old[1])
    assert values(Journal(path, write=False)) == [0, 1]   # a chain cannot see this
    with pytest.raises(ValueError, match=r"^head: no line of .* it was cut, changed, or belongs to another run"):
        Journal(path, head=head)


def test_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    with pytest.raises(ValueError, match=r"^path: .* is open for writing elsewhere; one run, one ledger file"):
        Journal(path)
    journal.append({"value": 0})
    assert values(Journal(path, write=False)) == [0]   # readers are welcome
    journal.close()
    with pytest.raises(ValueError, match=r"nothing can be appended, it was closed; open it again"):
        journal.append({"value": 1})
    Journal(path).append({"value": 1})


def test_a_reader_does_not_write(tmp_path: Path) -> None:
    written(tmp_path / "j", 1)
    with pytest.raises(ValueError, match=r"opened for reading; use Ledger\(path\)"):
        Journal(tmp_path / "j", write=False).append({"value": 1})
    with pytest.raises(ValueError, match=r"does not exist or is empty; expected a ledger"):
        Journal(tmp_path / "other", write=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["j", "j.tail"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello\n", r"line 0 of .* is no JSON"),
        (b"[1]\n", r"is no ledger: its first line does not say 'dprs_kernels ledger'"),
        (b'{"format":"dprs_kernels ledger","version":2}\n', r"has format version 2; this is for 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    written(tmp_path / "j", 0)
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Journal(tmp_path / "j")


def test_both_files_are_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    synced: list[str] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        sync(handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}") + f" {(tmp_path / 'j').stat().st_size > size}")

    size = (tmp_path / "j").stat().st_size
    monkeypatch.setattr(os, "fsync", watched)
    journal.append({"value": 0})
    assert synced == [f"{tmp_path}/j.tail False", f"{tmp_path}/j True"]   # the tail first, and while path is as before


def test_making_a_file_syncs_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    Journal(tmp_path / "j")
    assert synced == [f"{tmp_path}/j.tail", str(tmp_path), f"{tmp_path}/j", str(tmp_path)]


def test_a_failed_append_closes_the_journal_and_the_line_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.append({"value": 0})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append({"value": 1})
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"an earlier append failed or was interrupted; open it again"):
        journal.append({"value": 2})
    assert journal.count == 1
    journal.close()
    assert values(Journal(path)) == [0, 1]   # begun: the slot was written


@pytest.mark.parametrize("in_file", [True, False])
def test_an_interrupt_after_the_sync_leaves_the_journal_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_file: bool
) -> None:
    """The line is there and the count is not: going on would chain the next one to the wrong line."""
    book = Journal(tmp_path / "l" if in_file else None)
    book.append({"a": 1})

    class Interrupted(Journal):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "count":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    book.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        book.append({"a": 2})
    book.__class__ = Journal
    with pytest.raises(ValueError, match="nothing can be appended, an earlier append failed or was interrupted"):
        book.append({"a": 3})
    if in_file:
        book.close()
        assert [line["a"] for line in Journal(tmp_path / "l").contents()] == [1, 2]


def test_too_long_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(ValueError, match=r"^content: got a line of \d+ bytes; expected at most 1982"):
        journal.append({"value": "x" * 2000})
    journal.append({"value": 1})   # nothing was begun
    assert values(journal) == [1]


def test_a_forked_child_neither_writes_nor_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    (ready, tell), (wait, release) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            journal.append({"value": 666})
        except ValueError as error:
            code = 0 if "opened before a fork" in str(error) else 2
        os.close(release)
        os.write(tell, b"x")
        os.read(wait, 1)   # outlives the parent's journal
        os._exit(code)
    try:
        os.read(ready, 1)
        journal.append({"value": 0})
        assert journal._tail is not None
        journal._tail.close()   # as when the parent is killed: nothing is unlocked, only closed
        assert values(Journal(path)) == [0]   # and the child is alive
    finally:
        os.close(release)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


KILLED = """
import sys
from dprs_kernels.privacy.journal import Journal
journal = Journal(sys.argv[1])
while True:
    journal.append({"value": journal.count})
    print(journal.head, flush=True)
"""


def test_kill_9_while_appending(tmp_path: Path) -> None:
    """What append returned from is there afterwards; at most the one line that was begun comes on top."""
    path, told = tmp_path / "j", 0
    for more in (3, 40, 77):
        writer = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        head = [writer.stdout.readline().strip() for _ in range(more)][-1]
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
        writer.wait()
        told += more + len(rest)
        head = rest[-1] if rest and len(rest[-1]) == 64 else head
        journal = Journal(path, head=head)
        assert told <= journal.count <= told + 1
        assert values(journal) == list(range(journal.count))
        told = journal.count
        journal.close()
