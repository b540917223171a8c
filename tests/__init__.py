"""The folders of tests are those of the package, and each tests the modules of the one that has its name.

``browser``, ``cluster_managers``, ``docs``, ``end_to_end``, ``fuzz``, ``keras_parity``, ``notebooks`` and ``project``
test what no folder of the package has to itself. Here are the tests of ``tfos_nb``'s own modules, what tests of several
folders use, and the programs that make runs: ``ends``, ``matrix``, ``quick_java`` and ``soak``.
"""
