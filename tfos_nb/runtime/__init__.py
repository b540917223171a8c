"""Everything that runs on an executor, and both ends of every wire.

The input is Spark tasks with a plan, the user's code and rows. The output is messages to the driver, trained models and
rows with results. ``docs/how-it-works.md`` shows the processes. Any package may import the packages of the runtime;
these import nothing outside the runtime but ``tfos_nb.errors`` and other modules of the lowest layer. They import no
notebook library, and TensorFlow only inside functions.
"""
