"""The session, its slots, its Java and its monitor."""
