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
from verl.weight_sync.choice import Endpoint, choose_transport
from verl.weight_sync.direct import DirectSender
from verl.weight_sync.fingerprint import Fingerprint, FingerprintLog
from verl.weight_sync.link import Meeting, Offer, Route, join, plan_routes

__all__ = [
    "DirectSender",
    "Endpoint",
    "Fingerprint",
    "FingerprintLog",
    "Meeting",
    "NamedTensors",
    "Offer",
    "ProofSchedule",
    "Route",
    "WeightReceiver",
    "WeightSender",
    "WeightTaker",
    "choose_transport",
    "join",
    "plan_routes",
    "receive_into",
]
