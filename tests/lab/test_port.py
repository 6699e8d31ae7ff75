"""The kernel does not give a free port to another process before it is used."""

import socket

import pytest

from fcdp_lab import port


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Sets the range that the kernel chooses from."""

    def set_(text):
        path = tmp_path / "range"
        path.write_text(text)
        monkeypatch.setattr(port, "RANGE", path)

    return set_


def choose(monkeypatch, *ports):
    left = list(ports)

    class Random:
        def randrange(self, low, high):
            assert left and low <= left[0] < high
            return left.pop(0)

    monkeypatch.setattr(port.random, "SystemRandom", Random)
    return left


def test_it_is_below_the_kernels(kernels):
    kernels("20000\t30000\n")
    assert all(1024 <= port.free_port() < 20000 for _ in range(50))


def test_one_that_is_taken_is_passed_over(kernels, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        kernels(f"{number + 1} {number + 100}")
        other = next(n for n in range(number - 1, 1024, -1) if port._is_free(n))
        left = choose(monkeypatch, number, other)
        assert port.free_port() == other and not left


@pytest.mark.parametrize("text", ["1024 65535", "", "no numbers"])
def test_where_the_kernel_leaves_none_it_chooses(kernels, monkeypatch, text):
    kernels(text)
    left = choose(monkeypatch)
    assert port._is_free(port.free_port()) and not left
