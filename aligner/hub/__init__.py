"""Models and data sets of the Hugging Face Hub by name: found in the local cache or downloaded once; and uploads of exports.

`names` reads ORG/NAME[@REV], `download` turns it into a directory. `aligner.run.from_hub` does so for the settings of a run.
"""
