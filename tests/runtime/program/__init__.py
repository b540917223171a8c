"""The parts behind a program's ``ctx``: strategies, coordinators, peers, and the check of Keras."""
