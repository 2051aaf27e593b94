"""The standalone node agent: pods from a folder of manifests, devices for the container runtime.

A promise about this room: it keeps no state of its own that matters. What is owed is in the ledger,
what is wanted is in the folder, and everything else can be made again from the two.
"""
