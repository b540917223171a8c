"""Print as the last line how many tasks the submitted session runs at once."""

from __future__ import annotations

import json

from tfos_nb import spark_session
from tfos_nb.spark.slots import slots_total

if __name__ == "__main__":
    print(json.dumps({"outcome": {"slots": slots_total(spark_session(), at_least=4)}}))
