"""The user's code on its way to the executors: what goes along, and what cannot."""
