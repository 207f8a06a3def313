"""How processes send each other tensors of accelerators: the choice, and channels over NCCL, on imitated ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import imitated_accelerator, imitated_nccl
from support.imitated_accelerator import DEVICE, FarTensor, RaceError
from support.imitated_nccl import ImitatedNccl
from support.running import PATIENCE_S, wait_until
from torch import distributed

from moestro.model import channels
from moestro.model.channels import CPU, TensorChannel, TensorChannels, choose_backend, describe_backend, name_device
from moestro.model.experts.exchange import GroupExchange, GroupPlace, Meeting
from moestro.model.staged.staged_device import TorchFrames

OTHER = "another card"


@pytest.fixture(autouse=True)
def _imitated(monkeypatch) -> Iterator[None]:
    with imitated_accelerator.imitated(monkeypatch):
        torch.cuda.set_device(DEVICE)
        yield


@pytest.fixture
def nccl(monkeypatch) -> None:
    imitated_nccl.imitate(monkeypatch)
    monkeypatch.setattr(ImitatedNccl, "shares_card", True)  # both ends are in this process


@pytest.mark.parametrize(
    ("names", "has_nccl", "backend", "words"),
    [
        (("a", "b"), True, "nccl", "has a GPU of its own"),
        (("a", "b", "c"), True, "nccl", "NCCL"),
        (("a", "b", "a"), True, "gloo", "share a GPU"),
        (("a", "b"), False, "gloo", "built without NCCL"),
        (("a", CPU), True, "gloo", "has no GPU"),
        ((CPU, CPU), True, "gloo", ""),
        ((CPU,), True, "gloo", ""),
    ],
)
def test_nccl_is_chosen_where_each_process_has_a_gpu_of_its_own(names, has_nccl, backend, words, monkeypatch):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: has_nccl)
    assert choose_backend(names) == backend
    assert words in describe_backend(names)
    assert bool(describe_backend(names)) == bool(words)


def test_a_device_is_named_by_its_card_and_not_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    assert name_device(torch.device("cpu")) == CPU
    assert name_device(torch.device("cuda", 3)) == "GPU-3"


class NoHost:
    """Carries nothing."""

    def gather(self, numbers):
        raise NotImplementedError

    def swap(self, sent, received):
        raise NotImplementedError


@pytest.mark.parametrize("other", [OTHER, "imitated-0"])
def test_a_group_begins_with_the_backend_of_all_its_devices(other, monkeypatch):
    calls = []
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed, "init_process_group", lambda *args, **options: calls.append((args, options)))
    store = distributed.HashStore()
    store.set("device-1", other)
    group = GroupExchange(GroupPlace(worker=0, num_workers=2, timeout_s=9.0), Meeting(store, NoHost()), DEVICE)
    assert store.get("device-0") == b"imitated-0"
    options = {
        "store": store, "rank": 0, "world_size": 2, "timeout": timedelta(seconds=9), "device_id": DEVICE,
    }  # fmt: skip
    assert calls == ([(("nccl",), options)] if other == OTHER else [])
    assert ("NCCL, because each" in group.note) == (other == OTHER)
    assert ("sockets through host memory, because processes share" in group.note) == (other != OTHER)


class Ends:
    """Both ends of a channel over NCCL in one process."""

    def __init__(self) -> None:
        have_begun = threading.Event()
        self.news = threading.Event()

        def tell(other: int):
            def to_other(key: str, value: bytes) -> None:
                assert have_begun.wait(PATIENCE_S)
                self.ends[other].on_message(key, value)

            return to_other

        channels = TensorChannels("127.0.0.1", DEVICE)
        self.ends: list[TensorChannel] = [channels.open(i, OTHER, tell(1 - i), self.news.set) for i in range(2)]
        have_begun.set()
        wait_until(lambda: all(end.is_open or end.is_broken for end in self.ends))

    def close(self) -> None:
        for end in self.ends:
            end.close()
        assert all(end.join(PATIENCE_S) for end in self.ends)


@pytest.fixture
def ends(nccl) -> Iterator[Ends]:
    with contextlib.closing(Ends()) as both:
        assert all(end.is_open for end in both.ends)
        yield both


def there(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(DEVICE)


def taken(end: TensorChannel, num: int) -> list[bytes]:
    found: list[bytes] = []

    def has_all() -> bool:
        assert not end.is_broken
        while (frame := end.take()) is not None:
            assert isinstance(frame, FarTensor)
            found.append(frame.cpu().numpy().tobytes())
        return len(found) >= num

    wait_until(has_all)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_tensors_arrive_in_order_in_both_directions_and_nothing_waits_for_the_other(ends, seed):
    rng = np.random.default_rng(seed)
    assert all(end.reaches_device for end in ends.ends)
    tensors = [[rng.integers(0, 256, int(rng.choice([1, 100, 5000])), np.uint8) for _ in range(12)] for _ in range(2)]
    sends = [list(each) for each in tensors]
    expects = [[len(tensor) for tensor in each] for each in tensors]
    for end in range(2):  # both send before either receives: one group for both directions would never end
        ends.ends[end].send(there(sends[end].pop(0)))
    while any(sends) or any(expects):
        end = int(rng.integers(2))
        if rng.random() < 0.5 and sends[end]:
            ends.ends[end].send(there(sends[end].pop(0)))
        elif expects[end]:
            ends.ends[1 - end].expect(expects[end].pop(0))
    for end in range(2):
        assert taken(ends.ends[1 - end], 12) == [tensor.tobytes() for tensor in tensors[end]]
    assert not any(end.is_broken for end in ends.ends)


def test_the_memory_of_a_receive_is_not_read_before_it_has_ended(ends):
    """The imitation fails where a stream reads what another one writes; the channel hands over what is there."""
    wire = ends.ends[1]._wire
    work, frame = wire.receive(3)
    with pytest.raises(RaceError):
        frame + 1
    ends.ends[0].send(there(np.arange(3, dtype=np.uint8)))
    wire.wait(work)
    assert (frame + 1).cpu().tolist() == [1, 2, 3]


def test_a_receive_without_a_send_ends_by_an_abort_and_breaks_the_channel(nccl, monkeypatch):
    monkeypatch.setattr(channels, "TRANSFER_S", 1.0)
    with contextlib.closing(Ends()) as both:
        both.ends[1].expect(5)
        wait_until(lambda: both.ends[1].is_broken)
        assert both.ends[1].take() is None


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_close_ends_what_is_under_way_without_a_wait_for_the_other_end(ends, is_sending):
    end = ends.ends[0]
    if is_sending:
        end.send(there(np.zeros(9, np.uint8)))
    else:
        end.expect(9)
    end.close()
    assert end.join(PATIENCE_S)
    assert end.take() is None
    assert not any(thread.name.startswith("tensors") and thread is end._receiver for thread in threading.enumerate())


def test_two_processes_on_one_card_would_be_refused_so_gloo_is_chosen(monkeypatch):
    imitated_nccl.imitate(monkeypatch)
    channels = TensorChannels("127.0.0.1", DEVICE)
    assert not channels.reaches_device(channels.device_name)
    assert channels.reaches_device(OTHER)
    both = Ends()  # wrongly over NCCL
    wait_until(lambda: all(end.is_broken for end in both.ends))
    both.close()
    assert channels.describe([channels.device_name, OTHER, OTHER]) == (
        "large tensors go to 2 of 3 workers by NCCL, because each process has a GPU of its own; large tensors go to 1"
        " of 3 workers by gloo through host memory, because processes share a GPU, which NCCL refuses"
    )


def test_frames_of_the_host_and_of_the_device_hold_the_same_bytes():
    frames = TorchFrames(SimpleNamespace(vector_form=(8, torch.bfloat16)))
    rows = torch.arange(32, dtype=torch.bfloat16).view(4, 8).to(DEVICE)
    flat = frames.flatten(rows)
    assert flat.device == DEVICE
    assert bytes(frames.pack(rows)) == flat.cpu().numpy().tobytes()
    assert (frames.unpack(flat, 4).cpu() == rows.cpu()).all()
    with pytest.raises(ValueError, match="64 bytes of tensor for 3 rows"):
        frames.unpack(flat, 3)
