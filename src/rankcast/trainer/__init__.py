"""The trainer's side: where weights come from, how trainer ranks agree, and the push.

This package knows nothing itself; its modules must not know ``rollout``, and no engine by name.
"""
