"""The claim ledger: what is owed to which driver, for which pod, in one SQLite file.

A promise about this room: one connection writes and checkpoints, every other one opens `mode=ro`;
what memory shows is only what a commit has made durable; nothing here calls a driver or a cluster.
"""
