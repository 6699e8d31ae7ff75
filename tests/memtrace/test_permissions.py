"""Another user's job cannot be read; nothing that is made is open to others."""

import os

import pytest

from live import NOBODY
from traces import Process, _trace, a_job


def as_nobody(act):
    """What `act` returns, as text, in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can")
def test_another_user_s_job_cannot_be_read(tmp_path):
    process = Process(a_job())
    path = tmp_path / "own.trace"
    _trace.recorder_close(_trace.recorder_create(str(path), [], [process.pid]))

    def attach():
        mine = os.memfd_create("of nobody")
        _trace.recorder_create(f"/proc/self/fd/{mine}", [], [process.pid])
        return "attached"

    def descriptors():
        return str(os.listdir(f"/proc/{process.pid}/fd"))

    assert (
        as_nobody(attach)
        == f"Error: process {process.pid} belongs to another user, and only that user may read its trace"
    )
    assert "PermissionError" in as_nobody(descriptors)
    path.parent.chmod(0o755)
    said = as_nobody(lambda: str(_trace.file_summary(_trace.file_open(str(path)))))
    assert "Error" in said and "Permission denied" in said
    process.end()


def test_what_is_made_is_the_user_s_own(tmp_path):
    previous = os.umask(0)
    try:
        process = Process(a_job())
        _trace.recorder_close(_trace.recorder_create(str(tmp_path / "x.trace"), [], [process.pid]))
        process.end()
    finally:
        os.umask(previous)
    assert (tmp_path / "x.trace").stat().st_mode & 0o777 == 0o600
