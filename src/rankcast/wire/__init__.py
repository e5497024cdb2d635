"""The wire: records, handles, the codec and its MAC, and the forms a payload may take.

Everything here is plain data and pure functions over it; nothing here opens, connects, copies, or knows torch.
"""
