"""The doctor: each check finds its problem and says what to do."""
