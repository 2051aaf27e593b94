"""Cluster objects in, model values out: the one place to import the readers from."""

from __future__ import annotations

from drastate.kube.claim import parse_claim
from drastate.kube.pod import parse_pod, parse_pod_uid

__all__ = ["parse_claim", "parse_pod", "parse_pod_uid"]
