"""What made a head: a recipe that repeats the run, and where it ran, beside the weights."""

import json
import sys
from pathlib import Path

from outrider.data.files import write_whole
from outrider.eval.report.provenance import provenance
from outrider.train.recipe import to_yaml
from outrider.train.settings import Settings


def write_provenance(output: Path, settings: Settings) -> None:
    """Write settings.yaml and provenance.json."""
    write_whole(output / "settings.yaml", to_yaml(settings))
    facts = {"command": sys.argv, **provenance()}
    write_whole(output / "provenance.json", json.dumps(facts, indent=1) + "\n")
