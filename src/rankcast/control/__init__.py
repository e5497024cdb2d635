"""The control plane: clients that drive engines, and the channel on which workers report back.

Everything here moves small records between processes. Nothing here knows tensors, sessions' rules, or what is pushed.
"""
