"""rankcast as a weight-transfer backend of vLLM.

What vLLM calls comes in through ``plugin``; everything that touches vLLM's insides is in ``adapter``. Nothing here
imports vLLM before vLLM itself asks for it.
"""
