"""Settings that are applied before a device is used."""

import os

import pytest
import torch

from verl.single_controller.ray_ranks import forwarded
from verl.utils.devices import ALLOCATOR_SETTINGS, leave_free, visible_device


def test_the_allocator_grows_its_segments_on_every_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(ALLOCATOR_SETTINGS, "")  # so that it is undone
    monkeypatch.delenv(ALLOCATOR_SETTINGS)
    visible_device("cpu")
    assert forwarded()[ALLOCATOR_SETTINGS] == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS])
def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.delenv(ALLOCATOR_SETTINGS, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    visible_device("cpu")
    assert os.environ[name] == "max_split_size_mb:512"
    assert (ALLOCATOR_SETTINGS in os.environ) == (name == ALLOCATOR_SETTINGS)


@pytest.mark.parametrize(
    ("device", "free", "emptied"), [("cuda", 29, 1), ("cuda", 30, 0), ("cpu", 0, 0)]
)
def test_memory_kept_for_later_is_given_up_where_others_lack_it(
    monkeypatch: pytest.MonkeyPatch, device: str, free: int, emptied: int
):
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    leave_free(0.3, torch.device(device))
    assert len(calls) == emptied
