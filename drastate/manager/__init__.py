"""Decides what is prepared and unprepared, and when. Loads no grpc and no cluster client by itself.

A promise about this room: the intent is durable before a driver is called, a driver is never told
to let go of a claim that a pod still holds, and no lock is held while a driver works.
"""
