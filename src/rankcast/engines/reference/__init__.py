"""The embedded rollout engine: a small mixture-of-experts decoder, sharded as real engines shard.

Modules are imported by their own names; importing this package loads no torch. Nothing here knows how new weights
travel: the model offers ``load_weights`` and named parameters, as any engine's model does.
"""
