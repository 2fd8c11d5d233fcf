"""The queues that people use otherwise, each doing the work of `rollfab bench queue` in its natural fast form.

One module per peer, each the program of one child process. Nothing is imported here: a peer's interpreter may have
nothing installed but that peer.
"""
