"""``format("tfrecord")`` without registration by the user: the package registers it with each session that it uses."""

from __future__ import annotations

import pyspark
import pytest

from tests.conftest import RunScript

if pyspark.__version__ < "4":
    pytest.skip("Spark 3.5 has no data sources in Python", allow_module_level=True)

SCRIPT = """
    import os, sys, tempfile
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable

    def main(args, ctx):
        return "done"

    def there_and_back(spark, folder):
        spark.range(5).write.format("tfrecord").mode("overwrite").save(folder)
        print(type(spark).__name__, spark.read.format("tfrecord").load(folder).count())

    if __name__ == "__main__":
        folder = tempfile.mkdtemp(prefix="registration-")
        first = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()

        from IPython.core.interactiveshell import InteractiveShell
        import tfos_nb
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "tfos_nb")
        there_and_back(first, folder)
        assert "tfos_nb.tfrecord" in sys.modules
        shell.run_line_magic("reload_ext", "tfos_nb")

        second = first.newSession()
        with tfos_nb.launch(main, workers=1, spark=second, input_mode="tensorflow"):
            there_and_back(second, folder)
        tfos_nb.tfrecord.register(second)

        first.stop()
        third = tfos_nb.spark_session(2, conf={"spark.ui.enabled": "false"})
        there_and_back(third, folder)
        third.stop()
        assert not [name for name in ("tensorflow", "keras") if name in sys.modules]
"""


@pytest.mark.slow
def test_a_session_loaded_launched_or_started_here_knows_the_format(run_script: RunScript) -> None:
    ended = run_script(SCRIPT)
    assert ended.stdout.split().count("5") == 3
    assert "already" not in ended.stderr
    assert "replaced" not in ended.stderr
