"""What a training goes on from after a loss: checkpoints, and states that the supervisors hold in memory.

In come a program's states, with how far it is in its rows; out comes the state of one moment on all nodes. It imports
the feed, whose positions it keeps, and what lies below.
"""
