"""Saved models as functions of arrays: their inputs, their outputs, and the rows that they are applied to."""
