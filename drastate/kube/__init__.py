"""Where pods and ResourceClaims come from: API server, folder of manifests, objects in hand.

Cluster objects go in, `drastate.model` values come out. Nothing here knows the ledger, the drivers
or the manager, and importing this package loads neither the cluster client nor a YAML parser.
"""
