"""The patches of Keras, each by what it mends in one worker or two.

Whether whole Keras programs come to the numbers of one process, ``tests/keras_parity`` shows.
"""
