"""Data planes: how one process exports a segment and another opens its handle.

This package knows memory, descriptors and limits of a host. It must not know sessions, entries or who talks to whom.
"""
