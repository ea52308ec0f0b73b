"""One function per kind of component: builds its parts from a root config and runs it. The entry scripts in examples/ call these."""
