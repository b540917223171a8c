"""What a program's ``ctx`` stands on: strategies, coordinators, peers, and the check of Keras."""
