"""Models and data sets of the Hugging Face Hub by name: found in the local cache or downloaded, once; and exports uploaded to it.

`names` reads ORG/NAME[@REV], `download` makes a directory of it. `aligner.run.from_hub` does so for the settings of a run.
"""
