"""The doctor: each of its checks finds what is wrong, and says what to do."""
