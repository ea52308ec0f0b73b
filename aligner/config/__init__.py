"""Settings: composed from dataclasses, files of conf/ and the command line (`compose`), read by programs (`program`), swept over (`sweep`),
with directories in place of names of the Hugging Face Hub (`from_hub`). The only importer of Hydra and OmegaConf.
"""

from aligner.config.as_file import as_file
from aligner.config.compose import compose, fingerprint, from_yaml, override, schema_of, search_path, to_yaml
from aligner.config.from_hub import fetch_named, fetch_one, with_names
from aligner.config.program import Command, entrypoint, parse

__all__ = [
    "Command",
    "as_file",
    "compose",
    "entrypoint",
    "fetch_named",
    "fetch_one",
    "fingerprint",
    "from_yaml",
    "override",
    "parse",
    "schema_of",
    "search_path",
    "to_yaml",
    "with_names",
]
