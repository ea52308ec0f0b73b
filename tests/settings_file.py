"""Write conf/settings.json: every setting of every config in conf/, so that `--help` need not import the recipes (`make settings`)."""

from __future__ import annotations

import json

from aligner.algorithms.registry import recipe_of
from aligner.files import conf_directory, configs
from aligner.settings.compose import compose_node, shown_values
from aligner.settings.explain import SETTINGS_FILE, groups_of
from aligner.settings.schema import schema_keys


def content() -> str:
    """The file as it should be: a line for each config, and for each distinct setting with its value."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name in configs():
        recipe = recipe_of(name)
        keys = list(schema_keys(recipe.config, described=True))
        values = dict(shown_values(compose_node(recipe.config, name, (), recipe.folders()), keys))
        rows = [json.dumps([one.key, one.type, one.comment, one.section, one.open, values.get(one.key)]) for one in keys]
        found[name] = rows, groups_of(keys, recipe.folders())
    distinct = sorted({row for rows, _ in found.values() for row in rows})
    place = {row: i for i, row in enumerate(distinct)}
    written = [
        f"{json.dumps(name)}: {json.dumps({'groups': groups, 'rows': [place[row] for row in rows]})}"
        for name, (rows, groups) in found.items()
    ]
    return '{"configs": {\n' + ",\n".join(written) + '\n}, "rows": [\n' + ",\n".join(distinct) + "\n]}\n"


if __name__ == "__main__":
    (conf_directory() / SETTINGS_FILE).write_text(content())
