"""How the user's code is sent to the executors: what is included, and what cannot be sent."""
