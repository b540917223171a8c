"""What a cluster looks like at one moment, and what is kept of its past to show.

In come reports and lines of output; out come immutable snapshots. All views, in a notebook and in a terminal, are made
of these alone. It imports nothing that speaks to Spark or to a node.
"""
