"""Rollout engines that rankcast plugs into, one package each.

This package knows nothing itself; each engine's package knows its engine and must not know another's.
"""
