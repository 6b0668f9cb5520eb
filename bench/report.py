"""`python -m bench report DIR`: the records in a folder as Markdown tables, for README.md and docs/.

A column that is empty in all rows is left out. One that says the same in all rows, of three or more, stands above the
table.
"""

from collections import Counter
from pathlib import Path

from bench import cell, exact, peers
from bench.decoding import DECODING, LAUNCHES, STEPS, TEXTS, tree_columns
from bench.kinds import accuracy_columns, accuracy_rows, decoding_columns
from bench.operations import OPERATIONS
from bench.static import TARGETS
from model import InputError, read_json

# ---------------------------------------------------------------------------------------------------------------------
# What a record holds: (title, columns, rows), ...

def decode_tables(record):
    title = f"Decoding {record['model']}, heads {record['heads'][-1]}, {TEXTS[record['text']]}"
    yield f"{title}, temperature {record['temperature']:g}", DECODING, record["decoding"]
    ratios = [dict(batch_size=size, ratio=ratio) for size, ratio in record["auto_over_best"].items()]
    yield "auto over the best single variant", {"batch size": "batch_size {}", "speed-up": "ratio {:.2f}x"}, ratios
    trees = record.get("trees", {})
    rows = [dict(drafted_by=name) | row for name, row in trees.items()]
    yield "Tokens per step over tree sizes", tree_columns(next(iter(trees.values()), ())), rows


def step_tables(record):
    yield f"Steps of {record['model']} with random weights", STEPS | peers.COLUMNS | LAUNCHES, record["steps"]


def exact_tables(record):
    yield f"Verifying with {record['model']}, what bits that never differ cost", exact.COLUMNS, record["verify"]


def heads_tables(record):
    yield f"Head accuracy, {record['model']}", accuracy_columns(record["accuracy"]), accuracy_rows(record["accuracy"])
    rows = record["decoding"]
    first = next(iter(record["accuracy"]))
    if len({row["batch_size"] for row in rows}) == 1:
        yield f"Decoding {record['model']}", decoding_columns(first), rows
    else:
        for name, temperature in dict.fromkeys((row["heads"], row["temperature"]) for row in rows):
            mine = [row for row in rows if (row["heads"], row["temperature"]) == (name, temperature)]
            yield f"{name} over batch sizes, temperature {temperature:g}", *grid(mine, first)


def grid(rows, first):
    """Rows of one kind of heads -> (columns, rows): a line for each batch size, a column for each tree size."""
    columns, lines = {"batch size": "batch_size {}"}, {row["batch_size"]: {} for row in rows}
    for figure, over in (("speed_up", "plain"), ("speed_up_over_first", first)):
        for row in rows if over != rows[0]["heads"] else ():
            key = f"{figure} {row['tree_size']}"
            columns[f"over {over}, T = {row['tree_size']}"] = f"{key} {{:.2f}}x"
            lines[row["batch_size"]] |= {"batch_size": row["batch_size"], key: row[figure]}
    return columns, list(lines.values())


def kernel_tables(record):
    for name, operation in OPERATIONS.items():
        yield f"{name}, us; {record['copy_gb_per_s']:.0f} GB/s copied", operation.columns, record.get(name, [])


def static_tables(record):
    names = ("kernel", "dtype", "tile", "warps", "stages")
    cells = [row | {target: "{registers} / {spilled} / {shared}".format_map(row[target]) for target in TARGETS}
             for row in record["table"]]
    yield ("Registers per thread / spilled bytes / bytes of shared memory",
           {name: f"{name} {{}}" for name in (*names, *TARGETS)}, cells)


def test_tables(record):
    rows = record["tests"]
    counts = [dict(outcome=name, tests=count) for name, count in Counter(row["outcome"] for row in rows).items()]
    yield (f"pytest -m gpu, {sum(row['seconds'] for row in rows):.0f} seconds",
           {"outcome": "outcome {}", "tests": "tests {}"}, counts)
    bad = [row | dict(error=row.get("error", "-").strip().splitlines()[-1][:100].replace("|", "/"))
           for row in rows if row["outcome"] not in ("passed", "skipped")]
    yield "Tests that did not pass", {"test": "test {}", "outcome": "outcome {}", "error": "error {}"}, bad


FORMS = {"decode": decode_tables, "decode-random": step_tables, "exact": exact_tables, "heads": heads_tables,
         "kernels": kernel_tables, "kernels-static": static_tables, "tests": test_tables}


# ---------------------------------------------------------------------------------------------------------------------
# As Markdown

def hardware(machine):
    """Such as "NVIDIA H200, torch 2.11.0, triton 3.6.0, commit 1a2b3c4"."""
    parts = [machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"]
    return ", ".join(parts + [f"{name} {machine[name]}" for name in ("torch", "triton", "commit") if machine.get(name)])


def markdown(title, columns, rows):
    """The lines of one table; none without rows."""
    cells = {heading: [cell(row, column) for row in rows] for heading, column in columns.items()}
    cells = {heading: column for heading, column in cells.items() if set(column) - {"-"}}
    same = {heading: column[0] for heading, column in cells.items() if len(rows) > 2 and len(set(column)) == 1}
    shown = {heading: column for heading, column in cells.items() if heading not in same}
    if not cells:
        return []
    above = ["; ".join(f"{heading}: {value}" for heading, value in same.items()), ""] if same else []
    body = ["| " + " | ".join(line) + " |" for line in (shown, *zip(*shown.values()))]
    return [f"### {title}", "", *above, body[0], "|" + " --- |" * len(shown), *body[1:], ""]


def lines(record):
    """A record as Markdown. Raises KeyError and its like where it is not what its `bench` says."""
    found, dtype = [], f", {record['dtype'].removeprefix('torch.')}" if "dtype" in record else ""
    for title, columns, rows in FORMS[record["bench"]](record):
        found += markdown(f"{title}{dtype}, {hardware(record['machine'])}", columns, rows)
    return found


def report(path):
    """The lines of one file, with what is wrong with it."""
    try:
        record = read_json(path)
        if not {record.get("bench"), "error"} & {*FORMS, *record}:
            raise InputError(f"{path}: left out; expected a record of bench {', '.join(FORMS)}")
        found = lines(record) if record.get("bench") in FORMS else []
        if "error" in record:
            last = (record["error"]["tail"] or ["no output"])[-1]
            found += [f"{path}: failed, exit code {record['error']['exit_code']}: {last}", ""]
        elif not record.get("complete", True):
            found += [f"{path}: not complete; the command that made it goes on with it", ""]
        return found
    except InputError as error:
        return [str(error), ""]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return [f"{path}: left out; not what bench writes ({type(error).__name__}: {error})", ""]


def bench(args):
    """`python -m bench report`: prints all tables."""
    paths = sorted(Path(args.folder).glob("*.json"))
    if not paths:
        raise InputError(f"{args.folder}: expected a folder with .json files, as python -m bench --out writes them")
    for path in paths:
        print("\n".join(report(path)))
