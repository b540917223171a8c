"""Tests: each folder has the name of a folder of the package, and tests its modules.

``browser``, ``cluster_managers``, ``docs``, ``end_to_end``, ``fuzz``, ``keras_parity``, ``notebooks`` and ``project``
test things that belong to no single folder of the package. This folder has the tests of ``tfos_nb``'s own modules,
helpers of several folders, and the programs that ``make`` runs: ``ends``, ``matrix``, ``quick_java`` and ``soak``.
"""
