"""Settings: composed from dataclasses, files of conf/ and the command line (`compose`), read by programs (`program`), swept over (`sweep`).
The only importer of Hydra and OmegaConf.
"""

from aligner.config.compose import compose, fingerprint, from_yaml, override, schema_of, search_path, to_yaml
from aligner.config.program import Command, entrypoint, parse

__all__ = ["Command", "compose", "entrypoint", "fingerprint", "from_yaml", "override", "parse", "schema_of", "search_path", "to_yaml"]
