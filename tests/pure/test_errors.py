"""Errors: which classes a caller can catch, and what a message must say."""

from __future__ import annotations

import pickle

import pytest
import torch

import tileweave as tw
from tileweave.errors import PeerTimeout, Waited, require
from tileweave.ops.matmul.all_gather_matmul import check_inputs


def test_error_classes_a_caller_can_catch() -> None:
    for error in (
        tw.InputError,
        tw.RankMismatchError,
        tw.CaptureError,
        tw.UnsupportedError,
        tw.PeerTimeout,
    ):
        assert issubclass(error, tw.TileweaveError)
    assert issubclass(tw.InputError, ValueError)
    assert issubclass(tw.RankMismatchError, tw.InputError)
    for error in (tw.CaptureError, tw.UnsupportedError, tw.PeerTimeout):
        assert issubclass(error, RuntimeError)


def test_require_message_has_three_parts() -> None:
    require(True, "a", "b", "c")
    with pytest.raises(tw.InputError, match=r"^asked: a; allowed: b; remedy: c$"):
        require(False, "a", "b", "c")


def test_timeout_message_names_everything() -> None:
    error = PeerTimeout("all_gather_matmul", 2, 1, 17, 40, 39, 2.5)
    assert (error.op, error.rank, error.peer, error.unit) == ("all_gather_matmul", 2, 1, 17)
    assert (error.expected, error.seen, error.seconds) == (40, 39, 2.5)
    for part in (
        error.op,
        "rank 2",
        "rank 1",
        "unit 17",
        "epoch 40",
        "saw 39",
        "2.5 s",
        "TILEWEAVE_TIMEOUT",
    ):
        assert part in str(error)
    assert "tileweave.close" in str(error), "the way on is in the message"


def test_timeout_message_at_a_barrier() -> None:
    text = str(PeerTimeout("barrier", 0, -1, -1, 0, 0, 30.0))
    assert "barrier" in text
    assert "rank -1" not in text
    assert "unit -1" not in text


@pytest.mark.parametrize("at", ["meeting", "closed"])
def test_timeout_message_on_the_host_has_no_epochs(at: Waited) -> None:
    text = str(PeerTimeout("mapping symmetric memory", 0, 2, -1, 0, 0, 30.0, at))
    assert (
        "mapping symmetric memory" in text
        and "rank 2" in text
        and "Remedy: " in text
        and "tileweave.close" in text
    )
    assert "epoch" not in text and "barrier" not in text
    assert ("has closed its workspace" in text) == (at == "closed") and ("30 s" in text) == (
        at == "meeting"
    )
    assert "some rank" in str(
        PeerTimeout("mapping symmetric memory", 0, -1, -1, 0, 0, 30.0, "meeting")
    )


@pytest.mark.parametrize("seconds", [2.5, 0.0], ids=["no answer", "gone"])
def test_message_about_the_store_names_its_host(seconds: float) -> None:
    text = str(PeerTimeout("a gather", 1, -1, -1, 0, 0, seconds, "store", "10.0.0.1:29500"))
    assert all(part in text for part in ("a gather: rank 1", "10.0.0.1:29500", "Remedy: "))
    assert ("2.5 s" in text) == bool(seconds) and "some rank" not in text


@pytest.mark.parametrize("at", ["signal", "meeting", "closed", "store"])
def test_timeout_survives_pickling(at: Waited) -> None:
    """Launchers and process pools pass exceptions from process to process."""
    error = PeerTimeout("all_gather_matmul", 2, 1, 17, 40, 39, 2.5, at, "10.0.0.1:29500")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is PeerTimeout
    assert str(back) == str(error)
    assert (back.peer, back.seen, back.seconds, back.at) == (1, 39, 2.5, at)


# --- Inputs that are wrong on one rank ---

X, W = torch.zeros(4, 8), torch.zeros(6, 8)


def refused(*args: object) -> str:
    with pytest.raises(tw.InputError) as caught:
        check_inputs(*args, 2)
    text = str(caught.value)
    assert all(part in text for part in ("asked: ", "; allowed: ", "; remedy: ")), text
    return text


def test_sound_inputs_pass() -> None:
    check_inputs(X, W, None, None, 2)
    check_inputs(X, W, torch.zeros(6), torch.zeros(8, 6), 2)
    check_inputs(X, torch.zeros(6, 20)[:, 3:11], None, None, 2)
    check_inputs(torch.zeros(4, 1), torch.zeros(1, 6).t(), None, None, 2)
    check_inputs(torch.zeros(0, 8), torch.zeros(0, 8), torch.zeros(0), torch.zeros(0, 0), 2)


def test_inputs_on_another_device_are_refused() -> None:
    assert "meta" in refused(X, W.to("meta"), None, None)
    assert "meta" in refused(X, W, torch.zeros(6, device="meta"), None)
    assert "meta" in refused(X, W, None, torch.zeros(8, 6, device="meta"))


def test_the_message_shows_what_was_passed() -> None:
    text = refused(X, torch.zeros(8, 6), None, None)
    assert "(4, 8)" in text
    assert "(8, 6)" in text
    assert "float64" in refused(X.double(), W.double(), None, None)
    assert "(8, 6)" in refused(X, W, None, torch.zeros(4, 6)), "the shape that out must have"


def test_the_default_group_needs_torch_distributed() -> None:
    with pytest.raises(tw.InputError, match="init_process_group"):
        tw.all_gather_matmul(X, W)


def test_unknown_operators_are_refused() -> None:
    for ask in (tw.explain, tw.warmup):
        with pytest.raises(tw.InputError, match="all_gather_matmul"):
            ask("all_gather_matmull", X, W)


def test_warmup_refuses_negative_sizes() -> None:
    with pytest.raises(tw.InputError, match="-1"):
        tw.warmup("all_gather_matmul", 4, -1, 8, device="cpu")


def test_long_words_are_not_repeated_whole() -> None:
    error = tw.RankMismatchError(f"asked: group {'x' * 100_000}; allowed: one; remedy: pass it")
    assert str(error).endswith("; allowed: one; remedy: pass it") and len(str(error)) < 400
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    path = "/".join(["folder"] * 50)  # 349 characters
    assert path in str(tw.InputError(f"asked: {path}"))
