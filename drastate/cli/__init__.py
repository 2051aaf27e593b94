"""The command line. A module per command, loaded when the command is used.

A promise about this room: the inspecting commands read the ledger and nothing else; they load
neither grpc nor a cluster client, and leave no trace beside the files they read.
"""
