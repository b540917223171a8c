"""The driver's side of a cluster: members, jobs and outcome, mostly with nodes that a test plays at a real door."""
