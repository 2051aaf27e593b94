"""Fixtures of the manager's tests."""

from manager_node import manager, node

__all__ = ["manager", "node"]
