"""rankcast as a weight-transfer backend of vLLM.

What vLLM calls comes in through ``plugin``. How weights get into its layers is in ``adapter``; the modules of hooks
know the calls that they are put around. Nothing here imports vLLM before vLLM itself asks for it.
"""
