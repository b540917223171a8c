"""Tests of the patches of Keras: what each one fixes, with one worker or two.

``tests/keras_parity`` compares the results of whole Keras programs with those of a single process.
"""
