"""Fixtures of the agent's tests."""

from agent_node import node

__all__ = ["node"]
