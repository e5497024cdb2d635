"""What an engine's loader does with a checkpoint, recorded without a byte being moved.

This package knows torch's operators and how loaders use them. It must not know engines, transports or sessions.
"""
