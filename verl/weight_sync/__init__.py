"""Hand weights from the trainer to the rollout: named tensors, in buckets, the fastest way."""

from verl.weight_sync.base import (
    ProofSchedule,
    WeightReceiver,
    WeightSender,
    WeightTaker,
    receive_into,
)
from verl.weight_sync.choice import Endpoint
from verl.weight_sync.direct import DirectSender
from verl.weight_sync.fingerprint import Fingerprint, FingerprintLog
from verl.weight_sync.link import Meeting, Offer, Route, join, plan_routes

__all__ = [
    "DirectSender",
    "Endpoint",
    "Fingerprint",
    "FingerprintLog",
    "Meeting",
    "Offer",
    "ProofSchedule",
    "Route",
    "WeightReceiver",
    "WeightSender",
    "WeightTaker",
    "join",
    "plan_routes",
    "receive_into",
]
