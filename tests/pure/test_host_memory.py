"""A block of shared host memory: it cannot shrink under its readers, and nothing else is taken for
it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import tileweave as tw

pytest.importorskip("fcntl")

from tileweave.transport import host_memory

if not hasattr(os, "memfd_create"):
    pytest.skip("no anonymous memory here", allow_module_level=True)

NBYTES = 8192


@pytest.fixture
def block() -> Iterator[int]:
    descriptor = host_memory._make("a-token", NBYTES)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1, 2 * NBYTES])
def test_shared_block_keeps_its_size(block: int, nbytes: int) -> None:
    """A rank that maps a block that ends early would get a SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(block, nbytes)
    assert os.fstat(block).st_size == NBYTES


def test_shared_block_is_allocated_when_created(block: int) -> None:
    assert os.fstat(block).st_blocks * 512 >= NBYTES


@pytest.mark.parametrize("token", ["another", "b-token"])
def test_another_block_is_not_taken_for_a_peers(block: int, token: str) -> None:
    """Its number may have been reused since, and other bytes would be taken for those of a peer."""
    with pytest.raises(tw.UnsupportedError, match="something else is there"):
        host_memory._open(f"{os.getpid()} {block} {token}", NBYTES)


def test_memory_of_another_user_is_not_taken_for_a_peers(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reaches the store could announce a block of its own, with the right token."""
    user = os.geteuid()
    monkeypatch.setattr(host_memory.os, "geteuid", lambda: user + 1)
    with pytest.raises(tw.UnsupportedError, match="another user's"):
        host_memory._open(f"{os.getpid()} {block} a-token", NBYTES)


def test_all_ranks_have_mapped_a_block_before_one_goes_on() -> None:
    """A rank that goes on may end its process, and its block could not be opened any more."""
    said: list[str] = []

    def exchange(text: str) -> list[str]:
        said.append(text)
        return [text]

    mapped = host_memory.share(NBYTES, 0, [0], exchange)
    assert len(mapped[0]) == NBYTES
    assert [text.partition("|")[0] for text in said] == ["memory", "mapped"]


def test_file_is_not_taken_for_a_peers_block(tmp_path) -> None:
    place = tmp_path / "tileweave-a-token"
    place.write_bytes(bytes(NBYTES))
    with (
        place.open("r+b") as file,
        pytest.raises(tw.UnsupportedError, match="something else is there"),
    ):
        host_memory._open(f"{os.getpid()} {file.fileno()} a-token", NBYTES)


def test_writes_are_visible_to_the_other_mapping(block: int) -> None:
    with (
        host_memory._open(f"{os.getpid()} {block} a-token", NBYTES) as there,
        host_memory._open(f"{os.getpid()} {block} a-token", NBYTES) as here,
    ):
        assert here[:] == bytes(NBYTES)
        there[NBYTES - 1] = 7
        assert here[NBYTES - 1] == 7
