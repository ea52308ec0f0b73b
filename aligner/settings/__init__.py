"""Settings: composed from dataclasses, files of conf/ and the command line, checked, explained, and named as other frameworks call them.

`compose` is the only module that imports Hydra; the programs that read a command line are in `aligner.run.program`.
"""
