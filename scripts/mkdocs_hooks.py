"""Pages that the documentation's build makes from the code: the config reference and the commands."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

MADE = {"reference/config.md": "config_page", "reference/cli.md": "cli_page"}


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to the site."""
    for uri, script in MADE.items():
        page = runpy.run_path(str(Path(__file__).with_name(f"{script}.py")))["page"]
        files.append(File.generated(config, uri, content=page()))
    return files
