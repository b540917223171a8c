"""The machine of a cluster's members, without a door and without Spark: events in, commands out."""
