"""``rankcast demo``: a small expert-parallel trainer pushes every step into a running fleet, and the oracle looks on.

``command`` knows the whole story; ``trainer`` is what runs in a trainer rank's process. This file must import neither.
"""
