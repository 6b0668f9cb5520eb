"""A pytest plugin: writes the ids of the tests and files that were skipped to the file $SKIPPED."""

import os
from pathlib import Path


def pytest_terminal_summary(terminalreporter):
    ids = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    Path(os.environ["SKIPPED"]).write_text("\n".join(sorted(ids)))
