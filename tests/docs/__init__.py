"""What the pages say is so: their blocks run, their names and messages stand in the code, their manifests are valid."""
