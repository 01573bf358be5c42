"""doit tasks of the models in ``neml2-build.toml``: ``doit list --all``, ``doit info lower-cpu:rates``, ``doit clean``."""

from pathlib import Path

from neml2_build import Manifest, create_tasks

Path("cache").mkdir(exist_ok=True)  # doit opens its database before it asks for tasks
DOIT_CONFIG = {"dep_file": "cache/doit.db", "backend": "sqlite3", "verbosity": 2}


def task_neml2():
    yield from create_tasks(Manifest.load())
