"""docs/config.md is what the schema says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _script():
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "scripts" / "make_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_current():
    script = _script()
    message = "run `python scripts/make_config_docs.py`"
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), message


def test_a_row_names_the_flag_and_what_is_not_built():
    rows = [line for line in _script().render().splitlines() if line.startswith("| `context_parallel_size`")]
    assert rows == [
        "| `context_parallel_size` | int | `1` |  | devices that share each sequence. **Not built yet** (context"
        " parallelism). | `--context-parallel-size` |"
    ]
