"""Weights from the trainer to whoever generates: named tensors, in buckets, over the transport that
fits."""

from verl.weight_sync.base import (
    NamedTensors,
    ProofSchedule,
    WeightReceiver,
    WeightSender,
    WeightTaker,
    receive_into,
)
from verl.weight_sync.choice import Endpoint, Link, choose_transport
from verl.weight_sync.direct import DirectSender
from verl.weight_sync.fingerprint import Fingerprint, FingerprintLog

__all__ = [
    "DirectSender",
    "Endpoint",
    "Fingerprint",
    "FingerprintLog",
    "Link",
    "NamedTensors",
    "ProofSchedule",
    "WeightReceiver",
    "WeightSender",
    "WeightTaker",
    "choose_transport",
    "receive_into",
]
