"""Fakes for the tests of drastate and of whoever embeds it.

They speak the real protocols: `drastate.testing.driver` is a DRA driver on real unix sockets.
Nothing is imported here, so that a test pays only for the fake it uses.
"""
