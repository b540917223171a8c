"""Choose the reader for each kind of model file.

::

    .keras, .h5                      by Keras 3, or by tf_keras if Keras 2 wrote it  keras_model.py
    directory with saved_model.pb    by a signature, or by the names of tensors      saved_model.py
    directory with checkpoints       with a .keras file or the model function        checkpoint_model.py
"""

from __future__ import annotations

import os

from tfos_nb.runtime.models.checkpoint_model import load_checkpoint
from tfos_nb.runtime.models.classifier_outputs import with_heads
from tfos_nb.runtime.models.keras_model import load_keras
from tfos_nb.runtime.models.model import WHOLE, Model, Use, check_directory, check_file, is_saved_model
from tfos_nb.runtime.models.saved_model import load_saved_model

__all__ = ["load"]


def load(path: str, use: Use = WHOLE) -> Model:
    """Load a Keras file, a SavedModel or the newest checkpoint of a directory.

    Parameters
    ----------
    path : str
        Local path of the file or directory.
    use : Use
        Part of the model that is used.

    Raises
    ------
    ModelUnusable
        If it is none of them, cannot be read, or does not describe its inputs and outputs.

    Examples
    --------
    >>> model = load("/models/mnist.keras")  # doctest: +SKIP
    >>> [scores] = model.apply([np.zeros((2, 28, 28), "float32")])  # doctest: +SKIP
    >>> scores.shape  # doctest: +SKIP
    (2, 10)
    """
    if not os.path.isdir(path):
        check_file(path)
        model = load_keras(path, use)
    else:
        check_directory(path)
        model = load_saved_model(path, use) if is_saved_model(path) else load_checkpoint(path, use)
    return with_heads(model, use.heads) if use.heads else model
